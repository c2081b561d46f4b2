"""attention.py: every rule and recipe against its formula, equalities between recipes, numerical traps, positions,
windows, importance, dropout and the choice of kernels. test_contract.py tests what holds for every recipe."""
import math

import bounds
import pytest
import torch
from bounds import below, close, same
from conftest import DEVICE, needs_triton, tiny_config
from layers import attend_and_gradients, fresh, inputs, layer, normal, scalars
from test_contract import COMBINED, output_by_hand
from torch.nn import functional as F

import attention
import kernels
from attention import Attention, choose_kernel
from axes import positions
from axes.positions import Distance
from axes.sight import Sight, visible, visible_count
from model import GPT

pytestmark = pytest.mark.usefixtures("small_blocks")
# the recipes of this mixer; other mixers have test files of their own
ATTENTIONS = {name: axes for name, axes in attention.ATTENTIONS.items() if "mixer" not in axes}


# ----------------------------------------------------------------------------------------------------------- formulas
# These formulas share no code with attention.py. They compute one row of one head at a time, in float64. First come the
# scores of a query q (D,) and the keys k (., D) that it sees. n is the number of these keys, without an extra key.


def scores_plain(q, k, n, module, head):
    return k @ q / len(q) ** 0.5


def scores_ssmax(q, k, n, module, head):
    """Nakanishi: sigma_h log(n) times the usual score."""
    return module.sigma[head] * math.log(n) * scores_plain(q, k, n, module, head)


def scores_asentmax(q, k, n, module, head):
    """delta + beta log(n + 1)^gamma with delta 1 (the released code counts rows from 0 and writes log(i + 2))."""
    factor = 1 + module.scale_beta[head] * math.log(n + 1) ** module.scale_gamma[head]
    return factor * scores_plain(q, k, n, module, head)


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def scores_cosine(q, k, n, module, head):
    return unit(k) @ unit(q)


def scores_lssar(q, k, n, module, head):
    """Cosines times log(d) log(n)."""
    return math.log(len(q)) * math.log(n) * scores_cosine(q, k, n, module, head)


def elu_plus_one(x, module=None):
    return torch.where(x > 0, x + 1, x.exp())


def two_layers(x, module):
    return (x @ module.feature[0].weight.T).clamp(min=0) @ module.feature[2].weight.T


def featured(feature):
    """The usual scores, of the features of q and k."""
    return lambda q, k, n, module, head: scores_plain(feature(q, module), feature(k, module), n, module, head)


def scores_by_axes(q, k, n, module, head):
    """Scores of any combination of axes. The projections have already applied the norms "head" and "all"."""
    c = module.config
    norm = {"l2": unit, "rms": lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()}.get(c.qk_norm)
    feature = {"elu": elu_plus_one, "mlp": two_layers}.get(c.feature)
    q, k = (norm(x) if norm else x for x in (q, k))
    q, k = (feature(x, module) if feature else x for x in (q, k))
    scores = {"log_n": scores_ssmax, "asentmax": scores_asentmax}.get(c.scale, scores_plain)
    return scores(q, k, n, module, head) * (len(q) ** 0.5 if c.scale == "one" else 1)


# Then the weights of a row from its scores. If there is an extra key, its score and its weight come first.


def softmax_row(s, module, head):
    e = (s - s.max()).exp()
    return e / e.sum()


def elastic_row(s, module, head):
    """Lazy Attention, eq. 5: relu(softmax(s) - tau_h / n), with the offsets of its table 2."""
    divisor = {"True": len(s), "False": 1, "block": module.config.block_size}[str(module.args["per_length"])]
    return (softmax_row(s, module, head) - module.tau[head] / divisor).clamp(min=0)


def entmax_row(s, module, head):
    """relu((alpha - 1) s - tau)^(1 / (alpha - 1)), tau by bisection."""
    alpha = 1 + torch.sigmoid(module.theta[head]).item() if hasattr(module, "theta") else \
        2.0 if module.config.rule == "sparsemax" else module.args["alpha"]
    z = (alpha - 1) * s
    low, high = z.max() - 1, z.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (z - middle).clamp(min=0).pow(1 / (alpha - 1)).sum() > 1 else (low, middle)
    return (z - low).clamp(min=0).pow(1 / (alpha - 1))


def lssar_row(s, module, head):
    """softplus, l1 norm, relu(n a - 1) (relu(n a) in the first three rows), power 15, l1 norm."""
    phi = torch.logaddexp(s, torch.zeros_like(s))
    x = (len(s) * phi / phi.sum() - (1 if len(s) > 3 else 0)).clamp(min=0) ** module.args["power"]
    return x / max(x.sum(), 1e-300)             # a uniform row has no survivor


def softpick_row(s, module, head):
    # the paper adds eps to sums of exp(s - max), so here it is multiplied by exp(max)
    e, eps = s.exp() - 1, 1e-8 * s.max().clamp(min=0).exp()
    return e.clamp(min=0) / (e.abs().sum() + eps)


