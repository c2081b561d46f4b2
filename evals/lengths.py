"""The loss at several lengths, also on longer windows than in training, and by the position in the
window (Lazy Attention 2601.00919, section 5.5 and figure 6: trained at 512 tokens, perplexity at
512, 1024 and 2048).

Every length reads the same tokens: spans of the longest length, whole or cut into adjacent windows.
So lengths differ only in the context before a token. Standard errors are over spans.

--rope_scaling stretches RoPE's wavelengths at the lengths beyond the training length. With
--finetune the model first trains for more steps at each of them, as a new run (Threshold
Differential Attention 2601.12145, section 6 and appendix D.3: 500 steps). The base row, from which
"more" is measured, is the model as it was trained.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from common.flags import Knobs, knob, shown
from evals.instrument import (
    legend,
    mean_and_error,
    table,
    train_if_missing,
    whole_numbers,
    window_batches,
)
from evals.loss import figures_of, token_losses
from evals.pictures import figure_of, line_panel, powers_of_two


@dataclass
class Lengths(Knobs):
    """Flags of lengths"""

    split: str = knob("val", "split of the data set", ("train", "val"))
    lengths: str = knob(
        "",
        "tokens of a window; each divides the longest; empty: 1, 2 and 4 times the training length",
    )
    windows: int = knob(
        -1,
        "spans of the longest length; 0: as many as fit; -1: 65,536 tokens, at least 2",
        least=-1,
    )
    batch_size: int = knob(1, "spans per forward pass", least=1)
    finetune: int = knob(
        0,
        "first train for this many steps at each length beyond the training length, with a tenth "
        "of the learning rate and as many tokens per step; the new run is OUT_DIR-LENGTH",
    )
    train_args: str = knob("", "with --finetune: further flags of train.py, separated by spaces")


def command(args, run):
    """Loss and perplexity at several lengths on the same tokens, and by the position in the
    window."""
    trained, machine = run.meta["knobs"]["block_size"], run.machine
    text = args.lengths or f"{trained},{2 * trained},{4 * trained}"
    lengths = sorted(set(whole_numbers(text, "lengths", 1)))
    longest = lengths[-1]
    if any(longest % length for length in lengths):
        raise ValueError(
            f"--lengths={args.lengths}: each must divide the longest, {longest}, so that all read "
            "the same tokens"
        )
    run.window(longest, "lengths")  # raises ValueError
    count = max(2, 65_536 // longest) if args.windows < 0 else args.windows
    base = trained if trained in lengths else lengths[0]
    unstretched = max(base, trained)  # the longest windows that --rope_scaling leaves as they are
    split, losses = run.split(args.split), {}  # {length: the loss of every token, (spans, longest)}
    for length in lengths:
        model, found = run.model, []
        if args.finetune and length > trained:
            model = finetuned(run, length, args)
        elif length <= unstretched:
            model = unscaled(run)
        for rows in window_batches(
            model, split, machine, longest, count, args.batch_size, bar=True
        ):
            # (B longest / length, length + 1)
            windows = rows.unfold(1, length + 1, length).flatten(0, 1)
            with torch.no_grad():
                nats = token_losses(model, windows, machine)
            found.append(nats.view(len(rows), -1).double().cpu())
        losses[length] = torch.cat(found).numpy()
    numbers = {
        "dataset": run.dataset,
        "split": args.split,
        "spans": len(losses[longest]),
        "training_length": trained,
        "base": base,
        "rope_scaling": run.model.config.rope_scaling,
        "unstretched": unstretched,
        "finetune": args.finetune,
        "lengths": [summary(losses[length], length, losses[base]) for length in lengths],
    }
    return numbers, in_words(numbers)


def summary(losses, length, base):
    """The numbers of one length. losses (spans, longest): those of all tokens, read in windows of
    `length`; base: the losses of the same tokens at the base length. by_position: means in bins of
    positions in the window."""
    figures, (spans, longest) = figures_of(losses.mean(1), (losses - base).mean(1)), losses.shape
    by_position, mean = [], losses.reshape(spans, -1, length).mean(1)  # (spans, length)
    # the bins end at the longest length divided by powers of sqrt(2)
    ends = {round(longest / 2 ** (k / 2)) for k in range(2 * longest.bit_length())}
    ends = sorted(end for end in ends | {0, length} if end <= length)
    for start, end in itertools.pairwise(ends):
        here, its_error = mean_and_error(mean[:, start:end].mean(1))
        by_position.append({"first": start + 1, "last": end, "loss": here, "error": its_error})
    # d exp(x) = exp(x) dx
    error = figures["loss_error"] and figures["perplexity"] * figures["loss_error"]
    return {"length": length, **figures, "perplexity_error": error, "by_position": by_position}


def unscaled(run):
    """The model of a run with its own RoPE, and with the other overrides of this evaluation."""
    others = run.overrides.copy()
    for name in ("rope_base", "rope_scaling"):
        others.pop(name, None)
    return run.model if others == run.overrides else run.beside(run.out_dir, others).model


def finetuned(run, length, args):
    """The model of a run after args.finetune more steps at this length, with the overrides of this
    evaluation, as many tokens per step, and a tenth of the learning rate, at which a schedule ends
    by default."""
    folder, knobs = Path(f"{run.out_dir}-{length}"), run.meta["knobs"]
    flags = {
        "init_from": run.out_dir,
        "block_size": length,
        "max_iters": args.finetune,
        "eval_interval": args.finetune,
        "warmup_iters": args.finetune // 10,
        "device": run.machine.device,
    }
    if "learning_rate" in knobs:  # public weights lack it; train.py has a preset for them
        same = "gradient_accumulation_steps weight_decay beta1 beta2 head_lr grad_clip seed"
        flags |= {name: knobs[name] for name in same.split()}
        flags["batch_size"] = max(1, knobs["batch_size"] * knobs["block_size"] // length)
        flags["learning_rate"] = knobs["learning_rate"] / 10
    flags |= run.overrides | {"out_dir": folder}
    words = [f"--{name}={shown(value)}" for name, value in flags.items()]
    train_if_missing(folder, [*words, *args.train_args.split()])
    return run.beside(folder).model


def in_words(numbers):
    """A table with a row for each length, and the losses by position in the longest windows, bin by
    bin."""
    keys = ("loss", "loss_error", "perplexity", "perplexity_error", "more", "more_error")
    rows = [[str(row["length"]), *(row[key] for key in keys)] for row in numbers["lengths"]]
    longest, bins = numbers["lengths"][-1], []
    for b in longest["by_position"]:
        seen = f"{b['first']}-{b['last']}" if b["first"] < b["last"] else str(b["last"])
        bins.append([seen, b["loss"]])
    meanings = {
        "+-": f"standard errors over {numbers['spans']} spans of {longest['length']} tokens, the "
        "same at every length",
        "more": f"nats per token more than at length {numbers['base']}",
    }
    if numbers["rope_scaling"]:
        meanings["scaling"] = (
            f"RoPE as it was trained in windows of at most {numbers['unstretched']} tokens"
        )
    header = ["length", "loss", "+-", "perplexity", "+-", "more", "+-"]
    by_position = table(bins, ["tokens seen", "loss"])
    return f"{table(rows, header)}\n\n{legend(meanings)}\n\n{by_position}"


def draw(path, found):
    """Draw perplexity by length, the loss minus that at the base length, and the loss by the
    position in the longest window, in the middles of the bins. A line for each run; dotted lines at
    the training lengths."""
    longest = max(numbers["lengths"][-1]["length"] for numbers in found.values())
    trained = {numbers["training_length"] for numbers in found.values()}
    marks = [length for length in trained if length <= longest]
    bases = " and ".join(sorted({str(numbers["base"]) for numbers in found.values()}))
    panels = {  # {title: the columns x, y and error}
        "perplexity of the same tokens": ("length", "perplexity", "perplexity_error"),
        f"nats a token more than at length {bases}": ("length", "more", "more_error"),
        "nats a token, in the longest window": ("middle", "loss", "error"),
    }
    with figure_of(path, [3.9], [4.3] * 3) as axes:
        for ax, (title, columns) in zip(axes[0], panels.items(), strict=True):
            curves, xlabel = {}, "tokens in a window"
            for place, numbers in found.items():
                rows = numbers["lengths"]
                if "middle" in columns:
                    xlabel, bins = "tokens seen in the window", rows[-1]["by_position"]
                    rows = [b | {"middle": math.sqrt(b["first"] * b["last"])} for b in bins]
                curves[Path(place).name] = [[row[name] for row in rows] for name in columns]
            line_panel(ax, curves, title, xlabel, marks, legend=ax is axes[0, 0])
            powers_of_two(ax.xaxis)
