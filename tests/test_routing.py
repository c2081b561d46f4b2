"""mixers/routing.py: that it is not causal, and how centroids move. Its weights are compared with the dense reference in
tests/test_mixer_properties.py."""
import pytest
import reference_mixers as reference
import torch
from bounds import below, close
from conftest import tiny_config
from layers import fresh, inputs
from torch.nn import functional as F

from model import GPT


def layer(args="clusters=3"):
    return fresh("routing", n_kv_head=2, attn_args=args)


@pytest.mark.parametrize("R", [1, 9])
def test_fewer_queries_than_keys_form_clusters_of_their_own(R):
    module = layer("clusters=3,cluster_size=6")
    q, k, v, x = inputs(module, 31, R)
    close(module.weights_of(q, k, x), reference.weights(module, q, k, x))
    close(module.attend(q, k, v, x), reference.attend(module, q, k, v, x))


def test_weights_are_causal_but_clusters_depend_on_later_tokens():
    """Later keys have no weight. But changing the last token changes the weights of earlier rows."""
    module = layer()
    assert not module.causal and not module.cached
    q, k, _, x = inputs(module, 30)
    w = module.weights_of(q, k, x)
    assert w.triu(1).abs().max() == 0
    nearer = k.clone()
    nearer[:, :, -1] = module.means[::2, 0]
    below(0.1, (module.weights_of(q, nearer, x) - w)[:, :, :-1].abs().max())


def test_a_hidden_key_is_seen_by_its_own_row():
    module = layer("clusters=2,cluster_size=20")
    q, k, _, x = inputs(module, 20)
    hidden = module.weights_of(q, k, x, sight=module.sight._replace(hidden=0))
    assert (hidden[:, :, 0, 0] == 1).all() and (hidden[:, :, 1:, 0] == 0).all()


class Ranks:
    """Replaces a Machine. mean(x) returns the mean of x over all ranks."""
    def __init__(self, mean):
        self.mean = mean


ALONE = Ranks(lambda x: x)


def test_centroids_move_to_the_vectors_nearest_to_them():
    """The first step moves each centroid to the mean direction of its nearest queries and keys, as a round of k-means
    does. The n-th step moves it by a share of 1 / n, at least 0.001. A centroid without such vectors stays."""
    module = layer("clusters=3").train()
    far = -F.normalize(sum(F.normalize(y, dim=-1).sum((0, 1, 2)) for y in inputs(module, 20)[:2]), dim=0)
    module.means[:, 2] = 1e-3 * far             # nothing is nearest to so short a centroid
    before = module.means.clone()
    q, k, v, x = inputs(module, 20)
    module.attend(q, k, v, x)
    module.finish_step(ALONE)
    both = torch.cat([q, k.repeat_interleave(2, 1)], 2)
    unit = both / both.norm(dim=-1, keepdim=True)
    nearest = (unit @ before.mT).argmax(-1)     # (B, H, 2 T)
    for h in range(4):
        for c in range(3):
            mine = unit[:, h][nearest[:, h] == c]
            expected = F.normalize(mine.sum(0), dim=0) if len(mine) else before[h, c]
            close(module.means[h, c], expected)
    module.moves.fill_(5000)
    first = module.means.clone()
    module.attend(-q, -k, v, x)
    module.finish_step(ALONE)
    moved = (module.means - first).norm(dim=-1)                         # a share of a distance of at most 2
    assert 0 < moved.max() <= 0.002 + 1e-9
    assert module.sums == 0


def test_centroids_do_not_move_in_evaluation():
    module = layer()
    module.attend(*inputs(module, 20))
    assert module.sums == 0


def test_two_ranks_move_centroids_like_one():
    """Centroids move by the mean over ranks. Two ranks with half of the batch each equal one rank with all of it."""
    whole, one, other = (layer().train() for _ in range(3))
    q, k, v, x = inputs(whole, 20)
    whole.attend(q, k, v, x)
    one.attend(q[:1], k[:1], v[:1], x[:1])
    other.attend(q[1:], k[1:], v[1:], x[1:])
    mean = (one.sums + other.sums) / 2
    whole.finish_step(ALONE)
    one.finish_step(Ranks(lambda _: mean))
    close(one.means, whole.means)


def test_the_checkpoint_holds_the_centroids():
    gpt = GPT(tiny_config(attn="routing"))
    assert {"transformer.h.0.attn.means", "transformer.h.0.attn.moves"} <= gpt.state_dict().keys()
