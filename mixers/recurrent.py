"""Mixers with a state: a head keeps its past in one matrix S instead of keys and values.

Six of the nine recipes are the recurrent rivals in table 1 of Lazy Attention. Each token t has a
query, a key and a value, all row vectors. It updates S (D x E) and reads it:

    S   = forget_t S                            fade the state
    u   = write_t v_t - erase_t (k_t S)         subtract what S already returns for this key
    S   = S + k_t^T u                           write u under the key
    o_t = q_t S                                 read

`token_by_token` is this recurrence in PyTorch. The published models differ in forget, write and
erase, and in what happens before and after:

                    forget_t                    write_t   erase_t   before                  after
    linear_state    1                           1         0         elu + 1                 over the sum of weights
    retnet          gamma_h                     1         0         RoPE                    RMSNorm a head, silu gate
    gla             sigmoid(x)^(1/16) a channel 1         0                                 RMSNorm a head, silu gate
    mamba2          exp(-A_h dt_t)              dt_t      0         conv; all heads one k   + D_h v, silu gate, RMSNorm
    deltanet  1                           beta_t    beta_t    conv, unit q and k      RMSNorm a head
    gated_deltanet  exp(-A_h dt_t)              beta_t    beta_t    conv, unit q and k      RMSNorm a head, silu gate
    kda             exp(-A_h dt_t) a channel    beta_t    beta_t    conv, unit q and k      RMSNorm a head, gate
    ttt             1                           rate_t    gradient  RoPE within a chunk     q + LayerNorm, LayerNorm
    titans         1 - alpha_t, with momentum  rate_t    gradient  conv, unit q, k; RMS v  as retnet

ttt and titans write by gradient descent: u is a step that makes the state return v_t for k_t. The
gradient is taken at the state before the chunk of tokens that t is in. In ttt the loss has a
LayerNorm; in titans an MLP replaces S.

The weights of a row need not sum to 1, so no row needs a sink (except with --normalize=sum, which
divides by the sum
of the weights). The size of the state does not depend on the number of tokens. Training takes a
chunk of C tokens at once, by matrix products (`one_chunk`), and `mixers/recurrent_kernels.py` does
the same in Triton.

As in the papers' code, a state runs through the whole sequence: document separators do not reset
it, and padding is a token like any other.

Shapes: B batch, H heads, T tokens, C tokens of a chunk, D width of q and k, E of v.  q, k (B, H or 1, T, D)
v, u, o (B, H, T, E)   forget (B, H, T, 1 or D): logarithms, at most 0   write, erase (B, H, T, 1)   S (B, H, D, E)
c (B, H, C, 1 or D): the sums of forget since the chunk began, so exp(c_i - c_j) is the decay from
token j to token i
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
from axes.layer import Cache, triton_obstacles
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
        q_t, k_t, u, forget_t = (x[:, :, t : t + 1] for x in (q, k, v, forget))  # (B, H or 1, 1, .)
        S = forget_t.exp().mT * S  # fade
        if erase is not None:
            u = u - erase[:, :, t : t + 1] * (k_t @ S)  # subtract what S returns for this key
        S = S + k_t.mT @ u  # write
        outputs.append(q_t @ S)  # read
    return torch.cat(outputs, 2), (S,)


# ------------------------------------------------------------------------------- one chunk, and all


def decays(c):
    """The decay from token j to token i of a chunk, exp(c_i - c_j), 0 for j > i: (.., C, C, 1 or
    D).

    Subtract before the exponential: exp(c_i) / exp(c_j) is 0 / 0 after a few strong gates."""
    later = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)
    return (c[..., :, None, :] - c[..., None, :, :]).masked_fill(later[..., None], -math.inf).exp()


def scores(a, b, c):
    """Decayed scores: the sum over channels of a_i b_j exp(c_i - c_j), 0 for j > i: (.., C, C).

    Where each channel decays at its own rate, the direct sum needs (.., C, C, D) numbers. So the
    chunk is halved.
    Pairs across the halves decay first to the middle and then from there: a product of two matrices
    in which no exponent exceeds 0. Source: the second level of chunks of GLA, Yang et al.
    2312.06635, section 4."""
    if c.shape[-1] == 1:
        return a @ b.mT * decays(c)[..., 0]
    if a.shape[-2] <= 16:
        return (a[..., :, None, :] * b[..., None, :, :] * decays(c)).sum(-1)
    half = a.shape[-2] // 2
    (a, later_a), (b, later_b), (c, later_c) = (x.tensor_split([half], -2) for x in (a, b, c))
    middle = c[..., -1:, :]
    across = (later_a * (later_c - middle).exp()) @ (b * (middle - c).exp()).mT
    earlier = F.pad(scores(a, b, c), (0, across.shape[-2]))
    return torch.cat([earlier, torch.cat([across, scores(later_a, later_b, later_c)], -1)], -2)


def one_chunk(state, q, k, v, forget, erase=None):
    """`token_by_token` for the C tokens of a chunk by matrix products: o (B, H, C, E) and the state
    (S,) after it.

    Each u depends on the earlier ones: u_i = v_i - erase_i (k_i S exp(c_i) + sum_{j<i} exp(c_i -
    c_j) k_i.k_j u_j). These are C linear equations with a triangular matrix. Source: Yang et al.
    2406.06484, section 3; with forgetting 2412.06464."""
    (S,) = state
    c = forget.cumsum(-2)
    end = c[..., -1:, :]
    u = v
    if erase is not None:
        u = v - erase * ((k * c.exp()) @ S)
        u = torch.linalg.solve_triangular(
            erase * scores(k, k, c), u, upper=False, unitriangular=True
        )
    o = (q * c.exp()) @ S + scores(q, k, c) @ u
    S = end.exp().mT * S + (k * (end - c).exp()).mT @ u
    return o, (S,)


def all_chunks(chunk, state, inputs, size):
    """Run the function `chunk` over all chunks of `size` tokens, one after another; the last chunk
    may be shorter. inputs: tensors (B, H or 1, T, .). Returns o (B, H, T, E) and the state after
    the last token.

    Only the T / size states between chunks are kept for the backward pass, which computes the rest
    again."""
    recompute = torch.is_grad_enabled() and inputs[0].shape[2] > 2 * size
    if recompute:
        chunk = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    outputs = []
    for part in zip(*(x.split(size, 2) for x in inputs), strict=True):
        o, state = chunk(state, *part)
        outputs.append(o)
    return torch.cat(outputs, 2), state


# ----------------------------------------------------------------- one chunk of a state that learns


def advance(M, q, k, u, c, arrived):
    """Write a chunk to a memory M (B, H, D, E) and read it: M_t = forget_t M_{t-1} + k_t^T u_t, o_t
    = q_t M_t.

    arrived (.., C, C): the share of token j's write that M holds at token i. c (.., C, 1). Returns
    o and the new M."""
    o = (q * c.exp()) @ M + (q @ k.mT * arrived) @ u
    return o, c[..., -1:, :].exp() * M + (k * arrived[..., -1:, :].mT).mT @ u


def advance_with_momentum(M, P, q, k, u, forget, momentum):
    """The same with a momentum P (B, H, D, E): P_t = momentum_t P_{t-1} + k_t^T u_t, M_t = forget_t
    M_{t-1} + P_t.

    forget, momentum (.., C, 1): logarithms. Returns o and the new M and P."""
    c, m = forget.cumsum(-2), momentum.cumsum(-2)
    decay, moving = decays(c)[..., 0], decays(m)[..., 0]  # (.., C, C): from token j to token i
    late = decay @ m.exp()  # (.., C, 1): the share of the chunk's first P that M holds at token i
    o, M = advance(M, q, k, u, c, decay @ moving)
    return (
        o + (q * late) @ P,
        M + late[..., -1:, :] * P,
        m[..., -1:, :].exp() * P + (k * moving[..., -1:, :].mT).mT @ u,
    )


def one_chunk_ttt(state, q, k, v, rate, forget):
    """One chunk of a linear memory z = k M. Each token is a step of gradient descent from the
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
    dz = (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) / deviation
    u, c = -rate * dz, forget.cumsum(-2)
    o, M = advance(M, q, k, u, c, decays(c)[..., 0] * averaging[:, :, : q.shape[2]])
    return o, (M, weight, bias, averaging)


