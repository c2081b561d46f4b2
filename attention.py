"""How attention scores become attention weights: the rules, the axes around them, and the layer that puts both together.

For every attention here one head's output is  o_i = sum_j w_ij v_j  over the keys j that row i sees, and its weights come from a
rule  w_ij = f(s_ij; r_i, t_i)  of the score s_ij, a row statistic r_i of the scores (a log-sum-exp, say) and a row input t_i
(a threshold; entmax's is an exponent). A rule in plain PyTorch is the definition; kernels.py holds its Triton form under the same name.

Shapes: B batch, H score heads, T keys, R query rows (the last R of the T positions), D width of q and k, E width of v, C n_embd.
q (B, H, R, D)   k (B, H or fewer, T, D)   v (B, H or fewer, T, E)   scores, weights (B, H, R, T)   row vectors (B, H, R, 1)
A differential recipe has two score heads for every head of its output.
"""
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

# ------------------------------------------------------------------------------------------------- the rules: scores to weights
# Each takes a block of scores s (B, H, R, T), the mask `seen` of who sees whom (broadcastable to it), the row input t and perhaps a
# power, and returns the weights, zero where not seen. They work in the precision of s, which the callers keep at float32 or above.

UNSEEN = -1e30                                  # added to a score it leaves nothing of it, and it is finite, so no row can turn into nan


def softmax(s, seen, t=None):
    """w_ij = exp(s_ij) / sum_k exp(s_ik): every row must spend exactly 1, so a row with nothing to look for pays it into a sink.

    No learned scalars. The row statistic is the log-sum-exp. Source: Vaswani et al. 2017, eq. 1.
    """
    return torch.softmax(s + ~seen * UNSEEN, -1)


class LogSumExp(torch.autograd.Function):
    """r_i = log sum_j exp(s_ij), natural, of rows whose softmax w is known: r = s_ij - log w_ij for any j, best for the largest weight.

    This spares a second pass of exponentials, and so does the gradient, which is w itself.
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
    """w_ij = relu(p_ij - t_i), p = softmax(s), t_i = tau_h / n_i: a row may spend less than 1; an evenly spread one spends nothing.

    The sink is cut off: what would be parked there falls below the threshold. Exact zeros, row sum in [0, 1], not renormalised.
    Learned: tau (H,), 1 at the start, so that a uniform row is off. n_i counts from 1: row i of the paper sees i keys.
    Source: Lazy Attention, eq. 5 and table 2. The author's public code stores -tau and adds it, from -1, -0.5 or -1.01 on, and gives
    it a hundred times the learning rate (here --head_lr=100).
    """
    return F.relu(softmax(s, seen) - t).masked_fill(~seen, 0.0)          # tau may learn to be negative: then 0 - t is not


def elastic_scalars(layer):
    return {"tau": torch.full((layer.heads,), layer.args["tau_init"])}


def elastic_threshold(layer, n):
    """t_i = tau_h / n_i; without `per_length` tau_h alone, and with per_length=block tau_h / block_size on every row."""
    per_length = layer.args["per_length"]
    n = torch.full_like(n, layer.config.block_size) if per_length == "block" else n if per_length else torch.ones_like(n)
    return layer.tau[:, None, None] / n[:, None]


def entmax(s, seen, t=None, power=2.0):
    """w_ij = relu((alpha - 1) s_ij - r_i)^p, p = 1 / (alpha - 1), with the threshold r_i that makes the row sum to 1.

    Between softmax (alpha 1) and sparsemax (alpha 2), 1.5 by default. Keys far below the best get exact zeros, but the row still spends
    1: the sink becomes a choice of few keys, and remains. `power` is p; with --attn_args=alpha=learned it is None and p comes as t, with
    alpha_h = 1 + sigmoid(theta_h), theta (H,) 0 at the start, which is alpha 1.5.
    Source: Peters et al. 2019, eq. 7 and 9; alpha per head: Correia et al. 2019, who learn it as 1 + sigmoid, too.
    """
    p = t if power is None else power
    z = s / p + ~seen * UNSEEN
    z = z - z.detach().amax(-1, keepdim=True)                           # now r lies in [-1, 0]
    r = entmax_threshold(z.detach(), p)
    x = F.relu(z - r)
    # r solves sum_j x_ij^p = 1. One more step of Newton's method changes nothing but that autograd now sees how r depends on z and p
    r = r + ((x ** p).sum(-1, keepdim=True) - 1) / (p * (x > 0) * x ** (p - 1)).sum(-1, keepdim=True).detach()
    return F.relu(z - r) ** p


@torch.no_grad()
def entmax_threshold(z, p):
    """The r (.., 1) at which sum_j relu(z_j - r)^p = 1, for rows z whose maximum is 0: Newton's method on the p-norm, which is convex, so
    that r rises from -1, where one weight alone is 1, and never passes the solution."""
    r = torch.full_like(z[..., :1], -1.0)
    for _ in range(60):                         # five to ten do as a rule
        x = F.relu(z - r)
        total = (x ** p).sum(-1, keepdim=True)
        step = (total - total ** (1 - 1 / p)) / ((x > 0) * x ** (p - 1)).sum(-1, keepdim=True)
        r = r + step
        if step.max() < 2 * torch.finfo(z.dtype).eps:
            break
    return r


def entmax_scalars(layer):
    return {"theta": torch.zeros(layer.heads)} if layer.args["alpha"] == "learned" else {}


def entmax_row_input(layer, n):
    """p_h = 1 / (alpha_h - 1) where alpha is learned; None where it is a constant, and then the rule's power."""
    if layer.args["alpha"] == "learned":
        return (1 + torch.exp(-layer.theta.clamp(min=-4.6)))[:, None, None].expand(-1, len(n), 1)       # alpha of at least 1.01


def sparsemax(s, seen, t=None, power=1.0):
    """w_ij = relu(s_ij - r_i), with the threshold r_i that makes the row sum to 1: entmax at alpha 2, its sparsest form.

    No learned scalars. The sink stays, for the sum is still 1. Source: Martins & Astudillo 2016, eq. 1.
    """
    return entmax(s, seen, None, power)


