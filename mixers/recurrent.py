"""Mixers with a state: a head keeps its past in one matrix S instead of keys and values.

Six of the nine recipes are the recurrent rivals in table 1 of Lazy Attention. Each token t has a
query, a key and a value, all row vectors. It updates S (D x E) and reads it:

    S   = forget_t S                            fade the state
    u   = write_t v_t - erase_t (k_t S)         subtract what S already returns for this key
    S   = S + k_t^T u                           write u under the key
    o_t = q_t S                                 read

`token_by_token` is this recurrence in PyTorch. The published models differ in forget, write and
erase, and in what happens before and after:

                    forget_t                     write_t  erase_t   before
    linear_state    1                            1        0         elu + 1
    retnet          gamma_h                      1        0         RoPE
    gla             sigmoid(x)^(1/16) a channel  1        0
    mamba2          exp(-A_h dt_t)               dt_t     0         conv; all heads one k
    deltanet        1                            beta_t   beta_t    conv, unit q and k
    gated_deltanet  exp(-A_h dt_t)               beta_t   beta_t    conv, unit q and k
    kda             exp(-A_h dt_t) a channel     beta_t   beta_t    conv, unit q and k
    ttt             1                            rate_t   gradient  RoPE within a chunk
    titans          1 - alpha_t, with momentum   rate_t   gradient  conv, unit q and k, RMS v

                    after
    linear_state    division by the sum of weights
    mamba2          + D_h v, silu gate, RMSNorm
    deltanet        RMSNorm a head
    kda             RMSNorm a head, gate
    ttt             q + LayerNorm, LayerNorm
    all others      RMSNorm a head, silu gate

ttt and titans write by gradient descent: u is a step that makes the state return v_t for k_t. The
gradient is taken at the state before the chunk of tokens that contains t. In ttt the loss has a
LayerNorm; in titans an MLP replaces S.

The weights of a row need not sum to 1, so no row needs a sink (except with --normalize=sum, which
divides by the sum of the weights). The size of the state does not depend on the number of tokens.
Training takes a chunk of C tokens at once, by matrix products (`one_chunk`), and
`mixers/recurrent_kernels.py` does the same in Triton.

As in the papers' code, a state runs through the whole sequence: document separators do not reset
it, and padding is a token like any other.

In this file: the recurrence, one chunk of it, one chunk of a state that learns, the rules, the axes
forget, write, conv, gate, out_norm and normalize, and the layer.

Shapes: B batch, H heads, T tokens, C tokens of a chunk, D width of q and k, E of v.

    q, k          (B, H or 1, T, D)
    v, u, o       (B, H, T, E)
    forget        (B, H, T, 1 or D): logarithms, at most 0
    write, erase  (B, H, T, 1)
    S             (B, H, D, E)
    c             (B, H, C, 1 or D): the sums of forget since the chunk began, so exp(c_i - c_j) is
                  the decay from token j to token i
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernels
from axes.base import Choice, Constant, Normal, only, split_heads
from axes.layer import Cache
from axes.outputs import EPS, GATES, OUT_NORMS, Gate, OutNorm, sigmoid_gate
from axes.queries_keys import FEATURES, SCALES, unit_square
from axes.rows import NORMALIZERS, same_heads
from kernels import wide
from mixers import recurrent_kernels
from mixers.base import Mixer, axes_of

# ------------------------------------------------------------------- the recurrence, token by token


def token_by_token(state, q, k, v, forget, erase=None):
    """The definition: one token after another, from the state (S,) before the first to (S,) after
    the last.

    v is already multiplied by write. erase None: nothing is subtracted. Returns o (B, H, T, E) and
    the state. `one_chunk` returns the same, faster. Either can be passed to Recurrent.read."""
    (S,) = state
    outputs = []
    for t in range(v.shape[2]):
        now = slice(t, t + 1)
        k_t = k[:, :, now]  # (B, H or 1, 1, D)
        u = v[:, :, now]  # (B, H, 1, E)
        S = forget[:, :, now].exp().mT * S  # fade
        if erase is not None:
            u = u - erase[:, :, now] * (k_t @ S)  # subtract what S returns for this key
        S = S + k_t.mT @ u  # write
        outputs.append(q[:, :, now] @ S)  # read
    return torch.cat(outputs, 2), (S,)


# ------------------------------------------------------------------------------- one chunk, and all


def decays(c):
    """The decay from token j to token i of a chunk, exp(c_i - c_j), 0 for j > i: (.., C, C, 1 or
    D).

    Subtract before the exponential: exp(c_i) / exp(c_j) is 0 / 0 after a few strong gates."""
    C = c.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=c.device).triu(1)
    difference = c[..., :, None, :] - c[..., None, :, :]
    return difference.masked_fill(later[..., None], -math.inf).exp()


def scores(a, b, c):
    """Decayed scores: the sum over channels of a_i b_j exp(c_i - c_j), 0 for j > i: (.., C, C).

    Where each channel decays at its own rate, the direct sum needs (.., C, C, D) numbers. So the
    chunk is halved. Pairs across the halves decay first to the middle and then from there: a
    product of two matrices in which no exponent exceeds 0. Source: the second level of chunks of
    GLA, Yang et al. 2312.06635, section 4."""
    if c.shape[-1] == 1:
        return a @ b.mT * decays(c)[..., 0]
    if a.shape[-2] <= 16:
        products = a[..., :, None, :] * b[..., None, :, :]  # (.., C, C, D)
        return (products * decays(c)).sum(-1)
    half = [a.shape[-2] // 2]
    a, later_a = a.tensor_split(half, -2)
    b, later_b = b.tensor_split(half, -2)
    c, later_c = c.tensor_split(half, -2)
    middle = c[..., -1:, :]
    from_middle = later_a * (later_c - middle).exp()
    to_middle = b * (middle - c).exp()
    across = from_middle @ to_middle.mT
    upper = F.pad(scores(a, b, c), (0, across.shape[-2]))  # 0 for later tokens
    lower = torch.cat([across, scores(later_a, later_b, later_c)], -1)
    return torch.cat([upper, lower], -2)


def one_chunk(state, q, k, v, forget, erase=None):
    """`token_by_token` for the C tokens of a chunk by matrix products: o (B, H, C, E) and the state
    (S,) after it.

    Each u depends on the earlier ones:

        u_i = v_i - erase_i (k_i S exp(c_i) + sum_{j<i} exp(c_i - c_j) k_i.k_j u_j)

    These are C linear equations with a triangular matrix. Source: Yang et al. 2406.06484, section
    3; with forgetting 2412.06464."""
    (S,) = state
    c = forget.cumsum(-2)
    end = c[..., -1:, :]
    u = v
    if erase is not None:
        u = v - erase * ((k * c.exp()) @ S)
        A = erase * scores(k, k, c)  # (B, H, C, C)
        u = torch.linalg.solve_triangular(A, u, upper=False, unitriangular=True)
    o = (q * c.exp()) @ S + scores(q, k, c) @ u
    S = end.exp().mT * S + (k * (end - c).exp()).mT @ u
    return o, (S,)


def all_chunks(chunk, state, inputs, size):
    """Run the function `chunk` over all chunks of `size` tokens, one after another; the last chunk
    may be shorter. inputs: tensors (B, H or 1, T, .). Returns o (B, H, T, E) and the state after
    the last token.

    Only the T / size states between chunks are kept for the backward pass, which computes the rest
    again."""
    parts = [x.split(size, 2) for x in inputs]
    if torch.is_grad_enabled() and len(parts[0]) > 2:
        chunk = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    outputs = []
    for part in zip(*parts, strict=True):
        o, state = chunk(state, *part)
        outputs.append(o)
    return torch.cat(outputs, 2), state


# ----------------------------------------------------------------- one chunk of a state that learns


def advance(M, q, k, u, c, arrived):
    """Write a chunk to a memory M (B, H, D, E) and read it:

        M_t = forget_t M_{t-1} + k_t^T u_t
        o_t = q_t M_t

    arrived (.., C, C): the share of token j's write that M holds at token i. c (.., C, 1). Returns
    o and the new M."""
    o = (q * c.exp()) @ M + (q @ k.mT * arrived) @ u
    last = arrived[..., -1:, :].mT  # (.., C, 1)
    M = c[..., -1:, :].exp() * M + (k * last).mT @ u
    return o, M


def advance_with_momentum(
    M,  # (B, H, D, E)
    P,  # (B, H, D, E): the momentum
    q,  # (B, H, C, D)
    k,  # (B, H, C, D)
    u,  # (B, H, C, E)
    forget,  # (B, H, C, 1): logarithms
    momentum,  # (B, H, C, 1): logarithms
):
    """`advance` with a momentum. Returns o and the new M and P:

    P_t = momentum_t P_{t-1} + k_t^T u_t
    M_t = forget_t M_{t-1} + P_t"""
    c = forget.cumsum(-2)
    m = momentum.cumsum(-2)
    decay = decays(c)[..., 0]  # (.., C, C): from token j to token i
    moving = decays(m)[..., 0]
    late = decay @ m.exp()  # (.., C, 1): the share of the chunk's first P that M holds at token i
    o, M = advance(M, q, k, u, c, decay @ moving)
    o = o + (q * late) @ P
    M = M + late[..., -1:, :] * P
    last = moving[..., -1:, :].mT  # (.., C, 1)
    P = m[..., -1:, :].exp() * P + (k * last).mT @ u
    return o, M, P


def one_chunk_ttt(state, q, k, v, rate, forget):
    """One chunk of a linear memory z = k M. Each token adds a step of gradient descent, from the
    memory before the chunk.

    The state also carries constants: weight and bias of the LayerNorm in the loss, and `averaging`
    (B, 1, C, 1), the factor on what a token sees of its own chunk's steps. Source: the dual form of
    TTT-linear, Sun et al. 2407.04620, section 2.5.

    Differs from the paper: its main results put the layer into Mamba's backbone, where queries and
    keys share a projection, each followed by its own convolution over 4 tokens, and a GELU gate
    multiplies the normed output. Here the layer replaces attention in a Transformer. That is the
    paper's TTT-Linear (T), the weaker of the two, and ttt_linear_base in the authors' code."""
    M, weight, bias, averaging = state
    # the gradient of |weight normed(z) + bias - v|^2 / 2 with respect to z: a LayerNorm's backward
    # pass
    z = k @ M
    deviation = (z.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    normed = (z - z.mean(-1, keepdim=True)) / deviation
    g = weight * (weight * normed + bias - v)
    along = (g * normed).mean(-1, keepdim=True)
    dz = (g - g.mean(-1, keepdim=True) - normed * along) / deviation

    u = -rate * dz
    c = forget.cumsum(-2)
    arrived = decays(c)[..., 0] * averaging[:, :, : q.shape[2]]  # (B, H, C, C)
    o, M = advance(M, q, k, u, c, arrived)
    return o, (M, weight, bias, averaging)


LARGEST_STEP = 2  # bound on rate x curvature: a larger step increases the error


def titans_gradients(M, N, k, v):
    """For a memory z = gelu(k M) N with the loss |z - v|^2 / 2: the hidden values gelu(k M), the
    gradients with respect to k M and to z, and the curvature (.., C, 1) of the loss along its
    gradient in M and N.

    That gradient is k^T da in M and hidden^T dz in N. To first order, a step changes the error dz
    by -rate x curvature x dz, plus changes in other directions."""
    a = k @ M
    hidden = F.gelu(a)
    dz = hidden @ N - v
    density = torch.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    slope = torch.special.ndtr(a) + a * density  # gelu(a) = a ndtr(a)
    da = (dz @ N.mT) * slope
    k2, da2, dz2, hidden2 = (y.square().sum(-1, keepdim=True) for y in (k, da, dz, hidden))
    curvature = k2 * da2 / (dz2 + 1e-12) + hidden2
    return hidden, da, dz, curvature


def one_chunk_titans(
    state,  # M, P, N, Q
    q,  # (B, H, C, D)
    k,  # (B, H, C, D)
    v,  # (B, H, C, E)
    rate,  # (B, H, C, 1), as the four below
    share,
    forget,
    momentum,
):
    """One chunk of an MLP as memory, z = gelu(k M) N, that learns with momentum: two memories,
    where the hidden values of the first are the keys of the second. P and Q are the momenta of M
    and N.

    This is the neural memory of Titans, Behrouz et al. 2501.00663, section 3.1, with two layers. It
    has no persistent tokens and no attention. The paper's theta_t is rate x share.

    Differs from the paper: a token's rate is lowered where rate x curvature exceeds 2. With the
    rates and initial values of this file that is rare; `eval.py params` prints the share of such
    tokens. Without the bound, a memory whose initial values have grown in training can overshoot,
    each chunk farther than the one before, until it is nan. TTT's LayerNorm in the loss, which fla
    adds, makes gradients explode here."""
    M, P, N, Q = state
    hidden, da, dz, curvature = titans_gradients(M, N, k, v)
    step = rate * curvature
    excess = torch.where(step > LARGEST_STEP, step / LARGEST_STEP, 1.0)
    rate = share * rate / excess
    a, M, P = advance_with_momentum(M, P, q, k, -rate * da, forget, momentum)
    o, N, Q = advance_with_momentum(N, Q, F.gelu(a), hidden, -rate * dz, forget, momentum)
    return o, (M, P, N, Q)


def slowed_titans(state, q, k, v, rate, *rest):
    """`one_chunk_titans`, but instead of o it returns which tokens' rates were lowered, (B, H, C,
    1)."""
    M, _, N, _ = state
    *_, curvature = titans_gradients(M, N, k, v)
    slowed = rate * curvature > LARGEST_STEP
    _, state = one_chunk_titans(state, q, k, v, rate, *rest)
    return slowed.to(v), state


# --------------------------------------------------------------- what x decides, for several axes


def number_per_head(layer, bias=False):
    """A projection of x (B, T, C) to one number for each head."""
    return nn.Linear(layer.config.n_embd, layer.heads, bias=bias)


def low_rank(layer, rank, bias):
    """A projection of x (B, T, C) to all channels of all heads, of a low rank."""
    return nn.Sequential(
        nn.Linear(layer.config.n_embd, rank, bias=False),
        nn.Linear(rank, layer.heads * layer.width, bias=bias),
    )


def by_head(layer, y):
    """Such a projection y (B, T, heads n) as float32 (B, heads, T, n)."""
    return wide(split_heads(y, layer.heads, -1))


# ------------------------------------------------------------------------ the axis rule: add, delta


def chunk_inputs(
    layer,
    q,  # (B, H or 1, T, D)
    k,  # (B, H or 1, T, D)
    v,  # (B, H, T, E)
    forget,  # (B, H, T, 1 or D): logarithms
    write,  # (B, H, T, 1)
    x,  # (B, T, C)
):
    """The inputs of `one_chunk` for a rule that erases nothing."""
    return q, k, v * write, forget


def initial_state(layer, v):
    """The state of `one_chunk` before the first token: S = 0."""
    B, H, _, E = v.shape
    return (v.new_zeros(B, H, layer.width, E),)


# tokens taken at once; ttt and titans take one gradient for each chunk
CHUNK = {"chunk": Constant(64, 1, 65536)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRule(Choice):
    """How a token changes the state."""

    args: dict[str, Constant] = dataclasses.field(default_factory=CHUNK.copy)
    heads: Callable = same_heads
    chunk: Callable = one_chunk  # state, q, k, v, ... of one chunk of tokens -> o, state
    inputs: Callable = chunk_inputs  # layer, q, k, v, forget, write, x -> the inputs of `chunk`
    after: Callable | None = None  # layer, o, q, v -> o
    start: Callable = initial_state  # layer, v -> the state before the first token
    products: int = 2  # vector-matrix products with a state per token: one write, one read
    has_weights: bool = True  # u is linear in v, so attention weights exist
    # as `chunk`, but instead of o returns which tokens' rates it lowers
    slowed: Callable | None = None
    rope_positions: Callable | None = None  # positions, chunk -> others, by which RoPE rotates


def chunk_inputs_delta(layer, *inputs):
    """The inputs of `one_chunk`. The delta rule erases as much as it writes."""
    *_, write, _ = inputs
    return *chunk_inputs(layer, *inputs), write


def with_skip(layer, o, q, v):
    """o + D_h v: a token's own value bypasses the state."""
    return o + layer.skip[:, None, None] * v