LARGEST_STEP = 2  # bound on rate x curvature: a larger step increases the error


def titans_gradients(M, N, k, v):
    """For a memory z = gelu(k M) N with the loss |z - v|^2 / 2: the hidden values gelu(k M), the
    gradients with respect to k M and to z, and the curvature (.., C, 1) of the loss along its
    gradient in M and N.

    That gradient is k^T dhidden in M and hidden^T dz in N. To first order, a step changes the error
    dz by
    -rate x curvature x dz, plus changes in other directions."""
    a = k @ M
    hidden = F.gelu(a)
    dz = hidden @ N - v
    density = torch.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    da = (dz @ N.mT) * (torch.special.ndtr(a) + a * density)  # gelu(a) = a ndtr(a)
    k2, da2, dz2, hidden2 = (y.square().sum(-1, keepdim=True) for y in (k, da, dz, hidden))
    return hidden, da, dz, k2 * da2 / (dz2 + 1e-12) + hidden2


def one_chunk_titans(state, q, k, v, rate, share, forget, momentum):
    """One chunk of an MLP as memory, z = gelu(k M) N, that learns with momentum: two memories,
    where the hidden values of the first are the keys of the second. P and Q are the momenta of M
    and N.

    This is the neural memory of Titans, Behrouz et al. 2501.00663, section 3.1, with two layers. It
    has
    no persistent tokens and no attention. The paper's theta_t is rate x share.

    Differs from the paper: a token's rate is lowered where rate x curvature exceeds 2. With the
    rates and initial values of this file that is rare; `eval.py params` prints the share of such
    tokens. Without the bound, a memory whose initial values have grown in training can overshoot,
    each chunk farther than the one before, until it is nan. TTT's LayerNorm in the loss, which fla
    adds, makes gradients explode here."""
    M, P, N, Q = state
    hidden, da, dz, curvature = titans_gradients(M, N, k, v)
    step = rate * curvature
    rate = share * rate / torch.where(step > LARGEST_STEP, step / LARGEST_STEP, 1.0)
    a, M, P = advance_with_momentum(M, P, q, k, -rate * da, forget, momentum)
    o, N, Q = advance_with_momentum(N, Q, F.gelu(a), hidden, -rate * dz, forget, momentum)
    return o, (M, P, N, Q)


