"""How attention scores become attention weights: every rule, every published recipe, and the layer around them.

One head's output is  o_i = sum_j w_ij v_j  over the keys j that row i sees. The weights come from a rule

    w_ij = f(s_ij; r_i, t_i)

of the score s_ij, a statistic r_i of the row (such as the log-sum-exp of its scores) and a row input t_i (such as a
threshold). A rule is one card below: its formula, its definition in PyTorch, the same in Triton, and its row in RULES.
A recipe, such as --attn=elastic, is one line in ATTENTIONS: a rule and a choice on each axis around it (see axes/).
`Attention.forward` tells the whole way from x to y. kernels.py computes any rule without storing the weights.

Shapes: B batch, H score heads, T keys, R query rows (the last R of the T positions), D width of q and k, E width of v,
C = n_embd. q (B, H, R, D), k (B, H or fewer, T, D), v (B, H or fewer, T, E). Scores and weights are (B, H, R, T), row
vectors (B, H, R, 1). A differential recipe has two score heads, called views, for each output head: view a is 0::2 of
the score heads, view b is 1::2.
"""
import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

import kernels
from axes import options, rows
from axes.base import Choice, Constant, split_heads, wide
from axes.layer import Layer
from axes.positions import Distance, as_distance, no_bias, rope_frequencies, rotate
from axes.rows import SINKS
from axes.sight import visible, visible_count
from kernels import (
    BINARY,
    LN2,
    LOG2E,
    Kernel,
    const_power,
    jit,
    log_one_plus,
    logistic,
    real_power,
    tl,
)

# ------------------------------------------------------------------------------------------------------- what a rule is
# In PyTorch a rule takes a block of scores s (B, H, R, T) in float32 or float64, the mask `seen` of visible keys
# (broadcastable to s), the row input t and perhaps a power. It returns weights of the shape of s, zero where masked.
#
# In Triton a rule is three small functions of one tile of scores, which kernels.py calls:
#   weigh   s, r, t -> the weights w, what the statistic sums (z), and what the backward's U sums (u)
#   slope   s, r, t, g, delta -> the gradient ds of the scores, and the summand of dt. g_ij = do_i . v_j is the gradient
#           of w_ij. delta_i = do_i . U_i - dr_i, where U_i = sum_j u_ij v_j / sum_j z_ij is often the output itself.
#   settle  the finished sums of a row -> its statistic r
# There s and r are in the rule's unit: multiplied by log2 e where exponentials are taken, because the hardware computes
# 2^x. Each line of Triton stands below the line of PyTorch that defines it.

MASKED = -1e30                                  # additive mask. Finite, so a fully masked row gives no NaN


@dataclasses.dataclass(frozen=True)
class Rule(Choice):
    weights: Callable | None = None             # s, seen, t -> weights, the definition
    statistic: Callable | None = None           # s, seen, weights -> r (B, H, R, 1), computed only where it is needed
    row_input: Callable | None = None           # layer, n (R,) -> t, broadcastable to (B, H, R, 1)
    power: Callable | None = None               # args -> the constant power of rules that have one
    kernel: Kernel | None = None                # the same rule in Triton
    threshold_of: str | None = None             # in Triton, t is multiplied by the row sum of this other rule

    linear = True                               # the output is linear in the values: there are weights to look at

    @property
    def normalizes(self):
        """Does the rule itself decide what its rows sum to?"""
        return self.statistic is not row_sum


RULES = {}


def row_sum(s, seen, w):
    """r_i = sum_j w_ij, the statistic of rules that do not normalise their rows."""
    return w.sum(-1, keepdim=True)


# -------------------------------------------------------------------------------------------------------------- softmax
# w_ij = exp(s_ij - r_i),   r_i = log sum_j exp(s_ij)                                         Vaswani et al. 2017, eq. 1
# ds_ij = w_ij (g_ij - delta_i)


def softmax(s, seen, t=None):
    """w_ij = exp(s_ij) / sum_k exp(s_ik): every row spends exactly 1. A row that finds nothing pays into a sink.

    No learned scalars. The statistic is the log-sum-exp. Source: Vaswani et al. 2017, eq. 1.
    """
    return torch.softmax(s + ~seen * MASKED, -1)


class LogSumExp(torch.autograd.Function):
    """r_i = log sum_j exp(s_ij), natural, of rows whose softmax w is known: r = s_ij - log w_ij for any j. The largest
    weight gives the best precision. This saves a second pass of exponentials, and the gradient of r is w itself."""
    @staticmethod
    def forward(ctx, s, seen, w):
        ctx.save_for_backward(w)
        top = w.argmax(-1, keepdim=True)
        return s.gather(-1, top) - w.gather(-1, top).log()

    @staticmethod
    def backward(ctx, e):
        return ctx.saved_tensors[0] * e, None, None


@jit
def softmax_weigh(s, r, t, power: tl.constexpr):
    # w = torch.exp(s - r)
    w = tl.exp2(s - r)
    return w, w, w


