"""How any rule is computed in memory linear in T: one walk over blocks of scores, in PyTorch, in
Triton and in C++.

A rule (attention.py) turns one block of scores into weights. This file works for every rule. It
cuts the rows of a causal attention into blocks, finds the keys that a block sees, passes their
scores to the rule, and sums up weights times values. Memory is O(T x block): in a long sequence the
weights of a block are dropped once its output is known, and the backward pass computes them again.

First comes the walk in PyTorch (`block_loop`). It defines the others and runs everywhere. It
decodes, as a block of one row, and gives the instruments their weights. Then the same walk in
Triton, for GPUs: each program keeps one tile of rows, or of keys, in registers and shared
memory, and walks over the tiles of the other side (Rabe & Staats 2021, arXiv 2112.05682; Dao et al.
2022, FlashAttention, arXiv 2205.14135), with a running maximum where a rule normalises (Milakov &
Gimelshein 2018, arXiv 1805.02867). No sum is atomic, so two runs agree bit for bit. The row input t
and the statistic r (if not found by iteration) are differentiable, so PyTorch computes thresholds,
sinks, gates and normalisers outside the kernels. In the backward pass some rules skip tiles whose
weights are all 0. The third walk, for CPUs, is kernels.cpp. It computes what the Triton kernels
compute (but for their second pass over delta), with the same rules, which common/cpp.py translates.
`attend` calls either.

Differential attention (Ye et al. 2024, arXiv 2410.05258) subtracts a second view: o_i = sum_j (w_ij
- mix_i w'_ij) v_j, with w' from queries and keys of its own. Rules without `settle` compute both
views in one pass.

Legend                                              shapes in comments
  B, H, T   batch, score heads, tokens              (BM, ..)  a tile of BM rows, that is queries
  D, E      width of q and k, width of v            (BN, ..)  a tile of BN keys
  W         width of the distance table             DP, EP    D and E padded to a power of two
  i, j      row and key numbers                     KIND      of a tile: FULL, TABLE or MASKED
  s, w      scores, weights                         do, ds    gradients: of o, of s; also dq, dk, ..
  r, t      row statistic, row input                g         g_ij = do_i . v_j, the gradient of w
  z         summed for the statistic, besides w     U         sum_j u_ij v_j / sum_j z_ij, often o
  u         the weights that U sums                 delta     delta_i = do_i . U_i - dr_i
  mix       lambda_i of the second view             .b        of the second view: qb, wb, ..
  power     the rule's power, a constant            kernel    the rule's Kernel, compile time
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

from common import cpp as in_cpp

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
except (ImportError, AttributeError):  # without a recent Triton: the block loop, and kernels.cpp
    triton, tl = SimpleNamespace(jit=lambda f: f), SimpleNamespace(constexpr=lambda x: x)
    INTERPRETED = AVAILABLE = False
jit = triton.jit

# ---------------------------------------------------------------------------- which keys a row sees


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
    start = 0
    seen = j <= i
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


def block_loop(one_block, mask, parts, *tensors):
    """Call one_block(positions of its rows, *its part of each tensor) for every block of rows, and
    join the outputs. For attention by a rule, one_block is attend_block.

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
    for rows, keys, i in row_blocks(R, T, mask, tensors[0].device):
        cuts = [rows if part == "rows" else keys for part in parts]
        block = [
            None if x is None else x[..., cut, :] for x, cut in zip(tensors, cuts, strict=True)
        ]
        outputs.append(one_block(i, *block))
    return tuple(torch.cat(part, 2) for part in zip(*outputs, strict=True))


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
    t,  # (.., R, 1), broadcastable to (B, H, R, 1), or None
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
    """A rule in Triton: functions of a tile, which attention.py explains, and a few constants. All
    are known at compile time."""

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
    heavy: bool = False  # needs more registers than most: uses the tiles of kind 2, see TILES
    # launch() adds the sizes of the heads and tiles, see the legend
    D: int = 0
    DP: int = 0
    E: int = 0
    EP: int = 0
    BM: int = 0
    BN: int = 0

    @property
    def cache_key(self):
        """Part of Triton's cache key. Without it an edited rule would run its old cached kernel."""
        return "-".join(str(getattr(part, "cache_key", part)) for part in self)


KERNELS = {}  # {name of a rule: Kernel}. Operators of torch accept strings, but no functions


def offer(kernels):
    """Add rules. A rule without `settle` is added a second time as "name_sum", with the row sum
    as its statistic."""
    for name, kernel in kernels.items():
        KERNELS[name] = kernel
        if kernel.settle is None:
            KERNELS[f"{name}_sum"] = kernel._replace(settle=sum_settle, plain_sum=True)


def kernel_of(rule):
    """The Kernel of a rule by name, which may end in its power, as in "tra:3.0"."""
    name, _, power = rule.partition(":")
    return KERNELS[name]._replace(power=float(power)) if power else KERNELS[name]


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
    series = e * (1 - e * (0.5 - e * (1 / 3 - e * 0.25)))
    return tl.where(e < 0.015625, series, tl.log2(1 + e) * LN2)


@jit
def logistic(s):
    # torch.sigmoid(s)            (s already has the factor log2 e; the exponential never overflows)
    e = tl.exp2(-tl.abs(s))
    return tl.where(s > 0, 1.0, e) / (1 + e)


# ---------------------------------------------------------------------------- what the kernels read

# A tensor (B, heads, T, width) or (B, heads, T) as one argument of a kernel: a pointer and the
# strides of its batches, heads and rows. The stride along the width is 1
Matrix = namedtuple("Matrix", "at batch head row")
# One head of a Matrix: a 64-bit pointer to its first row, and the stride of its rows. Inside a head
# 32-bit offsets suffice
HeadMatrix = namedtuple("HeadMatrix", "at row")


class Inputs(NamedTuple):
    """What every kernel reads. A None argument is removed at compile time."""

    q: Matrix  # (B, H, T, D)
    k: Matrix  # (B, H/GK, T, D): GK query heads share one key head
    v: Matrix  # (B, Hv, T, E): GV heads of the output share one value head
    t: Any  # Matrix (B, H, T) float32: the row input, or None
    table: Any  # (H, W) float32, added to the score at distance i - j < W, or None
    tail: Any  # (H,) float32, added to the score at all other distances, or None
    slope: Any  # (H,) float32: slope (i - j) is added to the score, or None
    mix: Any  # Matrix (B, H/2, T) float32, or None: heads 2h, 2h + 1 are views, weighted 1, -mix
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


class Head(NamedTuple):
    """One of the H heads."""

    batch: Any
    number: Any  # among the H heads
    out: Any  # number of its output, which two views share
    rows: Any  # offset of its rows in a tensor (B, H, T)
    q: HeadMatrix  # (T, D)
    k: HeadMatrix  # (T, D)
    v: HeadMatrix  # (T, E)
    tail: Any
    slope: Any


# A tile of rows of one head: the head, q (BM, DP) and t (BM,). A program handles one or two views
View = namedtuple("View", "head q t")

# --------------------------------------------------------------------- which tiles a program visits
# The triangle of tiles. A program of `forward` or `backward_rows` walks along one row of it, a
# program of `backward_keys` down one column:
#
#     without a window          with a window and first keys
#
#     rows   M                  rows   M                #  FULL: no mask is needed, and no key lies
#            # M                       M M                 within the distance table
#            # # M                     M # M            M  MASKED: on the diagonal, at the edge of
#            # # # M                   M M # M             the window, or among the first keys
#            # # # # M                 M . M # M        .  skipped
#            keys                      keys
#
# Between FULL and the diagonal lie TABLE tiles: they need no mask, but have keys within the table.
# `visible_in_tile` is the mask of one tile; `key_tiles` and `row_tiles` say which tiles are
# visible. Packed documents bound a row's keys from below, as a window does.

FULL = tl.constexpr(0)
TABLE = tl.constexpr(1)
MASKED = tl.constexpr(2)

# Tiles that begin at start, start + size, .. and before end
Range = namedtuple("Range", "start end")


class Tiles(NamedTuple):
    """The tiles of keys that a tile of rows sees, or the tiles of rows that see a tile of keys.

    In the order of tokens, masked_first is followed by masked_before, the full and table tiles, and
    masked_after. Only after masked_first can there be a gap."""

    full: Range
    table: Range
    masked_first: Range  # the first keys; no rows
    masked_before: Range  # of keys, the window's edge; of rows, the diagonal
    masked_after: Range  # of keys, the diagonal; of rows, the window's edge


