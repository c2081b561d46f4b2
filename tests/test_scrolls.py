"""eval.py scrolls: unpacked files, prompts, cutting, and scores with known answers. All rows are invented."""
import json
import sys

import numpy as np
import pytest
import torch
from bounds import close

import eval as eval_script
from evals import scrolls
from evals.instrument import Common, OpenedRun, load_run
from evals.scrolls import TASKS, Question, Scrolls, best, read_questions, score
from model import GPT

DOCUMENT = "The fox jumps over the dog.\n\nThen it packs a box with five dozen jugs. " * 3
CHOICES = " (A) Over\n the dog\n (B) Into a box\n (C) Nowhere\n (D) To the quick"
ROWS = {
    "gov_report": [("g1", DOCUMENT, "A fox jumps. It packs a box.")],
    "summ_screen_fd": [("s1", DOCUMENT, "The fox and the dog.")],
    "qmsum": [("m1", f"What did the fox do?\n\n{DOCUMENT}", "It jumped over the dog.")],
    "narrative_qa": [(id, f"Who jumps?\n\n{DOCUMENT}", text) for id, text in (
        ("n1", "the fox"), ("n1", "A fox"), ("n2", "the dog"))],
    "qasper": [("q1", f"How many jugs?\n\n{DOCUMENT}", text) for text in ("five dozen", "Unanswerable")],
    "quality": [("y1", f"Where does it jump?\n\n{CHOICES}\n\n\n{DOCUMENT}", "Over the dog")],
    "contract_nli": [("c1", f"The fox may jump.\n\n{DOCUMENT}", "Entailment")],
}


@pytest.fixture
def source(tmp_path):
    """The unpacked benchmark, in which one task is a file instead of a folder."""
    for name, rows in ROWS.items():
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(dict(zip(("id", "input", "output"), row, strict=True))) + "\n" for row in rows)
        for file in ("qasper.jsonl" if name == "qasper" else f"{name}/validation.jsonl", f"{name}/train.jsonl"):
            (tmp_path / file).write_text(lines)
    return tmp_path


def test_unpacked_files_are_found_and_lines_of_one_id_are_one_question(source):
    found = scrolls.find(source, "all", "validation")
    assert list(found) == list(ROWS) and found["qasper"].name == "qasper.jsonl"
    assert all(path.name == "train.jsonl" for path in scrolls.find(source, "qmsum,qasper", "train").values())
    for limit, answers in (0, [["the fox", "A fox"], ["the dog"]]), (5, [["the fox", "A fox"], ["the dog"]]), (
            1, [["the fox", "A fox"]]):
        asked = read_questions(found["narrative_qa"], "narrative_qa", limit)
        assert [question.answers for question in asked] == answers
    # the question comes after the document
    letters = ["Over the dog", "Into a box", "Nowhere", "To the quick"]
    for name, choices, asked in (
            ("gov_report", [], "Question: What is a summary of the preceding text?\nAnswer:"),
            ("qmsum", [], "Question: What did the fox do?\nAnswer:"),
            ("quality", letters, "Question: Where does it jump?\n(A) Over the dog\n(B) Into a box\n(C) Nowhere\n"
                                 "(D) To the quick\nAnswer:"),
            ("contract_nli", [*TASKS["contract_nli"].choices], "Hypothesis: The fox may jump.\nConclusion:")):
        text = DOCUMENT.strip() if name == "quality" else DOCUMENT
        assert read_questions(found[name], name) == [(f"{text}\n\n{asked}", [ROWS[name][0][2]], choices)]


def halves(text, answer):
    """A substitute for ROUGE."""
    return {f"rouge{i + 1}": text.count(answer[i]) / max(1, len(text)) for i in range(2)}