def needs_small_writes(config, args, choices):
    if config.write == "dt":
        return (
            "--rule=delta erases as much as it writes, and --write=dt has no bound: above 1, old "
            "values would change sign. Use --write=beta"
        )
    if config.qk_norm != "l2":
        return "--rule=delta needs unit-length keys: add --qk_norm=l2"
    if config.feature != "none":
        return (
            f"--rule=delta needs unit-length keys, and --feature={config.feature} changes their "
            "length: leave out --feature"
        )


def one_rate(config, args, choices):
    if config.forget in ("channel", "channel_dt"):
        return (
            f"--rule={config.rule} needs one rate per head: use --forget=none, fixed, dt or alpha"
        )


# ------------------------------------------------------------- the axis rule: TTT, gradient descent


def ttt_parameters(layer):
    H, D = layer.heads, layer.width
    return {
        "inner_scale": torch.ones(H, 1, D),  # of the LayerNorm in the loss
        "inner_bias": torch.zeros(H, 1, D),
        "memory": Normal(0.02, (H, D, D)),
        "memory_bias": torch.zeros(H, 1, D),
        "place": torch.zeros(layer.args["chunk"]),
    }


def initial_state_ttt(layer, v):
    """The state of `one_chunk_ttt` before the first token. The n-th token of a chunk sees 1 / n of
    the sum of the steps so far, their average, plus a learned share."""
    M = wide(torch.cat([layer.memory, layer.memory_bias], 1))  # (H, D + 1, D)
    C = len(layer.place)
    n = torch.arange(1, C + 1, device=M.device, dtype=M.dtype)
    averaging = F.relu(1 / n + layer.place).view(1, C, 1)
    constants = M, layer.inner_scale, layer.inner_bias, averaging
    return tuple(y.expand(len(v), *y.shape) for y in constants)


