"""Properties that every recipe must have, tested on each recipe of ATTENTIONS and on drawn
combinations of axes. A new row of ATTENTIONS is tested without further work. A new rule, position,
norm, gate or mixer also needs its formula in tests/reference.py or reference_mixers.py."""

import io
from functools import partial

import pytest
import torch
from bounds import below, close, moved_by_rounding, same
from conftest import DEVICE, FEW, by_default, examples, needs_triton, tiny_config
from hypothesis import given, settings
from layers import (
    SIZES,
    assert_learns,
    attend_and_gradients,
    inputs,
    layer,
    normal,
    recipes,
    selection,
    token_ids,
)

import kernels
import mixers
from attention import ATTENTIONS, RULES
from axes.layer import Cache
from common.machine import LiveMemory
from evals import params
from model import GPT

pytestmark = pytest.mark.usefixtures("small_blocks")

FULL = {"attn": "focus", "sink": "logit", "gate": "head", "out_norm": "head", "qk_norm": "l2"}
CASES = {attn: {"attn": attn} for attn in ATTENTIONS} | {
    "focus topk=1": {"attn": "focus", "topk": 1},  # sparse
    "focus with an extra key": FULL,
    "focus with both": FULL | {"topk": 2},
}
every = pytest.mark.parametrize(
    "choices", [by_default(case["attn"] in FEW, case) for case in CASES.values()], ids=[*CASES]
)
# The interpreter needs seconds per kernel, so the default tests have one recipe for each way of
# calling the kernels: plain; with the statistic; twice as wide; half as many heads; a table; a
# threshold in row sums; two views in one pass; a row sum to divide by; a state that erases; a state
# with one key for all heads; one call for each group; a learned slope; two views, too wide for one
# pass. --all adds the rest
CALLS = (
    "softmax",
    "kv_bias",
    "streaming",
    "diff",
    "lazy",
    "lssar",
    "tda",
    "sigmoid_norm",
    "gated_deltanet",
    "mamba2",
    "focus topk=1",
)
MORE = {
    "elastic learn_alibi=1": {"attn": "elastic", "pos": "alibi", "attn_args": "learn_alibi=1"},
    "tda head_dim=136": {"attn": "tda", "head_dim": 136, "n_head": 2, "n_kv_head": 1},
}
IN_KERNELS = [
    by_default(name in (*CALLS, *MORE), case, False) for name, case in (CASES | MORE).items()
]
IN_KERNELS += [
    by_default(attn == "streaming", {"attn": attn}, True)
    for attn in ("softmax", "streaming", "lazy", "entmax", "tda")
]
IN_KERNELS += [by_default(False, {"attn": "softmax", "pos": "t5"}, False)]


@every
def test_a_hidden_key_is_seen_by_its_own_row_only(choices):
    module = layer(**choices)
    T = 21
    q, k, v, x = inputs(module, T)
    for place in (0, 4):
        hidden = module.mask._replace(hidden=place)
        later = slice(place + 1, None)
        here = torch.arange(T)[:, None] == place
        assert module.weights_of(q, k, x, mask=hidden)[:, :, later, place - T].abs().max() == 0
        if choices["attn"] == "routing":  # a cluster takes another token in its place
            continue
        o = module.attend(q, k, v, x, mask=hidden)
        changed = torch.where(here, -k, k), torch.where(here, 1 - 2 * v, v)
        other = module.attend(q, *changed, x, mask=hidden)
        close(other[:, :, later], o[:, :, later], terms=T)
        close(o[:, :, : place + 1], module.attend(q, k, v, x)[:, :, : place + 1], terms=T)


@needs_triton
def test_a_layer_with_a_kernel_hides_a_key_and_decodes_as_the_block_loop_does():
    """The kernels can do neither: they compute every row of a sequence, and hide no single key."""
    choices = {"attn": "elastic", "dtype": torch.float32}
    fused, loop = (layer(**choices, kernel=kernel).to(DEVICE) for kernel in ("triton", "torch"))
    loop.load_state_dict(fused.state_dict())
    T = 21
    for R, hidden in ((T, 4), (5, -1)):
        mask = fused.mask._replace(hidden=hidden)
        qkvx = [a.to(DEVICE) for a in inputs(fused, T, R, dtype=torch.float32)]
        found, expected = (module.attend(*qkvx, mask=mask) for module in (fused, loop))
        close(found, expected, terms=T + fused.width)


