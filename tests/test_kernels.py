"""kernels.py against an independent dense form in float64, on the GPU or, without one, in Triton's interpreter.

The bounds follow from the error of plain PyTorch in the same dtype. --margins prints the errors closest to their bound.
"""
import math
import subprocess
import sys
from unittest import mock

import pytest
import torch
from bounds import below, close, dice, note, same
from conftest import DEVICE, ROOT, by_default

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


# -------------------------------------------------------------------------------- the dense form

def entmax(s, seen, p):
    """Weights relu(s / p - r)^p that sum to 1. Bisection finds r; a Newton step at the solution gives its gradient."""
    z = s / p
    lo = z.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True) - 1
    hi = lo + 1
    for _ in range(60):
        r = (lo + hi) / 2
        large = (torch.relu(z.detach() - r) ** p * seen).sum(-1, keepdim=True) > 1
        lo, hi = torch.where(large, r, lo), torch.where(large, hi, r)
    x = torch.relu(z - lo) * seen
    slope = (p * x ** (p - 1) * (x > 0)).sum(-1, keepdim=True).detach()
    return torch.relu(z - lo - ((x ** p).sum(-1, keepdim=True) - 1) / slope) ** p * seen


def dense_weights(rule, s, seen, t, p):
    """The weights by the rule's definition, and the row statistic (None if the rule has none)."""
    if rule in ("softmax", "elastic"):
        s = s.masked_fill(~seen, -math.inf)
        w = s.softmax(-1)
        return torch.relu(w - t) * seen if rule == "elastic" else w, s.logsumexp(-1)
    if rule in ("entmax", "sparsemax"):
        return entmax(s, seen, p if t is None else t), None
    if rule == "lssar":
        x = torch.relu(torch.nn.functional.softplus(s) - t) * seen
        m = x.detach().amax(-1, keepdim=True)                         # so that x^p cannot overflow
        m = torch.where(m > 0, m, 1.)
        b = (x / m) ** p
        total = b.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1.)                     # a row may have no survivor
        return b / total, (p * m.log() + total.log())[..., 0]
    if rule == "softpick":
        m = s.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True).clamp(min=0)
        e = (torch.exp(s - m) - torch.exp(-m)) * seen
        total = e.abs().sum(-1, keepdim=True) + 1e-8
        return torch.relu(e) / total, (m + total.log())[..., 0]
    w = {"softplus": torch.nn.functional.softplus, "relu": torch.relu, "tra": lambda s: torch.relu(s - t) ** p,
         "sigmoid": lambda s: torch.sigmoid(s - t), "elu": lambda s: torch.nn.functional.elu(s) + 1,
         "identity": lambda s: s}[rule](s)
    return w * seen, None


