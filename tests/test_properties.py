"""What holds for every layer: hypothesis draws cases (ten times as many with --all, others with --hypothesis-seed=1),
and tests/reference.py says what is right."""
from functools import partial
from unittest import mock

import pytest
import reference
import torch
from bounds import close
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import KINDS, SCORES, inputs, layer, normal, recipes, scalars, shaped, with_gradients

import kernels
from attention import ATTENTIONS
from axes.positions import Distance

LENGTHS = st.sampled_from((45, 20, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33))
LAYERS = st.fixed_dictionaries({"depth": st.integers(0, 1), "progress": st.sampled_from((0.3, 0.9))})
# one call of a layer. rows: the last ones of T; block: how many rows the block loop takes at a time
CALLS = st.fixed_dictionaries({
    "T": LENGTHS, "rows": st.sampled_from((45, 1, 5, 18)), "B": st.integers(1, 2), "scores": SCORES,
    "block": st.sampled_from((16, 1, 3, 7, 64)), "W": st.sampled_from((5, 0, 1, 20, 60)), "tail": st.booleans(),
    "slope": st.booleans(), "zeros": st.sampled_from((True, False))})  # zeros: of some tokens, the value


def drawn_inputs(module, call):
    """q, k, v, x, and the parts of a Distance, or None."""
    q, k, v, x = inputs(module, call["T"], min(call["T"], call["rows"]), B=call["B"])
    v = v * (torch.arange(call["T"]) % 3 > 0)[:, None] if call["zeros"] else v
    heads, W = module.score_heads, call["W"]
    table = [normal(*shape, stream=5) if there else None for there, shape in (
        (W, (heads, W)), (call["tail"], (heads,)), (call["slope"], (heads,)))]
    return [*shaped(call["scores"], q, k), v, x], table if any(part is not None for part in table) else None


def output_and_gradients(attend, distance, module, qkvx, table):
    """{name: attend's output, and its gradient by every input and every learned number of the layer}."""
    names = ("table", "tail", "slope")
    parts = {name: part for name, part in zip(names, table or (), strict=False) if part is not None}

    def call(q, k, v, x, *leaves):
        leaves = dict(zip(parts, leaves, strict=True))
        return attend(q, k, v, x, distance(*map(leaves.get, names)) if parts else None)
    own = [name for name, _ in module.named_parameters() if not name.startswith(("c_attn", "c_proj"))]
    found = with_gradients(call, [*qkvx, *parts.values()], scalars(module))
    return dict(zip(("o", *(f"d{name}" for name in ("q", "k", "v", "x", *parts, *own))), found, strict=True))


def exact_frequencies(config, width, device):
    """RoPE's, in float64. Angles in float32 would take some scores across the kinks of rules."""
    return config.rope_base ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))


def agree(found, expected, terms, dtype=None, moved=0.0):
    """Values and gradients are equal up to rounding. No gradient is a gradient of 0, and a gradient that cancels still
    has a size of 1, or that of dq and dk, which sum the same numbers. moved: a share of that size, see `close`."""
    for name, b in expected.items():
        if (a := found[name]) is not None or b is not None:
            a, b = (torch.zeros_like(other) if y is None else y for y, other in ((a, b), (b, a)))
            also = [expected[part] for part in ("dq", "dk") if name != "o" and part in expected]
            size = max(1.0, *(part.abs().max().item() for part in (b, *also)))
            close(a, b, terms, size, dtype, moved * size, f"{name}: ")


def largest_score(module, q, k, *_):
    """At least 1. The larger a score, the more its rounding moves the weights."""
    return 1 + module.sight.scale * (q.abs().amax(-1).max() * k.abs().sum(-1).max()).item()


@given(recipes("attention"), LAYERS, CALLS)
@settings(max_examples=examples(150))
def test_the_block_loop_equals_the_reference_in_output_and_all_gradients(choices, where, call):
    module = layer(**choices, **where, kernel="torch")
    qkvx, table = drawn_inputs(module, call)
    with mock.patch.object(kernels, "BLOCK", call["block"]):
        found = output_and_gradients(module.attend, Distance, module, qkvx, table)
    expected = output_and_gradients(partial(reference.attend, module), lambda *parts: parts, module, qkvx, table)
    agree(found, expected, terms=64 * largest_score(module, *qkvx))


