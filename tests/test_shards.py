"""train.py --shard=1: weights, gradients and optimizer state are split over the ranks, and nothing
else changes. Checkpoints are whole, and any number of ranks goes on with them."""

import csv

import pytest
import torch
from bounds import close
from conftest import TINY, assert_close_runs, by_default, meta, run, train_here

# AdamW turns rounding of a gradient near 0 into a step of the size of the learning rate
SHARED = "--gradient_accumulation_steps=2 --n_layer=2 --lr_decay_iters=8".split()
SHARED += ["--learning_rate=3e-5", "--min_lr=3e-5"]
# balancing losses depend on which sequences are in one forward pass
AT_ONCE = "--gradient_accumulation_steps=1"
# a run from other weights has not the flags of TINY
LATER = "--init_from={base} --device=cpu --dtype=float32 --eval_interval=4 --eval_iters=1"
LATER += " --batch_size=4 --log_interval=1 --decay_lr=0"


def trained(ranks, *flags):
    """Train in this process, or in several with --shard=1."""
    if ranks == 1:
        return train_here(*flags)
    new = () if any(flag.startswith("--init_from") for flag in flags) else TINY
    run("train.py", *new, *flags, "--shard=1", ranks=ranks)


@pytest.mark.parametrize(
    "before, after, flags",
    [
        (1, 2, "--attn=elastic --grad_clip=0.1"),
        by_default(False, 2, 1, "--attn=elastic"),
        by_default(False, 2, 4, "--attn=lazy"),
        by_default(False, 2, 2, "--attn=tda"),
        by_default(False, 2, 2, "--attn=dex"),
        by_default(False, 4, 4, "--attn=gated_deltanet"),
        by_default(False, 2, 2, "--attn=focus --window=4 --balance=softmax"),
        by_default(False, 2, 2, "--attn=routing --attn_args=cluster_size=4"),
        by_default(False, 2, 2, "--attn=softmax --tied=0 --bias=1"),
        by_default(False, 2, 2, "--pos=t5"),
        by_default(False, 2, 2, f"--attn=gated --n_head=4 --head_balance=0.1 {AT_ONCE}"),
        by_default(False, 2, 2, f"--attn=softmax1 --head_balance=0.1 {AT_ONCE}"),
        by_default(False, 2, 2, LATER),
        by_default(False, 2, 2, f"{LATER} --train_only=lora"),
        by_default(False, 2, 2, f"{LATER} --train_only=focus --attn=focus --window=4"),
    ],
)
def test_shards_train_and_go_on_like_one_process(before, after, flags, tmp_path, data):
    """The ranks gather the same weights and average the same gradients, also those of balancing
    losses. Buffers that training sets, such as Dex's progress, are equal as well. An adapter's
    checkpoint holds only what it trained."""
    base, sharded, alone = (tmp_path / name for name in ("base", "sharded", "alone"))
    flags = flags.format(base=base).split()
    if flags[0].startswith("--init_from"):
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

    def norms(out):
        return [
            float(row["grad_norm"]) for row in csv.DictReader((out / "log.csv").open(newline=""))
        ]

    close(norms(sharded), norms(alone), terms=1024, dtype=torch.float32)
    sinks = [meta(out)["report"]["sink"] for out in (sharded, alone)]
    close(*sinks, size=1.0, dtype=torch.float32)