def tra_row(s, module, head):
    """tau = beta sqrt(2 log(n / kappa) / d)."""
    tau = module.beta[head] * math.sqrt(2 * max(0, math.log(len(s) / module.args["kappa"])) / module.width)
    return (s - tau).clamp(min=0) ** module.args["power"]


def sigmoid_row(s, module, head):
    """Apple's bias is -log of the training length. When Attention Sink Emerges has no bias."""
    return 1 / (1 + (-s).exp() * (module.config.block_size if module.args["length_bias"] else 1))


def each(function):
    """Each weight depends on its own score only."""
    return lambda s, module, head: function(s)


def normalized(w, how):
    """none, sum, max1: When Attention Sink Emerges, table 6. length: Wortsman et al."""
    return w / {"none": 1.0, "sum": w.sum() + 1e-8, "length": len(w), "max1": max(w.sum().abs(), 1.0)}[how]


# recipes, the formula of their scores, and the formula of a row of weights
FORMULAS = {attn: forms for names, *forms in (
    ("softmax softmax1 sink gpt_oss k_bias kv_bias sink_token v_bias", scores_plain, softmax_row),
    ("gated gated_elementwise window streaming diff diff2 dex", scores_plain, softmax_row),
    ("ssmax", scores_ssmax, softmax_row),
    ("elastic lazy", scores_plain, elastic_row),
    ("entmax sparsemax", scores_plain, entmax_row),
    ("asentmax", scores_asentmax, entmax_row),
    ("lssar", scores_lssar, lssar_row),
    ("softpick", scores_plain, softpick_row),
    ("relu rela rela_gated diff_rela", scores_plain, each(F.relu)),
    ("tra tda", scores_cosine, tra_row),
    ("sigmoid sigmoid_raw sigmoid_norm", scores_plain, sigmoid_row),
    ("elu elu_norm", scores_plain, each(elu_plus_one)),
    ("linear linear_raw", featured(elu_plus_one), each(lambda s: s)),
    ("identity identity_norm", scores_plain, each(lambda s: s)),
    ("mlp mlp_norm", featured(two_layers), each(lambda s: s)),
) for attn in names.split()}
ROWS = {ATTENTIONS[attn]["rule"]: row for attn, (_, row) in FORMULAS.items()}           # {rule: formula of a row}


def key_head(module, h):
    """The key head of score head h. If each view has its own keys, it is view h % 2 of a pair of key heads."""
    heads, key_heads = module.shapes["q"][0], module.shapes["k"][0]
    if module.config.diff in ("subtract", "v1"):
        return h // 2 * 2 * key_heads // heads // 2 * 2 + h % 2 if heads > key_heads else h
    return h * key_heads // heads


@torch.no_grad()
def views_by_formula(module, q, k, table, scores, row):
    """Weights (B, score heads, R, T or 1 + T), computed row by row."""
    (B, H, R, _), T, views = q.shape, k.shape[2], module.score_heads // module.heads
    table = F.pad(q.new_zeros(H, 0) if table is None else table, (0, T))                # 0 at all other distances
    c, sink = module.config, module.config.sink.replace("token", "none")                # a token is an ordinary key
    w = q.new_zeros(B, H, R, (sink != "none") + T)
    for b, h, r in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(R)).tolist():
        i = T - R + r                           # window and first keys by their definition
        seen = [j for j in range(i + 1) if not c.window or i - j < c.window or j < c.first]
        s = scores(q[b, h, r], k[b, key_head(module, h), seen], len(seen), module, h)
        s = s + table[h, [i - j for j in seen]]
        if sink in ("one", "logit"):            # one more score in the denominator
            s = torch.cat([module.sink_logit[h, None] if sink == "logit" else s.new_zeros(1), s])
        elif sink != "none":                    # the score of a learned key, as of any other
            own = module.sink_key[key_head(module, h)][None]
            s = torch.cat([scores(q[b, h, r], own, len(seen), module, h), s])
        places = ([] if sink == "none" else [0]) + [j - T for j in seen]
        w[b, h, r, places] = normalized(row(s, module, h // views), c.normalize)
    return w


def lambda_by_formula(module, x):
    """The factor of a differential recipe's second view, (B or 1, H or 1, R or 1, 1)."""
    if module.config.diff == "subtract":
        return 1 / (1 + (-module.lambda_logit).exp())[:, None, None]
    if module.config.diff == "v2":
        return 1 / (1 + (-(x @ module.lambda_proj.weight.T)).exp()).transpose(1, 2)[..., None]
    up, down = (a @ b for a, b in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)))
    return up.exp() - down.exp() + 0.8 - 0.6                            # of layer 0: 0.8 - 0.6 e^0