def slowed_titans(state, q, k, v, rate, *rest):
    """The same, but instead of o it returns which tokens' rates were lowered, (B, H, C, 1)."""
    M, _, N, _ = state
    slowed = rate * titans_gradients(M, N, k, v)[3] > LARGEST_STEP
    return slowed.to(v), one_chunk_titans(state, q, k, v, rate, *rest)[1]


# ------------------------------------------------------------------------ the axis rule: add, delta


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRule(Choice):
    """How a token changes the state."""

    heads: Callable = same_heads
    chunk: Callable | None = None  # state, q, k, v, ... of one chunk of tokens -> o, state
    inputs: Callable | None = None  # layer, q, k, v, forget, write, x -> the inputs of `chunk`
    after: Callable | None = None  # layer, o, q, v -> o
    start: Callable | None = None  # layer, v -> the state before the first token; None: S is 0
    products: int = 2  # vector-matrix products with a state per token: one write, one read
    has_weights: bool = True  # u is linear in v, so attention weights exist
    # as `chunk`, but instead of o returns which tokens' rates it lowers
    slowed: Callable | None = None
    rope_positions: Callable | None = None  # positions, chunk -> others, by which RoPE rotates


def chunk_inputs(layer, q, k, v, forget, write, x):
    """The inputs of `one_chunk`. The delta rule erases as much as it writes; the others erase
    nothing."""
    return q, k, v * write, forget, *([write] if layer.config.rule == "delta" else [])


def with_skip(layer, o, q, v):
    """o + D_h v: a token's own value bypasses the state."""
    return o + layer.skip[:, None, None] * v


