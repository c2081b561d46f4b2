"""How attention scores become attention weights: the rules, the axes around them, and the layer that puts both together.

For every attention here one head's output is  o_i = sum_j w_ij v_j  over the keys j that row i sees, and its weights come from a
rule  w_ij = f(s_ij; r_i, t_i)  of the score s_ij, a row statistic r_i of the scores (a log-sum-exp, say) and a row input t_i
(a threshold, say). A rule in plain PyTorch is the definition; kernels.py holds its Triton form under the same name.

Shapes: B batch, H score heads, T keys, R query rows (the last R of the T positions), D width of q and k, E width of v, C n_embd.
q (B, H, R, D)   k (B, H or fewer, T, D)   v (B, H or fewer, T, E)   scores, weights (B, H, R, T)   row vectors (B, H, R, 1)
"""
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import kernels

# ------------------------------------------------------------------------------------------------- the rules: scores to weights
# Each takes a block of scores s (B, H, R, T), the mask `seen` of who sees whom (broadcastable to it) and the row input t, and
# returns the weights, zero where not seen. They work in the precision of s, which the callers keep at float32 or above.

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
    Source: Lazy Attention, eq. 5 and table 2. The authors' public code stores -tau and adds it.
    """
    return F.relu(softmax(s, seen) - t).masked_fill(~seen, 0.0)          # tau may learn to be negative: then 0 - t is not


def elastic_scalars(config, args):
    return {"tau": torch.full((config.n_head,), args["tau_init"])}


def elastic_threshold(layer, n):
    """t_i = tau_h / n_i; without `per_length` tau_h alone, and with per_length=block tau_h / block_size on every row."""
    per_length = layer.args["per_length"]
    n = torch.full_like(n, layer.config.block_size) if per_length == "block" else n if per_length else torch.ones_like(n)
    return layer.tau[:, None, None] / n[:, None]


def sigmoid(s, seen, t):
    """w_ij = sigmoid(s_ij - t_i): each key is judged alone, so nothing has to be spent and there is no sink to spend it on.

    No learned scalars: t is log(block_size) (`length_bias`), so that a row's sum is near 1 at the start; without it, 0.
    Source: Ramapuram et al. 2409.04431 (b = -log n of the training length); without a bias: When Attention Sink Emerges, table 6.
    """
    return torch.sigmoid(s - t).masked_fill(~seen, 0.0)


def sigmoid_threshold(layer, n):
    """t_i = log(block_size), minus the published bias; the same on every row."""
    return torch.full_like(n, math.log(layer.config.block_size) if layer.args["length_bias"] else 0.0)[:, None]


class Rule(NamedTuple):
    """What the layer must know of a rule beside its formula."""
    weights: Callable                           # s, seen, t -> w
    statistic: Callable | None = None           # s, seen, w -> r (B, H, R, 1), computed only where a recipe uses it
    args: dict[str, Any] = {}                   # constants that --attn_args may set, with their defaults
    scalars: Callable | None = None             # config, args -> {name: tensor} of learned per-head scalars
    row_input: Callable | None = None           # layer, n (R,) -> t, broadcastable to (B, H, R, 1)


RULES = {
    "softmax": Rule(softmax, LogSumExp.apply),
    "elastic": Rule(elastic, None, {"tau_init": 1.0, "per_length": True, "learn_tau": True}, elastic_scalars, elastic_threshold),
    "sigmoid": Rule(sigmoid, None, {"length_bias": True}, None, sigmoid_threshold),
}

# --------------------------------------------------------------------------------------------- the recipes: one line a variant
# A published variant is a rule and a choice on every axis around it. Axes left out here fall to the preset, then to the default.

AXES = {                                        # axis: its values, the default first
    "rule": tuple(RULES),
    "pos": ("rope", "none", "learned", "bias", "rope+bias"),
    "sink": ("none", "one", "logit"),
    "gate": ("none", "head", "element"),
}

ATTENTIONS = {
    "softmax": {"rule": "softmax"},
    # a sink outside the sequence: an extra key that holds no value
    "softmax1": {"rule": "softmax", "sink": "one"},
    "sink": {"rule": "softmax", "sink": "logit"},
    # or a gate on the output, which is what such a sink amounts to
    "gated": {"rule": "softmax", "gate": "head"},
    "gated_elementwise": {"rule": "softmax", "gate": "element"},
    # a threshold below which weights are zero
    "elastic": {"rule": "elastic"},
    "lazy": {"rule": "elastic", "pos": "rope+bias"},
    # no normaliser at all
    "sigmoid": {"rule": "sigmoid"},
    "sigmoid_raw": {"rule": "sigmoid", "args": {"length_bias": False}},
}


def recipe(name):
    """The axes of one recipe. Raises ValueError naming the recipes that exist."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown --attn={name}: choose from {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]


