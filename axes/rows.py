"""What happens to a row of weights after its rule: a row normaliser, an extra key, a second view
that is subtracted.

Shapes: B batch, H score heads, R query rows, D width of q and k, E width of v. Row vectors are (B,
H, R, 1).
"""

import math
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
    whole_bias,
    wrong_bias_dims,
)
from kernels import wide

# ---------------------------------------------------------------------------------- row normalisers


def over_sum(r, n):
    """The row sum. The added 1e-8 keeps rows without any weight finite."""
    return r + 1e-8


def over_length(r, n):
    """n_i, the number of keys that row i sees."""
    return n


def over_max1(r, n):
    """max(|row sum|, 1), for weights of either sign. Source: When Attention Sink Emerges, table
    6."""
    return torch.where(r.abs() > 1, r.abs(), 1.0)


def wrong_normalizer(config, args, choices):
    if config.normalize == "sum" and config.rule == "identity" and config.feature != "elu":
        return (
            "--normalize=sum divides by row sums, which can be 0, because --rule=identity with "
            f"--feature={config.feature} gives weights of either sign: add --feature=elu, or use "
            "--normalize=max1"
        )
    if not choices["rule"].sums_rows:
        return (
            f"--normalize={config.normalize} is for rules without a normaliser of their own, such "
            f"as relu or sigmoid: leave it out with --rule={config.rule}"
        )


@dataclass(frozen=True, kw_only=True)
class Normalizer(Choice):
    """A value of the axis normalize."""

    # row sums r and lengths n (.., R, 1) -> the row's divisor; None: 1
    divisor: Callable | None = None
    needs_sum: bool = False  # the divisor depends on r


NORMALIZERS = {
    "none": Normalizer(),
    "sum": Normalizer(divisor=over_sum, refuse=wrong_normalizer, needs_sum=True),
    "length": Normalizer(divisor=over_length, refuse=wrong_normalizer),
    "max1": Normalizer(divisor=over_max1, refuse=wrong_normalizer, needs_sum=True),
}

# ------------------------------------------------------------------------------------- an extra key


def zero_score(layer, q):
    """c = 0. Source: softmax1, Miller 2023."""
    return 0.0


def logit_score(layer, q):
    """c = b_h, learned, 0 at first. Source: GPT-OSS, which gives no initial value; transformers has
    N(0, 0.02)."""
    return layer.sink_logit[:, None, None]


def key_score(layer, q):
    """c_i = q_i . k* / sqrt(d), as for every key. k* starts as N(0, 0.02) for each key head and is
    not rotated.
    Source: When Attention Sink Emerges, table 4.
    Differs from its code, which decays k* and v*: here weight decay acts on linear layers and
    embeddings only."""
    key = layer.for_score_heads(layer.featured(whole_bias(layer.sink_key, *layer.shapes["k"])), 0)
    return layer.scale * (wide(q[..., : layer.width]) * key[:, None]).sum(-1, keepdim=True)


def extra_key(layer):
    """k*, and for key_value also v*, which starts as N(0, 0.02). value_norm=NUMBER fixes v* at that
    norm, along the first channel or (value_even) along all. Source: When Attention Sink Emerges,
    table 5."""
    (heads, width), norm = layer.shapes["v"], layer.args.get("value_norm")
    learned = {"sink_key": drawn_bias(layer, *layer.shapes["k"])}
    if norm == "learned":
        learned["sink_value"] = drawn_bias(layer, heads, width)
    elif norm is not None:
        value = (
            torch.full((width,), width**-0.5) if layer.args["value_even"] else torch.eye(width)[0]
        )
        learned["sink_value"] = Fixed((norm * value).repeat(heads, 1))
    return learned


def sink_value(layer, heads):
    return whole_bias(layer.sink_value, heads, layer.shapes["v"][1])[:, None]


def wrong_sink(config, args, choices):
    if config.sink == "token" and config.window and not config.first:
        return "--sink=token cannot be seen beyond --window: add --first=1"
    if choices["sink"].extra_score and config.rule != "softmax":
        return (
            f"--sink={config.sink} needs --rule=softmax: an extra key is merged by log-sum-exp, "
            "which only it has"
        )
    if args.get("value_even") and args["value_norm"] == "learned":
        return (
            "--attn_args=value_even=1 needs a fixed norm of the extra key's value: add "
            "value_norm=NUMBER"
        )
    return wrong_bias_dims(config, args, choices)


@dataclass(frozen=True, kw_only=True)
class Sink(Choice):
    """A value of the axis sink."""

    # layer, q -> c, broadcastable to (B, H, R, 1); None: no extra key
    extra_score: Callable | None = None
    # layer, heads -> the value of the extra key, (heads, 1, E); None: 0
    extra_value: Callable | None = None
    tokens: int = 0  # learned tokens that model.py puts before the sequence


SINKS = {
    "none": Sink(),
    "one": Sink(extra_score=zero_score, refuse=wrong_sink),
    "logit": Sink(
        learns=lambda layer: {"sink_logit": torch.zeros(layer.score_heads)},
        extra_score=logit_score,
        refuse=wrong_sink,
    ),
    "key": Sink(learns=extra_key, args=BIAS_SIZES, extra_score=key_score, refuse=wrong_sink),
    "key_value": Sink(
        learns=extra_key,
        args=BIAS_SIZES
        | {"value_norm": Constant("learned", word="learned"), "value_even": Constant(False)},
        extra_score=key_score,
        extra_value=sink_value,
        refuse=wrong_sink,
    ),
    "token": Sink(tokens=1, refuse=wrong_sink),  # an ordinary key
}


