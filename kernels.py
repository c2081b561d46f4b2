"""How any rule is computed in memory linear in T: one walk over blocks of scores, in PyTorch and in
Triton.

A rule (attention.py) turns one block of scores into weights. This file works for every rule. It
cuts the rows of a causal attention into blocks, finds the keys that a block sees, passes their
scores to the rule, and sums up weights times values. Memory is O(T x block): in a long sequence the
weights of a block are dropped once its output is known, and the backward pass computes them again.

First comes the walk in PyTorch (`block_loop`). On CPUs it trains all rules (plain softmax also has
a faster way). It decodes, as a block of one row, and gives the instruments their weights. Then the
same walk in Triton: each program keeps one tile of rows, or of keys, in registers and shared
memory, and walks over the tiles of the other side (Rabe & Staats 2021, arXiv 2112.05682; Dao et al.
2022, FlashAttention, arXiv 2205.14135), with a running maximum where a rule normalises (Milakov &
Gimelshein 2018, arXiv 1805.02867). No sum is atomic, so two runs agree bit for bit. The row input t
and the statistic r (if not found by iteration) are differentiable, so PyTorch computes thresholds,
sinks, gates and normalisers outside the kernels. In the backward pass some rules skip tiles whose
weights are all 0.

Differential attention (Ye et al. 2024, arXiv 2410.05258) subtracts a second view: o_i = sum_j (w_ij
- mix_i w'_ij) v_j, with w' from queries and keys of its own. Rules without a statistic compute both
views in one pass.

Legend                                              shapes in comments
  B, H, T   batch, query heads, tokens              (BM, ..)  a tile of BM rows, that is queries
  D, E      width of q and k, width of v            (BN, ..)  a tile of BN keys
  W         width of the distance table             DP, EP    D and E padded to a power of two
  i, j      row and key numbers                     KIND      of a tile: FULL, TABLE or MASKED
  s, w      scores, weights                         do, ds    gradients: of o, of s; also dq, dk, ..
  r, t      row statistic, row input                g         g_ij = do_i . v_j, the gradient of w
  z         summed for the statistic, besides w     U         sum_j u_ij v_j / sum_j z_ij, often o
  u         the weights that U sums                 delta     delta_i = do_i . U_i - dr_i
  mix       lambda_i of the second view             .b        suffix: of the second view (qb, wb, ..)
  power     the rule's power, a constant            rule, c   Kernel and TileSizes, compile time
"""

from collections import namedtuple
from functools import partial
from math import gcd
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl

    # TRITON_INTERPRET=1: the kernels run on the CPU, for tests
    INTERPRETED = triton.knobs.runtime.interpret
    # NVIDIA GPUs from Ampere on. Older ones have too little shared memory for these tiles
    CAPABLE = (
        torch.cuda.is_available()
        and torch.version.cuda
        and torch.cuda.get_device_capability() >= (8, 0)
    )
    AVAILABLE = bool(INTERPRETED or CAPABLE)
except (ImportError, AttributeError):  # without a recent Triton only the block loop works
    triton, tl = SimpleNamespace(jit=lambda f: f), SimpleNamespace(constexpr=lambda x: x)
    INTERPRETED = AVAILABLE = False
jit = triton.jit

# ------------------------------------------------------------------------------------ who sees whom


class Mask(NamedTuple):
    """Which keys the rows of a layer see."""

    window: int = 0  # number of keys that a row sees, its own included; 0: all earlier ones
    first: int = 0  # number of first keys that it sees beyond the window
    hidden: int = -1  # a key that only its own row sees: for instruments, never in training
    starts: Any = None  # (B, T): the first key of each row's own document; None: key 0


def visible(i, j, mask):
    """The mask: row i sees key j (positions, broadcast against each other).

    A window (Beltagy et al. 2020) hides the sink. A model that was trained without a window needs
    its sink and breaks, unless the first keys stay visible (StreamingLLM, Xiao et al. 2309.17453).
    In GPT-OSS layers 0, 2, .. have one."""
    seen, start = j <= i, 0
    if mask.starts is not None:
        start = document_start(i, mask)
        seen = seen & (start <= j)
    if mask.window:
        seen = seen & ((i - j < mask.window) | (j - start < mask.first))
    if mask.hidden >= 0:
        seen = seen & ((j != mask.hidden) | (i == j))
    return seen


def document_start(i, mask):
    """The first key of the documents of rows i: 0, or of packed ones (B, 1, the shape of i)."""
    return 0 if mask.starts is None else mask.starts[:, None, i]


def visible_count(i, mask):
    """n_i, the number of keys that row i sees, hidden ones included, as float32: (R,), or of packed
    documents (B, 1, R)."""
    n = (i + 1).float()
    if mask.starts is not None:
        n = n - document_start(i, mask)
    return n.clamp(max=mask.window + mask.first) if mask.window else n


# ------------------------------------------------------------------------------ the walk in PyTorch
# BLOCK query rows at a time see all keys up to their last row, so the scores in memory are (B, H,
# BLOCK, keys):
#
#            keys                   rows      keys
#     rows   ####                   block 0   #
#            ########               block 1   ##        a window or first keys
#            ############           block 2   ###       leave only a part of each row

BLOCK = 128


def block_loop(
    rule,
    q,  # (B, H, R, D)
    k,  # (B, Hk, T, D)
    v,  # (B, Hv, T, E)
    t,  # (.., R, 1), broadcastable to (B, H, R, 1), or None
    scale,
    mask,
    distance=None,
    need_r=False,
    dropout=0.0,
):
    """Attention of all query rows by one rule: output (B, H, R, E), and statistic (B, H, R, 1) if
    need_r, else None."""
    one_block = partial(attend_block, rule, scale, mask, distance, need_r, dropout)
    o, *r = run_blocks(one_block, mask, ("rows", "keys", "keys", "rows"), q, k, v, t)
    return o, r[0] if r else None


def run_blocks(one_block, mask, parts, *tensors):
    """Call one_block(positions of its rows, *its part of each tensor) for every block of rows, and
    join the outputs.

    parts: for each tensor, which slice along axis -2 a block gets: its "rows", or the "keys" that
    they see. q and k come first. A tensor may be None. Outputs are (B, H, rows, any).

    Up to two blocks keep their weights for the backward pass. If there are more, the backward pass
    computes them again, with the same dropout, so memory stays O(T x BLOCK)."""
    R, T = tensors[0].shape[2], tensors[1].shape[2]
    # one copy here saves one in every block
    tensors = [None if x is None else x.contiguous() for x in tensors]
    if torch.is_grad_enabled() and R > 2 * BLOCK:
        one_block = partial(checkpoint, one_block, use_reentrant=False)
        # their gradients add up over blocks in float32
        tensors = [None if x is None else wide(x) for x in tensors]
    outputs = []
    for rows, keys, i in reversed([*row_blocks(R, T, mask, tensors[0].device)]):
        cuts = [rows if part == "rows" else keys for part in parts]
        # A cut of the cut before: its gradient fills only the keys that it sees. The backward pass
        # starts with block 0
        for n, cut in enumerate(cuts):
            if tensors[n] is not None:
                tensors[n] = tensors[n][..., : cut.stop, :]
        block = [
            None if x is None else x[..., cut.start :, :]
            for x, cut in zip(tensors, cuts, strict=True)
        ]
        outputs.append(one_block(i, *block))
    return tuple(torch.cat(parts[::-1], 2) for parts in zip(*outputs, strict=True))


def row_blocks(R, T, mask, device):
    """The last R of T rows, BLOCK at a time: yields a slice of the R rows, the slice of the keys
    that they may see, and their positions."""
    for start in range(0, R, BLOCK):
        rows = slice(start, min(start + BLOCK, R))
        i = torch.arange(T - R + rows.start, T - R + rows.stop, device=device)
        begin = 0  # or where the window of the first row begins
        if mask.window and not mask.first:
            begin = max(0, T - R + rows.start + 1 - mask.window)
        yield rows, slice(begin, T - R + rows.stop), i


def attend_block(
    rule,
    scale,
    mask,
    distance,  # a Distance or None
    need_r,
    dropout,
    i,  # (R,)
    q,  # (B, H, R, D)
    k,  # (B, Hk, keys, D)
    v,  # (B, Hv, keys, E), or None
    t,
):
    """One block: the rows at positions i attend to keys. The last key is at the position of the
    last row.

    Returns the output (B, H, R, E), and the statistic if it is needed. Without v it returns the
    weights (B, H, R, keys) in place of the output. Matrix products may have low precision;
    everything else is float32 at least."""
    j = torch.arange(k.shape[2], device=k.device) + (i[-1] + 1 - k.shape[2])
    seen = visible(i[:, None], j, mask)  # (R, keys)
    s = scaled_scores(q, k, scale)  # (B, H, R, keys)
    if distance:
        s = s + distance.bias(*s.shape[2:])
    w = rule.weights(s, seen, t)  # (B, H, R, keys)
    r = (rule.statistic(s, seen, w),) if need_r else ()  # (B, H, R, 1)
    return w if v is None else weighted_sum(w, v, dropout), *r  # (B, H, R, E)


def scaled_scores(q, k, scale):
    """s_ij = scale q_i . k_j, (B, H, R, keys). The result is float32 at least, the product as in
    `for_products`."""
    return wide(grouped(for_products(q) * scale, for_products(k).mT))


