"""mixers/focus.py: routing and what leaks, gates, the sparse form, decoding, training."""
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import train, train_here

import mixers
from common.machine import Machine
from evals.instrument import load_run
from mixers.focus import BALANCES, k_means, sparse
from model import GPT, GPTConfig

CAUSAL = [name for name, balance in BALANCES.items() if balance.causal]


def layer(seed=0, **choices):
    """A layer of 4 heads on 2 of keys, width 6, in float64, with scores that spread."""
    given = {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 24, "block_size": 512, "attn": "focus", "window": 5}
    module = mixers.layer_of(GPTConfig(**given | choices), 0).double()
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            if p.dim():
                p.copy_(torch.randn(p.shape, generator=dice, dtype=torch.float64) * 0.3)
    return module.eval()


def inputs(module, T, seed=1):
    """Random q, k, v and x of T tokens, two sequences."""
    dice = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, T, width) for heads, width in module.shapes.values()] + [(2, T, module.config.n_embd)]
    return [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]


def with_gradients(function, given):
    """Output, and the gradients of all inputs for a random one from above."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    o = function(*leaves)
    above = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [o, *torch.autograd.grad(o, leaves, above, materialize_grads=True)]


def by_pairs(module, q, k, v, x, g):
    """Equation 2 over whole matrices: every pair's score, gate and weight."""
    T, config = q.shape[2], module.config
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    s = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if module.hard:
        top = g.argsort(-1, descending=True)[..., :config.topk]
        sets = [[set(token.tolist()) for token in sequence] for sequence in top]
        met = torch.tensor([[[bool(a & b) for b in sequence] for a in sequence] for sequence in sets])[:, None]
        s = s.masked_fill(~(met | (i - j < config.window)), -math.inf)
    else:
        gate = torch.sigmoid(module.gate_scale * (g @ g.mT - module.gate_offset))[:, None]
        gated = s + gate.log() if config.affinity == "log" else s * gate
        s = torch.where(i - j < config.window, s, gated)
    return torch.softmax(s.masked_fill(j > i, -math.inf), -1) @ v


# ------------------------------------------------------------------------------------------------------------- routing


