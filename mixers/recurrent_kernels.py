"""The state of mixers/recurrent.py in Triton: `one_chunk` for all chunks of a sequence, forward and
backward.

One chunk takes the state S before it to S' after it. c is the sum of log forget since the chunk
began, `end` its last value, and decay_ij = exp(c_i - c_j) for j <= i, otherwise 0. below(..) keeps
the entries below the diagonal:

    w = (k exp(c)) S + below(k k^T decay) u     what the state returns for each key: from earlier
                                                chunks and from this one
    u = v - erase w               solved for u: u = X (v - erase (k exp(c)) S), where X = (1 + A)^-1
                                                and A = erase below(k k^T decay)
    o = (q exp(c)) S + (q k^T decay) u
    S' = exp(end) S + (k exp(end - c))^T u

w has the form of o with the query erase k, so both have the same gradient formulas. Only the states
depend on earlier chunks. `scan` and `scan_back` walk over the chunks and keep a state, or its
gradient, on the chip. All other kernels compute all chunks at once. Only X, T x C numbers, is kept
from forward to backward: `scan` computes the states again.

A None argument is removed at compile time: c is None without forgetting, erase without erasing.
`channels`: each channel of the keys decays at its own rate. v is already multiplied by write.
PyTorch computes the sums c and their gradient. There are no atomic additions, so two runs agree bit
for bit.

Legend, in addition to mixers/recurrent.py's          shapes in comments
  C         tokens of a chunk                            (C, ..)   the tokens of one chunk
  DP        D padded to a power of two                   (.., BD)  a tile of BD columns of q and k
  X         the inverse, for all chunks                  (.., BE)  a tile of BE columns of v
  dr        the gradient of v - erase (k exp(c)) S: dv   do, du    gradients of o and u; also dq, ..
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import kernels
from kernels import INTERPRETED, HeadMatrix, Matrix, begin, count, jit, matrix, padded, times, tl


class StateInputs(NamedTuple):
    q: Matrix  # (B, H, T, D)
    k: Matrix  # (B, H, T, D)
    v: Matrix  # (B, H, T, E)
    c: Any  # (B, H, T, 1 or D) float32, or None: no forgetting
    erase: Any  # (B, H, T) float32, or None: no erasing
    H: int
    T: int


class ChunkSizes(NamedTuple):  # compile-time constants
    C: int
    D: int
    DP: int
    BD: int
    E: int
    BE: int
    channels: bool
    invert: str  # precision of float32 products in `invert`


class StateHead(NamedTuple):
    batch: Any
    number: Any  # within its sequence
    q: HeadMatrix  # (T, D)
    k: HeadMatrix  # (T, D)
    v: HeadMatrix  # (T, E)
    rows: Any  # rows before this head in tensors (B, H, T, ..)
    chunks: Any  # chunks before this head


# ------------------------------------------------------------------------------- loading and decays


@jit
def head_of(inputs, number, sizes: tl.constexpr):
    """A head by its number, counted over the whole batch."""
    batch = (number // inputs.H).to(tl.int64)
    h = (number % inputs.H).to(tl.int64)
    q = begin(inputs.q, batch, h)
    k = begin(inputs.k, batch, h)
    v = begin(inputs.v, batch, h)
    rows = number.to(tl.int64) * inputs.T
    chunks = number.to(tl.int64) * tl.cdiv(inputs.T, sizes.C)
    return StateHead(batch, h, q, k, v, rows, chunks)


@jit
def my_chunk(inputs, sizes: tl.constexpr):
    """The head of this program, the first token of its chunk, and the tokens of the chunk (C,)."""
    chunks = tl.cdiv(inputs.T, sizes.C)
    head = head_of(inputs, tl.program_id(0) // chunks, sizes)
    start = tl.program_id(0) % chunks * sizes.C
    return head, start, start + tl.arange(0, sizes.C)


@jit
def dense(tensor, head, width: tl.constexpr):
    """The rows (T, width) of this head in a contiguous tensor (B, H, T, width)."""
    return HeadMatrix(tensor + head.rows * width, width)


@jit
def load(matrix, i, T, left, D: tl.constexpr, BD: tl.constexpr):
    """Rows i and BD columns from `left` on of a (T, D) matrix, 0 beyond its ends: (rows, BD)."""
    d = left + tl.arange(0, BD)
    at = matrix.at + (i[:, None] * matrix.row + d[None, :])
    mask = (i < T)[:, None] & (d < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@jit
def save(
    matrix,
    value,  # (rows, BD)
    i,  # (rows,)
    T,
    left,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    d = left + tl.arange(0, BD)
    at = matrix.at + (i[:, None] * matrix.row + d[None, :])
    mask = (i < T)[:, None] & (d < D)[None, :]
    tl.store(at, value.to(matrix.at.dtype.element_ty), mask=mask)


@jit
def state_of(States, head, start, sizes: tl.constexpr):
    """The state (D, E) before the chunk that begins at `start`, in (B, H, chunks, D, E)."""
    at = States + (head.chunks + start // sizes.C) * (sizes.D * sizes.E)
    return HeadMatrix(at, sizes.E)


@jit
def sums(inputs, head, i, left, sizes: tl.constexpr, BD: tl.constexpr):
    """The sums c of tokens i: one for the head, (rows, 1), or one for each of these channels,
    (rows, BD)."""
    if sizes.channels:
        c = dense(inputs.c, head, sizes.D)
        return load(c, i, inputs.T, left, sizes.D, BD)  # (rows, BD)
    else:
        c = tl.load(inputs.c + head.rows + i, mask=i < inputs.T, other=0.0)  # (rows,)
        return c[:, None]


@jit
def decays_of_state(inputs, head, start, left, sizes: tl.constexpr, BD: tl.constexpr):
    """Three decays: from the chunk's start to each token, from each token to the chunk's end, both
    (C, 1 or BD), and over the whole chunk, (1 or BD, 1)."""
    if inputs.c is None:
        return 1.0, 1.0, 1.0
    else:
        here = sums(inputs, head, start + tl.arange(0, sizes.C), left, sizes, BD)  # (C, ..)
        last = tl.minimum(start + sizes.C, inputs.T) - 1 + tl.arange(0, 1)
        end = sums(inputs, head, last, left, sizes, BD)  # (1, ..)
        # c.exp(), (end - c).exp(), end.exp().mT
        return tl.exp(here), tl.exp(end - here), tl.trans(tl.exp(end))


@jit
def decays_of_pairs(inputs, head, start, left, sizes: tl.constexpr):
    """The decay from token j to token i, 0 for j > i: (C, C), or for these channels (C, C, BD)."""
    i = tl.arange(0, sizes.C)
    causal = i[:, None] >= i[None, :]
    if inputs.c is None:
        return tl.where(causal, 1.0, 0.0)
    else:
        c = sums(inputs, head, start + i, left, sizes, sizes.BD)  # (C, ..)
        # decay = (c[:, None] - c[None]).exp().tril()        (minimum: later tokens would overflow)
        if sizes.channels:
            lost = tl.minimum(c[:, None, :] - c[None, :, :], 0.0)  # (C, C, BD)
            return tl.where(causal[:, :, None], tl.exp(lost), 0.0)
        else:
            lost = tl.minimum(c - tl.trans(c), 0.0)  # (C, C)
            return tl.where(causal, tl.exp(lost), 0.0)


# ------------------------------------------------------------------------------ products of a chunk


@jit
def pairs(a, b, decay, sizes: tl.constexpr):
    """The sum over BD columns of a_i b_j decay_ij: (C, C)."""
    if sizes.channels:
        # torch.einsum("id,jd,ijd->ij", a, b, decay)
        a = a.to(tl.float32)[:, None, :]
        b = b.to(tl.float32)[None, :, :]
        return tl.sum(a * b * decay, 2)
    else:
        # a @ b.mT * decay
        return times(a, tl.trans(b)) * decay


@jit
def pairs_back(dp, a, b, decay, sizes: tl.constexpr):
    """The gradients of a and b, (C, BD) each, from dp (C, C), the gradient of `pairs`."""
    if sizes.channels:
        # da = torch.einsum("ij,jd,ijd->id", dp, b, decay)
        # db = torch.einsum("ij,id,ijd->jd", dp, a, decay)
        p = dp[:, :, None] * decay
        da = tl.sum(p * b.to(tl.float32)[None, :, :], 1)
        db = tl.sum(p * a.to(tl.float32)[:, None, :], 0)
    else:
        # da = (dp * decay) @ b; db = (dp * decay).mT @ a
        da = times(dp * decay, b)
        db = times(tl.trans(dp * decay), a)
    return da, db


@jit
def decayed_scores(rows, inputs, head, start, sizes: tl.constexpr):
    """Decayed scores (C, C) of the chunk's rows, its queries or its keys, with its keys."""
    i = start + tl.arange(0, sizes.C)
    p = tl.zeros((sizes.C, sizes.C), tl.float32)
    for left in tl.range(0, sizes.D, sizes.BD):
        a = load(rows, i, inputs.T, left, sizes.D, sizes.BD)  # (C, BD)
        k = load(head.k, i, inputs.T, left, sizes.D, sizes.BD)  # (C, BD)
        p += pairs(a, k, decays_of_pairs(inputs, head, start, left, sizes), sizes)
    return p