def check_axes(config):
    """Raise ValueError, with the reason, on a combination of axes that means nothing."""
    if config.sink != "none" and config.rule != "softmax":
        raise ValueError(f"--sink={config.sink} goes with rule softmax only: an extra key merges exactly by log-sum-exp, and rule {config.rule} "
                         "spends no fixed sum that such a key could take a share of")
    constants(config)


def constants(config):
    """The constants of a config's rule: --attn_args "key=value,key=value" over the recipe's over the rule's; unknown keys are errors."""
    allowed = RULES[config.rule].args
    args = allowed | {key: value for key, value in recipe(config.attn).get("args", {}).items() if key in allowed}
    for part in filter(None, config.attn_args.split(",")):
        key, _, value = part.partition("=")
        if key not in allowed:
            raise ValueError(f"unknown --attn_args key {key!r}: this recipe knows {', '.join(allowed) or 'none'}")
        args[key] = parse_value(key, value, allowed[key])
    return args


def parse_value(key, text, default):
    """One constant, in the type of its default: a switch also takes a word of its own (per_length=block)."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(default, bool):
        if text.lower() in words:
            return words[text.lower()]
        if (key, text) == ("per_length", "block"):
            return text
        raise ValueError(f"--attn_args {key}={text}: use 1 or 0" + (", or block" if key == "per_length" else ""))
    try:
        value = type(default)(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"--attn_args: write {key}=NUMBER, with a number like {default}, not {text!r}")
    return value


# ---------------------------------------------------------------------------------- the block loop: attention in O(T) memory
# Rows are taken BLOCK at a time, so the scores in memory are (B, H, BLOCK, T) and never (B, H, T, T). The same loop trains on
# CPUs, decodes (a block of one row) and shows its weights to the probes.

BLOCK = 128


class View(NamedTuple):
    """How a layer looks at its keys, beside the rule."""
    scale: float = 1.0                          # what multiplies q.k
    hide: int = 0                               # so many first keys are seen by themselves only: for eval.py, never in training


def visible(i, j, hide=0):
    """Who sees whom: row i sees key j (both positions, broadcast against each other)."""
    seen = j <= i
    return seen & ((j >= hide) | (i == j)) if hide else seen


def visible_count(i):
    """n_i, the number of keys that row i sees, as float32."""
    return (i + 1).float()


def grouped(a, b):
    """Matrix product a @ b (B, H, R, .) where b may have fewer heads: the rows of a group of heads share one head of b."""
    B, H, R, _ = a.shape
    with torch.autocast(a.device.type, enabled=False):                  # a and b have the precision they should have
        return (a.reshape(B, b.shape[1], -1, a.shape[-1]) @ b).view(B, H, R, b.shape[-1])


def full(x):
    """Low precision up to float32, except under bfloat16 autocast on a CPU, whose products are much faster than its float32 ones."""
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return x.to(torch.get_autocast_dtype("cpu"))
    return x.to(torch.promote_types(x.dtype, torch.float32))


def distance_bias(table, R, T):
    """table[h, i - j] for the last R of T rows against all T keys, (H, R, T); 0 at distances beyond the table's width.

    One vector per head holds every distance once, from T-1 down to -(R-1); each row is a window on it, one further than the next row's.
    """
    by_distance = F.pad(table, (0, T - table.shape[1]))                                 # (H, T), cut or filled up to distance T-1
    return F.pad(by_distance.flip(-1), (0, R - 1)).unfold(-1, T, 1).flip(-2)


def block_weights(rule, view, q, k, t, table, i, need_r=False):
    """Weights (B, H, R, T) and statistic of the rows at positions i (R,). Products may be low precision, all after them is not."""
    seen = visible(i[:, None], torch.arange(k.shape[2], device=k.device), view.hide)
    s = grouped(q, k.mT)                        # (B, H, R, T), in the precision of q and k
    s = s.to(torch.promote_types(s.dtype, torch.float32))
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


def cut(q, k, v, t, table, rows):
    """What one block needs of everything: its rows, and the keys up to its last position. Views, so they can be added to in place."""
    seen = k.shape[2] - q.shape[2] + rows.stop
    return q[:, :, rows], k[:, :, :seen], v[:, :, :seen], None if t is None else t[..., rows, :], table


def run_blocks(run, q, k, v, t, table):
    """All blocks one after another, kept for the backward pass as autograd does."""
    blocks = [run(*cut(q, k, v, t, table, rows), i) for rows, i in row_blocks(q.shape[2], k.shape[2], q.device)]
    return tuple(torch.cat(parts, 2) for parts in zip(*blocks, strict=True))


class Recomputed(torch.autograd.Function):
    """run_blocks whose backward pass computes each block again, so that none is kept: memory stays O(T x BLOCK).

    torch.utils.checkpoint around each block would do, but slower: each block's gradient of k and v would be a full one, mostly zeros.
    """
    @staticmethod
    def forward(ctx, run, *inputs):
        ctx.run, ctx.dice = run, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return run_blocks(run, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *arriving):
        inputs = ctx.saved_tensors
        sums = [None if x is None else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.dice)       # dropout falls as it did
            for rows, i in row_blocks(inputs[0].shape[2], inputs[1].shape[2], inputs[0].device):
                with torch.enable_grad():
                    parts = [None if x is None else x.detach().requires_grad_() for x in cut(*inputs, rows)]
                    outputs = ctx.run(*parts, i)
                given = [part for part in parts if part is not None]
                # of this block alone; then added to where its rows and keys lie in the whole
                grads = torch.autograd.grad(outputs, given, [gradient[:, :, rows] for gradient in arriving])
                for total, gradient in zip((x for x in cut(*sums, rows) if x is not None), grads, strict=True):
                    total += gradient
        return None, *(None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True))


def block_loop(rule, q, k, v, t, view, table=None, need_r=False, dropout=0.0):
    """Attention of all rows, block by block: output (B, H, R, E) and, if asked for, the row statistic (B, H, R, 1), else None.

    table (H, W) is added to the score at distance i - j < W. Up to two blocks are kept for the backward pass; more are computed again.
    """
    loop = Recomputed.apply if torch.is_grad_enabled() and q.shape[2] > 2 * BLOCK else run_blocks
    o, *r = loop(partial(block_output, rule, view, need_r, dropout), full(q) * view.scale, full(k), full(v), t, table)
    return o, r[0] if need_r else None


# ------------------------------------------------------------------------------------------------------------------- positions

def rotate(x, base, start=0):
    """RoPE (Su et al. 2021): turn pairs of channels (x_c, x_{c + D/2}) of x (B, H, T, D) by position * base^(-2c/D).

    Half-split pairing, as in GPT-NeoX and LLaMA. The first row is at position `start`; an odd last channel stays as it is.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------------- the layer

