"""What all axes have in common.

An axis is one choice that a layer makes around its rule: its positions, its gate, and so on. Each
axis is one table, and each of its values is one row of that table. A row holds everything about the
value: what it computes, what it learns, its constants, and what it cannot be combined with. A new
value is a new row.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F


class Constant(NamedTuple):
    """A constant that --attn_args may set. The type of its default decides: a switch, a whole
    number or any number."""

    default: Any
    low: float = -math.inf
    high: float = math.inf
    word: str | None = None  # one word that is allowed in place of a number


def unchanged(layer, x, *_):
    """The function for a value that changes nothing."""
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of an axis. It sets only the fields of its axis. Rules, and some axes of mixers,
    add fields."""

    learns: Callable = lambda layer: {}  # layer -> {name: what Layer.add accepts}
    args: dict[str, Constant] = dataclasses.field(default_factory=dict)
    # config, args, choices -> why this value cannot be combined, or None
    refuse: Callable | None = None
    # pos
    # places, C -> the embedding that model.py adds for each position
    embeds: Callable | None = None
    rotates: bool = False  # RoPE rotates q and k
    bias: Callable | None = None  # layer -> Distance, which is added to the score
    shared: tuple = ()  # names of learned tensors that all layers share
    # qk_norm, feature
    # layer, a learned norm, x -> x: queries or keys, before rotation
    projected: Callable | None = None
    normed: Callable = unchanged  # layer, x -> x: after rotation. For out_norm: layer, o -> o
    mapped: Callable = unchanged  # layer, x -> x: queries or keys, after their norm
    # scale
    # layer, n (.., R) -> a factor on the score, (.., H, R, 1); None: 1
    factor: Callable | None = None
    unscaled: bool = False  # the score is not divided by sqrt(d)
    # normalize
    # row sums r, lengths n (.., R, 1) -> the row's divisor; None: 1
    divisor: Callable | None = None
    needs_sum: bool = False  # the divisor depends on r
    # sink
    # layer, q -> c, broadcastable to (B, H, R, 1); None: no extra key
    score: Callable | None = None
    # layer, heads -> the value of the extra key, (heads, 1, E); None: 0
    value: Callable | None = None
    ahead: int = 0  # learned tokens that model.py puts before the sequence
    # diff
    heads: Callable = lambda H, K, D: ((H, D), (K, D), (K, D))  # -> (heads, width) of q, k, v
    own_keys: bool = False  # each view has a key head of its own
    # layer, x -> lambda, broadcastable to (B, output heads, R, 1)
    mix: Callable = lambda layer, x: None
    after: Callable = unchanged  # layer, o -> o: follows the norm on the output
    # value_bias, dex, exclude, gate
    corrected: Callable = unchanged  # layer, o, v -> o
    gated: Callable = unchanged  # layer, o, x -> o
    before_norm: bool = False  # the gate comes before the norm of the output
    # forget, write and conv of mixers/recurrent.py; affinity of mixers/focus.py. x (B, T, C): the
    # layer's input
    log_forget: Callable | None = None  # layer, x -> log forget (B, H, T, 1 or D); None: 0
    # layer, x -> write, the factor on v, (B, H, T, 1); None: 1
    write_factor: Callable | None = None
    # layer, all of q, k and v (B, 3 + T, ..) -> the same (B, T, ..)
    convolved: Callable | None = None
    # scores s, gate arguments z, broadcast to (B, H, R, T) -> s'
    gated_score: Callable | None = None

    def __deepcopy__(self, memo):
        return self  # Triton's functions cannot be copied


def only(values, *names):
    """The rows of a table with these names."""
    return {name: values[name] for name in names}


class Normal(NamedTuple):
    """Initial values drawn from N(0, std): of a learned tensor of this shape or, without a shape,
    of a weight of a module that the choice has added before. Other weights of modules are drawn
    from N(0, 0.02)."""

    std: float
    shape: tuple | None = None


class Fixed(NamedTuple):
    """A tensor that a layer keeps and does not learn."""

    value: torch.Tensor


BIAS_SIZES = {  # shapes of learned key and value biases; When Attention Sink Emerges
    "bias_shared": Constant(False),  # one for all heads (table 12)
    # only the first channels learn, the others stay 0 (table 13)
    "bias_dims": Constant("all", 1, word="all"),
}


def drawn_bias(layer, heads, width):
    """A key or value bias (heads, width), or smaller as BIAS_SIZES says, that starts as N(0,
    0.02)."""
    dims = layer.args["bias_dims"]
    return Normal(
        0.02, (1 if layer.args["bias_shared"] else heads, width if dims == "all" else int(dims))
    )


def whole_bias(bias, heads, width):
    """Expand such a bias to (heads, width): repeat a shared one, fill missing channels with 0."""
    return F.pad(bias, (0, width - bias.shape[-1])).repeat_interleave(heads // len(bias), 0)


def wrong_bias_dims(config, args, choices):
    dims = args.get("bias_dims", "all")
    if dims != "all" and (dims != int(dims) or dims > config.head_width):
        return f"--attn_args: bias_dims={dims:g} must be a whole number, at most a head's {config.head_width} channels"


def wide(x):
    """The same tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split_heads(x, heads, width):
    """(B, R, heads * width) to (B, heads, R, width)."""
    return x.unflatten(-1, (heads, width)).transpose(1, 2)
