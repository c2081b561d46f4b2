"""model.py: the architecture against torch, initial weights, optimizer groups, generation against
forward passes."""

import copy
import math

import bounds
import pytest
import torch
from bounds import below, close, same
from conftest import CACHES, examples, tiny_config
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from layers import SIZES as LAYER
from layers import assert_learns, normal, recipes, token_ids
from torch.nn import functional as F

import attention
import mixers
from attention import ATTENTIONS
from axes.positions import POSITIONS, rope_frequencies
from model import GPT, hidden_width


def model(spread=4.0, **choices):
    """A GPT of two layers in float64 and eval mode, with `spread` times its initial matrices: its
    logits differ."""
    gpt = GPT(tiny_config(**{"n_layer": 2} | choices), bounds.SEED).double().eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(spread if p.dim() > 1 else 1.0)
    return gpt


def nanogpt(gpt, idx):
    """nanoGPT's logits from torch's own layers and functions. With norm_place="post", the
    architecture is that of Vaswani et al. 2017 and has one more norm at the end."""

    def attend(block, x):
        qkv = block.attn.c_attn(x).unflatten(-1, (3, gpt.config.n_head, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return block.attn.c_proj(o.transpose(1, 2).flatten(2))

    def mlp(block, x):
        return block.mlp.c_proj(F.gelu(block.mlp.c_fc(x)))

    x = gpt.transformer.wte(idx) + gpt.transformer.wpe.weight[: idx.shape[1]]
    for block in gpt.transformer.h:
        for branch, norm in ((attend, block.ln_1), (mlp, block.ln_2)):
            if block.norm_place == "post":
                x = norm(x + branch(block, x))
            else:
                x = x + branch(block, norm(x))
    return gpt.transformer.ln_f(x) @ gpt.transformer.wte.weight.T


@pytest.mark.parametrize(
    "kernel, norm_place", [("torch", "pre"), ("sdpa", "pre"), ("torch", "post")]
)
def test_loss_and_gradients_equal_those_of_nanogpts_architecture(kernel, norm_place):
    """The loss that the model itself returns is in float32. Targets of -1 do not count."""
    plain = {"attn": "softmax", "pos": "learned", "mlp": "gelu", "bias": True}
    gpt = model(**plain, norm_place=norm_place, kernel=kernel)
    for n, p in enumerate(gpt.parameters()):
        p.data += 0.1 * normal(*p.shape, stream=n)  # biases are 0 at first
    idx = token_ids(4, 16)
    targets = token_ids(4, 16, stream=1)
    targets[:, :3] = -1

    def loss_and_gradients(logits):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return loss, torch.autograd.grad(loss, list(gpt.parameters()))

    found, gradients = loss_and_gradients(gpt(idx)[0])
    expected, expected_gradients = loss_and_gradients(nanogpt(gpt, idx))
    close(found, expected)
    close(gpt(idx, targets)[1], expected, dtype=torch.float32)
    close(gradients, expected_gradients, terms=64 * 16, size=1.0)


def test_sinusoidal_positions_and_ntk_scaling_equal_their_formulas():
    """Vaswani et al. 2017. tests/test_weights.py compares RoPE's other scalings with those of
    transformers."""
    gpt = model(pos="sinusoidal")
    angle = torch.arange(9.0).double()[:, None] / 10000 ** torch.linspace(0, 1, 9)[:8].double()
    expected = torch.cat([angle.sin(), angle.cos()], 1)
    close(gpt.transformer.wpe(torch.arange(9)), expected, terms=8, size=8.0)
    assert gpt.num_params() == model(pos="none").num_params()
    ntk = rope_frequencies(tiny_config(rope_scaling="ntk:4"), 64)
    larger = rope_frequencies(tiny_config(rope_base=10000.0 * 4 ** (64 / 62)), 64)
    close(ntk / larger, torch.ones(32), terms=16)


SIZES = {
    "attn": ["elastic", "diff_rela"],
    "window": [5],
    "window_every": [2],
    "first": [2],
    "norm": ["rmsnorm"],
    "mlp": ["relu", "gelu_tanh", "swiglu", "relu2"],
    "n_kv_head": [1],
    "n_inner": [24],
    "rope_base": [500.0],
    "dropout": [0.2],
    "n_embd": [18],
    "head_dim": [6],
    "qkv_bias": [True],
    "norm_place": ["out", "post"],
    "bias_of": ["q"],
    "norm_eps": [1e-3],
    "embed_norm": [True],
    "pos": list(attention.AXES["pos"]),
    "rope_scaling": ["linear:4", "llama3:8,1,4,8", "ntk:2"],
    "tied": [False],
    "bias": [True],
}


SOME = st.fixed_dictionaries({}, optional={name: st.sampled_from(SIZES[name]) for name in SIZES})


@settings(max_examples=examples(50))
@given(SOME)
def test_any_combination_of_sizes_trains_every_parameter(sizes):
    try:
        gpt = GPT(tiny_config(**sizes))
    except ValueError:
        reject()
    assert_learns(gpt, token_ids(2, 17))


def test_dropout_acts_on_embeddings_and_on_both_branches_of_a_block():
    gpt = GPT(tiny_config(dropout=0.5))
    block = gpt.transformer.h[0]
    changed = []
    for module in (gpt.transformer.drop, block.attn.resid_dropout, block.mlp.dropout):
        module.register_forward_hook(lambda _, x, y: changed.append(not torch.equal(x[0], y)))
    gpt(torch.arange(16)[None])
    assert changed == [True] * 3


def test_parameters_and_operations_count_what_a_token_uses():
    assert hidden_width(tiny_config(n_embd=100, mlp="swiglu")) == 288
    assert hidden_width(tiny_config(n_embd=100, mlp="gelu")) == 400
    C, V, T = 16, 31, 16
    # matrices; biases of c_attn, c_proj, c_fc, c_proj; norms
    blocks = 2 * (12 * C * C + 9 * C + 4 * C) + 2 * C
    shared = GPT(tiny_config(n_layer=2, bias=True, pos="t5"))  # all layers share a table
    assert shared.num_params() == blocks + V * C + shared.transformer.h[1].attn.t5.numel()
    untied = GPT(tiny_config(n_layer=2, bias=True, pos="learned", tied=False))
    assert untied.num_params() == blocks + 2 * V * C + T * C
    assert untied.num_params(embeddings=False) == blocks + V * C


def test_initial_values_are_those_of_gpt2():
    """A standard deviation of n draws has a standard error of 1 / sqrt(2 n)."""
    gpt = GPT(tiny_config(n_embd=128, n_layer=2, pos="learned", bias=True), bounds.SEED)
    for name, value in gpt.named_parameters():
        if value.dim() > 1:
            expected = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            below((value.std() / expected - 1).abs(), 8 / math.sqrt(2 * value.numel()))
        else:
            is_scale = "ln_" in name and name.endswith("weight")
            assert (value == int(is_scale)).all(), name


@given(recipes(), st.sampled_from(["all", "matrices", "the rest"]))  # LoRA trains only matrices
@settings(max_examples=examples(20))
def test_optimizer_decays_matrices_only_and_gives_head_scalars_their_own_rate(choices, trains):
    gpt = GPT(tiny_config(**LAYER | {"bias": True, "n_layer": 2} | choices))
    modules = gpt.transformer.h.modules()
    matrices = {module.weight for module in modules if isinstance(module, torch.nn.Linear)}
    for p in gpt.parameters():
        p.requires_grad_(trains == "all" or (p in matrices) == (trains == "matrices"))
    made = gpt.configure_optimizers(0.3, 1e-3, (0.8, 0.9), head_lr=5.0)
    found = {p: group for group in made.param_groups for p in group["params"]}
    names = {name: p for name, p in gpt.named_parameters() if p.requires_grad}
    assert len(found) == len(names) == sum(len(group["params"]) for group in made.param_groups)
    for name, p in names.items():
        decays = name.endswith("weight") and "ln_" not in name and "norm" not in name
        scale = 1.0 if name.endswith((".weight", ".bias")) else 5.0  # learned by attention itself
        assert found[p]["weight_decay"] == (0.3 if decays else 0.0), name
        assert found[p]["lr_scale"] == scale, name
        assert (found[p]["lr"], found[p]["betas"]) == (1e-3, (0.8, 0.9))


def test_a_copy_of_a_model_shares_the_rows_of_tables():
    """Outside the interpreter, their Triton functions cannot be copied."""
    gpt = GPT(tiny_config(attn="elastic"))
    copied = copy.deepcopy(gpt).transformer.h[0].attn.choices
    assert all(copied[axis] is row for axis, row in gpt.transformer.h[0].attn.choices.items())


@torch.no_grad()
def read_in_parts(gpt, idx, parts):
    """The logits of tokens that are read part by part, with a cache."""
    cache = gpt.new_cache()
    return torch.cat([gpt(part, cache=cache)[0] for part in idx.split(parts, 1)], 1)


@pytest.mark.parametrize("attn", CACHES)
@settings(max_examples=examples(5))
@given(
    pos=st.sampled_from(list(attention.AXES["pos"])),
    parts=st.lists(st.integers(1, 6), min_size=2, max_size=7),
)
def test_a_cache_changes_neither_logits_nor_tokens_generated_past_block_size(attn, pos, parts):
    """While it generates, absolute positions read the last block_size tokens, and all others read
    everything."""
    assume(pos in mixers.MIXERS[ATTENTIONS[attn].get("mixer", "attention")].axes["pos"])
    length = sum(parts)
    assume(length <= 16 or not POSITIONS[pos].embeds)
    gpt = model(attn=attn, pos=pos)
    idx = token_ids(2, length)
    if gpt.transformer.h[0].attn.cached:
        # RoPE's angles are float32
        close(read_in_parts(gpt, idx, parts), gpt(idx)[0], dtype=torch.float32)
    cached = gpt.generate(idx, 20, seed=bounds.SEED)
    uncached = gpt.generate(idx, 20, seed=bounds.SEED, use_cache=False)
    assert cached.shape == (2, length + 20)
    same(cached, uncached)  # ids: rounding is too small to change a draw
    context = cached[:, -16:] if POSITIONS[pos].embeds else cached
    same(gpt.generate(cached, 1, temperature=0)[:, -1], gpt(context)[0][:, -1].argmax(-1))


@torch.no_grad()
def test_a_pattern_of_layers_repeats_those_of_its_recipes_with_and_without_a_cache():
    """Initial values depend on the names of tensors alone, so blocks of other models are the
    same."""
    layers = "lazy,tau_init=2+gated_deltanet+sink,pos=none,window=5+lazy,per_length=0"
    flags = {"n_layer": 6, "gate": "head"}  # in all layers
    gpt = model(layers=layers, attn_args="tau_init=0.5", **flags)
    own = (
        {"attn": "lazy", "attn_args": "tau_init=2"},  # the layer's own wins
        {"attn": "gated_deltanet"},
        {"attn": "sink", "pos": "none", "window": 5},
        {"attn": "lazy", "attn_args": "tau_init=0.5,per_length=0"},
    )
    idx = token_ids(2, 14)
    x = gpt.transformer.wte(idx)
    for layer in range(6):
        x = model(**flags, **own[layer % 4]).transformer.h[layer](x)
    logits = gpt.lm_head(gpt.transformer.ln_f(x))
    close(gpt(idx)[0], logits, dtype=torch.float32)
    close(read_in_parts(gpt, idx, 3), logits, dtype=torch.float32)


def test_the_seed_decides_the_draws_and_model_and_global_generator_stay_as_they_were():
    gpt = model(dropout=0.5).train()
    idx = token_ids(2, 4)
    state = torch.get_rng_state()
    a, b, c = (gpt.generate(idx, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state) and gpt.training


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (0, None, None),
        (1.0, 1, None),
        (1.0, None, 1e-6),
        (0.5, None, None),
        (2.0, None, None),
        (2.0, 3, None),
        (1.0, None, 0.9),
        (2.0, 5, 0.7),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(temperature, top_k, top_p):
    gpt = model(spread=8.0)
    idx = token_ids(1, 6)
    many = idx.expand(4000, -1)
    found = gpt.generate(many, 1, temperature, top_k, top_p, seed=bounds.SEED)[:, -1]
    logits, order = gpt(idx)[0][0, -1].sort(descending=True)  # the likeliest first
    p = (logits / (temperature or 1e-9)).softmax(-1)
    p = p * (torch.arange(31) < (top_k or 31))
    if top_p:
        p = p * (p.cumsum(0) - p < top_p * p.sum())
    p = p / p.sum()
    share = (found[:, None] == order).double().mean(0)
    below((share - p).abs(), 10 * (p * (1 - p) / 4000).sqrt() + 1e-3)  # ten standard errors
    assert not share[p == 0].any()


def test_a_row_repeats_its_stop_token_while_other_rows_continue():
    gpt = model(spread=8.0)
    idx = token_ids(6, 5)
    free = gpt.generate(idx, 30, seed=bounds.SEED)
    stop = free[:3, 7].tolist()  # three rows draw one of these as their third token, or earlier
    found = gpt.generate(idx, 30, seed=bounds.SEED, stop=stop)
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        first = next((i for i in range(5, 35) if whole[i] in stop), 34)  # the prompt does not count
        assert row == (whole[: first + 1] + [whole[first]] * 34)[: found.shape[1]]
    assert found.shape[1] == 35 or torch.isin(found[:, -1], torch.tensor(stop)).all()
    assert gpt.generate(idx, 30, seed=3, stop=range(31)).shape == (6, 6)  # every row has stopped