def needs_small_writes(config, args, choices):
    if config.write == "dt":
        return (
            "--rule=delta erases as much as it writes, and --write=dt has no bound: above 1, old values would "
            "change sign. Use --write=beta"
        )
    if config.qk_norm != "l2":
        return "--rule=delta needs unit-length keys: add --qk_norm=l2"
    if config.feature != "none":
        return (
            f"--rule=delta needs unit-length keys, and --feature={config.feature} changes their length: leave out "
            "--feature"
        )


def one_rate(config, args, choices):
    if config.forget in ("channel", "channel_dt"):
        return (
            f"--rule={config.rule} needs one rate per head: use --forget=none, fixed, dt or alpha"
        )


# ------------------------------------------------------------- the axis rule: TTT, gradient descent


def ttt_parameters(layer):
    H, D = layer.heads, layer.width
    # of the LayerNorm in the loss
    return {
        "inner_scale": torch.ones(H, 1, D),
        "inner_bias": torch.zeros(H, 1, D),
        "memory": Normal(0.02, (H, D, D)),
        "memory_bias": torch.zeros(H, 1, D),
        "place": torch.zeros(layer.args["chunk"]),
    }


def initial_state_ttt(layer, v):
    """The state of `one_chunk_ttt` before the first token. The n-th token of a chunk sees 1 / n of
    the sum of the steps so far, their average, plus a learned share."""
    M, B = wide(torch.cat([layer.memory, layer.memory_bias], 1)), len(v)
    n = torch.arange(1, len(layer.place) + 1, device=M.device, dtype=M.dtype)
    averaging = F.relu(1 / n + layer.place)
    M, weight, bias = (y.expand(B, *y.shape) for y in (M, layer.inner_scale, layer.inner_bias))
    return M, weight, bias, averaging[:, None].expand(B, 1, -1, 1)


def chunk_inputs_ttt(layer, q, k, v, forget, write, x):
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
    return q + layer.inner_scale * F.layer_norm(o, o.shape[-1:], eps=1e-6) + layer.inner_bias


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
        "momentum": nn.Linear(layer.config.n_embd, H),
    }


def initial_state_titans(layer, v):
    """The learned memory of each sequence, and its momentum of 0."""
    M, N = (wide(y).expand(len(v), *y.shape) for y in (layer.memory_in, layer.memory_out))
    return M, torch.zeros_like(M), N, torch.zeros_like(N)


def chunk_inputs_titans(layer, q, k, v, forget, write, x):
    """The inputs of `one_chunk_titans`.

    All gradients of a chunk are taken at the same memory, so their steps add up. Over time, a
    momentum eta_t multiplies each step by 1 / (1 - eta_t). The share (1 - eta_t) / chunk
    compensates for both: a chunk of equal tokens moves the memory by at most one step of the rate.
    The rate is write_t over the initial curvature.

    Differs from the paper: it leaves theta_t open, and there is no official code. Its values can
    have any size; here their mean square is 1. The size of the values would only scale the
    gradient, as the rate does. But the curvature grows with the values that the memory returns, and
    then no rate would be small enough."""
    logits = wide(split_heads(layer.momentum(x), layer.heads, 1))
    rate, share = write / layer.width**0.5, torch.sigmoid(-logits) / layer.args["chunk"]
    return q, k, unit_square(layer, v), rate, share, forget, F.logsigmoid(logits)


# tokens taken at once; ttt and titans take one gradient for each chunk
CHUNK = {"chunk": Constant(64, 1, 65536)}