@jit
def softmax_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.exp(s - r) * (g - delta)
    ds = tl.exp2(s - r) * (g - delta)
    return ds, ds


@jit
def softmax_settle(r, t, power: tl.constexpr, sum_w, sum_z, FIRST: tl.constexpr):
    # r = torch.logsumexp(s, -1)                    (r comes in as the maximum m, sum_z as the sum of 2^(s - m))
    return tl.where(sum_z > 0, r + tl.log2(sum_z), 0.)                          # an empty row (of lssar) has no sum


RULES["softmax"] = Rule(weights=softmax, statistic=LogSumExp.apply, kernel=Kernel(
    softmax_weigh, softmax_slope, softmax_settle, online=True, unit=BINARY))

# -------------------------------------------------------------------------------------------------------------- elastic
# w_ij = relu(p_ij - t_i),   p = softmax(s),   t_i = tau_h / n_i                       Lazy Attention, eq. 5 and table 2
# ds_ij = p_ij (m_ij g_ij - delta_i),   m_ij = [p_ij > t_i],   U_i = sum_j p_ij m_ij v_j


def elastic(s, seen, t):
    """w_ij = relu(p_ij - t_i), p = softmax(s), t_i = tau_h / n_i: a row may spend less than 1, an even row nothing.

    Weights that softmax would park on a sink fall below the threshold and become exactly zero. The others are not
    renormalised. For tau >= 0 the row sum lies in [0, 1].
    Learned: tau (H,), 1 at the start, so that an even row is off. n_i counts from 1: row i of the paper sees i keys.
    Source: Lazy Attention, eq. 5 and table 2.
    Differs from the author's code: it stores -tau and adds it, from -1, -0.5 or -1.01 on, with a hundred times the
    learning rate (here --head_lr=100).
    """
    return (softmax(s, seen) - t).masked_fill_(~seen, 0.0).relu_()      # a negative tau would lift masked keys


def elastic_threshold(layer, n):
    """t_i = tau_h / n_i; with per_length=0 tau_h alone, with per_length=block tau_h / block_size on every row."""
    if layer.args["per_length"] == "block":
        n = torch.full_like(n, layer.config.block_size)
    elif not layer.args["per_length"]:
        n = torch.ones_like(n)
    return layer.tau[:, None, None] / n[:, None]


# The first row has one key: p = 1, and t = 1 as tau starts. Rounding differs between kernels and must not decide a tie
TIE = tl.constexpr(1 + 2**-18)


@jit
def elastic_weigh(s, r, t, power: tl.constexpr):
    # p = torch.exp(s - r); w = torch.relu(p - t)
    p = tl.exp2(s - r)
    return tl.maximum(p - t, 0.), p, tl.where(p > t * TIE, p, 0.)


@jit
def elastic_slope(s, r, t, power: tl.constexpr, g, delta):
    # p = torch.exp(s - r); g = g * (p > t)
    p = tl.exp2(s - r)
    g = tl.where(p > t * TIE, g, 0.)
    # ds = p * (g - delta); dt = -g.sum(-1)
    return p * (g - delta), -g


RULES["elastic"] = Rule(
    lambda layer: {"tau": torch.full((layer.heads,), layer.args["tau_init"])},
    {"tau_init": Constant(1.0), "per_length": Constant(True, word="block"), "learn_tau": Constant(True)},
    weights=elastic, row_input=elastic_threshold, kernel=Kernel(
        elastic_weigh, elastic_slope, softmax_settle, passes=1, save_u=True, takes_t=True, unit=BINARY))

# ---------------------------------------------------------------------------------------------------- entmax, sparsemax
# w_ij = x_ij^a,   x_ij = relu(s_ij / a - r_i),   r_i such that the row sums to 1,   a = 1 / (alpha - 1), the power
# ds_ij = u_ij (g_ij - delta_i),   u_ij = x_ij^(a - 1),   U_i = sum_j u_ij v_j / sum_j u_ij    Peters et al. 2019, eq. 7


def entmax(s, seen, t=None, power=2.0):
    """w_ij = relu((alpha - 1) s_ij - r_i)^power, power = 1 / (alpha - 1), with the r_i that makes the row sum to 1.

    Between softmax (alpha 1) and sparsemax (alpha 2), 1.5 by default. Keys far below the best get exact zeros. The row
    still spends 1, so it still needs a sink, chosen among few keys.
    Learned, with --attn_args=alpha=learned: theta (H,), 0 at the start, alpha_h = 1 + sigmoid(theta_h). The power is
    then the row input t.
    Source: Peters et al. 2019, eq. 7 and 9; alpha per head as 1 + sigmoid: Correia et al. 2019.
    """
    power = t if power is None else power
    z = s / power + ~seen * MASKED
    z = z - z.detach().amax(-1, keepdim=True)                           # now r lies in [-1, 0]
    r = entmax_threshold(z.detach(), power)
    x = F.relu(z - r)
    # r solves sum_j x_ij^power = 1. One more step of Newton's method does not move it, but shows autograd how r depends
    # on z and on the power
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
    for _ in range(60):                         # five to ten are usual
        x = F.relu(z - r)
        total = (x ** power).sum(-1, keepdim=True)
        step = (total - total ** (1 - 1 / power)) / ((x > 0) * x ** (power - 1)).sum(-1, keepdim=True)
        r = r + step
        if step.max() < 2 * torch.finfo(z.dtype).eps:
            break
    return r


