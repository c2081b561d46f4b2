"""The role of each head: how dormant, local, global and important it is, and how much the loss
rises without its sink or without the head. These are the head-level measures of The Attention Sink
as Native MoE, on fixed windows.

The sink is the extra key or the sink token if the recipe has one, else the first token. A head is a
head of the output: a differential recipe's weights are the difference of its views. Maps are
(layers, heads).

Differs from the paper: eq. 7 takes the weights as they are, though its mean 1/i needs rows that sum
to 1, and rows of a recipe with a sink outside the sequence do not (sigma2_printed). sigma2 scales
rows to sum 1. Under --window both count the visible keys, not all i.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from common.flags import knob
from data import tokens
from evals.ablate import OTHER, ablations, costs, draw_costs
from evals.instrument import (
    Windows,
    explained,
    first_line,
    table,
    whole_numbers,
    window_batches,
)
from evals.measures import HEAD_MEASURES
from evals.pictures import SHARES, draw_rows, heat_map, signed
from evals.probe import probe

MEASURES = {  # name: its meaning, printed under the table
    "alpha_sink": "weight on the sink, mean over all rows (eq. 5): `extra` or `sink` of probe",
    "alpha_local": "weight on the last {local} keys, mean over rows with that many keys (eq. 6; "
    "{local} is our choice)",
    "sigma2": "variance of a row's absolute weights, scaled to sum to 1, around an even spread "
    "(eq. 7)",
    "sigma2_printed": "the same of the weights as they are (eq. 7 as printed)",
    "importance": "weight on all other keys; for a gated head, its mean gate (eq. 8)",
    "dormant": "heads with alpha_sink above {threshold:g}",
}
FIGURES = {  # over all heads
    "depth_rank_correlation": "rank correlation of a layer's depth and its mean alpha_sink",
    "importance_cv": "standard deviation of importance over its mean (eq. 8)",
    "importance_cv_late": "the same without the first layers, {early} of them",
}


@dataclass
class Heads(Windows):
    """Flags of heads"""

    local: int = knob(8, "alpha_local is the weight on this number of last keys", least=1)
    threshold: float = knob(0.5, "a head is dormant if its alpha_sink is above this")
    against: str = knob(
        "", "also measure alpha_sink on this data set, to see whether the same heads are dormant"
    )
    cost: bool = knob(
        False,
        "also measure how much each ablation raises the loss, in some 30 passes over the windows",
    )
    prune: str = knob("5,14,30", "with --cost: percentages of heads to silence")

    def __post_init__(self):
        super().__post_init__()
        if max(whole_numbers(self.prune, "prune")) > 100:
            raise ValueError(
                f"--prune={self.prune} has a percentage above 100: give percentages of the heads"
            )


def command(args, run):
    """How dormant, local, global and important every head is; with --cost, what its sink and the
    head are worth."""
    T = run.window(args.length)
    machine = run.machine
    if args.local > T:
        raise ValueError(f"--local={args.local}, but a window has {T} tokens: lower it")
    if args.cost and T <= OTHER:
        raise ValueError(f"--cost needs windows of more than {OTHER} tokens: raise --length")

    def measured(folder):
        """{measure: (layers, heads)} on the windows of a data set, and its split."""
        split = tokens.Tokens(folder, args.split)
        sizes = args.windows, args.batch_size, T
        layers = probe(run.model, split, machine, *sizes, bar=True, local=args.local)["layers"]
        maps = {}
        for name in HEAD_MEASURES:
            maps[name] = torch.tensor([layer[name] for layer in layers], dtype=torch.float64)
        return maps, split

    maps, split = measured(run.data[0])
    (rows,) = window_batches(run.model, split, machine, T, args.windows, args.windows)
    alpha = maps["alpha_sink"]
    numbers = run.reads(args.split, len(rows), T) | {"local": args.local}
    numbers |= summary(maps, args.threshold)
    if args.against:
        there, _ = measured(run.data_of(args.against)[0])
        numbers["against"] = compared(alpha, there["alpha_sink"], Path(args.against).name)
    if args.cost:
        removed = ablations(alpha, args.threshold, whole_numbers(args.prune))
        numbers["cost"] = costs(removed, run.model, rows, machine, args.batch_size)
    return numbers, in_words(numbers)


def summary(maps, threshold):
    """The maps as lists, and figures over all heads. threshold: a head with a larger alpha_sink is
    dormant."""
    alpha, importance = maps["alpha_sink"], maps["importance"]
    depth = torch.arange(len(alpha), dtype=torch.float64)
    early = max(1, round(len(alpha) / 5))  # a fifth of the layers
    lists = {}
    for name, values in maps.items():
        lists[name] = [[round(value, 6) for value in layer] for layer in values.tolist()]
    return {
        "maps": lists,
        "mean": {name: values.mean().item() for name, values in maps.items()},
        "threshold": threshold,
        "dormant": (alpha > threshold).double().mean().item(),
        "depth_rank_correlation": correlation(depth, alpha.mean(1).argsort().argsort().double()),
        "importance_cv": variation(importance),
        "early": early,
        "importance_cv_late": variation(importance[early:]),
    }


def variation(values):
    """Standard deviation over mean (eq. 8); None if it is undefined. The paper does not define its
    standard deviation; ours divides by n, as the balancing loss in training does."""
    if values.numel() < 2:
        return None
    found = values.std(correction=0) / values.mean()
    return found.item() if found.isfinite() else None


def correlation(a, b):
    """Pearson's correlation of two maps; None if it is undefined, like that with a constant."""
    if a.numel() < 2:
        return None
    found = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
    return found.item() if found.isfinite() else None


