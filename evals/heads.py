"""The role of each head: how dormant, local, global and important it is, and how much the loss rises without its sink
or without the head. These are the head-level measures of The Attention Sink as Native MoE, on fixed windows.

The sink is the extra key or the sink token if the recipe has one, else the first token. A head is a head of the output:
a differential recipe's weights are the difference of its views. The weights are read block by block, so memory is
linear in T. Maps are (layers, heads).
"""
from dataclasses import dataclass
from pathlib import Path

import torch

from axes.outputs import sigmoid_gate
from axes.sight import visible
from common.flags import at_least, knob
from data import tokens
from evals.ablate import ablations, cost_table, costs, draw_costs
from evals.instrument import (
    LENGTH,
    first_line,
    legend,
    progress,
    table,
    watch,
    whole_numbers,
    window_batches,
)
from evals.measures import has_outside, rows_of
from evals.pictures import SHARES, heat_map, pyplot, save_figure, signed

MEASURES = {                                    # name: its meaning, printed under the table
    "alpha_sink": "weight on the first token, or on the extra key if there is one; mean over rows (eq. 5)",
    "alpha_local": "weight on the last {local} keys, mean over rows with that many keys (eq. 6; our choice of {local})",
    "sigma2": "variance of a row's absolute weights around an even spread, after they are scaled to sum to 1 (eq. 7)",
    "importance": "weight on all other keys, 1 - alpha_sink if rows sum to 1; for a gated head, its mean gate (eq. 8)",
}


@dataclass
class Heads:
    """Flags of heads"""
    split: str = knob("val", "split of the data set", ("train", "val"))
    windows: int = knob(16, "fixed windows, spread evenly")
    length: int = knob(0, LENGTH)
    batch_size: int = knob(4, "windows per forward pass")
    local: int = knob(8, "alpha_local is the weight on this number of last keys")
    threshold: float = knob(0.5, "a head is dormant if its alpha_sink is above this")
    early: int = knob(-1, "compute the variation of importance again without this number of first layers; -1: "
                          "a fifth of all layers (the paper: 7 of 36 in Qwen3-8B)")
    against: str = knob("", "also measure alpha_sink on this data set, to see whether the same heads are dormant")
    cost: bool = knob(False, "also measure how much each ablation raises the loss, in some 30 passes over the windows")
    prune: str = knob("5,14,30", "with --cost: percentages of heads to silence")
    other: int = knob(8, "with --cost: token whose value is zeroed, for comparison with the first token's")
    draws: int = knob(3, "with --cost: number of random draws of heads")
    seed: int = knob(1337, "with --cost: seed of these draws")

    def __post_init__(self):
        at_least(self, windows=1, length=0, batch_size=1, local=1, early=-1, other=1, draws=1, seed=0)
        if max(whole_numbers(self.prune, "prune")) > 100:
            raise ValueError(f"--prune={self.prune} has a percentage above 100: give percentages of the heads")


def command(args, run):
    """Measure how dormant, local, global and important every head is; with --cost, also how much the loss rises without
    its sink or without the head."""
    T = run.window(args.length)
    if max(args.local, args.other + 1) > T:
        raise ValueError(f"--local={args.local} and --other={args.other} do not fit into windows of {T} tokens: "
                         "lower them, or raise --length")
    rows = windows_of(*run.data, T, args, run)
    elsewhere = windows_of(*other_data(args, run), T, args, run) if args.against else None
    maps = measure(run.model, rows, run.machine, args.batch_size, args.local, bar=True)
    numbers = run.reads(args.split, len(rows), T) | {"local": args.local} | summary(maps, args)
    if args.against:
        there = measure(run.model, elsewhere, run.machine, args.batch_size, args.local, bar=True)
        numbers["against"] = compared(maps["alpha_sink"], there["alpha_sink"], Path(args.against).name)
    if args.cost:
        things = ablations(maps["alpha_sink"], args.threshold, whole_numbers(args.prune), args.other, args.draws,
                           args.seed)
        numbers["cost"] = costs(things, run.model, rows, run.machine, args.batch_size) | {
            "threshold": args.threshold, "dormant": numbers["dormant"]}
    return numbers, report(numbers)


def other_data(args, run):
    """The data set --against in the run's tokenizer, in the form of run.data."""
    folder, meta = tokens.data_for(run.out_dir, args.against, run.machine)
    tokens.check_vocabulary(run.model.config, meta, folder)
    return folder, meta


def windows_of(folder, meta, T, args, run):
    """The fixed windows of a data set, (N, T + 1)."""
    rows, = window_batches(run.model, tokens.Tokens(folder, args.split), run.machine, T, args.windows, args.windows,
                           meta.get("stride", 1))
    return rows


