"""The parameters that attention has learned outside its linear layers, by layer and head, next to
their initial values.

These are Lazy Attention's figures 4, 5, 8, 9 and 10, for every recipe: thresholds, distance biases,
sink logits, norms of key and value biases, lambdas, gates, temperatures, and how much a state keeps
and writes.

The instrument finds a layer's tensors by itself: all that belong to no linear layer and no norm. It
shows scalars as they are and vectors by their norms. For a lambda or a gate it shows the number
that the layer computes from them.
"""

import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev

import numpy as np
import torch
from torch import nn

from common.flags import knob
from evals.instrument import Windows, batches, legend, table, watch
from evals.measures import gate_of
from evals.pictures import GREY, draw_rows, frame, heat_map, signed
from model import GPT

MEANINGS = {  # name: its meaning, printed below the tables
    "tau": "tau / n is subtracted from each softmax weight, down to 0 (Lazy Attention plots -tau)",
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
    "|dt_bias|": "norm of the biases of a head's time steps, one for each channel",
    "A_log": "the logarithm of the rate at which a head's state fades",
    "forget_bias": "at an input of 0, a head keeps sigmoid(forget_bias) of its state",
    "skip": "factor on a token's own value, which is added to the state's output",
    "|memory|": "norm of the memory matrix that every sequence begins with",
    "|memory_bias|": "norm of the bias of that memory",
    "|memory_in|": "norm of the first matrix of the memory that every sequence begins with",
    "|memory_out|": "norm of its second matrix",
    "|inner_scale|": "norm of the weights of the norm on the memory's output",
    "|inner_bias|": "norm of the biases of that norm",
    "|place|": "norm of what is added to 1, 1/2, 1/3, ..., the steps of the tokens of a chunk",
    "|centroids|": "norm of each Focus group's centroid; the columns are groups, not heads",
    "|potential|": "norm of the vector that keeps Focus' groups even",
    "|planes|": "norm of MagicPIG's random directions; the columns are channels, not heads",
    "gate_scale": "Focus' gates are sigmoid(gate_scale (g_i . g_j - gate_offset))",
    "gate_offset": "the similarity g_i . g_j of two tokens at which their gate is 1/2",
    "dex_lambda": "factor on Dex's correction, which is subtracted",
    "alpha": "entmax's alpha: 1 is softmax, 2 sparsemax",
    "sharpness": "factor on the scores of a row of block_size keys",
    "lambda": "factor on the second view, which is subtracted; mean over tokens",
    "kept": "share of its state that a head keeps at each token; mean over tokens and channels",
    "written": "factor on a token's value when a head writes it; mean over tokens. Of ttt: its "
    "rate times the width; of titans: its rate times the square root of the width",
    "momentum": "share of its last step that a learning memory repeats; mean over tokens",
    "slowed": "share of tokens at which a learning memory lowers its rate",
    "gate": "the gate on the output: 0 is closed, 1 open (but not of a silu); mean over tokens",
}

BIAS = {
    "distance bias": "added to the score at each distance, mean over heads; Lazy Attention's -b",
    "decay": "its mean at distances 1 to 8, minus its mean beyond a quarter of all distances",
}

RANGES = {  # ranges of distances, from Lazy Attention's section 5.3
    "0": (0, 0),
    "1": (1, 1),
    "2-10": (2, 10),
    "11-100": (11, 100),
    ">100": (101, 10**9),
}


@dataclass
class Params(Windows):
    """Flags of params"""

    windows: int = knob(8, "fixed windows of the split, spread evenly", least=1)


def command(args, run):
    """The parameters that attention has learned outside its linear layers, next to their initial
    values."""
    modules = [block.attn for block in run.model.transformer.h]
    # the initial values of attention do not depend on the MLP, which can be large
    config = dataclasses.replace(run.model.config, mlp="relu", n_inner=1)
    fresh = [block.attn for block in GPT(config, run.meta["knobs"].get("seed", 1337)).transformer.h]
    start = list(map(figures, fresh))
    now = list(map(figures, modules))
    # one more linear layer than c_attn and c_proj: it computes a gate or a lambda from the text
    if any(sum(isinstance(part, nn.Linear) for part in module.modules()) > 2 for module in modules):
        now = means_over_text(args, run)
    kept = {name for module in modules for name, _ in module.named_buffers(recurse=False)}
    numbers = {"attn": run.model.config.attn, "figures": {}, "distance_bias": None}
    for name in dict.fromkeys(itertools.chain(*now)):
        layers = [layer for layer, found in enumerate(now) if name in found]
        numbers["figures"][name] = {
            "now": [rounded(now[layer][name]) for layer in layers],
            "start": [rounded(start[layer][name]) for layer in layers],
            "layers": layers,
            "learned": name.strip("|") not in kept,
        }
    if biased := [layer for layer, module in enumerate(modules) if module.distance() is not None]:
        numbers["distance_bias"] = {
            "layers": biased,
            "now": [rounded(bias_by_distance(modules[layer])) for layer in biased],
            "start": [rounded(bias_by_distance(fresh[layer])) for layer in biased],
        }
    return numbers, in_words(numbers)