@jit
def load_erase(inputs, head, i):
    return tl.load(inputs.erase + head.rows + i, mask=i < inputs.T, other=0.0)[:, None]  # (C, 1)


# ------------------------------------------------------------------------------------------ forward


@jit
def invert(
    inputs,
    X,  # (B, H, T, C)
    sizes: tl.constexpr,
):
    """X = (1 + A)^-1: from blocks of one token, whose inverse is 1, to blocks of two, four, ...
    tokens.

    A series in powers of A would be shorter. But those powers can be large, while the inverses of
    blocks stay small."""
    head, start, i = my_chunk(inputs, sizes)
    erase = load_erase(inputs, head, i)
    p = decayed_scores(head.k, inputs, head, start, sizes)
    t = tl.arange(0, sizes.C)
    A = erase * tl.where(t[:, None] > t[None, :], p, 0.0)
    x = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    size = 1
    while size < sizes.C:
        row = t[:, None] // size
        col = t[None, :] // size
        # lower left of each block of 2 size
        corner = tl.where((row == col + 1) & (col % 2 == 0), A, 0.0)
        # x = x - x @ corner @ x
        product = tl.dot(x, corner, input_precision=sizes.invert)
        x -= tl.dot(product, x, input_precision=sizes.invert)
        size *= 2
    save(dense(X, head, sizes.C), x, i, inputs.T, 0, sizes.C, sizes.C)