def share_of_keys(layer, q, r, n):
    """The factor on a row's real keys, (B, H, R, 1): 1 / the row normaliser, 1 minus the extra
    key's weight, or None.

    An extra key of score c multiplies the weights of the real keys by e^r / (e^r + e^c), where r is
    the log-sum-exp of their scores. That is a gate on the output, sigmoid(r_i - c_i): a sink need
    not be a token. Source: The Attention Sink as Native MoE, eq. 2 to 4."""
    if layer.divisor:
        return 1 / layer.divisor(r, n[..., None])
    if layer.extra_score:
        return torch.sigmoid(r - layer.extra_score(q))


def normalised_output(layer, o, q, r, n):
    """Apply the row normaliser, or the extra key (its value gets the weight that real keys lose),
    to o (B, H, R, E)."""
    share = share_of_keys(layer, q, r, n)
    if share is None:
        return o
    o = wide(o) * share
    return o + (1 - share) * layer.extra_value(o.shape[1]) if layer.extra_value else o


# -------------------------------- a second view: o = o_a - mix o_b, so the weight on a sink cancels


def lambda_at_depth(depth):
    """Differential Transformer's lambda_init, for layers counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def lambda_of_head(layer, x):
    """sigmoid(lambda_logit_h), 0.5 at first. Source: Threshold Differential Attention.
    Differs from the paper: it gives no initial value. Its code clamps lambda to [0, 1]: beyond, the
    gradient is 0."""
    return torch.sigmoid(layer.lambda_logit)[:, None, None]


def lambda_of_layer(layer, x):
    """exp(q1.k1) - exp(q2.k2) + lambda_init, from four learned vectors (D,), N(0, 0.1), and the
    depth: one per layer.

    Source: Ye et al. 2410.05258, eq. 3. Its code has two versions: multihead_diffattn.py shares one
    key head between both views. multihead_flashdiff_1.py, which it recommends, gives each view its
    own, as here.
    Differs from the paper: it has a GroupNorm. Its code has an RMSNorm with one weight for all
    heads, as here. transformers pairs heads h and h + H/2, and its norm has no weight."""
    ups, downs = (
        (layer.lambda_q1 * layer.lambda_k1).sum(),
        (layer.lambda_q2 * layer.lambda_k2).sum(),
    )
    return ups.exp() - downs.exp() + lambda_at_depth(layer.depth)


def lambda_of_token(layer, x):
    """sigmoid(W x): one lambda per head and token, and no norm on the output. Source: unilm,
    Diff-Transformer-V2."""
    return torch.sigmoid(wide(layer.lambda_proj(x))).transpose(1, 2)[..., None]


def shrunk(layer, o):
    """o (1 - lambda_init), after the norm on the output. Source: Ye et al. 2410.05258, eq. 4."""
    return o * (1 - lambda_at_depth(layer.depth))


def needs_pairs(config, args, choices):
    if config.n_kv_head % 2:
        return (
            f"--diff=v1 pairs heads: n_head={config.n_head} and n_kv_head={config.n_kv_head} must "
            "both be even"
        )


def same_heads(H, K, D):
    """(heads, width) of q, k and v for H heads, K key heads and the head dimension D."""
    return (H, D), (K, D), (K, D)


@dataclass(frozen=True, kw_only=True)
class Difference(Choice):
    """A value of the axis diff."""

    heads: Callable = same_heads
    own_keys: bool = False  # each view has a key head of its own
    # layer, x -> lambda, broadcastable to (B, output heads, R, 1)
    mix: Callable | None = None
    after_norm: Callable | None = None  # layer, o -> o: follows the norm on the output


DIFFERENCES = {
    "none": Difference(),
    "subtract": Difference(  # two views of the same values
        learns=lambda layer: {
            "lambda_logit": torch.full((layer.heads,), layer.args["lambda_init"]).logit()
        },
        args={"lambda_init": Constant(0.5, 1e-6, 1 - 1e-6)},
        mix=lambda_of_head,
        own_keys=True,
        heads=lambda H, K, D: ((2 * H, D), (2 * K, D), (K, D)),
    ),
    "v1": Difference(  # half the heads, each twice as wide: as many parameters as softmax
        learns=lambda layer: {
            f"lambda_{name}": Normal(0.1, (layer.width,)) for name in ("q1", "k1", "q2", "k2")
        },
        mix=lambda_of_layer,
        refuse=needs_pairs,
        own_keys=True,
        after_norm=shrunk,
        heads=lambda H, K, D: ((H, D), (K, D), (K // 2, 2 * D)),
    ),
    "v2": Difference(  # two queries look at the same keys
        learns=lambda layer: {
            "lambda_proj": nn.Linear(layer.config.n_embd, layer.heads, bias=False)
        },
        mix=lambda_of_token,
        heads=lambda H, K, D: ((2 * H, D), (K, D), (K, D)),
    ),
}
