"""The loss of a run on fixed windows: the same tokens at every call, so that two runs can be compared."""
import math
from dataclasses import dataclass

import torch

from common.flags import at_least, knob
from data import tokens
from evals.instrument import LENGTH, progress, read_windows, table


@dataclass
class Loss:
    """Flags of loss"""
    split: str = knob("val", "which split", ("train", "val"))
    windows: int = knob(0, "fixed windows, spread evenly; 0: as many as fit")
    length: int = knob(0, LENGTH)
    batch_size: int = knob(16, "windows per forward pass")

    def __post_init__(self):
        at_least(self, windows=0, length=0, batch_size=1)


def command(args, run):
    """Mean loss of a split on fixed windows."""
    loss = mean_loss(run.model, run.split(args.split), run.machine, args.windows, args.batch_size, run.stride,
                     run.window(args.length), bar=True)
    bpb = bits_per_byte(loss, run.data_meta, args.split)
    numbers = {"split": args.split, "loss": loss, "bits_per_byte": bpb}
    return numbers, table([[args.split, loss, bpb]], ["split", "loss", "bits per byte"])


@torch.no_grad()
def mean_loss(model, split, machine, count, batch_size, stride=1, length=0, bar=False):
    """Mean loss (nats per token) on `count` fixed windows of a split, 0 for as many as fit; the ranks share them.
    length: of a window, 0 for block_size; bar: show the progress."""
    training, T = model.training, length or model.config.block_size
    model.eval()                                # no dropout; train.py calls this between two steps
    total, seen = 0.0, 0
    # rank r of w takes windows r, r + w, ...: it may have one less than another rank, or none at all
    starts = tokens.fixed_windows(split, T, count, stride)[machine.rank::machine.world]
    for i in progress(range(0, len(starts), batch_size), bar and machine.main):
        rows = read_windows(split, starts[i:i + batch_size], T + 1, model, machine)         # (B, T + 1)
        with machine.autocast():                # a mean of B windows; the last batch may have fewer
            total += model(rows[:, :-1], rows[:, 1:])[1].item() * len(rows)
        seen += len(rows)
    model.train(training)
    total, seen = machine.sum(total, seen)
    return total / seen


def bits_per_byte(loss, data_meta, split):
    """Nats per token as bits per byte of text, which compares across tokenizers; None where the tokens are no text."""
    ratio = tokens.bytes_per_token(data_meta, split)
    return loss / math.log(2) / ratio if ratio else None