def test_f1_and_exact_match_are_those_of_squad_and_the_best_answer_counts(monkeypatch):
    """A task has the geometric mean of its means."""
    for text, answer, f1, exact in (
            ("The fox!", "a fox", 1, 1), ("dog dog", "dog", 2 / 3, 0), ("", "fox", 0, 0), ("cat", "c t", 0, 0),
            ("five-dozen", "five dozen", 0, 0), ("jumps over the dog", "the dog jumps", 0.8, 0)):
        close([best(measure, text, [answer])[measure] for measure in ("f1", "exact")], [f1, exact], terms=4)
    monkeypatch.setattr(scrolls, "rouge", halves)
    assert best("rouge", "aabc", ["ab", "bb"]) == {"rouge1": 0.5, "rouge2": 0.25}       # each part has its own best
    found = score("rouge", ["aabc", "abbb"], [Question("", ["ab"], [])] * 2)
    close(found, {"rouge1": 37.5, "rouge1_error": 12.5, "rouge2": 50.0, "rouge2_error": 25.0,
                  "score": (37.5 * 50) ** 0.5}, terms=4, size=100)


@pytest.fixture
def reply(elastic_run):
    """The answer to one question, and whether its prompt was cut."""
    run = OpenedRun(Common(out_dir=str(elastic_run), device="cpu"), {})
    return lambda question, length, **flags: [found for [found] in scrolls.replies(
        run, run.tokenizer, [question], Scrolls(source="x", **flags), length)]


def test_a_long_prompt_loses_its_beginning_and_an_answer_ends_with_its_line(reply, monkeypatch):
    prompt, asked = "x" * 50 + " the quick brown fox jumps", []
    monkeypatch.setattr(GPT, "generate", lambda self, idx, count, **how: asked.append((idx, count, how)) or torch.cat(
        [idx, torch.tensor([[102, 111, 120, 10]])], 1))
    question = Question(prompt, ["fox"], [])
    assert reply(question, 40, tokens=10) == reply(question, 40, tokens=10, bos=True) == ["fox", True]
    assert not reply(question, 86, tokens=10)[1] and reply(question, 85, tokens=10)[1]
    texts = [bytes(idx[0] % 256).decode() for idx, _, _ in asked[:3]]
    assert texts == [prompt[-30:], "\0" + prompt[-29:], prompt]         # 256 is \0 here
    assert asked[0][1:] == (10, {"temperature": 0, "stop": [10, 256]})  # the end of a line, or of a text


@torch.no_grad()
def test_choices_are_ranked_by_their_likelihood_per_character(reply, elastic_run):
    prompt, choices = "pack my box with five dozen", ["liquor jugs", "dogs", "the lazy quick brown foxes"]
    each, model = [], load_run(elastic_run, "cpu")[0].double()
    for choice in choices:
        ids = torch.tensor([list(f"{prompt} {choice}".encode())])
        logs = model(ids)[0].log_softmax(-1)[0, len(prompt) - 1:-1]
        each.append(logs.gather(1, ids[0, len(prompt):, None]).sum().item() / len(choice))
    question = Question(prompt, [], choices)
    close(each[choices.index(reply(question, 60)[0])], max(each), terms=8, dtype=torch.float32)
    assert reply(question, 60, tokens=3, rank=False)[0] not in choices


def test_the_command_prints_all_numbers_and_a_table(elastic_run, toy_run, source, evaluate, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", sys)                # as if it were installed
    monkeypatch.setattr(scrolls, "rouge", halves)
    look = ["scrolls", f"--source={source}", "--device=cpu", "--length=150", "--tokens=8"]
    found = evaluate(*look, f"--out_dir={elastic_run}")
    assert list(found["tasks"]) == list(ROWS) and found["tasks"]["narrative_qa"]["questions"] == 2
    close(found["score"], np.mean([task["score"] for task in found["tasks"].values()]), terms=7)
    eval_script.main([*look, f"--out_dir={elastic_run},{toy_run}", "--tasks=narrative_qa,quality"])
    assert capsys.readouterr().out.count(str(toy_run)) == 1