def lssar(s, seen, t, power=15.0):
    """a_ij = softplus(s_ij) / sum_k softplus(s_ik),  w_ij = x_ij^p / sum_k x_ik^p with x_ij = relu(a_ij - t_i), t_i = o_i / n_i.

    What lies below an even row's share is cut, and the power sharpens what is left; rows still sum to 1 (only an even one is empty), so
    a sink may remain. o_i is 1, but 0 where a row sees up to three keys. No learned scalars: the recipe puts q and k to unit length and
    the score is log(d) log(n_i) q.k.
    Source: Gao & Spratling 2501.13428, eq. 4 and 5. x is divided by its row's maximum, for x^15 leaves float32's range, and the published
    1e-8 beside the last sum is left out, for it would empty nearly even rows; x within rounding of 0 is 0. Paper [2]'s table 1 says that
    LSSAR has no exact zeros: with the threshold it has.
    """
    phi = F.softplus(s, threshold=40).masked_fill(~seen, 0.0)
    a = phi / phi.sum(-1, keepdim=True).clamp(min=1e-30)                # where all scores are far below 0, phi itself is 0
    x = (a - t) * (seen & (a > t * (1 + 2 ** -18)))                     # what rounding alone lifts above t, the power would blow up
    x = x / x.detach().amax(-1, keepdim=True).clamp(min=1e-30)
    b = x ** power
    return b / b.sum(-1, keepdim=True).clamp(min=1.0)                   # the largest is 1, so only a row of zeros sums to less


def lssar_threshold(layer, n):
    """t_i = 1 / n_i, and 0 for up to three keys. The same on every head."""
    return torch.where(n > 3, 1 / n, 0.0)[:, None]


def softpick(s, seen, t=None):
    """w_ij = relu(e^s_ij - 1) / (sum_k |e^s_ik - 1| + eps): negative scores get exact zeros and only swell the denominator.

    So a row may spend less than 1, and nothing at all where every score is negative: no sink is needed. No learned scalars.
    Source: Zuhri et al. 2504.20966. Both sides are multiplied by e^-m, with m the row's maximum but at least 0: the
    authors' code lacks the "at least 0" and overflows where all scores are below -88. eps (1e-8) is added after that, as there; their
    kernel has 1e-6, and counts a score of exactly 0 as negative where autograd and this have slope 0.
    """
    s = s + ~seen * UNSEEN                      # nothing that is not seen may overflow
    m = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = (torch.exp(s - m) - torch.exp(-m)).masked_fill(~seen, 0.0)
    return F.relu(e) / (e.abs().sum(-1, keepdim=True) + 1e-8)


def relu(s, seen, t=None):
    """w_ij = relu(s_ij): no normaliser, exact zeros below 0, and nothing to spend, hence no sink.

    No learned scalars. Divided by the row's length (Wortsman et al. 2309.08586, there bidirectional and one length for all rows), or
    followed by an RMSNorm (ReLA, Zhang et al. 2021).
    """
    return F.relu(s).masked_fill(~seen, 0.0)


def tra(s, seen, t, power=2.0):
    """w_ij = relu(s_ij - t_i)^power, t_i = beta_h sqrt(2 log(n_i / kappa) / d): only scores that noise would hardly reach survive.

    Of unit q and k of width d that have nothing to do with each other, at beta 1 at most kappa keys a row pass on average, however long
    the context (at d 64 and n 1024 really 0.05, so that most rows start empty). Exact zeros, no sum to spend, no sink.
    Learned: beta (H,), 1 at the start, one for both views of TDA.
    Source: Threshold Differential Attention, eq. 1 and appendix B. The released kernel has kappa = 1, takes beta as a constant and lacks
    the norm on the output, which gives the few small weights a scale; here the logarithm is at least 0, for kappa above n.
    """
    return F.relu(s - t).masked_fill(~seen, 0.0) ** power


def tra_scalars(layer):
    return {"beta": torch.full((layer.heads,), layer.args["beta_init"])}


def tra_threshold(layer, n):
    """t_i = beta_h sqrt(2 log(n_i / kappa) / d), the logarithm at least 0."""
    return layer.beta[:, None, None] * torch.sqrt(2 * torch.log(n / layer.args["kappa"]).clamp(min=0) / layer.width)[:, None]


def sigmoid(s, seen, t):
    """w_ij = sigmoid(s_ij - t_i): each key is judged alone, so nothing has to be spent and there is no sink to spend it on.

    No learned scalars: t is log(block_size) (`length_bias`), so that a row's sum is near 1 at the start; without it, 0.
    Source: Ramapuram et al. 2409.04431 (b = -log n of the training length); without a bias: When Attention Sink Emerges, table 6.
    """
    return torch.sigmoid(s - t).masked_fill(~seen, 0.0)


def sigmoid_threshold(layer, n):
    """t_i = log(block_size), minus the published bias; the same on every row."""
    return torch.full_like(n, math.log(layer.config.block_size) if layer.args["length_bias"] else 0.0)[:, None]


def elu(s, seen, t=None):
    """w_ij = elu(s_ij) + 1, that is 1 + s_ij above 0 and e^s_ij below: positive, without a normaliser and without a sink.

    No learned scalars. Source: When Attention Sink Emerges, table 6.
    """
    return torch.where(s > 0, 1 + s, s.clamp(max=0).exp()).masked_fill(~seen, 0.0)


def identity(s, seen, t=None):
    """w_ij = s_ij: the score itself, of either sign. With a feature map on q and k this is linear attention; nothing need be spent.

    No learned scalars. Source: When Attention Sink Emerges, table 6; with elu + 1 on q and k: Katharopoulos et al. 2020.
    """
    return s.masked_fill(~seen, 0.0)


def row_sum(s, seen, w):
    """The statistic of rules that do not normalise: what a row spends."""
    return w.sum(-1, keepdim=True)


class Rule(NamedTuple):
    """What the layer must know of a rule beside its formula."""
    weights: Callable                           # s, seen, t -> w
    statistic: Callable | None = None           # s, seen, w -> r (B, H, R, 1), computed only where a recipe uses it
    args: dict[str, Any] = {}                   # constants that --attn_args may set, with their defaults
    scalars: Callable | None = None             # layer -> {name: tensor} of learned per-head scalars
    row_input: Callable | None = None           # layer, n (R,) -> t, broadcastable to (B, H, R, 1)
    power: Callable | None = None               # args -> the constant p of rules that have one


RULES = {
    "softmax": Rule(softmax, LogSumExp.apply),
    "elastic": Rule(elastic, None, {"tau_init": 1.0, "per_length": True, "learn_tau": True}, elastic_scalars, elastic_threshold),
    "entmax": Rule(entmax, None, {"alpha": 1.5}, entmax_scalars, entmax_row_input,
                   lambda args: None if args["alpha"] == "learned" else 1 / (args["alpha"] - 1)),
    "sparsemax": Rule(sparsemax),
    "lssar": Rule(lssar, None, {"power": 15.0}, None, lssar_threshold, lambda args: args["power"]),
    "softpick": Rule(softpick),
    "relu": Rule(relu, row_sum),
    "tra": Rule(tra, row_sum, {"beta_init": 1.0, "kappa": 1.0, "power": 2.0, "learn_beta": True}, tra_scalars, tra_threshold,
                lambda args: args["power"]),
    "sigmoid": Rule(sigmoid, row_sum, {"length_bias": True}, None, sigmoid_threshold),
    "elu": Rule(elu, row_sum),
    "identity": Rule(identity, row_sum),
}

