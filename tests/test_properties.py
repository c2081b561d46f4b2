"""What holds for every layer: hypothesis draws cases (ten times as many with --all, others with
--hypothesis-seed=1), and tests/reference.py and reference_mixers.py say what is right."""

from unittest import mock

import pytest
import reference
import reference_mixers
import torch
from bounds import SEED, close
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import KINDS, inputs, layer, normal, recipes, scalars, shaped, with_gradients

import kernels
from attention import ATTENTIONS
from axes.layer import Cache
from axes.positions import POSITIONS, Distance
from mixers import focus

# what a case always has: a recipe, positions, or parts of Focus
FIXED = [{"attn": attn} for attn in ATTENTIONS]
FIXED += [{"attn": "softmax", "pos": pos} for pos in POSITIONS]
FIXED += [{"attn": "focus", "balance": balance} for balance in focus.BALANCES]
FIXED += [{"attn": "focus", "topk": 2}]
SHAPES = st.sampled_from(
    (
        {},
        {},
        {"n_head": 3, "n_kv_head": 1, "n_embd": 15},
        {"n_head": 1, "n_kv_head": 1, "n_embd": 8},
    )
)
ARGS = {  # constants that make a short sequence interesting
    "chunk": range(1, 41),
    "groups": (4, 1, 2, 3, 5),
    "temperature": (0.5, 1, 2),
    "iterations": range(5),
    "gate_scale": (1, 10),
    "gate_offset": (0, 0.5),
    "learn_gate_scale": (1,),
    "learn_gate_offset": (1,),
    "clusters": range(1, 6),
    "cluster_size": range(13),
    "features": range(13),
    "components": range(1, 9),
    "local": (0, 0.25, 0.6, 1),
    "realloc": (0, 1),
    "page": range(1, 10),
    "bits": range(1, 4),
    "tables": range(2, 9),
    "first": range(5),
    "recent": range(2, 10),
    "out_norm_eps": (0.01, 1),  # smaller ones amplify rounding where an output is almost 0
}
CALL = {  # of a layer: {what: values}
    "T": (45, 20, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33),
    "rows": (45, 1, 5, 18),  # the last ones of T
    "B": (1, 2),
    "scores": KINDS,
    "block": (16, 1, 3, 7, 64),  # how many rows the block loop takes at a time
    "W": (5, 0, 1, 20, 60),
    "tail": (False, True),
    "slope": (False, True),
    "training": (False, True),
    "zeros": (True, False),  # of some tokens, the value
    "gates": (1, 30),  # 30: some gates of a mixer close
}
CALLS = st.fixed_dictionaries({what: st.sampled_from(CALL[what]) for what in CALL})


def drawn(count):
    """Run a test(fixed, data) that draws cases, `count` times for each of FIXED."""
    names = [" ".join(map(str, fixed.values())) for fixed in FIXED]
    each = pytest.mark.parametrize("fixed", FIXED, ids=names)
    few = settings(max_examples=examples(count))
    return lambda test: each(given(data=st.data())(few(test)))


def drawn_layer(fixed, data, **more):
    """A layer as if trained, and its definition: statistics differ from their initial values, and
    some steps of Titans are too large."""
    torch.manual_seed(SEED)  # a case must not depend on the cases before it
    choices = data.draw(recipes(fixed | data.draw(SHAPES), ARGS))
    depth = data.draw(st.integers(0, 1))
    progress = data.draw(st.sampled_from((0.3, 0.9)))
    module = layer(**choices, **more, depth=depth, progress=progress)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name in ("potential", "middle"):
                value.copy_(normal(len(value), stream=5))
            if name == "memory_out":
                value.mul_(2)
    return module, reference if module.config.mixer == "attention" else reference_mixers


def drawn_inputs(module, call):
    """q, k, v, x, and the parts of a Distance, or None. Only attention adds a bias to scores."""
    attention = module.config.mixer == "attention"
    rows = min(call["T"], call["rows"]) if attention else None
    q, k, v, x = inputs(module, call["T"], rows, B=call["B"])
    if call["zeros"]:
        v = v * (torch.arange(call["T"]) % 3 > 0)[:, None]
    if not attention:
        return [q, k, v, call["gates"] * x], None
    H, W = module.score_heads, call["W"]
    table = normal(H, W, stream=5) if W else None
    tail = normal(H, stream=5) if call["tail"] else None
    slope = normal(H, stream=5) if call["slope"] else None
    some = W or call["tail"] or call["slope"]
    return [*shaped(call["scores"], q, k), v, x], (table, tail, slope) if some else None


