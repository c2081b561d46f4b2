"""eval.py loss: the mean over fixed windows, in nats and bits, from one process or several ranks, and over seeds."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bounds import close
from conftest import meta, train_here

import eval as eval_script
from common.machine import Machine
from data import tokens
from evals.instrument import load_run
from evals.loss import bits_per_byte, curves, groups_of, window_losses


def test_fixed_windows_are_spread_over_the_whole_split_or_begin_at_a_stride(data):
    fox = tokens.Tokens(data, "val")
    starts = tokens.fixed_windows(fox, 16, 5)
    assert len(starts) == 5 and [*starts[[0, -1]]] == [0, len(fox) - 17] and len(set(np.diff(starts) // 10)) == 1
    for count in (10 ** 9, 0):
        assert len(tokens.fixed_windows(fox, 16, count)) == (len(fox) - 1) // 16
    fox.ends, fox.stride = [20 * 65], 65
    for length in (4, 64):
        assert tokens.fixed_windows(fox, length, 0).tolist() == [65 * n for n in range(20)]


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_windows_in_nats_and_bits(evaluate, elastic_run, data):
    run = f"--out_dir={elastic_run}"
    found = evaluate("loss", run, "--windows=6")
    gpt, split = load_run(elastic_run, "cpu")[0].double(), tokens.Tokens(data, "val")
    rows = torch.from_numpy(split.windows(tokens.fixed_windows(split, 16, 6), 17, 257))
    means = -gpt(rows[:, :-1])[0].log_softmax(-1).gather(2, rows[:, 1:, None]).mean((1, 2))
    expected = means.mean().item()
    close([found["loss"], found["bits_per_byte"]], [expected, expected / math.log(2)], dtype=torch.float32)
    close(found["loss_error"], means.std().item() / math.sqrt(6), size=expected, dtype=torch.float32)
    close(evaluate("loss", run, "--windows=6", "--batch_size=4")["loss"], expected, dtype=torch.float32)
    assert [found[name] for name in ("dataset", "split", "windows", "length")] == [str(data), "val", 6, 16]
    assert evaluate("loss", run, "--windows=1")["loss_error"] is None
    for size, expected in (({"bytes": 200}, 1 / math.log(2) / 4), ({}, None)):
        close(bits_per_byte(1.0, {"shards": {"val.bin": {"tokens": 50, "sha256": ""} | size}}, "val"), expected)
    assert evaluate("loss", run, "--windows=6", "--split=train")["loss"] != found["loss"]


def test_ranks_share_the_windows(elastic_run, data):
    """Two ranks add up to the losses of one process."""
    gpt, split, found = load_run(elastic_run, "cpu")[0], tokens.Tokens(data, "val"), []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        machine = Machine("cpu", "float32")
        machine.rank, machine.world, machine.sum = rank, world, lambda *values: values
        found.append(window_losses(gpt, split, machine, 7, 2, 16))
    close(found[1] + found[2], found[0], dtype=torch.float32)


def numbers(attn="softmax", loss=2.0, **knobs):
    return {"loss": loss, "knobs": {"attn": attn, "rule": attn, "init_from": "scratch"} | knobs}


def test_runs_with_the_same_knobs_are_a_group_named_by_the_recipe_and_knobs_that_differ():
    found = [numbers(loss=9.0, window=0), numbers(loss=1.0, window=0), numbers(loss=3.0, window=4),
             numbers("lazy", loss=6.0, rule="elastic", gate="head", window=0),
             numbers("elastic", loss=7.0, window=0, n_embd=64)]
    assert {label: len(group) for label, group in groups_of(dict(enumerate(found))).items()} == {
        "softmax --window=4": 1, "softmax": 2, "lazy --gate=head": 1, "elastic --n_embd=64": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, elastic_run):
    """Two seeds of softmax. The second was stopped and continued."""
    out = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train_here(f"--dataset={data}", f"--out_dir={out}/softmax-{seed}", f"--seed={seed}",
                   "--attn=softmax", "--dropout=0.1")
    train_here("--init_from=resume", f"--out_dir={out}/softmax-1", "--max_iters=8")
    return [str(out / "softmax-0"), str(out / "softmax-1"), str(elastic_run)]


def test_seeds_become_a_mean_and_a_deviation_on_the_same_windows(runs, evaluate, capsys):
    flags = (f"--out_dir={','.join(runs)}", "--windows=4")
    found = evaluate("loss", *flags)
    losses = [found[run]["loss"] for run in runs]
    one, two = ([np.array(found[run]["losses"]) for run in names] for names in (runs[:2], runs[2:]))
    more = two[0] - (one[0] + one[1]) / 2       # of elastic
    softmax_first = more.mean() > 0
    eval_script.main(["loss", *flags, "--device=cpu"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:5]}
    error = f"{more.std(ddof=1) / 2:.4f}"
    deviation = np.std(losses[:2], ddof=1)
    assert rows["softmax"][:3] == ["2", f"{np.mean(losses[:2]):.4f}", f"{deviation:.4f}"]
    assert rows["elastic"][:3] == ["1", f"{losses[2]:.4f}", "-"]
    assert list(rows) == ["softmax", "elastic"][::1 if softmax_first else -1]
    assert rows["elastic" if softmax_first else "softmax"][4:] == [f"{abs(more.mean()):.4f}", error]


def test_the_picture_has_the_losses_of_training(runs, evaluate, tmp_path):
    picture = tmp_path / "curves.png"
    found = evaluate("loss", f"--out_dir={','.join(runs)}", "--windows=2", f"--png={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    steps, values = curves([found[run] for run in runs[:2]], "val_loss")
    assert steps == [4, 8] and values.shape == (2, 2)
    close(values[:, 1], [meta(Path(run))["losses"]["val"] for run in runs[:2]], dtype=torch.float32)
