"""The algorithm of Triton's tutorial on fused attention, as a rival of our kernels: plain causal softmax, no more.

FlashAttention-2 (Dao 2023, arXiv 2307.08691) in the form and with the tiles of Triton's tutorial 06, in our own code.
The forward pass keeps 128 rows and walks over 64 keys at a time. The backward pass has a program for 128 keys, which
walks over 32 rows at a time, and one for 128 rows, which walks over 32 keys. Tiles on the diagonal need a mask. At a
width of 128 a tile has 8 warps instead of the tutorial's 4, and the backward pass has 3 stages instead of 5, because
hundreds of bytes of registers would spill otherwise. q, k, v (B, H, T, D): contiguous, of one dtype, T a multiple of
128 and D a power of two of at least 16.
"""
import torch

from kernels import BINARY, LN2, jit, tl, triton

SIDE, STEP, FORWARD_STEP = 128, 32, 64          # rows or keys of a program, and how many of the others it takes at once


@jit
def tile_at(x, head, start, T, D: tl.constexpr, size: tl.constexpr):
    """Pointers to `size` rows of a head, (size, D)."""
    return x + head * T * D + (start + tl.arange(0, size))[:, None] * D + tl.arange(0, D)[None, :]


@jit
def forward(q, k, v, o, lse, T, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    start, head = tl.program_id(0) * M, tl.program_id(1).to(tl.int64)
    i = start + tl.arange(0, M)
    q_tile = tl.load(tile_at(q, head, start, T, D, M))
    top = tl.full((M,), -1e30, tl.float32)      # the running maximum of the scores, and the sum of exponentials
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for near in tl.static_range(2):             # full tiles, then those on the diagonal
        for j in tl.range(near * start, start + near * M, N):
            s = tl.dot(q_tile, tl.trans(tl.load(tile_at(k, head, j, T, D, N))), input_precision="ieee") * scale
            if near == 1:
                s = tl.where(i[:, None] >= (j + tl.arange(0, N))[None, :], s, -1e30)
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            v_tile = tl.load(tile_at(v, head, j, T, D, N))
            out = tl.dot(p.to(v_tile.dtype), v_tile, out * shrink[:, None], input_precision="ieee")
            top = higher
    tl.store(tile_at(o, head, start, T, D, M), (out / total[:, None]).to(o.dtype.element_ty))
    tl.store(lse + head * T + i, top + tl.log2(total))


@jit
def weights(left, right, lse, seen, scale, near: tl.constexpr):
    """p of a tile: (rows, keys) if left are queries and right keys, else (keys, rows). lse and seen match it."""
    p = tl.exp2(tl.dot(left, tl.trans(right), input_precision="ieee") * scale - lse)
    return tl.where(seen, p, 0.) if near == 1 else p


@jit
def backward_keys(q, k, v, do, lse, delta, dk, dv, T, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    start, head = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    j = start + tl.arange(0, N)
    k_tile, v_tile = tl.load(tile_at(k, head, start, T, D, N)), tl.load(tile_at(v, head, start, T, D, N))
    dk_sum = tl.zeros((N, D), tl.float32)
    dv_sum = tl.zeros((N, D), tl.float32)
    for far in tl.static_range(2):              # the diagonal, then the rows below it
        for row in tl.range(start + far * N, start + N if far == 0 else T, M):
            i = row + tl.arange(0, M)
            q_tile, do_tile = tl.load(tile_at(q, head, row, T, D, M)), tl.load(tile_at(do, head, row, T, D, M))
            # (keys, rows): p and ds then need no transposition, which would cost registers
            p = weights(k_tile, q_tile, tl.load(lse + head * T + i)[None, :], i[None, :] >= j[:, None], scale, 1 - far)
            dv_sum = tl.dot(p.to(do_tile.dtype), do_tile, dv_sum, input_precision="ieee")
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            ds = p * (dp - tl.load(delta + head * T + i)[None, :])
            dk_sum = tl.dot(ds.to(q_tile.dtype), q_tile, dk_sum, input_precision="ieee")
    tl.store(tile_at(dk, head, start, T, D, N), (dk_sum * (scale * LN2)).to(dk.dtype.element_ty))
    tl.store(tile_at(dv, head, start, T, D, N), dv_sum.to(dv.dtype.element_ty))


@jit
def backward_rows(q, k, v, do, lse, delta, dq, T, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    start, head = tl.program_id(0) * M, tl.program_id(1).to(tl.int64)
    i = start + tl.arange(0, M)
    q_tile, do_tile = tl.load(tile_at(q, head, start, T, D, M)), tl.load(tile_at(do, head, start, T, D, M))
    lse_tile, delta_tile = tl.load(lse + head * T + i)[:, None], tl.load(delta + head * T + i)[:, None]
    dq_sum = tl.zeros((M, D), tl.float32)
    for near in tl.static_range(2):
        for column in tl.range(near * start, start + near * M, N):
            k_tile, v_tile = tl.load(tile_at(k, head, column, T, D, N)), tl.load(tile_at(v, head, column, T, D, N))
            j = column + tl.arange(0, N)
            p = weights(q_tile, k_tile, lse_tile, i[:, None] >= j[None, :], scale, near)
            ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - delta_tile)
            dq_sum = tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum, input_precision="ieee")
    tl.store(tile_at(dq, head, start, T, D, M), (dq_sum * (scale * LN2)).to(dq.dtype.element_ty))


class PlainFlash(torch.autograd.Function):
    """o (B, H, T, D) of causal softmax attention, with scores q.k / sqrt(D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        (B, H, T, D), o = q.shape, torch.empty_like(q)
        if T % SIDE or not q.is_contiguous() or D != triton.next_power_of_2(D):
            raise ValueError(f"T must be a multiple of {SIDE}, D a power of two, and q contiguous")
        lse, ctx.scale = q.new_empty(B, H, T, dtype=torch.float32), BINARY * D ** -0.5   # scores count in powers of 2
        forward[T // SIDE, B * H](q, k, v, o, lse, T, ctx.scale, D, SIDE, FORWARD_STEP, num_stages=3,
                                  num_warps=4 if D <= 64 else 8)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        (B, H, T, D), do = q.shape, do.contiguous()
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        delta, grid = (o.float() * do.float()).sum(-1), (T // SIDE, B * H)
        like = {"num_warps": 4, "num_stages": 5} if D <= 64 else {"num_warps": 8, "num_stages": 3}
        backward_keys[grid](q, k, v, do, lse, delta, dk, dv, T, ctx.scale, D, STEP, SIDE, **like)
        backward_rows[grid](q, k, v, do, lse, delta, dq, T, ctx.scale, D, SIDE, STEP, **like)
        return dq, dk, dv
