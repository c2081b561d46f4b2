"""eval.py passkey: prompts byte for byte, reading on from a KV cache, scores with known answers."""
import re

import numpy as np
import pytest
import torch
from bounds import SEED, below, close, same
from conftest import RECIPES, tiny_config, train_here
from layers import token_ids

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
    """Appendix C prints the five blocks. Of 100 characters of garbage, 40 come before the key."""
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
def test_a_prompt_is_as_long_as_possible_with_room_for_the_answer(name, toy):
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


def test_trials_depend_only_on_number_length_and_seed():
    first = make_trial(BYTES, 400, 0)
    assert first == make_trial(BYTES, 400, 0)
    others = [make_trial(BYTES, 400, 1), make_trial(BYTES, 401, 0), make_trial(BYTES, 400, 0, seed=1)]
    assert len({trial.key for trial in [first, *others]}) == 4
    with_separator = make_trial(BYTES, 400, 0, bos=True)
    assert with_separator.prompt[0] == 256 and len(with_separator.prompt) == len(first.prompt) == 390
    assert (with_separator.key, with_separator.depth) == (first.key, first.depth)


def test_keys_and_depths_are_spread_evenly():
    trials = [make_trial(BYTES, 300, number, SEED) for number in range(200)]
    keys, depths = [t.key for t in trials], [t.depth for t in trials]
    assert 1 <= min(keys) and max(keys) <= 50_000
    below(abs(np.mean(keys) - 25_000), 6 * 50_000 / 12 ** 0.5 / 200 ** 0.5)             # six standard errors
    below(torch.tensor(np.histogram(depths, 5, (0, 1))[0] - 40).abs(), 6 * (200 * 0.2 * 0.8) ** 0.5)


def test_batches_hold_trials_of_equal_size_and_the_longest_come_first():
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
def test_reading_in_parts_equals_reading_at_once(name, cached, monkeypatch):
    config = tiny_config(attn=name, block_size=64, **({"window": 8} if name in ("streaming", "gpt_oss") else {}))
    gpt = GPT(config).eval()
    if not gpt.transformer.h[0].attn.causal:
        pytest.skip("its outputs depend on later tokens")
    if not cached:
        for block in gpt.transformer.h:
            monkeypatch.setattr(block.attn, "cached", False)
    idx, reader = token_ids(2, 40), Reader(gpt)
    with torch.no_grad():
        whole = gpt(idx)[0]
    close(reader.read(idx[:, :25]), whole[:, 24:25], terms=8)
    fork = reader.fork()
    close(fork.read(idx[:, 25:], 15), whole[:, 25:], terms=8)
    # reading with the fork does not move the reader
    logits = torch.cat([reader.read(idx[:, 25:26]), reader.read(idx[:, 26:30], 4)], 1)
    close(logits, whole[:, 25:30], terms=8)
    # it continues with the likeliest token, up to rounding
    reader = Reader(gpt)
    said = reader.go_on(reader.read(idx), 5)
    with torch.no_grad():
        logits = gpt(torch.cat([idx, said], 1))[0][:, 39:-1]
    close(logits.gather(2, said[..., None])[..., 0], logits.amax(-1), terms=8)


def test_generation_ends_with_the_token_that_ends_an_answer():
    reader = Reader(GPT(tiny_config()).eval())
    first = reader.read(token_ids(1, 3))
    said = reader.fork().go_on(first, 8)[0].tolist()
    last = said[4]
    same(reader.go_on(first, 8, lambda token: token == last)[0].tolist(), said[:said.index(last) + 1])


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
            likely[name] = own.sum().item()
            if name == "right":                 # rounding may swap tokens that are equally likely
                least, most = 1 + (logs > own + 1e-4).sum(1), (logs > own - 1e-4).sum(1)
                assert least.double().mean() <= scores["rank"] + 1e-9 <= most.double().mean() + 2e-9
                assert (most == 1).all() <= scores["likeliest"] <= (least == 1).all()
        close([scores["log_likelihood"], scores["gain"]], [likely["right"], likely["right"] - likely["wrong"]],
              terms=16, size=-likely["right"], dtype=torch.float32)


class Finder(torch.nn.Module):
    """A substitute for a model. After "key is" it says the key if this is among the last `sight` characters. Otherwise
    it says a full stop."""

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


def test_a_model_that_finds_the_key_is_always_right_and_a_blind_one_never():
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
            assert found["rank"] == found["likeliest"] == 1 and found["correct_error"] == 0
            below(-found["log_likelihood"], 1e-4)
            below(7, found["gain"])
        if sight == 200:                        # only keys near the end are found
            assert deepest["correct"] == 1 and first["correct"] == 0
            below(7, deepest["gain"])
            close(found["correct_error"], np.std([scores[t]["correct"] for t in trials], ddof=1) / 20 ** 0.5)
    assert sum(part["trials"] for part in found["by_depth"]) == 20


def test_an_answer_of_one_token_is_scored_by_the_logits_before_it():
    gpt = GPT(tiny_config()).eval()
    reader = Reader(gpt)
    first = reader.read(torch.tensor([[3, 4]]))
    likely, rank = forced(reader, first, torch.tensor([[5]]))
    close(likely[0], first.log_softmax(-1)[0, 0, 5], terms=4)
    assert rank.item() == 1 + (first > first[0, 0, 5]).sum().item()


# ---------------------------------------------------------------------------------------------------------- the command

FLAGS = ("--device=cpu", "--lengths=300,340", "--trials=4")


def test_the_command_prints_numbers_tables_and_a_picture(elastic_run, toy_run, tmp_path, evaluate, capsys):
    found, alone = (evaluate("passkey", f"--out_dir={elastic_run}", *FLAGS, *more)["lengths"]
                    for more in ([], ["--batch_size=1"]))
    assert [row["length"] for row in found] == [300, 340] and found[0]["trials"] == 4
    close(*([row["log_likelihood"] for row in rows] for rows in (alone, found)), terms=16, dtype=torch.float32)
    picture = tmp_path / "passkey.png"
    eval_script.main(["passkey", f"--out_dir={elastic_run},{toy_run}", *FLAGS, f"--png={picture}"])
    said = capsys.readouterr().out
    assert said.count(str(toy_run)) == 4 and "80-100 %" in said and "log-likelihood" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_lengths_end_where_learned_positions_do(data, tmp_path, evaluate):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path}", "--pos=learned", "--block_size=1100")
    found = evaluate("passkey", f"--out_dir={tmp_path}", "--trials=1")
    assert [row["length"] for row in found["lengths"]] == [500, 1000]
