"""attention.py: every recipe against its formula, its own blocks, its gradients and its promises."""
import math

import pytest
import torch
from conftest import tiny_config
from torch.nn import functional as F

import attention
from attention import BLOCK, Attention, choose_kernel
from common.machine import LiveMemory
from model import GPT

# the recipes of this layer; those of other mixers are in a file of their own
ATTENTIONS = {name: axes for name, axes in attention.ATTENTIONS.items() if "mixer" not in axes}
recipes = pytest.mark.parametrize("attn", ATTENTIONS)
exhaustive = pytest.mark.exhaustive
OFFSETS = ("", "tau_init=0", "tau_init=0,per_length=0", "per_length=block", "learn_tau=0")     # elastic's forms


def layer(attn="softmax", dtype=torch.float64, **choices):
    """An attention layer in eval mode whose weights and per-head scalars are random: at their initial values some sit
    on a kink."""
    windowed = {"window": 7} if "window" in ATTENTIONS[attn] else {}
    module = Attention(tiny_config(**{"attn": attn, "n_head": 4, "n_embd": 32, "bias": True} | windowed | choices),
                       0).to(dtype).eval()
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=dice, dtype=torch.float64).to(dtype) * 0.2)
        if hasattr(module, "progress"):
            module.progress.fill_(0.3)          # in the middle of Dex's schedule, where both of its terms count
    return module


def inputs(module, T, R=None, dtype=torch.float64, seed=0):
    """Random q (of the last R rows), k, v and x for module.attend."""
    dice = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, *module.shapes[name][:1], T, module.shapes[name][1], generator=dice, dtype=torch.float64)
               for name in "qkv")
    x = torch.randn(2, T, module.config.n_embd, generator=dice, dtype=torch.float64)
    return [a.to(dtype) for a in (2 * q[:, :, T - (R or T):], k, v, x[:, T - (R or T):])]


def scalars(module):
    """What a recipe learns beside its projections."""
    return [p for name, p in module.named_parameters() if not name.startswith(("c_attn", "c_proj"))]


def attend_and_gradients(module, *qkvx):
    """Output and, for a random gradient from above, the gradients of all inputs and scalars."""
    leaves = [a.clone().requires_grad_() for a in qkvx]
    o = module.attend(*leaves)
    above = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(o)
    return [o, *torch.autograd.grad(o, leaves + scalars(module), above, allow_unused=True)]


def assert_all_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


def assert_close_to(found, expected, atol):
    """Within atol of the largest expected number, or of 1."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol * max(1.0, expected.abs().max().item()))


# ----------------------------------------------------------------------------------------------------------- formulas
# Independent of attention.py, one row and head at a time in float64: how scores come about, and what becomes of a row
# of them.

def scores_plain(q, k, module, head):
    return k @ q / len(q) ** 0.5


def scores_ssmax(q, k, module, head):
    """Nakanishi: sigma_h log(n) times the usual score."""
    return module.sigma[head] * math.log(len(k)) * (k @ q) / len(q) ** 0.5


def scores_asentmax(q, k, module, head):
    """delta + beta log(n + 1)^gamma with delta 1 (the released code counts rows from 0 and writes log(i + 2))."""
    return (1 + module.scale_beta[head] * math.log(len(k) + 1) ** module.scale_gamma[head]) * (k @ q) / len(q) ** 0.5


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def scores_cosine(q, k, module, head):
    return unit(k) @ unit(q)


def scores_lssar(q, k, module, head):
    """Scale log(d) log(n) on cosines."""
    return math.log(len(q)) * math.log(len(k)) * scores_cosine(q, k, module, head)


def scores_elu(q, k, module, head):
    def phi(x):
        return torch.where(x > 0, x + 1, x.exp())
    return phi(k) @ phi(q) / len(q) ** 0.5


def scores_mlp(q, k, module, head):
    def phi(x):
        return (x @ module.feature[0].weight.T).clamp(min=0) @ module.feature[2].weight.T
    return phi(k) @ phi(q) / len(q) ** 0.5


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


def entmax_row(s, module, head):
    """relu((alpha - 1) s - tau)^(1 / (alpha - 1)), tau by bisection."""
    alpha = 1 + torch.sigmoid(module.theta[head]).item() if hasattr(module, "theta") else \
        2.0 if module.config.rule == "sparsemax" else module.args["alpha"]
    z = (alpha - 1) * s
    low, high = z.max() - 1, z.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (z - middle).clamp(min=0).pow(1 / (alpha - 1)).sum() > 1 else (low, middle)
    return (z - low).clamp(min=0).pow(1 / (alpha - 1))


def lssar_row(s, module, head):
    """softplus, l1, relu(n a - 1) (but relu(n a) in the first three rows), power 15, l1."""
    phi = torch.logaddexp(s, torch.zeros_like(s))
    x = (len(s) * phi / phi.sum() - (1 if len(s) > 3 else 0)).clamp(min=0)
    return x.pow(15) / x.pow(15).sum()


def softpick_row(s, module, head):
    # which is added to sums that are shifted by the maximum
    e, eps = s.exp() - 1, 1e-8 * s.max().clamp(min=0).exp()
    return e.clamp(min=0) / (e.abs().sum() + eps)


def relu_row(s, module, head):
    return s.clamp(min=0) / (len(s) if module.config.normalize == "length" else 1)


def tra_row(s, module, head):
    """tau = beta sqrt(2 log(n / kappa) / d)."""
    tau = module.beta[head] * math.sqrt(2 * max(0, math.log(len(s) / module.args["kappa"])) / module.width)
    return (s - tau).clamp(min=0) ** module.args["power"]


def sigmoid_row(s, module, head):
    """Apple's bias is -log of the training length; paper 5 has none, but divides by the sum in one form."""
    bias = -math.log(module.config.block_size) if module.config.attn == "sigmoid" else 0.0
    w = 1 / (1 + (-s - bias).exp())
    return w / (w.sum() + 1e-8) if module.config.normalize == "sum" else w


def elu_row(s, module, head):
    w = torch.where(s > 0, s + 1, s.exp())
    return w / (w.sum() + 1e-8) if module.config.normalize == "sum" else w


def identity_row(s, module, head):
    """Paper 5, table 6: over the sum (linear attention), over max(|sum|, 1), or as it is."""
    return s / {"none": 1.0, "sum": s.sum() + 1e-8, "max1": max(s.sum().abs(), 1.0)}[module.config.normalize]


# recipes, how their scores come about, and what becomes of a row of them, an extra key's weight first
FORMULAS = {attn: forms for names, *forms in (
    ("softmax k_bias kv_bias sink_token v_bias gated gated_elementwise", scores_plain, softmax_row),
    ("window streaming diff diff2 dex", scores_plain, softmax_row),
    ("softmax1 sink gpt_oss", scores_plain, extra_key_row),
    ("ssmax", scores_ssmax, softmax_row),
    ("elastic lazy", scores_plain, elastic_row),
    ("entmax sparsemax", scores_plain, entmax_row),
    ("asentmax", scores_asentmax, entmax_row),
    ("lssar", scores_lssar, lssar_row),
    ("softpick", scores_plain, softpick_row),
    ("relu rela rela_gated diff_rela", scores_plain, relu_row),
    ("tra tda", scores_cosine, tra_row),
    ("sigmoid sigmoid_raw sigmoid_norm", scores_plain, sigmoid_row),
    ("elu elu_norm", scores_plain, elu_row),
    ("linear linear_raw", scores_elu, identity_row),
    ("identity identity_norm", scores_plain, identity_row),
    ("mlp mlp_norm", scores_mlp, identity_row),
) for attn in names.split()}


