"""eval.py loss: the mean over fixed windows, in nats and bits, from one process or several ranks."""
import math

import numpy as np
import torch
from bounds import close

from common.machine import Machine
from data import tokens
from evals.instrument import load_run
from evals.loss import bits_per_byte, loss_and_error


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
    """Two ranks add up the sums of one process."""
    gpt, split, sums = load_run(elastic_run, "cpu")[0], tokens.Tokens(data, "val"), []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        machine = Machine("cpu", "float32")
        machine.rank, machine.world, machine.sum = rank, world, lambda *values: sums.append(values) or values
        loss_and_error(gpt, split, machine, 7, 2, 16)
    close([a + b for a, b in zip(*sums[1:], strict=True)], list(sums[0]), dtype=torch.float32)