ARGUMENTS = [("elastic", "tau_init=0"), ("elastic", "tau_init=0,per_length=0"), ("elastic", "per_length=block"),
             ("elastic", "learn_tau=0"), ("entmax", "alpha=learned"), ("entmax", "alpha=1.2"), ("entmax", "alpha=2"),
             ("tra", "power=1"), ("tra", "power=3"), ("tra", "power=5"), ("tra", "kappa=4,beta_init=0.5"),
             ("tda", "learn_beta=0"), ("ssmax", "sigma_init=0.4,learn_sigma=0"), ("lssar", "power=1")]
CASES = [{"attn": attn} for attn in ATTENTIONS] + [{"attn": attn, "attn_args": args} for attn, args in ARGUMENTS] + [
    choices for choices in COMBINED if choices["attn"] in ATTENTIONS]


@pytest.mark.parametrize("choices", CASES, ids=lambda choices: "-".join(map(str, choices.values())))
@pytest.mark.parametrize("T, R, n_kv_head, W", [(1, 1, 4, 0), (13, 13, 2, 0), (20, 3, 1, 5), (20, 18, 4, 30)])
def test_weights_and_output_equal_the_formula(choices, T, R, n_kv_head, W):
    """Published recipes have their own formulas; combinations use those of their axes. W: width of a distance table."""
    if "v1" in (choices.get("diff"), ATTENTIONS[choices["attn"]].get("diff")):
        n_kv_head = max(2, n_kv_head)           # v1 pairs key heads
    module = layer(**{"n_kv_head": n_kv_head} | choices)
    q, k, v, x = inputs(module, T, R)
    scores, row = (scores_by_axes, ROWS[module.config.rule]) if choices in COMBINED else FORMULAS[choices["attn"]]
    table = normal(module.score_heads, W, stream=5) if W else None
    expected = views_by_formula(module, q, k, table, scores, row)
    # the constant sqrt(d) log(d) of recipe lssar is kept in float32
    rounding = {"dtype": torch.float32} if scores == scores_lssar else {}
    if module.config.diff != "none":
        expected = expected[:, 0::2], expected[:, 1::2]
        close(module.views_of(q, k, x, table), expected, **rounding)
        expected = expected[0] - lambda_by_formula(module, x) * expected[1]
    size = max(1.0, expected.abs().max().item())
    close(module.weights_of(q, k, x, table), expected, size=size, **rounding)
    close(module.attend(q, k, v, x, table), output_by_hand(module, expected, v, x), size=T * size, **rounding)


# recipe: {parameter: initial value}, for four heads of width 8 at block_size 1024
INITIAL = {
    "ssmax": {"sigma": 1024 / math.lgamma(1025)},                       # 1 / mean(log n)
    "sink": {"sink_logit": 0.0}, "elastic": {"tau": 1.0}, "tra": {"beta": 1.0, "out_norm.weight": 1.0},
    "tda": {"beta": 1.0, "lambda_logit": 0.0}, "asentmax": {"scale_beta": [0.1, 0.4, 0.7, 1.0], "scale_gamma": 0.0},
    "dex": {"dex_lambda": 0.0, "dex_proj.weight": 0.0, "progress": 0.0}, "lazy": {"table": 0.0},
    "rela": {"out_norm.weight": 1.0}, "lssar": {"sigma": 8 ** 0.5 * math.log(8)}}
SPREAD = {                                      # recipe: {parameter: standard deviation}, for heads of width 512
    "kv_bias": {"sink_key": 0.02, "sink_value": 0.02}, "v_bias": {"value_bias": 0.02},
    "rela_gated": {"norm_gate": 0.02},
    "mlp": {"feature.0.weight": (2 / (5 * 512)) ** 0.5, "feature.2.weight": (2 / (5 * 512)) ** 0.5},
    "diff": {name: 0.1 for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}}


@pytest.mark.parametrize("attn", INITIAL)
def test_initial_values_of_parameters(attn):
    state = fresh(attn, block_size=1024).float().state_dict()
    for name, value in INITIAL[attn].items():
        close(state[name], torch.as_tensor(value).expand_as(state[name]))


@pytest.mark.parametrize("attn", SPREAD)
def test_initial_draws_have_their_mean_and_spread_within_eight_standard_errors(attn):
    gpt = GPT(tiny_config(attn=attn, n_head=2, n_embd=1024), seed=bounds.SEED)
    for name, std in SPREAD[attn].items():
        drawn = gpt.state_dict()[f"transformer.h.0.attn.{name}"]
        below(abs(drawn.std().item() / std - 1), 8 / math.sqrt(2 * drawn.numel()))
        below(abs(drawn.mean().item()), 8 * std / math.sqrt(drawn.numel()))


