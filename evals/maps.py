"""Attention maps: which token attends to which in a sentence, in chosen layers and heads.

These are Lazy Attention's figure 7 and Threshold Differential Attention's figure 2. A row is a query, a column a key,
and the colour is the attention weight. Signed weights are red above 0 and blue below, exact zeros are yellow. For
differential recipes, --views shows both views next to their difference. --html writes a page for a browser, with every
head (evals/maps_page.py).
"""
from dataclasses import dataclass

import numpy as np
import torch

from common.flags import knob
from evals import maps_page
from evals.instrument import table, watch, whole_numbers
from evals.pictures import SHARES, pyplot, save_figure, signed
from evals.sample import as_ids

SENTENCE = "When Alice saw the white rabbit run past her, she ran after the rabbit and fell down a deep hole."
SHOWN = 32                                      # tokens of it that are shown
MOST = 100                                      # labels of more tokens are too small in a picture


@dataclass
class Maps:
    """Flags of maps"""
    text: str | None = knob(None, f"the sentence, of at most {MOST} tokens; default: {SHOWN} tokens about Alice and a "
                                  "rabbit, or of the held-out data if tokens are not text")
    layers: str = knob("", "layers, counted from 0, separated by commas; empty: four, from the first to the last")
    heads: str = knob("", "heads, counted from 0, separated by commas; empty: in each layer the one with the most "
                          "weight on the first token and, without --views, the one with the least")
    views: bool = knob(False, "also show the two views of a differential recipe")
    html: str = knob("", "also write a page for a browser into this file, with all heads of all layers; several runs, "
                         "or several recipes in --attn=a,b, are tabs")
    cost: bool = knob(False, "with --html: also measure how much the loss of the sentence rises without each head, in "
                             "one pass per head")

    def __post_init__(self):
        if self.text is not None and not self.text.strip():
            raise ValueError("--text is empty: write a sentence, or leave the flag out")
        if self.html and (self.layers or self.heads or self.views):
            raise ValueError("--html shows every head and no views: leave out --layers, --heads and --views")
        if self.cost and not self.html:
            raise ValueError("--cost is for the page: add --html=FILE")


def command(args, run):
    """The attention maps of a sentence."""
    ids, labels = sentence(args.text, run)
    if args.cost and len(ids) < 2:
        raise ValueError("--cost needs a sentence of two tokens or more: the loss is that of the second and later ones")
    modules = [block.attn for block in run.model.transformer.h]
    all_layers, all_heads = range(len(modules)), range(modules[0].heads)
    layers = all_layers if args.html else chosen("layers", args.layers, len(modules)) or spread(len(modules))
    heads = all_heads if args.html else chosen("heads", args.heads, modules[0].heads)
    if args.views and not modules[0].choices["diff"].mix:
        raise ValueError(f"--views is for recipes that subtract one view from another (diff, diff2, tda, ...), not for "
                         f"--attn={run.model.config.attn}")
    seen = weights_of_layers(run, ids, layers, args.views)
    queries = ["(sink token)"] * modules[0].ahead + labels
    keys = ["(extra key)"] * modules[0].has_extra_key + queries
    first, maps = len(keys) - len(labels), []   # first: the column of the first token
    for layer, kinds in seen.items():
        *_, weights = kinds.values()
        for head in heads or extremes(weights, first)[:1 if args.views else 2]:
            maps += [{"layer": layer, "head": head, "kind": kind, "weights": rounded(w[head])}
                     for kind, w in kinds.items()]
    numbers = {"queries": queries, "keys": keys, "first": first, "maps": maps}
    if args.html:
        numbers |= maps_page.seen_in_every_head(run, ids)
        hidden = numbers.pop("hidden")          # {layer: (heads, T, keys)}
        for found in maps:
            found["hidden"] = rounded(hidden[found["layer"]][found["head"]])
        if args.cost:
            numbers["measures"]["cost"] = maps_page.costs(run, ids)
        return numbers, maps_page.in_words(args.html, numbers)
    return numbers, in_words(numbers)


# ------------------------------------------------------------------------------------------ sentence, layers and heads