def chunk_inputs_ttt(
    layer,
    q,  # (B, H, T, D)
    k,  # (B, H, T, D)
    v,  # (B, H, T, E)
    forget,  # (B, H, T, 1): logarithms
    write,  # (B, H, T, 1)
    x,  # (B, T, C)
):
    """The inputs of `one_chunk_ttt`. Appending a constant 1 to q and k turns the last row of M into
    a bias. The memory returns k + LayerNorm(k M) for a key, so v - k is the target of the
    LayerNorm."""
    return (
        F.pad(q, (0, 1), value=1.0),
        F.pad(k, (0, 1), value=1.0),
        v - k,
        write / layer.width,
        forget,
    )


def ttt_output(layer, o, q, v):
    """q + LayerNorm(o): what the memory returns for a query."""
    normed = F.layer_norm(o, o.shape[-1:], eps=1e-6)
    return q + layer.inner_scale * normed + layer.inner_bias


# ----------------------------------------------------- the axis rule: Titans, descent with momentum


def titans_parameters(layer):
    """Initial values at which the curvature of a token's loss, for a key of length 1, is about
    sqrt(D), half of it from each layer. Both layers are scaled so that the memory can return values
    of mean square 1."""
    H, D = layer.heads, layer.width
    std = (4 * D) ** -0.25
    return {
        "memory_in": Normal(std, (H, D, 4 * D)),
        "memory_out": Normal(std, (H, 4 * D, D)),
        "momentum": number_per_head(layer, bias=True),
    }


