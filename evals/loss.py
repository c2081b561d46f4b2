"""The loss of a run on fixed windows. Every call reads the same tokens, so runs can be compared.

    python eval.py loss --out_dir=out/a                 one run
    python eval.py loss --out_dir='out/tiny-*' --png=out/loss.png

The second command prints a table of several runs, and draws their losses during training. Runs
that differ only in the seed become one row of the table and one line of the picture.
"""

import csv
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch.nn import functional as F

import attention
import mixers
from common.flags import knob
from common.runs import read_run
from data import tokens
from evals.instrument import Windows, explained, first_line, mean_and_error, table, window_batches
from evals.pictures import figure_of, frame


@dataclass
class Loss(Windows):
    """Flags of loss"""

    windows: int = knob(0, "fixed windows, spread evenly; 0: as many as fit")
    batch_size: int = knob(16, "windows per forward pass")


# knobs in which runs of one row may differ
ALIKE = "seed", "out_dir", "log_interval", "eval_interval", "eval_iters", "wandb"
ADVICE = {
    "tokenizer": "look at one run after another",
    "training data (hash)": "name data for all with --dataset",
    "block_size": "set one for all with --length",
}
MEANINGS = {
    "runs": "with these choices; they differ in the seed",
    "loss": "nats per token, mean over the runs",
    "deviation": "standard deviation over the runs; with fewer than three it says little",
    "bits_per_byte": "the same loss in bits per byte of text, which tokenizers do not change",
    "more": "loss than in the first row, on the same windows",
    "+-": "standard error of this difference over the windows, not over the seeds",
}


def check(args, places, dataset):
    """Raise ValueError if these runs would not read the same windows. dataset: that of
    --dataset."""
    first = None
    for place in places:
        meta = read_run(place)[0]
        reads = {
            "tokenizer": meta.get("tokenizer"),
            "training data (hash)": dataset or meta.get("data_hash"),
            "block_size": args.length or meta["knobs"]["block_size"],
        }
        first = first or reads
        for name, value in reads.items():
            if value != first[name]:
                raise ValueError(
                    f"{places[0]} and {place} differ in {name}: {first[name]} and {value}. Only "
                    f"losses on the same windows can be compared: {ADVICE[name]}"
                )


def command(args, run):
    """Mean loss of a split on fixed windows. Of several runs: means and deviations over seeds;
    with --png their losses during training."""
    length = run.window(args.length)
    split = run.split(args.split)
    losses = window_losses(run.model, split, run.machine, args.windows, args.batch_size, length)
    loss, error = mean_and_error(losses)
    bits = bits_per_byte(loss, run.data_meta, args.split)
    knobs = run.meta["knobs"] | asdict(run.model.config)
    numbers = run.reads(args.split, len(losses), length) | {
        "loss": loss,
        "loss_error": error,
        "bits_per_byte": bits,
        "losses": losses.tolist(),
        "knobs": {name: knobs[name] for name in knobs if name not in ALIKE},
        # a run under other choices than its own was not trained so
        "log": None if run.overrides else str(run.out_dir / "log.csv"),
    }
    text = table([[args.split, loss, error, bits]], ["split", "loss", "+-", "bits_per_byte"])
    return numbers, f"{first_line(numbers)}\n\n{text}\n\n+-: standard error over the windows"


def compare(found):
    """A row for each recipe of several runs."""
    first = next(iter(found.values()))
    lines = {}
    best = None
    for label, group in groups_of(found).items():
        means = [numbers["loss"] for numbers in group]
        bits = [numbers["bits_per_byte"] for numbers in group]
        losses = np.mean([numbers["losses"] for numbers in group], 0)  # (windows,)
        lines[label] = {
            "runs": len(group),
            "loss": fmean(means),
            "deviation": stdev(means) if len(group) > 1 else None,
            "bits_per_byte": None if None in bits else fmean(bits),
        }
        if best is None:
            best = losses
        else:
            lines[label]["more"], lines[label]["+-"] = mean_and_error(losses - best)
    return f"{first_line(first)}\n\n{explained(lines, MEANINGS, '')}"


def groups_of(found):
    """The runs of {run: numbers} with the same knobs, except for the seed: {label: [numbers]}, the
    best first. A label is the recipe, and the knobs that differ between groups unless the recipe
    sets them."""
    groups = {}
    for numbers in found.values():
        groups.setdefault(str(numbers["knobs"]), []).append(numbers)
    best_first = sorted(groups.values(), key=lambda group: fmean(run["loss"] for run in group))
    every = [group[0]["knobs"] for group in best_first]
    labelled = {}
    for group, knobs in zip(best_first, every, strict=True):
        usual = {"attn": knobs["attn"], "attn_args": "", "layers": ""}
        usual |= mixers.DEFAULTS | attention.recipe(knobs["attn"])
        label = knobs["attn"]
        for name, value in knobs.items():
            differs = any(other.get(name) != value for other in every)
            if differs and (name not in usual or usual[name] != value):
                label += f" --{name}={int(value) if isinstance(value, bool) else value}"
        labelled[label] = group
    return labelled


