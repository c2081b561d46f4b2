"""Routing attention: keys and queries fall into clusters, and only those of one cluster meet (Roy et al. 2003.05997).

Each head has K centroids, unit vectors at first. For clustering, queries and keys are scaled to unit length, and each
centroid takes the w queries and the w keys that lie nearest to it, of the whole sequence. Softmax runs inside each
cluster, over the keys at or before the query. A query of several clusters gets the mean of their outputs. A query of
none gets 0, as does one without an earlier key in its cluster.

Which tokens a cluster takes depends on all of them: a later one that lies nearer pushes an earlier one out. So although
no query reads a later value, what it reads depends on later tokens, in training and in every perplexity that is
measured like that: `causal` is False, and there is no step-by-step decoding.

Centroids start as random directions. After each training step (`finish_step`) they move towards the mean of the queries
and keys nearest to each: to it at first, later as an average of 0.999 of what they were (the paper's decay).

Differs from the authors' code (google-research/routing_transformer): there, queries and keys go through a LayerNorm
without weights, both for clustering and for the scores, which are then not divided by sqrt(D). In a decoder the keys
are the queries (share_qk), and relative positions are learned inside each cluster. A centroid is a running mean of
these normed vectors, of any length. Here the length matters for clustering alone: scores are q.k / sqrt(D) of the
queries and keys as they are, from projections of their own, as in the public PyTorch code (routing_transformer 1.6.1).
--qk_norm=rms --scale=one comes close to the authors' scores.

Left out: both codes have local attention in some heads, and a loss of weight 1e-4 that pulls queries and keys to their
centroids. The PyTorch code also learns an extra key for each cluster, and starts with ten rounds of k-means on its
first batch.

Shapes: B batch, H heads, R queries, T keys, D width of q and k, E of v, K clusters, w tokens of a cluster.
"""
import torch
from torch.nn import functional as F

import kernels
from attention import Rule, softmax
from axes import options
from axes.base import Constant, Fixed, only, wide
from axes.layer import Layer
from axes.outputs import GATES, OUT_NORMS, VALUE_BIASES
from axes.positions import WITHOUT_BIAS
from axes.queries_keys import QK_NORMS, SCALES
from axes.sight import visible


def random_directions(layer):
    """Centroids (H, K, D), and how often they have moved."""
    dice = torch.Generator().manual_seed(layer.depth)
    means = torch.randn(layer.heads, layer.args["clusters"], layer.width, generator=dice, device="cpu")
    return {"means": Fixed(F.normalize(means, dim=-1)), "moves": Fixed(torch.zeros(()))}


CLUSTERED = Rule(random_directions, {
    "clusters": Constant(8, 1, 65536),
    "cluster_size": Constant(0, 0, 2**31)},     # w; 0: T / K, which gives each token one place on average
    weights=softmax)
AXES = options.defaults_but(
    {"softmax": CLUSTERED}, qk_norm=QK_NORMS, scale=only(SCALES, "sqrt_d", "one"), pos=WITHOUT_BIAS,
    value_bias=VALUE_BIASES, out_norm=OUT_NORMS, gate=GATES)


