"""kernels.py against tests/reference.py in float64, on the GPU or, without one, in Triton's interpreter.

The bounds follow from the error of plain PyTorch in the same dtype. --margins prints the errors closest to their bound.
"""
import itertools
import math
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import reference
import torch
from bounds import below, close, dice, note, same
from conftest import DEVICE, ROOT, by_default, examples
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from layers import SCORES, shaped

pytest.importorskip("triton")
import kernels  # noqa: E402

# The interpreter computes with numpy. It warns about scores of future keys before they are masked, and about rows
# beyond the input, which are never stored
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


@pytest.fixture(autouse=True)
def poison():
    """Fill every torch.empty with NaN: an element that a kernel forgets to write stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.randn(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------- which tiles are visited


def walked(tiles, mine, size, inputs):
    """The triples (place among `mine`, place on the other side, is the tile masked) of all tiles that a walk visits. The
    code of the kernels runs as plain Python, on numbers."""
    found = []

    def step(state, held, start, inputs, head, rule, c, masked):
        found.extend((one, other, masked) for one in mine for other in range(start, start + size))
    kernels.walk.fn(None, step, None, tiles, None, inputs, None, None, None, size, False)
    return found


PYTHON = SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), where=lambda c, a, b: a if c else b,
                         range=lambda a, b, step, **_: range(a, b, step))


@mock.patch.object(kernels, "tl", PYTHON)
def test_the_kernels_visit_every_visible_pair_once_and_mask_where_they_must():
    """All windows, numbers of first keys and widths of a table at T = 11, on tiles of 2 and 4. A full tile has no masked
    pair, no row beyond T, and none within the table; with sets, no tile is full."""
    T = 11
    for window, first, W, BM, BN, sets in itertools.product(
            (None, *range(1, T)), range(T + 1), (0, 1, 2, 3, 6, 20), (2, 4), (2, 4), (None, True)):
        inputs, c = SimpleNamespace(T=T, window=window, first=first, W=W, sets=sets), SimpleNamespace(BM=BM, BN=BN)
        pairs = {(i, j) for i in range(T) for j in range(i + 1) if not window or i - j < window or j < first}
        by_rows = [seen for i in range(0, T, BM)
                   for seen in walked(kernels.key_tiles.fn(i, inputs, c), range(i, min(i + BM, T)), BN, inputs)]
        by_keys = [(i, j, masked) for at in range(0, T, BN) for j, i, masked in walked(
            kernels.row_tiles.fn(at, inputs, c), range(at, min(at + BN, T)), BM, inputs)]
        for seen in (by_rows, by_keys):
            shown = [(i, j) for i, j, masked in seen if not masked or i < T and kernels.visible_in_tile.fn(i, j, inputs)]
            assert len(shown) == len(pairs) and set(shown) == pairs
            assert not any(not masked and (i - j < W or sets) for i, j, masked in seen)
        call = SimpleNamespace(table=torch.empty(1, W), q=torch.empty(1, 1, T, 1), window=window or 0, first=first)
        assert kernels.diagonals_in_sight(call, BM) > max((i // BM - j // BM for i, j in pairs if i - j < W), default=-1)


# --------------------------------------------------------------------------------------------------- drawing and comparing


def draw(rule, T, D=16, E=None, B=1, H=2, Hk=None, Hv=None, dtype=torch.float32, W=0, tail=False, slope=False,
         strided=False, seed=0, mix=None, t=None, scores=None, **options):
    """Random inputs of attend(), by name, and its options. t, mix: the shape of the row input, and of the second view's
    factor. scores: see `shaped`."""
    g = dice(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    def heads(count, width):                                          # strided: the layout of a fused projection
        if not strided:
            return normal(B, count, T, width, dtype=dtype)
        return normal(B, T, count, 2, width, dtype=dtype)[:, :, :, 1].transpose(1, 2)

    E, n, options = E or D, torch.arange(1, T + 1, device=DEVICE), {"scale": D**-0.5} | options
    Hv = Hv or (H if mix is None else H // 2)                         # with mix, two views share a value head
    x = dict(zip("qk", shaped(scores, heads(H, D), heads(Hk or H, D)), strict=True)) | {"v": heads(Hv, E)}
    if strided:
        x["v"] = normal(B, Hv, E, T, dtype=dtype).mT             # the stride of the last axis is not 1 either
    x |= {"table": normal(H, W)} if W else {}
    x |= {"tail": normal(H)} if tail else {}
    x |= {"slope": 0.1 * normal(H)} if slope else {}
    if rule == "elastic":                                             # tau_h / n_i: about half of the weights survive
        x["t"] = (0.6 + 0.3 * torch.rand(H, 1, generator=g)).to(DEVICE) / n
    if rule in ("sigmoid", "tra"):
        x["t"] = 0.5 * normal(*t or (H, 1))
    if rule == "entmax" and t:
        x["t"] = 1.2 + 3 * torch.rand(t, generator=g).to(DEVICE)
    if rule == "lssar":                                               # the mean of softplus, as a layer computes it
        more = {name: options[name] for name in ("scale", "window", "first", "sets") if name in options}
        x["t"] = kernels.attend("softplus", **x, **more, row_sum=True)[1] * (n > 3) / n
    x |= {} if mix is None else {"mix": 0.5 + 0.3 * normal(*mix)}
    return x, options


def outputs_and_gradients(attend, rule, x, options, upstream=(), dtype=None):
    """All outputs and gradients of attend(), by name. The random upstream gradients are the same in each call."""
    leaves = {name: part.detach().to(dtype or part.dtype).requires_grad_() for name, part in x.items()}
    outputs = [part for part in attend(rule, **leaves, **options) if part is not None and part.requires_grad]
    g = dice(7)
    upstream = upstream or [torch.randn(out.shape, generator=g).to(DEVICE) for out in outputs]
    torch.autograd.backward(outputs, [up.to(out.dtype) for up, out in zip(upstream, outputs, strict=False)])
    grads = [part.grad for part in leaves.values()]
    for grad, part in zip(grads, leaves.values(), strict=True):
        assert grad.shape == part.shape and grad.dtype == part.dtype
    grads = {"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}
    return dict(zip(["o", "r"], outputs, strict=False)) | grads


def rms(x):
    return x.double().pow(2).mean().sqrt().item()


def dense_gradients(rule, x, options, upstream, dtype=None):
    """Outputs and gradients of the dense form. Also the gradients of single terms: of the scores, and of t and mix
    expanded to all rows."""
    B, H, T, _ = x["q"].shape
    few = {name: x[name] for name in ("t", "mix") if name in x}
    spread = {name: part.expand(B, H // 2 if name == "mix" else H, T) for name, part in few.items()}
    more = torch.zeros(H, T, T, device=DEVICE)
    grads = outputs_and_gradients(reference.attend_by_rule, rule, x | spread | {"more": more}, options, upstream, dtype)
    terms = {"ds": grads.pop("dmore").double()} | {"d" + name: grads["d" + name].double() for name in few}
    return grads | {"d" + name: grads["d" + name].sum_to_size(part.shape) for name, part in few.items()}, terms


def roots_of_squares(terms, x):
    """(sum of squares)^1/2 of the gradient's terms, for each input that serves many rows or scores. Their sum would be
    this large if signs were random. Where the terms cancel, rounding errors still have this size."""
    ds, T, W = terms["ds"].tril(), x["q"].shape[2], x["table"].shape[1] if "table" in x else 0
    distance = torch.arange(T, device=DEVICE)[:, None] - torch.arange(T, device=DEVICE)
    squares = {"d" + name: terms["d" + name].pow(2).sum_to_size(x[name].shape) for name in ("t", "mix") if name in x}
    squares |= {"dtail": (ds * (distance >= W)).pow(2).sum((1, 2)), "dslope": (ds * distance).pow(2).sum((1, 2))}
    if W:
        squares["dtable"] = torch.stack([ds.diagonal(-d, 1, 2).pow(2).sum(-1) for d in range(min(W, T))])
    return {name: square.mean().sqrt().item() for name, square in squares.items()}


def compare(rule, x, options, only_o=False):
    """Check outputs and gradients: RMS(kernel - float64) <= 4 RMS(eager in the same dtype - float64) + rounding errors.
    only_o: the upstream gradient of the statistic is 0."""
    (B, H, T, D), dtype, statistic = x["q"].shape, x["q"].dtype, kernels.KERNELS[rule]
    o = (B, H // 2 if "mix" in x else H, *x["v"].shape[2:])
    upstream = [torch.randn(o, device=DEVICE).to(dtype), torch.randn(o[:3], device=DEVICE) * (not only_o)]
    kernel = outputs_and_gradients(kernels.attend, rule, x, options, upstream)
    eager, eager_terms = dense_gradients(rule, x, options, upstream)
    exact, terms = dense_gradients(rule, x, options, upstream, torch.float64)
    assert kernel.keys() == eager.keys() == exact.keys()
    # the eager error of a sum of many terms may be small by luck, so the errors of its terms are added to the bound
    sums = roots_of_squares(terms, x)
    lost = roots_of_squares({name: eager_terms[name] - term for name, term in terms.items()}, x)
    # Errors that no kernel of this design can avoid, as a change of the exact inputs. delta = do . o - dr is computed
    # from a rounded o, the sum of rounded weights. With sum_delta an extra pass sums delta, and only delta is rounded.
    # lssar's x is a difference, which keeps the rounding error of t
    nudged, up, eps = dict(x), list(upstream), torch.finfo(torch.float32).eps
    if "r" in exact and not options.get("row_sum"):
        lost_o = eps / 2 * exact["o"] if statistic.sum_delta else eager["o"] - exact["o"]
        up[1] = up[1] + (up[0].double() * lost_o).sum(-1)
    if rule == "lssar":
        # the backward pass computes x again and takes r from the forward pass: a weight is off by the error of r, and
        # so are delta and g, which cancel if one weight dominates
        nudged = {name: part.double() for name, part in x.items()} | {"t": x["t"].double() * (1 + eps)}
        lost_r = (reference.attend_by_rule(rule, **nudged, **options)[1] - exact["r"]).abs().clamp(max=1)
        size_of_delta = (up[0].double().abs() * exact["o"].abs()).sum(-1)
        up = [up[0] * (1 + lost_r[..., None]), up[1] * (1 + lost_r) + lost_r * size_of_delta]
    moved, _ = dense_gradients(rule, nudged, options, up, torch.float64)
    alone = T == 1 or options.get("window") == 1                      # a single weight is always 1: its gradient is 0
    for name, true in exact.items():
        # one rounding to the dtype, and a float32 sum over the width. dt and dmix come from an o or g rounded to the
        # dtype. lssar's weights are exponentials of a difference of logarithms, which are as large as r
        rounded = dtype if name in ("dt", "dmix") else kernel[name].dtype
        length = D**0.5 + (rms(exact["r"]) if rule == "lssar" else 0)
        floor = torch.finfo(rounded).eps + eps * length
        size = max(rms(true), 1) if alone else rms(true)
        bound = 4 * (rms(eager[name] - true) + lost.get(name, 0) + rms(moved[name] - true))
        bound += 2 * floor * (size + sums.get(name, 0))
        error = rms(kernel[name] - true)
        note(error / bound if bound else 0.0 if error == 0 else math.inf,
             f"{name} {tuple(true.shape)} of the kernel {rule} ({dtype}): its error {error:.3g}")


EVERYTHING = dict(W=21, tail=True, slope=True)
RULES = [name for name, kernel in kernels.KERNELS.items() if not kernel.plain_sum and name != "alphamax"]
BOTH = st.sampled_from((True, False))
# one call of attend(); the simplest case, which is drawn first, has everything at once
CALLS = st.fixed_dictionaries({
    "T": st.sampled_from((45, 1, 15, 16, 17, 31, 32, 33, 48, 64, 65)), "D": st.sampled_from((16, 8, 24, 40, 72)),
    "E": st.sampled_from((24, 16, 8, 40, 80)), "dtype": st.sampled_from(DTYPES), "heads": st.sampled_from(
        ((1, 2, 1, 1), (2, 2, 2, 2), (1, 4, 2, 1))), "W": st.sampled_from((21, 0, 1, 37, 200)), "tail": BOTH, "slope": BOTH,
    "window": st.sampled_from((17, 0, 1, 30)), "first": st.sampled_from((3, 0, 20)), "strided": BOTH, "scores": SCORES,
    "tiles": st.tuples(*[st.sampled_from(((32, 16), (16, 32), (32, 32), (16, 16)))] * 4,
                       st.sampled_from(((32, 32), (16, 16))))})


def check(rule, call, draws):
    """The kernels of one call. t and mix broadcast, the power is a constant or a row input, tokens share sets."""
    about, call, tiles = kernels.KERNELS[rule], dict(call), call["tiles"]
    B, H, call["Hk"], call["Hv"] = call.pop("heads")
    T, rows = call["T"], (None, (), (1,), (call["T"],), (H, 1), (B, H, call["T"]))
    call |= {"B": B, "H": H, "t": draws.draw(st.sampled_from(rows), "t")}
    call["power"] = draws.draw(st.sampled_from((None, 1.0, 1.5, 3.0)), "power") if about.takes_power and not (
        rule == "entmax" and call["t"]) else None
    if about.settle is None and draws.draw(st.booleans(), "two views"):
        call |= {"mix": draws.draw(st.sampled_from(((1,), (), (H // 2, 1), (B, H // 2, T))), "mix"), "Hv": 1}
    elif about.settle is None:
        call["row_sum"] = draws.draw(BOTH, "row sum")
    if draws.draw(st.booleans(), "sets"):
        call["sets"] = random_sets(B, T)
    with mock.patch.object(kernels, "SMALL", tuple((*tile, 4, 1) for tile in call.pop("tiles"))):
        x, options = draw(rule, **call)
        if rule == "elastic":                   # the kernels' derivative begins 2^-18 beyond the threshold
            eye = torch.eye(T, dtype=torch.float64, device=DEVICE).expand(B, 1, T, T)
            p, _ = reference.attend_by_rule("softmax", **{name: part.double() for name, part in x.items()} | {
                "t": None, "v": eye}, **options)
            assume(((p / x["t"][..., None] - 1).abs() > 2 ** -17).all())
        compare(rule, x, options)


def random_sets(B, T):
    """Sets as bits, (B, T) int64: one or two bits for each token, none for tokens 0, 5, .. A row sees no key that shares a
    bit with it."""
    draws = dice(3)
    sets = sum(2 ** torch.randint(8, (B, T), generator=draws) for _ in range(2))
    sets[:, ::5] = 0
    return sets.to(DEVICE)


@pytest.mark.parametrize("rule", RULES)
@given(CALLS, st.data())
@settings(max_examples=examples(1))
def test_the_kernels_of_each_rule_equal_the_reference_in_outputs_and_all_gradients(rule, call, draws):
    check(rule, call, draws)


@given(st.sampled_from(RULES), CALLS, st.data())
@settings(max_examples=examples(6))
def test_kernels_equal_the_reference_in_outputs_and_all_gradients(rule, call, draws):
    check(rule, call, draws)
