"""The parameters that attention has learned outside its linear layers, by layer and head, next to their initial values.

These are Lazy Attention's figures 4, 5, 8, 9 and 10, for every recipe: thresholds, distance biases, sink logits, norms
of key and value biases, lambdas, gates, temperatures, and how much a state keeps and writes.

The instrument finds a layer's tensors by itself: all that belong to no linear layer and no norm. It shows scalars as
they are and vectors by their norms. Some raw tensors say little, such as the four vectors of a lambda or the weights of
a gate. For these it shows the number that the layer computes from them.
"""
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import torch
from torch import nn

from common.flags import at_least, knob
from evals.instrument import LENGTH, legend, table, watch, window_batches
from evals.pictures import heat_map, pyplot, save_figure, signed
from model import GPT

MEANINGS = {                                    # name: its meaning, printed below the tables
    "tau": "tau / n is subtracted from each softmax weight, and what falls below zero becomes zero; Lazy Attention's "
           "figures 5 and 10 plot -tau",
    "beta": "scores below beta sqrt(2 log(n / kappa) / d) have weight zero",
    "sigma": "the score is multiplied by sigma log n",
    "scale_beta": "the score is multiplied by 1 + scale_beta log(n + 1)^scale_gamma",
    "scale_gamma": "the exponent of log(n + 1) in that factor",
    "sink_logit": "score of a key outside the sequence",
    "|sink_key|": "norm of the key outside the sequence",
    "|sink_value|": "norm of the value of the key outside the sequence",
    "|value_bias|": "norm of the vector added to the output",
    "|norm_gate|": "norm of the vector that gates the normed output",
    "dt_bias": "a token's time step is softplus(dt_bias), from 0.001 to 0.1 at first",
    "A_log": "the logarithm of the rate at which a head's state fades",
    "forget_bias": "a head's state keeps sigmoid(forget_bias) at each token, before the token's own contribution",
    "skip": "factor on a token's own value, which is added to the state's output",
    "|memory|": "norm of the memory matrix that every sequence begins with",
    "|memory_bias|": "norm of the bias of that memory",
    "|memory_in|": "norm of the first matrix of the memory that every sequence begins with",
    "|memory_out|": "norm of its second matrix",
    "|inner_scale|": "norm of the weights of the norm on the memory's output",
    "|inner_bias|": "norm of the biases of that norm",
    "|place|": "norm of the learned correction to 1, 1/2, 1/3, ..., the shares of a chunk's steps that its tokens read",
    "|centroids|": "norm of the centroid of each Focus group; the columns are groups, not heads",
    "|potential|": "norm of the vector that Focus subtracts from its groups' scores to keep the groups even; training "
                   "changes it without a gradient",
    "|planes|": "norm of each channel of MagicPIG's random directions; the columns are channels, not heads",
    "gate_scale": "Focus' gates are sigmoid(gate_scale (g_i . g_j - gate_offset))",
    "gate_offset": "the similarity g_i . g_j of two tokens at which their gate is 1/2",
    "dex_lambda": "factor on Dex's correction, which is subtracted",
    "alpha": "entmax's alpha: 1 is softmax, 2 sparsemax",
    "sharpness": "factor on the scores of a row of block_size keys",
    "lambda": "factor on the second view, which is subtracted; mean over tokens if it depends on them",
    "kept": "share of its state that a head keeps at each token; mean over tokens, and over channels if they differ",
    "written": "factor on a token's value when a head writes it; for ttt its rate times the width, for titans times "
               "the square root of the width; mean over tokens",
    "momentum": "share of its last step that a learning memory repeats; mean over tokens",
    "slowed": "share of tokens at which a learning memory lowers its rate, so that its step does not overshoot",
    "gate": "the gate on the output: from 0 (closed) to 1 (open) unless it is a silu; mean over tokens",
}

BIAS = {"distance bias": "added to the score at each distance, mean over heads; Lazy Attention's b is minus this",
        "decay": "its mean at distances 1 to 8, minus its mean beyond a quarter of all distances"}

RANGES = {                                      # of distances, from Lazy Attention's section 5.3
    "0": (0, 0), "1": (1, 1), "2-10": (2, 10), "11-100": (11, 100), ">100": (101, None)}


