"""eval.py lengths: the same tokens at every length, errors over spans, losses by position, fine-tuning."""
import itertools

import numpy as np
import pytest
import torch
from bounds import below, close, same
from conftest import enliven, meta
from hypothesis import given
from hypothesis import strategies as st

from data import tokens
from evals import lengths
from evals.instrument import Common, OpenedRun, load_run

FLAGS = ("--device=cpu", "--windows=5", "--lengths=16,32,64")


@pytest.fixture
def look(elastic_run, evaluate):
    def call(*flags, out_dir=elastic_run):
        return evaluate("lengths", f"--out_dir={out_dir}", *FLAGS, *flags)
    return call


def close_losses(found, expected):
    """Compare losses of a float32 and a float64 model. The loss of a token is computed from layers of 16 channels."""
    close(found, expected, terms=8, size=6.0, dtype=torch.float32)


@pytest.fixture(scope="module")
def by_hand(elastic_run, data):
    """{length: losses (5 spans, 64)}, from windows read one by one in float64."""
    gpt = load_run(elastic_run, "cpu")[0].double()
    split = tokens.Tokens(data, "val")
    starts = tokens.fixed_windows(split, 64, 5)
    found = {}
    for length in (16, 32, 64):
        found[length] = np.zeros((5, 64))
        for i, start in enumerate(starts):
            for at in range(0, 64, length):
                ids = torch.from_numpy(split.window(start + at, length + 1).astype(np.int64))
                with torch.no_grad():
                    logs = gpt(ids[None, :-1])[0][0].log_softmax(-1)
                found[length][i, at:at + length] = -logs.gather(1, ids[1:, None])[:, 0].numpy()
    return found


def test_losses_perplexities_and_errors_equal_those_by_hand(look, by_hand):
    found = look()
    assert found["spans"] == 5 and found["base"] == found["training_length"] == 16
    assert [row["length"] for row in found["lengths"]] == [16, 32, 64]
    for row in found["lengths"]:
        for name, spans in (("loss", by_hand[row["length"]].mean(1)),
                            ("more", (by_hand[row["length"]] - by_hand[16]).mean(1))):
            close_losses([row[name], row[f"{name}_error"]], [spans.mean(), spans.std(ddof=1) / 5 ** 0.5])
        close(row["perplexity"], np.exp(row["loss"]), terms=4)
        close(row["perplexity_error"], row["perplexity"] * row["loss_error"], terms=4)


def test_places_are_counted_from_the_beginning_of_the_window(look, by_hand):
    for row in look("--batch_size=3")["lengths"]:
        length, bins = row["length"], row["by_position"]
        assert bins[0]["first"] == 1 and bins[-1]["last"] == length
        assert all(a["last"] + 1 == b["first"] for a, b in itertools.pairwise(bins))
        places = by_hand[length].reshape(5, -1, length).mean((0, 1))
        close_losses([b["loss"] for b in bins], [places[b["first"] - 1:b["last"]].mean() for b in bins])


@given(st.integers(1, 9), st.integers(1, 99))
def test_two_bins_end_for_each_halving_of_the_longest_length(halvings, odd):
    ends = lengths.bin_ends(odd << halvings)
    assert ends[0] == 1 and ends == sorted(set(ends))
    assert {round(odd * 2 ** (n / 2)) for n in range(2 * halvings + 1)} == {end for end in ends if end >= odd}


def test_rope_scaling_changes_the_loss_of_all_tokens_but_the_first(elastic_run):
    found = []
    for scaling in ("", "linear:4"):
        run = OpenedRun(Common(out_dir=elastic_run, device="cpu"), {"rope_scaling": scaling})
        enliven(run.model)
        found.append(lengths.command(lengths.Lengths(lengths="64", windows=3), run)[0])
    (plain,), (scaled,) = (numbers["lengths"] for numbers in found)
    assert found[1]["rope_scaling"] == "linear:4"
    below(1e-4, abs(plain["loss"] - scaled["loss"]))
    # the first token sees only itself, so its angles do not matter
    close_losses(plain["by_position"][0]["loss"], scaled["by_position"][0]["loss"])


def test_finetuning_continues_the_run_at_the_longer_length(copy, look, trainings):
    finetune = ("--finetune=2", "--lengths=16,32", "--train_args=--eval_iters=1 --batch_size=2")
    found = look(*finetune, out_dir=copy)
    tuned = copy.with_name("copy-32")
    knobs = meta(tuned)["knobs"]
    assert knobs["block_size"] == 32 and knobs["max_iters"] == 2 and knobs["attn"] == "elastic"
    close(knobs["learning_rate"], meta(copy)["knobs"]["learning_rate"] / 10, terms=1)
    assert knobs["init_from"].endswith("copy/ckpt.pt") and knobs["batch_size"] == 2         # the last flag counts
    short, long = found["lengths"]
    plain = look("--lengths=16,32", out_dir=copy)["lengths"]
    same(short["loss"], plain[0]["loss"])       # the finetuned model reads only longer windows
    assert long["loss"] != plain[1]["loss"]
    close_losses(look("--lengths=16,32", out_dir=tuned)["lengths"][1]["loss"], long["loss"])


def test_finetuning_repeats_the_overrides_of_the_evaluation(elastic_run):
    run = OpenedRun(Common(out_dir=elastic_run, device="cpu"), {"rope_scaling": "linear:2", "window": 8})
    flags = lengths.finetune_flags(run, 32, 500)
    assert {"--rope_scaling=linear:2", "--window=8", "--max_iters=500", "--warmup_iters=50"} <= set(flags)
    assert "--batch_size=2" in flags            # as many tokens as 4 sequences of 16
    assert not any(flag.startswith(("--attn", "--gate", "--kernel")) for flag in flags)
