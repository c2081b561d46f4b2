"""loss"""
import math
from dataclasses import dataclass

import numpy as np
import torch

from common.flags import at_least, knob
from data import tokens
from evals.instrument import table


@dataclass
class Loss:
    """Flags of loss"""
    split: str = knob("val", "which split", ("train", "val"))
    windows: int = knob(0, "fixed windows of block_size tokens, spread evenly; 0: as many as fit")
    batch_size: int = knob(16, "windows per forward pass")

    def __post_init__(self):
        at_least(self, windows=0, batch_size=1)


def loss_command(args, run):
    """Mean loss of a split on fixed windows."""
    loss = mean_loss(run.model, run.split(args.split), run.machine, args.windows, args.batch_size, run.stride)
    bpb = bits_per_byte(loss, run.data, args.split)
    return {"split": args.split, "loss": loss, "bits_per_byte": bpb}, table([[args.split, loss, bpb]], ["split", "loss", "bits per byte"])


@torch.no_grad()
def mean_loss(model, split, machine, count, batch_size, stride=1):
    """Mean loss (nats per token) on `count` fixed windows of a split, 0 for as many as fit; the ranks share them."""
    training, config = model.training, model.config
    model.eval()
    total, seen = 0.0, 0
    starts = tokens.fixed_windows(split, config.block_size, count, stride)[machine.rank::machine.world]
    for batch in np.split(starts, range(batch_size, len(starts), batch_size)) if len(starts) else []:
        rows = torch.from_numpy(split.windows(batch, config.block_size + 1, config.vocab_size)).to(machine.device)
        with machine.autocast():
            total += model(rows[:, :-1], rows[:, 1:])[1].item() * len(batch)
        seen += len(batch)
    model.train(training)
    total, seen = machine.sum(total, seen)
    return total / seen


def bits_per_byte(loss, meta, split):
    """Loss in nats per token as bits per byte of text, which compares across tokenizers; None where the tokens are no text."""
    ratio = tokens.bytes_per_token(meta, split)
    return loss / math.log(2) / ratio if ratio else None