def compared(here, there, dataset):
    """Compare alpha_sink on two data sets (figure 6): the second map, the first minus the second,
    their similarity."""
    return {
        "dataset": dataset,
        "alpha_sink": there.tolist(),
        "difference": (here - there).tolist(),
        "correlation": correlation(here, there),
        "mean_difference": (here - there).abs().mean().item(),
    }


def in_words(numbers):
    """A row for each layer, a line for each figure over all heads, and the costs."""
    threshold = numbers["threshold"]
    lines = {}
    for layer, alpha in enumerate(numbers["maps"]["alpha_sink"]):
        lines[str(layer)] = {name: fmean(values[layer]) for name, values in numbers["maps"].items()}
        dormant = sum(sink > threshold for sink in alpha)
        lines[str(layer)]["dormant"] = f"{dormant} of {len(alpha)}"
    lines["mean"] = numbers["mean"] | {"dormant": f"{numbers['dormant']:.0%}"}
    columns = {name: meaning.format(**numbers) for name, meaning in MEASURES.items()}
    figures = []
    for name, meaning in FIGURES.items():
        if numbers[name] is not None:
            figures.append([f"{name}, {meaning}".format(**numbers), numbers[name]])
    if against := numbers.get("against"):
        for name in ("correlation", "mean_difference"):
            line = f"{name} of alpha_sink here and on {against['dataset']}"
            figures.append([line, against[name]])
    texts = [first_line(numbers), explained(lines, columns, "layer")]
    if figures:  # not of a single head
        texts.append(table(figures, ["over all heads", ""]))
    if cost := numbers.get("cost"):
        rows = [line.values() for line in cost["changes"]]
        header = "taken away,in the heads,heads,loss change,standard error,over draws".split(",")
        texts += [f"loss as it is: {cost['loss']:.4f} nats per token", table(rows, header)]
        if not numbers["dormant"]:
            texts[-1] += f"\nfirst value zero in dormant heads: no head is above {threshold:g}"
    return "\n\n".join(texts)


def draw(path, found):
    """Draw maps. One run: alpha_sink, alpha_local and sigma2 (figures 4, 5, 10, 11), with --against
    alpha_sink on both data sets and the difference (figure 6), with --cost the costs. Several runs:
    their alpha_sink (figure 12)."""
    panels, least = [], (1, 1)

    def add(title, cells, colours=SHARES):
        panels.append(partial(heat_map, cells=cells, colours=colours, title=title, bar=""))

    if len(found) > 1:
        for place, numbers in found.items():
            mean = f"mean $\\alpha_{{sink}}$ {numbers['mean']['alpha_sink']:.2f}"
            add(f"{place}\n{mean}", numbers["maps"]["alpha_sink"])
    else:
        (numbers,) = found.values()
        maps, against, cost = numbers["maps"], numbers.get("against"), numbers.get("cost")
        add("weight on the sink\n$\\alpha_{sink}$", maps["alpha_sink"])
        if against:
            add(f"the same on\n{against['dataset']}", against["alpha_sink"])
            add("difference\n(first minus second)", against["difference"], signed(0.5))
        add(f"on the last {numbers['local']} keys\n$\\alpha_{{local}}$", maps["alpha_local"])
        add("how uneven rows are\n$\\sigma^2$", maps["sigma2"], SHARES | {"vmax": None})
        if cost:
            panels.append(partial(draw_costs, cost=cost))
            least = len(cost["changes"]), 1  # a bar needs as much height as a layer
    draw_rows(path, {"": panels}, least)
