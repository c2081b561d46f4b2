"""model.py: the architecture against torch.nn, initial weights, optimizer groups, generation against forward passes."""
import math
import re

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import RECIPES, some_recipes, tiny_config

import attention
import mixers
from attention import ATTENTIONS
from data import tokens
from model import GPT, GPTConfig

recipes = pytest.mark.parametrize("attn", RECIPES)
positions = pytest.mark.parametrize("pos", attention.AXES["pos"])


def known(attn, pos):
    """Skips the test where a recipe's mixer has nothing that positions could be added to."""
    mixer = mixers.MIXERS[ATTENTIONS[attn].get("mixer", "attention")]
    if pos not in mixer.axes["pos"]:
        pytest.skip(mixer.refused["pos"])


def model(seed=1, spread=4.0, **choices):
    """A GPT in eval mode with matrices `spread` times their initial size, so that logits differ enough."""
    gpt = GPT(tiny_config(**{"n_layer": 2} | choices), seed).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(spread if p.dim() > 1 else 1.0)
    return gpt


def some_tokens(T, B=2, seed=0):
    return torch.randint(31, (B, T), generator=torch.Generator().manual_seed(seed))


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
        """Take over the weights of a GPT under torch.nn's names."""
        names = {"attn.c_attn.": "self_attn.in_proj_", "attn.c_proj": "self_attn.out_proj", "mlp.c_fc": "linear1",
                 "mlp.c_proj": "linear2", "ln_1": "norm1", "ln_2": "norm2", "transformer.": ""}
        state = {}
        for name, value in gpt.state_dict().items():
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            state[name] = value
        state.pop("lm_head.weight")
        self.load_state_dict(state)
        return self


@pytest.mark.parametrize("kernel", ["torch", "sdpa"])
def test_logits_loss_and_gradients_equal_torch_nn(kernel):
    gpt = model(attn="softmax", pos="learned", bias=True, kernel=kernel)
    with torch.no_grad():
        for p in gpt.parameters():                                      # biases and norms too must make a difference
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    reference, idx, targets = Reference(gpt.config).copy(gpt).train(), some_tokens(16), some_tokens(16, seed=1)
    logits, loss = gpt(idx, targets)
    expected = reference(idx)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    expected_loss = nn.functional.cross_entropy(expected.reshape(-1, 31), targets.reshape(-1))
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
    loss.backward()
    expected_loss.backward()
    torch.testing.assert_close(gpt.transformer.wte.weight.grad, reference.wte.weight.grad, rtol=1e-4, atol=1e-5)


