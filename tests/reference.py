"""The definition of every recipe: attention as one dense matrix of weights, straight from the
papers.

Tests compare all other code with this file, in values and in gradients. It imports nothing from
that code. From a layer it takes the choices (config, args), the sizes of heads (shapes), the
projections, and parameters and buffers by name. Nothing here is fast, cuts anything into blocks, or
knows a derivative; autograd finds those. Not defined here: ALiBi's slopes (test_attention.py) and
RoPE's scalings (test_weights.py).

Read in this order: RULES, row_input (their thresholds), all_views, weights, postprocess, layer.

Shapes: B batch, H score heads, R query rows (the last R of T positions), T keys, D width of q and
k, E width of v. Scores s and weights w are (B, H, R, T), row vectors such as a threshold t are (..,
R, 1), `seen` is (R, T).
"""

import math

import torch
from torch.nn import functional as F

TINY = 1e-30  # a divisor of 0 becomes this


def distances(R, T, device=None):
    """i - j of the last R rows i and all keys j, (R, T)."""
    i = torch.arange(T - R, T, device=device)
    j = torch.arange(T, device=device)
    return i[:, None] - j


def visible(apart, window=0, first=0):
    """Row i sees key j if j <= i and, with a window (Beltagy et al. 2020), if i - j < window or j <
    first (StreamingLLM, Xiao et al. 2309.17453). apart: see `distances`."""
    causal = apart >= 0
    if not window:
        return causal
    j = torch.arange(apart.shape[1], device=apart.device)
    return causal & ((apart < window) | (j < first))


def bias(apart, table=None, tail=None, slope=None, more=None):
    """The bias that relative positions add to scores, (H, R, T): table[h, i - j] at distances below
    its width W, tail[h] beyond (without one: 0), and slope[h] (i - j) everywhere. more: another
    term, (B, H, R, T)."""
    b = torch.zeros(1, 1, 1, device=apart.device)
    if tail is not None:
        b = tail[:, None, None]
    if table is not None and table.shape[1]:
        W = table.shape[1]
        b = torch.where(apart < W, table[:, apart.clamp(0, W - 1)], b)
    if slope is not None:
        b = b + slope[:, None, None] * apart
    return b if more is None else b + more


# The rules: scores s, the mask `seen`, and perhaps a threshold t or a power, to weights. Masked
# scores are 0. Masked weights may be wrong: `weights_by_rule` sets them to 0.


def exponentials(s, seen, *_):
    """exp(s - m) of the visible keys and m, the largest score of the row, which prevents
    overflow."""
    m = s.detach().masked_fill(~seen, -1e30).amax(-1, keepdim=True)
    return (s - m).masked_fill(~seen, -math.inf).exp(), m


def softmax(s, seen, *_):
    """exp(s_ij) / sum_k exp(s_ik). Vaswani et al. 2017, eq. 1."""
    e, _ = exponentials(s, seen)
    return e / e.sum(-1, keepdim=True).clamp(min=TINY)


def elastic(s, seen, t, power):
    """relu(softmax(s)_ij - t_i), t_i = tau / n_i. Lazy Attention, eq. 5."""
    return torch.relu(softmax(s, seen) - t)


def entmax(s, seen, t, power):
    """relu(s_ij / power - r_i)^power, power = 1 / (alpha - 1). r_i makes the row sum to 1. Peters
    et al. 2019, eq. 7.

    Bisection finds r. At 1 below the largest z = s / power, that key alone has weight 1; at z, no
    key has any. A step of Newton's method leaves the solution as it is, and tells autograd how r
    depends on z and on the power."""
    if t is not None:  # the power of each row, where alpha is learned
        power = t
    z = s / power
    low = z.detach().masked_fill(~seen, -1e30).amax(-1, keepdim=True) - 1
    low = torch.where(seen.any(-1, keepdim=True), low, 0.0)  # a row without keys must not overflow
    high = low + 1
    for _ in range(60):
        r = (low + high) / 2
        heavy = (torch.relu(z.detach() - r) ** power * seen).sum(-1, keepdim=True) > 1
        low = torch.where(heavy, r, low)
        high = torch.where(heavy, high, r)
    x = torch.relu(z - low) * seen
    excess = ((x**power).sum(-1, keepdim=True) - 1) * seen.any(-1, keepdim=True)
    slope = (power * (x > 0) * x ** (power - 1)).sum(-1, keepdim=True).detach()
    return torch.relu(z - low - excess / slope.clamp(min=TINY)) ** power


