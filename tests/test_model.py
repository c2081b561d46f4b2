"""model.py: the architecture against torch.nn, initial weights, optimizer groups, generation against forward passes."""
import math

import bounds
import pytest
import torch
import torch.nn as nn
from bounds import below, close, same
from conftest import CACHES, RECIPES, examples, tiny_config
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from layers import assert_learns, normal, token_ids, with_gradients

import attention
import mixers
from attention import ATTENTIONS
from axes.positions import POSITIONS, rope_frequencies
from common import machine
from data import tokens
from model import GPT, MoE, check_size


def model(spread=4.0, **choices):
    """A GPT of two layers in float64 and eval mode. Its matrices are `spread` times their initial values, so that its
    logits differ clearly."""
    gpt = GPT(tiny_config(**{"n_layer": 2} | choices), bounds.SEED).double().eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(spread if p.dim() > 1 else 1.0)
    return gpt


class Reference(nn.Module):
    """nanoGPT's architecture from torch.nn's own layers: learned positions, LayerNorm, gelu, biases, tied head. With
    norm_place="post", that of Vaswani et al. 2017 and one more norm at the end."""

    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        layer = nn.TransformerEncoderLayer(c.n_embd, c.n_head, 4 * c.n_embd, 0.0, "gelu", batch_first=True,
                                           norm_first=c.norm_place == "pre")
        self.h = nn.TransformerEncoder(layer, c.n_layer, nn.LayerNorm(c.n_embd), enable_nested_tensor=False)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], dtype=torch.float64)
        return self.h(self.wte(idx) + self.wpe.weight[:idx.shape[1]], mask, is_causal=True) @ self.wte.weight.T


def their_name(name):
    """What torch.nn calls a parameter of GPT."""
    for ours, theirs in {"attn.c_attn.": "self_attn.in_proj_", "attn.c_proj": "self_attn.out_proj",
                         "mlp.c_fc": "linear1", "mlp.c_proj": "linear2", "ln_1": "norm1", "ln_2": "norm2",
                         "transformer.h": "h.layers", "transformer.ln_f": "h.norm", "transformer.": ""}.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("kernel, norm_place", [("torch", "pre"), ("sdpa", "pre"), ("torch", "post")])
def test_losses_of_fifty_steps_equal_those_of_nanogpts_architecture(kernel, norm_place, data):
    """Both losses are in float64: in float32, Adam turns rounding errors of tiny gradients into whole steps. The loss
    that the model itself returns is in float32. Targets of -1 do not count."""
    gpt = GPT(tiny_config(n_layer=2, n_embd=32, block_size=32, vocab_size=257, attn="softmax", pos="learned",
                          norm="layernorm", norm_place=norm_place, mlp="gelu", bias=True, kernel=kernel)).double()
    reference = Reference(gpt.config).double()
    reference.load_state_dict({their_name(name): value for name, value in gpt.named_parameters()})
    groups = [{"params": [p for p in reference.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
              for matrix in (True, False)]
    optimizers = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    split, starts, expected = tokens.Tokens(data, "train"), torch.randint(19_000, (50, 4), generator=bounds.dice()), []
    for step in range(50):
        rows = torch.from_numpy(split.windows(starts[step].tolist(), 33, 257))
        idx, targets = rows[:, :-1], rows[:, 1:].masked_fill(torch.arange(32) < step % 32, -1)
        losses = [nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
                  for logits in (gpt(idx)[0], reference(idx))]
        close(losses[0], losses[1], terms=50 * 64)
        close(gpt(idx, targets)[1], losses[1], dtype=torch.float32)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        expected.append(loss.item())
    below(0.5, expected[0] - expected[-1])


def test_sinusoidal_positions_and_ntk_scaling_equal_their_formulas():
    """sin, then cos, of position / 10000^(2c / C), Vaswani et al. 2017, which are not learned. NTK: RoPE with a larger
    base. tests/test_weights.py compares its other scalings with those of transformers."""
    gpt = model(pos="sinusoidal")
    angle = torch.arange(9.0).double()[:, None] / 10000 ** torch.linspace(0, 1, 9)[:8].double()
    close(gpt.transformer.wpe(torch.arange(9)), torch.cat([angle.sin(), angle.cos()], 1), terms=8, size=8.0)
    assert gpt.num_params() == model(pos="none").num_params()
    ntk, larger = (rope_frequencies(tiny_config(**choice), 64, "cpu") for choice in (
        {"rope_scaling": "ntk:4"}, {"rope_base": 10000.0 * 4 ** (64 / 62)}))
    close(ntk / larger, torch.ones(32), terms=16)


SIZES = {
    "attn": ["elastic", "diff_rela"], "window": [5], "window_every": [2], "first": [2], "norm": ["rmsnorm"],
    "mlp": ["relu", "gelu_tanh", "swiglu", "relu2", "moe"], "n_kv_head": [1], "n_inner": [24], "rope_base": [500.0],
    "dropout": [0.2], "n_embd": [18], "head_dim": [6], "qkv_bias": [True], "norm_place": ["out", "post", "parallel"],
    "norm_eps": [1e-3], "embed_norm": [True], "rope_share": [0.5], "pos": list(attention.AXES["pos"]),
    "rope_scaling": ["linear:4", "llama3:8,1,4,8", "ntk:2", "yarn:8,4,1,8"], "tied": [False], "bias": [True]}


@settings(max_examples=examples(50))
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in SIZES.items()}))
def test_any_combination_of_sizes_trains_every_parameter(sizes):
    """tests/test_contract.py tests the axes of the mixers."""
    try:
        gpt = GPT(tiny_config(**sizes))
    except ValueError:
        reject()
    assert_learns(gpt, token_ids(2, 17))


