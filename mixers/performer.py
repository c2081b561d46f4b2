"""Performer: softmax attention in O(T), its exponentials estimated by random features (Choromanski et al. 2009.14794).

exp(q.k) is the mean over random directions w ~ N(0, 1) of phi_w(q) phi_w(k), phi_w(x) = exp(w.x - |x|^2 / 2). With m
directions instead of all, a sum over keys becomes a product with sums: one matrix S of m features x E values, and the
sum of weights beside it, is all that a head keeps of its past. So it is a state (mixers/recurrent.py), and one thing is
its own: features may be as small as exp(-|k|^2 / 2), out of every number's range. S is kept over the largest feature of
each direction so far:

    c_t = max(c_{t-1}, log phi(k_t))                                    (m,), elementwise
    S_t = exp(c_{t-1} - c_t) S_{t-1} + phi(k_t) exp(-c_t) v_t^T
    o_t = phi(q_t) exp(c_t) S_t  over the same of ones in place of v

Numerator and denominator are exact multiples of what they are without c, the denominator is at least 1 when phi(q_t)
exp(c_t) is over its largest, and nothing depends on later keys. (The public performer-pytorch takes one maximum over
all keys, later ones too, and adds 1e-4 to each feature to bear what that leaves: with many features its estimate gets
worse. Here nothing is added.)

Shapes: B batch, H heads, T tokens, C tokens of a chunk, D width of q and k, E of v, m features.
"""
import math

import torch

from axes.base import Constant, Fixed, only
from axes.rows import Normalizer
from mixers.recurrent import AXES as STATES
from mixers.recurrent import FORGETS, WRITES, Recurrent, StateRule


def orthogonal_normal(m, D, dice):
    """Directions (m, D), each N(0, 1) by itself, and orthogonal within every D of them: section 2.4's, whose estimate
    varies less than that of independent ones."""
    def draw(*shape):
        return torch.randn(*shape, generator=dice, device="cpu", dtype=torch.float64)

    blocks = []
    for _ in range(-(-m // D)):
        Q, R = torch.linalg.qr(draw(D, D))
        blocks.append(Q * R.diagonal().sign())  # now evenly distributed over all rotations
    lengths = draw(m, D).norm(dim=1, keepdim=True)                      # as long as independent ones would be
    return (torch.cat(blocks)[:m] * lengths).float()


def directions(layer):
    """floor(D ln D) directions, or as many as --attn_args=features=, for all heads of a layer; drawn once, where the
    paper draws anew now and then in training. Each layer has its own."""
    m, D = layer.args["features"] or max(1, int(layer.width * math.log(layer.width))), layer.width
    return {"directions": Fixed(orthogonal_normal(m, D, torch.Generator().manual_seed(layer.depth)))}


def log_features(layer, q, k, v, forget, write, x):
    """What `step` takes: log phi of queries and of keys, (B, H, T, m), but for what all features of a query share.
    q comes times the scale of scores, 1 / sqrt(D); here each side gets its root, as x / D^(1/4) in the paper."""
    root, W = math.sqrt(layer.sight.scale), layer.directions.mT
    q, k = q / root, k * root
    b = k @ W - k.square().sum(-1, keepdim=True) / 2
    return q @ W, torch.where(write == 0, -1e30, b), v                  # (one head of keys may do for all)


def step(state, a, b, v):
    """One chunk: (S, c) before it to o (B, H, C, E) and (S, c) after it. a, b (B, H, C, m): logarithms of features of
    queries and keys. Every exponent is at most 0, and that of each query's largest product with c_t is 0."""
    S, c = state                                # (B, H, m, E), (B, H, 1, m)
    tops = torch.cat([c, b.detach()], 2).cummax(2).values[:, :, 1:]     # (B, H, C, m): c_t at every token
    largest = (a.detach() + tops).amax(-1, keepdim=True)                # (B, H, C, 1)
    a = a - largest
    later = torch.ones(a.shape[2], a.shape[2], dtype=torch.bool, device=a.device).triu(1)
    pairs = a[:, :, :, None] + b[:, :, None]    # (B, H, C, C, m)
    o = (a + c).exp() @ S + pairs.masked_fill(later[..., None], -math.inf).exp().sum(-1) @ v
    last = tops[:, :, -1:]
    return o, ((c - last).exp().mT * S + (b - last).exp().mT @ v, last)


def itself(r, n):
    """The sum of weights, at least 1: see `step`."""
    return r


FAVOR = StateRule(directions, {"features": Constant(0, 0, 65536), "chunk": Constant(8, 1, 65536)}, chunk=step,
                  inputs=log_features)
AXES = STATES | {
    "rule": {"favor": FAVOR}, "normalize": {"sum": Normalizer(divisor=itself)},
    "forget": only(FORGETS, "none"), "write": only(WRITES, "one"),
    "feature": only(STATES["feature"], "none"),
}


class Performer(Recurrent):
    """A recurrent layer whose state holds the sums of random features, and the largest of each so far."""
    axes, added = AXES, ("directions",)

    def initial_state(self, v):
        """The state before the first token: S of 0, and nothing yet that could be the largest."""
        B, H, _, E = v.shape
        m = len(self.directions)
        return v.new_zeros(B, H, m, E), v.new_full((B, H, 1, m), -math.inf)

    @staticmethod
    def obstacles(config, device):
        """Triples of a kernel, a condition under which it cannot be on this device, and the reason."""
        yield "triton", True, "the features of a Performer have no kernel"
        yield "sdpa", True, f"it computes softmax itself, which --attn={config.attn} estimates"
