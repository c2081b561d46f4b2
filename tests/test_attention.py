"""attention.py: initial values, importance, long rows, positions, dropout and the choice of
kernels. test_properties.py compares every rule with its formula, test_contract.py tests what holds
for every recipe."""

import math

import bounds
import pytest
import reference
import torch
from bounds import below, close
from conftest import DEVICE, tiny_config
from layers import attend_and_gradients, fresh, inputs, layer, normal, scalars

import kernels
import mixers
from attention import RULES, Rule, softmax
from axes.layer import Cache
from model import GPT

pytestmark = pytest.mark.usefixtures("small_blocks")

# recipe, --attn_args, initial values of its parameters, of its buffers ("fixed") and of constants
# of --attn_args ("arg"): four heads of width 8 at block_size 1024
INITIAL = [
    ("ssmax", "", {"sigma": 1024 / math.lgamma(1025)}),  # 1 / mean(log n)
    ("sink", "", {"sink_logit": 0.0}),
    ("lazy", "", {"table": 0.0}),
    ("elastic", "", {"tau": 1.0, "arg tau_init": 1, "arg per_length": True}),
    ("elastic", "tau_init=2,learn_tau=false", {"fixed tau": 2.0}),
    ("rela", "", {"out_norm.weight": 1.0}),
    ("tra", "", {"beta": 1.0, "out_norm.weight": 1.0}),
    ("tda", "learn_beta=0", {"fixed beta": 1.0}),
    ("tda", "", {"beta": 1.0, "lambda_logit": 0.0, "arg kappa": 1, "arg power": 2}),
    ("lssar", "", {"fixed sigma": 8**0.5 * math.log(8), "arg power": 15, "arg learn_sigma": False}),
    ("asentmax", "", {"scale_beta": [0.1, 0.4, 0.7, 1.0], "scale_gamma": 0.0}),
    ("entmax", "", {"arg alpha": 1.5}),
    (
        "dex",
        "",
        {"dex_lambda": 0.0, "dex_proj.weight": 0.0, "fixed progress": 0.0, "arg anneal": 0.5},
    ),
    # When Attention Sink Emerges, table 5: along the first axis or along all. With norm 0 the
    # recipe is the K bias
    ("kv_bias", "value_norm=5", {"fixed sink_value": [[5.0] + [0.0] * 7] * 4}),
    ("kv_bias", "value_norm=5,value_even=1", {"fixed sink_value": 5 / 8**0.5}),
    ("kv_bias", "value_norm=0", {"fixed sink_value": 0.0}),
    ("titans", "", {"forget_bias": 4.0}),
    (
        "focus",
        "",
        {
            "arg groups": 4,
            "arg route_dim": 16,
            "arg temperature": 0.1,
            "arg iterations": 10,
            "arg gate_scale": 10,
            "arg gate_offset": 0.5,
        },
    ),
    ("sparq", "components=3", {"arg local": 0.25, "arg realloc": False}),
    ("quest", "", {"arg page": 16}),
    ("magicpig", "", {"arg bits": 8, "arg tables": 75}),
]
SPREAD = {  # recipe: {parameter: standard deviation}, for heads of width 512
    "kv_bias": {"sink_key": 0.02, "sink_value": 0.02},
    "v_bias": {"value_bias": 0.02},
    "rela_gated": {"norm_gate": 0.02},
    "mlp": {f"feature.{n}.weight": (2 / (5 * 512)) ** 0.5 for n in (0, 2)},
    "diff": {name: 0.1 for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")},
}


@pytest.mark.parametrize("attn, args, values", INITIAL)
def test_parameters_and_constants_start_at_the_values_of_their_papers(attn, args, values):
    window = 4 if attn == "focus" else 0
    module = fresh(attn, torch.float32, attn_args=args, block_size=1024, window=window)
    kinds = {
        "": dict(module.named_parameters()),
        "fixed": dict(module.named_buffers()),
        "arg": module.args,
    }
    for name, value in values.items():
        kind, _, name = name.rpartition(" ")
        found = torch.as_tensor(kinds[kind][name])
        close(found, torch.as_tensor(value).expand_as(found), dtype=torch.float32)


@pytest.mark.parametrize("attn", SPREAD)
def test_initial_draws_have_their_mean_and_spread_within_eight_standard_errors(attn):
    gpt = GPT(tiny_config(attn=attn, n_head=2, n_embd=1024), seed=bounds.SEED)
    for name, std in SPREAD[attn].items():
        drawn = gpt.state_dict()[f"transformer.h.0.attn.{name}"]
        below(abs(drawn.std().item() / std - 1), 8 / math.sqrt(2 * drawn.numel()))
        below(abs(drawn.mean().item()), 8 * std / math.sqrt(drawn.numel()))


def test_dropout_that_is_set_later_counts():  # pretrained/interface.py sets it
    module = mixers.layer_of(tiny_config(attn="elastic"), 0)
    module.dropout, x = 0.5, torch.randn(1, 16, module.config.n_embd)
    assert not torch.equal(module(x), module(x))


def importance_of(module, q, k, v, x):
    found = []
    module.attend(q, k, v, x, module.distance(), importance=found)
    return found[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"attn": "softmax"},
        {"attn": "window"},
        {"attn": "sink_token"},
        {"attn": "softmax1"},
        {"attn": "kv_bias"},
        {"attn": "gated_elementwise"},
        {"attn": "softmax", "pos": "t5"},
        {"attn": "softmax", "pos": "alibi", "n_kv_head": 2},
        {"attn": "ssmax", "qk_norm": "l2"},
        {"attn": "sink", "n_kv_head": 2},
        {"attn": "elastic", "gate": "head"},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_importance_and_its_gradient_equal_their_definition(choices):
    """Importance is the gate's mean, or 1 minus the sink's mean weight. 45 rows are three blocks,
    computed again."""
    T = 45
    module = layer(**choices, kernel="torch")
    q, k, v, x = (a.requires_grad_() for a in inputs(module, T))
    if module.config.gate != "none":
        opened = torch.sigmoid(module.gate(x)).unflatten(-1, (4, -1)).mean((0, 1, 3))
    else:
        opened = 1 - reference.weights(module, q, k, x, module.distance())[..., 0].mean((0, 2))
    leaves = [q, k, x, *scalars(module).values()]

    def with_gradients(value):
        above = normal(4, stream=9)
        return [value, *torch.autograd.grad(value, leaves, above, materialize_grads=True)]

    found = with_gradients(importance_of(module, q, k, v, x))
    close(found, with_gradients(opened), terms=T, size=1.0)


@pytest.mark.parametrize("size", [0.3, 30.0])
def test_importance_under_autocast_agrees_with_the_weights_and_lies_between_0_and_1(size):
    """Most rows give nearly all their weight to the first key. So their log-sum-exp is close to its
    score, which is about 7, 70 or 700, and bfloat16 rounds scores to 8 bits."""
    module = layer(dtype=torch.float32, kernel="torch")
    q, k, v, x = inputs(module, 40, dtype=torch.float32)
    q = size * (q + 8 * k[:, :, :1])
    with torch.autocast("cpu", torch.bfloat16):
        found = importance_of(module, q, k, v, x)
        w = module.weights_of(q, k, x)[..., 0]
    largest = (q @ k.mT).abs().max().item() * module.scale  # the largest argument of exp
    close(found, 1 - w.mean((0, 2)), terms=4, size=largest)
    assert 0 <= found.min() and found.max() <= 1


@pytest.mark.parametrize("large", [0, 255])
def test_gradients_of_a_long_sequence_add_up_in_float32(large):
    """Every row gives its weight to the first key, so the gradient of its value is the sum of dy.
    One of 256 blocks adds 512, each other block 0.25. In bfloat16 512 + 0.25 is 512. large: the
    block that adds 512."""
    T = 256 * kernels.BLOCK
    module = layer(dtype=torch.float32, kernel="torch")
    q, k, v, x = inputs(module, T, B=1, dtype=torch.float32)
    v.requires_grad_()
    dy = torch.full((256, kernels.BLOCK), 0.25 / kernels.BLOCK)
    dy[large] = 512 / kernels.BLOCK
    with torch.autocast("cpu", torch.bfloat16):
        k = 9 * (torch.arange(T) == 0)[:, None] + 0 * k
        y = module.attend(0 * q + 9, k, v.bfloat16(), x)  # the dtype of projections under autocast
    y.backward(dy.view(-1, 1).expand(y.shape).to(y.dtype))
    found = v.grad[:, :, 0]
    close(found, torch.full_like(found, 512 + 255 / 4), terms=1, dtype=torch.bfloat16)


def test_lssar_stays_finite_in_long_rows():
    """With a = 1 and n = 1500, (n a - 1)^15 is about 1500^15, which overflows float32."""
    module = layer("lssar", dtype=torch.float32, block_size=2000)
    q, k, v, x = inputs(module, 1500, 1, dtype=torch.float32)
    k[:, :, 700] = q[:, :, 0]
    for part in attend_and_gradients(module, q, k, v, x):
        assert part is None or part.isfinite().all()
    w = module.weights_of(q, k, x)
    close(w.sum(-1), torch.ones_like(w[..., 0]), terms=1500)
    below(100 / 1500, w[..., 700])  # a hundred times the uniform weight
    w = module.weights_of(q, torch.ones_like(k), x)  # rounding errors must not become weights
    assert not w.any()


def test_slopes_of_alibi_equal_their_formula():
    assert isinstance(layer(pos="alibi", attn_args="learn_alibi=1").alibi, torch.nn.Parameter)

    def slopes(heads, **more):
        return layer(pos="alibi", n_head=heads, n_embd=8 * heads, **more).alibi.tolist()

    eight = [2.0**-h for h in range(1, 9)]
    assert slopes(8) == eight and slopes(1) == [2.0**-8]
    between = [2.0 ** -(h + 0.5) for h in range(4)]  # 0.7071, ...
    close(slopes(12), eight + between, terms=1, dtype=torch.float32)
    close(slopes(2, attn="diff2"), [2.0**-4] * 2 + [2.0**-8] * 2, terms=1, dtype=torch.float32)


KEYS = {"softmax": 192, "window": 6, "streaming": 10}  # in the cache after 192 tokens


@pytest.mark.parametrize("attn", [*KEYS, "performer", "gated_deltanet", "ttt", "titans"])
def test_a_cache_keeps_only_what_is_needed(attn):
    """From one whole chunk to another: in between, ttt and titans also hold the inputs of at most
    15 tokens."""
    module = layer(attn)
    cache = Cache()
    sizes = set()
    for part in normal(2, 192, 32).split([48, 16, 16, 112], 1):
        module(part, cache)
        sizes.add(sum(y.numel() for kept in cache.kept.values() for y in kept))
    assert cache.tokens == 192 and (len(sizes) == 1 or attn == "softmax")
    if attn in KEYS:
        assert cache.kept["k"].shape[2] == cache.kept["v"].shape[2] == KEYS[attn]


def test_dropout_zeroes_its_share_of_the_weights_and_scales_the_others():
    module = layer(kernel="torch", dropout=0.3).train()
    q, k, _, x = inputs(module, 45)
    v = torch.eye(45, dtype=torch.float64).expand(2, 4, 45, 45)
    found = module.attend(q, k, v, x)  # the matrix of weights
    w = module.weights_of(q, k, x)
    kept = found != 0
    count = (w > 0).sum().item()
    close(found, w * kept / 0.7)
    below(abs(1 - kept.sum().item() / count - 0.3), 8 * math.sqrt(0.21 / count))


@pytest.mark.parametrize(
    "choices", [{"pos": "t5"}, {"attn": "elastic", "pos": "alibi"}, {"attn": "tda"}], ids=str
)
def test_recomputed_blocks_draw_the_same_dropout(choices, monkeypatch):
    module = layer(**choices, kernel="torch", dropout=0.3).train()
    module.to(DEVICE)  # each device has its own generator
    T = 150 if "pos" in choices else 45  # beyond T5's table
    qkvx = [a.to(DEVICE) for a in inputs(module, T)]
    found = []

    def keep(block, *args, **options):
        return block(*args)

    for compute in (kernels.checkpoint, keep):
        monkeypatch.setattr(kernels, "checkpoint", compute)
        torch.manual_seed(5)
        found.append(attend_and_gradients(module, *qkvx, table=module.distance()))
    close(*found, terms=T)


def test_auto_chooses_a_kernel_unless_there_is_dropout_and_then_sdpa_for_plain_softmax(
    monkeypatch,
):
    monkeypatch.setattr(kernels, "AVAILABLE", True)
    for device, attn, dropout, found in (
        ("cpu", "softmax", 0.0, "cpp"),
        ("cpu", "elastic", 0.0, "cpp"),
        ("cpu", "elastic", 0.1, "torch"),
        ("cpu", "softmax", 0.1, "sdpa"),
        ("cuda", "softmax", 0.0, "triton"),
        ("cuda", "elastic", 0.1, "torch"),
        ("cuda", "softmax", 0.1, "sdpa"),
    ):
        assert layer(attn=attn, dropout=dropout).kernel_on(device) == found
    assert layer(kernel="torch").kernel_on("cpu") == "torch"
    with pytest.raises(ValueError, match="dropout"):
        layer(attn="elastic", dropout=0.1, kernel="triton").kernel_on("cuda")


def test_a_rule_whose_rows_depend_on_each_other_is_refused(monkeypatch):
    def selective(s, seen, t=None):  # what earlier rows have read counts less
        return softmax(s - s.relu().cumsum(-2), seen)

    monkeypatch.setitem(RULES, "softmax", Rule(weights=selective))
    with pytest.raises(ValueError, match="--rule=softmax gives row 2 .* must be independent"):
        tiny_config()