def seen_by(i, module):
    """The keys that row i sees, window and first keys by their definition."""
    c = module.config
    return [j for j in range(i + 1) if not c.window or i - j < c.window or j < c.first]


def key_head(module, h):
    """Which key head score head h looks at: with own keys for each view, view h % 2 of a group's pair of key heads."""
    heads, key_heads = module.shapes["q"][0], module.shapes["k"][0]
    if module.config.diff in ("subtract", "v1"):
        return h // 2 * 2 * key_heads // heads // 2 * 2 + h % 2 if heads > key_heads else h
    return h * key_heads // heads


def views_by_formula(module, q, k):
    """Weights (B, score heads, R, T) row by row from FORMULAS, in float64."""
    q, k = q.double(), k.double()
    (B, H, R, D), T = q.shape, k.shape[2]
    extra, views = int(module.config.sink not in ("none", "token")), H // module.heads
    scores, row = FORMULAS[module.config.attn]
    w = torch.zeros(B, H, R, extra + T, dtype=torch.float64)
    for b, h, r in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(R)).tolist():
        seen = seen_by(T - R + r, module)
        s = scores(q[b, h, r], k[b, key_head(module, h), seen], module, h)
        if module.config.sink.startswith("key"):
            s = torch.cat([q[b, h, r] @ module.sink_key[key_head(module, h)][:, None] / D ** 0.5, s])
        w[b, h, r, ([0] if extra else []) + [extra + j for j in seen]] = row(s, module, h // views)
    return w


def lambda_by_formula(module, x):
    """What differential recipes multiply their second view with, (B or 1, H or 1, R or 1, 1)."""
    if module.config.diff == "subtract":
        return 1 / (1 + (-module.lambda_logit).exp())[:, None, None]
    if module.config.diff == "v2":
        return 1 / (1 + (-(x @ module.lambda_proj.weight.T)).exp()).transpose(1, 2)[..., None]
    up, down = (a @ b for a, b in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)))
    return up.exp() - down.exp() + 0.8 - 0.6                            # of layer 0: 0.8 - 0.6 e^0


def by_formula(module, q, k, x):
    w = views_by_formula(module, q, k)
    return w if module.config.diff == "none" else w[:, 0::2] - lambda_by_formula(module, x) * w[:, 1::2]


def output_by_formula(module, w, v, x):
    """What a layer makes of its weights: times the values, an extra key's too, then corrections, norms and gates."""
    c, T = module.config, v.shape[2]
    heads = v.repeat_interleave(w.shape[1] // v.shape[1], 1)
    o = w[..., -T:] @ heads
    if c.sink == "key_value":
        o = o + w[..., :1] * module.sink_value.repeat_interleave(w.shape[1] // v.shape[1], 0)[:, None]
    if c.value_bias == "on":
        o = o + module.value_bias[:, None]
    if c.dex == "on":                           # lambda_init of layer 0 is 0.2; T_a is half of the training
        a = min(1.0, module.progress.item() / 0.5)
        o = o - ((1 - a) * a * 0.2 + a * module.dex_lambda) * (o @ module.dex_proj.weight.T)
    if c.out_norm == "head":
        o = o / (o.square().mean(-1, keepdim=True) + module.args["out_norm_eps"]).sqrt() * module.out_norm.weight
    elif c.out_norm != "none":                  # over all heads side by side
        flat = o.transpose(1, 2).flatten(2)
        y = flat / (flat.square().mean(-1, keepdim=True) + module.args["out_norm_eps"]).sqrt() * module.out_norm.weight
        y = y * torch.sigmoid(module.norm_gate * flat) if c.out_norm == "gated" else y
        o = y.unflatten(-1, (o.shape[1], -1)).transpose(1, 2)
    if c.diff == "v1":
        o = o * (1 - 0.2)
    if c.gate != "none":                        # (B, T, H or H E), one number or E for each head
        gate = torch.sigmoid(x @ module.gate.weight.mT + module.gate.bias)
        o = o * gate.view(*x.shape[:2], o.shape[1], -1).transpose(1, 2)
    return o


ARGUMENTS = [("elastic", args) for args in OFFSETS[1:]] + [
    ("entmax", "alpha=learned"), ("entmax", "alpha=1.2"), ("entmax", "alpha=2"), ("tra", "power=1"),
    ("tra", "power=3"), ("tra", "power=5"),
    ("tra", "kappa=4,beta_init=0.5"), ("tda", "learn_beta=0"), ("ssmax", "sigma_init=0.4,learn_sigma=0")]


@recipes
def test_weights_of_grouped_heads_equal_the_formula(attn):
    module = layer(attn, n_kv_head=2)
    q, k, _, x = inputs(module, 9)
    expected = by_formula(module, q, k, x).detach()
    assert_close_to(module.weights_of(q, k, x), expected, 1e-7)


# recipe: {parameter: value at the start}, of four heads of width 8 at block_size 1024
INITIAL = {
    "ssmax": {"sigma": 0.16847}, "sink": {"sink_logit": 0.0}, "elastic": {"tau": 1.0},
    "tra": {"beta": 1.0, "out_norm.weight": 1.0},
    "tda": {"beta": 1.0, "lambda_logit": 0.0}, "asentmax": {"scale_beta": [0.1, 0.4, 0.7, 1.0], "scale_gamma": 0.0},
    "dex": {"dex_lambda": 0.0, "dex_proj.weight": 0.0, "progress": 0.0}, "lazy": {"table": 0.0},
    "rela": {"out_norm.weight": 1.0},
    "lssar": {"sigma": 8 ** 0.5 * math.log(8)}}
SPREAD = {                                      # and standard deviations of what is drawn
    "kv_bias": {"sink_key": 0.02, "sink_value": 0.02}, "v_bias": {"value_bias": 0.02},
    "rela_gated": {"norm_gate": 0.02},
    "mlp": {"feature.0.weight": (2 / (5 * 64)) ** 0.5, "feature.2.weight": (2 / (5 * 64)) ** 0.5},
    "diff": {name: 0.1 for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}}


@pytest.mark.parametrize("attn", INITIAL)
def test_initial_values(attn):
    state = Attention(tiny_config(attn=attn, n_head=4, n_embd=32, block_size=1024), 0).state_dict()
    for name, value in INITIAL[attn].items():
        expected = torch.as_tensor(value).expand_as(state[name]).float()
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attn", SPREAD)
def test_initial_spread(attn):
    gpt = GPT(tiny_config(attn=attn, n_head=16, n_embd=1024))
    for name, std in SPREAD[attn].items():
        drawn = gpt.state_dict()[f"transformer.h.0.attn.{name}"]
        assert abs(drawn.std().item() / std - 1) < 4 / math.sqrt(2 * drawn.numel())
        assert abs(drawn.mean().item()) < 4 * std / math.sqrt(drawn.numel())


@pytest.mark.parametrize("attn, args", [(attn, "") for attn in ATTENTIONS] + ARGUMENTS)
@pytest.mark.parametrize("T, R", [(1, 1), (13, 13), (20, 3)])
def test_weights_equal_the_formula(attn, args, T, R):
    module = layer(attn, attn_args=args)
    q, k, _, x = inputs(module, T, R)
    found, expected = module.weights_of(q, k, x), by_formula(module, q, k, x).detach()
    atol = 1e-7 if attn == "lssar" else 1e-11   # its constant sqrt(d) log(d) is kept in float32
    torch.testing.assert_close(found, expected, rtol=0, atol=atol * max(1.0, expected.abs().max().item()))


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
    elastic = Attention(tiny_config(attn="elastic", attn_args="tau_init=0"), 0)
    softmax = Attention(tiny_config(attn="softmax"), 0)
    q, k, v, x = inputs(elastic, 21)
    torch.testing.assert_close(elastic.attend(q, k, v, x), softmax.attend(q, k, v, x), rtol=0, atol=1e-12)
    assert torch.equal(elastic.weights_of(q, k, x), softmax.weights_of(q, k, x))


@pytest.mark.parametrize("R", [9, 1, 4])
@pytest.mark.parametrize("W", [None, 1, 5, 9, 30])
@pytest.mark.parametrize("tail, slope", [(True, False), (False, True), (True, True)])
def test_a_distance_is_a_table_a_tail_and_a_slope(R, W, tail, slope):
    """Against each entry by itself; in the weights, and with gradients, through recomputed blocks as through kept
    ones."""
    H, T = 4, 9
    table = None if W is None else torch.randn(H, W, dtype=torch.float64)
    distance = attention.Distance(table, *(torch.randn(H, dtype=torch.float64) if there else None
                                           for there in (tail, slope)))
    found = distance.bias(R, T)
    for h, r, j in torch.cartesian_prod(torch.arange(H), torch.arange(R), torch.arange(T)).tolist():
        apart = T - R + r - j
        if apart >= 0:
            near = table is not None and apart < W
            expected = table[h, apart] if near else distance.tail[h] if tail else 0.0
            assert found[h, r, j] == expected + (distance.slope[h] * apart if slope else 0.0)


def test_every_part_of_a_distance_learns(monkeypatch):
    module = layer("elastic", kernel="torch")
    qkvx = inputs(module, 3 * BLOCK)
    parts = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 20), (4,), (4,))]
    above = torch.randn(2, 4, 3 * BLOCK, 8, dtype=torch.float64)

    def gradients():
        return torch.autograd.grad(module.attend(*qkvx, attention.Distance(*parts)), parts, above)

    recomputed = gradients()
    monkeypatch.setattr(attention.Recomputed, "apply", attention.run_blocks)  # that keep their blocks
    assert_all_close(recomputed, gradients(), rtol=1e-9, atol=1e-9)
    assert all(g.abs().max() > 0 for g in recomputed)


