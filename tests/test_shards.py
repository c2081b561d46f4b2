"""train.py --shard=1: weights, gradients and optimizer state are split over the ranks, and nothing
else changes. Checkpoints are whole, and any number of ranks goes on with them."""

import csv

import pytest
import torch
from bounds import close
from conftest import TINY, assert_close_runs, by_default, meta, run, train_here

SHARED = (
    "--gradient_accumulation_steps=2",
    "--n_layer=2",
    "--lr_decay_iters=8",
    "--learning_rate=3e-5",
    "--min_lr=3e-5",
)  # AdamW turns rounding of a gradient near 0 into a step of this size
# balancing losses depend on which sequences are in one forward pass
AT_ONCE = ("--gradient_accumulation_steps=1",)
LATER = (
    "--eval_interval=4",
    "--eval_iters=1",
    "--batch_size=4",
    "--log_interval=1",
    "--decay_lr=0",
    # of a run from other weights, which has not the flags of TINY
    "--device=cpu",
    "--dtype=float32",
)


def trained(ranks, *flags):
    """Train in this process, or in several with --shard=1."""
    new = () if any(flag.startswith("--init_from") for flag in flags) else TINY
    train_here(*flags) if ranks == 1 else run("train.py", *new, *flags, "--shard=1", ranks=ranks)


@pytest.mark.parametrize(
    "before, after, flags",
    [
        (1, 2, ("--attn=elastic", "--grad_clip=0.1")),
        *(
            by_default(False, *case)
            for case in (
                (2, 1, ("--attn=elastic",)),
                (2, 4, ("--attn=lazy",)),
                (2, 2, ("--attn=tda",)),
                (2, 2, ("--attn=dex",)),
                (4, 4, ("--attn=gated_deltanet",)),
                (2, 2, ("--attn=focus", "--window=4", "--balance=softmax")),
                (2, 2, ("--attn=routing", "--attn_args=cluster_size=4")),
                (2, 2, ("--attn=softmax", "--tied=0", "--bias=1")),
                (2, 2, ("--pos=t5",)),
                (2, 2, ("--attn=gated", "--n_head=4", "--head_balance=0.1", *AT_ONCE)),
                (2, 2, ("--attn=softmax1", "--head_balance=0.1", *AT_ONCE)),
                *(
                    (2, 2, ("--init_from={base}", *LATER, *only))
                    for only in (
                        ("--train_only=lora",),
                        ("--attn=focus", "--window=4", "--train_only=focus"),
                        (),
                    )
                ),
            )
        ),
    ],
)
def test_shards_train_and_go_on_like_one_process(before, after, flags, tmp_path, data):
    """The ranks gather the same weights and average the same gradients, also those of balancing
    losses. Buffers that training sets, such as Dex's progress, are equal as well. An adapter's
    checkpoint holds only what it trained."""
    base, sharded, alone = (tmp_path / name for name in ("base", "sharded", "alone"))
    flags = [flag.format(base=base) for flag in flags]
    if "--init_from" in " ".join(flags):
        train_here(f"--dataset={data}", f"--out_dir={base}")
    else:
        flags = [f"--dataset={data}", *SHARED, *flags]
    # Dex's progress depends on --max_iters
    for out, first, then in (sharded, before, after), (alone, 1, 1):
        trained(first, *flags, f"--out_dir={out}", "--max_iters=4")
        trained(then, f"--out_dir={out}", "--init_from=resume", "--max_iters=8")
    averages = torch.load(sharded / "ckpt.pt", weights_only=True)["optimizer"]["state"][0].values()
    assert {(type(value), value.device.type) for value in averages} == {(torch.Tensor, "cpu")}
    assert_close_runs(sharded, alone)
    logs = (csv.DictReader((run / "log.csv").open(newline="")) for run in (sharded, alone))
    close(
        *([float(row["grad_norm"]) for row in log] for log in logs), terms=1024, dtype=torch.float32
    )
    close(*(meta(run)["report"]["sink"] for run in (sharded, alone)), size=1.0, dtype=torch.float32)
