"""Properties that every recipe must have, tested on each recipe of ATTENTIONS and on drawn combinations of axes. A new
row of ATTENTIONS is tested without further work. A new rule, position, norm, gate or mixer also needs its formula in
tests/reference.py or reference_mixers.py."""
import io

import pytest
import torch
from bounds import below, close, moved_by_rounding, same
from conftest import DEVICE, FEW, examples, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import assert_learns, attend_and_gradients, inputs, layer, normal, recipes, selection, token_ids

import kernels
import mixers
from attention import ATTENTIONS, RULES
from common.machine import LiveMemory
from evals import params
from model import GPT

pytestmark = pytest.mark.usefixtures("small_blocks")

PUBLISHED = [{"attn": attn} for attn in ATTENTIONS]
FULL = {"attn": "focus", "sink": "logit", "gate": "head", "out_norm": "head", "qk_norm": "l2"}
FOCUS = [{"attn": "focus", "topk": 1}, FULL, FULL | {"topk": 2}]        # sparse; with an extra key; both
EVERY = [pytest.param(choices, id=" ".join(f"{axis}={value}" for axis, value in choices.items()).removeprefix("attn="),
                      marks=() if choices["attn"] in FEW else pytest.mark.exhaustive) for choices in PUBLISHED + FOCUS]
every = pytest.mark.parametrize("choices", EVERY)
published = pytest.mark.parametrize("choices", PUBLISHED, ids=ATTENTIONS)
# The interpreter needs seconds per kernel, so the default tests have one recipe for each way of calling the kernels.
# --all adds the rest. In the order of CALLS: plain; with the statistic; twice as wide; half as many heads; a table; a
# threshold in row sums; two views in one pass; a row sum to divide by; features; a state; a state that erases; a state
# with one key for all heads; one call for each group. After CALLS: a learned slope; a table with a tail; two views, too
# wide for one pass
CALLS = ("softmax", "kv_bias", "streaming", "diff", "lazy", "lssar", "tda", "sigmoid_norm", "linear", "retnet",
         "gated_deltanet", "mamba2", "focus topk=1")
called = pytest.mark.parametrize("choices", [
    pytest.param(case.values[0], id=case.id, marks=() if case.id in CALLS else pytest.mark.exhaustive)
    for case in EVERY] + [
    pytest.param({"attn": "elastic", "pos": "alibi", "attn_args": "learn_alibi=1"}, id="elastic learn_alibi=1"),
    pytest.param({"attn": "softmax", "pos": "t5"}, id="softmax pos=t5", marks=pytest.mark.exhaustive),
    pytest.param({"attn": "tda", "head_dim": 136, "n_head": 2, "n_kv_head": 1}, id="tda head_dim=136")])


@every
def test_a_hidden_key_is_seen_by_its_own_row_only(choices):
    module, T = layer(**choices), 21
    q, k, v, x = inputs(module, T)
    for place in (0, 4):
        hidden, later = module.sight._replace(hidden=place), slice(place + 1, None)
        here = torch.arange(T)[:, None] == place
        assert module.weights_of(q, k, x, sight=hidden)[:, :, later, place - T].abs().max() == 0
        if choices["attn"] == "routing":        # a cluster takes another token in its place
            continue
        o = module.attend(q, k, v, x, sight=hidden)
        other = module.attend(q, torch.where(here, -k, k), torch.where(here, 1 - 2 * v, v), x, sight=hidden)
        close(other[:, :, later], o[:, :, later], terms=T)
        close(o[:, :, :place + 1], module.attend(q, k, v, x)[:, :, :place + 1], terms=T)


PACKED = ((0, 9, 10, 18), (0, 3, 20, 23))       # where documents begin in two sequences of 24 tokens
FEW_PACKED = "streaming", "tda", "focus", "gated_deltanet"


@pytest.mark.parametrize("choices", [
    pytest.param(*case.values, id=case.id, marks=() if case.id in FEW_PACKED else pytest.mark.exhaustive)
    for case in EVERY])
def test_no_row_sees_another_document_of_a_pack(choices):
    """Nor has it a gradient from there: output and gradient are those of each document alone."""
    module, x, above = layer(**choices), normal(2, 24, 32).requires_grad_(), normal(2, 24, 32, stream=1)
    if module.config.mixer != "attention" or module.ahead:
        with pytest.raises(ValueError, match="--docs=1 (needs attention|cannot be used with --sink=token)"):
            mixers.check_packs(module.config)
        return
    parts = [module(part) for b, begins in enumerate(PACKED) for part in x[b:b + 1].tensor_split(begins[1:], 1)]
    starts = torch.tensor([[max(begin for begin in begins if begin <= i) for i in range(24)] for begins in PACKED])
    module.sight = module.sight._replace(starts=starts)
    o, alone = module(x), torch.cat(parts, 1).view_as(x)
    g, g_alone = (torch.autograd.grad((y * above).sum(), x, retain_graph=True)[0] for y in (o, alone))
    close([o, g], [alone, g_alone], terms=24 * 32 * 64)
    for own in (starts == start for start in starts.unique()):
        assert not torch.autograd.grad((o * above)[own].sum(), x, retain_graph=True)[0][~own].any()


