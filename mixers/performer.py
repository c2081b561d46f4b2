"""Performer: softmax attention in O(T), its exponentials estimated by random features (Choromanski
et al. 2009.14794).

exp(q.k) is the mean of phi_w(q) phi_w(k) over random directions w ~ N(0, 1), where phi_w(x) =
exp(w.x - |x|^2 / 2). Performer takes m directions. Then the sum over keys needs only one matrix S
of m features x E values and the sum of the weights, so a head keeps a state as in
mixers/recurrent.py.

Features can be as small as exp(-|k|^2 / 2), which underflows. So S is divided by exp(c), where c is
the largest log feature of each direction so far:

    c_t = max(c_{t-1}, log phi(k_t))                                    (m,), elementwise
    S_t = exp(c_{t-1} - c_t) S_{t-1} + phi(k_t) exp(-c_t) v_t^T
    o_t = phi(q_t) exp(c_t) S_t  divided by the same expression with ones in place of v

c cancels in the quotient. Dividing phi(q_t) exp(c_t) by its largest entry makes the denominator at
least 1. Nothing depends on later keys.

Differs from the public performer-pytorch: it takes one maximum over all keys, including later ones,
and adds 1e-4 to each feature against the underflow that remains. With many features that makes its
estimate worse.

Shapes: B batch, H heads, T tokens, C tokens of a chunk, D width of q and k, E of v, m features.
"""

import math

import torch

from axes.base import Constant, Fixed, only
from axes.layer import Layer
from axes.rows import Normalizer
from mixers.recurrent import AXES as STATES
from mixers.recurrent import Recurrent, StateRule


def orthogonal_normal(m, D, generator):
    """Directions (m, D), each distributed as N(0, 1), and orthogonal within every D of them:
    section 2.4. Their estimate has a lower variance than that of independent directions."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float64)

    blocks = []
    for _ in range(0, m, D):
        Q, R = torch.linalg.qr(draw(D, D))
        blocks.append(Q * R.diagonal().sign())  # the sign makes Q uniform over all rotations
    lengths = draw(m, D).norm(dim=1, keepdim=True)  # the lengths of independent directions
    return (torch.cat(blocks)[:m] * lengths).float()


def directions(layer):
    """The directions of a layer, shared by its heads: floor(D ln D), or as many as
    --attn_args=features= says.

    Differs from the paper: it redraws them at intervals in training; here they are drawn once."""
    D = layer.width
    m = layer.args["features"] or max(1, int(D * math.log(D)))
    generator = torch.Generator().manual_seed(layer.depth)
    return {"directions": Fixed(orthogonal_normal(m, D, generator))}


def log_features(
    layer,
    q,  # (B, H, T, D)
    k,  # (B, H, T, D)
    v,  # (B, H, T, E)
    forget,
    write,  # (B, H, T, 1): 0 for a hidden key, else 1
    x,
):
    """The inputs of `one_chunk`: log phi of queries and of keys, (B, H, T, m), and v. The queries'
    |q|^2 / 2 is left out, because it cancels. q already contains the score scale 1 / sqrt(D). Its
    root is moved to k, so both are divided by D^(1/4), as in the paper."""
    root = math.sqrt(layer.scale)
    q = q / root
    k = k * root
    W = layer.directions.mT  # (D, m)
    b = k @ W - k.square().sum(-1, keepdim=True) / 2
    b = torch.where(write == 0, -1e30, b)
    return q @ W, b, v


def one_chunk(state, a, b, v):
    """One chunk of tokens: from (S, c) before it to o (B, H, C, E) and (S, c) after it. a, b (B, H,
    C, m): log features of queries and keys. Every exponent is at most 0, and the largest entry of
    each query's a + c_t is shifted to 0."""
    S, c = state  # (B, H, m, E), (B, H, 1, m)
    C = a.shape[2]
    # c_t at every token: (B, H, C, m)
    tops = torch.cat([c, b.detach()], 2).cummax(2).values[:, :, 1:]
    a = a - (a.detach() + tops).amax(-1, keepdim=True)
    later = torch.ones(C, C, dtype=torch.bool, device=a.device).triu(1)
    pairs = a[:, :, :, None] + b[:, :, None]  # (B, H, C, C, m)
    w = pairs.masked_fill(later[..., None], -math.inf).exp().sum(-1)  # (B, H, C, C)
    o = (a + c).exp() @ S + w @ v
    last = tops[:, :, -1:]  # (B, H, 1, m)
    S = (c - last).exp().mT * S + (b - last).exp().mT @ v
    return o, (S, last)


def sum_of_weights(r, n):
    """The row's sum, which is at least 1: see `one_chunk`."""
    return r


def initial_sums(layer, v):
    """The state before the first token: S = 0, and -inf as the largest log features."""
    B, H, _, E = v.shape
    m = len(layer.directions)
    S = v.new_zeros(B, H, m, E)
    c = v.new_full((B, H, 1, m), -math.inf)
    return S, c


FAVOR = StateRule(
    learns=directions,
    args={"features": Constant(0, 0, 65536), "chunk": Constant(8, 1, 65536)},
    chunk=one_chunk,
    inputs=log_features,
    start=initial_sums,
)


class Performer(Recurrent):
    """A recurrent layer whose state holds the sums of random features, and the largest log feature
    of each direction."""

    axes = STATES | {
        "rule": {"favor": FAVOR},
        "normalize": {"sum": Normalizer(divisor=sum_of_weights)},
        "forget": only(STATES["forget"], "none"),
        "write": only(STATES["write"], "one"),
        "feature": only(STATES["feature"], "none"),
    }
    added = ("directions",)
    obstacles = Layer.obstacles  # random features have no kernel