@dataclass
class Params:
    """Flags of params"""
    split: str = knob("val", "split for gates and lambdas that depend on the text",
                      ("train", "val"))
    windows: int = knob(8, "fixed windows of the split, spread evenly")
    length: int = knob(0, LENGTH)
    batch_size: int = knob(4, "windows per forward pass")

    def __post_init__(self):
        at_least(self, windows=1, length=0, batch_size=1)


def command(args, run):
    """The parameters that attention has learned outside its linear layers, next to their initial values."""
    modules = [block.attn for block in run.model.transformer.h]
    seed = run.meta["knobs"].get("seed", 1337)
    # the initial values of attention do not depend on the MLP, which can be large
    config = dataclasses.replace(run.model.config, mlp="relu", n_inner=1)
    fresh = [block.attn for block in GPT(config, seed).transformer.h] if learns(modules) else modules
    now = figures_on_text(run, args) if depends_on_text(modules) else [figures(module) for module in modules]
    start, kept = [figures(module) for module in fresh], dict(modules[0].named_buffers(recurse=False))
    numbers = {
        "attn": run.model.config.attn,
        "figures": {name: {"now": [rounded(layer[name]) for layer in now],
                           "start": [rounded(layer[name]) for layer in start],
                           "learned": name.strip("|") not in kept} for name in now[0]},
        "distance_bias": None if modules[0].distance() is None else {
            "now": [rounded(bias_by_distance(module)) for module in modules],
            "start": [rounded(bias_by_distance(module)) for module in fresh]}}
    return numbers, tell(args, {"": numbers})


# ------------------------------------------------------------------------------------------------------ one layer


# tensors that are not shown: MADE shows the number that the layer computes from them, or they are not learned
BEHIND = ("conv", "theta", "lambda_logit", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "progress", "steps",
          "moves", "directions", "means")


def figures(module, x=None):
    """Everything that one layer has learned: {name: (heads,)}, or {name: (1,)} if all heads share it.

    x (B, T, C): the layer's inputs, for figures that depend on them; the default is one input of zeros."""
    if x is None:
        x = module.c_attn.weight.new_zeros(1, 1, module.config.n_embd, dtype=torch.float32)
    bias = module.distance() or ()
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    own = dict(per_head(module, name, p) for name, p in held
               if name not in BEHIND and not any(p is part for part in bias))
    made = {name: make(module, x) for name, make in MADE.items()}
    return own | {name: values for name, values in made.items() if values is not None}


def per_head(module, name, p):
    """(name, (heads,)) of a tensor: scalars as they are, vectors by their norms. A vector that a mixer adds for its
    whole layer counts as a vector, even if its length is the number of heads."""
    if p.numel() == 1:
        return name, p.reshape(1)
    if p.dim() == 1 and len(p) in (module.heads, module.score_heads) and name not in module.added:
        return name, p
    return f"|{name}|", p.flatten(1).norm(dim=1) if p.dim() > 1 else p.norm()[None]


def alpha(module, x):
    """The alpha of entmax, if it is learned. Its row input is the power 1 / (alpha - 1)."""
    if module.args.get("alpha") == "learned":
        return 1 + 1 / module.rule.row_input(module, x.new_ones(1)).flatten()


def sharpness(module, x):
    """The factor on the scores of a row that sees block_size keys (SSMax, ASEntmax)."""
    factor = module.choices["scale"].factor
    return factor and factor(module, x.new_full((1,), module.config.block_size)).flatten()


def lambda_of(module, x):
    """The factor on the second view. `mix` returns one number, one for each head, or one for each head and token."""
    mix = module.choices["diff"].mix
    return None if mix is None else (mix(module, x) + x.new_zeros(1, module.heads, 1, 1)).mean((0, 2, 3))


def gate(module, x):
    """The mean gate of each head. An output of ones becomes the gate itself."""
    if hasattr(module, "gate"):
        ones = x.new_ones(len(x), module.heads, x.shape[1], 1)
        return module.choices["gate"].gated(module, ones, x).mean((0, 2, 3))


def kept(module, x):
    """The factor on a state at each token, from the logarithms that `forget` returns."""
    forget = module.choices.get("forget")
    return forget.log_kept(module, x).exp().mean((0, 2, 3)) if forget and forget.log_kept else None