@every
def test_extreme_scores_stay_finite_in_values_and_gradients(choices):
    module = layer(**choices, dtype=torch.float32)
    q, k, v, x = inputs(module, 21, dtype=torch.float32)
    own = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    for name, scores in {
            "one key": (q[:, :, :1], k[:, :, :1]), "zero": (0 * q, 0 * k),
            "all equal": (torch.ones_like(q), torch.ones_like(k)),
            "all negative": (torch.full_like(q, 10.0), -5 - 0.01 * k.abs()),          # scores near -141, not all equal
            "times 300": (300 * q, k), "all keys but one's own point away": (30 * own, -30 * k)}.items():
        T, gates = scores[1].shape[2], 300 * x if name == "times 300" else x        # x decides gates
        for a in attend_and_gradients(module, *scores, v[:, :, :T], gates[:, :T]):
            assert a is None or a.isfinite().all(), name


def without_jumps(choices, T):
    """Routing has clusters of all T tokens, and selection selects all T keys: rounding cannot change which they are."""
    whole = {"magicpig": {"attn_args": f"recent={T}"}} | dict.fromkeys(("topk", "sparq", "quest"), {"topk": 0})
    routing = {"attn_args": f"cluster_size={T}"} if choices["attn"] == "routing" else {}
    return choices | routing | whole.get(selection(**choices), {})


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_have_the_dtype_of_the_inputs_and_are_accurate(choices, dtype):
    module = layer(**without_jumps(choices, 40), dtype=torch.float32)
    q, k, v, x = inputs(module, 40, dtype=dtype)
    o = module.attend(q, k, v, x.float())       # x has the dtype of the layer
    assert o.dtype == dtype
    exact = [a.double() for a in (q, k, v, x)]
    module = module.double()
    close(o, module.attend(*exact), terms=8, moved=moved_by_rounding(module.attend, exact, dtype))


@every
def test_autocast_is_close_to_float64(choices):
    """The bound is the effect of rounding the input to bfloat16. The last tokens are decoded from a cache."""
    module, x = layer(**without_jumps(choices, 40), dtype=torch.float32), normal(2, 40, 32, dtype=torch.float32)
    past = {} if module.cached else None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        low = torch.cat([module(part, past) for part in (x.split([37, 1, 1, 1], 1) if module.cached else [x])], 1)
    module, x = module.double(), x.double()
    close(low.float(), module(x), terms=1, dtype=torch.bfloat16, moved=moved_by_rounding(module, [x], torch.bfloat16))


@every
def test_training_memory_grows_linearly(choices):
    """Eight times as many tokens take eight times the memory. If it were quadratic, they would take 64 times."""
    fixed = {"attn_args": "cluster_size=16"} if choices["attn"] == "routing" else {}
    module = layer(**choices | fixed, dtype=torch.float32, block_size=1024).train()

    def peak(T):
        leaves = [a.requires_grad_() for a in inputs(module, T, B=1, dtype=torch.float32)]
        with LiveMemory() as memory:
            module.attend(*leaves).square().sum().backward()
        return memory.peak

    below(peak(1024), 20 * peak(128))


@published
def test_initial_values_depend_only_on_the_seed_of_the_model_and_not_on_the_recipe(choices):
    """The state of the global generator is different for the second model."""
    one, again, other = (GPT(tiny_config(**choices), seed).state_dict() for seed in (5, 5, 6))
    same(again, one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])
    plain = GPT(tiny_config(attn="softmax", pos="learned"), 5).state_dict()
    shared = [name for name in one if name in plain and one[name].shape == plain[name].shape]
    assert len(shared) > 5
    same([one[name] for name in shared], [plain[name] for name in shared])


@every
def test_a_model_is_the_same_after_saving_and_loading(choices):
    """A file of tensors alone restores all parameters and buffers, and the logits are the same."""
    file, idx = io.BytesIO(), torch.arange(13)[None]
    written, read = (GPT(tiny_config(n_head=4, n_embd=32, **choices), seed).eval() for seed in (1, 2))
    torch.save(written.state_dict(), file)
    file.seek(0)
    read.load_state_dict(torch.load(file, weights_only=True))
    same(read.state_dict(), written.state_dict())
    same(read(idx)[0], written(idx)[0])


