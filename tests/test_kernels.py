"""kernels.py against tests/reference.py in float64, on the GPU or, without one, in Triton's
interpreter.

The bounds follow from the error of plain PyTorch in the same dtype. --margins prints the errors
closest to their bound.
"""

import itertools
import math
import subprocess
import sys
from functools import partial
from random import Random
from types import SimpleNamespace
from unittest import mock

import bounds
import pytest
import reference
import torch
from bounds import below, close, dice, note, same
from conftest import DEVICE, ROOT, by_default, examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import SCORES, shaped
from torch.nn import functional as F

pytest.importorskip("triton")
import attention  # noqa: E402
import kernels  # noqa: E402

# The interpreter computes with numpy. It warns about scores of future keys before they are masked,
# and about rows beyond the input, which are never stored
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


MEMORY = [0] * 22  # starts and ends of documents, for 11 tokens; a list


def check_walk(tiles, size, pairs, seen, near, inputs, random):
    """A walk visits each tile with a pair in `seen` once. A tile with a pair outside `near` is
    masked, and with sets all are. Half of the walks have a list of live tiles (see `in_order`) and
    visit no others. pairs: {start of a tile: its pairs}. The code of the kernels runs as plain
    Python."""
    found = {}
    live = range(len(pairs))
    rule = SimpleNamespace(skip=random.random() < 0.5)
    if rule.skip:
        live = [n for n in live if random.random() < 0.7]
        MEMORY[22:] = [sum(n < end for n in live) for end in range(len(pairs) + 1)] + live
        tiles = kernels.live_tiles.fn(tiles, 22, size)

    def step(state, my_side, place, inputs, rule, kind):
        start = kernels.start_at.fn(place, 22, inputs, rule, size)
        assert start not in found
        found[start] = kind

    def kind(part):
        if inputs.sets or not near.issuperset(part):
            return kernels.MASKED
        return kernels.TABLE if any(i - j < inputs.W for i, j in part) else kernels.FULL

    kernels.walk.fn(None, step, None, tiles, inputs, rule, size)
    assert found == {
        start: kind(part)
        for start, part in pairs.items()
        if start // size in live and not seen.isdisjoint(part)
    }


