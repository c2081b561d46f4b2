"""attention.py: every recipe against its formula, its own blocks, its gradients and its promises."""
import math

import pytest
import torch
from conftest import tiny_config
from torch.nn import functional as F

import attention
from attention import ATTENTIONS, BLOCK, Attention, choose_kernel
from eval import LiveMemory

recipes = pytest.mark.parametrize("attn", ATTENTIONS)
OFFSETS = ("", "tau_init=0", "tau_init=0,per_length=0", "per_length=block", "learn_tau=0")     # elastic's forms


def layer(attn="softmax", dtype=torch.float64, **choices):
    """An attention layer in eval mode whose weights and per-head scalars are random: at their initial values some sit on a kink."""
    module = Attention(tiny_config(**{"attn": attn, "n_head": 4, "n_embd": 32, "bias": True} | choices), 0).to(dtype).eval()
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=dice, dtype=torch.float64).to(dtype) * 0.2)
    return module


def inputs(module, T, R=None, dtype=torch.float64, seed=0):
    """Random q (of the last R rows), k, v and x for module.attend."""
    dice = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, *module.shapes[name][:1], T, module.shapes[name][1], generator=dice, dtype=torch.float64) for name in "qkv")
    x = torch.randn(2, T, module.config.n_embd, generator=dice, dtype=torch.float64)
    return [a.to(dtype) for a in (2 * q[:, :, T - (R or T):], k, v, x[:, T - (R or T):])]


def scalars(module):
    """What a recipe learns beside its projections."""
    return [p for name, p in module.named_parameters() if not name.startswith(("c_attn", "c_proj"))]


def attend_and_gradients(module, *qkvx):
    """Output and, for a random gradient from above, the gradients of all inputs and scalars."""
    leaves = [a.clone().requires_grad_() for a in qkvx]
    o = module.attend(*leaves)
    above = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(o.dtype)
    return [o, *torch.autograd.grad(o, leaves + scalars(module), above, allow_unused=True)]


def assert_all_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


# ------------------------------------------------------------------------------------------------------------------- formulas

def softmax_row(s, module, head):
    e = (s - s.max()).exp()
    return e / e.sum()


def elastic_row(s, module, head):
    """Lazy Attention, eq. 5: relu(softmax(s) - tau_h / n), with the offsets of its table 2."""
    divisor = {"True": len(s), "False": 1, "block": module.config.block_size}[str(module.args["per_length"])]
    return (softmax_row(s, module, head) - module.tau[head] / divisor).clamp(min=0)


def extra_key_row(s, module, head):
    """GPT-OSS: softmax with one more score in the denominator, whose weight comes first."""
    c = module.sink_logit[head] if module.config.sink == "logit" else s.new_zeros(())
    return softmax_row(torch.cat([c[None], s]), module, head)


def sigmoid_row(s, module, head):
    """Apple's bias is -log of the training length; paper 5 has none."""
    bias = -math.log(module.config.block_size) if module.config.attn == "sigmoid" else 0.0
    return 1 / (1 + (-s - bias).exp())


FORMULAS = {                                    # scores of one head's row over the keys it sees -> weights, an extra key's first
    "softmax": softmax_row, "softmax1": extra_key_row, "sink": extra_key_row, "gated": softmax_row, "gated_elementwise": softmax_row,
    "elastic": elastic_row, "lazy": elastic_row, "sigmoid": sigmoid_row, "sigmoid_raw": sigmoid_row}


