"""The loss of a run on fixed windows. Every call reads the same tokens, so runs can be compared."""
import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from common.flags import knob
from data import tokens
from evals.instrument import Windows, first_line, mean_and_error, table, window_batches


@dataclass
class Loss(Windows):
    """Flags of loss"""
    windows: int = knob(0, "fixed windows, spread evenly; 0: as many as fit")
    batch_size: int = knob(16, "windows per forward pass")


def command(args, run):
    """Mean loss of a split on fixed windows."""
    T, split = run.window(args.length), run.split(args.split)
    loss, error, windows = loss_and_error(run.model, split, run.machine, args.windows, args.batch_size, T)
    bpb = bits_per_byte(loss, run.data_meta, args.split)
    numbers = run.reads(args.split, windows, T) | {"loss": loss, "loss_error": error, "bits_per_byte": bpb}
    text = table([[args.split, loss, error, bpb]], ["split", "loss", "+-", "bits per byte"])
    return numbers, f"{first_line(numbers)}\n\n{text}\n\n+-: standard error over the windows"


@torch.no_grad()
def mean_loss(model, split, machine, count, batch_size, share=True):
    """Mean loss (nats per token) on `count` fixed windows of a split, 0 for as many as fit. share: the ranks share the
    windows. A sharded model needs all ranks for each pass, so there every rank reads every window."""
    training, total, seen = model.training, 0.0, 0
    model.eval()                                # no dropout; train.py calls this between two steps
    T = model.config.block_size
    for rows, starts in window_batches(model, split, machine, T, count, batch_size, share=share, packed=True):
        with machine.autocast():                # a mean over B windows; the last batch may have fewer
            total += model(rows[:, :-1], rows[:, 1:], starts=starts)[1].item() * len(rows)
        seen += len(rows)
    model.train(training)
    total, seen = machine.sum(total, seen)
    return total / seen


@torch.no_grad()
def loss_and_error(model, split, machine, count, batch_size, length):
    """The mean loss of a model in eval mode, its standard error over the windows (None for one window), and the number
    of windows. The ranks share the windows."""
    total, squares, seen = 0.0, 0.0, 0
    for rows, starts in window_batches(model, split, machine, length, count, batch_size, True, True, packed=True):
        losses = token_losses(model, rows, machine, starts).double().mean(1)            # (B,)
        total, squares, seen = total + losses.sum().item(), squares + losses.square().sum().item(), seen + len(rows)
    total, squares, seen = machine.sum(total, squares, seen)
    mean = total / seen
    variance = max(0.0, squares / seen - mean ** 2)                     # rounding can make it negative
    return mean, math.sqrt(variance / (seen - 1)) if seen > 1 else None, int(seen)


def token_losses(model, rows, machine, starts=None):
    """The loss of every target in windows rows (N, T + 1), packed or not: (N, T) in float32."""
    with machine.autocast():
        logits = model(rows[:, :-1], starts=starts)[0]
    return F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")


def figures_of(losses, more):
    """The means and standard errors of losses (windows,) and of `more`, their excess over another model's losses of the
    same windows. The excess varies little between windows, so its error is much smaller than that of the loss."""
    (loss, error), (more, more_error) = map(mean_and_error, (losses, more))
    return {"loss": loss, "loss_error": error, "more": more, "more_error": more_error,
            "perplexity": math.exp(min(loss, 700))}                     # exp of more overflows


def bits_per_byte(loss, data_meta, split):
    """Nats per token as bits per byte of text, which is comparable across tokenizers; None if tokens are not text."""
    rows = tokens.shards_of(data_meta, split)
    size, count = (sum(row.get(key) or 0 for row in rows) for key in ("bytes", "tokens"))
    return loss / math.log(2) / (size / count) if size and count else None