@mock.patch.object(kernels, "start_of", kernels.start_of.fn)
@mock.patch.object(kernels, "live_range", kernels.live_range.fn)
@mock.patch.object(
    kernels,
    "tl",
    SimpleNamespace(
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        where=lambda c, a, b: a if c else b,
        load=MEMORY.__getitem__,
        range=lambda a, b, step, **_: range(a, b, step),
    ),
)
@pytest.mark.exhaustive
def test_the_kernels_visit_tiles_with_visible_pairs_and_mask_where_they_must():
    """All windows, numbers of first keys and widths of a table at T = 11, on tiles of 2 and 4, each
    with one document and with drawn ones. Rows beyond T change only their own results, so only the
    walk down a column masks them. The walk along a row masks the first keys of its document."""
    T, head, random = 11, SimpleNamespace(batch=0), Random(bounds.SEED)
    for window, first, W, BM, BN, sets, packed in itertools.product(
        (None, *range(1, T)),
        range(T + 1),
        (0, 1, 2, 3, 6, 20),
        (2, 4),
        (2, 4),
        (None, True),
        (False, True),
    ):
        begins = [0]
        if packed:
            begins += random.sample(range(1, T), random.randrange(T))
        starts = [max(begin for begin in begins if begin <= i) for i in range(T)]
        MEMORY[:22] = starts + [min([n for n in begins if n > i], default=T) for i in range(T)]
        inputs = SimpleNamespace(
            T=T,
            window=window,
            first=first,
            W=W,
            sets=sets,
            ends=T,
            starts=0 if packed else None,
            table=W or None,
        )
        c = SimpleNamespace(BM=BM, BN=BN)
        past = [(i, j) for i in range(T + 3) for j in range(starts[min(i, T - 1)], i + 1)]
        near = {(i, j) for i, j in past if not window or i - j < window}
        seen = {(i, j) for i, j in past if i < T and ((i, j) in near or j - starts[i] < first)}
        square = itertools.product(range(T), range(T))
        visible = kernels.visible_in_tile.fn
        assert seen == {(i, j) for i, j in square if visible(i, j, inputs, head)}

        def pairs(i, j, BM=BM, BN=BN):
            return [*itertools.product(range(i, i + BM), range(j, j + BN))]

        for i in range(0, T, BM):
            first_keys = range(starts[i], starts[i] + first) if window else ()
            unmasked = {(n, j) for n, j in near if j not in first_keys}
            row = {j: pairs(i, j) for j in range(0, T, BN)}
            tiles = kernels.key_tiles.fn(i, inputs, head, c)
            check_walk(tiles, BN, row, seen, unmasked, inputs, random)
        unmasked = {(i, j) for i, j in near if i < T}
        for j in range(0, T, BN):
            column = {i: pairs(i, j) for i in range(0, T, BM)}
            tiles = kernels.row_tiles.fn(j, inputs, head, c)
            check_walk(tiles, BM, column, seen, unmasked, inputs, random)
        call = SimpleNamespace(
            table=torch.empty(1, W), q=torch.empty(1, 1, T, 1), window=window or 0, first=first
        )
        apart = max((i // BM - j // BM for i, j in seen if i - j < W), default=0)
        assert kernels.visible_diagonals(call, BM) > apart


def draw(
    rule,
    T,
    D=16,
    E=None,
    B=1,
    H=2,
    Hk=None,
    Hv=None,
    dtype=torch.float32,
    W=0,
    tail=False,
    slope=False,
    strided=False,
    seed=0,
    mix=None,
    t=None,
    scores=None,
    cpp=False,
    **options,
):
    """Random inputs of attend(), by name, and its options. t, mix: the shape of the row input, and
    of the second view's factor. scores: see `shaped`."""
    g = dice(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    def heads(count, width):  # strided: the layout of a fused projection
        if not strided:
            return normal(B, count, T, width, dtype=dtype)
        return normal(B, T, count, 2, width, dtype=dtype)[:, :, :, 1].transpose(1, 2)

    E = E or D
    Hv = Hv or (H if mix is None else H // 2)
    options = {"scale": D**-0.5} | options
    distance = reference.distances(T, T, DEVICE)
    seen = reference.visible(distance, options.get("window", 0), options.get("first", 0))
    n = seen.sum(-1)
    x = dict(zip("qk", shaped(scores, heads(H, D), heads(Hk or H, D)), strict=True))
    # strided: the stride of the last axis of v is not 1 either
    x["v"] = normal(B, Hv, E, T, dtype=dtype).mT if strided else heads(Hv, E)
    if W:
        x["table"] = normal(H, W)
    if tail:
        x["tail"] = normal(H)
    if slope:
        x["slope"] = 0.1 * normal(H)
    if rule == "elastic":  # tau_h / n_i: about half of the weights survive
        x["t"] = (0.6 + 0.3 * torch.rand(H, 1, generator=g)).to(DEVICE) / n
    if rule == "entmax" and t:
        x["t"] = 1.2 + 3 * torch.rand(t, generator=g).to(DEVICE)
    if rule == "lssar":  # the mean of softplus, as a layer computes it
        more = {
            name: options[name] for name in ("scale", "window", "first", "sets") if name in options
        }
        row_sum = kernels.attend("softplus", **x, **more, row_sum=True, cpp=cpp)[1]
        x["t"] = row_sum * (n > 3) / n
    if kernels.KERNELS[rule].takes_t and "t" not in x:
        x["t"] = 0.5 * normal(*t or (H, 1))
    if mix is not None:
        x["mix"] = 0.5 + 0.3 * normal(*mix)
    return x, options


def outputs_and_gradients(attend, rule, x, options, upstream=(), dtype=None):
    """All outputs and gradients of attend(), by name. The random upstream gradients are the same in
    each call."""
    leaves = {
        name: part.detach().to(dtype or part.dtype).requires_grad_() for name, part in x.items()
    }
    outputs = attend(rule, **leaves, **options)
    outputs = [part for part in outputs if part is not None and part.requires_grad]
    g = dice(7)
    upstream = upstream or [torch.randn(out.shape, generator=g).to(DEVICE) for out in outputs]
    upstream = [up.to(out.dtype) for up, out in zip(upstream, outputs, strict=False)]
    torch.autograd.backward(outputs, upstream)
    found = dict(zip("or", outputs, strict=False))
    for name, part in leaves.items():
        assert part.grad.shape == part.shape and part.grad.dtype == part.dtype
        found["d" + name] = part.grad
    return found


def rms(x):
    return x.double().pow(2).mean().sqrt().item()


def dense_gradients(rule, x, options, upstream, dtype=None, more=0.0):
    """Outputs and gradients of the dense form; also of single terms: the scores, t and mix expanded
    to all rows. more: another term of the scores."""
    B, H, T, _ = x["q"].shape
    spread = {"more": torch.zeros(H, T, T, device=DEVICE) + more}
    if "t" in x:
        spread["t"] = x["t"].expand(B, H, T)
    if "mix" in x:
        spread["mix"] = x["mix"].expand(B, H // 2, T)
    dense = reference.attend_by_rule
    grads = outputs_and_gradients(dense, rule, x | spread, options, upstream, dtype)
    terms = {"ds": grads.pop("dmore").double()}
    for name in ("t", "mix"):
        if name in x:
            terms["d" + name] = grads["d" + name].double()
            grads["d" + name] = grads["d" + name].sum_to_size(x[name].shape)
    return grads, terms


def roots_of_squares(terms, x):
    """(sum of squares)^1/2 of the gradient's terms, for each input that serves many rows or scores.
    Their sum would be this large if signs were random. Where the terms cancel, rounding errors
    still have this size."""
    ds = terms["ds"].tril()  # (H, T, T)
    T = x["q"].shape[2]
    W = x["table"].shape[1] if "table" in x else 0
    i = torch.arange(T, device=DEVICE)
    distance = i[:, None] - i
    squares = {
        "dtail": (ds * (distance >= W)).pow(2).sum((1, 2)),
        "dslope": (ds * distance).pow(2).sum((1, 2)),
    }
    for name in ("t", "mix"):
        if name in x:
            squares["d" + name] = terms["d" + name].pow(2).sum_to_size(x[name].shape)
    if W:
        diagonals = [ds.diagonal(-d, 1, 2) for d in range(min(W, T))]
        squares["dtable"] = torch.stack([part.pow(2).sum(-1) for part in diagonals])
    return {name: square.mean().sqrt().item() for name, square in squares.items()}


def compare(rule, x, options, cpp=False):
    """Check outputs and gradients: RMS(kernel - float64) <= 8 RMS(eager in the same dtype -
    float64) + rounding errors. The 8 is chosen: among thousands of drawn calls, eager is lucky in
    some."""
    torch.manual_seed(bounds.SEED)
    B, H, T, D = x["q"].shape
    dtype = x["q"].dtype
    o = (B, H // 2 if "mix" in x else H, *x["v"].shape[2:])
    upstream = [torch.randn(o, device=DEVICE).to(dtype), torch.randn(o[:3], device=DEVICE)]
    attend = partial(kernels.attend, cpp=cpp)
    kernel = outputs_and_gradients(attend, rule, x, options, upstream)
    eager, eager_terms = dense_gradients(rule, x, options, upstream)
    exact, terms = dense_gradients(rule, x, options, upstream, torch.float64)
    assert kernel.keys() == eager.keys() == exact.keys()
    # large powers of large scores leave the range of float16
    assume(all(true.abs().max() < torch.finfo(dtype).max / 64 for true in exact.values()))
    # the eager error of a sum of many terms may be small by luck, so the errors of its terms are
    # added to the bound
    sums = roots_of_squares(terms, x)
    lost = roots_of_squares({name: eager_terms[name] - term for name, term in terms.items()}, x)
    by_design = errors_by_design(rule, x, options, upstream, eager, exact)
    alone = T == 1 or options.get("window") == 1  # a single weight is always 1: its gradient is 0
    for name, true in exact.items():
        # one rounding to the dtype, and a float32 sum over the width. dt and dmix come from an o or
        # g rounded to the dtype. lssar's weights are exponentials of a difference of logarithms,
        # which are as large as r
        rounded = dtype if name in ("dt", "dmix") else kernel[name].dtype
        length = D**0.5 + (rms(exact["r"]) if rule == "lssar" else 0)
        floor = torch.finfo(rounded).eps + torch.finfo(torch.float32).eps * length
        size = rms(true)
        if alone or size == 0:  # g and delta, sums over E, cancel
            size = max(size, x["v"].shape[3] ** 0.5)
        bound = 8 * (rms(eager[name] - true) + lost.get(name, 0) + by_design[name])
        bound += 2 * floor * (size + sums.get(name, 0))
        error = rms(kernel[name] - true)
        share = math.inf if error > 0 else 0.0
        if bound:
            share = error / bound
        what = f"{name} {tuple(true.shape)} of the kernel {rule} ({dtype})"
        note(share, f"{what}: its error {error:.3g}")


def errors_by_design(rule, x, options, upstream, eager, exact):
    """RMS errors, by name, that no kernel of this design can avoid. Some are found as a change of
    the exact inputs."""
    B, H, T, _ = x["q"].shape
    eps = torch.finfo(torch.float32).eps
    up = list(upstream)
    do = up[0].double()
    nudged = {name: part.double() for name, part in x.items()}
    eye = torch.eye(T, device=DEVICE).expand(B, 1, T, T)
    lost = dict.fromkeys(exact, 0.0)
    means = []

    # delta is a mean of g, computed as do times a sum of rounded weights: do . o - dr, or do . U
    # for entmax. For lssar an extra pass sums it. Since g is rounded too, the two cancel up to eps
    mean = exact["o"]
    lost_mean = 0 if rule == "lssar" else eager["o"] - mean
    entmax = rule in ("entmax", "sparsemax")
    if entmax:
        power = options.get("power") or reference.POWERS.get(rule, 1.0)
        if "t" in x:
            power = nudged["t"][..., None]
        v = nudged["v"].repeat_interleave(H // x["v"].shape[1], 1)
        for form in (x, nudged):
            of_keys = form | {"v": eye.to(form["v"].dtype)}
            w, _ = reference.attend_by_rule(rule, **of_keys, **options)
            u = (w > 0) * w.double() ** (1 - 1 / power)
            means.append((u @ v / u.sum(-1, keepdim=True).clamp(min=1e-30)).to(w.dtype).double())
        mean = means[1]
        lost_mean = means[0] - mean
    lost_delta = (do * lost_mean).sum(-1).abs() + eps * (do * mean).abs().sum(-1)
    scored = {name: part for name, part in nudged.items() if name not in ("t", "mix")} | {"v": eye}
    positive = {name: part.abs() for name, part in scored.items()}
    sizes, _ = reference.attend_by_rule("identity", **positive, **options)
    if entmax:
        lost_ds = [u * lost_delta[..., None]]
        through, _ = dense_gradients("identity", scored, options, lost_ds, torch.float64)
        lost |= {name: rms(part) for name, part in through.items() if name not in ("o", "dv")}
        # r is as large as the scores. o is divided by the sum of weights that its rounding changes;
        # dv is not
        lost_w = eps * u * sizes.amax(-1, keepdim=True)
        lost["dv"] = rms((lost_w.mT @ do).unflatten(1, (x["v"].shape[1], -1)).sum(2))
    if entmax and "t" in x:
        # dt_i = sum_j (g_ij - delta_i) w_ij (log x_ij - 1): the weights sum to 1, and log x_ij =
        # log w_ij / t_i
        off = lost_delta * (math.log(T) / x["t"].min() + 1)
        lost["dt"] = off.square().sum_to_size(x["t"].shape).mean().sqrt().item()
    if "r" in exact and not options.get("row_sum"):
        # the backward pass computes a weight again, from r of the forward pass. So it is off by the
        # error of r, and so are delta and g, which cancel if one weight dominates. softpick's
        # weight is the difference of e^(s - r) and e^-r. lssar's x is a difference that keeps the
        # error of t
        lost_r = eps * exact["r"].abs() + (eager["r"] - exact["r"]).abs()
        if rule == "lssar":
            nudged["t"] = nudged["t"] * (1 + eps)
            lost_r += (reference.attend_by_rule(rule, **nudged, **options)[1] - exact["r"]).abs()
        if rule == "softpick":
            lost_r *= 1 + (-exact["r"]).exp()
        lost_r = lost_r.clamp(max=1)
        lost_dr = lost_r * (do * mean).abs().sum(-1) + lost_delta
        up = [up[0] * (1 + lost_r[..., None]), up[1] * (1 + lost_r) + lost_dr]
    # scores are rounded: equal ones alike, others at random, and eager may be lucky. Each is off by
    # 0 or 4 eps
    coins = torch.randint(2, sizes.shape, generator=dice(8)).to(DEVICE)
    moved, _ = dense_gradients(rule, nudged, options, up, torch.float64, 4 * eps * coins * sizes)
    return {name: lost[name] + rms(moved[name] - true) for name, true in exact.items()}


EVERYTHING = dict(W=21, tail=True, slope=True)
RULES = [
    name for name, kernel in kernels.KERNELS.items() if not kernel.plain_sum and name != "alphamax"
]
BOTH = st.sampled_from((True, False))
# one call of attend(); the simplest case, which is drawn first, has everything at once
CALLS = st.fixed_dictionaries(
    {
        "T": st.sampled_from((45, 1, 15, 16, 17, 31, 32, 33, 48, 64, 65)),
        "D": st.sampled_from((16, 8, 24, 40, 72)),
        "E": st.sampled_from((24, 16, 8, 40, 80)),
        "dtype": st.sampled_from(DTYPES),
        "heads": st.sampled_from(((1, 2, 1, 1), (2, 2, 2, 2), (1, 4, 2, 1))),
        "W": st.sampled_from((21, 0, 1, 37, 200)),
        "tail": BOTH,
        "slope": BOTH,
        "window": st.sampled_from((17, 0, 1, 30)),
        "first": st.sampled_from((3, 0, 20)),
        "strided": BOTH,
        "scores": SCORES,
        "tiles": st.tuples(
            *[st.sampled_from(((32, 16), (16, 32), (32, 32), (16, 16)))] * 4,
            st.sampled_from(((32, 32), (16, 16))),
        ),
    }
)


def check(rule, call, draws, cpp=False):
    """The kernels of one call. t and mix broadcast, the power is a constant or a row input, tokens
    share sets."""
    about = kernels.KERNELS[rule]
    call = dict(call)
    B, H, call["Hk"], call["Hv"] = call.pop("heads")
    T = call["T"]
    rows = (None, (), (1,), (T,), (H, 1), (B, H, T))
    call |= {"B": B, "H": H, "t": call.get("t") or draws.draw(st.sampled_from(rows), "t")}
    call["power"] = None
    if about.takes_power and not (rule == "entmax" and call["t"]):
        call["power"] = draws.draw(st.sampled_from((None, 1.0, 1.5, 3.0)), "power")
    if about.settle is None and draws.draw(st.booleans(), "two views"):
        rows = ((1,), (), (H // 2, 1), (B, H // 2, T))
        call |= {"mix": draws.draw(st.sampled_from(rows), "mix"), "Hv": 1}
    elif about.settle is None:
        call["row_sum"] = draws.draw(BOTH, "row sum")
    # bits: one or two for each token, none for tokens 0, 5, ..
    if draws.draw(st.booleans(), "sets"):
        sets = (2 ** (8 * torch.randint(8, (2, B, T), generator=dice(3)))).sum(0)
        call["sets"] = (sets * (torch.arange(T) % 5 > 0)).to(DEVICE)
    with mock.patch.object(kernels, "SMALL", tuple((*tile, 4, 1) for tile in call.pop("tiles"))):
        x, options = draw(rule, cpp=cpp, **call)
        if rule == "elastic":  # the kernels' derivative begins 2^-18 beyond the threshold
            eye = torch.eye(T, dtype=torch.float64, device=DEVICE).expand(B, 1, T, T)
            exact = {name: part.double() for name, part in x.items()} | {"t": None, "v": eye}
            p, _ = reference.attend_by_rule("softmax", **exact, **options)
            assume(((p / x["t"][..., None] - 1).abs() > 2**-17).all())
        compare(rule, x, options, cpp)


@pytest.mark.parametrize(
    "rule, changes",
    [
        *((rule, {}) for rule in RULES),
        ("softpick", {"scores": "far below 0"}),
        ("entmax", {"t": (1,)}),
        (
            "lssar",
            {"scores": "equal", "W": 0, "tail": False, "slope": False, "dtype": torch.float32},
        ),
    ],
    ids=str,
)
@given(CALLS, st.data())
@settings(max_examples=examples(1))
def test_the_kernels_of_each_rule_equal_the_reference_in_outputs_and_all_gradients(
    rule, changes, call, draws
):
    check(rule, call | changes, draws)


@given(st.sampled_from(RULES), CALLS, st.data())
@settings(max_examples=examples(3))
def test_kernels_equal_the_reference_in_outputs_and_all_gradients(rule, call, draws):
    # in half precision, eager LSSAR divides 0 by 0 where all scores of a row equal their mean
    assume(rule != "lssar" or call["scores"] != "equal" or call["dtype"] == torch.float32)
    check(rule, call, draws)


def clusters(T, views):
    """Clustered queries and keys: tokens have high scores only within stretches of 60, so whole
    tiles of weights are 0. The second view has other such tiles."""
    centre = F.pad(8 * (torch.eye(4) - 1 / 4), (0, 12))[torch.arange(T) // 60 % 4]
    q, k = (centre + 0.4 * torch.randn(1, 1, T, 16, generator=dice(stream)) for stream in (2, 3))
    return {
        "q": torch.cat([q, q.roll(60, 2)][:views], 1).to(DEVICE),
        "k": torch.cat([k, k][:views], 1).to(DEVICE),
    }


BUSY = dict(window=120, first=5, **EVERYTHING)


@pytest.mark.parametrize(
    "rule, options",
    [
        by_default((rule, options) == ("tra", {"H": 1, "T": 150} | BUSY), rule, options)
        for rule in RULES
        if kernels.KERNELS[rule].skip
        for options in ({"H": 1, "T": 150} | BUSY, {"T": 230, "mix": (1, 1)})
        if rule in ("tra", "relu") or "mix" not in options
    ],
    ids=str,
)
def test_skipping_dead_tiles_changes_nothing(rule, options):
    """Results equal those of kernels that visit every tile and are close to float64. A weight of 0
    may have a gradient. With two views, a tile is visited if either view has a weight in it. In
    many tiles neither view has."""
    x, more = draw(rule, **options)
    x |= clusters(options["T"], x["q"].shape[1])
    x |= {"t": x["t"].abs() + 3} if "t" in x and "mix" not in x else {}
    # no bias lifts scores above thresholds
    x |= {name: -x[name].abs() for name in ("tail", "slope") if name in x}
    with mock.patch.object(kernels, "live_lists", side_effect=kernels.live_lists) as visits:
        with_skip, without = (
            outputs_and_gradients(kernels.attend, rule, x, more | {"skip": skip})
            for skip in (True, False)
        )
    if kernels.INTERPRETED:  # tiles are 32 x 16; those on a GPU are too large for these clusters
        T, alive = options["T"], visits.call_args_list[0].args[0].float()
        past = torch.arange(0, T, 16) <= torch.arange(0, T, 32)[:, None] + 31
        assert 0.1 < alive.sum() / past.sum() < 0.9
    same(with_skip, without)
    compare(rule, x, more)


def test_without_gradients_and_in_a_second_run_the_output_is_the_same_bit_for_bit():
    """Without gradients, the kernel saves nothing for a backward pass."""
    x, options = draw("elastic", 45, Hk=1, Hv=1, window=30, first=2, **EVERYTHING)
    one, two = (outputs_and_gradients(kernels.attend, "elastic", x, options) for _ in range(2))
    same(two, one)
    same(kernels.attend("elastic", **x, **options)[0], one["o"].detach())


def test_heads_may_lie_far_apart_in_memory_but_a_head_must_fit_32_bit_offsets():
    """Batches of q and v, and heads of k, are 2^31 elements apart. Only a few pages of the buffer
    are ever touched."""
    torch.use_deterministic_algorithms(False)  # NaN would fill the whole buffer
    x, options = draw("softmax", T=33, B=2, dtype=torch.float16)
    far, step = 2**31 + 8 * 64, 64 * 64
    buffer = torch.empty(far + 8 * step, dtype=torch.float16, device=DEVICE)
    spread = {
        name: buffer.as_strided(x[name].shape, (*strides, 16, 1), 2 * n * step).copy_(x[name])
        for n, (name, strides) in enumerate(
            {"q": (far, step), "k": (step, far), "v": (far, step)}.items()
        )
    }
    same(*(outputs_and_gradients(kernels.attend, "softmax", form, options) for form in (spread, x)))
    with pytest.raises(ValueError, match="2\\^31"):
        kernels.attend(
            "softmax", x["q"], buffer.as_strided((2, 2, 33, 16), (0, 0, 2**26, 1)), x["v"]
        )


zeros = partial(torch.zeros, device=DEVICE)


@pytest.mark.parametrize(
    "message, rule, changes",
    [
        ("choose one of", "softmox", {}),
        ("leave out row_sum", "softmax", {"row_sum": True}),
        ("takes no power 2", "softmax", {"power": 2}),
        ("takes no power 0.5", "tra", {"power": 0.5}),
        ("leave out t", "softmax", {"t": zeros(8)}),
        ("without a row statistic", "softmax", {"mix": zeros(())}),
        ("must agree", "softmax", {"q": zeros(2, 8, 16)}),
        ("must agree", "softmax", {"k": zeros(1, 3, 8, 16)}),
        ("must agree", "relu", {"mix": zeros(())}),
        ("heads of q", "softmax", {"table": zeros(3, 4)}),
        ("must be positive", "softmax", {"scale": 0.0}),
        ("width 256 at most", "softmax", {"v": zeros(1, 2, 8, 257)}),
        ("width 128 at most", "relu", {"mix": zeros(()), "v": zeros(1, 1, 8, 129)}),
        ("share one of float32", "softmax", {"v": zeros(1, 2, 8, 16, dtype=torch.float16)}),
        (r"sets must be \(B, T\) int64", "softmax", {"sets": zeros(1, 9, dtype=torch.int64)}),
        *(
            []
            if DEVICE == "cuda"
            else [
                (
                    "interpreter computes bfloat16 wrongly",
                    "softmax",
                    dict.fromkeys("qkv", zeros(1, 2, 8, 16, dtype=torch.bfloat16)),
                )
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_inputs_are_refused(message, rule, changes):
    with pytest.raises(ValueError, match=message):
        kernels.attend(rule, **draw("softmax", T=8)[0] | changes)


KINDS = {  # scores of the keys (T,), the same in every row
    "below -100": lambda T: -100 - torch.rand(T),
    "nearly uniform": lambda T: 1e-3 * torch.randn(T),
    "ties": lambda T: torch.randint(0, 3, (T,)).float(),
    "10^4": lambda T: 1e4 * torch.randn(T),
    "10^4 either way": lambda T: 1e4 * torch.randn(T).sign(),
    "0": lambda T: torch.zeros(T),
}


def with_scores(s, **more):
    """Inputs whose scores are exactly s_j."""
    q, k, v = (torch.randn(1, 1, len(s), 16, device=DEVICE) for _ in range(3))
    k[..., 0] = s.to(DEVICE)
    return dict(q=torch.eye(16, device=DEVICE)[0].expand_as(q), k=k, v=v, **more)


@pytest.mark.parametrize(
    "rule, kind",
    [
        by_default(
            kind in ("below -100", "10^4 either way") or (rule, kind) == ("softpick", "0"),
            rule,
            kind,
        )
        for rule in RULES
        for kind in KINDS
    ],
)
def test_extreme_scores_give_finite_outputs_and_gradients_close_to_float64(rule, kind):
    """Rules that cut off low scores give 0 if all scores are very negative. lssar's (10^4)^15 would
    overflow."""
    t = {"t": torch.full((), 0.02, device=DEVICE)} if kernels.KERNELS[rule].takes_t else {}
    x = with_scores(KINDS[kind](20), **t)
    found = outputs_and_gradients(kernels.attend, rule, x, {})
    assert all(part.isfinite().all() for part in found.values())
    o, _ = reference.attend_by_rule(rule, **{name: part.double() for name, part in x.items()})
    # scores of 10^4 are themselves rounded to 5e-4
    below(rms(found["o"] - o), 4e-3 * rms(o) + 1e-12)
    if kind == "below -100" and rule in ("lssar", "softpick", "relu", "tra"):
        assert not any(part.any() for name, part in found.items() if name not in ("r", "dq", "dk"))


@pytest.mark.parametrize(
    "rule, power",
    [
        by_default(power == 2, rule, power)
        for rule, power in (
            ("entmax", 20),
            ("entmax", 5),
            ("entmax", 2),
            ("entmax", 1.25),
            ("sparsemax", 1),
        )
    ],
)
def test_long_rows_of_entmax_sum_to_one(monkeypatch, rule, power):
    """Values of 1 give outputs of 1, and r solves its equation to float32 precision. In PyTorch,
    the weights sum to 1, equal scores have equal weights, and a uniform row has no zeros."""
    # the interpreter is slow per tile
    monkeypatch.setattr(kernels, "SMALL", ((512, 512, 8, 1),) * 5)
    for s in (
        KINDS["nearly uniform"](1500),
        torch.rand(1000).log(),
        *(make(200) for make in KINDS.values()),
    ):
        x = with_scores(s)
        o, r = kernels.attend(
            rule, **x | {"v": torch.ones_like(x["v"])}, power=None if power == 1 else power
        )
        close(o, torch.ones_like(o), terms=64)  # the errors of the long sums cancel
        r, z = r[0, 0, -1].double(), s.double().to(DEVICE) / power
        # the sums for r moved up and down by the spacing of float32 numbers
        spacing = torch.finfo(torch.float32).eps * z.abs().max()
        near = [(torch.relu(z - r - d) ** power).sum() for d in (spacing, -spacing)]
        assert near[0] - 1e-5 <= 1 <= near[1] + 1e-5
        s, learned = s.expand(2, -1), torch.full((2, 1), float(power))
        for how in {"power": power}, {"t": learned, "power": None}:
            w = attention.RULES["entmax"].weights(s, torch.ones_like(s).bool(), **how)
            close(w.sum(-1), torch.ones(2), terms=s.shape[1])
            for row, score in zip(w, s, strict=True):
                top = row[score == score.max()]
                close(top, top[:1].expand_as(top), terms=4)
                assert len(top) < len(row) or row.all()


def test_a_loss_on_the_statistic_alone_and_a_second_derivative():
    """If o is not used, the gradients are those for an upstream gradient of 0."""
    x, options = draw("softmax", T=20)
    upstream = [torch.zeros_like(x["q"]), torch.randn(x["q"].shape[:3], device=DEVICE)]
    both = outputs_and_gradients(kernels.attend, "softmax", x, options, upstream)
    alone = outputs_and_gradients(
        lambda rule, **x: kernels.attend(rule, **x)[1:], "softmax", x, options, upstream[1:]
    )
    same([alone["d" + name] for name in x], [both["d" + name] for name in x])
    q = x["q"].requires_grad_()
    (dq,) = torch.autograd.grad(
        kernels.attend("softmax", **x)[0].square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiated once"):
        dq.sum().backward()


def test_without_triton_modules_can_be_imported_but_attend_is_refused():
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


def test_autocast_casts_inputs_to_one_dtype():
    """Each gradient has the original dtype of its input."""
    low, (x, options) = DTYPES[-1], draw("elastic", T=33, **EVERYTHING)
    x["v"] = x["v"].to(low)
    with torch.autocast(DEVICE, dtype=low):
        one = outputs_and_gradients(kernels.attend, "elastic", x, options)
    cast = {name: part.to(low) if name in "qkv" else part for name, part in x.items()}
    two = outputs_and_gradients(kernels.attend, "elastic", cast, options)
    assert one["o"].dtype == low and one["r"].dtype == torch.float32
    same(one, {name: two[name].to(one[name].dtype) for name in one})


def test_torch_compile_makes_one_graph_and_does_not_recompile():
    """The compiled function gives the same outputs and gradients in two steps with different
    inputs."""
    torch._dynamo.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda rule, **x: kernels.attend(rule, **x), fullgraph=True, backend=backend, dynamic=False
    )
    for step in range(2):
        x, options = draw("elastic", T=16, H=4, Hk=2, seed=step, **EVERYTHING)
        with torch._dynamo.config.patch(error_on_recompile=True):
            fused = outputs_and_gradients(compiled, "elastic", x, options)
        close(fused, outputs_and_gradients(kernels.attend, "elastic", x, options), terms=64)


@pytest.mark.parametrize(
    "rule, options", [("elastic", EVERYTHING), ("tra", dict(H=4, W=4, mix=(1, 2, 20)))], ids=str
)
def test_operators_declare_what_they_return(rule, options):
    """The shapes, strides and dtypes that tracing assumes are those of the kernels' outputs."""
    x, more = draw(rule, T=20, E=24, **options)
    with mock.patch.object(kernels, "run_forward", side_effect=kernels.run_forward) as run:
        kernels.attend(rule, **x, **more)
    call = kernels.Call(*run.call_args.args)._replace(learn=True, skip=True)
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(kernels.run_forward, call, test_utils=checks)
    o, r, u, alive = kernels.run_forward(*call)
    saved = u if kernels.KERNELS[rule].save_u else o
    torch.library.opcheck(
        kernels.run_backward, (*call, saved, r, alive, o, r), test_utils=checks[:2]
    )