def sparsemax(s, seen, t, power):
    """relu(s_ij - r_i), where r_i makes the row sum to 1. Martins & Astudillo 2016, eq. 1."""
    return entmax(s, seen, None, 1.0)


def softplus(s, *_):
    """log(1 + exp(s_ij))."""
    return torch.logaddexp(s, torch.zeros_like(s))


def lssar(s, seen, t, power):
    """x_ij^power / sum_k x_ik^power, x_ij = relu(softplus(s_ij) - t_i), t_i = o_i / n_i sum_k
    softplus(s_ik). o_i is 1, or 0 in rows of up to three keys. Gao & Spratling 2501.13428, eq. 4
    and 5. A row without survivors is 0."""
    b, _ = powers(s, seen, t, power)
    return b / b.sum(-1, keepdim=True).clamp(min=TINY)


def powers(s, seen, t, power):
    """(x / m)^power and log m^power, m the largest x of the row: x^power itself would overflow. A
    key within rounding (2^-18) of the threshold counts as below it, and a score below -69 as minus
    infinity."""
    phi = softplus(s)
    x = (phi - t) * (seen & (phi > t * (1 + 2**-18)) & (phi > TINY))
    m = x.detach().amax(-1, keepdim=True)
    m = torch.where(m > 0, m, 1.0)
    return (x / m) ** power, power * m.log()


def softpick(s, seen, *_):
    """relu(e_ij) / (sum_k |e_ik| + 1e-8), e = exp(s - m) - exp(-m), m = max(0, max_j s_ij). Zuhri
    et al. 2504.20966."""
    e, _ = exp_minus_one(s, seen)
    return torch.relu(e) / (e.abs().sum(-1, keepdim=True) + 1e-8)


def exp_minus_one(s, seen, *_):
    """(e^s - 1) e^-m, and m = max(0, max_j s_j)."""
    m = s.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True).clamp(min=0)
    return ((s - m).exp() - (-m).exp()) * seen, m


def relu(s, *_):
    """relu(s_ij). Wortsman et al. 2309.08586; Zhang et al. 2021."""
    return torch.relu(s)


def tra(s, seen, t, power):
    """relu(s_ij - t_i)^power. Threshold Differential Attention, eq. 1."""
    return torch.relu(s - t) ** power


def sigmoid(s, seen, t, power):
    """sigmoid(s_ij - t). Ramapuram et al. 2409.04431."""
    return torch.sigmoid(s - t)


def elu_plus_one(x, *_):
    """exp(x) below 0, x + 1 above. When Attention Sink Emerges, table 6."""
    return torch.where(x < 0, x.clamp(max=0).exp(), x + 1)


def identity(s, *_):
    """s_ij. When Attention Sink Emerges, table 6."""
    return s


RULES = {
    "softmax": softmax,
    "elastic": elastic,
    "entmax": entmax,
    "sparsemax": sparsemax,
    "softplus": softplus,
    "lssar": lssar,
    "softpick": softpick,
    "relu": relu,
    "tra": tra,
    "sigmoid": sigmoid,
    "elu": elu_plus_one,
    "identity": identity,
}
POWERS = {"entmax": 2.0, "lssar": 15.0, "tra": 2.0}  # where none is given
DIVIDED = {  # rules with a divisor: functions that return its summands / e^m, and m
    "softmax": exponentials,
    "elastic": exponentials,
    "lssar": powers,
    "softpick": exp_minus_one,
}