def entmax_row_input(layer, n):
    """t = 1 / (alpha_h - 1) where alpha is learned. A constant alpha is the rule's power instead."""
    if layer.args["alpha"] == "learned":
        theta = torch.where(layer.theta > -4.6, layer.theta, -4.6)      # alpha is at least 1.01
        return (1 + torch.exp(-theta))[:, None, None].expand(-1, len(n), 1)


def sparsemax(s, seen, t=None, power=1.0):
    """w_ij = relu(s_ij - r_i), with the threshold r_i that makes the row sum to 1: entmax at alpha 2, its sparsest
    form. The row still spends 1, so it still needs a sink.

    No learned scalars. Source: Martins & Astudillo 2016, eq. 1.
    """
    return entmax(s, seen, None, power)


@jit
def entmax_lift(s, t, power: tl.constexpr):
    return s / power


@jit
def entmax_weigh(s, r, t, power: tl.constexpr):
    # x = torch.relu(s - r); w = x**power           (s comes in divided by the power)
    u = const_power(s - r, power - 1)
    return u * tl.maximum(s - r, 0.), u, u


@jit
def entmax_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.relu(s / power - r)**(power - 1) * (g - delta)
    ds = const_power(s / power - r, power - 1) * (g - delta)
    return ds, ds


@jit
def entmax_settle(r, t, power, sum_w, sum_z, FIRST: tl.constexpr):
    # r so that (relu(s / power - r)**power).sum(-1) == 1
    if FIRST:                                               # r comes in as the maximum. The largest weight alone is at
        return r - 1.                                       # most 1, so the solution is not below the maximum minus 1
    else:                                                   # Newton on the norm (sum of w)^(1 / power), convex in r:
        step = sum_w - real_power(sum_w, 1 - 1 / power)     # from the left, never beyond the solution
        return r + step / tl.maximum(sum_z, 1e-30)


# alphamax is the kernel of entmax where each row has a power t_i of its own, learned:
# dt_i = sum_j (g_ij - delta_i) w_ij (log x_ij - 1). x depends on t also through s / t, whose slope is -(x + r) / t, but
# r is the same for all keys, and ds sums to 0

@jit
def alphamax_lift(s, t, power: tl.constexpr):
    return s / t


@jit
def alphamax_weigh(s, r, t, power: tl.constexpr):
    # x = torch.relu(s - r); w = x**t               (s comes in divided by t)
    u = real_power(s - r, t - 1)
    return u * tl.maximum(s - r, 0.), u, u


@jit
def alphamax_slope(s, r, t, power: tl.constexpr, g, delta):
    # x = torch.relu(s / t - r); ds = x**(t - 1) * (g - delta)
    x = s / t - r
    ds = real_power(x, t - 1) * (g - delta)
    # dt = (ds * x * (torch.log(x) - 1)).sum(-1)
    return ds, tl.where(x > 0, ds * x * (tl.log2(x) * LN2 - 1), 0.)


@jit
def alphamax_settle(r, t, power: tl.constexpr, sum_w, sum_z, FIRST: tl.constexpr):
    # r so that (relu(s / t - r)**t).sum(-1) == 1
    return entmax_settle(r, t, t, sum_w, sum_z, FIRST)


ENTMAX = Kernel(entmax_weigh, entmax_slope, entmax_settle, entmax_lift, passes=24, save_u=True, skip=True, heavy=True)
ALPHAMAX = ENTMAX._replace(weigh=alphamax_weigh, slope=alphamax_slope, settle=alphamax_settle, lift=alphamax_lift)
RULES["entmax"] = Rule(
    lambda layer: {"theta": torch.zeros(layer.heads)} if layer.args["alpha"] == "learned" else {},
    {"alpha": Constant(1.5, 1.01, 2.0, "learned")}, weights=entmax, row_input=entmax_row_input,
    power=lambda args: None if args["alpha"] == "learned" else 1 / (args["alpha"] - 1),
    kernel=ENTMAX._replace(power=2.0, takes_power=True, with_t="alphamax"))
RULES["sparsemax"] = Rule(weights=sparsemax, kernel=ENTMAX._replace(power=1.0))