def output_and_gradients(attend, distance, module, qkvx, table):
    """{name: attend's output, and its gradient by every input and every parameter of the layer}."""
    names = ("table", "tail", "slope")
    parts = {name: part for name, part in zip(names, table or (), strict=False) if part is not None}

    def call(q, k, v, x, *leaves):
        leaves = dict(zip(parts, leaves, strict=True))
        return attend(q, k, v, x, distance(*map(leaves.get, names)) if parts else None)

    own = scalars(module)
    found = with_gradients(call, [*qkvx, *parts.values()], own.values())
    of = [f"d{name}" for name in ("q", "k", "v", "x", *parts, *own)]
    return dict(zip(["o", *of], found, strict=True))


def exact_frequencies(config, width):
    """RoPE's, in float64. Angles in float32 would take some scores across the kinks of rules."""
    return config.rope_base ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))


def agree(module, found, expected, terms, dtype=None):
    """Values and gradients are equal up to rounding. No gradient is a gradient of 0, and a gradient
    that cancels still has a size of 1, or that of dq and dk, which sum the same numbers. Titans
    adds 1e-12 to a denominator."""
    for name, b in expected.items():
        a = found[name]
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        others = [expected[part] for part in ("dq", "dk") if name != "o" and part in expected]
        size = max(1.0, *(part.abs().max().item() for part in (b, *others)))
        moved = 1e-12 * size if module.config.rule == "momentum" else 0.0
        close(a, b, terms, size, dtype, moved, f"{name}: ")


def rounding(module, q, k, gates=1):
    """How many roundings an output sums. The larger a score, the more its rounding moves weights,
    and the larger the gates, the more does that of their logarithms' sums."""
    if module.config.mixer != "attention":
        return 64 * k.shape[2] * gates
    return 64 * (1 + module.scale * (q.abs().amax(-1).max() * k.abs().sum(-1).max()).item())


@drawn(6)
def test_outputs_all_gradients_and_weights_equal_the_reference(fixed, data):
    call = data.draw(CALLS)
    module, define = drawn_layer(fixed, data, kernel="torch")
    module.train(call["training"])
    (q, k, v, x), table = drawn_inputs(module, call)
    parts = table and Distance(*table)
    terms = rounding(module, q, k, call["gates"])

    def exact(*args):
        return define.attend(module, *args)

    block = call["block"] if define is reference else 16  # a mixer takes one row as a decoding step
    with mock.patch.object(kernels, "BLOCK", block):
        found = output_and_gradients(module.attend, Distance, module, (q, k, v, x), table)
        expected = output_and_gradients(exact, lambda *parts: parts, module, (q, k, v, x), table)
        agree(module, found, expected, terms)
        with torch.no_grad():
            o = module.attend(q, k, v, x, parts)
            # there Focus uses torch's fused kernel, in float32
            dtype = torch.float32 if module.config.mixer == "focus" else None
            agree(module, {"o": o}, {"o": expected["o"]}, terms, dtype)
            if module.has_weights:  # otherwise weights_of has derivatives
                w = {"w": define.weights(module, q, k, x, *([table] if table else []))}
                agree(module, {"w": module.weights_of(q, k, x, parts)}, w, terms)
            if module.config.diff != "none":
                views = dict(enumerate(define.views(module, q, k, x, table)))
                agree(module, dict(enumerate(module.views_of(q, k, x, parts))), views, terms)


@drawn(3)
def test_a_layer_equals_the_reference_in_one_call_and_decoded_in_parts(fixed, data):
    """From x to all gradients, with projections and positions; no row's gradient is of a later
    token. Decoding gives the same if a copy of the cache then reads other tokens."""
    with mock.patch("axes.positions.rope_frequencies", exact_frequencies):
        module, define = drawn_layer(fixed, data, bias_range=20, dropout=0.5)  # for training alone
    assert module.causal == (fixed["attn"] != "routing" and module.config.balance != "sinkhorn")
    T = data.draw(
        st.just(150) if "pos" in fixed else st.sampled_from(CALL["T"])
    )  # beyond T5's buckets
    x = normal(2, T, module.config.n_embd)
    names, parameters = zip(*module.named_parameters(), strict=True)
    of = "o", "dx", *names
    with mock.patch.object(kernels, "BLOCK", 16):

        def results(function):
            return dict(zip(of, with_gradients(function, [x], parameters), strict=True))

        expected = results(lambda x: define.layer(module, x))
        agree(module, results(module), expected, 1000 * T)  # lssar raises to the power 15
        if module.causal:
            t = data.draw(st.integers(1, T))
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(module(x)[:, :t].square().sum(), x)
            assert not gradient[:, t:].any()
        if module.cached:
            cache = Cache()
            steps = []
            x = x.detach()
            with torch.no_grad():
                while x.shape[1]:
                    part, x = x.tensor_split([data.draw(st.sampled_from((1, 1, 2, 9, 20)))], 1)
                    before = cache.copy()
                    steps.append(module(part, cache))
                    module(-part, before)
            agree(module, {"o": torch.cat(steps, 1)}, {"o": expected["o"]}, 1000 * T)
            assert cache.tokens == T
