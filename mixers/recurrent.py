"""The recurrent rivals of Lazy Attention's table 1, as one idea: a head's past is a matrix S, not keys and values.

Every token does four things to it, and what tells one published model from another is a choice of these:

    S_t = forget_t S_{t-1}                      fade what is known,
    u_t = write_t v_t - erase_t (k_t S_t)       take off what S answers to this key, so that only what is new is left,
    S_t = S_t + k_t u_t^T                       write that under the key,
    o_t = q_t S_t                               and read.

                    forget_t                    write_t   erase_t   before                  after
    linear_state    1                           1         0         elu + 1                 over the sum of weights
    retnet          gamma_h                     1         0         RoPE                    RMSNorm a head, silu gate
    gla             sigmoid(x)^(1/16) a channel 1         0                                 RMSNorm a head, silu gate
    mamba2          exp(-A_h dt_t)              dt_t      0         conv; all heads one k   + D_h v, silu gate, RMSNorm
    deltanet        1                           beta_t    beta_t    conv, unit q and k      RMSNorm a head
    gated_deltanet  exp(-A_h dt_t)              beta_t    beta_t    conv, unit q and k      RMSNorm a head, silu gate
    ttt             1                           rate_t    slope     RoPE within a chunk     q + LayerNorm, LayerNorm
    titans          1 - alpha_t, with momentum  rate_t    slope     conv, unit q, k; RMS v  as retnet

The last two take off more than S answers: each write is a step of gradient descent on a loss, and its slope is taken
where the chunk began, of an S through a LayerNorm (ttt) or of an MLP in place of S (titans).

There is no row of scores, hence nothing that must be spent and no sink (but where --normalize=sum divides). Yet what is
read was written once, under a key of D numbers. The state has the same size after any number of tokens. All of it is in
the order of time, so many tokens are taken at once, a chunk, by matrix products; a chunk of one token is the recurrence
itself, and that is decoding.

As in the papers' code a state runs through all of a sequence: separators of documents do not reset it, and padding is
a token like any other.

Shapes: B batch, H heads, T tokens, C tokens of a chunk, D width of q and k, E of v.  q, k (B, H or 1, T, D)
v, u, o (B, H, T, E)   forget (B, H, T, 1 or D): logarithms, at most 0   write, erase (B, H, T, 1)   S (B, H, D, E)
"""
import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernels
from attention import choose_kernel, triton_obstacles
from axes import options
from axes.base import Choice, Constant, Normal, only, split_heads, wide
from axes.layer import Layer
from axes.outputs import EPS, GATES, OUT_NORMS, VALUE_BIASES, Gate, OutNorm, gate_of
from axes.positions import WITHOUT_BIAS, rope_frequencies, rotate
from axes.queries_keys import FEATURES, QK_NORMS, SCALES, unit_square
from axes.rows import NORMALIZERS
from mixers import recurrent_kernels

# ---------------------------------------------------------------------------------------------- one chunk, and all


def faded(c):
    """exp(c_i - c_j), what is left at token i of what token j wrote, 0 for later j: (.., C, C, 1 or D), of sums of
    logarithms c (.., C, 1 or D).

    The difference comes first, always: the quotient exp(c_i) / exp(c_j) is 0 / 0 after a few strong gates.
    """
    later = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)
    return (c[..., :, None, :] - c[..., None, :, :]).masked_fill(later[..., None], -math.inf).exp()


def scores(a, b, c):
    """a_i . b_j, of which each channel fades from token j to token i; 0 for later j: (.., C, C). c as in `faded`.

    Where each channel of the keys fades at its own rate, that is a sum over (.., C, C, D). So the chunk is halved: what
    the later half sees of the earlier one fades first to the middle and from there on, which makes it a product of two
    matrices, and no exponent is above 0. Source: the second level of chunks of GLA, Yang et al. 2312.06635, section 4.
    """
    if c.shape[-1] == 1:
        return a @ b.mT * faded(c)[..., 0]
    if a.shape[-2] <= 16:
        return (a[..., :, None, :] * b[..., None, :, :] * faded(c)).sum(-1)
    half = a.shape[-2] // 2
    (a, later_a), (b, later_b), (c, later_c) = (x.tensor_split([half], -2) for x in (a, b, c))
    middle = c[..., -1:, :]
    across = (later_a * (later_c - middle).exp()) @ (b * (middle - c).exp()).mT
    earlier = F.pad(scores(a, b, c), (0, across.shape[-2]))
    return torch.cat([earlier, torch.cat([across, scores(later_a, later_b, later_c)], -1)], -2)


