"""The state of mixers/recurrent.py in Triton: `step` for all chunks of a sequence, one fused forward and backward.

What one chunk does, with S the state before it and S' after it (c sums the logarithms of forget since the chunk began,
`end` is the last of them, and left_ij = exp(c_i - c_j) for j <= i, otherwise 0):

    w = (k exp(c)) S + below(k k^T left) u      what S answers to each key, of earlier chunks and of this one
    u = v - erase w                             that is u = X (v - erase (k exp(c)) S), with X the inverse of 1 + A,
                                                A = erase below(k k^T left)
    o = (q exp(c)) S + (q k^T left) u
    S' = exp(end) S + (k exp(end - c))^T u

w is read as o is, by a query erase k: the gradients of both are found alike. Only the states between chunks depend on
each other. So `scan` and `scan_back` walk over the chunks and keep a state, or its gradient, on the chip; all else is
done for all chunks at once. Between forward and backward only X is kept, T x C numbers: the states are found again.

What a recipe has not got does not exist for the compiler: c or erase is None, and `channels` says whether each channel
of the keys fades at its own rate. v comes multiplied by write; sums c are made outside, in PyTorch, and so are theirs.
Nothing is added atomically, so two runs agree bit for bit.

Legend, beside mixers/recurrent.py's                     shapes in comments
  C         tokens of a chunk                               (C, ..)   the tokens of one chunk
  DP        D padded to a power of two                      (.., BD)  a tile of BD columns of q and k
  X         the inverse, also in what follows the chunk     (.., BE)  a tile of BE columns of v
  dr        the gradient of v - erase (k exp(c)) S, so dv   do, du    the gradients that arrive at o and at u; so dq, ..
"""
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import kernels
from kernels import INTERPRETED, Matrix, begin, count, jit, matrix, padded, times, tl


class Inputs(NamedTuple):
    q: Matrix                   # (B, H, T, D)
    k: Matrix                   # (B, H, T, D)
    v: Matrix                   # (B, H, T, E)
    c: Any                      # (B, H, T, 1 or D) float32, or None: nothing fades
    erase: Any                  # (B, H, T) float32, or None: nothing is taken off
    H: int
    T: int


class Sizes(NamedTuple):        # all known to the compiler
    C: int
    D: int
    DP: int
    BD: int
    E: int
    BE: int
    channels: bool
    invert: str                 # precision of products of float32 numbers in `invert`


class Head(NamedTuple):
    batch: Any
    number: Any                 # within its sequence
    q: Any                      # where its rows begin
    k: Any
    rows: Any                   # how many rows of tensors (B, H, T, ..) come before
    chunks: Any                 # how many chunks


# ------------------------------------------------------------------------------------------------ loading and fading

