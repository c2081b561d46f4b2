"""mixers/recurrent_kernels.py against the token-by-token recurrence in float64, on the GPU or, without one, in Triton's
interpreter."""
import pytest
import torch
from bounds import below, same
from conftest import DEVICE, by_default

pytest.importorskip("triton")
from mixers import recurrent_kernels  # noqa: E402
from test_kernels import DTYPES, poison, rms  # noqa: E402, F401
from test_recurrent import FORMS, by_tokens, results_of  # noqa: E402
from test_recurrent import draw as draw_on_cpu  # noqa: E402


def draw(form, T, D=16, E=16, **more):
    return draw_on_cpu(form, T, **{"H": 2, "D": D, "E": E, "B": 1, "dtype": torch.float32, "device": DEVICE} | more)


def compare(x, limit):
    """The relative error of the output and of each gradient is below the limit. A size below 0.03 counts as 0.03,
    because some gradients are 0 up to rounding, as that of forget at the first token."""
    found, exact = results_of(recurrent_kernels.recur, x), results_of(by_tokens, x, torch.float64)
    below(max(rms(y - true) / max(rms(true), 0.03) for y, true in zip(found, exact, strict=True)), limit)
    assert all(dx.dtype == y.dtype and dx.shape == y.shape for dx, y in zip(found[1:], x.values(), strict=True))


exhaustive = pytest.mark.exhaustive


# -------------------------------------------------------------------------------- outputs and gradients

@pytest.mark.parametrize("form, T", [by_default(T == 45 or (form, T) == ("gated delta", 1), form, T)
                                     for form in FORMS for T in (1, 45, 63, 130)])
def test_float32_equals_the_recurrence(form, T):
    """Up to two chunks and a part of one; keys and values fit into one tile."""
    compare(draw(form, T), 1e-5)


@exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_of_several_tiles(form):
    compare(draw(form, 45, D=24, E=40, B=2), 1e-5)


def test_wide_keys_whose_products_are_cut_into_pieces():
    compare(draw("gated delta", 20, D=72), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("form", [by_default(form == "gated delta", form) for form in FORMS])
def test_low_precision_is_close_to_the_recurrence(form, dtype):
    """Inputs, states and factors are rounded to the dtype, a few times each."""
    compare(draw(form, 63, D=24, dtype=dtype), 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", [by_default(form == "delta, a rate a channel", form)
                                  for form, (_, rate, _) in FORMS.items() if rate])
def test_strong_forgetting_stays_exact(form):
    """With a log forget of -50, only the token itself remains. Quotients of exponentials would be 0 / 0."""
    x = draw(form, 45, strength=400.0)
    assert x["forget"].median() < -50
    compare(x, 1e-5)


def test_the_same_token_many_times():
    """With erase 1, only the first write counts. Powers of A are large and cancel, while X stays small."""
    x = {name: y[:, :, :1].expand(-1, -1, 45, -1) for name, y in draw("delta", 45).items()}
    compare(x | {"erase": torch.ones_like(x["erase"])}, 1e-5)


def test_two_runs_agree_bit_for_bit():
    same(*(results_of(recurrent_kernels.recur, draw("gated delta", 45)) for _ in range(2)))


# -------------------------------------------------------------------------------- errors, second derivatives, tracing

@pytest.mark.parametrize("changes, message", [
    ({"k": torch.randn(1, 2, 9, 8)}, "must agree"), ({"forget": torch.zeros(1, 2, 9, 2)}, "must agree"),
    ({"v": torch.randn(1, 2, 9, 16).half()}, "must share one"), ({"erase": torch.ones(1, 2, 9)}, "must agree"),
    ({name: torch.randn(1, 2, 9, 300) for name in "qk"}, "256 at most")])
def test_invalid_inputs_are_refused(changes, message):
    x = draw("gated delta", 9)
    with pytest.raises(ValueError, match=message):
        recurrent_kernels.recur(**x | {name: y.to(DEVICE) for name, y in changes.items()})


@pytest.mark.skipif(DEVICE == "cuda", reason="values on a GPU are not checked")
@pytest.mark.parametrize("changes, message", [
    ({"erase": torch.full((1, 2, 9, 1), 1.5)}, "from 0 to 1"), ({"forget": torch.ones(1, 2, 9, 1)}, "at most 0")])
def test_rates_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        recurrent_kernels.recur(**draw("gated delta", 9) | changes)


def test_a_second_derivative_is_refused():
    x = {name: y.requires_grad_() for name, y in draw("linear", 9).items()}
    gradient, = torch.autograd.grad(recurrent_kernels.recur(**x).square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="kernel=torch"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_operators_declare_what_they_return():
    """torch.compile relies on the declared shapes and strides before anything runs."""
    x = draw("gated delta", 20)
    call = (x["q"], x["k"], x["v"], recurrent_kernels.sums_of_chunks(x["forget"], 32), x["erase"][..., 0])
    torch.library.opcheck(recurrent_kernels.run_forward, call, test_utils="test_faketensor")
    o, X = recurrent_kernels.run_forward(*call)
    torch.library.opcheck(recurrent_kernels.run_backward, (*call, X, o), test_utils="test_faketensor")
