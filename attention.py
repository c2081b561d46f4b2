"""How attention scores become attention weights: the rules, the recipes made of them, the axes around them, the layer.

For every attention here one head's output is  o_i = sum_j w_ij v_j  over the keys j that row i sees. Its weights come
from a rule  w_ij = f(s_ij; r_i, t_i)  of the score s_ij, a row statistic r_i of the scores (a log-sum-exp, say) and a
row input t_i (a threshold; entmax's is an exponent). The rules below are the definition; kernels.py has each in
Triton under the same name. Everything else that tells one published variant from another is a choice on an axis
around the rule: see ATTENTIONS and AXES.

Shapes: B batch, H score heads, T keys, R query rows (the last R of the T positions), D width of q and k, E of v,
C n_embd. q (B, H, R, D), k (B, H or fewer, T, D), v (B, H or fewer, T, E), scores and weights (B, H, R, T), row vectors
(B, H, R, 1). A differential recipe has two score heads, called views, for every head of its output: view a is 0::2 of
them, view b 1::2.
"""
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states, set_device_states

import kernels

# --------------------------------------------------------------------------------------- the rules: scores to weights
# Each takes a block of scores s (B, H, R, T), the mask `seen` of who sees whom (broadcastable to it), the row input t
# and perhaps a power, and returns the weights, zero where not seen. The scores come in float32 or above, and so do
# the weights.

UNSEEN = -1e30                                  # added to a score it leaves nothing of it; finite, so no row is nan


def softmax(s, seen, t=None):
    """w_ij = exp(s_ij) / sum_k exp(s_ik): a row must spend exactly 1. With nothing to look for it pays into a sink.

    No learned scalars. The row statistic is the log-sum-exp.
    Source: Vaswani et al. 2017, eq. 1.
    """
    return torch.softmax(s + ~seen * UNSEEN, -1)


class LogSumExp(torch.autograd.Function):
    """r_i = log sum_j exp(s_ij), natural, of rows whose softmax w is known: r = s_ij - log w_ij for any j, best for the
    largest weight. This spares a second pass of exponentials, and so does the gradient, which is w itself.
    """
    @staticmethod
    def forward(ctx, s, seen, w):
        ctx.save_for_backward(w)
        top = w.argmax(-1, keepdim=True)
        return s.gather(-1, top) - w.gather(-1, top).log()

    @staticmethod
    def backward(ctx, e):
        return ctx.saved_tensors[0] * e, None, None


def elastic(s, seen, t):
    """w_ij = relu(p_ij - t_i), p = softmax(s), t_i = tau_h / n_i: a row may spend less than 1, an even one nothing.

    What would be parked on a sink falls below the threshold and is cut off. Exact zeros, not renormalised; for tau >=
    0 the row sum lies in [0, 1].
    Learned: tau (H,), 1 at the start, so that an even row is off. n_i counts from 1: row i of the paper sees i keys.
    Source: Lazy Attention, eq. 5 and table 2. The author's public code stores -tau and adds it, from -1, -0.5 or
    -1.01 on, and gives it a hundred times the learning rate (here --head_lr=100).
    """
    return F.relu(softmax(s, seen) - t).masked_fill(~seen, 0.0)         # a negative tau would lift what is not seen


def elastic_threshold(layer, n):
    """t_i = tau_h / n_i; with per_length=0 tau_h alone, with per_length=block tau_h / block_size on every row."""
    if layer.args["per_length"] == "block":
        n = torch.full_like(n, layer.config.block_size)
    elif not layer.args["per_length"]:
        n = torch.ones_like(n)
    return layer.tau[:, None, None] / n[:, None]


def entmax(s, seen, t=None, power=2.0):
    """w_ij = relu((alpha - 1) s_ij - r_i)^power, power = 1 / (alpha - 1), with the r_i that makes the row sum to 1.

    Between softmax (alpha 1) and sparsemax (alpha 2), 1.5 by default. Keys far below the best get exact zeros, but
    the row still spends 1: the sink becomes a choice of few keys, and remains. With --attn_args=alpha=learned the
    power comes as t, from alpha_h = 1 + sigmoid(theta_h), theta (H,) 0 at the start, which is alpha 1.5. Source:
    Peters et al. 2019, eq. 7 and 9; alpha per head: Correia et al. 2019, who learn it as 1 + sigmoid, too.
    """
    power = t if power is None else power
    z = s / power + ~seen * UNSEEN
    z = z - z.detach().amax(-1, keepdim=True)                           # now r lies in [-1, 0]
    r = entmax_threshold(z.detach(), power)
    x = F.relu(z - r)
    # r solves sum_j x_ij^power = 1. One more step of Newton's method leaves it where it is, but autograd now sees how r
    # depends on z and on the power
    slope = (power * (x > 0) * x ** (power - 1)).sum(-1, keepdim=True).detach()
    r = r + ((x ** power).sum(-1, keepdim=True) - 1) / slope
    return F.relu(z - r) ** power


@torch.no_grad()
def entmax_threshold(z, power):
    """The r (.., 1) at which sum_j relu(z_j - r)^power = 1, for rows z whose maximum is 0.

    Newton's method on the norm of relu(z - r), which is convex in r: r rises from -1, where the largest weight alone is
    1, and never passes the solution.
    """
    r = torch.full_like(z[..., :1], -1.0)
    for _ in range(60):                         # five to ten do as a rule
        x = F.relu(z - r)
        total = (x ** power).sum(-1, keepdim=True)
        step = (total - total ** (1 - 1 / power)) / ((x > 0) * x ** (power - 1)).sum(-1, keepdim=True)
        r = r + step
        if step.max() < 2 * torch.finfo(z.dtype).eps:
            break
    return r


def entmax_row_input(layer, n):
    """t = 1 / (alpha_h - 1) where alpha is learned. A constant one is the rule's power, and there is no row input."""
    if layer.args["alpha"] == "learned":
        theta = layer.theta.clamp(min=-4.6)     # alpha from 1.01 on
        return (1 + torch.exp(-theta))[:, None, None].expand(-1, len(n), 1)


def sparsemax(s, seen, t=None, power=1.0):
    """w_ij = relu(s_ij - r_i), with the threshold r_i that makes the row sum to 1: entmax at alpha 2, its sparsest
    form.

    No learned scalars. The sink stays, for the sum is still 1.
    Source: Martins & Astudillo 2016, eq. 1.
    """
    return entmax(s, seen, None, power)


def lssar(s, seen, t, power=15.0):
    """a_ij = softplus(s_ij) / sum_k softplus(s_ik),  w_ij = x_ij^power / sum_k x_ik^power,  x_ij = relu(a_ij - t_i).

    t_i = o_i / n_i, with o_i = 1, but 0 where a row sees up to three keys. What lies below an even row's share is
    cut, and the power sharpens what is left. Rows still sum to 1 (only an even one is empty), so a sink may remain.
    No learned scalars: the recipe puts q and k to unit length, and the score is log(d) log(n_i) q.k.
    Source: Gao & Spratling 2501.13428, eq. 4 and 5. Paper [2]'s table 1 says that LSSAR has no exact zeros: with this
    threshold it has. For float32 x is divided by its row's maximum, for x^15 leaves its range, and x within rounding
    of 0 is 0. A reimplementation adds 1e-8 to the last sum; that would empty nearly even rows, so it is left out.
    """
    phi = F.softplus(s, threshold=40).masked_fill(~seen, 0.0)
    a = phi / phi.sum(-1, keepdim=True).clamp(min=1e-30)        # where all scores are far below 0, phi itself is 0
    x = (a - t) * (seen & (a > t * (1 + 2 ** -18)))             # the power would blow up what is only rounding
    x = x / x.detach().amax(-1, keepdim=True).clamp(min=1e-30)
    b = x ** power
    return b / b.sum(-1, keepdim=True).clamp(min=1.0)           # the largest is 1: only a row of zeros sums to less


def lssar_threshold(layer, n):
    """t_i = 1 / n_i, and 0 for up to three keys. The same on every head."""
    return torch.where(n > 3, 1 / n, 0.0)[:, None]


def softpick(s, seen, t=None):
    """w_ij = relu(e^s_ij - 1) / (sum_k |e^s_ik - 1| + eps): negative scores get zeros and only swell the denominator.

    So a row may spend less than 1, and nothing where every score is negative: no sink is needed. No learned scalars.
    Source: Zuhri et al. 2504.20966. Both sides are multiplied by e^-m, with m the row's maximum but at least 0: the
    authors' code lacks the "at least 0" and overflows where all scores are below -88. eps (1e-8) is added after that,
    as there; their kernel has 1e-6, and counts a score of exactly 0 as negative where autograd and this have slope 0.
    """
    s = s + ~seen * UNSEEN                      # nothing that is not seen may overflow
    m = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = (torch.exp(s - m) - torch.exp(-m)).masked_fill(~seen, 0.0)
    return F.relu(e) / (e.abs().sum(-1, keepdim=True) + 1e-8)


def relu(s, seen, t=None):
    """w_ij = relu(s_ij): no normaliser, exact zeros below 0, and nothing that must be spent, hence no sink.

    No learned scalars. Divided by the row's length (Wortsman et al. 2309.08586, there bidirectional and one length
    for all rows), or followed by an RMSNorm (ReLA, Zhang et al. 2021).
    """
    return F.relu(s).masked_fill(~seen, 0.0)


def tra(s, seen, t, power=2.0):
    """w_ij = relu(s_ij - t_i)^power, t_i = beta_h sqrt(2 log(n_i / kappa) / d): only what noise would hardly reach
    counts.

    Of unit q and k of width d that have nothing to do with each other, at beta 1 at most kappa keys a row pass on
    average, however long the context (at d 64 and n 1024 really 0.05, so most rows start empty). Exact zeros, no sum,
    no sink.
    Learned: beta (H,), 1 at the start, one for both views of TDA.
    Source: Threshold Differential Attention, eq. 1 and appendix B. The released kernel has kappa = 1, takes beta as a
    constant and lacks the norm on the output, which gives the few small weights a scale. Here the logarithm is at
    least 0, for kappa above n.
    """
    return F.relu(s - t).masked_fill(~seen, 0.0) ** power