def step(state, q, k, v, forget, erase=None):
    """One chunk of a matrix that is told what to hold: (S,) before it to o (B, H, C, E) and (S,) after it. v comes
    multiplied by write; erase None takes nothing off.

    The u_t of a chunk depend on each other, u_i = v_i - erase_i (k_i S faded + sum_{j<i} left_ij k_i.k_j u_j): C
    equations with a triangular matrix. Source: Yang et al. 2406.06484, section 3; with forgetting 2412.06464.
    """
    S, = state
    c = forget.cumsum(-2)
    end = c[..., -1:, :]
    u = v
    if erase is not None:
        u = v - erase * ((k * c.exp()) @ S)
        u = torch.linalg.solve_triangular(erase * scores(k, k, c), u, upper=False, unitriangular=True)
    o = (q * c.exp()) @ S + scores(q, k, c) @ u
    return o, (end.exp().mT * S + (k * (end - c).exp()).mT @ u,)


def run(one, state, inputs, size):
    """All chunks, one after another: o (B, H, T, E) and the state after the last token. T need be no multiple of size.

    For the backward pass only the states between chunks are kept, T / size matrices; the rest is computed again.
    """
    parts = zip(*(x.split(size, 2) for x in inputs), strict=True)
    again = torch.is_grad_enabled() and inputs[0].shape[2] > 2 * size
    one = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False) if again else one
    outputs = []
    for part in parts:
        o, state = one(state, *part)
        outputs.append(o)
    return torch.cat(outputs, 2), state


# ---------------------------------------------------------------------------------- one chunk of a memory that learns


def carry(M, q, k, u, c, arrived):
    """Read and write a memory M (B, H, D, E), M_t = forget_t M_{t-1} + k_t u_t^T, of which arrived_ij (.., C, C) of
    what token j wrote is there at token i. c (.., C, 1): the sums of log forget. Returns o and M."""
    o = (q * c.exp()) @ M + (q @ k.mT * arrived) @ u
    return o, c[..., -1:, :].exp() * M + (k * arrived[..., -1:, :].mT).mT @ u


def carry_on(M, P, q, k, u, forget, momentum):
    """The same of a memory that moves by a momentum P, P_t = momentum_t P_{t-1} + k_t u_t^T and M_t = forget_t M_{t-1}
    + P_t. Returns o, M and P."""
    c, m = forget.cumsum(-2), momentum.cumsum(-2)
    left, moving = faded(c)[..., 0], faded(m)[..., 0]                   # (.., C, C): of what token j wrote, at token i
    late = left @ m.exp()                       # (.., C, 1): what has come of the momentum that the chunk began with
    o, M = carry(M, q, k, u, c, left @ moving)
    return (o + (q * late) @ P, M + late[..., -1:, :] * P,
            m[..., -1:, :].exp() * P + (k * moving[..., -1:, :].mT).mT @ u)


def slope(z, v, weight, bias):
    """The derivative of |weight LayerNorm(z) + bias - v|^2 / 2 in z."""
    deviation = (z.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    x = (z - z.mean(-1, keepdim=True)) / deviation
    g = weight * (weight * x + bias - v)
    return (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True)) / deviation


def learn(state, q, k, v, rate, forget):
    """One chunk of a memory z = k M, each token a step of gradient descent whose slope is taken where the chunk began.
    The weight and bias of the norm in its loss ride along in the state, and so does spread (C, 1), a factor on what
    token i sees of its own chunk. Source: the dual form of TTT-linear, Sun et al. 2407.04620, section 2.5.

    Differs from the paper, whose main results have the layer in Mamba's backbone: queries and keys share a projection,
    after which each has a convolution over 4 tokens of its own, and a GELU gate multiplies the normed output. Here the
    layer replaces attention in a Transformer. That is the paper's TTT-Linear (T), the weaker of the two, and
    ttt_linear_base in the authors' code.
    """
    M, weight, bias, spread = state
    u, c = -rate * slope(k @ M, v, weight, bias), forget.cumsum(-2)
    o, M = carry(M, q, k, u, c, faded(c)[..., 0] * spread[:, :, :q.shape[2]])
    return o, (M, weight, bias, spread)


def squared_norm(x):
    return x.square().sum(-1, keepdim=True)


LARGEST_STEP = 2                                # of rate x curvature: beyond it, a step makes the error larger


def deep_slopes(M, N, k, v):
    """For a memory z = gelu(k M) N and its loss |z - v|^2 / 2: h = gelu(k M), the derivatives of the loss in k M and in
    z, and the loss's curvature (.., C, 1) along its slope, which consists of k below^T in M and h g^T in N. To first
    order, a step changes the error g by -rate x curvature times itself, and in other directions."""
    z = k @ M
    h = F.gelu(z)
    g = h @ N - v
    bell = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = (g @ N.mT) * (torch.special.ndtr(z) + z * bell)             # through gelu(z) = z ndtr(z)
    curvature = squared_norm(k) * squared_norm(below) / (squared_norm(g) + 1e-12) + squared_norm(h)
    return h, below, g, curvature


