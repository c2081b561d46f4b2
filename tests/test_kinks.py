"""The derivative exactly at a kink: in PyTorch, whose versions differ about clamp, and in Triton.

Most kinks are mathematical, such as relu's at 0. There we take the derivative of the side on which
a key has no weight, or a limit has no effect. Some functions are smooth, and only their formula has
a kink. There we take the function's derivative.
"""

import math

import pytest
import torch
from bounds import close
from conftest import DEVICE, needs_triton

import attention
import kernels
from axes import queries_keys, rows
from common.balance import imbalance
from mixers import focus

# numpy warns about scores of masked keys
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
E = math.e

# Rows of scores s at a kink, and the derivatives of sum_j g_j w_j with respect to s and t, for g =
# 1, 2, 4, 8.
ROWS = {  # {what is at a kink: (rule, s, (t, power), ds, dt)}
    "a first row at tau 1: its output is 0, and relu'(0) = 0": (
        "elastic",
        [0.3],
        (1.0, None),
        [0.0],
        0.0,
    ),
    "an even row at tau 1, the same": ("elastic", [0.5] * 4, (0.25, None), [0.0] * 4, 0.0),
    "equal largest scores, of which no maximum takes sides": (
        "softmax",
        [0.0, 0.0],
        (None, None),
        [-1 / 4, 1 / 4],
        0.0,
    ),
    "the same in entmax, whose maximum is detached": (
        "entmax",
        [0.0, 0.0],
        (None, 2.0),
        [-(2**-1.5), 2**-1.5],
        0.0,
    ),
    "a key at the edge of entmax' support, which is smooth there": (
        "entmax",
        [2.0, 0.0],
        (None, 2.0),
        [0.0, 0.0],
        0.0,
    ),
    "the same where the power is learned": ("entmax", [2.0, 0.0], (2.0, None), [0.0, 0.0], 0.0),
    "a key at the edge of sparsemax' support is outside": (
        "sparsemax",
        [1.0, 0.0],
        (None, None),
        [0.0, 0.0],
        0.0,
    ),
    "one survivor, whose weight is 1 whatever its score": (
        "lssar",
        [3.0, -3.0, -3.0, -3.0],
        (1 / 4, 15.0),
        [0.0] * 4,
        0.0,
    ),
    "an even row has no survivor, and its output is 0": (
        "lssar",
        [1.0] * 4,
        (1 / 4, 15.0),
        [0.0] * 4,
        0.0,
    ),
    "scores below -69 count as minus infinity": (
        "lssar",
        [-70.0, -71.0],
        (0.0, 1.0),
        [0.0, 0.0],
        0.0,
    ),
    "a score of 0 counts neither as positive nor as negative": (
        "softpick",
        [0.0, math.log(2), math.log(3)],
        (None, None),
        [0.0, -8 / 9, 2 / 3],
        0.0,
    ),
    "relu'(0) = 0": ("relu", [0.0, 1.0], (None, None), [0.0, 2.0], 0.0),
    "a score at its threshold, power 1: relu'(0) = 0": (
        "tra",
        [0.5, 1.0],
        (0.5, 1.0),
        [0.0, 2.0],
        -2.0,
    ),
    "the same at power 2, which is smooth": ("tra", [0.5, 1.0], (0.5, 2.0), [0.0, 2.0], -2.0),
    "elu is smooth at 0": ("elu", [0.0, -1.0], (None, None), [1.0, 2 / E], 0.0),
}


def slopes_in_pytorch(rule, s, t, power):
    """ds (n,) and dt by the rule's definition in attention.py."""
    s = torch.tensor(s, requires_grad=True)
    t = torch.tensor([t or 0.0], requires_grad=True)
    options = {"power": power} if rule in ("entmax", "lssar", "tra") else {}
    seen = torch.ones(1, len(s), dtype=torch.bool)
    w = attention.RULES[rule].weights(s[None], seen, t, **options)
    total = (w * 2.0 ** torch.arange(len(s))).sum()
    return torch.autograd.grad(total, [s, t], materialize_grads=True)


def slopes_in_triton(rule, s, t, power):
    """The same by kernels.py: keys and values are unit vectors, q holds the scores, and o's last
    row the weights."""
    n = len(s)
    eye = torch.eye(n, device=DEVICE).expand(1, 1, n, n)
    q = torch.zeros(1, 1, n, n, device=DEVICE)
    q[..., -1, :] = torch.tensor(s)
    q.requires_grad_()
    given = torch.tensor([t or 0.0], device=DEVICE, requires_grad=True)
    row_input = None if t is None else given.expand(1, 1, n)
    if rule == "lssar":  # its threshold is a share of the row's sum, as in Attention
        row_input = row_input * kernels.attend("softplus", q, eye, eye, row_sum=True)[1]
    w, _ = kernels.attend(rule, q, eye, eye, t=row_input, power=power)
    total = (w[0, 0, -1] * 2.0 ** torch.arange(n, device=DEVICE)).sum()
    dq, dt = torch.autograd.grad(total, [q, given], materialize_grads=True)
    return dq[0, 0, -1], dt


@pytest.mark.parametrize(
    "form", [slopes_in_pytorch, pytest.param(slopes_in_triton, marks=needs_triton)]
)
@pytest.mark.parametrize("kink", ROWS)
def test_a_row_at_a_kink_has_the_gradient_of_the_chosen_side(kink, form):
    rule, s, given, ds, dt = ROWS[kink]
    found, found_dt = form(rule, s, *given)
    close(found, torch.tensor(ds), terms=8, size=8.0)  # the largest g
    close(found_dt, torch.tensor([float(dt)]), terms=8, size=8.0)


# {name: (function of one number x, x at the kink, derivative there)}
FORMULAS = {
    "max(|row sum|, 1) at 1: the 1 counts": (lambda x: rows.over_max1(x, None), 1.0, 0.0),
    "a vector of 0 at unit length is divided by eps": (
        lambda x: queries_keys.unit_length(None, x),
        0.0,
        1e6,
    ),
    "the feature elu + 1 is smooth at 0": (lambda x: queries_keys.elu_features(None, x), 0.0, 1.0),
    "a share of 0 has the entropy's slope at the smallest number": (
        focus.entropy,
        0.0,
        -math.log(torch.finfo(torch.float64).tiny),
    ),
    "heads used alike are balanced": (lambda x: imbalance(x.repeat(4)), 0.25, 0.0),
    "so are heads that are not used at all": (lambda x: imbalance(x.repeat(4)), 0.0, 0.0),
}


@pytest.mark.parametrize("kink", FORMULAS)
def test_a_formula_at_a_kink_has_the_expected_derivative(kink):
    f, x, slope = FORMULAS[kink]
    x = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(f(x).sum(), x)
    close(found.item(), slope, size=max(1.0, slope))