# ---------------------------------------------------------------------------------------------------------------- lssar
# a_ij = softplus(s_ij) / sum_k softplus(s_ik),   x_ij = relu(a_ij - t_i),   w_ij = x_ij^power / sum_k x_ik^power
# In Triton x = relu(softplus(s) - t) with t times the row sum of softplus, and w is the softmax of power log x, because
# x^power overflows. ds_ij = w_ij (g_ij - delta_i) power sigmoid(s_ij) / x_ij       Gao & Spratling 2501.13428, eq. 4, 5


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
    largest = x.detach().amax(-1, keepdim=True)
    survives = largest > 1e-30                  # does any key of the row?
    b = (x / torch.where(survives, largest, 1.0)) ** power
    return b / torch.where(survives, b.sum(-1, keepdim=True), 1.0)      # one key alone sums to exactly 1: no clamp here


def lssar_threshold(layer, n):
    """t_i = 1 / n_i, and 0 for up to three keys. The same on every head."""
    return torch.where(n > 3, 1 / n, 0.0)[:, None]


@jit
def softplus_weigh(s, r, t, power: tl.constexpr):
    # w = torch.log(1 + torch.exp(s))
    w = tl.maximum(s, 0.) * LN2 + log_one_plus(tl.exp2(-tl.abs(s)))
    return w, w, w


@jit
def softplus_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.sigmoid(s) * (g - delta)
    ds = logistic(s) * (g - delta)
    return ds, ds


@jit
def lssar_lift(s, t, power: tl.constexpr):
    # s = power * torch.log(torch.relu(softplus(s) - t))
    phi, _, _ = softplus_weigh(s, 0., t, power)
    return tl.where(phi > t * TIE, power * tl.log2(phi - t), float("-inf"))     # an even row is empty, not noise


@jit
def lssar_slope(s, r, t, power: tl.constexpr, g, delta):
    # x = torch.relu(softplus(s) - t); dx = x**power / torch.exp(r) * (g - delta) * power / x
    phi, _, _ = softplus_weigh(s, r, t, power)
    dx = tl.exp2(lssar_lift(s, t, power) - r) * (g - delta) * power / (phi - t)
    dx = tl.where(phi > t * TIE, dx, 0.)
    # ds = dx * torch.sigmoid(s); dt = -dx.sum(-1)
    return dx * logistic(s), -dx


SOFTPLUS = Kernel(softplus_weigh, softplus_slope, unit=BINARY, heavy=True)         # for the row sum alone
RULES["lssar"] = Rule(
    args={"power": Constant(15.0, 1.0, 64.0)}, weights=lssar, row_input=lssar_threshold,
    power=lambda args: args["power"], threshold_of="softplus", kernel=Kernel(
        softmax_weigh, lssar_slope, softmax_settle, lssar_lift, online=True, sum_delta=True, takes_t=True,
        takes_power=True, power=15.0, unit=BINARY, skip=True, heavy=True))

# ------------------------------------------------------------------------------------------------------------- softpick
# w_ij = relu(e^s_ij - 1) / sum_j |e^s_ij - 1| = relu(e^(s_ij - r_i) - e^-r_i),   r_i = log sum_j |e^s_ij - 1|
# Only positive scores have weight, but all scores are part of the sum:                        Zuhri et al. 2504.20966
# ds_ij = e^(s_ij - r_i) ([s_ij > 0] g_ij - sign(s_ij) delta_i)


def softpick(s, seen, t=None):
    """w_ij = relu(e^s_ij - 1) / (sum_k |e^s_ik - 1| + eps): negative scores get zeros and only raise the denominator.

    A row may spend less than 1, and nothing where every score is negative, so it needs no sink. No learned scalars.
    Both sides are multiplied by e^-m, with m the row's maximum but at least 0.
    Source: Zuhri et al. 2504.20966.
    Differs from the authors' code: it lacks the "at least 0" and overflows where all scores are below -88. eps (1e-8)
    is added after that multiplication, as there. Their kernel has 1e-6 and counts a score of exactly 0 as negative,
    where autograd and this rule have slope 0.
    """
    s = s + ~seen * MASKED                      # masked scores must not overflow
    m = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = (torch.exp(s - m) - torch.exp(-m)).masked_fill(~seen, 0.0)
    return F.relu(e) / (e.abs().sum(-1, keepdim=True) + 1e-8)


@jit
def softpick_weigh(s, r, t, power: tl.constexpr):
    # e = torch.exp(s - r) - torch.exp(-r); w = torch.relu(e)
    e = tl.exp2(s - r) - tl.exp2(-r)
    return tl.maximum(e, 0.), tl.abs(e), e


@jit
def softpick_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.exp(s - r) * ((s > 0) * g - torch.sign(s) * delta)
    ds = tl.exp2(s - r) * tl.where(s > 0, g - delta, tl.where(s < 0, delta, 0.))
    return ds, ds


@jit
def softpick_settle(r, t, power: tl.constexpr, sum_w, sum_z, FIRST: tl.constexpr):
    # r = m + torch.log(torch.abs(torch.exp(s - m) - torch.exp(-m)).sum(-1) + 1e-8)     (m = max(0, s): e^-m <= 1)
    return r + tl.log2(sum_z + 1e-8)