def sentence(text, run):
    """The token ids of a sentence, (T,), and their labels. Raises ValueError if the sentence is too long to be drawn,
    or if an id is not in the vocabulary."""
    coder, config = run.tokenizer, run.model.config
    if text is None:                            # the same for every model, up to its block_size
        symbols = coder.name == "numbers"
        ids = run.split("val").window(0, SHOWN) if symbols else coder.encode(SENTENCE)
        labels, shown = labels_of(ids, SENTENCE, coder), min(SHOWN, config.block_size)
        return ids[:shown], labels[:shown]
    ids = coder.encode(text)
    if len(ids) > MOST:
        raise ValueError(f"the sentence has {len(ids)} tokens, and no more than {MOST} can be drawn: give a shorter "
                         "--text")
    if max(ids) >= config.vocab_size:
        raise ValueError(f"--text has the id {max(ids)}, but this model has only 0 to {config.vocab_size - 1}")
    return ids, labels_of(ids, text, coder)


def labels_of(ids, text, coder):
    """A readable label for each token: spaces and newlines are symbols, and a token that is only a part of a character
    is spelled in bytes."""
    pieces, data = [coder.decode([i]).encode() for i in ids], text.encode()
    lengths = getattr(coder, "lengths", None)
    if lengths is not None and sum(lengths[i] for i in ids) == len(data):           # else the tokenizer adds a space
        ends = np.cumsum([lengths[i] for i in ids])
        pieces = [data[end - lengths[i]:end] for i, end in zip(ids, ends, strict=True)]
    signs = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "←"})
    labels = [piece.decode("utf-8", errors="backslashreplace").translate(signs) for piece in pieces]
    return [label if len(label) <= 14 else f"{label[:13]}…" for label in labels]


def chosen(name, text, count):
    """The layers or heads that a flag names, or None. Raises ValueError on one that does not exist."""
    numbers = whole_numbers(text, name) if text else None
    for number in numbers or []:
        if number >= count:
            raise ValueError(f"--{name}={text}, but there are {count} {name}: give numbers from 0 to {count - 1}")
    return numbers


def spread(count):
    """Four layers from the first to the last, or all if there are fewer."""
    return sorted({round(i * (count - 1) / 3) for i in range(4)})


def extremes(w, first):
    """The heads with the most and the least weight on the first token; w (heads, T, keys)."""
    sink = w[:, :, first].abs().mean(1)
    return list(dict.fromkeys([sink.argmax().item(), sink.argmin().item()]))


# ---------------------------------------------------------------------------------------------------------- the weights


def weights_of_layers(run, ids, layers, views=False):
    """{layer: {"weights": (heads, T, keys)}}, where keys is T, or 1 + T with an extra key's column first; with views
    {"view a", "view b", "difference"}, the last a - lambda b."""
    seen = {}

    def see(layer, module, q, k, v, x, table):
        if layer in layers:
            kinds = {"weights": module.weights_of(q, k, x, table)}
            if views:
                a, b = module.views_of(q, k, x, table)
                kinds = {"view a": a, "view b": b, "difference": kinds["weights"]}
            seen[layer] = {kind: w[0].float().cpu() for kind, w in kinds.items()}

    watch(run.model, see, as_ids(ids, run.machine), run.machine)
    return {layer: seen[layer] for layer in layers}


def rounded(w):
    """Weights (T, keys) to six significant digits, so no nonzero weight becomes 0."""
    return [[float(f"{weight:.6g}") for weight in row] for row in w.tolist()]


# -------------------------------------------------------------------------------------------------------------- as text


def in_words(numbers):
    """A table with a column for each map: for each query, the key with the most weight, and that weight. The last rows
    are the mean weights on the first token and on the extra key."""
    queries, keys, first = numbers["queries"], numbers["keys"], numbers["first"]
    w = torch.tensor([found["weights"] for found in numbers["maps"]])   # (maps, T, keys)
    top = w.abs().argmax(-1)
    rows = [[query] + [f"{keys[key]} {w[m, i, key]:5.2f}" if w[m, i, key] else "-" for m, key in enumerate(top[:, i])]
            for i, query in enumerate(queries)]
    means = w.mean(1)
    for column in range(first + 1):
        rows.append([f"mean on {keys[column]}"] + [f"{value:.3f}" for value in means[:, column]])
    header = [f"{found['layer']}.{found['head']}{kind_of(found, ' ')}" for found in numbers["maps"]]
    return ("for each query (down), the key with the most weight, and that weight; columns are layer.head\n"
            + table(rows, ["", *header]))


def kind_of(found, before):
    """The name of the view, if the map shows one."""
    return "" if found["kind"] == "weights" else before + found["kind"]


# --------------------------------------------------------------------------------------------- the page and the picture

page = maps_page.page