@jit
def scan(
    inputs,
    X,  # (B, H, T, C)
    U,  # Matrix (B, H, T, E)
    States,  # (B, H, chunks, D, E)
    sizes: tl.constexpr,
):
    """The state before each chunk, and u, for BE columns of v. Without erasing u is v, and U is not
    written."""
    head = head_of(inputs, tl.program_id(0), sizes)
    left = tl.program_id(1) * sizes.BE
    d = tl.arange(0, sizes.DP)
    S = tl.zeros((sizes.DP, sizes.BE), tl.float32)
    for start in tl.range(0, inputs.T, sizes.C):
        i = start + tl.arange(0, sizes.C)
        save(state_of(States, head, start, sizes), S, d, sizes.D, left, sizes.E, sizes.BE)
        from_start, to_end, whole = decays_of_state(inputs, head, start, 0, sizes, sizes.DP)
        k = load(head.k, i, inputs.T, 0, sizes.D, sizes.DP)  # (C, DP)
        u = load(head.v, i, inputs.T, left, sizes.E, sizes.BE)  # (C, BE)
        if inputs.erase is not None:
            # u = X @ (v - erase * ((k * c.exp()) @ S))
            erased = k * (load_erase(inputs, head, i) * from_start)  # (C, DP)
            r = u - times(erased, S.to(k.dtype))
            x = load(dense(X, head, sizes.C), i, inputs.T, 0, sizes.C, sizes.C)  # (C, C)
            u = times(x, r.to(k.dtype)).to(k.dtype)
            of_head = begin(U, head.batch, head.number)
            save(of_head, u, i, inputs.T, left, sizes.E, sizes.BE)
        # S = end.exp().mT * S + (k * (end - c).exp()).mT @ u
        S = whole * S + times(tl.trans(k * to_end), u)


