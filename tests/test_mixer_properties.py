"""Properties of every mixer but attention, over drawn recipes, axes, sizes and constants, against
tests/reference_mixers.py."""
import hypothesis.strategies as st
import pytest
import reference_mixers as reference
import torch
from bounds import SEED, below, close
from conftest import DEVICE, examples, tiny_config
from hypothesis import given, reject, settings
from layers import inputs, layer, normal, scalars, with_gradients

import mixers
from attention import ATTENTIONS
from axes.options import constants

MIXED = [attn for attn, axes in ATTENTIONS.items() if "mixer" in axes]
ARGS = {                                        # values of constants that make a small case interesting
    "chunk": st.integers(1, 20), "groups": st.integers(1, 5), "temperature": st.sampled_from([0.5, 1, 2]),
    "iterations": st.integers(0, 4), "gate_scale": st.sampled_from([1, 10]), "gate_offset": st.sampled_from([0, 0.5]),
    "learn_gate_scale": st.just(1), "learn_gate_offset": st.just(1), "penalty": st.just(1),
    "clusters": st.integers(1, 5), "cluster_size": st.integers(0, 12), "features": st.integers(0, 12),
    "components": st.integers(1, 8), "local": st.sampled_from([0, 0.25, 0.6, 1]), "realloc": st.integers(0, 1),
    "page": st.integers(1, 9), "bits": st.integers(1, 3), "tables": st.integers(2, 8), "first": st.integers(0, 4),
    "recent": st.integers(2, 9), "out_norm_eps": st.just(0.01)}


@st.composite
def cases(draw, among=MIXED, changes=3):
    """A recipe with up to three other axes, as arguments of `trained`, and the numbers of sequences and tokens."""
    attn = draw(st.sampled_from(among))
    mixer = mixers.MIXERS[ATTENTIONS[attn]["mixer"]]
    axes = {axis: list(values) for axis, values in mixer.axes.items() if len(values) > 1}
    changed = draw(st.lists(st.sampled_from(sorted(axes)), max_size=changes, unique=True))
    choices = {"attn": attn} | {axis: draw(st.sampled_from(axes[axis])) for axis in changed}
    heads, groups = draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (3, 1)]))
    choices |= {"n_head": heads, "n_kv_head": groups, "n_embd": heads * draw(st.sampled_from([4, 5, 8]))}
    choices |= {"window": draw(st.integers(1, 12))} if "window" in mixer.numbers else {}
    try:
        args = {name: draw(ARGS[name]) for name in constants(tiny_config(**choices), mixer.axes) if name in ARGS}
        if "topk" in mixer.numbers and "bits" not in args:
            choices["topk"] = draw(st.integers(0, args.get("groups", 12)))
        choices["attn_args"] = ",".join(f"{name}={value}" for name, value in args.items())
        tiny_config(**choices)
    except ValueError:                          # not legal
        reject()
    return choices, draw(st.integers(1, 2)), draw(st.integers(1, 40))


def trained(choices):
    """The layer, with statistics of training other than their initial values."""
    torch.manual_seed(SEED)                     # a case must not depend on the cases before it
    module = layer(**choices)
    for name, buffer in module.named_buffers():
        if name in ("potential", "middle"):
            buffer.copy_(normal(len(buffer), stream=5))
    return module


def agree(found, expected, terms):
    """Equal up to rounding, where no gradient is a gradient of 0. Gradients have a size of 1 even if they cancel."""
    for a, b in zip(found, expected, strict=True):
        if a is not None or b is not None:
            a, b = (torch.zeros_like(other) if y is None else y for y, other in ((a, b), (b, a)))
            size = max(1.0, b.abs().max().item())
            close(a, b, terms, size, moved=1e-12 * size)                # Titans adds 1e-12 to a denominator


@given(cases())
@settings(max_examples=examples(60))
def test_outputs_and_all_gradients_equal_the_reference(case):
    choices, B, T = case
    module = trained(choices)
    qkvx = inputs(module, T, B=B)
    agree(*(with_gradients(function, qkvx, scalars(module)) for function in (
        module.attend, lambda *leaves: reference.attend(module, *leaves))), 64 * T)
