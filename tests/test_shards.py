"""train.py --shard=1: weights, gradients and optimizer state are split over the ranks, and nothing
else changes. Checkpoints are whole."""
import csv

import pytest
import torch
from bounds import close
from conftest import (
    TINY, assert_close_runs, assert_same_run, by_default, meta, run, train, train_here)

SHARED = ("--gradient_accumulation_steps=2", "--n_layer=2")
AT_ONCE = ("--gradient_accumulation_steps=1",)  # balancing losses depend on which sequences are in one forward pass
FIFTY = ("--max_iters=50", "--eval_interval=25", "--gradient_accumulation_steps=4",
         "--learning_rate=3e-5")                # AdamW turns rounding of a gradient near 0 into a step of this size


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [
    ("--attn=dex",), ("--attn=focus", "--window=4", "--balance=softmax", *FIFTY),
    *((f"--attn={attn}", *FIFTY) for attn in ("elastic", "lazy", "tda", "gated_deltanet")),
    ("--attn=routing", "--attn_args=cluster_size=4"), ("--attn=softmax", "--tied=0", "--bias=1"),
    ("--attn=gated", "--n_head=4", "--head_balance=0.1", *AT_ONCE),
    ("--attn=softmax1", "--head_balance=0.1", *AT_ONCE), ("--pos=t5",)], ids=" ".join)
def test_shards_train_like_one_process(flags, tmp_path, data):
    """The ranks gather the same weights and average the same gradients, also those of balancing losses. Buffers that
    training sets, such as Dex's progress, are equal as well. Four ranks train fifty steps."""
    train(tmp_path / "2", data, *SHARED, *flags, "--shard=1", ranks=4 if {*FIFTY} <= {*flags} else 2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / '1'}", *SHARED, *flags)
    assert_like_one_process(tmp_path / "2", tmp_path / "1")


def assert_like_one_process(sharded, whole):
    assert_close_runs(sharded, whole)
    logs = (csv.DictReader((run / "log.csv").open(newline="")) for run in (sharded, whole))
    close(*([float(row["grad_norm"]) for row in log] for log in logs), terms=1024, dtype=torch.float32)
    close(*(meta(run)["report"]["sink"] for run in (sharded, whole)), size=1.0, dtype=torch.float32)


def trained(ranks, *flags):
    """Train in this process, or in several with --shard=1."""
    new = () if any(flag.startswith("--init_from") for flag in flags) else TINY
    train_here(*flags) if ranks == 1 else run("train.py", *new, *flags, "--shard=1", ranks=ranks)


@pytest.mark.parametrize("before, after", [(2, 2), by_default(False, 2, 1), by_default(False, 1, 4)])
def test_a_run_goes_on_with_any_number_of_ranks_sharded_or_not(before, after, tmp_path, data):
    """Bit for bit if the number is the same, and always like a single process."""
    flags = (f"--dataset={data}", *SHARED, "--attn=elastic", "--grad_clip=0.1", "--lr_decay_iters=8")
    stopped, whole, alone = (tmp_path / name for name in ("stopped", "whole", "alone"))
    trained(before, *flags, f"--out_dir={stopped}", "--max_iters=4")
    averages = torch.load(stopped / "ckpt.pt", weights_only=True)["optimizer"]["state"][0].values()
    assert {(type(value), value.device.type) for value in averages} == {(torch.Tensor, "cpu")}
    trained(after, f"--out_dir={stopped}", "--init_from=resume", "--max_iters=8")
    train_here(*flags, f"--out_dir={alone}")
    assert_like_one_process(stopped, alone)
    if before == after:
        trained(before, *flags, f"--out_dir={whole}")
        assert_same_run(stopped, whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("only", [("--train_only=lora",), ("--attn=focus", "--window=4", "--train_only=focus"), ()],
                         ids=["lora", "focus", "all"])
def test_a_sharded_run_from_other_weights_goes_on(only, tmp_path, data):
    """An adapter's checkpoint holds only what it trained, and its base the rest."""
    base, sharded, whole = (tmp_path / name for name in ("base", "sharded", "whole"))
    train_here(f"--dataset={data}", f"--out_dir={base}")
    flags = (f"--init_from={base}", "--eval_interval=4", "--eval_iters=1", "--batch_size=4", "--log_interval=1",
             "--device=cpu", "--dtype=float32", "--decay_lr=0", *only)
    trained(2, *flags, f"--out_dir={sharded}", "--max_iters=4")
    trained(2, f"--out_dir={sharded}", "--init_from=resume", "--max_iters=8")
    train_here(*flags, f"--out_dir={whole}", "--max_iters=8")
    assert_close_runs(sharded, whole)
