"""eval.py bench: requests in batches of any size, and scores of local tasks against log-likelihoods computed here."""
import math
import sys

import numpy as np
import pytest
import torch
from bounds import SEED, close
from conftest import TEXT, assert_says, complain, tiny_config
from hypothesis import given
from hypothesis import strategies as st

import eval as eval_script
from common import files
from common.machine import Machine
from data import tokens
from evals import likelihood
from evals.instrument import load_run
from model import GPT

IDS = st.lists(st.integers(0, 30), min_size=2, max_size=9)


@pytest.mark.parametrize("recipe", ["softmax", "sink_token"])
@given(st.lists(IDS.flatmap(lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids) - 1))), max_size=9),
       st.integers(1, 30))
@torch.no_grad()
def test_requests_in_batches_are_answered_as_one_by_one(recipe, requests, batch_size):
    torch.manual_seed(SEED)
    model = GPT(tiny_config(attn=recipe)).double().eval()
    for p in model.parameters():                # less flat logits than at initialisation
        p.add_(0.2 * torch.randn_like(p))
    for batch in (found := likelihood.batches([ids for ids, _ in requests], batch_size)):
        lengths = {len(requests[number][0]) for number in batch}
        assert len(lengths) == 1 and (len(batch) == 1 or len(batch) * lengths.pop() <= batch_size)
    assert sorted(sum(found, [])) == [*range(len(requests))]
    heard = likelihood.answers(model, Machine("cpu", "float32"), requests, batch_size)
    for (ids, count), answer in zip(requests, heard, strict=True):
        logits, wanted = model(torch.tensor([ids[:-1]]))[0][0, -count:], torch.tensor(ids[-count:])[:, None]
        rank = 1 + (logits > logits.gather(1, wanted)).sum(1)
        loglik = logits.log_softmax(-1).gather(1, wanted).sum().item()
        assert answer.greedy == (rank == 1).all()
        close([answer.loglik, answer.rank], [loglik, rank.double().mean().item()], dtype=torch.float32)


def write_task(folder, name, rows, measures, **config):
    """A task with its questions, in the harness's format (JSON is also YAML)."""
    path = files.write_json(folder / f"{name}.json", rows) or folder / f"{name}.json"
    files.write_json(folder / f"{name}.yaml", {
        "task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": {
            "data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")},
        "metric_list": [{"metric": measure, "higher_is_better": True} for measure in measures], **config})


@torch.no_grad()
def test_scores_are_those_of_log_likelihoods_computed_one_by_one(toy_run, tmp_path, evaluate):
    """Choices, a text longer than a window, and an answer up to a stop string, with inputs of at most 40 tokens."""
    pytest.importorskip("lm_eval", reason="needs the package lm-eval")
    gpt, coder, dice = load_run(toy_run, "cpu")[0], tokens.tokenizer(str(toy_run)), np.random.default_rng(SEED)
    length, words = 40, np.array(TEXT.split())

    def text(least, most):
        return " ".join(dice.choice(words, dice.integers(least, most)))

    def loglik(before, after):                  # ids; the input is `length` ids at most
        logs = gpt(torch.tensor([(before + after)[-length - 1:-1]]))[0][0].log_softmax(-1)
        return logs[-len(after):].gather(1, torch.tensor(after)[:, None]).sum().item()

    def ids(words):
        return coder.encode(words).tolist()

    rows = [{"q": text(1, 30), "choices": [text(1, 5) for _ in range(3)], "gold": int(dice.integers(3))}
            for _ in range(8)]
    write_task(tmp_path, "choose", rows, ["acc", "acc_norm"], output_type="multiple_choice", doc_to_text="{{q}}",
               doc_to_target="gold", doc_to_choice="choices")
    expected = {"choose acc": [], "choose acc_norm": []}
    for row in rows:
        sums = [loglik(before := ids(row["q"]), ids(f"{row['q']} {choice}")[len(before):]) for choice in row["choices"]]
        per_character = [total / len(choice) for total, choice in zip(sums, row["choices"], strict=True)]
        for name, scores in zip(expected, (sums, per_character), strict=True):
            expected[name].append(np.argmax(scores) == row["gold"])
    expected = {name: np.mean(hits) for name, hits in expected.items()}

    page = text(60, 61)
    write_task(tmp_path, "page", [{"page": page}], ["byte_perplexity", "bits_per_byte"], doc_to_text="",
               output_type="loglikelihood_rolling", doc_to_target="{{page}}")
    whole = [coder.separator, *ids(page)]
    ends = [*range(length, len(whole) - 1, length), len(whole) - 1]     # the last token that each window predicts
    total = sum(loglik(whole[max(0, end - length):start + 1], whole[start + 1:end + 1])
                for start, end in zip([0, *ends], ends, strict=False))
    expected |= {"page byte_perplexity": math.exp(-total / len(page.encode())),
                 "page bits_per_byte": -total / len(page.encode()) / math.log(2)}

    prompts, answers = [text(1, 30) for _ in range(6)], []
    for prompt in prompts:
        idx = torch.tensor([ids(prompt)[-length + 9:]])
        answers.append(coder.decode(gpt.generate(idx, 9, temperature=0)[0, idx.shape[1]:].tolist()))
    stop = answers[0][3:5]
    rows = [{"q": prompt, "a": answer.partition(stop)[0] if number % 3 else "no"}
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]
    write_task(tmp_path, "say", rows, ["exact_match"], output_type="generate_until", doc_to_text="{{q}}",
               doc_to_target="{{a}}", generation_kwargs={"until": [stop], "max_gen_toks": 9})
    expected["say exact_match"] = 4 / 6

    found = evaluate("bench", f"--out_dir={toy_run}", f"--include_path={tmp_path}", "--tasks=choose,page,say",
                     f"--length={length}", "--batch_size=99")
    assert found["questions"] == {"choose": 8, "page": 1, "say": 6}
    close({name: found[name] for name in expected}, expected, dtype=torch.float32, size=8.0)


def test_without_its_package_bench_says_in_one_line_what_to_install(toy_run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)         # as if it were missing
    line = complain(eval_script.main, capsys, "bench", f"--out_dir={toy_run}", "--device=cpu", "--tasks=piqa")[1]
    assert_says("needs the package lm_eval.*pip install lm_eval", line)