RULES["softpick"] = Rule(weights=softpick, kernel=Kernel(
    softpick_weigh, softpick_slope, softpick_settle, online=True, unit=BINARY, floor=0.0))

# ----------------------------------------------------------------------------------------------------------------- relu
# w_ij = relu(s_ij)                                                                          Wortsman et al. 2309.08586
# ds_ij = [s_ij > 0] (g_ij - delta_i). From here on rules have no statistic: delta is 0, or -dr if the row sum is used


def relu(s, seen, t=None):
    """w_ij = relu(s_ij): no normaliser, and exact zeros for negative scores. A row need not spend, so it needs no sink.

    No learned scalars.
    Source: divided by the row's length, Wortsman et al. 2309.08586 (there bidirectional, with one length for all rows);
    followed by an RMSNorm, ReLA, Zhang et al. 2021.
    """
    return F.relu(s).masked_fill(~seen, 0.0)


@jit
def relu_weigh(s, r, t, power: tl.constexpr):
    # w = torch.relu(s)
    w = tl.maximum(s, 0.)
    return w, w, w


@jit
def relu_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = (s > 0) * (g - delta)
    ds = tl.where(s > 0, g - delta, 0.)
    return ds, ds


RULES["relu"] = Rule(weights=relu, statistic=row_sum, kernel=Kernel(relu_weigh, relu_slope, skip=True))

# ------------------------------------------------------------------------------------------------------------------ tra
# w_ij = relu(s_ij - t_i)^power,   t_i = beta_h sqrt(2 log(n_i / kappa) / d)     Threshold Differential Attention, eq. 1
# ds_ij = power relu(s_ij - t_i)^(power - 1) (g_ij - delta_i)


def tra(s, seen, t, power=2.0):
    """w_ij = relu(s_ij - t_i)^power, t_i = beta_h sqrt(2 log(n_i / kappa) / d): noise hardly reaches the threshold.

    Take unit q and k of width d that are unrelated to each other. At beta 1, at most kappa keys a row pass the
    threshold on average, however long the context (at d 64 and n 1024 in fact 0.05, so most rows start empty). Weights
    have exact zeros and no fixed sum, so there is no sink.
    Learned: beta (H,), 1 at the start, one for both views of TDA.
    Source: Threshold Differential Attention, eq. 1 and appendix B. The paper does not say whether beta belongs to a
    head or to a layer, nor whether its RMSNorm sees one head or all: here each head has a beta, and the norm sees one.
    Differs from the released kernel: it has kappa = 1, takes beta as a constant, and lacks the norm on the output,
    which gives the few small weights a scale. Here the logarithm is at least 0, for kappa above n.
    """
    return (s - t).masked_fill_(~seen, 0.0).relu_() ** power


def tra_threshold(layer, n):
    """t_i = beta_h sqrt(2 log(n_i / kappa) / d), the logarithm at least 0."""
    log = torch.log(n / layer.args["kappa"]).clamp(min=0)
    return layer.beta[:, None, None] * torch.sqrt(2 * log / layer.width)[:, None]


@jit
def tra_weigh(s, r, t, power: tl.constexpr):
    # w = torch.relu(s - t)**power
    w = const_power(s - t, power)
    return w, w, w


@jit
def tra_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = power * torch.relu(s - t)**(power - 1) * (g - delta); dt = -ds.sum(-1)
    ds = power * const_power(s - t, power - 1) * (g - delta)
    return ds, -ds


RULES["tra"] = Rule(
    lambda layer: {"beta": torch.full((layer.heads,), layer.args["beta_init"])},
    {"beta_init": Constant(1.0), "kappa": Constant(1.0, 1e-9, 1e9), "power": Constant(2.0, 1.0, 64.0),
     "learn_beta": Constant(True)},
    weights=tra, statistic=row_sum, row_input=tra_threshold, power=lambda args: args["power"],
    kernel=Kernel(tra_weigh, tra_slope, takes_t=True, takes_power=True, power=2.0, skip=True))

# -------------------------------------------------------------------------------------------------------------- sigmoid
# w_ij = sigmoid(s_ij - t_i),   t_i = log(block_size)                                        Ramapuram et al. 2409.04431
# ds_ij = w_ij (1 - w_ij) (g_ij - delta_i)


def sigmoid(s, seen, t):
    """w_ij = sigmoid(s_ij - t_i): each key is judged alone. A row need not spend, so it needs no sink.

    No learned scalars: t is log(block_size), so that a row's sum starts near 1; with length_bias=0 it is 0.
    Source: Ramapuram et al. 2409.04431 (b = -log n of the training length). Without a bias: When Attention Sink
    Emerges, table 6.
    Differs from the authors' code, whose language model puts a LayerNorm on queries and keys (nearest: --qk_norm=head).
    """
    return torch.sigmoid(s - t).masked_fill(~seen, 0.0)


