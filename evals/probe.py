"""Where the attention of a run goes, and what its hidden states look like, on fixed windows.

measures.py defines the measures of attention weights, stream.py those of the residual stream. This file takes both in
one pass over the windows, and shows them as tables and as a picture.
"""
import math
from dataclasses import dataclass

import torch

from common.flags import at_least, knob
from evals.instrument import Windows, first_line, legend, table, watch, whole_numbers, window_batches
from evals.measures import MEASURES, Probe, mean_of
from evals.pictures import SHARES, figure_of, heat_map, line_panel, powers_of_two
from evals.stream import Stream, watching

TOP = {"top": "the largest sink among the heads of the layer, and its head"}
MASSIVE = {"massive": "norm of the first token's hidden state over the others'; the largest ratio at any place"}
IN_JSON = ("density", "entropy")                # left out of the tables, which show row_mass, sink and dispersion
ALWAYS = ("sink", "share", "row_mass")          # shown even if they are 0: each misleads without the others

STREAM = {                                      # columns of the second table
    "norm": "mean norm of the hidden states that enter the layer: the first token's, and the others'",
    "massive": "ratio of the first to the second, mean over sequences",
    "largest": "norm of the token with the largest norm, over the others'",
    "at": "position of that token, counted from 0: the most frequent position, and how frequent it is",
    "channels": "the largest channels of that token, and their values",
    "x median": "the largest of these values over the median magnitude of all hidden states",
    "var": "variance over the channels of a hidden state: the first token's over the others'",
    "var_in": "the same of the input to queries, keys and values (with pre-norm, after the norm)",
    "query": "norm of the first token's query over the others', as they enter the score: after rotation and norms",
    "key": "the same for the keys",
    "value": "the same for the values",
    "cos_qk": "mean cosine of the later queries with the first key, as they enter the score",
    "cos_kk": "mean cosine of the later keys with the first key",
    "spread": "largest distance of a hidden state from the first, over their mean norm",
}

MAPS = {"sink": "weight on the first token", "value_norm_ratio": "norm of its value over the others'",
        "dispersion": "entropy of the rows over log n"}                 # {measure: title} of the picture


@dataclass
class ProbeFlags(Windows):
    """Flags of probe"""
    windows: int = knob(-1, "fixed windows, spread evenly; 0: as many as fit; -1: 25,600 tokens in all, but at most "
                            "100 windows")
    lengths: str = knob("", "several lengths, such as 64,256,1024: print one line of means for each")
    input: str = knob("data", "what the model reads. data: windows of the data; repeat: the first token of each, "
                              "repeated; random: random ids; bos: the separator, then the data",
                      ("data", "repeat", "random", "bos"))
    k: int = knob(1, "the k of Sink_k^eps: which token, counted from 1")
    eps: float = knob(0.3, "the eps of Sink_k^eps: a token with a larger mean share is a sink")
    heads: bool = knob(False, "print a line for each head")
    layer: int = knob(-1, "also list norms and variances by position in this layer, counted from 0")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, k=1, eps=0, layer=-1)
        if self.lengths:
            whole_numbers(self.lengths, "lengths")          # raises ValueError
        if self.k > Probe.ROWS:
            raise ValueError(f"--k={self.k}, but Sink_k^eps looks at the first {Probe.ROWS} tokens: lower it")


