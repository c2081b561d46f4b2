"""eval.py lengths: the same tokens at every length, errors over spans, losses by position,
fine-tuning."""

import numpy as np
import pytest
import torch
from bounds import close
from conftest import meta

from data import tokens
from evals.instrument import load_run


@pytest.fixture
def look(elastic_run, evaluate):
    return lambda *flags, out_dir=elastic_run: evaluate(
        "lengths", f"--out_dir={out_dir}", "--windows=5", "--lengths=16,32,64", *flags
    )


def close_losses(found, expected):
    """Compare losses of a float32 and a float64 model. The loss of a token is computed from layers
    of 16 channels."""
    close(found, expected, terms=8, size=6.0, dtype=torch.float32)


@torch.no_grad()
def test_losses_perplexities_and_errors_equal_those_by_hand(look, elastic_run, data):
    """By hand: from windows that are read one by one in float64. Places are counted from the
    beginning of a window."""
    gpt, split = load_run(elastic_run, "cpu")[0].double(), tokens.Tokens(data, "val")
    by_hand = {length: np.zeros((5, 64)) for length in (16, 32, 64)}
    for i, start in enumerate(tokens.fixed_windows(split, 64, 5)):
        for length, losses in by_hand.items():
            for at in range(0, 64, length):
                ids = torch.from_numpy(split.window(start + at, length + 1).astype(np.int64))
                logs = gpt(ids[None, :-1])[0][0].log_softmax(-1)
                losses[i, at : at + length] = -logs.gather(1, ids[1:, None])[:, 0].numpy()
    found = look("--batch_size=3")
    assert found["spans"] == 5 and found["base"] == found["training_length"] == 16
    for row, (length, expected) in zip(found["lengths"], by_hand.items(), strict=True):
        assert row["length"] == length
        for name, spans in (("loss", expected.mean(1)), ("more", (expected - by_hand[16]).mean(1))):
            close_losses(
                [row[name], row[f"{name}_error"]], [spans.mean(), spans.std(ddof=1) / 5**0.5]
            )
        close(row["perplexity"], np.exp(row["loss"]), terms=4)
        close(row["perplexity_error"], row["perplexity"] * row["loss_error"], terms=4)
        bins, places = row["by_position"], expected.reshape(5, -1, length).mean((0, 1))
        ranges = [[*range(b["first"], b["last"] + 1)] for b in bins]
        assert sum(ranges, []) == [*range(1, length + 1)]
        close_losses(
            [b["loss"] for b in bins], [places[b["first"] - 1 : b["last"]].mean() for b in bins]
        )


@pytest.mark.parametrize("lengths, plain_rows", [("8,16,32,64", 2), ("32,64", 1)])
def test_rope_is_stretched_beyond_the_base_row_only(
    look, evaluate, elastic_run, lengths, plain_rows
):
    stretch = "--rope_scaling=linear:4"
    plain, found = (look(f"--lengths={lengths}", *flags)["lengths"] for flags in ([], [stretch]))
    assert found[:plain_rows] == plain[:plain_rows]
    base = plain[plain_rows - 1]["loss"]
    longest = evaluate("loss", f"--out_dir={elastic_run}", "--length=64", "--windows=5", stretch)[
        "loss"
    ]
    assert found[-1]["loss"] != plain[-1]["loss"]
    close_losses([found[-1]["loss"], found[-1]["more"]], [longest, longest - base])


def test_finetuning_continues_the_run_at_the_longer_length(copy, look, trainings):
    finetune = ("--finetune=2", "--lengths=16,32", "--train_args=--eval_iters=1 --batch_size=2")
    found, tuned = look(*finetune, out_dir=copy), copy.with_name("copy-32")
    knobs = meta(tuned)["knobs"]
    names = "block_size", "max_iters", "attn", "batch_size"
    assert [knobs[name] for name in names] == [32, 2, "elastic", 2]
    close(knobs["learning_rate"], meta(copy)["knobs"]["learning_rate"] / 10, terms=1)
    short, long = (row["loss"] for row in found["lengths"])
    plain, again = (look("--lengths=16,32", out_dir=run)["lengths"] for run in (copy, tuned))
    assert short == plain[0]["loss"] and long != plain[1]["loss"]  # read by the finetuned one
    close_losses(again[1]["loss"], long)
