"""mixers/recurrent.py: chunks against the recurrence token by token, and each recipe against its formula."""
import math

import pytest
import torch
from bounds import below, close, moved_by_rounding
from conftest import by_default, tiny_config
from layers import inputs, layer, normal, with_gradients
from torch.nn import functional as F

from attention import ATTENTIONS
from mixers.recurrent import all_chunks, gla_forget, learned_write, mamba2_forget, one_chunk, token_by_token
from model import GPT

RECURRENT = [name for name, axes in ATTENTIONS.items() if axes.get("mixer") == "recurrent"]
RECURRENT.remove("linear_state")                # a form of `linear`: it has a test of its own
LEARNERS = ["ttt", "titans"]                    # they write by gradient descent, not linearly in the values
recipes = pytest.mark.parametrize("attn", RECURRENT)
linear_in_values = pytest.mark.parametrize("attn", [name for name in RECURRENT if name not in LEARNERS])
learners = pytest.mark.parametrize("attn", LEARNERS)


def by_tokens(q, k, v, forget=None, erase=None):
    """The recurrence at the top of mixers/recurrent.py, written with einsum and independent of its code."""
    q, k = (y.expand(-1, v.shape[1], -1, -1) for y in (q, k))
    S, outputs = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        if forget is not None:
            S = forget[:, :, t, :, None].exp() * S
        u = v[:, :, t]
        if erase is not None:
            u = u - erase[:, :, t] * torch.einsum("bhd,bhde->bhe", k[:, :, t], S)
        S = S + torch.einsum("bhd,bhe->bhde", k[:, :, t], u)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], S))
    return torch.stack(outputs, 2)


def by_chunks(size):
    def call(q, k, v, forget=None, erase=None):
        return all_chunks(one_chunk, zero_state(k, v), chunk_inputs(q, k, v, forget, erase), size)[0]
    return call


def zero_state(k, v):
    return v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]),


def chunk_inputs(q, k, v, forget, erase):
    """The arguments of `one_chunk` after the state."""
    forget = torch.zeros_like(v[..., :1]) if forget is None else forget
    return (q, k, v, forget) if erase is None else (q, k, v, forget, erase)


# ------------------------------------------------------------------------------------------------- chunks and tokens

FORMS = {                                       # (do heads share q and k, what has a forget rate, is anything erased)
    "linear": (False, None, False), "one rate a head": (False, "head", False), "delta": (False, None, True),
    "one key for all heads": (True, "head", False), "gated delta": (False, "head", True),
    "a rate a channel": (False, "channel", False), "delta, a rate a channel": (False, "channel", True)}
forms = pytest.mark.parametrize("form", FORMS)


def draw(form, T, H=3, D=8, E=5, B=2, dtype=torch.float64, strength=1.0, device="cpu"):
    """Inputs of the recurrence and of its kernel, by name. Keys have unit length. forget is a logarithm, multiplied by
    `strength`."""
    shared, rate, erases = FORMS[form]

    def heads(count, width, stream):            # a fused projection's layout: a head's rows are not adjacent
        return normal(B, T, count, width, stream=stream).transpose(1, 2)

    q, k = (heads(1 if shared else H, D, stream) for stream in (0, 1))
    x = {"q": D ** -0.5 * q, "k": F.normalize(k, dim=-1), "v": heads(H, E, 2)}
    rates = {"forget": strength * F.logsigmoid(heads(H, D if rate == "channel" else 1, 3) + 1)} if rate else {}
    rates |= {"erase": torch.sigmoid(heads(H, 1, 4))} if erases else {}
    wide = torch.promote_types(dtype, torch.float32)
    return {name: y.to(device, wide if name in rates else dtype) for name, y in (x | rates).items()}


def results_of(function, x, dtype=None):
    """A function's output for named inputs, and all gradients."""
    return with_gradients(lambda *leaves: function(**dict(zip(x, leaves, strict=True))),
                          [y.to(dtype or y.dtype) for y in x.values()])


@pytest.mark.parametrize("T, size", [by_default((T, size) in ((1, 64), (37, 1), (37, 16), (130, 64)), T, size)
                                     for T in (1, 37, 130) for size in (1, 16, 64)])
@forms
def test_chunks_equal_tokens_with_all_gradients(form, T, size):
    """130 tokens are more than two chunks of 64: the backward pass recomputes them."""
    close(*(results_of(function, draw(form, T)) for function in (by_chunks(size), by_tokens)), terms=8 * T)


