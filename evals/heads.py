"""The role of each head: how dormant, local, global and important it is, and how much the loss
rises without its sink or without the head. These are the head-level measures of The Attention Sink
as Native MoE, on fixed windows.

The sink is the extra key or the sink token if the recipe has one, else the first token. A head is a
head of the output: a differential recipe's weights are the difference of its views. Maps are
(layers, heads).
"""

import math
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
    progress,
    table,
    watch,
    whole_numbers,
    window_batches,
)
from evals.measures import Probe
from evals.pictures import SHARES, draw_rows, heat_map, signed

MEASURES = {  # name: its meaning, printed under the table
    "alpha_sink": "weight on the sink, mean over rows (eq. 5)",
    "alpha_local": "weight on the last {local} keys, mean over rows with that many keys (eq. 6; our choice of {local})",
    "sigma2": "variance of a row's absolute weights around an even spread, after they are scaled to sum to 1 (eq. 7)",
    "importance": "weight on all other keys; for a gated head, its mean gate (eq. 8)",
}
FIGURES = {  # over all heads
    "depth_rank_correlation": "rank correlation of a layer's depth and its mean weight on the sink",
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
    T, machine = run.window(args.length), run.machine
    if args.local > T:
        raise ValueError(
            f"--local={args.local} does not fit into windows of {T} tokens: lower it, or raise --length"
        )
    if args.cost and T <= OTHER:
        raise ValueError(f"--cost needs windows of more than {OTHER} tokens: raise --length")
    maps, windows = [], []  # for the run's data set, and for --against
    for folder, _ in [run.data, *([run.data_of(args.against)] if args.against else [])]:
        split = tokens.Tokens(folder, args.split)
        # (N, T + 1)
        (rows,) = window_batches(run.model, split, machine, T, args.windows, args.windows)
        probes = [Probe(local=args.local) for _ in run.model.transformer.h]
        for batch in progress(rows.split(args.batch_size), machine.main):
            watch(
                run.model,
                lambda layer, *inputs, probes=probes: probes[layer].see(*inputs),
                batch[:, :-1],
                machine,
            )
        results = [probe.result() for probe in probes]
        maps.append({name: torch.stack([result[name] for result in results]) for name in MEASURES})
        windows.append(rows)
    outside = run.model.sink_tokens or any(
        block.attn.has_extra_key for block in run.model.transformer.h
    )
    numbers = run.reads(args.split, len(windows[0]), T) | {
        "local": args.local,
        "alpha_sink_is": "extra" if outside else "sink",
        **summary(maps[0], args.threshold),
    }
    alpha = maps[0]["alpha_sink"]
    if args.against:
        numbers["against"] = compared(alpha, maps[1]["alpha_sink"], Path(args.against).name)
    if args.cost:
        removed = ablations(alpha, args.threshold, whole_numbers(args.prune))
        numbers["cost"] = costs(removed, run.model, windows[0], machine, args.batch_size) | {
            "threshold": args.threshold,
            "dormant": numbers["dormant"],
        }
    return numbers, in_words(numbers)


def summary(maps, threshold):
    """The maps as lists, and figures over all heads. threshold: a head with a larger alpha_sink is
    dormant."""
    alpha, importance = maps["alpha_sink"], maps["importance"]
    depth = torch.arange(len(alpha), dtype=torch.float64)
    early = max(1, round(len(alpha) / 5))  # a fifth of the layers
    return {
        "maps": {
            name: [[round(value, 6) for value in layer] for layer in values.tolist()]
            for name, values in maps.items()
        },
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
    found = (
        values.std(correction=0) / values.mean()
        if values.numel() > 1
        else values.new_tensor(math.nan)
    )
    return found.item() if found.isfinite() else None


def correlation(a, b):
    """Pearson's correlation of two maps; None if it is undefined, like that with a constant."""
    found = (
        torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        if a.numel() > 1
        else a.new_tensor(math.nan)
    )
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
    maps, threshold, lines = numbers["maps"], numbers["threshold"], {}
    # evals/probe.py has the same number under another key, whose printed name is used here
    names = {name: name for name in MEASURES} | {"alpha_sink": numbers["alpha_sink_is"]}
    for layer, alpha in enumerate(maps["alpha_sink"]):
        dormant = sum(sink > threshold for sink in alpha)
        lines[str(layer)] = {names[name]: fmean(values[layer]) for name, values in maps.items()} | {
            "dormant": f"{dormant} of {len(alpha)}"
        }
    lines["mean"] = {names[name]: value for name, value in numbers["mean"].items()} | {
        "dormant": f"{numbers['dormant']:.0%}"
    }
    columns = {names[name]: meaning.format(**numbers) for name, meaning in MEASURES.items()} | {
        "dormant": f"heads whose weight on the sink is above {threshold:g}"
    }
    figures = [
        [f"{name}, {meaning}".format(**numbers), numbers[name]]
        for name, meaning in FIGURES.items()
        if numbers[name] is not None
    ]
    if "against" in numbers:
        figures += [
            [
                f"{name} of the weights on the sink, here and on {numbers['against']['dataset']}",
                numbers["against"][name],
            ]
            for name in ("correlation", "mean_difference")
        ]
    texts = [
        first_line(numbers),
        explained(lines, columns, "layer"),
        table(figures, ["over all heads", ""]),
    ]
    if "cost" in numbers:
        cost = numbers["cost"]
        rows = [
            [
                line["what"],
                line["where"],
                str(line["heads"]),
                *(line[name] for name in ("loss_change", "standard_error", "over_draws")),
            ]
            for line in cost["changes"]
        ]
        header = [
            "taken away",
            "in the heads",
            "heads",
            "loss change",
            "standard error",
            "over draws",
        ]
        texts += [f"loss as it is: {cost['loss']:.4f} nats per token", table(rows, header)]
        if not cost["dormant"]:
            texts[-1] += f"\nfirst value zero in dormant heads: no head is above {threshold:g}"
    return "\n\n".join(texts)


def draw(path, found):
    """Draw maps. One run: alpha_sink, alpha_local and sigma2 (figures 4, 5, 10, 11), with --against
    alpha_sink on both data sets and the difference (figure 6), with --cost the costs. Several runs:
    their alpha_sink (figure 12)."""
    panels = {
        f"{place}\nmean $\\alpha_{{sink}}$ {numbers['mean']['alpha_sink']:.2f}": (
            numbers["maps"]["alpha_sink"],
            SHARES,
        )
        for place, numbers in found.items()
    }
    first, cost = next(iter(found.values())), None
    if len(found) == 1:
        cost, against, maps = first.get("cost"), first.get("against"), first["maps"]
        panels = {"weight on the sink\n$\\alpha_{sink}$": (maps["alpha_sink"], SHARES)}
        if against:
            panels |= {
                f"the same on\n{against['dataset']}": (against["alpha_sink"], SHARES),
                "difference\n(first minus second)": (against["difference"], signed(0.5)),
            }
        panels |= {
            f"on the last {first['local']} keys\n$\\alpha_{{local}}$": (
                maps["alpha_local"],
                SHARES,
            ),
            "how uneven rows are\n$\\sigma^2$": (maps["sigma2"], SHARES | {"vmax": None}),
        }
    row = [
        partial(heat_map, cells=cells, colours=colours, title=title, bar="")
        for title, (cells, colours) in panels.items()
    ]
    draw_rows(path, {"": row + [partial(draw_costs, cost=cost)] * bool(cost)})
