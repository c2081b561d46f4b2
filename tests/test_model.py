"""model.py: the architecture against torch.nn, initial weights, optimizer groups, generation against forward passes."""
import math

import bounds
import pytest
import torch
import torch.nn as nn
from bounds import below, close, same
from conftest import CACHES, RECIPES, some_recipes, tiny_config
from layers import assert_learns, normal, token_ids, with_gradients

import attention
import mixers
from attention import ATTENTIONS
from axes.positions import POSITIONS, rope_frequencies, rotate
from data import tokens
from model import GPT, GPTConfig, MoE

recipes = pytest.mark.parametrize("attn", RECIPES)
positions = pytest.mark.parametrize("pos", attention.AXES["pos"])


def model(spread=4.0, **choices):
    """A GPT of two layers in float64 and eval mode. Its matrices are `spread` times their initial values, so that its
    logits differ clearly."""
    gpt = GPT(tiny_config(**{"n_layer": 2} | choices), bounds.SEED).double().eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(spread if p.dim() > 1 else 1.0)
    return gpt


# --------------------------------------------------------------------------------------------------- the architecture

class Reference(nn.Module):
    """nanoGPT's architecture from torch.nn's own layers: learned positions, LayerNorm, gelu, biases, tied head."""

    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(
            c.n_embd, c.n_head, 4 * c.n_embd, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe.weight[:idx.shape[1]]
        for block in self.h:
            mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
            x = block(x, src_mask=mask, is_causal=True)
        return self.ln_f(x) @ self.wte.weight.T

    def copy(self, gpt):
        """Copy the weights of a GPT."""
        self.double().load_state_dict({their_name(name): value for name, value in gpt.named_parameters()})
        return self.train()


def their_name(name):
    """What torch.nn calls a parameter of GPT."""
    for ours, theirs in {"attn.c_attn.": "self_attn.in_proj_", "attn.c_proj": "self_attn.out_proj",
                         "mlp.c_fc": "linear1", "mlp.c_proj": "linear2", "ln_1": "norm1", "ln_2": "norm2",
                         "transformer.": ""}.items():
        name = name.replace(ours, theirs)
    return name


def cross_entropy(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kernel", ["torch", "sdpa"])
def test_logits_loss_and_gradients_equal_torch_nn(kernel):
    gpt = model(attn="softmax", pos="learned", bias=True, kernel=kernel)
    with torch.no_grad():                       # biases and norms must matter
        for n, p in enumerate(gpt.parameters()):
            p.add_(0.1 * normal(*p.shape, stream=n))
    reference, idx, targets = Reference(gpt.config).copy(gpt), token_ids(2, 16), token_ids(2, 16, stream=1)
    (logits, loss), expected = gpt(idx, targets), reference(idx)
    close(logits, expected)
    expected_loss = cross_entropy(expected, targets)
    close(loss, expected_loss)                  # gpt computes its loss in float32
    loss.backward()
    expected_loss.backward()
    found, expected = zip(*((p.grad, reference.get_parameter(their_name(name)).grad)
                            for name, p in gpt.named_parameters()), strict=True)
    close(found, expected, dtype=torch.float32, size=max(g.abs().max().item() for g in expected))


def test_losses_of_fifty_steps_equal_those_of_nanogpts_architecture(data):
    """Both losses are in float64. In float32, Adam turns rounding errors of tiny gradients into whole steps."""
    gpt = GPT(tiny_config(n_layer=2, n_embd=32, block_size=32, vocab_size=257, attn="softmax", pos="learned",
                          norm="layernorm", mlp="gelu", bias=True)).double()
    reference = Reference(gpt.config).copy(gpt)
    groups = [{"params": [p for p in reference.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
              for matrix in (True, False)]
    pairs = [(lambda idx: gpt(idx)[0], gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), []),
             (reference, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)), [])]
    split, starts = tokens.Tokens(data, "train"), torch.randint(19_000, (50, 4), generator=bounds.dice())
    for step in range(50):
        rows = torch.from_numpy(split.windows(starts[step].tolist(), 33, 257))
        for logits_of, optimizer, losses in pairs:
            loss = cross_entropy(logits_of(rows[:, :-1]), rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    (_, _, found), (_, _, expected) = pairs
    close(found, expected, terms=50 * 64)
    below(0.5, expected[0] - expected[-1])


def test_targets_of_minus_one_do_not_count():
    gpt, idx, targets = model(), token_ids(2, 8), token_ids(2, 8, stream=1)
    targets[:, 3:] = -1
    close(gpt(idx, targets)[1], gpt(idx[:, :3], targets[:, :3])[1])


def test_rope_rotates_pairs_from_both_halves_of_a_head():
    x = torch.tensor([1.0, 10.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    frequency = rope_frequencies(tiny_config(rope_base=100.0), 4, "cpu")
    turned = rotate(x, frequency, torch.arange(3))[0, 0, 2]
    close(turned, torch.tensor([math.cos(2), 10 * math.cos(2 / 10), math.sin(2), 10 * math.sin(2 / 10)]), terms=8)


def test_rope_leaves_the_channels_beyond_its_share_as_they_are():
    """GPT-NeoX rotates a quarter. The pairs and their frequencies are those of a head of that width."""
    x, config = normal(2, 3, 9, 8), tiny_config(rope_share=0.5)
    turned = rotate(x, rope_frequencies(config, 8, "cpu"), torch.arange(9))
    close(turned[..., :4], rotate(x[..., :4], rope_frequencies(tiny_config(), 4, "cpu"), torch.arange(9)))
    same(turned[..., 4:], x[..., 4:])


def test_sinusoidal_positions_equal_their_formula():
    """sin, then cos, of position / 10000^(2c / C), Vaswani et al. 2017. They end at block_size and are not learned."""
    gpt = model(pos="sinusoidal")
    angle = torch.arange(9.0).double()[:, None] / 10000 ** torch.linspace(0, 1, 9)[:8].double()
    close(gpt.transformer.wpe(torch.arange(9)), torch.cat([angle.sin(), angle.cos()], 1), terms=8, size=8.0)
    assert gpt.num_params() == model(pos="none").num_params()
    with pytest.raises(ValueError, match="--pos=sinusoidal knows only its block_size=16"):
        gpt(token_ids(2, 17))


def test_post_norm_normalises_the_residual_stream():
    gpt, seen = model(norm_place="post", norm="rmsnorm", norm_eps=1e-30), []
    for block in gpt.transformer.h:
        block.register_forward_hook(lambda block, inputs, x: seen.append(x / block.ln_2.weight))
    gpt(token_ids(2, 9))
    close([x.square().mean(-1) for x in seen], [torch.ones(2, 9).double()] * 2)


def frequencies(**choices):
    return rope_frequencies(tiny_config(**choices), 64, "cpu")


def test_rope_scaling_by_wavelength():
    """LLaMA 3.1: wavelengths below original / high stay; those above original / low become 8 times longer."""
    plain, linear, llama3 = (frequencies(rope_scaling=text) for text in ("", "linear:4", "llama3:8,1,4,512"))
    close(linear / plain, torch.full((32,), 0.25), terms=4)
    smooth = ((512 * plain / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
    assert smooth[0] == 1 and smooth[-1] == 0 and ((smooth > 0) & (smooth < 1)).any()
    close(llama3 / plain, smooth + (1 - smooth) / 8, terms=16)


def test_yarn_changes_wavelengths_by_their_index_and_sharpens_scores():
    """The formula of GPT-OSS: a ramp between two indices of pairs. Scores are multiplied by (0.1 log(factor) + 1)^2."""
    plain, yarn = (frequencies(rope_base=150000.0, rope_scaling=text) for text in ("", "yarn:32,32,1,4096"))
    low, high = (32 * math.log(4096 / (2 * math.pi * turns)) / math.log(150000) for turns in (32, 1))
    ramp = ((torch.arange(32) - low) / (high - low)).clamp(0, 1)
    assert ramp[0] == 0 and ramp[-1] == 1 and ((ramp > 0) & (ramp < 1)).sum() > 5
    close(yarn / plain, 1 - ramp + ramp / 32, terms=64)                 # the ramp divides by log(32)
    plain, yarn = (model(rope_scaling=text).transformer.h[0].attn.sight.scale for text in ("", "yarn:32,32,1,4096"))
    close(yarn / plain, (0.1 * math.log(32) + 1) ** 2)


def test_ntk_keeps_the_fastest_pair_and_scales_the_slowest():
    """It equals a larger base: base r^(D / (D - 2))."""
    plain, ntk, larger = (frequencies(**flags) for flags in (
        {}, {"rope_scaling": "ntk:4"}, {"rope_base": 10000.0 * 4 ** (64 / 62)}))
    close(ntk / larger, torch.ones(32), terms=16)
    close((ntk / plain)[[0, -1]], torch.tensor([1.0, 0.25]), terms=16)


@pytest.mark.parametrize("how", ["head", "all"])
def test_learned_norms_of_queries_and_keys_come_before_rotation(how):
    """A norm per head (Qwen3), and a norm over all heads (OLMo 2), each by its formula."""
    gpt = GPT(tiny_config(n_head=4, n_kv_head=2, n_embd=32, qk_norm=how)).double()
    layer, seen = gpt.transformer.h[0].attn, []
    for n, norm in enumerate((layer.q_norm, layer.k_norm)):
        norm.weight.data += 0.3 * normal(*norm.weight.shape, stream=n)
    layer.attend = lambda q, k, v, x, table: seen.extend((q, k)) or v.repeat_interleave(2, 1)
    x = normal(2, 9, 32, stream=2)
    layer(x)
    q, k, _ = layer.c_attn(x).split([32, 16, 16], -1)
    frequency = rope_frequencies(gpt.config, 8, "cpu")
    for part, norm, found in ((q, layer.q_norm, seen[0]), (k, layer.k_norm, seen[1])):
        part = part.unflatten(-1, (-1, 8)) if how == "head" else part
        part = part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        part = part.reshape(2, 9, -1, 8).transpose(1, 2)
        close(found, rotate(part, frequency, torch.arange(9)))


SIZES = [
    ("window", 5), ("window_every", 2), ("first", 2), ("norm", "rmsnorm"), ("mlp", "relu"), ("mlp", "gelu_tanh"),
    ("mlp", "swiglu"), ("mlp", "relu2"), ("mlp", "moe"), ("tied", False), ("bias", True), ("n_kv_head", 1),
    ("n_inner", 24), ("rope_base", 500.0), ("dropout", 0.2), ("n_embd", 18), ("head_dim", 6), ("qkv_bias", True),
    ("norm_place", "out"), ("norm_eps", 1e-3), ("rope_scaling", "linear:4"), ("rope_scaling", "llama3:8,1,4,8"),
    ("norm_place", "post"), ("norm_place", "parallel"), ("embed_norm", True), ("rope_share", 0.5),
    ("rope_scaling", "ntk:2"), ("rope_scaling", "yarn:8,4,1,8"), *(("pos", pos) for pos in attention.AXES["pos"])]


@pytest.mark.parametrize("name, value", SIZES)
@pytest.mark.parametrize("attn", some_recipes("softmax", "elastic", "diff_rela"))
def test_every_size_trains_every_parameter(attn, name, value):
    """tests/test_contract.py tests the axes of the mixers."""
    try:
        gpt = GPT(tiny_config(attn=attn, **{name: value}))
    except ValueError as e:
        pytest.skip(str(e))
    assert_learns(gpt, token_ids(2, 17))


def test_parameter_counts():
    C, V, T = 16, 31, 16
    block = 12 * C * C + 9 * C + 4 * C          # matrices; biases of c_attn, c_proj, c_fc, c_proj; two norms
    gpt = GPT(tiny_config(n_layer=2, pos="learned", bias=True))
    assert gpt.num_params() == 2 * block + V * C + T * C + 2 * C
    assert gpt.num_params(embeddings=False) == gpt.num_params() - T * C
    untied = GPT(tiny_config(n_layer=2, bias=True, tied=False))
    assert untied.num_params(embeddings=False) == 2 * block + 2 * C + V * C


# ------------------------------------------------------------------------------------------------ a mixture of experts


def dense_experts(moe, x):
    """The same mixture as a dense sum: every expert reads every token, and those that are not chosen get weight 0."""
    scores = x @ moe.router.weight.T + moe.router.bias                  # (B, T, E)
    least = scores.sort(-1, descending=True).values[..., moe.active - 1:moe.active]
    weight = scores.exp() * (scores >= least)
    weight = weight / weight.sum(-1, keepdim=True)
    h = torch.einsum("bti,eoi->bteo", x, moe.c_fc.weight) + moe.c_fc.bias
    gate, linear = h.unflatten(-1, (-1, 2)).unbind(-1)
    gate, linear = torch.where(gate > 7, 7.0, gate), torch.where(linear.abs() > 7, 7 * linear.sign(), linear)
    y = torch.einsum("bteh,eoh->bteo", gate / (1 + (-1.702 * gate).exp()) * (linear + 1), moe.c_proj.weight)
    return (weight[..., None] * (y + moe.c_proj.bias)).sum(2)


@pytest.mark.parametrize("experts, active", [(4, 1), (5, 2), (3, 3), (40, 2)])
def test_experts_equal_a_dense_sum_in_output_and_gradients(experts, active):
    """Of 40 experts, some are chosen by no token: their gradient is 0 and not None."""
    moe = MoE(tiny_config(mlp="moe", n_expert=experts, n_active=active, bias=True)).double()
    for n, p in enumerate(moe.parameters()):
        p.data = 0.8 * normal(*p.shape, stream=n)                       # some inputs of SwiGLU are above 7
    x = normal(2, 9, 16, stream=50)
    found, expected = (with_gradients(function, [x], tuple(moe.parameters()))
                       for function in (moe, lambda x: dense_experts(moe, x)))
    close(found, expected, size=max(part.abs().max().item() for part in expected))
    unused = moe.load()[0] == 0
    assert unused.any() == (experts == 40)
    for gradient in found[4:]:                  # after those of output, input and router
        assert (gradient[unused] == 0).all() and gradient[~unused].any()


def test_parameters_and_operations_count_the_experts_that_a_token_uses():
    C, F, E, V = 16, 24, 5, 31
    expert = 2 * F * C + 2 * F + C * F + C
    gpt = GPT(tiny_config(mlp="moe", n_expert=E, n_active=2, n_inner=F, bias=True, norm="rmsnorm"))
    rest = V * C + 3 * C + 4 * (C * C + C) + E * (C + 1)                # embedding, norms, attention, router
    assert gpt.num_params() == rest + E * expert
    assert gpt.num_params(active=True) == rest + 2 * expert
    attention_alone = gpt.transformer.h[0].attn.flops_per_token()
    assert gpt.flops_per_token() == 6 * (rest + 2 * expert) + attention_alone


@pytest.mark.parametrize("layers, experts, total, active", [(24, 32, 20.91, 3.61), (36, 128, 116.83, 5.13)])
def test_gpt_oss_has_the_size_of_its_model_card(layers, experts, total, active, monkeypatch):
    """In billions (table 1). The card counts the output layer as active, and the embedding not."""
    monkeypatch.setattr(GPT, "init_weights", lambda self, seed: None)
    with torch.device("meta"):
        gpt = GPT(GPTConfig(attn="gpt_oss", mlp="moe", n_layer=layers, n_expert=experts, n_active=4, n_embd=2880,
                            n_inner=2880, n_head=64, n_kv_head=8, head_dim=64, vocab_size=201088, norm="rmsnorm",
                            bias=True, tied=False))
    assert round(gpt.num_params() / 1e9, 2) == total
    assert round(gpt.num_params(embeddings=False, active=True) / 1e9, 2) == active


def test_load_is_the_share_of_choices_and_the_mean_probability():
    moe = MoE(tiny_config(mlp="moe", n_expert=3, n_active=2)).double()
    moe.router.weight.data.zero_()
    moe.router.weight.data[:, 0] = torch.tensor([1.0, 0.0, -1.0])
    x = torch.zeros(1, 4, 16).double()
    x[0, :, 0] = torch.tensor([2.0, 1.0, 1.0, -1.0])                    # three tokens choose 0 and 1, one 2 and 1
    moe(x)
    close(moe.load()[0], torch.tensor([3 / 8, 4 / 8, 1 / 8]).double(), dtype=torch.float32)
    close(moe.load()[1], (x[0, :, :1] * torch.tensor([1.0, 0.0, -1.0])).softmax(-1).mean(0), dtype=torch.float32)


# ----------------------------------------------------------------------------------------- initial weights, optimizer

def test_all_layers_share_one_parameter_for_t5_buckets():
    gpt = model(pos="t5")
    first, second = (block.attn for block in gpt.transformer.h)
    assert first.t5 is second.t5 and gpt.num_params() == model(pos="none").num_params() + first.t5.numel()
    again = GPT(gpt.config).double()
    again.load_state_dict(gpt.state_dict())
    same(again(token_ids(2, 9))[0], gpt(token_ids(2, 9))[0])
    optimizer = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    assert sum(p is first.t5 for group in optimizer.param_groups for p in group["params"]) == 1


def test_initial_values_are_those_of_gpt2():
    """A standard deviation of n draws has a standard error of 1 / sqrt(2 n)."""
    gpt = GPT(tiny_config(n_embd=128, n_layer=2, pos="learned", bias=True), bounds.SEED)
    for name, value in gpt.named_parameters():
        if value.dim() > 1:
            expected = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            below((value.std() / expected - 1).abs(), 8 / math.sqrt(2 * value.numel()))
        else:
            assert (value == (1 if "ln_" in name and name.endswith("weight") else 0)).all(), name


def test_optimizer_decays_the_matrices_of_experts_and_not_their_biases():
    gpt = GPT(tiny_config(mlp="moe", bias=True))
    decay = {id(p): group["weight_decay"] for group in gpt.configure_optimizers(0.3, 1e-3, (0.8, 0.9)).param_groups
             for p in group["params"]}
    for name, p in gpt.transformer.h[0].mlp.named_parameters():
        assert decay[id(p)] == (0.3 if name.endswith("weight") else 0.0), name


@recipes
def test_optimizer_decays_matrices_only_and_gives_head_scalars_their_own_rate(attn):
    gpt = GPT(tiny_config(attn=attn, bias=True, pos="learned"))
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


# --------------------------------------------------------------------------------------------------------- generation

@pytest.mark.parametrize("attn", CACHES)
@positions
def test_a_cache_changes_neither_logits_nor_tokens_generated_past_block_size(attn, pos):
    mixer = mixers.MIXERS[ATTENTIONS[attn].get("mixer", "attention")]
    if pos not in mixer.axes["pos"]:
        pytest.skip(mixer.refused["pos"])
    gpt = model(attn=attn, pos=pos)
    if gpt.transformer.h[0].attn.cached:
        idx, cache = token_ids(2, 16 if POSITIONS[pos].embeds else 40), gpt.new_cache()
        with torch.no_grad():
            steps = [gpt(part, cache=cache)[0] for part in idx.split([5, 3] + [1] * (idx.shape[1] - 8), 1)]
            close(torch.cat(steps, 1), gpt(idx)[0], dtype=torch.float32)                # RoPE's angles are float32
    cached, uncached = (gpt.generate(token_ids(2, 3), 30, seed=bounds.SEED, use_cache=use) for use in (True, False))
    assert cached.shape == (2, 33)
    same(cached, uncached)                      # ids: rounding is too small to change a draw


def test_absolute_positions_read_the_last_block_and_others_read_everything():
    for pos in attention.AXES["pos"]:
        gpt, idx = model(pos=pos), token_ids(2, 25)
        context = idx[:, -16:] if POSITIONS[pos].embeds else idx
        same(gpt.generate(idx, 1, temperature=0)[:, -1], gpt(context)[0][:, -1].argmax(-1))


def test_seed_decides_the_draws_and_leaves_the_global_generator_alone():
    gpt, idx = model(), token_ids(2, 4)
    state = torch.get_rng_state()
    a, b, c = (gpt.generate(idx, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(torch.get_rng_state(), state)


def draws(temperature=1.0, top_k=None, top_p=None):
    """4,000 draws of the next token after one prompt; and all logits and their ids, likeliest first."""
    gpt, idx = model(spread=8.0), token_ids(1, 6)
    found = gpt.generate(idx.expand(4000, -1), 1, temperature, top_k, top_p, seed=bounds.SEED)[:, -1]
    logits, order = gpt(idx)[0][0, -1].sort(descending=True)
    return found, logits, order


@pytest.mark.parametrize("choices", [{"temperature": 0}, {"top_p": 1e-6}, {"top_k": 1}])
def test_temperature_zero_a_tiny_top_p_and_top_k_of_one_choose_the_likeliest(choices):
    found, _, order = draws(**choices)
    assert (found == order[0]).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(temperature):
    """Each share is within ten standard errors of its probability."""
    found, logits, order = draws(temperature)
    p = (logits / temperature).softmax(-1)
    share = (found[:, None] == order).double().mean(0)
    below((share - p).abs(), 10 * (p * (1 - p) / 4000).sqrt() + 1e-3)


def test_top_k_keeps_the_k_likeliest():
    found, _, order = draws(temperature=2.0, top_k=3)
    assert set(found.tolist()) == set(order[:3].tolist())


def test_top_p_keeps_the_fewest_that_reach_p():
    found, logits, order = draws(top_p=0.9)
    kept = int((logits.softmax(-1).cumsum(-1) < 0.9).sum()) + 1
    assert 1 < kept < 31 and set(found.tolist()) == set(order[:kept].tolist())


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_repeats_its_stop_token_while_other_rows_continue(use_cache):
    gpt, idx = model(spread=8.0), token_ids(6, 5)
    free = gpt.generate(idx, 30, seed=bounds.SEED, use_cache=use_cache)
    stop = free[:3, 7].tolist()                 # three rows draw one of these as their third token, or earlier
    found, cut = gpt.generate(idx, 30, seed=bounds.SEED, use_cache=use_cache, stop=stop), []
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        first = next((i for i in range(5, 35) if whole[i] in stop), 34)
        cut.append(whole[:first + 1] + [whole[first]] * (34 - first))
        assert row == cut[-1][:len(row)]        # stop tokens in the prompt do not count
    ends = [max(i for i in range(5, 35) if i == 5 or row[i] != row[i - 1]) for row in cut]
    assert found.shape[1] == (max(ends) + 1 if all(row[-1] in stop for row in cut) else 35)


def test_generation_ends_when_every_row_has_stopped():
    gpt, idx = model(), token_ids(2, 5)
    assert gpt.generate(idx, 30, seed=3, stop=range(31)).shape == (2, 6)
    assert gpt.generate(idx, 30, seed=3, stop=[]).shape == (2, 35)


def test_generate_leaves_the_model_in_the_mode_it_was_in():
    gpt = model(dropout=0.5).train()
    a, b = (gpt.generate(token_ids(2, 3), 5, temperature=0) for _ in range(2))
    assert gpt.training
    same(a, b)


def test_config_has_nanogpts_names_and_defaults():
    c = GPTConfig()
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size, c.n_kv_head) == (12, 12, 768, 1024, 50304, 12)
