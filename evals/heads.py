"""The role of each head: how dormant, local, global and important it is, and how much the loss rises without its sink
or without the head. These are the head-level measures of The Attention Sink as Native MoE, on fixed windows.

The sink is the extra key or the sink token if the recipe has one, else the first token. A head is a head of the output:
a differential recipe's weights are the difference of its views. The weights are read block by block, so memory is
linear in T. Maps are (layers, heads).
"""
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from common.flags import at_least, knob
from data import tokens
from evals.ablate import ablations, cost_table, costs, draw_costs
from evals.instrument import Windows, first_line, legend, progress, table, watch, whole_numbers, window_batches
from evals.measures import Probe
from evals.pictures import SHARES, figure_of, heat_map, signed

MEASURES = {                                    # name: its meaning, printed under the table
    "alpha_sink": "weight on the first token, or on the extra key if there is one; mean over rows (eq. 5)",
    "alpha_local": "weight on the last {local} keys, mean over rows with that many keys (eq. 6; our choice of {local})",
    "sigma2": "variance of a row's absolute weights around an even spread, after they are scaled to sum to 1 (eq. 7)",
    "importance": "weight on all other keys, 1 - alpha_sink if rows sum to 1; for a gated head, its mean gate (eq. 8)",
}


@dataclass
class Heads(Windows):
    """Flags of heads"""
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
        super().__post_init__()
        at_least(self, local=1, early=-1, other=1, draws=1, seed=0)
        if max(whole_numbers(self.prune, "prune")) > 100:
            raise ValueError(f"--prune={self.prune} has a percentage above 100: give percentages of the heads")


def command(args, run):
    """Measure how dormant, local, global and important every head is; with --cost, also how much the loss rises without
    its sink or without the head."""
    T = run.window(args.length)
    if max(args.local, args.other + 1) > T:
        raise ValueError(f"--local={args.local} and --other={args.other} do not fit into windows of {T} tokens: "
                         "lower them, or raise --length")
    windows = []                                # of the run's data set, and of --against: (N, T + 1)
    for folder, meta in [run.data, *([run.data_of(args.against)] if args.against else [])]:
        windows += window_batches(run.model, tokens.Tokens(folder, args.split), run.machine, T, args.windows,
                                  args.windows, meta.get("stride", 1))
    maps, *there = [measure(run.model, rows, run.machine, args.batch_size, args.local) for rows in windows]
    rows = windows[0]
    numbers = run.reads(args.split, len(rows), T) | {"local": args.local} | summary(maps, args)
    if args.against:
        numbers["against"] = compared(maps["alpha_sink"], there[0]["alpha_sink"], Path(args.against).name)
    if args.cost:
        removed = ablations(maps["alpha_sink"], args.threshold, whole_numbers(args.prune), args.other, args.draws,
                            args.seed)
        numbers["cost"] = costs(removed, run.model, rows, run.machine, args.batch_size) | {
            "threshold": args.threshold, "dormant": numbers["dormant"]}
    return numbers, tell(args, {"": numbers})


def measure(model, rows, machine, batch_size, local):
    """The MEASURES of every head on windows rows (N, T + 1): {measure: (layers, heads) float64}."""
    probes = [Probe(local=local) for _ in model.transformer.h]
    for some in progress(rows.split(batch_size), machine.main):
        watch(model, lambda layer, *inputs: probes[layer].see(*inputs), some[:, :-1], machine)
    results = [probe.result() for probe in probes]
    return {name: torch.stack([result[name] for result in results]) for name in MEASURES}


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
    """Standard deviation over mean (eq. 8); None if it is undefined. The paper does not define its standard deviation;
    ours divides by n, as the balancing loss in training does."""
    found = values.std(correction=0) / values.mean() if values.numel() > 1 else values.new_tensor(math.nan)
    return found.item() if found.isfinite() else None


