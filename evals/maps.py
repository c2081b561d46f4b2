"""Attention maps: which token attends to which in a sentence, in chosen layers and heads.

These are Lazy Attention's figure 7 and Threshold Differential Attention's figure 2. A row is a
query, a column a key, and the colour is the attention weight: red above 0, blue below if weights
are signed, yellow for an exact zero. --of draws other numbers of a query and a key, as figure 3 of
Attention Sink Forges Native MoE. --html writes a page for a browser with every head:
evals/heads.html, with these numbers in it.
"""

import base64
import json
import os
import zlib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from common import files
from common.flags import Knobs, knob
from evals.ablate import costs, output_zeroed
from evals.instrument import table, watch, whole_numbers
from evals.measures import MEASURES, Probe
from evals.pictures import figure_of, pyplot
from evals.sample import as_ids
from evals.stream import score_parts, watching
from kernels import visible

SENTENCE = (
    "When Alice saw the white rabbit run past her, "
    "she ran after the rabbit and fell down a deep hole."
)
SHOWN = 32  # tokens of it that are shown
MOST = 100  # labels of more tokens are too small in a picture
OF = {  # {value of --of: (its meaning, the name of its mean over the first column)}
    "weights": ("weight", "sink"),
    "qk": ("q·k", "first key"),
    "cos_qk": ("cos(q, k)", "first key"),
    "cos_kk": ("cos(k, k)", "first key"),
}
VIEWS = "view a", "view b", "difference"  # kinds of map of --views


