"""The Triton side of attention.py: every rule there that has a fused kernel stands here under the same name, in the same order.

One formula serves all. A head's output is  o_i = sum_j f(s_ij; r_i, t_i) v_j  over the keys j that row i sees, where s is the
score, t_i a row input (elastic's threshold, minus sigmoid's bias) and r_i a statistic of the row's scores (their log-sum-exp,
the sum of the weights, a threshold that solves an equation, or nothing). So a rule is three small functions, `weigh` (scores to
weights), `slope` (the derivative) and `settle` (running sums to the statistic), and one forward and one backward skeleton, which
know no rule, take them as compile-time arguments. Both t and r are differentiable (but for r that were found by iteration):
thresholds, sinks, gates and normalisers live outside, in PyTorch.

Tiles: each program keeps one tile of rows (or of keys) on the chip and walks over the tiles of the other side, so no T x T
matrix is ever stored (Rabe & Staats 2021, arXiv 2112.05682; Dao et al. 2022, FlashAttention, arXiv 2205.14135). The running
maximum is Milakov & Gimelshein's (2018, arXiv 1805.02867). Nothing is added atomically: two runs agree bit for bit. Tiles in which
every weight is exactly 0 are noted in the forward and passed over in the backward.

Differential attention (Ye et al. 2024, arXiv 2410.05258) subtracts a second view: o_i = sum_j (w_ij - mix_i w'_ij) v_j, with w' from
queries and keys of its own. Rules without a statistic weigh both views at once, so there is one product with the values.

Legend                                              shapes in comments
  B, H, T   batch, query heads, tokens               (BM, ..)  a tile of BM rows, that is queries
  D, E      width of q and k, width of v             (BN, ..)  a tile of BN keys
  i, j      row and key numbers                      DP, EP    D and E padded to a power of two
  s, w      scores, weights                          NEAR      the tile needs masks or the distance table
  g         g_ij = do_i . v_j, the gradient of w     do, ds    the gradient that arrives at o, that of s (dq, dk, .. alike)
  r, t      row statistic, row input                 e         the gradient that arrives at r
  u         what the saved row vector sums           delta     delta_i = do_i . U_i - e_i, the row constant of the backward
  z         what the statistic sums, beside w        p         the rule's power, a constant
  mix       the row's factor of a second view        .b       (kb, dsb, ..) of the second view; b alone is its head
  x, y      all inputs (Inputs), one head (Head)     c, rule   Sizes and Rule: known to the compiler, never at run time
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    INTERPRETED = triton.knobs.runtime.interpret                     # TRITON_INTERPRET=1: the kernels run on the CPU, for tests
    # NVIDIA from Ampere on: older GPUs have too little shared memory for these tiles
    CAPABLE = torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() >= (8, 0)
    AVAILABLE = bool(INTERPRETED or CAPABLE)
except (ImportError, AttributeError):                                # no triton, or an old one: names stay, nothing runs
    triton, tl = SimpleNamespace(jit=lambda f: f), SimpleNamespace(constexpr=lambda x: x)
    INTERPRETED = AVAILABLE = False

BINARY = 1.4426950408889634                                          # log2 e: e^x = 2^(x log2 e), and the hardware knows only 2^x
LOG2E = tl.constexpr(BINARY)                                         # the same for use inside a kernel
LN2 = tl.constexpr(1 / BINARY)


class Inputs(NamedTuple):
    """What every kernel reads. What is None does not exist for the compiler either."""
    q: Any                  # (B, H, T, D)
    k: Any                  # (B, H/GK, T, D): GK query heads share one key head,
    v: Any                  # (B, H/GV, T, E)  and GV of them one value head
    t: Any                  # (B, H, T) float32 row input, or None
    table: Any              # (H, W) float32: added to the score at distance i - j < W, or None
    far: Any                # (H, 2) float32: a constant from distance W on, and a slope times the distance everywhere, or None
    mix: Any                # (B, H/2, T) float32: heads 2h and 2h + 1 are two views, weighted 1 and -mix, of the output's head h; or None
    sq: tuple               # strides between batches, heads and rows; the last axis has stride 1
    sk: tuple
    sv: tuple
    st: tuple
    sm: Any                 # of mix, or None
    H: int
    GK: int
    GV: int
    T: int
    W: int                  # width of the table, 0 without one
    window: Any             # keys farther than this are not seen (None: no limit),
    first: int              # but for this many first keys
    scale: float


class Head(NamedTuple):
    """Where one head's matrices begin: 64-bit addresses. Inside a head 32 bits are enough, and the host checks that."""
    n: Any                  # batch entry
    h: Any                  # head
    out: Any                # that of the output: h, or h // 2 where two views share it
    at: Any                 # where its row vectors begin in (B, H, T)
    q: Any
    k: Any
    v: Any
    tail: Any
    slope: Any


class Sizes(NamedTuple):
    D: int
    DP: int
    E: int
    EP: int
    BM: int
    BN: int


class Rule(NamedTuple):
    weigh: Any              # s, r, t, p -> w (times v), z (summed for the statistic), u (times v, saved for the backward)
    slope: Any              # s, r, t, p, g, delta -> ds, the summand of dt_i
    settle: Any = None      # r, t, p, W = sum of w, Z = sum of z, first call? -> the statistic; None: the rule has none
    lift: Any = None        # s, t, p -> what weigh takes for s and the running maximum is taken of; slope is given s itself
    online: bool = False    # weigh(s, r + c) = 2^-c weigh(s, r): r may be the maximum so far, and one pass is enough
    passes: int = 0         # passes over the keys before the output pass; from the second on, settle improves on the statistic
    extra: bool = False     # U_i = sum_j u_ij v_j / sum_j z_ij is not the output: save it as well
    rowin: bool = False     # reads t
    power: float = 0.0      # p,
    powers: bool = False    # and attend() may choose another
    unit: float = 1.0       # the rule sees s * unit
    floor: float = -1e30    # where a running maximum starts: finite, for -inf minus -inf is nan
    sums: bool = False      # the statistic is a plain sum, which the backward can do without
    heavy: bool = False     # needs more registers than most, so HEAVY tiles
    dead: Any = None        # what the backward may leave out of a tile whose weights are all 0: "all" of it, where ds is 0, too; or
                            # what has to do with the "values", where ds does not depend on g; or nothing

    @property
    def cache_key(self):    # Triton looks for it: without it an edited rule would run its old, cached kernel
        return "-".join(str(getattr(part, "cache_key", part)) for part in self)


# ------------------------------------------------------------------------------------------------ who sees whom
# `visible` says it for one row and key, the two functions after it for a whole tile:
# change these, and every kernel follows.
# Both return (kept, lo, a, b, hi). Tiles in [a, b) are seen in full and need neither mask nor table; those in [0, kept), [lo, a) and
# [b, hi) do; nothing else is in sight. All of these numbers but hi are multiples of the tile.

@triton.jit
def visible(i, j, x):
    seen = j <= i
    if x.window is not None:
        seen &= (i - j < x.window) | (j < x.first)
    return seen


