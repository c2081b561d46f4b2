"""The passkey instrument: prompts byte for byte, reading on from a cache, scores with known answers."""
import json
import re

import numpy as np
import pytest
import torch
from conftest import RECIPES, tiny_config, train_here

import eval as eval_script
from common.machine import Machine
from data import tokens
from evals import passkey
from evals.instrument import load_run
from evals.passkey import Reader, batches, forced, is_correct, make_trial, prompt_text
from model import GPT

BYTES = tokens.tokenizer("bytes")

# ---------------------------------------------------------------------------------------------------------- the prompts


def test_a_prompt_is_that_of_the_paper_byte_for_byte():
    """As appendix C prints the five blocks; 100 characters of garbage, 40 of them before the key."""
    assert prompt_text(12345, 100, 0.4) == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n"
        "The grass is green. The sky is blue. The\n"
        "The pass key is 12345. Remember it. 12345 is the pass key.\n"
        "The grass is green. The sky is blue. The sun is yellow. Here\n"
        "What is the pass key? The pass key is")


def test_garbage_is_one_long_repeated_string():
    _, before, _, after, _ = prompt_text(7, 400, 0.999).split("\n")
    whole = " ".join([passkey.GARBAGE] * 9)
    assert (before, after) == (whole[:400], "") and "again. The grass" in before
    _, before, _, after, _ = prompt_text(7, 400, 0.0).split("\n")
    assert (before, after) == ("", whole[:400])


@pytest.mark.parametrize("name", ["bytes", "toy"])
def test_a_prompt_is_as_long_as_leaves_room_for_the_answer(name, toy):
    coder = tokens.tokenizer(str(toy) if name == "toy" else name)
    for number in range(3):
        trial = make_trial(coder, 700, number)
        text = coder.decode(trial.prompt)
        characters = len("".join(text.split("\n")[1::2]))
        longer = coder.encode(prompt_text(trial.key, characters + 1, trial.depth))
        assert len(trial.prompt) <= 690 < len(longer)
        assert text == prompt_text(trial.key, characters, trial.depth)
        assert coder.decode(trial.prompt + trial.right) == f"{text} {trial.key}"
        wrong = coder.decode(trial.prompt + trial.wrong).removeprefix(text)
        assert re.fullmatch(r" \d+", wrong) and len(trial.wrong) == len(trial.right)


def test_trials_differ_by_number_length_and_seed_and_by_nothing_else():
    first = make_trial(BYTES, 400, 0)
    assert first == make_trial(BYTES, 400, 0)
    others = [make_trial(BYTES, 400, 1), make_trial(BYTES, 401, 0), make_trial(BYTES, 400, 0, seed=1)]
    assert len({trial.key for trial in [first, *others]}) == 4
    with_separator = make_trial(BYTES, 400, 0, bos=True)
    assert with_separator.prompt[0] == 256 and len(with_separator.prompt) == len(first.prompt) == 390
    assert (with_separator.key, with_separator.depth) == (first.key, first.depth)


def test_keys_and_depths_are_spread_evenly():
    trials = [make_trial(BYTES, 300, number) for number in range(200)]
    assert 1 <= min(t.key for t in trials) and max(t.key for t in trials) <= 50_000
    assert np.mean([t.key for t in trials]) == pytest.approx(25_000, abs=3000)
    assert np.histogram([t.depth for t in trials], 5, (0, 1))[0].min() > 20


def test_batches_hold_what_is_of_equal_size_the_longest_first():
    trials = [make_trial(BYTES, length, number) for length in (300, 320) for number in range(20)]
    found = batches(trials, 4)
    assert sorted(t for batch in found for t in batch) == sorted(trials) and all(len(batch) <= 4 for batch in found)
    assert all(len({(len(t.prompt), len(t.right)) for t in batch}) == 1 for batch in found)
    sizes = [len(batch[0].prompt) for batch in found]
    assert sizes == sorted(sizes, reverse=True)