def tra_threshold(layer, n):
    """t_i = beta_h sqrt(2 log(n_i / kappa) / d), the logarithm at least 0."""
    log = torch.log(n / layer.args["kappa"]).clamp(min=0)
    return layer.beta[:, None, None] * torch.sqrt(2 * log / layer.width)[:, None]


def sigmoid(s, seen, t):
    """w_ij = sigmoid(s_ij - t_i): each key is judged alone, so nothing has to be spent and there is no sink.

    No learned scalars: t is log(block_size) (`length_bias`), so that a row's sum is near 1 at the start; without it,
    0.
    Source: Ramapuram et al. 2409.04431 (b = -log n of the training length); without a bias: When Attention Sink
    Emerges, table 6.
    """
    return torch.sigmoid(s - t).masked_fill(~seen, 0.0)


def sigmoid_threshold(layer, n):
    """t_i = log(block_size), minus the published bias; the same on every row."""
    return torch.full_like(n, math.log(layer.config.block_size) if layer.args["length_bias"] else 0.0)[:, None]


def elu(s, seen, t=None):
    """w_ij = elu(s_ij) + 1, that is 1 + s_ij above 0 and e^s_ij below: positive, without a normaliser, without a sink.

    No learned scalars.
    Source: When Attention Sink Emerges, table 6.
    """
    return torch.where(s > 0, 1 + s, s.clamp(max=0).exp()).masked_fill(~seen, 0.0)


def identity(s, seen, t=None):
    """w_ij = s_ij: the score itself, of either sign. With a feature map on q and k this is linear attention. No sink.

    No learned scalars.
    Source: When Attention Sink Emerges, table 6; with elu + 1 on q and k: Katharopoulos et al. 2020.
    """
    return s.masked_fill(~seen, 0.0)


def row_sum(s, seen, w):
    """r_i = sum_j w_ij, what a row spends: the statistic of rules that do not normalise."""
    return w.sum(-1, keepdim=True)


class Constant(NamedTuple):
    """A constant that --attn_args may set: a switch if its default is one, else a number (a whole one if the default
    is), or perhaps a word."""
    default: Any
    low: float = -math.inf
    high: float = math.inf
    word: str | None = None                     # besides a number or a switch


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value of an axis. All there is to know of it stands in its row of the axis' table.

    `does` differs from axis to axis; a comment above each table says what goes in and what comes out.
    """
    does: Callable | None = None                # None: nothing
    learns: Callable | None = None              # layer -> {name: what Attention.add takes}
    args: dict[str, Constant] = dataclasses.field(default_factory=dict)
    refuse: Callable | None = None              # config, args -> why it means nothing there, or None


@dataclasses.dataclass(frozen=True)
class Rule(Choice):
    """A rule; it does s, seen, t -> weights."""
    statistic: Callable | None = None           # s, seen, weights -> r (B, H, R, 1), computed only where it is used
    row_input: Callable | None = None           # layer, n (R,) -> t, broadcastable to (B, H, R, 1)
    power: Callable | None = None               # args -> the constant power of rules that have one
    counted_in: str | None = None               # in the kernel t is a multiple of this kernel rule's row sum
    linear = True                               # in the values; not so of every state, see mixers/recurrent.py

    @property
    def normalizes(self):
        """Does the rule say itself what its rows sum to?"""
        return self.statistic is not row_sum


RULES = {
    "softmax": Rule(softmax, statistic=LogSumExp.apply),
    "elastic": Rule(
        elastic, row_input=elastic_threshold,
        learns=lambda layer: {"tau": torch.full((layer.heads,), layer.args["tau_init"])},
        args={"tau_init": Constant(1.0), "per_length": Constant(True, word="block"), "learn_tau": Constant(True)}),
    "entmax": Rule(
        entmax, row_input=entmax_row_input,
        learns=lambda layer: {"theta": torch.zeros(layer.heads)} if layer.args["alpha"] == "learned" else {},
        args={"alpha": Constant(1.5, 1.01, 2.0, "learned")},
        power=lambda args: None if args["alpha"] == "learned" else 1 / (args["alpha"] - 1)),
    "sparsemax": Rule(sparsemax),
    "lssar": Rule(lssar, row_input=lssar_threshold, counted_in="softplus",
                  args={"power": Constant(15.0, 1.0, 64.0)}, power=lambda args: args["power"]),
    "softpick": Rule(softpick),
    "relu": Rule(relu, statistic=row_sum),
    "tra": Rule(
        tra, statistic=row_sum, row_input=tra_threshold,
        learns=lambda layer: {"beta": torch.full((layer.heads,), layer.args["beta_init"])},
        args={"beta_init": Constant(1.0), "kappa": Constant(1.0, 1e-9, 1e9), "power": Constant(2.0, 1.0, 64.0),
              "learn_beta": Constant(True)}, power=lambda args: args["power"]),
    "sigmoid": Rule(sigmoid, statistic=row_sum, row_input=sigmoid_threshold, args={"length_bias": Constant(True)}),
    "elu": Rule(elu, statistic=row_sum),
    "identity": Rule(identity, statistic=row_sum),
}

# ------------------------------------------------------------------------------------ the recipes: one line a variant
# A published variant is a rule and a choice on every axis around it. Axes that a recipe leaves out fall to the
# preset, then to the default, which is the first value in the axis' table below. A row with a "mixer" is no attention:
# its choices are explained where that mixer is, in mixers/.

ATTENTIONS = {
    "softmax": {"rule": "softmax"},
    # scores that grow with the number of keys, so that longer rows are not flatter
    "ssmax": {"rule": "softmax", "scale": "log_n"},
    # a sink outside the sequence: an extra key that holds no value, or one, or is a token
    "softmax1": {"rule": "softmax", "sink": "one"},
    "sink": {"rule": "softmax", "sink": "logit"},
    "k_bias": {"rule": "softmax", "sink": "key"},
    "kv_bias": {"rule": "softmax", "sink": "key_value"},
    "sink_token": {"rule": "softmax", "sink": "token"},
    "v_bias": {"rule": "softmax", "value_bias": "on"},
    # or a gate on the output, which is what such a sink amounts to
    "gated": {"rule": "softmax", "gate": "head"},
    "gated_elementwise": {"rule": "softmax", "gate": "element"},
    # fewer keys in sight
    "window": {"rule": "softmax", "window": 128},
    "streaming": {"rule": "softmax", "window": 128, "first": 4},
    "gpt_oss": {"rule": "softmax", "sink": "logit", "window": 128, "window_every": 2},
    # two softmaxes, of which one is subtracted, or a correction of the output that does the same
    "diff": {"rule": "softmax", "diff": "v1", "out_norm": "head", "args": {"out_norm_eps": 1e-5}},
    "diff2": {"rule": "softmax", "diff": "v2"},
    "dex": {"rule": "softmax", "dex": "on"},
    # a threshold below which weights are zero
    "elastic": {"rule": "elastic"},
    "lazy": {"rule": "elastic", "pos": "rope+bias"},        # its paper speaks of a larger RoPE base, its code has 10000
    # zeros, and yet a sum of one
    "entmax": {"rule": "entmax"},
    "sparsemax": {"rule": "sparsemax"},
    "asentmax": {"rule": "entmax", "scale": "asentmax"},
    "lssar": {"rule": "lssar", "qk_norm": "l2", "scale": "log_n", "args": {"learn_sigma": False}},
    # rectified scores: at most one, or whatever they sum to
    "softpick": {"rule": "softpick"},
    "relu": {"rule": "relu", "normalize": "length"},
    "rela": {"rule": "relu", "out_norm": "all"},
    "rela_gated": {"rule": "relu", "out_norm": "gated"},
    "diff_rela": {"rule": "relu", "diff": "subtract", "out_norm": "head"},
    "tra": {"rule": "tra", "qk_norm": "l2", "scale": "one", "out_norm": "head"},
    "tda": {"rule": "tra", "qk_norm": "l2", "scale": "one", "out_norm": "head", "diff": "subtract"},
    # each key judged alone, with and without a row sum to divide by
    "sigmoid": {"rule": "sigmoid"},
    "sigmoid_raw": {"rule": "sigmoid", "args": {"length_bias": False}},
    "sigmoid_norm": {"rule": "sigmoid", "normalize": "sum", "args": {"length_bias": False}},
    "elu": {"rule": "elu"},
    "elu_norm": {"rule": "elu", "normalize": "sum"},
    # similarity kernels: the score itself, of what a feature map makes of q and k
    "linear": {"rule": "identity", "feature": "elu", "normalize": "sum"},
    "linear_raw": {"rule": "identity", "feature": "elu"},
    "identity": {"rule": "identity"},
    "identity_norm": {"rule": "identity", "normalize": "max1"},
    "mlp": {"rule": "identity", "feature": "mlp"},
    "mlp_norm": {"rule": "identity", "feature": "mlp", "normalize": "max1"},
    # learned groups of tokens: mixers/focus.py
    "focus": {"mixer": "focus", "rule": "softmax", "window": 128},
    # softmax among the tokens of a cluster, mixers/routing.py; or estimated by random features, mixers/performer.py
    "routing": {"mixer": "routing", "rule": "softmax"},
    "performer": {"mixer": "performer", "rule": "favor", "normalize": "sum"},
    # a state instead of keys: the rules and axes of mixers/recurrent.py
    "linear_state": {"mixer": "recurrent", "rule": "add", "feature": "elu", "normalize": "sum"},    # `linear` in O(T)
    "retnet": {"mixer": "recurrent", "rule": "add", "forget": "fixed", "pos": "rope", "out_norm": "head",
               "gate": "silu"},
    "gla": {"mixer": "recurrent", "rule": "add", "forget": "channel", "pos": "none", "out_norm": "head", "gate": "silu",
            "args": {"chunk": 16}},
    "mamba2": {"mixer": "recurrent", "rule": "ssd", "forget": "dt", "write": "dt", "pos": "none", "conv": "on",
               "scale": "one", "out_norm": "all", "gate": "silu_first"},
    "deltanet": {"mixer": "recurrent", "rule": "delta", "write": "beta", "pos": "none", "conv": "on", "qk_norm": "l2",
                 "out_norm": "head"},
    "gated_deltanet": {"mixer": "recurrent", "rule": "delta", "forget": "dt", "write": "beta", "pos": "none",
                       "conv": "on", "qk_norm": "l2", "out_norm": "head", "gate": "silu"},
    "ttt": {"mixer": "recurrent", "rule": "descent", "write": "rate", "pos": "rope", "scale": "one",
            "out_norm": "layer", "args": {"chunk": 16}},
    "titans": {"mixer": "recurrent", "rule": "momentum", "forget": "alpha", "write": "rate", "pos": "none",
               "conv": "on", "qk_norm": "l2", "scale": "one", "out_norm": "head", "gate": "silu",
               "args": {"chunk": 16}},
}


def recipe(name):
    """The axes of one recipe. Raises ValueError naming the recipes that exist."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown --attn={name}: choose from {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]


