"""eval.py loss: the mean over fixed windows, in nats and bits, from one process or several ranks,
and over seeds."""

import math

import numpy as np
import torch
from bounds import close
from conftest import meta, train_here
from hypothesis import given
from hypothesis import strategies as st

from common.machine import Machine
from data import tokens
from evals.instrument import load_run
from evals.loss import bits_per_byte, compare, curves, groups_of, window_losses


def test_fixed_windows_are_spread_over_the_whole_split_or_begin_at_a_stride(data):
    fox = tokens.Tokens(data, "val")
    starts = tokens.fixed_windows(fox, 16, 5)
    assert [*starts[[0, -1]]] == [0, len(fox) - 17]
    assert len(starts) == 5 and len(set(np.diff(starts) // 10)) == 1
    for count in (10**9, 0):
        assert len(tokens.fixed_windows(fox, 16, count)) == (len(fox) - 1) // 16
    fox.ends, fox.stride = [20 * 65], 65
    for length in (4, 64):
        assert tokens.fixed_windows(fox, length, 0).tolist() == [*range(0, 20 * 65, 65)]


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_windows_in_nats_and_bits(evaluate, elastic_run, data):
    run = f"--out_dir={elastic_run}"
    found = evaluate("loss", run, "--windows=6", "--batch_size=4")
    gpt = load_run(elastic_run, "cpu")[0].double()
    split = tokens.Tokens(data, "val")
    rows = torch.from_numpy(split.windows(tokens.fixed_windows(split, 16, 6), 17, 257))
    means = -gpt(rows[:, :-1])[0].log_softmax(-1).gather(2, rows[:, 1:, None]).mean((1, 2))
    loss = means.mean().item()
    close([found["loss"], found["bits_per_byte"]], [loss, loss / math.log(2)], dtype=torch.float32)
    close(found["loss_error"], means.std().item() / math.sqrt(6), size=loss, dtype=torch.float32)
    assert [found[name] for name in ("dataset", "split", "windows", "length")] == [
        str(data),
        "val",
        6,
        16,
    ]
    assert evaluate("loss", run, "--windows=1", "--split=train")["loss_error"] is None
    for size, bits in (({"bytes": 200}, 1 / math.log(2) / 4), ({}, None)):
        about = {"shards": {"val.bin": {"tokens": 50, "sha256": ""} | size}}
        assert bits_per_byte(1.0, about, "val") == bits


def test_ranks_share_the_windows(elastic_run, data):
    """Two ranks add up to the losses and targets of one process."""
    gpt = load_run(elastic_run, "cpu")[0]
    split = tokens.Tokens(data, "val")
    found = []

    def add(*values):
        found.append(np.array(values))
        return values

    for rank, world in ((0, 1), (0, 2), (1, 2)):
        machine = Machine("cpu", "float32")
        machine.rank, machine.world, machine.sum = rank, world, add
        window_losses(gpt, split, machine, 7, 2, 16)
    close(found[1] + found[2], found[0], dtype=torch.float32)


def numbers(attn="softmax", losses=(2.0,), **knobs):
    return {
        "loss": float(np.mean(losses)),
        "losses": losses,
        "bits_per_byte": None,
        "dataset": "fox",
        "split": "val",
        "windows": len(losses),
        "length": 16,
        "knobs": {"attn": attn, "rule": attn, "init_from": "scratch"} | knobs,
    }


def test_runs_with_the_same_knobs_are_a_group_named_by_the_recipe_and_knobs_that_differ():
    found = [
        numbers(losses=[9.0], window=0),
        numbers(losses=[1.0], window=0),
        numbers(losses=[3.0], window=4),
        numbers("lazy", losses=[6.0], rule="elastic", gate="head", window=0),
        numbers("elastic", losses=[7.0], window=0, n_embd=64),
    ]
    assert {label: len(group) for label, group in groups_of(dict(enumerate(found))).items()} == {
        "softmax --window=4": 1,
        "softmax": 2,
        "lazy --gate=head": 1,
        "elastic --n_embd=64": 1,
    }


@given(st.integers(0, 999))
def test_seeds_become_a_mean_and_a_deviation_on_the_same_windows(seed):
    one, two, other = losses = np.random.default_rng(seed).normal(5, 1, (3, 4))
    found = dict(enumerate(map(numbers, ("softmax", "softmax", "elastic"), losses)))
    lines = compare(found).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:5]}
    means = losses.mean(1)
    more = other - (one + two) / 2
    worse = "elastic" if more.mean() > 0 else "softmax"
    assert rows["softmax"][:3] == ["2", f"{means[:2].mean():.4f}", f"{means[:2].std(ddof=1):.4f}"]
    assert rows["elastic"][:3] == ["1", f"{means[2]:.4f}", "-"] and [*rows][1] == worse
    # no bits per byte: tokens are not text
    assert rows[worse][3:] == [f"{abs(more.mean()):.4f}", f"{more.std(ddof=1) / 2:.4f}"]


def test_the_picture_has_the_losses_of_training_also_of_a_run_that_was_continued(
    elastic_run, copy, evaluate, tmp_path
):
    train_here("--init_from=resume", f"--out_dir={copy}", "--max_iters=8")
    picture = tmp_path / "curves.png"
    found = evaluate("loss", f"--out_dir={elastic_run},{copy}", "--windows=2", f"--png={picture}")
    assert picture.exists() and [*groups_of(found)] == ["elastic"]
    steps, values = curves([*found.values()], "val_loss")
    assert steps == [4, 8]
    last = [meta(run)["losses"]["val"] for run in (elastic_run, copy)]
    close(values[:, 1], last, dtype=torch.float32)