@jit
def read(
    inputs,
    U,  # Matrix (B, H, T, E)
    States,  # (B, H, chunks, D, E)
    O,  # (B, H, T, E)
    sizes: tl.constexpr,
):
    """o for one chunk and BE columns."""
    head, start, i = my_chunk(inputs, sizes)
    left = tl.program_id(1) * sizes.BE
    d = tl.arange(0, sizes.DP)
    from_start, _, _ = decays_of_state(inputs, head, start, 0, sizes, sizes.DP)
    q = load(head.q, i, inputs.T, 0, sizes.D, sizes.DP)  # (C, DP)
    state = state_of(States, head, start, sizes)
    S = load(state, d, sizes.D, left, sizes.E, sizes.BE)  # (DP, BE)
    u = load(begin(U, head.batch, head.number), i, inputs.T, left, sizes.E, sizes.BE)  # (C, BE)
    # o = (q * c.exp()) @ S + decayed_scores(q, k, c) @ u
    o = times(q * from_start, S)
    o += times(decayed_scores(head.q, inputs, head, start, sizes), u)
    save(dense(O, head, sizes.E), o, i, inputs.T, left, sizes.E, sizes.BE)


# ----------------------------------------------------------------------------------------- backward


@jit
def read_back(
    inputs,
    DO,  # (B, H, T, E)
    DR,  # (B, H, T, E)
    sizes: tl.constexpr,
):
    """The part of du that comes from o of the same chunk, for one chunk and BE columns."""
    head, start, i = my_chunk(inputs, sizes)
    left = tl.program_id(1) * sizes.BE
    do = load(dense(DO, head, sizes.E), i, inputs.T, left, sizes.E, sizes.BE)  # (C, BE)
    # du = decayed_scores(q, k, c).mT @ do
    p = decayed_scores(head.q, inputs, head, start, sizes)  # (C, C)
    du = times(tl.trans(p), do)
    save(dense(DR, head, sizes.E), du, i, inputs.T, left, sizes.E, sizes.BE)


@jit
def scan_back(
    inputs,
    X,  # (B, H, T, C)
    DO,  # (B, H, T, E)
    DR,  # (B, H, T, E)
    DStates,  # (B, H, chunks, D, E)
    sizes: tl.constexpr,
):
    """The gradient of the state after each chunk, from the last to the first, and dr, which
    replaces du."""
    head = head_of(inputs, tl.program_id(0), sizes)
    left = tl.program_id(1) * sizes.BE
    chunks = tl.cdiv(inputs.T, sizes.C)
    d = tl.arange(0, sizes.DP)
    dS = tl.zeros((sizes.DP, sizes.BE), tl.float32)
    for back in tl.range(0, chunks):
        start = (chunks - 1 - back) * sizes.C
        i = start + tl.arange(0, sizes.C)
        save(state_of(DStates, head, start, sizes), dS, d, sizes.D, left, sizes.E, sizes.BE)
        from_start, to_end, whole = decays_of_state(inputs, head, start, 0, sizes, sizes.DP)
        k = load(head.k, i, inputs.T, 0, sizes.D, sizes.DP)  # (C, DP)
        q = load(head.q, i, inputs.T, 0, sizes.D, sizes.DP)  # (C, DP)
        do = load(dense(DO, head, sizes.E), i, inputs.T, left, sizes.E, sizes.BE)  # (C, BE)
        dr = load(dense(DR, head, sizes.E), i, inputs.T, left, sizes.E, sizes.BE)  # (C, BE)
        # dr = X.mT @ (du + (k * (end - c).exp()) @ dS)
        dr = (dr + times(k * to_end, dS.to(k.dtype))).to(k.dtype)
        # dS = end.exp().mT * dS + (q * c.exp()).mT @ do - (erase * k * c.exp()).mT @ dr
        dS = whole * dS + times(tl.trans(q * from_start), do)
        if inputs.erase is not None:
            x = load(dense(X, head, sizes.C), i, inputs.T, 0, sizes.C, sizes.C)  # (C, C)
            dr = times(tl.trans(x), dr).to(k.dtype)
            erased = k * (load_erase(inputs, head, i) * from_start)  # (C, DP)
            dS -= times(tl.trans(erased), dr)
        save(dense(DR, head, sizes.E), dr, i, inputs.T, left, sizes.E, sizes.BE)


