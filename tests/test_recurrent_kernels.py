"""mixers/recurrent_kernels.py against the dense reference, on the GPU or, without one, in Triton's
interpreter."""

import pytest
import torch
from bounds import same
from conftest import DEVICE, examples
from hypothesis import example, settings

pytest.importorskip("triton")
from test_recurrent import FORM, assert_exact, draw, forms, results_of  # noqa: E402

from mixers import recurrent_kernels  # noqa: E402

pytestmark = pytest.mark.usefixtures("poison")
SMALL = FORM | {"D": 16, "E": 16}  # one tile, which takes a quarter of the interpreter's time


def gated_delta(**form):
    return draw(**SMALL | {"rate": "head", "erases": True} | form)


@forms
@settings(max_examples=examples(1))  # the first of all is a single token
@example(**FORM | {"rate": "head", "shared": True})
@example(**FORM | {"rate": "channel", "erases": True})
# products are cut into pieces
@example(**SMALL | {"rate": "head", "erases": True, "D": 72, "T": 20})
@example(**SMALL | {"rate": "channel", "erases": True, "strength": 400})
@example(**SMALL | {"erases": True, "repeated": True})
def test_float32_equals_the_reference(**form):
    assert_exact(recurrent_kernels.recur, draw(**form))


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"), ids=str)
def test_low_precision_is_close_to_the_reference(dtype):
    """Inputs, states and factors are rounded to the dtype, a few times each."""
    assert_exact(
        recurrent_kernels.recur, gated_delta(D=24, dtype=dtype), 8 * torch.finfo(dtype).eps
    )


def test_two_runs_agree_bit_for_bit():
    same(*(results_of(recurrent_kernels.recur, gated_delta(T=20, D=24)) for _ in range(2)))


@pytest.mark.parametrize(
    "changes, message",
    [
        *(
            []
            if DEVICE == "cuda"
            else [  # where looking at values is cheap
                ({"erase": torch.full((1, 2, 9, 1), 1.5)}, "from 0 to 1"),
                ({"forget": torch.ones(1, 2, 9, 1)}, "at most 0"),
            ]
        ),
        ({"k": torch.randn(1, 2, 9, 8)}, "must agree"),
        ({"v": torch.randn(1, 2, 9, 16).half()}, "must share one"),
        ({name: torch.randn(1, 2, 9, 300) for name in "qk"}, "256 at most"),
    ],
)
def test_invalid_inputs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        recurrent_kernels.recur(
            **gated_delta(T=9) | {name: y.to(DEVICE) for name, y in changes.items()}
        )


def test_a_second_derivative_is_refused():
    x = {name: y.requires_grad_() for name, y in draw(**SMALL | {"T": 9}).items()}
    (gradient,) = torch.autograd.grad(
        recurrent_kernels.recur(**x).square().sum(), x["q"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="kernel=torch"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_operators_declare_what_they_return():
    """torch.compile relies on the declared shapes and strides before anything runs."""
    x = gated_delta(T=20)
    call = (
        x["q"],
        x["k"],
        x["v"],
        recurrent_kernels.sums_of_chunks(x["forget"], 32),
        x["erase"][..., 0],
    )
    torch.library.opcheck(recurrent_kernels.run_forward, call, test_utils="test_faketensor")
    o, X = recurrent_kernels.run_forward(*call)
    torch.library.opcheck(
        recurrent_kernels.run_backward, (*call, X, o), test_utils="test_faketensor"
    )
