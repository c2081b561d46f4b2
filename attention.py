"""How attention scores become attention weights: the rules, the published recipes, and the layer
around them.

One head's output is  o_i = sum_j w_ij v_j  over the keys j that row i sees. The weights come from a
rule

    w_ij = f(s_ij; r_i, t_i)

of the score s_ij, a statistic r_i of the row (such as the log-sum-exp of its scores) and a row
input t_i (such as a threshold). Each rule has one card below: its formula, its definition in
PyTorch, the same in Triton, and its row in RULES. A recipe, such as --attn=elastic, is an entry of
ATTENTIONS: a rule and a choice on each axis around it (see axes/). `Attention.forward` and
`Attention.attend` go from x to y. kernels.py and kernels.cpp compute any rule block by block, so
their memory is linear in T.

Shapes: B batch, H score heads, T keys, R query rows (the last R of the T positions), D width of q
and k, E width of v, C = n_embd. q (B, H, R, D), k (B, Hk, T, D), v (B, Hv, T, E): Hk and Hv divide
H. Scores and weights are (B, H, R, T), row vectors (B, H, R, 1). A differential recipe has two
score heads, called views, for each output head: heads 0, 2, .. form view a, heads 1, 3, .. view b.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn import functional as F

import kernels
from axes import options, rows
from axes.base import Choice, Constant, split_heads
from axes.layer import Layer
from axes.positions import Distance, rotate
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
    visible,
    visible_count,
    wide,
)

# ----------------------------------------------------------------------------------- what a rule is
# In PyTorch a rule takes a block of scores s (B, H, R, T) in float32 or float64, the mask `seen` of
# visible keys (broadcastable to s), the row input t and, if the rule has one, the constant `power`.
# It returns weights of the shape of s, zero where masked.
#
# In Triton a rule is up to four small functions of one tile of scores, which kernels.py calls:
#
#   weigh   s, r, t, power -> w, z, u               o_i = sum_j w_ij v_j
#                                                   U_i = sum_j u_ij v_j / sum_j z_ij
#   settle  r, t, power, sum_w, sum_z, FIRST -> r   the statistic of the row, from its sums
#   slope   s, r, t, power, g, delta -> ds, dt      g_ij = do_i . v_j,   delta_i = do_i . U_i - dr_i
#                                                   (a rule without t returns anything as dt)
#   lift    s, t, power -> s                        another score for weigh; few rules have it
#
# For softmax, w_ij = exp(s_ij - r_i), and a score moves all weights of its row:
#     ds_ij = w_ij (g_ij - delta_i),   delta_i = sum_j w_ij g_ij = do_i . o_i
# g_ij is the gradient of w_ij, and delta_i holds what the scores of a row have in common. Every
# rule has this form, with a U of its own in place of o; dr is the gradient of r. For softmax w, z
# and u are the same. For elastic z is p, and u is p above the threshold.
#
# In the first pass (FIRST) the r of weigh and settle is the running maximum of the scores; in a
# later pass it is the last estimate. A rule whose weights depend on no other score of the row has
# no settle and reads no r: its statistic is the row sum. slope gets the scores before lift, and
# dt_i is the sum of its dt. s and r are multiplied by Kernel.unit: log2 e for rules that take
# exponentials, because the hardware computes 2^x. A comment above a line of Triton gives the same
# in PyTorch, unless both read alike. On a CPU the same functions are translated to C++: see
# common/cpp.py. The other fields of Kernel, such as online and passes, are explained in kernels.py.

# Rules add -t: the gradient of s - t with respect to t would first negate that of a whole block.
MASKED_SCORE = -1e30  # additive mask. Finite, so a fully masked row gives no NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Choice):
    weights: Callable | None = None  # s, seen, t -> weights: the definition
    statistic: Callable | None = None  # s, seen, weights -> r (B, H, R, 1), if anything needs it
    # layer, n (.., R) -> t, broadcastable to (B, H, R, 1); None: no t
    row_input: Callable | None = None
    power: Callable | None = None  # args -> the constant power of rules that have one
    # the same rule in Triton, and on CPUs in C++; None: the block loop computes it everywhere
    kernel: Kernel | None = None
    threshold_of: str | None = None  # another rule: the kernel's t is t times that rule's row sum

    has_weights = True  # the output is a linear function of the values

    @property
    def sums_rows(self):
        """Is its statistic the row sum? Then --normalize can divide by it."""
        return self.statistic is row_sum


RULES = {}


def row_sum(s, seen, w):
    """r_i = sum_j w_ij, the statistic of rules that do not normalise their rows."""
    return w.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------ softmax
# w_ij = exp(s_ij - r_i),   r_i = log sum_j exp(s_ij)                     Vaswani et al. 2017, eq. 1
# ds_ij = w_ij (g_ij - delta_i)


def softmax(s, seen, t=None):
    """w_ij = exp(s_ij) / sum_k exp(s_ik): every row sums to 1. A row without a relevant key must
    still put its weight somewhere, usually on the first token: the attention sink.

    No learned scalars. The statistic is the log-sum-exp. Source: Vaswani et al. 2017, eq. 1."""
    return torch.softmax(s + ~seen * MASKED_SCORE, -1)


class LogSumExp(torch.autograd.Function):
    """The log-sum-exp of each row (natural logarithm) from its softmax w: r = s_ij - log w_ij for
    any j. The largest weight gives the best precision. This avoids a second pass of exponentials,
    and the gradient of r is w itself."""

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
    # r = torch.logsumexp(s, -1)       (the argument r is the maximum m, sum_z the sum of 2^(s - m))
    return tl.where(sum_z > 0, r + tl.log2(sum_z), 0.0)  # sum_z is 0 in a row without weights


RULES["softmax"] = Rule(
    weights=softmax,
    statistic=LogSumExp.apply,
    kernel=Kernel(softmax_weigh, softmax_slope, softmax_settle, online=True, unit=BINARY),
)

# ------------------------------------------------------------------------------------------ elastic
# w_ij = relu(p_ij - t_i),   p = softmax(s),   t_i = tau_h / n_i   Lazy Attention, eq. 5 and table 2
# ds_ij = p_ij (m_ij g_ij - delta_i),   m_ij = [p_ij > t_i],   U_i = sum_j p_ij m_ij v_j


def elastic(s, seen, t):
    """w_ij = relu(p_ij - t_i), p = softmax(s), t_i = tau_h / n_i: a row may sum to less than 1, a
    uniform row to 0.

    Weights that softmax would park on a sink fall below the threshold and become exactly zero. The
    others are not renormalised. For tau >= 0 the row sum lies in [0, 1].
    Learned: tau (H,). It starts at 1, where a uniform row outputs zero. n_i is the number of
    visible keys.
    Source: Lazy Attention, eq. 5 and table 2.
    Differs from the author's code: it stores -tau and adds it. It starts at -1, -0.5 or -1.01,
    depending on the script, with 100 times the learning rate (here --head_lr=100)."""
    # without the mask, tau < 0 would give masked keys a weight
    return (softmax(s, seen) + -t).masked_fill_(~seen, 0.0).relu_()


def elastic_threshold(layer, n):
    """t_i = tau_h / n_i. per_length=0: t_i = tau_h. per_length=block: t_i = tau_h / block_size."""
    if layer.args["per_length"] == "block":
        n = torch.full_like(n, layer.config.block_size)
    elif not layer.args["per_length"]:
        n = torch.ones_like(n)
    return layer.tau[:, None, None] / n[..., None]


# The first row begins at p = t = 1. Rounding must not decide this tie, so in the derivative p
# counts as above t only beyond t (1 + 2^-18). A pair with p between these two, or within rounding
# of one, may count on either side: only there do the gradients of a kernel and of the function
# above differ by more than rounding. The weights agree: they are near 0
TIE = tl.constexpr(1 + 2**-18)


@jit
def elastic_weigh(s, r, t, power: tl.constexpr):
    # p = torch.exp(s - r); w = torch.relu(p - t)
    p = tl.exp2(s - r)
    return tl.maximum(p - t, 0.0), p, tl.where(p > t * TIE, p, 0.0)


@jit
def elastic_slope(s, r, t, power: tl.constexpr, g, delta):
    # p = torch.exp(s - r); g = g * (p > t)
    p = tl.exp2(s - r)
    g = tl.where(p > t * TIE, g, 0.0)
    # ds = p * (g - delta); dt = -g.sum(-1)
    return p * (g - delta), -g


RULES["elastic"] = Rule(
    learns=lambda layer: {"tau": torch.full((layer.heads,), layer.args["tau_init"])},
    args={
        "tau_init": Constant(1.0),
        "per_length": Constant(True, word="block"),
        "learn_tau": Constant(True),
    },
    weights=elastic,
    row_input=elastic_threshold,
    kernel=Kernel(
        elastic_weigh,
        elastic_slope,
        softmax_settle,
        passes=1,
        save_u=True,
        takes_t=True,
        unit=BINARY,
    ),
)

# -------------------------------------------------------------------------------- entmax, sparsemax
# w_ij = x_ij^a,   x_ij = relu(s_ij / a - r_i),   a = 1 / (alpha - 1), the power,
# r_i such that the row sums to 1                                          Peters et al. 2019, eq. 7
# ds_ij = u_ij (g_ij - delta_i),   u_ij = x_ij^(a - 1),   U_i = sum_j u_ij v_j / sum_j u_ij


def entmax(s, seen, t=None, power=2.0):
    """w_ij = relu((alpha - 1) s_ij - r_i)^power, power = 1 / (alpha - 1), with the r_i that makes
    the row sum to 1.

    Between softmax (alpha 1) and sparsemax (alpha 2), 1.5 by default. Keys far below the best get
    exact zeros. Rows still sum to 1, so a sink may form, but only a few keys get weight.
    Learned, with --attn_args=alpha=learned: theta (H,), 0 at the start, alpha_h = 1 +
    sigmoid(theta_h). Then the power is passed as the row input t.
    Source: Peters et al. 2019, eq. 7 and 9; alpha per head as 1 + sigmoid: Correia et al. 2019."""
    power = t if power is None else power
    z = s / power + ~seen * MASKED_SCORE
    z = z - z.detach().amax(-1, keepdim=True)  # now r lies in [-1, 0]
    r = entmax_threshold(z.detach(), power)
    x = F.relu(z - r)
    w = x**power
    # one more step of Newton's method leaves r as it is, but is differentiable, so gradients reach
    # z and the power
    decrease = (power * w / x.clamp(min=torch.finfo(x.dtype).tiny)).sum(-1, keepdim=True).detach()
    return F.relu(z - r - (w.sum(-1, keepdim=True) - 1) / decrease) ** power


@torch.no_grad()
def entmax_threshold(z, power):
    """The r (.., 1) at which sum_j relu(z_j - r)^power = 1, for rows z whose maximum is 0.

    Newton's method on (sum_j relu(z_j - r)^power)^(1/power), which is convex in r. r rises and
    never passes the solution. It starts at -1, where the largest key alone has weight 1, or higher:
    n keys with the mean m have, by Jensen's inequality, at least the weight n (m - r)^power, so r
    is not below m - n^(-1/power)."""
    x = F.relu(z + 1)
    n = (x > 0).sum(-1, keepdim=True, dtype=z.dtype)
    r = (x.sum(-1, keepdim=True) / n - n ** (-1 / power)).clamp(min=0) - 1
    for _ in range(60):  # usually stops after 2 to 10
        x = (z - r).relu_()
        w = x**power
        total = w.sum(-1, keepdim=True)
        u = w.div_(x.clamp_(min=torch.finfo(z.dtype).tiny))
        step = (total - total ** (1 - 1 / power)) / u.sum(-1, keepdim=True)
        r = r + step
        if step.abs().max() < 2 * torch.finfo(z.dtype).eps:
            break
    return r


def entmax_row_input(layer, n):
    """t = 1 / (alpha_h - 1) where alpha is learned. A constant alpha is the rule's power
    instead."""
    if layer.args["alpha"] == "learned":
        theta = torch.where(layer.theta > -4.6, layer.theta, -4.6)  # alpha is at least 1.01
        return (1 + torch.exp(-theta))[:, None, None]


def sparsemax(s, seen, t=None):
    """w_ij = relu(s_ij - r_i), with the threshold r_i that makes the row sum to 1: entmax at alpha
    2, its sparsest form. The row still spends 1, so a sink may form.

    No learned scalars. Source: Martins & Astudillo 2016, eq. 1."""
    return entmax(s, seen, power=1.0)


# A learned power differs from row to row: t holds it, and the constant power is 0. The gradient of
# t is dt_i = sum_j (g_ij - delta_i) w_ij (log x_ij - 1). It includes the derivative of
# x = s / t - r by t, -(x + r) / t. The term with r vanishes, because ds sums to 0 over the row.


@jit
def entmax_lift(s, t, power: tl.constexpr):
    return s / (t if power == 0 else power)


@jit
def entmax_weigh(s, r, t, power: tl.constexpr):
    # x = torch.relu(s - r); w = x**power           (lift has divided s by the power)
    if power == 0:
        u = real_power(s - r, t - 1)
    else:
        u = const_power(s - r, power - 1)
    return u * tl.maximum(s - r, 0.0), u, u


@jit
def entmax_slope(s, r, t, power: tl.constexpr, g, delta):
    # x = torch.relu(s / power - r); ds = x**(power - 1) * (g - delta)
    if power == 0:
        x = s / t - r
        ds = real_power(x, t - 1) * (g - delta)
        # dt = (ds * x * (torch.log(x) - 1)).sum(-1)
        return ds, tl.where(x > 0, ds * x * (tl.log2(x) * LN2 - 1), 0.0)
    else:
        ds = const_power(s / power - r, power - 1) * (g - delta)
        return ds, ds


@jit
def entmax_settle(r, t, power: tl.constexpr, sum_w, sum_z, FIRST: tl.constexpr):
    # r so that (relu(s / power - r)**power).sum(-1) == 1
    if FIRST:
        # the argument r is the maximum m. At r = m - 1 the largest key alone has weight 1: the
        # solution is not smaller
        return r - 1.0
    else:
        # one step of Newton's method, as in entmax_threshold: r rises and never passes the solution
        step = sum_w - real_power(sum_w, 1 - 1 / (t if power == 0 else power))
        return r + step / tl.maximum(sum_z, 1e-30)


ENTMAX = Kernel(
    entmax_weigh,
    entmax_slope,
    entmax_settle,
    entmax_lift,
    passes=24,
    save_u=True,
    skip=True,
    heavy=True,
)
RULES["entmax"] = Rule(
    learns=lambda layer: (
        {"theta": torch.zeros(layer.heads)} if layer.args["alpha"] == "learned" else {}
    ),
    args={"alpha": Constant(1.5, 1.01, 2.0, "learned")},
    weights=entmax,
    row_input=entmax_row_input,
    power=lambda args: None if args["alpha"] == "learned" else 1 / (args["alpha"] - 1),
    kernel=ENTMAX._replace(power=2.0, takes_power=True, with_t="alphamax"),
)
RULES["sparsemax"] = Rule(weights=sparsemax, kernel=ENTMAX._replace(power=1.0))

# -------------------------------------------------------------------------------------------- lssar
# phi_ij = softplus(s_ij),   x_ij = relu(phi_ij - t_i sum_k phi_ik),   w_ij = x_ij^power / sum_k
# x_ik^power. Eq. 4 and 5 divide x by sum_k phi_ik, which cancels       Gao & Spratling 2501.13428
# dx_ij = w_ij (g_ij - delta_i) power / x_ij, and by way of phi and of the threshold ds follows
# In Triton t has been multiplied by the row sum of phi, so x = relu(phi - t). There w is the
# softmax of power log x, because x^power overflows.


def lssar(s, seen, t, power=15.0):
    """w_ij = x_ij^power / sum_k x_ik^power, with x_ij = relu(a_ij - t_i) and
    a_ij = softplus(s_ij) / sum_k softplus(s_ik).

    t_i = 1 / n_i, or 0 if the row sees at most three keys (the paper's o_i / n_i). Keys below the
    uniform share 1 / n_i get weight 0, and the power sharpens the others. Every row sums to 1, but
    a uniform row of more than three keys is empty. So a sink may remain.
    No learned scalars: the recipe normalises q and k to unit length, and the score is log(d)
    log(n_i) q.k.
    Source: Gao & Spratling 2501.13428, eq. 4 and 5. Threshold Differential Attention, table 1, says
    that LSSAR has no exact zeros: with this threshold it has. x^15 leaves the range of float32, so
    x is divided by its row's maximum. x within rounding of 0 is 0, and so is softplus of a score
    below -69. A reimplementation adds 1e-8 to the last sum. That would empty nearly uniform rows,
    so it is left out."""
    # phi is 1e-30 at -69.07
    phi = F.softplus(s, threshold=40).masked_fill(~(seen & (s > -69.07)), 0.0)
    # where all scores are far below 0, phi itself is 0
    a = phi / phi.sum(-1, keepdim=True).clamp(min=1e-30)
    x = (a - t) * (seen & (a > t * (1 + 2**-18)))  # else the power would amplify rounding
    largest = x.detach().amax(-1, keepdim=True)
    survives = largest > 1e-30  # rows with a key above the threshold
    b = (x / torch.where(survives, largest, 1.0)) ** power
    # no clamp: the largest entry is 1
    return b / torch.where(survives, b.sum(-1, keepdim=True), 1.0)


def lssar_threshold(layer, n):
    """t_i = 1 / n_i, or 0 if the row sees at most three keys. The same on every head."""
    return torch.where(n > 3, 1 / n, 0.0)[..., None]


@jit
def softplus_weigh(s, r, t, power: tl.constexpr):
    # w = torch.log(1 + torch.exp(s))
    w = tl.maximum(s, 0.0) * LN2 + log_one_plus(tl.exp2(-tl.abs(s)))
    return w, w, w


@jit
def softplus_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.sigmoid(s) * (g - delta)
    ds = logistic(s) * (g - delta)
    return ds, ds


@jit
def lssar_lift(s, t, power: tl.constexpr):
    # s = power * torch.log(torch.relu(softplus(s) - t))
    phi, _, _ = softplus_weigh(s, 0.0, t, power)
    # no noise if uniform
    return tl.where(phi > tl.maximum(t * TIE, 1e-30), power * tl.log2(phi - t), float("-inf"))


@jit
def lssar_slope(s, r, t, power: tl.constexpr, g, delta):
    # x = torch.relu(softplus(s) - t); dx = x**power / torch.exp(r) * (g - delta) * power / x
    phi, _, _ = softplus_weigh(s, r, t, power)
    dx = tl.exp2(lssar_lift(s, t, power) - r) * (g - delta) * power / (phi - t)
    # the limit of lssar_lift; its -inf takes more registers
    dx = tl.where(phi > tl.maximum(t * TIE, 1e-30), dx, 0.0)
    # ds = dx * torch.sigmoid(s); dt = -dx.sum(-1)
    return dx * logistic(s), -dx


SOFTPLUS = Kernel(softplus_weigh, softplus_slope, unit=BINARY, heavy=True)  # for the row sum alone
RULES["lssar"] = Rule(
    args={"power": Constant(15.0, 1.0, 64.0)},
    weights=lssar,
    row_input=lssar_threshold,
    power=lambda args: args["power"],
    threshold_of="softplus",
    kernel=Kernel(
        softmax_weigh,
        lssar_slope,
        softmax_settle,
        lssar_lift,
        online=True,
        sum_delta=True,
        takes_t=True,
        takes_power=True,
        power=15.0,
        unit=BINARY,
        skip=True,
        heavy=True,
    ),
)

# ----------------------------------------------------------------------------------------- softpick
# w_ij = relu(e^s_ij - 1) / (sum_j |e^s_ij - 1| + eps) = relu(e^(s_ij - r_i) - e^-r_i), with r_i the
# log of the divisor
# Only positive scores have weight, but all scores are part of the sum.      Zuhri et al. 2504.20966
# ds_ij = e^(s_ij - r_i) ([s_ij > 0] g_ij - sign(s_ij) delta_i)


def softpick(s, seen, t=None):
    """w_ij = relu(e^s_ij - 1) / (sum_k |e^s_ik - 1| + eps): negative scores get zeros and only
    raise the denominator.

    A row may sum to less than 1, and to 0 if every score is negative, so it needs no sink. No
    learned scalars. Numerator and denominator are multiplied by e^-m, m = max(0, max_j s_ij). As in
    the authors' code, eps (1e-8) is added after that.
    Source: Zuhri et al. 2504.20966.
    Differs from the authors' code: its m is max_j s_ij, so it overflows if all scores are below
    -88. Its Triton kernel has eps 1e-6. At a score of exactly 0 that kernel uses the slope of
    negative scores. Here the slope is 0, as in autograd."""
    s = s + ~seen * MASKED_SCORE  # masked scores must not overflow
    m = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = (torch.exp(s - m) - torch.exp(-m)).masked_fill(~seen, 0.0)
    return F.relu(e) / (e.abs().sum(-1, keepdim=True) + 1e-8)


@jit
def softpick_weigh(s, r, t, power: tl.constexpr):
    # e = torch.exp(s - r) - torch.exp(-r); w = torch.relu(e)
    e = tl.exp2(s - r) - tl.exp2(-r)
    w = tl.maximum(e, 0.0)
    return w, tl.abs(e), w


@jit
def softpick_slope(s, r, t, power: tl.constexpr, g, delta):
    # ds = torch.exp(s - r) * ((s > 0) * g - torch.sign(s) * delta)
    ds = tl.exp2(s - r) * tl.where(s > 0, g - delta, tl.where(s < 0, delta, 0.0))
    return ds, ds


@jit
def softpick_settle(r, t, power: tl.constexpr, sum_w, sum_z, FIRST: tl.constexpr):
    # r = m + torch.log(torch.abs(torch.exp(s - m) - torch.exp(-m)).sum(-1) + 1e-8)
    # (m: the argument r)
    return r + tl.log2(sum_z + 1e-8)


RULES["softpick"] = Rule(
    weights=softpick,
    kernel=Kernel(
        softpick_weigh, softpick_slope, softpick_settle, online=True, unit=BINARY, floor=0.0
    ),
)

# --------------------------------------------------------------------------------------------- relu
# w_ij = relu(s_ij)                                                       Wortsman et al. 2309.08586
# ds_ij = [s_ij > 0] (g_ij - delta_i)
# From here on, rules do not normalise. Their statistic is the row sum: delta is -dr, or 0 if
# nothing uses the sum


def relu(s, seen, t=None):
    """w_ij = relu(s_ij): no normaliser, and exact zeros for negative scores. A row may sum to 0, so
    it needs no sink.

    No learned scalars.
    Source: with division by the row's length Wortsman et al. 2309.08586, whose attention is
    bidirectional, with one length for all rows. With an RMSNorm on the output ReLA, Zhang et al.
    2021."""
    return (s + ~seen * MASKED_SCORE).relu_()


@jit
def relu_weigh(s, r, t, power: tl.constexpr):
    w = tl.maximum(s, 0.0)
    return w, w, w


@jit
def relu_slope(s, r, t, power: tl.constexpr, g, delta):
    ds = tl.where(s > 0, g - delta, 0.0)
    return ds, ds


RULES["relu"] = Rule(
    weights=relu, statistic=row_sum, kernel=Kernel(relu_weigh, relu_slope, skip=True)
)

# ---------------------------------------------------------------------------------------------- tra
# w_ij = relu(s_ij - t_i)^power                              Threshold Differential Attention, eq. 1
# t_i = beta_h sqrt(2 log(n_i / kappa) / d)
# ds_ij = power relu(s_ij - t_i)^(power - 1) (g_ij - delta_i)


def tra(s, seen, t, power=2.0):
    """w_ij = relu(s_ij - t_i)^power, t_i = beta_h sqrt(2 log(n_i / kappa) / d): few unrelated keys
    pass.

    Take unit q and k of width d that are unrelated to each other. At beta 1, at most kappa keys a
    row pass the threshold on average, however long the context. (At d = 64 and n = 1024 it is 0.05
    keys, so most rows start empty.) Weights have exact zeros and no fixed sum, so no sink is
    needed.
    Learned: beta (H,), 1 at the start. Both views of the recipe tda share it.
    Source: Threshold Differential Attention, eq. 1 and appendix B. The paper does not say whether
    beta belongs to a head or to a layer, nor whether its RMSNorm sees one head or all. Here beta
    belongs to a head; the norm sees one. Differs from the released kernel: it has kappa = 1, takes
    beta as a constant, and has no norm on the output. That norm rescales outputs of few small
    weights. Here the logarithm is at least 0, which matters if kappa > n."""
    return (s + -t).add_(~seen * MASKED_SCORE).relu_() ** power


def tra_threshold(layer, n):
    """t_i = beta_h sqrt(2 log(n_i / kappa) / d), the logarithm at least 0."""
    log = torch.log(n / layer.args["kappa"]).clamp(min=0)
    return layer.beta[:, None, None] * torch.sqrt(2 * log / layer.width)[..., None]


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
    learns=lambda layer: {"beta": torch.full((layer.heads,), layer.args["beta_init"])},
    args={
        "beta_init": Constant(1.0),
        "kappa": Constant(1.0, 1e-9, 1e9),
        "power": Constant(2.0, 1.0, 64.0),
        "learn_beta": Constant(True),
    },
    weights=tra,
    statistic=row_sum,
    row_input=tra_threshold,
    power=lambda args: args["power"],
    kernel=Kernel(tra_weigh, tra_slope, takes_t=True, takes_power=True, power=2.0, skip=True),
)

# ------------------------------------------------------------------------------------------ sigmoid
# w_ij = sigmoid(s_ij - t_i),   t_i = log(block_size)                    Ramapuram et al. 2409.04431
# ds_ij = w_ij (1 - w_ij) (g_ij - delta_i)


def sigmoid(s, seen, t):
    """w_ij = sigmoid(s_ij - t_i): a weight depends on its own score only. A row may sum to 0, so it
    needs no sink.

    No learned scalars: t is log(block_size), so the sum of a row of block_size keys starts near 1.
    length_bias=0: 0. Source: Ramapuram et al. 2409.04431 (b = -log n of the training length).
    Without a bias: When Attention Sink Emerges, table 6.
    Differs from the authors' code: its language model puts a LayerNorm on queries and keys. The
    closest choice here is --qk_norm=head."""
    return (s + -t).add_(~seen * MASKED_SCORE).sigmoid_()


def sigmoid_threshold(layer, n):
    """t_i = log(block_size), the negative of the published bias; the same on every row."""
    bias = math.log(layer.config.block_size) if layer.args["length_bias"] else 0.0
    return torch.full_like(n, bias)[..., None]


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


RULES["sigmoid"] = Rule(
    args={"length_bias": Constant(True)},
    weights=sigmoid,
    statistic=row_sum,
    row_input=sigmoid_threshold,
    kernel=Kernel(sigmoid_weigh, sigmoid_slope, takes_t=True, unit=BINARY),
)

# ---------------------------------------------------------------------------------------------- elu
# w_ij = elu(s_ij) + 1: 1 + s_ij above 0, e^s_ij below          When Attention Sink Emerges, table 6
# ds_ij = min(1, e^s_ij) (g_ij - delta_i)


def elu(s, seen, t=None):
    """w_ij = elu(s_ij) + 1, that is 1 + s_ij above 0 and e^s_ij below: positive, not normalised, no
    sink needed.

    No learned scalars. Source: When Attention Sink Emerges, table 6."""
    return torch.where(s < 0, s.clamp(max=0).exp(), 1 + s).masked_fill(~seen, 0.0)


@jit
def elu_weigh(s, r, t, power: tl.constexpr):
    w = tl.maximum(s, 0.0) + tl.exp2(tl.minimum(s, 0.0) * LOG2E)
    return w, w, w


@jit
def elu_slope(s, r, t, power: tl.constexpr, g, delta):
    ds = tl.exp2(tl.minimum(s, 0.0) * LOG2E) * (g - delta)
    return ds, ds


RULES["elu"] = Rule(weights=elu, statistic=row_sum, kernel=Kernel(elu_weigh, elu_slope))

# ----------------------------------------------------------------------------------------- identity
# w_ij = s_ij                                                   When Attention Sink Emerges, table 6
# ds_ij = g_ij - delta_i


def identity(s, seen, t=None):
    """w_ij = s_ij: the score itself, of either sign. With a feature map on q and k this is linear
    attention.

    No learned scalars.
    Source: When Attention Sink Emerges, table 6; with elu + 1 on q and k, Katharopoulos et al.
    2020."""
    return s.masked_fill(~seen, 0.0)


@jit
def identity_weigh(s, r, t, power: tl.constexpr):
    return s, s, s


@jit
def identity_slope(s, r, t, power: tl.constexpr, g, delta):
    return g - delta, g - delta


RULES["identity"] = Rule(
    weights=identity, statistic=row_sum, kernel=Kernel(identity_weigh, identity_slope)
)

# -------------------------------------------------------------------------------------- the recipes
# A recipe is a rule and a choice on every axis around it. An axis that a recipe omits takes the
# preset's value, else the default, which is the first value in the axis' table. A recipe with a
# "mixer" builds another layer than `Attention` below: mixers/ explains its choices.

# fmt: off
ATTENTIONS = {
    "softmax": {"rule": "softmax"},
    # scores that grow with the number of keys, so that longer rows are not flatter
    "ssmax": {"rule": "softmax", "scale": "log_n"},
    # a sink outside the sequence: an extra key with value 0 (softmax1, sink, k_bias), with a
    # learned value, or a token
    "softmax1": {"rule": "softmax", "sink": "one"},
    "sink": {"rule": "softmax", "sink": "logit"},
    "k_bias": {"rule": "softmax", "sink": "key"},
    "kv_bias": {"rule": "softmax", "sink": "key_value"},
    "sink_token": {"rule": "softmax", "sink": "token"},
    "v_bias": {"rule": "softmax", "value_bias": "on"},
    # a gate on the output: an extra key with value 0 is such a gate
    "gated": {"rule": "softmax", "gate": "head"},
    "gated_elementwise": {"rule": "softmax", "gate": "element"},
    # fewer visible keys
    "window": {"rule": "softmax", "window": 128},
    "streaming": {"rule": "softmax", "window": 128, "first": 4},
    # GPT-OSS: a learned score of the sink, and a window in every second layer
    "gpt_oss": {"rule": "softmax", "sink": "logit", "window": 128, "window_every": 2},
    # two softmaxes, one minus the other; Dex subtracts from the output instead
    "diff": {"rule": "softmax", "diff": "v1", "out_norm": "head", "args": {"out_norm_eps": 1e-5}},
    "diff2": {"rule": "softmax", "diff": "v2"},
    "dex": {"rule": "softmax", "dex": "on"},
    "xsa": {"rule": "softmax", "exclude": "own"},
    # a threshold below which weights are zero
    "elastic": {"rule": "elastic"},
    # RoPE's base: larger in the paper, 10000 in its code
    "lazy": {"rule": "elastic", "pos": "rope+bias"},
    # sparse weights that sum to 1
    "entmax": {"rule": "entmax"},
    "sparsemax": {"rule": "sparsemax"},
    "asentmax": {"rule": "entmax", "scale": "asentmax"},
    "lssar": {"rule": "lssar", "qk_norm": "l2", "scale": "log_n", "args": {"learn_sigma": False}},
    # rectified scores: softpick's rows sum to at most 1, the others to any number
    "softpick": {"rule": "softpick"},
    "relu": {"rule": "relu", "normalize": "length"},
    "rela": {"rule": "relu", "out_norm": "all"},
    "rela_gated": {"rule": "relu", "out_norm": "gated"},
    "diff_rela": {"rule": "relu", "diff": "subtract", "out_norm": "head"},
    "tra": {"rule": "tra", "qk_norm": "l2", "scale": "one", "out_norm": "head"},
    "tda": {"rule": "tra", "qk_norm": "l2", "scale": "one", "out_norm": "head", "diff": "subtract"},
    # weights that depend on their own score only, with or without division by the row's sum
    "sigmoid": {"rule": "sigmoid"},
    "sigmoid_raw": {"rule": "sigmoid", "args": {"length_bias": False}},
    "sigmoid_norm": {"rule": "sigmoid", "normalize": "sum", "args": {"length_bias": False}},
    "elu": {"rule": "elu"},
    "elu_norm": {"rule": "elu", "normalize": "sum"},
    # similarity kernels: the score itself, with or without a feature map on q and k
    "linear": {"rule": "identity", "feature": "elu", "normalize": "sum"},
    "linear_raw": {"rule": "identity", "feature": "elu"},
    "identity": {"rule": "identity"},
    "identity_norm": {"rule": "identity", "normalize": "max1"},
    "mlp": {"rule": "identity", "feature": "mlp"},
    "mlp_norm": {"rule": "identity", "feature": "mlp", "normalize": "max1"},
    # learned groups of tokens: mixers/focus.py
    "focus": {"mixer": "focus", "rule": "softmax", "window": 128},
    # as printed: the gate multiplies the score, and Sinkhorn looks at later tokens
    "focus_printed": {"mixer": "focus", "rule": "softmax", "window": 128, "affinity": "score",
                      "balance": "sinkhorn"},
    # softmax among the tokens of a cluster, mixers/routing.py; or estimated by random features,
    # mixers/performer.py
    "routing": {"mixer": "routing", "rule": "softmax"},
    "performer": {"mixer": "performer", "rule": "favor", "normalize": "sum"},
    # a few keys for each query, in a model that was trained with softmax: mixers/selection.py
    "topk": {"mixer": "selection", "rule": "softmax", "select": "topk", "topk": 32},
    "sparq": {"mixer": "selection", "rule": "softmax", "select": "sparq", "topk": 32},
    "quest": {"mixer": "selection", "rule": "softmax", "select": "quest", "topk": 32},
    "magicpig": {"mixer": "selection", "rule": "softmax", "select": "magicpig"},
    # a state instead of keys: rules and axes of mixers/recurrent.py. `linear` in O(T) comes first
    "linear_state": {"mixer": "recurrent", "rule": "add", "feature": "elu", "normalize": "sum"},
    "retnet": {"mixer": "recurrent", "rule": "add", "forget": "fixed", "pos": "rope",
               "out_norm": "head", "gate": "silu"},
    "gla": {"mixer": "recurrent", "rule": "add", "forget": "channel", "pos": "none",
            "out_norm": "head", "gate": "silu", "args": {"chunk": 16}},
    "mamba2": {"mixer": "recurrent", "rule": "ssd", "forget": "dt", "write": "dt", "pos": "none",
               "conv": "on", "scale": "one", "out_norm": "all", "gate": "silu_first"},
    "deltanet": {"mixer": "recurrent", "rule": "delta", "write": "beta", "pos": "none",
                 "conv": "on", "qk_norm": "l2", "out_norm": "head"},
    "gated_deltanet": {"mixer": "recurrent", "rule": "delta", "forget": "dt", "write": "beta",
                       "pos": "none", "conv": "on", "qk_norm": "l2", "out_norm": "head",
                       "gate": "silu"},
    "kda": {"mixer": "recurrent", "rule": "delta", "forget": "channel_dt", "write": "beta",
            "pos": "none", "conv": "on", "qk_norm": "l2", "out_norm": "head", "gate": "low_rank",
            "args": {"chunk": 16}},
    "ttt": {"mixer": "recurrent", "rule": "descent", "write": "rate", "pos": "rope",
            "scale": "one", "out_norm": "layer", "args": {"chunk": 16}},
    "titans": {"mixer": "recurrent", "rule": "momentum", "forget": "alpha", "write": "rate",
               "pos": "none", "conv": "on", "qk_norm": "l2", "scale": "one", "out_norm": "head",
               "gate": "silu", "args": {"chunk": 16}},
}
# fmt: on


def recipe(name):
    """The axes of one recipe. Raises ValueError naming the recipes that exist."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown --attn={name}: choose from {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]


def layers_of(text):
    """The parts of --layers: "kda*3+softmax,pos=none" has two. The plus of pos=rope+bias does not
    end a part."""
    return re.split(r"\+(?!bias\b)", text)


def pattern(text):
    """The layers that --layers repeats, [(recipe, {axis or constant: its text or whole number})]:
    "kda*3+softmax,pos=none" names four. Raises ValueError on an unknown recipe."""
    found = []
    for part in layers_of(text):
        words = re.fullmatch(r"(\w+)(?:\*([1-9]\d?))?((?:,\w+=[^,=]+)*)", part)
        if not words or words[1] not in ATTENTIONS:
            raise ValueError(
                f"--layers={text}: {part!r} must be RECIPE, RECIPE*N or RECIPE*N,axis=value; "
                f"recipes are {', '.join(ATTENTIONS)}"
            )
        own = dict(pair.split("=") for pair in words[3].split(",")[1:])
        own = {name: int(value) if value.isdecimal() else value for name, value in own.items()}
        found += [(words[1], own)] * int(words[2] or 1)
    return found


# kernels.py imports no rule. It gets the kernels of all rules here, and two that serve other rules
kernels.offer(
    {name: rule.kernel for name, rule in RULES.items() if rule.kernel}
    | {"softplus": SOFTPLUS, "alphamax": ENTMAX._replace(takes_t=True)}
)

# ---------------------------------------------------------------------------------------- the layer

AXES = {"rule": RULES} | options.AXES


@cache
@torch.no_grad()
def dependent_row(weights, takes_t, given):
    """The first row to which a rule gives other weights alone than among others, or None. Training
    computes up to 128 rows at a time, and decoding one, so rows must be independent. given: further
    arguments of the rule, as pairs."""
    scores = torch.linspace(-2, 2, 48, dtype=torch.float64, device="cpu").cos() * 3
    s = scores.view(1, 2, 4, 6)  # (B, H, R, T)
    seen = torch.ones(4, 6, dtype=torch.bool, device="cpu").tril(2)
    t = s.new_full((4, 1), 0.5) if takes_t else None
    together = weights(s, seen, t, **dict(given))
    for i in range(4):
        row = slice(i, i + 1)
        part = s[:, :1, row], seen[row], None if t is None else t[row]
        if not torch.allclose(weights(*part, **dict(given)), together[:, :1, row]):
            return i


@cache
@torch.no_grad()
def kernel_differs(name, power):
    """Does kernels.cpp compute other weights than the rule's PyTorch function, since one of the two
    has been edited?"""
    if name not in kernels.KERNELS:
        return False
    rule, kernel = RULES[name], kernels.KERNELS[name]
    learned = rule.power and power is None  # then the row input is the power
    full = kernels.full_name(kernel.with_t if learned else name, False, power)
    if rule.threshold_of or kernels.why_not_cpp(full, 1):
        return False
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        dice = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 1, 16, 8, generator=dice, dtype=torch.float32)
        v = torch.eye(16, dtype=torch.float32)[None, None]  # with it, the output is the weights
        t = None
        if learned or kernel.takes_t:
            t = q.new_full((1, 1, 16, 1), 2.0 if learned else 0.05)
        seen = torch.ones(16, 16, dtype=torch.bool).tril()
        given = {"power": power} if rule.power else {}
        w = rule.weights(q @ k.mT, seen, t, **given)
        t = None if t is None else t[..., 0]
        found, _ = kernels.attend(name, q, k, v, t=t, power=power, scale=1.0, cpp=True)
    return not torch.allclose(found, w, rtol=1e-3, atol=1e-3)


