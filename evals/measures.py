"""Measures of a layer's attention weights: sinks, zeros, spread and peaks, per head.

The weights are read one block of rows at a time, as attention.py computes them. So every recipe has
these measures, and memory is linear in T. Some rules give signed weights, or rows that do not sum
to 1. Therefore the shares of a row (share, times_uniform, sink_eps) are shares of its absolute
weights, including a key outside the sequence. Read them together with row_mass: a row whose weights
sum to 0.001 has shares like any other. If most rows are empty, times_uniform is mostly that of the
first row, whose only key is the first token: times_live leaves out both. The entropy is that of the
absolute weights on the tokens, without an extra key, divided by their sum.

Sources:
    sink, density           Lazy Attention, 2601.00919, appendix C.3
    times_uniform           Threshold Differential Attention, 2601.12145, section 3 and figure 1c
    entropy, dispersion     the same, section 3, Attention Dispersion, after Vasylenko et al. 2025
    sparsity                the same, appendix D.1 and figure 1a
    peak, negative          the same, figures 1b and 2
    sink_eps                Gu et al. 2410.10781 (When Attention Sink Emerges): Sink_k^eps, on
                            windows of 64 tokens
    value_norm_ratio        the same, section 3.1; The Attention Sink as Native MoE, figure 2
"""

import math

import torch

from axes.outputs import sigmoid_gate
from kernels import document_start, visible, visible_count

MEASURES = {  # name: its meaning, printed under the table
    "sink": "weight on the first token, mean over all rows",
    "share": "the first token's share of the row's absolute weights",
    "row_mass": "sum of the weights of a row (signed)",
    "uniform": "weight on the first token if all rows were evenly spread",
    "times_uniform": "share on the first token, divided by that of evenly spread rows",
    "times_live": "the same over rows of more than one key that are not empty",
    "density": "weight on all other tokens (Lazy Attention's term; not 1 - sparsity)",
    "extra": "weight on a key outside the sequence",
    "sparsity": "share of exact zeros among the pairs that may attend",
    "negative": "share of negative weights among the pairs that may attend",
    "empty_rows": "share of rows whose weights are all zero",
    "dead_heads": "share of heads whose rows are all empty, of those that see more than one key",
    "entropy": "effective entropy, in nats: that of a row's absolute weights, scaled to sum to 1",
    "dispersion": "entropy of a row over log n, if it sees n > 1 keys: 1 if even, 0 if on one key",
    "peak": "largest absolute weight in rows of more than one key; of a layer: over all its heads",
    "peak_a": "the same in a differential recipe's first view, before the subtraction",
    "peak_b": "the same in its second view, before the factor lambda",
    "sparsity_a": "sparsity of the first view",
    "sparsity_b": "sparsity of the second view",
    "sink_eps": "Sink_k^eps: share of sequences whose first 64 queries give token k more than eps",
    "extra_eps": "the same for the key outside the sequence",
    "value_norm_ratio": "norm of the first token's value, divided by the mean norm of the others",
}

# see evals/heads.py
HEAD_MEASURES = "alpha_sink", "alpha_local", "sigma2", "sigma2_printed", "importance"

# {figure of the lab: its meaning}; train.py prints the first five. *Idle* rows need no key, *copy*
# rows need one
IN_THE_LAB = {
    "excess_copy": "loss of copy rows above the best possible one, in nats; 2.3 without attention",
    "sink_idle": "weight on the first token, mean over idle rows: near 1 is a sink",
    "sink_copy": "the same over copy rows: near 0 if the head copies",
    "row_mass_idle": "sum of the weights of an idle row (signed): softmax must spend 1",
    "value_norm_ratio": "norm of the first value over the others': near 0, a sink adds nothing",
    "excess_loss": "loss of all rows above the best possible one, in nats",
    "excess_idle": "the same for idle rows",
    "zero_cost": "rise of the loss if the first token's value is zero",
    "hide_cost": "rise of the loss if no later row sees the first key",
}
FURTHER = (  # measures over all rows, or over those that the ending of the name says
    "row_mass_copy share_idle share_copy times_uniform_idle times_uniform_copy extra_idle "
    "extra_copy sparsity empty_rows sink_eps extra_eps"
)
for name in FURTHER.split():
    IN_THE_LAB[name] = MEASURES[name.removesuffix("_idle").removesuffix("_copy")]

# a measure is a sum of Probe over rows, or divided by another sum
DIVISORS = {
    "sparsity": "pairs",
    "negative": "pairs",
    "times_live": "uniform_live",
    "dispersion": "several",
    "sink_eps": "sequences",
    "extra_eps": "sequences",
    "value_norm_ratio": "other_norm",
    "sparsity_a": "pairs_a",
    "sparsity_b": "pairs_b",
    "alpha_local": "full",
}