def weights_by_rule(rule, s, seen, t=None, power=None):
    if power is None:
        power = POWERS.get(rule)
    return RULES[rule](s.masked_fill(~seen, 0.0), seen, t, power).masked_fill(~seen, 0.0)


def log_divisor(rule, s, seen, t=None, power=None):
    """The logarithm of each row's divisor, (B, H, R), 0 in an empty row; None for rules without a
    divisor."""
    if rule not in DIVIDED:
        return None
    if power is None:
        power = POWERS.get(rule)
    e, m = DIVIDED[rule](s.masked_fill(~seen, 0.0), seen, t, power)
    total = e.abs().sum(-1)
    if rule == "softpick":
        total = total + 1e-8
    some = total > 0
    return torch.where(some, m[..., 0], 0.0) + torch.where(some, total, 1.0).log()


def attend_by_rule(
    rule,
    q,  # (B, H, T, D)
    k,  # (B, K, T, D): neighbouring heads of q share a head of k and v
    v,  # (B, K, T, E)
    t=None,  # broadcastable to (B, H, T)
    table=None,  # (H, W)
    tail=None,  # (H,)
    slope=None,  # (H,)
    scale=1.0,
    window=0,
    first=0,
    row_sum=False,
    power=None,
    mix=None,  # broadcastable to (B, H / 2, T)
    sets=None,  # (B, T) bits: a row does not see keys with which it has a common bit
    more=None,  # (H, T, T): another term of the scores
):
    """What kernels.attend returns for the same arguments: the output in the dtype of v, and the row
    statistic in float32 at least."""
    B, H, T = q.shape[:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    k = every_head(k, H)
    v = every_head(v, H)
    apart = distances(T, T, q.device)
    s = (q @ k.mT).to(wide) * scale + bias(apart, table, tail, slope, more)
    seen = visible(apart, window, first)
    if sets is not None:
        seen = seen & ((sets[:, :, None] & sets[:, None]) == 0)[:, None]
    if t is not None:
        t = t.to(wide).expand(B, H, T)[..., None]
    w = weights_by_rule(rule, s, seen, t, power)
    if mix is not None:  # the view of heads 0, 2, .. minus mix times that of heads 1, 3, ..
        w = w[:, 0::2] - mix.expand(B, H // 2, T)[..., None] * w[:, 1::2]
        v = v[:, 0::2]
    statistic = w.sum(-1) if row_sum else log_divisor(rule, s, seen, t, power)
    return w.to(v.dtype) @ v, statistic


def by_mean_square(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def heads(y, H):
    """(B, T, H * width) to (B, H, T, width)."""
    return y.unflatten(-1, (H, -1)).transpose(1, 2)


def every_head(y, H):
    """Neighbouring heads share a head of keys or values: (B, K, ..) to (B, H, ..)."""
    return y.repeat_interleave(H // y.shape[1], 1)


def featured(module, x):
    """Queries or keys after the norm without weights and the feature map."""
    c = module.config
    if c.qk_norm == "l2":  # Threshold Differential Attention; LSSAR
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-6)
    if c.qk_norm == "rms":
        x = by_mean_square(x)
    if c.feature == "mlp":  # When Attention Sink Emerges, table 6
        return torch.relu(x @ module.feature[0].weight.mT) @ module.feature[2].weight.mT
    if c.feature == "elu":  # Katharopoulos et al. 2020, eq. 7
        return elu_plus_one(x)
    return x


def factor(module, n=None):
    """The scale of q.k, (H, R, 1) or a number. n (R, 1): how many keys each row sees."""
    scale = module.config.scale
    root = module.width**-0.5
    if scale == "one":
        return 1.0
    if scale == "log_n":  # SSMax, Nakanishi 2501.19399; in LSSAR sigma = sqrt(d) log d
        return root * module.sigma[:, None, None] * n.log()
    if scale == "asentmax":  # the asentmax repository, sparse_gemma.py
        beta = module.scale_beta[:, None, None]
        gamma = module.scale_gamma[:, None, None]
        return root * (1 + beta * (n + 1).log() ** gamma)
    return root


def scores(module, q, k, n):
    """Each q.k times its factor, (B, H, R, T)."""
    return factor(module, n) * (featured(module, q) @ featured(module, k).mT)


def key_heads(module):
    """The key head of each score head. Where each view has its own keys, views 0 and 1 of a head
    take a pair."""
    H, _ = module.shapes["q"]
    K, _ = module.shapes["k"]
    if module.config.diff in ("subtract", "v1"):
        return [h // 2 // (H // K) * 2 + h % 2 for h in range(H)]
    return [h // (H // K) for h in range(H)]


def whole(parameter, H, width):
    """A bias of H heads (H, width) from one that all share, or that has only its first channels."""
    padded = F.pad(parameter, (0, width - parameter.shape[1]))
    return padded.repeat_interleave(H // len(parameter), 0)


def extra_score(module, q, n):
    """The score of an extra key, broadcastable to (B, H, R, 1), or None."""
    sink = module.config.sink
    if sink in ("key", "key_value"):  # When Attention Sink Emerges, table 4: like any other key
        key = whole(module.sink_key, *module.shapes["k"])[key_heads(module), None]
        return scores(module, q, key, n)
    if sink == "logit":  # GPT-OSS, The Attention Sink as Native MoE, eq. 2
        return module.sink_logit[:, None, None]
    if sink == "one":  # softmax1, Miller 2023
        return torch.zeros(1, 1, 1)


def with_extra(s, seen, extra):
    """The scores and the mask. If there is an extra key, its column comes first, and every row sees
    it."""
    if extra is None:
        return s, seen
    s = torch.cat([extra.to(s).expand(s[..., :1].shape), s], -1)
    seen = torch.cat([seen[..., :1] | True, seen], -1)
    return s, seen


def row_input(module, n, s, seen):
    """t and the power of a layer's rule. n (R, 1): how many keys each row sees. Both views of a
    head share a number."""
    c, args = module.config, module.args
    t, power = None, args.get("power")

    def per_head(parameter):
        return parameter.repeat_interleave(module.score_heads // module.heads)[:, None, None]

    if c.rule == "elastic":  # the offsets of Lazy Attention's table 2
        divisor = {"True": n, "False": 1, "block": c.block_size}[str(args["per_length"])]
        t = per_head(module.tau) / divisor
    if c.rule == "tra":  # beta sqrt(2 log(n / kappa) / d)
        log_n = (n / args["kappa"]).log().clamp(min=0)
        t = per_head(module.beta) * (2 * log_n / module.width).sqrt()
    if c.rule == "sigmoid":
        t = s.new_tensor(math.log(c.block_size) if args["length_bias"] else 0.0)
    if c.rule == "lssar":
        mean = torch.where(n > 3, 1 / n, 0.0)
        t = mean * (softplus(s) * seen).sum(-1, keepdim=True)
    if c.rule == "entmax" and args["alpha"] == "learned":  # alpha = 1 + sigmoid(theta) >= 1.01
        theta = torch.where(module.theta > -4.6, module.theta, -4.6)
        t = 1 / torch.sigmoid(per_head(theta))
    elif c.rule == "entmax":
        power = 1 / (args["alpha"] - 1)
    return t, power


def all_views(module, q, k, table=None, early=None):
    """The weights of every score head, (B, H, R, T), or (B, H, R, 1 + T) with those of an extra key
    first. table: None, a (H, W) table, or (table, tail, slope). early: the queries as they meet
    first keys, with StreamingLLM's RoPE."""
    c = module.config
    R, T = q.shape[2], k.shape[2]
    k = k[:, key_heads(module)]
    windowed = module.depth % c.window_every == 0
    apart = distances(R, T)
    seen = visible(apart, c.window * windowed, c.first)
    n = seen.sum(-1, keepdim=True).to(q.dtype)
    s = scores(module, q, k, n)
    if early is not None:
        s = torch.where(torch.arange(T) < c.first, scores(module, early, k, n), s)
    if isinstance(table, torch.Tensor):
        table = (table,)
    if table is not None:
        s = s + bias(apart, *table)
    s, seen = with_extra(s, seen, extra_score(module, q, n))
    w = weights_by_rule(c.rule, s, seen, *row_input(module, n, s, seen))
    total = w.sum(-1, keepdim=True)
    if c.normalize == "sum":  # When Attention Sink Emerges, table 6
        return w / (total + 1e-8)
    if c.normalize == "max1":
        return w / total.abs().clamp(min=1.0)
    if c.normalize == "length":  # Wortsman et al.
        return w / n
    return w


def views(module, q, k, x, table=None, early=None):
    """The weights of both views of a differential recipe."""
    w = all_views(module, q, k, table, early)
    return w[:, 0::2], w[:, 1::2]


def lambda_init(module):
    return 0.8 - 0.6 * math.exp(-0.3 * module.depth)


def mix(module, x):
    """lambda, the factor of the second view, from the layer's input x."""
    if module.config.diff == "subtract":  # Threshold Differential Attention
        return torch.sigmoid(module.lambda_logit)[:, None, None]
    if module.config.diff == "v2":  # unilm, Diff-Transformer-V2
        return torch.sigmoid(x @ module.lambda_proj.weight.mT).mT[..., None]
    up = module.lambda_q1 @ module.lambda_k1
    down = module.lambda_q2 @ module.lambda_k2
    return up.exp() - down.exp() + lambda_init(module)  # Ye et al. 2410.05258, eq. 3


def weights(module, q, k, x, table=None, early=None):
    """The weights of each output head; of a differential recipe view 0 minus lambda times view
    1."""
    if module.config.diff == "none":
        return all_views(module, q, k, table, early)
    one, two = views(module, q, k, x, table, early)
    return one - mix(module, x) * two


def attend(module, q, k, v, x, table=None, early=None):
    return output(module, weights(module, q, k, x, table, early), v, x)


def output(module, w, v, x):
    """Each head's output (B, H, R, E) from its weights, values, and the layer's input x."""
    H, T = w.shape[1], v.shape[2]
    o = w[..., -T:] @ every_head(v, H)
    if module.config.sink == "key_value":  # When Attention Sink Emerges, table 4
        o = o + w[..., :1] * whole(module.sink_value, H, v.shape[3])[:, None]
    return postprocess(module, o, x, v)


def postprocess(module, o, x, v):
    """The steps after the heads' outputs (B, H, R, E), in order."""
    c = module.config
    H, R, E = o.shape[1:]
    if c.value_bias == "on":  # When Attention Sink Emerges, table 4
        o = o + whole(module.value_bias, H, E)[:, None]
    if c.dex == "on":  # Kong et al. 2505.16333. progress: the share of the training so far
        a = (module.progress / module.args["anneal"]).clamp(max=1.0)
        strength = (1 - a) * a * lambda_init(module) + a * module.dex_lambda
        o = o - strength * (o @ module.dex_proj.weight.mT)
    if c.exclude == "own":  # XSA, 2603.09078
        unit = F.normalize(every_head(v[:, :, -R:], H), dim=-1)
        o = o - (o * unit).sum(-1, keepdim=True) * unit
    if c.gate == "silu_first":  # Mamba2 gates before its norm
        o = o * F.silu(heads(module.gate(x), H))
    if c.out_norm == "head":
        o = by_mean_square(o, module.args["out_norm_eps"]) * module.out_norm.weight
    elif c.out_norm != "none":
        o = heads(normed_together(module, o.transpose(1, 2).flatten(2)), H)
    if c.diff == "v1":  # Ye et al. 2410.05258, eq. 4
        o = o * (1 - lambda_init(module))
    if c.gate == "silu":
        o = o * F.silu(heads(module.gate(x), H))
    if c.gate in ("head", "element", "low_rank"):  # Qiu et al. 2505.06708; KDA, 2510.26692
        o = o * torch.sigmoid(heads(module.gate(x), H))
    return o


def normed_together(module, flat):
    """The norm over all heads side by side, (B, R, H * E)."""
    kind, norm = module.config.out_norm, module.out_norm
    y = flat
    if kind == "layer":  # TTT's LayerNorm
        y = y - y.mean(-1, keepdim=True)
    y = by_mean_square(y, module.args["out_norm_eps"]) * norm.weight  # ReLA, Zhang et al. 2021
    if kind == "layer":
        y = y + norm.bias
    if kind == "gated":  # ReLA's gated form
        y = y * torch.sigmoid(module.norm_gate * flat)
    return y


def rotated(x, places, base):
    """RoPE, Su et al. 2021: channels c and c + D/2 are a pair, which turns by the angle place *
    base^(-2c / D)."""
    half = x.shape[-1] // 2
    c = torch.arange(half, device=x.device).to(x)
    angle = places[:, None] * base ** (-c / half)
    pair = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angle)
    return torch.cat([pair.real, pair.imag, x[..., 2 * half :]], -1)


def t5_bucket(apart):
    """Raffel et al. 1910.10683: each of 16 near distances is a bucket; bucket 16 + c ends at 16 *
    8^((c + 1) / 16)."""
    if apart < 16:
        return apart
    ended = sum(apart >= 16 * 8 ** ((c + 1) / 16) for c in range(16))
    return min(31, 16 + ended)


def positions(module, T):
    """The bias of --pos at distances 0 .. T - 1, (H, T), or None."""
    pos = module.config.pos
    buckets = [t5_bucket(apart) for apart in range(T)]
    if pos in ("bias", "rope+bias"):  # Lazy Attention: 0 beyond its table
        return F.pad(module.table, (0, T))[:, :T]
    if pos == "alibi":  # Press et al. 2108.12409
        return -module.alibi[:, None] * torch.arange(T)
    if pos == "t5_index":  # the released code of When Attention Sink Emerges
        return torch.tensor(buckets).repeat(module.score_heads, 1)
    if pos == "t5":
        return module.t5[:, buckets]
    if pos not in ("none", "rope", "sinusoidal", "learned"):
        raise NotImplementedError(f"define the bias of --pos={pos} here")


def convolved(module, y):
    """The short convolution over 4 tokens, each channel by itself, (B, T, ..). H3, Mamba."""
    T = y.shape[1]
    padded = F.pad(y, (0, 0, 3, 0))
    return F.silu(sum(module.conv[:, 0, n] * padded[:, n : n + T] for n in range(4)))


def layer(module, x, attend=attend):
    """The whole layer: x (B, T, C) to (B, T, C). attend: see above, or that of a mixer."""
    c, T = module.config, x.shape[1]
    y = module.c_attn(x)
    if hasattr(module, "conv"):
        y = convolved(module, y)
    q, k, v = y.split([H * width for H, width in module.shapes.values()], -1)
    if c.qk_norm == "all":  # OLMo 2: all heads together
        q = by_mean_square(q, c.norm_eps) * module.q_norm.weight
        k = by_mean_square(k, c.norm_eps) * module.k_norm.weight
    q, k, v = (heads(y, H) for y, (H, _) in zip((q, k, v), module.shapes.values(), strict=True))
    if c.qk_norm == "head":  # Qwen3
        q = by_mean_square(q, c.norm_eps) * module.q_norm.weight
        k = by_mean_square(k, c.norm_eps) * module.k_norm.weight
    early = None
    if "rope" in c.pos:
        places = torch.arange(T)
        if c.rule == "descent":  # TTT counts places in each chunk
            places = places % module.args["chunk"]
        if c.first and module.depth % c.window_every == 0:  # StreamingLLM: in its cache
            early = rotated(q, places.clamp(max=c.first + c.window - 1), c.rope_base)
        q = rotated(q, places, c.rope_base)
        k = rotated(k, places, c.rope_base)
    o = attend(module, q, k, v, x, positions(module, T), early)
    return module.c_proj(o.transpose(1, 2).flatten(2))