@jit
def gradients(
    inputs,
    U,  # Matrix (B, H, T, E)
    States,  # (B, H, chunks, D, E)
    DStates,  # (B, H, chunks, D, E)
    DO,  # (B, H, T, E)
    DR,  # (B, H, T, E)
    DQ,  # (B, H, T, D)
    DK,  # (B, H, T, D)
    DC,  # (B, H, T, D or tiles of columns)
    DErase,  # (B, H, T, tiles of columns)
    sizes: tl.constexpr,
):
    """dq and dk for one chunk and BD columns, and the parts of dc and derase that come from these
    columns."""
    head, start, i = my_chunk(inputs, sizes)
    left = tl.program_id(1) * sizes.BD
    d = left + tl.arange(0, sizes.BD)

    # products with values and states
    dp = tl.zeros((sizes.C, sizes.C), tl.float32)  # gradient of the scores in o
    da = dp  # gradient of the scores in w
    dq = tl.zeros((sizes.C, sizes.BD), tl.float32)
    dw, dk = dq, dq  # gradients of erase k, and of k
    SdS = tl.zeros((sizes.BD, sizes.BE), tl.float32)  # S * dS
    for e in tl.range(0, sizes.E, sizes.BE):
        u = load(begin(U, head.batch, head.number), i, inputs.T, e, sizes.E, sizes.BE)  # (C, BE)
        do = load(dense(DO, head, sizes.E), i, inputs.T, e, sizes.E, sizes.BE)  # (C, BE)
        state = state_of(States, head, start, sizes)
        S = load(state, d, sizes.D, e, sizes.E, sizes.BE)  # (BD, BE)
        dstate = state_of(DStates, head, start, sizes)
        dS = load(dstate, d, sizes.D, e, sizes.E, sizes.BE)  # (BD, BE)
        # dp = do @ u.mT; dq = do @ S.mT; dk = u @ dS.mT
        dp += times(do, tl.trans(u))
        dq += times(do, tl.trans(S))
        dk += times(u, tl.trans(dS))
        SdS += S.to(tl.float32) * dS.to(tl.float32)
        if inputs.erase is not None:  # the same with -dr in place of do
            dr = load(dense(DR, head, sizes.E), i, inputs.T, e, sizes.E, sizes.BE)  # (C, BE)
            da -= times(dr, tl.trans(u))
            dw -= times(dr, tl.trans(S))

    # dq and dk, and from them dc and derase
    from_start, to_end, whole = decays_of_state(inputs, head, start, left, sizes, sizes.BD)
    decay = decays_of_pairs(inputs, head, start, left, sizes)
    q = load(head.q, i, inputs.T, left, sizes.D, sizes.BD)  # (C, BD)
    k = load(head.k, i, inputs.T, left, sizes.D, sizes.BD)  # (C, BD)
    dk *= to_end
    # the gradient of `end`, which multiplies the whole state at the chunk's end
    dend = tl.sum(whole * SdS, 1) + tl.sum(dk * k, 0)  # (BD,)
    dq_pairs, dk_pairs = pairs_back(dp, q, k, decay, sizes)
    dq = dq * from_start + dq_pairs
    dk += dk_pairs
    dc = q * dq  # exp(c) multiplies each query
    part = (head.rows + i) * tl.cdiv(sizes.D, sizes.BD) + tl.program_id(1)  # of these columns
    if inputs.erase is not None:
        erase = load_erase(inputs, head, i)
        da = tl.where(i[:, None] > i[None, :], da, 0.0)
        dw_pairs, dk_pairs = pairs_back(da, (erase * k).to(k.dtype), k, decay, sizes)
        dw = dw * from_start + dw_pairs
        dk += dk_pairs
        dc += erase * k * dw
        tl.store(DErase + part, tl.sum(k * dw, 1), mask=i < inputs.T)
    if inputs.c is not None:
        dc -= k * dk  # and divides each key that is written
        last = tl.minimum(start + sizes.C, inputs.T) - 1
        dc += tl.where((i == last)[:, None], dend[None, :], 0.0)
        if sizes.channels:
            save(dense(DC, head, sizes.D), dc, i, inputs.T, left, sizes.D, sizes.BD)
        else:
            tl.store(DC + part, tl.sum(dc, 1), mask=i < inputs.T)
    if inputs.erase is not None:
        dk += load_erase(inputs, head, i) * dw
    save(dense(DQ, head, sizes.D), dq, i, inputs.T, left, sizes.D, sizes.BD)
    save(dense(DK, head, sizes.D), dk, i, inputs.T, left, sizes.D, sizes.BD)