def initial_state_titans(layer, v):
    """The learned memory of each sequence, and its momentum of 0."""
    M = wide(layer.memory_in).expand(len(v), -1, -1, -1)  # (B, H, D, 4 D)
    N = wide(layer.memory_out).expand(len(v), -1, -1, -1)  # (B, H, 4 D, D)
    return M, torch.zeros_like(M), N, torch.zeros_like(N)


def chunk_inputs_titans(
    layer,
    q,  # (B, H, T, D)
    k,  # (B, H, T, D)
    v,  # (B, H, T, E)
    forget,  # (B, H, T, 1): logarithms
    write,  # (B, H, T, 1)
    x,  # (B, T, C)
):
    """The inputs of `one_chunk_titans`.

    All gradients of a chunk are taken at the same memory, so their steps add up. Over time, a
    momentum eta_t multiplies each step by 1 / (1 - eta_t). The share (1 - eta_t) / chunk
    compensates for both: a chunk of equal tokens moves the memory by at most one step of the rate.
    The rate is write_t over the initial curvature.

    Differs from the paper: it leaves theta_t open, and there is no official code. Its values can
    have any size; here their mean square is 1. The size of the values would only scale the
    gradient, as the rate does. But the curvature grows with the values that the memory returns, and
    then no rate would be small enough."""
    logits = by_head(layer, layer.momentum(x))  # (B, H, T, 1)
    return (
        q,
        k,
        unit_square(layer, v),
        write / layer.width**0.5,  # rate
        torch.sigmoid(-logits) / layer.args["chunk"],  # share
        forget,
        F.logsigmoid(logits),  # log eta
    )