def momentum(module, x):
    """The eta of Titans: the share of its last step that the memory repeats."""
    return module.momentum(x).sigmoid().mean((0, 1)) if hasattr(module, "momentum") else None


def slowed(module, x):
    """The share of tokens at which a memory lowers its rate; 0 for an input of zeros."""
    return module.slowed(x) if hasattr(module, "slowed") else None


def written(module, x):
    """The factor on a token's value: Mamba2's time step, the delta rule's beta, the rate of a learning memory."""
    write = module.choices.get("write")
    return write.amount(module, x).mean((0, 2, 3)) if write and write.amount else None


MADE = {"alpha": alpha, "sharpness": sharpness, "lambda": lambda_of, "kept": kept, "written": written,
        "momentum": momentum, "slowed": slowed, "gate": gate}           # module, x -> (heads,), or None


def bias_by_distance(module):
    """The bias on the score at distances 0 to W - 1, (score heads, W). W is the smaller of bias_range and
    block_size. The paper's b (Lazy Attention, eq. 4) is minus this."""
    W = min(module.config.block_size, module.config.bias_range)
    return module.distance().bias(1, W)[:, 0].flip(-1)                  # the last row sees distances W - 1 .. 0


# ------------------------------------------------------------------------------------------------------ all layers


def learns(modules):
    return bool(figures(modules[0])) or modules[0].distance() is not None


def depends_on_text(modules):
    """Does a linear layer besides the projections compute a gate or a lambda from the layer's input?"""
    return any(name not in ("c_attn", "c_proj") and any(isinstance(part, nn.Linear) for part in module.modules())
               for name, module in modules[0].named_children())


def figures_on_text(run, args):
    """The figures of every layer, [{name: (heads,)}]: means over the tokens of fixed windows."""
    sums, windows = [{} for _ in run.model.transformer.h], 0

    def see(layer, module, q, k, v, x, table):
        for name, values in figures(module, x[:, module.ahead:]).items():
            sums[layer][name] = sums[layer].get(name, 0) + len(x) * values.double()

    for rows in window_batches(run.model, run.split(args.split), run.machine, run.window(args.length), args.windows,
                               args.batch_size, run.stride, bar=True):
        watch(run.model, see, rows[:, :-1], run.machine)
        windows += len(rows)
    return [{name: total / windows for name, total in layer.items()} for layer in sums]


def rounded(values):
    """A tensor as lists of numbers."""
    return torch.round(values.detach().double().cpu(), decimals=6).tolist()


# ------------------------------------------------------------------------------------------------------------ as text


def tell(args, found):
    """The tables of each run, and below them the meanings of the names."""
    texts = []
    for place, numbers in found.items():
        texts += [place] if len(found) > 1 else []
        texts += tables(numbers) or [f"--attn={numbers['attn']} learns nothing in its attention besides the linear "
                                     "layers: look at a run of elastic, lazy, sink, gated or diff"]
    meant = {name: MEANINGS[name] for numbers in found.values() for name in numbers["figures"] if name in MEANINGS}
    if any(numbers["distance_bias"] for numbers in found.values()):
        meant |= BIAS
    return "\n\n".join(texts + ([legend(meant)] if meant else []))


def tables(numbers):
    """A table for each figure, layers (down) by heads (across), and one for the distance bias."""
    bias = numbers["distance_bias"]
    return ([figure_table(name, **figure) for name, figure in numbers["figures"].items()]
            + ([bias_table(**bias)] if bias else []))


def figure_table(name, now, start, learned=True):
    """A table of each head's value, the mean and the standard deviation over heads, and the initial mean."""
    heads, several = len(now[0]), len(now[0]) > 1                       # one column if all heads share the figure
    header = ["layer", *(f"head {h}" for h in range(heads)), "mean", "deviation"] if several else ["layer", "value"]
    rows = [[str(layer), *values, *([fmean(values), pstdev(values)] if several else []), fmean(first)]
            for layer, (values, first) in enumerate(zip(now, start, strict=True))]
    return f"{name}{'' if learned else ' (kept as it was)'}\n{table(rows, [*header, 'at first'])}"