def test_parameters_and_operations_count_what_a_token_uses():
    C, V, T, F, E = 16, 31, 16, 24, 5
    blocks = 2 * (12 * C * C + 9 * C + 4 * C) + 2 * C       # matrices; biases of c_attn, c_proj, c_fc, c_proj; norms
    shared, learned, untied = (GPT(tiny_config(n_layer=2, bias=True, **choices)) for choices in (
        {"pos": "t5"}, {"pos": "learned"}, {"pos": "learned", "tied": False}))
    assert shared.num_params() == blocks + V * C + shared.transformer.h[1].attn.t5.numel()  # all layers share a table
    assert learned.num_params() == blocks + V * C + T * C and untied.num_params() == blocks + 2 * V * C + T * C
    assert learned.num_params(embeddings=False) == untied.num_params(embeddings=False) == blocks + V * C
    expert = 2 * F * C + 2 * F + C * F + C
    rest = V * C + 3 * C + 4 * (C * C + C) + E * (C + 1)                # embedding, norms, attention, router
    gpt = GPT(tiny_config(mlp="moe", n_expert=E, n_active=2, n_inner=F, bias=True, norm="rmsnorm"))
    assert gpt.num_params() == rest + E * expert and gpt.num_params(active=True) == rest + 2 * expert
    assert gpt.flops_per_token() == 6 * (rest + 2 * expert) + gpt.transformer.h[0].attn.flops_per_token()


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_built(monkeypatch):
    """A model needs its weights and, even on the meta device, the Python objects of its blocks."""
    config, parameters = tiny_config(n_layer=1000, tied=False), 1000 * (12 * 16 * 16 + 2 * 16) + 2 * 31 * 16 + 16
    size = 1000 * 40_000 + 4 * 4 * parameters
    monkeypatch.setattr(machine, "host_memory", lambda: size)
    check_size(config, 4)
    monkeypatch.setattr(machine, "host_memory", lambda: size - 1)
    with pytest.raises(ValueError, match=rf"{parameters:,} parameters.* n_layer=1000 blocks, needs 0\.1 GB.*lower"):
        check_size(config, 4)
    with torch.device("meta"), pytest.raises(ValueError, match="n_layer=10000000: .* need 400.0 GB .*lower n_layer"):
        GPT(tiny_config(n_layer=10 ** 7))