def choose_kernel(config, device):
    """Which code computes a recipe on a device ("cuda", "cpu", ...): "triton", "sdpa" (torch's own fused softmax) or "torch" (the block loop).

    auto is Triton on CUDA where the rule has a kernel, elsewhere sdpa for what is plain softmax. Raises ValueError where an explicit
    --kernel cannot be.
    """
    reasons = {
        "triton": {"rule {rule} has no kernel": config.rule not in kernels.RULES,
                   "the kernels have no attention dropout": config.dropout > 0,
                   "its heads are wider than 256": config.n_embd // config.n_head > 256,
                   "it needs triton and a CUDA GPU": not kernels.AVAILABLE or device != "cuda" and not kernels.INTERPRETED},
        "sdpa": {"it computes plain softmax only, not --attn={attn} --pos={pos}":
                 config.rule != "softmax" or config.sink != "none" or "bias" in config.pos},
        "torch": {}}
    cannot = {kernel: [why for why, holds in all_of_them.items() if holds] for kernel, all_of_them in reasons.items()}
    if config.kernel == "auto":
        return next(kernel for kernel, why in cannot.items() if not why and (kernel != "triton" or device == "cuda"))
    if cannot[config.kernel]:
        raise ValueError(f"--kernel={config.kernel}: {cannot[config.kernel][0].format(**vars(config))}; use auto or torch")
    return config.kernel