RULES = {
    "add": StateRule(),
    # state-space duality: all heads share one q and k; a skip connection follows. Mamba2, Dao and
    # Gu 2405.21060
    "ssd": StateRule(
        learns=lambda layer: {"skip": torch.ones(layer.heads)},
        after=with_skip,
        heads=lambda H, K, D: ((1, D), (1, D), (K, D)),
    ),
    "delta": StateRule(refuse=needs_small_writes, inputs=chunk_inputs_delta, products=3),
    "descent": StateRule(
        learns=ttt_parameters,
        refuse=one_rate,
        chunk=one_chunk_ttt,
        inputs=chunk_inputs_ttt,
        start=initial_state_ttt,
        after=ttt_output,
        products=3,
        has_weights=False,
        rope_positions=lambda positions, chunk: positions % chunk,
    ),
    "momentum": StateRule(
        learns=titans_parameters,
        refuse=one_rate,
        chunk=one_chunk_titans,
        inputs=chunk_inputs_titans,
        start=initial_state_titans,
        slowed=slowed_titans,
        has_weights=False,
        products=7 * 4,  # two memories, four times a head's width
    ),
}

# ------------------------------------------------------------------ the axes forget, write and conv


def retnet_forget(layer, x):
    """forget_h = 1 - 2^(-5-h), fixed: the half-life is 22 tokens in the first head and doubles from
    head to head. RetNet, Sun et al. 2307.08621, eq. 8.

    Differs from the paper: its values and gates are twice as wide as its keys; here all have the
    same width. Its GroupNorm of each head subtracts the mean; the authors' code (torchscale) had a
    LayerNorm without weights. Since October 2023 it has an RMSNorm without weights, and values 5/3
    as wide. Here it is an RMSNorm whose weights all heads share, as in fla. The paper's experiments
    spread log(1 - forget_h) evenly from log 1/32 to log 1/512 over the heads of every model.
    torchscale also scales each row, among others by max(|sum of its weights|, 1). The norm undoes
    that."""
    h = torch.arange(layer.heads, dtype=torch.float64)
    log_gamma = (1 - 2.0 ** (-5 - h)).log().to(x)  # (H,)
    return log_gamma[:, None, None].expand(len(x), -1, x.shape[1], 1)


def gla_forget(layer, x):
    """forget = sigmoid(x W1 W2 + b)^(1/16), one for each channel of a key; W1 W2 has rank 16. GLA,
    Yang et al. 2312.06635, section 4.4.

    Differs from the paper: its keys have half the width of its values; here both have the same
    width. Its norm of each head is a LayerNorm (without weights in the authors' first code); here
    it is an RMSNorm whose weights all heads share, as in the authors' later code (fla). Its output
    gate always has a bias; here only with --bias."""
    return F.logsigmoid(by_head(layer, layer.fade(x))) / 16


def time_step(layer, x):
    """dt = softplus(x W + b), (B, H, T, 1 or D): how much a token writes, and for how long the
    state decays."""
    bias = layer.dt_bias.view(layer.heads, 1, -1)
    return F.softplus(by_head(layer, layer.dt(x)) + bias)


def mamba2_forget(layer, x):
    """forget = exp(-A_h dt_t). Mamba2, Dao and Gu 2405.21060; Gated DeltaNet, Yang et al.
    2412.06464.

    Differs from the authors' code: there, Mamba2's convolution has a bias, its values together are
    twice as wide as the residual stream, its keys have 128 channels, and its published models have
    no MLPs. Gated DeltaNet's values are twice as wide as its keys. Here both have the widths of all
    other recipes, and an MLP follows each layer."""
    A = layer.A_log.exp()[:, None, None]
    return -A * time_step(layer, x)


def mamba2_parameters(layer):
    """The papers draw A from U(1, 16) (or U(0, 16)) and the softplus of b from 0.001 to 0.1,
    uniformly in its logarithm. Here both start evenly spread over the heads: the first head decays
    slowly, the last one fast."""
    A = 1 + 15 * (torch.arange(layer.heads) + 0.5) / layer.heads
    return {
        "dt": number_per_head(layer),
        "dt_bias": time_biases(layer.heads),
        "A_log": A.log(),
    }


def time_biases(count):
    """Biases (count,) whose softplus is evenly spread from 0.001 to 0.1, in its logarithm."""
    place = (torch.arange(count) + 0.5) / count  # between 0 and 1
    dt = torch.exp(math.log(0.001) + place * math.log(100))
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def kda_parameters(layer):
    """As `mamba2_parameters`, with a time step for each channel, from a matrix of rank D. Kimi
    Delta Attention, Kimi Team 2510.26692, section 3. In each head the first channel decays slowly,
    the last one fast; the authors' code (fla) draws these biases, as Mamba2's.

    Differs from the paper: its values can be wider than its keys; here both have the same width."""
    return mamba2_parameters(layer) | {
        "dt": low_rank(layer, layer.width, bias=False),
        "dt_bias": time_biases(layer.width).repeat(layer.heads, 1),
    }