# --------------------------------------------------------------------------------------------------- the axes: tools
# From here on, one table an axis and one row a value: what it does, what it learns, its constants, what it does not
# go with. A new value is a row. `layer` is the Attention below; what it learns for each view has layer.score_heads
# rows, what it learns for each head of the output layer.heads. (A new axis is a table, a row of AXES, a field of
# model.GPTConfig, and the place in Attention where it acts.)


def only(values, *names):
    """These rows of a table."""
    return {name: values[name] for name in names}


class Normal(NamedTuple):
    """A learned tensor that starts as draws from N(0, std)."""
    std: float
    shape: tuple


class Redrawn(NamedTuple):
    """A weight of a learned module that starts as draws from N(0, std), and not from that of every linear layer."""
    std: float


class Fixed(NamedTuple):
    """A tensor that a layer keeps and does not learn."""
    value: torch.Tensor


def wide(x):
    """Low precision up to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split_heads(x, heads, width):
    """(B, R, heads * width) to (B, heads, R, width)."""
    return x.unflatten(-1, (heads, width)).transpose(1, 2)


# --------------------------------------------------------------------------------------------------------- positions


class Distance(NamedTuple):
    """Relative positions as one value: b[h, i - j], which is added to the score. Each part is a tensor or None."""
    table: Any = None                           # (H, W): at distances 0 .. W - 1
    tail: Any = None                            # (H,): from distance W on; None: 0 there
    slope: Any = None                           # (H,): times the distance, everywhere

    @property
    def is_empty(self):
        return all(part is None for part in self)

    def by_distance(self, T):
        """b at distances 0 .. T - 1, (H, T)."""
        H, part = next((len(part), part) for part in self if part is not None)
        table = part.new_zeros(H, 0) if self.table is None else self.table[:, :T]
        beyond = T - table.shape[1]
        by_distance = F.pad(table, (0, beyond))                         # (H, T)
        if self.tail is not None:
            by_distance = torch.cat([table, self.tail[:, None].expand(-1, beyond)], -1)
        if self.slope is not None:
            by_distance = by_distance + self.slope[:, None] * torch.arange(T, device=part.device)
        return by_distance

    def bias(self, R, T):
        """b for the last R of T rows against all T keys, (H, R, T); what stands at negative distances is not seen."""
        # one vector a head holds every distance once, from T-1 down to -(R-1); each row is a window on it, one step
        # further
        return F.pad(self.by_distance(T).flip(-1), (0, R - 1)).unfold(-1, T, 1).flip(-2)


def rope_frequencies(config, width, device):
    """Radians per position of each pair of channels, (width // 2,): base^(-2c/width), changed as rope_scaling says."""
    half = width // 2
    frequency = config.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    how, numbers = parse_rope_scaling(config.rope_scaling)
    return ROPE_SCALINGS[how](frequency, *numbers)


def ntk_frequencies(frequency, ratio):
    """NTK-aware: as with base * ratio^(D / (D - 2)). The fastest pair stays, the slowest turns `ratio` times slower, so
    that a context `ratio` times longer holds as much of its wave. (bloc97 2023; YaRN, Peng et al. 2309.00071,
    section 3.1)"""
    return frequency * ratio ** -torch.linspace(0, 1, len(frequency), device=frequency.device)


def llama3_frequencies(frequency, factor, low, high, original):
    """LLaMA 3.1: waves that fit into the original context `high` times stay, those that do not even `low` times become
    `factor` times longer, and in between it goes over smoothly."""
    fits = original * frequency / (2 * math.pi)                         # how often a wave fits into the context
    kept = ((fits - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


ROPE_SCALINGS = {                               # frequencies, numbers -> frequencies
    "": lambda frequency: frequency,
    "linear": lambda frequency, factor: frequency / factor,             # position interpolation, Chen et al. 2023
    "ntk": ntk_frequencies,
    "llama3": llama3_frequencies,
}


def rotate(x, frequency, positions):
    """RoPE (Su et al. 2021): turn the channels (x_c, x_{c + D/2}) of x (B, H, T, D) by position * frequency_c.

    positions (T,), frequency (D // 2,). Half-split pairing, as in GPT-NeoX and LLaMA. An odd last channel stays as it
    is.
    """
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1).to(x.dtype)


class Sinusoids(nn.Module):
    """sin and cos of each place, [sin | cos] over the width C, of wavelengths 2 pi to 20,000 pi: nothing is learned.

    Vaswani et al. 2017, section 3.5, where they alternate; half by half as in the code of When Attention Sink Emerges,
    which has them as large, too, beside embeddings that start at 0.02. (Vaswani et al. multiply these by sqrt(C).)
    """

    def __init__(self, places, width):
        super().__init__()
        self.num_embeddings, self.width = places, width

    def forward(self, positions):               # (T,) to (T, C)
        half = -(-self.width // 2)
        frequency = 10000.0 ** (-torch.arange(half, device=positions.device) / half)
        angle = positions[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], -1)[:, :self.width]


def learned_table(layer):
    return {"table": torch.zeros(layer.score_heads, layer.config.bias_range)}


def learned_bias(layer):
    """score + table[h, i - j], 0 beyond `bias_range`. Lazy Attention, section 4.1, whose minus is in the table."""
    return Distance(layer.table)


def alibi(layer):
    """score - m_h (i - j), fixed, or learned with --attn_args=learn_alibi=1. ALiBi, Press et al. 2108.12409,
    section 3."""
    return Distance(slope=-layer.alibi)


def alibi_slopes(layer):
    """m_h = 2^(-8 (h + 1) / H) if H is a power of 2; else those of the next lower one P, then every second one of 2 P:
    the released code's. Two views share one."""
    heads = layer.heads
    lower = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
    slopes += [2 ** (-4 * (h + 1) / lower) for h in range(0, 2 * (heads - lower), 2)]
    return {"alibi": torch.tensor(slopes).repeat_interleave(layer.score_heads // heads)}


T5_BUCKETS, T5_FAR = 32, 128                    # the buckets, and from where on a distance is in the last of them


def t5_buckets(device=None):
    """The bucket of each distance, (T5_FAR,): one for each of the nearest 16, then 16 evenly in the logarithm.

    T5, Raffel et al. 1910.10683, section 2.1; its code, for causal attention.
    """
    near = T5_BUCKETS // 2
    distance = torch.arange(T5_FAR, device=device)
    logs = (distance / near).clamp(min=1).log() / math.log(T5_FAR / near)               # 0 at 16, 1 at 128
    return torch.where(distance < near, distance, near + (logs * near).long())


def t5_bias(layer):
    """score + b[h, bucket of i - j]; b (heads, 32) is shared by all layers, N(0, 1/sqrt(n_embd)) at first, as in
    transformers. T5, whose scores are not divided by sqrt(d) (here they are; --scale=one is T5's)."""
    return Distance(layer.t5[:, t5_buckets(layer.t5.device)], layer.t5[:, -1])


def t5_table(layer):
    return {"t5": Normal(layer.config.n_embd ** -0.5, (layer.score_heads, T5_BUCKETS))}


def t5_index(layer):
    """score + the number of the bucket, 0 to 31: the farther, the more. Nothing is learned, and no model should want
    it: it is what the released code of When Attention Sink Emerges computes as relative positions (table 3, whose
    loss is 5.45 where the others have 3.8)."""
    return Distance(layer.t5_index, layer.t5_index[:, -1])


def t5_index_table(layer):
    return {"t5_index": Fixed(t5_buckets().float().repeat(layer.score_heads, 1))}


@dataclasses.dataclass(frozen=True)
class Position(Choice):
    """Does layer -> Distance."""
    rotates: bool = False                       # q and k turn by RoPE
    embeds: Callable | None = None              # places, C -> what model.py adds for each place; there are no others
    shared: tuple = ()                          # names of what it learns that all layers share


POSITIONS = {
    "rope": Position(rotates=True),
    "none": Position(),
    "sinusoidal": Position(embeds=Sinusoids),
    "learned": Position(embeds=nn.Embedding),
    "alibi": Position(alibi, alibi_slopes, {"learn_alibi": Constant(False)}),
    "t5": Position(t5_bias, t5_table, shared=("t5",)),
    "t5_index": Position(t5_index, t5_index_table),
    "bias": Position(learned_bias, learned_table),
    "rope+bias": Position(learned_bias, learned_table, rotates=True),
}

# -------------------------------------------------------------------------------- before the scores: queries and keys


def unit_length(layer, x):
    """x / |x|. It has no weights, so it makes no difference that RoPE came before. TRA, LSSAR."""
    return F.normalize(wide(x), dim=-1, eps=1e-6).to(x.dtype)


def unit_square(layer, x):
    """x / sqrt(mean x^2), without weights."""
    return F.rms_norm(wide(x), (layer.width,), eps=1e-6).to(x.dtype)


def norm_of_heads(layer, norm, x):
    """RMSNorm of each head with learned weights, (D,) for queries and (D,) for keys. Qwen3."""
    return norm(wide(x)).to(x.dtype)


def norm_of_layer(layer, norm, x):
    """RMSNorm of all heads together with learned weights, (H D,) for queries and (Hk D,) for keys. OLMo 2."""
    return split_heads(norm(wide(x).transpose(1, 2).flatten(2)), *x.shape[1::2]).to(x.dtype)


def norms_of_qk(layer, q_width, k_width):
    return {"q_norm": nn.RMSNorm(q_width, eps=layer.config.norm_eps),
            "k_norm": nn.RMSNorm(k_width, eps=layer.config.norm_eps)}


@dataclasses.dataclass(frozen=True)
class QKNorm(Choice):
    """Does layer, x -> x after rotation: queries and keys, each by itself."""
    projected: Callable | None = None           # layer, its learned norm, x -> x, which weights bind to before rotation


QK_NORMS = {
    "none": QKNorm(),
    "l2": QKNorm(unit_length),
    "rms": QKNorm(unit_square),
    "head": QKNorm(projected=norm_of_heads, learns=lambda layer: norms_of_qk(layer, layer.width, layer.width)),
    "all": QKNorm(projected=norm_of_layer, learns=lambda layer: norms_of_qk(
        layer, layer.shapes["q"][0] * layer.width, layer.shapes["k"][0] * layer.width)),
}


def elu_features(layer, x):
    """elu(x) + 1: linear attention's positive features. Katharopoulos et al. 2020, eq. 7."""
    return F.elu(x) + 1


def mlp_features(layer, x):
    """W2 relu(W1 x), one map for queries and keys of all heads. When Attention Sink Emerges, table 6, where it is
    printed as mlp(q, mlp(k)); the released code has mlp(q) mlp(k)."""
    return layer.feature(x.to(layer.feature[0].weight.dtype)).to(x.dtype)


def mlp_feature_map(layer):
    width = layer.width
    first, second = (nn.Linear(width, width, bias=False) for _ in range(2))
    drawn = Redrawn(math.sqrt(2 / (5 * width)))
    return {"feature": nn.Sequential(first, nn.ReLU(), second), "feature.0.weight": drawn, "feature.2.weight": drawn}


FEATURES = {                                    # layer, x -> x: queries and keys, each by itself
    "none": Choice(),
    "elu": Choice(elu_features),
    "mlp": Choice(mlp_features, mlp_feature_map),
}


def ssmax_scale(layer, n):
    """SSMax (Nakanishi 2501.19399): the score times sigma_h log n_i. Long rows are as sharp as short ones, their
    sinks too.

    Learned: sigma (H,), at first 1 / mean(log n) of a training context (0.168 for 1024), or --attn_args=sigma_init=.
    The asentmax repository's version has log(n + 1) and N(1, 0.01). For unit q and k (LSSAR, which fixes it) sigma is
    sqrt(d) log(d).
    """
    return layer.sigma[:, None, None] * n.log()[:, None]


def ssmax_scalars(layer):
    config, width, sigma = layer.config, layer.width, layer.args["sigma_init"]
    mean_log = (torch.arange(config.block_size) + 1.0).log().mean().item()
    if sigma == "auto":
        sigma = math.sqrt(width) * math.log(width) if config.qk_norm == "l2" else 1 / max(mean_log, 0.1)
    return {"sigma": torch.full((layer.score_heads,), sigma)}


def asentmax_scale(layer, n):
    """ASEntmax: the score times 1 + beta_h log(n_i + 1)^gamma_h, which a head may learn to let grow or shrink with n.

    Learned: scale_beta (H,), at first evenly spread over the heads from 0.1 to 1 (the released code draws it there),
    and scale_gamma (H,), at first 0, so that length comes in as it learns (there N(0, 0.1)).
    Source: the asentmax repository, sparse_gemma.py. A simplification: the form recommended there has beta =
    softplus(x W) and gamma = 2 tanh(x W') for each token, and scales only the heads without positions, where the
    other half of the heads carries ALiBi.
    """
    return 1 + layer.scale_beta[:, None, None] * (n + 1).log()[:, None] ** layer.scale_gamma[:, None, None]


def asentmax_scalars(layer):
    heads = layer.score_heads
    beta = torch.linspace(0.1, 1.0, heads) if heads > 1 else torch.full((1,), 0.55)
    return {"scale_beta": beta, "scale_gamma": torch.zeros(heads)}


@dataclasses.dataclass(frozen=True)
class Scale(Choice):
    """Does layer, n (R,) -> a factor on the score, (H, R, 1)."""
    bare: bool = False                          # not divided by sqrt(d)


SCALES = {
    "sqrt_d": Scale(),
    "one": Scale(bare=True),
    "log_n": Scale(ssmax_scale, ssmax_scalars,
                   {"sigma_init": Constant("auto", word="auto"), "learn_sigma": Constant(True)}),
    "asentmax": Scale(asentmax_scale, asentmax_scalars),
}

# ----------------------------------------------------------- after the rule: what a row keeps, and what is subtracted


def over_sum(r, n):
    """The row sum. 1e-8 keeps a row without any weight finite."""
    return r + 1e-8


def over_length(r, n):
    """n_i, the number of keys that row i sees."""
    return n


def over_max1(r, n):
    """max(|row sum|, 1), for weights of either sign. When Attention Sink Emerges, table 6."""
    return r.abs().clamp(min=1.0)


def normalizes_itself(config, args):
    if RULES[config.rule].normalizes:
        free = ", ".join(name for name, rule in RULES.items() if not rule.normalizes)
        return (f"--normalize={config.normalize} goes with rules that have no normaliser of their own ({free}): "
                f"the rows of rule {config.rule} are normalised already")


def sum_may_be_zero(config, args):
    if config.rule == "identity" and config.feature != "elu":
        return "--normalize=sum divides by sums that weights of either sign may bring to 0: use --normalize=max1"
    return normalizes_itself(config, args)


@dataclasses.dataclass(frozen=True)
class Normalizer(Choice):
    """Does r (B, H, R, 1) the row sums, n (R, 1) the lengths -> what to divide a row by."""
    sums: bool = False                          # it reads r


NORMALIZERS = {
    "none": Normalizer(),
    "sum": Normalizer(over_sum, refuse=sum_may_be_zero, sums=True),
    "length": Normalizer(over_length, refuse=normalizes_itself),
    "max1": Normalizer(over_max1, refuse=normalizes_itself, sums=True),
}


def zero_score(layer, q):
    """c = 0 (softmax1, Miller 2023)."""
    return 0.0


def logit_score(layer, q):
    """c = b_h, learned, 0 at first. GPT-OSS, which prints no initial value; transformers has N(0, 0.02)."""
    return layer.sink_logit[:, None, None]


BIAS_SIZES = {                                  # of learned key and value biases
    "bias_shared": Constant(False),             # one for all heads; When Attention Sink Emerges, table 12
    "bias_dims": Constant("all", 1, word="all")}        # only so many first channels learn, the others are 0; table 13


def wrong_bias_dims(config, args):
    dims = args["bias_dims"]
    if dims != "all" and (dims != int(dims) or dims > config.head_width):
        return f"--attn_args: bias_dims={dims:g} must be a whole number of channels, of a head's {config.head_width}"


def bias_shape(layer, heads, width):
    dims = layer.args["bias_dims"]
    return 1 if layer.args["bias_shared"] else heads, width if dims == "all" else int(dims)


def whole_bias(bias, heads, width):
    """A learned bias as every head wants it, (heads, width)."""
    return F.pad(bias, (0, width - bias.shape[-1])).repeat_interleave(heads // len(bias), 0)


def key_score(layer, q):
    """c_i = q_i . k* / sqrt(d), as for every key, with k* N(0, 0.02) for each key head, not rotated. When Attention
    Sink Emerges, table 4, whose code decays k* and v*; here nothing outside the linear layers decays."""
    key = layer.for_score_heads(layer.featured(whole_bias(layer.sink_key, *layer.shapes["k"])), 0)
    return layer.sight.scale * (wide(q[..., :layer.width]) * key[:, None]).sum(-1, keepdim=True)


def sink_key(layer):
    return {"sink_key": Normal(0.02, bias_shape(layer, *layer.shapes["k"]))}


def sink_key_and_value(layer):
    """v* is N(0, 0.02), or fixed: of norm `value_norm`, along the first axis or (`value_even`) all; its table 5."""
    heads, width = layer.shapes["v"]
    if layer.args["value_norm"] == "learned":
        return sink_key(layer) | {"sink_value": Normal(0.02, bias_shape(layer, heads, width))}
    value = torch.full((width,), width ** -0.5) if layer.args["value_even"] else torch.eye(width)[0]
    return sink_key(layer) | {"sink_value": Fixed((layer.args["value_norm"] * value).repeat(heads, 1))}


def sink_value(layer, heads):
    return whole_bias(layer.sink_value, heads, layer.shapes["v"][1])[:, None]


def needs_log_sum_exp(config, args):
    if config.rule != "softmax":
        return (f"--sink={config.sink} goes with rule softmax only: an extra key merges exactly by log-sum-exp, "
                f"and rule {config.rule} has none")
    if args.get("value_even") and args["value_norm"] == "learned":
        return "--attn_args: value_even=1 lays out a fixed value of the extra key: give its value_norm=NUMBER as well"
    return wrong_bias_dims(config, args) if "bias_dims" in args else None


def needs_first(config, args):
    if config.window and not config.first:
        return "--sink=token is out of sight beyond a window: give --first=1 as well"


@dataclasses.dataclass(frozen=True)
class Sink(Choice):
    """Does layer, q -> c (.., 1), the score of an extra key, which leaves the others e^r / (e^r + e^c) of their
    weights: softmax followed by a gate, o_i sigmoid(r_i - c_i). So a sink need not be a token (The Attention Sink as
    Native MoE, eq. 2 to 4)."""
    value: Callable | None = None               # layer, heads -> the extra key's value (heads, 1, E); None: 0
    ahead: int = 0                              # model.py puts so many learned tokens ahead of the sequence


SINKS = {
    "none": Sink(),
    "one": Sink(zero_score, refuse=needs_log_sum_exp),
    "logit": Sink(logit_score, lambda layer: {"sink_logit": torch.zeros(layer.score_heads)},
                  refuse=needs_log_sum_exp),
    "key": Sink(key_score, sink_key, BIAS_SIZES, refuse=needs_log_sum_exp),
    "key_value": Sink(key_score, sink_key_and_value, BIAS_SIZES | {
        "value_norm": Constant("learned", word="learned"), "value_even": Constant(False)},
        refuse=needs_log_sum_exp, value=sink_value),
    "token": Sink(refuse=needs_first, ahead=1),                         # an ordinary key
}


def lambda_at_depth(depth):
    """Differential Transformer's lambda_init, for layers counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def lambda_logit(layer):
    start = layer.args["lambda_init"]
    return {"lambda_logit": torch.full((layer.heads,), math.log(start / (1 - start)))}


def lambda_of_head(layer, x):
    """sigmoid(lambda_logit_h), 0.5 at first. Threshold Differential Attention prints no initial value, and its code
    clamps lambda to [0, 1], where it gets no gradient."""
    return torch.sigmoid(layer.lambda_logit)[:, None, None]


def lambda_of_layer(layer, x):
    """exp(q1.k1) - exp(q2.k2) + lambda_init of four vectors (D,), N(0, 0.1), and the depth: one lambda a layer.

    Source: Ye et al. 2410.05258, eq. 3. In the code two layers stand side by side: multihead_diffattn.py shares one
    key head between both views, multihead_flashdiff_1.py, which it recommends, gives each its own, as here. Paper
    GroupNorm, code RMSNorm with one weight for all heads, as here; transformers pairs heads h and h + H/2, and has no
    weight.
    """
    ups, downs = (layer.lambda_q1 * layer.lambda_k1).sum(), (layer.lambda_q2 * layer.lambda_k2).sum()
    return ups.exp() - downs.exp() + lambda_at_depth(layer.depth)


def lambda_of_token(layer, x):
    """sigmoid of a linear map of the layer's input: a lambda per head and token, no norm. unilm,
    Diff-Transformer-V2."""
    return torch.sigmoid(wide(layer.lambda_proj(x))).transpose(1, 2)[..., None]


def shrunk(layer, o):
    """o (1 - lambda_init), after the norm on the output.
    Source: Ye et al. 2410.05258, eq. 4."""
    return o * (1 - lambda_at_depth(layer.depth))


def needs_pairs(config, args):
    if config.n_kv_head % 2:
        return (f"--diff=v1 pairs heads, of keys, too: n_head={config.n_head} and n_kv_head={config.n_kv_head} "
                "must both be even")


@dataclasses.dataclass(frozen=True)
class Difference(Choice):
    """Does layer, x -> lambda, broadcastable to (B, output heads, R, 1): o = o_a - lambda o_b.

    What both views park on a sink cancels. `heads` takes n_head H, n_kv_head K and the width D of a query.
    """
    heads: Callable = lambda H, K, D: ((H, D), (K, D), (K, D))          # (heads, width) of q, k and v
    own_keys: bool = False                      # each view has its own of a pair of key heads
    after: Callable | None = None               # layer, o -> o, what follows the norm on the output


DIFFERENCES = {
    "none": Difference(),
    "subtract": Difference(                     # two views of the same values
        lambda_of_head, lambda_logit, {"lambda_init": Constant(0.5, 1e-6, 1 - 1e-6)}, own_keys=True,
        heads=lambda H, K, D: ((2 * H, D), (2 * K, D), (K, D))),
    "v1": Difference(                           # half the heads, each twice as wide: as many parameters as softmax
        lambda_of_layer, refuse=needs_pairs, own_keys=True, after=shrunk,
        learns=lambda layer: {f"lambda_{name}": Normal(0.1, (layer.width,)) for name in ("q1", "k1", "q2", "k2")},
        heads=lambda H, K, D: ((H, D), (K, D), (K // 2, 2 * D))),
    "v2": Difference(                           # two queries look at the same keys
        lambda_of_token, lambda layer: {"lambda_proj": nn.Linear(layer.config.n_embd, layer.heads, bias=False)},
        heads=lambda H, K, D: ((2 * H, D), (K, D), (K, D))),
}

# -------------------------------------------------------------------------------------------- the output of each head


def plus_value(layer, o):
    """o + v*, a learned constant N(0, 0.02) for each head: V biases. When Attention Sink Emerges, table 4."""
    return o + whole_bias(layer.value_bias, o.shape[1], o.shape[-1])[:, None]


VALUE_BIASES = {                                # layer, o (B, heads, R, E) -> o
    "off": Choice(),
    "on": Choice(plus_value, lambda layer: {
        "value_bias": Normal(0.02, bias_shape(layer, layer.heads, layer.shapes["v"][1]))}, BIAS_SIZES,
        refuse=wrong_bias_dims),
}


def dex_corrected(layer, o):
    """o - lambda(t) o W: every head may subtract what a sink's value adds. Kong et al. 2505.16333; there is no
    official code.

    lambda(t) = (1 - a) a lambda_init + a lambda_learned, a = min(1, progress / anneal). W and lambda_learned start at
    0, where neither would ever move: the term that fades in and out is what starts them. The paper corrects some
    heads of a trained model; here all.
    """
    a = (layer.progress / layer.args["anneal"]).clamp(max=1.0)
    factor = (1 - a) * a * lambda_at_depth(layer.depth) + a * layer.dex_lambda
    return o - factor * layer.dex_proj(o.to(layer.dex_proj.weight.dtype))


def dex_correction(layer):
    E = layer.shapes["v"][1]
    return {"dex_proj": nn.Linear(E, E, bias=False), "dex_proj.weight": Redrawn(0.0), "dex_lambda": torch.zeros(()),
            "progress": Fixed(torch.zeros(()))}         # how much of the training is over: the loop sets it


DEXES = {                                       # layer, o (B, heads, R, E) -> o
    "off": Choice(),
    "on": Choice(dex_corrected, dex_correction, {"anneal": Constant(0.5, 1e-6, 1.0)}),
}


def head_norm(layer, o):
    """RMSNorm of each head's output, one weight for all heads."""
    return layer.out_norm(o.to(layer.out_norm.weight.dtype))


def joint_norm(layer, o):
    """RMSNorm of all heads together (ReLA; its code has eps 1e-8, at which an empty row's gradient is huge)."""
    together = o.transpose(1, 2).flatten(2).to(layer.out_norm.weight.dtype)         # (B, R, heads E)
    return split_heads(layer.out_norm(together), *o.shape[1::2])


def gated_norm(layer, o):
    """The same times sigmoid(g o) of the output before the norm: ReLA's second form. g is N(0, 0.02) at first."""
    together = o.transpose(1, 2).flatten(2).to(layer.out_norm.weight.dtype)         # (B, R, heads E)
    return split_heads(layer.out_norm(together) * torch.sigmoid(layer.norm_gate * together), *o.shape[1::2])


def rms_norm(layer, width):
    return nn.RMSNorm(width, eps=layer.args["out_norm_eps"])


def norm_of_all(layer):
    return {"out_norm": rms_norm(layer, layer.heads * layer.shapes["v"][1])}


def norm_and_gate(layer):
    return norm_of_all(layer) | {"norm_gate": Normal(0.02, (layer.heads * layer.shapes["v"][1],))}


EPS = {"out_norm_eps": Constant(1e-6, 1e-12, 1.0)}
OUT_NORMS = {                                   # layer, o (B, heads, R, E) -> o
    "none": Choice(),
    "head": Choice(head_norm, lambda layer: {"out_norm": rms_norm(layer, layer.shapes["v"][1])}, EPS),
    "all": Choice(joint_norm, norm_of_all, EPS),
    "gated": Choice(gated_norm, norm_and_gate, EPS),
}


def gated(layer, o, x):
    """o sigmoid(W x), x the layer's input: a closed gate spends nothing, so no sink is needed. Gates start at 1/2.

    One gate per head, or one per element of its output.
    Source: Qiu et al. 2505.06708; The Attention Sink as Native MoE, eq. 3.
    """
    return o * torch.sigmoid(split_heads(layer.gate(x), o.shape[1], -1).to(o.dtype))


def gate(layer, gates):
    return {"gate": nn.Linear(layer.config.n_embd, layer.heads * gates, bias=layer.config.bias)}


GATES = {                                       # layer, o (B, heads, R, E), x (B, R, C) -> o
    "none": Choice(),
    "head": Choice(gated, lambda layer: gate(layer, 1)),
    "element": Choice(gated, lambda layer: gate(layer, layer.shapes["v"][1])),
}

# ------------------------------------------------------------------------------------------------------- all the axes

AXES = {                                        # axis: its values, the default first
    "rule": RULES, "pos": POSITIONS, "qk_norm": QK_NORMS, "feature": FEATURES, "scale": SCALES,
    "normalize": NORMALIZERS, "sink": SINKS, "diff": DIFFERENCES,
    "value_bias": VALUE_BIASES, "dex": DEXES, "out_norm": OUT_NORMS, "gate": GATES,
}


def needs_window(config, args):
    if not config.window:
        return f"--window_every={config.window_every} says which layers have a window: give --window as well"


def needs_window_and_places(config, args):
    if not config.window:
        return f"--first={config.first} keeps keys visible beyond a window: give --window as well"
    if POSITIONS[config.pos].rotates and config.feature == "elu":
        return ("--first with rope scores the first keys from places of their own, which elu + 1 would mix up: "
                "use another --feature or --pos")


class Number(NamedTuple):
    """An axis that is a whole number."""
    default: int                                # also the smallest it can be
    refuse: Callable | None = None              # config, args -> why another number means nothing there, or None


NUMBERS = {                                     # what they do is in Sight and `visible`
    "window": Number(0),
    "window_every": Number(1, needs_window),
    "first": Number(0, needs_window_and_places),
}
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()}
DEFAULTS |= {name: number.default for name, number in NUMBERS.items()}

# --------------------------------------------------------------------------- the block loop: attention in O(T) memory
# Rows are taken BLOCK at a time, so the scores in memory are (B, H, BLOCK, T) and never (B, H, T, T). The same loop
# trains on CPUs, decodes (a block of one row) and shows its weights to the instruments.

BLOCK = 128


class Sight(NamedTuple):
    """Who sees whom in a layer, and what multiplies their score."""
    scale: float = 1.0
    window: int = 0                             # keys that a row sees, itself included (0: all),
    first: int = 0                              # beside so many first keys
    hidden: int = -1                            # one key that only its own row sees: for instruments, never in training
    skip_dead: bool = True                      # kernels pass over tiles without any weight; off to see what that gains


def visible(i, j, sight):
    """Who sees whom: row i sees key j (both positions, broadcast against each other).

    A window (Beltagy et al. 2020) takes the sink out of sight. So a model trained without one, which needs its sink,
    breaks, unless its first keys stay visible (StreamingLLM, Xiao et al. 2309.17453). GPT-OSS has a window of 128 in
    every second layer, 0 first.
    """
    seen = j <= i
    if sight.window:
        seen = seen & ((i - j < sight.window) | (j < sight.first))
    return seen & ((j != sight.hidden) | (i == j)) if sight.hidden >= 0 else seen


def visible_count(i, sight):
    """n_i, the number of keys that row i sees, as float32. A hidden key counts."""
    n = (i + 1).float()
    return n.clamp(max=sight.window + sight.first) if sight.window else n


def grouped(a, b):
    """Matrix product a @ b (B, H, R, .) where b may have fewer heads: a group of heads shares one head of b."""
    B, H, R, _ = a.shape
    with torch.autocast(a.device.type, enabled=False):                  # a and b have the precision they should have
        return (a.reshape(B, b.shape[1], -1, a.shape[-1]) @ b).view(B, H, R, b.shape[-1])


def for_products(x):
    """The same, except under bfloat16 autocast on a CPU, whose products are much faster than its float32 ones."""
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return x.to(torch.get_autocast_dtype("cpu"))
    return wide(x)


def weigh_block(rule, sight, q, k, t, distance, i, need_r=False):
    """The rows at positions i (R,): their weights (B, H, R, keys) for as many keys as end at the last of them, and
    their statistic where it is needed. q comes in scaled. Products may be low precision, all after them is not."""
    j = torch.arange(k.shape[2], device=k.device) + (i[-1] + 1 - k.shape[2])
    seen = visible(i[:, None], j, sight)
    s = wide(grouped(q, k.mT))                  # (B, H, R, keys)
    if not distance.is_empty:
        s = s + distance.bias(*s.shape[2:])
    w = rule.does(s, seen, t)
    return w, rule.statistic(s, seen, w) if need_r else None


def output_block(rule, sight, need_r, dropout, q, k, v, t, _, *distance, i):
    """Output (B, H, R, E) of one block of rows, and its statistic if that is needed, as a tuple of one or two."""
    w, r = weigh_block(rule, sight, q, k, t, Distance(*distance), i, need_r)
    if dropout:
        w = F.dropout(w, dropout)
    o = grouped(w.to(v.dtype), v)
    return (o, r) if need_r else (o,)


def row_blocks(R, T, device):
    """The last R of T rows, BLOCK at a time: yields which of the R they are (a slice), and their positions."""
    for start in range(0, R, BLOCK):
        rows = slice(start, min(start + BLOCK, R))
        yield rows, torch.arange(T - R + rows.start, T - R + rows.stop, device=device)


def keys_of(rows, R, T, sight):
    """The keys that some of these rows may see: up to the last row, and no farther back than the first row's window."""
    start = 0 if sight.first or not sight.window else max(0, T - R + rows.start + 1 - sight.window)
    return slice(start, T - R + rows.stop)


def cut(sight, rows, q, k, v, t, u=None, *distance):
    """What one block needs of everything: its rows, and the keys they see. Slices, so they can be added to in place.
    t goes with rows, u (B, heads, T, .) with keys, if there is one (see mixers/focus.py)."""
    keys = keys_of(rows, q.shape[2], k.shape[2], sight)
    t, u = None if t is None else t[..., rows, :], None if u is None else u[:, :, keys]
    return q[:, :, rows], k[:, :, keys], v[:, :, keys], t, u, *distance


def run_blocks(run, sight, q, k, *more):
    """All blocks one after another, kept for the backward pass as autograd does."""
    blocks = [run(*cut(sight, rows, q, k, *more), i=i) for rows, i in row_blocks(q.shape[2], k.shape[2], q.device)]
    return tuple(torch.cat(parts, 2) for parts in zip(*blocks, strict=True))


class Recomputed(torch.autograd.Function):
    """run_blocks whose backward pass computes each block again, so that none is kept: memory stays O(T x BLOCK).

    torch.utils.checkpoint around each block would do, but slower: each block's gradient of k and v would be a full one,
    mostly zeros.
    """
    @staticmethod
    def forward(ctx, run, sight, *inputs):
        ctx.run, ctx.sight, ctx.rng, ctx.device_rng = run, sight, torch.get_rng_state(), get_device_states(*inputs)
        ctx.save_for_backward(*inputs)
        return run_blocks(run, sight, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *arriving):
        inputs = ctx.saved_tensors
        sums = [None if x is None else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                for x in inputs]
        with torch.random.fork_rng(devices=ctx.device_rng[0]):
            torch.set_rng_state(ctx.rng)        # dropout falls as it did
            set_device_states(*ctx.device_rng)
            for rows, i in row_blocks(inputs[0].shape[2], inputs[1].shape[2], inputs[0].device):
                with torch.enable_grad():
                    parts = [None if x is None else x.detach().requires_grad_() for x in cut(ctx.sight, rows, *inputs)]
                    outputs = ctx.run(*parts, i=i)
                given = [part for part in parts if part is not None]
                # of this block alone; then added to where its rows and keys lie in the whole
                grads = torch.autograd.grad(outputs, given, [gradient[:, :, rows] for gradient in arriving],
                                            materialize_grads=True)
                wholes = (x for x in cut(ctx.sight, rows, *sums) if x is not None)
                for whole, gradient in zip(wholes, grads, strict=True):
                    whole += gradient
        return None, None, *(None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True))


def in_blocks(run, sight, q, k, v, t, u=None, distance=None):
    """What `run` makes of each block of rows, put together: output (B, H, R, E), and the statistic (B, H, R, 1) if it
    gives one, or None. Up to two blocks are kept for the backward pass; more are computed again."""
    loop = Recomputed.apply if torch.is_grad_enabled() and q.shape[2] > 2 * BLOCK else run_blocks
    q, k, v = for_products(q) * sight.scale, for_products(k), for_products(v)
    o, *r = loop(run, sight, q, k, v, t, u, *(distance or Distance()))
    return o, r[0] if r else None


def block_loop(rule, q, k, v, t, sight, distance=None, need_r=False, dropout=0.0):
    """Attention of all rows, block by block: output, and the statistic if asked for, or None."""
    run = partial(output_block, rule, sight, need_r, dropout)
    return in_blocks(run, sight, q, k, v, t, None, distance)


def plain_softmax(q, k, v, scale, dropout):
    """Softmax attention by torch's own fused kernel."""
    R, T = q.shape[2], k.shape[2]
    mask = None
    if 1 < R < T:                               # is_causal would count from the first key, not from the last
        mask = visible(torch.arange(T - R, T, device=q.device)[:, None], torch.arange(T, device=q.device), Sight())
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=R == T and R > 1, scale=scale,
                                          enable_gqa=k.shape[1] < q.shape[1])


# ---------------------------------------------------------------------------------------------------------- the layer


class Attention(nn.Module):
    """One attention layer, built from the axes of a model.GPTConfig.

    module(x) takes the layer's normed input (B, R, C) to (B, R, C). Between the projections stands
    module.attend(q, k, v, x), whose inputs have the shapes that module.shapes gives as {"q": (heads, width), ...}.
    """
    axes, numbers = AXES, NUMBERS               # a mixer derived from this layer has others
    heads_by = "diff"                           # the axis that says how many heads q, k and v have
    refused = {}                                # axis: why its values mean nothing to a mixer that does not know them
    penalized, penalty = False, 0.0             # does the layer add to the training loss, and what
    added = ()                                  # names of parameters and buffers that a mixer adds to this layer's
    causal = True                               # no row depends on later positions, in values and in gradients
    cached = True                               # can be decoded step by step
    fused_by = ()                               # Triton functions of a mixer that has its own, in their order

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.depth, self.args = config, layer, constants(config, self.axes)
        self.choices = chosen(config, self.axes)                        # {axis: Choice}
        self.rule, self.power = self.choices["rule"], None
        if self.rule.power:
            self.power = self.rule.power(self.args)
            self.rule = dataclasses.replace(self.rule, does=partial(self.rule.does, power=self.power))
        # the projections
        self.width = config.head_width                                  # of queries and keys
        heads = self.choices[self.heads_by].heads(config.n_head, config.n_kv_head, self.width)
        self.shapes = dict(zip("qkv", heads, strict=True))
        (self.score_heads, _), (_, value_width) = self.shapes["q"], self.shapes["v"]
        self.heads = config.n_head * self.width // value_width          # of the output
        self.c_attn = nn.Linear(config.n_embd, sum(h * w for h, w in self.shapes.values()),
                                bias=config.bias or config.qkv_bias)
        self.c_proj = nn.Linear(self.heads * value_width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        # who sees whom, and how scores are scaled
        window, first = (config.window, config.first) if layer % config.window_every == 0 else (0, 0)
        self.sight = Sight(1.0 if self.choices["scale"].bare else self.width ** -0.5, window, first)
        self.ahead = self.choices["sink"].ahead                         # how many of the keys come before the sequence
        # what the choices learn
        self.init_std = {}                      # {parameter: std}, of what GPT.init_weights draws
        for choice in self.choices.values():
            for name, start in (choice.learns(self) if choice.learns else {}).items():
                self.add(name, start)

    def add(self, name, start):
        """Something that a choice learns or keeps: a module, or a tensor to start from, which learn_<name>=0 among
        --attn_args keeps fixed; or a Normal, a Redrawn weight of the module before it, a Fixed. What is drawn here for
        a layer by itself, GPT.init_weights draws again, from the model's seed."""
        if isinstance(start, (Normal, Redrawn)):
            self.init_std[name] = start.std
        if isinstance(start, Redrawn):
            return nn.init.normal_(self.get_parameter(name), 0.0, start.std)
        if isinstance(start, Normal):
            start = torch.randn(start.shape) * start.std
        if isinstance(start, nn.Module):
            self.add_module(name, start)
        elif isinstance(start, Fixed):
            self.register_buffer(name, start.value)
        elif self.args.get(f"learn_{name}", True):
            self.register_parameter(name, nn.Parameter(start))
        else:
            self.register_buffer(name, start)

    def through(self, axis, x, *more):
        """x as the choice on this axis changes it."""
        does = self.choices[axis].does
        return x if does is None else does(self, x, *more)

    def forward(self, x, past=None, importances=None):
        """x (B, R, C), the layer's normed input. past: a dict that keeps the keys and values of earlier calls.
        importances: a list that the layer's `importance` is added to."""
        sizes = [heads * width for heads, width in self.shapes.values()]
        parts = zip(self.c_attn(x).split(sizes, -1), self.shapes.values(), strict=True)
        q, k, v = (split_heads(part, *shape) for part, shape in parts)
        if self.choices["qk_norm"].projected:
            q, k = (self.choices["qk_norm"].projected(self, *pair) for pair in ((self.q_norm, q), (self.k_norm, k)))
        gone = 0                                # tokens that have left the cache
        if past is not None:                    # keys are kept unrotated: where some are forgotten, the others move up
            k, v = (torch.cat([past[name], new], 2) if name in past else new for name, new in (("k", k), ("v", v)))
            past.update(k=self.still_seen(k), v=self.still_seen(v), tokens=past.get("tokens", 0) + x.shape[1])
            gone = past["tokens"] - k.shape[2]
        if self.choices["pos"].rotates:
            q, k = self.rotated(q, k, gone)
        more = self.carried(x, past) | ({} if importances is None else {"importances": importances})
        y = self.attend(q, k, v, x, self.distance(), **more)            # (B, heads, R, E)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    def carried(self, x, past):
        """What a mixer's attend needs beside queries, keys and values, and keeps in past."""
        return {}

    def distance(self):
        """The layer's relative positions, a Distance, or None."""
        does = self.choices["pos"].does
        return does(self) if does else None

    def still_seen(self, x):
        """Of cached keys or values (B, H, T, .), what the next token sees: the first and the window less itself."""
        first, recent = self.sight.first, self.sight.window - 1
        if not self.sight.window or x.shape[2] <= first + recent:
            return x
        if first and self.choices["pos"].does:  # a distance bias would notice what is missing in between
            return x
        return torch.cat([x[:, :, :first], x[:, :, x.shape[2] - recent:]], 2)

    def rotated(self, q, k, gone):
        """RoPE for the last R of T rows, and all keys. `gone` tokens between the first keys and the others are not
        cached.

        StreamingLLM counts places in a cache that holds only what is seen: beyond the window, a row is always `end`
        places behind the start, and scores the first keys from there. For that q and k become twice as wide: [q at i
        | q at end] against [k | 0] for recent keys and [0 | k] for the first ones.
        """
        frequency = rope_frequencies(self.config, self.width, k.device)
        first, j = self.sight.first, torch.arange(k.shape[2], device=k.device)
        j = j + gone * (j >= first)
        i, end = j[k.shape[2] - q.shape[2]:], first + self.sight.window - 1
        turned, k = rotate(q, frequency, i), rotate(k, frequency, j)
        if not first or gone + k.shape[2] <= end + 1:
            return turned, k
        early = (j < first)[:, None]
        return torch.cat([turned, rotate(q, frequency, i.clamp(max=end))], -1), torch.cat([k * ~early, k * early], -1)

    def attend(self, q, k, v, x, table=None, sight=None, importances=None):
        """From rotated queries and keys, values and the layer's input to each head's output (B, heads, R, E).

        table: the relative positions, a Distance or a bare (H, W) table, or None. sight: another Sight than the
        layer's own. importances: a list that `importance` is added to.
        """
        sight, distance, dtype = sight or self.sight, as_distance(table), v.dtype
        q, k, t, n = self.prepare(q, k)
        mix = self.mix(x)                       # lambda, or None where there is one view
        first_key_counts = importances is not None and not self.has_extra_key and not self.choices["gate"].does
        o, r = self.run_rule(q, k, v, t, distance, sight, mix, self.need_r or first_key_counts)
        if importances is not None:
            importances.append(self.importance(q, k, x, r, n, distance, sight))
        o = self.kept(o, q, r, n)
        if o.shape[1] > self.heads:             # two views that no kernel has subtracted yet
            o = wide(o[:, 0::2]) - mix * wide(o[:, 1::2])
        for axis in ("value_bias", "dex", "out_norm"):
            o = self.through(axis, o)
        if self.choices["diff"].after:
            o = self.choices["diff"].after(self, o)
        return self.through("gate", o, x).to(dtype)

    # ------------------------------------------------------------------ before the rule

    def prepare(self, q, k):
        """Queries and keys as the scores want them (but for the constant scale), the rule's t, broadcastable to
        (B, score heads, R, 1), or None, and n (R,), the number of keys that each row sees."""
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        n = visible_count(i, self.sight).to(wide(q).dtype)
        q, k = self.featured(q), self.featured(k)
        if self.choices["diff"].own_keys:
            k = self.for_score_heads(k, 1)
        if self.choices["scale"].does:
            q = (q * self.choices["scale"].does(self, n)).to(q.dtype)
        t = self.rule.row_input(self, n) if self.rule.row_input else None
        if t is not None and t.dim() == 3 and self.score_heads > self.heads:
            t = t.repeat_interleave(2, 0)       # both views have their head's
        return q, k, t, n

    def featured(self, x):
        """Queries or keys (.., D), or two side by side (see `rotated`), normalised and through the feature map."""
        x = x.unflatten(-1, (-1, self.width))
        return self.through("feature", self.through("qk_norm", x)).flatten(-2)

    def for_score_heads(self, x, axis):
        """What belongs to key heads, along `axis`, repeated for the score heads that share them. Where each view has
        its own of a pair of key heads, pairs are repeated."""
        shared = self.score_heads // x.shape[axis]
        if shared == 1:
            return x
        if not self.choices["diff"].own_keys:
            return x.repeat_interleave(shared, axis)
        return x.unflatten(axis, (-1, 2)).repeat_interleave(shared, axis).flatten(axis, axis + 1)

    # ------------------------------------------------------------------ the rule

    def run_rule(self, q, k, v, t, distance, sight, mix, need_r):
        """The rule alone, by whichever code computes it here: output (B, score heads, R, E), and the statistic where
        it is needed. A kernel may also have subtracted `mix` times the second view: then the output is (B, heads, R,
        E)."""
        kernel, dropout = choose_kernel(self.config, q.device.type), self.config.dropout if self.training else 0.0
        if kernel == "triton" and q.shape[2] == k.shape[2] and sight.hidden < 0:
            return self.fused(q, k, v, t, distance, sight, mix, need_r)
        if kernel == "sdpa" and distance is None and sight.hidden < 0 and not need_r:
            return plain_softmax(q, k, v, sight.scale, dropout), None
        return block_loop(self.rule, q, k, v, t, sight, distance, need_r, dropout)

    def fused(self, q, k, v, t, distance, sight, mix, need_r):
        """The rule by its Triton kernel; two views in one pass if no statistic comes between weights and output, and if
        a tile can hold both."""
        call = partial(kernels.attend, q=q, k=k, v=v, **(distance or Distance())._asdict(), scale=sight.scale,
                       window=sight.window, first=sight.first, skip=sight.skip_dead)
        t = None if t is None else t.squeeze(-1)
        if self.rule.counted_in:                # lssar's threshold is a share of the row sum of softplus
            t = t * call(self.rule.counted_in, row_sum=True)[1]
        if mix is not None and not self.rule.normalizes and not need_r and kernels.holds_two_views(q, v):
            return call(self.config.rule, t=t, power=self.power, mix=mix.squeeze(-1) if mix.dim() else mix)
        o, r = call(self.config.rule, t=t, power=self.power, row_sum=need_r and not self.rule.normalizes)
        return o, None if r is None else r[..., None]

    # ------------------------------------------------------------------ after the rule

    @property
    def exact(self):
        """Are weights_of times the values what the rule puts out? Else derivatives stand in for weights."""
        return self.rule.linear

    @property
    def has_extra_key(self):
        return self.choices["sink"].does is not None

    @property
    def need_r(self):
        """Does what comes after the rule need its statistic?"""
        return self.has_extra_key or self.choices["normalize"].sums

    def share(self, q, r, n):
        """What a row's real weights are multiplied with, (B, score heads, R, 1), or None if that is 1."""
        if self.choices["normalize"].does:
            return 1 / self.choices["normalize"].does(r, n[:, None])
        if self.has_extra_key:
            return torch.sigmoid(r - self.choices["sink"].does(self, q))

    def kept(self, o, q, r, n):
        """The output with the row normaliser or the extra key in it, whose value gets what the share leaves."""
        share = self.share(q, r, n)
        if share is None:
            return o
        o = wide(o)
        if self.choices["sink"].value:
            return o * share + (1 - share) * self.choices["sink"].value(self, o.shape[1])
        return o * share

    def mix(self, x):
        """lambda, the share of the second view that is subtracted, broadcastable to (B, heads, R, 1), or None."""
        does = self.choices["diff"].does
        return does(self, x) if does else None

    def importance(self, q, k, x, r, n, distance, sight):
        """How much each head is used, (heads,): the mean over rows of its gate, if it has one, else of what a sink
        leaves: 1 minus the weight of the extra key, or of the first one. The Attention Sink as Native MoE, eq. 8. The
        first row counts, too; it sees itself alone, and is 0.

        It costs O(T): the first key's weight is e^(s_i0 - r_i) of the row's log-sum-exp r, whose gradient is known.
        """
        if self.choices["gate"].does:
            return torch.sigmoid(wide(split_heads(self.gate(x), self.heads, -1))).mean((0, 2, 3))
        if self.has_extra_key:
            return self.share(q, r, n).mean((0, 2, 3))
        R, T = q.shape[2], k.shape[2]
        first = wide(k[:, :, :1]).repeat_interleave(q.shape[1] // k.shape[1], 1)        # (B, H, 1, D)
        s = sight.scale * (wide(q) * first).sum(-1)                     # (B, H, R)
        if distance is not None:
            s = s + distance.by_distance(T)[:, T - R:]                  # row i is i away from the first key
        seen = visible(torch.arange(T - R, T, device=q.device), torch.zeros_like(n, dtype=torch.long), sight)
        return 1 - (s - r[..., 0]).masked_fill(~seen, -math.inf).exp().mean((0, 2))

    # ------------------------------------------------------------------ for looking at

    def weights_of(self, q, k, x, table=None, sight=None):
        """What multiplies the values: (B, H, R, T), or (B, H, R, 1 + T) with an extra key's column first; of a
        differential recipe, the difference. Gates, norms and corrections of the output are no part of it. Costs O(R
        T) memory, which weight_blocks does not."""
        return torch.cat(list(self.weight_blocks(q, k, x, table, sight)), 2)

    def views_of(self, q, k, x, table=None):
        """The weights of both views of a differential recipe, the second not yet multiplied by lambda."""
        w = torch.cat(list(self.view_blocks(q, k, table)), 2)
        return w[:, 0::2], w[:, 1::2]

    def weight_blocks(self, q, k, x, table=None, sight=None):
        """weights_of one block of rows at a time: yields (B, H, BLOCK or fewer, T or 1 + T)."""
        R, T = q.shape[2], k.shape[2]
        for (rows, _), w in zip(row_blocks(R, T, q.device), self.view_blocks(q, k, table, sight), strict=True):
            if self.choices["diff"].does:
                w = w[:, 0::2] - self.mix(x[:, rows]) * w[:, 1::2]
            yield w

    def flops_per_token(self):
        """Floating-point operations of training on one token, forward and backward, beside those of the parameters: the
        products of queries with keys and of weights with values, as if every row saw a whole block."""
        return 12 * self.config.n_head * self.config.head_width * self.config.block_size

    def view_blocks(self, q, k, table=None, sight=None):
        """The weights of every score head, a block of rows at a time, as the block loop makes them."""
        q, k, t, n = self.prepare(q, k)
        R, T, sight, distance = q.shape[2], k.shape[2], sight or self.sight, as_distance(table) or Distance()
        for rows, i in row_blocks(R, T, q.device):
            qb, kb, _, tb, _ = cut(sight, rows, q, k, k, t)
            scaled = for_products(qb) * sight.scale
            w, r = weigh_block(self.rule, sight, scaled, for_products(kb), tb, distance, i, self.need_r)
            keys, share = keys_of(rows, R, T, sight), self.share(qb, r, n[rows])
            w = F.pad(w if share is None else w * share, (keys.start, T - keys.stop))
            yield torch.cat([1 - share, w], -1) if self.has_extra_key else w

    # ------------------------------------------------------------------ fine print

    def finish_step(self, machine):
        """A training step is over; here nothing was counted."""

    @staticmethod
    def cannot_learn(config):
        """Why training with this config would teach a mixer nothing, or None."""

    @staticmethod
    def obstacles(config, device):
        """Triples of a kernel, a condition under which it cannot be on this device, and the reason."""
        choices, width = chosen(config), config.head_width
        widest = max(w for _, w in choices["diff"].heads(config.n_head, config.n_kv_head, width))
        if config.first and choices["pos"].rotates:                     # q and k become twice as wide, see `rotated`
            widest = max(widest, 2 * width)
        yield "triton", config.rule not in kernels.RULES, f"rule {config.rule} has no kernel"
        yield "triton", config.dropout > 0, "the kernels have no attention dropout"
        yield "triton", widest > 256, "its heads are wider than 256"
        yield from triton_obstacles(config, device)
        plain = (config.rule == "softmax" and config.diff == "none" and not config.window and not choices["sink"].does
                 and not choices["pos"].does)
        yield "sdpa", not plain, f"it computes plain softmax only, not --attn={config.attn} --pos={config.pos}"


def triton_obstacles(config, device):
    """Those of any kernel in Triton."""
    here = kernels.AVAILABLE and (device == "cuda" or kernels.INTERPRETED)
    yield "triton", not here, "it needs triton and a CUDA GPU"
    yield "triton", config.kernel == "auto" and device != "cuda", "the interpreter is for tests"


def as_distance(table):
    """A bare table as the Distance it is."""
    return Distance(table) if isinstance(table, torch.Tensor) else table


# ------------------------------------------------------------------------------------------ fine print: refusals last


def chosen(config, axes=AXES):
    """{axis: Choice} of a config, by the axes of its mixer."""
    return {axis: values[getattr(config, axis)] for axis, values in axes.items()}


def check_axes(config, axes=AXES, numbers=NUMBERS):
    """Raise ValueError, with the reason, on a combination of axes that means nothing."""
    args = constants(config, axes)
    if parse_rope_scaling(config.rope_scaling)[0] and not POSITIONS[config.pos].rotates:
        raise ValueError(f"--rope_scaling={config.rope_scaling} goes with rotary positions, --pos={config.pos} has "
                         "none: write --rope_scaling= (nothing), or --pos=rope")
    others = [number for name, number in numbers.items() if getattr(config, name) != number.default]
    for choice in [*chosen(config, axes).values(), *others]:
        if choice.refuse and (reason := choice.refuse(config, args)):
            raise ValueError(reason)


def constants(config, axes=AXES):
    """The constants of a config, {key: value}: --attn_args "key=value,key=value" over the recipe's over those of its
    rule and axes. Raises ValueError on unknown keys and wrong values."""
    known = {key: constant for choice in chosen(config, axes).values() for key, constant in choice.args.items()}
    args = {key: constant.default for key, constant in known.items()}
    args |= {key: value for key, value in recipe(config.attn).get("args", {}).items() if key in known}
    for part in filter(None, config.attn_args.split(",")):
        key, _, text = part.partition("=")
        if key not in known:
            raise ValueError(f"unknown --attn_args key {key!r}: this recipe knows {', '.join(known) or 'none'}")
        args[key] = parse_value(key, text, known[key])
    return args


def parse_value(key, text, constant):
    """The value that a text gives to a constant. Raises ValueError on one that it cannot have."""
    default, low, high, word = constant
    if text == word:
        return text
    instead = f", or {word}" if word else ""
    if isinstance(default, bool):
        switch = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in switch:
            raise ValueError(f"--attn_args {key}={text}: use 1 or 0{instead}")
        return switch[text.lower()]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = isinstance(default, int)
    if not (math.isfinite(value) and low <= value <= high and not (whole and value % 1)):
        between = f" from {low:g} to {high:g}" if math.isfinite(low) else ""
        raise ValueError(f"--attn_args: write {key}={'WHOLE ' * whole}NUMBER{between}{instead}, not {text!r}")
    return int(value) if whole else value


def parse_rope_scaling(text):
    """"llama3:8,1,4,8192" to ("llama3", [8.0, 1.0, 4.0, 8192.0]). Raises ValueError naming the forms that there are."""
    how, _, numbers = text.partition(":")
    forms = {"linear": "linear:FACTOR", "ntk": "ntk:RATIO", "llama3": "llama3:FACTOR,LOW,HIGH,ORIGINAL"}
    try:
        numbers = [float(number) for number in numbers.split(",")] if text else []
    except ValueError:
        numbers = [math.nan]
    if how not in ROPE_SCALINGS or not all(0 < n < math.inf for n in numbers) or len(numbers) != {
            "": 0, "linear": 1, "ntk": 1, "llama3": 4}[how]:
        raise ValueError(f"--rope_scaling={text}: write {' or '.join(forms.values())}")
    return how, numbers


def check_importance(config):
    """Raise ValueError on a recipe whose heads have neither a gate nor the weight of a sink."""
    if config.mixer == "attention" and config.gate != "none":
        return
    if config.mixer != "attention" or config.rule != "softmax" or config.diff != "none":
        raise ValueError(f"--head_balance balances gates and sinks, and --attn={config.attn} has neither: it goes with "
                         "one view of rule softmax, with or without --sink, or with --gate=head or element")
    if config.window and not config.first and SINKS[config.sink].does is None:
        raise ValueError("--head_balance balances the sinks of first tokens, which are out of sight beyond --window: "
                         "add --first=1, a --sink or a --gate")


def choose_kernel(config, device, obstacles=None):
    """Which code computes a recipe on a device ("cuda", "cpu", ...): "triton", "sdpa" (torch's own fused softmax) or
    "torch" (the block loop).

    auto is Triton on CUDA where the rule has a kernel, elsewhere sdpa for what is plain softmax. Raises ValueError
    where an explicit --kernel cannot be. obstacles: another mixer's.
    """
    cannot = {}
    for kernel, holds, reason in (obstacles or Attention.obstacles)(config, device):
        if holds:
            cannot.setdefault(kernel, reason)
    if config.kernel == "auto":
        return next(kernel for kernel in ("triton", "sdpa", "torch") if kernel not in cannot)
    if config.kernel in cannot:
        raise ValueError(f"--kernel={config.kernel}: {cannot[config.kernel]}; use auto or torch")
    return config.kernel
