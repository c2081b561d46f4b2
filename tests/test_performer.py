"""mixers/performer.py: what it estimates, that nothing comes from later tokens, that no number leaves its range."""
import math

import pytest
import torch
from conftest import tiny_config

import mixers
from mixers.performer import orthogonal_normal
from model import GPT


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(dtype=torch.float64, **choices):
    config = tiny_config(**{"attn": "performer", "n_head": 4, "n_embd": 32} | choices)
    return mixers.layer_of(config, 0).to(dtype).eval()


def inputs(module, T, dtype=torch.float64):
    """Random q, k, v and x for module.attend."""
    q, k, v = (normal(2, heads, T, width, seed=n) for n, (heads, width) in enumerate(module.shapes.values()))
    return [a.to(dtype) for a in (q, k, v, normal(2, T, module.config.n_embd, seed=5))]


def features(x, W):
    """The paper's phi, lemma 1, of x / D^(1/4): (.., D) to (.., m)."""
    x = x / x.shape[-1] ** 0.25
    return torch.exp(x @ W.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(W))


def weights_by_formula(module, q, k):
    """phi(q_i).phi(k_j) over their sum for j <= i, without anything subtracted or added."""
    W = module.directions
    s = (features(q, W) @ features(k.repeat_interleave(q.shape[1] // k.shape[1], 1), W).mT).tril()
    return s / s.sum(-1, keepdim=True)


@pytest.mark.parametrize("T, chunk", [(1, 8), (45, 8), (45, 1), (130, 16)])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_chunks_equal_the_formula_in_values_and_gradients(T, chunk, n_kv_head):
    module = layer(n_kv_head=n_kv_head, attn_args=f"chunk={chunk}")
    q, k, v, x = (y.requires_grad_() for y in inputs(module, T))
    expected = weights_by_formula(module, q, k)
    torch.testing.assert_close(module.weights_of(q, k, x), expected, rtol=1e-10, atol=1e-12)
    above = normal(2, 4, T, 8, seed=9)
    both = []
    for o in (module.attend(q, k, v, x), expected @ v.repeat_interleave(4 // n_kv_head, 1)):
        both.append([o, *torch.autograd.grad(o, (q, k, v), above)])
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("m", [1, 8, 33])
def test_the_features_are_an_unbiased_estimate_of_softmaxs_exponential(m):
    """The mean of phi(q).phi(k) over draws of W is exp(q.k / sqrt(D)), within four standard errors."""
    q, k = 0.5 * normal(6, 8), 0.5 * normal(6, 8, seed=1)
    dice = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(4000):
        W = orthogonal_normal(m, 8, dice).double()
        drawn.append(features(q, W) @ features(k, W).T)
    drawn = torch.stack(drawn)
    error = drawn.std(0) / math.sqrt(len(drawn))
    off = (drawn.mean(0) - torch.exp(q @ k.T / math.sqrt(8))) / error
    assert off.abs().max() < 4
    assert off.square().mean() < 2              # on average they are one standard error off


def test_orthogonal_directions_vary_less_than_independent_ones():
    q, k, dice = normal(20, 8), normal(20, 8, seed=1), torch.Generator().manual_seed(0)
    exact = torch.exp(q @ k.T / math.sqrt(8))

    def squares(draw):
        return torch.stack([(features(q, W) @ features(k, W).T - exact).square() for W in map(draw, range(400))]).mean()

    assert squares(lambda _: orthogonal_normal(8, 8, dice).double()) < squares(lambda n: normal(8, 8, seed=n))


def test_directions_are_orthogonal_in_blocks_and_each_is_normal():
    W = torch.cat([orthogonal_normal(20, 8, torch.Generator().manual_seed(n)) for n in range(200)]).double()
    block = W[:8] / W[:8].norm(dim=1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-6)
    n = W.numel()
    assert abs(W.mean()) < 4 / math.sqrt(n) and abs(W.square().mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs(W.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)             # as a Gaussian's, whose 8th moment is 105


def test_more_features_come_closer_to_softmax():
    def error(m):
        module = layer(attn_args=f"features={m}")
        q, k, _, x = inputs(module, 40)
        later = torch.ones(40, 40, dtype=torch.bool).triu(1)
        exact = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1)
        return (module.weights_of(q, k, x) - exact).abs().mean().item()

    few, some, many = (error(m) for m in (16, 256, 4096))
    assert many < 0.7 * some < 0.5 * few


def test_floor_d_log_d_features_by_default_and_every_layer_its_own():
    gpt = GPT(tiny_config(attn="performer", n_layer=2, n_head=1, n_embd=64))
    one, other = (block.attn.directions for block in gpt.transformer.h)
    assert one.shape == (266, 64) and not torch.equal(one, other)
    assert torch.equal(one, GPT(gpt.config, seed=5).transformer.h[0].attn.directions)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_nothing_depends_on_later_tokens_however_large(size):
    """By gradients, and bit for bit by changed tokens: stabilisers look back only."""
    module = layer(torch.float32)
    q, k, v, x = (y.requires_grad_() for y in inputs(module, 30, torch.float32))
    grads = torch.autograd.grad(module.attend(q, k, v, x)[:, :, :20].sum(), (q, k, v))
    assert all(g[:, :, 20:].abs().max() == 0 for g in grads)
    changed = [torch.cat([y[:, :, :20], size * y[:, :, 20:]], 2) for y in (q, k, v)]
    assert torch.equal(module.attend(*changed, x)[:, :, :20], module.attend(q, k, v, x)[:, :, :20])


@pytest.mark.parametrize("kind", ["huge", "tiny", "equal", "huge first", "opposite"])
def test_extreme_keys_stay_finite_and_rows_sum_to_one(kind):
    module = layer(torch.float32)
    q, k, v, x = inputs(module, 40, torch.float32)
    size = {"huge": 1e3, "tiny": 1e-6, "equal": 1.0, "huge first": 1.0, "opposite": 30.0}[kind]
    q, k = size * q, size * (k[:, :, :1].expand_as(k) if kind == "equal" else -q if kind == "opposite" else k)
    if kind == "huge first":
        k = torch.cat([1e3 * k[:, :, :1], k[:, :, 1:]], 2)
    leaves = [y.detach().requires_grad_() for y in (q, k, v)]
    o = module.attend(*leaves, x)
    o.sum().backward()
    assert o.isfinite().all() and all(y.grad.isfinite().all() for y in leaves)
    sums = module.weights_of(q, k, x).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=0)


def test_a_hidden_key_is_as_if_it_were_not_there_even_if_it_outshone_all_others():
    module = layer(torch.float32)
    q, k, v, x = inputs(module, 20, torch.float32)
    k[:, :, 1:] *= 30
    hidden = module.attend(q, k, v, x, sight=module.sight._replace(hidden=0))
    without = module.attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], x[:, 1:])
    torch.testing.assert_close(hidden[:, :, 1:], without, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden[:, :, :1], v[:, :, :1])


def test_the_cache_equals_reading_everything():
    gpt = GPT(tiny_config(attn="performer", n_layer=2, n_head=4, n_kv_head=2, n_embd=32)).eval()
    idx = torch.randint(31, (2, 45), generator=torch.Generator().manual_seed(0))
    cache = gpt.new_cache()
    with torch.no_grad():
        parts = [gpt(piece, cache=cache)[0] for piece in idx.split([20, 1, 9, 15], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), gpt(idx)[0], rtol=1e-5, atol=1e-6)


def test_it_replaces_softmax_under_its_weights():
    """Directions are all that is new; on short contexts of small scores both models say nearly the same."""
    softmax, performer = (GPT(tiny_config(attn=attn, n_head=2, n_embd=32)).eval() for attn in ("softmax", "performer"))
    added = performer.beyond(softmax.config)
    assert added == ["transformer.h.0.attn.directions"]
    performer.load_state_dict(softmax.state_dict(), strict=False)
    idx = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(performer(idx)[0], softmax(idx)[0], rtol=0, atol=1e-2)
