"""mixers/routing.py: how centroids move. Its weights are in tests/reference_mixers.py."""

from functools import partial
from types import SimpleNamespace

import reference_mixers as reference
import torch
from bounds import close
from layers import fresh, inputs
from torch.nn import functional as F

ALONE = SimpleNamespace(mean=lambda x: x)  # a Machine with one rank
layer = partial(fresh, "routing", n_kv_head=2)


def test_fewer_queries_than_keys_form_clusters_of_their_own():
    module = layer(attn_args="clusters=3,cluster_size=6")
    q, k, v, x = inputs(module, 31, 9)
    close(module.weights_of(q, k, x), reference.weights(module, q, k, x))
    close(module.attend(q, k, v, x), reference.attend(module, q, k, v, x))


def test_centroids_move_to_the_vectors_nearest_to_them():
    """The first step moves each centroid to the mean direction of its nearest queries and keys, as
    a round of k-means does. The n-th step moves it by a share of 1 / n, at least 0.001. A centroid
    without such vectors stays."""
    module = layer(attn_args="clusters=9")
    q, k, v, x = inputs(module, 2)  # eight vectors in nine clusters
    unit = F.normalize(torch.cat([q, k.repeat_interleave(2, 1)], 2), dim=-1)
    for moves, share in ((0, 1), (1, 1 / 2), (5000, 0.001)):
        before = module.means.clone()
        nearest = F.one_hot((unit @ before.mT).argmax(-1), 9).double()  # (B, H, 2 T, K)
        means = F.normalize((nearest.mT @ unit).sum(0), dim=-1)
        some = nearest.sum((0, 2))[..., None] > 0
        expected = before + share * torch.where(some, means - before, 0.0)
        module.eval().attend(q, k, v, x)  # moves nothing
        module.train().attend(q, k, v, x)
        module.moves.fill_(moves)
        module.finish_step(ALONE)
        close(module.means, expected)
        assert module.sums == 0 and module.moves == moves + 1


def test_two_ranks_move_centroids_like_one():
    """Centroids move by the mean over ranks. Two ranks with half of the batch each equal one rank
    with all of it."""
    whole, one, other = (layer(attn_args="clusters=3").train() for _ in range(3))
    q, k, v, x = inputs(whole, 20)
    whole.attend(q, k, v, x)
    one.attend(q[:1], k[:1], v[:1], x[:1])
    other.attend(q[1:], k[1:], v[1:], x[1:])
    mean = (one.sums + other.sums) / 2
    whole.finish_step(ALONE)
    one.finish_step(SimpleNamespace(mean=lambda _: mean))
    close(one.means, whole.means)