# ---------------------------------------------------------------------------------------------------- the maps


def measure(model, rows, machine, batch_size, local, bar=False):
    """The MEASURES of every head on windows rows (N, T + 1): {measure: (layers, heads) float64}."""
    layers = [HeadSums(local) for _ in model.transformer.h]
    for some in progress(rows.split(batch_size), bar and machine.main):
        watch(model, lambda layer, *inputs: layers[layer].see(*inputs), some[:, :-1], machine)
    results = [sums.result() for sums in layers]
    return {name: torch.stack([result[name] for result in results]) for name in MEASURES}


class HeadSums:
    """Sums of one layer's measures, per head, over the rows of all sequences that it sees."""

    def __init__(self, local):
        self.local, self.sums = local, {}       # {name: (H,) float64}

    def add(self, name, value):
        """Add value (B, H, rows) to the sum of each head, and count the rows."""
        total, count = self.sums.get(name, (0, 0))
        self.sums[name] = total + value.double().sum((0, 2)).cpu(), count + value.shape[0] * value.shape[2]

    def see(self, module, q, k, v, x, table=None):
        """Add one batch of a layer's inputs, as `watch` passes them."""
        for i, w in rows_of(module, module.weight_blocks(q, k, x, table)):
            self.see_rows(i, w, module)
        if module.choices["gate"].gated is sigmoid_gate:                # a silu is not between 0 and 1
            ones = x.new_ones(len(x), module.heads, x.shape[1], module.shapes["v"][1])
            self.add("gate", module.choices["gate"].gated(module, ones, x)[:, :, module.ahead:].mean(-1))

    def see_rows(self, i, w, module):
        """Add one block of rows, at positions i (R,), with the weights w (B, H, R, T or 1 + T)."""
        sink, elsewhere = w[..., 0], w[..., 1:].abs().sum(-1)           # the sink is always the first column
        w = w[..., 1:] if has_outside(module) else w
        j = torch.arange(w.shape[3], device=w.device)
        seen = visible(i[:, None] + module.ahead, j + module.ahead, module.sight)             # (R, T)
        n = seen.sum(-1)
        share = w.abs() / (w.abs().sum(-1, keepdim=True) + 1e-8)        # a row may be empty
        away = (share - 1 / n[:, None]) * seen  # distance from an even spread
        near = w * (j > i[:, None] - self.local)
        self.add("alpha_sink", sink)
        self.add("alpha_local", near.sum(-1)[..., i >= self.local - 1])
        self.add("sigma2", away.square().sum(-1) / n)
        self.add("importance", elsewhere)

    def result(self):
        """{measure: (H,) float64}."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        return means | {"importance": means.get("gate", means["importance"])}


def summary(maps, args):
    """The maps as lists, and figures over all heads."""
    alpha, importance = maps["alpha_sink"], maps["importance"]
    depth = torch.arange(len(alpha), dtype=torch.float64)
    early = max(1, round(len(alpha) / 5)) if args.early < 0 else args.early
    return {
        "maps": {name: [[round(value, 6) for value in layer] for layer in values.tolist()]
                 for name, values in maps.items()},
        "mean": {name: values.mean().item() for name, values in maps.items()},
        "threshold": args.threshold, "dormant": (alpha > args.threshold).double().mean().item(),
        "depth_rank_correlation": correlation(depth, alpha.mean(1).argsort().argsort().double()),
        "importance_cv": variation(importance), "early": early, "importance_cv_late": variation(importance[early:])}


def variation(values):
    """Coefficient of variation: standard deviation over mean (eq. 8). The paper does not define its standard deviation;
    ours divides by n, as the balancing loss in training does."""
    return finite(values.std(correction=0) / values.mean()) if values.numel() > 1 else None


def correlation(a, b):
    """Pearson's correlation of two maps."""
    return finite(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) if a.numel() > 1 else None


def finite(value):
    """A tensor as a number, or None if it is undefined, like the correlation with a constant."""
    return value.item() if value.isfinite() else None


def compared(here, there, dataset):
    """Compare alpha_sink on two data sets (figure 6): the second map, the first minus the second, their similarity."""
    return {"dataset": dataset, "alpha_sink": there.tolist(), "difference": (here - there).tolist(),
            "correlation": correlation(here, there), "mean_difference": (here - there).abs().mean().item()}


# -------------------------------------------------------------------------------------------------- texts, the picture