class Attention(nn.Module):
    """One attention layer, built from the axes of a model.GPTConfig.

    module(x) takes the layer's normed input (B, R, C) to (B, R, C). Between the projections stands
    module.attend(q, k, v, x), whose inputs have the shapes that module.shapes gives as {"q": (heads, width), ...}.
    """
    causal = True                               # no row depends on later positions, in values and in gradients
    cached = True                               # can be decoded step by step
    hide = 0                                    # first keys that eval.py hides to see what they are worth

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer, self.rule, self.args = config, layer, RULES[config.rule], constants(config)
        heads, width = config.n_head, config.n_embd // config.n_head
        self.shapes = {"q": (heads, width), "k": (config.n_kv_head, width), "v": (config.n_kv_head, width)}
        self.scale = width ** -0.5
        self.c_attn = nn.Linear(config.n_embd, sum(h * w for h, w in self.shapes.values()), bias=config.bias)
        self.c_proj = nn.Linear(heads * width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        for name, value in (self.rule.scalars(config, self.args) if self.rule.scalars else {}).items():
            learned = self.args.get(f"learn_{name}", True)
            self.register_parameter(name, nn.Parameter(value)) if learned else self.register_buffer(name, value)
        if "bias" in config.pos:                # Lazy Attention, section 4.1, with its minus inside: score + table[h, i - j]
            self.table = nn.Parameter(torch.zeros(heads, config.bias_range))
        if config.sink == "logit":              # GPT-OSS: score of an extra key without a value
            self.sink_logit = nn.Parameter(torch.zeros(heads))
        if config.gate != "none":               # Qiu et al. 2505.06708, at the output of each head
            self.gate = nn.Linear(config.n_embd, heads * (width if config.gate == "element" else 1), bias=config.bias)

    def forward(self, x, past=None):
        """x (B, R, C), the layer's normed input. past: a dict that keeps the keys and values of earlier calls."""
        sizes = [heads * width for heads, width in self.shapes.values()]
        q, k, v = (split_heads(p, *shape) for p, shape in zip(self.c_attn(x).split(sizes, -1), self.shapes.values(), strict=True))
        if past is not None:                    # keys are kept unrotated, and turned by their place in the cache
            k, v = (torch.cat([past[name], new], 2) if name in past else new for name, new in (("k", k), ("v", v)))
            past.update(k=k, v=v)
        if "rope" in self.config.pos:
            q, k = rotate(q, self.config.rope_base, k.shape[2] - q.shape[2]), rotate(k, self.config.rope_base)
        y = self.attend(q, k, v, x, getattr(self, "table", None))       # (B, H, R, E)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    def attend(self, q, k, v, x, table=None):
        """From rotated queries and keys, values and the layer's input to each head's output (B, H, R, E)."""
        o, r = self.look(q, k, v, table)
        if self.has_extra_key:
            o = o * self.kept(r)
        return self.gated(o, x).to(v.dtype)

    def look(self, q, k, v, table):
        """The rule alone, by whichever code computes it here: output (B, H, R, E), and the statistic where it is needed."""
        kernel, t = choose_kernel(self.config, q.device.type), self.row_input(q, k)
        whole, dropout = q.shape[2] == k.shape[2] and not self.hide, self.config.dropout if self.training else 0.0
        if kernel == "triton" and whole:
            o, r = kernels.attend(self.config.rule, q, k, v, None if t is None else t.squeeze(-1), table, scale=self.scale)
            return o, None if r is None else r[..., None]
        if kernel == "sdpa" and table is None and not self.hide:
            return plain_softmax(q, k, v, self.scale, dropout), None
        return block_loop(self.rule, q, k, v, t, View(self.scale, self.hide), table, self.has_extra_key, dropout)

    @property
    def has_extra_key(self):
        return self.config.sink != "none"

    def kept(self, r):
        """Share of its weight that a row keeps for the real keys beside an extra key of score c: e^r / (e^r + e^c), (B, H, R, 1).

        So a sink outside the sequence is softmax followed by a gate: o_i sigmoid(r_i - c). c is 0 (softmax1, Miller 2023) or learned
        per head (the sink logit of GPT-OSS); The Attention Sink as Native MoE, eq. 2 to 4, tells the story.
        """
        return torch.sigmoid(r if self.config.sink == "one" else r - self.sink_logit[:, None, None])

    def gated(self, o, x):
        """o times the sigmoid of a linear map of the layer's input: one gate per head, or one per element of its output."""
        if self.config.gate == "none":
            return o
        return o * torch.sigmoid(split_heads(self.gate(x), o.shape[1], -1).to(o.dtype))

    def weights_of(self, q, k, x, table=None):
        """What multiplies the values: (B, H, R, T), or (B, H, R, 1 + T) with an extra key's column first. A gate is no part of it.

        For looking at; costs O(R T) memory, which weight_blocks does not."""
        return torch.cat(list(self.weight_blocks(q, k, x, table)), 2)

    def weight_blocks(self, q, k, x, table=None):
        """The same, one block of rows at a time: yields (B, H, BLOCK or fewer, T or 1 + T)."""
        # the scores as the block loop makes them, whichever code computes the output
        q, k, t, T = full(q) * self.scale, full(k), self.row_input(q, k), k.shape[2]
        for rows, i in row_blocks(q.shape[2], T, q.device):
            qb, kb, _, tb, _ = cut(q, k, k, t, None, rows)
            w, r = block_weights(self.rule, View(self.scale, self.hide), qb, kb, tb, table, i, self.has_extra_key)
            w = F.pad(w, (0, T - kb.shape[2]))
            yield torch.cat([1 - self.kept(r), w * self.kept(r)], -1) if self.has_extra_key else w

    def row_input(self, q, k):
        """The rule's t, broadcastable to (B, H, R, 1), or None."""
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        return self.rule.row_input(self, visible_count(i)) if self.rule.row_input else None


def split_heads(x, heads, width):
    """(B, R, heads * width) to (B, heads, R, width)."""
    return x.unflatten(-1, (heads, width)).transpose(1, 2)


def plain_softmax(q, k, v, scale, dropout):
    """Softmax attention by torch's own fused kernel."""
    R, T = q.shape[2], k.shape[2]
    mask = visible(torch.arange(T - R, T, device=q.device)[:, None], torch.arange(T, device=q.device)) if 1 < R < T else None
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=R == T and R > 1, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