class Probe:
    """Sums of one layer's measures, per head, over the queries of all sequences that it sees.

    k, eps: those of Sink_k^eps, the token (from 1) and the share that makes it a sink. local: if
    not 0, `result` also has the measures of evals/heads.py, with alpha_local over this number of
    last keys."""

    ROWS = 64  # the number of first rows that Sink_k^eps counts

    def __init__(self, k=1, eps=0.3, local=0):
        self.k, self.eps, self.local = k, eps, local
        self.sums, self.peaks = {}, {}  # {name: (H,)} in float64: sums, and the largest so far

    def add(self, name, value):
        """Add value (B, H, ...), summed over all axes but the heads."""
        self.sums[name] = self.sums.get(name, 0) + value.double().flatten(2).sum((0, 2)).cpu()

    def keep_largest(self, name, value):
        """Keep the largest of value (B, H, ...) for each head, if it exceeds those before."""
        largest = value.flatten(2).amax((0, 2)).double().cpu()
        self.peaks[name] = torch.maximum(largest, self.peaks.get(name, largest))

    def see(self, module, q, k, v, x, table=None, counted=None):
        """Add one batch of a layer's inputs, as `watch` passes them. counted (B, T): which queries
        count."""
        if counted is None:
            counted = torch.ones(len(q), q.shape[2] - module.sink_tokens, device=q.device)
        early = 0  # (2, B, H): the shares of see_rows, summed over the first rows
        for i, w in rows_of(module, module.weight_blocks(q, k, x, table)):
            shares = self.see_rows(module, i, w, counted[:, None, i])
            early = early + shares[..., i < self.ROWS].sum(-1)
        rows = min(self.ROWS, counted.shape[1]) - self.k + 1  # that see token k
        sinks = early[..., None] / rows > self.eps
        self.add("sequences", torch.ones_like(sinks[0]))
        self.add("sink_eps", sinks[0])
        if has_outer_key(module):
            self.add("extra_eps", sinks[1])
        norm = v[:, :, module.sink_tokens :].float().norm(dim=-1)
        norm = norm.repeat_interleave(early.shape[2] // v.shape[1], 1)  # (B, H, T)
        self.add("value_norm_ratio", norm[..., :1])
        self.add("other_norm", norm[..., 1:].mean(-1, keepdim=True))
        # a silu is not between 0 and 1
        if self.local and module.choices["gate"].gated is sigmoid_gate:
            gate = gate_of(module, x, module.shapes["v"][1])
            self.add("gate", gate[:, :, module.sink_tokens :].mean(-1))

    def see_rows(self, module, i, w, counted):
        """Add a block of rows, at positions i (R,), with the weights w (B, H, R, T or 1 + T).
        counted (B, 1, R): which rows count. Returns the shares of token k and of the key outside
        the sequence, (2, B, H, R)."""
        here = counted.expand(w.shape[:3])
        n = visible_count(i, module.mask)  # (.., R): the keys that a row sees
        first = document_start(i, module.mask)  # (.., R): the first token of its document
        extra, w = split_extra(module, w)
        a = w.abs()
        mass = a.sum(-1)
        total = mass + extra + 1e-8  # an empty row has shares of 0
        p = a / mass.clamp(min=1e-30)[..., None]
        entropy = torch.special.entr(p).sum(-1)
        several = (n > 1).float()
        empty = (w == 0).all(-1)
        live = several * ~empty
        uniform = visible(i, first, module.mask) / n
        share = on(a, first) / total
        row_values = {
            "rows": torch.ones_like(mass),
            "pairs": n,
            "uniform": uniform,
            "sink": on(w, first),
            "share": share,
            "times_live": live * share,
            "uniform_live": live * uniform,
            "row_mass": w.sum(-1),
            "extra": extra,
            "sparsity": n - (w != 0).sum(-1),
            "empty_rows": empty,
            "negative": (w < 0).sum(-1),
            "empty_several": several * empty,
            "entropy": entropy,
            "several": several,
            # log 2 is 0.69: this changes only n = 1
            "dispersion": several * entropy / n.log().clamp(min=0.5),
        }
        if self.local:
            row_values |= self.of_heads(module, i, w, extra)
        for name, value in row_values.items():
            self.add(name, here * value)
        self.keep_largest("peak", here * several * a.amax(-1))
        return torch.stack([on(a, first + self.k - 1), extra]) / total

    def of_heads(self, module, i, w, extra):
        """The values of rows of which HEAD_MEASURES are means. w (B, H, R, T): the weights on
        tokens, extra (B, H, R): that on a key outside the sequence."""
        a = w.abs()
        mass = a.sum(-1)
        j = torch.arange(w.shape[3], device=w.device)
        # positions in the layer's input, which begins with the sink tokens
        rows = i[:, None] + module.sink_tokens
        seen = visible(rows, j + module.sink_tokens, module.mask)  # (R, T)
        n = seen.sum(-1)
        even = 1 / n[:, None]
        uneven = (a / (mass[..., None] + 1e-8) - even) * seen
        full = (i >= self.local - 1).float()  # rows that see at least `local` keys
        outside = has_outer_key(module)
        return {
            "alpha_sink": extra if outside else w[..., 0],
            "importance": mass if outside else a[..., 1:].sum(-1),
            "sigma2": uneven.square().sum(-1) / n,
            "sigma2_printed": ((w - even) * seen).square().sum(-1) / n,
            "full": full,
            "alpha_local": full * (w * (j > i[:, None] - self.local)).sum(-1),
        }

    def see_views(self, module, q, k, table=None):
        """Add the two views of a differential recipe, before the subtraction."""
        for i, w in rows_of(module, module.view_blocks(q, k, table)):
            w = split_extra(module, w)[1]
            n = visible_count(i, module.mask)
            for name, view in (("a", w[:, 0::2]), ("b", w[:, 1::2])):
                self.add(f"pairs_{name}", n.expand(view.shape[:3]))
                self.add(f"sparsity_{name}", n - (view != 0).sum(-1))
                self.keep_largest(f"peak_{name}", (n > 1) * view.abs().amax(-1))

    def result(self):
        """{measure: (H,) tensor}; nan where a measure does not exist for this layer."""
        s = self.sums
        found = dict.fromkeys(MEASURES, torch.full_like(s["rows"], torch.nan)) | self.peaks
        for name, total in s.items():
            found[name] = total / s[DIVISORS.get(name, "rows")]
        found["density"] = found["row_mass"] - found["sink"]
        # not a mean of ratios, which late rows would dominate; 0 if no row sees the first token
        found["times_uniform"] = s["share"] / s["uniform"].clamp(min=1e-30)
        found["dead_heads"] = (s["empty_several"] / s["several"] == 1).double()  # 0 / 0 is not 1
        if "gate" in found:  # eq. 8 of Native MoE
            found["importance"] = found["gate"]
        return found

    def numbers(self):
        """The measures as lists with six decimals, None for nan, which JSON lacks: {measure: [per
        head]}."""
        result = self.result()
        found = {}
        for name in [*MEASURES, *(HEAD_MEASURES if self.local else [])]:
            values = result[name].tolist()
            found[name] = [None if math.isnan(value) else round(value, 6) for value in values]
        return found


def has_outer_key(module):
    """Is there a key outside the sequence: an extra key, or a sink token before it?"""
    return module.has_extra_key or module.sink_tokens > 0


def rows_of(module, blocks):
    """Yield positions i (R,) and weights w (B, H, R, .) of blocks of rows, without the row of a
    sink token before the sequence."""
    start = 0
    for block, w in enumerate(blocks):
        if block == 0:
            w = w[:, :, module.sink_tokens :]
        yield torch.arange(start, start + w.shape[2], device=w.device), w
        start += w.shape[2]


def split_extra(module, w):
    """The weight on a key outside the sequence (B, H, R), 0 without one, and the weights on the
    tokens (B, H, R, T)."""
    return (w[..., 0], w[..., 1:]) if has_outer_key(module) else (torch.zeros_like(w[..., 0]), w)


def on(w, j):
    """The weights w (B, H, R, T) on keys j, one or (B, 1, R), and at most on the last key: (B, H,
    R)."""
    j = torch.as_tensor(j, device=w.device).clamp(max=w.shape[3] - 1)
    return w.gather(3, j.expand(w.shape[:3])[..., None])[..., 0]


def gate_of(module, x, width=1):
    """The gate on each head's output, (B, heads, T, width): what it makes of an output of ones of
    this width. With one gate for each channel, the width is 1 or that of v."""
    ones = x.new_ones(len(x), module.heads, x.shape[1], width)
    return module.gated(ones, x)


def mean_of(probes):
    """{measure: mean over the layers and heads that have it}."""
    results = [p.result() for p in probes]
    return {name: float(torch.stack([r[name] for r in results]).nanmean()) for name in MEASURES}