def titans_forget(layer, x):
    """forget = 1 - alpha_t = sigmoid(b - x W). Titans, eq. 13. b starts at 4; the paper gives no
    value."""
    bias = layer.forget_bias[:, None, None]
    return F.logsigmoid(bias - by_head(layer, layer.alpha(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget(Choice):
    """A value of the axis forget."""

    log_forget: Callable | None = None  # layer, x -> log forget (B, H, T, 1 or D); None: 0


FORGETS = {
    "none": Forget(),
    "fixed": Forget(log_forget=retnet_forget),
    "channel": Forget(
        log_forget=gla_forget,
        learns=lambda layer: {"fade": low_rank(layer, 16, bias=True)},
    ),
    "dt": Forget(log_forget=mamba2_forget, learns=mamba2_parameters),
    "channel_dt": Forget(log_forget=mamba2_forget, learns=kda_parameters),
    "alpha": Forget(
        log_forget=titans_forget,
        learns=lambda layer: {
            "alpha": number_per_head(layer),
            "forget_bias": torch.full((layer.heads,), 4.0),
        },
    ),
}


def needs_time(config, args, choices):
    if config.forget != "dt":
        return (
            f"--write=dt uses the time step of --forget=dt, not of --forget={config.forget}: add "
            "--forget=dt"
        )


def learned_write(layer, x):
    """sigmoid(x W + b), between 0 and 1: the beta of DeltaNet, which has no b, and the learning
    rate of TTT and Titans."""
    return torch.sigmoid(by_head(layer, layer.beta(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Write(Choice):
    """A value of the axis write."""

    # layer, x -> the factor on v, (B, H, T, 1); None: 1
    write_factor: Callable | None = None


WRITES = {
    "one": Write(),
    "dt": Write(refuse=needs_time, write_factor=time_step),
    "beta": Write(
        write_factor=learned_write,
        learns=lambda layer: {"beta": number_per_head(layer)},
    ),
    "rate": Write(
        write_factor=learned_write,
        learns=lambda layer: {"beta": number_per_head(layer, bias=True)},
    ),
}


CONV_REACH = 3  # earlier tokens that the convolution sees


def short_convolution(layer, y, cache):
    """silu of a causal convolution over 4 tokens, each channel by itself: a token sees its
    neighbours before it writes. y (B, T, .) to (B, T, .). H3, Mamba and their successors."""
    before = y.new_zeros(len(y), CONV_REACH, y.shape[2])
    if cache is not None:
        before = cache.kept.get("conv", before)
    y = torch.cat([before, y], 1)
    if cache is not None:
        cache.kept["conv"] = y[:, -CONV_REACH:].clone()  # a view would keep all of y in memory
    y = F.conv1d(y.mT, layer.conv.to(y.dtype), groups=y.shape[2])
    return F.silu(y.mT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Choice):
    """A value of the axis conv."""

    convolved: Callable | None = None  # layer, projections y, cache -> y


CONVS = {
    "off": Conv(),
    # 0.29 is the standard deviation of U(-1/2, 1/2), from which torch draws weights for four tokens
    "on": Conv(
        convolved=short_convolution,
        learns=lambda layer: {"conv": Normal(0.29, (layer.c_attn.out_features, 1, 4))},
    ),
}

# ------------------------------------------------------------ the axes gate, out_norm and normalize


def silu_gate(layer, o, x):
    """o silu(W x), elementwise."""
    logits = split_heads(layer.gate(x), o.shape[1], -1)  # (B, H, R, E)
    return o * F.silu(logits.to(o.dtype))


GATES = GATES | {
    "silu": dataclasses.replace(GATES["element"], gated=silu_gate),
    # KDA: W has the rank of a head
    "low_rank": Gate(
        gated=sigmoid_gate,
        learns=lambda layer: {"gate": low_rank(layer, layer.width, layer.config.bias)},
    ),
    # Mamba2
    "silu_first": dataclasses.replace(GATES["element"], gated=silu_gate, before_norm=True),
}


def layer_norm(layer, o):
    """LayerNorm over all heads together. TTT."""
    y = layer.out_norm(o.transpose(1, 2).flatten(2))  # (B, R, H E)
    return split_heads(y, o.shape[1], -1)


OUT_NORMS = OUT_NORMS | {
    "layer": OutNorm(
        args=EPS,
        normed=layer_norm,
        learns=lambda layer: {
            "out_norm": nn.LayerNorm(
                layer.heads * layer.shapes["v"][1], eps=layer.args["out_norm_eps"]
            )
        },
    )
}


def sum_may_be_zero(config, args, choices):
    if config.rule != "add" or config.feature != "elu":
        return (
            "--normalize=sum divides by row sums, which can be 0 for weights of either sign: for a "
            "state, add --rule=add --feature=elu"
        )


AXES = {"rule": RULES, "forget": FORGETS} | axes_of(
    RULES,
    write=WRITES,
    conv=CONVS,
    feature=FEATURES,
    scale=only(SCALES, "sqrt_d", "one"),
    out_norm=OUT_NORMS,
    gate=GATES,
    normalize=only(NORMALIZERS, "none")
    | {"sum": dataclasses.replace(NORMALIZERS["sum"], refuse=sum_may_be_zero)},
)

# ---------------------------------------------------------------------------------------- the layer


class Recurrent(Mixer):
    """A layer whose heads keep a state instead of keys and values: (B, T, C) to (B, T, C).

    The cache of generation holds the state, the last inputs of the short convolution and the number
    of tokens so far. Its size does not grow."""

    axes = AXES
    heads_by = "rule"
    decided_by_x = "what it forgets and writes"
    refused = {  # {axis: why a state does not accept its other values}
        "window": "a state holds no keys that could be hidden; --forget decides how long it "
        "remembers",
        "window_every": "it has no window",
        "first": "it has no window",
        "sink": "the weights of a row need not sum to 1, so an extra key has nothing to take",
        "pos": "there is no score to add a bias to: use rope, none, sinusoidal or learned",
        "diff": "there are no weights to subtract",
        "dex": "there is no sink to correct",
        "scale": "scores do not compete within a row, so their number does not matter",
    }

    @property
    def fused_by(self):
        if not self.has_weights:
            return ()
        solving = [recurrent_kernels.invert] if self.config.rule == "delta" else []
        return *solving, recurrent_kernels.scan, recurrent_kernels.read

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.bind("conv", "convolved")
        self.bind("forget", "log_forget")
        self.bind("write", "write_factor")

    def remember(self, cache, x, k, v):
        """`read` updates the cache."""
        return {"cache": cache}

    def projected(self, x, cache=None, rope=None, starts=None):
        """Queries, keys and values (B, heads, T, width), after the short convolution and RoPE, if
        any."""
        if self.rope and self.rule.rope_positions:
            i = self.positions(x, cache, starts)
            rope = self.rope(self.rule.rope_positions(i, self.args["chunk"]))
        return super().projected(x, cache, rope, starts)

    def recall(self, cache, k, v):
        """A state keeps no keys and values."""
        cache.tokens += k.shape[2]
        return k, v

    def attend(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk, T, D)
        v,  # (B, Hk, T, E)
        x,  # (B, T, C)
        table=None,
        mask=None,
        cache=None,
    ):
        """What the queries read from the state, see Mixer. Later tokens cannot read what a hidden
        token writes. cache: a Cache, which the call updates."""
        self.check(k, x, table)
        R = q.shape[2]
        hidden = (mask or self.mask).hidden
        o = self.read(q, k, v, x, cache)
        if hidden >= 0:
            without = self.read(q, k, v, x, hidden=hidden)  # the hidden token writes nothing
            here = torch.arange(k.shape[2], device=k.device) == hidden
            o = torch.where(here[:, None], o, without)
        return self.postprocess(o[:, :, -R:], x[:, -R:], v)

    # ------------------------------------------------------------------ the state

    def read(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk, T, D)
        v,  # (B, Hk, T, E)
        x,  # (B, T, C)
        cache=None,
        hidden=-1,
        chunk=None,
    ):
        """The values that all tokens read, (B, H, T, E), before norm and gate. They are at least
        float32, because they are sums of many products. cache: a Cache, which the call updates.
        hidden: a position that writes nothing. chunk: a function that replaces the rule's
        `chunk`."""
        dtype = v.dtype
        q, k, v = self.rule_inputs(q, k, v)
        forget = v.new_zeros(*v.shape[:3], 1)  # (B, H, T, 1 or D)
        if self.log_forget:
            forget = wide(self.log_forget(x))
        write = v.new_ones(*v.shape[:3], 1)
        if self.write_factor:
            write = wide(self.write_factor(x))
        if hidden >= 0:
            is_hidden = torch.arange(v.shape[2], device=v.device) == hidden
            write = write * ~is_hidden[:, None]
        with torch.autocast(q.device.type, enabled=False):
            values = v
            if self.divisor:  # the 1 becomes the sum of the row's weights
                values = F.pad(v, (0, 1), value=1.0)
            inputs = self.rule.inputs(self, q, k, values, forget, write, x)
            if cache is None and self.kernel_on(q.device.type) == "triton":
                qkv = (y.to(dtype) for y in inputs[:3])
                if not self.log_forget:
                    forget = None
                o = wide(recurrent_kernels.recur(*qkv, forget, *inputs[4:]))
            else:
                o = self.run_chunks(inputs, cache or Cache(), chunk or self.rule.chunk)
            if self.divisor:
                o = o[..., :-1] / self.divisor(o[..., -1:], None)
            if self.rule.after:
                o = self.rule.after(self, o, q, v)
        return o

    def rule_inputs(self, q, k, v):
        """Queries, keys and values in the shapes of the rule: q and k (B, H or 1, T, D), v (B, H,
        T, E)."""
        q = wide(self.featured(q)) * self.scale
        k = wide(self.featured(k))
        k = self.for_score_heads(k, 1)  # as many heads as q
        q = F.pad(q, (0, 0, k.shape[2] - q.shape[2], 0))  # positions without a query get 0
        v = wide(v).repeat_interleave(self.heads // v.shape[1], 1)
        return q, k, v

    def run_chunks(self, inputs, cache, chunk):
        """The outputs (B, H, T, E) of all tokens by `chunk`. The cache of ttt and titans holds the
        state after the last whole chunk, and the inputs (`rows`) of the tokens since then. They are
        computed again until their chunk is whole, because all its gradients are taken at the state
        before it."""
        v = inputs[2]
        new = v.shape[2]
        size = self.args["chunk"]
        state = cache.kept.get("state") or self.rule.start(self, v)
        if len(state[0]) != len(v):
            raise ValueError(
                f"the cache has {len(state[0])} sequences, the input {len(v)}: begin with "
                "model.new_cache()"
            )
        if "rows" in cache.kept:
            inputs = [torch.cat(pair, 2) for pair in zip(cache.kept["rows"], inputs, strict=True)]
        T = inputs[0].shape[2]
        full = T if self.has_weights else T - T % size
        outputs = []
        if full:
            whole = [y[:, :, :full] for y in inputs]
            o, state = all_chunks(chunk, state, whole, size)
            outputs.append(o)
        cache.kept["state"] = state
        if not self.has_weights:
            cache.kept["rows"] = [y[:, :, full:].clone() for y in inputs]
        if full < T:
            o, _ = all_chunks(chunk, state, cache.kept["rows"], size)
            outputs.append(o)
        return torch.cat(outputs, 2)[:, :, -new:]

    # ----------------------------------------------------------- attention weights, for instruments

    @torch.no_grad()
    def weight_blocks(self, q, k, x, table=None, mask=None):
        """See Mixer. A rule that is not linear in the values has no weights: then it yields
        `derivatives`."""
        self.check(k, x, table)
        hidden = (mask or self.mask).hidden
        blocks_of = self.exact_weights if self.has_weights else self.derivatives
        if hidden < 0:
            yield from blocks_of(q, k, x)
            return
        blocks = kernels.row_blocks(q.shape[2], k.shape[2], self.mask, q.device)
        without = blocks_of(q, k, x, hidden)  # the hidden token writes nothing
        for w in blocks_of(q, k, x):
            _, _, i = next(blocks)
            yield torch.where((i == hidden)[:, None], w, next(without))

    def exact_weights(self, q, k, x, hidden=-1):
        """weight_blocks of a rule that is linear in the values: the outputs for one-hot values. The
        j-th value is row j of the identity matrix. Memory is O(T)."""
        R, T = q.shape[2], k.shape[2]
        q = F.pad(q, (0, 0, T - R, 0))  # (B, H, T, D)
        j = torch.arange(T, device=q.device)
        cache = Cache()
        bounds = [*range(0, T - R, kernels.BLOCK), *range(T - R, T, kernels.BLOCK), T]
        for start, stop in itertools.pairwise(bounds):
            rows = slice(start, stop)
            q_rows = q[:, :, rows]
            k_rows = k[:, :, rows]
            one_hot = (j[rows, None] == j).to(x.dtype)  # (rows, T)
            one_hot = one_hot.expand(len(k), self.heads, -1, -1)
            w = self.read(q_rows, k_rows, one_hot, x[:, rows], cache, hidden - start)
            if start >= T - R:
                yield w

    def bytes_read(self, q, k, v, x, table=None, cache=None):
        """The state, and what else the cache holds."""
        total = 0
        for kept in cache.kept.values():
            for y in [kept] if isinstance(kept, torch.Tensor) else kept:
                total += y.nbytes
        return total

    def derivatives(self, q, k, x, hidden=-1):
        """weight_blocks of any other rule: the mean over channels c of the derivative of o_ic with
        respect to v_jc. For attention, that is w_ij.

        It is estimated along one direction of random signs, the same for every token (Hutchinson),
        at the values that the layer computes from x. Costs O(T^2): each row needs a backward
        pass."""
        R, T = q.shape[2], k.shape[2]
        _, _, v = self.projected(x)
        v = self.for_score_heads(wide(v), 1)
        q = F.pad(q, (0, 0, T - R, 0))
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (self.heads, 1, v.shape[3]), generator=generator)
        signs = signs.to(v) * 2 - 1
        for start in range(T - R, T, kernels.BLOCK):
            stop = min(start + kernels.BLOCK, T)
            with torch.enable_grad():
                qs, ks, vs, xs = (y[..., :stop, :].detach() for y in (q, k, v, x))
                o = self.read(qs, ks, vs.requires_grad_(), xs, hidden=hidden)
                outputs = (o * signs)[:, :, start:].sum((0, 1, 3))  # a number for each row
            few = max(1, 2**22 // vs.numel())  # rows at a time, to save memory
            blocks = []
            for rows in torch.eye(stop - start, device=v.device, dtype=o.dtype).split(few):
                (dv,) = torch.autograd.grad(
                    outputs, vs, rows, retain_graph=True, is_grads_batched=True
                )
                blocks.append((dv * signs).mean(-1))  # (few, B, H, stop)
            w = torch.cat(blocks).movedim(0, 2)  # (B, H, rows, stop)
            yield F.pad(w, (0, T - stop))

    @torch.no_grad()
    def slowed(self, x):
        """The share of the tokens of x (B, T, C) whose rate the rule lowers, (H,). None if it never
        lowers one."""
        if self.rule.slowed:
            q, k, v = self.projected(x)
            slowed = self.read(q, k, v, x, chunk=self.rule.slowed)  # (B, H, T, 1)
            return slowed.mean((0, 2, 3))

    def flops_per_token(self):
        """FLOPs of the recurrence, which do not depend on the length. Chunks spend more for the
        same result."""
        size = self.width * self.shapes["v"][1]  # of a head's state
        return 6 * self.rule.products * self.heads * size

    # ------------------------------------------------------------------ limits

    def obstacles(self, device):
        reason = f"rule {self.config.rule} of a state has no kernel"
        yield "triton", not self.has_weights, reason
        yield "cpp", True, "a state is not in kernels.cpp"
        yield from self.obstacles_of_kernels(device)