def sigmoid_threshold(layer, n):
    """t_i = log(block_size), minus the published bias; the same on every row."""
    return torch.full_like(n, math.log(layer.config.block_size) if layer.args["length_bias"] else 0.0)[:, None]


@jit
def sigmoid_weigh(s, r, t, power: tl.constexpr):
    # w = torch.sigmoid(s - t)
    w = logistic(s - t * LOG2E)
    return w, w, w


@jit
def sigmoid_slope(s, r, t, power: tl.constexpr, g, delta):
    # w = torch.sigmoid(s - t); ds = w * (1 - w) * (g - delta); dt = -ds.sum(-1)
    w = logistic(s - t * LOG2E)
    ds = w * (1 - w) * (g - delta)
    return ds, -ds


RULES["sigmoid"] = Rule(args={"length_bias": Constant(True)}, weights=sigmoid, statistic=row_sum,
                        row_input=sigmoid_threshold,
                        kernel=Kernel(sigmoid_weigh, sigmoid_slope, takes_t=True, unit=BINARY))

# ------------------------------------------------------------------------------------------------------------------ elu
# w_ij = elu(s_ij) + 1: 1 + s_ij above 0, e^s_ij below                          When Attention Sink Emerges, table 6
# ds_ij = min(1, e^s_ij) (g_ij - delta_i)


def elu(s, seen, t=None):
    """w_ij = elu(s_ij) + 1, that is 1 + s_ij above 0 and e^s_ij below: positive, without a normaliser, without a sink.

    No learned scalars. Source: When Attention Sink Emerges, table 6.
    """
    return torch.where(s < 0, s.clamp(max=0).exp(), 1 + s).masked_fill(~seen, 0.0)


@jit
def elu_weigh(s, r, t, power: tl.constexpr):
    # w = torch.nn.functional.elu(s) + 1
    w = tl.maximum(s, 0.) + tl.exp2(tl.minimum(s, 0.) * LOG2E)
    return w, w, w


@jit
def elu_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.exp(s.clamp(max=0)) * (g - delta)
    ds = tl.exp2(tl.minimum(s, 0.) * LOG2E) * (g - delta)
    return ds, ds


RULES["elu"] = Rule(weights=elu, statistic=row_sum, kernel=Kernel(elu_weigh, elu_slope))

# ------------------------------------------------------------------------------------------------------------- identity
# w_ij = s_ij                                                                   When Attention Sink Emerges, table 6
# ds_ij = g_ij - delta_i


def identity(s, seen, t=None):
    """w_ij = s_ij: the score itself, of either sign. With a feature map on q and k this is linear attention. No sink.

    No learned scalars.
    Source: When Attention Sink Emerges, table 6; with elu + 1 on q and k, Katharopoulos et al. 2020.
    """
    return s.masked_fill(~seen, 0.0)


@jit
def identity_weigh(s, r, t, power: tl.constexpr):
    # w = s
    return s, s, s


@jit
def identity_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = g - delta
    return g - delta, g - delta


RULES["identity"] = Rule(weights=identity, statistic=row_sum, kernel=Kernel(identity_weigh, identity_slope))

kernels.offer({name: rule.kernel for name, rule in RULES.items()} | {
    "softplus": SOFTPLUS, "alphamax": ALPHAMAX._replace(takes_t=True)})

# -------------------------------------------------------------------------------------- the recipes: one line a variant
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
    # only the attention of GPT-OSS: its biases and RoPE base of 150,000 are flags of their own; its YaRN does not exist
    # here
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


# ------------------------------------------------------------------------------------------------------------ the layer

AXES = {"rule": RULES} | options.AXES
NUMBERS = options.NUMBERS
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()}
DEFAULTS |= {name: number.default for name, number in NUMBERS.items()}