# --------------------------------------------------------------------------------------------- host


def recur(q, k, v, forget=None, erase=None):
    """`one_chunk` of mixers/recurrent.py over all tokens, from a state of 0: o (B, H, T, E).

    q, k (B, H or 1, T, D), v (B, H, T, E), multiplied by write, of one dtype: float32, float16 or
    bfloat16. forget (B, H, T, 1 or D), logarithms; None: no forgetting. erase (B, H, T, 1); None:
    no erasing.
    Differentiable once. Raises ValueError on inputs that the kernels cannot compute."""
    for bad, why in problems(q, k, v, forget, erase):
        if bad:
            raise ValueError(why)
    q = q.expand(*v.shape[:2], -1, -1)
    k = k.expand(*v.shape[:2], -1, -1)
    c = None
    if forget is not None:
        C, *_ = tiles(q, forget.shape[3] > 1)
        c = sums_of_chunks(forget.float(), C)
    if erase is not None:
        erase = erase[..., 0].float().contiguous()
    o, _ = run_forward(q, k, v, c, erase)
    return o


def problems(q, k, v, forget, erase):
    """Pairs (condition, error message). Each condition relies on the ones before it."""
    yield from kernels.problems_anywhere(q, k, v)
    yield q.shape[3] > 256, "a tile holds keys of width 256 at most: use --kernel=torch"
    B, H, T, _ = v.shape
    rates = ((B, H, T, 1), (B, H, T, q.shape[3]))
    agree = (
        q.shape == k.shape
        and q.shape[::2] == (B, T)
        and q.shape[1] in (1, H)
        and (forget is None or forget.shape in rates)
        and (erase is None or erase.shape == (B, H, T, 1))
    )
    shapes = [tuple(part.shape) for part in (q, k, v, forget, erase) if part is not None]
    yield (
        not agree,
        "q and k (B, H or 1, T, D), v (B, H, T, E), forget (B, H, T, 1 or D) and erase "
        f"(B, H, T, 1) must agree, but they are {shapes}",
    )
    # on a GPU the check would have to wait
    if v.device.type == "cpu" and not torch.compiler.is_compiling():
        yield (
            erase is not None and not bool(((erase >= 0) & (erase <= 1)).all()),
            "erase is the share of a key's stored value that is subtracted: give a share from 0 "
            "to 1",
        )
        yield (
            forget is not None and bool((forget > 0).any()),
            "forget is the logarithm of a share: give at most 0",
        )


