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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of an axis. Each axis adds fields for what its values compute."""

    learns: Callable = lambda layer: {}  # layer -> {name: what Layer.add accepts}
    args: dict[str, Constant] = dataclasses.field(default_factory=dict)
    # config, args, choices -> why this value cannot be combined, or None
    refuse: Callable | None = None

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
        return (
            f"--attn_args: bias_dims={dims:g} must be a whole number, at most a head's "
            f"{config.head_width} channels"
        )


def split_heads(x, heads, width):
    """(B, R, heads * width) to (B, heads, R, width)."""
    return x.unflatten(-1, (heads, width)).transpose(1, 2)
