"""What happens to the output of each head: a value bias, Dex's and XSA's corrections, a norm, a
gate.

Shapes: B batch, R query rows, E width of v. The output o is (B, heads, R, E), the values v are (B,
Hv, T, E), the layer's input x is (B, R, C).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn

from axes.base import (
    BIAS_SIZES,
    Choice,
    Constant,
    Fixed,
    Normal,
    drawn_bias,
    split_heads,
    whole_bias,
    wrong_bias_dims,
)
from axes.rows import lambda_at_depth

# -------------------------------------------------------------- corrections: a value bias, Dex, XSA


def plus_value(layer, o, v):
    """o + v*, learned for each head, at first N(0, 0.02). Source: V biases of When Attention Sink
    Emerges, table 4."""
    return o + whole_bias(layer.value_bias, o.shape[1], o.shape[-1])[:, None]


def dex_corrected(layer, o, v):
    """o - lambda(t) o W: every head can subtract the contribution of a sink's value.

    lambda(t) = (1 - a) a lambda_init + a lambda_learned, with a = min(1, progress / anneal) and
    progress from 0 to 1 over the training. W and lambda_learned start at 0, where their gradients
    are 0. The first term, which fades in and out again, gives W a gradient. Once W is not 0,
    lambda_learned has one as well.
    Source: Kong et al. 2505.16333. Differs from the paper: it corrects some heads of a trained
    model, here all."""
    a = (layer.progress / layer.args["anneal"]).clamp(max=1.0)
    factor = (1 - a) * a * lambda_at_depth(layer.depth) + a * layer.dex_lambda
    return o - factor * layer.dex_proj(o.to(layer.dex_proj.weight.dtype))


def without_own_value(layer, o, v):
    """o - (o.v) v / |v|^2 with the row's own value v: what the token says of itself is left to the
    residual stream. The first row sees only itself, so it becomes 0. Source: exclusive self
    attention, 2603.09078."""
    v = v[:, :, -o.shape[2] :].to(o.dtype).repeat_interleave(o.shape[1] // v.shape[1], 1)
    # (B, heads, R, 1)
    along = (o * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp(min=1e-30)
    return o - along * v


def no_norm_after(config, args, choices):
    if config.out_norm != "none":
        return (
            "--exclude=own leaves only rounding errors in rows of one key: leave out "
            f"--out_norm={config.out_norm}"
        )


@dataclass(frozen=True, kw_only=True)
class Correction(Choice):
    """A value of the axes value_bias, dex and exclude."""

    corrected: Callable | None = None  # layer, o, v -> o


VALUE_BIASES = {
    "off": Correction(),
    "on": Correction(
        args=BIAS_SIZES,
        refuse=wrong_bias_dims,
        corrected=plus_value,
        learns=lambda layer: {"value_bias": drawn_bias(layer, layer.heads, layer.shapes["v"][1])},
    ),
}
DEXES = {
    "off": Correction(),
    "on": Correction(
        args={"anneal": Constant(0.5, 1e-6, 1.0)},
        corrected=dex_corrected,
        learns=lambda layer: {
            "dex_proj": nn.Linear(layer.shapes["v"][1], layer.shapes["v"][1], bias=False),
            "dex_proj.weight": Normal(0.0),
            "dex_lambda": torch.zeros(1),
            "progress": Fixed(torch.zeros(())),  # GPT.set_progress sets it
        },
    ),
}
EXCLUSIONS = {
    "none": Correction(),
    "own": Correction(refuse=no_norm_after, corrected=without_own_value),
}

# -------------------------------------------------------------------------------------------- norms


def head_norm(layer, o):
    """RMSNorm of each head's output, with one weight vector for all heads."""
    return layer.out_norm(o.to(layer.out_norm.weight.dtype))


def joint_norm(layer, o):
    """RMSNorm of all heads together: ReLA, Zhang et al. 2021. Its eps, 1e-8, gives an empty row a
    huge gradient."""
    together = o.transpose(1, 2).flatten(2).to(layer.out_norm.weight.dtype)  # (B, R, heads E)
    return split_heads(layer.out_norm(together), *o.shape[1::2])


def gated_norm(layer, o):
    """The joint norm of o, times sigmoid(g o). The vector g starts as N(0, 0.02). Source: ReLA's
    second form."""
    together = o.transpose(1, 2).flatten(2).to(layer.out_norm.weight.dtype)  # (B, R, heads E)
    together = layer.out_norm(together) * torch.sigmoid(layer.norm_gate * together)
    return split_heads(together, *o.shape[1::2])


def norm_of_output(layer, heads):
    return {"out_norm": nn.RMSNorm(heads * layer.shapes["v"][1], eps=layer.args["out_norm_eps"])}


@dataclass(frozen=True, kw_only=True)
class OutNorm(Choice):
    """A value of the axis out_norm."""

    normed: Callable | None = None  # layer, o -> o


EPS = {"out_norm_eps": Constant(1e-6, 1e-12, 1.0)}
OUT_NORMS = {
    "none": OutNorm(),
    "head": OutNorm(learns=lambda layer: norm_of_output(layer, 1), args=EPS, normed=head_norm),
    "all": OutNorm(
        learns=lambda layer: norm_of_output(layer, layer.heads), args=EPS, normed=joint_norm
    ),
    "gated": OutNorm(
        args=EPS,
        normed=gated_norm,
        learns=lambda layer: (
            norm_of_output(layer, layer.heads)
            | {"norm_gate": Normal(0.02, (layer.heads * layer.shapes["v"][1],))}
        ),
    ),
}

# -------------------------------------------------------------------------------------------- gates


def sigmoid_gate(layer, o, x):
    """o sigmoid(W x), with x the layer's input: one gate per head, or one per element of its
    output.

    Gates start near 1/2. A closed gate makes the output 0, so the head needs no sink.
    Source: Qiu et al. 2505.06708; The Attention Sink as Native MoE, eq. 3."""
    return o * torch.sigmoid(split_heads(layer.gate(x), o.shape[1], -1).to(o.dtype))


def gate_of(layer, gates):
    return {"gate": nn.Linear(layer.config.n_embd, layer.heads * gates, bias=layer.config.bias)}


@dataclass(frozen=True, kw_only=True)
class Gate(Choice):
    """A value of the axis gate."""

    gated: Callable | None = None  # layer, o, x -> o
    before_norm: bool = False  # the gate comes before the norm of the output


GATES = {
    "none": Gate(),
    "head": Gate(learns=lambda layer: gate_of(layer, 1), gated=sigmoid_gate),
    "element": Gate(learns=lambda layer: gate_of(layer, layer.shapes["v"][1]), gated=sigmoid_gate),
}