# --------------------------------------------------------------------------------------------- the recipes: one line a variant
# A published variant is a rule and a choice on every axis around it. Axes left out here fall to the preset, then to the default.

AXES = {                                        # axis: its values, the default first
    "rule": tuple(RULES),
    "pos": ("rope", "none", "learned", "bias", "rope+bias"),
    "qk_norm": ("none", "l2", "rms"),
    "feature": ("none", "elu", "mlp"),
    "scale": ("sqrt_d", "one", "log_n", "asentmax"),
    "normalize": ("none", "sum", "length", "max1"),
    "sink": ("none", "one", "logit", "key", "key_value", "token"),
    "diff": ("none", "subtract", "v1", "v2"),
    "value_bias": ("off", "on"),
    "dex": ("off", "on"),
    "out_norm": ("none", "head", "all", "gated"),
    "gate": ("none", "head", "element"),
}
NUMBERS = {                                     # axes that are whole numbers, with their defaults, which are also the smallest they can be
    "window": 0,                                # keys that a row sees, itself included; 0: all
    "window_every": 1,                          # the layers with a window: 0, window_every, ...
    "first": 0,                                 # first keys that stay visible beyond the window
}
DEFAULTS = {axis: values[0] for axis, values in AXES.items()} | NUMBERS

AXIS_ARGS = {                                   # constants that some choices on an axis bring along, with their defaults
    ("scale", "log_n"): {"sigma_init": "auto", "learn_sigma": True},
    ("sink", "key_value"): {"value_norm": "learned", "value_even": False},
    ("diff", "subtract"): {"lambda_init": 0.5},
    ("dex", "on"): {"anneal": 0.5},
    ("out_norm", "head"): {"norm_eps": 1e-6},
    ("out_norm", "all"): {"norm_eps": 1e-6},
    ("out_norm", "gated"): {"norm_eps": 1e-6},
}

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
    "diff": {"rule": "softmax", "diff": "v1", "out_norm": "head", "args": {"norm_eps": 1e-5}},
    "diff2": {"rule": "softmax", "diff": "v2"},
    "dex": {"rule": "softmax", "dex": "on"},
    # a threshold below which weights are zero
    "elastic": {"rule": "elastic"},
    "lazy": {"rule": "elastic", "pos": "rope+bias"},
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
}


def recipe(name):
    """The axes of one recipe. Raises ValueError naming the recipes that exist."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown --attn={name}: choose from {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]


def check_axes(config):
    """Raise ValueError, with the reason, on a combination of axes that means nothing."""
    for wrong, reason in meaningless(config):
        if wrong:
            raise ValueError(reason)
    constants(config)


def meaningless(c):
    """Pairs of a condition on a config and what to say about it."""
    yield c.sink not in ("none", "token") and c.rule != "softmax", (
        f"--sink={c.sink} goes with rule softmax only: an extra key merges exactly by log-sum-exp, and rule {c.rule} has none")
    free = [name for name, rule in RULES.items() if rule.statistic is row_sum]
    yield c.normalize != "none" and c.rule not in free, (
        f"--normalize={c.normalize} goes with rules that have no normaliser of their own ({', '.join(free)}): "
        f"the rows of rule {c.rule} are normalised already")
    yield c.normalize == "sum" and c.rule == "identity" and c.feature != "elu", (
        "--normalize=sum divides by sums that weights of either sign may bring to 0: use --normalize=max1")
    yield c.sink == "token" and c.window and not c.first, "--sink=token is out of sight beyond a window: give --first=1 as well"
    yield c.diff == "v1" and c.n_kv_head % 2, (
        f"--diff=v1 pairs heads, of keys, too: n_head={c.n_head} and n_kv_head={c.n_kv_head} must both be even")
    yield c.first and not c.window, f"--first={c.first} keeps keys visible beyond a window: give --window as well"
    yield c.window_every > 1 and not c.window, f"--window_every={c.window_every} says which layers have a window: give --window as well"
    yield c.first and "rope" in c.pos and c.feature == "elu", (
        "--first with rope scores the first keys from places of their own, which elu + 1 would mix up: use another --feature or --pos")


def constants(config):
    """The constants of a config: --attn_args "key=value,key=value" over the recipe's over those of its rule and axes; unknown keys are errors."""
    allowed = dict(RULES[config.rule].args)
    for (axis, value), args in AXIS_ARGS.items():
        allowed |= args if getattr(config, axis) == value else {}
    args = allowed | {key: value for key, value in recipe(config.attn).get("args", {}).items() if key in allowed}
    for part in filter(None, config.attn_args.split(",")):
        key, _, value = part.partition("=")
        if key not in allowed:
            raise ValueError(f"unknown --attn_args key {key!r}: this recipe knows {', '.join(allowed) or 'none'}")
        args[key] = parse_value(key, value, allowed[key])
    if args.get("value_even") and args["value_norm"] == "learned":
        raise ValueError("--attn_args: value_even=1 lays out a fixed value of the extra key: give its value_norm=NUMBER as well")
    return args


WORDS = {"per_length": "block", "alpha": "learned", "value_norm": "learned", "sigma_init": "auto"}     # beside a switch or a number
BOUNDS = {"alpha": (1.01, 2.0), "power": (1.0, 64.0), "kappa": (1e-9, 1e9), "lambda_init": (1e-6, 1 - 1e-6), "norm_eps": (1e-12, 1.0),
          "anneal": (1e-6, 1.0)}


def parse_value(key, text, default):
    """One constant: a switch where its default is one, else a number, or the word that it may be."""
    if text == WORDS.get(key):
        return text
    word = f", or {WORDS[key]}" if key in WORDS else ""
    if isinstance(default, bool):
        switch = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in switch:
            raise ValueError(f"--attn_args {key}={text}: use 1 or 0{word}")
        return switch[text.lower()]
    low, high = BOUNDS.get(key, (-math.inf, math.inf))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and low <= value <= high):
        between = f" from {low:g} to {high:g}" if key in BOUNDS else ""
        raise ValueError(f"--attn_args: write {key}=NUMBER{between}{word}, not {text!r}")
    return value


