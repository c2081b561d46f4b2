"""mixers/focus.py: routing, which balances are causal, gates, the sparse form, decoding, training."""
import math

import layers
import pytest
import torch
from bounds import below, close, same
from conftest import by_default, tiny_config, train, train_here, weights
from layers import attend_and_gradients, inputs, normal, scalars, with_gradients

import kernels
from common.machine import Machine
from evals.instrument import load_run
from mixers.focus import BALANCES, k_means, sparse
from model import GPT

MACHINE = Machine("cpu", "float32")


def layer(**choices):
    """A layer with 4 heads and 2 key heads. Its tokens' group shares are close to 0 or 1."""
    return layers.layer("focus", **{"n_kv_head": 2, "window": 5} | choices)


def by_pairs(module, q, k, v, x):
    """Equation 2 by whole matrices: the score, gate and weight of every pair."""
    T, config, g = q.shape[2], module.config, module.assign(x)
    k, v = (y.repeat_interleave(2, 1) for y in (k, v))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    s = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if module.hard:
        sets = [[set(token.tolist()) for token in sequence] for sequence in g.argsort(-1)[..., -config.topk:]]
        shared = torch.tensor([[[bool(a & b) for b in sequence] for a in sequence] for sequence in sets])[:, None]
        s = s.masked_fill(~(shared | (i - j < config.window)), -math.inf)
    else:
        gate = torch.sigmoid(module.gate_scale * (g @ g.mT - module.gate_offset))[:, None]
        gated = s + gate.log() if config.affinity == "log" else s * gate
        s = torch.where(i - j < config.window, s, gated)
    return torch.softmax(s.masked_fill(j > i, -math.inf), -1) @ v


def equals_equation_2(module, T):
    """Check the output and all gradients. Returns the inputs and the expected output."""
    qkvx = inputs(module, T)
    expected = with_gradients(lambda *leaves: by_pairs(module, *leaves), qkvx, scalars(module))
    close(attend_and_gradients(module, *qkvx), expected, terms=T)
    return qkvx, expected[0]


# ------------------------------------------------------------------------------------------------------------- routing


def test_sinkhorn_equals_the_loop_of_the_paper():
    module = layer(balance="sinkhorn", attn_args="iterations=10,groups=3,temperature=2")
    x = normal(2, 40, 32)
    Q = torch.exp(x @ module.router.weight.T @ module.centroids.T / 2)
    for _ in range(10):
        Q = Q / Q.sum(1, keepdim=True)
        Q = Q / Q.sum(2, keepdim=True)
    g = module.assign(x)
    close(g, Q, terms=10 * 40)
    close(g.sum(-1), torch.ones(2, 40).double())
    unbalanced = layer(balance="softmax", attn_args="groups=3,temperature=2").assign(x)
    uneven, even = ((shares.sum(1) - 40 / 3).abs().max() for shares in (unbalanced, g))
    below(even, uneven / 5)


@pytest.mark.parametrize("topk", [0, 2])
@pytest.mark.parametrize("balance", BALANCES)
def test_only_sinkhorn_lets_later_tokens_change_earlier_rows(balance, topk):
    """Tests the soft form in training mode, and the hard form in evaluation mode."""
    module, early = layer(balance=balance, topk=topk).train(topk == 0), slice(0, 30)
    q, k, v, x = inputs(module, 41)
    changed = x.clone()
    changed[:, 35] += 3.0
    x.requires_grad_()
    o, other = (module.attend(q, k, v, y)[:, :, early] for y in (x, changed))
    g, other_g = (module.assign(y)[:, early] for y in (x, changed))
    assert module.causal == BALANCES[balance].causal == (balance != "sinkhorn")
    slope = torch.autograd.grad(g[..., 0].sum(), x, allow_unused=True)[0]       # None: the balance stops it
    later = 0.0 if slope is None else slope[:, 30:].abs().max().item()
    if module.causal:
        assert later == 0
        close(other_g, g)
        close(other, o, terms=41)
    else:
        below(1e-6, later)
        below(1e-6, (other_g - g).abs().max())


def test_potentials_balance_groups_and_do_not_change_in_evaluation():
    module, most = layer(attn_args="groups=4,temperature=0.3").train(), []
    for step in range(80):
        x = normal(2, 200, 32, stream=step) + 1.0                       # adds a direction that all tokens share
        most.append(module.assign(x).mean((0, 1)).max().item())
        module.finish_step(MACHINE)
    below(most[-1] - 1 / 4, (most[0] - 1 / 4) / 2)
    before = module.potential.clone()
    module.eval().assign(x)
    module.finish_step(MACHINE)
    same(module.potential, before)