def draw(path, found):
    """Draw val_loss by step of training, a line for each recipe: the mean over seeds, and a band of
    one standard deviation. Dotted: train_loss."""
    with figure_of(path, [4.2], [6.5]) as ((ax,),):
        for label, group in groups_of(found).items():
            steps, values = curves(group, "val_loss")
            mean = values.mean(0)
            dot = "o" if len(steps) == 1 else None
            (line,) = ax.plot(steps, mean, marker=dot, label=f"{label}, runs: {len(group)}")
            colour = line.get_color()
            if len(group) > 1:
                deviation = values.std(0, ddof=1)
                ax.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.2)
            steps, values = curves(group, "train_loss")
            ax.plot(steps, values.mean(0), ":", color=colour, linewidth=0.8)
        ax.legend(frameon=False, fontsize=8)
        frame(
            ax,
            "val_loss, and train_loss (dotted); bands: one standard deviation over seeds",
            "step",
            "nats per token",
        )


def curves(group, column):
    """The steps at which all these runs have this column in their log.csv, and its values there,
    (runs, steps)."""
    logs = []
    for numbers in group:
        log = numbers["log"]
        if not log or not Path(log).exists():
            raise ValueError(
                f"there is no curve of {numbers['knobs']['attn']}: only a run that was "
                "trained here, as it is now, has a log.csv. Leave out --png"
            )
        try:
            with open(log, newline="") as f:
                rows = [row for row in csv.DictReader(f) if row[column]]
            logs.append({float(row["step"]): float(row[column]) for row in rows})
        except (ValueError, KeyError, csv.Error):
            raise ValueError(f"{log} is damaged: leave out this run, or --png") from None
    steps = sorted(set.intersection(*map(set, logs)))
    return steps, np.array([[log[step] for step in steps] for log in logs])


@torch.no_grad()
def mean_loss(model, split, machine, count, batch_size, share=True):
    """Mean loss (nats per target) on `count` fixed windows of a split, 0 for as many as fit. share:
    the ranks share the windows. A sharded model needs all ranks for each pass, so there every rank
    reads every window. The caller checks with window_targets that there is a target."""
    training = model.training
    total = 0.0
    seen = 0  # targets
    model.eval()  # no dropout; train.py calls this between two steps
    T = model.config.block_size
    for rows, targets, starts in window_batches(
        model, split, machine, T, count, batch_size, share=share, packed=True
    ):
        here = (targets >= 0).sum().item()  # the last batch may have fewer
        with machine.autocast():
            total += model(rows[:, :-1], targets, starts=starts)[1].item() * here
        seen += here
    model.train(training)
    total, seen = machine.sum(total, seen)
    return total / seen


@torch.no_grad()
def window_losses(model, split, machine, count, batch_size, length):
    """The loss of each fixed window, (windows,) in float64, of a model in eval mode. The mean over
    windows is the mean over targets, and their standard error is that of a ratio: a window differs
    from the mean only by the losses of its targets, not by their number. The ranks share the
    windows."""
    counts, own = window_targets(split, length, count), []
    for rows, wanted, starts in window_batches(
        model, split, machine, length, count, batch_size, bar=True, share=True, packed=True
    ):
        losses = token_losses(model, rows, machine, starts).double() * (wanted >= 0)
        own += losses.sum(1).tolist()
    found = np.zeros(len(counts))
    found[machine.rank :: machine.world] = own
    losses = np.array(machine.sum(*found)) / counts.mean()
    return losses + losses.mean() * (1 - counts / counts.mean())


def window_targets(split, length, count):
    """How many targets of the loss each fixed window has, (windows,). Raises ValueError if none
    has one."""
    counts = split.count_targets(tokens.fixed_windows(split, length, count), length)
    if not counts.any():
        raise ValueError(
            f"{split.name}: {len(counts)} windows of {length} tokens hold no target of the loss: "
            "raise --block_size or --eval_iters (in eval.py --length or --windows)"
        )
    return counts


def token_losses(model, rows, machine, starts=None):
    """The loss of every target in windows rows (N, T + 1), packed or not: (N, T) in float32."""
    with machine.autocast():
        logits = model(rows[:, :-1], starts=starts)[0]
    return F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")


def figures_of(losses, more):
    """The means and standard errors of losses (windows,) and of `more`, their excess over another
    model's losses of the same windows. The excess varies little between windows, so its error is
    much smaller than that of the loss."""
    loss, error = mean_and_error(losses)
    more, more_error = mean_and_error(more)
    return {
        "loss": loss,
        "loss_error": error,
        "more": more,
        "more_error": more_error,
        # exp of more overflows
        "perplexity": math.exp(min(loss, 700)),
    }


def bits_per_byte(loss, data_meta, split):
    """Nats per token as bits per byte of text, which is comparable across tokenizers; None if
    tokens are not text."""
    rows = tokens.shards_of(data_meta, split)
    size, count = (sum(row.get(key) or 0 for row in rows) for key in ("bytes", "tokens"))
    return loss / math.log(2) / (size / count) if size and count else None