# ---------------------------------------------------------------------------------------------------------- the answers


@pytest.mark.parametrize("text, right", [
    (" 123", True), ("123\n", True), (" 123. Remember it", True), (" 0123.", True), ("key 123, 45", True),
    ("1234", False), ("45, 123", False), ("", False), ("none", False)])
def test_an_answer_is_right_as_text_or_as_a_number(text, right):
    assert is_correct(text, 123) is right


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_reading_on_equals_reading_at_once(name, cached, monkeypatch):
    config = tiny_config(attn=name, block_size=64, **({"window": 8} if name in ("streaming", "gpt_oss") else {}))
    gpt = GPT(config).eval()
    if not gpt.transformer.h[0].attn.causal:
        pytest.skip("what it reads first depends on what comes after")
    if not cached:
        for block in gpt.transformer.h:
            monkeypatch.setattr(block.attn, "cached", False)
    idx = torch.randint(31, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = gpt(idx)[0]
    reader = Reader(gpt)
    assert torch.allclose(reader.read(idx[:, :25]), whole[:, 24:25], atol=1e-5)
    fork = reader.fork()
    assert torch.allclose(fork.read(idx[:, 25:], 15), whole[:, 25:], atol=1e-5)
    # the fork has left the reader where it was
    logits = torch.cat([reader.read(idx[:, 25:26]), reader.read(idx[:, 26:30], 4)], 1)
    assert torch.allclose(logits, whole[:, 25:30], atol=1e-5)
    reader = Reader(gpt)
    assert torch.equal(reader.go_on(reader.read(idx), 5), gpt.generate(idx, 5, temperature=0)[:, 40:])


def test_going_on_ends_where_it_is_told():
    gpt = GPT(tiny_config()).eval()
    reader, idx = Reader(gpt), torch.tensor([[1, 2, 3]])
    said = gpt.generate(idx, 8, temperature=0)[0, 3:].tolist()
    last = said[4]
    found = reader.go_on(reader.read(idx), 8, lambda token: token == last)[0].tolist()
    assert found == said[:said.index(last) + 1]


def test_scores_are_those_of_the_whole_text_in_float64(elastic_run):
    gpt = load_run(elastic_run, "cpu")[0]
    trials = [make_trial(BYTES, 330, number) for number in range(4)]
    found = [score for batch in batches(trials, 4) for score in
             zip(batch, passkey.answer(gpt, Machine("cpu", "float32"), BYTES, batch), strict=True)]
    gpt = gpt.double()
    for trial, scores in found:
        likely = {}
        for name in ("right", "wrong"):
            ids = torch.tensor([trial.prompt + getattr(trial, name)])
            with torch.no_grad():
                logs = gpt(ids)[0].log_softmax(-1)[0, len(trial.prompt) - 1:-1]         # (K, V)
            own = logs.gather(1, ids[0, len(trial.prompt):, None])
            likely[name], ranks = own.sum().item(), 1 + (logs > own).sum(1)
            if name == "right":
                assert scores["rank"] == pytest.approx(ranks.double().mean().item())
                assert scores["likeliest"] == float((ranks == 1).all())
        assert scores["log_likelihood"] == pytest.approx(likely["right"], abs=1e-3)
        assert scores["gain"] == pytest.approx(likely["right"] - likely["wrong"], abs=1e-3)


class Finder(torch.nn.Module):
    """Stands in for a model: it says the key after each "key is" that has one before it, if that is not too far back;
    else a full stop."""

    def __init__(self, sight):
        super().__init__()
        self.sight, self.lm_head = sight, torch.nn.Identity()
        self.transformer = torch.nn.ModuleDict({"h": torch.nn.ModuleList()})
        self.new_cache, self.seen = lambda: [{}], None

    def forward(self, idx, cache):
        cache[0]["idx"] = torch.cat([cache[0].get("idx", idx[:, :0]), idx], 1)
        says = [[self.next(row[:end].tolist()) for end in range(len(row) - idx.shape[1] + 1, len(row) + 1)]
                for row in cache[0]["idx"]]
        return self.lm_head(20.0 * torch.nn.functional.one_hot(torch.tensor(says), 257)), None

    def next(self, ids):
        text = bytes(ids).decode()[-self.sight:]
        key = re.search(r"key is (\d+)\. Remember", text)
        said = text.rpartition("The pass key is")[2]
        whole = f" {key[1]}." if key else "."
        return ord(whole[len(said)] if whole.startswith(said) and len(said) < len(whole) else ".")


def test_a_model_that_finds_the_key_scores_full_marks_and_a_blind_one_none():
    trials = [make_trial(BYTES, 500, number) for number in range(20)]
    machine = Machine("cpu", "float32")
    for sight, low, high in ((1000, 1.0, 1.0), (60, 0.0, 0.0), (200, 0.1, 0.9)):
        scores = {}
        for batch in batches(trials, 8):
            scores |= zip(batch, passkey.answer(Finder(sight), machine, BYTES, batch), strict=True)
        found = passkey.summary(500, [(trial.depth, scores[trial]) for trial in trials])
        assert low <= found["correct"] <= high
        deepest, first = found["by_depth"][-1], found["by_depth"][0]
        if sight == 1000:
            assert found["rank"] == found["likeliest"] == 1 and found["log_likelihood"] == pytest.approx(0, abs=1e-3)
            assert found["gain"] > 15 and found["correct_error"] == 0
        if sight == 200:                        # what is near the end is found
            assert deepest["correct"] == 1 and first["correct"] == 0 and deepest["gain"] > 15
            right = [scores[t]["correct"] for t in trials]
            assert found["correct_error"] == pytest.approx(np.std(right, ddof=1) / 20 ** 0.5)
    assert sum(part["trials"] for part in found["by_depth"]) == 20


def test_a_single_token_has_no_token_before_it():
    gpt = GPT(tiny_config()).eval()
    reader = Reader(gpt)
    first = reader.read(torch.tensor([[3, 4]]))
    likely, rank = forced(reader, first, torch.tensor([[5]]))
    assert likely.item() == pytest.approx(first.log_softmax(-1)[0, 0, 5].item())
    assert rank.item() == 1 + (first > first[0, 0, 5]).sum().item()


# ---------------------------------------------------------------------------------------------------------- the command

FLAGS = ("--device=cpu", "--lengths=300,340", "--trials=4")


def test_the_command_prints_numbers_tables_and_a_picture(elastic_run, toy_run, tmp_path, capsys):
    eval_script.main(["passkey", f"--out_dir={elastic_run}", *FLAGS, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["length"] for row in found["lengths"]] == [300, 340] and found["lengths"][0]["trials"] == 4
    eval_script.main(["passkey", f"--out_dir={elastic_run}", *FLAGS, "--batch_size=1", "--json"])
    other = json.loads(capsys.readouterr().out)["lengths"][1]
    assert other["log_likelihood"] == pytest.approx(found["lengths"][1]["log_likelihood"], abs=1e-4)
    picture = tmp_path / "passkey.png"
    eval_script.main(["passkey", f"--out_dir={elastic_run},{toy_run}", *FLAGS, f"--png={picture}"])
    said = capsys.readouterr().out
    assert said.count(str(toy_run)) == 4 and "80-100 %" in said and "log-likelihood" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_lengths_end_where_learned_positions_do(data, tmp_path, capsys):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path}", "--pos=learned", "--block_size=1100")
    capsys.readouterr()
    eval_script.main(["passkey", f"--out_dir={tmp_path}", "--device=cpu", "--trials=1", "--json"])
    assert [row["length"] for row in json.loads(capsys.readouterr().out)["lengths"]] == [500, 1000]