def learn_deep(state, q, k, v, rate, share, forget, momentum):
    """The same of an MLP, z = gelu(k M) N, by its |z - v|^2 / 2: two such memories, the second one's keys are the first
    one's answers. The neural memory of Titans, Behrouz et al. 2501.00663, section 3.1, alone (no persistent tokens, no
    attention beside it), with two layers. The paper's theta_t is rate x share.

    Differs from the paper: a token's rate is lowered where rate x curvature exceeds 2. With the rates and initial
    values of this file that is rare; `eval.py params` prints the share of such tokens. Without the bound, a memory
    whose initial values have grown in training can overshoot, each chunk farther than the one before, until it is nan.
    TTT's LayerNorm in the loss, which fla adds, makes gradients explode here.
    """
    M, P, N, Q = state
    h, below, g, curvature = deep_slopes(M, N, k, v)
    step = rate * curvature
    rate = share * rate / torch.where(step > LARGEST_STEP, step / LARGEST_STEP, 1.0)
    a, M, P = carry_on(M, P, q, k, -rate * below, forget, momentum)
    o, N, Q = carry_on(N, Q, F.gelu(a), h, -rate * g, forget, momentum)
    return o, (M, P, N, Q)


def slowed_deep(state, q, k, v, rate, *rest):
    """One chunk of `learn_deep` that returns which tokens' rates were lowered, (B, H, C, 1), in place of o."""
    M, _, N, _ = state
    slowed = rate * deep_slopes(M, N, k, v)[3] > LARGEST_STEP
    return slowed.to(v), learn_deep(state, q, k, v, rate, *rest)[1]


# ------------------------------------------------------------------------------------- the axes: how a state learns


@dataclasses.dataclass(frozen=True)
class StateRule(Choice):
    """How a token changes the state."""
    chunk: Callable | None = None               # state, q, k, v, ... of one chunk of tokens -> o, state
    inputs: Callable | None = None              # layer, q, k, v, forget, write, x -> what a chunk takes
    start: Callable | None = None               # layer, B -> the state before the first token; None: S is 0
    after: Callable | None = None               # layer, o, q, v -> o
    products: int = 2                           # of a vector with a state, for every token: it reads, and it writes
    linear: bool = True                         # what is written is linear in v, so that there are weights
    slowed: Callable | None = None              # as chunk, but returns which tokens' rates it lowers, not o
    places: Callable = lambda positions, chunk: positions               # what RoPE turns by
    heads: Callable = lambda H, K, D: ((H, D), (K, D), (K, D))          # (heads, width) of q, k and v


def told(layer, q, k, v, forget, write, x):
    """What `step` takes where nothing is erased."""
    return q, k, v * write, forget


def told_and_erased(layer, q, k, v, forget, write, x):
    """What `step` takes where as much is erased as is written."""
    return q, k, v * write, forget, write


def plus_skip(layer, o, q, v):
    """o + D_h v: a token's own value, past the state."""
    return o + layer.skip[:, None, None] * v


def needs_small_writes(config, args, choices):
    if config.write == "dt":
        return ("--rule=delta erases as much as it writes, and --write=dt has no bound: above 1, old values would "
                "change their sign. Use --write=beta")
    if config.qk_norm != "l2":
        return "--rule=delta needs unit-length keys: add --qk_norm=l2"
    if config.feature != "none":
        return (f"--rule=delta needs unit-length keys, and --feature={config.feature} changes their length: leave out "
                "--feature")


def one_rate(config, args, choices):
    if config.forget == "channel":
        return f"--rule={config.rule} forgets at one rate per head: use --forget=none, fixed, dt or alpha"


def for_descent(layer, q, k, v, forget, write, x):
    """What `learn` takes: one more number of q and k, always 1, makes a bias of a row of M; the answer to a key is
    k + LayerNorm, so that the norm is to be v - k."""
    return F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1), value=1.0), v - k, write / layer.width, forget


def linear_memory(layer, B):
    M = wide(torch.cat([layer.memory, layer.memory_bias], 1))
    n = torch.arange(1, len(layer.place) + 1, device=M.device, dtype=M.dtype)
    spread = F.relu(1 / n + layer.place)        # steps of a chunk are averaged
    return M.expand(B, *M.shape), *norm_in_the_loss(layer, B), spread[:, None].expand(B, 1, -1, 1)


def memory_of_descent(layer):
    H, D = layer.heads, layer.width
    return inner_norm(layer) | {"memory": Normal(0.02, (H, D, D)), "memory_bias": torch.zeros(H, 1, D),
                                "place": torch.zeros(layer.args["chunk"])}