@pytest.mark.parametrize("choices, name, learns", [
    ({"attn": "elastic"}, "tau", True), ({"attn": "elastic", "attn_args": "learn_tau=0"}, "tau", False),
    ({"attn": "tda", "attn_args": "learn_beta=0"}, "beta", False), ({"attn": "lssar"}, "sigma", False),
    ({"pos": "alibi"}, "alibi", False), ({"pos": "alibi", "attn_args": "learn_alibi=1"}, "alibi", True)])
def test_attn_args_decide_whether_a_scalar_learns(choices, name, learns):
    module = layer(**choices)
    assert (name in dict(module.named_parameters())) == learns and name in module.state_dict()


# -------------------------------------------------------------------------------------------- equalities, extra keys

EQUAL = {                                       # (recipe, choices), (recipe, choices), the factor between their weights
    "elastic at tau 0 is softmax": (("elastic", {"attn_args": "tau_init=0"}), ("softmax", {}), 1),
    "entmax at alpha 2 is sparsemax": (("entmax", {"attn_args": "alpha=2"}), ("sparsemax", {}), 1),
    "learned alpha starts at 1.5": (("entmax", {"attn_args": "alpha=learned"}), ("entmax", {}), 1),
    "a window over everything is softmax": (("window", {"window": 100}), ("softmax", {}), 1),
    "gpt_oss in a layer without a window is a sink": (("gpt_oss", {"window": 100}), ("sink", {}), 1),
    "a sink of logit 0 is softmax1": (("sink", {}), ("softmax1", {}), 1),
    "TRA with beta 0 and power 1 is ReLA": (("tra", {"attn_args": "beta_init=0,power=1"}),
                                            ("rela", {"qk_norm": "l2", "scale": "one"}), 1),
    "without unit vectors it is ReLA times sqrt(d)": (
        ("tra", {"qk_norm": "none", "attn_args": "beta_init=0,power=1"}), ("rela", {}), 8 ** 0.5),
    "linear attention's numerator": (("linear_raw", {}), ("identity", {"feature": "elu"}), 1),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equalities_between_recipes(name):
    (one, choices), (other, others), factor = EQUAL[name]
    one, other = fresh(one, **choices), fresh(other, **others)
    q, k, _, x = inputs(one, 21)
    close(one.weights_of(q, k, x), factor * other.weights_of(q, k, x))


def test_a_very_low_sink_logit_gives_softmax_and_a_very_high_one_gives_zero():
    module, plain = layer("sink"), layer("softmax")
    q, k, v, x = inputs(module, 11)
    module.sink_logit.data.fill_(-1e4)
    close(module.attend(q, k, v, x), plain.attend(q, k, v, x))
    module.sink_logit.data.fill_(1e4)
    assert module.attend(q, k, v, x).abs().max() == 0 and (module.weights_of(q, k, x)[..., 0] == 1).all()


def test_hiding_the_first_key_of_softmax_equals_removing_it():
    module = layer("softmax")
    q, k, _, x = inputs(module, 9)
    w = module.weights_of(q, k, x, sight=module.sight._replace(hidden=0))
    close(w[:, :, 1:, 1:], module.weights_of(q[:, :, 1:], k[:, :, 1:], x[:, 1:]))
    assert (w[:, :, 0, 0] == 1).all()


@pytest.mark.parametrize("attn, option", [("softmax1", "add_zero_attn"), ("kv_bias", "add_bias_kv")])
def test_extra_keys_equal_those_of_torch_nn(attn, option):
    """softmax1 and the KV bias against torch.nn.MultiheadAttention."""
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
    close(module.attend(q, k, v, x).transpose(1, 2).flatten(2), expected)
    close(module.weights_of(q, k, x), w.roll(1, -1))                    # their extra key comes last


@pytest.mark.parametrize("norm, even, expected", [
    (5, 0, [5.0] + [0.0] * 7), (5, 1, [5 / 8 ** 0.5] * 8), (0, 0, [0.0] * 8)])
def test_a_fixed_value_of_the_extra_key_lies_along_the_first_axis_or_along_all(norm, even, expected):
    """When Attention Sink Emerges, table 5. With norm 0 the recipe is the K bias."""
    module = fresh("kv_bias", attn_args=f"value_norm={norm},value_even={even}")
    assert "sink_value" not in dict(module.named_parameters())
    close(module.sink_value, torch.tensor([expected] * 4), dtype=torch.float32)


@pytest.mark.parametrize("attn, names", [("k_bias", ["sink_key"]), ("kv_bias", ["sink_key", "sink_value"]),
                                         ("v_bias", ["value_bias"])])
@pytest.mark.parametrize("shared, dims", [(1, "all"), (0, 3), (1, 2)])
def test_biases_shared_by_heads_or_limited_to_few_channels(attn, names, shared, dims):
    """When Attention Sink Emerges, tables 12 and 13. A full bias, padded with zeros, gives the same."""
    small = layer(attn, attn_args=f"bias_shared={shared},bias_dims={dims}", n_kv_head=2)
    full = layer(attn, n_kv_head=2)
    full.load_state_dict(small.state_dict() | {name: getattr(full, name) for name in names})
    for name in names:
        bias, whole = getattr(small, name), getattr(full, name)
        assert bias.shape == (1 if shared else whole.shape[0], whole.shape[1] if dims == "all" else dims)
        whole.data.zero_()
        whole.data[:, :bias.shape[1]] = bias.data
    close(*(attend_and_gradients(module, *inputs(module, 21))[:5] for module in (small, full)))


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
@pytest.mark.parametrize("T", [21, 45])
def test_importance_and_its_gradient_equal_their_definition(choices, T):
    """Importance is the gate's mean, or 1 minus the sink's mean weight. 45 rows are three blocks, computed again."""
    module = layer(**choices, kernel="torch")
    q, k, v, x = (a.requires_grad_() for a in inputs(module, T))
    if module.config.gate != "none":
        opened = torch.sigmoid(module.gate(x)).unflatten(-1, (4, -1)).mean((0, 1, 3))
    else:
        opened = 1 - module.weights_of(q, k, x, module.distance())[..., 0].mean((0, 2))
    leaves, above = [q, k, x, *scalars(module)], normal(4, stream=9)
    found, expected = ([value, *torch.autograd.grad(value, leaves, above, materialize_grads=True)]
                       for value in (importance_of(module, q, k, v, x), opened))
    close(found, expected, terms=T, size=1.0)


def test_a_first_key_out_of_sight_has_no_weight_however_large_its_score():
    module = layer("window", window=4, kernel="torch")
    q, k, v, x = inputs(module, 30)
    k[:, :, 0] = 500 * q[:, :, 29, :]           # the last row would give it all its weight
    assert importance_of(module, q, k, v, x).isfinite().all()


@needs_triton
@pytest.mark.parametrize("attn", ["softmax", "sink"])
def test_importance_comes_from_the_kernels_log_sum_exp(attn):
    """Importance and its gradients from Triton equal those of the block loop."""
    found = []
    for kernel in ("triton", "torch"):
        module = layer(attn, torch.float32, kernel=kernel).to(DEVICE)
        q, k, v, x = (a.to(DEVICE).requires_grad_() for a in inputs(module, 45, B=1, dtype=torch.float32))
        importance = importance_of(module, q, k, v, x)
        found.append([importance, *torch.autograd.grad(importance.square().sum(), [q, k])])
    close(*found)


@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
def test_importance_under_autocast_agrees_with_the_weights_and_lies_between_0_and_1(size):
    """Most rows give nearly all their weight to the first key. So their log-sum-exp is close to its score, which is
    about 7, 70 or 700, and bfloat16 rounds scores to 8 bits."""
    module = layer(dtype=torch.float32, kernel="torch")
    q, k, v, x = inputs(module, 40, dtype=torch.float32)
    q = size * (q + 8 * k[:, :, :1])
    with torch.autocast("cpu", torch.bfloat16):
        found = importance_of(module, q, k, v, x)
        w = module.weights_of(q, k, x)[..., 0]
    largest = (q @ k.mT).abs().max().item() * module.sight.scale        # the largest argument of exp
    close(found, 1 - w.mean((0, 2)), terms=4, size=largest)
    assert 0 <= found.min() and found.max() <= 1


@pytest.mark.parametrize("large", [0, 255])
def test_gradients_of_a_long_sequence_add_up_in_float32(large):
    """Every row gives its weight to the first key, so the gradient of its value is the sum of dy. One of 256 blocks
    adds 512, each other block 0.25. In bfloat16 512 + 0.25 is 512. large: the block that adds 512."""
    module, T = layer(dtype=torch.float32, kernel="torch"), 256 * kernels.BLOCK
    q, k, v, x = inputs(module, T, B=1, dtype=torch.float32)
    v.requires_grad_()
    dy = torch.full((256, kernels.BLOCK), 0.25 / kernels.BLOCK)
    dy[large] = 512 / kernels.BLOCK
    with torch.autocast("cpu", torch.bfloat16):
        k = 9 * (torch.arange(T) == 0)[:, None] + 0 * k
        y = module.attend(0 * q + 9, k, v.bfloat16(), x)                # the dtype of projections under autocast
    y.backward(dy.view(-1, 1).expand(y.shape).to(y.dtype))
    close(v.grad[:, :, 0], torch.full_like(v.grad[:, :, 0], 512 + 255 / 4), terms=1, dtype=torch.bfloat16)


def test_a_sink_equals_a_gate_on_softmax():
    """Attention Sink as Native MoE, eq. 4. Softmax with a first value of 0, a sink logit over the other tokens, and a
    gate on softmax over the other tokens give the same output if the gates match."""
    vanilla, sink, plain = layer(), layer("sink"), layer()
    q, k, v, x = inputs(vanilla, 30)
    v[:, :, 0] = 0
    expected = vanilla.attend(q, k, v, x)[:, :, 1:]
    weight = vanilla.weights_of(q, k, x)[:, :, 1:, :1]                  # weight of the first token, (B, H, T - 1, 1)
    rest = q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], x[:, 1:]
    close((1 - weight) * plain.attend(*rest), expected)
    # a sink logit is one number for all rows. Set it to one row's score of the first key, and compare that row
    s = plain.sight.scale * (q * k[:, :, :1]).sum(-1)[:, :, 1:]         # (B, H, T - 1)
    for row in (0, 7, 28):
        sink.sink_logit.data = s[0, :, row].clone()
        close(sink.attend(*rest)[0, :, row], expected[0, :, row])


