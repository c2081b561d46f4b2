"""Attention maps: which token attends to which in a sentence, in chosen layers and heads.

These are Lazy Attention's figure 7 and Threshold Differential Attention's figure 2. A row is a
query, a column a key, and the colour is the attention weight: red above 0, blue below if weights
are signed, yellow for an exact zero. --html writes a page for a browser with every head:
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

from common import files
from common.flags import Knobs, knob
from evals.ablate import costs, output_zeroed
from evals.instrument import table, watch, whole_numbers
from evals.measures import MEASURES, Probe
from evals.pictures import figure_of, pyplot
from evals.sample import as_ids
from evals.stream import watching
from kernels import visible

SENTENCE = "When Alice saw the white rabbit run past her, she ran after the rabbit and fell down a deep hole."
SHOWN = 32  # tokens of it that are shown
MOST = 100  # labels of more tokens are too small in a picture


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
    views: bool = knob(False, "also show the two views of a differential recipe")
    html: str = knob(
        "",
        "also write a page for a browser into this file, with all heads; each run or recipe has a tab",
    )
    cost: bool = knob(
        False, "with --html: also measure how much the loss of the sentence rises without each head"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.text is not None and not self.text.strip():
            raise ValueError("--text is empty: write a sentence, or leave the flag out")
        if self.html and (self.layers or self.heads or self.views):
            raise ValueError(
                "--html shows every head and no views: leave out --layers, --heads and --views"
            )
        if self.cost and not self.html:
            raise ValueError("--cost is for the page: add --html=FILE")


def command(args, run):
    """The attention maps of a sentence."""
    ids, labels = sentence(args.text, run)
    modules = [block.attn for block in run.model.transformer.h]
    if args.cost and len(ids) < 2:
        raise ValueError(
            "--cost needs a sentence of two tokens or more: the loss is that of the second and later ones"
        )
    if args.views and any(module.config.diff == "none" for module in modules):
        raise ValueError(
            f"--views is for recipes that subtract one view from another (diff, diff2, tda, ...), not for "
            f"--attn={run.model.config.attn}"
        )
    chosen = {}  # by flags; empty: the flag is not given
    for name, count in (("layers", len(modules)), ("heads", modules[0].heads)):
        text = getattr(args, name)
        chosen[name] = range(count) if args.html else whole_numbers(text, name) if text else []
        if max(chosen[name], default=0) >= count:
            raise ValueError(
                f"--{name}={text}, but there are {count} {name}: give numbers from 0 to {count - 1}"
            )
    queries = ["(sink token)"] * modules[0].sink_tokens + labels
    keys = ["(extra key)"] * any(module.has_extra_key for module in modules) + queries
    first = len(keys) - len(labels)  # the column of the first token
    kinds, of_page = maps_of(run, ids, args)
    maps = []  # by default of four layers, or of all if there are fewer
    for layer in chosen["layers"] or sorted({round(i * (len(modules) - 1) / 3) for i in range(4)}):
        hidden = kinds[layer].pop("hidden", None)
        *_, weights = kinds[layer].values()
        sink = weights[:, :, first].abs().mean(1)  # (heads,)
        extremes = [sink.argmax().item(), sink.argmin().item()][: 1 if args.views else 2]
        for head in chosen["heads"] or dict.fromkeys(extremes):
            more = {} if hidden is None else {"hidden": six_digits(hidden[head])}
            maps += [
                {"layer": layer, "head": head, "kind": kind, "weights": six_digits(w[head])} | more
                for kind, w in kinds[layer].items()
            ]
    numbers = {"queries": queries, "keys": keys, "first": first, "maps": maps} | of_page
    return numbers, f"open {args.html} in a browser" if args.html else in_words(numbers)


def six_digits(w):
    """Weights (T, keys) to six significant digits, so no nonzero weight becomes 0."""
    return [[float(f"{weight:.6g}") for weight in row] for row in w.tolist()]


def sentence(text, run):
    """The token ids of a sentence, (T,), and their labels. Raises ValueError on too many ids or an
    unknown one."""
    coder, config = run.tokenizer, run.model.config
    symbols = text is None and coder.name == "numbers"
    ids = (
        run.split("val").window(0, SHOWN)
        if symbols
        else coder.encode(SENTENCE if text is None else text)
    )
    labels, shown = (
        labels_of(ids, SENTENCE if text is None else text, coder),
        min(SHOWN, config.block_size),
    )
    if text is None:  # the same for every model, up to its block_size
        return ids[:shown], labels[:shown]
    if len(ids) > MOST:
        raise ValueError(
            f"the sentence has {len(ids)} tokens, and no more than {MOST} can be drawn: give a shorter "
            "--text"
        )
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
    # else the tokenizer adds a space
    if lengths is not None and sum(lengths[i] for i in ids) == len(data):
        ends = np.cumsum([lengths[i] for i in ids])
        pieces = [data[end - lengths[i] : end] for i, end in zip(ids, ends, strict=True)]
    signs = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "←"})
    labels = [piece.decode("utf-8", errors="backslashreplace").translate(signs) for piece in pieces]
    return [label if len(label) <= 14 else f"{label[:13]}…" for label in labels]


# measures that colour the page's heads
IN_GRID = ("sink", "entropy", "row_mass", "sparsity", "extra", "negative")
COST = "how much the loss of this sentence rises without the head, in nats per token"


def maps_of(run, ids, args):
    """One pass over a sentence ids (T,), for rows of T queries. Returns the maps of each layer,
    [{kind: (heads, T, keys)}], where keys is T, or 1 + T with an extra key's column first. The
    kinds are "weights", or with --views
    "view a", "view b" and "difference" (a - lambda b), and with --html "hidden", the weights if
    only the first row sees the first key. Also returns what else the page shows, which is empty
    without --html: the recipe, measures
    (layers, heads) of IN_GRID and with --cost the costs, hidden_measures, which are those of
    "hidden", norms of values (layers, heads, T), and norms of the hidden states (layers + 1, T)
    that enter a layer, and after the last."""
    kinds, probes, value_norms, stream = [], {"weights": [], "hidden": []}, [], []
    model, rows = run.model, as_ids(ids, run.machine)
    columns = (
        len(ids)
        + model.sink_tokens
        + any(block.attn.has_extra_key for block in model.transformer.h)
    )

    def see(layer, module, q, k, v, x, table):
        found = {"weights": module.weights_of(q, k, x, table)}
        if args.views:
            a, b = module.views_of(q, k, x, table)
            found = {"view a": a, "view b": b, "difference": found["weights"]}
        if args.html:
            found["hidden"] = module.weights_of(
                q, k, x, table, module.mask._replace(hidden=module.sink_tokens)
            )
            for kind in probes:
                probes[kind].append(probe_of(module, found[kind], kind == "hidden"))
            norms = v[0].float().norm(dim=-1)  # (Hv, T)
            value_norms.append(norms.repeat_interleave(module.heads // len(norms), 0).tolist())
        kinds.append(
            {
                kind: torch.constant_pad_nd(w[0].float().cpu(), (columns - w.shape[3], 0))
                for kind, w in found.items()
            }
        )

    with watching(model, lambda layer, h: stream.append(h[0].float().norm(dim=-1).tolist())):
        watch(model, see, rows, run.machine)
    if not args.html:
        return kinds, {}
    measures, hidden = (
        {name: [result[name] for result in map(Probe.numbers, layers)] for name in IN_GRID}
        for layers in probes.values()
    )
    # the last two are 0 in most recipes
    measures = {
        name: layers
        for name, layers in measures.items()
        if name not in ("extra", "negative") or any(map(any, layers))
    }
    if args.cost:  # of each head
        L, H = len(stream) - 1, model.transformer.h[0].attn.heads
        alone = [
            ("", "", 1, [output_zeroed(head.view(L, H))])
            for head in torch.eye(L * H, dtype=torch.bool)
        ]
        found = [
            round(line["loss_change"], 6)
            for line in costs(alone, model, rows, run.machine, 1)["changes"]
        ]
        measures["cost"] = [found[i : i + H] for i in range(0, L * H, H)]
    attn, trained = (
        knobs.get("layers") or knobs["attn"] for knobs in (vars(model.config), run.meta["knobs"])
    )
    about = f"--attn={attn}" + (
        ""
        if run.has_weights
        else ": derivatives of outputs by values, since this recipe has no attention weights"
    )
    about += f"; the model was trained with {trained}" if attn != trained else ""
    return kinds, {
        "about": about,
        "measures": measures,
        "hidden_measures": hidden,
        "value_norms": value_norms,
        "stream": stream,
    }


def probe_of(module, w, hides):
    """A Probe that has seen the weights w (1, heads, ahead + T, .) of a layer. hides: do later rows
    not see the first key? Then it is not among the keys that they may attend to."""
    probe, i = Probe(), torch.arange(w.shape[2] - module.sink_tokens, device=w.device)
    probe.see_rows(
        module, i, w[:, :, module.sink_tokens :], torch.ones(1, 1, len(i), device=w.device)
    )
    if hides:
        gone = visible(i[1:], 0, module.mask).sum().item()
        probe.sums["pairs"], probe.sums["sparsity"] = (
            probe.sums[name] - gone for name in ("pairs", "sparsity")
        )
    return probe


def in_words(numbers):
    """A table with a column for each map: for each query, the key with the most weight, and that
    weight. The last rows are the mean weights on the first token and on the extra key."""
    queries, keys, first = numbers["queries"], numbers["keys"], numbers["first"]
    w = torch.tensor([found["weights"] for found in numbers["maps"]])  # (maps, T, keys)
    top = w.abs().argmax(-1)
    rows = [
        [query]
        + [
            f"{keys[key]} {w[m, i, key]:5.2f}" if w[m, i, key] else "-"
            for m, key in enumerate(top[:, i])
        ]
        for i, query in enumerate(queries)
    ]
    for column, name in enumerate(["extra", "sink"][-1 - first :]):  # the measures of probe
        rows.append([name, *(f"{mean:.3f}" for mean in w[:, :, column].mean(1))])
    header = [
        "{layer}.{head} {kind}".format(**found).removesuffix(" weights")
        for found in numbers["maps"]
    ]
    return (
        "for each query (down), the key with the most weight, and that weight; columns are layer.head\n"
        + table(rows, ["", *header])
    )


def page(path, found):
    """Write evals/heads.html with a tab for each run: its numbers, as JSON, in the element "data".

    The page is one file and needs no network. It links to docs/ if it is inside the repository."""
    names = "about", "queries", "keys", "first", "measures", "hidden_measures"
    tabs = []
    for place, numbers in found.items():
        weights = [[one[kind] for one in numbers["maps"]] for kind in ("weights", "hidden")]
        tabs.append(
            {name: numbers[name] for name in names}
            | {
                "name": place.removeprefix("out/"),
                "meanings": {name: MEASURES.get(name, COST) for name in numbers["measures"]},
                "weights": packed(weights),  # of the shape (2, maps, T, keys)
                "value_norms": packed(numbers["value_norms"]),
                "stream": [[float(f"{norm:.4g}") for norm in norms] for norms in numbers["stream"]],
            }
        )
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
    grids = [
        [list(maps) for _, maps in groupby(numbers["maps"], lambda one: one["layer"])]
        for numbers in found.values()
    ]  # for each run, the maps of each column
    rows, columns = max(len(maps) for grid in grids for maps in grid), max(map(len, grids))
    beside = columns == 1
    # inches of a map
    side = min(7.0, max(2.6, 0.14 * max(len(numbers["keys"]) for numbers in found.values())))
    down, across = (rows, len(grids)) if beside else (rows * len(grids), columns)
    shown = [
        (np.array(one["weights"]), later_keys(numbers))
        for numbers in found.values()
        for one in numbers["maps"]
    ]
    # all colours go by the square root of the weight, so that small weights show. The scale ends at
    # the largest weight after the first row, in which softmax always has a weight of 1, or at 1 if
    # that is near
    most = max(1e-6, *(np.abs(w[min(1, len(w) - 1) :]).max() for w, _ in shown))
    most = 1 if 0.8 < most < 1 else most
    below = any((w < 0).any() for w, _ in shown)
    root, square = lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x * x
    norm = pyplot().matplotlib.colors.FuncNorm(
        (root, square), vmin=-most if below else 0, vmax=most
    )
    colours = {"cmap": "RdBu_r" if below else "Blues", "norm": norm}
    beyond = "max" if any(w.max() > most for w, _ in shown) else "neither"  # in a first row
    with figure_of(path, [side + 1.5] * down, [side + 1.1] * across) as axes:
        for ax in axes.flat:
            ax.set_axis_off()  # a column may be shorter than others
        parts = np.split(axes, len(grids), axis=int(beside))
        for part, (place, numbers), grid in zip(parts, found.items(), grids, strict=True):
            image = draw_run(
                part,
                numbers,
                grid,
                f"{Path(place).name}: " if len(found) > 1 else "",
                side,
                colours,
            )
        zeros = any((w == 0)[~later].any() for w, later in shown)
        label = "weight (square-root scale" + ("; yellow: exactly 0)" if zeros else ")")
        figure = axes[0, 0].figure
        figure.supxlabel("key: the token that is attended to", fontsize=10)
        figure.supylabel("query: the token that attends", fontsize=10)
        figure.colorbar(image, ax=axes, label=label, shrink=0.6, aspect=30, pad=0.01, extend=beyond)


def later_keys(numbers):
    """The mask (T, keys) of the keys that a row does not see because they come later."""
    T, keys = len(numbers["queries"]), len(numbers["keys"])
    return np.triu(np.ones((T, keys), bool), 1 + keys - T)


def draw_run(axes, numbers, grid, place, side, colours):
    """All maps of a run. Returns the last image."""
    exactly_zero, later = (
        pyplot().matplotlib.colors.ListedColormap(["#fff3c4"]),
        later_keys(numbers),
    )
    # letters fit into a cell, and a $ does not begin a formula
    keys, plain = (
        numbers["keys"],
        {"parse_math": False, "fontsize": min(7, 60 * side / len(numbers["keys"]))},
    )
    for column, maps in zip(axes.T, grid, strict=False):
        for ax, found in zip(column, maps, strict=False):
            w = np.array(found["weights"])
            ax.set_axis_on()
            ax.set_facecolor("0.93")  # later keys are grey, exact zeros yellow
            image = ax.imshow(np.ma.array(w, mask=later | (w == 0)), **colours)
            ax.imshow(np.ma.array(w, mask=later | (w != 0)), cmap=exactly_zero)
            name = "layer {layer}, head {head}, {kind}".format(**found).removesuffix(", weights")
            name = place + name if ax is axes[0, 0] else name
            ax.set_title(
                f"{name}\nsink {w[:, numbers['first']].mean():.2f}",
                fontsize=9,
            )
            ax.set_xticks(
                range(len(keys)), keys, rotation=0 if max(map(len, keys)) == 1 else 90, **plain
            )
            ax.set_yticks(range(len(numbers["queries"])), numbers["queries"], **plain)
            ax.tick_params(length=0, pad=1)
            ax.spines[:].set_visible(False)
    return image