def dense_experts(moe, x):
    """The same mixture as a dense sum: every expert reads every token, and those that are not chosen get weight 0."""
    scores = x @ moe.router.weight.T + moe.router.bias                  # (B, T, E)
    weight = scores.exp() * (scores >= scores.sort(-1, descending=True).values[..., moe.active - 1:moe.active])
    weight = weight / weight.sum(-1, keepdim=True)
    h = torch.einsum("bti,eoi->bteo", x, moe.c_fc.weight) + moe.c_fc.bias
    gate, linear = h.unflatten(-1, (-1, 2)).unbind(-1)
    gate, linear = torch.where(gate > 7, 7.0, gate), torch.where(linear.abs() > 7, 7 * linear.sign(), linear)
    y = torch.einsum("bteh,eoh->bteo", gate / (1 + (-1.702 * gate).exp()) * (linear + 1), moe.c_proj.weight)
    return (weight[..., None] * (y + moe.c_proj.bias)).sum(2)


@pytest.mark.parametrize("experts, active", [(4, 1), (5, 2), (3, 3), (40, 2)])
def test_experts_equal_a_dense_sum_in_output_gradients_and_load(experts, active):
    """Of 40 experts, some are chosen by no token: their gradient is 0 and not None. The load is the share of choices,
    and the mean probability."""
    moe = MoE(tiny_config(mlp="moe", n_expert=experts, n_active=active, bias=True)).double()
    for n, p in enumerate(moe.parameters()):
        p.data = 0.8 * normal(*p.shape, stream=n)                       # some inputs of SwiGLU are above 7
    x = normal(2, 9, 16, stream=50)
    found, expected = (with_gradients(function, [x], tuple(moe.parameters()))
                       for function in (moe, lambda x: dense_experts(moe, x)))
    close(found, expected, size=max(part.abs().max().item() for part in expected))
    scores = (x @ moe.router.weight.T + moe.router.bias).flatten(0, 1)
    chosen = torch.zeros_like(scores).scatter(1, scores.argsort(1, descending=True)[:, :active], 1.0)
    close(moe.load(), torch.stack([chosen.mean(0) / active, scores.softmax(1).mean(0)]), dtype=torch.float32)
    unused = moe.load()[0] == 0
    assert unused.any() == (experts == 40)
    for gradient in found[4:]:                  # after those of output, input and router
        assert (gradient[unused] == 0).all() and gradient[~unused].any()


def test_initial_values_are_those_of_gpt2():
    """A standard deviation of n draws has a standard error of 1 / sqrt(2 n)."""
    gpt = GPT(tiny_config(n_embd=128, n_layer=2, pos="learned", bias=True), bounds.SEED)
    for name, value in gpt.named_parameters():
        if value.dim() > 1:
            expected = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            below((value.std() / expected - 1).abs(), 8 / math.sqrt(2 * value.numel()))
        else:
            assert (value == (1 if "ln_" in name and name.endswith("weight") else 0)).all(), name


@pytest.mark.parametrize("attn, pos", [pytest.param(*p.values, "learned", marks=p.marks) for p in RECIPES] +
                         [("softmax", "t5")])   # t5: layers share a parameter
def test_optimizer_decays_matrices_only_and_gives_head_scalars_their_own_rate(attn, pos):
    """The biases of all experts form a matrix, which does not decay either."""
    gpt = GPT(tiny_config(attn=attn, bias=True, pos=pos, mlp="moe", n_layer=2))
    optimizer = gpt.configure_optimizers(0.3, 1e-3, (0.8, 0.9), head_lr=5.0)
    names = {id(p): name for name, p in gpt.named_parameters()}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert len(found) == len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    for name, group in found.items():
        matrix = name.endswith("weight") and "ln_" not in name and "out_norm" not in name
        learned_by_attention = not name.endswith((".weight", ".bias"))
        assert group["weight_decay"] == (0.3 if matrix else 0.0), name
        assert group["lr_scale"] == (5.0 if learned_by_attention else 1.0), name
    assert ("transformer.h.0.attn.tau" in found) == (ATTENTIONS[attn]["rule"] == "elastic")


