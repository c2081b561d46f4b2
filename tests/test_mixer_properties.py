"""Properties of all mixers except attention: drawn recipes, axes, sizes and constants against the dense reference."""
import hypothesis.strategies as st
import pytest
import reference_mixers as reference
import test_properties as properties
import torch
from bounds import SEED
from conftest import examples, tiny_config
from hypothesis import given, reject, settings
from layers import inputs, layer, normal, scalars, with_gradients

import mixers
from attention import ATTENTIONS
from axes.options import constants
from mixers import focus

# what a case always has: a recipe, and Focus' parts
FIXED = [{"attn": attn} for attn, axes in ATTENTIONS.items() if "mixer" in axes and attn != "focus"]
FIXED += [{"attn": "focus", "balance": balance} for balance in focus.BALANCES] + [{"attn": "focus", "topk": 2}]
ARGS = {                                        # values of constants that make a short sequence interesting
    "chunk": st.integers(1, 20), "groups": st.integers(1, 5), "temperature": st.sampled_from([0.5, 1, 2]),
    "iterations": st.integers(0, 4), "gate_scale": st.sampled_from([1, 10]), "gate_offset": st.sampled_from([0, 0.5]),
    "learn_gate_scale": st.just(1), "learn_gate_offset": st.just(1), "clusters": st.integers(1, 5),
    "cluster_size": st.integers(0, 12), "features": st.integers(0, 12), "components": st.integers(1, 8),
    "local": st.sampled_from([0, 0.25, 0.6, 1]), "realloc": st.integers(0, 1), "page": st.integers(1, 9),
    "bits": st.integers(1, 3), "tables": st.integers(2, 8), "first": st.integers(0, 4), "recent": st.integers(2, 9),
    "out_norm_eps": st.just(0.01)}


@st.composite
def cases(draw, fixed):
    """Up to three axes and all numbers beyond the fixed choices, for `trained`, and counts of sequences and tokens."""
    mixer = mixers.MIXERS[ATTENTIONS[fixed["attn"]]["mixer"]]
    axes = {axis: list(values) for axis, values in mixer.axes.items() if len(values) > 1}
    changed = draw(st.lists(st.sampled_from(sorted(axes)), max_size=3, unique=True))
    choices = {axis: draw(st.sampled_from(axes[axis])) for axis in changed} | fixed
    heads, groups = draw(st.sampled_from([(4, 2), (4, 4), (4, 1), (3, 1), (1, 1)]))
    choices |= {"n_head": heads, "n_kv_head": groups, "n_embd": heads * draw(st.sampled_from([8, 5, 4]))}
    choices |= {"window": draw(st.integers(1, 12))} if "window" in mixer.numbers else {}
    try:
        args = {name: draw(ARGS[name]) for name in constants(tiny_config(**choices), mixer.axes) if name in ARGS}
        if "topk" in mixer.numbers and "bits" not in args:
            choices.setdefault("topk", draw(st.integers(0, args.get("groups", 12))))
        choices["attn_args"] = ",".join(f"{name}={value}" for name, value in args.items())
        tiny_config(**choices)
    except ValueError:                          # not legal
        reject()
    return choices, draw(st.integers(1, 2)), draw(st.integers(1, 40))


def drawn(count):
    """Run a test(fixed, data) that draws cases, `count` times for each of FIXED."""
    names = [" ".join(map(str, fixed.values())) for fixed in FIXED]
    each = pytest.mark.parametrize("fixed", FIXED, ids=names)
    return lambda test: each(given(data=st.data())(settings(max_examples=examples(count))(test)))


def trained(choices):
    """A layer as if trained: statistics differ from their initial values, and some steps of Titans are too large."""
    torch.manual_seed(SEED)                     # a case must not depend on the cases before it
    module = layer(**choices)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name in ("potential", "middle"):
                value.copy_(normal(len(value), stream=5))
            if name == "memory_out":
                value.mul_(2)
    return module


def agree(found, expected, *rounding):
    """Titans adds 1e-12 to a denominator."""
    properties.agree(dict(enumerate(found)), dict(enumerate(expected)), *rounding, moved=1e-12)


@pytest.fixture(autouse=True)
def small_rows(small_blocks, monkeypatch):
    monkeypatch.setattr(focus, "ROWS", 16)


@drawn(6)
def test_outputs_all_gradients_and_weights_equal_the_reference(fixed, data):
    choices, B, T = data.draw(cases(fixed))
    module = trained(choices).train(data.draw(st.booleans()))
    q, k, v, x = inputs(module, T, B=B)
    qkvx = q, k, v, x = q, k, v, data.draw(st.sampled_from([1, 30])) * x        # 30: some gates close
    found, expected = (with_gradients(function, qkvx, scalars(module)) for function in (
        module.attend, lambda *leaves: reference.attend(module, *leaves)))
    agree(found, expected, 64 * T)
    with torch.no_grad():                       # there Focus uses torch's fused kernel, which sums in float32
        agree([module.attend(*qkvx)], expected[:1], T, torch.float32 if module.config.mixer == "focus" else None)
        if module.has_weights:                        # otherwise weights_of has derivatives
            agree([module.weights_of(q, k, x)], [reference.weights(module, q, k, x)], 64 * T)


@drawn(5)
def test_a_layer_equals_the_reference_in_one_call_and_decoded_in_random_parts(fixed, data):
    choices, B, T = data.draw(cases(fixed))
    module, x = trained(choices | {"dropout": 0.5}), normal(B, T, choices["n_embd"])         # for training alone
    expected, rounding = reference.layer(module, x), (64 * T, None)
    if module.config.pos == "rope":             # its angles are float32
        rounding = T, torch.float32
    agree([module(x)], [expected], *rounding)
    if module.cached:
        past, parts = {}, []
        while sum(parts) < T:
            parts.append(min(T - sum(parts), data.draw(st.sampled_from([1, 1, 2, 9, 20]))))
        agree([torch.cat([module(part, past) for part in x.split(parts, 1)], 1)], [expected], *rounding)
        assert past["tokens"] == T


@drawn(2)
def test_rows_of_a_causal_layer_have_no_gradient_from_later_tokens(fixed, data):
    choices, B, T = data.draw(cases(fixed))
    module, x = trained(choices).train(data.draw(st.booleans())), normal(B, T, choices["n_embd"]).requires_grad_()
    assert module.causal == (fixed["attn"] != "routing" and fixed.get("balance") != "sinkhorn")
    if module.causal:
        t = data.draw(st.integers(1, T))
        gradient, = torch.autograd.grad(module(x)[:, :t].square().sum(), x)
        assert gradient[:, t:].eq(0).all() and gradient[:, :t].any()