@dataclass
class Maps(Knobs):
    """Flags of maps"""

    text: str | None = knob(
        None,
        f"the sentence, of at most {MOST} tokens; default: {SHOWN} tokens about Alice and a "
        "rabbit, or of the held-out data if tokens are not text",
    )
    layers: str = knob(
        "", "layers, counted from 0, separated by commas; empty: four, from the first to the last"
    )
    heads: str = knob(
        "",
        "heads, counted from 0, separated by commas; empty: in each layer the one with the "
        "most weight on the first token and, without --views, the one with the least",
    )
    of: str = knob(
        "weights",
        "what is shown: attention weights, products of queries and keys, their cosines, or the "
        "cosines of the row's own key and a key; of a differential recipe, in its first view",
        tuple(OF),
    )
    views: bool = knob(False, "also show the two views of a differential recipe")
    html: str = knob(
        "",
        "also write a page for a browser into this file, with all heads; each run or recipe has "
        "a tab",
    )
    cost: bool = knob(
        False, "with --html: also measure how much the loss of the sentence rises without each head"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.text is not None and not self.text.strip():
            raise ValueError("--text is empty: write a sentence, or leave the flag out")
        if self.html and (self.layers or self.heads or self.views or self.of != "weights"):
            raise ValueError(
                "--html shows the weights of every head and no views: leave out --layers, --heads, "
                "--of and --views"
            )
        if self.views and self.of != "weights":
            raise ValueError(f"--views shows weights: leave out --of={self.of}")
        if self.cost and not self.html:
            raise ValueError("--cost is for the page: add --html=FILE")


def command(args, run):
    """The attention maps of a sentence."""
    ids, labels = sentence(args.text, run)
    modules = [block.attn for block in run.model.transformer.h]
    if args.cost and len(ids) < 2:
        raise ValueError("--cost needs a sentence of two tokens or more: the first has no loss")
    if args.views and any(module.config.diff == "none" for module in modules):
        raise ValueError(
            "--views is for recipes that subtract one view from another (diff, diff2, tda, ...), "
            f"not for --attn={run.model.config.attn}"
        )
    L, H = len(modules), modules[0].heads
    layers = range(L) if args.html else numbers_below(args.layers, "layers", L)
    heads = range(H) if args.html else numbers_below(args.heads, "heads", H)
    queries = ["(sink token)"] * modules[0].sink_tokens + labels
    has_extra_key = any(module.has_extra_key for module in modules)
    # an extra key has a weight, but no product with a query
    keys = ["(extra key)"] * (has_extra_key and args.of == "weights") + queries
    first = len(keys) - len(labels)  # the column of the first token
    kinds, of_page = maps_of(run, ids, args)
    maps = []
    for layer in layers or sorted({round(i * (L - 1) / 3) for i in range(4)}):
        sink = kinds[layer]["weights"][:, :, -len(labels)].abs().mean(1)
        extremes = dict.fromkeys([sink.argmax().item(), sink.argmin().item()])
        for head in heads or [*extremes][: 1 if args.views else 2]:
            shown = {kind: six_digits(w[head]) for kind, w in kinds[layer].items()}
            hidden = {"hidden": shown["hidden"]} if args.html else {}
            for kind in VIEWS if args.views else (args.of,):
                w = shown["weights" if kind == "difference" else kind]
                maps.append({"layer": layer, "head": head, "kind": kind, "weights": w} | hidden)
    numbers = {"of": args.of, "queries": queries, "keys": keys, "first": first, "maps": maps}
    numbers |= of_page
    return numbers, f"open {args.html} in a browser" if args.html else in_words(numbers)


def numbers_below(text, flag, count):
    """The numbers in the value of a flag, "0,2"; [] if it is empty."""
    found = whole_numbers(text, flag) if text else []
    if max(found, default=0) >= count:
        raise ValueError(
            f"--{flag}={text}, but there are {count} {flag}: give numbers from 0 to {count - 1}"
        )
    return found


def six_digits(w):
    """Weights (T, keys) to six significant digits, so no nonzero weight becomes 0."""
    return [[float(f"{weight:.6g}") for weight in row] for row in w.tolist()]


def sentence(text, run):
    """The token ids of a sentence, (T,), and their labels. Raises ValueError on too many ids or an
    unknown one."""
    coder, config = run.tokenizer, run.model.config
    words = SENTENCE if text is None else text
    if text is None and coder.name == "numbers":
        ids = run.split("val").window(0, SHOWN)
    else:
        ids = coder.encode(words)
    labels = labels_of(ids, words, coder)
    if text is None:  # the same for every model, up to its block_size
        shown = min(SHOWN, config.block_size)
        return ids[:shown], labels[:shown]
    if len(ids) > MOST:
        raise ValueError(f"--text has {len(ids)} tokens: give a sentence of at most {MOST}")
    if max(ids) >= config.vocab_size:
        raise ValueError(
            f"--text has the id {max(ids)}, but this model has only 0 to {config.vocab_size - 1}"
        )
    return ids, labels


def labels_of(ids, text, coder):
    """A readable label for each token. Spaces and newlines are symbols; a part of a character is
    spelled in bytes."""
    pieces, data = [coder.decode([i]).encode() for i in ids], text.encode()
    lengths = getattr(coder, "lengths", None)
    # otherwise the tokenizer has added a space
    if lengths is not None and lengths[ids].sum() == len(data):
        ends = np.cumsum(lengths[ids])
        pieces = [data[end - lengths[i] : end] for i, end in zip(ids, ends, strict=True)]
    signs = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "←"})
    labels = [piece.decode("utf-8", errors="backslashreplace").translate(signs) for piece in pieces]
    return [label if len(label) <= 14 else f"{label[:13]}…" for label in labels]


# measures that colour the page's heads
IN_GRID = ("sink", "entropy", "row_mass", "sparsity", "extra", "negative")
COST = "how much the loss of this sentence rises without the head, in nats per token"