@forms
def test_token_by_token_equals_the_formula(form):
    def defined(q, k, v, forget=None, erase=None):
        return token_by_token(zero_state(k, v), *chunk_inputs(q, k, v, forget, erase))[0]
    close(*(results_of(function, draw(form, 37)) for function in (defined, by_tokens)), terms=8 * 37)


@forms
def test_strong_forgetting_and_repeated_tokens_stay_exact_in_float32(form):
    """With a log forget of -50, only the token itself remains. Quotients of exponentials would be 0 / 0."""
    x = draw(form, 100)
    shut = x | {"forget": torch.full_like(x.get("forget", x["v"][..., :1]), -50.0)}
    repeated = {name: torch.ones_like(y) if name == "erase" else y[:, :, :1].expand_as(y) for name, y in x.items()}
    for x in (shut, repeated):
        found, x = results_of(by_chunks(64), x, torch.float32), {name: y.float().double() for name, y in x.items()}
        expected = results_of(by_tokens, x)
        moved = moved_by_rounding(lambda *y, x=x: results_of(by_tokens, dict(zip(x, y, strict=True))), list(x.values()),
                                  torch.float32)
        close(found, expected, terms=100, size=max(y.abs().max().item() for y in expected), moved=moved)


@forms
def test_long_sequences_stay_finite(form):
    x = draw(form, 16_384, B=1, dtype=torch.float32)
    assert by_chunks(16 if "channel" in form else 64)(**x).isfinite().all()


# ------------------------------------------------------------------------------------------------- the recipes' layers


def heads_of(y, H=4):
    """(B, T, H * width) to (B, H, T, width)."""
    return y.unflatten(-1, (H, -1)).transpose(1, 2)


def inputs_by_formula(attn, module, q, k, v, x):
    """q, k, v times write, log forget, and erase if the recipe has it, as the papers define them."""
    forget = torch.zeros_like(v[..., :1])
    if attn == "retnet":
        forget = torch.stack([torch.full_like(v[0, 0, :, :1], 1 - 2.0 ** (-5 - h)).log() for h in range(4)]).expand(
            len(v), -1, -1, -1)
    if attn == "gla":
        first, second = module.fade
        forget = torch.sigmoid(heads_of(x @ first.weight.T @ second.weight.T + second.bias)).log() / 16
    if attn == "mamba2":
        dt, A = time_of(module, x)
        return q, k, v * dt, -A * dt
    if attn.endswith("deltanet"):
        q, k = (y / y.square().sum(-1, keepdim=True).sqrt() for y in (q, k))
        beta = 1 / (1 + (-heads_of(x @ module.beta.weight.T)).exp())
        if attn == "gated_deltanet":
            dt, A = time_of(module, x)
            forget = -A * dt
        return q * 8 ** -0.5, k, v * beta, forget, beta
    return q * 8 ** -0.5, k, v, forget


def time_of(module, x):
    """dt (B, H, T, 1) and A (H, 1, 1) of Mamba2."""
    dt = (1 + (heads_of(x @ module.dt.weight.T) + module.dt_bias[:, None, None]).exp()).log()
    return dt, module.A_log.exp()[:, None, None]


def read_by_formula(attn, module, q, k, v, x):
    """The outputs before norm and gate."""
    o = by_tokens(*inputs_by_formula(attn, module, q, k, v, x))
    return o + module.skip[:, None, None] * v if attn == "mamba2" else o


def output_by_formula(attn, module, q, k, v, x):
    """The outputs after norm and gate."""
    o = read_by_formula(attn, module, q, k, v, x)
    gate = heads_of(F.silu(x @ module.gate.weight.T)) if hasattr(module, "gate") else 1.0
    if attn == "mamba2":                        # gated first, then normed over all heads
        o = (o * gate).transpose(1, 2).flatten(2)
        return heads_of(o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.out_norm.weight)
    return o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.out_norm.weight * gate


@linear_in_values
@pytest.mark.parametrize("T", [1, 45])
def test_attend_equals_the_formula(attn, T):
    """Two heads share a key head and a value head; in Mamba2 all heads share one key head anyway."""
    module = layer(attn, n_kv_head=2, bias=False)
    q, k, v, x = inputs(module, T)
    keys = k if attn == "mamba2" else k.repeat_interleave(2, 1)
    expected = output_by_formula(attn, module, q, keys, v.repeat_interleave(2, 1), x)
    close(module.attend(q, k, v, x), expected, terms=8 * T)


@linear_in_values
def test_a_layer_reads_the_same_in_chunks_and_token_by_token(attn):
    module = layer(attn)
    qkvx = inputs(module, 45)
    close(module.read(*qkvx, chunk=token_by_token), module.read(*qkvx), terms=8 * 45)