def bias_table(now, start):
    """A table of the bias by layer: means over heads and ranges of distances, and the decrease from near to far."""
    rows = []
    for layer, (curves, first) in enumerate(zip(now, start, strict=True)):
        curve = torch.tensor(curves).mean(0)                            # (W,)
        means = [part_mean(curve, *ends) for ends in RANGES.values()]
        near, far = part_mean(curve, 1, 8), part_mean(curve, len(curve) // 4 + 1, None)
        decay = None if near is None or far is None else near - far
        rows.append([str(layer), *means, decay, torch.tensor(first).mean().item()])
    return "distance bias\n" + table(rows, ["layer", *RANGES, "decay", "at first"])


def part_mean(curve, low, high):
    """The mean of a curve at distances low to high, None if the curve is shorter."""
    part = curve[low:None if high is None else high + 1]
    return part.mean().item() if len(part) else None


# -------------------------------------------------------------------------------------------------------- the picture

ACROSS = 6                                      # panels of the distance bias side by side


def draw(path, found):
    """Draw, for each run, maps of the figures, layers (down) by heads (across), coloured by the change in training; and
    the distance bias, a panel for each layer and a line for each head."""
    plt, shown = pyplot(), []                   # shown: (width, height, a function that draws into a subfigure)
    for place, numbers in found.items():
        title = "" if len(found) == 1 else f"{Path(place).name}: "
        figures, bias = numbers["figures"], numbers["distance_bias"]
        if figures:
            layers = max(len(figure["now"]) for figure in figures.values())
            shown.append((len(figures) * map_width(figures), 1.4 + 0.3 * layers, partial(draw_figures, title, figures)))
        if bias:
            across, rows = min(ACROSS, len(bias["now"])), -(-len(bias["now"]) // ACROSS)
            shown.append((2.1 * across, 0.9 + 1.7 * rows, partial(draw_bias, title, bias["now"])))
    if not shown:
        raise ValueError(f"nothing to draw: {', '.join(found)} learned nothing outside linear layers, leave out --png")
    widths, heights, drawers = zip(*shown, strict=True)
    width = max(5, *widths)
    figure = plt.figure(figsize=(width, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, draw_into in zip(parts, drawers, strict=True):
        draw_into(part, width)
    save_figure(figure, path)


def map_width(figures):
    """Inches of a map and its colour bar."""
    return 2 + 0.42 * max(len(figure["now"][0]) for figure in figures.values())


def draw_figures(title, figures, part, width):
    """Draw a map for each figure. The numbers are its values, the colours their change: red is above the initial value,
    blue below."""
    axes = part.subplots(1, max(len(figures), int(width / map_width(figures))), squeeze=False)[0]
    for ax, (name, figure) in zip(axes, figures.items(), strict=False):
        now = np.array(figure["now"])           # (layers, heads)
        change = now - np.array(figure["start"])
        part.colorbar(heat_map(ax, change, signed(max(np.abs(change).max(), 1e-6)), now), ax=ax, label="change")
        ax.set_title(f"{title}{name} ({fmean(map(fmean, figure['start'])):.3g} at first)", fontsize=10)
    for ax in axes[len(figures):]:
        ax.set_axis_off()


def draw_bias(title, now, part, width):
    """Draw the biases now (layers, heads, W), a panel for each layer."""
    axes = part.subplots(-(-len(now) // ACROSS), min(ACROSS, len(now)), sharex=True, sharey=True, squeeze=False)
    for layer, (ax, curves) in enumerate(zip(axes.flat, now, strict=False)):
        curves = np.array(curves)               # (heads, W)
        ax.axhline(0, color="0.7", linewidth=0.8)
        ax.plot(curves.T, color="#6baed6", linewidth=0.8)
        ax.plot(curves.mean(0), color="#08306b", linewidth=1.8)
        ax.set_xscale("symlog", linthresh=1)    # includes distance 0
        ax.set_title(f"layer {layer}", fontsize=9)
    for ax in axes.flat[len(now):]:
        ax.set_axis_off()
    part.suptitle(f"{title}bias on the score, by distance: heads, and their mean (dark)", fontsize=10)
    part.supxlabel("distance", fontsize=9)
