"""mixers/recurrent_kernels.py against the recurrence in float64, token by token: on the GPU, or in Triton's interpreter
without one."""
import os

import pytest
import torch
from bounds import below, close, dice, same
from torch.nn import functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                              # before triton is imported

pytest.importorskip("triton")
import mixers  # noqa: E402
from attention import ATTENTIONS  # noqa: E402
from conftest import tiny_config  # noqa: E402
from mixers import recurrent_kernels  # noqa: E402
from test_kernels import DEVICE, DTYPES, poison, rms  # noqa: E402, F401

FORMS = {                       # heads of q and k, forget, is something erased?
    "linear": (2, None, False), "one rate a head": (2, 1, False), "one key for all heads": (1, 1, False),
    "a rate a channel": (2, "D", False), "delta": (2, None, True), "gated delta": (2, 1, True),
    "delta, a rate a channel": (2, "D", True)}


def tokens(q, k, v, forget=None, erase=None):
    """The recurrence, token by token."""
    B, H, T, E = v.shape
    S, outputs = v.new_zeros(B, H, k.shape[3], E), []
    for t in range(T):
        if forget is not None:
            S = forget[:, :, t, :, None].exp() * S
        u, key = v[:, :, t, None], k[:, :, t, :, None]
        if erase is not None:
            u = u - erase[:, :, t, None] * (key.mT @ S)
        S = S + key @ u
        outputs.append(q[:, :, t, None] @ S)
    return torch.cat(outputs, 2)


def draw(form, T, D=16, E=16, B=1, dtype=torch.float32, strength=1.0):
    """Inputs of recur(), by name. Keys have unit length, forget is a logarithm of strength times the usual."""
    heads, rates, erases = FORMS[form]
    g = dice(T)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(DEVICE)
    # strides as after a fused projection: the rows of one head are not adjacent
    q, k, v = (normal(B, T, n, width).transpose(1, 2) for n, width in ((heads, D), (heads, D), (2, E)))
    x = {name: y.to(dtype) for name, y in (("q", D**-0.5 * q), ("k", F.normalize(k, dim=-1)), ("v", v))}
    if rates:
        x["forget"] = strength * F.logsigmoid(normal(B, 2, T, D if rates == "D" else 1) + 2)
    return x | ({"erase": torch.sigmoid(normal(B, 2, T, 1))} if erases else {})


def with_gradients(function, x, dtype=None):
    """The output, and every gradient for a random upstream gradient."""
    leaves = {name: y.detach().to(dtype or y.dtype).requires_grad_() for name, y in x.items()}
    o = function(**leaves)
    upstream = torch.randn(o.shape, generator=dice(9)).to(o)
    return {"o": o.detach()} | {"d" + name: grad for (name, y), grad in zip(
        leaves.items(), torch.autograd.grad(o, list(leaves.values()), upstream), strict=True)}


def compare(x, limit):
    """Every relative difference from float64 is below the limit. (The 0.03: some gradients are exactly 0, such as that
    of forget at the first token, and are computed as 0 up to rounding.)"""
    found, exact = with_gradients(recurrent_kernels.recur, x), with_gradients(tokens, x, torch.float64)
    errors = {name: rms(found[name] - true) / max(rms(true), 0.03) for name, true in exact.items()}
    print({name: f"{error:.0e}" for name, error in errors.items()})
    below(max(errors.values()), limit)
    assert all(found["d" + name].dtype == y.dtype and found["d" + name].shape == y.shape for name, y in x.items())


exhaustive = pytest.mark.exhaustive


def by_default(chosen, values):
    """The cases as parameters: those that are not chosen run only with --all."""
    return [pytest.param(*case, marks=() if case in chosen else exhaustive) for case in values]


# -------------------------------------------------------------------------------- outputs and gradients

CASES = [(form, T) for form in FORMS for T in (1, 45, 63, 130)]


@pytest.mark.parametrize("form, T", by_default([*((form, 45) for form in FORMS), ("gated delta", 1)], CASES))
def test_float32(form, T):
    """Up to two chunks and a part of one; keys and values fit into one tile."""
    compare(draw(form, T), 1e-5)


@exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_several_tiles_of_keys_and_values(form):
    compare(draw(form, 45, D=24, E=40, B=2), 1e-5)


def test_keys_so_wide_that_products_are_cut_into_pieces():
    compare(draw("gated delta", 20, D=72), 1e-5)


@pytest.mark.parametrize("form, dtype", by_default(
    [("gated delta", torch.float16)], [(form, dtype) for form in FORMS for dtype in DTYPES[1:]]))