@pytest.mark.parametrize("R", [9, 1, 4])
@pytest.mark.parametrize("W", [1, 5, 9, 30])
def test_a_distance_table_is_added_to_the_scores(R, W):
    module = layer("elastic")
    q, k, _, x = inputs(module, 9, R)
    table = torch.randn(4, W, dtype=torch.float64)
    distance = torch.arange(9 - R, 9)[:, None] - torch.arange(9)
    bias = torch.where((distance >= 0) & (distance < W), table[:, distance.clamp(0, W - 1)], 0.0)
    assert torch.equal(attention.Distance(table).bias(R, 9), bias)
    s = q @ k.mT * module.sight.scale + bias
    p = s.masked_fill(distance < 0, -math.inf).softmax(-1)
    n = torch.arange(9 - R, 9)[:, None] + 1
    expected = (p - module.tau[:, None, None] / n).clamp(min=0).masked_fill(distance < 0, 0)
    torch.testing.assert_close(module.weights_of(q, k, x, table), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attn", ["softmax1", "sink"])
def test_a_sink_is_the_textbook_denominator_in_values_and_gradients(attn):
    """softmax(s) sigmoid(lse - c) against e^s / (e^c + sum e^s), with torch's own add_zero_attn layout as the second
    form."""
    module = layer(attn)
    q, k, v, x = (a.requires_grad_() for a in inputs(module, 23))
    c = module.sink_logit[:, None, None] if attn == "sink" else torch.zeros(4, 1, 1, dtype=torch.float64)
    s = (q @ k.mT * module.sight.scale).masked_fill(torch.ones(23, 23).triu(1).bool(), -math.inf)
    textbook = (s.exp() / (c.exp() + s.exp().sum(-1, keepdim=True))) @ v
    extra = torch.cat([c.expand(2, 4, 23, 1), s], -1).softmax(-1) @ F.pad(v, (0, 0, 1, 0))
    above = torch.randn(2, 4, 23, 8, dtype=torch.float64)
    wanted = [*scalars(module), q, k, v]
    found = [torch.autograd.grad(o, wanted, above, retain_graph=True)
             for o in (module.attend(q, k, v, x), textbook, extra)]
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
    sight = module.sight._replace(hidden=0)
    w = module.weights_of(q, k, x, sight=sight)
    assert (w[:, :, 1:, 0] == 0).all() and (w[:, :, 0, 0] == 1).all()
    torch.testing.assert_close(w[:, :, 1:, 1:], layer("softmax").weights_of(q[:, :, 1:], k[:, :, 1:], x[:, 1:]),
                               rtol=0, atol=1e-12)
    torch.testing.assert_close(module.attend(q, k, v, x, sight=sight), w @ v, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------- equal to one another

def assert_same_weights(one, other, rtol=0.0, factor=1.0, T=21):
    """Two layers give the same weights to the same queries and keys."""
    q, k, _, x = inputs(one, T)
    torch.testing.assert_close(one.weights_of(q, k, x), factor * other.weights_of(q, k, x), rtol=rtol, atol=1e-12)


def fresh(attn, **choices):
    return Attention(tiny_config(**{"attn": attn, "n_head": 4, "n_embd": 32} | choices), 0).double()


EQUAL = {                                       # pairs of (recipe, choices) that mean the same
    "elastic at tau 0 is softmax": (("elastic", {"attn_args": "tau_init=0"}), ("softmax", {})),
    "entmax at alpha 2 is sparsemax": (("entmax", {"attn_args": "alpha=2"}), ("sparsemax", {})),
    "learned alpha starts at 1.5": (("entmax", {"attn_args": "alpha=learned"}), ("entmax", {})),
    "a window over everything is softmax": (("window", {"window": 100}), ("softmax", {})),
    "gpt_oss in a layer without a window is a sink": (("gpt_oss", {"window": 100}), ("sink", {})),
    "a sink of logit 0 is softmax1": (("sink", {}), ("softmax1", {})),
    "TRA with beta 0 and power 1 is ReLA": (("tra", {"attn_args": "beta_init=0,power=1"}),
                                            ("rela", {"qk_norm": "l2", "scale": "one"})),
    "linear attention's numerator": (("linear_raw", {}), ("identity", {"feature": "elu"})),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equalities_between_recipes(name):
    (one, choices), (other, others) = EQUAL[name]
    assert_same_weights(fresh(one, **choices), fresh(other, **others))


def test_tra_without_unit_vectors_is_rela_times_sqrt_d():
    """Both before the norm on the output."""
    tra, rela = fresh("tra", qk_norm="none", attn_args="beta_init=0,power=1"), fresh("rela")
    assert_same_weights(tra, rela, rtol=1e-12, factor=8 ** 0.5)


def test_ssmax_at_sigma_one_over_log_n_is_softmax_in_that_row():
    ssmax, softmax = fresh("ssmax", attn_args=f"sigma_init={1 / math.log(21)}"), fresh("softmax")
    q, k, _, x = inputs(ssmax, 21)
    torch.testing.assert_close(ssmax.weights_of(q, k, x)[:, :, -1], softmax.weights_of(q, k, x)[:, :, -1], rtol=0,
                               atol=1e-7)


def test_softpick_of_positive_scores_is_a_normalised_sum():
    module = fresh("softpick")
    q, k, _, x = (a.abs() + 0.1 for a in inputs(module, 15))
    e = ((q @ k.mT * module.sight.scale).exp() - 1).tril()
    torch.testing.assert_close(module.weights_of(q, k, x), e / e.sum(-1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("attn, plain", [("tda", "tra"), ("diff_rela", "rela"), ("diff2", "softmax")])
def test_without_a_second_view_a_differential_recipe_is_its_rule(attn, plain):
    """lambda next to 0 leaves the first view, and equal views at lambda 1/2 leave half of either."""
    module, single = fresh(attn), fresh(plain)
    (q, k, _, x), (H, _) = inputs(module, 17), module.shapes["q"]
    for name, p in single.named_parameters():
        if name in ("beta",):
            p.data.copy_(module.beta)
    a, b = module.views_of(q, k, x)
    own = single.weights_of(q[:, 0::2], k if attn == "diff2" else k[:, 0::2], x)
    torch.testing.assert_close(a, own, rtol=0, atol=1e-12)
    lam = 0.5 if attn != "diff2" else lambda_by_formula(module, x)
    torch.testing.assert_close(module.weights_of(q, k, x), a - lam * b, rtol=0, atol=1e-12)
    assert a.shape == b.shape == (2, 4, 17, 17) and H == 8


def test_lssar_with_power_one_and_no_threshold_is_softplus_over_its_sum():
    module = fresh("lssar", attn_args="power=1", block_size=16)
    q, k, _, x = inputs(module, 3)              # rows of up to three keys have no threshold
    c = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    phi = F.softplus(math.log(8) * torch.arange(1.0, 4).double().log()[:, None] * c, threshold=40).tril()
    torch.testing.assert_close(module.weights_of(q, k, x), phi / phi.sum(-1, keepdim=True), rtol=0, atol=1e-7)


def test_extra_keys_equal_torch_nns():
    """softmax1 and the KV bias against torch.nn.MultiheadAttention's add_zero_attn and add_bias_kv."""
    for attn, option in (("softmax1", "add_zero_attn"), ("kv_bias", "add_bias_kv")):
        module, T = layer(attn), 12
        theirs = torch.nn.MultiheadAttention(32, 4, bias=False, batch_first=True, **{option: True}).double()
        q, k, v, x = inputs(module, T)
        with torch.no_grad():
            theirs.in_proj_weight.copy_(torch.eye(32).repeat(3, 1))
            theirs.out_proj.weight.copy_(torch.eye(32))
            if attn == "kv_bias":
                theirs.bias_k.copy_(module.sink_key.flatten())
                theirs.bias_v.copy_(module.sink_value.flatten())
        flat = [a.transpose(1, 2).flatten(2) for a in (q, k, v)]
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        expected, w = theirs(*flat, attn_mask=future, average_attn_weights=False)
        torch.testing.assert_close(module.attend(q, k, v, x).transpose(1, 2).flatten(2), expected, rtol=0, atol=1e-12)
        # theirs comes last
        torch.testing.assert_close(module.weights_of(q, k, x), w.roll(1, -1), rtol=0, atol=1e-12)


def test_a_fixed_value_of_the_extra_key_has_the_norm_asked_for():
    """Table 5 of When Attention Sink Emerges; at norm 0 it is the K bias."""
    for even in (0, 1):
        module = fresh("kv_bias", attn_args=f"value_norm=5,value_even={even}")
        assert "sink_value" not in dict(module.named_parameters())
        torch.testing.assert_close(module.sink_value.norm(dim=-1), torch.full((4,), 5.0).double(), rtol=1e-6, atol=0)
        assert (module.sink_value[:, 0] == 5).all() != bool(even)
    bare, key = fresh("kv_bias", attn_args="value_norm=0"), fresh("k_bias")
    key.sink_key.data.copy_(bare.sink_key)
    q, k, v, x = inputs(bare, 14)
    torch.testing.assert_close(bare.attend(q, k, v, x), key.attend(q, k, v, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("attn, names", [("k_bias", ["sink_key"]), ("kv_bias", ["sink_key", "sink_value"]),
                                         ("v_bias", ["value_bias"])])
@pytest.mark.parametrize("sizes", ["bias_shared=1", "bias_dims=3", "bias_shared=1,bias_dims=2"])
def test_biases_shared_by_heads_and_of_few_channels(attn, names, sizes):
    """When Attention Sink Emerges, tables 12 and 13: equal to full ones that hold the same numbers, and zeros."""
    small, full = layer(attn, attn_args=sizes, n_kv_head=2), layer(attn, n_kv_head=2)
    full.load_state_dict(small.state_dict() | {name: getattr(full, name) for name in names})
    for name in names:
        bias, whole = getattr(small, name), getattr(full, name)
        assert bias.shape == (1 if "shared" in sizes else whole.shape[0], 3 if "=3" in sizes else 2 if "=2" in sizes
                              else whole.shape[1])
        whole.data.zero_()
        whole.data[:, :bias.shape[1]] = bias.data
    found, expected = (attend_and_gradients(module, *inputs(module, 21))[:5] for module in (small, full))
    assert_all_close(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- numerical traps

@recipes
@pytest.mark.parametrize("kind", ["one key", "equal", "below -100", "above 100", "opposite", "1e4"])
def test_extreme_rows_are_finite_in_values_and_gradients(attn, kind):
    module = layer(attn, dtype=torch.float32, kernel="torch")
    q, k, v, x = inputs(module, 1 if kind == "one key" else 12, dtype=torch.float32)
    if kind == "equal":
        q, k = torch.ones_like(q), torch.ones_like(k)
    if kind in ("below -100", "above 100"):     # scores of -141 or 141 before any norm, and a little apart
        q, k = torch.ones_like(q) * 10, torch.ones_like(k) * (-5 if kind == "below -100" else 5) - 0.01 * k.abs()
    if kind == "opposite":                      # what is not oneself points away
        q, k = k.repeat(1, q.shape[1] // k.shape[1], 1, 1), -k
    if kind == "1e4":
        q, k = 100 * q, 100 * k
    found = attend_and_gradients(module, q, k, v, x)
    assert all(g is None or g.isfinite().all() for g in found)


@pytest.mark.parametrize("attn", ["relu", "rela", "tra", "tda", "diff_rela", "softpick"])
def test_rows_in_which_nothing_survives_give_nothing_and_no_gradient(attn):
    module = layer(attn, dtype=torch.float32)
    _, _, v, x = inputs(module, 9, dtype=torch.float32)
    q, k = (size * torch.ones(2, module.shapes[name][0], 9, module.shapes[name][1])
            for size, name in ((10.0, "q"), (-5.0, "k")))
    o, *gradients = attend_and_gradients(module, q, k, v, x)
    assert o.abs().max() == 0 and all(g is None or g.abs().max() == 0 for g in gradients)


@pytest.mark.parametrize("alpha", ["1.05", "1.2", "1.5", "2", "learned"])
def test_entmax_sums_to_one_in_long_even_and_tied_rows(alpha):
    module = layer("entmax", dtype=torch.float32, attn_args=f"alpha={alpha}")
    s = torch.randn(1, 4, 5, 3000, generator=torch.Generator().manual_seed(0))
    s[:, :, 0], s[:, :, 1], s[:, :, 2, :7], s[:, :, 3] = 0.0, 1e4, 9.0, 1e3 * s[:, :, 3]
    t = module.rule.row_input(module, torch.ones(5))
    w = module.rule.does(s, torch.ones(5, 3000, dtype=torch.bool), t)
    torch.testing.assert_close(w.sum(-1), torch.ones(1, 4, 5), rtol=0, atol=3000 * torch.finfo(torch.float32).eps)
    assert (w[:, :, :2] > 0).all() and w[:, :, 2, :7].std(-1).max() < 1e-6
    assert alpha == "1.05" or (w[:, :, 3] == 0).float().mean() > 0.9


def test_lssar_stays_finite_beyond_a_thousand_keys():
    """x^15 of n a - 1 with a = 1 at n = 1500 would be 1500^15, far out of float32."""
    module = layer("lssar", dtype=torch.float32, block_size=2000)
    q, k, v, x = inputs(module, 1500, 1, dtype=torch.float32)
    k[:, :, 700] = q[:, :, 0]
    found = attend_and_gradients(module, q, k, v, x)
    w = module.weights_of(q, k, x)
    assert all(g is None or g.isfinite().all() for g in found) and w[..., 700].min() > 0.3
    torch.testing.assert_close(w.sum(-1), torch.ones_like(w[..., 0]), rtol=0, atol=1e-5)


def test_lssar_rows_are_even_or_not_whatever_the_rounding():
    """An even row is empty, not what rounding to the 15th power makes of it."""
    module = layer("lssar", dtype=torch.float32, block_size=2000)
    q, k, v, x = inputs(module, 600, dtype=torch.float32)
    w = module.weights_of(q, torch.ones_like(k), x)
    assert w[:, :, 3:].abs().max() == 0 and (w[:, :, :3].sum(-1) - 1).abs().max() < 1e-6


def test_lssar_without_unit_vectors_survives_scores_far_below_zero():
    module = layer("softmax", rule="lssar", dtype=torch.float32)
    q, k, v, x = inputs(module, 9, dtype=torch.float32)
    found = attend_and_gradients(module, 10 * torch.ones_like(q), -5 * torch.ones_like(k), v, x)
    assert all(g is None or g.isfinite().all() for g in found)


@pytest.mark.parametrize("theta", [-100.0, -5.0, 0.0, 20.0])
def test_a_learned_alpha_stays_between_softmax_and_sparsemax(theta):
    module = layer("entmax", dtype=torch.float32, attn_args="alpha=learned")
    module.theta.data.fill_(theta)
    q, k, v, x = inputs(module, 30, dtype=torch.float32)
    found = attend_and_gradients(module, q, k, v, x)
    assert all(g is None or g.isfinite().all() for g in found)
    torch.testing.assert_close(module.weights_of(q, k, x).sum(-1), torch.ones(2, 4, 30), rtol=0, atol=1e-4)


def test_sigmoid_rows_sum_to_about_one_at_the_start():
    for attn, expected in (("sigmoid", 1.0), ("sigmoid_raw", 8.0)):     # with the bias, and n / 2 without
        module = fresh(attn)
        q, k, _, x = inputs(module, 16)
        assert module.weights_of(0.01 * q, k, x)[:, :, -1].sum(-1).mean().item() == pytest.approx(expected, rel=0.1)


def test_elastic_spends_what_exceeds_the_threshold():
    module = fresh("elastic")
    q, k, _, x = inputs(module, 16)
    w = module.weights_of(q, k, x)
    assert ((w.sum(-1) >= 0) & (w.sum(-1) < 1)).all()
    assert w[:, :, 0].abs().max() < 1e-12 and (w == 0).double().mean() > 0.6


# ----------------------------------------------------------------------------- combinations that nobody has published

COMBINATIONS = [
    {"attn": "elastic", "gate": "head"}, {"attn": "elastic", "window": 7, "n_kv_head": 2},
    {"attn": "softpick", "diff": "subtract"},
    {"attn": "sink", "window": 7, "n_kv_head": 2}, {"attn": "entmax", "scale": "log_n"},
    {"attn": "entmax", "attn_args": "alpha=learned", "diff": "v2"},
    {"attn": "elastic", "scale": "asentmax", "pos": "rope+bias"},
    {"attn": "tda", "window": 7, "first": 2, "gate": "element"},
    {"attn": "diff", "sink": "logit"}, {"attn": "kv_bias", "diff": "v2", "qk_norm": "rms"},
    {"attn": "sigmoid", "diff": "v1", "normalize": "sum"},
    {"attn": "lssar", "value_bias": "on", "dex": "on"}, {"attn": "lazy", "window": 9, "window_every": 2, "first": 3},
    {"attn": "mlp", "normalize": "length", "qk_norm": "l2"}, {"attn": "tra", "normalize": "sum", "pos": "bias"},
    {"attn": "relu", "sink": "token"},
    {"attn": "linear", "window": 7}, {"attn": "mlp_norm", "window": 7}, {"attn": "kv_bias", "window": 7},
    {"attn": "streaming", "sink": "key"},
    {"attn": "tda", "n_kv_head": 2, "window": 7}, {"attn": "diff", "n_kv_head": 2},
    {"attn": "sink_token", "window": 7, "first": 1},
    {"attn": "ssmax", "sink": "key", "out_norm": "gated"}, {"attn": "elu", "feature": "elu", "normalize": "max1"}]


@pytest.mark.parametrize("choices", COMBINATIONS, ids=lambda c: " ".join(f"{key}={value}" for key, value in c.items()))
def test_combinations_work(choices):
    """Output from weights, causality, blocks against one dense block, and decoding step by step."""
    module = layer(**choices)
    q, k, v, x = inputs(module, 20)
    expected = output_by_formula(module, module.weights_of(q, k, x), v, x)
    assert_close_to(module.attend(q, k, v, x), expected, 1e-11)
    x = torch.randn(1, BLOCK + 9, 32, dtype=torch.float64, requires_grad=True)
    y, past, steps = module(x), {}, []
    for part in x.detach().split([5, 20] + [1] * 30 + [BLOCK - 46], 1):
        steps.append(module(part, past))
    torch.testing.assert_close(torch.cat(steps, 1), y, rtol=0, atol=1e-5)  # RoPE's angles are float32
    y[:, :40].square().sum().backward()
    assert x.grad[:, 40:].abs().max() == 0 and x.grad[:, :40].isfinite().all()


@pytest.mark.parametrize("choices, reason", [
    ({"attn": "elastic", "sink": "key"}, "merges exactly by log-sum-exp"),
    ({"attn": "softmax", "normalize": "sum"}, "normalised already"),
    ({"attn": "diff", "n_head": 1}, "both be even"), ({"attn": "softmax", "first": 4}, "give --window"),
    ({"attn": "softmax", "window_every": 2}, "give --window"), ({"attn": "sink_token", "window": 8}, "out of sight"),
    ({"attn": "mlp", "normalize": "sum"}, "max1"),
    ({"attn": "kv_bias", "attn_args": "value_even=1"}, "value_norm=NUMBER"),
    ({"attn": "k_bias", "attn_args": "bias_dims=1.7"}, "whole number"),
    ({"attn": "v_bias", "attn_args": "bias_dims=99"}, "of a head's"),
    ({"attn": "streaming", "feature": "elu"}, "places of their own")])
def test_combinations_without_meaning_say_why(choices, reason):
    with pytest.raises(ValueError, match=reason):
        tiny_config(**choices)


# ----------------------------------------------------------------------------------------------------------- positions


def turned(x, place):
    """RoPE of one vector (D,) by complex numbers: pair c is (x_c, x_{c + D/2})."""
    half = len(x) // 2
    pair = torch.complex(x[:half], x[half:]) * torch.exp(1j * place * 10000.0 ** (-torch.arange(half).double() / half))
    return torch.cat([pair.real, pair.imag])


def t5_bucket(apart):
    """By counting: 16 distances have a bucket each, beyond them bucket 16 + k ends at 16 8^((k + 1)/16)."""
    return apart if apart < 16 else min(31, 16 + sum(apart >= 16 * 8 ** ((k + 1) / 16) for k in range(16)))


# what each position code adds to the score of head h at a distance, by its own formula
ADDED = {
    "none": lambda module, h, apart: 0.0, "rope": lambda module, h, apart: 0.0,
    "alibi": lambda module, h, apart: -(2.0 ** (-2 * (h + 1))) * apart,                 # of 4 heads
    "t5": lambda module, h, apart: module.t5[h, t5_bucket(apart)].item(),
    "t5_index": lambda module, h, apart: float(t5_bucket(apart)),
    "bias": lambda module, h, apart: module.table[h, apart].item() if apart < 20 else 0.0}
ADDED |= {"rope+bias": ADDED["bias"], "sinusoidal": ADDED["none"], "learned": ADDED["none"]}


@pytest.mark.parametrize("pos", attention.POSITIONS)
def test_what_each_position_code_adds_to_the_score(pos):
    """Against each score by itself in float64, through the layer's own forward pass: 150 tokens, so beyond every
    table."""
    module, T, seen = layer(pos=pos, bias_range=20), 150, []
    module.attend = lambda q, k, v, x, table: seen.append((q, k, table)) or v
    x = torch.randn(1, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module(x)
    q, k, _ = (part[0].unflatten(-1, (4, 8)) for part in module.c_attn(x).split(32, -1))
    w = module.weights_of(*seen[0][:2], x, seen[0][2])[0]               # (H, T, T)
    for h, i in ((0, 5), (1, 149), (2, 131), (3, 60)):
        place = (lambda x, at: turned(x, at)) if pos in ("rope", "rope+bias") else (lambda x, at: x)
        s = torch.stack([place(q[i, h], i) @ place(k[j, h], j) / math.sqrt(8) + ADDED[pos](module, h, i - j)
                         for j in range(i + 1)])
        torch.testing.assert_close(w[h, i, :i + 1], s.softmax(0), rtol=0, atol=2e-6)        # RoPE's angles are float32


def test_alibi_slopes_of_any_number_of_heads():
    def slopes(heads, **more):
        return layer(pos="alibi", n_head=heads, n_embd=8 * heads, **more).alibi.tolist()
    eight = [2.0 ** -h for h in range(1, 9)]
    assert slopes(8) == eight
    assert slopes(12) == pytest.approx([*eight, *(2.0 ** -(h + 0.5) for h in range(4))])     # 0.7071, 0.3536, ...
    assert slopes(1) == [2.0 ** -8] and slopes(2, attn="diff2") == pytest.approx([2.0 ** -4] * 2 + [2.0 ** -8] * 2)


def test_alibi_learns_its_slopes_if_told_to():
    assert "alibi" in dict(layer(pos="alibi").named_buffers())
    assert "alibi" in dict(layer(pos="alibi", attn_args="learn_alibi=1").named_parameters())


def test_t5_buckets():
    buckets = attention.t5_buckets().tolist()
    assert [buckets[apart] for apart in (0, 1, 15, 16, 31, 64, 127)] == [0, 1, 15, 16, 21, 26, 31]
    assert buckets == [t5_bucket(apart) for apart in range(128)]


def test_t5_and_alibi_are_those_of_transformers():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    apart = torch.arange(300)
    theirs = t5.T5Attention._relative_position_bucket(-apart, bidirectional=False, num_buckets=32, max_distance=128)
    ours = torch.cat([attention.t5_buckets(), torch.full((172,), 31)])
    assert torch.equal(ours, theirs)
    for heads in (8, 12):
        module = layer(pos="alibi", n_head=heads, n_embd=8 * heads, dtype=torch.float32)
        bias = module.distance().bias(1, 20)[:, 0]                      # (H, 20) of the last row
        alibi = bloom.build_alibi_tensor(torch.ones(1, 20), heads, torch.float32).view(heads, 20)
        # theirs counts from the first key: a constant a row, which softmax does not see
        torch.testing.assert_close(bias - bias[:, :1], alibi - alibi[:, :1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pos", [name for name, row in attention.POSITIONS.items() if not row.embeds])
def test_relative_positions_are_translation_invariant(pos):
    """Scores of equal queries and equal keys are the same along each diagonal."""
    module, T = layer(pos=pos, bias_range=20, attn="identity"), 160     # whose weights are the scores
    q, k, _, x = inputs(module, T)
    q, k = q[:, :, :1].expand(-1, -1, T, -1), k[:, :, :1].expand(-1, -1, T, -1)
    if attention.POSITIONS[pos].rotates:
        q, k = module.rotated(q, k, 0)
    w = module.weights_of(q, k, x, module.distance())
    error = 1e-4 if attention.POSITIONS[pos].rotates else 1e-9          # RoPE's angles are float32
    torch.testing.assert_close(w[..., 1:, 1:].tril(), w[..., :-1, :-1].tril(), rtol=0, atol=error)


# ------------------------------------------------------------------------------------------------ windows, first keys

def test_a_streaming_row_scores_first_keys_from_the_end_of_its_cache():
    """StreamingLLM: of a row beyond the window, only the first keys and the window are left, side by side, and RoPE
    counts their places."""
    module = layer("streaming", pos="rope")
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    # what a cache of 4 + 7 would hold at the last row
    kept = torch.cat([x[:, :4], x[:, 30 - 7:]], 1)
    plain = layer("softmax", pos="rope")
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x)[:, -1], plain(kept)[:, -1], rtol=0, atol=1e-5)  # RoPE's angles are float32


def test_a_window_sees_only_its_keys_and_its_cache_keeps_no_more():
    for attn, most in (("window", 6), ("streaming", 10), ("softmax", 30)):
        module, past = layer(attn), {}
        for part in torch.randn(1, 30, 32, dtype=torch.float64).split(3, 1):
            module(part, past)
        assert past["k"].shape[2] == past["v"].shape[2] == most and past["tokens"] == 30


def test_every_second_layer_has_the_window():
    config = tiny_config(attn="gpt_oss", n_layer=4, window=5)
    assert [Attention(config, i).sight.window for i in range(4)] == [5, 0, 5, 0]


def test_lengths_count_what_a_row_sees():
    view = attention.Sight(window=5, first=2)
    i, j = torch.arange(12), torch.arange(12)
    assert torch.equal(attention.visible(i[:, None], j, view).sum(1).float(), attention.visible_count(i, view))


# ----------------------------------------------------------------------------------------- weights, output, causality

@recipes
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_attend_is_the_weights_times_the_values(attn, n_kv_head):
    if ATTENTIONS[attn].get("diff") == "v1" and n_kv_head == 1:
        pytest.skip("v1 pairs heads of keys, too")
    module = layer(attn, n_kv_head=n_kv_head)
    q, k, v, x = inputs(module, 45)
    expected = output_by_formula(module, module.weights_of(q, k, x), v, x)
    assert_close_to(module.attend(q, k, v, x), expected, 1e-12)


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
    assert module.weights_of(q, k, x)[..., -12:].triu(1).abs().max() == 0
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
    torch.testing.assert_close(module.attend(*last, v, x[:, -R:]), module.attend(q, k, v, x)[:, :, -R:], rtol=0,
                               atol=1e-12)
    torch.testing.assert_close(module.weights_of(*last, x[:, -R:]), module.weights_of(q, k, x)[:, :, -R:], rtol=0,
                               atol=1e-12)


@recipes
def test_grouped_heads_equal_repeated_keys_and_values(attn):
    shared, single = layer(attn, n_kv_head=2), layer(attn)
    for own, other in zip(scalars(shared), scalars(single), strict=True):
        repeats = len(other) // len(own) if other.dim() else 1          # of what belongs to heads of keys or values
        other.data.copy_(own.data.repeat_interleave(repeats, 0) if repeats > 1 else own.data)
    q, k, v, x = inputs(shared, 37)
    k_heads = [key_head(shared, h * single.shapes["q"][0] // single.shapes["k"][0])
               for h in range(single.shapes["k"][0])]
    repeated = single.attend(q, k[:, k_heads], v.repeat_interleave(2, 1), x)
    torch.testing.assert_close(shared.attend(q, k, v, x), repeated, rtol=0, atol=1e-10)


# ---------------------------------------------------------------------------------------------- the sink as a gate

BALANCED = [{"attn": "softmax"}, {"attn": "softmax", "pos": "t5"}, {"attn": "softmax", "pos": "alibi", "n_kv_head": 2},
            {"attn": "window"}, {"attn": "ssmax", "qk_norm": "l2"}, {"attn": "sink_token"}, {"attn": "softmax1"},
            {"attn": "sink", "n_kv_head": 2}, {"attn": "kv_bias"}, {"attn": "gated"}, {"attn": "gated_elementwise"},
            {"attn": "elastic", "gate": "head"}]


def importance_of(module, q, k, v, x):
    gates = []
    module.attend(q, k, v, x, module.distance(), importances=gates)
    return gates[0]


@pytest.mark.parametrize("choices", BALANCED, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("T", [21, 3 * BLOCK - 7])
def test_importance_is_what_the_sink_leaves_and_so_is_its_gradient(choices, T):
    """Against the whole matrix of weights, (B, H, T, T), for the gradients of everything; also of blocks computed
    again."""
    module = layer(**choices, kernel="torch")
    q, k, v, x = (a.requires_grad_() for a in inputs(module, T))
    found = importance_of(module, q, k, v, x)
    if module.config.gate != "none":
        opened = torch.sigmoid(module.gate(x)).unflatten(-1, (4, -1)).mean((0, 1, 3))
    else:
        opened = 1 - module.weights_of(q, k, x, module.distance())[..., 0].mean((0, 2))
    torch.testing.assert_close(found, opened, rtol=0, atol=1e-12)
    above = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaves = [q, k, x, *scalars(module)]
    gradients = [torch.autograd.grad(value, leaves, above, allow_unused=True, retain_graph=True)
                 for value in (found, opened)]
    for mine, theirs in zip(*gradients, strict=True):
        zero = torch.zeros(1, dtype=torch.float64)
        torch.testing.assert_close(zero if mine is None else mine, zero.expand_as(mine) if theirs is None and mine
                                   is not None else zero if theirs is None else theirs, rtol=0, atol=1e-12)


def test_a_first_key_out_of_sight_has_no_weight_however_large_its_score():
    module = layer("window", window=4, kernel="torch")
    q, k, v, x = inputs(module, 30)
    k[:, :, 0] = 500 * q[:, :, 29, :]           # the last row would give it all
    assert torch.equal(importance_of(module, q, k, v, x).isfinite(), torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("attn", ["softmax", "sink"])
def test_importance_comes_from_the_kernels_log_sum_exp(attn):
    """Through Triton (its interpreter, without a GPU), with gradients, at no cost of T x T."""
    if not attention.kernels.AVAILABLE:
        pytest.skip("no triton here")
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for kernel in ("triton", "torch"):
        module = layer(attn, torch.float32, kernel=kernel).to(device)
        q, k, v, x = (a.to(device).requires_grad_() for a in inputs(module, 45, dtype=torch.float32))
        importance = importance_of(module, q, k, v, x)
        found.append([importance, *torch.autograd.grad(importance.square().sum(), [q, k])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * torch.finfo(torch.float32).eps * b.abs().max().item())


def test_a_sink_is_a_gate():
    """The Attention Sink as Native MoE, eq. 4: vanilla attention whose first token has the value 0, sink attention over
    the other tokens, and a gate on softmax over them give the same output, if the gates match."""
    vanilla, sink, plain = layer(), layer("sink"), layer()
    q, k, v, x = inputs(vanilla, 30)
    v[:, :, 0] = 0
    expected = vanilla.attend(q, k, v, x)[:, :, 1:]
    weight = vanilla.weights_of(q, k, x)[:, :, 1:, :1]                  # of the first token, (B, H, T - 1, 1)
    rest = q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], x[:, 1:]
    torch.testing.assert_close((1 - weight) * plain.attend(*rest), expected, rtol=0, atol=1e-12)
    # a sink logit is the same for every row: rows whose score for the first key is that logit
    s = plain.sight.scale * (q * k[:, :, :1]).sum(-1)[:, :, 1:]         # (B, H, T - 1)
    for row in (0, 7, 28):
        sink.sink_logit.data = s[0, :, row].clone()
        torch.testing.assert_close(sink.attend(*rest)[0, :, row], expected[0, :, row], rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- the block loop

@recipes
@pytest.mark.parametrize("T", [1, 45, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 17])
def test_blocks_equal_one_dense_block(attn, T, monkeypatch):
    module = layer(attn, kernel="torch")
    qkvx = inputs(module, T)
    by_blocks = attend_and_gradients(module, *qkvx)
    monkeypatch.setattr(attention, "BLOCK", 1 << 20)
    assert_all_close(by_blocks, attend_and_gradients(module, *qkvx), rtol=1e-10, atol=1e-10)


@recipes
@pytest.mark.parametrize("n_kv_head", [4, pytest.param(2, marks=exhaustive)])
def test_gradients_equal_finite_differences(attn, n_kv_head):
    module = layer(attn, n_kv_head=n_kv_head, n_embd=12)
    qkvx = [a[:1].requires_grad_() for a in inputs(module, 7)]
    assert torch.autograd.gradcheck(lambda q, k, v, x, *_: module.attend(q, k, v, x), (*qkvx, *scalars(module)))


@recipes
def test_recomputed_blocks_draw_the_same_dropout(attn, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"             # each has a generator of its own
    module = layer(attn, kernel="torch", dropout=0.3).train().to(device)
    qkvx = [a.to(device) for a in inputs(module, 3 * BLOCK)]
    torch.manual_seed(5)
    recomputed = attend_and_gradients(module, *qkvx)
    monkeypatch.setattr(attention.Recomputed, "apply", attention.run_blocks)  # that keep their blocks
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


# ------------------------------------------------------------------------------------------------------- number types

@recipes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_number_type_comes_back_and_is_accurate(attn, dtype):
    module = layer(attn, dtype=torch.float32)
    q, k, v, x = inputs(module, 40, dtype=dtype)
    x = x.float()                                                       # the layer's input has the layer's own type
    o = module.attend(q, k, v, x)
    assert o.dtype == dtype
    # How far off may it be? As far as a few roundings of what goes in take the exact result: where signed weights
    # cancel, and by powers and norms, that is more than a few roundings of what comes out.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)   # the scalars are float32 all along
    given = [a.double() for a in (q, k, v, x)]
    exact = module.double().attend(*given)
    noise = torch.Generator().manual_seed(0)
    rounded = [a * (1 + eps * (2 * torch.rand(a.shape, generator=noise, dtype=a.dtype) - 1)) for a in given]
    moved = (module.attend(*rounded) - exact).abs().max().item()
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=8 * max(eps * exact.abs().max().item(), moved))


@recipes
def test_autocast_is_close_to_float32(attn):
    torch.manual_seed(0)                        # the same weights whatever ran before
    module = layer(attn, dtype=torch.float32, pos="rope")
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = module(x)
    full = module(x)
    rms = (low.float() - full).square().mean().sqrt() / full.square().mean().sqrt()
    assert rms < 8 * module.args.get("power", 1) * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("n_kv_head, T, R", [(4, 45, 45), (2, 45, 45), (1, 150, 150), (4, 45, 7), (2, 45, 1),
                                             (4, 1, 1)])
def test_sdpa_equals_the_block_loop(n_kv_head, T, R):
    sdpa, loop = (layer("softmax", kernel=kernel, n_kv_head=n_kv_head) for kernel in ("sdpa", "torch"))
    qkvx = inputs(sdpa, T, R)
    assert_all_close(attend_and_gradients(sdpa, *qkvx), attend_and_gradients(loop, *qkvx), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------- arguments and kernels

@pytest.mark.parametrize("attn, args, says", [
    ("softmax", "tau_init=1", "tau_init"), ("elastic", "speed=3", "per_length"),
    ("elastic", "tau_init=much", "tau_init"),
    ("elastic", "tau_init", "tau_init"), ("elastic", "learn_tau=maybe", "1 or 0"),
    ("elastic", "per_length=row", "block")])
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


# one recipe for each way in which the layer calls a kernel: plain, with the statistic, twice as wide, half as many
# heads, with a table, a threshold in row sums, two views in one pass, a row sum to divide by, features
CALLS = ("softmax", "kv_bias", "streaming", "diff", "lazy", "lssar", "tda", "sigmoid_norm", "linear")


# and one for each of the parts that a relative position code is made of
LAYERS = [pytest.param({"attn": a}, id=a, marks=() if a in CALLS else exhaustive) for a in ATTENTIONS] + [
    pytest.param({"attn": attn, "pos": pos, "attn_args": more}, id=f"{attn}-{pos}", marks=marks)
    for attn, pos, more, marks in (("elastic", "alibi", "learn_alibi=1", ()), ("softmax", "t5", "", exhaustive))]


@pytest.mark.parametrize("choices", LAYERS)
def test_the_kernel_equals_the_block_loop_in_output_and_all_gradients(choices):
    """The whole layer through Triton (its interpreter, without a GPU) against PyTorch, scalars and tables included."""
    attn = choices["attn"]
    if not attention.kernels.AVAILABLE:
        pytest.skip("no triton here")
    if ATTENTIONS[attn]["rule"] not in attention.kernels.RULES:
        pytest.skip("this rule has no Triton form yet")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choices = {"dtype": torch.float32, "n_kv_head": 2, "bias_range": 20} | choices
    T = 140 if choices.get("pos") == "t5" else 45                       # beyond its table
    found, weights = [], layer(**choices).state_dict()
    for kernel in ("triton", "torch"):
        module = layer(kernel=kernel, **choices)
        module.load_state_dict(weights)
        module.to(device)
        q, k, v, x = (a.to(device).requires_grad_() for a in inputs(module, T, dtype=torch.float32))
        o = module.attend(q, k, v, x, module.distance())
        above = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(device)
        found.append([o, *torch.autograd.grad(o, [q, k, v, *scalars(module)], above)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * torch.finfo(torch.float32).eps * b.abs().max().item())


def test_two_views_too_wide_for_one_tile_take_two_calls(monkeypatch):
    """Their difference and all gradients are the same."""
    if not attention.kernels.AVAILABLE:
        pytest.skip("no triton here")
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    module = layer("tda", torch.float32, kernel="triton").to(device)
    for fit in (True, False):
        monkeypatch.setattr(attention.kernels, "holds_two_views", lambda q, v, fit=fit: fit)
        q, k, v, x = (a.to(device).requires_grad_() for a in inputs(module, 20, dtype=torch.float32))
        o = module.attend(q, k, v, x)
        found.append([o, *torch.autograd.grad(o.square().sum(), [q, k, v, *scalars(module)])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * torch.finfo(torch.float32).eps * b.abs().max().item())