@pytest.mark.parametrize("pos", ["rope", "none"])
def test_linear_attention_equals_its_form_with_a_state(pos):
    """Rows of weights and chunks of a state give the same output with the same parameters."""
    quadratic, chunked = (layer(attn, pos=pos, n_kv_head=2) for attn in ("linear", "linear_state"))
    chunked.load_state_dict(quadratic.state_dict())
    x = normal(2, 150, 32)
    close(chunked(x), quadratic(x), terms=150)
    q, k, _, x = inputs(chunked, 150)
    close(chunked.weights_of(q, k, x), quadratic.weights_of(q, k, x), terms=150)


def test_the_convolution_sees_three_tokens_back():
    module, x = layer("deltanet"), normal(1, 9, 32)
    y = module.c_attn(x)
    past = F.pad(y, (0, 0, 3, 0))
    expected = F.silu(sum(module.conv[:, 0, n] * past[:, n:n + 9] for n in range(4)))
    close(torch.cat([part.transpose(1, 2).flatten(2) for part in module.projected(x, None)], -1), expected)


def descent_by_autograd(output, loss, memory, largest, q, k, v, rate, share, forget, momentum, averaging, size):
    """The updates of TTT and Titans (eq. 13 and 14 of Titans) with gradients by autograd, for one head: q, k, v are
    (T, D), the others (T,). A token's gradient is taken at the memory before its chunk. `averaging` scales the steps of
    its own chunk that a token sees. memory: a tuple of matrices. largest: bound on rate times curvature. The curvature
    along the gradient is |gradient with respect to the memory|^2 / |gradient with respect to the output|^2. Returns the
    outputs, and for each token whether its rate was lowered."""
    error = torch.func.grad(loss)
    gradient = torch.func.grad(lambda memory, k, v: loss(output(memory, k), k, v))
    moving, outputs, slowed = [torch.zeros_like(w) for w in memory], [], []
    for t in range(len(q)):
        if t % size == 0:
            anchor = start = memory
        gradients = gradient(anchor, k[t], v[t])
        curvature = sum(g.square().sum() for g in gradients) / error(output(anchor, k[t]), k[t], v[t]).square().sum()
        slowed.append(bool(rate[t] * curvature > largest))
        step = share[t] * (largest / curvature if slowed[-1] else rate[t])
        moving = [momentum[t] * p - step * g for p, g in zip(moving, gradients, strict=True)]
        start = [forget[t] * w for w in start]  # the memory without this chunk's steps
        memory = tuple(forget[t] * w + p for w, p in zip(memory, moving, strict=True))
        seen = tuple(w0 + averaging[t] * (w - w0) for w0, w in zip(start, memory, strict=True))
        outputs.append(output(seen, q[t]))
        memory = seen if t % size == size - 1 else memory
    return torch.stack(outputs), slowed


def learner_by_formula(attn, module, q, k, v, x):
    """The outputs before norm and gate, head by head, and which tokens' rates were lowered (2, 4, T)."""
    T, size = q.shape[2], 16
    ones = torch.ones(2, 4, T, dtype=torch.float64)
    rate = torch.sigmoid(heads_of(x @ module.beta.weight.T + module.beta.bias))[..., 0]
    if attn == "ttt":
        place = torch.arange(T) % size
        averaging = (1 / (place + 1).double() + module.place[place]).clamp(min=0).expand_as(ones)
        rate, share, forget, momentum = rate / 8, ones, ones, 0 * ones
    else:
        q, k = (y / y.square().sum(-1, keepdim=True).sqrt() for y in (q, k))
        v = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        forget = torch.sigmoid(module.forget_bias[:, None] - heads_of(x @ module.alpha.weight.T)[..., 0])
        momentum = torch.sigmoid(heads_of(x @ module.momentum.weight.T + module.momentum.bias))[..., 0]
        rate, share, averaging = rate / 8**0.5, (1 - momentum) / size, ones
    slowed = torch.zeros(2, 4, T, dtype=torch.bool)
    o = torch.empty_like(v)
    for b in range(2):
        for h in range(4):
            if attn == "ttt":                   # a residual and a LayerNorm around a linear memory with a bias
                norm = (module.inner_scale[h, 0], module.inner_bias[h, 0], 1e-6)
                memory, output = (module.memory[h], module.memory_bias[h]), lambda w, x: x @ w[0] + w[1][0]

                def seen(z, k, norm=norm):
                    return k + F.layer_norm(z, (8,), *norm)
            else:
                memory, output = (module.memory_in[h], module.memory_out[h]), lambda w, x: F.gelu(x @ w[0]) @ w[1]

                def seen(z, k):
                    return z
            z, lowered = descent_by_autograd(
                output, lambda z, k, v, seen=seen: (seen(z, k) - v).square().sum() / 2, memory,
                math.inf if attn == "ttt" else 2, q[b, h], k[b, h], v[b, h],
                *(y[b, h] for y in (rate, share, forget, momentum, averaging)), size)
            o[b, h], slowed[b, h] = seen(z, q[b, h]), torch.tensor(lowered)
    return o, slowed