@pytest.mark.parametrize("balance", BALANCES)
def test_how_each_balance_of_table_8_treats_gradients_and_centroids(balance):
    module, x = layer(balance=balance).train(), normal(2, 60, 32).requires_grad_()
    own = balance in ("ema", "recluster")       # these move centroids without gradients
    g = module.assign(x)
    slope, = torch.autograd.grad(g[..., 0].sum(), x, retain_graph=True, allow_unused=True)
    assert (slope is None) == (balance in ("stop_gradient", "ema"))
    assert torch.autograd.grad(g[..., 0].sum(), module.router.weight)[0].abs().max() > 0
    assert ("centroids" in dict(module.named_parameters())) != own
    before = module.centroids.detach().clone()
    for _ in range(100):
        module.assign(x)
        module.finish_step(MACHINE)
    assert (module.centroids != before).any() == own


def test_the_penalty_is_low_for_confident_tokens_in_balanced_groups():
    module = layer(balance="entropy", attn_args="groups=4,penalty=1")
    penalty, eye = module.choices["balance"].penalty, torch.eye(4).double()
    sure, unsure, one = eye.repeat(1, 3, 1), torch.full((1, 12, 4), 0.25).double(), eye[:1].repeat(1, 12, 1)
    close([penalty(module, g).item() for g in (sure, unsure, one)], [-math.log(4), 0.0, 0.0], size=math.log(4))
    module.train().assign(normal(2, 12, 32))
    module.finish_step(MACHINE)
    assert module.penalty == 0.0


def test_the_penalty_has_finite_gradients_where_a_softmax_is_zero():
    """In float32 a score 100 below the largest has softmax 0. A confident router reaches that."""
    module = layer(balance="entropy", attn_args="groups=4")
    s = torch.tensor([[[200.0, 0, 0, 0], [0, 200, 0, 0], [1, 2, 3, 4]]], requires_grad=True)
    g = s.softmax(-1)
    assert (g == 0).any()
    slope, = torch.autograd.grad(module.choices["balance"].penalty(module, g), s)
    assert slope.isfinite().all() and slope[0, 2].any()


def test_k_means_finds_hidden_clusters():
    middles = torch.tensor([[0.0, 9.0], [9.0, 0.0], [-9.0, -9.0]])
    found = k_means(normal(300, 2, dtype=torch.float32) + middles.repeat(100, 1), 3)
    below(torch.cdist(middles, found).amin(1), 10 / math.sqrt(100))     # ten standard errors
    assert k_means(torch.zeros(5, 2), 3).isfinite().all()               # fewer distinct points than groups


def test_after_reclustering_tokens_are_in_the_groups_of_k_means():
    """This holds although all tokens share a direction, which by itself would decide their scores."""
    module = layer(balance="recluster", attn_args="groups=3,every=1,temperature=1").train()
    x = normal(2, 300, 32) + 2.0
    module.assign(x)
    module.finish_step(MACHINE)
    shares = torch.bincount(module.assign(x)[0].argmax(-1), minlength=3) / 300
    below((shares - 1 / 3).abs(), 2 / 3)        # 2/3: all in one group


def test_a_run_can_be_loaded_without_its_router_or_with_another_balance(data, tmp_path):
    """A run of Focus can be loaded as plain attention or with another balance, and trained further."""
    train_here(*FOCUS, f"--dataset={data}", f"--out_dir={tmp_path / 'focus'}", "--max_iters=2")
    for flags in (["--attn=softmax", "--window=0"], ["--balance=softmax"]):
        given = dict(flag.removeprefix("--").split("=") for flag in flags)
        load_run(tmp_path / "focus", "cpu", given | ({"window": 0} if "window" in given else {}))
        train_here(f"--init_from={tmp_path / 'focus'}", *flags, "--max_iters=1", f"--out_dir={tmp_path / 'next'}")


# --------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("T", [1, 45])
@pytest.mark.parametrize("affinity", ["log", "score"])
def test_soft_gates_equal_equation_2_in_output_and_all_gradients(affinity, T, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)         # 45 rows are three blocks, computed again
    equals_equation_2(layer(affinity=affinity, attn_args="learn_gate_scale=1,learn_gate_offset=1,temperature=1"), T)


@pytest.mark.parametrize("affinity", ["score", "log"])
def test_a_closed_gate_removes_weight_only_with_affinity_log(affinity):
    """affinity=score multiplies scores by gates, as the paper does. A closed gate then gives 0, which is no mask."""
    module = layer(affinity=affinity, window=1, attn_args="gate_offset=4")      # the gate is below 1e-13
    q, k, _, x = inputs(module, 64)
    spent = module.weights_of(q, k, x).tril(-1).sum(-1)[..., 32:].mean()
    below(*(spent, 1e-9) if affinity == "log" else (0.3, spent))