def difference(rule, mix, q, k, v, t, biases, **options):
    """Dense differential attention: the view of heads 0, 2, .. minus mix times the view of heads 1, 3, .."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    t = None if t is None else t.expand(q.shape[:3])
    one, two = (dense(rule, q[:, n::2], k[:, n::2], v, None if t is None else t[:, n::2],
                      *(None if part is None else part[n::2] for part in biases), **options)[0] for n in (0, 1))
    return one - mix.to(v.dtype).expand(one.shape[:3])[..., None] * two, None


def dense(rule, q, k, v, t=None, table=None, tail=None, slope=None, bias=None, scale=1.0, window=0, first=0,
          row_sum=False, power=None, mix=None, sets=None):
    """What attend() should return, by the whole T x T matrix, in the dtype of q (statistics in float32 at least). bias
    (H, T, T) is another term of the scores."""
    if mix is not None:
        biases = (table, tail, slope, bias)
        return difference(rule, mix, q, k, v, t, biases, scale=scale, window=window, first=first, power=power)
    wide = torch.promote_types(q.dtype, torch.float32)
    H, T = q.shape[1:3]
    k, v = k.repeat_interleave(H // k.shape[1], 1), v.repeat_interleave(H // v.shape[1], 1)
    distance = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    s = (q @ k.mT).to(wide) * scale
    far = torch.zeros(H, T, T, dtype=wide, device=q.device)
    if tail is not None:
        far = far + tail.to(wide)[:, None, None]
    if table is not None:
        W = table.shape[1]
        far = torch.where(distance < W, table.to(wide)[:, distance.clamp(0, W - 1)], far)
    if slope is not None:
        far = far + slope.to(wide)[:, None, None] * distance
    s = s + far if bias is None else s + far + bias
    seen = distance >= 0
    if window:
        seen = seen & ((distance < window) | (torch.arange(T, device=q.device) < first))
    if sets is not None:
        seen = seen & ((sets[:, :, None] & sets[:, None]) == 0)[:, None]
    t = None if t is None else t.to(wide).expand(q.shape[:3])[..., None]
    # masked scores are set to 0, where no formula overflows
    power = kernels.KERNELS[rule].power if power is None else power
    w, r = dense_weights(rule, s.masked_fill(~seen, 0.), seen, t, power)
    return w.to(v.dtype) @ v, w.sum(-1) if row_sum else r


# -------------------------------------------------------------------------------- drawing and comparing

def draw(rule, T, D=16, E=None, B=1, H=2, Hk=None, Hv=None, dtype=torch.float32, W=0, tail=False, slope=False,
         strided=False, seed=0, mix=None, **options):
    """Random inputs of attend(), by name, and its options. mix: the shape of the second view's factor."""
    g = dice(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    def heads(count, width):                                          # strided: the layout of a fused projection
        if not strided:
            return normal(B, count, T, width, dtype=dtype)
        return normal(B, T, count, 2, width, dtype=dtype)[:, :, :, 1].transpose(1, 2)

    E = E or D
    Hv = Hv or (H if mix is None else H // 2)                         # with mix, two views share a value head
    x = dict(q=heads(H, D), k=heads(Hk or H, D), v=heads(Hv, E))
    if strided:
        x["v"] = normal(B, Hv, E, T, dtype=dtype).mT             # the stride of the last axis is not 1 either
    if rule == "elastic":                                             # tau_h / n_i: about half of the weights survive
        x["t"] = (0.6 + 0.3 * torch.rand(H, 1, generator=g)).to(DEVICE) / torch.arange(1, T + 1, device=DEVICE)
    if rule in ("sigmoid", "tra"):
        x["t"] = 0.5 * normal(H, 1)
    if rule == "lssar":                                               # the mean of softplus is about 0.8
        x["t"] = (0.6 + 0.4 * torch.rand(B, 1, T, generator=g)).to(DEVICE)
    x |= {"table": normal(H, W)} if W else {}
    x |= {"tail": normal(H)} if tail else {}
    x |= {"slope": 0.1 * normal(H)} if slope else {}
    x |= {} if mix is None else {"mix": 0.5 + 0.3 * normal(*mix)}
    return x, dict(scale=D**-0.5, **options)


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
    bias = torch.zeros(H, T, T, device=DEVICE)
    grads = outputs_and_gradients(dense, rule, x | spread | {"bias": bias}, options, upstream, dtype)
    terms = {"ds": grads.pop("dbias").double()} | {"d" + name: grads["d" + name].double() for name in few}
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


def compare(rule, dtype=torch.float32, inputs=None, only_o=False, **shape):
    """Check outputs and gradients: RMS(kernel - float64) <= 4 RMS(eager in the same dtype - float64) + rounding errors.
    only_o: the upstream gradient of the statistic is 0."""
    row_sum = shape.pop("row_sum", False) and rule + "_sum" in kernels.KERNELS
    x, options = draw(rule, dtype=dtype, row_sum=row_sum, **shape)
    x |= inputs or {}
    H, T = x["q"].shape[1:3]
    o = (x["q"].shape[0], H // 2 if "mix" in x else H, *x["v"].shape[2:])
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
    if "r" in exact and not row_sum:
        lost_o = eps / 2 * exact["o"] if kernels.KERNELS[rule].sum_delta else eager["o"] - exact["o"]
        up[1] = up[1] + (up[0].double() * lost_o).sum(-1)
    if rule == "lssar":
        # the backward pass computes x again and takes r from the forward pass: a weight is off by the error of r, and
        # so are delta and g, which cancel if one weight dominates
        nudged = {name: part.double() for name, part in x.items()} | {"t": x["t"].double() * (1 + eps)}
        lost_r = (dense(rule, **nudged, **options)[1] - exact["r"]).abs().clamp(max=1)
        size_of_delta = (up[0].double().abs() * exact["o"].abs()).sum(-1)
        up = [up[0] * (1 + lost_r[..., None]), up[1] * (1 + lost_r) + lost_r * size_of_delta]
    moved, _ = dense_gradients(rule, nudged, options, up, torch.float64)
    alone = T == 1 or options.get("window") == 1                      # a single weight is always 1: its gradient is 0
    for name, true in exact.items():
        # one rounding to the dtype, and a float32 sum over the width. dt and dmix come from an o or g rounded to the
        # dtype. lssar's weights are exponentials of a difference of logarithms, which are as large as r
        rounded = dtype if name in ("dt", "dmix") else kernel[name].dtype
        length = x["q"].shape[3]**0.5 + (rms(exact["r"]) if rule == "lssar" else 0)
        floor = torch.finfo(rounded).eps + eps * length
        size = max(rms(true), 1) if alone else rms(true)
        bound = 4 * (rms(eager[name] - true) + lost.get(name, 0) + rms(moved[name] - true))
        bound += 2 * floor * (size + sums.get(name, 0))
        error = rms(kernel[name] - true)
        note(error / bound if bound else 0.0 if error == 0 else math.inf)


# -------------------------------------------------------------------------------- outputs and gradients

RULES = ["softmax", "elastic", "entmax", "sparsemax", "softplus", "lssar", "softpick", "relu", "tra", "sigmoid", "elu",
         "identity"]
VIEWED = ("tra", "relu", "sigmoid")             # rules with both views in one pass that recipes use
EVERYTHING = dict(W=21, tail=True, slope=True)
CASES = {
    "one token": dict(T=1, D=16, B=2, W=4, row_sum=True),
    "plain": dict(T=70, D=16, row_sum=True),
    "odd, two batches, grouped": dict(T=45, D=40, B=2, H=4, Hk=2, Hv=1),
    "wide keys": dict(T=63, D=64, E=16, strided=True),
    "wide values": dict(T=45, D=24, E=64, H=4, Hk=1, Hv=4),
    "widths that are cut into pieces": dict(T=33, D=100, E=80, H=1),
    "table": dict(T=70, W=37),
    "table beyond the input": dict(T=45, W=200),
    "tail and slope": dict(T=63, tail=True, slope=True),
    "tail alone": dict(T=33, tail=True),
    "everything": dict(T=70, B=1, H=2, Hk=1, row_sum=True, **EVERYTHING),
    "window": dict(T=70, window=40, row_sum=True),
    "window of one": dict(T=45, window=1),
    "window, first keys, everything": dict(T=70, window=17, first=3, H=2, Hv=1, **EVERYTHING),
    "window and many first keys": dict(T=70, window=9, first=40, W=60),
}
TELLING = ("one token", "odd, two batches, grouped", "wide keys", "everything", "window, first keys, everything")
SHORT = ("one token", "wide keys", "widths that are cut into pieces", "window of one")
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("case, rule", [
    by_default(case == "everything" or rule == "softmax" and case in SHORT, case, rule)
    for rule in RULES for case in CASES if rule in RULES[:2] or case in TELLING])
def test_float32_equals_the_dense_form(case, rule):
    compare(rule, **CASES[case])


def random_sets(B, T, every):
    """Sets as bits, (B, T) int64: one or two random bits for each token, none for tokens 0, every, 2 every, .."""
    draws = dice(3)
    sets = sum(2 ** torch.randint(8, (B, T), generator=draws) for _ in range(2))
    sets[:, ::every] = 0
    return sets.to(DEVICE)


@pytest.mark.parametrize("rule, options", [
    by_default((rule, number) in (("softmax", 0), ("relu", 1)), rule, options) for rule in RULES
    for number, options in enumerate((dict(T=70), dict(T=45, H=4, Hk=1, Hv=2, window=17, row_sum=True),
                                      dict(T=70, window=9, first=3, **EVERYTHING)))], ids=str)
def test_tokens_that_share_a_set_do_not_see_each_other(rule, options):
    compare(rule, B=2, sets=random_sets(2, options["T"], 5), **options)


def test_a_row_that_sees_no_key_is_zero():
    x, options = draw("softmax", T=40)
    o, r = kernels.attend("softmax", **x, **options, sets=torch.ones(1, 40, dtype=torch.int64, device=DEVICE))
    assert o.count_nonzero() == 0 == r.count_nonzero()
    with pytest.raises(ValueError, match=r"sets must be \(B, T\) int64"):
        kernels.attend("softmax", **x, **options, sets=torch.ones(1, 39, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("rule, power", [by_default((rule, power) in (("tra", 1.5), ("lssar", 5)), rule, power)
                                         for rule in ("entmax", "lssar", "tra") for power in (1, 1.5, 2, 3, 5)])
def test_powers_of_entmax_lssar_and_tra(rule, power):
    compare(rule, T=45, power=power, window=30, **EVERYTHING)


@pytest.mark.parametrize("dtype, shape", [by_default((dtype, shape) == (torch.float32, (2, 1)), dtype, shape)
                                          for dtype in DTYPES for shape in ((2, 1), (2, 1, 45))], ids=str)
def test_entmax_with_a_power_for_every_row(dtype, shape):
    """With a row input, the power can be learned."""
    t = 1.2 + 3 * torch.rand(shape, generator=dice(4)).to(DEVICE)
    compare("entmax", dtype, inputs={"t": t}, T=45, B=2, window=30, first=2, **EVERYTHING)


@pytest.mark.parametrize("wide", [False, by_default(False, True)], ids=["", "wide heads"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_low_precision_is_close_to_the_dense_form(dtype, rule, wide):
    shape = dict(T=63, D=64, row_sum=True) if wide else dict(T=40, D=40, window=20, first=2, **EVERYTHING)
    compare(rule, dtype, Hk=1, **shape)


@pytest.mark.parametrize("survivors", ["one", "two, of which one dominates"])
def test_lssar_where_one_weight_dominates(survivors):
    """Here g - delta cancels, and is divided by a small x. The kernel must not lose more precision than autograd."""
    x, options = draw("lssar", T=45, slope=True)
    x |= {"q": 0.02 * x["q"], "slope": 0.02 * x["slope"]}             # scores differ little, so x is small
    exact = {name: part.double() for name, part in x.items()}
    distance = torch.arange(45, device=DEVICE)[:, None] - torch.arange(45, device=DEVICE)
    s = exact["q"] @ exact["k"].mT * options["scale"] + exact["slope"][:, None, None] * distance
    phi = torch.nn.functional.softplus(s).masked_fill(distance < 0, 0).topk(2).values
    first, second = phi.unbind(-1)
    # of two survivors, the first has twice the x: its weight is 2^15 times the other
    t = (first + second if survivors == "one" else 4 * second - 2 * first) / 2
    x["t"] = torch.minimum(t.clamp(min=0), first * (1 - 2 ** -16)).float()        # x within rounding of 0 counts as 0
    compare("lssar", inputs=x, only_o=True, T=45, slope=True)


SHAPES = [by_default(shape in ((), (1, 2, 17)), shape)
          for shape in ((), (1,), (17,), (2, 1), (2, 1, 1), (1, 2, 17), (2, 2, 17))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_input_of_every_shape(shape):
    """t broadcasts to (B, H, T), and its gradient comes back in its own shape."""
    t = torch.randn(shape, generator=dice(5)).to(DEVICE)
    compare("sigmoid", inputs={"t": t}, T=17, B=2)


@pytest.mark.parametrize("rule", ["softmax", "sigmoid"])
def test_a_loss_on_the_statistic_alone(rule):
    """If o is not used, the gradients are those for an upstream gradient of 0."""
    x, options = draw(rule, T=20, row_sum=rule == "sigmoid")
    upstream = [torch.zeros_like(x["q"]), torch.randn(x["q"].shape[:3], device=DEVICE)]
    both = outputs_and_gradients(kernels.attend, rule, x, options, upstream)
    alone = outputs_and_gradients(lambda rule, **x: kernels.attend(rule, **x)[1:], rule, x, options, upstream[1:])
    same({name: both["d" + name] for name in x}, {name: alone["d" + name] for name in x})


@pytest.mark.parametrize("rule, views", [
    *(by_default(rule == "elastic", rule, {}) for rule in RULES),
    *(by_default(False, rule, dict(H=4, mix=(1, 2, 50))) for rule in VIEWED)], ids=str)
def test_two_runs_agree_bit_for_bit(rule, views):
    x, options = draw(rule, **dict(T=50, Hk=1, Hv=1, window=30, first=2, **EVERYTHING) | views)
    one, two = (outputs_and_gradients(kernels.attend, rule, x, options) for _ in range(2))
    same(two, one)


# -------------------------------------------------------------------------------- live tiles

def clusters(T, views=1, dtype=torch.float32):
    """Clustered queries and keys: tokens have high scores only within stretches of 60, so whole tiles of weights are 0.
    The second view has other such tiles."""
    centre = torch.zeros(4, 16)
    centre[:, :4] = 8 * (torch.eye(4) - 1 / 4)
    member = torch.arange(T) // 60 % 4
    q, k = (centre[member] + 0.4 * torch.randn(1, 1, T, 16, generator=dice(stream)) for stream in (2, 3))
    heads = {"q": [q, q.roll(60, 2)], "k": [k, k]}
    return {name: torch.cat(of_views[:views], 1).to(DEVICE, dtype) for name, of_views in heads.items()}


LIVE = [rule for rule in RULES if kernels.KERNELS[rule].skip]
BUSY = dict(window=120, first=5, **EVERYTHING)


@pytest.mark.parametrize("rule, options", [
    *(by_default((rule, kind) == ("tra", "busy"), rule, dict(H=1, **options))
      for rule in LIVE for kind, options in (("plain", dict(T=170)), ("busy", dict(T=150, row_sum=True, **BUSY)))),
    *(by_default(False, rule, dict(T=230, mix=(1, 1), **options)) for rule in ("tra", "relu") for options in ({}, BUSY))
    ], ids=str)
def test_skipping_dead_tiles_changes_nothing(rule, options):
    """Results equal those of kernels that visit every tile and are close to float64. A weight of 0 may have a gradient.
    With two views, a tile is visited if either view has a weight in it. In many tiles neither view has."""
    inputs, (x, more) = clusters(options["T"], 2 if "mix" in options else 1), draw(rule, **options)
    inputs |= {"t": x["t"].abs() + 3} if "t" in x and "mix" not in x else {}
    # a bias must not lift every score above its threshold
    inputs |= {name: -x[name].abs() for name in ("tail", "slope") if name in x}
    x, more["row_sum"] = x | inputs, more.get("row_sum", False) and rule + "_sum" in kernels.KERNELS
    with mock.patch.object(kernels, "visits_of", side_effect=kernels.visits_of) as visits:
        with_skip, without = (outputs_and_gradients(kernels.attend, rule, x, more | {"skip": skip})
                              for skip in (True, False))
    if kernels.INTERPRETED:                     # tiles are 32 x 16; those on a GPU are too large for these clusters
        T, alive = options["T"], visits.call_args_list[0].args[0].float()
        past = torch.arange(0, T, 16) <= torch.arange(0, T, 32)[:, None] + 31
        assert 0.1 < alive.sum() / past.sum() < 0.9
    same(with_skip, without)
    compare(rule, inputs=inputs, **options)


@exhaustive
def test_skipping_dead_tiles_in_low_precision_and_with_other_powers():
    inputs = clusters(203, dtype=torch.float16)
    compare("tra", torch.float16, inputs=inputs | {"k": inputs["k"] / 8}, T=203, H=1, power=3)
    compare("entmax", inputs=clusters(203) | {"t": torch.full((1, 203), 1.7, device=DEVICE)}, T=203, H=1)


def test_a_map_of_live_tiles_can_be_resized_and_sorted():
    """A tile of another size is alive if any part of it is. The list names the live tiles first, in ascending order."""
    T, g = 150, dice(6)
    for a, b in ((32, 16), (16, 64), (16, 16), (64, 16)):
        alive = (torch.rand(2, kernels.count(T, a), generator=g) > 0.6).to(torch.int8)
        fine = alive.repeat_interleave(a, 1)[:, :T]
        there = kernels.resized(alive, 1, T, a, b)
        assert there.shape[1] == kernels.count(T, b)
        assert all(there[n, m] == fine[n, m * b:(m + 1) * b].max() for n in range(2) for m in range(there.shape[1]))
        for row, n in zip(kernels.in_order(there).tolist(), there.tolist(), strict=True):
            before, order = row[:len(n) + 1], row[len(n) + 1:]
            assert before == [sum(n[:m]) for m in range(len(n) + 1)]
            assert order[:sum(n)] == [m for m in range(len(n)) if n[m]]


@pytest.mark.parametrize("rule", ["elastic", by_default(False, "entmax"), by_default(False, "softpick")])
def test_without_gradients_the_output_is_the_same(rule):
    """The kernel then saves nothing for a backward pass."""
    x, options = draw(rule, T=70)
    learned, _ = kernels.attend(rule, **{name: part.clone().requires_grad_() for name, part in x.items()}, **options)
    plain, _ = kernels.attend(rule, **x, **options)
    same(learned, plain)


# -------------------------------------------------------------------------------- two views at once

VIEWS = {
    "one token": dict(T=1, B=2, mix=(1, 1)),
    "plain": dict(T=70, mix=(1, 1)),
    "odd, two batches, grouped": dict(T=45, D=40, E=24, B=2, H=8, Hk=2, Hv=1, mix=(2, 4, 45)),
    "a key head for each view": dict(T=45, D=24, E=64, H=8, Hk=8, Hv=2, strided=True, mix=(4, 1)),
    "everything": dict(T=70, H=4, Hk=2, mix=(), **EVERYTHING),
    "window, first keys, everything": dict(T=70, window=17, first=3, H=4, Hv=1, mix=(1, 2, 70), **EVERYTHING),
}
LAST = "window, first keys, everything"
DEFAULT_VIEWS = [("tra", "one token"), ("tra", LAST), ("sigmoid", "a key head for each view")]


@pytest.mark.parametrize("rule, case", [
    by_default((rule, case) in DEFAULT_VIEWS, rule, case)
    for rule in (*VIEWED, "softplus", "elu", "identity") for case in VIEWS if rule in VIEWED or case == LAST])
def test_two_views_equal_the_dense_form(rule, case):
    compare(rule, **VIEWS[case])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("rule, wide", [by_default((rule, wide) == ("tra", False), rule, wide)
                                        for rule in VIEWED for wide in (False, True)])
def test_two_views_in_low_precision(rule, wide, dtype):
    wide_heads = dict(T=63, D=64, H=4, Hk=1, Hv=1, mix=(2, 1))
    compare(rule, dtype, **wide_heads if wide else dict(T=45, D=40, window=20, first=2, mix=(1, 1), **EVERYTHING))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mix_of_every_shape(shape):
    compare("tra", T=17, B=2, H=4, power=3, mix=shape)


# -------------------------------------------------------------------------------- addresses

def test_heads_may_lie_far_apart_in_memory():
    """Batches and heads are more than 2^31 elements apart. Only a few pages of the buffer are ever touched."""
    torch.use_deterministic_algorithms(False)                         # NaN would fill the whole buffer
    x, options = draw("softmax", T=33, B=2, dtype=torch.float16)
    far, step = 2**31 + 8 * 64, 64 * 64
    buffer = torch.empty(far + 8 * step, dtype=torch.float16, device=DEVICE)
    spread = {}
    for n, (name, part) in enumerate(x.items()):                      # q, v: batches are far apart; k: heads
        strides = (step, far) if name == "k" else (far, step)
        spread[name] = buffer.as_strided(part.shape, (*strides, 16, 1), 2 * n * step).copy_(part)
    upstream = [torch.randn_like(x["q"]), torch.randn(x["q"].shape[:3], device=DEVICE)]
    near = outputs_and_gradients(kernels.attend, "softmax", x, options, upstream)
    leaves = {name: part.requires_grad_() for name, part in spread.items()}
    outputs = kernels.attend("softmax", **leaves, **options)
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    same(list(near.values()), [*outputs, *grads])


def test_a_head_must_fit_32_bit_offsets():
    torch.use_deterministic_algorithms(False)
    x, _ = draw("softmax", T=65, H=1)
    x["k"] = torch.empty(2**31 + 16, dtype=torch.float16, device=DEVICE).as_strided((1, 1, 65, 16), (0, 0, 2**25, 1))
    with pytest.raises(ValueError, match="2\\^31"):
        kernels.attend("softmax", x["q"].half(), x["k"], x["v"].half())


# -------------------------------------------------------------------------------- errors

def wrong(message, rule="softmax", **changes):
    return pytest.param(rule, changes, message, id=message)


ZERO = torch.zeros
MISTAKES = [
    wrong("choose one of", rule="softmox"),
    wrong("leave out row_sum", row_sum=True),
    wrong("takes no power 2", power=2),
    wrong("takes no power 0.5", rule="tra", power=0.5),
    wrong("leave out t", t=ZERO(8, device=DEVICE)),
    wrong("without a row statistic", mix=ZERO((), device=DEVICE)),
    wrong("without a row statistic", rule="relu", row_sum=True, mix=ZERO((), device=DEVICE)),
    wrong("must agree", q=ZERO(2, 8, 16, device=DEVICE)),
    wrong("must agree", k=ZERO(1, 2, 9, 16, device=DEVICE)),
    wrong("must agree", k=ZERO(1, 2, 8, 32, device=DEVICE)),
    wrong("must agree", k=ZERO(1, 3, 8, 16, device=DEVICE)),
    wrong("must agree", v=ZERO(1, 2, 8, 0, device=DEVICE)),
    wrong("must agree", rule="relu", mix=ZERO((), device=DEVICE), q=ZERO(1, 3, 8, 16, device=DEVICE)),
    wrong("must agree", rule="relu", mix=ZERO((), device=DEVICE)),
    wrong("heads of q", table=ZERO(3, 4, device=DEVICE)),
    wrong("heads of q", tail=ZERO(3, device=DEVICE)),
    wrong("width 256 at most", v=ZERO(1, 2, 8, 257, device=DEVICE)),
    wrong("width 128 at most", rule="relu", mix=ZERO((), device=DEVICE), v=ZERO(1, 1, 8, 129, device=DEVICE)),
    wrong("share one of float32", v=ZERO(1, 2, 8, 16, device=DEVICE, dtype=torch.float16)),
]


@pytest.mark.parametrize("rule, changes, message", MISTAKES)
def test_invalid_inputs_are_refused(rule, changes, message):
    x, _ = draw("softmax", T=8)
    with pytest.raises(ValueError, match=message):
        kernels.attend(rule, **(x | changes))


# -------------------------------------------------------------------------------- extreme scores

SCORES = {                                                            # scores of the keys (T,), the same in every row
    "all below -100": lambda T: -100 - torch.rand(T),
    "nearly uniform": lambda T: 1e-3 * torch.randn(T),
    "ties": lambda T: torch.randint(0, 3, (T,)).float(),
    "10^4 either way": lambda T: 1e4 * torch.randn(T).sign(),
    "10^4 and random": lambda T: 1e4 * torch.randn(T),
    "all zero": lambda T: torch.zeros(T),
}


def with_scores(rule, s, **more):
    """Inputs whose scores are exactly s_j."""
    T = len(s)
    q = torch.zeros(1, 1, T, 16, device=DEVICE)
    q[..., 0] = 1
    k = torch.randn_like(q)
    k[..., 0] = s.to(DEVICE)
    return dict(q=q, k=k, v=torch.randn_like(q), **more)


@pytest.mark.parametrize("rule, scores", [by_default(scores in ("all below -100", "10^4 either way"), rule, scores)
                                          for rule in RULES for scores in SCORES])
def test_extreme_scores_give_finite_outputs_close_to_float64(rule, scores):
    """Gradients are finite as well. Rules that cut off low scores give 0 if all scores are very negative."""
    x = with_scores(rule, SCORES[scores](40))
    x |= {"t": torch.full((), 0.02, device=DEVICE)} if kernels.KERNELS[rule].takes_t else {}
    results = outputs_and_gradients(kernels.attend, rule, x, {})
    assert all(part.isfinite().all() for part in results.values())
    o, _ = dense(rule, **{name: part.double() for name, part in x.items()})
    below(rms(results["o"] - o), 4e-3 * rms(o) + 1e-12)               # scores of 10^4 are themselves rounded to 5e-4
    if scores == "all below -100" and rule in ("lssar", "softpick", "relu", "tra"):
        assert all(results[name].abs().max() == 0 for name in results if name not in ("r", "dq", "dk"))


@pytest.mark.parametrize("rule, power", [by_default(power == 2, rule, power) for rule, power in (
    ("entmax", 10), ("entmax", 5), ("entmax", 2), ("entmax", 1.25), ("sparsemax", None))])
def test_weights_of_entmax_sum_to_one(monkeypatch, rule, power):
    """Values of 1 give outputs of 1, and r solves its equation to float32 precision, in rows of up to 4096 keys."""
    monkeypatch.setattr(kernels, "SMALL", ((512, 1024, 8, 1),) * 5)   # the interpreter is slow per tile
    long = [(4096, SCORES["nearly uniform"]), (1000, lambda T: torch.rand(T).log())]
    for T, make in [(200, make) for make in SCORES.values()] + long:
        x = with_scores(rule, make(T))
        o, r = kernels.attend(rule, **x | {"v": torch.ones_like(x["v"])}, power=power)
        close(o, torch.ones_like(o), terms=64)                         # sums of up to 4096, whose errors cancel
        p, r = power or 1, r[0, 0, -1].double()
        z = x["k"][0, 0, :, 0].double() / p
        # the sums for r moved up and down by the spacing of float32 numbers
        spacing = torch.finfo(torch.float32).eps * z.abs().max()
        near = [(torch.relu(z - r - d) ** p).sum() for d in (spacing, -spacing)]
        assert near[0] - 1e-5 <= 1 <= near[1] + 1e-5


@exhaustive
def test_lssar_in_long_rows(monkeypatch):
    """A key may have a thousand times the mean of its row. The 15th power of that overflows float32."""
    monkeypatch.setattr(kernels, "SMALL", ((256, 256, 8, 1),) * 5)
    s = torch.full((1100,), -30.0)
    s[7] = 900.0
    x = with_scores("lssar", s, t=torch.zeros((), device=DEVICE))
    o, _ = kernels.attend("lssar", **x)
    close(o[0, 0, 7:], x["v"][0, 0, 7].expand_as(o[0, 0, 7:]), terms=64)
    compare("lssar", T=1100, H=1)


@pytest.mark.parametrize("D", [16, by_default(False, 32), by_default(False, 64)])
def test_elastic_ties_at_tau_one_pass_no_gradient(D):
    """The first row sees one key, so p = 1 = t. Its output and gradients are 0, however each kernel rounds."""
    x, options = draw("elastic", B=16, T=2, D=D, W=2)
    x["t"] = 1 / torch.arange(1.0, 3.0, device=DEVICE)
    leaves = {name: part.detach().requires_grad_() for name, part in x.items()}
    o, _ = kernels.attend("elastic", **leaves, **options)
    close(o[:, :, 0], torch.zeros_like(o[:, :, 0]), terms=4, size=x["v"].abs().max().item())
    o[:, :, 0].backward(torch.randn_like(o[:, :, 0]))
    assert all(leaves[name].grad.abs().max() == 0 for name in ("q", "k", "t", "table"))
    close(leaves["v"].grad, torch.zeros_like(leaves["v"]), terms=4, size=4.0)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU computes bfloat16 rightly")
def test_the_interpreter_refuses_bfloat16():
    x, _ = draw("softmax", T=8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        kernels.attend("softmax", **x)


def test_a_second_derivative_is_refused():
    x, _ = draw("softmax", T=8)
    q = x["q"].requires_grad_()
    dq, = torch.autograd.grad(kernels.attend("softmax", **x)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        dq.sum().backward()


def test_without_triton_modules_can_be_imported_but_attend_is_refused():
    """The modules can be imported and the rules listed. Calling attend() says that triton is missing."""
    program = """
import sys
sys.modules["triton"] = None
import attention, kernels, torch
assert not kernels.AVAILABLE and list(kernels.KERNELS)[:3] == ["softmax", "elastic", "entmax"]
try: kernels.attend("softmax", *torch.zeros(3, 1, 1, 4, 16))
except ValueError as error: assert "need triton" in str(error)
else: raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# -------------------------------------------------------------------------------- with the rest of PyTorch

def test_autocast_casts_inputs_to_one_dtype():
    """Each gradient has the original dtype of its input."""
    low = DTYPES[-1]
    x, options = draw("elastic", T=33, **EVERYTHING)
    x["v"] = x["v"].to(low)
    with torch.autocast(DEVICE, dtype=low):
        one = outputs_and_gradients(kernels.attend, "elastic", x, options)
    cast = {name: part.to(low) if name in "qkv" else part for name, part in x.items()}
    two = outputs_and_gradients(kernels.attend, "elastic", cast, options)
    assert one["o"].dtype == low and one["r"].dtype == torch.float32
    same(one, {name: two[name].to(one[name].dtype) for name in one})


@pytest.mark.parametrize("reentrant", [False, by_default(False, True)])
def test_activation_checkpointing_changes_nothing(reentrant):
    def checkpointed(rule, **inputs):
        return torch.utils.checkpoint.checkpoint(lambda *parts: kernels.attend(rule, *parts), *inputs.values(),
                                                 use_reentrant=reentrant)

    x, _ = draw("softmax", T=20)
    plain, again = (outputs_and_gradients(form, "softmax", x, {}) for form in (kernels.attend, checkpointed))
    same(again, plain)


def test_torch_compile_makes_one_graph_and_does_not_recompile():
    """The compiled function gives the same outputs and gradients in three steps with different inputs."""
    def attend(rule, **x):
        return kernels.attend(rule, **x)

    torch._dynamo.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=False)
    for step in range(3):
        x, options = draw("elastic", T=20, H=4, Hk=2, seed=step, **EVERYTHING)
        with torch._dynamo.config.patch(error_on_recompile=True):
            fused = outputs_and_gradients(compiled, "elastic", x, options)
        plain = outputs_and_gradients(kernels.attend, "elastic", x, options)
        close(list(fused.values()), list(plain.values()), terms=64)


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.mark.parametrize("rule, options", [("elastic", EVERYTHING), ("tra", dict(H=4, W=4, mix=(1, 2, 20)))],
                         ids=["one view", "two views"])
def test_operators_declare_what_they_return(rule, options):
    """The shapes, strides and dtypes that tracing assumes are those of the kernels' outputs."""
    x, more = draw(rule, T=20, E=24, **options)
    names = ("q", "k", "v", "t", "table", "tail", "slope", "scale", "window", "first", "power", "mix", "sets")
    call = kernels.prepare(rule, *map(({"window": 0, "first": 0} | x | more).get, names))
    torch.library.opcheck(kernels.run_forward, (*call, True, True), test_utils=CHECKS)
    o, r, u, alive = kernels.run_forward(*call, True, True)
    saved = u if kernels.KERNELS[rule].save_u else o
    torch.library.opcheck(kernels.run_backward, (*call, saved, r, alive, o, r, True), test_utils=CHECKS[:2])
