"""mixers/performer.py: its random directions. Its formula is in tests/reference_mixers.py."""

import math

import pytest
import torch
from bounds import below, close, dice, same
from conftest import tiny_config
from layers import normal

from mixers.performer import orthogonal_normal
from model import GPT


@pytest.mark.parametrize("m", [1, 20])
def test_the_features_are_an_unbiased_estimate_of_the_exponential(m):
    """The mean of phi(q).phi(k) over draws of W is exp(q.k), within eight standard errors."""
    q = 0.3 * normal(6, 8)
    k = 0.3 * normal(6, 8, stream=1)
    random = dice(2)
    draws = [orthogonal_normal(m, 8, random).double() for _ in range(2000)]

    def phi(y, W):
        return torch.exp(y @ W.T - y.square().sum(-1, keepdim=True) / 2)

    # (draws, 6): of the pairs q_i, k_i
    found = torch.stack([(phi(q, W) * phi(k, W)).mean(-1) for W in draws])
    error = found.mean(0) - torch.exp((q * k).sum(-1))
    below(error.abs(), 8 * found.std(0) / math.sqrt(len(draws)))
    if m > 8:  # orthogonal within every D of them
        unit = draws[0][8:16] / draws[0][8:16].norm(dim=1, keepdim=True)
        close(unit @ unit.T, torch.eye(8), dtype=torch.float32)


def test_each_layer_draws_its_own_floor_d_log_d_features_by_default():
    gpt = GPT(tiny_config(attn="performer", n_layer=2, n_head=1, n_embd=64))
    one, other = (block.attn.directions for block in gpt.transformer.h)
    assert one.shape == (266, 64) and not torch.equal(one, other)
    same(one, GPT(gpt.config, seed=5).transformer.h[0].attn.directions)