PACKED = ((0, 9, 10, 18), (0, 3, 20, 23))  # where documents begin in two sequences of 24 tokens


@pytest.mark.parametrize(
    "choices",
    [by_default(name in ("streaming", "tda", "focus"), case) for name, case in CASES.items()],
    ids=[*CASES],
)
def test_no_row_sees_another_document_of_a_pack(choices):
    """Nor has it a gradient from there: output and gradient are those of each document alone."""
    module = layer(**choices)
    x = normal(2, 24, 32).requires_grad_()
    above = normal(2, 24, 32, stream=1)
    if module.config.mixer != "attention" or module.sink_tokens:
        with pytest.raises(
            ValueError, match="--docs=1 (needs attention|cannot be used with --sink=token)"
        ):
            mixers.check_packs(module.config)
        return
    starts = torch.zeros(2, 24, dtype=torch.long)
    parts = []
    for b, begins in enumerate(PACKED):
        for begin in begins:
            starts[b, begin:] = begin
        parts += map(module, x[b : b + 1].tensor_split(begins[1:], 1))
    alone = torch.cat(parts, 1).view_as(x)
    o = module(x, None, None, starts)

    def gradient(y):
        return torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

    # outputs and gradients may cancel, as with a window of 1 and --exclude=own
    for found, expected in ((o, alone), (gradient(o * above), gradient(alone * above))):
        close(found, expected, terms=24 * 32 * 64, size=max(1.0, expected.abs().max().item()))
    for start in starts.unique():
        own = starts == start
        assert not gradient((o * above)[own])[~own].any()


@every
def test_extreme_scores_stay_finite_in_values_and_gradients(choices):
    module = layer(**choices, dtype=torch.float32)
    q, k, v, x = inputs(module, 21, dtype=torch.float32)
    own = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    for name, scores in {
        "one key": (q[:, :, :1], k[:, :, :1]),
        "zero": (0 * q, 0 * k),
        "all equal": (torch.ones_like(q), torch.ones_like(k)),
        # scores near -141, not all equal
        "all negative": (torch.full_like(q, 10.0), -5 - 0.01 * k.abs()),
        "times 300": (300 * q, k),
        "all keys but one's own point away": (30 * own, -30 * k),
    }.items():
        T = scores[1].shape[2]
        gates = 300 * x if name == "times 300" else x  # x decides gates
        for a in attend_and_gradients(module, *scores, v[:, :, :T], gates[:, :T]):
            assert a is None or a.isfinite().all(), name


def without_jumps(choices, T):
    """Routing has clusters of all T tokens, and selection selects all T keys: rounding cannot
    change which they are."""
    if choices["attn"] == "routing":
        return choices | {"attn_args": f"cluster_size={T}"}
    if selection(**choices) == "magicpig":
        return choices | {"attn_args": f"recent={T}"}
    return choices | ({"topk": 0} if selection(**choices) else {})


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_close_to_float64(choices, dtype):
    """The bound is the effect of rounding the input. The last tokens are decoded from a cache."""
    module = layer(**without_jumps(choices, 40), dtype=torch.float32)
    x = normal(2, 40, 32, dtype=torch.float32)
    cache, parts = (Cache(), x.split([37, 1, 1, 1], 1)) if module.cached else (None, [x])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        low = torch.cat([module(part, cache) for part in parts], 1)
    assert low.dtype == dtype
    module, x = module.double(), x.double()
    close(low.float(), module(x), terms=1, dtype=dtype, moved=moved_by_rounding(module, [x], dtype))


@every
def test_training_memory_grows_linearly(choices):
    """Eight times as many tokens take eight times the memory. If it were quadratic, they would take
    64 times."""
    fixed = {"attn_args": "cluster_size=16"} if choices["attn"] == "routing" else {}
    module = layer(**choices | fixed, dtype=torch.float32, block_size=1024).train()

    def peak(T):
        leaves = [a.requires_grad_() for a in inputs(module, T, B=1, dtype=torch.float32)]
        with LiveMemory() as memory:
            module.attend(*leaves).square().sum().backward()
        return memory.peak

    below(peak(1024), 20 * peak(128))