def for_momentum(layer, q, k, v, forget, write, x):
    """What `learn_deep` takes. A chunk's slopes are all taken at the same memory, so they add up, and a momentum eta_t
    multiplies each of them by 1 / (1 - eta_t) over time. The share (1 - eta_t) / chunk makes up for both: a chunk of
    equal tokens moves the memory by at most one step of the rate. The rate is write_t over the curvature at first.

    Differs from the paper: it leaves theta_t open, and there is no official code. Its values have any size; here their
    mean square is 1. The size of a value would only scale its slope, as the rate does, and the curvature grows with the
    values that the memory answers with, so that no rate would be small enough.
    """
    logits = wide(split_heads(layer.momentum(x), layer.heads, 1))
    rate, share = write / layer.width**0.5, torch.sigmoid(-logits) / layer.args["chunk"]
    return q, k, unit_square(layer, v), rate, share, forget, F.logsigmoid(logits)


def memory_of_momentum(layer):
    """Initial values with which the curvature of a token's loss, at a key of length 1, is about sqrt(D), half of it
    from either layer. Both layers have the size that answers values of mean square 1."""
    H, D = layer.heads, layer.width
    std = (4 * D)**-0.25
    return {"memory_in": Normal(std, (H, D, 4 * D)), "memory_out": Normal(std, (H, 4 * D, D)),
            "momentum": nn.Linear(layer.config.n_embd, H)}


def deep_memory(layer, B):
    return (*at_rest(layer.memory_in, B), *at_rest(layer.memory_out, B))


def at_rest(M, B):
    """A memory (H, D, E) for every sequence, and its momentum of 0."""
    M = wide(M).expand(B, *M.shape)
    return M, torch.zeros_like(M)


def norm_in_the_loss(layer, B):
    """Weight and bias of the LayerNorm in the loss, for every sequence."""
    return (x.expand(B, *x.shape) for x in (layer.inner_scale, layer.inner_bias))


def inner_norm(layer):
    return {"inner_scale": torch.ones(layer.heads, 1, layer.width),
            "inner_bias": torch.zeros(layer.heads, 1, layer.width)}


def answer(layer, o, q, v):
    """q + LayerNorm(o), the memory's answer to a query."""
    return q + layer.inner_scale * F.layer_norm(o, o.shape[-1:], eps=1e-6) + layer.inner_bias


CHUNK = {"chunk": Constant(64, 1, 65536)}       # tokens taken at once; of a memory that learns, between two slopes


RULES = {
    "add": StateRule(args=CHUNK, chunk=step, inputs=told),
    # state-space duality: all heads have one q and k, and tokens a way past the state. Mamba2, Dao and Gu 2405.21060
    "ssd": StateRule(lambda layer: {"skip": torch.ones(layer.heads)}, CHUNK, chunk=step, inputs=told, after=plus_skip,
                     heads=lambda H, K, D: ((1, D), (1, D), (K, D))),
    "delta": StateRule(args=CHUNK, chunk=step, refuse=needs_small_writes, inputs=told_and_erased, products=3),
    "descent": StateRule(memory_of_descent, CHUNK, one_rate, chunk=learn, inputs=for_descent, start=linear_memory,
                         after=answer, products=3, linear=False, places=lambda positions, chunk: positions % chunk),
    "momentum": StateRule(memory_of_momentum, CHUNK, one_rate, chunk=learn_deep, inputs=for_momentum, start=deep_memory,
                     slowed=slowed_deep, linear=False,
                     products=7 * 4),           # of two memories, four times as wide as a head
}

# ------------------------------------------------------------------------------- the axes: what is forgotten, written


def gamma(layer, x):
    """forget_h = 1 - 2^(-5-h), fixed: half-lives from 22 tokens on, twice as long from head to head. RetNet, Sun et al.
    2307.08621, eq. 8.

    Differs from the paper: its values and gates are twice as wide as its keys, here as wide. Its GroupNorm of each head
    subtracts the mean; the authors' code (torchscale) had a LayerNorm without weights for it, and since October 2023 an
    RMSNorm without weights and values 5/3 as wide. Here it is an RMSNorm whose weights all heads share, as in fla. The
    paper's experiments spread log(1 - forget_h) evenly from log 1/32 to log 1/512 over the heads of every model.
    torchscale also scales each row, by max(|sum of its weights|, 1) among others; the norm undoes that.
    """
    h = torch.arange(layer.heads, dtype=torch.float64)
    return (1 - 2.0 ** (-5 - h)).log().to(x)[:, None, None].expand(len(x), -1, x.shape[1], 1)


def gla_gate(layer, x):
    """forget = sigmoid(x W1 W2 + b)^(1/16), one for each channel of a key, through 16 numbers. GLA, Yang et al.
    2312.06635, section 4.4.

    Differs from the paper: its keys have half the width of the values, here the same. Its norm of each head is a
    LayerNorm (without weights in the authors' first code), here an RMSNorm whose weights all heads share, as in the
    authors' later code (fla). Its output gate always has a bias, here with --bias only.
    """
    return F.logsigmoid(wide(split_heads(layer.fade(x), layer.heads, -1))) / 16


