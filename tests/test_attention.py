"""attention.py: initial values, equalities between recipes, long rows, importance, positions, dropout and the choice of
kernels. test_properties.py compares every rule with its formula, test_contract.py tests what holds for every recipe."""
import math

import bounds
import pytest
import reference
import torch
from bounds import below, close, same
from conftest import DEVICE, needs_triton, tiny_config
from layers import attend_and_gradients, fresh, inputs, layer, normal, scalars

import kernels
from attention import Attention, choose_kernel
from axes import positions
from model import GPT

pytestmark = pytest.mark.usefixtures("small_blocks")

# ----------------------------------------------------------------------------------------------------------- parameters

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


@pytest.mark.parametrize("norm, even, expected", [
    (5, 0, [5.0] + [0.0] * 7), (5, 1, [5 / 8 ** 0.5] * 8), (0, 0, [0.0] * 8)])
def test_a_fixed_value_of_the_extra_key_lies_along_the_first_axis_or_along_all(norm, even, expected):
    """When Attention Sink Emerges, table 5. With norm 0 the recipe is the K bias."""
    module = fresh("kv_bias", attn_args=f"value_norm={norm},value_even={even}")
    assert "sink_value" not in dict(module.named_parameters())
    close(module.sink_value, torch.tensor([expected] * 4), dtype=torch.float32)


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
def test_importance_and_its_gradient_equal_their_definition(choices):
    """Importance is the gate's mean, or 1 minus the sink's mean weight. 45 rows are three blocks, computed again."""
    module, T = layer(**choices, kernel="torch"), 45
    q, k, v, x = (a.requires_grad_() for a in inputs(module, T))
    if module.config.gate != "none":
        opened = torch.sigmoid(module.gate(x)).unflatten(-1, (4, -1)).mean((0, 1, 3))
    else:
        opened = 1 - reference.weights(module, q, k, x, module.distance())[..., 0].mean((0, 2))
    leaves, above = [q, k, x, *scalars(module)], normal(4, stream=9)
    found, expected = ([value, *torch.autograd.grad(value, leaves, above, materialize_grads=True)]
                       for value in (importance_of(module, q, k, v, x), opened))
    close(found, expected, terms=T, size=1.0)


def test_a_first_key_out_of_sight_has_no_weight_however_large_its_score():
    module = layer("window", window=4, kernel="torch")
    q, k, v, x = inputs(module, 30)
    k[:, :, 0] = 500 * q[:, :, 29, :]           # the last row would give it all its weight
    assert importance_of(module, q, k, v, x).isfinite().all()


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


# ---------------------------------------------------------------------------------------------------- long rows


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


@pytest.mark.parametrize("theta", [-100.0, -5.0, 20.0])
def test_a_learned_alpha_stays_between_softmax_and_sparsemax(theta):
    module = layer("entmax", dtype=torch.float32, attn_args="alpha=learned")
    module.theta.data.fill_(theta)
    q, k, v, x = inputs(module, 30, dtype=torch.float32)
    assert all(part is None or part.isfinite().all() for part in attend_and_gradients(module, q, k, v, x))
    close(module.weights_of(q, k, x).sum(-1), torch.ones(2, 4, 30), terms=300)          # the power is up to 100


def test_lssar_stays_finite_beyond_a_thousand_keys():
    """With a = 1 and n = 1500, (n a - 1)^15 is about 1500^15, which overflows float32."""
    module = layer("lssar", dtype=torch.float32, block_size=2000)
    q, k, v, x = inputs(module, 1500, 1, dtype=torch.float32)
    k[:, :, 700] = q[:, :, 0]
    assert all(part is None or part.isfinite().all() for part in attend_and_gradients(module, q, k, v, x))
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


# ------------------------------------------------------------------------------------------------- positions, windows


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


@pytest.mark.parametrize("attn, most", [("window", 6), ("streaming", 10), ("softmax", 30)])
def test_the_cache_of_a_window_keeps_only_the_keys_that_are_needed(attn, most):
    module, past = layer(attn), {}
    for part in normal(1, 30, 32).split(3, 1):
        module(part, past)
    assert past["k"].shape[2] == past["v"].shape[2] == most and past["tokens"] == 30


# ---------------------------------------------------------------------------------------------------- dropout, kernels


@pytest.mark.parametrize("choices", [
    {"pos": "t5"}, {"attn": "elastic", "pos": "alibi"}, {"attn": "tda"}, {"attn": "kv_bias"}], ids=str)
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
