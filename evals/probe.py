"""Where the attention of a run goes, and what its hidden states look like: measures.py and
stream.py in one pass."""

import math
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from common.flags import knob
from evals.instrument import (
    Windows,
    explained,
    first_line,
    table,
    watch,
    whole_numbers,
    window_batches,
    with_meanings,
)
from evals.lab_figures import lab_figures
from evals.measures import IN_THE_LAB, MEASURES, Probe, mean_of
from evals.pictures import SHARES, draw_rows, heat_map, line_panel, powers_of_two
from evals.stream import Stream, watching

COLUMNS = MEASURES | {  # of the first table; two do not measure a head
    "top": "the largest sink among the heads of the layer, and its head",
    "massive": "norm of the first token's hidden state over the others'; the largest ratio at any place",
}
# without --all
SHOWN = "sink", "share", "row_mass", "sparsity", "value_norm_ratio", "top", "massive"

STREAM = {  # columns of the second table
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
    "value": "norm of the first token's value over the others'",
    "cos_qk": "mean cosine of the later queries with the first key, as they enter the score",
    "cos_kk": "mean cosine of the later keys with the first key",
    "spread": "largest distance of a hidden state from the first, over their mean norm",
}
STREAM_SHOWN = "norm", "massive", "largest", "at", "channels", "value"

MAPS = {
    "sink": "first token, all rows",
    "value_norm_ratio": "norm of its value over the others'",
    "dispersion": "entropy of the rows over log n",
}  # {measure: title} of the picture


@dataclass
class ProbeFlags(Windows):
    """Flags of probe"""

    windows: int = knob(
        -1, "fixed windows; 0: as many as fit; -1: 25,600 tokens, but at most 100 windows", least=-1
    )
    lengths: str = knob(
        "", "several lengths, such as 64,256,1024: print one line of means for each"
    )
    input: str = knob(
        "data",
        "what the model reads. repeat: each window's first token; random: random ids; bos: the "
        "separator first",
        ("data", "repeat", "random", "bos"),
    )
    k: int = knob(1, "the k of Sink_k^eps: which token, counted from 1", least=1)
    eps: float = knob(
        0.3, "the eps of Sink_k^eps: a token with a larger mean share is a sink", least=0
    )
    heads: bool = knob(False, "print a line for each head")
    all: bool = knob(False, "print all columns, and all figures of a run of the sink lab")
    layer: int = knob(
        -1, "also list norms and variances by position in this layer, counted from 0", least=-1
    )

    def __post_init__(self):
        super().__post_init__()
        whole_numbers(self.lengths or "0", "lengths")  # raises ValueError
        if self.k > Probe.ROWS:
            raise ValueError(
                f"--k={self.k}, but Sink_k^eps looks at the first {Probe.ROWS} tokens: lower it"
            )


