"""mixers/recurrent.py: what properties against the dense reference do not say. Precision, extremes
and costs."""

from functools import partial

import hypothesis.strategies as st
import pytest
import reference_mixers as reference
import torch
from bounds import below, close
from conftest import DEVICE, tiny_config
from hypothesis import example, given
from layers import layer, normal, with_gradients
from torch.nn import functional as F

from mixers.recurrent import all_chunks, one_chunk, token_by_token
from model import GPT

FORM = {
    "rate": None,
    "erases": False,
    "shared": False,
    "B": 1,
    "H": 2,
    "T": 37,
    "D": 24,
    "E": 40,
    "strength": 1,
    "repeated": False,
}  # several chunks, and several tiles of q, k and v
forms = given(
    rate=st.sampled_from([None, "head", "channel"]),
    erases=st.booleans(),
    shared=st.booleans(),
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    T=st.integers(1, 80),
    D=st.integers(1, 40),
    E=st.integers(1, 40),
    # at 400 only the token itself remains
    strength=st.sampled_from([1, 400]),
    repeated=st.booleans(),
)


def draw(rate, erases, shared, B, H, T, D, E, strength, repeated, dtype=torch.float32):
    """Inputs of a state by name. rate: one for a head or one for each channel. shared: all heads
    have the same q and k. repeated: all tokens are equal. In memory a head's rows are not adjacent,
    as after a fused projection."""
    keys, rates = (1 if shared else H, D), (H, D if rate == "channel" else 1)
    q, k, v, forget, erase = (
        normal(B, T, *shape, stream=n).transpose(1, 2)
        for n, shape in enumerate((keys, keys, (H, E), rates, (H, 1)))
    )
    x = {"q": D**-0.5 * q, "k": F.normalize(k, dim=-1), "v": v}
    x |= {"forget": strength * F.logsigmoid(forget + 1)} if rate else {}
    x |= {"erase": torch.sigmoid(4 * erase)} if erases else {}
    for name, y in x.items():
        if repeated:
            y = y[:, :, :1].expand_as(y)
        x[name] = y.to(DEVICE, dtype if name in "qkv" else torch.float32)
    return x


def by_chunks(q, k, v, forget=None, erase=None, chunk=one_chunk):
    start = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3])
    if forget is None:
        forget = v.new_zeros(1)
    tokens = [q, k, v, forget.expand(*v.shape[:3], -1)]
    if erase is not None:
        tokens.append(erase)
    return all_chunks(chunk, (start,), tokens, 24)[0]


def by_reference(q, k, v, forget=None, erase=None):
    keep = v.new_ones(*v.shape[:3], 1) if forget is None else forget.exp()
    return reference.recurrence(q, k, v, keep, erase)


def results_of(function, x):
    """A function's output for named inputs, and all gradients."""
    return with_gradients(lambda *leaves: function(**dict(zip(x, leaves, strict=True))), x.values())


def assert_exact(function, x, limit=1e-5):
    """The relative error of the output and of each gradient is a few roundings. A size below 0.03
    counts as 0.03, because some gradients are 0 up to rounding. That of forget is a sum of products
    of the others, which cancel."""
    found = results_of(function, x)
    exact = results_of(by_reference, {name: y.double() for name, y in x.items()})
    sizes = [true.square().mean().sqrt().clamp(min=0.03) for true in exact]
    for name, y, true, size in zip(("o", *x), found, exact, sizes, strict=True):
        size = max(sizes) if name == "forget" else size
        below((y.double() - true).square().mean().sqrt(), limit * size)
    for dy, y in zip(found[1:], x.values(), strict=True):
        assert dy.dtype == y.dtype and dy.shape == y.shape


@forms
@example(**FORM | {"rate": "channel", "erases": True, "strength": 400})  # KDA
def test_chunks_are_exact_in_float32(**form):
    """Also where all but the token itself is forgotten: quotients of exponentials would be 0 / 0.
    With a rate for each channel, scores of more than 16 tokens are halved."""
    for chunk in (one_chunk, token_by_token):
        assert_exact(partial(by_chunks, chunk=chunk), draw(**form))


def test_what_a_token_writes_has_a_bias_in_learning_memories_alone():
    for attn in ("deltanet", "gated_deltanet", "ttt", "titans"):
        assert (layer(attn).beta.bias is not None) == (attn in ("ttt", "titans"))


@pytest.mark.parametrize("size, bias", [(1, 0.0), (4, 0.0), (4, 3.0)])
def test_a_memory_that_learns_too_fast_stays_finite(size, bias):
    """The rate is the largest, and nothing is forgotten. Ten equal tokens follow each other, so
    their steps have the same direction. A memory of 4 times its initial size has 16 times the
    curvature. The steps of each chunk overshoot there, but they must not grow from chunk to
    chunk."""
    module = layer("titans")
    for memory in (module.memory_in, module.memory_out):
        memory.data.mul_(size)
    module.momentum.bias.data.fill_(bias)
    module.beta.bias.data.fill_(5.0)
    module.forget_bias.data.fill_(12.0)
    x = normal(1, 40, 32).repeat_interleave(10, 1).requires_grad_()
    assert size == 1 or module.slowed(x).min() > 0.5
    o = module(x)
    (slope,) = torch.autograd.grad(o.square().mean(), x)
    assert o.isfinite().all()
    below(slope.norm(), 10)


@pytest.mark.parametrize("attn", ["ttt", "titans"])
def test_weights_of_a_learner_estimate_derivatives(attn):
    """weights_of estimates the mean over channels c of the derivatives of o_ic by v_jc, along
    random signs."""
    module = layer(attn)
    x = normal(1, 20, 32)
    q, k, v = module.projected(x, None)

    def read(v):
        return module.read(q, k, v[None], x)[0]

    jacobian = torch.autograd.functional.jacobian(read, v[0].detach())
    random = torch.Generator().manual_seed(0)  # the layer's own
    signs = torch.randint(2, (4, 1, 8), generator=random).to(v) * 2 - 1
    signs = signs.expand(4, 20, 8)
    along = torch.einsum("hic,hichjd,hjd->hij", signs, jacobian, signs) / 8
    close(module.weights_of(q, k, x)[0], along)


def test_the_flops_of_a_token_do_not_depend_on_the_length():
    # 2 heads of width 8
    for attn, T, flops in (
        ("retnet", 16, 6 * 2 * 2 * 8 * 8),
        ("retnet", 512, 6 * 2 * 2 * 8 * 8),
        ("deltanet", 16, 6 * 3 * 2 * 8 * 8),
        ("softmax", 512, 12 * 16 * 512),
    ):
        model = GPT(tiny_config(attn=attn, block_size=T))
        assert model.flops_per_token() == 6 * model.num_params(embeddings=False) + flops