@jit
def head_of(inputs, number, c: tl.constexpr):
    """The head of this number, counted over the whole batch."""
    batch, h = (number // inputs.H).to(tl.int64), (number % inputs.H).to(tl.int64)
    q, k = begin(inputs.q, batch, h), begin(inputs.k, batch, h)
    return Head(batch, h, q, k, number.to(tl.int64) * inputs.T, number.to(tl.int64) * tl.cdiv(inputs.T, c.C))


@jit
def my_chunk(inputs, c: tl.constexpr):
    """This program's head, and the first token of its chunk."""
    chunks = tl.cdiv(inputs.T, c.C)
    return head_of(inputs, tl.program_id(0) // chunks, c), tl.program_id(0) % chunks * c.C


@jit
def tile(i, stride, T, left, D: tl.constexpr, BD: tl.constexpr):
    """Offsets of rows i and BD columns from `left` on in a (T, D) matrix, and which of them there are."""
    d = left + tl.arange(0, BD)
    return i[:, None] * stride + d[None, :], (i < T)[:, None] & (d < D)[None, :]


@jit
def load(at, stride, i, T, left, D: tl.constexpr, BD: tl.constexpr):
    offsets, mask = tile(i, stride, T, left, D, BD)
    return tl.load(at + offsets, mask=mask, other=0.)                           # (rows, BD)


@jit
def save(at, value, stride, i, T, left, D: tl.constexpr, BD: tl.constexpr):
    offsets, mask = tile(i, stride, T, left, D, BD)
    tl.store(at + offsets, value.to(at.dtype.element_ty), mask=mask)


@jit
def state_of(States, head, start, c: tl.constexpr):
    """Where the state before the chunk that begins at `start` lies in (B, H, chunks, D, E)."""
    return States + (head.chunks + start // c.C) * (c.D * c.E)


@jit
def sums(inputs, head, i, left, c: tl.constexpr, BD: tl.constexpr):
    """c of tokens i: of a head, (rows, 1), or of these channels, (rows, BD)."""
    if c.channels:
        return load(inputs.c + head.rows * c.D, c.D, i, inputs.T, left, c.D, BD)                           # (rows, BD)
    else:
        return tl.load(inputs.c + head.rows + i, mask=i < inputs.T, other=0.)[:, None]                      # (rows, 1)


@jit
def fading(inputs, head, start, left, c: tl.constexpr, BD: tl.constexpr):
    """What is left of the chunk's first state at each token, of each token at the chunk's end, both (C, 1 or BD), and
    of the first state there, (1 or BD, 1)."""
    if inputs.c is None:
        return 1., 1., 1.
    else:
        here = sums(inputs, head, start + tl.arange(0, c.C), left, c, BD)                                   # (C, ..)
        last = tl.minimum(start + c.C, inputs.T) - 1 + tl.arange(0, 1)
        end = sums(inputs, head, last, left, c, BD)                                                         # (1, ..)
        # c.exp(), (end - c).exp(), end.exp().mT
        return tl.exp(here), tl.exp(end - here), tl.trans(tl.exp(end))


@jit
def left_of(inputs, head, start, left, c: tl.constexpr):
    """What is left at token i of what token j wrote, 0 for later j: (C, C), or of these channels (C, C, BD)."""
    i = tl.arange(0, c.C)
    past = i[:, None] >= i[None, :]
    if inputs.c is None:
        return tl.where(past, 1., 0.)
    else:                                                                       # later tokens would overflow
        here = sums(inputs, head, start + i, left, c, c.BD)                                                 # (C, ..)
        # left = (c[:, None] - c[None]).exp().tril()
        if c.channels:
            return tl.where(past[:, :, None], tl.exp(tl.minimum(here[:, None, :] - here[None, :, :], 0.)), 0.)
        else:
            return tl.where(past, tl.exp(tl.minimum(here - tl.trans(here), 0.)), 0.)


# ------------------------------------------------------------------------------------------------ products of a chunk

@jit
def pairs(a, b, left, c: tl.constexpr):
    """a_i . b_j times what is left, of BD columns: (C, C)."""
    if c.channels:
        # torch.einsum("id,jd,ijd->ij", a, b, left)
        return tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :] * left, 2)
    else:
        # a @ b.mT * left
        return times(a, tl.trans(b)) * left


@jit
def pairs_back(dp, a, b, left, c: tl.constexpr):
    """The gradients of a and b, (C, BD) each, from that of their pairs (C, C)."""
    if c.channels:
        # da = torch.einsum("ij,jd,ijd->id", dp, b, left); db = torch.einsum("ij,id,ijd->jd", dp, a, left)
        p = dp[:, :, None] * left
        return tl.sum(p * b.to(tl.float32)[None, :, :], 1), tl.sum(p * a.to(tl.float32)[:, None, :], 0)
    else:
        # da = (dp * left) @ b; db = (dp * left).mT @ a
        return times(dp * left, b), times(tl.trans(dp * left), a)


@jit
def scores(at, stride, inputs, head, start, c: tl.constexpr):
    """Every token's q, or its k, with the keys of its chunk, times what is left: (C, C)."""
    i = start + tl.arange(0, c.C)
    p = tl.zeros((c.C, c.C), tl.float32)
    for left in tl.range(0, c.D, c.BD):
        a = load(at, stride, i, inputs.T, left, c.D, c.BD)                      # (C, BD)
        k = load(head.k, inputs.k.row, i, inputs.T, left, c.D, c.BD)            # (C, BD)
        p += pairs(a, k, left_of(inputs, head, start, left, c), c)
    return p


@jit
def below(p, c: tl.constexpr):
    """p.tril(-1): a token does not see itself."""
    i = tl.arange(0, c.C)
    return tl.where(i[:, None] > i[None, :], p, 0.)


@jit
def erasing(inputs, head, i):
    return tl.load(inputs.erase + head.rows + i, mask=i < inputs.T, other=0.)[:, None]                      # (C, 1)


# ------------------------------------------------------------------------------------------------------------ forward

@jit
def invert(inputs, X, c: tl.constexpr):
    """X = (1 + A)^-1, from blocks of one token, whose inverse is 1, to blocks of two, four, .. The inverses of blocks
    stay small, where the powers of A, of which a shorter series could be made, do not."""
    head, start = my_chunk(inputs, c)
    i, t = start + tl.arange(0, c.C), tl.arange(0, c.C)
    A = erasing(inputs, head, i) * below(scores(head.k, inputs.k.row, inputs, head, start, c), c)
    x = tl.where(t[:, None] == t[None, :], 1., 0.)
    size = 1
    while size < c.C:
        row, col = t[:, None] // size, t[None, :] // size
        corner = tl.where((row == col + 1) & (col % 2 == 0), A, 0.)             # of each block of 2 size: lower left
        # x = x - x @ corner @ x
        x -= tl.dot(tl.dot(x, corner, input_precision=c.invert), x, input_precision=c.invert)
        size *= 2
    save(X + head.rows * c.C, x, c.C, i, inputs.T, 0, c.C, c.C)


@jit
def scan(inputs, X, U, States, c: tl.constexpr):
    """The state before each chunk, and u, of BE columns of v. U is written only where something is erased."""
    head, left = head_of(inputs, tl.program_id(0), c), tl.program_id(1) * c.BE
    d = tl.arange(0, c.DP)
    S = tl.zeros((c.DP, c.BE), tl.float32)
    for start in tl.range(0, inputs.T, c.C):
        i = start + tl.arange(0, c.C)
        save(state_of(States, head, start, c), S, c.E, d, c.D, left, c.E, c.BE)
        first, last, end = fading(inputs, head, start, 0, c, c.DP)
        k = load(head.k, inputs.k.row, i, inputs.T, 0, c.D, c.DP)               # (C, DP)
        u = load(begin(inputs.v, head.batch, head.number), inputs.v.row, i, inputs.T, left, c.E, c.BE)      # (C, BE)
        if inputs.erase is not None:
            # u = X @ (v - erase * ((k * c.exp()) @ S))
            r = u - times(k * (erasing(inputs, head, i) * first), S.to(k.dtype))
            x = load(X + head.rows * c.C, c.C, i, inputs.T, 0, c.C, c.C)        # (C, C)
            u = times(x, r.to(k.dtype)).to(k.dtype)
            save(begin(U, head.batch, head.number), u, U.row, i, inputs.T, left, c.E, c.BE)
        # S = end.exp().mT * S + (k * (end - c).exp()).mT @ u
        S = end * S + times(tl.trans(k * last), u)


@jit
def read(inputs, U, States, O, c: tl.constexpr):
    """o of one chunk and BE columns."""
    head, start = my_chunk(inputs, c)
    i, left = start + tl.arange(0, c.C), tl.program_id(1) * c.BE
    first, _, _ = fading(inputs, head, start, 0, c, c.DP)
    q = load(head.q, inputs.q.row, i, inputs.T, 0, c.D, c.DP)                   # (C, DP)
    S = load(state_of(States, head, start, c), c.E, tl.arange(0, c.DP), c.D, left, c.E, c.BE)               # (DP, BE)
    u = load(begin(U, head.batch, head.number), U.row, i, inputs.T, left, c.E, c.BE)                      # (C, BE)
    # o = (q * c.exp()) @ S + scores(q, k, c) @ u
    o = times(q * first, S) + times(scores(head.q, inputs.q.row, inputs, head, start, c), u)
    save(O + head.rows * c.E, o, c.E, i, inputs.T, left, c.E, c.BE)


# ----------------------------------------------------------------------------------------------------------- backward

@jit
def read_back(inputs, DO, DR, c: tl.constexpr):
    """What o of its own chunk adds to du, for one chunk and BE columns."""
    head, start = my_chunk(inputs, c)
    i, left = start + tl.arange(0, c.C), tl.program_id(1) * c.BE
    do = load(DO + head.rows * c.E, c.E, i, inputs.T, left, c.E, c.BE)          # (C, BE)
    # du = scores(q, k, c).mT @ do
    du = times(tl.trans(scores(head.q, inputs.q.row, inputs, head, start, c)), do)
    save(DR + head.rows * c.E, du, c.E, i, inputs.T, left, c.E, c.BE)


@jit
def scan_back(inputs, X, DO, DR, DStates, c: tl.constexpr):
    """The gradient of the state after each chunk, from the last to the first, and dr in place of du."""
    head, left = head_of(inputs, tl.program_id(0), c), tl.program_id(1) * c.BE
    chunks, d = tl.cdiv(inputs.T, c.C), tl.arange(0, c.DP)
    dS = tl.zeros((c.DP, c.BE), tl.float32)
    for back in tl.range(0, chunks):
        start = (chunks - 1 - back) * c.C
        i = start + tl.arange(0, c.C)
        save(state_of(DStates, head, start, c), dS, c.E, d, c.D, left, c.E, c.BE)
        first, last, end = fading(inputs, head, start, 0, c, c.DP)
        k = load(head.k, inputs.k.row, i, inputs.T, 0, c.D, c.DP)               # (C, DP)
        q = load(head.q, inputs.q.row, i, inputs.T, 0, c.D, c.DP)               # (C, DP)
        do = load(DO + head.rows * c.E, c.E, i, inputs.T, left, c.E, c.BE)      # (C, BE)
        dr = load(DR + head.rows * c.E, c.E, i, inputs.T, left, c.E, c.BE)      # (C, BE)
        # dr = X.mT @ (du + (k * (end - c).exp()) @ dS)
        dr = (dr + times(k * last, dS.to(k.dtype))).to(k.dtype)
        # dS = end.exp().mT * dS + (q * c.exp()).mT @ do - (erase * k * c.exp()).mT @ dr
        dS = end * dS + times(tl.trans(q * first), do)
        if inputs.erase is not None:
            x = load(X + head.rows * c.C, c.C, i, inputs.T, 0, c.C, c.C)        # (C, C)
            dr = times(tl.trans(x), dr).to(k.dtype)
            dS -= times(tl.trans(k * (erasing(inputs, head, i) * first)), dr)
        save(DR + head.rows * c.E, dr, c.E, i, inputs.T, left, c.E, c.BE)


@jit
def gradients(inputs, U, States, DStates, DO, DR, DQ, DK, DC, DErase, c: tl.constexpr):
    """dq and dk of one chunk and BD columns, and what these add to the gradients of c and erase."""
    head, start = my_chunk(inputs, c)
    left, tiles = tl.program_id(1) * c.BD, tl.cdiv(c.D, c.BD)
    i, d = start + tl.arange(0, c.C), left + tl.arange(0, c.BD)
    dp = tl.zeros((c.C, c.C), tl.float32)                                       # of scores(q, k, c),
    da = dp                                                                     # of those by which w is read
    dq = tl.zeros((c.C, c.BD), tl.float32)
    dw, dk = dq, dq                                                             # of erase k, as w's query; and of k
    held = tl.zeros((c.BD, c.BE), tl.float32)
    for e in tl.range(0, c.E, c.BE):
        u = load(begin(U, head.batch, head.number), U.row, i, inputs.T, e, c.E, c.BE)                     # (C, BE)
        do = load(DO + head.rows * c.E, c.E, i, inputs.T, e, c.E, c.BE)         # (C, BE)
        S = load(state_of(States, head, start, c), c.E, d, c.D, e, c.E, c.BE)   # (BD, BE)
        dS = load(state_of(DStates, head, start, c), c.E, d, c.D, e, c.E, c.BE) # (BD, BE)
        # dp = do @ u.mT; dq = do @ S.mT; dk = u @ dS.mT
        dp += times(do, tl.trans(u))
        dq += times(do, tl.trans(S))
        dk += times(u, tl.trans(dS))
        held += S.to(tl.float32) * dS.to(tl.float32)
        if inputs.erase is not None:                                            # the same with -dr for do
            dr = load(DR + head.rows * c.E, c.E, i, inputs.T, e, c.E, c.BE)     # (C, BE)
            da -= times(dr, tl.trans(u))
            dw -= times(dr, tl.trans(S))
    first, last, end = fading(inputs, head, start, left, c, c.BD)
    still = left_of(inputs, head, start, left, c)
    q = load(head.q, inputs.q.row, i, inputs.T, left, c.D, c.BD)                # (C, BD)
    k = load(head.k, inputs.k.row, i, inputs.T, left, c.D, c.BD)                # (C, BD)
    dk *= last
    # what the last c multiplies: all that is held at the chunk's end
    ends = tl.sum(end * held, 1) + tl.sum(dk * k, 0)                                                        # (BD,)
    more, moreover = pairs_back(dp, q, k, still, c)
    dq, dk = dq * first + more, dk + moreover
    dc = q * dq                                                                 # exp(c) multiplies each query,
    if inputs.erase is not None:
        erase = erasing(inputs, head, i)
        more, moreover = pairs_back(below(da, c), (erase * k).to(k.dtype), k, still, c)
        dw = dw * first + more
        dk += moreover
        dc += erase * k * dw
        tl.store(DErase + (head.rows + i) * tiles + tl.program_id(1), tl.sum(k * dw, 1), mask=i < inputs.T)
    if inputs.c is not None:
        dc -= k * dk                                                            # and divides each key that is written
        dc += tl.where((i == tl.minimum(start + c.C, inputs.T) - 1)[:, None], ends[None, :], 0.)
        if c.channels:
            save(DC + head.rows * c.D, dc, c.D, i, inputs.T, left, c.D, c.BD)
        else:
            tl.store(DC + (head.rows + i) * tiles + tl.program_id(1), tl.sum(dc, 1), mask=i < inputs.T)
    if inputs.erase is not None:
        dk += erasing(inputs, head, i) * dw
    save(DQ + head.rows * c.D, dq, c.D, i, inputs.T, left, c.D, c.BD)
    save(DK + head.rows * c.D, dk, c.D, i, inputs.T, left, c.D, c.BD)


# --------------------------------------------------------------------------------------------------------------- host

def recur(q, k, v, forget=None, erase=None):
    """`step` of mixers/recurrent.py over all tokens, from a state of 0: o (B, H, T, E).

    q, k (B, H or 1, T, D), v (B, H, T, E), multiplied by write, of one dtype: float32, float16 or bfloat16. forget
    (B, H, T, 1 or D), logarithms; None: nothing fades. erase (B, H, T, 1); None: nothing is taken off. All is
    differentiable, once. Raises ValueError on what the kernels cannot do.
    """
    for bad, why in problems(q, k, v, forget, erase):
        if bad:
            raise ValueError(why)
    q, k = (y.expand(*v.shape[:2], -1, -1) for y in (q, k))
    channels = forget is not None and forget.shape[3] > 1
    c = None if forget is None else sums_of_chunks(forget.float(), tiles(q, channels)[0])
    return run_forward(q, k, v, c, None if erase is None else erase[..., 0].float().contiguous())[0]


def problems(q, k, v, forget, erase):
    """Pairs of a condition and what to say about it. Each relies on those before."""
    yield from kernels.problems_anywhere(q, k, v)
    yield q.shape[3] > 256, "a tile holds keys of width 256 at most: use --kernel=torch"
    B, H, T, _ = v.shape
    shapes = [tuple(part.shape) for part in (q, k, v, forget, erase) if part is not None]
    yield (q.shape != k.shape or q.shape[::2] != (B, T) or q.shape[1] not in (1, H)
           or forget is not None and forget.shape not in ((B, H, T, 1), (B, H, T, q.shape[3]))
           or erase is not None and erase.shape != (B, H, T, 1)), (
        f"q and k (B, H or 1, T, D), v (B, H, T, E), forget (B, H, T, 1 or D) and erase (B, H, T, 1) must agree, "
        f"but they are {shapes}")
    if v.device.type == "cpu" and not torch.compiler.is_compiling():    # a GPU would have to be waited for
        yield erase is not None and not bool(((erase >= 0) & (erase <= 1)).all()), (
            "erase is the share of what stands under a key that is taken off: from 0 to 1")
        yield forget is not None and bool((forget > 0).any()), "forget is the logarithm of a share: at most 0"


def sums_of_chunks(forget, size):
    """forget.cumsum(-2) that begins anew with every chunk."""
    T = forget.shape[2]
    chunks = F.pad(forget, (0, 0, 0, -T % size)).unflatten(2, (-1, size))
    return chunks.cumsum(3).flatten(2, 3)[:, :, :T].contiguous()


SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? c, Tensor? erase"


@torch.library.custom_op("nanoattention::recur", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def run_forward(q, k, v, c, erase):
    o, X = allocate_forward(q, k, v, c, erase)
    inputs, sizes = described(q, k, v, c, erase)
    if erase is not None:
        launch(invert, inputs, sizes, (X,))
    U, States = scanned(inputs, sizes, X, v)
    launch(read, inputs, sizes, (U, States, o), sizes.BE)
    return o, X


@run_forward.register_fake
def allocate_forward(q, k, v, c, erase):
    size = described_sizes(q, v, c).C
    return contiguous_like(v), q.new_empty((0,) if erase is None else (*v.shape[:3], size))


@torch.library.custom_op("nanoattention::recur_backward", mutates_args=(),
                         schema=f"({SCHEMA}, Tensor X, Tensor do) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def run_backward(q, k, v, c, erase, X, do):
    grads = dq, dk, dv, dc, derase = allocate_backward(q, k, v, c, erase, X, do)
    inputs, sizes = described(q, k, v, c, erase)
    U, States = scanned(inputs, sizes, X, v)
    DStates = torch.empty_like(States)
    launch(read_back, inputs, sizes, (do, dv), sizes.BE)
    launch(scan_back, inputs, sizes, (X, do, dv, DStates), sizes.BE)
    sizes = sizes._replace(BE=min(sizes.BE, tiles(q, sizes.channels)[3]))       # it has the most to hold
    launch(gradients, inputs, sizes, (U, States, DStates, do, dv, dq, dk, dc, derase), sizes.BD)
    return grads


@run_backward.register_fake
def allocate_backward(q, k, v, c, erase, X, do):
    sizes = described_sizes(q, v, c)
    parts = count(sizes.D, sizes.BD)                                            # each adds to the gradients of a row
    dc = (0,) if c is None else c.shape if sizes.channels else (*v.shape[:3], parts)
    derase = (0,) if erase is None else (*v.shape[:3], parts)
    rows = [q.new_empty(shape, dtype=torch.float32) for shape in (dc, derase)]
    return contiguous_like(q), contiguous_like(k), contiguous_like(v), *rows


def contiguous_like(y):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def described_sizes(q, v, c):
    """How a call is cut: Sizes of plain numbers."""
    D, E, channels = q.shape[3], v.shape[3], c is not None and c.shape[3] > 1
    C, BD, BE, _ = tiles(q, channels)
    invert = "ieee" if q.dtype == torch.float32 else "tf32x3"                   # X is what u is made of: no less
    return Sizes(C, D, padded(D), min(BD, padded(D)), E, min(BE, padded(E)), channels, invert)


def described(q, k, v, c, erase):
    """What all kernels take: the inputs, and how the call is cut."""
    q, k, v = (matrix(part, name) for part, name in ((q, "q"), (k, "k"), (v, "v")))
    return Inputs(q, k, v, c, erase, v.at.shape[1], v.at.shape[2]), described_sizes(q.at, v.at, c)


def scanned(inputs, sizes, X, v):
    """u as a Matrix, which is v where nothing is erased, and the states."""
    U = inputs.v if inputs.erase is None else matrix(contiguous_like(v))
    States = v.new_empty(*v.shape[:2], count(v.shape[2], sizes.C), sizes.D, sizes.E)
    launch(scan, inputs, sizes, (X, U, States), sizes.BE)
    return U, States


def launch(kernel, inputs, sizes, more, columns=None):
    """A program for each chunk of each head (a scan: for each head), and each tile of so many columns."""
    B, heads, T, E = inputs.v.at.shape
    walks = kernel in (scan, scan_back)
    grid = (B * heads * (1 if walks else count(T, sizes.C)),
            1 if columns is None else count(sizes.D if kernel is gradients else E, columns))
    # so that none spills registers to memory in Triton 3.9; in 3.6 a few spill 8 or 16 bytes
    wide = inputs.v.at.dtype == torch.float32   # its numbers take twice the registers, and twice the shared memory
    warps, stages = 8 if walks or kernel is gradients or wide else 4, 1 if walks and wide else 3
    with torch.cuda.device_of(inputs.v.at):
        kernel[grid](inputs, *more, Sizes(*map(tl.constexpr, sizes)), num_warps=warps, num_stages=stages,
                     enable_fp_fusion=True)


def remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def differentiate(ctx, do, _):
    q, k, v, c, erase, X = ctx.saved_tensors
    dq, dk, dv, dc, derase = run_backward(q, k, v, c, erase, X, do.contiguous())
    dc = None if c is None else dc.sum(-1, keepdim=True) if c.shape[3] == 1 else dc
    return dq, dk, dv, dc, None if erase is None else derase.sum(-1)


run_forward.register_autograd(differentiate, setup_context=remember)
run_backward.register_autograd(kernels.refuse)


# -------------------------------------------------------------------------------------------------------------- tiles

TILES = {  # GPU generation (0: float32, on any), width of q and k, is there a rate a channel?
    (90, 64, False): (64, 64, 64, 32), (90, 128, False): (64, 64, 64, 32), (90, 256, False): (32, 64, 16, 16),
    (80, 64, False): (32, 64, 64, 64), (80, 128, False): (32, 64, 32, 32), (80, 256, False): (32, 64, 16, 16),
    (0, 64, False): (16, 32, 32, 32), (0, 128, False): (16, 64, 32, 32), (0, 256, False): (16, 64, 16, 16),
    (90, 64, True): (16, 32, 64, 32), (90, 128, True): (16, 32, 64, 32), (90, 256, True): (16, 32, 16, 16),
    (80, 64, True): (16, 32, 64, 32), (80, 128, True): (16, 32, 32, 32), (80, 256, True): (16, 32, 16, 16),
    (0, 64, True): (16, 32, 32, 32), (0, 128, True): (16, 32, 32, 32), (0, 256, True): (16, 32, 16, 16),
}
SMALL = {False: (32, 16, 32, 16), True: (16, 16, 32, 16)}       # the interpreter: several tiles even of short inputs


def tiles(q, channels):
    """(C, BD, BE, BE of `gradients`) of a call: tokens of a chunk, columns of q and k, columns of v."""
    if INTERPRETED:
        return SMALL[channels]
    device = 0 if q.dtype == torch.float32 else kernels.generation(q.device)
    return TILES[device, max(64, padded(q.shape[3])), channels]