@pytest.mark.parametrize("topk", [0, 1])
def test_within_the_window_focus_equals_plain_attention(topk):
    module, plain = layer(window=64, topk=topk), layers.layer("softmax", n_kv_head=2)
    qkvx = inputs(module, 64)
    close(module.attend(*qkvx), plain.attend(*qkvx))


# ------------------------------------------------------------------------------------------------------ the sparse form

CHOSEN = ((45, 4, 2, 5), (130, 7, 3, 5), (45, 1, 1, 1), (1, 4, 1, 5), (130, 4, 1, 200))


@pytest.mark.parametrize("T, K, k, window", [
    by_default((T, K, k, window) in CHOSEN, T, K, k, window)
    for T in (1, 45, 130) for K in (1, 4, 7) for window in (1, 5, 200) for k in range(1, K + 1)])
def test_the_sparse_form_equals_the_masked_matrix_in_output_and_all_gradients(T, K, k, window):
    module = layer(window=window, topk=k, attn_args=f"groups={K}")
    qkvx, expected = equals_equation_2(module, T)
    with torch.no_grad():                       # torch's fused kernel sums in float32
        close(module.attend(*qkvx), expected, terms=T, dtype=torch.float32)


def test_groups_may_have_nearly_all_tokens_or_none():
    module = layer(topk=1, attn_args="groups=40")
    q, k, v, x = inputs(module, 33)
    members = torch.zeros(2, 33, 40, dtype=torch.bool)
    members[:, :, 0] = True
    members[:, 20:22] = False
    members[:, 20:22, 39] = True
    i, j = torch.arange(33)[:, None], torch.arange(33)
    seen = ((members.double() @ members.double().mT > 0) | (i - j < 5)) & (j <= i)
    s = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * 0.4
    s = s.masked_fill(~seen[:, None], -math.inf)
    close(sparse(q, k, v, members, 5, 0.4),
          (torch.softmax(s, -1) @ v.repeat_interleave(2, 1), s.logsumexp(-1, keepdim=True)))
    assert module.attend(q, k, v, x).isfinite().all()


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("topk", [0, 1, 2])
@pytest.mark.parametrize("balance", [name for name, balance in BALANCES.items() if balance.causal])
def test_decoding_token_by_token_equals_one_call(balance, topk):
    module, x, past = layer(balance=balance, topk=topk), normal(2, 33, 32), {}
    steps = [module(part, past) for part in x.split([20, *[1] * 13], 1)]
    close(torch.cat(steps, 1), module(x), dtype=torch.float32)          # RoPE's angles are float32


def test_sinkhorn_is_not_decoded_with_a_cache():
    gpt = GPT(tiny_config(attn="focus", window=4, balance="sinkhorn")).eval()
    assert not gpt.transformer.h[0].attn.cached
    assert gpt.generate(torch.zeros(1, 3, dtype=torch.long), 4).shape == (1, 7)


# ------------------------------------------------------------------------------------------------------------ training

FOCUS = ("--attn=focus", "--window=4", "--max_iters=12", "--eval_interval=12")


@pytest.mark.exhaustive
@pytest.mark.parametrize("balance, kept", [("potential", "potential"), ("recluster", "centroids"),
                                           ("ema", "centroids")])
def test_two_ranks_equal_one_process_in_potentials_and_centroids(balance, kept, tmp_path, data):
    flags = (*FOCUS, "--batch_size=2", "--gradient_accumulation_steps=4", f"--balance={balance}")
    flags += ("--attn_args=every=5",) if balance == "recluster" else ()
    train_here(*flags, f"--dataset={data}", f"--out_dir={tmp_path / '1'}")
    train(tmp_path / "2", data, *flags, ranks=2)
    one, two = (weights(tmp_path / ranks) for ranks in "12")
    assert [name for name in one if name.endswith(kept) and one[name].abs().max() > 1e-3]
    assert one.keys() == two.keys()
    close([two[name] for name in one], list(one.values()), terms=12 * 16)       # steps and tokens


@pytest.mark.parametrize("balance", [by_default(name == "potential", name) for name in BALANCES])
def test_every_balance_trains_and_resumes_bit_for_bit(balance, tmp_path, data):
    flags = (*FOCUS, f"--balance={balance}", f"--dataset={data}", "--eval_interval=6", "--lr_decay_iters=12")
    train_here(*flags, f"--out_dir={tmp_path / 'whole'}")
    train_here(*flags, f"--out_dir={tmp_path / 'parts'}", "--max_iters=6")
    train_here(f"--out_dir={tmp_path / 'parts'}", "--init_from=resume", "--max_iters=12")
    same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
