"""kernels.cpp against tests/reference.py in float64, and how it is built."""

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels

pytest.importorskip("triton")
from test_kernels import CALLS, RULES, check  # noqa: E402

pytestmark = pytest.mark.usefixtures("poison")


@st.composite
def calls(draw):
    """A call in float32, of any width, perhaps longer than a task of kernels.cpp, with any number
    of heads that share keys and values."""
    call = draw(CALLS)
    call["dtype"] = kernels.torch.float32
    call["T"] = draw(st.sampled_from((45, 1, 2, 31, 32, 33, 64, 65, 130, 530, 1030)), "T")
    for name in ("D", "E"):
        call[name] = draw(st.sampled_from((24, 1, 3, 16, 32, 33, 64, 256)), name)
    call["heads"] = draw(st.sampled_from(((1, 4, 2, 1), (2, 2, 2, 2), (1, 6, 2, 3), (2, 4, 1, 2))))
    call["window"] = draw(st.sampled_from((0, 17, 1, 100)))
    call["first"] = draw(st.sampled_from((0, 3, 70)))
    return call


@pytest.mark.parametrize("rule", RULES)
@given(calls(), st.data())
@settings(max_examples=examples(2))
def test_every_rule_equals_the_reference_in_outputs_and_all_gradients(rule, call, draws):
    check(rule, call, draws, cpp=True)
