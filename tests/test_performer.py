"""mixers/performer.py: what properties against the dense reference do not say: how well it estimates softmax, and
extreme inputs."""
import math

import pytest
import torch
from bounds import below, close, dice, moved_by_rounding, same
from conftest import tiny_config
from layers import attend_and_gradients, fresh, inputs, normal, token_ids

from mixers.performer import orthogonal_normal
from model import GPT


def layer(dtype=torch.float64, **choices):
    return fresh("performer", dtype, **choices)


def features(x, W):
    """The features phi of the paper's lemma 1, for x / D^(1/4): (.., D) to (.., m)."""
    x = x / x.shape[-1] ** 0.25
    return torch.exp(x @ W.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(W))


@pytest.mark.parametrize("m", [1, 20])
def test_the_features_are_an_unbiased_estimate_of_the_exponential(m):
    """The mean of phi(q).phi(k) over draws of W is exp(q.k / sqrt(D)), within eight standard errors."""
    q, k, random = 0.3 * normal(6, 8), 0.3 * normal(6, 8, stream=1), dice(2)
    drawn = torch.stack([features(q, W) @ features(k, W).T
                         for W in (orthogonal_normal(m, 8, random).double() for _ in range(2000))])
    error = drawn.std(0) / math.sqrt(len(drawn))
    off = (drawn.mean(0) - torch.exp(q @ k.T / math.sqrt(8))) / error
    below(off.abs().max(), 8)
    below(off.square().mean().sqrt(), 4)        # on average the error is one standard error


def test_orthogonal_directions_vary_less_than_independent_ones():
    """Compares the even part of the estimates, computed from W and -W. The odd part varies equally in both."""
    q, k, random = 0.2 * normal(20, 8), 0.2 * normal(20, 8, stream=1), dice(2)
    exact = torch.exp(q @ k.T / math.sqrt(8))

    def squares(draw):
        both = (torch.cat([W, -W]) for W in (draw() for _ in range(500)))
        return torch.stack([(features(q, W) @ features(k, W).T - exact).square() for W in both]).mean()

    below(squares(lambda: orthogonal_normal(8, 8, random).double()),
          squares(lambda: torch.randn(8, 8, generator=random, dtype=torch.float64)))


def test_directions_are_orthogonal_in_blocks_and_normally_distributed():
    random = dice()
    W = torch.cat([orthogonal_normal(20, 8, random) for _ in range(200)]).double()
    block = W[:8] / W[:8].norm(dim=1, keepdim=True)
    close(block @ block.T, torch.eye(8), dtype=torch.float32)
    n = W.numel()                               # moments of a Gaussian, within eight standard errors
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        below((W.pow(power).mean() - moment).abs(), 8 * math.sqrt(variance / n))


def test_each_layer_draws_its_own_floor_d_log_d_features_by_default():
    gpt = GPT(tiny_config(attn="performer", n_layer=2, n_head=1, n_embd=64))
    one, other = (block.attn.directions for block in gpt.transformer.h)
    assert one.shape == (266, 64) and not torch.equal(one, other)
    same(one, GPT(gpt.config, seed=5).transformer.h[0].attn.directions)


@pytest.mark.parametrize("kind", ["huge", "tiny", "equal", "huge first", "opposite"])
def test_extreme_keys_stay_finite_and_rows_sum_to_one(kind):
    module = layer(torch.float32)
    q, k, v, x = inputs(module, 40, dtype=torch.float32)
    size = {"huge": 1e3, "tiny": 1e-6, "equal": 1.0, "huge first": 1.0, "opposite": 30.0}[kind]
    q, k = size * q, size * (k[:, :, :1].expand_as(k) if kind == "equal" else -q if kind == "opposite" else k)
    if kind == "huge first":
        k = torch.cat([1e3 * k[:, :, :1], k[:, :, 1:]], 2)
    o, *gradients = attend_and_gradients(module, q, k, v, x)
    assert all(a is None or a.isfinite().all() for a in (o, *gradients))
    close(module.weights_of(q, k, x).sum(-1), torch.ones(2, 4, 40), terms=40)


def test_hiding_a_key_equals_removing_it_even_if_its_features_are_the_largest():
    module = layer(torch.float32)
    q, k, v, x = inputs(module, 20, dtype=torch.float32)
    q, k = q / 2, k * torch.tensor([1.0] + [30.0] * 19)[:, None]        # features of long keys are tiny
    hidden = module.attend(q, k, v, x, sight=module.sight._replace(hidden=0))

    def without(q, k, v):                       # in float64, with the same directions
        return layer().attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], x[:, 1:])

    exact = [a.double() for a in (q, k, v)]
    close(hidden[:, :, 1:], without(*exact), moved=moved_by_rounding(without, exact, torch.float32))
    close(hidden[:, :, :1], v[:, :, :1])


def test_performer_approximates_softmax_with_the_same_weights():
    """Only directions are added. With a short context and small scores, both models have nearly the same logits."""
    softmax, performer = (GPT(tiny_config(n_embd=32, **choices)).eval() for choices in (
        {"attn": "softmax"}, {"attn": "performer", "attn_args": "features=2048"}))
    added = performer.additions_to(softmax.config)
    assert added == ["transformer.h.0.attn.directions"]
    performer.load_state_dict(softmax.state_dict(), strict=False)
    idx = token_ids(2, 16)
    below((performer(idx)[0] - softmax(idx)[0]).abs().max(), 1e-2)
