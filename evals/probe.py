"""Where the attention of a run goes, and what its hidden states look like: measures.py and
stream.py in one pass."""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from common.flags import knob
from evals.instrument import (
    Windows,
    explained,
    first_line,
    legend,
    number,
    table,
    watch,
    whole_numbers,
    window_batches,
)
from evals.lab_figures import lab_figures
from evals.maps import labels_of, sentence
from evals.measures import IN_THE_LAB, MEASURES, Probe, mean_of
from evals.pictures import (
    SHARES,
    draw_rows,
    figure_of,
    frame,
    heat_map,
    line_panel,
    powers_of_two,
    whole_ticks,
)
from evals.sample import as_ids
from evals.stream import FIRST, Stream, watching

COLUMNS = MEASURES | {  # of the first table; two do not measure a head
    "top": "the largest sink among the heads of the layer, and its head",
    "massive": "norm of the first token's hidden state over the others', mean over sequences; the "
    "largest at any place",
}
# without --all
SHOWN = "sink", "share", "row_mass", "sparsity", "value_norm_ratio", "top", "massive"

STREAM = {  # columns of the second table
    "norm": "mean norm of the hidden states that enter the layer: the first, and the others",
    "massive": "the first over the second in each sequence, then the mean over sequences",
    "ln_1": "the same of what the layer's first norm reads",
    "ln_2": "the same of what its second norm reads",
    "largest": "norm of the token with the largest norm over the others', mean over sequences",
    "at": "position of that token, counted from 0: the most frequent one, and how frequent it is",
    "channels": "the largest channels of that token, and their values",
    "channel_ratio": "the largest of these values over the median magnitude of all hidden states",
    "var": "mean variance over the channels of a hidden state: the first token's over the others'",
    "var_in": "the same of the input to queries, keys and values (with pre-norm, after the norm)",
    "query": "mean norm of the first token's query over the others', after rotation and norms",
    "key": "the same for the keys",
    "cos_qk": "mean cosine of the later queries with the first key, as they enter the score",
    "cos_kk": "mean cosine of the later keys with the first key",
    "spread": "largest distance of a hidden state from the first, over their mean norm",
}
STREAM_SHOWN = "norm", "massive", "largest", "at", "channels"

MAPS = {  # {measure: title} of the picture
    "sink": "sink: weight on the first token",
    "value_norm_ratio": "norm of its value over the others'",
    "dispersion": "entropy of the rows over log n",
}


@dataclass
class ProbeFlags(Windows):
    """Flags of probe"""

    windows: int = knob(
        -1, "fixed windows; 0: as many as fit; -1: 25,600 tokens, but at most 100 windows", least=-1
    )
    lengths: str = knob(
        "", "several lengths, such as 64,256,1024: print one line of means for each"
    )
    text: str = knob("", "read this sentence in place of the windows; --layer lists its tokens")
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
    lines: str = knob(
        "",
        "with --png: draw these columns of --all by layer, or with --lengths by length, a line for "
        "each run. A panel for each column, or for several: sparsity,peak+peak_a+peak_b",
    )
    all: bool = knob(False, "print all columns, and all figures of a run of the sink lab")
    layer: int = knob(
        -1, "also list norms and variances by position in this layer, counted from 0", least=-1
    )

    def __post_init__(self):
        super().__post_init__()
        whole_numbers(self.lengths or "0", "lengths")  # raises ValueError
        if self.text and (self.lengths or self.length or self.windows >= 0):
            raise ValueError("--text is one sentence: leave out --length, --lengths and --windows")
        if self.k > Probe.ROWS:
            raise ValueError(
                f"--k={self.k}, but Sink_k^eps looks at the first {Probe.ROWS} tokens: lower it"
            )
        for name in self.lines.replace("+", ",").split(",") if self.lines else []:
            if name not in MEASURES:
                raise ValueError(f"--lines: {name!r} is none of {', '.join(MEASURES)}")