# ---------------------------------------------------------------------------------------------------- numerical traps


def assert_finite(found):
    assert all(a is None or a.isfinite().all() for a in found)


@pytest.mark.parametrize("attn", ["relu", "rela", "tra", "tda", "diff_rela", "softpick"])
def test_rows_without_a_surviving_key_have_zero_output_and_gradients(attn):
    module = layer(attn, dtype=torch.float32)
    q, k, v, x = inputs(module, 9, dtype=torch.float32)
    found = attend_and_gradients(module, torch.full_like(q, 10.0), torch.full_like(k, -5.0), v, x)
    assert all(a is None or a.abs().max() == 0 for a in found)


@pytest.mark.parametrize("alpha", ["1.05", "1.2", "1.5", "2", "learned"])
def test_entmax_sums_to_one_in_long_uniform_and_tied_rows(alpha):
    module = layer("entmax", dtype=torch.float32, attn_args=f"alpha={alpha}")
    s = normal(1, 4, 5, 3000, dtype=torch.float32)
    s[:, :, 0], s[:, :, 1], s[:, :, 2, :7], s[:, :, 3] = 0.0, 1e4, 9.0, 1e3 * s[:, :, 3]
    t = module.rule.row_input(module, torch.ones(5))
    w = module.rule.weights(s, torch.ones(5, 3000, dtype=torch.bool), t)
    close(w.sum(-1), torch.ones(1, 4, 5), terms=3000)
    assert (w[:, :, :2] > 0).all()
    tied = w[:, :, 2, :7]
    close(tied, tied[..., :1].expand_as(tied), terms=4)
    if alpha != "1.05":
        below((w[:, :, 3] > 0).float().mean(), 0.1)


