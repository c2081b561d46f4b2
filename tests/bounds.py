"""The three kinds of assertions about numbers in these tests.

    same(a, b)        equal bit for bit. Only where the code promises it: a resumed run, two runs,
                      the same products.
    close(a, b, ...)  equal up to rounding. The bound follows from the data type, from how many
                      numbers are summed and from how large they are, so it holds for every SIMD
                      width, thread count and torch version.
    below(a, b)       an inequality of the science, which must hold by a factor, not by a percent.

`close` and `below` record each error as a share of its bound. `python -m pytest --margins` prints
the largest shares.
"""

import math
import sys
from pathlib import Path

import torch

SEED = 0  # of all random inputs; conftest.py sets it from --hypothesis-seed
shares = []  # (share of the bound, line of the test) for the running test


def dice(stream=0):
    """A random generator that depends on --hypothesis-seed. Different streams are independent."""
    return torch.Generator().manual_seed(1_000_003 * SEED + stream)


def note(share, what="the error"):
    """Record the share of a bound and the line of the test that made the comparison. Fail if it is
    above 1. what: which tensor of which computation, for the message."""
    frame = sys._getframe(2)
    while (name := Path(frame.f_code.co_filename).name) in ("bounds.py", "conftest.py"):
        frame = frame.f_back
    line = f"{name}:{frame.f_lineno}"
    shares.append((float(share), line))  # numpy's numbers do not travel between processes
    assert share <= 1, f"{line}: {what} is {share:.3g} times the bound"  # nan also fails


def same(found, expected):
    """Equal bit for bit: tensors, or numbers, or lists and dicts of them. A nan equals itself."""
    if isinstance(expected, dict | list | tuple):
        names = expected if isinstance(expected, dict) else range(len(expected))
        assert len(found) == len(names)
        for name in names:
            same(found[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        off = (found != expected) & ~(found.isnan() & expected.isnan())
        if off.any():
            first = f"the first by {found[off][0]} - {expected[off][0]}"
            raise AssertionError(f"{off.sum()} of {off.numel()} differ, {first}")
    else:
        both_nan = found != found and expected != expected
        assert found == expected or both_nan, f"{found} is not {expected}"


def close(found, expected, terms=64, size=None, dtype=None, moved=0.0, what=""):
    """Equal up to rounding: tensors, or numbers, or lists and dicts of them where None equals None.

    The bound is 4 eps * terms * size + 8 * moved.
    terms: how many roundings affect one number: about the total length of the sums that lead to it.
    size: the largest summand on the way. None: the largest expected number. It must be given if
    terms cancel.
    dtype: the data type of the computation. None: the less precise of the two.
    moved: how far rounding the inputs moves the exact result (see `moved_by_rounding`), for
    ill-conditioned functions. what: names the tensor in the message; the names of a dict and the
    places in a list are added."""
    if isinstance(expected, dict | list | tuple):
        names = expected if isinstance(expected, dict) else range(len(expected))
        assert len(found) == len(names)
        for name in names:
            close(found[name], expected[name], terms, size, dtype, moved, f"{what}{name}: ")
        return
    if expected is None or found is None:
        assert found is expected, f"{what}only one of them is None"
        return
    found, expected = as_tensor(found), as_tensor(expected)
    shapes = f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    assert found.shape == expected.shape, f"{what}shape {shapes}"
    if not expected.numel():
        return
    dtypes = [dtype] if dtype else [found.dtype, expected.dtype]
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    found = found.detach().double().cpu()
    expected = expected.detach().double().cpu()
    if size is None:
        size = expected.abs().max().item()
    error = (found - expected).abs().max().item()
    bound = 4 * eps * terms * size + 8 * moved
    if not bound:
        share = math.inf if error else 0.0
    else:
        share = error / bound
    note(share, f"{what}the error {error:.3g}")


def as_tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=torch.float64)


def below(value, bound):
    """value < bound, both positive, for a single number or for every number of a tensor."""
    value, bound = (torch.as_tensor(a).detach().double().cpu() for a in (value, bound))
    note((value / bound).max().item())


def moved_by_rounding(function, inputs, dtype):
    """How far the result of a float64 function moves when its inputs are rounded to a data type
    (its condition). An error of this size comes from the precision of the inputs, not from the code
    under test."""
    eps = torch.finfo(dtype).eps
    exact = function(*inputs)
    moved = 0.0
    for random in (dice(101), dice(102)):
        rounded = []
        for a in inputs:
            noise = 2 * torch.rand(a.shape, generator=random, dtype=a.dtype) - 1
            rounded.append(a * (1 + eps * noise))
        moved = max(moved, (exact - function(*rounded)).abs().max().item())
    return moved