def command(args, run):
    """Measure where the attention goes, by layer or head, and what the hidden states look like."""
    flag, layers = "lengths" if args.lengths else "length", run.model.config.n_layer
    lengths = {run.window(T, flag) for T in whole_numbers(args.lengths or str(args.length), flag)}
    if args.layer >= layers:
        raise ValueError(
            f"--layer={args.layer}, but the layers of {run.out_dir} are 0 to {layers - 1}"
        )
    if args.k > min(lengths):
        raise ValueError(f"--k={args.k}, but a window has {min(lengths)} tokens: lower it")
    if min(lengths) < 2:
        raise ValueError(
            "a window needs 2 tokens or more, to compare the first with others: give a larger --length"
        )
    by_length = {}
    for T in sorted(lengths, reverse=True):  # the longest first: it may not fit into memory
        count = max(1, min(100, 25_600 // T)) if args.windows < 0 else args.windows
        by_length[T] = probe(
            run.model,
            run.split(args.split),
            run.machine,
            count,
            args.batch_size,
            T,
            bar=True,
            change=change_of(args.input, run),
            k=args.k,
            eps=args.eps,
        )
    longest = by_length[max(lengths)]  # all numbers except "lengths" are those of the longest
    numbers = (
        run.reads(args.split, longest["windows"], max(lengths))
        | longest
        | {"input": args.input, "k": args.k, "eps": args.eps}
    )
    if args.lengths:
        numbers["lengths"] = [
            {
                "length": T,
                "windows": found["windows"],
                **found["mean"],
                "massive": max(place["massive"] for place in found["stream"]),
            }
            for T, found in sorted(by_length.items())
        ]
    if args.all and "triggers" in run.data_meta:  # only the sink lab's sequences have them
        numbers["lab"] = lab_figures(run.model, run.split("val"), run.data_meta, run.machine)
    return numbers, "\n\n".join(tables(args, numbers))


def change_of(kind, run):
    """The function that --input applies to a batch of windows (B, T)."""
    dice, separator = (
        torch.Generator().manual_seed(0),
        kind == "bos" and getattr(run.tokenizer, "separator", None),
    )
    if separator is None:
        raise ValueError(
            f"--input=bos: the tokens of {run.data[0]} have no separator, give another --input"
        )
    return {
        "data": lambda idx: idx,
        "repeat": lambda idx: idx[:, :1].expand_as(idx),  # Lazy Attention, figure 3b
        "random": lambda idx: torch.randint(
            run.data_meta["vocab_size"], idx.shape, generator=dice
        ).to(idx.device),
        "bos": lambda idx: torch.cat([torch.full_like(idx[:, :1], separator), idx[:, :-1]], 1),
    }[kind]


@torch.no_grad()
def probe(
    model,
    split,
    machine,
    count=100,
    batch_size=4,
    length=0,
    bar=False,
    change=lambda idx: idx,
    k=1,
    eps=0.3,
):
    """The MEASURES of every layer and head on `count` fixed windows, 0 for as many as fit:
    {"windows": their number, "length": tokens in each, "mean": {measure: value}, "layers":
    [{measure: [per head]}], "stream": [Stream.result of each layer, and after the last]}. A value
    is None if it is undefined.
    length: tokens of a window, 0 for block_size. bar: show the progress. change: a function of each
    batch of windows. k, eps: those of Sink_k^eps."""
    T, windows = length or model.config.block_size, 0
    probes = [Probe(k, eps) for _ in model.transformer.h]
    streams = [Stream() for _ in range(len(probes) + 1)]

    def see(layer, module, q, k, v, x, table):
        probes[layer].see(module, q, k, v, x, table)
        if module.score_heads > module.heads:
            probes[layer].see_views(module, q, k, table)
        streams[layer].see(module, q, k, v, x)

    with watching(model, lambda layer, h: streams[layer].see_hidden(h, model.sink_tokens)):
        for rows, starts in window_batches(
            model, split, machine, T, count, batch_size, bar, packed=True
        ):
            watch(model, see, change(rows[:, :-1]), machine, starts)  # (B, T)
            windows += len(rows)
    mean = {name: None if math.isnan(value) else value for name, value in mean_of(probes).items()}
    return {
        "windows": windows,
        "length": T,
        "mean": mean,
        "layers": [probe.numbers() for probe in probes],
        "stream": [stream.result() for stream in streams],
    }


def tables(args, found):
    """Yield the tables of a run, each with the meanings of its columns below it."""
    mean, lines = found["mean"], {}  # {name of a line: {measure: value}}
    yield (
        f"{first_line(found)}, --input={found['input']}\nan even spread puts {mean['uniform']:.4f} on the first "
        f"token; sink_eps is Sink_{found['k']}^{found['eps']:g}"
    )
    for l, of_heads in enumerate([] if args.lengths else found["layers"]):
        sinks = of_heads["sink"]
        if args.heads:
            lines |= {
                f"{l}.{h}": {name: values[h] for name, values in of_heads.items()}
                for h in range(len(sinks))
            }
        else:  # means over the heads, or the largest of peaks
            lines[str(l)] = {
                name: None
                if None in values
                else max(values)
                if name.startswith("peak")
                else fmean(values)
                for name, values in of_heads.items()
            }
            lines[str(l)]["top"] = f"{max(sinks):.2f} ({sinks.index(max(sinks))})"
    lines |= (
        {str(line["length"]): line for line in found["lengths"]} if args.lengths else {"mean": mean}
    )
    yield explained(
        lines,
        {name: COLUMNS[name] for name in COLUMNS if args.all or name in SHOWN},
        "length" if args.lengths else "layer.head" if args.heads else "layer",
    )
    if args.lengths:
        return
    *layers, end = map(stream_row, found["stream"])  # end: the stream after the last layer
    lines = {str(layer): row for layer, row in enumerate(layers)} | {"end": end}
    yield explained(
        lines, {name: STREAM[name] for name in STREAM if args.all or name in STREAM_SHOWN}, "layer"
    )
    if args.layer >= 0:  # as Lazy Attention prints them (2601.00919, tables 4 to 7)
        place = found["stream"][args.layer]
        # and the rest
        columns = [[*values, place[name][1]] for name, values in place["positions"].items()]
        rows = [[str(i), *map(number, row)] for i, row in enumerate(zip(*columns, strict=True))]
        rows[-1][0] = "rest"
        yield (
            f"layer {args.layer} by position, means over sequences and heads\n"
            + table(rows, ["position", *place["positions"]])
        )
    if "lab" in found:
        figures = {name: found["lab"][name] for name in IN_THE_LAB if name in found["lab"]}
        yield f"the sink lab, 256 sequences of the held-out data\n{with_meanings(figures, IN_THE_LAB)}"


def stream_row(place):
    """The cells of STREAM. After the last layer, which has no queries, some are None."""
    ratio = {name: place[name][0] / place[name][1] for name in place["positions"] if place[name][1]}
    cells = [
        " / ".join(map(number, place["hidden_norm"])),
        place["massive"],
        place["largest"],
        f"{place['at']} ({place['at_share']:.2f})",
        " ".join(f"{channel}:{number(value)}" for channel, value, _ in place["channels"]),
        place["channels"][0][2],
        *map(ratio.get, ("hidden_var", "input_var", "query_norm", "key_norm", "value_norm")),
        *map(place.get, ("cos_qk", "cos_kk", "spread")),
    ]
    return dict(zip(STREAM, cells, strict=True))


def number(value):
    return "-" if value is None else f"{value:.4g}"


def draw(path, found):
    """Draw a row for each run: MAPS of layers (down) by heads (across), the first token in the
    stream, and with --lengths share, dispersion and the share of an even spread by length."""
    rows = {}
    for place, numbers in found.items():
        maps = {name: [layer[name] for layer in numbers["layers"]] for name in MAPS}
        rows[place] = [
            partial(heat_map, cells=maps[name], colours=SHARES, numbers=maps[name], title=title)
            for name, title in MAPS.items()
        ] + [partial(draw_stream, places=numbers["stream"])]
        if "lengths" in numbers:
            rows[place].append(partial(draw_lengths, lines=numbers["lengths"]))
    draw_rows(path, rows)


def draw_lengths(ax, lines):
    curves = {
        name: [[line[key] for line in lines] for key in ("length", name)]
        for name in ("share", "dispersion", "uniform")
    }
    line_panel(ax, curves, "by length, means over heads", "tokens of a window")
    powers_of_two(ax.xaxis)
    ax.set_ylim(0, 1.03)


def draw_stream(ax, places):
    """Draw the first token's norm over the others', layer by layer; if it is massive, also its
    largest channel."""
    ratios = [place["massive"] for place in places]
    top = ratios.index(max(ratios))
    line_panel(
        ax,
        {"": (ratios, range(len(ratios)))},
        "norm of its hidden state over the others'",
        "",
        [1],
        False,
    )
    if ratios[top] > 3:
        channel, value, _ = places[top]["channels"][0]
        ax.annotate(
            f"channel {channel}: {number(value)}",
            (ratios[top], top),
            xytext=(-8, -12),
            ha="right",
            fontsize=8,
            textcoords="offset points",
        )
    ticks = [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]
    ax.set_xscale("log")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set(
        xlim=(min(0.5, 0.8 * min(ratios)), max(3, 1.3 * ratios[top])),
        ylim=(len(ratios) - 0.5, -0.5),
        ylabel="enters layer",
    )  # the embeddings are on top
    ax.set_yticks(range(len(ratios)), [*range(len(ratios) - 1), "end"], fontsize=7)