@pytest.mark.parametrize("theta", [-100.0, -5.0, 0.0, 20.0])
def test_a_learned_alpha_stays_between_softmax_and_sparsemax(theta):
    module = layer("entmax", dtype=torch.float32, attn_args="alpha=learned")
    module.theta.data.fill_(theta)
    q, k, v, x = inputs(module, 30, dtype=torch.float32)
    assert_finite(attend_and_gradients(module, q, k, v, x))
    close(module.weights_of(q, k, x).sum(-1), torch.ones(2, 4, 30), terms=300)          # the power is up to 100


def test_lssar_stays_finite_beyond_a_thousand_keys():
    """With a = 1 and n = 1500, (n a - 1)^15 is about 1500^15, which overflows float32."""
    module = layer("lssar", dtype=torch.float32, block_size=2000)
    q, k, v, x = inputs(module, 1500, 1, dtype=torch.float32)
    k[:, :, 700] = q[:, :, 0]
    assert_finite(attend_and_gradients(module, q, k, v, x))
    w = module.weights_of(q, k, x)
    close(w.sum(-1), torch.ones_like(w[..., 0]), terms=1500)
    below(100 / 1500, w[..., 700])              # a hundred times the uniform weight


def test_lssar_gives_zero_for_uniform_rows_whatever_the_rounding():
    """Rounding errors must not be raised to the 15th power and normalised. Only the first three rows keep weights."""
    module = layer("lssar", dtype=torch.float32, block_size=2000)
    q, k, v, x = inputs(module, 600, dtype=torch.float32)
    w = module.weights_of(q, torch.ones_like(k), x)
    assert w[:, :, 3:].abs().max() == 0
    close(w[:, :, :3].sum(-1), torch.ones(2, 4, 3))


def test_lssar_without_unit_vectors_stays_finite_for_very_negative_scores():
    module = layer("softmax", rule="lssar", dtype=torch.float32)
    q, k, v, x = inputs(module, 9, dtype=torch.float32)
    assert_finite(attend_and_gradients(module, 10 * torch.ones_like(q), -5 * torch.ones_like(k), v, x))


# ----------------------------------------------------------------------------------------------------------- positions


def turned(x, places):
    """RoPE of vectors x (T, D) with complex numbers: pair c is (x_c, x_{c + D/2})."""
    half = x.shape[-1] // 2
    angle = places[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    pair = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angle)
    return torch.cat([pair.real, pair.imag], -1)


