"""The state of mixers/recurrent.py in Triton: `one_chunk` for all chunks of a sequence, forward and
backward.

One chunk takes the state S before it to S' after it. c is the sum of log forget since the chunk
began, `end` its last value, and decay_ij = exp(c_i - c_j) for j <= i, otherwise 0. below(..) keeps
the entries below the diagonal:

    w = (k exp(c)) S + below(k k^T decay) u     what the state returns for each key: from earlier chunks and this one
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

Legend, in addition to mixers/recurrent.py's             shapes in comments
  C         tokens of a chunk                               (C, ..)   the tokens of one chunk
  DP       D padded to a power of two                      (.., BD)  a tile of BD columns of q and k
  X         the inverse, for all chunks                     (.., BE)  a tile of BE columns of v
  dr        the gradient of v - erase (k exp(c)) S: dv      do, du    the upstream gradients of o and u; dq, .. alike
  c.C, c.D  in kernels, c is the ChunkSizes                 inputs.c  the sums c above
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import kernels
from kernels import INTERPRETED, Matrix, begin, count, jit, matrix, padded, times, tl


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
    q: Any  # address of its first row
    k: Any
    rows: Any  # rows before this head in tensors (B, H, T, ..)
    chunks: Any  # chunks before this head


# ------------------------------------------------------------------------------- loading and decays


@jit
def head_of(inputs, number, c: tl.constexpr):
    """A head by its number, counted over the whole batch."""
    batch, h = (number // inputs.H).to(tl.int64), (number % inputs.H).to(tl.int64)
    q, k = begin(inputs.q, batch, h), begin(inputs.k, batch, h)
    return StateHead(
        batch, h, q, k, number.to(tl.int64) * inputs.T, number.to(tl.int64) * tl.cdiv(inputs.T, c.C)
    )


@jit
def my_chunk(inputs, c: tl.constexpr):
    """The head of this program, and the first token of its chunk."""
    chunks = tl.cdiv(inputs.T, c.C)
    return head_of(inputs, tl.program_id(0) // chunks, c), tl.program_id(0) % chunks * c.C


@jit
def load(at, stride, i, T, left, D: tl.constexpr, BD: tl.constexpr):
    """Rows i and BD columns from `left` on of a (T, D) matrix, 0 beyond its ends: (rows, BD)."""
    d = left + tl.arange(0, BD)
    return tl.load(
        at + (i[:, None] * stride + d[None, :]), mask=(i < T)[:, None] & (d < D)[None, :], other=0.0
    )


@jit
def save(at, value, stride, i, T, left, D: tl.constexpr, BD: tl.constexpr):
    d = left + tl.arange(0, BD)
    mask = (i < T)[:, None] & (d < D)[None, :]
    tl.store(at + (i[:, None] * stride + d[None, :]), value.to(at.dtype.element_ty), mask=mask)


@jit
def state_of(States, head, start, c: tl.constexpr):
    """The address, in (B, H, chunks, D, E), of the state before the chunk that begins at
    `start`."""
    return States + (head.chunks + start // c.C) * (c.D * c.E)


@jit
def sums(inputs, head, i, left, c: tl.constexpr, BD: tl.constexpr):
    """The sums c of tokens i: one for the head, (rows, 1), or one for each of these channels,
    (rows, BD)."""
    if c.channels:
        return load(inputs.c + head.rows * c.D, c.D, i, inputs.T, left, c.D, BD)  # (rows, BD)
    else:
        return tl.load(inputs.c + head.rows + i, mask=i < inputs.T, other=0.0)[:, None]  # (rows, 1)


@jit
def decays_of_state(inputs, head, start, left, c: tl.constexpr, BD: tl.constexpr):
    """Three decays: from the chunk's start to each token, from each token to the chunk's end, both
    (C, 1 or BD), and over the whole chunk, (1 or BD, 1)."""
    if inputs.c is None:
        return 1.0, 1.0, 1.0
    else:
        here = sums(inputs, head, start + tl.arange(0, c.C), left, c, BD)  # (C, ..)
        last = tl.minimum(start + c.C, inputs.T) - 1 + tl.arange(0, 1)
        end = sums(inputs, head, last, left, c, BD)  # (1, ..)
        # c.exp(), (end - c).exp(), end.exp().mT
        return tl.exp(here), tl.exp(end - here), tl.trans(tl.exp(end))


@jit
def decays_of_pairs(inputs, head, start, left, c: tl.constexpr):
    """The decay from token j to token i, 0 for j > i: (C, C), or for these channels (C, C, BD)."""
    i = tl.arange(0, c.C)
    past = i[:, None] >= i[None, :]
    if inputs.c is None:
        return tl.where(past, 1.0, 0.0)
    else:  # minimum: later tokens would overflow
        here = sums(inputs, head, start + i, left, c, c.BD)  # (C, ..)
        # decay = (c[:, None] - c[None]).exp().tril()
        if c.channels:
            return tl.where(
                past[:, :, None], tl.exp(tl.minimum(here[:, None, :] - here[None, :, :], 0.0)), 0.0
            )
        else:
            return tl.where(past, tl.exp(tl.minimum(here - tl.trans(here), 0.0)), 0.0)


# ------------------------------------------------------------------------------ products of a chunk


@jit
def pairs(a, b, decay, c: tl.constexpr):
    """The sum over BD columns of a_i b_j decay_ij: (C, C)."""
    if c.channels:
        # torch.einsum("id,jd,ijd->ij", a, b, decay)
        return tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :] * decay, 2)
    else:
        # a @ b.mT * decay
        return times(a, tl.trans(b)) * decay


@jit
def pairs_back(dp, a, b, decay, c: tl.constexpr):
    """The gradients of a and b, (C, BD) each, from dp (C, C), the gradient of `pairs`."""
    if c.channels:
        # da = torch.einsum("ij,jd,ijd->id", dp, b, decay); db = torch.einsum("ij,id,ijd->jd", dp,
        # a, decay)
        p = dp[:, :, None] * decay
        return tl.sum(p * b.to(tl.float32)[None, :, :], 1), tl.sum(
            p * a.to(tl.float32)[:, None, :], 0
        )
    else:
        # da = (dp * decay) @ b; db = (dp * decay).mT @ a
        return times(dp * decay, b), times(tl.trans(dp * decay), a)


@jit
def decayed_scores(at, stride, inputs, head, start, c: tl.constexpr):
    """Decayed scores (C, C) of the chunk's queries, or keys, with its keys. at, stride: of the rows
    of q or k."""
    i = start + tl.arange(0, c.C)
    p = tl.zeros((c.C, c.C), tl.float32)
    for left in tl.range(0, c.D, c.BD):
        a = load(at, stride, i, inputs.T, left, c.D, c.BD)  # (C, BD)
        k = load(head.k, inputs.k.row, i, inputs.T, left, c.D, c.BD)  # (C, BD)
        p += pairs(a, k, decays_of_pairs(inputs, head, start, left, c), c)
    return p


@jit
def load_erase(inputs, head, i):
    return tl.load(inputs.erase + head.rows + i, mask=i < inputs.T, other=0.0)[:, None]  # (C, 1)


# ------------------------------------------------------------------------------------------ forward


@jit
def invert(inputs, X, c: tl.constexpr):
    """X = (1 + A)^-1: from blocks of one token, whose inverse is 1, to blocks of two, four, ...
    tokens.

    A series in powers of A would be shorter. But those powers can be large, while the inverses of
    blocks stay small."""
    head, start = my_chunk(inputs, c)
    i, t = start + tl.arange(0, c.C), tl.arange(0, c.C)
    erase, p = (
        load_erase(inputs, head, i),
        decayed_scores(head.k, inputs.k.row, inputs, head, start, c),
    )
    A = erase * tl.where(t[:, None] > t[None, :], p, 0.0)
    x = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    size = 1
    while size < c.C:
        row, col = t[:, None] // size, t[None, :] // size
        # lower left of each block of 2 size
        corner = tl.where((row == col + 1) & (col % 2 == 0), A, 0.0)
        # x = x - x @ corner @ x
        x -= tl.dot(tl.dot(x, corner, input_precision=c.invert), x, input_precision=c.invert)
        size *= 2
    save(X + head.rows * c.C, x, c.C, i, inputs.T, 0, c.C, c.C)


@jit
def scan(inputs, X, U, States, c: tl.constexpr):
    """The state before each chunk, and u, for BE columns of v. Without erasing u is v, and U is not
    written."""
    head, left = head_of(inputs, tl.program_id(0), c), tl.program_id(1) * c.BE
    d = tl.arange(0, c.DP)
    S = tl.zeros((c.DP, c.BE), tl.float32)
    for start in tl.range(0, inputs.T, c.C):
        i = start + tl.arange(0, c.C)
        save(state_of(States, head, start, c), S, c.E, d, c.D, left, c.E, c.BE)
        from_start, to_end, whole = decays_of_state(inputs, head, start, 0, c, c.DP)
        k = load(head.k, inputs.k.row, i, inputs.T, 0, c.D, c.DP)  # (C, DP)
        # (C, BE)
        u = load(
            begin(inputs.v, head.batch, head.number), inputs.v.row, i, inputs.T, left, c.E, c.BE
        )
        if inputs.erase is not None:
            # u = X @ (v - erase * ((k * c.exp()) @ S))
            r = u - times(k * (load_erase(inputs, head, i) * from_start), S.to(k.dtype))
            x = load(X + head.rows * c.C, c.C, i, inputs.T, 0, c.C, c.C)  # (C, C)
            u = times(x, r.to(k.dtype)).to(k.dtype)
            save(begin(U, head.batch, head.number), u, U.row, i, inputs.T, left, c.E, c.BE)
        # S = end.exp().mT * S + (k * (end - c).exp()).mT @ u
        S = whole * S + times(tl.trans(k * to_end), u)


@jit
def read(inputs, U, States, O, c: tl.constexpr):
    """o for one chunk and BE columns."""
    head, start = my_chunk(inputs, c)
    i, left = start + tl.arange(0, c.C), tl.program_id(1) * c.BE
    from_start, _, _ = decays_of_state(inputs, head, start, 0, c, c.DP)
    q = load(head.q, inputs.q.row, i, inputs.T, 0, c.D, c.DP)  # (C, DP)
    # (DP, BE)
    S = load(state_of(States, head, start, c), c.E, tl.arange(0, c.DP), c.D, left, c.E, c.BE)
    u = load(begin(U, head.batch, head.number), U.row, i, inputs.T, left, c.E, c.BE)  # (C, BE)
    # o = (q * c.exp()) @ S + decayed_scores(q, k, c) @ u
    o = times(q * from_start, S) + times(
        decayed_scores(head.q, inputs.q.row, inputs, head, start, c), u
    )
    save(O + head.rows * c.E, o, c.E, i, inputs.T, left, c.E, c.BE)


# ----------------------------------------------------------------------------------------- backward


@jit
def read_back(inputs, DO, DR, c: tl.constexpr):
    """The part of du that comes from o of the same chunk, for one chunk and BE columns."""
    head, start = my_chunk(inputs, c)
    i, left = start + tl.arange(0, c.C), tl.program_id(1) * c.BE
    do = load(DO + head.rows * c.E, c.E, i, inputs.T, left, c.E, c.BE)  # (C, BE)
    # du = decayed_scores(q, k, c).mT @ do
    du = times(tl.trans(decayed_scores(head.q, inputs.q.row, inputs, head, start, c)), do)
    save(DR + head.rows * c.E, du, c.E, i, inputs.T, left, c.E, c.BE)


@jit
def scan_back(inputs, X, DO, DR, DStates, c: tl.constexpr):
    """The gradient of the state after each chunk, from the last to the first, and dr, which
    replaces du."""
    head, left = head_of(inputs, tl.program_id(0), c), tl.program_id(1) * c.BE
    chunks, d = tl.cdiv(inputs.T, c.C), tl.arange(0, c.DP)
    dS = tl.zeros((c.DP, c.BE), tl.float32)
    for back in tl.range(0, chunks):
        start = (chunks - 1 - back) * c.C
        i = start + tl.arange(0, c.C)
        save(state_of(DStates, head, start, c), dS, c.E, d, c.D, left, c.E, c.BE)
        from_start, to_end, whole = decays_of_state(inputs, head, start, 0, c, c.DP)
        k = load(head.k, inputs.k.row, i, inputs.T, 0, c.D, c.DP)  # (C, DP)
        q = load(head.q, inputs.q.row, i, inputs.T, 0, c.D, c.DP)  # (C, DP)
        do = load(DO + head.rows * c.E, c.E, i, inputs.T, left, c.E, c.BE)  # (C, BE)
        dr = load(DR + head.rows * c.E, c.E, i, inputs.T, left, c.E, c.BE)  # (C, BE)
        # dr = X.mT @ (du + (k * (end - c).exp()) @ dS)
        dr = (dr + times(k * to_end, dS.to(k.dtype))).to(k.dtype)
        # dS = end.exp().mT * dS + (q * c.exp()).mT @ do - (erase * k * c.exp()).mT @ dr
        dS = whole * dS + times(tl.trans(q * from_start), do)
        if inputs.erase is not None:
            x = load(X + head.rows * c.C, c.C, i, inputs.T, 0, c.C, c.C)  # (C, C)
            dr = times(tl.trans(x), dr).to(k.dtype)
            dS -= times(tl.trans(k * (load_erase(inputs, head, i) * from_start)), dr)
        save(DR + head.rows * c.E, dr, c.E, i, inputs.T, left, c.E, c.BE)


@jit
def gradients(inputs, U, States, DStates, DO, DR, DQ, DK, DC, DErase, c: tl.constexpr):
    """dq and dk for one chunk and BD columns, and the parts of dc and derase that come from these
    columns."""
    head, start = my_chunk(inputs, c)
    left, tiles = tl.program_id(1) * c.BD, tl.cdiv(c.D, c.BD)
    i, d = start + tl.arange(0, c.C), left + tl.arange(0, c.BD)
    dp = tl.zeros((c.C, c.C), tl.float32)  # gradient of the scores in o
    da = dp  # gradient of the scores in w
    dq = tl.zeros((c.C, c.BD), tl.float32)
    dw, dk = dq, dq  # gradients of erase k, and of k
    SdS = tl.zeros((c.BD, c.BE), tl.float32)  # S * dS
    for e in tl.range(0, c.E, c.BE):
        u = load(begin(U, head.batch, head.number), U.row, i, inputs.T, e, c.E, c.BE)  # (C, BE)
        do = load(DO + head.rows * c.E, c.E, i, inputs.T, e, c.E, c.BE)  # (C, BE)
        S = load(state_of(States, head, start, c), c.E, d, c.D, e, c.E, c.BE)  # (BD, BE)
        dS = load(state_of(DStates, head, start, c), c.E, d, c.D, e, c.E, c.BE)  # (BD, BE)
        # dp = do @ u.mT; dq = do @ S.mT; dk = u @ dS.mT
        dp += times(do, tl.trans(u))
        dq += times(do, tl.trans(S))
        dk += times(u, tl.trans(dS))
        SdS += S.to(tl.float32) * dS.to(tl.float32)
        if inputs.erase is not None:  # the same with -dr in place of do
            dr = load(DR + head.rows * c.E, c.E, i, inputs.T, e, c.E, c.BE)  # (C, BE)
            da -= times(dr, tl.trans(u))
            dw -= times(dr, tl.trans(S))
    from_start, to_end, whole = decays_of_state(inputs, head, start, left, c, c.BD)
    decay = decays_of_pairs(inputs, head, start, left, c)
    q = load(head.q, inputs.q.row, i, inputs.T, left, c.D, c.BD)  # (C, BD)
    k = load(head.k, inputs.k.row, i, inputs.T, left, c.D, c.BD)  # (C, BD)
    dk *= to_end
    # the gradient of `end`, which multiplies the whole state at the chunk's end
    dend = tl.sum(whole * SdS, 1) + tl.sum(dk * k, 0)  # (BD,)
    dq_pairs, dk_pairs = pairs_back(dp, q, k, decay, c)
    dq, dk = dq * from_start + dq_pairs, dk + dk_pairs
    dc = q * dq  # exp(c) multiplies each query
    if inputs.erase is not None:
        erase = load_erase(inputs, head, i)
        da = tl.where(i[:, None] > i[None, :], da, 0.0)
        dw_pairs, dk_pairs = pairs_back(da, (erase * k).to(k.dtype), k, decay, c)
        dw = dw * from_start + dw_pairs
        dk += dk_pairs
        dc += erase * k * dw
        tl.store(
            DErase + (head.rows + i) * tiles + tl.program_id(1),
            tl.sum(k * dw, 1),
            mask=i < inputs.T,
        )
    if inputs.c is not None:
        dc -= k * dk  # and divides each key that is written
        dc += tl.where((i == tl.minimum(start + c.C, inputs.T) - 1)[:, None], dend[None, :], 0.0)
        if c.channels:
            save(DC + head.rows * c.D, dc, c.D, i, inputs.T, left, c.D, c.BD)
        else:
            tl.store(
                DC + (head.rows + i) * tiles + tl.program_id(1), tl.sum(dc, 1), mask=i < inputs.T
            )
    if inputs.erase is not None:
        dk += load_erase(inputs, head, i) * dw
    save(DQ + head.rows * c.D, dq, c.D, i, inputs.T, left, c.D, c.BD)
    save(DK + head.rows * c.D, dk, c.D, i, inputs.T, left, c.D, c.BD)


# --------------------------------------------------------------------------------------------- host


def recur(q, k, v, forget=None, erase=None):
    """`one_chunk` of mixers/recurrent.py over all tokens, from a state of 0: o (B, H, T, E).

    q, k (B, H or 1, T, D), v (B, H, T, E), multiplied by write, of one dtype: float32, float16 or
    bfloat16. forget
    (B, H, T, 1 or D), logarithms; None: no forgetting. erase (B, H, T, 1); None: no erasing.
    Differentiable once. Raises ValueError on inputs that the kernels cannot compute."""
    for bad, why in problems(q, k, v, forget, erase):
        if bad:
            raise ValueError(why)
    q, k = (y.expand(*v.shape[:2], -1, -1) for y in (q, k))
    channels = forget is not None and forget.shape[3] > 1
    c = None if forget is None else sums_of_chunks(forget.float(), tiles(q, channels)[0])
    return run_forward(q, k, v, c, None if erase is None else erase[..., 0].float().contiguous())[0]


def problems(q, k, v, forget, erase):
    """Pairs (condition, error message). Each condition relies on the ones before it."""
    yield from kernels.problems_anywhere(q, k, v)
    yield q.shape[3] > 256, "a tile holds keys of width 256 at most: use --kernel=torch"
    B, H, T, _ = v.shape
    shapes = [tuple(part.shape) for part in (q, k, v, forget, erase) if part is not None]
    yield (
        (
            q.shape != k.shape
            or q.shape[::2] != (B, T)
            or q.shape[1] not in (1, H)
            or forget is not None
            and forget.shape not in ((B, H, T, 1), (B, H, T, q.shape[3]))
            or erase is not None
            and erase.shape != (B, H, T, 1)
        ),
        (
            f"q and k (B, H or 1, T, D), v (B, H, T, E), forget (B, H, T, 1 or D) and erase (B, H, T, 1) must agree, "
            f"but they are {shapes}"
        ),
    )
    # on a GPU the check would have to wait
    if v.device.type == "cpu" and not torch.compiler.is_compiling():
        yield (
            erase is not None and not bool(((erase >= 0) & (erase <= 1)).all()),
            (
                "erase is the share of a key's stored value that is subtracted: give a share from 0 to 1"
            ),
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
    return v.new_empty(v.shape), q.new_empty(
        (0,) if erase is None else (*v.shape[:3], sizes_of(q, v, c).C)
    )


@torch.library.custom_op(
    "nanoattention::recur_backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor X, Tensor do) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def run_backward(q, k, v, c, erase, X, do):
    grads = dq, dk, dv, dc, derase = allocate_backward(q, k, v, c, erase, X, do)
    inputs, sizes, U, States = scanned(q, k, v, c, erase, X)
    DStates = torch.empty_like(States)
    launch(read_back, inputs, sizes, (do, dv), sizes.BE)
    launch(scan_back, inputs, sizes, (X, do, dv, DStates), sizes.BE)
    # `gradients` needs the most registers
    sizes = sizes._replace(BE=min(sizes.BE, tiles(q, sizes.channels)[3]))
    launch(gradients, inputs, sizes, (U, States, DStates, do, dv, dq, dk, dc, derase), sizes.BD)
    return grads


@run_backward.register_fake
def allocate_backward(q, k, v, c, erase, X, do):
    sizes = sizes_of(q, v, c)
    parts = count(sizes.D, sizes.BD)  # tiles that add to a row's gradients
    dc = (0,) if c is None else c.shape if sizes.channels else (*v.shape[:3], parts)
    derase = (0,) if erase is None else (*v.shape[:3], parts)
    rows = [q.new_empty(shape, dtype=torch.float32) for shape in (dc, derase)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *rows


def sizes_of(q, v, c):
    """The ChunkSizes of a call, as plain numbers."""
    D, E, channels = q.shape[3], v.shape[3], c is not None and c.shape[3] > 1
    C, BD, BE, _ = tiles(q, channels)
    invert = "ieee" if q.dtype == torch.float32 else "tf32x3"  # u depends on X: tf32 is too coarse
    return ChunkSizes(C, D, padded(D), min(BD, padded(D)), E, min(BE, padded(E)), channels, invert)


def scanned(q, k, v, c, erase, X, solve=False):
    """Scan the chunks; with `solve`, compute X first. Returns the StateInputs and ChunkSizes of all
    kernels, u as a Matrix (v itself without erasing), and the states before all chunks."""
    matrices = (matrix(part, name) for part, name in ((q, "q"), (k, "k"), (v, "v")))
    inputs, sizes = StateInputs(*matrices, c, erase, *v.shape[1:3]), sizes_of(q, v, c)
    if solve and erase is not None:
        launch(invert, inputs, sizes, (X,))
    U = inputs.v if erase is None else matrix(v.new_empty(v.shape))
    States = v.new_empty(*v.shape[:2], count(v.shape[2], sizes.C), sizes.D, sizes.E)
    launch(scan, inputs, sizes, (X, U, States), sizes.BE)
    return inputs, sizes, U, States


def launch(kernel, inputs, sizes, tensors, columns=None):
    """Start a program for each chunk of each head (a scan: for each head), and for each tile of
    `columns` columns. tensors: the kernel's further arguments."""
    B, heads, T, E = inputs.v.at.shape
    walks = kernel in (scan, scan_back)
    grid = (
        B * heads * (1 if walks else count(T, sizes.C)),
        1 if columns is None else count(sizes.D if kernel is gradients else E, columns),
    )
    # chosen so that no kernel spills registers in Triton 3.9; in 3.6 a few spill 8 or 16 bytes
    # float32 takes twice the registers and twice the shared memory
    wide = inputs.v.at.dtype == torch.float32
    warps, stages = 8 if walks or kernel is gradients or wide else 4, 1 if walks and wide else 3
    with torch.cuda.device_of(inputs.v.at):
        constants = ChunkSizes(*map(tl.constexpr, sizes))
        kernel[grid](
            inputs, *tensors, constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True
        )


def backward(ctx, do, _):
    q, k, v, c, erase, X = ctx.saved_tensors
    dq, dk, dv, dc, derase = run_backward(q, k, v, c, erase, X, do.contiguous())
    dc = None if c is None else dc.sum(-1, keepdim=True) if c.shape[3] == 1 else dc
    return dq, dk, dv, dc, None if erase is None else derase.sum(-1), None


run_forward.register_autograd(
    backward, setup_context=(lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]))
)
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
