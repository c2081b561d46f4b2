"""eval.py loss: the mean over fixed windows, in nats and bits, from one process or several ranks."""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bounds import close
from conftest import ROOT, run

from data import tokens
from evals.instrument import load_run
from evals.loss import bits_per_byte


@pytest.fixture
def loss(elastic_run, evaluate):
    return lambda *flags: evaluate("loss", f"--out_dir={elastic_run}", *flags)


@pytest.mark.parametrize("length", [4, 64])
def test_fixed_windows_with_a_stride_read_each_sequence_once(length):
    sequences = range(20 * 65)
    assert tokens.fixed_windows(sequences, length, 0, 65).tolist() == [65 * n for n in range(20)]


def test_fixed_windows_are_spread_over_the_whole_split(data):
    fox = tokens.Tokens(data, "val")
    starts = tokens.fixed_windows(fox, 16, 5)
    assert starts[0] == 0 and starts[-1] == len(fox) - 17 and len(starts) == 5 and len(set(np.diff(starts) // 10)) == 1
    for count in (10 ** 9, 0):
        assert len(tokens.fixed_windows(fox, 16, count)) == (len(fox) - 1) // 16


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
    assert loss("--windows=6", "--split=train")["loss"] != found["loss"]


def test_bits_per_byte_need_a_count_of_bytes():
    row = {"tokens": 50, "bytes": 200, "sha256": ""}
    close(bits_per_byte(math.log(2), {"shards": {"val.bin": row}}, "val"), 1 / 4)
    del row["bytes"]
    assert bits_per_byte(1.0, {"shards": {"val.bin": row}}, "val") is None


def test_two_ranks_give_the_loss_of_one_process(loss, elastic_run):
    alone = loss("--windows=7", "--batch_size=2")
    flags = (f"--out_dir={elastic_run}", "--json", "--windows=7", "--batch_size=2", "--device=cpu")
    both = json.loads(run("eval.py", "loss", *flags, ranks=2).stdout)
    assert both["windows"] == 7
    close(*([numbers["loss"], numbers["loss_error"]] for numbers in (both, alone)), size=alone["loss"],
          dtype=torch.float32)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the list of threads that Linux has")
def test_no_thread_of_the_ranks_outlives_the_command(elastic_run, tmp_path):
    """A leftover thread of gloo sometimes aborts the process when Python exits."""
    script = tmp_path / "threads.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import eval
eval.main(sys.argv[1:])
for thread in os.listdir("/proc/self/task"):
    try:
        name = open(f"/proc/self/task/{{thread}}/comm").read()
    except OSError:                             # the thread has ended
        continue
    assert "gloo" not in name, name
""")
    run(script, "loss", f"--out_dir={elastic_run}", "--json", "--windows=2", "--device=cpu", ranks=2)