class Attention(Layer):
    """Attention by one rule: module(x) takes the layer's input (B, R, C) to (B, R, C).

        q, k, v = x through c_attn, then normed, rotated, cached     projected
        t = the rule's row input, n = the keys that each row sees    rule_inputs
        o = sum_j rule(scale q.k, t)_j v_j                           fused, plain_softmax or blocks
        o = o over the row's divisor, or merged with the extra key;  combined
            then the first view minus lambda times the second
        o = value bias, Dex, norm, gate                              postprocess
        y = o through c_proj                                         output

    What all mixers share is in axes/layer.py. Layer.bind makes methods of what the axes' values do:
    self.bias, mix, score_factor, gated and others come from the tables of axes/."""

    axes, numbers = AXES, options.NUMBERS
    in_blocks = True

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.power = None
        if self.rule.power:  # a constant of the rule, such as entmax's 1 / (alpha - 1)
            self.power = self.rule.power(self.args)
            weights = partial(self.rule.weights, power=self.power)
            self.rule = dataclasses.replace(self.rule, weights=weights)
        # does anything after the rule need its statistic?
        self.need_r = self.has_extra_key or self.choices["normalize"].needs_sum
        # can one call of a kernel compute both views and subtract them?
        self.one_call = self.mix and self.rule.sums_rows and not (self.divisor or self.need_r)
        # is it softmax that torch's own fused kernel can compute?
        self.plain = config.rule == "softmax" and not (
            self.mix or config.window or self.extra_score or self.bias
        )
        self.skip_dead = True  # the kernels skip tiles without weights; False to measure the gain

    def forward(self, x, cache=None, rope=None, starts=None, importance=None):
        """x (B, R, C) to (B, R, C).

        cache: a Cache, which the call updates. rope: what a Rope returned; None: computed here.
        starts (B, T): where the documents of packed tokens begin. importance: a list, to which the
        call appends the importance of its heads."""
        # (B, H, R, D), (B, Hk, T, D), (B, Hv, T, E)
        q, k, v = self.projected(x, cache, rope, starts)
        mask = self.mask if starts is None else self.mask._replace(starts=starts)
        attend = partial(self.attend, mask=mask, importance=importance)
        if self.hook:
            attend = partial(self.hook, attend)
        o = attend(q, k, v, x, self.distance())  # (B, heads, R, E)
        return self.output(o)  # (B, R, C)

    def attend(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk, T, D)
        v,  # (B, Hv, T, E)
        x,  # (B, R, C)
        table=None,
        mask=None,
        importance=None,
    ):
        """Each head's output (B, heads, R, E) from rotated queries and keys, values, and the
        layer's input x.

        table: the relative positions, a Distance, an (H, W) table, or None. mask: replaces the
        layer's own. importance: as in forward."""
        mask = mask or self.mask
        distance = Distance(table) if isinstance(table, torch.Tensor) else table
        q, k, t, n = self.rule_inputs(q, k, mask)  # (B, H, R, D), (B, Hk, T, D), .., (.., R)
        mix = self.mix(x) if self.mix else None  # lambda of a second view
        need_r = self.need_r or (importance is not None and not self.gated)
        dropout = self.dropout if self.training else 0.0

        # by a kernel if every position is a row (not while decoding), by torch's softmax, or by
        # the block loop
        kernel = self.kernel_on(q.device.type)
        whole = q.shape[2] == k.shape[2] and mask.hidden < 0
        if kernel in ("triton", "cpp") and (not whole or dropout or q.dtype == torch.float64):
            kernel = "sdpa" if self.plain else "torch"
        if kernel in ("triton", "cpp"):
            o, r = self.fused(q, k, v, t, n, distance, mask, mix, need_r, kernel == "cpp")
        elif kernel == "sdpa" and not (distance or mask.window or mask.hidden >= 0 or need_r):
            o, r = kernels.plain_softmax(q, k, v, self.scale, mask, dropout), None
        else:
            one_block = partial(
                kernels.attend_block, self.rule, self.scale, mask, distance, need_r, dropout
            )
            parts = "rows", "keys", "keys", "rows"
            o, *r = kernels.block_loop(one_block, mask, parts, q, k, v, t)
            r = r[0] if r else None  # (B, H, R, 1)
            o = self.combined(o, q, r, n, mix)  # (B, heads, R, E)
        if importance is not None:  # differentiable: --head_balance trains on it
            importance.append(self.importance_of_heads(q, k, x, r, n, distance, mask))
        return self.postprocess(o, x, v)

    def combined(self, o, q, r, n, mix):
        """Apply the row normaliser or the extra key to o (B, H, R, E), and subtract the second
        view, times its lambda: (B, heads, R, E). Plain softmax has none of them."""
        o = rows.normalised_output(self, o, q, r, n)  # (B, H, R, E)
        return o if mix is None else wide(o[:, 0::2]) - mix * wide(o[:, 1::2])

    def rule_inputs(self, q, k, mask):
        """q and k after norm, feature map and learned factor (the constant scale comes later); the
        rule's row input t (.., R, 1), or None; and n (R,), or of packed documents (B, 1, R), the
        number of keys that each row sees."""
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        n = visible_count(i, mask).to(wide(q).dtype)
        if self.fixed_norm or self.feature_map:
            q, k = self.featured(q), self.featured(k)
        if self.choices["diff"].own_keys:
            k = self.for_score_heads(k, 1)
        if self.score_factor:
            q = (q * self.score_factor(n)).to(q.dtype)
        t = self.rule.row_input(self, n) if self.rule.row_input else None
        if t is not None:
            t = t.expand(*t.shape[:-2], n.shape[-1], 1)  # (.., R, 1)
            if t.dim() > 2 and t.shape[-3] == self.heads < self.score_heads:
                t = t.repeat_interleave(2, -3)  # both views share their head's t
        return q, k, t, n

    def fused(
        self,
        q,  # (B, H, T, D)
        k,  # (B, Hk, T, D)
        v,  # (B, Hv, T, E)
        t,  # (.., T, 1), or None
        n,  # (.., T)
        distance,  # a Distance, or None
        mask,
        mix,  # lambda of the second view, or None
        need_r,
        cpp,
    ):
        """By the rule's kernel: what `combined` returns, (B, heads, T, E), and the statistic or
        None. One call computes and subtracts both views, if the rule does not normalise, nothing
        needs the sum of a row, and a tile can hold both."""
        run = partial(
            kernels.attend,
            q=q,
            k=k,
            v=v,
            **(distance or Distance())._asdict(),
            scale=self.scale,
            window=mask.window,
            first=mask.first,
            skip=self.skip_dead,
            starts=mask.starts,
            cpp=cpp,
        )
        t = None if t is None else t.squeeze(-1)  # (B, H, T)
        if self.rule.threshold_of:  # lssar's threshold is a share of the row sum of softplus
            t = t * run(self.rule.threshold_of, row_sum=True)[1]
        run = partial(run, self.config.rule, t=t, power=self.power)
        if self.one_call and (cpp or kernels.holds_two_views(q, v)):
            return run(mix=mix.squeeze(-1) if mix.dim() else mix)
        o, r = run(row_sum=need_r and self.rule.sums_rows)
        r = None if r is None else r[..., None]
        return self.combined(o, q, r, n, mix), r

    # ------------------------------------------------------------------ weights to look at

    def weight_blocks(self, q, k, x, table=None, mask=None):
        """As weights_of, but a block of rows at a time: yields (B, heads, BLOCK or fewer, T or 1 +
        T)."""
        start = 0
        for w in self.view_blocks(q, k, table, mask):
            if self.mix:
                w = w[:, 0::2] - self.mix(x[:, start : start + w.shape[2]]) * w[:, 1::2]
            start += w.shape[2]
            yield w

    def view_blocks(self, q, k, table=None, mask=None):
        """The weights of every score head, a block of rows at a time, by the code of the block
        loop."""
        mask = mask or self.mask
        distance = Distance(table) if isinstance(table, torch.Tensor) else table
        q, k, t, n = self.rule_inputs(q, k, mask)
        one_block = partial(
            kernels.attend_block, self.rule, self.scale, mask, distance, self.need_r, 0.0
        )
        for block, keys, i in kernels.row_blocks(q.shape[2], k.shape[2], mask, q.device):
            qb = q[:, :, block]
            tb = None if t is None else t[..., block, :]
            w, *r = one_block(i, qb, k[:, :, keys], None, tb)
            share = rows.share_of_keys(self, qb, r[0] if r else None, n[..., block])
            w = F.pad(w if share is None else w * share, (keys.start, k.shape[2] - keys.stop))
            yield torch.cat([1 - share, w], -1) if self.has_extra_key else w

    def importance_of_heads(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk, T, D)
        x,  # (B, R, C)
        r,  # (B, H, R, 1)
        n,  # (.., R)
        distance,  # a Distance, or None
        mask,
    ):
        """Head importance (heads,), a mean over rows: of the gate if there is one, else of 1 minus
        the weight of the extra key, or of the first key. Row 0 sees only the first key, so its
        importance is then 0. Source: The Attention Sink as Native MoE, eq. 8.

        It costs O(T): the weight of the first key is e^(s_i0 - r_i), and the log-sum-exp r is
        differentiable."""
        if self.gated:
            return torch.sigmoid(wide(split_heads(self.gate(x), self.heads, -1))).mean((0, 2, 3))
        if self.has_extra_key:
            return rows.share_of_keys(self, q, r, n).mean((0, 2, 3))
        if mask.starts is not None:
            raise ValueError("packed documents have several first keys: leave out `starts`")
        R, T = q.shape[2], k.shape[2]
        # the block loop has rounded the scores in r, so s must be rounded in the same way
        s = kernels.scaled_scores(q, k[:, :, :1], self.scale)[..., 0]  # (B, H, R)
        if distance is not None:
            s = s + distance.by_distance(T)[:, T - R :]  # row i is at distance i
        i = torch.arange(T - R, T, device=q.device)
        seen = visible(i, torch.zeros_like(n, dtype=torch.long), mask)
        log_weight = -F.relu(r[..., 0] - s)  # rounding makes no weight larger than 1
        return 1 - log_weight.masked_fill(~seen, -math.inf).exp().mean((0, 2))

    @staticmethod
    def refuse(config, args, choices):
        rule = choices["rule"]
        given = (("power", rule.power(args)),) if rule.power else ()
        i = dependent_row(rule.weights, bool(rule.row_input), given)
        if i is not None:
            return (
                f"--rule={config.rule} gives row {i} other weights alone than among other rows "
                "and heads, but they must be independent: write a mixer (docs/add-your-own.md)"
            )

    @staticmethod
    def has_importance(config):
        """Of gates, and of the sink of one view of softmax."""
        return config.gate != "none" or (config.rule == "softmax" and config.diff == "none")

    def obstacles(self, device):
        config = self.config
        widest = max(width for _, width in self.shapes.values())
        if config.first and self.rope:  # see Streaming
            widest = max(widest, 2 * self.width)
        for kernel in ("triton", "cpp"):
            yield kernel, config.rule not in kernels.KERNELS, f"rule {config.rule} has no kernel"
            yield kernel, config.dropout > 0, "the kernels have no attention dropout"
        yield from self.triton_obstacles(device, widest)
        if not config.dropout:
            yield from self.cpp_obstacles(device, self.rules_in_cpp())
        compared = device == "cpu" and config.kernel in ("auto", "cpp", "sdpa")
        differs = compared and kernel_differs(config.rule, self.power)
        for kernel in ("cpp", "sdpa"):
            yield kernel, differs, f"rule {config.rule} has other weights in PyTorch"
        reason = f"it computes plain softmax only, not --attn={config.attn} --pos={config.pos}"
        yield "sdpa", not self.plain, reason

    def rules_in_cpp(self):
        """What `fused` asks of kernels.cpp: pairs (name of a rule, number of views in one call)."""
        name, rule = self.config.rule, self.rule
        if name not in kernels.KERNELS:
            return
        if rule.threshold_of:
            yield f"{rule.threshold_of}_sum", 1
        if rule.power and self.power is None:
            name = kernels.KERNELS[name].with_t
        row_sum = self.need_r and rule.sums_rows
        yield kernels.full_name(name, row_sum, self.power), 2 if self.one_call else 1