def test_fifty_steps_have_the_losses_of_nanogpts_architecture(data):
    gpt = GPT(tiny_config(n_layer=2, n_embd=32, block_size=32, vocab_size=257, attn="softmax", pos="learned",
                          norm="layernorm", mlp="gelu", bias=True))
    reference = Reference(gpt.config).copy(gpt).train()
    groups = [{"params": [p for p in reference.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
              for matrix in (True, False)]
    other = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    own, found, expected = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), [], []
    split = tokens.Tokens(data, "train")

    def reference_loss(x, y):
        return nn.functional.cross_entropy(reference(x).flatten(0, 1), y.flatten())

    for step in range(50):
        rows = torch.from_numpy(split.windows(np.random.default_rng(step).integers(0, 19_000, 4), 33, 257))
        for loss_of, optimizer, into in ((lambda x, y: gpt(x, y)[1], own, found), (reference_loss, other, expected)):
            loss = loss_of(rows[:, :-1], rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            into.append(loss.item())
    assert expected[-1] < expected[0] - 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_targets_of_minus_one_do_not_count():
    gpt, idx, targets = model(), some_tokens(8), some_tokens(8, seed=1)
    targets[:, 3:] = -1
    torch.testing.assert_close(gpt(idx, targets)[1], gpt(idx[:, :3], targets[:, :3])[1], rtol=0, atol=1e-6)


def test_rope_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    scores = [(attention.rotate(q, 100.0, place + 5) * attention.rotate(k, 100.0, place)).sum()
              for place in torch.tensor([[0], [3], [40]])]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=0, atol=1e-5)


def test_rope_turns_half_split_pairs():
    x = torch.tensor([1.0, 10.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    frequency = attention.rope_frequencies(tiny_config(rope_base=100.0), 4, "cpu")
    turned = attention.rotate(x, frequency, torch.arange(3))[0, 0, 2]
    expected = [math.cos(2), 10 * math.cos(2 / 10), math.sin(2), 10 * math.sin(2 / 10)]
    torch.testing.assert_close(turned, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_sinusoids():
    """sin, then cos, of place / 10000^(2c / C), Vaswani et al. 2017; added to the embedding, never past block_size."""
    gpt = model(pos="sinusoidal")
    C, found = gpt.config.n_embd, gpt.transformer.wpe(torch.arange(9))
    for place, c in torch.cartesian_prod(torch.arange(9), torch.arange(C // 2)).tolist():
        angle = place / 10000 ** (2 * c / C)
        assert found[place, c].item() == pytest.approx(math.sin(angle), abs=1e-5)
        assert found[place, C // 2 + c].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert gpt.num_params() == model(pos="none").num_params()
    with pytest.raises(ValueError, match="--pos=sinusoidal knows only its block_size=16"):
        gpt(some_tokens(17))


@positions
@pytest.mark.parametrize("norm_place", ["pre", "out", "post"])
def test_every_position_code_trains_wherever_the_norms_stand(pos, norm_place):
    """A model begins to learn a batch by heart in 40 steps with 10 of warm-up."""
    gpt, idx = GPT(tiny_config(n_layer=2, n_embd=32, pos=pos, norm_place=norm_place, kernel="torch")), some_tokens(17)
    optimizer = gpt.configure_optimizers(0.0, 3e-3, (0.9, 0.95))
    losses = []
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 10)
        loss = gpt(idx[:, :-1], idx[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5 and np.isfinite(losses).all()


def test_post_norm_norms_the_stream_itself():
    gpt = model(norm_place="post", norm="rmsnorm")
    seen = []
    for block in gpt.transformer.h:
        block.register_forward_hook(lambda block, inputs, x: seen.append(x))
    gpt(some_tokens(9))
    for x, block in zip(seen, gpt.transformer.h, strict=True):
        scaled = x / block.ln_2.weight
        torch.testing.assert_close(scaled.square().mean(-1), torch.ones(2, 9), rtol=1e-2, atol=1e-2)


def test_rope_scaling_by_wavelength():
    """LLaMA 3.1: of waves shorter than original / high nothing changes, of those longer than original / low all."""
    plain, linear, llama3 = (attention.rope_frequencies(tiny_config(rope_scaling=text), 64, "cpu").double()
                             for text in ("", "linear:4", "llama3:8,1,4,512"))
    torch.testing.assert_close(linear, plain / 4, rtol=1e-6, atol=0)
    for found, frequency in zip(llama3.tolist(), plain.tolist(), strict=True):
        wavelength = 2 * math.pi / frequency
        smooth = (512 / wavelength - 1) / (4 - 1)
        expected = frequency if wavelength < 512 / 4 else frequency / 8 if wavelength > 512 else (
            (1 - smooth) * frequency / 8 + smooth * frequency)
        assert found == pytest.approx(expected, rel=1e-5)
    assert llama3[0] == plain[0] and llama3[-1] == pytest.approx(plain[-1].item() / 8)


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest():
    """As a larger base would: base r^(D / (D - 2)), by its own formula."""
    plain, ntk, larger = (attention.rope_frequencies(tiny_config(**flags), 64, "cpu").double() for flags in (
        {}, {"rope_scaling": "ntk:4"}, {"rope_base": 10000.0 * 4 ** (64 / 62)}))
    torch.testing.assert_close(ntk, larger, rtol=1e-5, atol=0)
    assert ntk[0] == plain[0] and ntk[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-6)


@pytest.mark.parametrize("how", ["head", "all"])
def test_learned_norms_of_queries_and_keys_come_before_rotation(how):
    """A head's norm (Qwen3), and one of all heads together (OLMo 2), each by its formula."""
    gpt = GPT(tiny_config(n_head=4, n_kv_head=2, n_embd=32, qk_norm=how)).double()
    layer, seen = gpt.transformer.h[0].attn, []
    for norm in (layer.q_norm, layer.k_norm):
        norm.weight.data.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(0))
    layer.attend = lambda q, k, v, x, table: seen.extend((q, k)) or v.repeat_interleave(2, 1)
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer(x)
    q, k, _ = layer.c_attn(x).split([32, 16, 16], -1)
    frequency = attention.rope_frequencies(gpt.config, 8, "cpu")
    for part, norm, found in ((q, layer.q_norm, seen[0]), (k, layer.k_norm, seen[1])):
        part = part.unflatten(-1, (-1, 8)) if how == "head" else part
        part = part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        part = part.reshape(2, 9, -1, 8).transpose(1, 2)
        torch.testing.assert_close(found, attention.rotate(part, frequency, torch.arange(9)), rtol=1e-6, atol=1e-6)


CHOICES = [(axis, value) for axis, values in attention.AXES.items() for value in values] + [
    ("window", 5), ("window_every", 2), ("first", 2), ("norm", "rmsnorm"), ("mlp", "relu"), ("mlp", "gelu_tanh"),
    ("mlp", "swiglu"), ("mlp", "relu2"), ("tied", False), ("bias", True), ("n_kv_head", 1), ("n_inner", 24),
    ("rope_base", 500.0), ("dropout", 0.2), ("n_embd", 18), ("head_dim", 6), ("qkv_bias", True), ("norm_place", "out"),
    ("norm_eps", 1e-3), ("rope_scaling", "linear:4"), ("rope_scaling", "llama3:8,1,4,8"),
    ("norm_place", "post"), ("rope_scaling", "ntk:2")]


@pytest.mark.parametrize("axis, value", CHOICES)
@pytest.mark.parametrize("attn", some_recipes("softmax", "elastic", "diff_rela"))
def test_every_choice_trains_every_parameter(attn, axis, value):
    try:
        gpt = GPT(tiny_config(attn=attn, **{axis: value}))
    except ValueError as e:                     # some axes do not go together, and say why
        assert re.search("means nothing to mixer|goes with (rule|--rule|rotary)|give --(window|first|qk_norm)|"
                         "both be even|elu . 1 would mix up|--normalize=max1|a key of length 1", str(e))
        return
    optimizer = gpt.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    idx = some_tokens(17)
    before = gpt(idx[:, :-1], idx[:, 1:])[1]
    before.backward()
    assert [name for name, p in gpt.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    optimizer.step()
    assert gpt.eval()(idx[:, :-1], idx[:, 1:])[1] < before


def test_parameter_counts():
    C, V, T = 16, 31, 16
    block = 12 * C * C + 9 * C + 4 * C          # matrices; biases of c_attn, c_proj, c_fc, c_proj; two norms
    gpt = GPT(tiny_config(n_layer=2, pos="learned", bias=True))
    assert gpt.num_params() == 2 * block + V * C + T * C + 2 * C
    assert gpt.num_params(embeddings=False) == gpt.num_params() - T * C
    untied = GPT(tiny_config(n_layer=2, bias=True, tied=False))
    assert untied.num_params(embeddings=False) == 2 * block + 2 * C + V * C


# ----------------------------------------------------------------------------------------- initial weights, optimizer

def test_initial_weights_ignore_the_global_generator_and_follow_the_seed():
    states = []
    for noise, seed in ((0, 7), (1, 7), (1, 8)):
        torch.manual_seed(noise)
        states.append(GPT(tiny_config(attn="elastic"), seed).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["transformer.wte.weight"], states[2]["transformer.wte.weight"])


@recipes
def test_recipes_share_the_initial_values_of_what_they_share(attn):
    one = GPT(tiny_config(attn=attn)).state_dict()
    other = GPT(tiny_config(attn="softmax", pos="learned", n_layer=1)).state_dict()
    same = [name for name in one if name in other and one[name].shape == other[name].shape]
    assert len(same) > 5 and all(torch.equal(one[name], other[name]) for name in same)


def test_t5s_buckets_are_one_parameter_of_all_layers():
    gpt = model(pos="t5")
    first, second = (block.attn for block in gpt.transformer.h)
    assert first.t5 is second.t5 and gpt.num_params() == model(pos="none").num_params() + first.t5.numel()
    again = GPT(gpt.config)
    again.load_state_dict(gpt.state_dict())
    assert torch.equal(again(some_tokens(9))[0], gpt(some_tokens(9))[0])
    optimizer = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    assert sum(p is first.t5 for group in optimizer.param_groups for p in group["params"]) == 1


def test_initial_values_are_gpt2s():
    state = GPT(tiny_config(n_embd=128, n_layer=2, pos="learned", bias=True)).state_dict()
    for name, value in state.items():
        if value.dim() > 1:
            expected = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            assert abs(value.std().item() / expected - 1) < 0.05, name
        else:
            assert (value == (1 if "ln_" in name and name.endswith("weight") else 0)).all(), name


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

@recipes
@positions
def test_cached_logits_equal_uncached_ones(attn, pos):
    known(attn, pos)
    gpt = model(attn=attn, pos=pos)
    if not gpt.transformer.h[0].attn.cached:
        pytest.skip("cannot be decoded step by step, by its own word")
    idx = some_tokens(16 if attention.POSITIONS[pos].embeds else 40)    # relative positions: past block_size
    cache = gpt.new_cache()
    with torch.no_grad():
        pieces = [(0, 5), (5, 8), *((t, t + 1) for t in range(8, idx.shape[1]))]
        steps = [gpt(idx[:, a:b], cache=cache)[0] for a, b in pieces]
        torch.testing.assert_close(torch.cat(steps, 1), gpt(idx)[0], rtol=0, atol=1e-5)


@recipes
@positions
def test_generating_with_and_without_cache_is_the_same_past_block_size(attn, pos):
    known(attn, pos)
    gpt = model(attn=attn, pos=pos)
    cached, uncached = (gpt.generate(some_tokens(3), 30, seed=4, use_cache=use) for use in (True, False))
    assert cached.shape == (2, 33) and torch.equal(cached, uncached)


def test_absolute_positions_read_the_last_block_again_and_others_read_everything():
    for pos in attention.AXES["pos"]:
        gpt, idx = model(pos=pos), some_tokens(25)
        context = idx[:, -16:] if attention.POSITIONS[pos].embeds else idx
        assert torch.equal(gpt.generate(idx, 1, temperature=0)[:, -1], gpt(context)[0][:, -1].argmax(-1))


def test_seed_decides_the_draws_and_leaves_the_global_generator_alone():
    gpt, idx = model(), some_tokens(4)
    state = torch.get_rng_state()
    a, b, c = (gpt.generate(idx, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(torch.get_rng_state(), state)


def draws(temperature=1.0, top_k=None, top_p=None):
    """The tokens that come first in 400 continuations of one prompt, and the logits they were drawn from, likeliest
    first."""
    gpt, idx = model(spread=12.0), some_tokens(6, B=1)
    found = gpt.generate(idx.expand(400, -1), 1, temperature, top_k, top_p, seed=0)[:, -1]
    logits, order = gpt(idx)[0][0, -1].sort(descending=True)
    return found, logits, order


def test_temperature_zero_takes_the_likeliest():
    found, _, order = draws(temperature=0)
    assert (found == order[0]).all()


def test_temperature_sharpens_and_flattens():
    for temperature in (0.5, 1.0, 2.0):
        found, logits, order = draws(temperature)
        p = (logits / temperature).softmax(-1)[0].item()
        share = (found == order[0]).float().mean().item()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 400) + 1e-3


def test_top_k_keeps_the_k_likeliest():
    found, _, order = draws(temperature=2.0, top_k=3)
    assert set(found.tolist()) == set(order[:3].tolist())


def test_top_p_keeps_the_fewest_that_reach_p():
    _, logits, order = draws()
    kept = int((logits.softmax(-1).cumsum(-1) < 0.6).sum()) + 1
    found = draws(top_p=0.6)[0]
    assert 1 < kept < 31 and set(found.tolist()) == set(order[:kept].tolist())


def test_a_tiny_top_p_and_top_k_of_one_are_greedy():
    for found, _, order in (draws(top_p=1e-6), draws(top_k=1)):
        assert (found == order[0]).all()


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_that_has_met_its_end_repeats_it_and_the_others_go_on(use_cache):
    gpt, idx = model(spread=8.0), some_tokens(5, B=6)
    free = gpt.generate(idx, 30, seed=3, use_cache=use_cache)
    stop = free[:3, 7].tolist()                 # three rows meet one of these at their third token, if not before
    found, cut = gpt.generate(idx, 30, seed=3, use_cache=use_cache, stop=stop), []
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        first = next((i for i in range(5, 35) if whole[i] in stop), 34)
        cut.append(whole[:first + 1] + [whole[first]] * (34 - first))
        assert row == cut[-1][:len(row)]        # a prompt may hold them: only what is drawn counts
    ends = [max(i for i in range(5, 35) if i == 5 or row[i] != row[i - 1]) for row in cut]
    assert found.shape[1] == (max(ends) + 1 if all(row[-1] in stop for row in cut) else 35)


def test_generation_ends_when_every_row_has():
    gpt, idx = model(), some_tokens(5)
    assert gpt.generate(idx, 30, seed=3, stop=range(31)).shape == (2, 6)
    assert gpt.generate(idx, 30, seed=3, stop=[]).shape == (2, 35)


def test_generate_leaves_the_model_in_the_mode_it_was_in():
    gpt = model(dropout=0.5).train()
    a, b = (gpt.generate(some_tokens(3), 5, temperature=0) for _ in range(2))
    assert gpt.training and torch.equal(a, b)


def test_config_has_nanogpts_names_and_defaults():
    c = GPTConfig()
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size, c.n_kv_head) == (12, 12, 768, 1024, 50304, 12)