@pytest.mark.parametrize("attn", CACHES)
@settings(max_examples=examples(5))
@given(pos=st.sampled_from(list(attention.AXES["pos"])), parts=st.lists(st.integers(1, 6), min_size=2, max_size=7))
def test_a_cache_changes_neither_logits_nor_tokens_generated_past_block_size(attn, pos, parts):
    """A model reads a text in parts of any lengths, and generates. Absolute positions read the last block_size tokens
    then, all others read everything."""
    assume(pos in mixers.MIXERS[ATTENTIONS[attn].get("mixer", "attention")].axes["pos"])
    gpt, length = model(attn=attn, pos=pos), sum(parts)
    assume(length <= 16 or not POSITIONS[pos].embeds)
    idx, cache = token_ids(2, length), gpt.new_cache()
    if gpt.transformer.h[0].attn.cached:
        with torch.no_grad():
            steps = [gpt(part, cache=cache)[0] for part in idx.split(parts, 1)]
            close(torch.cat(steps, 1), gpt(idx)[0], dtype=torch.float32)                # RoPE's angles are float32
    cached, uncached = (gpt.generate(idx, 20, seed=bounds.SEED, use_cache=use) for use in (True, False))
    assert cached.shape == (2, length + 20)
    same(cached, uncached)                      # ids: rounding is too small to change a draw
    context = cached[:, -16:] if POSITIONS[pos].embeds else cached
    same(gpt.generate(cached, 1, temperature=0)[:, -1], gpt(context)[0][:, -1].argmax(-1))


def test_the_seed_decides_the_draws_and_model_and_global_generator_stay_as_they_were():
    gpt, idx = model(dropout=0.5).train(), token_ids(2, 4)
    state = torch.get_rng_state()
    a, b, c = (gpt.generate(idx, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(torch.get_rng_state(), state) and gpt.training


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (0, None, None), (1.0, 1, None), (1.0, None, 1e-6), (0.5, None, None), (2.0, None, None), (2.0, 3, None),
    (1.0, None, 0.9), (2.0, 5, 0.7)])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(temperature, top_k, top_p):
    """Each share is within ten standard errors of its probability, and 0 where that is 0."""
    gpt, idx = model(spread=8.0), token_ids(1, 6)
    found = gpt.generate(idx.expand(4000, -1), 1, temperature, top_k, top_p, seed=bounds.SEED)[:, -1]
    logits, order = gpt(idx)[0][0, -1].sort(descending=True)
    p = (logits / (temperature or 1e-9)).softmax(-1) * (torch.arange(31) < (top_k or 31))       # the likeliest first
    p = p * (p.cumsum(0) - p < top_p * p.sum()) if top_p else p
    p = p / p.sum()
    share = (found[:, None] == order).double().mean(0)
    below((share - p).abs(), 10 * (p * (1 - p) / 4000).sqrt() + 1e-3)
    assert not share[p == 0].any()


def test_a_row_repeats_its_stop_token_while_other_rows_continue():
    gpt, idx = model(spread=8.0), token_ids(6, 5)
    free = gpt.generate(idx, 30, seed=bounds.SEED)
    stop = free[:3, 7].tolist()                 # three rows draw one of these as their third token, or earlier
    found, cut = gpt.generate(idx, 30, seed=bounds.SEED, stop=stop), []
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        first = next((i for i in range(5, 35) if whole[i] in stop), 34)
        cut.append(whole[:first + 1] + [whole[first]] * (34 - first))
        assert row == cut[-1][:len(row)]        # stop tokens in the prompt do not count
    ends = [max(i for i in range(5, 35) if i == 5 or row[i] != row[i - 1]) for row in cut]
    assert found.shape[1] == (max(ends) + 1 if all(row[-1] in stop for row in cut) else 35)
    assert gpt.generate(idx, 30, seed=3, stop=range(31)).shape == (6, 6)                # every row has stopped