def t5_bucket(apart):
    """T5's bucket of a distance: itself below 16; from there on, bucket 16 + k ends at 16 * 8^((k + 1) / 16)."""
    return apart if apart < 16 else min(31, 16 + sum(apart >= 16 * 8 ** ((k + 1) / 16) for k in range(16)))


# the term that each position code adds to the score of head h at a distance
ADDED = {
    "none": lambda module, h, apart: 0.0,
    "alibi": lambda module, h, apart: -(2.0 ** (-2 * (h + 1))) * apart,                 # of 4 heads
    "t5": lambda module, h, apart: module.t5[h, t5_bucket(apart)].item(),
    "t5_index": lambda module, h, apart: float(t5_bucket(apart)),
    "bias": lambda module, h, apart: module.table[h, apart].item() if apart < 20 else 0.0}
ADDED |= {"rope+bias": ADDED["bias"]} | {name: ADDED["none"] for name in ("rope", "sinusoidal", "learned")}


@pytest.mark.parametrize("pos", positions.POSITIONS)
def test_each_position_code_adds_its_term_to_the_scores(pos):
    """Through the layer's forward pass, against a formula in float64. 150 tokens reach beyond every table."""
    module, T, seen = layer(pos=pos, bias_range=20), 150, []
    module.attend = lambda q, k, v, x, table: seen.append((q, k, table)) or v
    x, places = normal(1, T, 32), torch.arange(T)
    module(x)
    w = module.weights_of(*seen[0][:2], x, seen[0][2])[0]               # (H, T, T)
    apart, later = (places[:, None] - places).clamp(min=0), torch.ones(T, T, dtype=torch.bool).triu(1)
    q, k, _ = (part[0].unflatten(-1, (4, 8)).transpose(0, 1) for part in module.c_attn(x).split(32, -1))
    for h in range(4):
        one, other = (turned(a[h], places) if "rope" in pos else a[h] for a in (q, k))
        added = torch.tensor([ADDED[pos](module, h, distance) for distance in range(T)], dtype=torch.float64)
        expected = (one @ other.T / math.sqrt(8) + added[apart]).masked_fill(later, -math.inf).softmax(-1)
        close(w[h], expected, terms=T, dtype=torch.float32 if "rope" in pos else None)  # RoPE's angles are float32


@pytest.mark.parametrize("R", [9, 1, 4])
@pytest.mark.parametrize("W", [0, 1, 5, 9, 30])
@pytest.mark.parametrize("tail, slope", [(True, False), (False, True), (True, True)])
def test_a_distance_bias_is_a_table_with_a_tail_plus_a_slope(R, W, tail, slope):
    T, table, last, steep = 9, normal(4, W), normal(4, stream=1), normal(4, stream=2)
    distance = Distance(table if W else None, last if tail else None, steep if slope else None)
    apart = (torch.arange(T - R, T)[:, None] - torch.arange(T)).clamp(min=0)
    whole = torch.cat([table, (last * tail)[:, None].expand(-1, T)], 1) # (heads, W + T)
    expected = whole[:, apart] + slope * steep[:, None, None] * apart
    close(distance.bias(R, T).tril(T - R), expected.tril(T - R), terms=2)


def test_alibi_slopes_of_any_number_of_heads():
    def slopes(heads, **more):
        return layer(pos="alibi", n_head=heads, n_embd=8 * heads, **more).alibi.tolist()
    eight = [2.0 ** -h for h in range(1, 9)]
    assert slopes(8) == eight and slopes(1) == [2.0 ** -8]
    close(slopes(12), [*eight, *(2.0 ** -(h + 0.5) for h in range(4))], terms=1, dtype=torch.float32)   # 0.7071, ...
    close(slopes(2, attn="diff2"), [2.0 ** -4] * 2 + [2.0 ** -8] * 2, terms=1, dtype=torch.float32)


def test_t5_and_alibi_equal_those_of_transformers():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    apart = torch.arange(300)
    theirs = t5.T5Attention._relative_position_bucket(-apart, bidirectional=False, num_buckets=32, max_distance=128)
    same(torch.cat([positions.t5_buckets(), torch.full((172,), 31)]), theirs)
    for heads in (8, 12):
        module = layer(pos="alibi", n_head=heads, n_embd=8 * heads, dtype=torch.float32)
        bias = module.distance().bias(1, 20)[:, 0]                      # (H, 20) of the last row
        alibi = bloom.build_alibi_tensor(torch.ones(1, 20), heads, torch.float32).view(heads, 20)
        # transformers counts from the first key. That differs by a constant per row, which softmax ignores
        close(bias - bias[:, :1], alibi - alibi[:, :1], terms=4)


# ------------------------------------------------------------------------------------------------ windows, first keys