def gla_layers(layer):
    C, width = layer.config.n_embd, layer.heads * layer.width
    return {"fade": nn.Sequential(nn.Linear(C, 16, bias=False), nn.Linear(16, width))}


def time_step(layer, x):
    """dt = softplus(x W + b): how much time a token takes, (B, H, T, 1)."""
    return F.softplus(wide(split_heads(layer.dt(x), layer.heads, 1)) + layer.dt_bias[:, None, None])


def time_gate(layer, x):
    """forget = exp(-A_h dt_t). Mamba2, Dao and Gu 2405.21060; Gated DeltaNet, Yang et al. 2412.06464.

    Differs from the authors' code: there, Mamba2's convolution has a bias, its values together are twice as wide as the
    stream, its keys have 128 channels, and its published models have no MLPs. Gated DeltaNet's values are twice as wide
    as its keys. Here both have the widths of all other recipes, and an MLP follows each layer.
    """
    return -layer.A_log.exp()[:, None, None] * time_step(layer, x)


def time_scalars(layer):
    """The papers draw A from U(1, 16) (or U(0, 16)) and the softplus of b from 0.001 to 0.1, evenly in its logarithm;
    here heads are spread evenly over both at once, the first slow in both, the last fast."""
    spread = (torch.arange(layer.heads) + 0.5) / layer.heads
    dt = torch.exp(math.log(0.001) + spread * math.log(100))
    return {"dt": nn.Linear(layer.config.n_embd, layer.heads, bias=False), "A_log": (1 + 15 * spread).log(),
            "dt_bias": dt + torch.log(-torch.expm1(-dt))}               # the inverse of softplus


def decay(layer, x):
    """forget = 1 - alpha_t = sigmoid(b - x W). Titans, eq. 13; b starts at 4, for nothing is known of the paper's."""
    return F.logsigmoid(layer.forget_bias[:, None, None] - wide(split_heads(layer.alpha(x), layer.heads, 1)))


def decay_layers(layer):
    return {"alpha": nn.Linear(layer.config.n_embd, layer.heads, bias=False),
            "forget_bias": torch.full((layer.heads,), 4.0)}


@dataclasses.dataclass(frozen=True)
class Forget(Choice):
    log_kept: Callable | None = None            # layer, x (B, T, C) -> log forget (B, H, T, 1 or D), at most 0; None: 0


FORGETS = {
    "none": Forget(),
    "fixed": Forget(log_kept=gamma),
    "channel": Forget(gla_layers, log_kept=gla_gate),
    "dt": Forget(time_scalars, log_kept=time_gate),
    "alpha": Forget(decay_layers, log_kept=decay),
}


def needs_time(config, args, choices):
    if config.forget != "dt":
        return f"--write=dt writes for as long as --forget=dt forgets, not --forget={config.forget}"


def share(layer, x):
    """beta = sigmoid(x W + b), between 0 and 1: DeltaNet's share (its layer has no b); what TTT and Titans learn at."""
    return torch.sigmoid(wide(split_heads(layer.beta(x), layer.heads, 1)))


def learned_share(bias):
    return lambda layer: {"beta": nn.Linear(layer.config.n_embd, layer.heads, bias=bias)}


@dataclasses.dataclass(frozen=True)
class Write(Choice):
    amount: Callable | None = None              # layer, x (B, T, C) -> the factor on v, (B, H, T, 1); None: 1


WRITES = {
    "one": Write(),
    "dt": Write(refuse=needs_time, amount=time_step),
    "beta": Write(learned_share(False), amount=share),
    "rate": Write(learned_share(True), amount=share),                   # TTT's has a bias
}

# ------------------------------------------------------------------------------------- the axes: before and after


def short_convolution(layer, x):
    """silu of a learned sum of each channel's last four values: a token sees its neighbours before anything is written.
    x (B, 3 + T, .) to (B, T, .). H3, Mamba and all that came after."""
    return F.silu(F.conv1d(x.mT, layer.conv.to(x.dtype), groups=x.shape[-1]).mT)


@dataclasses.dataclass(frozen=True)
class Convolution(Choice):
    convolved: Callable | None = None           # layer, x (B, 3 + T, all of q, k and v) -> (B, T, the same)


CONVS = {
    "off": Convolution(),
    # 0.29 is the standard deviation of U(-1/2, 1/2), from which torch draws four values
    "on": Convolution(lambda layer: {"conv": Normal(0.29, (layer.c_attn.out_features, 1, 4))},
                      convolved=short_convolution),
}
CONV_REACH = 3                                  # earlier tokens that it sees