class Routing(Layer):
    """One layer whose queries see the earlier keys of their own clusters: (B, T, C) to (B, T, C)."""
    axes, numbers, causal, cached, added = AXES, {}, False, False, ("means", "moves")
    refused = {                                 # axis: why its values mean nothing here
        "window": "who sees whom is decided by clusters; how many tokens one takes is --attn_args=cluster_size=",
        "window_every": "it has no window", "first": "it has no window",
        "pos": "only rope, none, sinusoidal and learned go: a query is not near all keys at which it looks"}

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.sums = 0                           # (H, K, D): unit queries and keys nearest to each centroid, this step

    def forward(self, x, past=None, importances=None):
        """x (B, R, C), the layer's normed input."""
        q, k, v = self.heads_of(self.c_attn(x))
        if past is not None:
            k, v, _ = self.recall(past, k, v)
        if self.choices["pos"].rotates:
            q, k = self.rotated(q, k)
        return self.output(self.attend(q, k, v, x, None))

    def attend(self, q, k, v, x, table=None, sight=None):
        """From rotated queries and keys, values and the layer's input x (B, R, C) to each head's output (B, H, R, E).
        With fewer queries than keys, they are the last. sight: only its `hidden` counts."""
        q, k, v = self.prepare_heads(q, k, v)
        if self.training:
            self.notice(q, k)
        rows, keys, w, count = self.clusters(q, k, sight)
        w = F.dropout(w, self.config.dropout, self.training)
        o = w @ taken(wide(v), keys)            # (B, H, K, w, E)
        places = rows.flatten(2)[..., None].expand(-1, -1, -1, o.shape[-1])
        o = o.new_zeros(*q.shape[:3], o.shape[-1]).scatter_add(2, places, o.flatten(2, 3)) / count
        o = self.choices["value_bias"].shifted(self, o)
        o = self.choices["out_norm"].normed(self, o)
        return self.choices["gate"].gated(self, o, x).to(v.dtype)

    def prepare_heads(self, q, k, *v):
        """The same, normed as asked for, every head with keys (and values) of its own."""
        q, *kv = self.featured(q), self.featured(k), *v
        return q, *(y.repeat_interleave(self.heads // y.shape[1], 1) for y in kv)

    def clusters(self, q, k, sight=None):
        """What each cluster takes, and its softmax: places of queries and of keys (B, H, K, w), weights (B, H, K, w, w)
        and how many clusters give a query something, at least 1: (B, H, R, 1)."""
        R, T = q.shape[2], k.shape[2]
        rows, keys = self.nearest(q), self.nearest(k)
        seen = visible(rows[..., None] + T - R, keys[..., None, :], sight or self.sight)
        s = wide(taken(q, rows) @ taken(k, keys).mT) * self.sight.scale
        w = softmax(s, seen) * seen   # of a row that sees nothing, softmax is not 0
        some = seen.any(-1).flatten(2).to(w.dtype)
        count = w.new_zeros(q.shape[:3]).scatter_add(2, rows.flatten(2), some)
        return rows, keys, w, count.clamp(min=1)[..., None]

    @torch.no_grad()
    def nearest(self, x):
        """The places of the w tokens nearest to each centroid, x (B, H, T, D) to (B, H, K, w)."""
        T, K = x.shape[2], self.means.shape[1]
        size = min(self.args["cluster_size"] or -(-T // K), T)
        return self.closeness(x).topk(size, dim=2).indices.mT

    def closeness(self, x):
        """Cosines with each centroid, times its length: (B, H, T, D) to (B, H, T, K). The length is at most 1, since a
        centroid is an average of unit vectors."""
        x = F.normalize(wide(x), dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            return x @ self.means.to(x.dtype).mT

    # ------------------------------------------------------------------ how centroids move

    @torch.no_grad()
    def notice(self, q, k):
        """Add queries and keys (B, H, ., D) of a training batch to the sums of their nearest centroids."""
        x = F.normalize(wide(torch.cat([q, k], 2)), dim=-1)
        nearest = F.one_hot(self.closeness(x).argmax(-1), self.means.shape[1]).to(x.dtype)          # (B, H, ., K)
        with torch.autocast(x.device.type, enabled=False):
            self.sums = self.sums + (nearest.mT @ x).sum(0)

    @torch.no_grad()
    def finish_step(self, machine):
        """After a training step: each centroid moves towards the mean direction of what was nearest to it on all
        ranks; one to which nothing was, stays. The n-th move is a share of 1 / n, but 0.001 at least."""
        found, self.sums = machine.mean(self.sums), 0
        self.moves += 1
        share = torch.clamp(1 / self.moves, min=0.001)
        used = found.abs().sum(-1, keepdim=True) > 0
        self.means.lerp_(torch.where(used, F.normalize(found, dim=-1), self.means).to(self.means.dtype), share)

    # ------------------------------------------------------------------ for looking at

    @torch.no_grad()
    def weight_blocks(self, q, k, x, table=None, sight=None):
        """The w_ij of o_i = sum_j w_ij v_j before value bias, norm and gate, a block of rows at a time: yields
        (B, H, BLOCK or fewer, T). Memory is O(R T): clusters hold rows from everywhere."""
        q, k = self.prepare_heads(q, k)
        rows, keys, w, count = self.clusters(q, k, sight)
        R, T = q.shape[2], k.shape[2]
        places = rows[..., None] * T + keys[..., None, :]               # (B, H, K, w, w): of the pairs in a matrix
        dense = w.new_zeros(*q.shape[:2], R * T).scatter_add(2, places.flatten(2), w.flatten(2))
        yield from (dense.unflatten(2, (R, T)) / count).split(kernels.BLOCK, 2)

    # ------------------------------------------------------------------ fine print

    @staticmethod
    def obstacles(config, device):
        """Triples of a kernel, a condition under which it cannot be on this device, and the reason."""
        yield "triton", True, "clusters have no kernel"
        yield "sdpa", True, f"it computes plain softmax only, not --attn={config.attn}"


def taken(x, places):
    """The tokens of x (B, H, T, D) at places (B, H, K, w): (B, H, K, w, D)."""
    found = x.gather(2, places.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1]))
    return found.unflatten(2, places.shape[2:])