def maps_of(run, ids, args):
    """The maps of each layer from one pass over a sentence ids (T,), [{kind: (heads, T, keys)}],
    where keys is T, or more with the columns of the extra key (of weights only) and of sink tokens
    first; and what else the page shows, {} without --html.

    The kinds are "weights", with --views "view a" and "view b" (the weights are a - lambda b), the
    value of --of, and with --html "hidden": the weights if only the first row sees the first key.
    The page shows the recipe, the measures (layers, heads) of IN_GRID, also of "hidden", the costs
    with --cost, the norms of values (layers, heads, T), and those of the hidden states (layers + 1,
    T) that enter each layer and leave the last."""
    kinds, probes, value_norms, stream = [], {"weights": [], "hidden": []}, [], []
    model, rows = run.model, as_ids(ids, run.machine)
    modules = [block.attn for block in model.transformer.h]
    columns = len(ids) + model.sink_tokens + any(module.has_extra_key for module in modules)

    def see(layer, module, q, k, v, x, table):
        found = {"weights": module.weights_of(q, k, x, table)}
        if args.views:
            found |= zip(VIEWS[:2], module.views_of(q, k, x, table), strict=True)
        if args.html:
            without = module.mask._replace(hidden=module.sink_tokens)
            found["hidden"] = module.weights_of(q, k, x, table, without)
            for kind in probes:
                probes[kind].append(probe_of(module, found[kind], kind == "hidden"))
            norms = v[0].float().norm(dim=-1)  # (Hv, T)
            value_norms.append(norms.repeat_interleave(module.heads // len(norms), 0).tolist())
        kinds.append({})
        if args.of != "weights":
            kinds[layer][args.of] = products(args.of, module, q, k)[0].cpu()
        for kind, w in found.items():
            kinds[layer][kind] = F.pad(w[0].float().cpu(), (columns - w.shape[3], 0))

    with watching(model, lambda layer, h: stream.append(h[0].float().norm(dim=-1).tolist())):
        watch(model, see, rows, run.machine)
    if not args.html:
        return kinds, {}
    norms = {"value_norms": value_norms, "stream": stream}
    return kinds, {"about": about(run)} | measures_of(run, rows, probes, args.cost) | norms


def products(of, module, q, k):
    """The products or cosines (B, heads, T, T) that --of names; 0 after the row."""
    q, k = score_parts(module, q, k)
    if of == "cos_kk":  # its one nonzero part meets both parts of other keys
        q = k.sum(-2, keepdim=True).expand_as(k)
    if of != "qk":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    # each head's first view; heads may also share their query
    q, k = (x.repeat_interleave(module.heads, 1)[:, :: module.score_heads] for x in (q, k))
    # no matrix product, which autocast would compute in 16 bits
    return (q.unsqueeze(3) * k.unsqueeze(2)).sum((-2, -1)).tril()


def about(run):
    """What the page says of a run's recipe."""
    now, knobs = vars(run.model.config), run.meta["knobs"]
    attn, trained = now["layers"] or now["attn"], knobs.get("layers") or knobs["attn"]
    text = f"--attn={attn}"
    if not run.has_weights:
        text += ": derivatives of outputs by values, since this recipe has no attention weights"
    return text if attn == trained else f"{text}; the model was trained with {trained}"


def measures_of(run, rows, probes, cost):
    """The page's measures (layers, heads). probes: those of each kind, {kind: [of each layer]}."""
    measures, hidden = {}, {}
    for name in IN_GRID:
        seen, hidden[name] = ([layer.numbers()[name] for layer in probes[kind]] for kind in probes)
        # the last two are 0 in most recipes
        if name not in ("extra", "negative") or np.any(seen):
            measures[name] = seen
    if cost:
        L, H = np.shape(seen)
        chosen = torch.eye(L * H, dtype=torch.bool).view(-1, L, H)  # one head at a time
        alone = [("", "", 1, [output_zeroed(head)]) for head in chosen]
        lines = costs(alone, run.model, rows, run.machine, 1)["changes"]
        found = [round(line["loss_change"], 6) for line in lines]
        measures["cost"] = np.reshape(found, (L, H)).tolist()
    return {"measures": measures, "hidden_measures": hidden}


def probe_of(module, w, hides):
    """A Probe that has seen the weights w (1, heads, sink_tokens + T, .) of a layer. hides: do
    later rows not see the first key? Then it is not among the keys that they may attend to."""
    probe, i = Probe(), torch.arange(w.shape[2] - module.sink_tokens, device=w.device)
    probe.see_rows(
        module, i, w[:, :, module.sink_tokens :], torch.ones(1, 1, len(i), device=w.device)
    )
    if hides:
        gone = visible(i[1:], 0, module.mask).sum().item()
        for name in ("pairs", "sparsity"):
            probe.sums[name] = probe.sums[name] - gone
    return probe


def in_words(numbers):
    """A table with a column for each map: for each query, the key whose number is farthest from
    0, and that number. The last rows are the means over the first token and the extra key."""
    queries, keys, first = numbers["queries"], numbers["keys"], numbers["first"]
    w = torch.tensor([found["weights"] for found in numbers["maps"]])  # (maps, T, keys)
    meaning, mean_of_first = OF[numbers["of"]]
    rows = []
    for i, query in enumerate(queries):
        cells = []
        for m, key in enumerate(w[:, i].abs().argmax(-1)):
            weight = w[m, i, key]
            cells.append(f"{keys[key]} {weight:5.2f}" if weight else "-")
        rows.append([query, *cells])
    for column, name in enumerate(["extra", mean_of_first][-1 - first :]):
        rows.append([name, *(f"{mean:.3f}" for mean in w[:, :, column].mean(1))])
    titles = ["{layer}.{head} {kind}".format(**found) for found in numbers["maps"]]
    header = ["", *(title.removesuffix(" weights") for title in titles)]
    return (
        f"for each query (down), the key whose {meaning} is farthest from 0, and its value; "
        f"columns are layer.head\n{table(rows, header)}"
    )


def page(path, found):
    """Write evals/heads.html with a tab for each run: its numbers, as JSON, in the element "data".

    The page is one file and needs no network. It links to docs/ if it is inside the repository."""
    names = "about", "queries", "keys", "first", "measures", "hidden_measures"
    tabs = []
    for place, numbers in found.items():
        weights = [[one[kind] for one in numbers["maps"]] for kind in ("weights", "hidden")]
        tab = {name: numbers[name] for name in names}
        tab["name"] = place.removeprefix("out/")
        tab["meanings"] = {name: MEASURES.get(name, COST) for name in numbers["measures"]}
        tab["weights"] = packed(weights)  # of the shape (2, maps, T, keys)
        tab["value_norms"] = packed(numbers["value_norms"])
        tab["stream"] = [[float(f"{norm:.4g}") for norm in norms] for norms in numbers["stream"]]
        tabs.append(tab)
    data = {"runs": tabs}
    here, root = Path(path).resolve().parent, Path(__file__).resolve().parents[1]
    if here.is_relative_to(root):
        data["docs"] = Path(os.path.relpath(root / "docs", here)).as_posix()
    # "<" must not end the element. JSON has no nan, and the browser would refuse it
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    template = Path(__file__).with_name("heads.html").read_text(encoding="utf-8")
    with files.replacing(path, "w") as f:
        f.write(template.replace("DATA", text.replace("<", "\\u003c"), 1))


def packed(values):
    """Values of any shape as [the largest size, text]. The text is base64 of deflated int16: 32767
    times the square root of a value's share of the largest, with its sign. Small weights keep three
    digits, and only an exact zero becomes 0."""
    values = np.asarray(values, float)
    most = max(np.abs(values).max(), 1e-30)
    codes = np.round(np.sqrt(np.abs(values) / most) * 32767)
    codes = np.sign(values) * np.maximum(codes, values != 0)
    return [most, base64.b64encode(zlib.compress(codes.astype("<i2").tobytes(), 9)).decode()]


def draw(path, found):
    """Draw the maps: a column for each layer, a row for each head and view. Runs with one column
    are side by side. All maps have one colour scale."""
    grids = []  # for each run, the maps of each column
    for numbers in found.values():
        by_layer = groupby(numbers["maps"], lambda one: one["layer"])
        grids.append([list(maps) for _, maps in by_layer])
    rows, columns = max(len(maps) for grid in grids for maps in grid), max(map(len, grids))
    beside = columns == 1
    down, across = (rows, len(grids)) if beside else (rows * len(grids), columns)
    # inches of a map
    side = min(7.0, max(2.6, 0.14 * max(len(numbers["keys"]) for numbers in found.values())))
    colours, beyond = scale_of(found.values())
    with figure_of(path, [side + 1.5] * down, [side + 1.1] * across) as axes:
        for ax in axes.flat:
            ax.set_axis_off()  # a column may be shorter than others
        parts = np.split(axes, len(grids), axis=int(beside))
        for part, (place, numbers), grid in zip(parts, found.items(), grids, strict=True):
            for column, maps in zip(part.T, grid, strict=False):
                for ax, one in zip(column, maps, strict=False):
                    image = draw_map(ax, numbers, one, side, colours)
            if len(found) > 1:
                title = part[0, 0].get_title()
                part[0, 0].set_title(f"{Path(place).name}: {title}", fontsize=9)
        label = f"{OF[numbers['of']][0]} (square-root scale; yellow: exactly 0)"
        figure = axes[0, 0].figure
        figure.supxlabel("key: the token that is attended to", fontsize=10)
        figure.supylabel("query: the token that attends", fontsize=10)
        figure.colorbar(image, ax=axes, label=label, shrink=0.6, aspect=30, pad=0.01, extend=beyond)


def scale_of(runs):
    """The colours of all maps of several runs' numbers, and "max" if a weight is beyond the scale.

    Colours follow the square root of the weight, so that small weights show. The scale ends at the
    largest weight after the first row, in which softmax always has a weight of 1, or at 1 if that
    is near."""
    maps = [np.array([one["weights"] for one in numbers["maps"]]) for numbers in runs]
    most = max(np.abs(w[:, 1:]).max(initial=0) for w in maps) or 1  # w (maps, T, keys)
    most = 1 if 0.8 < most < 1 else most
    signed = min(w.min() for w in maps) < 0
    root, square = lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x * x
    norm = pyplot().matplotlib.colors.FuncNorm(
        (root, square), vmin=-most if signed else 0, vmax=most
    )
    beyond = max(w.max() for w in maps) > most
    return {"cmap": "RdBu" if signed else "Blues", "norm": norm}, "max" if beyond else "neither"


def draw_map(ax, numbers, one, side, colours):
    """Draw one map, `side` inches wide. Returns its image."""
    w, keys = np.array(one["weights"]), numbers["keys"]  # (T, keys)
    later = np.triu(np.ones_like(w, bool), 1 + len(keys) - len(w))  # after the query
    yellow = pyplot().matplotlib.colors.ListedColormap(["#fff3c4"])
    ax.set_axis_on()
    ax.set_facecolor("0.93")  # later keys are grey, exact zeros yellow
    image = ax.imshow(np.ma.array(w, mask=later | (w == 0)), **colours)
    ax.imshow(np.ma.array(w, mask=later | (w != 0)), cmap=yellow)
    name = "layer {layer}, head {head}, {kind}".format(**one).removesuffix(", weights")
    sink = w[:, numbers["first"]].mean()
    ax.set_title(f"{name}\n{OF[numbers['of']][1]} {sink:.2f}", fontsize=9)
    # letters fit into a cell, and a $ does not begin a formula
    plain = {"parse_math": False, "fontsize": min(7, 60 * side / len(keys))}
    upright = max(map(len, keys)) == 1
    ax.set_xticks(range(len(keys)), keys, rotation=0 if upright else 90, **plain)
    ax.set_yticks(range(len(numbers["queries"])), numbers["queries"], **plain)
    ax.tick_params(length=0, pad=1)
    ax.spines[:].set_visible(False)
    return image