RULES = {
    "add": StateRule(args=CHUNK, chunk=one_chunk, inputs=chunk_inputs),
    # state-space duality: all heads share one q and k; a skip connection follows. Mamba2, Dao and
    # Gu 2405.21060
    "ssd": StateRule(
        learns=lambda layer: {"skip": torch.ones(layer.heads)},
        args=CHUNK,
        chunk=one_chunk,
        inputs=chunk_inputs,
        after=with_skip,
        heads=lambda H, K, D: ((1, D), (1, D), (K, D)),
    ),
    "delta": StateRule(
        args=CHUNK, chunk=one_chunk, refuse=needs_small_writes, inputs=chunk_inputs, products=3
    ),
    "descent": StateRule(
        learns=ttt_parameters,
        args=CHUNK,
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
        args=CHUNK,
        refuse=one_rate,
        chunk=one_chunk_titans,
        inputs=chunk_inputs_titans,
        start=initial_state_titans,
        slowed=slowed_titans,
        # two memories, four times a head's width
        has_weights=False,
        products=7 * 4,
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
    return (1 - 2.0 ** (-5 - h)).log().to(x)[:, None, None].expand(len(x), -1, x.shape[1], 1)


def gla_forget(layer, x):
    """forget = sigmoid(x W1 W2 + b)^(1/16), one for each channel of a key; W1 W2 has rank 16. GLA,
    Yang et al. 2312.06635, section 4.4.

    Differs from the paper: its keys have half the width of its values; here both have the same
    width. Its norm of each head is a LayerNorm (without weights in the authors' first code); here
    it is an RMSNorm whose weights all heads share, as in the authors' later code (fla). Its output
    gate always has a bias; here only with --bias."""
    return F.logsigmoid(wide(split_heads(layer.fade(x), layer.heads, -1))) / 16


def time_step(layer, x):
    """dt = softplus(x W + b), (B, H, T, 1 or D): how much a token writes, and for how long the
    state decays."""
    return F.softplus(
        wide(split_heads(layer.dt(x), layer.heads, -1)) + layer.dt_bias.view(layer.heads, 1, -1)
    )


def mamba2_forget(layer, x):
    """forget = exp(-A_h dt_t). Mamba2, Dao and Gu 2405.21060; Gated DeltaNet, Yang et al.
    2412.06464.

    Differs from the authors' code: there, Mamba2's convolution has a bias, its values together are
    twice as wide as the residual stream, its keys have 128 channels, and its published models have
    no MLPs. Gated DeltaNet's values are twice as wide as its keys. Here both have the widths of all
    other recipes, and an MLP follows each layer."""
    return -layer.A_log.exp()[:, None, None] * time_step(layer, x)


def mamba2_parameters(layer):
    """The papers draw A from U(1, 16) (or U(0, 16)) and the softplus of b from 0.001 to 0.1,
    uniformly in its logarithm. Here both start evenly spread over the heads: the first head decays
    slowly, the last one fast."""
    return {
        "dt": nn.Linear(layer.config.n_embd, layer.heads, bias=False),
        "dt_bias": time_biases(layer.heads),
        "A_log": (1 + 15 * (torch.arange(layer.heads) + 0.5) / layer.heads).log(),
    }


def time_biases(count):
    """Biases (count,) whose softplus is evenly spread from 0.001 to 0.1, in its logarithm."""
    dt = torch.exp(math.log(0.001) + (torch.arange(count) + 0.5) / count * math.log(100))
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def kda_parameters(layer):
    """The same with a time step for each channel, from a matrix of rank D. Kimi Delta Attention,
    Kimi Team 2510.26692, section 3. In each head the first channel decays slowly, the last one
    fast; the authors' code (fla) draws these biases, as Mamba2's.

    Differs from the paper: its values can be wider than its keys; here both have the same width."""
    rank_d = nn.Sequential(
        nn.Linear(layer.config.n_embd, layer.width, bias=False),
        nn.Linear(layer.width, layer.heads * layer.width, bias=False),
    )
    return mamba2_parameters(layer) | {
        "dt": rank_d,
        "dt_bias": time_biases(layer.width).repeat(layer.heads, 1),
    }


def titans_forget(layer, x):
    """forget = 1 - alpha_t = sigmoid(b - x W). Titans, eq. 13. b starts at 4; the paper gives no
    value."""
    return F.logsigmoid(
        layer.forget_bias[:, None, None] - wide(split_heads(layer.alpha(x), layer.heads, 1))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget(Choice):
    """A value of the axis forget."""

    log_forget: Callable | None = None  # layer, x -> log forget (B, H, T, 1 or D); None: 0


FORGETS = {
    "none": Forget(),
    "fixed": Forget(log_forget=retnet_forget),
    "channel": Forget(
        log_forget=gla_forget,
        learns=lambda layer: {
            "fade": nn.Sequential(
                nn.Linear(layer.config.n_embd, 16, bias=False),
                nn.Linear(16, layer.heads * layer.width),
            )
        },
    ),
    "dt": Forget(log_forget=mamba2_forget, learns=mamba2_parameters),
    "channel_dt": Forget(log_forget=mamba2_forget, learns=kda_parameters),
    "alpha": Forget(
        log_forget=titans_forget,
        learns=lambda layer: {
            "alpha": nn.Linear(layer.config.n_embd, layer.heads, bias=False),
            "forget_bias": torch.full((layer.heads,), 4.0),
        },
    ),
}


def needs_time(config, args, choices):
    if config.forget != "dt":
        return f"--write=dt uses the time step of --forget=dt, not of --forget={config.forget}: add --forget=dt"


def learned_write(layer, x):
    """sigmoid(x W + b), between 0 and 1: the beta of DeltaNet, which has no b, and the learning
    rate of TTT and Titans.
    """
    return torch.sigmoid(wide(split_heads(layer.beta(x), layer.heads, 1)))


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
        learns=lambda layer: {"beta": nn.Linear(layer.config.n_embd, layer.heads, bias=False)},
    ),
    "rate": Write(
        write_factor=learned_write,
        learns=lambda layer: {"beta": nn.Linear(layer.config.n_embd, layer.heads)},
    ),
}


CONV_REACH = 3  # earlier tokens that the convolution sees


def short_convolution(layer, y, cache):
    """silu of a causal convolution over 4 tokens, each channel by itself: a token sees its
    neighbours before it writes. y (B, T, .) to (B, T, .). H3, Mamba and their successors."""
    before = y.new_zeros(len(y), CONV_REACH, y.shape[2])
    if cache:
        before = cache.kept.get("conv", before)
    y = torch.cat([before, y], 1)
    if cache is not None:
        cache.kept["conv"] = y[:, -CONV_REACH:].clone()  # a view would keep all of y in memory
    return F.silu(F.conv1d(y.mT, layer.conv.to(y.dtype), groups=y.shape[-1]).mT)


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
    return o * F.silu(split_heads(layer.gate(x), o.shape[1], -1).to(o.dtype))


GATES = GATES | {
    "silu": dataclasses.replace(GATES["element"], gated=silu_gate),
    # KDA: W has the rank of a head
    "low_rank": Gate(
        gated=sigmoid_gate,
        learns=lambda layer: {
            "gate": nn.Sequential(
                nn.Linear(layer.config.n_embd, layer.width, bias=False),
                nn.Linear(layer.width, layer.heads * layer.shapes["v"][1], bias=layer.config.bias),
            )
        },
    ),
    # Mamba2
    "silu_first": dataclasses.replace(GATES["element"], gated=silu_gate, before_norm=True),
}


def layer_norm(layer, o):
    """LayerNorm over all heads together. TTT."""
    return split_heads(layer.out_norm(o.transpose(1, 2).flatten(2)), *o.shape[1::2])


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
            "--normalize=sum divides by row sums, which can be 0 for weights of either sign: for a state, add "
            "--rule=add --feature=elu"
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

    axes, heads_by, decided_by_x = AXES, "rule", "what it forgets and writes"
    refused = {  # {axis: why a state does not accept its other values}
        "window": "a state holds no keys that could be hidden; --forget decides how long it remembers",
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
        solving = (recurrent_kernels.invert,) if self.config.rule == "delta" else ()
        return (
            (*solving, recurrent_kernels.scan, recurrent_kernels.read) if self.has_weights else ()
        )

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.bind("conv", "convolved")
        self.bind("forget", "log_forget")
        self.bind("write", "write_factor")

    def remember(self, cache, x, k, v):
        """`read` updates the cache."""
        return {"cache": cache}

    def projected(self, x, cache=None, rope=None, starts=None):
        """Queries, keys and values (B, heads, T, width), after the short convolution and RoPE, if
        any."""
        places = self.rule.rope_positions
        if self.rope and places:
            rope = self.rope(places(self.positions(x, cache, starts), self.args["chunk"]))
        return super().projected(x, cache, rope, starts)

    def recall(self, cache, k, v):
        """A state keeps no keys and values."""
        cache.tokens += k.shape[2]
        return k, v

    def attend(self, q, k, v, x, table=None, mask=None, cache=None):
        """What the queries read from the state, see Mixer. No later token reads what a hidden token
        writes. cache: the cache, empty at first."""
        self.check(k, x, table)
        R, hidden = q.shape[2], (mask or self.mask).hidden
        o = self.read(q, k, v, x, cache)
        if hidden >= 0:
            without = self.read(q, k, v, x, hidden=hidden)  # the hidden token writes nothing
            here = torch.arange(k.shape[2], device=k.device) == hidden
            o = torch.where(here[:, None], o, without)
        return self.postprocess(o[:, :, -R:], x[:, -R:], v)

    # ------------------------------------------------------------------ the state

    def read(self, q, k, v, x, cache=None, hidden=-1, chunk=None):
        """The values that all tokens read, (B, H, T, E), before norm and gate; at least float32,
        because they are sums of many products. cache: the cache, which the call updates. hidden: a
        position that writes nothing. chunk: a function that replaces the rule's `chunk`."""
        dtype = v.dtype
        q, k, v = self.rule_inputs(q, k, v)
        forget = wide(self.log_forget(x)) if self.log_forget else v.new_zeros(*v.shape[:3], 1)
        write = wide(self.write_factor(x)) if self.write_factor else v.new_ones(*v.shape[:3], 1)
        if hidden >= 0:
            write = write * (torch.arange(v.shape[2], device=v.device) != hidden)[:, None]
        with torch.autocast(q.device.type, enabled=False):
            # the 1 becomes the sum of the row's weights
            values = F.pad(v, (0, 1), value=1.0) if self.divisor else v
            inputs = self.rule.inputs(self, q, k, values, forget, write, x)
            if cache is None and self.kernel_on(q.device.type) == "triton":
                qkv = (y.to(dtype) for y in inputs[:3])
                forget = inputs[3] if self.log_forget else None
                o = wide(recurrent_kernels.recur(*qkv, forget, *inputs[4:]))
            else:
                o = self.run_chunks(inputs, cache or Cache(), chunk or self.rule.chunk)
            if self.divisor:
                o = o[..., :-1] / self.divisor(o[..., -1:], None)
            return self.rule.after(self, o, q, v) if self.rule.after else o

    def rule_inputs(self, q, k, v):
        """Queries, keys and values in the shapes of the rule: q and k (B, H or 1, T, D), v (B, H,
        T, E)."""
        q, k = wide(self.featured(q)) * self.scale, wide(self.featured(k))
        k = self.for_score_heads(k, 1)  # as many heads as q
        q = F.pad(q, (0, 0, k.shape[2] - q.shape[2], 0))  # positions without a query get 0
        return q, k, wide(v).repeat_interleave(self.heads // v.shape[1], 1)

    def run_chunks(self, inputs, cache, chunk):
        """The outputs (B, H, T, E) of all tokens by `chunk`. The cache of ttt and titans holds the
        state after the last whole chunk, and the inputs (`rows`) of the tokens since then: they are
        computed again until their chunk is whole, because all its gradients are taken at the state
        before it."""
        v, new, size = inputs[2], inputs[0].shape[2], self.args["chunk"]
        start = (
            self.rule.start(self, v)
            if self.rule.start
            else (v.new_zeros(*v.shape[:2], self.width, v.shape[3]),)
        )
        state = cache.kept.get("state", start)
        if [S.shape for S in state] != [S.shape for S in start]:
            raise ValueError(
                "the cache holds a state of another recipe, or of another batch: begin with "
                "model.new_cache()"
            )
        if "rows" in cache.kept:
            inputs = [torch.cat(pair, 2) for pair in zip(cache.kept["rows"], inputs, strict=True)]
        T = inputs[0].shape[2]
        full = T if self.has_weights else T - T % size
        outputs = []
        if full:
            o, state = all_chunks(chunk, state, [y[:, :, :full] for y in inputs], size)
            outputs.append(o)
        cache.kept["state"] = state
        if not self.has_weights:
            cache.kept["rows"] = [y[:, :, full:].clone() for y in inputs]
        if full < T:
            outputs.append(all_chunks(chunk, state, cache.kept["rows"], size)[0])
        return torch.cat(outputs, 2)[:, :, -new:]

    # ----------------------------------------------------------- attention weights, for instruments

    @torch.no_grad()
    def weight_blocks(self, q, k, x, table=None, mask=None):
        """See Mixer. A rule that is not linear in the values has no weights; then it yields
        `derivatives`."""
        self.check(k, x, table)
        hidden = (mask or self.mask).hidden
        blocks_of = self.exact_weights if self.has_weights else self.derivatives
        if hidden < 0:
            yield from blocks_of(q, k, x)
            return
        rows = kernels.row_blocks(q.shape[2], k.shape[2], self.mask, q.device)
        for (_, _, i), w, without in zip(
            rows, blocks_of(q, k, x), blocks_of(q, k, x, hidden), strict=True
        ):
            yield torch.where((i == hidden)[:, None], w, without)

    def exact_weights(self, q, k, x, hidden=-1):
        """weight_blocks of a rule that is linear in the values: the outputs for one-hot values, the
        j-th value being row j of the identity matrix. Memory is O(T)."""
        R, T = q.shape[2], k.shape[2]
        places, cache, q = torch.arange(T, device=q.device), Cache(), F.pad(q, (0, 0, T - R, 0))
        for start, stop in itertools.pairwise(
            [*range(0, T - R, kernels.BLOCK), *range(T - R, T, kernels.BLOCK), T]
        ):
            rows = slice(start, stop)
            one_hot = (places[rows, None] == places).to(x.dtype).expand(len(k), self.heads, -1, -1)
            w = self.read(q[:, :, rows], k[:, :, rows], one_hot, x[:, rows], cache, hidden - start)
            if start >= T - R:
                yield w

    def bytes_read(self, q, k, v, x, table=None, mask=None, cache=None):
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
        q, v = F.pad(q, (0, 0, T - R, 0)), self.rule_inputs(q, k, self.projected(x, None)[2])[2]
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (self.heads, 1, v.shape[3]), generator=generator).to(v) * 2 - 1
        for start in range(T - R, T, kernels.BLOCK):
            stop = min(start + kernels.BLOCK, T)
            with torch.enable_grad():
                qs, ks, vs, xs = (y[..., :stop, :].detach() for y in (q, k, v, x))
                o = self.read(qs, ks, vs.requires_grad_(), xs, hidden=hidden)
                # (stop - start,): a number for each row
                outputs = (o * signs)[:, :, start:].sum((0, 1, 3))
            few = max(1, 2**22 // vs.numel())  # rows at a time, to save memory
            gradients = [
                torch.autograd.grad(outputs, vs, rows, retain_graph=True, is_grads_batched=True)[0]
                for rows in torch.eye(len(outputs), device=v.device, dtype=outputs.dtype).split(few)
            ]
            # dv (few, B, H, stop, E)
            w = torch.cat([(dv * signs).mean(-1) for dv in gradients]).movedim(0, 2)
            yield F.pad(w, (0, T - stop))

    @torch.no_grad()
    def slowed(self, x):
        """The share of the tokens of x (B, T, C) whose rate the rule lowers, (H,). None if it never
        lowers one."""
        if self.rule.slowed:
            return self.read(*self.projected(x, None), x, chunk=self.rule.slowed).mean((0, 2, 3))

    def flops_per_token(self):
        """FLOPs of the recurrence, which do not depend on the length. Chunks spend more for the
        same result."""
        return 6 * self.rule.products * self.heads * self.width * self.shapes["v"][1]

    # ------------------------------------------------------------------ limits

    @staticmethod
    def obstacles(config, device):
        yield (
            "triton",
            not RULES[config.rule].has_weights,
            f"rule {config.rule} of a state has no kernel",
        )
        yield from triton_obstacles(config, device, config.head_width)
        yield "sdpa", True, f"it computes plain softmax only, not --attn={config.attn}"
