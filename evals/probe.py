"""Where the attention of a run goes, and what its hidden states look like, on fixed windows.

measures.py defines the measures of attention weights, stream.py those of the residual stream. This file takes both in
one pass over the windows, and probe_view.py shows the results.
"""
import math
from dataclasses import dataclass

import torch

from common.flags import at_least, knob
from evals import probe_view
from evals.instrument import LENGTH, watch, whole_numbers, window_batches
from evals.measures import MEASURES, Probe, mean_of
from evals.stream import Stream, watching

draw, tell = probe_view.draw, probe_view.tell


@dataclass
class ProbeFlags:
    """Flags of probe"""
    split: str = knob("val", "split of the data set", ("train", "val"))
    windows: int = knob(-1, "fixed windows, spread evenly; 0: as many as fit; -1: 25,600 tokens in all, but at most "
                            "100 windows")
    length: int = knob(0, LENGTH)
    lengths: str = knob("", "several lengths, such as 64,256,1024: print one line of means for each")
    batch_size: int = knob(4, "windows per forward pass")
    input: str = knob("data", "what the model reads. data: windows of the data; repeat: the first token of each, "
                              "repeated; random: random ids; bos: the separator, then the data",
                      ("data", "repeat", "random", "bos"))
    k: int = knob(1, "the k of Sink_k^eps: which token, counted from 1")
    eps: float = knob(0.3, "the eps of Sink_k^eps: a token with a larger mean share is a sink")
    heads: bool = knob(False, "print a line for each head")
    layer: int = knob(-1, "also list norms and variances by position in this layer, counted from 0")

    def __post_init__(self):
        at_least(self, windows=-1, length=0, batch_size=1, k=1, eps=0, layer=-1)
        if self.lengths:
            whole_numbers(self.lengths, "lengths")          # raises ValueError
        if self.k > Probe.ROWS:
            raise ValueError(f"--k={self.k}, but Sink_k^eps looks at the first {Probe.ROWS} tokens: lower it")


def command(args, run):
    """Measure where the attention goes, by layer or head, and what the hidden states look like."""
    flag = "lengths" if args.lengths else "length"
    lengths = {run.window(T, flag) for T in whole_numbers(args.lengths or str(args.length), flag)}
    check(args, run, min(lengths))
    by_length = {T: look(args, run, T) for T in sorted(lengths, reverse=True)}      # the longest may fail
    longest = by_length[max(lengths)]
    found = run.reads(args.split, longest["windows"], max(lengths)) | longest | {
        "input": args.input, "k": args.k, "eps": args.eps}
    if args.lengths:                            # all other numbers are those of the longest
        found["lengths"] = [at_length(by_length[T]) for T in sorted(lengths)]
    return found, tell(args, {"": found})


def check(args, run, length):
    """Raise ValueError on flags that do not fit the run, before the work begins."""
    layers = run.model.config.n_layer
    if args.layer >= layers:
        raise ValueError(f"--layer={args.layer}, but the layers of {run.out_dir} are 0 to {layers - 1}")
    if args.k > length:
        raise ValueError(f"--k={args.k}, but a window has {length} tokens: lower it")
    if length < 2:
        raise ValueError("a window needs 2 tokens or more, to compare the first with others: give a larger --length")


# ------------------------------------------------------------------------------------------------- taking the measures


def look(args, run, length):
    count = max(1, min(100, 25_600 // length)) if args.windows < 0 else args.windows
    return probe(run.model, run.split(args.split), run.machine, count, args.batch_size, run.stride, length, bar=True,
                 change=change_of(args.input, run), k=args.k, eps=args.eps)


def change_of(kind, run):
    """The function that --input applies to a batch of windows (B, T)."""
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
    return lambda idx: idx


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


def at_length(found):
    """The numbers of one of several lengths: the means, and "massive", the largest ratio of the first token's norm to
    the others' at any place in the stream."""
    return {"length": found["length"], "windows": found["windows"], **found["mean"],
            "massive": max(place["massive"] for place in found["stream"])}