def test_sinkhorn_is_the_papers_loop():
    module = layer(balance="sinkhorn", attn_args="iterations=10,groups=3,temperature=0.5")
    x = inputs(module, 40)[3]
    Q = torch.exp(x @ module.router.weight.T @ module.centroids.T / 0.5)
    for _ in range(10):
        Q = Q / Q.sum(1, keepdim=True)
        Q = Q / Q.sum(2, keepdim=True)
    g = module.assign(x)
    torch.testing.assert_close(g, Q, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(g.sum(-1), torch.ones(2, 40).double())
    assert (g.sum(1) - 40 / 3).abs().max() < 0.2 and (layer(balance="softmax").assign(x).sum(1) - 10).abs().max() > 1


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("topk", [0, 2])
def test_what_comes_later_changes_nothing_earlier_but_by_sinkhorn(balance, topk):
    """By gradients and by a changed token, in training (soft only) and in evaluation."""
    module, early = layer(balance=balance, topk=topk), slice(0, 30)
    q, k, v, x = inputs(module, 41)
    changed = x.clone()
    changed[:, 35] += 3.0
    module.train(topk == 0)
    o, other = (module.attend(q, k, v, y)[:, :, early] for y in (x, changed))
    x.requires_grad_()
    later = 0.0
    if not topk:                                # through hard groups there is no gradient
        early_rows = module.attend(q, k, v, x)[:, :, early].square().sum()
        found = torch.autograd.grad(early_rows, x, allow_unused=True)[0]
        later = 0.0 if found is None else found[:, 30:].abs().max()     # none at all where the router's is stopped
    assert module.causal == BALANCES[balance].causal == (balance != "sinkhorn")
    if module.causal:
        assert later == 0 and torch.equal(o, other)
    else:
        assert (later > 1e-6) == (topk == 0) and not torch.equal(module.assign(x)[:, early],
                                                                 module.assign(changed)[:, early])


def test_potentials_even_out_groups_and_stay_as_they_are_in_evaluation():
    module = layer(attn_args="groups=4,temperature=0.3", seed=3).train()
    shares = []
    for step in range(80):
        x = inputs(module, 200, seed=step)[3] + 1.0                     # all lean one way
        shares.append(module.assign(x).mean((0, 1)))
        module.finish_step(Machine("cpu", "float32"))
    assert shares[0].max() > 0.5 and shares[-1].max() < 0.32
    before = module.potential.clone()
    module.eval().assign(x)
    module.finish_step(Machine("cpu", "float32"))
    assert torch.equal(module.potential, before)


def test_what_each_balance_of_table_8_does_to_gradients_and_centroids():
    machine = Machine("cpu", "float32")
    for name in BALANCES:
        module = layer(balance=name).train()
        x = inputs(module, 60)[3].requires_grad_()
        g = module.assign(x)
        assert torch.autograd.grad(g[..., 0].sum(), x, retain_graph=True, allow_unused=True)[0] is None or (
            name not in ("stop_gradient", "ema"))
        assert g[..., 0].sum().backward() is None and module.router.weight.grad.abs().max() > 0
        learned = "centroids" in dict(module.named_parameters())
        assert learned == (name not in ("ema", "recluster"))
        before = module.centroids.detach().clone()
        for _ in range(100):
            module.assign(x)
            module.finish_step(machine)
        assert torch.equal(module.centroids, before) == learned
    assert layer(balance="entropy").train().penalty == 0.0


def test_the_penalty_is_low_for_tokens_that_are_sure_of_even_groups():
    module = layer(balance="entropy", attn_args="groups=4,penalty=1")
    penalty, eye = module.choices["balance"].penalty, torch.eye(4).double()
    sure, unsure, one = eye.repeat(1, 3, 1), torch.full((1, 12, 4), 0.25).double(), eye[:1].repeat(1, 12, 1)
    assert penalty(module, sure).item() == pytest.approx(-math.log(4))
    assert penalty(module, unsure).item() == pytest.approx(0) == penalty(module, one).item()


def test_the_penalty_has_a_slope_where_a_softmax_has_come_to_zero():
    """In float32 that is 100 below the largest score: a router that has learned to be sure gets there."""
    module = layer(balance="entropy", attn_args="groups=4")
    s = torch.tensor([[[200.0, 0, 0, 0], [0, 200, 0, 0], [1, 2, 3, 4]]], requires_grad=True)
    g = s.softmax(-1)
    assert (g == 0).any()
    slope, = torch.autograd.grad(module.choices["balance"].penalty(module, g), s)
    assert slope.isfinite().all() and slope[0, 2].any()


def test_k_means_finds_what_was_hidden():
    dice = torch.Generator().manual_seed(0)
    middles = torch.tensor([[0.0, 9.0], [9.0, 0.0], [-9.0, -9.0]])
    found = k_means(torch.randn(300, 2, generator=dice) + middles.repeat(100, 1), 3)
    assert torch.cdist(middles, found).amin(1).max() < 0.5
    assert k_means(torch.zeros(5, 2), 3).isfinite().all()               # fewer points than groups


def test_after_reclustering_tokens_are_where_k_means_put_them():
    """Also where all tokens have a direction in common, which scores would be full of."""
    module = layer(balance="recluster", attn_args="groups=3,every=1,temperature=1").train()
    x = inputs(module, 300)[3] + 2.0
    module.assign(x)
    module.finish_step(Machine("cpu", "float32"))
    shares = torch.bincount(module.assign(x)[0].argmax(-1), minlength=3) / 300
    assert shares.max() < 0.6 and shares.min() > 0.1


def test_a_router_can_be_left_out_or_given_another_balance(data, tmp_path):
    """What Focus had added to a run is no obstacle to looking at it as plain attention, or to another balance."""
    train_here(*FOCUS, f"--dataset={data}", f"--out_dir={tmp_path / 'focus'}", "--max_iters=2")
    for flags in (["--attn=softmax", "--window=0"], ["--balance=softmax"]):
        given = dict(flag.removeprefix("--").split("=") for flag in flags)
        load_run(tmp_path / "focus", "cpu", given | ({"window": 0} if "window" in given else {}))
        train_here(f"--init_from={tmp_path / 'focus'}", *flags, "--max_iters=1", f"--out_dir={tmp_path / 'next'}")


# --------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("T", [1, 45, 263])     # 263: more than two blocks, which are computed again
@pytest.mark.parametrize("affinity", ["log", "score"])
def test_soft_gates_are_equation_2_with_all_gradients(affinity, T):
    module = layer(affinity=affinity, attn_args="learn_gate_scale=1,learn_gate_offset=1,temperature=1")
    own = [module.router.weight, module.centroids, module.gate_scale, module.gate_offset]
    results = []
    for form in (module.attend, lambda q, k, v, x: by_pairs(module, q, k, v, x, module.assign(x))):
        module.zero_grad()
        found = with_gradients(lambda *given, form=form: form(*given), inputs(module, T))
        form(*inputs(module, T)).square().sum().backward()
        results.append([*found, *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in own)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_what_a_shut_gate_leaves():
    """As printed a shut gate takes a score to 0, no weight: a row still spends a large part on what was pruned. The
    logarithm leaves nothing."""
    for affinity, low, high in (("score", 0.3, 1.0), ("log", 0.0, 1e-9)):
        module = layer(affinity=affinity, window=1, attn_args="gate_offset=4")      # the gate is below 1e-13
        q, k, v, x = inputs(module, 64)
        w = module.weights_of(q, k, x)
        assert low <= w.tril(-1).sum(-1)[..., 32:].mean() <= high


def test_within_the_window_nothing_changes():
    module, plain = layer(window=64), mixers.layer_of(GPTConfig(
        n_layer=1, n_head=4, n_kv_head=2, n_embd=24, attn="softmax"), 0).double()
    q, k, v, x = inputs(module, 64)
    for topk in (0, 1):
        module.config.topk = topk
        torch.testing.assert_close(module.attend(q, k, v, x), plain.attend(q, k, v, x))


# ------------------------------------------------------------------------------------------------------ the sparse form

CASES = [(T, K, k, w) for T, K, w in itertools.product((1, 45, 130), (1, 4, 7), (1, 5, 200)) for k in range(1, K + 1)]


@pytest.mark.parametrize("T, K, k, window", [
    case if case in ((45, 4, 2, 5), (130, 7, 3, 5), (45, 1, 1, 1), (1, 4, 1, 5), (130, 4, 1, 200)) else
    pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES])
def test_the_sparse_form_is_the_masked_matrix_with_all_gradients(T, K, k, window):
    module = layer(window=window, topk=k, attn_args=f"groups={K}")
    given = inputs(module, T)
    mine = with_gradients(lambda *y: module.attend(*y), given)
    theirs = with_gradients(lambda q, k, v, x: by_pairs(module, q, k, v, x, module.assign(x)), given)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    with torch.no_grad():                       # by torch's fused kernel, whose sums are in float32
        torch.testing.assert_close(module.attend(*given), mine[0], rtol=1e-5, atol=1e-6)


def test_unequal_groups_and_more_groups_than_tokens():
    """Memberships set by hand: one group holds nearly all, another nobody."""
    module = layer(topk=1, attn_args="groups=40")
    q, k, v, x = inputs(module, 33)
    members = torch.zeros(2, 33, 40, dtype=torch.bool)
    members[:, :, 0] = True
    members[:, 20:22] = False
    members[:, 20:22, 39] = True
    o, r = sparse(q, k, v, members, 5, 0.4)
    i, j = torch.arange(33)[:, None], torch.arange(33)
    seen = ((members.double() @ members.double().mT > 0) | (i - j < 5)) & (j <= i)
    s = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * 0.4
    s = s.masked_fill(~seen[:, None], -math.inf)
    torch.testing.assert_close(o, torch.softmax(s, -1) @ v.repeat_interleave(2, 1))
    torch.testing.assert_close(r, s.logsumexp(-1, keepdim=True))
    assert module.attend(q, k, v, x).isfinite().all()


def test_an_extra_key_and_the_rest_of_the_layer_go_with_both_forms():
    for topk in (0, 2):
        module = layer(topk=topk, sink="logit", gate="head", out_norm="head", qk_norm="l2")
        q, k, v, x = inputs(module, 70)
        w = module.weights_of(q, k, x)
        assert w.shape == (2, 4, 70, 71) and w.sum(-1).allclose(torch.ones(()).double())
        o = (w[..., 1:] @ v.repeat_interleave(2, 1))
        torch.testing.assert_close(module.attend(q, k, v, x), module.through("gate", module.through("out_norm", o), x))


def test_weights_times_values_are_the_output():
    for topk, balance in itertools.product((0, 1, 3), ("potential", "sinkhorn")):
        module = layer(topk=topk, balance=balance)
        q, k, v, x = inputs(module, 140)
        o = module.weights_of(q, k, x) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(o, module.attend(q, k, v, x))


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_whole_models_in_float32_and_by_the_kernel(kernel):
    """One group a token runs each group through the kernel of softmax, here in the interpreter."""
    if kernel == "triton":
        pytest.importorskip("triton")
    config = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 80, "vocab_size": 50, "attn": "focus",
              "window": 4, "topk": 1}
    idx = torch.randint(50, (2, 61), generator=torch.Generator().manual_seed(0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = [GPT(GPTConfig(**config, kernel=name)).eval().to(device)(idx.to(device))[0]
              for name in (kernel, "torch")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("topk", [0, 1, 2])
@pytest.mark.parametrize("balance", CAUSAL)
def test_decoding_token_by_token_equals_reading_at_once(balance, topk):
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=80, vocab_size=50, attn="focus", window=4,
                          topk=topk, balance=balance)).double().eval()
    idx = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    steps = [model(part, cache=cache)[0] for part in idx.split([20, *[1] * 13], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(idx)[0], rtol=1e-9, atol=1e-10)
    assert model.generate(idx, 5, temperature=0).equal(model.generate(idx, 5, temperature=0, use_cache=False))


def test_sinkhorn_is_not_decoded_with_a_cache():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=50, attn="focus", window=4, balance="sinkhorn"))
    assert not model.transformer.h[0].attn.cached
    assert model.generate(torch.zeros(1, 3, dtype=torch.long), 4).shape == (1, 7)


# ------------------------------------------------------------------------------------------------------------ training

FOCUS = ("--attn=focus", "--window=4", "--max_iters=12", "--eval_interval=12")


@pytest.mark.exhaustive
@pytest.mark.parametrize("balance, kept", [("potential", "potential"), ("recluster", "centroids"),
                                           ("ema", "centroids")])
def test_two_ranks_equal_one_process_potentials_too(balance, kept, tmp_path, data):
    flags = (*FOCUS, "--batch_size=2", "--gradient_accumulation_steps=4", f"--balance={balance}")
    flags += ("--attn_args=every=5",) if balance == "recluster" else ()
    train(tmp_path / "1", data, *flags)
    train(tmp_path / "2", data, *flags, ranks=2)
    one, two = (torch.load(tmp_path / ranks / "ckpt.pt", weights_only=True)["model"] for ranks in "12")
    assert [name for name in one if name.endswith(kept) and one[name].abs().max() > 1e-3]
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("balance", [
    name if name == "potential" else pytest.param(name, marks=pytest.mark.exhaustive) for name in BALANCES])
def test_every_balance_trains_and_resumes_bit_for_bit(balance, tmp_path, data):
    flags = (*FOCUS, f"--balance={balance}", f"--dataset={data}", "--eval_interval=6", "--lr_decay_iters=12")
    train_here(*flags, f"--out_dir={tmp_path / 'whole'}")
    train_here(*flags, f"--out_dir={tmp_path / 'parts'}", "--max_iters=6")
    train_here(f"--out_dir={tmp_path / 'parts'}", "--init_from=resume", "--max_iters=12")
    whole, parts = (torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_in_bfloat16(data, tmp_path):
    train_here(*FOCUS, f"--dataset={data}", f"--out_dir={tmp_path}", "--dtype=bfloat16", "--max_iters=2")
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=50, attn="focus", window=4)).eval()
    idx = torch.randint(50, (1, 64), generator=torch.Generator().manual_seed(0))
    for topk in (0, 2):
        model.config.topk = topk
        with torch.autocast("cpu", torch.bfloat16):
            low = model(idx)[0].float()
        assert np.allclose(low.detach(), model(idx)[0].detach(), atol=0.05)