def silu_gate(layer, o, x):
    """o silu(W x), an element each."""
    return o * F.silu(split_heads(layer.gate(x), o.shape[1], -1).to(o.dtype))


def gate_of_elements(layer):
    return gate_of(layer, layer.shapes["v"][1])


GATES = GATES | {
    "silu": Gate(gate_of_elements, gated=silu_gate),
    "silu_first": Gate(gate_of_elements, gated=silu_gate, before_norm=True),            # Mamba2
}


def layer_norm(layer, o):
    """LayerNorm of all heads together. TTT."""
    return split_heads(layer.out_norm(o.transpose(1, 2).flatten(2)), *o.shape[1::2])


def norm_of_layer(layer):
    return {"out_norm": nn.LayerNorm(layer.heads * layer.shapes["v"][1], eps=layer.args["out_norm_eps"])}


OUT_NORMS = OUT_NORMS | {"layer": OutNorm(norm_of_layer, EPS, normed=layer_norm)}


def sum_may_be_zero(config, args, choices):
    if config.rule != "add" or config.feature != "elu":
        return ("--normalize=sum divides by sums that weights of either sign may bring to 0: of a state it goes with "
                "--rule=add --feature=elu")


AXES = options.defaults_but(
    RULES, forget=FORGETS, write=WRITES, conv=CONVS, pos=WITHOUT_BIAS, qk_norm=QK_NORMS, feature=FEATURES,
    scale=only(SCALES, "sqrt_d", "one"), value_bias=VALUE_BIASES, out_norm=OUT_NORMS, gate=GATES,
    normalize=only(NORMALIZERS, "none") | {"sum": dataclasses.replace(NORMALIZERS["sum"], refuse=sum_may_be_zero)})

REFUSED = {                                     # axis: why its other values mean nothing here
    "window": "a state holds no keys that could leave its sight; how long it remembers is --forget",
    "window_every": "it has no window", "first": "it has no window",
    "sink": "no row has a sum that must be spent, so there is nothing to spend on an extra key",
    "pos": "there is no score that a bias could be added to; rope, none, sinusoidal and learned go",
    "diff": "there are no weights to subtract", "dex": "there is no sink to correct",
    "scale": "scores do not compete within a row, so how many there are does not matter",
}

# ------------------------------------------------------------------------------------------------------ the layer


def blocks(start, stop):
    """(start, stop) of every BLOCK rows in between."""
    return [(i, min(i + kernels.BLOCK, stop)) for i in range(start, stop, kernels.BLOCK)]