@every
def test_every_parameter_learns(choices):
    assert_learns(GPT(tiny_config(n_head=4, n_embd=32, **choices)), token_ids(4, 17))


@published
def test_params_describe_the_recipe(choices):
    module = layer(**choices, dtype=torch.float32)
    own = {name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]}
    found = params.figures(module)
    assert not own - {*params.HIDDEN, "table", "alibi", "t5"} or found
    assert found.keys() <= params.MEANINGS.keys(), "give it a line in MEANINGS of evals/params.py"


CONTRACT = (
    test_a_hidden_key_is_seen_by_its_own_row_only, test_extreme_scores_stay_finite_in_values_and_gradients,
    test_autocast_is_close_to_float64, test_a_model_is_the_same_after_saving_and_loading, test_every_parameter_learns)


@given(recipes())
@settings(max_examples=examples(30))
def test_combinations_of_axes_obey_the_same_contract(choices):
    for test in CONTRACT:
        test(choices)


@pytest.mark.exhaustive
@given(recipes())
def test_no_row_of_any_combination_sees_another_document(choices):
    test_no_row_sees_another_document_of_a_pack(choices)


@pytest.mark.parametrize("attn", [
    pytest.param(attn, marks=() if attn == "streaming" else pytest.mark.exhaustive)
    for attn in ("softmax", "streaming", "lazy", "entmax", "tda")])
def test_the_kernels_of_packed_documents_equal_the_block_loop_and_skip_other_documents(attn):
    fused, loop = (layer(attn, dtype=torch.float32, n_kv_head=2, kernel=how).to(DEVICE) for how in ("triton", "torch"))
    loop.load_state_dict(fused.state_dict())
    first = torch.tensor([[0] * 9 + [9] + [10] * 54 + [64] * 20, [0] * 32 + [32] * 32 + [64] * 20], device=DEVICE)
    qkvx = [a.to(DEVICE) for a in inputs(fused, 84, dtype=torch.float32)]
    fused.sight, loop.sight = (module.sight._replace(starts=first) for module in (fused, loop))
    found, expected = (attend_and_gradients(module, *qkvx, table=module.distance()) for module in (fused, loop))
    for a, b in zip(found, expected, strict=True):
        close(a, b, 2 * 84, size=None if b is None else max(1.0, b.abs().max().item()))
    qkvx[2][:, :, :64] = torch.nan              # their tiles are not visited: a nan would spread to all rows of a tile
    assert fused.attend(*qkvx, fused.distance())[:, :, 64:].isfinite().all()


@called
@given(st.sampled_from((1, 2)))
@settings(max_examples=examples(1))             # by default 1, with --all both
def test_a_kernel_equals_the_block_loop_in_output_and_all_gradients(choices, groups):
    """On a GPU or interpreted, with a learned distance bias and grouped heads. Some keys occur twice: scores tie."""
    has_one = any(case.values[0] == choices for case in EVERY if case.id in CALLS)
    pairs = ATTENTIONS[choices["attn"]].get("diff") == "v1"             # of key heads
    choices = {"n_kv_head": 2 if pairs else groups, "bias_range": 20, "dtype": torch.float32} | choices
    assert {name for name, rule in RULES.items() if rule.kernel} <= kernels.KERNELS.keys()
    try:
        fused, loop = (layer(**choices, kernel=kernel) for kernel in ("triton", "torch"))
        mixers.choose_kernel(fused.config, DEVICE)
    except ValueError as e:
        assert not has_one, e
        pytest.skip(str(e))
    loop.load_state_dict(fused.state_dict())
    T = 140 if choices.get("pos") == "t5" else 45                       # beyond T5's table
    qkvx = [a.to(DEVICE) for a in inputs(fused, T, dtype=torch.float32)]
    qkvx[1][:, :, 30:40] = qkvx[1][:, :, 10:20]
    found, expected = (attend_and_gradients(module.to(DEVICE), *qkvx, table=module.distance())
                       for module in (fused, loop))
    # The gradient of a state's decay sums over all pairs of tokens before and after it. All summands have a size of
    # about 1, even if they cancel. They cancel for a sink logit before a norm, which undoes it
    terms = T * T if fused.config.mixer == "recurrent" else T + fused.width             # a score sums over the width
    for a, b in zip(found, expected, strict=True):
        close(a, b, terms, size=None if b is None else max(1.0, b.abs().max().item()))