class Attention(Layer):
    """Attention by one rule: module(x) takes the layer's normed input (B, R, C) to (B, R, C)."""
    axes, numbers = AXES, NUMBERS

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.power = None
        if self.rule.power:                     # a constant of the rule, such as entmax's 1 / (alpha - 1)
            self.power = self.rule.power(self.args)
            self.rule = dataclasses.replace(self.rule, weights=partial(self.rule.weights, power=self.power))

    def forward(self, x, past=None, importances=None):
        """x (B, R, C) to (B, R, C). past: a dict, the KV cache. importances: a list that gets the heads' importance."""
        q, k, v = self.heads_of(self.c_attn(x))                         # (B, H, R, D), (B, Hk, R, D), (B, Hv, R, E)
        gone = 0                                # tokens that the cache has dropped
        if past is not None:
            k, v, gone = self.recall(past, k, v)                        # (B, Hk, T, D), (B, Hv, T, E)
        if self.choices["pos"].rotates:
            q, k = self.rotated(q, k, gone)
        more = {} if importances is None else {"importances": importances}
        o = self.attend(q, k, v, x, self.distance(), **more)            # (B, heads, R, E)
        return self.output(o)                                           # (B, R, C)

    def attend(self, q, k, v, x, table=None, sight=None, importances=None):
        """From rotated queries and keys, values and the layer's input to each head's output (B, heads, R, E).

        table: the relative positions, a Distance or a bare (H, W) table, or None. sight: replaces the layer's own.
        importances: a list that gets `importance` (heads,).
        """
        choices, sight, distance, dtype = self.choices, sight or self.sight, as_distance(table), v.dtype

        # queries and keys as the score takes them, the rule's row input t, and the number n of keys that each row sees
        q, k, t, n = self.prepare(q, k)                                 # (B, H, R, D), (B, Hk, T, D), .., (R,)
        mix = choices["diff"].mix(self, x) if choices["diff"].mix else None             # lambda of the second view

        # the rule: by Triton where all rows are there, by torch's own softmax, or by the block loop
        kernel = choose_kernel(self.config, q.device.type)
        dropout = self.config.dropout if self.training else 0.0
        need_r = self.need_r or (importances is not None and choices["gate"].learns is None)
        if kernel == "triton" and q.shape[2] == k.shape[2] and sight.hidden < 0:
            o, r = self.fused(q, k, v, t, distance, sight, mix, need_r)
        elif kernel == "sdpa" and distance is None and sight.hidden < 0 and not need_r:
            o, r = kernels.plain_softmax(q, k, v, sight.scale, dropout), None
        else:
            o, r = kernels.block_loop(self.rule, q, k, v, t, sight, distance, need_r, dropout)
        if importances is not None:
            importances.append(self.importance(q, k, x, r, n, distance, sight))

        # the row: its normaliser or an extra key, then the second view, unless a kernel has subtracted it already
        o = rows.spent(self, o, q, r, n)                                # (B, H, R, E)
        if o.shape[1] > self.heads:
            o = wide(o[:, 0::2]) - mix * wide(o[:, 1::2])               # (B, heads, R, E)

        # the output: value bias, Dex, norm, gate
        o = choices["value_bias"].shifted(self, o)
        o = choices["dex"].corrected(self, o)
        o = choices["out_norm"].normed(self, o)
        o = choices["diff"].after(self, o)
        return choices["gate"].gated(self, o, x).to(dtype)

    # ------------------------------------------------------------------ before the rule

    def rotated(self, q, k, gone):
        """RoPE for the last R of T rows, and for all keys. `gone` tokens have left the cache, between the first keys
        and the others.

        StreamingLLM counts positions in a cache that holds only visible keys: beyond the window, a row is always `end`
        positions from the start, and scores the first keys from there. So q and k become twice as wide, [q at i | q at
        end] and [k | 0] for recent keys or [0 | k] for first keys.
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

    def prepare(self, q, k):
        """Queries and keys as the score takes them, before the constant scale; the rule's row input t, broadcastable
        to (B, score heads, R, 1), or None; and n (R,), the number of keys that each row sees."""
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        n = visible_count(i, self.sight).to(wide(q).dtype)
        q, k = self.featured(q), self.featured(k)
        if self.choices["diff"].own_keys:
            k = self.for_score_heads(k, 1)
        if self.choices["scale"].factor:
            q = (q * self.choices["scale"].factor(self, n)).to(q.dtype)
        t = self.rule.row_input(self, n) if self.rule.row_input else None
        if t is not None and t.dim() == 3 and self.score_heads > self.heads:
            t = t.repeat_interleave(2, 0)       # both views have their head's
        return q, k, t, n

    def featured(self, x):
        """Queries or keys (.., D) through norm and feature map. StreamingLLM has two side by side, see `rotated`."""
        return super().featured(x.unflatten(-1, (-1, self.width))).flatten(-2)

    # ------------------------------------------------------------------ the rule in Triton

    def fused(self, q, k, v, t, distance, sight, mix, need_r):
        """The rule by its kernel: output (B, score heads, R, E), and its statistic. A rule without a statistic weighs
        both views in one pass, if nothing comes between weights and output and a tile can hold both:
        then the output is (B, heads, R, E)."""
        call = partial(kernels.attend, q=q, k=k, v=v, **(distance or Distance())._asdict(), scale=sight.scale,
                       window=sight.window, first=sight.first, skip=sight.skip_dead)
        t = None if t is None else t.squeeze(-1)                        # (B, H, R)
        if self.rule.threshold_of:              # lssar's threshold is a share of the row sum of softplus
            t = t * call(self.rule.threshold_of, row_sum=True)[1]
        if mix is not None and not self.rule.normalizes and not need_r and kernels.holds_two_views(q, v):
            return call(self.config.rule, t=t, power=self.power, mix=mix.squeeze(-1) if mix.dim() else mix)
        o, r = call(self.config.rule, t=t, power=self.power, row_sum=need_r and not self.rule.normalizes)
        return o, None if r is None else r[..., None]

    @property
    def need_r(self):
        """Does anything after the rule need its statistic?"""
        return self.has_extra_key or self.choices["normalize"].needs_sum

    # ------------------------------------------------------------------ weights to look at

    def weight_blocks(self, q, k, x, table=None, sight=None):
        """weights_of one block of rows at a time: yields (B, H, BLOCK or fewer, T or 1 + T)."""
        R, T = q.shape[2], k.shape[2]
        for (block, _), w in zip(kernels.row_blocks(R, T, q.device), self.view_blocks(q, k, table, sight), strict=True):
            if mix := self.choices["diff"].mix:
                w = w[:, 0::2] - mix(self, x[:, block]) * w[:, 1::2]
            yield w

    def view_blocks(self, q, k, table=None, sight=None):
        """The weights of every score head, a block of rows at a time, from the block loop's own code."""
        q, k, t, n = self.prepare(q, k)
        R, T, sight, distance = q.shape[2], k.shape[2], sight or self.sight, as_distance(table) or Distance()
        for block, i in kernels.row_blocks(R, T, q.device):
            keys, qb = kernels.keys_of(block, R, T, sight), q[:, :, block]
            tb = None if t is None else t[..., block, :]
            w, *r = kernels.attend_block(self.rule, sight, self.need_r, 0.0, i, qb, k[:, :, keys], None, tb, *distance)
            share = rows.share_of_keys(self, qb, r[0] if r else None, n[block])
            w = F.pad(w if share is None else w * share, (keys.start, T - keys.stop))
            yield torch.cat([1 - share, w], -1) if self.has_extra_key else w

    def importance(self, q, k, x, r, n, distance, sight):
        """How much each head is used, (heads,): the mean over rows of its gate, if it has one, else of what a sink
        leaves: 1 minus the weight of the extra key, or of the first one. The Attention Sink as Native MoE, eq. 8. The
        first row counts, too; it sees itself alone, and is 0.

        It costs O(T): the first key's weight is e^(s_i0 - r_i) of the row's log-sum-exp r, whose gradient is known.
        """
        if self.config.gate != "none":
            return torch.sigmoid(wide(split_heads(self.gate(x), self.heads, -1))).mean((0, 2, 3))
        if self.has_extra_key:
            return rows.share_of_keys(self, q, r, n).mean((0, 2, 3))
        R, T = q.shape[2], k.shape[2]
        # r holds scores as the block loop rounds them, so s must be rounded alike
        s = kernels.scaled_scores(q, k[:, :, :1], sight.scale)[..., 0]  # (B, H, R)
        if distance is not None:
            s = s + distance.by_distance(T)[:, T - R:]                  # row i is i away from the first key
        seen = visible(torch.arange(T - R, T, device=q.device), torch.zeros_like(n, dtype=torch.long), sight)
        log_weight = -F.relu(r[..., 0] - s)     # rounding makes no weight larger than 1
        return 1 - log_weight.masked_fill(~seen, -math.inf).exp().mean((0, 2))

    def flops_per_token(self):
        """Floating-point operations of training on one token, forward and backward, besides those of the parameters:
        the products of queries with keys and of weights with values, as if every row saw a whole block."""
        return 12 * self.config.n_head * self.config.head_width * self.config.block_size

    @staticmethod
    def obstacles(config, device):
        """Triples of a kernel, a condition under which it cannot be on this device, and the reason."""
        choices, width = options.chosen(config, AXES), config.head_width
        widest = max(w for _, w in choices["diff"].heads(config.n_head, config.n_kv_head, width))
        if config.first and choices["pos"].rotates:                     # q and k become twice as wide, see `rotated`
            widest = max(widest, 2 * width)
        yield "triton", config.rule not in kernels.KERNELS, f"rule {config.rule} has no kernel"
        yield "triton", config.dropout > 0, "the kernels have no attention dropout"
        yield "triton", widest > 256, "its heads are wider than 256"
        yield from triton_obstacles(config, device)
        plain = (config.rule == "softmax" and config.diff == "none" and not config.window
                 and choices["sink"].score is None and choices["pos"].bias is no_bias)
        yield "sdpa", not plain, f"it computes plain softmax only, not --attn={config.attn} --pos={config.pos}"


def triton_obstacles(config, device):
    """Those of any kernel in Triton."""
    here = kernels.AVAILABLE and (device == "cuda" or kernels.INTERPRETED)
    yield "triton", not here, "it needs triton and a CUDA GPU"
    yield "triton", config.kernel == "auto" and device != "cuda", "the interpreter is for tests"


def check_importance(config):
    """Raise ValueError on a recipe whose heads have neither a gate nor the weight of a sink."""
    if config.mixer == "attention" and config.gate != "none":
        return
    if config.mixer != "attention" or config.rule != "softmax" or config.diff != "none":
        raise ValueError(f"--head_balance balances gates and sinks, and --attn={config.attn} has neither: it goes with "
                         "one view of rule softmax, with or without --sink, or with --gate=head or element")
    if config.window and not config.first and SINKS[config.sink].score is None:
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