def draw(path, found):
    """Draw the maps: a column for each layer, a row for each chosen head and view. Several runs are below each other,
    or side by side if each has only one column."""
    plt = pyplot()
    grids = [(place, numbers, grid_of(numbers["maps"])) for place, numbers in found.items()]
    heights = [1.2 + len(grid) * side(numbers) for _, numbers, grid in grids]
    widths = [1.2 + len(grid[0]) * side(numbers) for _, numbers, grid in grids]
    if all(len(grid[0]) == 1 for *_, grid in grids):
        figure = plt.figure(figsize=(sum(widths), max(heights)), layout="constrained")
        parts = figure.subfigures(1, len(grids), width_ratios=widths, squeeze=False)[0]
    else:
        figure = plt.figure(figsize=(max(widths), sum(heights)), layout="constrained")
        parts = figure.subfigures(len(grids), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (place, numbers, grid) in zip(parts, grids, strict=True):
        draw_grid(part, numbers, grid)
        part.suptitle(place if len(found) > 1 else "", fontsize=11)
    save_figure(figure, path)


LABELS = 0.9                                    # inches for the labels at a map


def side(numbers):
    """Inches of a map with its labels."""
    return LABELS + min(7.0, max(2.6, 0.14 * len(numbers["keys"])))


def grid_of(maps):
    """The maps in rows; those of one layer are in one column."""
    layers = {}
    for found in maps:
        layers.setdefault(found["layer"], []).append(found)
    down = max(map(len, layers.values()))
    return [[column[row] if row < len(column) else None for column in layers.values()] for row in range(down)]


def draw_grid(part, numbers, grid):
    """All maps of a run, on one colour scale: the square root of the weight, so that small weights show. The scale ends
    at the largest weight after the first row, in which softmax always has a weight of 1."""
    from matplotlib.colors import FuncNorm
    weights = torch.tensor([found["weights"] for found in numbers["maps"]])             # (maps, T, keys)
    below, most = bool((weights < 0).any()), max(weights[:, min(1, weights.shape[1] - 1):].abs().max().item(), 1e-6)
    norm = FuncNorm((signed_root, signed_square), vmin=-most if below else 0, vmax=most)
    colours = signed(most)["cmap"] if below else SHARES["cmap"]
    zeros = bool((weights == 0)[:, np.tri(*weights.shape[1:], weights.shape[2] - weights.shape[1], dtype=bool)].any())
    axes = part.subplots(len(grid), len(grid[0]), squeeze=False)
    for line, row in zip(axes, grid, strict=True):
        for ax, found in zip(line, row, strict=True):
            if found:
                image = draw_map(ax, found, numbers, norm, colours)
            else:
                ax.set_axis_off()
    label = "weight (square-root scale" + ("; yellow: exactly 0)" if zeros else ")")
    beyond = "max" if weights.max() > most else "neither"               # in a first row
    part.colorbar(image, ax=axes, label=label, shrink=0.6, aspect=30, pad=0.01, extend=beyond)


def signed_root(x):
    return np.sign(x) * np.sqrt(np.abs(x))


def signed_square(x):
    return np.sign(x) * x * x


def draw_map(ax, found, numbers, norm, colours):
    """Draw one map. Later keys are grey, exact zeros yellow."""
    from matplotlib.colors import ListedColormap
    w, offset = np.array(found["weights"]), len(numbers["keys"]) - len(numbers["queries"])
    later = np.triu(np.ones_like(w, bool), 1 + offset)
    ax.set_facecolor("0.93")
    image = ax.imshow(np.ma.array(w, mask=later | (w == 0)), cmap=colours, norm=norm)
    ax.imshow(np.ma.array(w, mask=later | (w != 0)), cmap=ListedColormap(["#fff3c4"]))
    on_first = f"{w[:, numbers['first']].mean():.2f} on the first token"
    ax.set_title(f"layer {found['layer']}, head {found['head']}{kind_of(found, ', ')}: {on_first}", fontsize=10)
    size = min(7, 60 * (side(numbers) - LABELS) / len(numbers["keys"]))  # letters fit into a cell
    plain = {"fontsize": size, "parse_math": False}                     # a $ does not begin a formula
    upright = max(map(len, numbers["keys"])) == 1
    ax.set_xticks(range(len(numbers["keys"])), numbers["keys"], rotation=0 if upright else 90, **plain)
    ax.set_yticks(range(len(numbers["queries"])), numbers["queries"], **plain)
    ax.tick_params(length=0, pad=1)
    ax.spines[:].set_visible(False)
    return image
