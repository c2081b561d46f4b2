"""Positions: how a score depends on the positions of its query and key.

RoPE rotates queries and keys before the score. Relative positions add a bias to the score that
depends on the distance i - j. Absolute positions are embeddings, which model.py adds to the tokens.

Shapes: B batch, H heads, T keys, R query rows (the last R of the T positions), D width of q and k,
P pairs of channels that RoPE rotates, W width of a table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

from axes.base import Choice, Constant, Fixed, Normal
from kernels import by_distance, wide

# ------------------------------------------------------------------------------- relative positions


class Distance(NamedTuple):
    """A bias by distance, b[h, i - j], which is added to the score. Each part is a tensor or
    None."""

    table: Any = None  # (H, W): b at distances 0 .. W - 1
    tail: Any = None  # (H,): b from distance W on; None: 0
    slope: Any = None  # (H,): slope times distance is added everywhere

    def by_distance(self, T):
        """b at distances 0 .. T - 1, (H, T)."""
        return by_distance(T, *self)

    def bias(self, R, T):
        """b for the last R of T rows and all T keys, (H, R, T). Entries of later keys are
        meaningless: they are masked.

        One vector per head holds b at every distance from T - 1 down to -(R - 1). A row is a slice
        of T entries of it, which starts one place before the slice of the row above."""
        return F.pad(self.by_distance(T).flip(-1), (0, R - 1)).unfold(-1, T, 1).flip(-2)


def learned_bias(layer):
    """score + table[h, i - j], where the table starts at 0; no bias beyond `bias_range`.
    Source: Lazy Attention, section 4.1. The paper subtracts the bias; here the sign is part of the
    table."""
    return Distance(layer.table)


def alibi(layer):
    """score - m_h (i - j), fixed, or learned with learn_alibi=1. Source: ALiBi, Press et al.
    2108.12409, section 3."""
    return Distance(slope=-layer.alibi)


def alibi_slopes(layer):
    """m_h = 2^(-8 (h + 1) / H) where H is a power of 2. Otherwise the slopes of the next lower
    power P come first, then every second slope of 2 P, as in the released code. The two views of a
    head share one slope."""
    heads, lower = layer.heads, 2 ** int(math.log2(layer.heads))
    slopes = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
    slopes += [2 ** (-4 * (h + 1) / lower) for h in range(0, 2 * (heads - lower), 2)]
    return {"alibi": torch.tensor(slopes).repeat_interleave(layer.score_heads // heads)}


T5_BUCKETS, T5_FAR = 32, 128  # from distance T5_FAR on, all distances are in the last bucket


def t5_buckets(device=None):
    """The bucket of each distance, (T5_FAR,): one for each of the nearest 16, then 16 of equal
    width in the logarithm. Source: T5, Raffel et al. 1910.10683, section 2.1, and its code for
    causal attention."""
    near, distance = T5_BUCKETS // 2, torch.arange(T5_FAR, device=device)
    logs = (distance / near).clamp(min=1).log() / math.log(T5_FAR / near)  # 0 at 16, 1 at 128
    return torch.where(distance < near, distance, near + (logs * near).long())


def t5_bias(layer):
    """score + b[h, bucket of i - j]. All layers share b (heads, 32). It starts as N(0, 1 /
    sqrt(n_embd)).
    Source: T5, section 2.1. T5 does not divide scores by sqrt(d): --scale=one gives its form."""
    return Distance(layer.t5[:, t5_buckets(layer.t5.device)], layer.t5[:, -1])


def t5_index(layer):
    """score + the number of the bucket, 0 to 31, which favours far keys. Nothing is learned. It is
    a negative control. Source: the relative positions in the code of When Attention Sink Emerges
    (table 3: loss 5.45, the others 3.8)."""
    return Distance(layer.t5_index, layer.t5_index[:, -1])


# --------------------------------------------------------------------------------- rotary positions

ROPE_SCALINGS = {  # {its name: its numbers}
    "linear": "FACTOR",
    "ntk": "RATIO",
    "llama3": "FACTOR,LOW,HIGH,ORIGINAL with LOW < HIGH",
}


def parse_rope_scaling(text):
    """ "llama3:8,1,4,8192" to ("llama3", [8.0, 1.0, 4.0, 8192.0]). Raises ValueError that names the
    valid forms."""
    if not text:
        return "", []
    how, _, numbers = text.partition(":")
    try:
        numbers = [float(number) for number in numbers.split(",")]
    except ValueError:
        numbers = []
    valid = how in ROPE_SCALINGS and len(numbers) == 1 + ROPE_SCALINGS[how].count(",")
    if not (
        valid
        and all(0 < n < math.inf for n in numbers)
        and (how != "llama3" or numbers[1] < numbers[2])
    ):
        forms = " or ".join(f"{name}:{form}" for name, form in ROPE_SCALINGS.items())
        raise ValueError(f"--rope_scaling={text}: write {forms}")
    return how, numbers


def rope_frequencies(config, width):
    """Radians per position of each of P pairs of channels, (P,): base^(-c / P) for pair c, scaled
    as rope_scaling says. The last of an odd number of channels has no partner and does not rotate.

    Sources: linear, position interpolation, Chen et al. 2023; ntk, bloc97 2023, Peng et al.
    2309.00071, section 3.1; llama3, the code of LLaMA 3.1."""
    pairs = width // 2
    pair = torch.arange(pairs, device="cpu", dtype=torch.float32)
    frequency = float(config.rope_base) ** (-pair / pairs)
    if not config.rope_scaling:
        return frequency
    how, (factor, *limits) = parse_rope_scaling(config.rope_scaling)
    if how == "linear":
        return frequency / factor
    # the base grows to base * ratio^(D / (D - 2)): the fastest pair keeps its frequency, and the
    # slowest turns `ratio` times slower, so it covers a context `ratio` times longer
    if how == "ntk":
        return frequency * factor ** -torch.linspace(0, 1, pairs, device="cpu")
    # llama3: waves that fit into the original context more than `high` times keep their length, and
    # waves that fit less than `low` times become `factor` times longer. Those in between are
    # interpolated by how often they fit
    low, high, original = limits
    kept = ((original * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


class Rope:
    """RoPE of one model: rope(positions) gives what `rotate` needs."""

    def __init__(self, config):
        self.width = config.head_width
        # {device: frequencies (P,)}
        self.frequencies = {torch.device("cpu"): rope_frequencies(config, self.width)}

    def __call__(self, positions):
        """P, [cos | cos | 1] and [-sin | sin | 0] (.., T, D) of the angles at positions (.., T)."""
        device = positions.device
        if device not in self.frequencies:
            self.frequencies[device] = self.frequencies[torch.device("cpu")].to(device)
        angle = positions[..., None].float() * self.frequencies[device]  # (.., T, P)
        cos, sin = angle.cos(), angle.sin()
        pairs = angle.shape[-1]
        rest = (0, self.width - 2 * pairs)  # a last channel without a partner
        whole_cos = F.pad(torch.cat([cos, cos], -1), rest, value=1.0)
        whole_sin = F.pad(torch.cat([-sin, sin], -1), rest)
        return pairs, whole_cos, whole_sin


class Rotation(torch.autograd.Function):
    """RoPE: rotate each pair of channels (x_c, x_{c + P}) of x (B, H, T, D) by the angle position *
    frequency_c. The gradient is rotated back, in a third of the time of autograd's own formula.

    pairs, cos, sin: from a Rope. Channels are paired half by half, as in LLaMA; the last of an odd
    number stays as it is. Source: Su et al. 2021."""

    @staticmethod
    def forward(ctx, x, pairs, cos, sin):
        ctx.rope = pairs, cos, sin
        dtype, x = x.dtype, wide(x)
        first, second = slice(pairs), slice(pairs, 2 * pairs)
        y = x * cos
        y[..., first].addcmul_(x[..., second], sin[..., first])
        y[..., second].addcmul_(x[..., first], sin[..., second])
        return y.to(dtype)

    @staticmethod
    def backward(ctx, dx):
        pairs, cos, sin = ctx.rope
        return rotate(dx, pairs, cos, -sin), None, None, None


rotate = Rotation.apply


# ------------------------------------------------------------------------------- absolute positions


class Sinusoids(nn.Module):
    """Fixed embeddings: [sin | cos] of each position, over the width C, with wavelengths from 2 pi
    to 20,000 pi.

    Source: Vaswani et al. 2017, section 3.5. Differs from the paper: sin and cos fill two halves
    and do not alternate, and token embeddings are not multiplied by sqrt(C). Both are as in the
    code of When Attention Sink Emerges."""

    def __init__(self, places, width):
        super().__init__()
        self.num_embeddings, self.width = places, width

    def forward(self, positions):  # (.., T) to (.., T, C)
        half = -(-self.width // 2)
        angle = positions[..., None] * 10000.0 ** (
            -torch.arange(half, device=positions.device) / half
        )
        return torch.cat([angle.sin(), angle.cos()], -1)[..., : self.width]


# ---------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Position(Choice):
    """A value of the axis pos."""

    # places, C -> the embedding that model.py adds for each position
    embeds: Callable | None = None
    rotates: bool = False  # RoPE rotates q and k
    bias: Callable | None = None  # layer -> Distance, which is added to the score
    shared: tuple = ()  # names of learned tensors that all layers share


TABLE = {
    "bias": learned_bias,
    "learns": lambda layer: {"table": torch.zeros(layer.score_heads, layer.config.bias_range)},
}
POSITIONS = {
    "rope": Position(rotates=True),
    "none": Position(),
    "sinusoidal": Position(embeds=Sinusoids),
    "learned": Position(embeds=nn.Embedding),
    "alibi": Position(learns=alibi_slopes, args={"learn_alibi": Constant(False)}, bias=alibi),
    "t5": Position(
        bias=t5_bias,
        shared=("t5",),
        learns=lambda layer: {
            "t5": Normal(layer.config.n_embd**-0.5, (layer.score_heads, T5_BUCKETS))
        },
    ),
    "t5_index": Position(
        bias=t5_index,
        learns=lambda layer: {"t5_index": Fixed(t5_buckets().float().repeat(layer.score_heads, 1))},
    ),
    "bias": Position(**TABLE),
    "rope+bias": Position(**TABLE, rotates=True),
}
WITHOUT_BIAS = {name: row for name, row in POSITIONS.items() if not row.bias}