def weighted_sum(w, v, dropout):
    """o_i = sum_j w_ij v_j, (B, H, R, E)."""
    v = for_products(v)
    return grouped((F.dropout(w, dropout) if dropout else w).to(v.dtype), v)


def wide(x):
    """The same tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def for_products(x):
    """x in the dtype of matrix products: under autocast on a CPU autocast's, which is faster there;
    else float32 at least."""
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return x.to(torch.get_autocast_dtype("cpu"))
    return wide(x)


def grouped(a, b):
    """a @ b for a (B, H, R, .) and a b with as many heads or fewer: then groups of a's heads share
    a head of b."""
    B, H, R, width = a.shape
    a = a.reshape(B, b.shape[1], -1, width)
    with torch.autocast(a.device.type, enabled=False):  # a and b already have the right precision
        return (a @ b).reshape(B, H, R, b.shape[-1])


def plain_softmax(q, k, v, scale, mask, dropout):
    """Softmax attention by torch's own fused kernel. Only for packed documents and after a cache
    does it need a mask: (B, 1, T, T) or (R, T)."""
    R, T = q.shape[2], k.shape[2]
    seen = None
    if 1 < R < T or mask.starts is not None:  # is_causal aligns rows with the first keys
        i = torch.arange(T - R, T, device=q.device)[:, None]
        seen = visible(i, torch.arange(T, device=q.device), mask)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        seen,
        dropout,
        is_causal=seen is None and R > 1,
        scale=scale,
        enable_gqa=k.shape[1] < q.shape[1],
    )


# --------------------------------------------------------------------------- a rule for the kernels


class Kernel(NamedTuple):
    """A rule in Triton: functions of a tile, which attention.py explains, and a few constants."""

    weigh: Any  # s, r, t, power -> w (times v), z (summed for the statistic), u (times v, for U)
    slope: Any  # s, r, t, power, g, delta -> ds, and the summand of dt_i
    # r, t, power, sum of w, sum of z, FIRST -> the statistic; None: weigh needs none
    settle: Any = None
    lift: Any = None  # s, t, power -> replaces s in weigh and in the running maximum
    # weigh(s, r + c) = 2^-c weigh(s, r): r may be the maximum so far, one pass is enough
    online: bool = False
    # passes over the keys before the output pass; from the second on, settle refines r
    passes: int = 0
    save_u: bool = False  # U is not the output: save it as well
    # slope divides by a small number: compute delta in an extra pass, see add_to_delta
    sum_delta: bool = False
    plain_sum: bool = False  # the statistic is a plain sum, and the backward pass does not read it
    takes_t: bool = False  # reads t
    with_t: str = ""  # the name of the kernel that is used instead if t is given
    takes_power: bool = False  # the caller of attend() may set the power
    power: float = 0.0
    unit: float = 1.0  # the rule sees s * unit
    floor: float = -1e30  # where a running maximum starts: finite, because -inf minus -inf is NaN
    # where all weights of a tile are 0, so is its ds: the backward pass may skip it
    skip: bool = False
    heavy: bool = False  # needs more registers than most: uses the tiles in HEAVY

    @property
    # part of Triton's cache key: else an edited rule would run its old, cached kernel
    def cache_key(self):
        return "-".join(str(getattr(part, "cache_key", part)) for part in self)


KERNELS = {}  # {name of a rule: Kernel}. Operators of torch accept strings, but no functions


def offer(kernels):
    """Add rules. A rule without a statistic is added a second time as "name_sum", with the row sum
    as its statistic."""
    KERNELS.update(kernels)
    KERNELS.update(
        {
            f"{name}_sum": kernel._replace(settle=sum_settle, plain_sum=True)
            for name, kernel in kernels.items()
            if kernel.settle is None
        }
    )


@jit
def sum_settle(r, t, power: tl.constexpr, sum_w, sum_z, FIRST: tl.constexpr):
    return sum_w


# Arithmetic that rules share. The hardware computes 2^x, so e^x is 2^(x log2 e)
BINARY = 1.4426950408889634  # log2 e
LOG2E = tl.constexpr(BINARY)  # the same for use inside a kernel
LN2 = tl.constexpr(1 / BINARY)


@jit
def real_power(x, a):
    # x**a if x > 0 else 0         (x^0 is [x > 0], so x^a has the slope a x^(a - 1) even for a = 1)
    return tl.where(x > 0, tl.exp2(a * tl.log2(x)), 0.0)


@jit
def const_power(x, a: tl.constexpr):  # the same for a constant
    if a == 0:
        return tl.where(x > 0, 1.0, 0.0)
    elif a == 1:
        return tl.maximum(x, 0.0)
    elif a > 32 or a % 1 != 0:
        return real_power(x, a)
    elif a % 2 == 0:  # integer powers by squaring: exponentials are slow
        half = const_power(x, a // 2)
        return half * half
    else:
        return const_power(x, a - 1) * tl.maximum(x, 0.0)


@jit
def log_one_plus(e):
    # torch.log1p(e)                       (for 0 <= e <= 1, where a small e would be lost in 1 + e)
    return tl.where(
        e < 0.015625, e * (1 - e * (0.5 - e * (1 / 3 - e * 0.25))), tl.log2(1 + e) * LN2
    )


@jit
def logistic(s):
    # torch.sigmoid(s)            (s already has the factor log2 e; the exponential never overflows)
    e = tl.exp2(-tl.abs(s))
    return tl.where(s > 0, 1.0, e) / (1 + e)


# ---------------------------------------------------------------------------- what the kernels read

# A tensor (B, heads, T, width) or (B, heads, T) as one argument of a kernel: a pointer and the
# strides of its batches, heads and rows. The stride along the width is 1
Matrix = namedtuple("Matrix", "at batch head row")
TileSizes = namedtuple("TileSizes", "D DP E EP BM BN")


class Inputs(NamedTuple):
    """What every kernel reads. A None argument is removed at compile time."""

    q: Any  # (B, H, T, D)
    k: Any  # (B, H/GK, T, D): GK query heads share one key head
    v: Any  # (B, Hv, T, E): GV heads of the output share one value head
    t: Any  # (B, H, T) float32 row input, or None
    table: Any  # (H, W) float32, added to the score at distance i - j < W, or None
    tail_slope: Any  # (H, 2) float32, or None: tail and slope, see tile_scores()
    mix: Any  # (B, H/2, T) float32, or None: heads 2h and 2h + 1 are views, weighted 1 and -mix
    sets: Any  # (B, T) int64, or None: bit masks. A row does not see a key that shares a bit
    starts: Any  # (B, T) int32, or None: the first key of the document of each row
    ends: Any  # (B, T) int32, or None: the first row beyond the document of each key
    H: int
    GK: int
    GV: int
    G: int  # how many heads of the output share both key and value heads (1 for two views)
    T: int
    W: int  # 0 without a table
    window: Any  # how many keys a row sees, its own included (None: no limit)
    first: int  # how many first keys it sees in addition
    scale: float


# One head: its batch index; its number among the H heads; the number of its output, which two views
# share; the offset of its rows in a row vector (B, H, T); 64-bit pointers to its matrices (inside a
# head, 32 bits suffice); its tail and slope
Head = namedtuple("Head", "batch number out rows q k v tail slope")


# ------------------------------------------------------------------------------------ who sees whom
# The triangle of tiles. A program of `forward` or `backward_rows` walks along one row of it, a
# program of `backward_keys` down one column:
#
#     without a window          with a window and first keys
#
#     rows   M                  rows   M                #  FULL: no mask is needed, and no key lies
#            # M                       M M                 within the distance table
#            # # M                     M # M            M  MASKED: on the diagonal, at the edge of the
#            # # # M                   M M # M             window, or among the first keys
#            # # # # M                 M . M # M        .  skipped
#            keys                      keys
#
# `visible_in_tile` is the mask of one tile; `key_tiles` and `row_tiles` say which tiles are
# visible. Both return (first, first_end, lo, m, a, b, d, hi): tiles in [a, b) are full. TABLE
# tiles, those in [m, a) and [b, d), have keys within the distance table, but need no mask. Tiles in
# [first, first_end), [lo, m) and [d, hi) are masked, and all others are skipped. All but hi are
# multiples of the tile's size. Packed documents bound a row's keys from below, as a window does.

FULL, TABLE, MASKED = (tl.constexpr(kind) for kind in range(3))


@jit
def start_of(i, inputs, head):
    """The first key of the documents of rows i, whose places may lie before 0 or beyond T."""
    if inputs.starts is None:
        return 0
    else:
        # as i
        return tl.load(
            inputs.starts + head.batch * inputs.T + tl.minimum(tl.maximum(i, 0), inputs.T - 1)
        )


@jit
def visible_in_tile(i, j, inputs, head):
    start, seen = start_of(i, inputs, head), j <= i
    if inputs.starts is not None:
        seen &= start <= j
    if inputs.window is not None:
        seen &= (i - j < inputs.window) | (j - start < inputs.first)
    return seen


@jit
def key_tiles(i, inputs, head, c: tl.constexpr):
    """The tiles of keys that rows i .. i+BM-1 see, see above."""
    hi = tl.minimum(i + c.BM, inputs.T)
    end = tl.cdiv(hi, c.BN) * c.BN
    # of the first and of the last row
    start, last = start_of(i, inputs, head), start_of(hi - 1, inputs, head)
    first = start // c.BN * c.BN
    first_end, lo, a = first, first, tl.cdiv(last, c.BN) * c.BN
    if inputs.window is not None:
        first_end = tl.minimum(tl.cdiv(start + inputs.first, c.BN) * c.BN, end)
        if inputs.starts is not None:
            first_end = tl.where(inputs.first > 0, first_end, first)
        lo = tl.maximum(i + 1 - inputs.window, 0) // c.BN * c.BN  # start of the first row's window
        lo = tl.maximum(lo, first_end)
        # start of the last row's window
        a = tl.cdiv(tl.maximum(i + c.BM - inputs.window, last), c.BN) * c.BN
        a = tl.minimum(tl.maximum(a, lo), end)
    # with sets, all tiles are masked
    d = a if inputs.sets is not None else tl.maximum(a, (i + 1) // c.BN * c.BN)
    b = tl.maximum(a, tl.minimum(d, tl.maximum(i + 1 - inputs.W, 0) // c.BN * c.BN))
    return first, first_end, lo, a, a, b, d, hi


@jit
def row_tiles(j, inputs, head, c: tl.constexpr):
    """The tiles of rows that see keys j .. j+BN-1, see above."""
    hi, last = inputs.T, tl.minimum(j + c.BN, inputs.T) - 1
    b = inputs.T // c.BM * c.BM  # an incomplete last tile needs masks
    if inputs.starts is not None:
        ends = inputs.ends + head.batch * inputs.T
        hi = tl.load(ends + last)  # ()
        b = tl.minimum(b, tl.load(ends + j) // c.BM * c.BM)  # ()
    if inputs.window is not None:
        # all later rows of the document see its first keys
        if tl.maximum(j - start_of(last, inputs, head), 0) >= inputs.first:
            hi = tl.minimum(hi, j + c.BN - 1 + inputs.window)
        b = tl.minimum(b, (j + inputs.window) // c.BM * c.BM)
    lo, m = j // c.BM * c.BM, tl.minimum(tl.cdiv(j + c.BN - 1, c.BM), tl.cdiv(hi, c.BM)) * c.BM
    b = m if inputs.sets is not None else tl.maximum(m, b)  # with sets, all tiles are masked
    a = tl.minimum(tl.cdiv(j + c.BN - 1 + inputs.W, c.BM) * c.BM, b)
    return 0, 0, lo, m, a, b, b, hi


@jit
def walk(
    state,
    step: tl.constexpr,
    my_side,
    tiles,
    visits,
    inputs,
    head,
    rule: tl.constexpr,
    c: tl.constexpr,
    size: tl.constexpr,
):
    """state = step(state, ..) for every visible tile: first the many full ones, then those within
    the table, then the masked ones.

    my_side: what step needs in every tile, the program's own rows or keys. visits: a list of live
    tiles (see in_order), or None. With a list, only its tiles are visited, and the bounds become
    indices into it."""
    first, first_end, lo, m, a, b, d, hi = tiles
    if visits is not None:
        first = place_of(visits, first, size) if inputs.starts is not None else 0
        first_end, lo, m = (
            place_of(visits, first_end, size),
            place_of(visits, lo, size),
            place_of(visits, m, size),
        )
        a, b, d = place_of(visits, a, size), place_of(visits, b, size), place_of(visits, d, size)
        # of the live tiles
        hi, numbers = place_of(visits, hi, size), visits + tl.cdiv(inputs.T, size) + 1
    for place in tl.range(a, b, size):
        start = place if visits is None else tl.load(numbers + place // size) * size  # ()
        state = step(state, my_side, start, inputs, head, rule, c, FULL)
    if inputs.table is not None:
        for n in tl.range(m, d - b + a, size):  # the two ranges, end to end
            place = tl.where(n < a, n, n - a + b)
            start = place if visits is None else tl.load(numbers + place // size) * size  # ()
            state = step(state, my_side, start, inputs, head, rule, c, TABLE)
    # pipelining costs registers
    for n in tl.range(first, first_end + (m - lo) + (hi - d), size, num_stages=1):
        place = tl.where(n < first_end, n, n - first_end + lo)  # the three ranges
        place = tl.where(place < m, place, place - m + d)
        start = place if visits is None else tl.load(numbers + place // size) * size  # ()
        state = step(state, my_side, start, inputs, head, rule, c, MASKED)
    return state


@jit
def place_of(visits, start, size: tl.constexpr):
    """The index in the list of the first tile that begins at `start` or later, times the tile's
    size."""
    return tl.load(visits + tl.cdiv(start, size)) * size  # ()


# ------------------------------------------------------------------------------ loading and scoring


@jit
def begin(matrix, batch, head):
    """The address of a head of this matrix. batch and head are 64-bit numbers: the product may
    exceed 2^31."""
    return matrix.at + batch * matrix.batch + head * matrix.head


@jit
def head_of(inputs, number):
    """The head number = batch index * H + head index."""
    batch = (number // inputs.H).to(tl.int64)
    h = (number % inputs.H).to(tl.int64)
    out = h if inputs.mix is None else h // 2
    tail = tl.load(inputs.tail_slope + 2 * h) if inputs.tail_slope is not None else 0.0  # ()
    slope = tl.load(inputs.tail_slope + 2 * h + 1) if inputs.tail_slope is not None else 0.0  # ()
    q = begin(inputs.q, batch, h)
    k = begin(inputs.k, batch, h // inputs.GK)
    v = begin(inputs.v, batch, out // inputs.GV)
    return Head(batch, h, out, number.to(tl.int64) * inputs.T, q, k, v, tail, slope)


@jit
def my_tile(inputs, size: tl.constexpr, REVERSED: tl.constexpr, G=1, n=0):
    """This program's tile: its number among the tiles of all heads, where it starts, and its head,
    or the n-th of its G heads. Programs that follow each other share a head, so they find k and v
    in the cache. REVERSED: the last tile first. A program computes both views, if there are two:
    its head is that of the first."""
    tiles = tl.cdiv(inputs.T, size)
    tile, out = tl.program_id(0) % tiles, tl.program_id(0) // tiles * G + n
    tile = tiles - 1 - tile if REVERSED else tile
    head = head_of(inputs, out if inputs.mix is None else 2 * out)
    return (out * tiles + tile).to(tl.int64), tile * size, head


@jit
def load(at, stride, i, T, D: tl.constexpr, DP: tl.constexpr, EDGE: tl.constexpr):
    """Rows i of a (T, D) matrix, zero in the padding. EDGE: some rows may lie beyond T."""
    d = tl.arange(0, DP)
    at += i[:, None] * stride + d[None, :]
    if EDGE or D < DP:
        return tl.load(at, mask=(i < T)[:, None] & (d < D)[None, :], other=0.0)  # (rows, DP)
    else:
        return tl.load(at)  # (rows, DP). Without a mask, loads stay wide and asynchronous


@jit
def save(at, value, stride, i, T, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    mask = (i < T)[:, None] & (d < D)[None, :]
    tl.store(at + i[:, None] * stride + d[None, :], value.to(at.dtype.element_ty), mask=mask)


@jit
def load_t(inputs, head, i, SIZE: tl.constexpr):
    """t of rows i. Rows beyond T repeat the last one: with t = 0 a rule might give NaN."""
    t = tl.zeros((SIZE,), tl.float32)
    if inputs.t is not None:
        # (SIZE,)
        t = tl.load(
            begin(inputs.t, head.batch, head.number) + tl.minimum(i, inputs.T - 1) * inputs.t.row
        )
    return t


@jit
def load_mix(inputs, head, i):
    """lambda of rows i: the factor on the second view, which is subtracted."""
    # (rows,)
    return tl.load(
        begin(inputs.mix, head.batch, head.out) + tl.minimum(i, inputs.T - 1) * inputs.mix.row
    )


@jit
def my_rows(inputs, c: tl.constexpr):
    """This program's tile of rows: its number, the tiles of keys that it sees, its head, and i, q
    and t of its rows. Then head, q, t and mix of the second view, or 0 if there is none."""
    number, start, head = my_tile(inputs, c.BM, True)  # longest rows first: balances the load
    i = start + tl.arange(0, c.BM)
    q = load(head.q, inputs.q.row, i, inputs.T, c.D, c.DP, True)  # (BM, DP)
    t = load_t(inputs, head, i, c.BM)  # (BM,)
    second = 0
    if inputs.mix is not None:
        headb = head_of(inputs, head.batch * inputs.H + head.number + 1)
        qb = load(headb.q, inputs.q.row, i, inputs.T, c.D, c.DP, True)  # (BM, DP)
        second = (headb, qb, load_t(inputs, headb, i, c.BM), load_mix(inputs, head, i))
    return number, key_tiles(start, inputs, head, c), head, i, q, t, second


# Tensor cores would round float32. Without them each thread holds whole rows of a and whole columns
# of b. If these are long, they do not fit into its registers, so they are cut into pieces.
LONG, PIECE = tl.constexpr(64), tl.constexpr(32)


@jit
def times(a, b):
    """a @ b in float32, of operands in the dtype of b."""
    if b.dtype == tl.float32 and a.shape[1] > LONG:
        pieces: tl.constexpr = a.shape[1] // PIECE
        # (pieces, rows, PIECE)
        a = tl.permute(tl.reshape(a, (a.shape[0], pieces, PIECE)), (1, 0, 2))
        b = tl.reshape(b, (pieces, PIECE, b.shape[1]))  # (pieces, PIECE, columns)
        return tl.sum(tl.dot(a, b, input_precision="ieee"), 0)
    else:
        return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@jit
def tile_scores(q, k, i, j, t, inputs, head, rule: tl.constexpr, KIND: tl.constexpr):
    """Returns q @ k.T (BM, BN), the scores in the rule's unit, the lifted scores that weigh takes,
    and the mask. i and t are columns (BM, 1), j is a row (1, BN).

    The tile may be transposed: with k as q, q as k, rows i and t and a column j, the results are
    (BN, BM)."""
    # s = scale * q @ k.T + where(i - j < W, table[i - j], tail) + slope * (i - j)     (* rule.unit)
    raw = times(q, tl.trans(k))
    s = raw * (inputs.scale * rule.unit)
    seen = visible_in_tile(i, j, inputs, head)
    if inputs.sets is not None:
        at = inputs.sets + head.batch * inputs.T
        sets_of_rows = tl.load(at + tl.minimum(i, inputs.T - 1))  # as i
        sets_of_keys = tl.load(at + tl.minimum(j, inputs.T - 1))  # as j
        seen &= (sets_of_rows & sets_of_keys) == 0
    if KIND != FULL and inputs.table is not None:
        close = i - j < inputs.W
        at = inputs.table + head.number * inputs.W + (i - j)
        s += tl.where(close, tl.load(at, mask=(i >= j) & close, other=0.0), head.tail)  # as s
    elif inputs.tail_slope is not None:  # full tiles lie beyond the table
        s += head.tail
    if inputs.tail_slope is not None:
        s += head.slope * (i.to(tl.float32) - j.to(tl.float32))
    lifted = s if rule.lift is None else rule.lift(s, t, rule.power)
    return raw, s, lifted, seen


# ------------------------------------------------------------------------------------------ forward


@jit
def tile_weights(
    r,
    q,
    t,
    i,
    start,
    inputs,
    head,
    rule: tl.constexpr,
    c: tl.constexpr,
    KIND: tl.constexpr,
    RUNNING: tl.constexpr,
):
    """w, z, u and r of one tile, and the factor on earlier sums. RUNNING: r is the maximum so far,
    which may rise."""
    j = start + tl.arange(0, c.BN)
    k = load(head.k, inputs.k.row, j, inputs.T, c.D, c.DP, KIND == MASKED)  # (BN, DP)
    raw, _, s, seen = tile_scores(
        q, k, i[:, None], j[None, :], t[:, None], inputs, head, rule, KIND
    )
    rescale = 1.0
    if RUNNING:
        # without biases s is a positive multiple of raw: one product a row, and the scores' own are
        # fused with s - r
        factor = inputs.scale * rule.unit
        if not (rule.lift is None and inputs.table is None and inputs.tail_slope is None):
            raw, factor = s, 1.0
        top = tl.maximum(
            r, tl.max(tl.where(seen, raw, float("-inf")) if KIND == MASKED else raw, 1) * factor
        )
        rescale = tl.exp2(r - top)
        r = top
    w, z, u = rule.weigh(s, r[:, None], t[:, None], rule.power)
    if KIND == MASKED:  # the mask acts on weights, never on scores: these stay finite
        w, z, u = tl.where(seen, w, 0.0), tl.where(seen, z, 0.0), tl.where(seen, u, 0.0)
    return w, z, u, r, rescale


@jit
def add_to_sums(
    state, my_side, start, inputs, head, rule: tl.constexpr, c: tl.constexpr, KIND: tl.constexpr
):
    """One tile of a pass for the statistic alone: at a fixed r or, if that is None, at the maximum
    so far."""
    r, sum_w, sum_z = state
    i, q, t, fixed = my_side
    w, z, _, r, rescale = tile_weights(
        r, q, t, i, start, inputs, head, rule, c, KIND, fixed is None
    )
    return r, sum_w * rescale + tl.sum(w, 1), sum_z * rescale + tl.sum(z, 1)


@jit
def statistic(r, i, q, t, keys, inputs, head, rule: tl.constexpr, c: tl.constexpr):
    """The statistic r of rows, before the output pass, for a rule with passes > 0. The first pass
    gives an r. Each later pass sums up at this r and improves it by a step of Newton's method."""
    zero = tl.zeros((c.BM,), tl.float32)
    my_side = (i, q, t, None)
    r, sum_w, sum_z = walk(
        (r, zero, zero), add_to_sums, my_side, keys, None, inputs, head, rule, c, c.BN
    )
    r = rule.settle(r, t, rule.power, sum_w, sum_z, True)
    if rule.passes > 1:
        passes_left = rule.passes - 1
        while passes_left > 0:  # until no row's sum changes by 1e-5
            state, at_r = (r, zero, zero), (i, q, t, r)
            _, sum_w, sum_z = walk(
                state, add_to_sums, at_r, keys, None, inputs, head, rule, c, c.BN
            )
            refined = rule.settle(r, t, rule.power, sum_w, sum_z, False)
            passes_left = tl.where(tl.max((refined - r) * sum_z, 0) > 1e-5, passes_left - 1, 0)
            r = refined
    return r