@every
def test_a_models_seed_alone_decides_its_initial_values_and_a_file_of_tensors_restores_it(choices):
    """All models of a seed share what they have in common. The global generator has another state
    each time."""

    def model(seed, choices=choices):
        return GPT(tiny_config(**SIZES | choices), seed).eval()

    one, other = model(5), model(6)
    first = one.state_dict()
    plain = model(5, {"attn": "softmax", "pos": "learned"}).state_dict()
    same(model(5).state_dict(), first)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    shared = [name for name in first if name in plain and first[name].shape == plain[name].shape]
    assert len(shared) > 5
    same([first[name] for name in shared], [plain[name] for name in shared])
    torch.save(first, file := io.BytesIO())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    idx = torch.arange(13)[None]
    same(other.state_dict(), first)
    same(other(idx)[0], one(idx)[0])


@every
def test_every_parameter_learns(choices):
    assert_learns(GPT(tiny_config(**SIZES | choices)), token_ids(4, 17))


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_params_describe_the_recipe(attn):
    module = layer(attn, dtype=torch.float32)
    own = {name for name, _ in module.named_parameters(recurse=False)}
    own |= {name for name, _ in module.named_buffers(recurse=False)}
    found = params.figures(module)
    assert not own - {*params.HIDDEN, "table", "alibi", "t5"} or found
    assert found.keys() <= params.MEANINGS.keys(), "give it a line in MEANINGS of evals/params.py"


CONTRACT = (
    test_a_hidden_key_is_seen_by_its_own_row_only,
    test_extreme_scores_stay_finite_in_values_and_gradients,
    partial(test_low_precision_is_close_to_float64, dtype=torch.bfloat16),
    test_a_models_seed_alone_decides_its_initial_values_and_a_file_of_tensors_restores_it,
    test_every_parameter_learns,
    test_no_row_sees_another_document_of_a_pack,
)


@given(recipes())
@settings(max_examples=examples(30))
def test_combinations_of_axes_obey_the_same_contract(choices):
    for test in CONTRACT:
        test(choices)


@pytest.mark.parametrize("kernel", ["triton", "cpp"])
@pytest.mark.parametrize("choices, packed", IN_KERNELS, ids=str)
def test_a_kernel_equals_the_block_loop_in_output_and_all_gradients(choices, packed, kernel):
    """On a GPU or interpreted, and in C++, with a learned distance bias and grouped heads. Some
    keys occur twice: scores tie. packed: several documents in a sequence."""
    device = DEVICE if kernel == "triton" else "cpu"
    pairs = ATTENTIONS[choices["attn"]].get("diff") == "v1"  # of key heads
    sizes = {"n_head": 2, "n_kv_head": 2 if pairs else 1, "n_embd": 16}
    choices = sizes | {"bias_range": 20, "dtype": torch.float32} | choices
    assert {name for name, rule in RULES.items() if rule.kernel} <= kernels.KERNELS.keys()
    try:
        fused, loop = (layer(**choices, kernel=name) for name in (kernel, "torch"))
        mixers.choose_kernel(fused.config, device)
    except ValueError as e:
        assert choices["attn"] not in CALLS or "is not in kernels.cpp" in str(e), e
        pytest.skip(str(e))
    loop.load_state_dict(fused.state_dict())
    T = 84 if packed else 45
    if choices.get("pos") == "t5":
        T = 140  # beyond its table
    qkvx = [a.to(device) for a in inputs(fused, T, dtype=torch.float32)]
    qkvx[1][:, :, 30:40] = qkvx[1][:, :, 10:20]
    if packed:
        starts = [[0] * 9 + [9] + [10] * 54 + [64] * 20, [0] * 32 + [32] * 32 + [64] * 20]
        starts = torch.tensor(starts, device=device)
        fused.mask, loop.mask = (module.mask._replace(starts=starts) for module in (fused, loop))
    found, expected = (
        attend_and_gradients(module.to(device), *qkvx, table=module.distance())
        for module in (fused, loop)
    )
    # The gradient of a state's decay sums over all pairs of tokens before and after it. All
    # summands have a size of about 1, even if they cancel. They cancel for a sink logit before a
    # norm, which undoes it
    # a score sums over the width
    terms = T * T if fused.config.mixer == "recurrent" else T + fused.width
    for a, b in zip(found, expected, strict=True):
        close(a, b, terms, size=None if b is None else max(1.0, b.abs().max().item()))
    if packed:  # its tiles are not visited: a nan would spread to all rows of a tile
        qkvx[2][:, :, :64] = torch.nan
        assert fused.attend(*qkvx, fused.distance())[:, :, 64:].isfinite().all()
