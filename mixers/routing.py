"""Routing attention: queries attend only to keys of their own clusters (Roy et al. 2003.05997).

Each head has K centroids. For clustering, queries and keys are scaled to unit length. Each
centroid takes the w queries and the w keys of the whole sequence that are nearest to it. Softmax
runs inside each cluster, over the keys at or before the query. A query in several clusters gets the
mean of their outputs. A query in no cluster gets 0, and so does a query without an earlier key in
its cluster.

A cluster takes the nearest tokens of the whole sequence, so a later token can replace an earlier
one. No query reads a later value, but which values it reads depends on later tokens. This holds in
training and in every perplexity measured this way. So `causal` is False, and step-by-step decoding
is impossible.

Centroids start as random unit vectors. After each training step (`finish_step`) they move towards
the mean of the queries and keys nearest to them: all the way at first, later by 0.001 of the way
(the paper's decay of 0.999).

Differs from the authors' code (google-research/routing_transformer): there, queries and keys go
through a LayerNorm without weights, for clustering and for the scores, and the scores are not
divided by sqrt(D). In a decoder the keys are the queries (share_qk), and relative positions are
learned inside each cluster. A centroid is a running mean of these normed vectors, of any length.
Here only clustering uses unit length: scores are q.k / sqrt(D) of the original queries and keys,
which have separate projections, as in the public PyTorch code (routing_transformer 1.6.1).
--qk_norm=rms --scale=one comes close to the authors' scores.

Left out: both implementations have local attention in some heads, and a loss of weight 1e-4 that
pulls queries and keys to their centroids. The PyTorch code also learns an extra key for each
cluster, and starts with ten rounds of k-means on its first batch.

Shapes: B batch, H heads, R queries, T keys, D width of q and k, E of v, K clusters, w tokens of a
cluster.
"""

import math

import torch
from torch.nn import functional as F

import kernels
from attention import Rule, softmax
from axes.base import Constant, Fixed, only
from axes.queries_keys import SCALES
from kernels import visible, wide
from mixers.base import Mixer, axes_of


def random_directions(layer):
    """Centroids `means` (H, K, D), and `moves`, how often they have moved."""
    generator = torch.Generator().manual_seed(layer.depth)
    shape = layer.heads, layer.args["clusters"], layer.width
    means = torch.randn(shape, generator=generator, device="cpu")
    return {
        "means": Fixed(F.normalize(means, dim=-1)),
        "moves": Fixed(torch.zeros(())),
    }


CLUSTERED = Rule(
    learns=random_directions,
    args={
        "clusters": Constant(8, 1, 65536),
        # w; 0: T / K, so that a token is in one cluster on average
        "cluster_size": Constant(0, 0, 2**31),
    },
    weights=softmax,
)