@learners
def test_learners_equal_updates_by_autograd(attn):
    """Outputs and gradients, for two whole chunks and a part of a third."""
    module = layer(attn)
    if attn == "titans":
        with torch.no_grad():
            module.memory_out.mul_(2)           # lowers the rates of some tokens, but not of all
    q, k, v, x = inputs(module, 45)
    leaves = [y.requires_grad_() for y in (q, k, v, x)]
    parameters = [p for name, p in module.named_parameters() if not name.startswith(("c_", "conv", "out_norm", "gate"))]
    upstream, results = normal(2, 4, 45, 8, stream=7), []
    expected, slowed = learner_by_formula(attn, module, *leaves)
    for o in (module.read(*leaves), expected):
        results.append([o, *torch.autograd.grad(o, [*leaves, *parameters], upstream)])
    close(*results, moved=1e-12)                # the layer adds this to the denominator of the curvature
    if attn == "titans":
        found = module.read(*leaves, chunk=module.rule.slowed)
        assert found[..., 0].bool().equal(slowed) and slowed.any() and not slowed.all()


@pytest.mark.parametrize("bias", [0.0, 3.0])
@pytest.mark.parametrize("size", [1, 4])
def test_a_memory_that_learns_too_fast_stays_finite(size, bias):
    """The rate is the largest, and nothing is forgotten. Ten equal tokens follow each other, so their steps have the
    same direction. A memory of 4 times its initial size has 16 times the curvature. The steps of each chunk overshoot
    there, but they must not grow from chunk to chunk."""
    module = layer("titans")
    with torch.no_grad():
        for memory in (module.memory_in, module.memory_out):
            memory.mul_(size)
        for of, value in ((module.momentum.bias, bias), (module.beta.bias, 5.0), (module.forget_bias, 12.0)):
            of.fill_(value)
    x = normal(1, 40, 32).repeat_interleave(10, 1).requires_grad_()
    assert size == 1 or module.slowed(x).min() > 0.5
    o = module(x)
    slope, = torch.autograd.grad(o.square().mean(), x)
    assert o.isfinite().all()
    below(slope.norm(), 10)


@learners
def test_weights_of_a_learner_estimate_derivatives(attn):
    """weights_of estimates the mean over channels of the derivatives of o_ic with respect to v_jc. One direction of
    random signs estimates each mean roughly, but all of them together well. Along that direction it is exact."""
    module, x = layer(attn), normal(1, 20, 32)
    q, k, v = module.projected(x, None)
    w = module.weights_of(q, k, x)[0]
    assert w.shape == (4, 20, 20) and w.triu(1).abs().max() == 0
    jacobian = torch.autograd.functional.jacobian(lambda v: module.read(q, k, v[None], x)[0], v[0].detach())
    exact = torch.einsum("hichjc->hij", jacobian) / 8
    earlier = torch.ones(20, 20).tril(-1).bool()
    below(1 - torch.corrcoef(torch.stack([w[:, earlier].flatten(), exact[:, earlier].flatten()]))[0, 1], 0.2)
    signs = torch.randint(2, (4, 1, 8), generator=torch.Generator().manual_seed(0)).to(v) * 2 - 1    # the layer's signs
    along = torch.einsum("hic,hichjd,hjd->hij", signs.expand(4, 20, 8), jacobian, signs.expand(4, 20, 8)) / 8
    close(w, along)


@recipes
def test_the_state_does_not_grow_from_token_to_token(attn):
    module, x, past, sizes = layer(attn), normal(2, 90, 32), {}, []
    for piece in x.split([40, 1, 1, 17, 1, 29, 1], 1):
        module(piece, past)
        sizes.append(sum(y.numel() for value in past.values() if not isinstance(value, int) for y in value))
    rows = sum(y[:, :, :1].numel() for y in past.get("rows", ()))       # an unfinished chunk has at most 15 rows
    assert max(sizes) - min(sizes) <= 15 * rows