def report(numbers):
    """Everything about one run: a row for each layer, means over its heads."""
    maps, most = {name: torch.tensor(values) for name, values in numbers["maps"].items()}, numbers["threshold"]
    heads = maps["alpha_sink"].shape[1]
    rows = [[str(layer), *(values[layer].mean().item() for values in maps.values()),
             f"{(maps['alpha_sink'][layer] > most).sum()} of {heads}"] for layer in range(len(maps["alpha_sink"]))]
    rows += [["mean", *numbers["mean"].values(), f"{numbers['dormant']:.0%}"]]
    meanings = {**MEASURES, "dormant": "heads with alpha_sink > {threshold}"}
    parts = [first_line(numbers), table(rows, ["layer", *meanings]),
             legend({name: meaning.format(**numbers) for name, meaning in meanings.items()}),
             side_by_side([""], [figures(numbers)])]
    return "\n\n".join(parts + ([cost_table(numbers["cost"])] if "cost" in numbers else []))


def figures(numbers):
    """The figures of a run over all heads, {label: number}."""
    found = {f"mean {name}": value for name, value in numbers["mean"].items()}
    found |= {"share of dormant heads": numbers["dormant"],
              "rank correlation of depth and alpha_sink": numbers["depth_rank_correlation"],
              "importance, deviation over mean": numbers["importance_cv"],
              "the same without the early layers": numbers["importance_cv_late"]}
    if "against" in numbers:
        found |= {f"alpha_sink on {numbers['against']['dataset']}: correlation": numbers["against"]["correlation"],
                  "and mean absolute difference": numbers["against"]["mean_difference"]}
    return found


def side_by_side(places, columns):
    """A line for each figure, a column for each run."""
    labels = ["over all heads", *columns[0]]
    header, *rows = (label.ljust(max(map(len, labels))) for label in labels)            # left-aligned
    return table([[row, *(column[row.rstrip()] for column in columns)] for row in rows], [header, *places])


def tell(args, found):
    """The report of one run; of several runs the figures side by side, and the costs of each."""
    if len(found) == 1:
        return report(*found.values())
    texts = list(dict.fromkeys(map(first_line, found.values())))
    texts += [side_by_side(found, [figures(numbers) for numbers in found.values()])]
    texts += [f"{place}: {cost_table(numbers['cost'])}" for place, numbers in found.items() if args.cost]
    return "\n\n".join(texts)


def draw(path, found):
    """Draw maps. One run: alpha_sink, alpha_local and sigma2 (figures 4, 5, 10, 11); with --against alpha_sink on both
    data sets and the difference (figure 6); with --cost the increases of the loss. Several runs: alpha_sink side by
    side (figure 12)."""
    alphas = [numbers["maps"]["alpha_sink"] for numbers in found.values()]
    first, *others = found.values()
    cost = None if others else first.get("cost")
    panels = panels_of(first)
    if others:
        panels = [(f"{Path(place).name}\nmean $\\alpha_{{sink}}$ {numbers['mean']['alpha_sink']:.2f}",
                   numbers["maps"]["alpha_sink"], SHARES) for place, numbers in found.items()]
    widths = [1.5 + 0.16 * max(len(alpha[0]) for alpha in alphas)] * len(panels) + [4.5] * bool(cost)
    height = max(1.6 + 0.15 * max(map(len, alphas)), 4.2 * bool(cost))
    figure, axes = pyplot().subplots(1, len(widths), squeeze=False, width_ratios=widths, layout="constrained",
                                     figsize=(sum(widths), height))
    for ax, (title, cells, colours) in zip(axes[0], panels, strict=False):              # the last may be for costs
        image = heat_map(ax, cells, colours, ylabel="layer" if ax is axes[0][0] else "")
        figure.colorbar(image, ax=ax, shrink=0.8)
        ax.set_title(title, fontsize=10)
    if cost:
        draw_costs(axes[0][-1], cost)
    save_figure(figure, path)


def panels_of(numbers):
    """The maps to draw, [(title, cells, colours)]."""
    maps, against = numbers["maps"], numbers.get("against")
    panels = [("weight on the sink\n$\\alpha_{sink}$", maps["alpha_sink"], SHARES),
              (f"on the last {numbers['local']} keys\n$\\alpha_{{local}}$", maps["alpha_local"], SHARES),
              ("how uneven rows are\n$\\sigma^2$", maps["sigma2"], SHARES | {"vmax": None})]
    if against:
        panels[1:1] = [(f"the same on\n{against['dataset']}", against["alpha_sink"], SHARES),
                       ("difference\n(first minus second)", against["difference"], signed(0.5))]
    return panels