def test_a_streaming_row_counts_rope_positions_within_its_cache():
    """StreamingLLM: a late row sees only the first keys and the window. RoPE treats these keys as adjacent."""
    module, plain, x = layer("streaming", pos="rope", first=4), layer("softmax", pos="rope"), normal(1, 30, 32)
    plain.load_state_dict(module.state_dict())
    kept = torch.cat([x[:, :4], x[:, 30 - 7:]], 1)                      # the cache of 4 + 7 tokens at the last row
    close(module(x)[:, -1], plain(kept)[:, -1], dtype=torch.float32)    # RoPE's angles are float32


@pytest.mark.parametrize("attn, most", [("window", 6), ("streaming", 10), ("softmax", 30)])
def test_the_cache_of_a_window_keeps_only_the_keys_that_are_needed(attn, most):
    module, past = layer(attn), {}
    for part in normal(1, 30, 32).split(3, 1):
        module(part, past)
    assert past["k"].shape[2] == past["v"].shape[2] == most and past["tokens"] == 30


def test_every_second_layer_of_gpt_oss_has_a_window():
    config = tiny_config(attn="gpt_oss", n_layer=4, window=5)
    assert [Attention(config, i).sight.window for i in range(4)] == [5, 0, 5, 0]


def test_visible_count_equals_the_row_sums_of_the_mask():
    sight, i = Sight(window=5, first=2), torch.arange(12)
    same(visible(i[:, None], i, sight).sum(1).float(), visible_count(i, sight))


# ---------------------------------------------------------------------------------------------------- dropout, kernels


@pytest.mark.parametrize("choices", [{"attn": attn} for attn in ATTENTIONS] + [{"pos": "t5"}, {
    "attn": "elastic", "pos": "alibi", "attn_args": "learn_alibi=1"}], ids=lambda c: "-".join(c.values()))
def test_recomputed_blocks_draw_the_same_dropout(choices, monkeypatch):
    module = layer(**choices, kernel="torch", dropout=0.3).train().to(DEVICE)        # each device has its own generator
    T = 150 if "pos" in choices else 45                                 # beyond T5's table
    qkvx, found = [a.to(DEVICE) for a in inputs(module, T)], []
    for compute in (kernels.checkpoint, lambda block, *args, **options: block(*args)):     # the second keeps its blocks
        monkeypatch.setattr(kernels, "checkpoint", compute)
        torch.manual_seed(5)
        found.append(attend_and_gradients(module, *qkvx, table=module.distance()))
    close(*found, terms=T)


@pytest.mark.parametrize("n_kv_head, T, R", [(4, 45, 45), (2, 45, 45), (1, 150, 150), (4, 45, 7), (2, 45, 1),
                                             (4, 1, 1)])
def test_sdpa_equals_the_block_loop(n_kv_head, T, R):
    sdpa, loop = (layer("softmax", kernel=kernel, n_kv_head=n_kv_head) for kernel in ("sdpa", "torch"))
    close(*(attend_and_gradients(module, *inputs(sdpa, T, R)) for module in (sdpa, loop)), terms=T + 8, size=1.0)


def test_attn_args_keep_the_type_of_their_default():
    module = Attention(tiny_config(attn="elastic", attn_args="tau_init=2,per_length=block,learn_tau=false"), 0)
    assert module.args == {"tau_init": 2.0, "per_length": "block", "learn_tau": False}


def test_auto_chooses_sdpa_for_plain_softmax_and_the_block_loop_otherwise():
    assert choose_kernel(tiny_config(attn="softmax"), "cpu") == "sdpa"
    assert choose_kernel(tiny_config(attn="elastic"), "cpu") == "torch"
    assert choose_kernel(tiny_config(attn="softmax", kernel="torch"), "cpu") == "torch"


def test_auto_chooses_triton_on_cuda_unless_there_is_dropout(monkeypatch):
    monkeypatch.setattr(kernels, "AVAILABLE", True)
    assert [choose_kernel(tiny_config(attn=attn), "cuda") for attn in ("softmax", "elastic", "sink")] == ["triton"] * 3
    assert choose_kernel(tiny_config(attn="elastic", dropout=0.1), "cuda") == "torch"
    assert choose_kernel(tiny_config(attn="softmax", dropout=0.1), "cuda") == "sdpa"
    with pytest.raises(ValueError, match="dropout"):
        choose_kernel(tiny_config(attn="elastic", dropout=0.1, kernel="triton"), "cuda")


@needs_triton
def test_two_views_too_wide_for_one_tile_are_computed_in_two_calls(monkeypatch):
    """The output and all gradients are the same as in one call."""
    module, found = layer("tda", dtype=torch.float32, kernel="triton").to(DEVICE), []
    qkvx = [a.to(DEVICE) for a in inputs(module, 20, dtype=torch.float32)]
    for fit in (True, False):
        monkeypatch.setattr(kernels, "holds_two_views", lambda q, v, fit=fit: fit)
        found.append(attend_and_gradients(module, *qkvx))
    close(*found, terms=40)
