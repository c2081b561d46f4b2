"""mixers/focus.py: balances in training, k-means, the sparse form, runs. Its formulas are in
tests/reference_mixers.py."""

import math

import layers
import pytest
import reference_mixers as reference
import torch
from bounds import below, close, dice, same
from conftest import by_default, examples, train, train_here, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import normal, with_gradients
from torch.nn import functional as F

from common.machine import Machine
from evals.instrument import load_run
from mixers.focus import BALANCES, k_means, sparse


def layer(**choices):
    """Its tokens' group shares are close to 0 or 1."""
    return layers.layer("focus", **{"n_kv_head": 2, "window": 5} | choices)


def step(module, *micro_batches):
    for x in micro_batches:
        module.assign(x)
    module.finish_step(Machine("cpu", "float32"))


def test_the_potential_moves_to_what_sinkhorn_subtracts():
    """Sinkhorn's result is softmax(s - u), which determines u up to a constant. Nothing moves in
    evaluation."""
    module = layer(attn_args="groups=3,temperature=2,rate=0.2")
    batches = [normal(2, 40, 32), normal(1, 40, 32, stream=1)]
    s = torch.cat(batches) @ module.router.weight.T @ module.centroids.T / 2
    u = (s - reference.sinkhorn(s, 10).log())[:, 0]
    step(module.train(), *batches)
    close(module.potential, 0.2 * (u - u.mean(-1, keepdim=True)).mean(0), terms=10 * 40)
    before = module.potential.clone()
    step(module.eval(), *batches)
    same(module.potential, before)


@pytest.mark.parametrize("balance", BALANCES)
def test_how_each_balance_of_table_8_treats_gradients_and_centroids(balance):
    module = layer(balance=balance, attn_args="every=7" if balance == "recluster" else "")
    x = normal(2, 60, 32).requires_grad_()
    module.assign(x)[..., 0].sum().backward()
    assert (x.grad is None) == (balance in ("stop_gradient", "ema"))
    assert module.router.weight.grad.any()
    assert module.cached == (balance != "sinkhorn")
    moves = {"ema": list(range(1, 16)), "recluster": [7, 14]}  # centroids without gradients
    assert ("centroids" in dict(module.named_parameters())) == (balance not in moves)
    moved = []
    for number in range(1, 16):
        before = module.centroids.detach().clone()
        step(module.train(), normal(2, 60, 32, stream=number))
        if not torch.equal(module.centroids, before):
            moved.append(number)
    assert moved == moves.get(balance, [])


def test_the_moving_average_takes_each_centroid_towards_the_mean_of_its_tokens():
    """The mean of W x, weighted by the tokens' shares, over all micro-batches. The centroid of an
    empty group stays."""
    module = layer(balance="ema", attn_args="groups=3,rate=0.25,temperature=100")
    x = normal(4, 30, 32) + 5.0
    z = (x @ module.router.weight.T).detach()
    module.centroids[2] = -1e3 * z.mean((0, 1))
    g = module.assign(x).detach()
    assert g[..., 2].sum() < 1e-3
    means = torch.einsum("btk,btd->kd", g, z) / g.sum((0, 1))[:, None]
    expected = module.centroids.clone()
    expected[:2] = 0.75 * expected[:2] + 0.25 * means[:2]
    step(module.train(), *x.split([1, 3]))
    close(module.centroids, expected, terms=120)


def test_the_penalty_is_low_for_confident_tokens_in_balanced_groups():
    """Its gradients are finite where a share is 0, as that of a score 1000 below the largest."""
    module = layer(balance="entropy", attn_args="groups=4,penalty=1")
    eye = torch.eye(4).double()
    for g, expected in (
        (eye.repeat(1, 3, 1), -math.log(4)),  # sure and even
        (torch.full((1, 12, 4), 0.25).double(), 0.0),  # unsure
        (eye[:1].repeat(1, 12, 1), 0.0),  # all in one group
    ):
        penalty = module.choices["balance"].penalty(module, g.requires_grad_())
        close(penalty.item(), expected, size=math.log(4))
        assert torch.autograd.grad(penalty, g)[0].isfinite().all()
    module.train().assign(normal(2, 12, 32))
    assert module.penalty.item() < 0
    step(module, normal(2, 12, 32))
    assert module.penalty == 0.0