@triton.jit
def key_tiles(i, x, c: tl.constexpr):
    """The keys that rows i .. i+BM-1 see."""
    hi = tl.minimum(i + c.BM, x.T)
    end = tl.cdiv(hi, c.BN) * c.BN
    kept = 0
    lo = 0
    a = 0
    if x.window is not None:
        kept = tl.minimum(tl.cdiv(x.first, c.BN) * c.BN, end)
        lo = tl.maximum(tl.maximum(i + 1 - x.window, 0) // c.BN * c.BN, kept)              # the first row sees farthest back,
        a = tl.maximum(tl.cdiv(tl.maximum(i + c.BM - x.window, 0), c.BN) * c.BN, lo)       # from here on the last row does, too
        a = tl.minimum(a, end)
    b = tl.maximum(tl.maximum(i + 1 - x.W, 0) // c.BN * c.BN, a)                           # nearer than W, or not all seen
    return kept, lo, a, b, hi


@triton.jit
def row_tiles(j, x, c: tl.constexpr):
    """The rows that see keys j .. j+BN-1."""
    hi = x.T
    b = x.T // c.BM * c.BM                                                                 # a last broken tile needs masks
    if x.window is not None:
        if j >= x.first:                                                                   # first keys are seen to the end
            hi = tl.minimum(x.T, j + c.BN - 1 + x.window)
        b = tl.minimum(b, (j + x.window) // c.BM * c.BM)
    lo = j // c.BM * c.BM
    a = tl.minimum(tl.cdiv(j + c.BN - 1 + x.W, c.BM) * c.BM, tl.cdiv(hi, c.BM) * c.BM)
    return 0, lo, a, tl.maximum(a, b), hi


@triton.jit
def walk(state, step: tl.constexpr, own, tiles, live, x, y, rule: tl.constexpr, c: tl.constexpr, size: tl.constexpr, WHICH: tl.constexpr):
    """state = step(state, ..) for every tile in sight: first the many that need no mask, then the few that do. WHICH: "all", or only
    those that `live` lists (see list_live) as "live" or "dead"; the bounds are then places in the list, so the runs stay as they are."""
    kept, lo, a, b, hi = tiles
    zero = 0
    if WHICH != "all":
        zero = place_in_list(live, 0, x, size, WHICH)
        kept = place_in_list(live, kept, x, size, WHICH) - zero
        lo = place_in_list(live, lo, x, size, WHICH)
        a = place_in_list(live, a, x, size, WHICH)
        b = place_in_list(live, b, x, size, WHICH)
        hi = place_in_list(live, hi, x, size, WHICH)
    for start in tl.range(a, b, size):
        state = step(state, own, listed(live, start, x, size, WHICH), x, y, rule, c, False)
    for n in tl.range(0, kept + (a - lo) + (hi - b), size, num_stages=1):                  # pipelining these costs registers
        start = tl.where(n < kept, n + zero, n - kept + lo)                                # three runs, laid end to end
        start = tl.where(start < a, start, start - a + b)
        state = step(state, own, listed(live, start, x, size, WHICH), x, y, rule, c, True)
    return state


@triton.jit
def place_in_list(live, start, x, size: tl.constexpr, WHICH: tl.constexpr):
    """Where the first live (dead) tile from `start` on is listed, in the same unit."""
    n = tl.cdiv(start, size)
    place = tl.load(live + n)                                                              # so many live tiles come before it
    if WHICH == "dead":
        place = tl.load(live + tl.cdiv(x.T, size)) + n - place                             # the dead ones follow after all live ones
    return place * size


@triton.jit
def listed(live, start, x, size: tl.constexpr, WHICH: tl.constexpr):
    """The tile at this place of the list; without one, of all tiles."""
    if WHICH != "all":
        start = tl.load(live + tl.cdiv(x.T, size) + 1 + start // size) * size
    return start


# ------------------------------------------------------------------------------------------------ loading and scoring

@triton.jit
def whose(x, head):
    """The head of this number, counted over the whole batch."""
    n = (head // x.H).to(tl.int64)                                                         # a product of these may pass 2^31
    h = (head % x.H).to(tl.int64)
    out = h
    if x.mix is not None:
        out = h // 2
    tail = 0.
    slope = 0.
    if x.far is not None:
        tail = tl.load(x.far + 2 * h)                                                      # ()
        slope = tl.load(x.far + 2 * h + 1)                                                 # ()
    q = x.q + n * x.sq[0] + h * x.sq[1]
    k = x.k + n * x.sk[0] + h // x.GK * x.sk[1]
    v = x.v + n * x.sv[0] + out // x.GV * x.sv[1]
    return Head(n, h, out, head.to(tl.int64) * x.T, q, k, v, tail, slope)


@triton.jit
def place(x, tiles, BOTH: tl.constexpr = True):
    """The tile number of this program and its head. Heads are outermost, so that programs that run together share k and v.
    BOTH: of two views the program takes both, and the head is the first's."""
    head = tl.program_id(0) // tiles
    if BOTH and x.mix is not None:
        head *= 2
    y = whose(x, head)
    return tl.program_id(0) % tiles, y


@triton.jit
def other(x, y):
    """The head of the second view."""
    return whose(x, y.n * x.H + y.h + 1)


@triton.jit
def load(P, stride, row, T, D: tl.constexpr, DP: tl.constexpr, EDGE: tl.constexpr):
    """Some rows of a (T, D) matrix, zero in the padding. EDGE: rows may lie beyond T."""
    d = tl.arange(0, DP)                                                                   # no mask at all where none is needed:
    P += row[:, None] * stride + d[None, :]                                                # loads stay wide and asynchronous
    if EDGE or D < DP:
        return tl.load(P, mask=(row < T)[:, None] & (d < D)[None, :], other=0.)            # (rows, DP)
    else:
        return tl.load(P)                                                                  # (rows, DP)


@triton.jit
def save(P, value, stride, row, T, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(P + row[:, None] * stride + d[None, :], value.to(P.dtype.element_ty), mask=(row < T)[:, None] & (d < D)[None, :])


@triton.jit
def row_input(x, y, i, B: tl.constexpr):
    t = tl.zeros((B,), tl.float32)
    if x.t is not None:                                                                    # rows beyond T repeat the last one:
        t = tl.load(x.t + y.n * x.st[0] + y.h * x.st[1] + tl.minimum(i, x.T - 1) * x.st[2])    # (B,); a zero may not suit the rule
    return t


@triton.jit
def factor(x, y, i):
    """What the second view is multiplied by before it is subtracted."""
    return tl.load(x.mix + y.n * x.sm[0] + y.out * x.sm[1] + tl.minimum(i, x.T - 1) * x.sm[2])    # (B,)


@triton.jit
def other_rows(x, y, i, c: tl.constexpr):
    """The head of the second view, what rows i have there, and their factors."""
    b = other(x, y)
    q = load(b.q, x.sq[2], i, x.T, c.D, c.DP, True)                                        # (BM, DP)
    return b, q, row_input(x, b, i, c.BM), factor(x, y, i)


@triton.jit
def scores(a, b, i, j, x, y, rule: tl.constexpr, NEAR: tl.constexpr):
    """a b^T in the rule's unit, and what is seen of it. i and j number rows and keys: one is a column, the other a row of the tile."""
    # s = scale * q @ k.T + where(i - j < W, table[i - j], tail) + slope * (i - j)
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * (x.scale * rule.unit)
    seen = visible(i, j, x)
    if NEAR and x.table is not None:
        close = i - j < x.W
        value = tl.load(x.table + y.h * x.W + (i - j), mask=seen & close, other=0.)        # the shape of s
        s += tl.where(close, value, y.tail)
    elif x.far is not None:
        s += y.tail                                                                        # far away there is nothing to gather
    if x.far is not None:
        s += y.slope * (i.to(tl.float32) - j.to(tl.float32))
    return s, seen


@triton.jit
def lifted(s, t, rule: tl.constexpr):
    if rule.lift is not None:
        s = rule.lift(s, t, rule.power)
    return s


# ------------------------------------------------------------------------------------------------ forward

@triton.jit
def weights(r, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr, RUN: tl.constexpr):
    """The weights of one tile. RUN: r is the maximum so far, and `fade` is what to rescale earlier sums with."""
    i, q, t, _, _ = own
    j = start + tl.arange(0, c.BN)
    k = load(y.k, x.sk[2], j, x.T, c.D, c.DP, NEAR)                                        # (BN, DP)
    s, seen = scores(q, k, i[:, None], j[None, :], x, y, rule, NEAR)
    s = lifted(s, t[:, None], rule)
    fade = 1.
    if RUN:
        top = tl.maximum(r, tl.max(tl.where(seen, s, float("-inf")) if NEAR else s, 1))
        fade = tl.exp2(r - top)
        r = top
    w, z, u = rule.weigh(s, r[:, None], t[:, None], rule.power)
    if NEAR:                                                                               # weights are masked, never scores: a rule
        w = tl.where(seen, w, 0.)                                                          # need not know what to make of -inf
        z = tl.where(seen, z, 0.)
        u = tl.where(seen, u, 0.)
    return r, fade, w, z, u


@triton.jit
def measure(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr):
    """One tile of the statistic's own pass: nothing is multiplied with the values."""
    r, W, Z = state
    r, fade, w, z, _ = weights(r, own, start, x, y, rule, c, NEAR, True)
    return r, W * fade + tl.sum(w, 1), Z * fade + tl.sum(z, 1)


@triton.jit
def measure_again(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr):
    """The same once there is a statistic, to improve on it."""
    r, W, Z = state
    _, _, w, z, _ = weights(r, own, start, x, y, rule, c, NEAR, False)
    return r, W + tl.sum(w, 1), Z + tl.sum(z, 1)


@triton.jit
def look(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr):
    """One tile of the output pass."""
    r, W, Z, acc, acc2 = state
    r, fade, w, z, u = weights(r, own, start, x, y, rule, c, NEAR, rule.online)
    i, _, _, alive, second = own
    most = w
    if x.mix is not None:
        b, qb, tb, mix = second
        _, _, wb, _, _ = weights(r, (i, qb, tb, alive, 0), start, x, b, rule, c, NEAR, False)
        most = tl.maximum(w, wb)                                                           # either view keeps a tile alive
        w -= mix[:, None] * wb
    if rule.dead is not None:                                                              # a row beyond T keeps no tile alive
        tl.store(alive + start // c.BN, (tl.max(tl.where(i < x.T, tl.max(most, 1), 0.), 0) > 0).to(tl.int8))
    if rule.online:
        acc *= fade[:, None]                                                               # a larger maximum shrinks what we have
    j = start + tl.arange(0, c.BN)
    v = load(y.v, x.sv[2], j, x.T, c.E, c.EP, NEAR)                                        # (BN, EP)
    acc = tl.dot(w.to(v.dtype), v, acc, input_precision="ieee")                            # o = w @ v
    if rule.extra:
        acc2 = tl.dot(u.to(v.dtype), v, acc2, input_precision="ieee")
    return r, W * fade + tl.sum(w, 1), Z * fade + tl.sum(z, 1), acc, acc2


@triton.jit
def forward(x, O, U, R, Alive, so, rule: tl.constexpr, c: tl.constexpr):
    """o, the statistic r in natural units, U where it is not o, and which tiles are alive."""
    tiles = tl.cdiv(x.T, c.BM)
    tile, y = place(x, tiles)
    start = (tiles - 1 - tile) * c.BM                                                      # the longest rows first
    i = start + tl.arange(0, c.BM)
    t = row_input(x, y, i, c.BM)
    q = load(y.q, x.sq[2], i, x.T, c.D, c.DP, True)                                        # (BM, DP)
    alive = Alive + (tl.program_id(0) // tiles * tiles + start // c.BM).to(tl.int64) * tl.cdiv(x.T, c.BN)
    second = other_rows(x, y, i, c) if x.mix is not None else 0
    own = (i, q, t, alive, second)                                                         # Alive is (B, H, tiles, key tiles)
    keys = key_tiles(start, x, c)
    r = tl.full((c.BM,), rule.floor, tl.float32)
    zero = tl.zeros((c.BM,), tl.float32)
    if rule.passes:                                                                        # the statistic first
        r, W, Z = walk((r, zero, zero), measure, own, keys, alive, x, y, rule, c, c.BN, "all")
        r = rule.settle(r, t, rule.power, W, Z, True)
    if rule.passes > 1:
        left = rule.passes - 1
        while left > 0:                                                                    # until no row's weights change by 1e-5
            _, W, Z = walk((r, zero, zero), measure_again, own, keys, alive, x, y, rule, c, c.BN, "all")
            better = rule.settle(r, t, rule.power, W, Z, False)
            left = tl.where(tl.max((better - r) * Z, 0) > 1e-5, left - 1, 0)
            r = better
    acc = tl.zeros((c.BM, c.EP), tl.float32)
    # W, Z and acc2 cost nothing where a rule leaves them unused: the compiler removes them
    top, W, Z, acc, acc2 = walk((r, zero, zero, acc, acc), look, own, keys, alive, x, y, rule, c, c.BN, "all")
    if rule.settle is not None:
        if not rule.passes:                                                                # or with the output
            r = rule.settle(top, t, rule.power, W, Z, True)
        tl.store(R + y.at + i, r if rule.sums else r * (1 / rule.unit), mask=i < x.T)
    if rule.online:
        acc *= tl.exp2(top - r)[:, None]                                                   # from the maximum to the statistic
    if rule.passes > 1:
        acc /= tl.maximum(W, 1e-30)[:, None]                                               # r rounds: the sum W may be 1e-4 off 1
    to = y.n * so[0] + y.out * so[1]
    save(O + to, acc, so[2], i, x.T, c.E, c.EP)
    if rule.extra:
        save(U + to, acc2 / tl.maximum(Z, 1e-30)[:, None], so[2], i, x.T, c.E, c.EP)


# ------------------------------------------------------------------------------------------------ backward

@triton.jit
def row_vectors(x, y, R, Delta, i, rule: tl.constexpr, B: tl.constexpr):
    """r in the rule's unit, t and delta of rows i; those beyond T repeat the last row, which keeps every rule finite."""
    r = tl.zeros((B,), tl.float32)
    delta = tl.zeros((B,), tl.float32)
    at = y.at + tl.minimum(i, x.T - 1)
    if rule.settle is not None:
        delta = tl.load(Delta + at)                                                        # (B,)
        if not rule.sums:
            r = tl.load(R + at) * rule.unit                                                # (B,)
    return r, row_input(x, y, i, B), delta


@triton.jit
def slopes(a, b, g, i, j, r, t, delta, x, y, rule: tl.constexpr, NEAR: tl.constexpr):
    """Weights, ds and the summands of dt of one tile: (a, b) is (q, k), or transposed (k, q)."""
    s, seen = scores(a, b, i, j, x, y, rule, NEAR)
    w, _, _ = rule.weigh(lifted(s, t, rule), r, t, rule.power)
    ds, dt = rule.slope(s, r, t, rule.power, g, delta)
    if NEAR:
        w = tl.where(seen, w, 0.)
        ds = tl.where(seen, ds, 0.)
        dt = tl.where(seen, dt, 0.)
    return w, ds, dt


@triton.jit
def live_list(Live, own, owns, size: tl.constexpr, x):
    """Which tiles the `own`-th of `owns` tiles of this head has to visit. See list_live for what is in it."""
    return Live + (tl.program_id(0) // owns * owns + own).to(tl.int64) * (2 * tl.cdiv(x.T, size) + 1)


@triton.jit
def take(state, q, k, g, i, j, r, t, delta, x, y, rule: tl.constexpr, NEAR: tl.constexpr):
    """What a tile of rows takes from one tile of keys, for one view. Its weights, too."""
    dq, dt, dtail, dslope = state
    w, ds, d = slopes(q, k, g, i, j, r[:, None], t[:, None], delta[:, None], x, y, rule, NEAR)
    dt += tl.sum(d, 1)
    if x.far is not None:
        dslope += tl.sum(ds * (i.to(tl.float32) - j.to(tl.float32)), 1)
        dtail += tl.sum(tl.where(i - j < x.W, 0., ds) if NEAR else ds, 1)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")                             # dq = ds @ k
    return (dq, dt, dtail, dslope), w


@triton.jit
def pull(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr, DEAD: tl.constexpr = False):
    """A tile of rows takes its gradients from one tile of keys. DEAD: all weights are 0, and g does not matter."""
    grads, gradsb, dmix = state
    i, q, do, r, t, delta, second = own
    j = start + tl.arange(0, c.BN)
    k = load(y.k, x.sk[2], j, x.T, c.D, c.DP, NEAR)                                        # (BN, DP)
    g = 0.
    if not DEAD:
        v = load(y.v, x.sv[2], j, x.T, c.E, c.EP, NEAR)                                    # (BN, EP)
        g = tl.dot(do, tl.trans(v), input_precision="ieee")                                # g = do @ v.T
    grads, _ = take(grads, q, k, g, i[:, None], j[None, :], r, t, delta, x, y, rule, NEAR)
    if x.mix is not None:
        b, qb, tb, mix = second
        k = load(b.k, x.sk[2], j, x.T, c.D, c.DP, NEAR)                                    # (BN, DP)
        gradsb, w = take(gradsb, qb, k, -mix[:, None] * g, i[:, None], j[None, :], r, tb, delta, x, b, rule, NEAR)
        dmix -= tl.sum(w * g, 1)                                                           # dmix = -(w * g).sum(-1)
    return grads, gradsb, dmix


@triton.jit
def pull_dead(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr):
    return pull(state, own, start, x, y, rule, c, NEAR, True)


@triton.jit
def save_rows(state, x, y, DQ, DT, DFar, sdq, i, c: tl.constexpr):
    dq, dt, dtail, dslope = state
    save(DQ + y.n * sdq[0] + y.h * sdq[1], dq * x.scale, sdq[2], i, x.T, c.D, c.DP)
    if x.t is not None:
        tl.store(DT + y.at + i, dt, mask=i < x.T)
    if x.far is not None:                                                                  # (B, H, 2, T)
        tl.store(DFar + 2 * y.at + i, dtail, mask=i < x.T)
        tl.store(DFar + 2 * y.at + x.T + i, dslope, mask=i < x.T)


@triton.jit
def backward_rows(x, U, R, DO, E, DQ, DT, DFar, DMix, Delta, Live, so, sdo, sdq, rule: tl.constexpr, c: tl.constexpr):
    """dq, the gradients of t, tail, slope and mix row by row, and delta, which the kernels after this one read."""
    tiles = tl.cdiv(x.T, c.BM)
    tile, y = place(x, tiles)
    start = (tiles - 1 - tile) * c.BM
    i = start + tl.arange(0, c.BM)
    q = load(y.q, x.sq[2], i, x.T, c.D, c.DP, True)                                        # (BM, DP)
    do = load(DO + y.n * sdo[0] + y.out * sdo[1], sdo[2], i, x.T, c.E, c.EP, True)         # (BM, EP)
    r, t, e = row_vectors(x, y, R, E, i, rule, c.BM)
    delta = -e                                                                             # delta = (do * U).sum(-1) - e
    if rule.settle is not None:
        if not rule.sums:                                                                  # a plain sum has no share in ds but e
            u = load(U + y.n * so[0] + y.out * so[1], so[2], i, x.T, c.E, c.EP, True)      # (BM, EP)
            delta += tl.sum(do.to(tl.float32) * u.to(tl.float32), 1)
        tl.store(Delta + y.at + i, delta, mask=i < x.T)
    second = other_rows(x, y, i, c) if x.mix is not None else 0
    own = (i, q, do, r, t, delta, second)
    zero = tl.zeros((c.BM,), tl.float32)
    none = (tl.zeros((c.BM, c.DP), tl.float32), zero, zero, zero)
    keys, live = key_tiles(start, x, c), live_list(Live, start // c.BM, tiles, c.BN, x)
    state = walk((none, none, zero), pull, own, keys, live, x, y, rule, c, c.BN, "all" if rule.dead is None else "live")
    if rule.dead == "values":
        state = walk(state, pull_dead, own, keys, live, x, y, rule, c, c.BN, "dead")
    grads, gradsb, dmix = state
    save_rows(grads, x, y, DQ, DT, DFar, sdq, i, c)
    if x.mix is not None:
        save_rows(gradsb, x, second[0], DQ, DT, DFar, sdq, i, c)
        tl.store(DMix + y.at // 2 + i, dmix, mask=i < x.T)                                 # (B, H/2, T)


@triton.jit
def push(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr, DEAD: tl.constexpr = False):
    """A tile of keys takes its gradients from one tile of rows. All is transposed: keys go down, rows across."""
    dk, dv, dkb = state
    j, k, v, DO, sdo, R, Delta, second = own
    i = start + tl.arange(0, c.BM)
    q = load(y.q, x.sq[2], i, x.T, c.D, c.DP, NEAR)                                        # (BM, DP)
    g = 0.
    if not DEAD:
        do = load(DO, sdo, i, x.T, c.E, c.EP, NEAR)                                        # (BM, EP)
        g = tl.dot(v, tl.trans(do), input_precision="ieee")                                # g.T = v @ do.T
    r, t, delta = row_vectors(x, y, R, Delta, i, rule, c.BM)
    if x.mix is not None:
        b, kb = second
        mix, tb = factor(x, y, i)[None, :], row_input(x, b, i, c.BM)
        qb = load(b.q, x.sq[2], i, x.T, c.D, c.DP, NEAR)                                   # (BM, DP)
    if NEAR:
        i = tl.where(i < x.T, i, -1)                                                       # a row that does not exist sees no key
    w, ds, _ = slopes(k, q, g, i[None, :], j[:, None], r[None, :], t[None, :], delta[None, :], x, y, rule, NEAR)
    if x.mix is not None:
        wb, dsb, _ = slopes(kb, qb, -mix * g, i[None, :], j[:, None], r[None, :], tb[None, :], delta[None, :], x, b, rule, NEAR)
        w -= mix * wb
        dkb = tl.dot(dsb.to(q.dtype), qb, dkb, input_precision="ieee")                     # dk of the second view
    if not DEAD:
        dv = tl.dot(w.to(do.dtype), do, dv, input_precision="ieee")                        # dv = w.T @ do
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")                             # dk = ds.T @ q
    return dk, dv, dkb


@triton.jit
def push_dead(state, own, start, x, y, rule: tl.constexpr, c: tl.constexpr, NEAR: tl.constexpr):
    return push(state, own, start, x, y, rule, c, NEAR, True)


@triton.jit
def backward_keys(x, R, DO, Delta, DK, DV, Live, sdo, sdk, sdv, rule: tl.constexpr, c: tl.constexpr):
    """dk and dv of every query head; heads that share keys or values are summed outside, always in the same order."""
    tiles = tl.cdiv(x.T, c.BN)
    tile, y = place(x, tiles)
    start = tile * c.BN
    j = start + tl.arange(0, c.BN)
    k = load(y.k, x.sk[2], j, x.T, c.D, c.DP, True)                                        # (BN, DP)
    v = load(y.v, x.sv[2], j, x.T, c.E, c.EP, True)                                        # (BN, EP)
    second = 0
    if x.mix is not None:
        b = other(x, y)
        second = (b, load(b.k, x.sk[2], j, x.T, c.D, c.DP, True))                          # (BN, DP)
    own = (j, k, v, DO + y.n * sdo[0] + y.out * sdo[1], sdo[2], R, Delta, second)
    dk = tl.zeros((c.BN, c.DP), tl.float32)
    state = (dk, tl.zeros((c.BN, c.EP), tl.float32), dk)
    rows, live = row_tiles(start, x, c), live_list(Live, tile, tiles, c.BM, x)
    state = walk(state, push, own, rows, live, x, y, rule, c, c.BM, "all" if rule.dead is None else "live")
    if rule.dead == "values":
        state = walk(state, push_dead, own, rows, live, x, y, rule, c, c.BM, "dead")
    dk, dv, dkb = state
    save(DK + y.n * sdk[0] + y.h * sdk[1], dk * x.scale, sdk[2], j, x.T, c.D, c.DP)
    save(DV + y.n * sdv[0] + y.out * sdv[1], dv, sdv[2], j, x.T, c.E, c.EP)
    if x.mix is not None:
        save(DK + y.n * sdk[0] + (y.h + 1) * sdk[1], dkb * x.scale, sdk[2], j, x.T, c.D, c.DP)


@triton.jit
def backward_table(x, R, DO, Delta, DTable, sdo, diagonals, rule: tl.constexpr, c: tl.constexpr):
    """The table's gradient. The square tiles (m, m - b) of one block diagonal b hold the same distances at the same places, so
    one program adds them up as they are, in registers; by_distance() sums what is left, one tile a diagonal. Dead tiles are not
    passed over: a table covers the distances at which keys matter, so few are dead."""
    b, y = place(x, diagonals, False)
    row = tl.arange(0, c.BM)
    total = tl.zeros((c.BM, c.BM), tl.float32)
    for start in tl.range(b * c.BM, x.T, c.BM, num_stages=1):
        i = start + row
        j = i - b * c.BM
        q = load(y.q, x.sq[2], i, x.T, c.D, c.DP, True)                                    # (BM, DP)
        k = load(y.k, x.sk[2], j, x.T, c.D, c.DP, True)                                    # (BM, DP)
        v = load(y.v, x.sv[2], j, x.T, c.E, c.EP, True)                                    # (BM, EP)
        do = load(DO + y.n * sdo[0] + y.out * sdo[1], sdo[2], i, x.T, c.E, c.EP, True)     # (BM, EP)
        r, t, delta = row_vectors(x, y, R, Delta, i, rule, c.BM)
        if x.mix is not None:
            share = tl.where(y.h % 2 == 0, 1., -factor(x, y, i))                           # -mix for the second view
        i = tl.where(i < x.T, i, -1)
        g = tl.dot(do, tl.trans(v), input_precision="ieee")                                # g = do @ v.T
        if x.mix is not None:
            g *= share[:, None]
        _, ds, _ = slopes(q, k, g, i[:, None], j[None, :], r[:, None], t[:, None], delta[:, None], x, y, rule, True)
        total += ds
    at = tl.program_id(0).to(tl.int64) * c.BM * c.BM                                       # (B, H, diagonals, BM, BM)
    tl.store(DTable + at + row[:, None] * c.BM + row[None, :], total)


# ------------------------------------------------------------------------------------------------ the rules
# For each the formula, then the three functions; the PyTorch line is the definition and stands above the Triton line. Here s and r
# are in the rule's unit: times log2 e where exponentials are taken, so that exp(s - r) is one exp2. s is a tile, the vectors
# r, t and delta broadcast to it, p is a number. A new rule is its functions and a row of RULES.

# softmax: w_ij = exp(s_ij - r_i), r_i = log sum_j exp(s_ij).  ds_ij = w_ij (g_ij - delta_i), delta_i = do_i . o_i - e_i

@triton.jit
def softmax_weigh(s, r, t, p: tl.constexpr):
    # w = torch.exp(s - r)
    w = tl.exp2(s - r)
    return w, w, w


@triton.jit
def softmax_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = torch.exp(s - r) * (g - delta)
    ds = tl.exp2(s - r) * (g - delta)
    return ds, ds


@triton.jit
def log_sum_exp(r, t, p: tl.constexpr, W, Z, FIRST: tl.constexpr):
    # r = torch.logsumexp(s, -1)                (r comes in as the maximum m, Z as the sum of 2^(s - m))
    return tl.where(Z > 0, r + tl.log2(Z), 0.)                       # lssar may find nothing alive


# elastic: w_ij = relu(p_ij - t_i), p = softmax(s), t_i = tau_h / n_i.  Every p_ij takes part in the sum, but only those above
# the threshold in the output: ds_ij = p_ij (m_ij g_ij - delta_i) with m_ij = [p_ij > t_i], U_i = sum_j p_ij m_ij v_j

# A first row has one key: p = 1, and t = 1 as tau starts. Rounding, which differs between kernels, must not decide such a tie.
TIE = tl.constexpr(1 + 2**-18)


@triton.jit
def elastic_weigh(s, r, t, p: tl.constexpr):
    # p = torch.exp(s - r)
    p = tl.exp2(s - r)
    # w = torch.relu(p - t)
    return tl.maximum(p - t, 0.), p, tl.where(p > t * TIE, p, 0.)


@triton.jit
def elastic_slope(s, r, t, p: tl.constexpr, g, delta):
    # p = torch.exp(s - r); g = g * (p > t)
    p = tl.exp2(s - r)
    g = tl.where(p > t * TIE, g, 0.)
    # ds = p * (g - delta); dt = -g.sum(-1)
    return p * (g - delta), -g


# Powers. x^p with x^p = 0 for x <= 0, whatever p is: x^0 is [x > 0], so that the slope of x^p is p x^(p - 1) for p = 1, too.

@triton.jit
def real_power(x, p):
    # x**p if x > 0 else 0
    return tl.where(x > 0, tl.exp2(p * tl.log2(x)), 0.)


@triton.jit
def power(x, p: tl.constexpr):
    # x**p if x > 0 else 0
    if p == 0:
        return tl.where(x > 0, 1., 0.)
    elif p == 1:
        return tl.maximum(x, 0.)
    elif p > 32 or p % 1 != 0:
        return real_power(x, p)
    elif p % 2 == 0:                                                 # whole powers by squaring: exponentials are dear
        half = power(x, p // 2)
        return half * half
    else:
        return power(x, p - 1) * tl.maximum(x, 0.)


# entmax: w_ij = x_ij^p, x_ij = relu(s_ij / p - r_i), with r_i such that sum_j w_ij = 1; p = 1 / (alpha - 1), 1 is sparsemax.
# ds_ij = u_ij (g_ij - delta_i), u = x^(p - 1), delta_i = do_i . U_i, U_i = sum_j u_ij v_j / sum_j u_ij

@triton.jit
def entmax_lift(s, t, p: tl.constexpr):
    return s / p


@triton.jit
def entmax_weigh(s, r, t, p: tl.constexpr):
    # x = torch.relu(s - r); w = x**p           (s comes in divided by p)
    u = power(s - r, p - 1)
    return u * tl.maximum(s - r, 0.), u, u


@triton.jit
def entmax_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = torch.relu(s / p - r)**(p - 1) * (g - delta)
    ds = power(s / p - r, p - 1) * (g - delta)
    return ds, ds


@triton.jit
def entmax_settle(r, t, p, W, Z, FIRST: tl.constexpr):
    # r so that (relu(s / p - r)**p).sum(-1) == 1
    if FIRST:                                                        # the largest weight alone is at most 1:
        return r - 1.                                                # not below its score minus 1
    else:                                                            # Newton on the p-norm of x, which is convex in r: from the left,
        return r + (W - real_power(W, 1 - 1 / p)) / tl.maximum(Z, 1e-30)                   # never beyond


# alphamax: entmax where each row has a power t_i of its own, learned.  dt_i = sum_j (g_ij - delta_i) w_ij (log x_ij - 1): x depends on
# t as -s / t^2 = -(x + r) / t, too, but r is the same for all keys, and ds adds up to 0

@triton.jit
def alphamax_lift(s, t, p: tl.constexpr):
    return s / t


@triton.jit
def alphamax_weigh(s, r, t, p: tl.constexpr):
    # x = torch.relu(s - r); w = x**t           (s comes in divided by t)
    u = real_power(s - r, t - 1)
    return u * tl.maximum(s - r, 0.), u, u


@triton.jit
def alphamax_slope(s, r, t, p: tl.constexpr, g, delta):
    # x = torch.relu(s / t - r); ds = x**(t - 1) * (g - delta)
    x = s / t - r
    ds = real_power(x, t - 1) * (g - delta)
    # dt = (ds * x * (torch.log(x) - 1)).sum(-1)
    return ds, tl.where(x > 0, ds * x * (tl.log2(x) * LN2 - 1), 0.)


@triton.jit
def alphamax_settle(r, t, p: tl.constexpr, W, Z, FIRST: tl.constexpr):
    # r so that (relu(s / t - r)**t).sum(-1) == 1
    return entmax_settle(r, t, t, W, Z, FIRST)


# softplus: w_ij = log(1 + exp(s_ij)).  ds_ij = sigmoid(s_ij) (g_ij - delta_i). As with all rules from here on that have no statistic,
# delta is 0, or -e_i where the sum of the weights is asked for

@triton.jit
def log_one_plus(e):
    # torch.log1p(e)                            (for 0 <= e <= 1; a small e would drown in 1 + e)
    return tl.where(e < 0.015625, e * (1 - e * (0.5 - e * (1 / 3 - e * 0.25))), tl.log2(1 + e) * LN2)


@triton.jit
def sigmoid(s):
    # torch.sigmoid(s)                          (with the exponential of softplus, which never overflows)
    e = tl.exp2(-tl.abs(s))
    return tl.where(s > 0, 1., e) / (1 + e)


@triton.jit
def softplus_weigh(s, r, t, p: tl.constexpr):
    # w = torch.log(1 + torch.exp(s))
    w = tl.maximum(s, 0.) * LN2 + log_one_plus(tl.exp2(-tl.abs(s)))
    return w, w, w


@triton.jit
def softplus_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = torch.sigmoid(s) * (g - delta)
    ds = sigmoid(s) * (g - delta)
    return ds, ds


@triton.jit
def row_sum(r, t, p: tl.constexpr, W, Z, FIRST: tl.constexpr):
    # r = w.sum(-1)
    return W


# lssar: w_ij = x_ij^p / sum_j x_ij^p, x_ij = relu(softplus(s_ij) - t_i), t_i the mean of the row's softplus: the softmax of p log x,
# since x^p itself overflows.  ds_ij = w_ij (g_ij - delta_i) p sigmoid(s_ij) / x_ij, dt_i = -sum_j w_ij (g_ij - delta_i) p / x_ij

@triton.jit
def lssar_lift(s, t, p: tl.constexpr):
    # s = p * torch.log(torch.relu(softplus(s) - t))
    w, _, _ = softplus_weigh(s, 0., t, p)
    return tl.where(w > t * TIE, p * tl.log2(w - t), float("-inf"))      # of an even row, rounding would be all that is left


@triton.jit
def lssar_slope(s, r, t, p: tl.constexpr, g, delta):
    # x = torch.relu(softplus(s) - t); d = x**p / torch.exp(r) * (g - delta) * p / x
    w, _, _ = softplus_weigh(s, r, t, p)
    d = tl.where(w > t * TIE, tl.exp2(lssar_lift(s, t, p) - r) * (g - delta) * p / (w - t), 0.)
    # ds = d * torch.sigmoid(s); dt = -d.sum(-1)
    return d * sigmoid(s), -d


# softpick: w_ij = relu(e^s_ij - 1) / sum_j |e^s_ij - 1| = relu(e^(s_ij - r_i) - e^-r_i), r_i = log sum_j |e^s_ij - 1|.  Weights rise
# with positive scores only, but all scores take part in the sum: ds_ij = e^(s_ij - r_i) ([s_ij > 0] g_ij - sign(s_ij) delta_i)

@triton.jit
def softpick_weigh(s, r, t, p: tl.constexpr):
    # e = torch.exp(s - r) - torch.exp(-r); w = torch.relu(e)
    e = tl.exp2(s - r) - tl.exp2(-r)
    return tl.maximum(e, 0.), tl.abs(e), e


@triton.jit
def softpick_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = torch.exp(s - r) * ((s > 0) * g - torch.sign(s) * delta)
    ds = tl.exp2(s - r) * tl.where(s > 0, g - delta, tl.where(s < 0, delta, 0.))
    return ds, ds


@triton.jit
def softpick_settle(r, t, p: tl.constexpr, W, Z, FIRST: tl.constexpr):
    # r = m + torch.log(torch.abs(torch.exp(s - m) - torch.exp(-m)).sum(-1) + 1e-8)         (m = max(0, s), or e^-m overflows)
    return r + tl.log2(Z + 1e-8)


# relu: w_ij = relu(s_ij).  ds_ij = [s_ij > 0] (g_ij - delta_i)

@triton.jit
def relu_weigh(s, r, t, p: tl.constexpr):
    # w = torch.relu(s)
    w = tl.maximum(s, 0.)
    return w, w, w


@triton.jit
def relu_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = (s > 0) * (g - delta)
    ds = tl.where(s > 0, g - delta, 0.)
    return ds, ds


# tra: w_ij = relu(s_ij - t_i)^p.  ds_ij = p relu(s_ij - t_i)^(p - 1) (g_ij - delta_i)

@triton.jit
def tra_weigh(s, r, t, p: tl.constexpr):
    # w = torch.relu(s - t)**p
    w = power(s - t, p)
    return w, w, w


@triton.jit
def tra_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = p * torch.relu(s - t)**(p - 1) * (g - delta); dt = -ds.sum(-1)
    ds = p * power(s - t, p - 1) * (g - delta)
    return ds, -ds


# sigmoid: w_ij = sigmoid(s_ij - t_i), t_i minus the bias.  ds_ij = w_ij (1 - w_ij) (g_ij - delta_i)

@triton.jit
def sigmoid_weigh(s, r, t, p: tl.constexpr):
    # w = torch.sigmoid(s - t)
    w = sigmoid(s - t * LOG2E)
    return w, w, w


@triton.jit
def sigmoid_slope(s, r, t, p: tl.constexpr, g, delta):
    # w = torch.sigmoid(s - t); ds = w * (1 - w) * (g - delta); dt = -ds.sum(-1)
    w = sigmoid(s - t * LOG2E)
    ds = w * (1 - w) * (g - delta)
    return ds, -ds


# elu: w_ij = elu(s_ij) + 1, that is 1 + s_ij above 0 and e^s_ij below.  ds_ij = min(1, e^s_ij) (g_ij - delta_i)

@triton.jit
def elu_weigh(s, r, t, p: tl.constexpr):
    # w = torch.nn.functional.elu(s) + 1
    w = tl.maximum(s, 0.) + tl.exp2(tl.minimum(s, 0.) * LOG2E)
    return w, w, w


@triton.jit
def elu_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = torch.exp(s.clamp(max=0)) * (g - delta)
    ds = tl.exp2(tl.minimum(s, 0.) * LOG2E) * (g - delta)
    return ds, ds


# identity: w_ij = s_ij.  ds_ij = g_ij - delta_i

@triton.jit
def identity_weigh(s, r, t, p: tl.constexpr):
    # w = s
    return s, s, s


@triton.jit
def identity_slope(s, r, t, p: tl.constexpr, g, delta):
    # ds = g - delta
    return g - delta, g - delta


RULES = {
    "softmax": Rule(softmax_weigh, softmax_slope, log_sum_exp, online=True, unit=BINARY),
    "elastic": Rule(elastic_weigh, elastic_slope, log_sum_exp, passes=1, extra=True, rowin=True, unit=BINARY, dead="values"),
    "entmax": Rule(entmax_weigh, entmax_slope, entmax_settle, entmax_lift, passes=24, extra=True, power=2.0, powers=True, heavy=True, dead="all"),
    "sparsemax": Rule(entmax_weigh, entmax_slope, entmax_settle, entmax_lift, passes=24, extra=True, power=1.0, heavy=True, dead="all"),
    "softplus": Rule(softplus_weigh, softplus_slope, unit=BINARY, heavy=True),
    "lssar": Rule(softmax_weigh, lssar_slope, log_sum_exp, lssar_lift, online=True, rowin=True, power=15.0, powers=True, unit=BINARY, heavy=True,
                  dead="all"),
    "softpick": Rule(softpick_weigh, softpick_slope, softpick_settle, online=True, unit=BINARY, floor=0.0, dead="values"),
    "relu": Rule(relu_weigh, relu_slope, dead="all"),
    "tra": Rule(tra_weigh, tra_slope, rowin=True, power=2.0, powers=True, dead="all"),
    "sigmoid": Rule(sigmoid_weigh, sigmoid_slope, rowin=True, unit=BINARY),
    "elu": Rule(elu_weigh, elu_slope),
    "identity": Rule(identity_weigh, identity_slope),
    # what attend() takes for entmax with a t
    "alphamax": Rule(alphamax_weigh, alphamax_slope, alphamax_settle, alphamax_lift, passes=24, extra=True, rowin=True, heavy=True, dead="all"),
}
# and with row_sum: rules without a statistic get the sum of their weights for one, to divide by outside
RULES |= {name + "_sum": rule._replace(settle=row_sum, sums=True) for name, rule in RULES.items() if rule.settle is None}

# ------------------------------------------------------------------------------------------------ tiles
# (BM, BN, warps, stages) of each kernel: large tiles that compile without spilling registers to memory, for every rule, in Triton
# 3.6 and 3.9, as tests/test_kernels.py shows without a GPU. (Only float32 at width 256, and some widths that are no power of two,
# spill a little.) A table, a tail, a slope or a window ("busy") costs registers, and so does the second accumulator of rules
# that save U. With fewer rows than 16 a warp, warps would repeat each other's work.

COLUMNS = ("forward", "forward with U", "backward_rows", "backward_keys", "backward_table")
TILES = {  # GPU generation (0: float32, on any), width, busy; no row for False: that for True serves
    (90, 64, False): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2), None),
    (90, 64, True): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2), (32, 128, 8, 2), (64, 64, 4, 1)),
    (90, 128, False): ((128, 64, 8, 3), (128, 32, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2), None),
    (90, 128, True): ((128, 32, 8, 3), (128, 32, 8, 3), (128, 32, 8, 2), (16, 128, 8, 2), (64, 64, 4, 1)),
    (90, 256, True): ((128, 32, 8, 2), (32, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (64, 64, 8, 1)),
    (80, 64, False): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2), None),
    (80, 64, True): ((128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 2), (32, 128, 8, 2), (32, 32, 2, 1)),
    (80, 128, False): ((64, 32, 4, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), None),
    (80, 128, True): ((64, 64, 8, 2), (64, 64, 8, 2), (128, 16, 8, 2), (32, 16, 4, 2), (32, 32, 4, 1)),
    (80, 256, True): ((32, 64, 8, 2), (32, 64, 8, 2), (16, 64, 8, 1), (32, 16, 4, 2), (16, 16, 2, 1)),
    (0, 64, True): ((32, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    (0, 128, True): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
    (0, 256, True): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
HEAVY = {  # instead of these, for heavy rules: the kernels that would spill
    (90, 64, False): {"backward_keys": (32, 128, 8, 2)},
    (90, 64, True): {"forward": (64, 64, 8, 3), "forward with U": (64, 64, 8, 3), "backward_table": (64, 64, 8, 1)},
    (90, 128, False): {"forward": (128, 32, 8, 3), "backward_rows": (128, 32, 8, 2), "backward_keys": (16, 128, 8, 2)},
    (90, 128, True): {"forward with U": (64, 64, 8, 2), "backward_rows": (64, 32, 8, 2), "backward_table": (64, 64, 8, 1)},
    (80, 64, False): {"backward_rows": (128, 32, 8, 2)},
    (80, 64, True): {"backward_rows": (64, 32, 8, 2), "backward_keys": (16, 128, 8, 2), "backward_table": (32, 32, 4, 1)},
    (80, 128, False): {"forward with U": (64, 32, 8, 2), "backward_keys": (32, 64, 8, 2)},
    (80, 128, True): {"forward with U": (32, 64, 8, 2)},
}
MIXED = {  # instead of all these, for two views at once, which need twice the scores and gradients; backward_table takes one at a time
    (90, 64, False): {"backward_rows": (128, 32, 8, 2), "backward_keys": (32, 128, 8, 2)},
    (90, 64, True): {"forward": (128, 32, 8, 3), "backward_keys": (16, 128, 8, 2)},
    (90, 128, False): {"backward_rows": (128, 16, 8, 2), "backward_keys": (32, 32, 4, 2)},
    (90, 128, True): {"forward": (128, 32, 8, 3), "backward_rows": (32, 32, 4, 2), "backward_keys": (32, 32, 8, 2)},
    (90, 256, True): {"forward": (32, 32, 8, 2), "backward_rows": (16, 32, 8, 1), "backward_keys": (32, 16, 4, 1)},
    (80, 64, False): {"forward": (128, 64, 8, 3), "backward_rows": (128, 32, 8, 2), "backward_keys": (32, 128, 8, 2)},
    (80, 64, True): {"forward": (128, 32, 8, 3), "backward_rows": (64, 16, 8, 2), "backward_keys": (16, 64, 8, 2)},
    (80, 128, False): {"forward": (128, 32, 8, 2), "backward_rows": (64, 32, 8, 2), "backward_keys": (32, 64, 8, 2)},
    (80, 128, True): {"forward": (64, 32, 8, 2), "backward_rows": (32, 16, 4, 1), "backward_keys": (16, 64, 8, 2)},
    (80, 256, True): {"forward": (32, 32, 8, 2), "backward_rows": (16, 32, 8, 1), "backward_keys": (32, 16, 4, 1)},
    (0, 64, True): {"backward_rows": (16, 16, 8, 1), "backward_keys": (16, 32, 8, 1)},
    (0, 128, True): {"backward_keys": (16, 16, 8, 1)},
}
SMALL = ((32, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1))  # the interpreter: several tiles of short inputs


def generation(device):
    """Data-centre Hopper and Blackwell have the shared memory for the tiles of 90; all others take those of 80."""
    return 90 if torch.cuda.get_device_capability(device)[0] in (9, 10) else 80


def tile(kernel, rule, q, v, busy, mixed=False):
    column = "forward with U" if kernel == "forward" and rule.extra else kernel
    if INTERPRETED:
        return SMALL[COLUMNS.index(column)]
    width = max(64, padded(q.shape[-1]), padded(v.shape[-1]))
    key = 0 if q.dtype == torch.float32 else generation(q.device), width
    key = (*key, busy) if (*key, busy) in TILES else (*key, True)
    instead = HEAVY.get(key, {}) if rule.heavy else {}
    instead = instead | MIXED.get(key, {}) if mixed else instead
    return instead.get(column) or TILES[key][COLUMNS.index(column)]


def padded(width):
    return max(16, 1 << (width - 1).bit_length())                    # a tile's sides are powers of two, tl.dot's at least 16


# ------------------------------------------------------------------------------------------------ host
# Two operators, forward and backward: torch.compile traces through them, and each allocates (which is also all that tracing
# needs), then launches. What is left, sums over heads, rows and diagonals, is ordinary PyTorch in `differentiate`.

def arguments(rule, q, k, v, t, table, far, mix, scale, window, first):
    """The kernels' arguments. Tables are multiplied by the rule's unit here, once, and not at every score."""
    q, k, v = (straight(tensor, name) for tensor, name in ((q, "q"), (k, "k"), (v, "v")))
    table, far = (None if part is None else (part * rule.unit).contiguous() for part in (table, far))
    H, T = q.shape[1:3]
    strides = [(0, 0, 0) if part is None else part.stride()[:3] for part in (q, k, v, t)]
    W, window = 0 if table is None else table.shape[1], window if 0 < window < T else None
    strides, GV = [*strides, None if mix is None else mix.stride()], outputs(q, mix) // v.shape[1]
    return Inputs(q, k, v, t, table, far, mix, *strides, H, H // k.shape[1], GV, T, W, window, first, scale)


def outputs(q, mix):
    """How many heads the output has."""
    return q.shape[1] if mix is None else q.shape[1] // 2


def named(rule):
    """The rule of a name, "softmax", or of a name with a power, "tra:3.0": operators take a string, but no Rule."""
    name, _, power = rule.partition(":")
    return RULES[name]._replace(power=float(power)) if power else RULES[name]


def to_save(rule, learn, skip):
    """The rule as the forward takes it: without gradients there is no use for U and the map of live tiles."""
    rule = named(rule)
    return rule._replace(extra=rule.extra and learn, dead=rule.dead if learn and skip else None)


def count(T, size):
    return -(-T // size)


def straight(tensor, name):
    """The last axis with stride 1, and one head within 2^31 elements."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    if (tensor.shape[2] - 1) * tensor.stride(2) + tensor.shape[3] > 2**31:
        raise ValueError(f"one head of {name} spans more than 2^31 elements, too far for 32-bit offsets: call .contiguous() on {name} first")
    return tensor


def is_busy(table, far, window, T):
    return table is not None or far is not None or 0 < window < T


def launch(kernel, count, rule, x, *more):
    """kernel on count(BM, BN) tiles of every head."""
    busy = is_busy(x.table, x.far, x.window or 0, x.T)
    BM, BN, warps, stages = tile(kernel.__name__, rule, x.q, x.v, busy, x.mix is not None)
    D, E = x.q.shape[-1], x.v.shape[-1]
    sizes = Sizes(*map(tl.constexpr, (D, padded(D), E, padded(E), BM, BN)))
    heads = x.H if kernel is backward_table else outputs(x.q, x.mix)                       # see place
    grid = (count(BM, BN) * x.q.shape[0] * heads,)
    with torch.cuda.device_of(x.q):
        kernel[grid](x, *more, rule, sizes, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def rows_of_all_heads(q, heads, width):
    """An empty (B, heads, T, width) that lies in memory as (B, T, heads, width), as projections read it, if 32-bit offsets allow."""
    B, _, T, _ = q.shape
    return q.new_empty(B, T, heads, width).transpose(1, 2) if T * heads * width < 2**31 else q.new_empty(B, heads, T, width)


def allocate_forward(rule, q, k, v, t, table, far, mix, scale, window, first, learn, skip):
    rule, heads = to_save(rule, learn, skip), outputs(q, mix)
    o = rows_of_all_heads(q, heads, v.shape[-1])
    u = rows_of_all_heads(q, heads if rule.extra else 0, v.shape[-1])
    r = q.new_empty(q.shape[:3] if rule.settle else (0,), dtype=torch.float32)
    T, (BM, BN, *_) = q.shape[2], tile("forward", rule, q, v, is_busy(table, far, window, q.shape[2]), mix is not None)
    alive = q.new_zeros((q.shape[0], heads, count(T, BM), count(T, BN)) if rule.dead else (0,), dtype=torch.int8)
    return o, r, u, alive


@torch.library.custom_op("nanoattention::forward", mutates_args=())
def run_forward(rule: str, q: Tensor, k: Tensor, v: Tensor, t: Tensor | None, table: Tensor | None, far: Tensor | None,
                mix: Tensor | None, scale: float, window: int, first: int, learn: bool, skip: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, r, u, alive = allocate_forward(rule, q, k, v, t, table, far, mix, scale, window, first, learn, skip)
    rule = to_save(rule, learn, skip)
    x = arguments(rule, q, k, v, t, table, far, mix, scale, window, first)
    launch(forward, lambda BM, BN: count(x.T, BM), rule, x, o, u, r, alive, o.stride()[:3])
    return o, r, u, alive


def resized(alive, axis, T, a, b):
    """A map of tiles a wide as a map of tiles b wide, both powers of two: a tile is alive if any part of it is."""
    split, join = max(1, a // b), max(1, b // a)
    alive = alive.repeat_interleave(split, axis).narrow(axis, 0, count(T, min(a, b))).movedim(axis, -1)
    return F.pad(alive, (0, -alive.shape[-1] % join)).unflatten(-1, (-1, join)).amax(-1).movedim(-1, axis)


def list_live(alive):
    """(.., n) bytes to (.., 2n + 1) numbers: how many tiles are alive among the first 0 .. n, then the numbers of the live tiles in
    ascending order, then those of the dead. By counting, so no sort and no wait for the GPU."""
    alive = alive.long()
    before = F.pad(alive.cumsum(-1), (1, 0))                         # (.., n + 1)
    number = torch.arange(alive.shape[-1], device=alive.device).expand_as(alive)
    place = torch.where(alive > 0, before[..., :-1], before[..., -1:] + number - before[..., :-1])
    return torch.cat([before, torch.zeros_like(alive).scatter_(-1, place, number)], -1).int()


def lists(alive, kernel, rule, x):
    """For every tile of a backward kernel those on the other side that are alive; nothing where there is no map."""
    if rule.dead is None:
        return alive
    busy = is_busy(x.table, x.far, x.window or 0, x.T)
    (BM, BN, *_), (rows, keys, *_) = (tile(name, rule, x.q, x.v, busy, x.mix is not None) for name in ("forward", kernel))
    alive = resized(resized(alive, 2, x.T, BM, rows), 3, x.T, BN, keys)
    return list_live(alive if kernel == "backward_rows" else alive.mT)


def diagonals(T, W, window, first, n):
    """How many block diagonals of n x n tiles hold a distance below W that anybody sees."""
    reach = min(W, T) if first or not window else min(W, T, window)
    return (reach + n - 2) // n + 1


def allocate_backward(rule, q, k, v, t, table, far, mix, u, r, alive, do, e, scale, window, first, learn_table):
    B, H, T, D = q.shape
    dq, dk, dv = (rows_of_all_heads(q, heads, width) for heads, width in ((H, D), (H, D), (outputs(q, mix), v.shape[-1])))
    dt = q.new_empty((0,) if t is None else (B, H, T), dtype=torch.float32)
    dfar = q.new_empty((0,) if far is None else (B, H, 2, T), dtype=torch.float32)
    dmix = q.new_empty((0,) if mix is None else mix.shape, dtype=torch.float32)
    shape = (0,)
    if learn_table:
        n = tile("backward_table", named(rule), q, v, True)[0]
        shape = (B, H, diagonals(T, table.shape[1], window, first, n), n, n)
    return dq, dk, dv, dt, dfar, dmix, q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("nanoattention::backward", mutates_args=())
def run_backward(rule: str, q: Tensor, k: Tensor, v: Tensor, t: Tensor | None, table: Tensor | None, far: Tensor | None,
                 mix: Tensor | None, u: Tensor, r: Tensor, alive: Tensor, do: Tensor, e: Tensor, scale: float, window: int, first: int,
                 learn_table: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = allocate_backward(rule, q, k, v, t, table, far, mix, u, r, alive, do, e, scale, window, first, learn_table)
    dq, dk, dv, dt, dfar, dmix, dtable = grads
    rule = to_save(rule, True, alive.numel() > 0)
    x = arguments(rule, q, k, v, t, table, far, mix, scale, window, first)
    do, delta = straight(do, "the output's gradient"), torch.empty_like(r)
    so, sdo, sdq, sdk, sdv = (part.stride()[:3] for part in (u, do, dq, dk, dv))
    by_rows, by_keys = (lists(alive, kernel, rule, x) for kernel in ("backward_rows", "backward_keys"))
    launch(backward_rows, lambda BM, BN: count(x.T, BM), rule, x, u, r, do, e, dq, dt, dfar, None if mix is None else dmix, delta, by_rows,
           so, sdo, sdq)
    launch(backward_keys, lambda BM, BN: count(x.T, BN), rule, x, r, do, delta, dk, dv, by_keys, sdo, sdk, sdv)
    if learn_table:
        launch(backward_table, lambda BM, BN: dtable.shape[2], rule, x, r, do, delta, dtable, sdo, dtable.shape[2])
    return grads


def by_distance(tiles, W):
    """(H, diagonals, n, n) sums of ds to (H, W). Entry (row, col) of tile b lies at distance b n + row - col."""
    H, count, n, _ = tiles.shape
    # with the keys reversed, n zeros after each row and the rows read as 2n - 1 long, row a stands a places further right:
    # column m then holds the distance b n + m - (n - 1), whatever the row
    skewed = F.pad(tiles.flip(-1), (0, n)).flatten(2)[..., :n * (2 * n - 1)].view(H, count, n, 2 * n - 1).sum(2)
    table = skewed[..., n - 1:].clone()                              # (H, diagonals, n): distances b n .. b n + n - 1
    table[:, :-1, 1:] += skewed[:, 1:, :n - 1]                       # and those that tile b + 1 has in common with tile b
    table = table.flatten(1)[:, :W]
    return F.pad(table, (0, W - table.shape[1]))


def over_groups(grad, heads):
    """Sum over the query heads that share a key or value head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def remember(ctx, inputs, output):
    rule, q, k, v, t, table, far, mix, *ctx.rest = inputs
    *ctx.rest, _, _ = ctx.rest
    ctx.rule, (o, r, u, alive) = rule, output
    ctx.save_for_backward(q, k, v, t, table, far, mix, u if named(rule).extra else o, r, alive)


def differentiate(ctx, do, e, *_):
    q, k, v, t, table, far, mix, *saved = ctx.saved_tensors
    learn_table = table is not None and ctx.needs_input_grad[5]
    grads = run_backward(ctx.rule, q, k, v, t, table, far, mix, *saved, do, e.contiguous(), *ctx.rest, learn_table)
    dq, dk, dv, dt, dfar, dmix, dtable = grads
    dk, dv = over_groups(dk, k.shape[1]), over_groups(dv, v.shape[1])
    dt, dmix = None if t is None else dt, None if mix is None else dmix
    dfar = None if far is None else dfar.sum((0, 3))                 # (H, 2)
    dtable = by_distance(dtable.sum(0), table.shape[1]) if learn_table else None
    return None, dq, dk, dv, dt, dtable, dfar, dmix, *[None] * 5


def refuse(ctx, *grads):
    raise RuntimeError("the attention kernels can be differentiated once: use --kernel=torch for second derivatives")


run_forward.register_fake(allocate_forward)
run_forward.register_autograd(differentiate, setup_context=remember)
run_backward.register_fake(allocate_backward)
run_backward.register_autograd(refuse)


# ------------------------------------------------------------------------------------------------ the public face

def attend(rule, q, k, v, t=None, table=None, tail=None, slope=None, scale=1.0, window=0, first=0, row_sum=False, power=None, skip=True,
           mix=None):
    """Causal attention (B, H, T, E) by a rule of RULES, and its row statistic (B, H, T), or None where the rule has none.

    q (B, H, T, D), k (B, Hk, T, D), v (B, Hv, T, E): Hk and Hv divide H. t broadcasts to (B, H, T); left out, it is 0. The score is
    scale q.k + table[h, i - j] (or tail[h] where i - j is not below the table's width) + slope[h] (i - j). Row i sees key j
    if i - j < window (0: no limit) or j < first. row_sum: the statistic of a rule that has none is the sum of its weights. power:
    another p than the rule's own; entmax takes one of each row as t, too. All is differentiable but entmax's statistic. skip: the
    backward passes over tiles in which all weights are 0. mix, for rules without a statistic: q has two heads for each of the
    output, whose weights are those of the first minus mix times those of the second; Hv divides H/2, mix broadcasts to (B, H/2, T)."""
    inputs = prepare(rule, q, k, v, t, table, tail, slope, scale, window, first, row_sum, power, mix)
    learn = torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in inputs)
    o, r, *_ = run_forward(*inputs, learn, skip)
    rule = named(inputs[0])
    if not rule.settle:
        return o, None
    return o, r.detach() if rule.passes > 1 else r                   # the slopes of such rules hold r to its equation already


def prepare(rule, q, k, v, t, table, tail, slope, scale, window, first, row_sum, power, mix=None):
    """attend()'s arguments as the operators take them."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (part.to(torch.get_autocast_dtype(q.device.type)) for part in (q, k, v))
    rule = "alphamax" if rule == "entmax" and t is not None else rule
    check(rule, q, k, v, t, table, tail, slope, scale, window, first, row_sum, power, mix)
    rule = rule + "_sum" if row_sum else rule
    B, H, T, _ = q.shape
    if RULES[rule].rowin:
        t = along_rows(q.new_zeros(()) if t is None else t, B, H, T)
    mix = None if mix is None else along_rows(mix, B, H // 2, T)
    if tail is not None or slope is not None:
        nothing = q.new_zeros(H, dtype=torch.float32)
        tail = torch.stack([nothing if part is None else part.float() for part in (tail, slope)], 1)
    table = table.float() if table is not None and table.shape[1] else None
    return rule if power is None else f"{rule}:{float(power)}", q, k, v, t, table, tail, mix, float(scale), window, first


def along_rows(part, *shape):
    part = part.float().expand(shape)
    return part if part.stride(2) < 2 else part.contiguous()


def check(rule, q, k, v, t, table, tail, slope, scale, window, first, row_sum, power, mix):
    """Whatever the kernels cannot do ends here, in one sentence."""
    if not AVAILABLE:
        raise ValueError("the kernels need triton and an NVIDIA GPU from Ampere on: use --kernel=torch "
                         "(or set TRITON_INTERPRET=1 to test them on a CPU)")
    for bad, message in problems(rule, q, k, v, t, table, tail, slope, scale, window, first, row_sum, power, mix):
        if bad:
            parts = dict(q=q, k=k, v=v, t=t, table=table, mix=mix)
            shapes = {name: tuple(part.shape) for name, part in parts.items() if isinstance(part, Tensor)}
            raise ValueError(message.format(rule=rule, rules=list(RULES), **shapes))


def problems(rule, q, k, v, t, table, tail, slope, scale, window, first, row_sum, power, mix):
    """Pairs of a condition and what to say about it, in an order in which each may rely on those before."""
    yield rule not in RULES, "no kernel for the rule {rule!r}: choose one of {rules}"
    yield row_sum and rule + "_sum" not in RULES, "{rule} has no row sum to return: leave out row_sum"
    yield power is not None and not RULES[rule].powers, "{rule} has no power: leave out power"
    yield power is not None and not (isinstance(power, (int, float)) and power >= 1), "power must be a plain number from 1 on"
    yield t is not None and not RULES[rule].rowin, "{rule} reads no row input: leave out t"
    statistic = mix is not None and (row_sum or RULES[rule].settle is not None)
    yield statistic, "mix is for rules without a row statistic: call {rule} once a view and subtract the outputs"
    yield mix is not None and not isinstance(mix, Tensor), "mix must be a tensor that broadcasts to (B, H/2, T)"
    yield {q.ndim, k.ndim, v.ndim} != {4}, "q, k and v must have four axes, (B, H, T, D), but are {q}, {k} and {v}"
    same = q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3]
    yield not same, "q, k and v must agree in batch and length, q and k in width, but are {q}, {k} and {v}"
    yield 0 in (*q.shape, k.shape[1], v.shape[1], v.shape[3]), "q, k and v must not be empty, but are {q}, {k} and {v}"
    yield mix is not None and q.shape[1] % 2, "with mix the heads of q are pairs of views, but q is {q}"
    yield mix is not None and outputs(q, mix) % v.shape[1], "with mix the heads of v {v} must divide half of those of q {q}"
    yield q.shape[1] % k.shape[1] or q.shape[1] % v.shape[1], "the heads of k {k} and of v {v} must divide those of q {q}"
    yield max(q.shape[3], v.shape[3]) > 256, "a tile holds heads of width 256 at most, but q is {q} and v is {v}: use --kernel=torch"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    yield q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype, "q, k and v must share one of float32, bfloat16 and float16"
    yield INTERPRETED and q.dtype == torch.bfloat16, "Triton's interpreter computes bfloat16 wrongly: use float32 or float16 there"
    yield not INTERPRETED and not q.is_cuda, "the kernels run on a CUDA GPU, but q is not on one: move it there or use --kernel=torch"
    given = [part for part in (k, v, t, table, tail, slope, mix) if part is not None]
    yield any(part.device != q.device for part in given), "all inputs must be on the device of q"
    yield not broadcasts(t, q.shape[:3]), "the row input t must broadcast to (B, H, T) of q {q}, but is {t}"
    rows = q.shape[0], outputs(q, mix), q.shape[2]
    yield not broadcasts(mix, rows), "mix must broadcast to (B, H/2, T) with half of the heads of q {q}, but is {mix}"
    heads = q.shape[1:2]
    yield table is not None and (table.ndim != 2 or table.shape[:1] != heads), "table must be (H, W) with the heads of q {q}, but is {table}"
    yield any(part is not None and part.shape != heads for part in (tail, slope)), "tail and slope must be (H,), one number a head of q {q}"
    numbers = isinstance(scale, (int, float)) and isinstance(window, int) and isinstance(first, int)
    yield not numbers, "scale, window and first are plain numbers (a learned scale belongs on q, outside)"
    yield window < 0 or first < 0, "window and first count keys and cannot be negative"


def broadcasts(part, shape):
    fits = part is None or all(size in (1, full) for size, full in zip(reversed(part.shape), reversed(shape), strict=False))
    return fits and (part is None or part.ndim <= len(shape))