def command(args, run):
    """Measure where the attention goes, by layer or head, and what the hidden states look like."""
    layers = run.model.config.n_layer
    change, ids = change_of(args.input, run), None
    flag = "lengths" if args.lengths else "length"
    if args.text:
        flag = "text"
        ids = change(as_ids(sentence(args.text, run)[0], run.machine))  # (1, T)
        run.check_positions(ids.shape[1], flag)
        lengths = [ids.shape[1]]
    else:
        lengths = whole_numbers(args.lengths or str(args.length), flag)
        lengths = sorted({run.window(T, flag) for T in lengths})
    if args.layer >= layers:
        raise ValueError(f"--layer={args.layer}, but the run has layers 0 to {layers - 1}")
    if args.k > lengths[0]:
        raise ValueError(f"--k={args.k}, but a window has {lengths[0]} tokens: lower it")
    if lengths[0] < 2:
        raise ValueError(
            f"--{flag} has {lengths[0]} token, but a window needs 2: give a longer one"
        )
    by_length = []
    for T in reversed(lengths):  # the longest first: it may not fit into memory
        count = args.windows
        if count < 0:
            count = max(1, min(100, 25_600 // T))
        found = probe(
            run.model,
            None if args.text else run.split(args.split),
            run.machine,
            count,
            args.batch_size,
            T,
            bar=True,
            change=change,
            k=args.k,
            eps=args.eps,
            ids=ids,
        )
        by_length.insert(0, found)
    longest = by_length[-1]  # all numbers except "lengths" are those of the longest
    numbers = run.reads(args.split, longest["windows"], lengths[-1]) | longest
    numbers |= {"input": args.input, "k": args.k, "eps": args.eps, "lines": args.lines}
    if args.text:
        numbers |= {"dataset": "the sentence", "split": "--text"}
        numbers["tokens"] = labels_of(ids[0].tolist(), "", run.tokenizer)
    if args.lengths:
        numbers["lengths"] = []
        for found in by_length:
            line = {"length": found["length"], "windows": found["windows"], **found["mean"]}
            line["massive"] = max(place["massive"] for place in found["stream"])
            numbers["lengths"].append(line)
    if args.all and "triggers" in run.data_meta:  # only the sink lab's sequences have them
        numbers["lab"] = lab_figures(run.model, run.split("val"), run.data_meta, run.machine)
    return numbers, "\n\n".join(tables(args, numbers))


def change_of(kind, run):
    """The function that --input applies to a batch of windows (B, T)."""
    dice = torch.Generator().manual_seed(0)
    separator = getattr(run.tokenizer, "separator", None) if kind == "bos" else 0
    if separator is None:
        raise ValueError(
            f"--input=bos: the tokens of {run.data[0]} have no separator, give another --input"
        )

    def random(idx):
        ids = torch.randint(run.data_meta["vocab_size"], idx.shape, generator=dice)
        return ids.to(idx.device)

    return {
        "data": lambda idx: idx,
        "repeat": lambda idx: idx[:, :1].expand_as(idx),  # Lazy Attention, figure 3b
        "random": random,
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
    local=0,
    ids=None,
):
    """The MEASURES of every layer and head on `count` fixed windows, 0 for as many as fit:
    {"windows": their number, "length": tokens in each, "mean": {measure: value}, "layers":
    [{measure: [per head]}], "stream": [Stream.result of each layer, and after the last]}. A value
    is None if it is undefined.

    length: tokens of a window, 0 for block_size. bar: show the progress. change: a function of each
    batch of windows. k, eps, local: those of Probe. ids (1, T): tokens in place of the windows."""
    T = length or model.config.block_size
    windows = 0
    probes = [Probe(k, eps, local) for _ in model.transformer.h]
    listed = FIRST if ids is None else ids.shape[1]  # first positions that the result lists
    streams = [Stream(listed) for _ in range(len(probes) + 1)]

    def see(layer, module, q, k, v, x, table):
        probes[layer].see(module, q, k, v, x, table)
        if module.score_heads > module.heads:
            probes[layer].see_views(module, q, k, table)
        streams[layer].see(module, q, k, v, x)

    if ids is None:
        batches = window_batches(model, split, machine, T, count, batch_size, bar, packed=True)
        batches = ((change(rows[:, :-1]), starts) for rows, _, starts in batches)
    else:
        batches = [(ids, None)]
    with watching(
        model,
        lambda layer, h: streams[layer].see_hidden(h, model.sink_tokens),
        lambda layer, name, h: streams[layer].see_first(name, h, model.sink_tokens),
    ):
        for rows, starts in batches:  # (B, T)
            watch(model, see, rows, machine, starts)
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
    yield (
        f"{first_line(found)}, --input={found['input']}\nan even spread puts "
        f"{found['mean']['uniform']:.4f} on the first token; sink_eps is "
        f"Sink_{found['k']}^{found['eps']:g}"
    )
    columns = {name: COLUMNS[name] for name in COLUMNS if args.all or name in SHOWN}
    if args.lengths:
        lines = {str(line["length"]): line for line in found["lengths"]}
        yield explained(lines, columns, "length")
        return
    lines = {}  # {its name: {measure: value}}
    for layer, of_heads in enumerate(found["layers"]):
        if not args.heads:
            lines[str(layer)] = over_heads(of_heads)
            continue
        for head in range(len(of_heads["sink"])):
            line = {name: values[head] for name, values in of_heads.items()}
            lines[f"{layer}.{head}"] = line
    lines["mean"] = found["mean"]
    yield explained(lines, columns, "layer.head" if args.heads else "layer")
    rows = {str(layer): stream_row(place) for layer, place in enumerate(found["stream"])}
    rows["end"] = rows.pop(str(len(rows) - 1))  # the stream after the last layer
    columns = {name: STREAM[name] for name in STREAM if args.all or name in STREAM_SHOWN}
    yield explained(rows, columns, "layer")
    if args.layer >= 0:
        yield by_position(found["stream"][args.layer], args.layer, found.get("tokens", []))
    if "lab" in found:
        text = legend(IN_THE_LAB, found["lab"])
        yield f"the sink lab, 256 sequences of the held-out data\n{text}"


def over_heads(of_heads):
    """The line of a layer: means over the heads that have a value, or the largest of peaks."""
    line = {}
    for name, values in of_heads.items():
        mean = max if name.startswith("peak") else fmean
        known = [value for value in values if value is not None]
        line[name] = mean(known) if known else None
    largest = max(of_heads["sink"])
    line["top"] = f"{largest:.2f} ({of_heads['sink'].index(largest)})"
    return line


def stream_row(place):
    """The cells of STREAM. After the last layer, which has no queries, some are None."""
    ratio = {}
    for name in place["positions"]:
        first, others = place[name]
        ratio[name] = first / others if others else None
    return {
        "norm": " / ".join(map(number, place["hidden_norm"])),
        **{name: place.get(name) for name in ("massive", "ln_1", "ln_2", "largest")},
        "at": f"{place['at']} ({place['at_share']:.2f})",
        "channels": " ".join(f"{channel}:{value:.4g}" for channel, value, _ in place["channels"]),
        "channel_ratio": place["channels"][0][2],
        "var": ratio.get("hidden_var"),
        "var_in": ratio.get("input_var"),
        "query": ratio.get("query_norm"),
        "key": ratio.get("key_norm"),
        "cos_qk": place.get("cos_qk"),
        "cos_kk": place.get("cos_kk"),
        "spread": place.get("spread"),
    }


def by_position(place, layer, labels):
    """Norms and variances by position in one layer, as Lazy Attention prints them (2601.00919,
    tables 4 to 7). The last row is the mean over all positions but the first. labels: the tokens of
    a sentence, [] for windows."""
    columns = [[*values, place[name][1]] for name, values in place["positions"].items()]
    rows = [[str(i), *map(number, row)] for i, row in enumerate(zip(*columns, strict=True))]
    rows[-1][0] = "rest"
    for row, label in zip(rows, labels, strict=False):
        row[0] += f" {label}"
    text = table(rows, ["position", *place["positions"]])
    return f"layer {layer} by position, means over sequences and heads\n{text}"


def draw(path, found):
    """Draw a row for each run: MAPS of layers (down) by heads (across), and the first token in the
    stream. With --lines: the figure of draw_lines."""
    if lines := next(iter(found.values()))["lines"]:
        return draw_lines(path, found, lines.split(","))
    rows = {}
    for place, numbers in found.items():
        maps = {name: [layer[name] for layer in numbers["layers"]] for name in MAPS}
        rows[place] = [
            partial(heat_map, cells=maps[name], colours=SHARES, numbers=maps[name], title=title)
            for name, title in MAPS.items()
        ]
        rows[place].append(partial(draw_stream, places=numbers["stream"]))
    draw_rows(path, rows)


def draw_lines(path, found, panels):
    """Draw panels such as "peak+peak_a" in a row, a line for each run and column: by layer, means
    over heads, or with --lengths by length, means over layers and heads."""
    axis = "length" if "lengths" in next(iter(found.values())) else "layer"
    points = {}  # {run: [{column: value} of each point]}
    short = {place: Path(place).name for place in found}
    if len({*short.values()}) < len(short):  # runs of the same name, or a run under several recipes
        short = {place: place for place in found}
    for place, numbers in found.items():
        layers = enumerate(map(over_heads, numbers["layers"]))
        points[place] = numbers.get("lengths") or [line | {"layer": i} for i, line in layers]
    with figure_of(path, [3.8], [4.6] * len(panels)) as axes:
        for ax, panel in zip(axes[0], panels, strict=True):
            names = panel.split("+")
            for (i, place), (j, name) in itertools.product(enumerate(points), enumerate(names)):
                known = [line for line in points[place] if line[name] is not None]
                if known:
                    label = f"{short[place]} {name}" if len(names) > 1 else short[place]
                    x, y = ([line[key] for line in known] for key in (axis, name))
                    style = ("-", "--", ":")[j % 3]  # a colour for each run, a dash for each column
                    ax.plot(x, y, style, color=f"C{i}", marker="o", markersize=4, label=label)
            if not ax.lines:
                raise ValueError(
                    f"--lines={panel}: no run has a value of it, choose another column"
                )
            ax.legend(frameon=False, fontsize=8)
            frame(ax, panel, axis)
            if axis == "length":
                powers_of_two(ax.xaxis)
            else:
                whole_ticks(ax.xaxis)


def draw_stream(ax, places):
    """Draw the first token's norm over the others', layer by layer; if it is massive, also its
    largest channel."""
    ratios = [place["massive"] for place in places]
    largest = max(ratios)
    layers = range(len(ratios))
    title = "norm of its hidden state over the others'"
    line_panel(ax, {"": (ratios, layers)}, title, "", [1], False)
    if largest > 3:
        top = ratios.index(largest)
        channel, value, _ = places[top]["channels"][0]
        ax.annotate(
            f"channel {channel}: {value:,.0f}",
            (largest, top),
            xytext=(-8, -12),
            ha="right",
            fontsize=8,
            textcoords="offset points",
        )
    ticks = [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]
    ax.set_xscale("log")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_xlim(min(0.5, 0.8 * min(ratios)), max(3, 1.3 * largest))
    ax.set_ylim(len(ratios) - 0.5, -0.5)  # the embeddings are on top
    ax.set_ylabel("enters layer")
    ax.set_yticks(layers, [*layers[:-1], "end"], fontsize=7)