# ---------------------------------------------------------------------------------- the block loop: attention in O(T) memory
# Rows are taken BLOCK at a time, so the scores in memory are (B, H, BLOCK, T) and never (B, H, T, T). The same loop trains on
# CPUs, decodes (a block of one row) and shows its weights to the probes.

BLOCK = 128


class View(NamedTuple):
    """How a layer looks at its keys, beside the rule."""
    scale: float = 1.0                          # what multiplies q.k
    window: int = 0                             # keys that a row sees, itself included (0: all),
    first: int = 0                              # beside so many first keys
    hide: int = -1                              # one key that is seen by itself only: for eval.py, never in training


def visible(i, j, view):
    """Who sees whom: row i sees key j (both positions, broadcast against each other).

    A window (Beltagy et al. 2020) takes the sink out of sight; so a model trained without one, which needs its sink, breaks, unless its
    first keys stay visible (StreamingLLM, Xiao et al. 2309.17453). GPT-OSS has a window of 128 in every second layer, 0 first.
    """
    seen = j <= i
    if view.window:
        seen = seen & ((i - j < view.window) | (j < view.first))
    return seen & ((j != view.hide) | (i == j)) if view.hide >= 0 else seen


def visible_count(i, view):
    """n_i, the number of keys that row i sees, as float32."""
    n = (i + 1).float()
    return n.clamp(max=view.window + view.first) if view.window else n


def grouped(a, b):
    """Matrix product a @ b (B, H, R, .) where b may have fewer heads: the rows of a group of heads share one head of b."""
    B, H, R, _ = a.shape
    with torch.autocast(a.device.type, enabled=False):                  # a and b have the precision they should have
        return (a.reshape(B, b.shape[1], -1, a.shape[-1]) @ b).view(B, H, R, b.shape[-1])


def wide(x):
    """Low precision up to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full(x):
    """The same, except under bfloat16 autocast on a CPU, whose products are much faster than its float32 ones."""
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return x.to(torch.get_autocast_dtype("cpu"))
    return wide(x)


def distance_bias(table, R, T):
    """table[h, i - j] for the last R of T rows against all T keys, (H, R, T); 0 at distances beyond the table's width.

    One vector per head holds every distance once, from T-1 down to -(R-1); each row is a window on it, one further than the next row's.
    """
    by_distance = F.pad(table, (0, T - table.shape[1]))                                 # (H, T), cut or filled up to distance T-1
    return F.pad(by_distance.flip(-1), (0, R - 1)).unfold(-1, T, 1).flip(-2)


def block_weights(rule, view, q, k, t, table, i, need_r=False):
    """Weights (B, H, R, keys) and statistic of the rows at positions i (R,), for as many keys as end at the last of them.

    Products may be low precision, all after them is not.
    """
    j = torch.arange(k.shape[2], device=k.device) + (i[-1] + 1 - k.shape[2])
    seen = visible(i[:, None], j, view)
    s = wide(grouped(q, k.mT))                  # (B, H, R, keys)
    if table is not None:
        s = s + distance_bias(table, *s.shape[2:])
    w = rule.weights(s, seen, t)
    return w, rule.statistic(s, seen, w) if need_r else None


def block_output(rule, view, need_r, dropout, q, k, v, t, table, i):
    """Output (B, H, R, E) of one block of rows, and its statistic if that is needed."""
    w, r = block_weights(rule, view, q, k, t, table, i, need_r)
    if dropout:
        w = F.dropout(w, dropout)
    o = grouped(w.to(v.dtype), v)
    return (o, r) if need_r else (o,)


def row_blocks(R, T, device):
    """The last R of T rows, BLOCK at a time: yields which of the R they are (a slice) and their positions among the T."""
    for start in range(0, R, BLOCK):
        rows = slice(start, min(start + BLOCK, R))
        yield rows, torch.arange(T - R + rows.start, T - R + rows.stop, device=device)


def keys_of(rows, R, T, view):
    """The keys that some of these rows may see: up to the last row's position, and no farther back than the first row's window reaches."""
    start = 0 if view.first or not view.window else max(0, T - R + rows.start + 1 - view.window)
    return slice(start, T - R + rows.stop)


def cut(view, q, k, v, t, table, rows):
    """What one block needs of everything: its rows, and the keys they see. Slices, so they can be added to in place."""
    keys = keys_of(rows, q.shape[2], k.shape[2], view)
    return q[:, :, rows], k[:, :, keys], v[:, :, keys], None if t is None else t[..., rows, :], table


def run_blocks(run, view, q, k, v, t, table):
    """All blocks one after another, kept for the backward pass as autograd does."""
    blocks = [run(*cut(view, q, k, v, t, table, rows), i) for rows, i in row_blocks(q.shape[2], k.shape[2], q.device)]
    return tuple(torch.cat(parts, 2) for parts in zip(*blocks, strict=True))


class Recomputed(torch.autograd.Function):
    """run_blocks whose backward pass computes each block again, so that none is kept: memory stays O(T x BLOCK).

    torch.utils.checkpoint around each block would do, but slower: each block's gradient of k and v would be a full one, mostly zeros.
    """
    @staticmethod
    def forward(ctx, run, view, *inputs):
        ctx.run, ctx.view, ctx.rng, ctx.device_rng = run, view, torch.get_rng_state(), get_device_states(*inputs)
        ctx.save_for_backward(*inputs)
        return run_blocks(run, view, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *arriving):
        inputs = ctx.saved_tensors
        sums = [None if x is None else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        with torch.random.fork_rng(devices=ctx.device_rng[0]):
            torch.set_rng_state(ctx.rng)        # dropout falls as it did
            set_device_states(*ctx.device_rng)
            for rows, i in row_blocks(inputs[0].shape[2], inputs[1].shape[2], inputs[0].device):
                with torch.enable_grad():
                    parts = [None if x is None else x.detach().requires_grad_() for x in cut(ctx.view, *inputs, rows)]
                    outputs = ctx.run(*parts, i)
                given = [part for part in parts if part is not None]
                # of this block alone; then added to where its rows and keys lie in the whole
                grads = torch.autograd.grad(outputs, given, [gradient[:, :, rows] for gradient in arriving])
                for total, gradient in zip((x for x in cut(ctx.view, *sums, rows) if x is not None), grads, strict=True):
                    total += gradient
        return None, None, *(None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True))


def block_loop(rule, q, k, v, t, view, table=None, need_r=False, dropout=0.0):
    """Attention of all rows, block by block: output (B, H, R, E) and, if asked for, the row statistic (B, H, R, 1), else None.

    table (H, W) is added to the score at distance i - j < W. Up to two blocks are kept for the backward pass; more are computed again.
    """
    loop = Recomputed.apply if torch.is_grad_enabled() and q.shape[2] > 2 * BLOCK else run_blocks
    o, *r = loop(partial(block_output, rule, view, need_r, dropout), view, full(q) * view.scale, full(k), full(v), t, table)
    return o, r[0] if need_r else None


# ------------------------------------------------------------------------------------------- before the scores: queries and keys

def rotate(x, base, positions):
    """RoPE (Su et al. 2021): turn pairs of channels (x_c, x_{c + D/2}) of x (B, H, T, D) by position * base^(-2c/D); positions (T,).

    Half-split pairing, as in GPT-NeoX and LLaMA. An odd last channel stays as it is.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1).to(x.dtype)


