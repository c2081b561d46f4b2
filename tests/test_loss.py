"""eval.py loss: the mean over fixed windows, in nats and bits, from one process or several ranks."""
import json
import math

import numpy as np
import pytest
import torch
from bounds import close
from conftest import TEXT, run

from common import files
from data import tokens
from evals.instrument import load_run
from evals.loss import bits_per_byte


@pytest.fixture
def loss(elastic_run, evaluate):
    return lambda *flags: evaluate("loss", f"--out_dir={elastic_run}", *flags)


def test_fixed_windows_are_spread_over_the_whole_split_or_begin_at_a_stride(data):
    fox = tokens.Tokens(data, "val")
    starts = tokens.fixed_windows(fox, 16, 5)
    assert starts[0] == 0 and starts[-1] == len(fox) - 17 and len(starts) == 5 and len(set(np.diff(starts) // 10)) == 1
    for count in (10 ** 9, 0):
        assert len(tokens.fixed_windows(fox, 16, count)) == (len(fox) - 1) // 16
    for length in (4, 64):
        assert tokens.fixed_windows(range(20 * 65), length, 0, 65).tolist() == [65 * n for n in range(20)]


def test_a_window_with_the_first_id_beyond_the_vocabulary_is_refused(data):
    path, highest = data / "val.bin", max(TEXT.encode())
    split, digest = tokens.Tokens(data, "val"), files.sha256(path)
    assert split.windows([0], 99, highest + 1).max() == highest
    tokens.check_shard(path, digest, highest + 1)
    for call in (lambda: split.windows([0], 99, highest), lambda: tokens.check_shard(path, digest, highest)):
        with pytest.raises(ValueError, match=f"{highest}"):
            call()


def test_the_loss_is_the_mean_over_the_windows_in_nats_and_bits(loss, elastic_run, data):
    found = loss("--windows=6")
    gpt, _ = load_run(elastic_run, "cpu")
    split = tokens.Tokens(data, "val")
    rows = torch.from_numpy(split.windows(tokens.fixed_windows(split, 16, 6), 17, 257))
    with torch.no_grad():
        logits = gpt(rows[:, :-1])[0]
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    expected, means = each.mean().item(), each.view(6, 16).mean(1)
    close([found["loss"], found["bits_per_byte"]], [expected, expected / math.log(2)], dtype=torch.float32)
    close(found["loss_error"], means.std().item() / math.sqrt(6), size=expected, dtype=torch.float32)
    close(loss("--windows=6", "--batch_size=4")["loss"], expected, dtype=torch.float32)
    assert [found[name] for name in ("dataset", "split", "windows", "length")] == [str(data), "val", 6, 16]
    assert loss("--windows=1")["loss_error"] is None
    assert bits_per_byte(1.0, {"shards": {"val.bin": {"tokens": 50, "bytes": 200, "sha256": ""}}}, "val") == (
        pytest.approx(1 / math.log(2) / 4))
    assert bits_per_byte(1.0, {"shards": {"val.bin": {"tokens": 50, "sha256": ""}}}, "val") is None
    assert loss("--windows=6", "--split=train")["loss"] != found["loss"]


def test_two_ranks_give_the_loss_of_one_process(loss, elastic_run):
    alone = loss("--windows=7", "--batch_size=2")
    flags = (f"--out_dir={elastic_run}", "--json", "--windows=7", "--batch_size=2", "--device=cpu")
    both = json.loads(run("eval.py", "loss", *flags, ranks=2).stdout)
    assert both["windows"] == 7
    close(*([numbers["loss"], numbers["loss_error"]] for numbers in (both, alone)), size=alone["loss"],
          dtype=torch.float32)