@given(recipes("attention"), LAYERS, CALLS)
@settings(max_examples=examples(60))
@torch.no_grad()
def test_attention_weights_and_views_equal_the_reference(choices, where, call):
    module = layer(**choices, **where)
    (q, k, _, x), table = drawn_inputs(module, call)
    parts = table and Distance(*table)
    with mock.patch.object(kernels, "BLOCK", call["block"]):
        found, expected = module.weights_of(q, k, x, parts), reference.weights(module, q, k, x, table)
        terms, size = 64 * largest_score(module, q, k), max(1.0, expected.abs().max().item())
        close(found, expected, terms, size)
        if module.config.diff != "none":
            close(module.views_of(q, k, x, parts), reference.views(module, q, k, x, table), terms, size)


@given(recipes("attention"), LAYERS, st.one_of(LENGTHS, st.just(150)))         # beyond T5's buckets
@settings(max_examples=examples(100))
def test_a_layer_equals_the_reference_from_x_to_all_its_gradients(choices, where, T):
    """With projections and positions."""
    module, x = layer(**choices, **where, bias_range=20, dropout=0.5), normal(2, T, 32)         # for training alone
    names, parameters = zip(*module.named_parameters(), strict=True)
    with mock.patch("axes.positions.rope_frequencies", exact_frequencies):
        found, expected = (dict(zip(("y", "dx", *names), with_gradients(form, [x], parameters), strict=True))
                           for form in (module, partial(reference.layer, module)))
    agree(found, expected, 1000 * T)             # lssar raises to the power 15


@given(recipes(), st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(max_examples=examples(60))
@torch.no_grad()
def test_decoding_in_chunks_equals_one_call(choices, chunks):
    """Also if a copy of the cache then reads other tokens."""
    module, x, past, steps = layer(**choices), normal(2, sum(chunks), 32), {}, []
    if module.cached:
        for part in x.split(chunks, 1):
            before = {**past}
            steps.append(module(part, past))
            module(-part, before)
        close(torch.cat(steps, 1), module(x), terms=64, dtype=torch.float32)
        assert past["tokens"] == sum(chunks)


@given(recipes(), st.integers(2, 45), st.integers(1, 44), st.booleans())
@settings(max_examples=examples(100))
def test_no_row_of_a_causal_layer_depends_on_later_tokens(choices, T, t, training):
    module, t, x = layer(**choices).train(training), min(t, T - 1), normal(2, T, 32).requires_grad_()
    if module.causal:
        y = module(x)[:, :t]
        gradient, = torch.autograd.grad(y.square().sum(), x)
        assert not gradient[:, t:].any()
        later = torch.cat([x[:, :t], 100 * normal(2, T - t, 32, stream=1)], 1)
        close(module(later)[:, :t], y, terms=T)


@pytest.mark.parametrize("attn", ATTENTIONS)
@given(LAYERS, CALLS, st.integers(1, 44))
@settings(max_examples=examples(1))
def test_each_recipe_as_it_is_has_all_these_properties(attn, where, call, t):
    choices = {"attn": attn}
    test_decoding_in_chunks_equals_one_call.hypothesis.inner_test(choices, [t, 1, 1, 20])
    test_no_row_of_a_causal_layer_depends_on_later_tokens.hypothesis.inner_test(choices, 45, t, True)
    if "mixer" not in ATTENTIONS[attn]:
        for scores in KINDS:
            test_the_block_loop_equals_the_reference_in_output_and_all_gradients.hypothesis.inner_test(
                choices, where, call | {"scores": scores})
        test_attention_weights_and_views_equal_the_reference.hypothesis.inner_test(choices, where, call)
        test_a_layer_equals_the_reference_from_x_to_all_its_gradients.hypothesis.inner_test(choices, where, 150)