class Recurrent(Layer):
    """One layer whose heads keep a state instead of keys and values: (B, T, C) to (B, T, C).

    past, which generation carries, holds the state, the last inputs of the short convolution and the number of tokens
    so far: its size does not grow.
    """
    axes, numbers, refused, heads_by = AXES, {}, REFUSED, "rule"

    @property
    def fused_by(self):
        taking_off = (recurrent_kernels.invert,) if self.config.rule == "delta" else ()
        return (*taking_off, recurrent_kernels.scan, recurrent_kernels.read) if self.rule.linear else ()

    def forward(self, x, past=None, importances=None):
        """x (B, T, C), the layer's normed input. past: a dict that keeps what the next call goes on from."""
        q, k, v = self.projected(x, past)
        attend = self.attend if past is None else partial(self.attend, past=past)       # which instruments replace
        y = attend(q, k, v, x, None)            # (B, H, T, E)
        if past is not None:
            past["tokens"] = past.get("tokens", 0) + x.shape[1]
        return self.output(y)

    def projected(self, x, past):
        """Queries, keys and values (B, heads, T, width), through the short convolution and RoPE where there are any."""
        y = self.c_attn(x)
        if self.choices["conv"].convolved:
            before = (past or {}).get("conv", y.new_zeros(len(y), CONV_REACH, y.shape[2]))
            y = torch.cat([before, y], 1)
            if past is not None:
                past["conv"] = y[:, -CONV_REACH:].clone()               # a view would keep all of y alive
            y = self.choices["conv"].convolved(self, y)
        q, k, v = self.heads_of(y)
        if self.choices["pos"].rotates:
            seen = 0 if past is None else past.get("tokens", 0)
            places = self.rule.places(torch.arange(seen, seen + x.shape[1], device=x.device), self.args["chunk"])
            frequency = rope_frequencies(self.config, self.width, x.device)
            q, k = (rotate(y, frequency, places) for y in (q, k))
        return q, k, v

    def attend(self, q, k, v, x, table=None, sight=None, past=None):
        """From queries, keys, values and the layer's input x (B, T, C), which says for every token what is forgotten
        and written, to each head's output (B, H, R, E). With fewer queries than keys, they are the last.

        sight: only its `hidden` counts, a token that nobody reads but itself. past: see forward; empty at first.
        """
        self.check(k, x, table)
        o = self.read(q, k, v, x, past)
        if sight is not None and sight.hidden >= 0:
            without = self.read(q, k, v, x, hidden=sight.hidden)        # of it nothing was written: but for itself
            here = torch.arange(k.shape[2], device=k.device) == sight.hidden
            o = torch.where(here[:, None], o, without)
        o, x = self.choices["value_bias"].shifted(self, o[:, :, -q.shape[2]:]), x[:, -q.shape[2]:]
        if not self.choices["gate"].before_norm:
            o = self.choices["out_norm"].normed(self, o)
        o = self.choices["gate"].gated(self, o, x)
        if self.choices["gate"].before_norm:
            o = self.choices["out_norm"].normed(self, o)
        return o.to(v.dtype)

    def check(self, k, x, table):
        """Raise ValueError on what a state cannot make use of."""
        if table is not None:
            raise ValueError(f"--attn={self.config.attn} has no scores that relative positions could be added to")
        if x.shape[1] != k.shape[2]:
            raise ValueError(f"x has {x.shape[1]} rows for {k.shape[2]} keys: a state needs the layer's input at every "
                             "token, since it says what is forgotten")

    # ------------------------------------------------------------------ the state

    def read(self, q, k, v, x, past=None, hidden=-1, one=None):
        """What every token reads, (B, H, T, E), before norm and gate, in float32 at least: these are sums of many
        products. past, where there is one, is left as the next call wants it. hidden: a place at which nothing is
        written. one: takes a chunk instead of the rule, and what it returns as o is returned."""
        dtype, (q, k, v) = v.dtype, self.prepare(q, k, v)
        sums, forget = self.choices["normalize"].divisor, self.choices["forget"].log_kept
        write = self.choices["write"].amount
        forget = wide(forget(self, x)) if forget else v.new_zeros(*v.shape[:3], 1)
        write = wide(write(self, x)) if write else v.new_ones(*v.shape[:3], 1)
        if hidden >= 0:
            write = write * (torch.arange(v.shape[2], device=v.device) != hidden)[:, None]
        with torch.autocast(q.device.type, enabled=False):
            values = F.pad(v, (0, 1), value=1.0) if sums else v         # what comes out of ones is the sum of weights
            inputs = self.rule.inputs(self, q, k, values, forget, write, x)
            if past is None and choose_kernel(self.config, q.device.type, self.obstacles) == "triton":
                o = self.fused(dtype, *inputs)
            else:
                o = self.remember(inputs, {} if past is None else past, one or self.rule.chunk)
            if sums:
                o = o[..., :-1] / sums(o[..., -1:], None)
            return self.rule.after(self, o, q, v) if self.rule.after else o

    def prepare(self, q, k, v):
        """Queries, keys and values as the rule takes them: q and k (B, H or 1, T, D), v (B, H, T, E)."""
        q, k = wide(self.featured(q)) * self.sight.scale, wide(self.featured(k))
        q = F.pad(q, (0, 0, k.shape[2] - q.shape[2], 0))                # what nobody asks is 0
        if 1 < k.shape[1] < self.heads:         # heads that share keys, and below values
            k = self.for_score_heads(k, 1)
        return q, k, wide(v).repeat_interleave(self.heads // v.shape[1], 1)

    def fused(self, dtype, q, k, v, forget, erase=None):
        """All tokens by the Triton kernels: (B, H, T, E), from products of numbers of this dtype."""
        q, k, v = (y.to(dtype) for y in (q, k, v))
        return wide(recurrent_kernels.recur(q, k, v, forget if self.choices["forget"].log_kept else None, erase))

    def remember(self, inputs, past, one):
        """All tokens, a chunk at a time by `one`: (B, H, T, E). A memory that learns keeps only the steps of whole
        chunks: the rows of a chunk that has begun are stored, and read again when it is whole."""
        new, size = inputs[0].shape[2], self.args["chunk"]
        state = self.state(past, inputs[2])
        if "rows" in past:
            inputs = [torch.cat(pair, 2) for pair in zip(past["rows"], inputs, strict=True)]
        T, outputs = inputs[0].shape[2], []
        full = T if self.rule.start is None else T - T % size
        if full:
            o, state = run(one, state, [y[:, :, :full] for y in inputs], size)
            outputs.append(o)
        past["state"] = state
        if self.rule.start:
            past["rows"] = [y[:, :, full:].clone() for y in inputs]
        if full < T:
            outputs.append(run(one, state, past["rows"], size)[0])
        return torch.cat(outputs, 2)[:, :, -new:]

    def fresh(self, v):
        """The state before the first token."""
        return self.rule.start(self, len(v)) if self.rule.start else (
            v.new_zeros(*v.shape[:2], self.width, v.shape[3]),)

    def state(self, past, v):
        """The state that the tokens with values v (B, H, T, E) find. Raises ValueError on one that is not of this
        recipe."""
        start = self.fresh(v)
        found = past.get("state", start)
        if [S.shape for S in found] != [S.shape for S in start]:
            raise ValueError("the cache holds a state of another recipe, or of another batch: begin with "
                             "model.new_cache()")
        return found

    # ------------------------------------------------------------------ for looking at

    @torch.no_grad()
    def weight_blocks(self, q, k, x, table=None, sight=None):
        """The w_ij of o_i = sum_j w_ij v_j before norm and gate, a block of rows at a time: (B, H, BLOCK or fewer, T).
        Where the rule is not linear in the values there are none, and `derivatives` stand in. sight: see attend."""
        self.check(k, x, table)
        look = self.marks if self.rule.linear else self.derivatives
        if sight is None or sight.hidden < 0:
            yield from look(q, k, x)
            return
        row = k.shape[2] - q.shape[2]
        for w, without in zip(look(q, k, x), look(q, k, x, sight.hidden), strict=True):
            here = torch.arange(row, row + w.shape[2], device=w.device) == sight.hidden
            row += w.shape[2]
            yield torch.where(here[:, None], w, without)

    def marks(self, q, k, x, hidden=-1):
        """weight_blocks of a rule that is linear in the values: what comes out where each value is a mark of its own
        place. Memory is O(T)."""
        R, T = q.shape[2], k.shape[2]
        places, past = torch.arange(T, device=q.device), {}
        q = F.pad(q, (0, 0, T - R, 0))
        for start, stop in (*blocks(0, T - R), *blocks(T - R, T)):
            marks = (places[start:stop, None] == places).to(x.dtype).expand(len(k), self.heads, -1, -1)
            rows = slice(start, stop)
            w = self.read(q[:, :, rows], k[:, :, rows], marks, x[:, rows], past, hidden - start)
            if start >= T - R:
                yield w

    def derivatives(self, q, k, x, hidden=-1):
        """How much o_i moves with v_j, as weights are given: (B, H, BLOCK or fewer, T). The mean over channels c of
        the derivative of o_ic in v_jc, which in an attention is w_ij; estimated along one direction of random signs,
        the same for every token (Hutchinson). The values are those that the layer makes of x. Costs O(T^2): each row
        has a backward pass."""
        R, T = q.shape[2], k.shape[2]
        q, v = F.pad(q, (0, 0, T - R, 0)), self.prepare(q, k, self.projected(x, None)[2])[2]
        dice = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (self.heads, 1, v.shape[3]), generator=dice).to(v) * 2 - 1
        for start, stop in blocks(T - R, T):
            seen = (y[..., :stop, :] for y in (q, k, v, x))
            yield F.pad(self.derivatives_of(start, signs, hidden, *seen), (0, T - stop))

    @torch.enable_grad()
    def derivatives_of(self, start, signs, hidden, q, k, v, x):
        """`derivatives` of the rows from start on, (B, H, T - start, T), a few at a time so that memory stays small."""
        q, k, v, x = (y.detach() for y in (q, k, v, x))
        o = self.read(q, k, v.requires_grad_(), x, hidden=hidden)
        asked = (o * signs)[:, :, start:].sum((0, 1, 3))                # (T - start,)
        few = max(1, 2**22 // v.numel())
        moved = [torch.autograd.grad(asked, v, rows, retain_graph=True, is_grads_batched=True)[0]   # (few, B, H, T, E)
                 for rows in torch.eye(len(asked), device=v.device, dtype=asked.dtype).split(few)]
        return torch.cat([(each * signs).mean(-1) for each in moved]).movedim(0, 2)

    @torch.no_grad()
    def slowed(self, x):
        """Share of the tokens of x (B, T, C) whose rate the rule lowers: (H,). None if the rule never lowers a rate."""
        if self.rule.slowed:
            return self.read(*self.projected(x, None), x, one=self.rule.slowed).mean((0, 2, 3))

    def flops_per_token(self):
        """Those of the recurrence, whose cost does not depend on the length; chunks spend more, on the same result."""
        return 6 * self.rule.products * self.heads * self.width * self.shapes["v"][1]

    # ------------------------------------------------------------------ fine print

    @staticmethod
    def obstacles(config, device):
        """Triples of a kernel, a condition under which it cannot be on this device, and the reason."""
        yield "triton", not RULES[config.rule].linear, f"rule {config.rule} of a state has no kernel"
        yield "triton", config.head_width > 256, "its heads are wider than 256"
        yield from triton_obstacles(config, device)
        yield "sdpa", True, f"it computes plain softmax only, not --attn={config.attn}"