def by_formula(module, q, k):
    """Weights (B, H, R, T) row by row from FORMULAS, in float64."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    B, H, R, D = q.shape
    T = k.shape[2]
    extra = int(module.config.sink != "none")
    w = torch.zeros(B, H, R, extra + T, dtype=torch.float64)
    for b, h, r in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(R)).tolist():
        n = T - R + r + 1
        w[b, h, r, :extra + n] = FORMULAS[module.config.attn](k[b, h, :n] @ q[b, h, r] / D ** 0.5, module, h)
    return w


@pytest.mark.parametrize("attn, args", [(attn, "") for attn in ATTENTIONS] + [("elastic", args) for args in OFFSETS[1:]])
@pytest.mark.parametrize("T, R", [(1, 1), (13, 13), (20, 3)])
def test_weights_equal_the_formula(attn, args, T, R):
    module = layer(attn, attn_args=args)
    q, k, _, x = inputs(module, T, R)
    row_input_eps = 1e-7 if attn == "sigmoid" else 1e-12                # its t is log(block_size) in float32
    torch.testing.assert_close(module.weights_of(q, k, x), by_formula(module, q, k).detach(), rtol=0, atol=row_input_eps)


def test_elastic_starts_with_tau_one_and_an_even_row_spends_nothing():
    module = Attention(tiny_config(attn="elastic"), 0)
    assert torch.equal(module.tau, torch.ones(2))
    zeros = torch.zeros(1, 2, 9, 8)
    assert module.weights_of(zeros, zeros, None).abs().max() < 1e-7


def test_elastic_learns_tau_unless_told_not_to():
    assert "tau" in dict(layer("elastic").named_parameters())
    fixed = Attention(tiny_config(attn="elastic", attn_args="learn_tau=0"), 0)
    assert "tau" not in dict(fixed.named_parameters()) and "tau" in fixed.state_dict()


def test_elastic_with_tau_zero_is_softmax():
    elastic, softmax = (Attention(tiny_config(attn=a, attn_args=args), 0) for a, args in (("elastic", "tau_init=0"), ("softmax", "")))
    q, k, v, x = inputs(elastic, 21)
    torch.testing.assert_close(elastic.attend(q, k, v, x), softmax.attend(q, k, v, x), rtol=0, atol=1e-12)
    assert torch.equal(elastic.weights_of(q, k, x), softmax.weights_of(q, k, x))


@pytest.mark.parametrize("R", [9, 1, 4])
@pytest.mark.parametrize("W", [1, 5, 9, 30])
def test_a_distance_table_is_added_to_the_scores(R, W):
    module = layer("elastic")
    q, k, _, x = inputs(module, 9, R)
    table = torch.randn(4, W, dtype=torch.float64)
    distance = torch.arange(9 - R, 9)[:, None] - torch.arange(9)
    bias = torch.where((distance >= 0) & (distance < W), table[:, distance.clamp(0, W - 1)], 0.0)
    assert torch.equal(attention.distance_bias(table, R, 9), bias)
    s = q @ k.mT * module.scale + bias
    p = s.masked_fill(distance < 0, -math.inf).softmax(-1)
    n = torch.arange(9 - R, 9)[:, None] + 1
    expected = (p - module.tau[:, None, None] / n).clamp(min=0).masked_fill(distance < 0, 0)
    torch.testing.assert_close(module.weights_of(q, k, x, table), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attn", ["softmax1", "sink"])
def test_a_sink_is_the_textbook_denominator_in_values_and_gradients(attn):
    """softmax(s) sigmoid(lse - c) against e^s / (e^c + sum e^s), with torch's own add_zero_attn layout as the second form."""
    module = layer(attn)
    q, k, v, x = (a.requires_grad_() for a in inputs(module, 23))
    c = module.sink_logit[:, None, None] if attn == "sink" else torch.zeros(4, 1, 1, dtype=torch.float64)
    s = (q @ k.mT * module.scale).masked_fill(torch.ones(23, 23).triu(1).bool(), -math.inf)
    textbook = (s.exp() / (c.exp() + s.exp().sum(-1, keepdim=True))) @ v
    extra = torch.cat([c.expand(2, 4, 23, 1), s], -1).softmax(-1) @ F.pad(v, (0, 0, 1, 0))
    above = torch.randn(2, 4, 23, 8, dtype=torch.float64)
    wanted = [*scalars(module), q, k, v]
    found = [torch.autograd.grad(o, wanted, above, retain_graph=True) for o in (module.attend(q, k, v, x), textbook, extra)]
    for other in found[1:]:
        assert_all_close(found[0], other, rtol=1e-9, atol=1e-11)