@jit
def add_to_output(
    state, my_side, start, inputs, head, rule: tl.constexpr, c: tl.constexpr, KIND: tl.constexpr
):
    """One tile of the output pass."""
    r, sum_w, sum_z, o, U = state
    i, q, t, second, alive = my_side
    w, z, u, r, rescale = tile_weights(r, q, t, i, start, inputs, head, rule, c, KIND, rule.online)
    largest = w
    if inputs.mix is not None:
        headb, qb, tb, mix = second
        wb, _, _, _, _ = tile_weights(r, qb, tb, i, start, inputs, headb, rule, c, KIND, False)
        largest = tl.maximum(w, wb)  # a weight of either view counts
        w -= mix[:, None] * wb
    if rule.skip:  # is the tile alive? Rows beyond T do not count
        largest = tl.max(tl.where(i < inputs.T, tl.max(largest, 1), 0.0), 0)
        tl.store(alive + start // c.BN, (largest > 0).to(tl.int8))
    if rule.online:
        o *= rescale[:, None]  # rescale to the larger maximum
    j = start + tl.arange(0, c.BN)
    v = load(head.v, inputs.v.row, j, inputs.T, c.E, c.EP, KIND == MASKED)  # (BN, EP)
    o = tl.dot(w.to(v.dtype), v, o, input_precision="ieee")  # (BM, EP)
    if rule.save_u:
        U = tl.dot(u.to(v.dtype), v, U, input_precision="ieee")  # (BM, EP)
    return r, sum_w * rescale + tl.sum(w, 1), sum_z * rescale + tl.sum(z, 1), o, U


@jit
def forward(inputs, O, U, R, Alive, rule: tl.constexpr, c: tl.constexpr):
    """One tile of rows: o, the statistic r in natural units, U where it is not o, and which tiles
    are alive."""
    number, keys, head, i, q, t, second = my_rows(inputs, c)
    # into (B, H, row tiles, key tiles)
    my_side = (i, q, t, second, Alive + number * tl.cdiv(inputs.T, c.BN))

    # the statistic, where the output needs it; then the output
    r = tl.full((c.BM,), rule.floor, tl.float32)
    if rule.passes:
        r = statistic(r, i, q, t, keys, inputs, head, rule, c)
    zero = tl.zeros((c.BM,), tl.float32)
    empty = tl.zeros((c.BM, c.EP), tl.float32)
    # the compiler removes the sums and U where a rule does not use them
    state = (r, zero, zero, empty, empty)
    top, sum_w, sum_z, o, u = walk(
        state, add_to_output, my_side, keys, None, inputs, head, rule, c, c.BN
    )
    if rule.settle is not None and not rule.passes:  # statistic and output in one pass
        r = rule.settle(top, t, rule.power, sum_w, sum_z, True)
    if rule.online:
        o *= tl.exp2(top - r)[:, None]  # rescale from the running maximum to r
    if rule.passes > 1:
        o /= tl.maximum(sum_w, 1e-30)[:, None]  # r is rounded: sums may miss 1 by 1e-4

    # save
    save(begin(O, head.batch, head.out), o, O.row, i, inputs.T, c.E, c.EP)
    if rule.save_u:
        u /= tl.maximum(sum_z, 1e-30)[:, None]
        save(begin(U, head.batch, head.out), u, U.row, i, inputs.T, c.E, c.EP)
    if rule.settle is not None:
        tl.store(R + head.rows + i, r if rule.plain_sum else r * (1 / rule.unit), mask=i < inputs.T)


# ----------------------------------------------------------------------------------------- backward


@jit
def load_row_vectors(inputs, head, R, Delta, i, rule: tl.constexpr, SIZE: tl.constexpr):
    """r in the rule's unit, t and delta of rows i (dr, if DR is passed as Delta). Rows beyond T
    repeat the last one, so that every rule stays finite."""
    r, delta = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    at = head.rows + tl.minimum(i, inputs.T - 1)
    if rule.settle is not None:
        delta = tl.load(Delta + at)  # (SIZE,)
        if not rule.plain_sum:
            r = tl.load(R + at) * rule.unit  # (SIZE,)
    return r, load_t(inputs, head, i, SIZE), delta


@jit
def slopes(q, k, g, i, j, r, t, delta, inputs, head, rule: tl.constexpr, KIND: tl.constexpr):
    """Weights, ds and the summands of dt of one tile, which may be transposed as in
    tile_scores()."""
    _, s, lifted, seen = tile_scores(q, k, i, j, t, inputs, head, rule, KIND)
    w, _, _ = rule.weigh(lifted, r, t, rule.power)
    ds, dt = rule.slope(s, r, t, rule.power, g, delta)
    if KIND == MASKED:
        w, ds, dt = tl.where(seen, w, 0.0), tl.where(seen, ds, 0.0), tl.where(seen, dt, 0.0)
    return w, ds, dt


@jit
def add_to_delta(
    state, my_side, start, inputs, head, rule: tl.constexpr, c: tl.constexpr, KIND: tl.constexpr
):
    """Add one tile to the sums of w and of w (g - delta), which correct a first delta = do . o - dr
    for rounding.

    If one weight dominates a row, g - delta of its key is almost 0. The rounding of r and o is then
    large relative to it, and slope amplifies it. So backward_rows adds the mean of g - delta, with
    the weights of this pass, and subtracts dr once more. The new delta is the mean of g, minus
    dr."""
    sum_w, sum_wg = state
    i, q, do, r, t, delta, _ = my_side
    j = start + tl.arange(0, c.BN)
    v = load(head.v, inputs.v.row, j, inputs.T, c.E, c.EP, KIND == MASKED)  # (BN, EP)
    g = times(do, tl.trans(v)) - delta[:, None]  # (BM, BN)
    k = load(head.k, inputs.k.row, j, inputs.T, c.D, c.DP, KIND == MASKED)  # (BN, DP)
    i, j, r, t, delta = i[:, None], j[None, :], r[:, None], t[:, None], delta[:, None]
    w, _, _ = slopes(q, k, g, i, j, r, t, delta, inputs, head, rule, KIND)
    return sum_w + tl.sum(w, 1), sum_wg + tl.sum(w * g, 1)


@jit
def add_to_view(
    state, q, k, g, i, j, r, t, delta, inputs, head, rule: tl.constexpr, KIND: tl.constexpr
):
    """Add one tile of keys to the gradients of a tile of rows, in one view. Returns the tile's
    weights as well."""
    dq, dt, dtail, dslope = state
    w, ds, dt_ij = slopes(
        q, k, g, i, j, r[:, None], t[:, None], delta[:, None], inputs, head, rule, KIND
    )
    dt += tl.sum(dt_ij, 1)
    if inputs.tail_slope is not None:
        dslope += tl.sum(ds * (i.to(tl.float32) - j.to(tl.float32)), 1)
        dtail += tl.sum(tl.where(i - j < inputs.W, 0.0, ds) if KIND != FULL else ds, 1)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")  # (BM, DP)
    return (dq, dt, dtail, dslope), w


@jit
def add_to_rows(
    state, my_side, start, inputs, head, rule: tl.constexpr, c: tl.constexpr, KIND: tl.constexpr
):
    """Add one tile of keys to the gradients of a tile of rows. k is loaded after v is used, to save
    registers."""
    grads, gradsb, dmix = state
    i, q, do, r, t, delta, second = my_side
    j = start + tl.arange(0, c.BN)
    v = load(head.v, inputs.v.row, j, inputs.T, c.E, c.EP, KIND == MASKED)  # (BN, EP)
    g = times(do, tl.trans(v))  # (BM, BN)
    k = load(head.k, inputs.k.row, j, inputs.T, c.D, c.DP, KIND == MASKED)  # (BN, DP)
    i, j_row = i[:, None], j[None, :]
    grads, _ = add_to_view(grads, q, k, g, i, j_row, r, t, delta, inputs, head, rule, KIND)
    if inputs.mix is not None:
        headb, qb, tb, mix = second
        kb = load(headb.k, inputs.k.row, j, inputs.T, c.D, c.DP, KIND == MASKED)  # (BN, DP)
        gb = -mix[:, None] * g
        gradsb, wb = add_to_view(
            gradsb, qb, kb, gb, i, j_row, r, tb, delta, inputs, headb, rule, KIND
        )
        dmix -= tl.sum(wb * g, 1)  # (BM,)
    return grads, gradsb, dmix


@jit
def save_rows(state, inputs, head, DQ, DT, DTailSlope, i, c: tl.constexpr):
    dq, dt, dtail, dslope = state
    save(begin(DQ, head.batch, head.number), dq * inputs.scale, DQ.row, i, inputs.T, c.D, c.DP)
    if inputs.t is not None:
        tl.store(DT + head.rows + i, dt, mask=i < inputs.T)
    if inputs.tail_slope is not None:  # (B, H, 2, T)
        tl.store(DTailSlope + 2 * head.rows + i, dtail, mask=i < inputs.T)
        tl.store(DTailSlope + 2 * head.rows + inputs.T + i, dslope, mask=i < inputs.T)


@jit
def backward_rows(
    inputs,
    U,
    R,
    DO,
    DR,
    DQ,
    DT,
    DTailSlope,
    DMix,
    Delta,
    Visits,
    rule: tl.constexpr,
    c: tl.constexpr,
):
    """One tile of rows: dq, the gradients of t, tail, slope and mix row by row, and delta for the
    next kernels."""
    number, keys, head, i, q, _, second = my_rows(inputs, c)
    do = load(begin(DO, head.batch, head.out), DO.row, i, inputs.T, c.E, c.EP, True)  # (BM, EP)
    r, t, dr = load_row_vectors(inputs, head, R, DR, i, rule, c.BM)  # (BM,) each
    visits = Visits + number * (2 * tl.cdiv(inputs.T, c.BN) + 1) if rule.skip else None
    zero = tl.zeros((c.BM,), tl.float32)

    # delta = (do * U).sum(-1) - dr
    delta = -dr
    if rule.settle is not None and not rule.plain_sum:  # for a plain sum, only dr counts
        u = load(begin(U, head.batch, head.out), U.row, i, inputs.T, c.E, c.EP, True)  # (BM, EP)
        delta += tl.sum(do.to(tl.float32) * u.to(tl.float32), 1)
    if rule.sum_delta:
        my_side = (i, q, do, r, t, delta, second)
        sum_w, sum_wg = walk(
            (zero, zero), add_to_delta, my_side, keys, visits, inputs, head, rule, c, c.BN
        )
        delta += sum_wg / tl.maximum(sum_w, 1e-30) - dr  # sum_w of an empty row is 0
    if rule.settle is not None:
        tl.store(Delta + head.rows + i, delta, mask=i < inputs.T)

    # the gradients
    my_side = (i, q, do, r, t, delta, second)
    none = (tl.zeros((c.BM, c.DP), tl.float32), zero, zero, zero)
    state = walk(
        (none, none, zero), add_to_rows, my_side, keys, visits, inputs, head, rule, c, c.BN
    )
    grads, gradsb, dmix = state
    save_rows(grads, inputs, head, DQ, DT, DTailSlope, i, c)
    if inputs.mix is not None:
        save_rows(gradsb, inputs, second[0], DQ, DT, DTailSlope, i, c)
        tl.store(DMix + head.rows // 2 + i, dmix, mask=i < inputs.T)  # (B, H/2, T)


@jit
def add_to_keys(
    state, my_side, start, inputs, head, rule: tl.constexpr, c: tl.constexpr, KIND: tl.constexpr
):
    """Add one tile of rows to the gradients of a tile of keys. Tiles are transposed: (keys,
    rows)."""
    dk, dv, dkb = state
    j, k, v, DO, do_row, R, Delta, second = my_side
    i = start + tl.arange(0, c.BM)
    q = load(head.q, inputs.q.row, i, inputs.T, c.D, c.DP, KIND == MASKED)  # (BM, DP)
    do = load(DO, do_row, i, inputs.T, c.E, c.EP, KIND == MASKED)  # (BM, EP)
    g = times(v, tl.trans(do))  # (BN, BM)
    r, t, delta = load_row_vectors(inputs, head, R, Delta, i, rule, c.BM)  # (BM,) each
    if inputs.mix is not None:
        headb, kb = second
        mix, tb = load_mix(inputs, head, i)[None, :], load_t(inputs, headb, i, c.BM)  # (BM,) each
        qb = load(headb.q, inputs.q.row, i, inputs.T, c.D, c.DP, KIND == MASKED)  # (BM, DP)
    if KIND == MASKED:
        i = tl.where(i < inputs.T, i, -1)  # rows beyond T see no key
    i, j, r, delta = i[None, :], j[:, None], r[None, :], delta[None, :]
    w, ds, _ = slopes(k, q, g, i, j, r, t[None, :], delta, inputs, head, rule, KIND)
    if inputs.mix is not None:
        wb, dsb, _ = slopes(
            kb, qb, -mix * g, i, j, r, tb[None, :], delta, inputs, headb, rule, KIND
        )
        w -= mix * wb
        dkb = tl.dot(dsb.to(q.dtype), qb, dkb, input_precision="ieee")  # dk of the second view
    dv = tl.dot(w.to(do.dtype), do, dv, input_precision="ieee")  # dv = w.T @ do
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")  # dk = ds.T @ q
    return dk, dv, dkb


@jit
def backward_keys(inputs, R, DO, Delta, DK, DV, Visits, rule: tl.constexpr, c: tl.constexpr):
    """One tile of keys: dk and dv, summed over the G query heads that share it."""
    number, start, head = my_tile(inputs, c.BN, False, inputs.G)
    j = start + tl.arange(0, c.BN)
    k = load(head.k, inputs.k.row, j, inputs.T, c.D, c.DP, True)  # (BN, DP)
    v = load(head.v, inputs.v.row, j, inputs.T, c.E, c.EP, True)  # (BN, EP)
    second = 0
    if inputs.mix is not None:
        headb = head_of(inputs, head.batch * inputs.H + head.number + 1)
        second = (headb, load(headb.k, inputs.k.row, j, inputs.T, c.D, c.DP, True))  # (BN, DP)

    # the gradients
    rows = row_tiles(start, inputs, head, c)
    dk, dv = tl.zeros((c.BN, c.DP), tl.float32), tl.zeros((c.BN, c.EP), tl.float32)
    dkb = dk
    for n in tl.range(0, inputs.G, disable_licm=True):  # hoisting would cost registers
        number, start, one = my_tile(inputs, c.BN, False, inputs.G, n)
        my_side = (j, k, v, begin(DO, one.batch, one.out), DO.row, R, Delta, second)
        visits = Visits + number * (2 * tl.cdiv(inputs.T, c.BM) + 1) if rule.skip else None
        dk, dv, dkb = walk(
            (dk, dv, dkb), add_to_keys, my_side, rows, visits, inputs, one, rule, c, c.BM
        )
    save(
        begin(DK, head.batch, head.number // inputs.G),
        dk * inputs.scale,
        DK.row,
        j,
        inputs.T,
        c.D,
        c.DP,
    )
    save(begin(DV, head.batch, head.out // inputs.G), dv, DV.row, j, inputs.T, c.E, c.EP)
    if inputs.mix is not None:
        save(
            begin(DK, head.batch, headb.number), dkb * inputs.scale, DK.row, j, inputs.T, c.D, c.DP
        )


@jit
def backward_table(inputs, R, DO, Delta, DTable, diagonals, rule: tl.constexpr, c: tl.constexpr):
    """The table's gradient. In all square tiles (m, m - b) of block diagonal b, equal entries have
    equal distances. So one program adds these tiles up into one, which by_distance() reduces. Dead
    tiles are visited as well: a table covers the distances at which keys matter, so few are
    dead."""
    b, head = tl.program_id(0) % diagonals, head_of(inputs, tl.program_id(0) // diagonals)
    row = tl.arange(0, c.BM)
    total = tl.zeros((c.BM, c.BM), tl.float32)
    for start in tl.range(b * c.BM, inputs.T, c.BM, num_stages=1):
        i = start + row
        j = i - b * c.BM
        v = load(head.v, inputs.v.row, j, inputs.T, c.E, c.EP, True)  # (BM, EP)
        do = load(begin(DO, head.batch, head.out), DO.row, i, inputs.T, c.E, c.EP, True)  # (BM, EP)
        g = times(do, tl.trans(v))  # (BM, BN)
        if inputs.mix is not None:  # -mix for the second view
            g *= tl.where(head.number % 2 == 0, 1.0, -load_mix(inputs, head, i))[:, None]
        q = load(head.q, inputs.q.row, i, inputs.T, c.D, c.DP, True)  # (BM, DP)
        k = load(head.k, inputs.k.row, j, inputs.T, c.D, c.DP, True)  # (BM, DP)
        r, t, delta = load_row_vectors(inputs, head, R, Delta, i, rule, c.BM)  # (BM,) each
        i = tl.where(i < inputs.T, i, -1)  # rows beyond T see no key
        r, t, delta = r[:, None], t[:, None], delta[:, None]
        _, ds, _ = slopes(q, k, g, i[:, None], j[None, :], r, t, delta, inputs, head, rule, MASKED)
        total += ds
    at = DTable + tl.program_id(0).to(tl.int64) * c.BM * c.BM  # into (B, H, diagonals, BM, BM)
    tl.store(at + row[:, None] * c.BM + row[None, :], total)


# --------------------------------------------------------------------------------------------- host
# Two operators, forward and backward, which torch.compile can trace. Each allocates its outputs and
# launches its kernels. torch.compile sees the outputs only. The remaining sums over heads, rows and
# diagonals are ordinary PyTorch in `differentiate`.

SCHEMA = (
    "str rule, Tensor q, Tensor k, Tensor v, Tensor? t, Tensor? table, Tensor? tail_slope, Tensor? mix, "
    "Tensor? sets, Tensor? starts, float scale, SymInt window, SymInt first"
)


class Call(namedtuple("Call", [argument.split()[1] for argument in SCHEMA.split(", ")])):
    """The arguments of the operators, as attend() describes them, except that a rule may name its
    power, as in "tra:3.0", and that tail_slope (H, 2) holds tail and slope."""

    @property
    def heads(self):
        """How many heads the output has."""
        return self.q.shape[1] if self.mix is None else self.q.shape[1] // 2

    @property
    def shared(self):
        """How many heads of the output, one after the other, share both key and value heads; 1 for
        two views."""
        heads = self.q.shape[1]
        return gcd(heads // self.k.shape[1], heads // self.v.shape[1]) if self.mix is None else 1

    @property
    def has_window(self):
        return 0 < self.window < self.q.shape[2]


def attend(
    rule,
    q,
    k,
    v,
    t=None,
    table=None,
    tail=None,
    slope=None,
    scale=1.0,
    window=0,
    first=0,
    row_sum=False,
    power=None,
    skip=True,
    mix=None,
    sets=None,
    starts=None,
):
    """Causal attention by a rule of KERNELS: output (B, H, T, E), and the row statistic (B, H, T),
    or None without one.

    q (B, H, T, D), k (B, Hk, T, D), v (B, Hv, T, E): Hk and Hv divide H.
    t: the row input, broadcastable to (B, H, T). None: 0.
    table (H, W), tail (H,), slope (H,): the score is scale q.k + slope[h] (i - j), plus table[h, i
        - j] at distances below W and tail[h] beyond.
    window, first: row i sees key j if i - j < window (0: no limit) or j < first.
    row_sum: a rule without a statistic returns the sum of its weights.
    power: replaces the rule's own.
    skip: if the rule allows it, the backward pass skips tiles in which all weights are 0.
    mix: q has two heads, called views, for each of the H/2 heads of the output. The weights are
        those of the first view minus mix times those of the second. Hv divides H/2, mix broadcasts
        to (B, H/2, T), and the rule must have no statistic.
    sets (B, T) int64: row i sees key j only if they have no bit in common. The output of a row that
    sees no key is 0. starts (B, T): packed documents. Row i sees no key before starts[:, i];
    `first` counts from there.
    Output and statistic are differentiable in q, k, v, t, table, tail, slope and mix, except for a
    statistic that is found by iteration.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (part.to(torch.get_autocast_dtype(q.device.type)) for part in (q, k, v))
    if t is not None and rule in KERNELS:
        rule = KERNELS[rule].with_t or rule
    for bad, why in problems(
        rule, q, k, v, t, table, tail, slope, scale, row_sum, power, mix, sets, starts
    ):
        if bad:
            raise ValueError(why)

    B, H, T, _ = q.shape
    if KERNELS[rule].takes_t:
        t = along_rows(q.new_zeros(()) if t is None else t, B, H, T)
    mix = None if mix is None else along_rows(mix, B, H // 2, T)
    tail_slope = None
    if tail is not None or slope is not None:
        nothing = q.new_zeros(H, dtype=torch.float32)
        tail_slope = torch.stack(
            [nothing if part is None else part.float() for part in (tail, slope)], 1
        )
    table = table.float() if table is not None and table.shape[1] else None
    rule += ("_sum" if row_sum else "") + ("" if power is None else f":{float(power)}")
    sets, starts = (
        None if sets is None else sets.contiguous(),
        None if starts is None else starts.int().contiguous(),
    )
    call = rule, q, k, v, t, table, tail_slope, mix, sets, starts, float(scale), window, first
    learn = torch.is_grad_enabled() and any(
        isinstance(part, Tensor) and part.requires_grad for part in call
    )
    o, r, *_ = run_forward(*call, learn, skip)
    rule = kernel_named(rule)
    if not rule.settle:
        return o, None
    # slope already includes how w depends on such an r
    return o, r.detach() if rule.passes > 1 else r


def problems(rule, q, k, v, t, table, tail, slope, scale, row_sum, power, mix, sets, starts):
    """Pairs (condition, error message). Each relies on those before it. PyTorch refuses what does
    not broadcast."""
    yield from problems_anywhere(q, k, v)
    yield not scale > 0, f"scale must be positive, not {scale}: give q the sign"
    yield rule not in KERNELS, f"no kernel for the rule {rule!r}: choose one of {list(KERNELS)}"
    kernel = KERNELS[rule]
    yield (
        row_sum and rule + "_sum" not in KERNELS,
        f"{rule} has no row sum to return: leave out row_sum",
    )
    yield t is not None and not kernel.takes_t, f"{rule} reads no row input: leave out t"
    yield (
        power is not None and not (kernel.takes_power and power >= 1),
        f"{rule} takes no power {power}: leave it out",
    )
    yield (
        mix is not None and (row_sum or kernel.settle is not None),
        (
            f"mix is for rules without a row statistic: call {rule} once per view and subtract the outputs"
        ),
    )
    a, b, c = shapes = [tuple(part.shape) for part in (q, k, v)]
    views = 1 if mix is None else 2
    yield (
        not (
            len(a) == len(b) == len(c) == 4
            and a[::2] == b[::2] == c[::2]
            and a[3] == b[3]
            and min(a + b + c) > 0
            and a[1] % views == 0
            and a[1] % b[1] == 0
            and a[1] // views % c[1] == 0
        ),
        (
            f"q (B, H, T, D), k (B, Hk, T, D) and v (B, Hv, T, E) must agree, Hk divide H, and Hv the heads of the output, "
            f"but they are {shapes}"
        ),
    )
    H = q.shape[1]
    given = [(part, dims) for part, dims in ((table, 2), (tail, 1), (slope, 1)) if part is not None]
    yield (
        any(part.ndim != dims or len(part) != H for part, dims in given),
        (f"table must be (H, W), tail and slope (H,), with the {H} heads of q"),
    )
    yield (
        any(
            x is not None and (x.shape != q.shape[::2] or x.dtype != torch.int64)
            for x in (sets, starts)
        ),
        (f"sets must be (B, T) int64, as starts, with the B and T of q, {tuple(q.shape[::2])}"),
    )
    yield (
        max(q.shape[3], v.shape[3]) > 256,
        "a tile holds heads of width 256 at most: use --kernel=torch",
    )
    yield (
        mix is not None and not holds_two_views(q, v),
        (
            f"a tile holds two views of width 128 at most in float32: call {rule} once per view and subtract"
        ),
    )


def problems_anywhere(q, k, v):
    """The problems of any kernel: its device and its data types."""
    yield (
        not AVAILABLE,
        (
            "the kernels need triton and an NVIDIA GPU from Ampere on: use --kernel=torch "
            "(or set TRITON_INTERPRET=1 to test them on a CPU)"
        ),
    )
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    yield (
        not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes,
        ("q, k and v must share one of float32, float16 and bfloat16"),
    )
    yield (
        INTERPRETED and q.dtype == torch.bfloat16,
        "Triton's interpreter computes bfloat16 wrongly: use float32 there",
    )
    yield (
        not (INTERPRETED or q.is_cuda),
        "the kernels run on a CUDA GPU: move q there or use --kernel=torch",
    )


def holds_two_views(q, v):
    """Can one call compute both views of these heads (see mix)? Float32 numbers take twice the
    registers."""
    return q.dtype != torch.float32 or max(q.shape[3], v.shape[3]) <= 128


def along_rows(part, *shape):
    """A row vector in float32, expanded to a shape (B, heads, T)."""
    part = part.float().expand(shape)
    return part if part.stride(2) < 2 else part.contiguous()


def kernel_named(rule):
    """The Kernel of "softmax", or of "tra:3.0" with a power. Operators accept a string, but no
    Kernel."""
    name, _, power = rule.partition(":")
    return KERNELS[name]._replace(power=float(power)) if power else KERNELS[name]


def count(T, size):
    return -(-T // size)


# ---- the forward operator


def unpacked(args):
    """The arguments as a Call, and its Kernel. Without gradients it saves neither U nor the map of
    live tiles."""
    *call, learn, skip = args
    call = Call(*call)
    rule = kernel_named(call.rule)
    return call, rule._replace(save_u=rule.save_u and learn, skip=rule.skip and learn and skip)


@torch.library.custom_op(
    "nanoattention::forward",
    mutates_args=(),
    schema=f"({SCHEMA}, bool learn, bool skip) -> (Tensor, Tensor, Tensor, Tensor)",
)
def run_forward(*args):
    (o, r, u, alive), (call, rule) = allocate_forward(*args), unpacked(args)
    launch(forward, rule, call, (kernel_inputs(call), matrix(o), matrix(u), r, alive))
    return o, r, u, alive


@run_forward.register_fake
def allocate_forward(*args):
    call, rule = unpacked(args)
    B, H, T, _ = call.q.shape
    E, (BM, BN, *_) = call.v.shape[-1], tile_config("forward", rule, call)
    o = rows_of_all_heads(call.q, call.heads, E)
    u = rows_of_all_heads(call.q, call.heads if rule.save_u else 0, E)
    r = call.q.new_empty((B, H, T) if rule.settle else (0,), dtype=torch.float32)
    tiles = (B, call.heads, count(T, BM), count(T, BN))
    return o, r, u, call.q.new_zeros(tiles if rule.skip else (0,), dtype=torch.int8)


def rows_of_all_heads(q, heads, width):
    """An empty tensor (B, heads, T, width). In memory it is (B, T, heads, width), as the next
    projection reads it, if 32-bit offsets allow that."""
    B, _, T, _ = q.shape
    if T * heads * width < 2**31:
        return q.new_empty(B, T, heads, width).transpose(1, 2)
    return q.new_empty(B, heads, T, width)


def matrix(tensor, name="a gradient"):
    """The Matrix of a tensor: its last axis must have stride 1, and one head must lie within 2^31
    elements."""
    if tensor.ndim == 4:
        tensor = tensor if tensor.stride(3) == 1 else tensor.contiguous()
        if (tensor.shape[2] - 1) * tensor.stride(2) + tensor.shape[3] > 2**31:
            raise ValueError(
                f"one head of {name} spans more than 2^31 elements: call .contiguous() on {name} first"
            )
    return Matrix(tensor, *tensor.stride()[:3])


def kernel_inputs(call):
    """The Inputs of the kernels. Tables are multiplied by the rule's unit here, once, instead of at
    every score."""
    unit, (_, H, T, _) = kernel_named(call.rule).unit, call.q.shape
    q, k, v = (matrix(part, name) for part, name in ((call.q, "q"), (call.k, "k"), (call.v, "v")))
    t, mix = (None if part is None else matrix(part) for part in (call.t, call.mix))
    table, tail_slope = (
        None if part is None else (part * unit).contiguous()
        for part in (call.table, call.tail_slope)
    )
    GK, GV, W = (
        H // call.k.shape[1],
        call.heads // call.v.shape[1],
        0 if table is None else table.shape[1],
    )
    window, ends = call.window if call.has_window else None, None
    if call.starts is not None:
        i = (
            torch.arange(T, dtype=torch.int32, device=call.q.device)
            .expand_as(call.starts)
            .contiguous()
        )
        ends = torch.searchsorted(call.starts, i, right=True, out_int32=True)
    return Inputs(
        q,
        k,
        v,
        t,
        table,
        tail_slope,
        mix,
        call.sets,
        call.starts,
        ends,
        H,
        GK,
        GV,
        call.shared,
        T,
        W,
        window,
        call.first,
        call.scale,
    )


def launch(kernel, rule, call, args, diagonals=None):
    """Start a program for each head and tile of rows; for backward_keys tile of keys, for
    backward_table diagonal."""
    BM, BN, warps, stages = tile_config(kernel.__name__, rule, call)
    tiles = diagonals or count(call.q.shape[2], BN if kernel is backward_keys else BM)
    heads = call.q.shape[1] if kernel is backward_table else call.heads  # see my_tile
    heads = heads // call.shared if kernel is backward_keys else heads
    D, E = call.q.shape[3], call.v.shape[3]
    tile_sizes = TileSizes(*map(tl.constexpr, (D, padded(D), E, padded(E), BM, BN)))
    with torch.cuda.device_of(call.q):
        grid = (tiles * heads * len(call.q),)
        kernel[grid](
            *args, rule, tile_sizes, num_warps=warps, num_stages=stages, enable_fp_fusion=True
        )


# ---- the backward operator


@torch.library.custom_op(
    "nanoattention::backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor u, Tensor r, Tensor alive, Tensor do, Tensor dr, bool learn_table)"
    f" -> ({', '.join(['Tensor'] * 7)})",
)
def run_backward(*args):
    grads = dq, dk, dv, dt, dtail_slope, dmix, dtable = allocate_backward(*args)
    *call, u, r, alive, do, dr, learn_table = args
    call, rule = unpacked((*call, True, alive.numel() > 0))
    inputs, delta, do = (
        kernel_inputs(call),
        torch.empty_like(r),
        matrix(do, "the output's gradient"),
    )
    dmix = None if call.mix is None else dmix
    by_rows, by_keys = (
        visits_of(alive, kernel, rule, call) for kernel in ("backward_rows", "backward_keys")
    )
    of_rows = inputs, matrix(u), r, do, dr, matrix(dq), dt, dtail_slope, dmix, delta, by_rows
    launch(backward_rows, rule, call, of_rows)
    launch(backward_keys, rule, call, (inputs, r, do, delta, matrix(dk), matrix(dv), by_keys))
    if learn_table:
        diagonals = dtable.shape[2]
        launch(backward_table, rule, call, (inputs, r, do, delta, dtable, diagonals), diagonals)
    return grads


@run_backward.register_fake
def allocate_backward(*args):
    call, learn_table = Call(*args[: len(Call._fields)]), args[-1]
    q, (B, H, T, D) = call.q, call.q.shape
    dq, dk = rows_of_all_heads(q, H, D), rows_of_all_heads(q, H // call.shared, D)
    dv = rows_of_all_heads(q, call.heads // call.shared, call.v.shape[-1])
    dt = q.new_empty((0,) if call.t is None else (B, H, T), dtype=torch.float32)
    dtail_slope = q.new_empty(
        (0,) if call.tail_slope is None else (B, H, 2, T), dtype=torch.float32
    )
    dmix = q.new_empty((0,) if call.mix is None else (B, H // 2, T), dtype=torch.float32)
    shape = (0,)
    if learn_table:
        n, *_ = tile_config("backward_table", kernel_named(call.rule), call)
        shape = (B, H, diagonals_in_sight(call, n), n, n)
    return dq, dk, dv, dt, dtail_slope, dmix, q.new_empty(shape, dtype=torch.float32)


def diagonals_in_sight(call, n):
    """How many block diagonals of n x n tiles contain a visible distance below W."""
    reach = min(call.table.shape[1], call.q.shape[2])
    reach = reach if call.first or not call.window else min(reach, call.window)
    return (reach + n - 2) // n + 1


def visits_of(alive, kernel, rule, call):
    """For every tile of a backward kernel, the list of live tiles on the other side. Empty if all
    are visited."""
    if not rule.skip:
        return alive
    (BM, BN, *_), (rows, keys, *_) = (tile_config(name, rule, call) for name in ("forward", kernel))
    alive = resized(resized(alive, 2, call.q.shape[2], BM, rows), 3, call.q.shape[2], BN, keys)
    return in_order(alive if kernel == "backward_rows" else alive.mT)


def in_order(alive):
    """A map of live tiles (.., n) as lists (.., 2n + 1): first n + 1 counts, how many of the first
    0, 1, .., n tiles are alive; then the numbers of live tiles, ascending. (The numbers of dead
    tiles follow and are never read.)"""
    numbers = alive.argsort(dim=-1, descending=True, stable=True)
    return torch.cat([F.pad(alive.cumsum(-1), (1, 0)), numbers], -1).int()


def resized(alive, axis, T, a, b):
    """Convert a map of tiles of size a to tiles of size b, both powers of two. A tile is alive if
    any part of it is."""
    split, join = max(1, a // b), max(1, b // a)
    alive = (
        alive.repeat_interleave(split, axis).narrow(axis, 0, count(T, min(a, b))).movedim(axis, -1)
    )
    return (
        F.pad(alive, (0, -alive.shape[-1] % join))
        .unflatten(-1, (-1, join))
        .amax(-1)
        .movedim(-1, axis)
    )


# ---- autograd


def save_for_backward(ctx, inputs, output):
    call, rule = unpacked(inputs)
    o, r, u, alive = output
    ctx.rule, ctx.numbers = call.rule, call[10:]
    ctx.save_for_backward(*call[1:10], u if rule.save_u else o, r, alive)


def differentiate(ctx, do, dr, *_):
    q, k, v, t, table, tail_slope, mix, sets, starts, *saved = ctx.saved_tensors
    tensors = q, k, v, t, table, tail_slope, mix, sets, starts
    learn_table = table is not None and ctx.needs_input_grad[5]
    grads = run_backward(ctx.rule, *tensors, *ctx.numbers, *saved, do, dr.contiguous(), learn_table)
    dq, dk, dv, dt, dtail_slope, dmix, dtable = grads
    dk, dv = over_groups(dk, k.shape[1]), over_groups(dv, v.shape[1])
    dt, dmix = None if t is None else dt, None if mix is None else dmix
    dtail_slope = None if tail_slope is None else dtail_slope.sum((0, 3))  # (H, 2)
    dtable = by_distance(dtable.sum(0), table.shape[1]) if learn_table else None
    return None, dq, dk, dv, dt, dtable, dtail_slope, dmix, *[None] * 7


def over_groups(grad, heads):
    """Sum over gradients that belong to the same key or value head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def by_distance(tiles, W):
    """(H, diagonals, n, n) sums of ds to (H, W). Entry (row, col) of tile b lies at distance b n +
    row - col."""
    H, diagonals, n, _ = tiles.shape
    # reverse the keys, append n zeros to each row, and read the rows as 2n - 1 long: each row then
    # starts one place to the right of the row above, and column m holds the distance b n + m - (n -
    # 1) in every row
    skewed = (
        F.pad(tiles.flip(-1), (0, n))
        .flatten(2)[..., : n * (2 * n - 1)]
        .view(H, diagonals, n, 2 * n - 1)
        .sum(2)
    )
    table = skewed[..., n - 1 :].clone()  # (H, diagonals, n): tile b's distances b n and more
    table[:, :-1, 1:] += skewed[:, 1:, : n - 1]  # plus tile b + 1's distances below (b + 1) n
    table = table.flatten(1)[:, :W]
    return F.pad(table, (0, W - table.shape[1]))


def refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        "the attention kernels can be differentiated once: use --kernel=torch for second derivatives"
    )


run_forward.register_autograd(differentiate, setup_context=save_for_backward)
run_backward.register_autograd(refuse_second_derivative)


# -------------------------------------------------------------------------------------------- tiles
# (BM, BN, warps, stages) of each kernel, chosen for Triton 3.9 from what tests/test_compile.py
# prints. It is the largest tile of which two programs fit on a multiprocessor without spilling
# registers. One program
# then computes exponentials while the other waits for its products. If no tile allows two, one
# program
# has eight warps. A warp needs at least 16 rows, else warps repeat each other's work. (At width
# 256, in
# Triton 3.6 and at widths that are not a power of two, some kernels spill.)

COLUMNS = ("forward", "backward_rows", "backward_keys", "backward_table")
# (GPU generation, or 0 for float32 on any; width; kind of call). A gap is filled by the next row.
# The kinds:
TILES = {
    # 0 plain; 1 a table, tail, slope or window; 2 a heavy rule; 3 two views; 4 two views and what 1
    # has
    (90, 64, 0): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), None),
    (90, 64, 1): ((64, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (64, 64, 4, 1)),
    (90, 64, 2): ((64, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 1), (64, 64, 8, 1)),
    (90, 64, 3): ((64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), None),
    (90, 64, 4): ((64, 64, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2), (64, 64, 4, 1)),
    (90, 128, 0): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), None),
    (90, 128, 1): ((64, 32, 4, 2), (64, 32, 4, 2), (16, 64, 4, 2), (64, 64, 4, 1)),
    (90, 128, 2): ((64, 16, 4, 2), (64, 16, 4, 2), (16, 64, 4, 2), (64, 64, 8, 1)),
    (90, 128, 3): ((64, 32, 4, 2), (64, 16, 4, 2), (32, 32, 4, 2), None),
    (90, 128, 4): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (64, 64, 4, 1)),
    (90, 256, 2): ((32, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (64, 64, 8, 1)),
    (90, 256, 4): ((32, 32, 8, 2), (16, 32, 8, 1), (32, 16, 4, 1), (64, 64, 8, 1)),
    (80, 64, 0): ((64, 32, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), None),
    (80, 64, 1): ((64, 32, 4, 1), (64, 32, 4, 1), (32, 64, 4, 2), (32, 32, 2, 1)),
    (80, 64, 2): ((32, 32, 2, 2), (64, 32, 4, 1), (16, 64, 4, 1), (32, 32, 2, 1)),
    (80, 64, 3): ((64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), None),
    (80, 64, 4): ((64, 32, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2), (32, 32, 2, 1)),
    (80, 128, 0): ((64, 32, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), None),
    (80, 128, 1): ((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    (80, 128, 2): ((32, 32, 4, 2), (16, 32, 2, 2), (32, 16, 4, 2), (32, 32, 4, 1)),
    (80, 128, 3): ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), None),
    (80, 128, 4): ((64, 32, 8, 2), (32, 16, 4, 2), (32, 16, 4, 2), (32, 32, 4, 1)),
    (80, 256, 2): ((32, 64, 8, 2), (16, 64, 8, 1), (32, 16, 4, 2), (16, 16, 2, 1)),
    (80, 256, 4): ((32, 32, 8, 2), (16, 32, 8, 1), (32, 16, 4, 1), (16, 16, 2, 1)),
    (0, 64, 2): ((32, 16, 8, 1), (16, 16, 16, 1), (32, 16, 16, 1), (32, 32, 8, 1)),
    (0, 64, 4): ((32, 16, 4, 1), (16, 16, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
    (0, 128, 2): ((16, 16, 4, 1), (16, 16, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1)),
    (0, 128, 4): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
    (0, 256, 2): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# for the interpreter: small, so that short inputs of tests have several tiles
SMALL = ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1))


def generation(device):
    """90 for data-centre Hopper and Blackwell, whose shared memory holds larger tiles; 80 for all
    others."""
    return 90 if torch.cuda.get_device_capability(device)[0] in (9, 10) else 80


def tile_config(kernel, rule, call):
    """(BM, BN, warps, stages) of a kernel in this call."""
    column = COLUMNS.index(kernel)
    if INTERPRETED:
        return SMALL[column]
    busy = any(part is not None for part in (call.table, call.tail_slope)) or call.has_window
    kind = 3 + busy if call.mix is not None else 2 if rule.heavy else int(busy)
    size = (
        0 if call.q.dtype == torch.float32 else generation(call.q.device),
        padded(max(64, call.q.shape[-1], call.v.shape[-1])),
    )
    rows = (TILES.get((*size, n)) for n in range(kind, 5))
    return next(row[column] for row in rows if row and row[column])


def padded(width):
    return max(16, 1 << (width - 1).bit_length())  # tl.dot needs sides of at least 16