class Routing(Mixer):
    """A layer whose queries see the earlier keys of their own clusters: (B, T, C) to (B, T, C)."""

    axes = axes_of(
        {"softmax": CLUSTERED},
        scale=only(SCALES, "sqrt_d", "one"),
    )
    causal = False
    cached = False
    added = ("means", "moves")
    refused = {  # {axis: why routing does not accept its other values}
        "window": "clusters decide which keys a query sees; set their size with "
        "--attn_args=cluster_size=N",
        "window_every": "it has no window",
        "first": "it has no window",
        "pos": "it has no bias by distance within a cluster: use rope, none, sinusoidal or learned",
    }

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.sums = 0  # (H, K, D): sums of unit queries and keys nearest to each centroid

    def attend(self, q, k, v, x, table=None, mask=None):
        """Softmax inside each cluster; in training its tokens also move the centroids. See
        Mixer."""
        self.check(k, x, table)
        q, k = self.prepared(q, k)
        v = self.for_score_heads(v, 1)
        if self.training:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                tokens = wide(torch.cat([q, k], 2))
                unit = F.normalize(tokens, dim=-1)  # (B, H, R + T, D)
                nearest = self.closeness(unit).argmax(-1)
                nearest = F.one_hot(nearest, self.means.shape[1])  # (B, H, R + T, K)
                sums = nearest.to(unit.dtype).mT @ unit  # (B, H, K, D)
                self.sums = self.sums + sums.sum(0)
        rows, keys, w, count = self.clusters(q, k, mask)
        w = F.dropout(w, self.config.dropout, self.training)
        values = gathered(wide(v), keys)  # (B, H, K, w, E)
        outputs = (w @ values).flatten(2, 3)  # (B, H, K w, E)
        places = rows.flatten(2)[..., None].expand_as(outputs)
        o = outputs.new_zeros(*q.shape[:3], v.shape[3])  # (B, H, R, E)
        o = o.scatter_add(2, places, outputs)
        return self.postprocess(o / count, x, v)

    def prepared(self, q, k):
        """Queries and keys after their norms, (B, H, R or T, D)."""
        q = self.featured(q)
        k = self.featured(k)
        return q, self.for_score_heads(k, 1)

    def clusters(self, q, k, mask=None):
        """Positions of each cluster's queries and of its keys (B, H, K, w), its softmax weights (B,
        H, K, w, w), and the number of clusters in which a query sees a key (B, H, R, 1), at least
        1."""
        R = q.shape[2]
        T = k.shape[2]
        rows = self.nearest(q)
        keys = self.nearest(k)
        i = rows[..., None] + T - R  # (B, H, K, w, 1)
        j = keys[..., None, :]
        seen = visible(i, j, mask or self.mask)  # (B, H, K, w, w)
        s = gathered(q, rows) @ gathered(k, keys).mT
        s = wide(s) * self.scale
        w = softmax(s, seen) * seen  # the softmax of a fully masked row is not 0
        sees_any = seen.any(-1).flatten(2)  # (B, H, K w)
        count = w.new_zeros(q.shape[:3])  # (B, H, R)
        count = count.scatter_add(2, rows.flatten(2), sees_any.to(w.dtype))
        return rows, keys, w, count.clamp(min=1)[..., None]

    @torch.no_grad()
    def nearest(self, x):
        """The positions of the w tokens nearest to each centroid: x (B, H, T, D) to (B, H, K,
        w)."""
        T = x.shape[2]
        K = self.means.shape[1]
        w = self.args["cluster_size"] or math.ceil(T / K)
        unit = F.normalize(wide(x), dim=-1)
        places = self.closeness(unit).topk(min(w, T), dim=2).indices  # (B, H, w, K)
        return places.mT

    def closeness(self, unit):
        """Cosine of unit vectors (B, H, T, D) with each centroid times the centroid's length, (B,
        H, T, K). The length is at most 1, because a centroid is an average of unit vectors."""
        means = self.means.to(unit.dtype)
        with torch.autocast(unit.device.type, enabled=False):
            return unit @ means.mT

    @torch.no_grad()
    def finish_step(self, machine):
        """After a training step: move each centroid towards the mean direction of the tokens
        nearest to it, on all ranks. A centroid without tokens stays. The n-th move covers 1 / n of
        the way, but at least 0.001."""
        sums = machine.mean(self.sums)  # (H, K, D)
        self.sums = 0
        self.moves += 1
        rate = torch.clamp(1 / self.moves, min=0.001)
        used = sums.abs().sum(-1, keepdim=True) > 0
        directions = F.normalize(sums, dim=-1)
        means = torch.where(used, directions, self.means).to(self.means.dtype)
        self.means.lerp_(means, rate)

    # ----------------------------------------------------------- attention weights, for instruments

    @torch.no_grad()
    def weight_blocks(self, q, k, x, table=None, mask=None):
        """See Mixer. Memory is O(R T), because a cluster's rows come from the whole sequence."""
        self.check(k, x, table)
        q, k = self.prepared(q, k)
        rows, keys, w, count = self.clusters(q, k, mask)
        R = q.shape[2]
        T = k.shape[2]
        # (B, H, K, w, w): in the flattened matrix
        places = rows[..., None] * T + keys[..., None, :]
        dense = w.new_zeros(*q.shape[:2], R * T)
        dense = dense.scatter_add(2, places.flatten(2), w.flatten(2))
        dense = dense.unflatten(2, (R, T)) / count
        yield from dense.split(kernels.BLOCK, 2)


def gathered(x, places):
    """The tokens of x (B, H, T, D) at the positions `places` (B, H, K, w): (B, H, K, w, D)."""
    flat = places.flatten(2)[..., None]  # (B, H, K w, 1)
    tokens = x.gather(2, flat.expand(-1, -1, -1, x.shape[-1]))
    return tokens.unflatten(2, places.shape[2:])