def test_a_sink_far_below_the_scores_leaves_softmax_and_far_above_them_nothing():
    module, plain = layer("sink"), layer("softmax")
    q, k, v, x = inputs(module, 11)
    module.sink_logit.data.fill_(-1e4)
    torch.testing.assert_close(module.attend(q, k, v, x), plain.attend(q, k, v, x), rtol=0, atol=1e-12)
    module.sink_logit.data.fill_(1e4)
    assert module.attend(q, k, v, x).abs().max() == 0 and (module.weights_of(q, k, x)[..., 0] == 1).all()


def test_a_sink_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="goes with rule softmax only"):
        tiny_config(attn="elastic", sink="one")


def test_a_hidden_first_key_is_seen_by_itself_only():
    module = layer("softmax")
    q, k, v, x = inputs(module, 9)
    module.hide = 1
    w = module.weights_of(q, k, x)
    assert (w[:, :, 1:, 0] == 0).all() and (w[:, :, 0, 0] == 1).all()
    torch.testing.assert_close(w[:, :, 1:, 1:], layer("softmax").weights_of(q[:, :, 1:], k[:, :, 1:], x[:, 1:]), rtol=0, atol=1e-12)
    torch.testing.assert_close(module.attend(q, k, v, x), w @ v, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------- weights, output, causality

@recipes
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_attend_is_the_weights_times_the_values(attn, n_kv_head):
    module = layer(attn, n_kv_head=n_kv_head)
    q, k, v, x = inputs(module, 45)
    o = module.weights_of(q, k, x)[..., -45:] @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    if module.config.gate != "none":            # (B, T, H or H E), one number or E for each head
        o = o * torch.sigmoid(x @ module.gate.weight.mT + module.gate.bias).view(2, 45, 4, -1).transpose(1, 2)
    torch.testing.assert_close(module.attend(q, k, v, x), o, rtol=0, atol=1e-12)


@recipes
@pytest.mark.parametrize("pos", attention.AXES["pos"])
def test_no_row_depends_on_later_ones(attn, pos):
    module = layer(attn, pos=pos)
    if not module.causal:
        pytest.skip("not causal by its own word")
    T, t = BLOCK + 9, BLOCK - 3
    x = torch.randn(1, T, 32, dtype=torch.float64, requires_grad=True)
    changed = torch.cat([x[:, :t], torch.randn(1, T - t, 32, dtype=torch.float64)], 1)
    y = module(x)
    torch.testing.assert_close(y[:, :t], module(changed)[:, :t], rtol=0, atol=1e-12)
    y[:, :t].square().sum().backward()
    assert x.grad[:, t:].abs().max() == 0 and x.grad[:, :t].abs().max() > 0


@recipes
def test_invisible_keys_have_weight_zero_and_may_hold_anything(attn):
    module = layer(attn)
    q, k, v, x = inputs(module, 12)
    assert torch.equal(module.weights_of(q, k, x)[..., -12:].triu(1), torch.zeros(2, 4, 12, 12, dtype=torch.float64))
    before = module.attend(q, k, v, x)[:, :, :-1]
    k[:, :, -1], v[:, :, -1] = 1e4, -1e4
    torch.testing.assert_close(module.attend(q, k, v, x)[:, :, :-1], before, rtol=0, atol=1e-12)


@recipes
def test_negative_scalars_show_no_later_key(attn):
    module = layer(attn)
    for p in scalars(module):
        p.data.fill_(-1.0)
    q, k, _, x = inputs(module, 12)
    assert module.weights_of(q, k, x)[..., -12:].triu(1).abs().max() == 0


@recipes
def test_huge_and_equal_scores_stay_finite(attn):
    module = layer(attn, dtype=torch.float32)
    for size in (0.0, 1e3):
        q, k, v, x = (size * a for a in inputs(module, 10, dtype=torch.float32))
        assert all(g is None or g.isfinite().all() for g in attend_and_gradients(module, q, k, v, x))


@recipes
@pytest.mark.parametrize("R", [1, 5, BLOCK + 2])
def test_fewer_queries_are_the_last_positions(attn, R):
    module = layer(attn)
    T = BLOCK + 30
    q, k, v, x = inputs(module, T)
    last = q[:, :, -R:], k
    torch.testing.assert_close(module.attend(*last, v, x[:, -R:]), module.attend(q, k, v, x)[:, :, -R:], rtol=0, atol=1e-12)
    torch.testing.assert_close(module.weights_of(*last, x[:, -R:]), module.weights_of(q, k, x)[:, :, -R:], rtol=0, atol=1e-12)


@recipes
def test_grouped_heads_equal_repeated_keys_and_values(attn):
    shared, single = layer(attn, n_kv_head=2), layer(attn)
    for own, other in zip(scalars(shared), scalars(single), strict=True):
        other.data.copy_(own.data)
    q, k, v, x = inputs(shared, 37)
    repeated = single.attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), x)
    torch.testing.assert_close(shared.attend(q, k, v, x), repeated, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------- the block loop

@recipes
@pytest.mark.parametrize("T", [1, 45, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 17])
def test_blocks_equal_one_dense_block(attn, T, monkeypatch):
    module = layer(attn, kernel="torch")
    qkvx = inputs(module, T)
    by_blocks = attend_and_gradients(module, *qkvx)
    monkeypatch.setattr(attention, "BLOCK", 1 << 20)
    assert_all_close(by_blocks, attend_and_gradients(module, *qkvx), rtol=1e-10, atol=1e-10)


@recipes
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_gradients_equal_finite_differences(attn, n_kv_head):
    module = layer(attn, n_kv_head=n_kv_head, n_embd=12)
    qkvx = [a[:1].requires_grad_() for a in inputs(module, 7)]
    assert torch.autograd.gradcheck(lambda q, k, v, x, *_: module.attend(q, k, v, x), (*qkvx, *scalars(module)))


@recipes
def test_recomputed_blocks_draw_the_same_dropout(attn, monkeypatch):
    module = layer(attn, kernel="torch", dropout=0.3).train()
    qkvx = inputs(module, 3 * BLOCK)
    torch.manual_seed(5)
    recomputed = attend_and_gradients(module, *qkvx)
    monkeypatch.setattr(attention.Recomputed, "apply", attention.run_blocks)
    torch.manual_seed(5)
    assert_all_close(recomputed, attend_and_gradients(module, *qkvx), rtol=1e-10, atol=1e-10)


@recipes
def test_training_memory_grows_linearly(attn):
    module = layer(attn, dtype=torch.float32).train()

    def peak(T):
        leaves = [a.requires_grad_() for a in inputs(module, T, dtype=torch.float32)]
        with LiveMemory() as memory:
            module.attend(*leaves).square().sum().backward()
        return memory.peak

    assert peak(8 * BLOCK) < 2.5 * peak(4 * BLOCK)


# ---------------------------------------------------------------------------------------------------------------- number types

@recipes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_number_type_comes_back_and_is_accurate(attn, dtype):
    module = layer(attn, dtype=torch.float32)
    q, k, v, x = inputs(module, 40, dtype=dtype)
    x = x.float()                                                       # the layer's input has the layer's own type
    o, exact = module.attend(q, k, v, x), module.double().attend(q.double(), k.double(), v.double(), x.double())
    assert o.dtype == dtype
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)   # the scalars are float32 all along
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=8 * eps * exact.abs().max().item())


