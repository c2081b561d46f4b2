"""The three kinds of assertions about numbers in these tests. Each kind has a function.

    same(a, b)          equal bit for bit. Only where the code promises it: a resumed run, two runs, the same products.
    close(a, b, ...)    equal up to rounding. The bound follows from the data type, from how many numbers are summed and
                        from how large they are, so it holds for every SIMD width, thread count and torch version.
    below(a, b)         an inequality of the science, which must hold by a factor and not by a percent.

`close` and `below` record each error as a share of its bound. `python -m pytest --margins` prints the largest shares.
"""
import math
import sys
from pathlib import Path

import torch

SEED = 0                                        # of all random inputs; conftest.py sets it from --hypothesis-seed
shares = []                                     # (share of the bound, line of the test) for the running test


def dice(stream=0):
    """A random generator that depends on --hypothesis-seed. Different streams are independent."""
    return torch.Generator().manual_seed(1_000_003 * SEED + stream)


def note(share, what="the error"):
    """Record the share of a bound and the line of the test that made the comparison. Fail if it is above 1. what: which
    tensor of which computation, for the message."""
    frame = sys._getframe(2)
    while Path(frame.f_code.co_filename).name in ("bounds.py", "conftest.py"):
        frame = frame.f_back
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    shares.append((float(share), line))         # numpy's numbers do not travel between processes
    assert share <= 1, f"{line}: {what} is {share:.3g} times the bound"      # nan also fails


def same(found, expected):
    """Equal bit for bit: tensors, or numbers, or lists and dicts of them. A nan equals itself."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        off = (found != expected) & ~(found.isnan() & expected.isnan())
        assert not off.any(), f"{off.sum()} of {off.numel()} numbers differ, the first by " \
                              f"{(found[off][0] - expected[off][0]).item():.3g}"
    else:
        assert found == expected or (found != found and expected != expected), f"{found} is not {expected}"


def close(found, expected, terms=64, size=None, dtype=None, moved=0.0, what=""):
    """Equal up to rounding: tensors, or numbers, or lists and dicts of them where None equals None.

    The bound is 4 eps * terms * size + 8 * moved.
    terms: how many roundings affect one number: about the total length of the sums that lead to it.
    size: the largest summand on the way. None: the largest expected number. It must be given if terms cancel, because
        the result is then smaller than the summands.
    dtype: the data type of the computation. None: the less precise of the two.
    moved: how far rounding the inputs moves the exact result (see `moved_by_rounding`), for ill-conditioned functions.
    what: names the tensor in the message; the names of a dict and the places in a list are added.
    """
    if isinstance(expected, (dict, list, tuple)):
        names = list(expected) if isinstance(expected, dict) else range(len(expected))
        assert set(names) == set(found if isinstance(expected, dict) else range(len(found)))
        for n, name in enumerate(names):
            m = moved[n] if isinstance(moved, (list, tuple)) else moved
            close(found[name], expected[name], terms, size, dtype, m, f"{what}{name}: ")
        return
    if expected is None or found is None:
        assert found is None and expected is None, f"{what}only one of them is None"
        return
    found, expected = (torch.as_tensor(a, dtype=None if isinstance(a, torch.Tensor) else torch.float64)
                       for a in (found, expected))
    assert found.shape == expected.shape, f"{what}shape {tuple(found.shape)} is not {tuple(expected.shape)}"
    if not expected.numel():
        return
    eps = max(torch.finfo(d).eps for d in ([dtype] if dtype else [found.dtype, expected.dtype]))
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    size = expected.abs().max().item() if size is None else size
    error = (found - expected).abs().max().item()
    bound = 4 * eps * terms * size + 8 * moved
    note(error / bound if bound else 0.0 if error == 0 else math.inf, f"{what}the error {error:.3g}")


def below(value, bound):
    """value < bound, both positive, for a single number or for every number of a tensor."""
    value, bound = (a.detach().double().cpu() if isinstance(a, torch.Tensor) else torch.tensor(float(a)).double()
                    for a in (value, bound))
    note((value / bound).max().item())


def moved_by_rounding(function, inputs, dtype):
    """How far the result of a float64 function moves when its inputs are rounded to a data type (its condition).

    Returns a list with the largest change of each output (0 for an output that is None). An error of this size comes
    from the precision of the inputs, not from the code under test.
    """
    exact, eps = function(*inputs), torch.finfo(dtype).eps
    several = isinstance(exact, (list, tuple))
    found = [0.0] * (len(exact) if several else 1)
    for stream in (101, 102):
        noise = dice(stream)
        rounded = [a * (1 + eps * (2 * torch.rand(a.shape, generator=noise, dtype=a.dtype) - 1)) for a in inputs]
        other = function(*rounded)
        for i, (a, b) in enumerate(zip(*((exact, other) if several else ([exact], [other])), strict=True)):
            if a is not None:
                found[i] = max(found[i], (a - b).abs().max().item())
    return found if several else found[0]