def command(args, run):
    """Measure where the attention goes, by layer or head, and what the hidden states look like."""
    flag, layers = "lengths" if args.lengths else "length", run.model.config.n_layer
    lengths = {run.window(T, flag) for T in whole_numbers(args.lengths or str(args.length), flag)}
    if args.layer >= layers:
        raise ValueError(f"--layer={args.layer}, but the layers of {run.out_dir} are 0 to {layers - 1}")
    if args.k > min(lengths):
        raise ValueError(f"--k={args.k}, but a window has {min(lengths)} tokens: lower it")
    if min(lengths) < 2:
        raise ValueError("a window needs 2 tokens or more, to compare the first with others: give a larger --length")
    by_length = {}
    for T in sorted(lengths, reverse=True):     # the longest may fail
        count = max(1, min(100, 25_600 // T)) if args.windows < 0 else args.windows
        by_length[T] = probe(run.model, run.split(args.split), run.machine, count, args.batch_size, run.stride, T,
                             bar=True, change=change_of(args.input, run), k=args.k, eps=args.eps)
    longest = by_length[max(lengths)]           # all numbers besides "lengths" are those of the longest
    numbers = run.reads(args.split, longest["windows"], max(lengths)) | longest | {
        "input": args.input, "k": args.k, "eps": args.eps}
    if args.lengths:                            # massive: the largest ratio at any place of the stream
        numbers["lengths"] = [{"length": T, "windows": found["windows"], **found["mean"],
                               "massive": max(place["massive"] for place in found["stream"])}
                              for T, found in sorted(by_length.items())]
    return numbers, tell(args, {"": numbers})


def change_of(kind, run):
    """The function that --input applies to a batch of windows (B, T), or None."""
    if kind == "repeat":                        # Lazy Attention, figure 3b
        return lambda idx: idx[:, :1].expand_as(idx)
    if kind == "random":
        dice, ids = torch.Generator().manual_seed(0), run.data_meta["vocab_size"]
        return lambda idx: torch.randint(ids, idx.shape, generator=dice).to(idx.device)
    if kind == "bos":
        separator = getattr(run.tokenizer, "separator", None)
        if separator is None:
            raise ValueError(f"--input=bos: the tokens of {run.data[0]} have no separator, give another --input")
        return lambda idx: torch.cat([torch.full_like(idx[:, :1], separator), idx[:, :-1]], 1)


@torch.no_grad()
def probe(model, split, machine, count=100, batch_size=4, stride=1, length=0, bar=False, change=None, k=1, eps=0.3):
    """The MEASURES of every layer and head on `count` fixed windows, 0 for as many as fit: {"windows": their number,
    "length": tokens in each, "mean": {measure: value}, "layers": [{measure: [per head]}], "stream": [Stream.result of
    each layer, and after the last]}. A value is None if it is undefined.

    length: tokens of a window, 0 for block_size. bar: show the progress. change: a function of each batch of windows.
    k, eps: those of Sink_k^eps."""
    T, layers = length or model.config.block_size, len(model.transformer.h)
    probes, streams = [Probe(k, eps) for _ in range(layers)], [Stream() for _ in range(layers + 1)]

    def see(layer, module, q, k, v, x, table):
        probes[layer].see(module, q, k, v, x, table)
        if module.score_heads > module.heads:
            probes[layer].see_views(module, q, k, table)
        streams[layer].see(module, q, k, v, x)

    windows = 0
    with watching(model, lambda layer, h: streams[layer].see_hidden(h, model.ahead)):
        for rows in window_batches(model, split, machine, T, count, batch_size, stride, bar):
            idx = rows[:, :-1]                  # (B, T)
            watch(model, see, change(idx) if change else idx, machine)
            windows += len(rows)
    return {"windows": windows, "length": T, "mean": {name: known(m) for name, m in mean_of(probes).items()},
            "layers": [rounded(p.result()) for p in probes], "stream": [s.result() for s in streams]}


def rounded(result):
    """One layer's measures, {measure: [per head]}."""
    return {name: [known(round(value, 6)) for value in result[name].tolist()] for name in MEASURES}


def known(value):
    """A number, or None for nan, which JSON lacks."""
    return None if math.isnan(value) else value


# ------------------------------------------------------------------------------------------- the tables, the picture


def tell(args, found):
    """The tables of each run, and below them the meanings of the columns."""
    texts, meant = [], {}                       # meant: {kind of table: {column: meaning}}
    for place, numbers in found.items():
        texts += [place] if len(found) > 1 else []
        for kind, text, meanings in tables(numbers, args.heads, args.layer):
            texts.append(text)
            meant[kind] = meant.get(kind, {}) | meanings
    return "\n\n".join([*texts, *(legend(meanings) for meanings in meant.values() if meanings)])


def tables(found, heads, layer):
    """Yield a run's tables: kind, text, and the meanings of the columns. heads: a line for each head; layer: also list
    the positions of this layer, -1 for none."""
    lengths, layers, mean = found.get("lengths"), found["layers"], found["mean"]
    # an even spread puts the same weight on the first token in all layers, unless only some of them have a window
    even = not lengths and len({value for of_heads in layers for value in of_heads["uniform"]}) == 1
    yield "", (f"{first_line(found)}, --input={found['input']}\n"
               + (f"an even spread puts {mean['uniform']:.4f} on the first token; " if even else "")
               + f"sink_eps is Sink_{found['k']}^{found['eps']:g}"), {}
    if lengths:
        yield "weights", *measures_table("length", {str(line["length"]): line for line in lengths}, MEASURES | MASSIVE)
        return
    left_out = (*IN_JSON, "uniform") if even else IN_JSON   # then the first line has "uniform"
    meanings = {name: meaning for name, meaning in MEASURES.items() if name not in left_out}
    if heads:
        first = "layer.head"
        lines = {f"{l}.{h}": {name: values[h] for name, values in of_heads.items()}
                 for l, of_heads in enumerate(layers) for h in range(len(of_heads["sink"]))}
    else:
        first, meanings = "layer", {"sink": MEASURES["sink"]} | TOP | meanings
        lines = {str(l): layer_line(of_heads) for l, of_heads in enumerate(layers)}
    yield "weights", *measures_table(first, lines | {"mean": mean}, meanings)
    names = [*map(str, range(len(layers))), "end"]          # the last line is the stream after the last layer
    rows = [[name, *stream_row(place)] for name, place in zip(names, found["stream"], strict=True)]
    yield "stream", table(rows, ["layer", *STREAM]), STREAM
    if layer >= 0:                              # as Lazy Attention prints them (2601.00919, tables 4 to 7)
        place = found["stream"][layer]
        rows = [[str(i), *row] for i, row in enumerate(zip(*place["positions"].values(), strict=True))]
        rows += [["rest", *(place[name][1] for name in place["positions"])]]
        cells = [[name, *(None if value is None else f"{value:.4g}" for value in row)] for name, *row in rows]
        yield "", (f"layer {layer} by position, means over sequences and heads\n"
                   + table(cells, ["position", *place["positions"]])), {}


def measures_table(first, lines, meanings):
    """lines {name: {measure: value}} as a table, and the meanings of its columns. Measures that are 0 or 1 in all lines
    are named below the table. Undefined measures are left out."""
    values = {name: [line[name] for line in lines.values() if line.get(name) is not None] for name in meanings}
    zero = [name for name in meanings if name not in ALWAYS and values[name] and not any(values[name])]
    one = [name for name in ("row_mass",) if all(f"{value:.4f}" == "1.0000" for value in values[name])]
    shown = [name for name in meanings if values[name] and name not in zero + one]
    text = table([[key, *(line.get(name) for name in shown)] for key, line in lines.items()], [first, *shown])
    everywhere = [f"{number} everywhere: {', '.join(names)}" for number, names in ((0, zero), (1, one)) if names]
    return "\n".join([text, *everywhere]), {name: meanings[name] for name in shown + one}


def layer_line(of_heads):
    """{measure: mean over a layer's heads, or the largest of peaks}; "top": the head with the largest sink."""
    sinks, line = of_heads["sink"], {}
    for name, values in of_heads.items():
        mean = max if name.startswith("peak") else lambda x: sum(x) / len(x)
        line[name] = None if None in values else mean(values)
    return line | {"top": f"{max(sinks):.2f} ({sinks.index(max(sinks))})"}


def stream_row(place):
    """The cells of STREAM; after the last layer, which has no queries, some are dashes."""
    ratio = {name: place[name][0] / place[name][1] for name in place["positions"] if place[name][1]}
    channels = " ".join(f"{channel}:{number(value)}" for channel, value, _ in place["channels"])
    return [" / ".join(map(number, place["hidden_norm"])), number(place["massive"]), number(place["largest"]),
            f"{place['at']} ({place['at_share']:.2f})", channels, number(place["channels"][0][2]),
            *(number(ratio.get(name)) for name in ("hidden_var", "input_var", "query_norm", "key_norm", "value_norm")),
            *(number(place.get(name)) for name in ("cos_qk", "cos_kk", "spread"))]


def number(value):
    """A number with two decimals, or without decimals from 100 on; a dash for None."""
    return "-" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def draw(path, found):
    """Draw a row for each run: MAPS of layers (down) by heads (across) with a number in every cell, the first token in
    the stream, and with --lengths share, dispersion and the share of an even spread by length."""
    layers = max(len(numbers["layers"]) for numbers in found.values())
    heads = max(len(numbers["layers"][0]["sink"]) for numbers in found.values())
    curves = 1 + any("lengths" in numbers for numbers in found.values())
    widths = [max(3.2, 1.2 + 0.52 * heads)] * len(MAPS) + [3.6] * curves
    with figure_of(path, [max(2.6, 1.2 + 0.26 * layers)] * len(found), widths) as axes:
        for (place, numbers), row in zip(found.items(), axes, strict=True):
            for ax, (name, title) in zip(row, MAPS.items(), strict=False):
                cells = [layer[name] for layer in numbers["layers"]]
                heat_map(ax, cells, SHARES, cells)
                ax.set_title(title, fontsize=10)
            draw_stream(row[len(MAPS)], numbers["stream"])
            if "lengths" in numbers:
                lines = numbers["lengths"]
                lengths = [line["length"] for line in lines]
                line_panel(row[-1], {name: (lengths, [line[name] for line in lines])
                                     for name in ("share", "dispersion", "uniform")},
                           "by length, means over heads", "tokens of a window")
                powers_of_two(row[-1].xaxis)
                row[-1].set_ylim(0, 1.03)
            if len(found) > 1:
                row[0].set_ylabel(f"{place}\nlayer")


def draw_stream(ax, places):
    """Draw the first token's norm over the others', layer by layer; if it is massive, also its largest channel."""
    ratios = [place["massive"] for place in places]
    top = ratios.index(max(ratios))
    line_panel(ax, {"": (ratios, range(len(ratios)))}, "norm of its hidden state over the others'", "", [1], False)
    if ratios[top] > 3:
        channel, value, _ = places[top]["channels"][0]
        ax.annotate(f"channel {channel}: {number(value)}", (ratios[top], top), xytext=(-8, -12), ha="right",
                    fontsize=8, textcoords="offset points")
    ticks = [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]
    ax.set_xscale("log")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_xlim(min(0.5, 0.8 * min(ratios)), max(3, 1.3 * ratios[top]))
    ax.set_ylim(len(ratios) - 0.5, -0.5)        # the embeddings are on top
    ax.set_yticks(range(len(ratios)), [*range(len(ratios) - 1), "end"], fontsize=7)
    ax.set_ylabel("enters layer")