def normed(x, how, width):
    """x (.., width) with unit length (l2) or unit mean square (rms). No weights, so it makes no difference whether RoPE comes before."""
    if how == "none":
        return x
    parts = wide(x).unflatten(-1, (-1, width))  # one, or two where the first keys of a window have places of their own
    parts = F.normalize(parts, dim=-1, eps=1e-6) if how == "l2" else F.rms_norm(parts, (width,), eps=1e-6)
    return parts.flatten(-2).to(x.dtype)


def feature_map(width):
    """The MLP kernel's map of queries and keys, W2 relu(W1 x), shared by all heads of a layer. When Attention Sink Emerges, table 6,
    printed as mlp(q, mlp(k)); the released code has mlp(q) mlp(k)."""
    layers = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
    for layer in (layers[0], layers[2]):
        layer.weight.init_std = math.sqrt(2 / (5 * width))
    return layers


def ssmax_scale(layer, n):
    """SSMax (Nakanishi 2501.19399): the score times sigma_h log n_i, so that long rows are as sharp as short ones, their sinks too.

    Learned: sigma (H,), at first 1 / mean(log n) of a training context (0.168 for 1024), or --attn_args=sigma_init=. The asentmax
    repository's version has log(n + 1) and N(1, 0.01). For unit q and k (LSSAR, which fixes it) sigma is sqrt(d) log(d).
    """
    return layer.sigma[:, None, None] * n.log()[:, None]


def ssmax_scalars(layer):
    config, width = layer.config, layer.width
    mean_log = (torch.arange(config.block_size) + 1.0).log().mean().item()
    sigma = layer.args["sigma_init"]
    if sigma == "auto":
        sigma = math.sqrt(width) * math.log(width) if config.qk_norm == "l2" else 1 / max(mean_log, 0.1)
    return {"sigma": torch.full((layer.shapes["q"][0],), sigma)}


def asentmax_scale(layer, n):
    """ASEntmax: the score times 1 + beta_h log(n_i + 1)^gamma_h, which the head may learn to let grow, or shrink, with the length.

    Learned: scale_beta (H,), at first evenly spread over the heads from 0.1 to 1 (the released code draws it there), and scale_gamma (H,),
    at first 0, so that length comes in as it learns (there N(0, 0.1)). Source: the asentmax repository, sparse_gemma.py.
    """
    return 1 + layer.scale_beta[:, None, None] * (n + 1).log()[:, None] ** layer.scale_gamma[:, None, None]


def asentmax_scalars(layer):
    heads = layer.shapes["q"][0]
    return {"scale_beta": torch.linspace(0.1, 1.0, heads) if heads > 1 else torch.full((1,), 0.55), "scale_gamma": torch.zeros(heads)}


SCALES = {"log_n": (ssmax_scale, ssmax_scalars), "asentmax": (asentmax_scale, asentmax_scalars)}

# ----------------------------------------------------------------------------------------------- after the rule: what a row keeps

NORMALIZERS = {                                 # r (B, H, R, 1) the row sums, n (R, 1) the lengths -> what to divide a row by
    "sum": lambda r, n: r + 1e-8,
    "length": lambda r, n: n,
    "max1": lambda r, n: r.abs().clamp(min=1.0),                        # for weights of either sign, as in When Attention Sink Emerges
}