def correlation(a, b):
    """Pearson's correlation of two maps; None if it is undefined, like that with a constant."""
    found = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] if a.numel() > 1 else a.new_tensor(math.nan)
    return found.item() if found.isfinite() else None


def compared(here, there, dataset):
    """Compare alpha_sink on two data sets (figure 6): the second map, the first minus the second, their similarity."""
    return {"dataset": dataset, "alpha_sink": there.tolist(), "difference": (here - there).tolist(),
            "correlation": correlation(here, there), "mean_difference": (here - there).abs().mean().item()}


def tell(args, found):
    """For one run, a row for each layer. Then a line for each figure over all heads, with a column for each run, and
    the costs of each run."""
    texts = list(dict.fromkeys(map(first_line, found.values())))
    if len(found) == 1:
        numbers, = found.values()
        maps = {name: torch.tensor(values) for name, values in numbers["maps"].items()}
        alpha, meanings = maps["alpha_sink"], {**MEASURES, "dormant": "heads with alpha_sink > {threshold}"}
        rows = [[str(layer), *(values[layer].mean().item() for values in maps.values()),
                 f"{(heads > numbers['threshold']).sum()} of {len(heads)}"] for layer, heads in enumerate(alpha)]
        rows += [["mean", *numbers["mean"].values(), f"{numbers['dormant']:.0%}"]]
        texts += [table(rows, ["layer", *meanings]),
                  legend({name: meaning.format(**numbers) for name, meaning in meanings.items()})]
    columns = [figures(numbers) for numbers in found.values()]
    width = max(map(len, columns[0]))           # labels are aligned to the left
    texts.append(table([[label.ljust(width), *(column[label] for column in columns)] for label in columns[0]],
                       ["over all heads".ljust(width), *(found if len(found) > 1 else [""])]))
    costs = {place: cost_table(numbers["cost"]) for place, numbers in found.items() if "cost" in numbers}
    return "\n\n".join(texts + [f"{place}: {text}" if len(found) > 1 else text for place, text in costs.items()])


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


def draw(path, found):
    """Draw maps. One run: alpha_sink, alpha_local and sigma2 (figures 4, 5, 10, 11); with --against alpha_sink on both
    data sets and the difference (figure 6); with --cost the increases of the loss. Several runs: alpha_sink side by
    side (figure 12)."""
    alphas = [numbers["maps"]["alpha_sink"] for numbers in found.values()]
    first, *others = found.values()
    cost, against = None if others else first.get("cost"), first.get("against")
    panels = [("weight on the sink\n$\\alpha_{sink}$", first["maps"]["alpha_sink"], SHARES),
              (f"on the last {first['local']} keys\n$\\alpha_{{local}}$", first["maps"]["alpha_local"], SHARES),
              ("how uneven rows are\n$\\sigma^2$", first["maps"]["sigma2"], SHARES | {"vmax": None})]
    if against:
        panels[1:1] = [(f"the same on\n{against['dataset']}", against["alpha_sink"], SHARES),
                       ("difference\n(first minus second)", against["difference"], signed(0.5))]
    if others:
        panels = [(f"{Path(place).name}\nmean $\\alpha_{{sink}}$ {numbers['mean']['alpha_sink']:.2f}",
                   numbers["maps"]["alpha_sink"], SHARES) for place, numbers in found.items()]
    widths = [1.5 + 0.16 * max(len(alpha[0]) for alpha in alphas)] * len(panels) + [4.5] * bool(cost)
    height = max(1.6 + 0.15 * max(map(len, alphas)), 4.2 * bool(cost))
    with figure_of(path, [height], widths) as axes:
        for ax, (title, cells, colours) in zip(axes[0], panels, strict=False):          # the last may be for costs
            image = heat_map(ax, cells, colours, ylabel="layer" if ax is axes[0][0] else "")
            ax.figure.colorbar(image, ax=ax, shrink=0.8)
            ax.set_title(title, fontsize=10)
        if cost:
            draw_costs(axes[0][-1], cost)