def means_over_text(args, run):
    """The figures of each layer, means over the windows of text."""
    totals, windows = [Counter() for _ in run.model.transformer.h], 0

    def see(layer, module, q, k, v, x, table):
        for name, value in figures(module, x[:, module.sink_tokens :]).items():
            totals[layer][name] += len(x) * value.double()

    for rows in batches(run, args, run.window(args.length)):
        watch(run.model, see, rows[:, :-1], run.machine)
        windows += len(rows)
    return [{name: total / windows for name, total in layer.items()} for layer in totals]


# tensors that are not shown: `figures` shows the number that the layer computes from them, or they
# are not learned
HIDDEN = """
    conv theta lambda_logit lambda_q1 lambda_k1 lambda_q2 lambda_k2
    progress steps moves directions means
""".split()


def figures(module, x=None):
    """Everything that one layer has learned: {name: (heads,)}, or {name: (1,)} if all heads share
    it. Scalars are shown as they are, vectors by their norms. A vector that a mixer adds for its
    whole layer counts as a vector, even if its length is the number of heads. Figures that depend
    on the layer's inputs x (B, T, C; default: zeros) are means."""
    if x is None:
        x = module.c_attn.weight.new_zeros(1, 1, module.config.n_embd, dtype=torch.float32)
    found, bias, ones = {}, module.distance() or (), x.new_ones(1)
    for name, p in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name in HIDDEN or any(p is part for part in bias):
            continue
        if p.numel() == 1:
            found[name] = p.reshape(1)
        elif p.dim() > 1:
            found[f"|{name}|"] = p.flatten(1).norm(dim=1)
        elif len(p) in (module.heads, module.score_heads) and name not in module.added:
            found[name] = p
        else:
            found[f"|{name}|"] = p.norm()[None]
    if module.args.get("alpha") == "learned":  # its row input is the power 1 / (alpha - 1)
        found["alpha"] = 1 + 1 / module.rule.row_input(module, ones).flatten()
    if module.score_factor:
        found["sharpness"] = module.score_factor(module.config.block_size * ones).flatten()
    # one number, one for each head, or one for each head and token
    if module.config.diff != "none":
        mix = module.mix(x) + x.new_zeros(1, module.heads, 1, 1)
        found["lambda"] = mix.mean((0, 2, 3))
    if getattr(module, "log_forget", None):
        found["kept"] = module.log_forget(x).exp().mean((0, 2, 3))
    # Mamba2's time step, the delta rule's beta, or a rate
    if getattr(module, "write_factor", None):
        found["written"] = module.write_factor(x).mean((0, 2, 3))
    if hasattr(module, "momentum"):  # the eta of Titans
        found["momentum"] = module.momentum(x).sigmoid().mean((0, 1))
    if getattr(module.rule, "slowed", None):
        found["slowed"] = module.slowed(x)
    if hasattr(module, "gate"):
        found["gate"] = gate_of(module, x).mean((0, 2, 3))
    return found


def bias_by_distance(module):
    """The bias on the score at distances 0 to W - 1, (score heads, W). W is the smaller of
    bias_range and block_size. The paper's b (Lazy Attention, eq. 4) is minus this."""
    W = min(module.config.block_size, module.config.bias_range)
    return module.distance().bias(1, W)[:, 0].flip(-1)  # the last row sees distances W - 1 .. 0


def rounded(values):
    """A tensor as lists of numbers."""
    return torch.round(values.detach().double().cpu(), decimals=6).tolist()