def sums_of_chunks(forget, size):
    """forget.cumsum(-2), restarted at every chunk."""
    T = forget.shape[2]
    chunks = F.pad(forget, (0, 0, 0, -T % size)).unflatten(2, (-1, size))
    return chunks.cumsum(3).flatten(2, 3)[:, :, :T].contiguous()


SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? c, Tensor? erase"


@torch.library.custom_op(
    "nanoattention::recur", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)"
)
def run_forward(q, k, v, c, erase):
    o, X = allocate_forward(q, k, v, c, erase)
    inputs, sizes, U, States = scanned(q, k, v, c, erase, X, solve=True)
    launch(read, inputs, sizes, (U, States, o), sizes.BE)
    return o, X


@run_forward.register_fake
def allocate_forward(q, k, v, c, erase):
    shape = (0,) if erase is None else (*v.shape[:3], sizes_of(q, v, c).C)
    return v.new_empty(v.shape), q.new_empty(shape)


@torch.library.custom_op(
    "nanoattention::recur_backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor X, Tensor do) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def run_backward(
    q,  # (B, H, T, D)
    k,  # (B, H, T, D)
    v,  # (B, H, T, E)
    c,  # (B, H, T, 1 or D) float32, or None
    erase,  # (B, H, T) float32, or None
    X,  # (B, H, T, C), empty without erasing
    do,  # (B, H, T, E)
):
    grads = dq, dk, dv, dc, derase = allocate_backward(q, k, v, c, erase, X, do)
    inputs, sizes, U, States = scanned(q, k, v, c, erase, X)
    DStates = torch.empty_like(States)
    launch(read_back, inputs, sizes, (do, dv), sizes.BE)
    launch(scan_back, inputs, sizes, (X, do, dv, DStates), sizes.BE)
    # `gradients` needs the most registers
    *_, BE = tiles(q, sizes.channels)
    sizes = sizes._replace(BE=min(sizes.BE, BE))
    launch(gradients, inputs, sizes, (U, States, DStates, do, dv, dq, dk, dc, derase), sizes.BD)
    return grads


