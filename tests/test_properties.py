"""What holds for every layer and kernel, drawn by hypothesis and compared with tests/reference.py.

python -m pytest tests/test_properties.py --hypothesis-seed=1    draws other cases, and --all twenty times as many
"""
from functools import partial
from unittest import mock

import reference
import torch
from bounds import close, moved_by_rounding
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import inputs, layer, normal, recipes, scalars, with_gradients

import kernels
from axes.positions import Distance

BLOCKS = st.sampled_from((16, 1, 3, 7, 64))     # rows that the block loop takes at a time
LENGTHS = st.sampled_from((20, 45, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33))
SCORES = st.sampled_from((None, "large", "ties", "equal", "negative", "far below 0"))


def shaped(kind, q, k):
    """Queries and keys whose scores are of a kind."""
    T = k.shape[2]
    if kind == "ties":                          # pairs of equal keys
        return q, k[:, :, torch.arange(T) // 2 * 2]
    if kind == "equal":
        return q, k[:, :, :1].expand_as(k)
    return {None: (q, k), "large": (30 * q, k), "negative": (q.abs(), -k.abs()),
            "far below 0": (10 + q.abs(), -30 - k.abs())}[kind]


# the sizes of one call of a layer: block: rows that the block loop takes at a time; rows: the last of the T rows
CALLS = st.fixed_dictionaries({
    "T": LENGTHS, "rows": st.sampled_from((45, 1, 5, 18)), "B": st.integers(1, 2), "scores": SCORES, "block": BLOCKS,
    "W": st.sampled_from((0, 1, 5, 20, 60)), "tail": st.booleans(), "slope": st.booleans()})
LAYERS = st.fixed_dictionaries({"depth": st.integers(0, 1), "progress": st.sampled_from((0.3, 0.9))})


def drawn_inputs(module, call):
    """q, k, v, x, and the parts of a Distance or None."""
    q, k, v, x = inputs(module, call["T"], min(call["T"], call["rows"]), B=call["B"])
    heads, W = module.score_heads, call["W"]
    table = [normal(heads, W, stream=5) if W else None, *(normal(heads, stream=6) if call[part] else None
                                                          for part in ("tail", "slope"))]
    return [*shaped(call["scores"], q, k), v, x], table if any(part is not None for part in table) else None


def compute(attend, distance, module, qkvx, table):
    """attend's output and all its gradients."""
    given = [part for part in table or () if part is not None]

    def call(q, k, v, x, *parts):
        parts = iter(parts)
        return attend(q, k, v, x, table and distance(*(None if part is None else next(parts) for part in table)))
    return with_gradients(call, [*qkvx, *given], scalars(module))


def largest_score(module, qkvx):
    """The larger a score, the more its rounding moves the weights; at least 1."""
    q, k, *_ = qkvx
    return 1 + module.sight.scale * (q.abs().amax(-1).max() * k.abs().sum(-1).max()).item()


def agree(found, expected, terms):
    """Values and gradients up to rounding. No gradient counts as a gradient of 0."""
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert not any(part is not None and part.any() for part in (a, b))
        else:
            close(a, b, terms, size=max(1.0, b.abs().max().item()))


@given(recipes("attention"), LAYERS, CALLS)
@settings(max_examples=examples(60))
def test_the_block_loop_equals_the_reference_in_output_and_all_gradients(choices, where, call):
    module = layer(**choices, **where, kernel="torch")
    qkvx, table = drawn_inputs(module, call)
    with mock.patch.object(kernels, "BLOCK", call["block"]):
        found = compute(module.attend, Distance, module, qkvx, table)
    expected = compute(partial(reference.attend, module), lambda *parts: parts, module, qkvx, table)
    agree(found, expected, terms=64 * largest_score(module, qkvx))