class Streaming(Attention):
    """Attention with a window and first keys, and with RoPE, as StreamingLLM has it (Xiao et al.
    2309.17453).

    StreamingLLM counts positions in a cache that holds only visible keys. Once tokens have been
    dropped, each query scores the first keys as if it were at the position `end`, and the recent
    keys as usual. So q and k become twice as wide: [q at i | q at end], and [k | 0] for recent keys
    or [0 | k] for first keys."""

    def projected(self, x, cache=None, rope=None, starts=None):
        i = self.positions(x, cache, starts)  # (R,), or (B, 1, R)
        total = x.shape[1] + (cache.tokens if cache else 0)
        q, k, v = super().projected(x, cache, rope, starts)
        end = self.mask.first + self.mask.window - 1
        if not self.mask.first or total <= end + 1:
            return q, k, v
        early = rotate(q, *self.rope((end - i).clamp(max=0)))  # from i to end, if i is beyond
        j = torch.arange(k.shape[2], device=k.device)
        if starts is not None:
            j = (j - starts)[:, None]
        is_first = (j < self.mask.first)[..., None]
        return torch.cat([q, early], -1), torch.cat([k * ~is_first, k * is_first], -1), v

    def featured(self, x):
        """As in every layer, but for both halves if `projected` has doubled the width."""
        return super().featured(x.unflatten(-1, (-1, self.width))).flatten(-2)