@jit
def start_of(i, inputs, head):
    """The first key of the documents of rows i, whose places may lie before 0 or beyond T."""
    if inputs.starts is None:
        return 0
    else:
        i = tl.minimum(tl.maximum(i, 0), inputs.T - 1)
        return tl.load(inputs.starts + head.batch * inputs.T + i)  # as i


@jit
def visible_in_tile(i, j, inputs, head):
    start = start_of(i, inputs, head)
    seen = j <= i
    if inputs.starts is not None:
        seen &= start <= j
    if inputs.window is not None:
        seen &= (i - j < inputs.window) | (j - start < inputs.first)
    return seen


@jit
def key_tiles(i, inputs, head, kernel: tl.constexpr):
    """The Tiles of keys that rows i .. i+BM-1 see."""
    end = tl.minimum(i + kernel.BM, inputs.T)
    last_start = start_of(end - 1, inputs, head)  # of the last row's document
    start = start_of(i, inputs, head)  # of the first row's document

    # From left to right, all multiples of BN but for end:
    #
    #   start .. first_end .. window_start .. unmasked_start .. table_start .. diagonal_start .. end
    #     first keys | skipped | masked before |     full      |     table     |  masked after |
    #
    # start: the first row's document. window_start: its window, or without one its document.
    # unmasked_start: from here on, keys lie in the windows of all rows
    window_start = start // kernel.BN * kernel.BN
    unmasked_start = tl.cdiv(last_start, kernel.BN) * kernel.BN
    masked_first = Range(window_start, window_start)
    if inputs.window is not None:
        tiles_end = tl.cdiv(end, kernel.BN) * kernel.BN
        first_end = tl.minimum(tl.cdiv(start + inputs.first, kernel.BN) * kernel.BN, tiles_end)
        if inputs.starts is not None:
            first_end = tl.where(inputs.first > 0, first_end, window_start)
        masked_first = Range(window_start, first_end)
        first_seen = tl.maximum(i + 1 - inputs.window, 0)  # by the first row
        window_start = tl.maximum(first_seen // kernel.BN * kernel.BN, first_end)
        seen_by_all = tl.maximum(i + kernel.BM - inputs.window, last_start)
        unmasked_start = tl.cdiv(seen_by_all, kernel.BN) * kernel.BN
        unmasked_start = tl.minimum(tl.maximum(unmasked_start, window_start), tiles_end)

    diagonal_start = unmasked_start
    if inputs.sets is None:  # with sets, all tiles are masked
        diagonal_start = tl.maximum(unmasked_start, (i + 1) // kernel.BN * kernel.BN)
    table_start = tl.maximum(i + 1 - inputs.W, 0) // kernel.BN * kernel.BN
    table_start = tl.maximum(unmasked_start, tl.minimum(diagonal_start, table_start))

    full = Range(unmasked_start, table_start)
    table = Range(table_start, diagonal_start)
    masked_before = Range(window_start, unmasked_start)
    masked_after = Range(diagonal_start, end)
    return Tiles(full, table, masked_first, masked_before, masked_after)


@jit
def row_tiles(j, inputs, head, kernel: tl.constexpr):
    """The Tiles of rows that see keys j .. j+BN-1."""
    last_key = tl.minimum(j + kernel.BN, inputs.T) - 1
    # the end of the rows that see any of the keys, and of those that see all. An incomplete last
    # tile needs a mask
    end = inputs.T
    full_end = inputs.T // kernel.BM * kernel.BM
    if inputs.starts is not None:
        ends = inputs.ends + head.batch * inputs.T
        end = tl.load(ends + last_key)  # ()
        full_end = tl.minimum(full_end, tl.load(ends + j) // kernel.BM * kernel.BM)  # ()
    if inputs.window is not None:
        # all later rows of the document see its first keys
        if tl.maximum(j - start_of(last_key, inputs, head), 0) >= inputs.first:
            end = tl.minimum(end, j + kernel.BN - 1 + inputs.window)
        full_end = tl.minimum(full_end, (j + inputs.window) // kernel.BM * kernel.BM)

    diagonal_start = j // kernel.BM * kernel.BM
    end_tile = tl.minimum(tl.cdiv(j + kernel.BN - 1, kernel.BM), tl.cdiv(end, kernel.BM))
    diagonal_end = end_tile * kernel.BM
    # with sets, all tiles are masked
    full_end = diagonal_end if inputs.sets is not None else tl.maximum(diagonal_end, full_end)
    table_end = tl.minimum(tl.cdiv(j + kernel.BN - 1 + inputs.W, kernel.BM) * kernel.BM, full_end)

    full = Range(table_end, full_end)
    table = Range(diagonal_end, table_end)
    masked_first = Range(0, 0)
    masked_before = Range(diagonal_start, diagonal_end)
    masked_after = Range(full_end, end)
    return Tiles(full, table, masked_first, masked_before, masked_after)


@jit
def walk(
    state,  # what the walk sums up
    step: tl.constexpr,
    my_side,  # what step needs in every tile: the program's own rows or keys
    tiles,
    inputs,
    kernel: tl.constexpr,
    size: tl.constexpr,
):
    """state = step(state, ..) for every visible tile: first the many full ones, then those within
    the table, then the masked ones."""
    for start in tl.range(tiles.full.start, tiles.full.end, size):
        state = step(state, my_side, start, inputs, kernel, FULL)
    if inputs.table is not None:
        for start in tl.range(tiles.table.start, tiles.table.end, size):
            state = step(state, my_side, start, inputs, kernel, TABLE)
    # One loop over the three masked ranges: a loop for each would triple its code. n counts as if
    # they had no gaps, neither the tiles skipped after the first keys nor the unmasked tiles
    first, before, after = tiles.masked_first, tiles.masked_before, tiles.masked_after
    skipped = before.start - first.end
    unmasked = after.start - before.end
    # num_stages=1, because pipelining costs registers
    for n in tl.range(first.start, after.end - unmasked - skipped, size, num_stages=1):
        start = tl.where(n < first.end, n, n + skipped)
        start = tl.where(start < before.end, start, start + unmasked)
        state = step(state, my_side, start, inputs, kernel, MASKED)
    return state


# In the backward pass, a walk may visit live tiles only: those with a weight that is not 0. `live`
# is then the list that in_order() makes: n + 1 counts, how many of the first 0, 1, .., n tiles are
# alive, and the numbers of the live tiles.


@jit
def live_range(tiles, live, size: tl.constexpr):
    """A Range as places in the list, times the tile's size."""
    start = tl.load(live + tl.cdiv(tiles.start, size)) * size  # ()
    end = tl.load(live + tl.cdiv(tiles.end, size)) * size  # ()
    return Range(start, end)


@jit
def live_tiles(tiles, live, size: tl.constexpr):
    """All ranges of Tiles as places in the list."""
    return Tiles(
        live_range(tiles.full, live, size),
        live_range(tiles.table, live, size),
        live_range(tiles.masked_first, live, size),
        live_range(tiles.masked_before, live, size),
        live_range(tiles.masked_after, live, size),
    )


@jit
def start_at(place, live, inputs, kernel: tl.constexpr, size: tl.constexpr):
    """Where the tile at this place begins: the place itself, if the walk visits all tiles."""
    start = place
    if kernel.skip:
        start = tl.load(live + tl.cdiv(inputs.T, size) + 1 + place // size) * size  # ()
    return start


# ------------------------------------------------------------------------------ loading and scoring


@jit
def begin(matrix, batch, head):
    """One head of a matrix. batch and head are 64-bit numbers: the product may exceed 2^31."""
    return HeadMatrix(matrix.at + batch * matrix.batch + head * matrix.head, matrix.row)


@jit
def head_of(inputs, number):
    """The head number = batch index * H + head index."""
    batch = (number // inputs.H).to(tl.int64)
    h = (number % inputs.H).to(tl.int64)
    out = h if inputs.mix is None else h // 2
    rows = number.to(tl.int64) * inputs.T
    q = begin(inputs.q, batch, h)
    k = begin(inputs.k, batch, h // inputs.GK)
    v = begin(inputs.v, batch, out // inputs.GV)
    tail = tl.load(inputs.tail + h) if inputs.tail is not None else 0.0  # ()
    slope = tl.load(inputs.slope + h) if inputs.slope is not None else 0.0  # ()
    return Head(batch, h, out, rows, q, k, v, tail, slope)


@jit
def second_view(inputs, head):
    """The head of the second view, which follows that of the first."""
    return head_of(inputs, head.batch * inputs.H + head.number + 1)


@jit
def my_tile(inputs, size: tl.constexpr, REVERSED: tl.constexpr, G=1, n=0):
    """This program's tile: its number among the tiles of all heads, where it starts, and its head,
    or the n-th of its G heads. Programs that follow each other share a head, so they find k and v
    in the cache. REVERSED: the last tile first. A program computes both views, if there are two:
    its head is that of the first."""
    tiles = tl.cdiv(inputs.T, size)
    tile = tl.program_id(0) % tiles
    if REVERSED:
        tile = tiles - 1 - tile
    out = tl.program_id(0) // tiles * G + n
    head = head_of(inputs, out if inputs.mix is None else 2 * out)
    return (out * tiles + tile).to(tl.int64), tile * size, head


@jit
def load(matrix, i, inputs, D: tl.constexpr, DP: tl.constexpr, EDGE: tl.constexpr):
    """Rows i of one head (T, D), zero in the padding. EDGE: some rows may lie beyond T."""
    d = tl.arange(0, DP)
    at = matrix.at + (i[:, None] * matrix.row + d[None, :])
    if EDGE or D < DP:
        return tl.load(at, mask=(i < inputs.T)[:, None] & (d < D)[None, :], other=0.0)  # (rows, DP)
    else:
        return tl.load(at)  # (rows, DP). Without a mask, loads stay wide and asynchronous


@jit
def save(matrix, value, i, inputs, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    at = matrix.at + i[:, None] * matrix.row + d[None, :]
    mask = (i < inputs.T)[:, None] & (d < D)[None, :]
    tl.store(at, value.to(matrix.at.dtype.element_ty), mask=mask)


@jit
def load_t(inputs, head, i, kernel: tl.constexpr):
    """t of rows i. Rows beyond T repeat the last one: with t = 0 a rule might give NaN."""
    t = tl.zeros((kernel.BM,), tl.float32)
    if inputs.t is not None:
        rows = begin(inputs.t, head.batch, head.number)
        t = tl.load(rows.at + tl.minimum(i, inputs.T - 1) * rows.row)  # (BM,)
    return t


@jit
def load_mix(inputs, head, i):
    """lambda of rows i: the factor on the second view, which is subtracted."""
    rows = begin(inputs.mix, head.batch, head.out)
    return tl.load(rows.at + tl.minimum(i, inputs.T - 1) * rows.row)  # (rows,)


@jit
def load_view(inputs, head, i, kernel: tl.constexpr):
    q = load(head.q, i, inputs, kernel.D, kernel.DP, True)  # (BM, DP)
    return View(head, q, load_t(inputs, head, i, kernel))


@jit
def my_rows(inputs, kernel: tl.constexpr):
    """This program's tile of rows: its number, the tiles of keys that it sees, its rows i, and its
    view. Then the second view and its factor, or 0 if there is none."""
    number, start, head = my_tile(inputs, kernel.BM, True)  # longest rows first: balances the load
    i = start + tl.arange(0, kernel.BM)
    viewb, mix = 0, 0
    if inputs.mix is not None:
        viewb = load_view(inputs, second_view(inputs, head), i, kernel)
        mix = load_mix(inputs, head, i)  # (BM,)
    view = load_view(inputs, head, i, kernel)
    return number, key_tiles(start, inputs, head, kernel), i, view, viewb, mix


# Tensor cores would round float32. Without them each thread holds whole rows of a and whole columns
# of b. If these are long, they do not fit into its registers, so they are cut into pieces.
LONG = tl.constexpr(64)
PIECE = tl.constexpr(32)


@jit
def times(a, b):
    """a @ b in float32, of operands in the dtype of b."""
    if b.dtype == tl.float32 and a.shape[1] > LONG:
        pieces: tl.constexpr = a.shape[1] // PIECE
        a = tl.reshape(a, (a.shape[0], pieces, PIECE))
        a = tl.permute(a, (1, 0, 2))  # (pieces, rows, PIECE)
        b = tl.reshape(b, (pieces, PIECE, b.shape[1]))  # (pieces, PIECE, columns)
        return tl.sum(tl.dot(a, b, input_precision="ieee"), 0)
    else:
        return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@jit
def tile_scores(
    q,  # (BM, DP)
    k,  # (BN, DP)
    i,  # (BM, 1)
    j,  # (1, BN)
    t,  # (BM, 1)
    inputs,
    head,
    kernel: tl.constexpr,
    KIND: tl.constexpr,
):
    """Returns q @ k.T (BM, BN), the scores in the rule's unit, the lifted scores that weigh takes,
    and the mask.

    The tile may be transposed: with k as q, q as k, rows i and t and a column j, the results are
    (BN, BM)."""
    # s = scale * q @ k.T + where(i - j < W, table[i - j], tail) + slope * (i - j)  (times unit)
    raw = times(q, tl.trans(k))
    s = raw * (inputs.scale * kernel.unit)
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
    elif inputs.tail is not None:  # full tiles lie beyond the table
        s += head.tail
    if inputs.slope is not None:
        s += head.slope * (i.to(tl.float32) - j.to(tl.float32))
    lifted = s if kernel.lift is None else kernel.lift(s, t, kernel.power)
    return raw, s, lifted, seen


# ------------------------------------------------------------------------------------------ forward


@jit
def tile_weights(
    r,  # (BM,)
    view,
    i,  # (BM,)
    start,
    inputs,
    kernel: tl.constexpr,
    KIND: tl.constexpr,
    RUNNING: tl.constexpr,  # r is the maximum so far, which may rise
):
    """w, z, u (BM, BN) and r of one tile, and the factor on earlier sums."""
    head = view.head
    j = start + tl.arange(0, kernel.BN)
    k = load(head.k, j, inputs, kernel.D, kernel.DP, KIND == MASKED)  # (BN, DP)
    t = view.t[:, None]
    raw, _, s, seen = tile_scores(view.q, k, i[:, None], j[None, :], t, inputs, head, kernel, KIND)
    rescale = 1.0
    if RUNNING:
        # without biases s is a positive multiple of raw: so multiply the maximum of a row, not each
        # score (s - r then has its multiplication fused)
        factor = inputs.scale * kernel.unit
        biased = inputs.table is not None or inputs.tail is not None or inputs.slope is not None
        if biased or kernel.lift is not None:
            raw, factor = s, 1.0
        if KIND == MASKED:
            raw = tl.where(seen, raw, float("-inf"))
        top = tl.maximum(r, tl.max(raw, 1) * factor)
        rescale = tl.exp2(r - top)
        r = top
    w, z, u = kernel.weigh(s, r[:, None], t, kernel.power)
    if KIND == MASKED:  # the mask acts on weights, never on scores: these stay finite
        w = tl.where(seen, w, 0.0)
        z = tl.where(seen, z, 0.0)
        u = tl.where(seen, u, 0.0)
    return w, z, u, r, rescale


@jit
def add_to_sums(state, my_side, start, inputs, kernel: tl.constexpr, KIND: tl.constexpr):
    """One tile of a pass for the statistic alone: at a fixed r or, if that is None, at the maximum
    so far."""
    r, sum_w, sum_z = state
    i, view, fixed = my_side
    w, z, _, r, rescale = tile_weights(r, view, i, start, inputs, kernel, KIND, fixed is None)
    return r, sum_w * rescale + tl.sum(w, 1), sum_z * rescale + tl.sum(z, 1)


@jit
def statistic(r, i, view, tiles, inputs, kernel: tl.constexpr):
    """The statistic r of rows, before the output pass, for a rule with passes > 0. The first pass
    gives an r. Each later pass sums up at this r and improves it by a step of Newton's method."""
    zero = tl.zeros((kernel.BM,), tl.float32)
    state = (r, zero, zero)
    r, sum_w, sum_z = walk(state, add_to_sums, (i, view, None), tiles, inputs, kernel, kernel.BN)
    r = kernel.settle(r, view.t, kernel.power, sum_w, sum_z, True)
    if kernel.passes > 1:
        passes_left = kernel.passes - 1
        while passes_left > 0:  # until no row's sum changes by 1e-5
            state, at_r = (r, zero, zero), (i, view, r)
            _, sum_w, sum_z = walk(state, add_to_sums, at_r, tiles, inputs, kernel, kernel.BN)
            refined = kernel.settle(r, view.t, kernel.power, sum_w, sum_z, False)
            passes_left = tl.where(tl.max((refined - r) * sum_z, 0) > 1e-5, passes_left - 1, 0)
            r = refined
    return r


@jit
def add_to_output(state, my_side, start, inputs, kernel: tl.constexpr, KIND: tl.constexpr):
    """One tile of the output pass."""
    r, sum_w, sum_z, o, U = state
    i, view, viewb, mix, alive = my_side
    w, z, u, r, rescale = tile_weights(r, view, i, start, inputs, kernel, KIND, kernel.online)
    largest = w
    if inputs.mix is not None:
        wb, _, _, _, _ = tile_weights(r, viewb, i, start, inputs, kernel, KIND, False)
        largest = tl.maximum(w, wb)  # a weight of either view counts
        w -= mix[:, None] * wb
    if kernel.skip:  # is the tile alive? Rows beyond T do not count
        largest = tl.max(tl.where(i < inputs.T, tl.max(largest, 1), 0.0), 0)
        tl.store(alive + start // kernel.BN, (largest > 0).to(tl.int8))
    if kernel.online:
        o *= rescale[:, None]  # rescale to the larger maximum
    j = start + tl.arange(0, kernel.BN)
    v = load(view.head.v, j, inputs, kernel.E, kernel.EP, KIND == MASKED)  # (BN, EP)
    o = tl.dot(w.to(v.dtype), v, o, input_precision="ieee")  # (BM, EP)
    if kernel.save_u:
        U = tl.dot(u.to(v.dtype), v, U, input_precision="ieee")  # (BM, EP)
    return r, sum_w * rescale + tl.sum(w, 1), sum_z * rescale + tl.sum(z, 1), o, U


@jit
def forward(inputs, O, U, R, Alive, kernel: tl.constexpr):
    """One tile of rows: o, the statistic r in natural units, U where it is not o, and which tiles
    are alive."""
    number, tiles, i, view, viewb, mix = my_rows(inputs, kernel)
    head = view.head

    # the statistic, where the output needs it; then the output
    r = tl.full((kernel.BM,), kernel.floor, tl.float32)
    if kernel.passes:
        r = statistic(r, i, view, tiles, inputs, kernel)
    zero = tl.zeros((kernel.BM,), tl.float32)
    empty = tl.zeros((kernel.BM, kernel.EP), tl.float32)
    # the compiler removes the sums and U where a rule does not use them
    state = (r, zero, zero, empty, empty)
    alive = Alive + number * tl.cdiv(inputs.T, kernel.BN)  # of (B, heads, row tiles, key tiles)
    my_side = (i, view, viewb, mix, alive)
    top, sum_w, sum_z, o, u = walk(state, add_to_output, my_side, tiles, inputs, kernel, kernel.BN)
    if kernel.settle is not None and not kernel.passes:  # statistic and output in one pass
        r = kernel.settle(top, view.t, kernel.power, sum_w, sum_z, True)
    if kernel.online:
        o *= tl.exp2(top - r)[:, None]  # rescale from the running maximum to r
    if kernel.passes > 1:
        o /= tl.maximum(sum_w, 1e-30)[:, None]  # r is rounded: sums may miss 1 by 1e-4

    # save
    save(begin(O, head.batch, head.out), o, i, inputs, kernel.E, kernel.EP)
    if kernel.save_u:
        u /= tl.maximum(sum_z, 1e-30)[:, None]
        save(begin(U, head.batch, head.out), u, i, inputs, kernel.E, kernel.EP)
    if kernel.settle is not None:
        natural = r if kernel.plain_sum else r * (1 / kernel.unit)
        tl.store(R + head.rows + i, natural, mask=i < inputs.T)


# ----------------------------------------------------------------------------------------- backward


@jit
def load_statistic(inputs, head, R, Delta, i, kernel: tl.constexpr):
    """r in the rule's unit and delta of rows i (dr, if DR is passed as Delta). Rows beyond T repeat
    the last one, so that every rule stays finite."""
    r = tl.zeros((kernel.BM,), tl.float32)
    delta = tl.zeros((kernel.BM,), tl.float32)
    at = head.rows + tl.minimum(i, inputs.T - 1)
    if kernel.settle is not None:
        delta = tl.load(Delta + at)  # (BM,)
        if not kernel.plain_sum:
            r = tl.load(R + at) * kernel.unit  # (BM,)
    return r, delta


@jit
def score_gradients(
    q,  # (BM, DP)
    k,  # (BN, DP)
    g,  # (BM, BN)
    i,  # (BM, 1)
    j,  # (1, BN)
    r,  # (BM, 1)
    t,  # (BM, 1)
    delta,  # (BM, 1)
    inputs,
    head,
    kernel: tl.constexpr,
    KIND: tl.constexpr,
):
    """Weights, ds and the summands of dt of one tile (BM, BN), which may be transposed as in
    tile_scores()."""
    _, s, lifted, seen = tile_scores(q, k, i, j, t, inputs, head, kernel, KIND)
    w, _, _ = kernel.weigh(lifted, r, t, kernel.power)
    ds, dt = kernel.slope(s, r, t, kernel.power, g, delta)
    if KIND == MASKED:
        w = tl.where(seen, w, 0.0)
        ds = tl.where(seen, ds, 0.0)
        dt = tl.where(seen, dt, 0.0)
    return w, ds, dt


@jit
def gradients_of_rows(
    view,
    k,  # (BN, DP)
    g,  # (BM, BN)
    i,  # (BM,)
    j,  # (BN,)
    r,  # (BM,)
    delta,  # (BM,)
    inputs,
    kernel: tl.constexpr,
    KIND: tl.constexpr,
):
    """score_gradients() of one view of a tile of rows."""
    i, j, r, t, delta = i[:, None], j[None, :], r[:, None], view.t[:, None], delta[:, None]
    return score_gradients(view.q, k, g, i, j, r, t, delta, inputs, view.head, kernel, KIND)


@jit
def add_to_delta(state, my_side, place, inputs, kernel: tl.constexpr, KIND: tl.constexpr):
    """Add one tile to the sums of w and of w (g - delta), which correct a first delta = do . o - dr
    for rounding.

    If one weight dominates a row, g - delta of its key is almost 0. The rounding of r and o is then
    large relative to it, and slope amplifies it. So backward_rows adds sum w (g - delta) / sum w
    - dr to delta, which becomes the mean of g, minus dr."""
    sum_w, sum_wg = state
    i, view, _, _, do, r, delta, live = my_side
    j = start_at(place, live, inputs, kernel, kernel.BN) + tl.arange(0, kernel.BN)
    v = load(view.head.v, j, inputs, kernel.E, kernel.EP, KIND == MASKED)  # (BN, EP)
    g = times(do, tl.trans(v)) - delta[:, None]  # (BM, BN)
    k = load(view.head.k, j, inputs, kernel.D, kernel.DP, KIND == MASKED)  # (BN, DP)
    w, _, _ = gradients_of_rows(view, k, g, i, j, r, delta, inputs, kernel, KIND)
    return sum_w + tl.sum(w, 1), sum_wg + tl.sum(w * g, 1)


@jit
def add_to_view(
    state,
    view,
    k,  # (BN, DP)
    g,  # (BM, BN)
    i,  # (BM,)
    j,  # (BN,)
    r,  # (BM,)
    delta,  # (BM,)
    inputs,
    kernel: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add one tile of keys to the gradients of a tile of rows, in one view. Returns the tile's
    weights (BM, BN) as well."""
    dq, dt, dtail, dslope = state
    w, ds, dt_ij = gradients_of_rows(view, k, g, i, j, r, delta, inputs, kernel, KIND)
    dt += tl.sum(dt_ij, 1)
    i, j = i[:, None], j[None, :]
    if inputs.slope is not None:
        dslope += tl.sum(ds * (i.to(tl.float32) - j.to(tl.float32)), 1)
    if inputs.tail is not None:
        dtail += tl.sum(tl.where(i - j < inputs.W, 0.0, ds) if KIND != FULL else ds, 1)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")  # (BM, DP)
    return (dq, dt, dtail, dslope), w


@jit
def add_to_rows(state, my_side, place, inputs, kernel: tl.constexpr, KIND: tl.constexpr):
    """Add one tile of keys to the gradients of a tile of rows. k is loaded after v is used, to save
    registers."""
    grads, gradsb, dmix = state
    i, view, viewb, mix, do, r, delta, live = my_side
    j = start_at(place, live, inputs, kernel, kernel.BN) + tl.arange(0, kernel.BN)
    v = load(view.head.v, j, inputs, kernel.E, kernel.EP, KIND == MASKED)  # (BN, EP)
    g = times(do, tl.trans(v))  # (BM, BN)
    k = load(view.head.k, j, inputs, kernel.D, kernel.DP, KIND == MASKED)  # (BN, DP)
    grads, _ = add_to_view(grads, view, k, g, i, j, r, delta, inputs, kernel, KIND)
    if inputs.mix is not None:
        kb = load(viewb.head.k, j, inputs, kernel.D, kernel.DP, KIND == MASKED)  # (BN, DP)
        gb = -mix[:, None] * g
        gradsb, wb = add_to_view(gradsb, viewb, kb, gb, i, j, r, delta, inputs, kernel, KIND)
        dmix -= tl.sum(wb * g, 1)  # (BM,)
    return grads, gradsb, dmix


@jit
def save_rows(
    state,
    inputs,
    head,
    DQ,  # Matrix (B, H, T, D)
    DT,  # (B, H, T)
    DTail,  # (B, H, T)
    DSlope,  # (B, H, T)
    i,  # (BM,)
    kernel: tl.constexpr,
):
    """Save the gradients of one view: of q, and row by row (B, H, T) of t, tail and slope."""
    dq, dt, dtail, dslope = state
    save(begin(DQ, head.batch, head.number), dq * inputs.scale, i, inputs, kernel.D, kernel.DP)
    if inputs.t is not None:
        tl.store(DT + head.rows + i, dt, mask=i < inputs.T)
    if inputs.tail is not None:
        tl.store(DTail + head.rows + i, dtail, mask=i < inputs.T)
    if inputs.slope is not None:
        tl.store(DSlope + head.rows + i, dslope, mask=i < inputs.T)


@jit
def backward_rows(
    inputs,
    U,  # Matrix (B, heads, T, E)
    R,  # (B, H, T)
    DO,  # Matrix (B, heads, T, E)
    DR,  # (B, H, T)
    DQ,  # Matrix (B, H, T, D)
    DT,  # (B, H, T)
    DTail,  # (B, H, T)
    DSlope,  # (B, H, T)
    DMix,  # (B, H/2, T)
    Delta,  # (B, H, T)
    Live,  # (B, heads, row tiles, 2 key tiles + 1)
    kernel: tl.constexpr,
):
    """One tile of rows: dq, the gradients of t, tail, slope and mix row by row, and delta for the
    next kernels."""
    number, tiles, i, view, viewb, mix = my_rows(inputs, kernel)
    head = view.head
    do = load(begin(DO, head.batch, head.out), i, inputs, kernel.E, kernel.EP, True)  # (BM, EP)
    r, dr = load_statistic(inputs, head, R, DR, i, kernel)  # (BM,) each
    live = Live
    if kernel.skip:
        live += number * (2 * tl.cdiv(inputs.T, kernel.BN) + 1)
        tiles = live_tiles(tiles, live, kernel.BN)
    zero = tl.zeros((kernel.BM,), tl.float32)

    # delta = (do * U).sum(-1) - dr
    delta = -dr
    if kernel.settle is not None and not kernel.plain_sum:  # for a plain sum, only dr counts
        at = begin(U, head.batch, head.out)
        u = load(at, i, inputs, kernel.E, kernel.EP, True)  # (BM, EP)
        delta += tl.sum(do.to(tl.float32) * u.to(tl.float32), 1)
    if kernel.sum_delta:
        my_side = (i, view, viewb, mix, do, r, delta, live)
        state = (zero, zero)
        sum_w, sum_wg = walk(state, add_to_delta, my_side, tiles, inputs, kernel, kernel.BN)
        delta += sum_wg / tl.maximum(sum_w, 1e-30) - dr  # sum_w of an empty row is 0
    if kernel.settle is not None:
        tl.store(Delta + head.rows + i, delta, mask=i < inputs.T)

    # the gradients
    my_side = (i, view, viewb, mix, do, r, delta, live)
    none = (tl.zeros((kernel.BM, kernel.DP), tl.float32), zero, zero, zero)
    state = (none, none, zero)
    grads, gradsb, dmix = walk(state, add_to_rows, my_side, tiles, inputs, kernel, kernel.BN)
    save_rows(grads, inputs, head, DQ, DT, DTail, DSlope, i, kernel)
    if inputs.mix is not None:
        save_rows(gradsb, inputs, viewb.head, DQ, DT, DTail, DSlope, i, kernel)
        tl.store(DMix + head.rows // 2 + i, dmix, mask=i < inputs.T)


@jit
def add_to_keys(state, my_side, place, inputs, kernel: tl.constexpr, KIND: tl.constexpr):
    """Add one tile of rows to the gradients of a tile of keys. Tiles are transposed: (keys,
    rows)."""
    dk, dv, dkb = state
    j, head, k, headb, kb, v, DO, R, Delta, live = my_side
    i = start_at(place, live, inputs, kernel, kernel.BM) + tl.arange(0, kernel.BM)
    q = load(head.q, i, inputs, kernel.D, kernel.DP, KIND == MASKED)  # (BM, DP)
    do = load(DO, i, inputs, kernel.E, kernel.EP, KIND == MASKED)  # (BM, EP)
    g = times(v, tl.trans(do))  # (BN, BM)
    r, delta = load_statistic(inputs, head, R, Delta, i, kernel)  # (BM,) each
    t = load_t(inputs, head, i, kernel)  # (BM,)
    if inputs.mix is not None:
        mix = load_mix(inputs, head, i)[None, :]  # (1, BM)
        tb = load_t(inputs, headb, i, kernel)[None, :]  # (1, BM)
        qb = load(headb.q, i, inputs, kernel.D, kernel.DP, KIND == MASKED)  # (BM, DP)
    if KIND == MASKED:
        i = tl.where(i < inputs.T, i, -1)  # rows beyond T see no key
    i, j, r, t, delta = i[None, :], j[:, None], r[None, :], t[None, :], delta[None, :]
    w, ds, _ = score_gradients(k, q, g, i, j, r, t, delta, inputs, head, kernel, KIND)
    if inputs.mix is not None:
        gb = -mix * g
        wb, dsb, _ = score_gradients(kb, qb, gb, i, j, r, tb, delta, inputs, headb, kernel, KIND)
        w -= mix * wb
        dkb = tl.dot(dsb.to(q.dtype), qb, dkb, input_precision="ieee")  # dk of the second view
    dv = tl.dot(w.to(do.dtype), do, dv, input_precision="ieee")  # dv = w.T @ do
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")  # dk = ds.T @ q
    return dk, dv, dkb


@jit
def backward_keys(
    inputs,
    R,  # (B, H, T)
    DO,  # Matrix (B, heads, T, E)
    Delta,  # (B, H, T)
    DK,  # Matrix (B, H/G, T, D)
    DV,  # Matrix (B, heads/G, T, E)
    Live,  # (B, heads, key tiles, 2 row tiles + 1)
    kernel: tl.constexpr,
):
    """One tile of keys: dk and dv, summed over the G query heads that share it."""
    _, start, head = my_tile(inputs, kernel.BN, False, inputs.G)
    tiles = row_tiles(start, inputs, head, kernel)
    j = start + tl.arange(0, kernel.BN)
    k = load(head.k, j, inputs, kernel.D, kernel.DP, True)  # (BN, DP)
    v = load(head.v, j, inputs, kernel.E, kernel.EP, True)  # (BN, EP)
    headb, kb = 0, 0
    if inputs.mix is not None:
        headb = second_view(inputs, head)
        kb = load(headb.k, j, inputs, kernel.D, kernel.DP, True)  # (BN, DP)

    # the gradients
    dk = tl.zeros((kernel.BN, kernel.DP), tl.float32)
    dv = tl.zeros((kernel.BN, kernel.EP), tl.float32)
    dkb = dk
    for n in tl.range(0, inputs.G, disable_licm=True):  # hoisting would cost registers
        number, start, one = my_tile(inputs, kernel.BN, False, inputs.G, n)
        live, visited = Live, tiles
        if kernel.skip:
            live += number * (2 * tl.cdiv(inputs.T, kernel.BM) + 1)
            visited = live_tiles(tiles, live, kernel.BM)
        do = begin(DO, one.batch, one.out)
        my_side = (j, one, k, headb, kb, v, do, R, Delta, live)
        state = (dk, dv, dkb)
        dk, dv, dkb = walk(state, add_to_keys, my_side, visited, inputs, kernel, kernel.BM)

    # save
    dk_of_head = begin(DK, head.batch, head.number // inputs.G)
    save(dk_of_head, dk * inputs.scale, j, inputs, kernel.D, kernel.DP)
    save(begin(DV, head.batch, head.out // inputs.G), dv, j, inputs, kernel.E, kernel.EP)
    if inputs.mix is not None:
        dk_of_head = begin(DK, head.batch, headb.number)
        save(dk_of_head, dkb * inputs.scale, j, inputs, kernel.D, kernel.DP)


@jit
def backward_table(
    inputs,
    R,  # (B, H, T)
    DO,  # Matrix (B, heads, T, E)
    Delta,  # (B, H, T)
    DTable,  # (B, H, diagonals, BM, BM)
    diagonals,
    kernel: tl.constexpr,
):
    """The table's gradient. In all square tiles (m, m - b) of block diagonal b, equal entries have
    equal distances. So one program adds these tiles up into one, which table_of_tiles() reduces.
    Dead tiles are visited as well: a table covers the distances at which keys matter, so few are
    dead."""
    b = tl.program_id(0) % diagonals
    head = head_of(inputs, tl.program_id(0) // diagonals)
    row = tl.arange(0, kernel.BM)
    total = tl.zeros((kernel.BM, kernel.BM), tl.float32)
    for start in tl.range(b * kernel.BM, inputs.T, kernel.BM, num_stages=1):
        i = start + row
        j = i - b * kernel.BM
        v = load(head.v, j, inputs, kernel.E, kernel.EP, True)  # (BM, EP)
        do = load(begin(DO, head.batch, head.out), i, inputs, kernel.E, kernel.EP, True)  # (BM, EP)
        g = times(do, tl.trans(v))  # (BM, BM)
        if inputs.mix is not None:  # -mix for the second view
            g *= tl.where(head.number % 2 == 0, 1.0, -load_mix(inputs, head, i))[:, None]
        view = load_view(inputs, head, i, kernel)
        k = load(head.k, j, inputs, kernel.D, kernel.DP, True)  # (BM, DP)
        r, delta = load_statistic(inputs, head, R, Delta, i, kernel)  # (BM,) each
        i = tl.where(i < inputs.T, i, -1)  # rows beyond T see no key
        _, ds, _ = gradients_of_rows(view, k, g, i, j, r, delta, inputs, kernel, MASKED)
        total += ds
    at = DTable + tl.program_id(0).to(tl.int64) * kernel.BM * kernel.BM
    tl.store(at + row[:, None] * kernel.BM + row[None, :], total)


# --------------------------------------------------------------------------------------------- host
# Two operators, forward and backward, which torch.compile can trace. Each allocates its outputs and
# launches its kernels. torch.compile sees the outputs only. The remaining sums over heads, rows and
# diagonals are ordinary PyTorch in `differentiate`.


class Call(NamedTuple):
    """The arguments of both operators. attend() describes them."""

    rule: str  # may end in its power, as in "tra:3.0"
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, Hk, T, D)
    v: Tensor  # (B, Hv, T, E)
    t: Tensor | None  # (B, H, T)
    table: Tensor | None  # (H, W)
    tail: Tensor | None  # (H,)
    slope: Tensor | None  # (H,)
    mix: Tensor | None  # (B, H/2, T)
    sets: Tensor | None  # (B, T)
    starts: Tensor | None  # (B, T)
    scale: float
    window: int
    first: int
    learn: bool  # will there be a backward pass?
    learn_table: bool  # does it need the table's gradient?
    skip: bool
    cpp: bool  # by kernels.cpp, on a CPU

    @property
    def kernel(self):
        """The Kernel of the rule. Without a backward pass it saves neither U nor the map of live
        tiles."""
        kernel = kernel_of(self.rule)
        return kernel._replace(
            save_u=kernel.save_u and self.learn, skip=kernel.skip and self.learn and self.skip
        )

    @property
    def library(self):
        """kernels.cpp with this rule, compiled for one or two views."""
        return in_cpp.library(kernel_of(self.rule), 1 if self.mix is None else 2)

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
    def sharing(self):
        """GK, GV and G of `Inputs`."""
        return {
            "GK": self.q.shape[1] // self.k.shape[1],
            "GV": self.heads // self.v.shape[1],
            "G": self.shared,
        }

    @property
    def has_window(self):
        return 0 < self.window < self.q.shape[2]


# The names of Call's tensors, and the arguments in the language of torch's operators
TENSORS = [name for name, kind in Call.__annotations__.items() if kind in (Tensor, Tensor | None)]
TYPES = {
    str: "str",
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    int: "SymInt",
    bool: "bool",
}
SCHEMA = ", ".join(f"{TYPES[kind]} {name}" for name, kind in Call.__annotations__.items())

# What the backward operator returns, by the name of the argument
Gradients = namedtuple("Gradients", "q k v t table tail slope mix")


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
    cpp=False,
):
    """Causal attention by a rule of KERNELS: output (B, H, T, E), and the row statistic (B, H, T),
    or None without one.

    q (B, H, T, D), k (B, Hk, T, D), v (B, Hv, T, E): Hk and Hv divide H.
    t: the row input, broadcastable to (B, H, T). None: 0.
    table (H, W), tail (H,), slope (H,): the score is scale q.k + slope[h] (i - j), plus
        table[h, i - j] at distances below W and tail[h] beyond.
    window, first: row i sees key j if i - j < window (0: no limit) or j < first.
    row_sum: a rule without `settle` returns the sum of its weights.
    power: replaces the rule's own.
    skip: if the rule allows it, the backward pass skips tiles in which all weights are 0.
    mix: q has two heads, called views, for each of the H/2 heads of the output. The weights are
        those of the first view minus mix times those of the second. Hv divides H/2, mix broadcasts
        to (B, H/2, T), and the rule must have no `settle`.
    sets (B, T) int64: row i sees key j only if they have no bit in common. The output of a row that
        sees no key is 0.
    starts (B, T) int64: packed documents. Row i sees no key before starts[:, i]; `first` counts
        from there.
    cpp: compute on a CPU by kernels.cpp, in float32 whatever the dtype of q, k and v. A NaN in v
        may reach all rows of a block in which one row sees it, and no others. The gradient of a
        bias by distance takes T / 512 rows of T numbers a head.
    Output and statistic are differentiable in q, k, v, t, table, tail, slope and mix, except for a
    statistic that is found by iteration.
    """
    device = q.device.type
    if cpp or torch.is_autocast_enabled(device):
        dtype = torch.float32 if cpp else torch.get_autocast_dtype(device)
        q, k, v = (part.to(dtype) for part in (q, k, v))
    if t is not None and rule in KERNELS:
        rule = KERNELS[rule].with_t or rule
    learn = torch.is_grad_enabled()
    numbers = (scale, window, first, learn, False, skip, cpp)
    call = Call(rule, q, k, v, t, table, tail, slope, mix, sets, starts, *numbers)
    for bad, why in problems(call, row_sum, power):
        if bad:
            raise ValueError(why)

    # the same arguments in the form that the kernels read
    B, H, T, _ = q.shape
    kernel = KERNELS[rule]
    if kernel.takes_t:
        t = along_rows(q.new_zeros(()) if t is None else t, B, H, T)
    if table is not None and not table.shape[1]:
        table = None
    if cpp and any(part is not None for part in (table, tail, slope)):
        table, tail, slope = by_distance(T, table, tail, slope), None, None
    call = call._replace(
        rule=full_name(rule, row_sum, power),
        t=t,
        table=None if table is None else table.float(),
        tail=None if tail is None else tail.float(),
        slope=None if slope is None else slope.float(),
        mix=None if mix is None else along_rows(mix, B, H // 2, T),
        sets=None if sets is None else sets.contiguous(),
        starts=None if starts is None else starts.int().contiguous(),
        scale=float(scale),
        learn=learn and any(isinstance(part, Tensor) and part.requires_grad for part in call),
        learn_table=learn and table is not None and table.requires_grad,
    )
    o, r, *_ = run_forward(*call)
    if kernel.settle is None and not row_sum:
        return o, None
    # slope already includes how w depends on such an r
    return o, r.detach() if kernel.passes > 1 else r


def full_name(rule, row_sum, power):
    """The name of the rule with its row sum and its power, for kernel_of."""
    return rule + ("_sum" if row_sum else "") + ("" if power is None else f":{float(power)}")


def problems(call, row_sum, power):
    """Pairs (condition, error message). Each relies on those before it. PyTorch refuses what does
    not broadcast."""
    rule, q, k, v = call[:4]
    if call.cpp:
        yield q.device.type != "cpu", "kernels.cpp computes on a CPU"
    else:
        yield from problems_anywhere(q, k, v)
    yield not call.scale > 0, f"scale must be positive, not {call.scale}: give q the sign"
    yield rule not in KERNELS, f"no kernel for the rule {rule!r}: choose one of {list(KERNELS)}"
    kernel = KERNELS[rule]
    without_sum = row_sum and rule + "_sum" not in KERNELS
    yield without_sum, f"{rule} has no row sum to return: leave out row_sum"
    without_t = call.t is not None and not kernel.takes_t
    yield without_t, f"{rule} reads no row input: leave out t"
    bad_power = power is not None and not (kernel.takes_power and power >= 1)
    yield bad_power, f"{rule} takes no power {power}: leave it out"
    views = 1 if call.mix is None else 2
    yield (
        views == 2 and (row_sum or kernel.settle is not None),
        f"mix is for rules without a row statistic: call {rule} once per view and subtract the "
        "outputs",
    )
    a, b, c = shapes = [tuple(part.shape) for part in (q, k, v)]
    agree = (
        len(a) == len(b) == len(c) == 4
        and a[::2] == b[::2] == c[::2]
        and a[3] == b[3]
        and min(a + b + c) > 0
        and a[1] % views == 0
        and a[1] % b[1] == 0
        and a[1] // views % c[1] == 0
    )
    yield (
        not agree,
        "q (B, H, T, D), k (B, Hk, T, D) and v (B, Hv, T, E) must agree, Hk divide H, and Hv the "
        f"heads of the output, but they are {shapes}",
    )
    H, rows = a[1], a[::2]
    yield (
        any(
            part is not None and (part.ndim != dims or len(part) != H)
            for part, dims in ((call.table, 2), (call.tail, 1), (call.slope, 1))
        ),
        f"table must be (H, W), tail and slope (H,), with the {H} heads of q",
    )
    yield (
        any(
            part is not None and (part.shape != rows or part.dtype != torch.int64)
            for part in (call.sets, call.starts)
        ),
        f"sets must be (B, T) int64, as starts, with the B and T of q, {rows}",
    )
    too_wide = not call.cpp and max(a[3], c[3]) > 256
    yield too_wide, "a tile holds heads of width 256 at most: use --kernel=torch"
    yield (
        views == 2 and not call.cpp and not holds_two_views(q, v),
        f"a tile holds two views of width 128 at most in float32: call {rule} once per view and "
        "subtract",
    )


def problems_anywhere(q, k, v):
    """The problems of any kernel: its device and its data types."""
    yield (
        not AVAILABLE,
        "the kernels need triton and an NVIDIA GPU from Ampere on: use --kernel=torch "
        "(or set TRITON_INTERPRET=1 to test them on a CPU)",
    )
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    yield (
        not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes,
        "q, k and v must share one of float32, float16 and bfloat16",
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


def count(T, size):
    return -(-T // size)


# ---- the forward operator


@torch.library.custom_op(
    "nanoattention::forward",
    mutates_args=(),
    schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def run_forward(*args):
    """Returns o (B, heads, T, E), r (B, H, T), U as o, and which tiles are alive, (B, heads, row
    tiles, key tiles). What the rule does not need is empty."""
    call = Call(*args)
    o, r, u, alive = allocate_forward(*args)
    if call.cpp:
        run_in_cpp("forward", call, o=o, r=r, u=u, alive=alive)
    else:
        launch(forward, call, (kernel_inputs(call), matrix(o), matrix(u), r, alive))
    return o, r, u, alive


def run_in_cpp(function, call, **more):
    """Run forward or backward of kernels.cpp. more: tensors by their names in its struct Call."""
    (B, H, T, D), E = call.q.shape, call.v.shape[3]
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "t", "mix", "sets")} | more
    tensors["ends"] = ends = row_ends(call)
    if call.table is not None:
        tensors["table"] = F.pad(call.table, (in_cpp.BN, in_cpp.BN))
    in_cpp.run(
        call.library,
        function,
        tensors,
        B=B,
        H=H,
        heads=call.heads,
        T=T,
        D=D,
        E=E,
        **call.sharing,
        ends_batch=T if ends is not None and len(ends) > 1 else 0,
        threads=torch.get_num_threads(),
        scale=call.scale,
    )


def why_not_cpp(rule, views):
    """The reason why kernels.cpp cannot compute a rule, by its full name, or None. Builds it."""
    try:
        in_cpp.library(kernel_of(rule), views)
    except ValueError as e:
        return str(e)


def row_ends(call):
    """(B or 1, T) int32: the first row beyond those that see a key. None: all later rows see it."""
    if not call.has_window and call.starts is None:
        return None
    T = call.q.shape[2]
    j = torch.arange(T, dtype=torch.int32)[None]
    starts = torch.zeros_like(j) if call.starts is None else call.starts
    ends = document_ends(starts)
    if call.has_window:
        ends = torch.where(j - starts < call.first, ends, ends.minimum(j + call.window))
    return ends.contiguous()


def document_ends(starts):
    """The first row beyond the document of each key, from the first keys of documents (B, T)
    int32."""
    i = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts, i.expand_as(starts).contiguous(), right=True, out_int32=True)


def by_distance(T, table=None, tail=None, slope=None):
    """The bias at distances 0 .. T - 1, (H, T), of a Distance of axes/positions.py."""
    part = next(part for part in (table, tail, slope) if part is not None)
    b = part.new_zeros(len(part), 0) if table is None else table[:, :T]
    tail = part.new_zeros(len(part)) if tail is None else tail
    b = torch.cat([b, tail[:, None].expand(-1, T - b.shape[1])], -1)
    return b if slope is None else b + slope[:, None] * torch.arange(T, device=part.device)


@run_forward.register_fake
def allocate_forward(*args):
    call = Call(*args)
    kernel = call.kernel
    B, H, T, _ = call.q.shape
    E = call.v.shape[-1]
    BM, BN, _, _ = tile_config("forward", call)
    tiles = (B, call.heads, count(T, BM), count(T, BN))

    o = rows_of_all_heads(call.q, call.heads, E)
    r = call.q.new_empty((B, H, T) if kernel.settle else (0,), dtype=torch.float32)
    u = rows_of_all_heads(call.q, call.heads if kernel.save_u else 0, E)
    alive = call.q.new_zeros(tiles if kernel.skip else (0,), dtype=torch.int8)
    return o, r, u, alive


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
                f"one head of {name} spans more than 2^31 elements: "
                f"call .contiguous() on {name} first"
            )
    return Matrix(tensor, *tensor.stride()[:3])


def kernel_inputs(call):
    """The Inputs of the kernels. Biases are multiplied by the rule's unit here, once, instead of at
    every score."""
    H, T = call.q.shape[1:3]

    def bias(part):
        return None if part is None else (part * call.kernel.unit).contiguous()

    return Inputs(
        q=matrix(call.q, "q"),
        k=matrix(call.k, "k"),
        v=matrix(call.v, "v"),
        t=None if call.t is None else matrix(call.t),
        table=bias(call.table),
        tail=bias(call.tail),
        slope=bias(call.slope),
        mix=None if call.mix is None else matrix(call.mix),
        sets=call.sets,
        starts=call.starts,
        ends=None if call.starts is None else document_ends(call.starts),
        H=H,
        **call.sharing,
        T=T,
        W=0 if call.table is None else call.table.shape[1],
        window=call.window if call.has_window else None,
        first=call.first,
        scale=call.scale,
    )


def launch(function, call, args, diagonals=None):
    """Start a program for each head and tile of rows; for backward_keys tile of keys, for
    backward_table diagonal."""
    BM, BN, warps, stages = tile_config(function.__name__, call)
    B, H, T, D = call.q.shape
    E = call.v.shape[3]
    heads, tiles = call.heads, count(T, BM)  # see my_tile
    if function is backward_keys:
        heads, tiles = call.heads // call.shared, count(T, BN)
    if function is backward_table:
        heads, tiles = H, diagonals
    kernel = call.kernel._replace(D=D, DP=padded(D), E=E, EP=padded(E), BM=BM, BN=BN)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    with torch.cuda.device_of(call.q):
        function[(tiles * heads * B,)](*args, kernel, **options)


# ---- the backward operator


@torch.library.custom_op(
    "nanoattention::backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor u, Tensor r, Tensor alive, Tensor do, Tensor dr)"
    f" -> ({', '.join(['Tensor'] * len(Gradients._fields))})",
)
def run_backward(*args):
    *call, u, r, alive, do, dr = args
    call = Call(*call)
    grads = allocate_backward(*args)
    dq, dk, dv, dt, dtable, dtail, dslope, dmix = grads
    if call.cpp:
        of = Gradients(*grads)
        gradients = {f"d{name}": part for name, part in of._asdict().items()}
        dtable.zero_()  # it adds to this one
        run_in_cpp("backward", call, u=u, r=r, alive=alive, d_o=do, dr=dr, **gradients)
        return grads
    inputs = kernel_inputs(call)
    do = matrix(do, "the output's gradient")
    delta = torch.empty_like(r)
    of_rows = matrix(dq), dt, dtail, dslope, dmix, delta
    live = live_lists(alive, "backward_rows", call)
    launch(backward_rows, call, (inputs, matrix(u), r, do, dr, *of_rows, live))
    live = live_lists(alive, "backward_keys", call)
    launch(backward_keys, call, (inputs, r, do, delta, matrix(dk), matrix(dv), live))
    if call.learn_table:
        diagonals = dtable.shape[2]
        launch(backward_table, call, (inputs, r, do, delta, dtable, diagonals), diagonals)
    return grads


@run_backward.register_fake
def allocate_backward(*args):
    """Empty gradients: of the table sums of tiles, see backward_table, or with cpp sums by distance
    for each task; of tail and slope one for each row. `differentiate` does the rest."""
    call = Call(*args[: len(Call._fields)])
    B, H, T, D = call.q.shape

    def float32(part, *shape):
        return call.q.new_empty((0,) if part is None else shape, dtype=torch.float32)

    sums = ()  # of the table's gradient
    if call.cpp:
        sums = count(T, in_cpp.KEYS), T + 2 * in_cpp.BN
    elif call.learn_table:
        n, *_ = tile_config("backward_table", call)
        sums = visible_diagonals(call, n), n, n
    return (
        rows_of_all_heads(call.q, H, D),
        rows_of_all_heads(call.q, H // call.shared, D),
        rows_of_all_heads(call.q, call.heads // call.shared, call.v.shape[-1]),
        float32(call.t, B, H, T),
        float32(call.table if call.learn_table else None, B, H, *sums),
        float32(call.tail, B, H, T),
        float32(call.slope, B, H, T),
        float32(call.mix, B, H // 2, T),
    )


def visible_diagonals(call, n):
    """How many block diagonals of n x n tiles contain a visible distance below W."""
    reach = min(call.table.shape[1], call.q.shape[2])
    reach = reach if call.first or not call.window else min(reach, call.window)
    return (reach + n - 2) // n + 1


def live_lists(alive, kernel, call):
    """For every tile of a backward kernel, the list of live tiles on the other side (see in_order).
    Empty if all are visited.

    alive: (B, heads, row tiles, key tiles) of the forward kernel."""
    if not call.kernel.skip:
        return alive
    T = call.q.shape[2]
    BM, BN, _, _ = tile_config("forward", call)
    rows, keys, _, _ = tile_config(kernel, call)
    alive = resized(alive.mT, T, BM, rows).mT
    alive = resized(alive, T, BN, keys)
    return in_order(alive if kernel == "backward_rows" else alive.mT)


def in_order(alive):
    """A map of live tiles (.., n) as lists (.., 2n + 1): first n + 1 counts, how many of the first
    0, 1, .., n tiles are alive; then the numbers of live tiles, ascending. (The numbers of dead
    tiles follow and are never read.)"""
    counts = F.pad(alive.cumsum(-1), (1, 0))
    numbers = alive.argsort(dim=-1, descending=True, stable=True)
    return torch.cat([counts, numbers], -1).int()


def resized(alive, T, a, b):
    """Convert a map of tiles of size a (.., T/a) to tiles of size b, both powers of two. A tile is
    alive if any part of it is."""
    small = min(a, b)
    alive = alive.repeat_interleave(a // small, -1)[..., : count(T, small)]
    alive = F.pad(alive, (0, -alive.shape[-1] % (b // small)))
    return alive.unflatten(-1, (-1, b // small)).amax(-1)


# ---- autograd


def save_for_backward(ctx, inputs, output):
    call = Call(*inputs)
    o, r, u, alive = output
    tensors = [getattr(call, name) for name in TENSORS]
    ctx.call = call._replace(**dict.fromkeys(TENSORS))
    ctx.save_for_backward(*tensors, u if call.kernel.save_u else o, r, alive)


def differentiate(ctx, do, dr, *_):
    *tensors, u, r, alive = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
    of = Gradients(*run_backward(*call, u, r, alive, do, dr.contiguous()))
    grads = {
        "q": of.q,
        "k": over_groups(of.k, call.k.shape[1]),
        "v": over_groups(of.v, call.v.shape[1]),
    }
    if call.t is not None:
        grads["t"] = of.t
    if call.learn_table and call.cpp:
        grads["table"] = of.table.sum((0, 2))[:, in_cpp.BN : -in_cpp.BN]
    elif call.learn_table:
        grads["table"] = table_of_tiles(of.table.sum(0), call.table.shape[1])
    if call.tail is not None:
        grads["tail"] = of.tail.sum((0, 2))
    if call.slope is not None:
        grads["slope"] = of.slope.sum((0, 2))
    if call.mix is not None:
        grads["mix"] = of.mix
    return tuple(grads.get(name) for name in Call._fields)


def over_groups(grad, heads):
    """Sum over gradients that belong to the same key or value head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def table_of_tiles(tiles, W):
    """(H, diagonals, n, n) sums of ds to (H, W). Entry (row, col) of tile b lies at distance b n +
    row - col."""
    H, diagonals, n, _ = tiles.shape
    # reverse the keys, append n zeros to each row, and read the rows as 2n - 1 long: each row then
    # starts one place to the right of the row above, and column m holds the distance
    # b n + m - (n - 1) in every row
    skewed = F.pad(tiles.flip(-1), (0, n)).flatten(2)[..., : n * (2 * n - 1)]
    skewed = skewed.view(H, diagonals, n, 2 * n - 1).sum(2)
    table = skewed[..., n - 1 :].clone()  # (H, diagonals, n): tile b's distances b n and more
    table[:, :-1, 1:] += skewed[:, 1:, : n - 1]  # plus tile b + 1's distances below (b + 1) n
    table = table.flatten(1)[:, :W]
    return F.pad(table, (0, W - table.shape[1]))


def refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        "the attention kernels can be differentiated once: use --kernel=torch for second "
        "derivatives"
    )


run_forward.register_autograd(differentiate, setup_context=save_for_backward)
run_backward.register_autograd(refuse_second_derivative)


# -------------------------------------------------------------------------------------------- tiles
# (BM, BN, warps, stages) of each kernel, chosen for Triton 3.9 from what tests/test_compile.py
# prints. It is the largest tile of which two programs fit on a multiprocessor without spilling
# registers. One program then computes exponentials while the other waits for its products. If no
# tile allows two, one program has eight warps. A warp needs at least 16 rows, else warps repeat
# each other's work. (At width 256, in Triton 3.6 and at widths that are not a power of two, some
# kernels spill.)

COLUMNS = ("forward", "backward_rows", "backward_keys", "backward_table")
# Keys: GPU generation (0: float32, on any), width, kind of call. A gap is filled by the next row.
# Kinds: 0 plain; 1 a table, tail, slope or window; 2 a heavy rule; 3 two views; 4 two views and
# what 1 has
TILES = {
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
    (80, 128, 2): ((32, 32, 4, 2), (16, 32, 2, 2), (32, 16, 4, 2), (16, 16, 2, 1)),
    (80, 128, 3): ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), None),
    (80, 128, 4): ((64, 32, 8, 2), (32, 16, 4, 2), (32, 16, 4, 2), (32, 32, 4, 1)),
    (80, 256, 2): ((32, 64, 8, 2), (16, 64, 8, 1), (32, 16, 4, 2), (16, 16, 2, 1)),
    (80, 256, 4): ((32, 32, 8, 2), (16, 32, 8, 1), (32, 16, 4, 1), (16, 16, 2, 1)),
    (0, 64, 2): ((32, 16, 8, 1), (16, 16, 8, 1), (32, 16, 16, 1), (32, 32, 8, 1)),
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


def tile_config(kernel, call):
    """(BM, BN, warps, stages) of a kernel in this call."""
    column = COLUMNS.index(kernel)
    if call.cpp:
        return in_cpp.BM, in_cpp.BN, 0, 0
    if INTERPRETED:
        return SMALL[column]
    biased = any(part is not None for part in (call.table, call.tail, call.slope))
    busy = biased or call.has_window
    kind = int(busy)
    if call.mix is not None:
        kind = 3 + busy
    elif call.kernel.heavy:
        kind = 2
    device = 0 if call.q.dtype == torch.float32 else generation(call.q.device)
    width = padded(max(64, call.q.shape[-1], call.v.shape[-1]))
    rows = [TILES.get((device, width, n)) for n in range(kind, 5)]
    return next(row[column] for row in rows if row and row[column])


def padded(width):
    return max(16, 1 << (width - 1).bit_length())  # tl.dot needs sides of at least 16