@recipes
def test_autocast_is_close_to_float32(attn):
    module = layer(attn, dtype=torch.float32, pos="rope")
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = module(x)
    full = module(x)
    torch.testing.assert_close(low.float(), full, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps * full.abs().max().item())


@pytest.mark.parametrize("n_kv_head, T, R", [(4, 45, 45), (2, 45, 45), (1, 150, 150), (4, 45, 7), (2, 45, 1), (4, 1, 1)])
def test_sdpa_equals_the_block_loop(n_kv_head, T, R):
    sdpa, loop = (layer("softmax", kernel=kernel, n_kv_head=n_kv_head) for kernel in ("sdpa", "torch"))
    qkvx = inputs(sdpa, T, R)
    assert_all_close(attend_and_gradients(sdpa, *qkvx), attend_and_gradients(loop, *qkvx), rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ arguments and kernels

@pytest.mark.parametrize("attn, args, says", [
    ("softmax", "tau_init=1", "tau_init"), ("elastic", "speed=3", "per_length"), ("elastic", "tau_init=much", "tau_init"),
    ("elastic", "tau_init", "tau_init"), ("elastic", "learn_tau=maybe", "1 or 0"), ("elastic", "per_length=row", "block")])
def test_wrong_attn_args_are_named(attn, args, says):
    with pytest.raises(ValueError, match=says):
        tiny_config(attn=attn, attn_args=args)


def test_attn_args_keep_the_type_of_their_default():
    module = Attention(tiny_config(attn="elastic", attn_args="tau_init=2,per_length=block,learn_tau=false"), 0)
    assert module.args == {"tau_init": 2.0, "per_length": "block", "learn_tau": False}


def test_unknown_recipe_names_those_that_exist():
    with pytest.raises(ValueError, match="softmax, .*elastic"):
        attention.recipe("nonsense")


def test_auto_takes_sdpa_for_plain_softmax_and_the_loop_for_the_rest():
    assert choose_kernel(tiny_config(attn="softmax"), "cpu") == "sdpa"
    assert choose_kernel(tiny_config(attn="elastic"), "cpu") == "torch"
    assert choose_kernel(tiny_config(attn="softmax", kernel="torch"), "cpu") == "torch"


@pytest.mark.parametrize("attn, kernel", [("elastic", "sdpa"), ("softmax", "triton"), ("elastic", "triton")])
def test_a_kernel_that_cannot_be_is_an_error(attn, kernel, monkeypatch):
    monkeypatch.setattr(attention.kernels, "AVAILABLE", False)
    with pytest.raises(ValueError, match=f"--kernel={kernel}.*torch"):
        choose_kernel(tiny_config(attn=attn, kernel=kernel), "cpu")


def test_triton_is_the_choice_on_cuda_only_and_never_with_dropout(monkeypatch):
    monkeypatch.setattr(attention.kernels, "AVAILABLE", True)
    assert [choose_kernel(tiny_config(attn=attn), "cuda") for attn in ("softmax", "elastic", "sink")] == ["triton"] * 3
    assert choose_kernel(tiny_config(attn="elastic", dropout=0.1), "cuda") == "torch"
    assert choose_kernel(tiny_config(attn="softmax", dropout=0.1), "cuda") == "sdpa"
    with pytest.raises(ValueError, match="dropout"):
        choose_kernel(tiny_config(attn="elastic", dropout=0.1, kernel="triton"), "cuda")


@recipes
def test_the_kernel_equals_the_block_loop_in_output_and_all_gradients(attn):
    """The whole layer through Triton (its interpreter, without a GPU) against PyTorch, scalars and tables included."""
    if not attention.kernels.AVAILABLE:
        pytest.skip("no triton here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, weights = [], layer(attn, torch.float32, n_kv_head=2, bias_range=20).state_dict()
    for kernel in ("triton", "torch"):
        module = layer(attn, torch.float32, kernel=kernel, n_kv_head=2, bias_range=20)
        module.load_state_dict(weights)
        module.to(device)
        q, k, v, x = (a.to(device).requires_grad_() for a in inputs(module, 45, dtype=torch.float32))
        table = getattr(module, "table", None)
        o = module.attend(q, k, v, x, table)
        above = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(device)
        found.append([o, *torch.autograd.grad(o, [q, k, v, *scalars(module)], above)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * torch.finfo(torch.float32).eps * b.abs().max().item())