ADDED = {                                       # parameters beyond softmax's, as in the table of docs/variants.md
    "retnet": lambda C, D, H: C * D * H + D, "gla": lambda C, D, H: (C * D + 17 * D) * H + 16 * C + D,
    "mamba2": lambda C, D, H: (C * D + C + 5 * D + 3) * H + 8 * D - 2 * C * D * (H - 1),
    "deltanet": lambda C, D, H: (C + 12 * D) * H + D,
    "gated_deltanet": lambda C, D, H: (C * D + 2 * C + 12 * D + 2) * H + D,
    "ttt": lambda C, D, H: (D * D + C + 5 * D + 1) * H + 16,
    "titans": lambda C, D, H: (8 * D * D + C * D + 3 * C + 12 * D + 3) * H + D}


@recipes
def test_parameter_counts_equal_the_table(attn):
    sizes = [sum(p.numel() for p in layer(name, bias=False).parameters()) for name in (attn, "softmax")]
    assert sizes[0] - sizes[1] == ADDED[attn](32, 8, 4)


def test_the_flops_of_a_token_do_not_depend_on_the_length():
    def flops(attn, T):
        model = GPT(tiny_config(attn=attn, block_size=T))
        return model.flops_per_token() - 6 * model.num_params(embeddings=False)
    assert flops("retnet", 16) == flops("retnet", 512) == 6 * 2 * 2 * 8 * 8     # two products, two heads of 8
    assert flops("deltanet", 16) == 6 * 3 * 2 * 8 * 8
    assert flops("softmax", 512) == 12 * 16 * 512


# -------------------------------------------------------------------------------------------------- outside references


def by_fla(attn, module, q, k, v, x):
    """The output by the reference functions of flash-linear-attention. Most of them take (B, T, H, .) where we have
    (B, H, T, .)."""
    def reference(ops, name, *inputs):
        function = getattr(pytest.importorskip(f"fla.ops.{ops}.naive"), name)
        return function(*(y.transpose(1, 2) for y in inputs))[0].transpose(1, 2)
    if attn == "retnet":
        return pytest.importorskip("fla.ops.retention.naive").naive_retention(q, k, v)
    if attn == "linear_state":
        function = pytest.importorskip("fla.ops.linear_attn.naive").naive_recurrent_linear_attn
        return function(*((F.elu(y) + 1).transpose(1, 2) for y in (q, k)), v.transpose(1, 2),
                        normalize=True)[0].transpose(1, 2)
    if attn == "gla":
        return reference("gla", "naive_recurrent_gla", q, k, v, gla_forget(module, x))
    q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), learned_write(module, x)[..., 0]
    if attn == "deltanet":
        return pytest.importorskip("fla.ops.delta_rule.naive").delta_rule_recurrence(q, k, v, beta)[0]
    gate = mamba2_forget(module, x)[..., 0]
    return reference("gated_delta_rule", "naive_recurrent_gated_delta_rule", q, k, v, beta, gate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attn", ["linear_state", "retnet", "gla", "deltanet", "gated_deltanet"])
def test_outputs_equal_those_of_flash_linear_attention(attn):
    """Its reference functions compute in float32."""
    module = layer(attn, torch.float32, pos="none")
    qkvx = inputs(module, 70, dtype=torch.float32)
    close(module.read(*qkvx), by_fla(attn, module, *qkvx), terms=8 * 70)


@pytest.mark.exhaustive
def test_mamba2_equals_that_of_transformers_with_the_same_weights():
    """The whole layer, with projections, convolution, norm and gate."""
    pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer
    module, x = layer("mamba2", torch.float32, bias=False), normal(2, 70, 32).float()
    config = Mamba2Config(num_heads=4, head_dim=8, hidden_size=32, state_size=8, expand=1, n_groups=1, conv_kernel=4,
                          use_conv_bias=False, use_bias=False, layer_norm_epsilon=1e-6, chunk_size=16,
                          num_hidden_layers=1)
    theirs = Mamba2Mixer(config, 0).eval()
    order = torch.cat([torch.arange(16, 48), torch.arange(8, 16), torch.arange(8)])     # their order is v, k, q
    theirs.load_state_dict({
        "in_proj.weight": torch.cat([module.gate.weight, module.c_attn.weight[order], module.dt.weight]),
        "conv1d.weight": module.conv[order], "dt_bias": module.dt_bias, "A_log": module.A_log, "D": module.skip,
        "norm.weight": module.out_norm.weight, "out_proj.weight": module.c_proj.weight})
    close(module(x), theirs(x), terms=8 * 70)