def test_k_means_finds_hidden_clusters_in_which_tokens_are_after_reclustering():
    """All tokens share a direction, which by itself would decide their scores. The first sequence
    of a step counts."""
    middles = torch.tensor([[0.0, 9.0], [9.0, 0.0], [-9.0, -9.0]])
    found = k_means(normal(300, 2, dtype=torch.float32) + middles.repeat(100, 1), 3)
    below(torch.cdist(middles, found).amin(1), 10 / math.sqrt(100))  # ten standard errors
    assert k_means(torch.zeros(5, 2), 3).isfinite().all()  # fewer distinct points than groups
    module = layer(balance="recluster", attn_args="groups=3,every=1,temperature=1")
    x = normal(2, 300, 32) + 2.0
    step(module.train(), x, normal(2, 300, 32, stream=1))
    z = (x[0] @ module.router.weight.T).detach()
    close(module.middle, z.mean(0), terms=300)
    close(module.centroids, F.normalize(k_means(z - z.mean(0), 3), dim=-1), terms=300)
    assert torch.bincount(module.assign(x)[0].argmax(-1), minlength=3).min() > 20


@pytest.mark.parametrize("kernel, dtype", [("torch", torch.float64), ("cpp", torch.float32)])
@given(
    st.sampled_from((70, 1, 2, 300)),
    st.sampled_from((3, 1, 62)),
    st.sampled_from((7, 1, 400)),
    st.sampled_from((0.3, 0.03, 1.0)),
)
@settings(max_examples=examples(10))
def test_every_open_pair_counts_once_whatever_groups_tokens_share(kernel, dtype, T, K, local, full):
    """A token may be in any number of groups, or in none. The parts of some rows have no keys."""
    members = torch.rand(2, T, K, generator=dice(T)) < full
    share_group = (members.double() @ members.double().mT > 0)[:, None]
    seen = (share_group | torch.ones(T, T).bool().triu(1 - local)).tril()

    def full_attention(q, k, v):
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        s = (q @ k.mT / 4).masked_fill(~seen, -math.inf)
        return torch.cat([s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True)], -1)

    def in_parts(q, k, v):
        qkv = [y.to(dtype) for y in (q, k, v)]
        return torch.cat(sparse(*qkv, members, local, 0.25, kernel), -1)

    qkv = [normal(2, heads, T, 16, stream=heads + T) for heads in (4, 2, 2)]
    expected = with_gradients(full_attention, qkv)
    size = max(1.0, *(part.abs().max().item() for part in expected))  # gradients may cancel
    close(with_gradients(in_parts, qkv), expected, T + 16, size, dtype)
    with torch.no_grad():
        close(in_parts(*qkv), expected[0], T + 16, size, torch.float32)


FOCUS = ("--attn=focus", "--window=4", "--max_iters=12", "--eval_interval=12")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "balance, kept", [("potential", "potential"), ("recluster", "centroids"), ("ema", "centroids")]
)
def test_two_ranks_equal_one_process_in_potentials_and_centroids(balance, kept, tmp_path, data):
    flags = (*FOCUS, "--batch_size=2", "--gradient_accumulation_steps=4", f"--balance={balance}")
    flags += ("--attn_args=every=5",) if balance == "recluster" else ()
    train_here(*flags, f"--dataset={data}", f"--out_dir={tmp_path / '1'}")
    train(tmp_path / "2", data, *flags, ranks=2)
    one, two = (weights(tmp_path / ranks) for ranks in "12")
    assert [name for name in one if name.endswith(kept) and one[name].abs().max() > 1e-3]
    close([two[name] for name in one], [*one.values()], terms=12 * 16)  # steps and tokens


@pytest.mark.parametrize("balance", [by_default(name == "potential", name) for name in BALANCES])
def test_every_balance_trains_and_resumes_bit_for_bit(balance, tmp_path, data):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (*FOCUS, f"--balance={balance}", f"--dataset={data}")
    flags += ("--eval_interval=6", "--lr_decay_iters=12")
    train_here(*flags, f"--out_dir={whole}")
    train_here(*flags, f"--out_dir={parts}", "--max_iters=6")
    train_here(f"--out_dir={parts}", "--init_from=resume", "--max_iters=12")
    same(weights(parts), weights(whole))


def test_a_run_can_be_loaded_and_trained_without_its_router_or_with_another_balance(data, tmp_path):
    run, after = tmp_path / "focus", tmp_path / "next"
    train_here(*FOCUS, f"--dataset={data}", f"--out_dir={run}", "--max_iters=2")
    for choices in ({"attn": "softmax", "window": 0}, {"balance": "softmax"}):
        load_run(run, "cpu", choices)
        flags = [f"--{axis}={value}" for axis, value in choices.items()]
        train_here(f"--init_from={run}", f"--out_dir={after}", "--max_iters=1", *flags)