def in_words(numbers):
    """A table for each figure, layers (down) by heads (across), and one column if all heads share
    it; a table of the distance bias, with means over heads and ranges of distances; the meanings of
    the names."""
    texts, bias = [], numbers["distance_bias"]
    for name, figure in numbers["figures"].items():
        rows, heads = [], len(figure["now"][0])
        header = [f"head {h}" for h in range(heads)] + ["mean", "deviation"]
        for layer, values, first in each_layer(figure):
            spread = [fmean(values), pstdev(values)] if heads > 1 else []
            rows.append([layer, *values, *spread, fmean(first)])
        title = name if figure["learned"] else f"{name} (kept as it was)"
        header = header if heads > 1 else ["value"]
        texts.append(f"{title}\n{table(rows, ['layer', *header, 'at first'])}")
    if bias:
        rows = []
        for layer, curves, first in each_layer(bias):
            curve = np.mean(curves, 0)  # (W,)
            ends = [*RANGES.values(), (1, 8), (len(curve) // 4 + 1, len(curve))]
            parts = [curve[low : high + 1] for low, high in ends]  # empty if the curve is shorter
            *means, near, far = (part.mean() if len(part) else None for part in parts)
            decay = None if None in (near, far) else near - far
            rows.append([layer, *means, decay, np.mean(first)])
        texts.append("distance bias\n" + table(rows, ["layer", *RANGES, "decay", "at first"]))
    if not texts:
        return (
            f"--attn={numbers['attn']} learns nothing in its attention besides the linear layers: "
            "look at a run of elastic, lazy, sink, gated or diff"
        )
    meanings = {name: MEANINGS[name] for name in numbers["figures"] if name in MEANINGS}
    return "\n\n".join([*texts, legend(meanings | BIAS if bias else meanings)])


def each_layer(figure):
    """The number of each layer as text, and its values now and at first."""
    return zip(map(str, figure["layers"]), figure["now"], figure["start"], strict=True)


def draw(path, found):
    """Draw a row for each run. First a map for each figure, layers (down) by heads (across): its
    numbers are values, its colours changes in training, red above the initial value and blue below.
    Beside it are the values of each layer. Then the distance bias."""
    rows, least = {}, (1, 1)
    for place, numbers in found.items():
        panels = [
            partial(draw_figure, name=name, figure=figure)
            for name, figure in numbers["figures"].items()
        ]
        if bias := numbers["distance_bias"]:
            curves = np.array(bias["now"])  # (layers, heads, W)
            panels.append(partial(draw_bias, numbers=bias["layers"], layers=curves))
            least = np.maximum(least, curves.shape[:2])
        if panels:
            rows[place] = panels
    if not rows:
        raise ValueError(
            f"nothing to draw: {', '.join(found)} learned nothing outside linear layers, "
            "leave out --png"
        )
    draw_rows(path, rows, least)


def draw_figure(ax, name, figure):
    """Draw a figure as a map, and beside it a dot for each head and a ring for their mean."""
    change = np.subtract(figure["now"], figure["start"])  # (layers, heads)
    start = fmean(map(fmean, figure["start"]))
    heat_map(
        ax,
        cells=change,
        colours=signed(max(np.abs(change).max(), 1e-6)),
        numbers=figure["now"],
        bar="change",
        title=f"{name} ({start:.3g} at first)",
    )
    ax.set_yticks(range(len(change)), figure["layers"])  # other layers may lack the figure
    beside = ax.inset_axes([1.03, 0, 0.4, 1], sharey=ax)
    for layer, values in enumerate(figure["now"]):
        beside.plot(values, [layer] * len(values), ".", color="#08519c", alpha=0.5)
        beside.plot(fmean(values), layer, "o", color="black", markerfacecolor="white")
    beside.axvline(start, color=GREY, linestyle=":", linewidth=1)
    beside.tick_params(labelleft=False, labelsize=7)
    beside.locator_params(axis="x", nbins=2, min_n_ticks=1)
    beside.margins(x=0.2)
    frame(beside, xlabel="heads, mean")


def draw_bias(ax, numbers, layers):
    """Draw the distance bias (layers, heads, W), a small panel for each layer: thin lines are
    heads, the thick one is their mean."""
    across = math.ceil(len(numbers) ** 0.5)
    down, first = -(-len(numbers) // across), None
    for place, (layer, curves) in enumerate(zip(numbers, layers, strict=True)):
        row, column = divmod(place, across)
        corner = column / across, 1 - (row + 1) / down
        part = ax.inset_axes([*corner, 0.9 / across, 0.75 / down], sharey=first)
        first = first or part
        part.plot(curves.T, color="#9ecae1", linewidth=0.5)
        part.plot(curves.mean(0), color="#08519c", linewidth=1.8)
        part.axhline(0, color=GREY, linestyle=":", linewidth=1)
        part.set_xscale("symlog", linthresh=1)  # includes distance 0
        part.set_xlim(0, layers.shape[2])
        part.set_title(f"layer {layer}", fontsize=7, pad=2)
        part.tick_params(
            labelsize=6, labelleft=column == 0, labelbottom=place + across >= len(numbers)
        )
        part.spines[["top", "right"]].set_visible(False)
    ax.set_axis_off()
    ax.set_title("bias on the score, by distance", fontsize=10)