@run_backward.register_fake
def allocate_backward(
    q,  # (B, H, T, D)
    k,  # (B, H, T, D)
    v,  # (B, H, T, E)
    c,  # (B, H, T, 1 or D) float32, or None
    erase,  # (B, H, T) float32, or None
    X,  # (B, H, T, C), empty without erasing
    do,  # (B, H, T, E)
):
    sizes = sizes_of(q, v, c)
    # each tile of columns adds a part to a row's gradients
    parts = (*v.shape[:3], count(sizes.D, sizes.BD))
    of_c = c.shape if sizes.channels else parts
    dc = q.new_empty((0,) if c is None else of_c, dtype=torch.float32)
    derase = q.new_empty((0,) if erase is None else parts, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dc, derase


def sizes_of(q, v, c):
    """The ChunkSizes of a call, as plain numbers."""
    D = q.shape[3]
    E = v.shape[3]
    channels = c is not None and c.shape[3] > 1
    C, BD, BE, _ = tiles(q, channels)
    precision = "ieee" if q.dtype == torch.float32 else "tf32x3"  # u depends on X: tf32 is coarse
    return ChunkSizes(
        C=C,
        D=D,
        DP=padded(D),
        BD=min(BD, padded(D)),
        E=E,
        BE=min(BE, padded(E)),
        channels=channels,
        invert=precision,
    )


def scanned(
    q,  # (B, H, T, D)
    k,  # (B, H, T, D)
    v,  # (B, H, T, E)
    c,  # (B, H, T, 1 or D) float32, or None
    erase,  # (B, H, T) float32, or None
    X,  # (B, H, T, C), empty without erasing
    solve=False,
):
    """Scan the chunks; with `solve`, compute X first. Returns the StateInputs and ChunkSizes of all
    kernels, u as a Matrix (v itself without erasing), and the states before all chunks."""
    H, T = v.shape[1:3]
    inputs = StateInputs(matrix(q, "q"), matrix(k, "k"), matrix(v, "v"), c, erase, H, T)
    sizes = sizes_of(q, v, c)
    if solve and erase is not None:
        launch(invert, inputs, sizes, (X,))
    U = inputs.v if erase is None else matrix(v.new_empty(v.shape))
    States = v.new_empty(*v.shape[:2], count(T, sizes.C), sizes.D, sizes.E)
    launch(scan, inputs, sizes, (X, U, States), sizes.BE)
    return inputs, sizes, U, States


def launch(kernel, inputs, sizes, tensors, columns=None):
    """Start a program for each chunk of each head (a scan: for each head), and for each tile of
    `columns` columns. tensors: the kernel's further arguments."""
    B, heads, T, E = inputs.v.at.shape
    walks = kernel in (scan, scan_back)
    chunks = 1 if walks else count(T, sizes.C)
    width = sizes.D if kernel is gradients else E
    grid = (B * heads * chunks, 1 if columns is None else count(width, columns))
    # chosen so that no kernel spills registers in Triton 3.9; in 3.6 a few spill 8 or 16 bytes
    # float32 takes twice the registers and twice the shared memory
    wide = inputs.v.at.dtype == torch.float32
    options = {
        "num_warps": 8 if walks or kernel is gradients or wide else 4,
        "num_stages": 1 if walks and wide else 3,
        "enable_fp_fusion": True,
    }
    with torch.cuda.device_of(inputs.v.at):
        kernel[grid](inputs, *tensors, ChunkSizes(*map(tl.constexpr, sizes)), **options)


def save_for_backward(ctx, inputs, output):
    _, X = output
    ctx.save_for_backward(*inputs, X)


def differentiate(ctx, do, _):
    q, k, v, c, erase, X = ctx.saved_tensors
    dq, dk, dv, dc, derase = run_backward(q, k, v, c, erase, X, do.contiguous())
    if c is None:
        dc = None
    elif c.shape[3] == 1:
        dc = dc.sum(-1, keepdim=True)
    return dq, dk, dv, dc, None if erase is None else derase.sum(-1)


run_forward.register_autograd(differentiate, setup_context=save_for_backward)
run_backward.register_autograd(kernels.refuse_second_derivative)


# -------------------------------------------------------------------------------------------- tiles

# GPU generation (0: float32, on any), width of q and k, does each channel decay at its own rate?
TILES = {
    (90, 64, False): (64, 64, 64, 32),
    (90, 128, False): (64, 64, 64, 32),
    (90, 256, False): (32, 64, 16, 16),
    (80, 64, False): (32, 64, 64, 64),
    (80, 128, False): (32, 64, 32, 32),
    (80, 256, False): (32, 64, 16, 16),
    (0, 64, False): (16, 32, 32, 32),
    (0, 128, False): (16, 64, 32, 32),
    (0, 256, False): (16, 64, 16, 16),
    (90, 64, True): (16, 32, 64, 32),
    (90, 128, True): (16, 32, 64, 32),
    (90, 256, True): (16, 32, 16, 16),
    (80, 64, True): (16, 32, 64, 32),
    (80, 128, True): (16, 32, 32, 32),
    (80, 256, True): (16, 32, 16, 16),
    (0, 64, True): (16, 32, 32, 32),
    (0, 128, True): (16, 32, 32, 32),
    (0, 256, True): (16, 32, 16, 16),
}
# interpreter: even short inputs have several tiles
SMALL = {False: (32, 16, 32, 16), True: (16, 16, 32, 16)}


def tiles(q, channels):
    """(C, BD, BE, BE of `gradients`) of a call: tokens of a chunk, columns of q and k, columns of
    v."""
    if INTERPRETED:
        return SMALL[channels]
    generation = 0 if q.dtype == torch.float32 else kernels.generation(q.device)
    return TILES[generation, padded(max(64, q.shape[3])), channels]