def test_low_precision(form, dtype):
    """Inputs, states and factors are rounded to the dtype: a few roundings each."""
    compare(draw(form, 63, D=24, dtype=dtype), 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("form, strength", by_default(
    [("delta, a rate a channel", 400.0)], [(form, 400.0) for form, (_, rates, _) in FORMS.items() if rates]))
def test_strong_decays(form, strength):
    """With a log forget of -50 per token only the token itself remains: quotients of exponentials would be 0 / 0."""
    x = draw(form, 45, strength=strength)
    assert x["forget"].median() < -50
    compare(x, 1e-5)


def test_one_token_again_and_again():
    """With erase 1 only the first write counts. Powers of A are large and cancel, while X stays small."""
    x = {name: y[:, :, :1].expand(-1, -1, 45, -1) for name, y in draw("delta", 45).items()}
    compare(x | {"erase": torch.ones_like(x["erase"])}, 1e-5)


def test_two_runs_agree_bit_for_bit():
    runs = [with_gradients(recurrent_kernels.recur, draw("gated delta", 45)) for _ in range(2)]
    same(*runs)


# -------------------------------------------------------------------------------- the layer

LINEAR = [name for name, axes in ATTENTIONS.items()
        if axes.get("mixer") == "recurrent" and axes["rule"] not in ("descent", "momentum")]


@pytest.mark.parametrize("attn", by_default([("mamba2",)], [(name,) for name in LINEAR]))
def test_the_layer_by_either_code(attn):
    """Output, and the gradients of all parameters and of the input."""
    results = []
    for kernel in ("triton", "torch"):
        torch.manual_seed(0)                    # the same initial values in both
        module = mixers.layer_of(tiny_config(attn=attn, n_head=2, n_embd=32, kernel=kernel), 0).to(DEVICE)
        x = torch.randn(1, 45, 32, generator=dice(1)).to(DEVICE).requires_grad_()
        o = module(x)
        results.append([o, *torch.autograd.grad(o.square().sum(), [x, *module.parameters()])])
    close(*results, terms=4 * 45)


@pytest.mark.parametrize("changes, message", [
    ({"k": torch.randn(1, 2, 9, 8)}, "must agree"), ({"forget": torch.zeros(1, 2, 9, 2)}, "must agree"),
    ({"v": torch.randn(1, 2, 9, 16).half()}, "must share one"), ({"erase": torch.ones(1, 2, 9)}, "must agree"),
    ({name: torch.randn(1, 2, 9, 300) for name in "qk"}, "256 at most")])
def test_mistakes_are_explained(changes, message):
    x = draw("gated delta", 9)
    with pytest.raises(ValueError, match=message):
        recurrent_kernels.recur(**x | {name: y.to(DEVICE) for name, y in changes.items()})


@pytest.mark.skipif(DEVICE == "cuda", reason="values on a GPU are not checked")
@pytest.mark.parametrize("changes, message", [
    ({"erase": torch.full((1, 2, 9, 1), 1.5)}, "from 0 to 1"), ({"forget": torch.ones(1, 2, 9, 1)}, "at most 0")])
def test_rates_out_of_range_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        recurrent_kernels.recur(**draw("gated delta", 9) | changes)


def test_who_has_a_kernel():
    assert mixers.choose_kernel(tiny_config(attn="gla", kernel="triton"), DEVICE) == "triton"
    with pytest.raises(ValueError, match="rule descent of a state has no kernel"):
        mixers.choose_kernel(tiny_config(attn="ttt", kernel="triton"), DEVICE)
    with pytest.raises(ValueError, match="wider than 256"):
        mixers.choose_kernel(tiny_config(attn="gla", kernel="triton", n_head=1, n_embd=512), DEVICE)


def test_a_second_derivative_is_refused():
    x = {name: y.requires_grad_() for name, y in draw("linear", 9).items()}
    gradient, = torch.autograd.grad(recurrent_kernels.recur(**x).square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="kernel=torch"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_operators_say_what_they_return():
    """torch.compile plans with these shapes and strides before anything runs."""
    x = draw("gated delta", 20)
    call = (x["q"], x["k"], x["v"], recurrent_kernels.sums_of_chunks(x["forget"], 32), x["erase"][..., 0])
    torch.library.opcheck(recurrent_kernels.run_forward, call, test_utils="test_faketensor")
    o, X = recurrent_kernels.run_forward(*call)
    torch.library.opcheck(recurrent_kernels.run_backward, (*call, X, o), test_utils="test_faketensor")