def lambda_at_depth(layer):
    """Differential Transformer's lambda_init, for layers counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


# ------------------------------------------------------------------------------------------------------------------- the layer

PLAIN = {"rule": ("softmax",), "diff": ("none",), "window": (0,), "sink": ("none", "token"), "pos": ("rope", "none", "learned")}


def obstacles(c, device):
    """Triples of a kernel, a condition on a config and a device under which it cannot be, and the reason."""
    doubled = 2 if c.diff == "v1" or c.first and "rope" in c.pos else 1                                  # the width of values, or of q and k
    here = kernels.AVAILABLE and (device == "cuda" or kernels.INTERPRETED)
    yield "triton", c.rule not in kernels.RULES, f"rule {c.rule} has no kernel"
    yield "triton", c.dropout > 0, "the kernels have no attention dropout"
    yield "triton", doubled * c.n_embd // c.n_head > 256, "its heads are wider than 256"
    yield "triton", not here, "it needs triton and a CUDA GPU"
    yield "triton", c.kernel == "auto" and device != "cuda", "the interpreter is for tests"
    plain = all(getattr(c, axis) in values for axis, values in PLAIN.items())
    yield "sdpa", not plain, f"it computes plain softmax only, not --attn={c.attn} --pos={c.pos}"


def choose_kernel(config, device):
    """Which code computes a recipe on a device ("cuda", "cpu", ...): "triton", "sdpa" (torch's own fused softmax) or "torch" (the block loop).

    auto is Triton on CUDA where the rule has a kernel, elsewhere sdpa for what is plain softmax. Raises ValueError where an explicit
    --kernel cannot be.
    """
    cannot = {}
    for kernel, holds, reason in obstacles(config, device):
        if holds:
            cannot.setdefault(kernel, reason)
    if config.kernel == "auto":
        return next(kernel for kernel in ("triton", "sdpa", "torch") if kernel not in cannot)
    if config.kernel in cannot:
        raise ValueError(f"--kernel={config.kernel}: {cannot[config.kernel]}; use auto or torch")
    return config.kernel


class Attention(nn.Module):
    """One attention layer, built from the axes of a model.GPTConfig.

    module(x) takes the layer's normed input (B, R, C) to (B, R, C). Between the projections stands
    module.attend(q, k, v, x), whose inputs have the shapes that module.shapes gives as {"q": (heads, width), ...}.
    A differential recipe has two *score heads* for each head of its output: view a is 0::2 of them, view b 1::2.
    """
    causal = True                               # no row depends on later positions, in values and in gradients
    cached = True                               # can be decoded step by step
    hide = -1                                   # a key that eval.py hides from later rows to see what it is worth
    skip = True                                 # kernels skip what zeros make zero; eval.py turns it off to see what that is worth

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer, self.args = config, layer, constants(config)
        self.ahead = int(config.sink == "token")                        # how many of the keys come before the sequence
        self.rule, self.power = RULES[config.rule], None
        if self.rule.power:
            self.power = self.rule.power(self.args)
            self.rule = self.rule._replace(weights=partial(self.rule.weights, power=self.power))
        # the projections
        self.width = config.n_embd // config.n_head                     # of queries and keys
        self.shapes, self.heads = self.plan()
        value_width = self.shapes["v"][1]
        self.c_attn = nn.Linear(config.n_embd, sum(h * w for h, w in self.shapes.values()), bias=config.bias)
        self.c_proj = nn.Linear(self.heads * value_width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        # who sees whom, and how scores are scaled
        windowed = layer % config.window_every == 0
        self.scale = 1.0 if config.scale == "one" else self.width ** -0.5
        self.window, self.first = (config.window, config.first) if windowed else (0, 0)
        # what the rule learns, and what each axis does
        for name, value in (self.rule.scalars(self) if self.rule.scalars else {}).items():
            self.learn(name, value)
        self.add_axes(value_width)

    def plan(self):
        """Heads and width of q, k and v, and the heads of the output. Views come in pairs of adjacent heads; of keys, too, where each view has
        its own. (With fewer key heads, unilm's code shares one key head between both views of a head.)"""
        H, K, D = self.config.n_head, self.config.n_kv_head, self.width
        q, k, v = {"none": ((H, D), (K, D), (K, D)),
                   "subtract": ((2 * H, D), (2 * K, D), (K, D)),        # two views of the same values
                   "v1": ((H, D), (K, D), (K // 2, 2 * D)),             # half the heads, each twice as wide: as many parameters as softmax
                   "v2": ((2 * H, D), (K, D), (K, D))}[self.config.diff]     # two queries look at the same keys
        return {"q": q, "k": k, "v": v}, H // 2 if self.config.diff == "v1" else H

    def learn(self, name, value, std=None):
        """A parameter of this layer, or a buffer if --attn_args says learn_<name>=0. std: drawn from N(0, std) by GPT.init_weights."""
        if std is not None:
            value = torch.randn(value) * std    # a shape
        if not self.args.get(f"learn_{name}", True):
            return self.register_buffer(name, value)
        self.register_parameter(name, nn.Parameter(value))
        getattr(self, name).init_std = std

    def add_axes(self, E):
        """What the choices on each axis learn. E: width of the values."""
        c, heads, (score_heads, D), key_heads = self.config, self.heads, self.shapes["q"], self.shapes["k"][0]
        if "bias" in c.pos:                     # Lazy Attention, section 4.1, with its minus inside: score + table[h, i - j]
            self.learn("table", torch.zeros(score_heads, c.bias_range))
        if c.feature == "mlp":
            self.feature = feature_map(D)
        for name, value in SCALES[c.scale][1](self).items() if c.scale in SCALES else ():
            self.learn(name, value)
        if c.sink == "logit":                   # GPT-OSS: score of an extra key without a value
            self.learn("sink_logit", torch.zeros(score_heads))
        if c.sink in ("key", "key_value"):      # When Attention Sink Emerges, table 4: an extra key, not rotated
            self.learn("sink_key", (key_heads, D), std=0.02)
        if c.sink == "key_value" and self.args["value_norm"] == "learned":
            self.learn("sink_value", (self.shapes["v"][0], E), std=0.02)
        elif c.sink == "key_value":             # its table 5: a fixed value, along the first axis or along all of them
            value = torch.full((E,), E ** -0.5) if self.args["value_even"] else torch.eye(E)[0]
            self.register_buffer("sink_value", (self.args["value_norm"] * value).repeat(self.shapes["v"][0], 1))
        if c.diff == "subtract":                # Threshold Differential Attention: lambda in (0, 1), one per head
            odds = self.args["lambda_init"] / (1 - self.args["lambda_init"])
            self.learn("lambda_logit", torch.full((heads,), math.log(odds)))
        if c.diff == "v1":                      # Differential Transformer, eq. 3: one lambda per layer, from four vectors
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                self.learn(name, (D,), std=0.1)
        if c.diff == "v2":                      # its second version: a lambda per head and token, from the layer's input
            self.lambda_proj = nn.Linear(c.n_embd, heads, bias=False)
        if c.value_bias == "on":                # When Attention Sink Emerges, table 4: V biases
            self.learn("value_bias", (heads, E), std=0.02)
        if c.dex == "on":                       # Kong et al. 2505.16333
            self.dex_proj = nn.Linear(E, E, bias=False)
            nn.init.zeros_(self.dex_proj.weight)
            self.dex_proj.weight.init_std = 0.0
            self.learn("dex_lambda", torch.zeros(()))
            self.register_buffer("progress", torch.zeros(()))           # how much of the training is over, set by the training loop
        if c.out_norm != "none":
            self.out_norm = nn.RMSNorm(E if c.out_norm == "head" else heads * E, eps=self.args["norm_eps"])
        if c.out_norm == "gated":               # ReLA's second form
            self.learn("norm_gate", (heads * E,), std=0.02)
        if c.gate != "none":                    # Qiu et al. 2505.06708, at the output of each head
            self.gate = nn.Linear(c.n_embd, heads * (E if c.gate == "element" else 1), bias=c.bias)

    def forward(self, x, past=None):
        """x (B, R, C), the layer's normed input. past: a dict that keeps the keys and values of earlier calls."""
        sizes = [heads * width for heads, width in self.shapes.values()]
        q, k, v = (split_heads(p, *shape) for p, shape in zip(self.c_attn(x).split(sizes, -1), self.shapes.values(), strict=True))
        if past is not None:                    # keys are kept unrotated: where a window forgets some, the others' places are known below
            k, v = (torch.cat([past[name], new], 2) if name in past else new for name, new in (("k", k), ("v", v)))
            past.update(k=self.still_seen(k), v=self.still_seen(v), tokens=past.get("tokens", 0) + x.shape[1])
        if "rope" in self.config.pos:
            q, k = self.rotated(q, k, 0 if past is None else past["tokens"] - k.shape[2])
        y = self.attend(q, k, v, x, getattr(self, "table", None))       # (B, H, R, E)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    def still_seen(self, x):
        """Of cached keys or values (B, H, T, .), those that the next token will see: the first keys and the window, less its own."""
        recent = self.window - 1
        if not self.window or x.shape[2] <= self.first + recent:
            return x
        if self.first and "bias" in self.config.pos:                    # a distance bias would notice what is missing in between
            return x
        return torch.cat([x[:, :, :self.first], x[:, :, x.shape[2] - recent:]], 2)

    def rotated(self, q, k, gone=0):
        """RoPE for the last R of T rows, and all keys. `gone` tokens between the first keys and the others have left the cache.

        StreamingLLM counts places in a cache that holds only what is seen: beyond the window, a row is always `end` places behind the
        start, and scores the first keys from there. For that q and k become twice as wide, [q at i | q at end] against [k | 0] for recent
        keys and [0 | k] for the first ones.
        """
        base, j = self.config.rope_base, torch.arange(k.shape[2], device=k.device)
        j = j + gone * (j >= self.first)
        i, end = j[k.shape[2] - q.shape[2]:], self.first + self.window - 1
        turned, k = rotate(q, base, i), rotate(k, base, j)
        if not self.first or gone + k.shape[2] <= end + 1:
            return turned, k
        early = (j < self.first)[:, None]
        return torch.cat([turned, rotate(q, base, i.clamp(max=end))], -1), torch.cat([k * ~early, k * early], -1)

    def attend(self, q, k, v, x, table=None):
        """From rotated queries and keys, values and the layer's input to each head's output (B, H, R, E)."""
        dtype = v.dtype
        q, k, t, n = self.prepare(q, k)
        mix = None if self.config.diff == "none" else self.subtracted_share(x)
        o, r = self.look(q, k, v, t, table, mix)
        o = self.kept(o, q, r, n)
        if o.shape[1] > self.heads:             # no kernel has done it yet
            o = wide(o[:, 0::2]) - mix * wide(o[:, 1::2])
        o = self.corrected(o)
        return self.gated(self.output_norm(o), x).to(dtype)

    # ------------------------------------------------------------------ before the rule

    def prepare(self, q, k):
        """Queries and keys as the scores want them (but for the constant scale), the rule's t, broadcastable to (B, score heads, R, 1), or
        None, and n (R,), the number of keys that each row sees."""
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        n = visible_count(i, self.view).to(wide(q).dtype)
        q, k = self.featured(q), self.featured(k)
        if self.config.diff in ("subtract", "v1"):
            k = self.of_score_heads(k, 1)
        if self.config.scale in SCALES:
            q = (q * SCALES[self.config.scale][0](self, n)).to(q.dtype)
        t = self.rule.row_input(self, n) if self.rule.row_input else None
        if t is not None and t.dim() == 3 and self.config.diff != "none":
            t = t.repeat_interleave(2, 0)       # both views have their head's
        return q, k, t, n

    def of_score_heads(self, x, axis):
        """What belongs to key heads, along `axis`, repeated for the score heads that share them: each view has its own of a pair."""
        shared = self.shapes["q"][0] // x.shape[axis]
        if shared == 1:
            return x
        if self.config.diff not in ("subtract", "v1"):
            return x.repeat_interleave(shared, axis)
        return x.unflatten(axis, (-1, 2)).repeat_interleave(shared, axis).flatten(axis, axis + 1)

    def featured(self, x):
        """Queries or keys, normalised and through the feature map."""
        x = normed(x, self.config.qk_norm, self.width)
        if self.config.feature == "elu":        # linear attention's: positive features
            return F.elu(x) + 1
        if self.config.feature == "mlp":
            return self.feature(x.unflatten(-1, (-1, self.width)).to(self.feature[0].weight.dtype)).flatten(-2).to(x.dtype)
        return x

    @property
    def view(self):
        return View(self.scale, self.window, self.first, self.hide)

    def look(self, q, k, v, t, table, mix):
        """The rule alone, by whichever code computes it here: output (B, score heads, R, E), and the statistic where it is needed. A kernel
        may also have subtracted `mix` times the second view: then the output is (B, H, R, E)."""
        kernel, dropout = choose_kernel(self.config, q.device.type), self.config.dropout if self.training else 0.0
        if kernel == "triton" and q.shape[2] == k.shape[2] and self.hide < 0:
            return self.fused(q, k, v, t, table, mix)
        if kernel == "sdpa" and table is None and self.hide < 0:
            return plain_softmax(q, k, v, self.scale, dropout), None
        return block_loop(self.rule, q, k, v, t, self.view, table, self.need_r, dropout)

    def fused(self, q, k, v, t, table, mix):
        """The rule by its Triton kernel; of two views both in one pass if no statistic comes between weights and output."""
        call = partial(kernels.attend, q=q, k=k, v=v, table=table, scale=self.scale, window=self.window, first=self.first, skip=self.skip)
        t = None if t is None else t.squeeze(-1)
        if self.config.rule == "lssar":         # two calls: the first one's row sum makes the second one's threshold
            t = t * call("softplus", row_sum=True)[1]
        if mix is not None and self.rule.statistic is row_sum and not self.need_r:
            return call(self.config.rule, t=t, power=self.power, mix=mix.squeeze(-1) if mix.dim() else mix)
        o, r = call(self.config.rule, t=t, power=self.power, row_sum=self.need_r and self.rule.statistic is row_sum)
        return o, None if r is None else r[..., None]

    # ------------------------------------------------------------------- after the rule

    @property
    def has_extra_key(self):
        return self.config.sink not in ("none", "token")

    @property
    def need_r(self):
        """Does what comes after the rule need its statistic?"""
        return self.has_extra_key or self.config.normalize in ("sum", "max1")

    def share(self, q, r, n):
        """What a row's real weights are multiplied with, (B, score heads, R, 1), or None if that is 1. r is the rule's statistic.

        An extra key of score c leaves them e^r / (e^r + e^c): a sink outside the sequence is softmax followed by a gate,
        o_i sigmoid(r_i - c), and the first token need not be one (The Attention Sink as Native MoE, eq. 2 to 4). c is 0 (softmax1, Miller
        2023); learned, sink_logit (H,) at first 0 (GPT-OSS, which prints no initial value; transformers has N(0, 0.02)); or q_i . k* / sqrt(d),
        as for every key, with sink_key N(0, 0.02) for each key head and not rotated (When Attention Sink Emerges, table 4, whose code decays
        it and v*; here nothing outside the linear layers decays).
        """
        if self.config.normalize != "none":
            return 1 / NORMALIZERS[self.config.normalize](r, n[:, None])
        if self.config.sink == "one":
            return torch.sigmoid(r)
        if self.config.sink == "logit":
            return torch.sigmoid(r - self.sink_logit[:, None, None])
        if self.has_extra_key:
            key = self.of_score_heads(self.featured(self.sink_key), 0)
            return torch.sigmoid(r - self.scale * (wide(q[..., :self.width]) * key[:, None]).sum(-1, keepdim=True))

    def kept(self, o, q, r, n):
        """The output with the row normaliser or the extra key in it, whose value has what the share leaves."""
        share = self.share(q, r, n)
        if share is None:
            return o
        o = wide(o)
        if self.config.sink == "key_value":
            return o * share + (1 - share) * self.sink_value.repeat_interleave(o.shape[1] // self.sink_value.shape[0], 0)[:, None]
        return o * share

    def subtracted_share(self, x):
        """lambda, how much of the second view is subtracted: broadcastable to (B, H, R, 1). What both views park on a sink cancels.

        subtract: sigmoid(lambda_logit_h), at first 0.5, for the TDA paper prints no value (its code clamps lambda to [0, 1], where it gets
        no gradient). v1 (Ye et al. 2410.05258): exp(q1.k1) - exp(q2.k2) + lambda_init of four vectors (D,), N(0, 0.1), and the layer's depth,
        one per layer; paper GroupNorm, code RMSNorm with one weight for all heads, as here; transformers pairs heads h and h + H/2, and has
        no weight. v2 (unilm, Diff-Transformer-V2): sigmoid of a linear map of the layer's input, no norm.
        """
        if self.config.diff == "subtract":
            return torch.sigmoid(self.lambda_logit)[:, None, None]
        if self.config.diff == "v2":
            return torch.sigmoid(wide(self.lambda_proj(x))).transpose(1, 2)[..., None]
        ups, downs = (self.lambda_q1 * self.lambda_k1).sum(), (self.lambda_q2 * self.lambda_k2).sum()
        return ups.exp() - downs.exp() + lambda_at_depth(self.layer)

    def corrected(self, o):
        """o + v*, a learned constant N(0, 0.02) for each head (V biases, When Attention Sink Emerges, table 4: the sink remains); or
        o - lambda(t) o W, Dex's correction of every head, which may subtract what a sink's value adds (Kong et al. 2505.16333, no official code).

        lambda(t) = (1 - a) a lambda_init + a lambda_learned, a = min(1, progress / anneal): W and lambda_learned start at 0, where neither
        would ever move, so the term that fades in and out is what starts them. The paper corrects some heads of a trained model; here all.
        """
        if self.config.value_bias == "on":
            o = o + self.value_bias[:, None]
        if self.config.dex == "on":
            a = (self.progress / self.args["anneal"]).clamp(max=1.0)
            o = o - ((1 - a) * a * lambda_at_depth(self.layer) + a * self.dex_lambda) * self.dex_proj(o.to(self.dex_proj.weight.dtype))
        return o

    def output_norm(self, o):
        """RMSNorm of each head's output with one weight for all heads, or of all heads together, there perhaps times sigmoid(g o) of the
        output before the norm, as ReLA has it (its code: eps 1e-8, under which an empty row's gradient is ten thousand times as large; the
        gate's g is N(0, 0.02) at first). Differential attention v1 then multiplies by 1 - lambda_init."""
        if self.config.out_norm == "head":
            o = self.out_norm(o.to(self.out_norm.weight.dtype))
        elif self.config.out_norm != "none":
            together = o.transpose(1, 2).flatten(2).to(self.out_norm.weight.dtype)      # (B, R, H E)
            y = self.out_norm(together)
            y = y * torch.sigmoid(self.norm_gate * together) if self.config.out_norm == "gated" else y
            o = split_heads(y, *o.shape[1::2])
        return o * (1 - lambda_at_depth(self.layer)) if self.config.diff == "v1" else o

    def gated(self, o, x):
        """o times the sigmoid of a linear map of the layer's input: one gate per head, or one per element of its output (Qiu et al. 2505.06708).
        A closed gate spends nothing, so no sink is needed; gates start at 1/2."""
        if self.config.gate == "none":
            return o
        return o * torch.sigmoid(split_heads(self.gate(x), o.shape[1], -1).to(o.dtype))

    # ------------------------------------------------------------------- for looking at

    def weights_of(self, q, k, x, table=None):
        """What multiplies the values: (B, H, R, T), or (B, H, R, 1 + T) with an extra key's column first; of a differential recipe, the
        difference. Gates, norms and corrections of the output are no part of it. Costs O(R T) memory, which weight_blocks does not."""
        return torch.cat(list(self.weight_blocks(q, k, x, table)), 2)

    def views_of(self, q, k, x, table=None):
        """The weights of the two views of a differential recipe, before the second is multiplied by lambda and subtracted."""
        w = torch.cat(list(self.score_blocks(q, k, table)), 2)
        return w[:, 0::2], w[:, 1::2]

    def weight_blocks(self, q, k, x, table=None):
        """weights_of one block of rows at a time: yields (B, H, BLOCK or fewer, T or 1 + T)."""
        blocks = self.score_blocks(q, k, table)
        if self.config.diff == "none":
            yield from blocks
        else:
            for (rows, _), w in zip(row_blocks(q.shape[2], k.shape[2], q.device), blocks, strict=True):
                yield w[:, 0::2] - self.subtracted_share(x[:, rows]) * w[:, 1::2]

    def score_blocks(self, q, k, table):
        """The weights of every score head, block by block, as the block loop makes them, whichever code computes the output."""
        q, k, t, n = self.prepare(q, k)
        R, T, look = q.shape[2], k.shape[2], self.view
        for rows, i in row_blocks(R, T, q.device):
            qb, kb, _, tb, _ = cut(look, q, k, k, t, None, rows)
            w, r = block_weights(self.rule, look, full(qb) * self.scale, full(kb), tb, table, i, self.need_r)
            keys, share = keys_of(rows, R, T, look), self.share(qb, r, n[rows])
            w = F.pad(w if share is None else w * share, (keys.start, T - keys.stop))
            yield torch.cat([1 - share, w], -1) if self.has_extra_key else w


def split_heads(x, heads, width):
    """(B, R, heads * width) to (B, heads, R, width)."""
    return x.unflatten(-1, (heads, width)).transpose(1, 2)


def plain_softmax(q, k, v, scale, dropout):
    """Softmax attention by torch's own fused kernel."""
    R, T = q.shape[2], k.shape[2]
    mask = visible(torch.arange(T - R, T, device=q.device)[:, None], torch.arange(T, device=q.device), View()) if 1 < R < T else None
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=R == T and R > 1, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
