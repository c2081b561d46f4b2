"""The definition of every recipe: attention as one dense matrix of weights, straight from the
papers.

Tests compare all other code with this file, in values and in gradients. It imports nothing from
that code. From a
layer it takes the choices (config, args), the sizes of heads (shapes), the projections, and
parameters and buffers by name. Nothing here is fast, cuts anything into blocks, or knows a
derivative; autograd finds those. Not defined here: ALiBi's slopes (test_attention.py) and RoPE's
scalings (test_weights.py).

Read in this order: RULES, row_input (their thresholds), all_views, weights, finished, layer.

Shapes: B batch, H score heads, R query rows (the last R of T positions), T keys, D width of q and
k, E width of v. Scores s and weights w are (B, H, R, T), row vectors such as a threshold t are (..,
R, 1), `seen` is (R, T).
"""

import math

import torch
from torch.nn import functional as F


def distances(R, T, device=None):
    """i - j of the last R rows i and all keys j, (R, T)."""
    return torch.arange(T - R, T, device=device)[:, None] - torch.arange(T, device=device)


def visible(apart, window=0, first=0):
    """Row i sees key j if j <= i and, with a window (Beltagy et al. 2020), if i - j < window or j <
    first (StreamingLLM, Xiao et al. 2309.17453). apart: see `distances`."""
    j, past = torch.arange(apart.shape[1], device=apart.device), apart >= 0
    return past & ((apart < window) | (j < first)) if window else past


def bias(apart, table=None, tail=None, slope=None, more=None):
    """The bias that relative positions add to scores, (H, R, T): table[h, i - j] at distances below
    its width W, tail[h] beyond (without one: 0), and slope[h] (i - j) everywhere. more: another
    term, (B, H, R, T)."""
    b = torch.zeros(1, 1, 1, device=apart.device) if tail is None else tail[:, None, None]
    W = 0 if table is None else table.shape[1]
    b = torch.where(apart < W, table[:, apart.clamp(0, W - 1)], b) if W else b
    b = b if slope is None else b + slope[:, None, None] * apart
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
    return e / e.sum(-1, keepdim=True).clamp(min=1e-30)


def entmax(s, seen, t, power):
    """relu(s_ij / power - r_i)^power, power = 1 / (alpha - 1). r_i makes the row sum to 1. Peters
    et al. 2019, eq. 7.

    Bisection finds r. At 1 below the largest z = s / power, that key alone has weight 1; at z, no
    key has any. A step of Newton's method leaves the solution as it is, and tells autograd how r
    depends on z and on the power."""
    power = power if t is None else t  # t: the power of each row, where alpha is learned
    z = s / power
    low = z.detach().masked_fill(~seen, -1e30).amax(-1, keepdim=True) - 1
    low = torch.where(seen.any(-1, keepdim=True), low, 0.0)  # a row without keys must not overflow
    high = low + 1
    for _ in range(60):
        r = (low + high) / 2
        heavy = (torch.relu(z.detach() - r) ** power * seen).sum(-1, keepdim=True) > 1
        low, high = torch.where(heavy, r, low), torch.where(heavy, high, r)
    x = torch.relu(z - low) * seen
    slope = (power * (x > 0) * x ** (power - 1)).sum(-1, keepdim=True).detach().clamp(min=1e-30)
    excess = ((x**power).sum(-1, keepdim=True) - 1) * seen.any(-1, keepdim=True)
    return torch.relu(z - low - excess / slope) ** power


def softplus(s, *_):
    return torch.logaddexp(s, torch.zeros_like(s))  # log(1 + exp(s_ij))


def lssar(s, seen, t, power):
    """x_ij^power / sum_k x_ik^power, x_ij = relu(softplus(s_ij) - t_i), t_i = o_i / n_i sum_k
    softplus(s_ik). o_i is 1, or 0 in rows of up to three keys. Gao & Spratling 2501.13428, eq. 4
    and 5. A row without survivors is 0."""
    b, _ = powers(s, seen, t, power)
    return b / b.sum(-1, keepdim=True).clamp(min=1e-30)


def powers(s, seen, t, power):
    """(x / m)^power and log m^power, m the largest x of the row: x^power itself would overflow. A
    key within rounding (2^-18) of the threshold counts as below it, and a score below -69 as minus
    infinity."""
    phi = softplus(s)
    x = (phi - t) * (seen & (phi > t * (1 + 2**-18)) & (phi > 1e-30))
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


def elu_plus_one(x):
    return torch.where(x < 0, x.clamp(max=0).exp(), x + 1)


RULES = {
    "softmax": softmax,
    "entmax": entmax,
    "softplus": softplus,
    "lssar": lssar,
    "softpick": softpick,
    # Martins & Astudillo 2016, eq. 1
    "sparsemax": lambda s, seen, t, power: entmax(s, seen, None, 1.0),
    "elastic": lambda s, seen, t, power: torch.relu(softmax(s, seen) - t),  # Lazy Attention, eq. 5
    "relu": lambda s, *_: torch.relu(s),  # Wortsman et al. 2309.08586; Zhang et al. 2021
    # Threshold Differential Attention, eq. 1
    "tra": lambda s, seen, t, power: torch.relu(s - t) ** power,
    "sigmoid": lambda s, seen, t, power: torch.sigmoid(s - t),  # Ramapuram et al. 2409.04431
    "elu": lambda s, *_: elu_plus_one(s),  # When Attention Sink Emerges, table 6
    "identity": lambda s, *_: s,  # the same
}
POWERS = {"entmax": 2.0, "lssar": 15.0, "tra": 2.0}  # where none is given


def weights_by_rule(rule, s, seen, t=None, power=None):
    power = POWERS.get(rule) if power is None else power
    return RULES[rule](s.masked_fill(~seen, 0.0), seen, t, power).masked_fill(~seen, 0.0)


def log_divisor(rule, s, seen, t=None, power=None):
    """The logarithm of each row's divisor, (B, H, R), 0 in an empty row; None for rules without a
    divisor."""
    parts = {
        "softmax": exponentials,
        "elastic": exponentials,
        "lssar": powers,
        "softpick": exp_minus_one,
    }
    if rule not in parts:
        return None
    e, m = parts[rule](
        s.masked_fill(~seen, 0.0), seen, t, POWERS.get(rule) if power is None else power
    )
    total = e.abs().sum(-1) + 1e-8 * (rule == "softpick")
    return torch.where(total > 0, m[..., 0], 0.0) + torch.where(total > 0, total, 1.0).log()


def attend_by_rule(
    rule,
    q,
    k,
    v,
    t=None,
    table=None,
    tail=None,
    slope=None,
    scale=1.0,
    window=0,
    first=0,
    row_sum=False,
    power=None,
    mix=None,
    sets=None,
    more=None,
):
    """What kernels.attend returns for the same arguments: the output in the dtype of v, and the row
    statistic in float32 at least. more (H, T, T): another term of the scores."""
    wide, (H, T) = torch.promote_types(q.dtype, torch.float32), q.shape[1:3]
    apart = distances(T, T, q.device)
    k, v = k.repeat_interleave(H // k.shape[1], 1), v.repeat_interleave(H // v.shape[1], 1)
    s = (q @ k.mT).to(wide) * scale + bias(apart, table, tail, slope, more)
    seen = visible(apart, window, first)
    if sets is not None:  # no common bit
        seen = seen & ((sets[:, :, None] & sets[:, None]) == 0)[:, None]
    t = None if t is None else t.to(wide).expand(q.shape[:3])[..., None]
    w = weights_by_rule(rule, s, seen, t, power)
    if mix is not None:  # the view of heads 0, 2, .. minus mix times that of heads 1, 3, ..
        w, v = w[:, 0::2] - mix.expand(len(q), H // 2, T)[..., None] * w[:, 1::2], v[:, 0::2]
    return w.to(v.dtype) @ v, w.sum(-1) if row_sum else log_divisor(rule, s, seen, t, power)


def by_mean_square(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def heads(y, H):
    """(B, T, H * width) to (B, H, T, width)."""
    return y.unflatten(-1, (H, -1)).transpose(1, 2)


def featured(module, x):
    """Queries or keys after the norm without weights and the feature map."""
    c = module.config
    if c.qk_norm == "l2":  # Threshold Differential Attention; LSSAR
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-6)
    if c.qk_norm == "rms":
        x = by_mean_square(x)
    if c.feature == "mlp":  # When Attention Sink Emerges, table 6
        return torch.relu(x @ module.feature[0].weight.mT) @ module.feature[2].weight.mT
    return elu_plus_one(x) if c.feature == "elu" else x  # Katharopoulos et al. 2020, eq. 7


def factor(module, n=None):
    """The scale of q.k, (H, R, 1) or a number. n (R, 1): how many keys each row sees."""
    scale, root = module.config.scale, module.width**-0.5
    if scale == "log_n":  # SSMax, Nakanishi 2501.19399; in LSSAR sigma = sqrt(d) log d
        return root * module.sigma[:, None, None] * n.log()
    if scale == "asentmax":  # the asentmax repository, sparse_gemma.py
        return root * (
            1
            + module.scale_beta[:, None, None] * (n + 1).log() ** module.scale_gamma[:, None, None]
        )
    return 1.0 if scale == "one" else root


def scores(module, q, k, n):
    """Each q.k times its factor, (B, H, R, T)."""
    return factor(module, n) * (featured(module, q) @ featured(module, k).mT)


def key_heads(module):
    """The key head of each score head. Where each view has its own keys, views 0 and 1 of a head
    take a pair."""
    H, K = module.shapes["q"][0], module.shapes["k"][0]
    pairs = module.config.diff in ("subtract", "v1")
    return [h // 2 // (H // K) * 2 + h % 2 if pairs else h // (H // K) for h in range(H)]


def whole(parameter, H, width):
    """A bias of H heads (H, width) from one that all share, or that has only its first channels."""
    return F.pad(parameter, (0, width - parameter.shape[1])).repeat_interleave(
        H // len(parameter), 0
    )


def extra_score(module, q, n):
    """The score of an extra key, broadcastable to (B, H, R, 1), or None."""
    sink = module.config.sink
    # When Attention Sink Emerges, table 4: a learned key, like any other
    if sink in ("key", "key_value"):
        return scores(
            module, q, whole(module.sink_key, *module.shapes["k"])[key_heads(module), None], n
        )
    # softmax1, Miller 2023; GPT-OSS, The Attention Sink as Native MoE, eq. 2
    return (
        module.sink_logit[:, None, None]
        if sink == "logit"
        else torch.zeros(1, 1, 1)
        if sink == "one"
        else None
    )


def with_extra(s, seen, extra):
    """The scores and the mask. If there is an extra key, its column comes first, and every row sees
    it."""
    if extra is None:
        return s, seen
    return torch.cat([extra.to(s).expand(s[..., :1].shape), s], -1), torch.cat(
        [seen[..., :1] | True, seen], -1
    )


def row_input(module, n, s, seen):
    """t and the power of a layer's rule. n (R, 1): how many keys each row sees. Both views of a
    head share a number."""
    c, args, t, power = module.config, module.args, None, module.args.get("power")

    def per_head(parameter):
        return parameter.repeat_interleave(module.score_heads // module.heads)[:, None, None]

    if c.rule == "elastic":  # the offsets of Lazy Attention's table 2
        t = (
            per_head(module.tau)
            / {"True": n, "False": 1, "block": c.block_size}[str(args["per_length"])]
        )
    if c.rule == "tra":
        t = (
            per_head(module.beta)
            * (2 * (n / args["kappa"]).log().clamp(min=0) / module.width).sqrt()
        )
    if c.rule == "sigmoid":
        t = s.new_tensor(math.log(c.block_size) if args["length_bias"] else 0.0)
    if c.rule == "lssar":
        t = torch.where(n > 3, 1 / n, 0.0) * (softplus(s) * seen).sum(-1, keepdim=True)
    # alpha = 1 + sigmoid(theta), at least 1.01
    if c.rule == "entmax" and args["alpha"] == "learned":
        t = 1 / torch.sigmoid(per_head(torch.where(module.theta > -4.6, module.theta, -4.6)))
    elif c.rule == "entmax":
        power = 1 / (args["alpha"] - 1)
    return t, power


def all_views(module, q, k, table=None, early=None):
    """The weights of every score head, (B, H, R, T), or (B, H, R, 1 + T) with those of an extra key
    first. table: None, a (H, W) table, or (table, tail, slope). early: the queries as they meet
    first keys, with StreamingLLM's RoPE."""
    c, (R, T) = module.config, (q.shape[2], k.shape[2])
    windowed, apart, k = (
        module.depth % c.window_every == 0,
        distances(R, T),
        k[:, key_heads(module)],
    )
    seen = visible(apart, c.window * windowed, c.first)
    n = seen.sum(-1, keepdim=True).to(q.dtype)
    s = scores(module, q, k, n)
    if early is not None:
        s = torch.where(torch.arange(T) < c.first, scores(module, early, k, n), s)
    if table is not None:
        s = s + bias(apart, *((table,) if isinstance(table, torch.Tensor) else table))
    s, seen = with_extra(s, seen, extra_score(module, q, n))
    w = weights_by_rule(c.rule, s, seen, *row_input(module, n, s, seen))
    total = w.sum(-1, keepdim=True)  # When Attention Sink Emerges, table 6; length: Wortsman et al.
    return (
        w
        / {"none": 1.0, "sum": total + 1e-8, "length": n, "max1": total.abs().clamp(min=1.0)}[
            c.normalize
        ]
    )


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
    up, down = module.lambda_q1 @ module.lambda_k1, module.lambda_q2 @ module.lambda_k2
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
    o = w[..., -T:] @ v.repeat_interleave(H // v.shape[1], 1)
    if module.config.sink == "key_value":  # When Attention Sink Emerges, table 4
        o = o + w[..., :1] * whole(module.sink_value, H, v.shape[3])[:, None]
    return finished(module, o, x, v)


def finished(module, o, x, v):
    """The steps after the heads' outputs (B, H, R, E), in order."""
    c, H = module.config, o.shape[1]
    if c.value_bias == "on":  # When Attention Sink Emerges, table 4
        o = o + whole(module.value_bias, H, o.shape[3])[:, None]
    if c.dex == "on":  # Kong et al. 2505.16333. progress: the share of the training so far
        a = (module.progress / module.args["anneal"]).clamp(max=1.0)
        o = o - ((1 - a) * a * lambda_init(module) + a * module.dex_lambda) * (
            o @ module.dex_proj.weight.mT
        )
    if c.exclude == "own":  # XSA, 2603.09078
        unit = F.normalize(v[:, :, -o.shape[2] :].repeat_interleave(H // v.shape[1], 1), dim=-1)
        o = o - (o * unit).sum(-1, keepdim=True) * unit
    if c.gate == "silu_first":  # Mamba2 gates before its norm
        o = o * F.silu(heads(module.gate(x), H))
    if c.out_norm == "head":
        o = by_mean_square(o, module.args["out_norm_eps"]) * module.out_norm.weight
    elif c.out_norm != "none":  # over all heads side by side
        flat = o.transpose(1, 2).flatten(2)
        y = flat - flat.mean(-1, keepdim=True) if c.out_norm == "layer" else flat  # TTT's LayerNorm
        # ReLA, Zhang et al. 2021
        y = by_mean_square(y, module.args["out_norm_eps"]) * module.out_norm.weight
        y = y + module.out_norm.bias if c.out_norm == "layer" else y
        # ReLA's gated form
        y = y * torch.sigmoid(module.norm_gate * flat) if c.out_norm == "gated" else y
        o = heads(y, H)
    if c.diff == "v1":  # Ye et al. 2410.05258, eq. 4
        o = o * (1 - lambda_init(module))
    if c.gate in ("head", "element", "low_rank", "silu"):  # Qiu et al. 2505.06708; KDA, 2510.26692
        o = o * (F.silu if c.gate == "silu" else torch.sigmoid)(heads(module.gate(x), H))
    return o


def rotated(x, places, base):
    """RoPE, Su et al. 2021: channels c and c + D/2 are a pair, which turns by the angle place *
    base^(-2c / D)."""
    half = x.shape[-1] // 2
    angle = places[:, None] * base ** (-torch.arange(half, device=x.device).to(x) / half)
    pair = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angle)
    return torch.cat([pair.real, pair.imag, x[..., 2 * half :]], -1)


def t5_bucket(apart):
    """Raffel et al. 1910.10683: each of 16 near distances is a bucket; bucket 16 + c ends at 16 *
    8^((c + 1) / 16)."""
    return (
        apart
        if apart < 16
        else min(31, 16 + sum(apart >= 16 * 8 ** ((c + 1) / 16) for c in range(16)))
    )


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


def layer(module, x, attend=attend):
    """The whole layer: x (B, T, C) to (B, T, C). attend: see above, or that of a mixer."""
    c, T, y = module.config, x.shape[1], module.c_attn(x)
    if hasattr(module, "conv"):  # over 4 tokens: H3, Mamba
        y = F.silu(
            sum(module.conv[:, 0, n] * F.pad(y, (0, 0, 3, 0))[:, n : n + T] for n in range(4))
        )
    q, k, v = y.split([H * width for H, width in module.shapes.values()], -1)
    if c.qk_norm == "all":  # OLMo 2: all heads together
        q, k = (
            by_mean_square(y, c.norm_eps) * norm.weight
            for y, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    q, k, v = (heads(y, H) for y, (H, _) in zip((q, k, v), module.shapes.values(), strict=True))
    if c.qk_norm == "head":  # Qwen3
        q, k = (
            by_mean_square(y, c.norm_eps) * norm.weight
            for y, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    # TTT: in its chunk
    early, places = None, torch.arange(T) % (module.args["chunk"] if c.rule == "descent" else T)
    if "rope" in c.pos:
        # StreamingLLM counts places in its cache
        if c.first and module.depth % c.window_every == 0:
            early = rotated(q, places.clamp(max=c.first + c.window - 1), c.rope_base)
        q, k = rotated(q, places, c.rope_base), rotated(k, places, c.rope_base)
    table = positions(module, T)
    return module.c_proj(attend(module, q, k, v, x, table, early).transpose(1, 2).flatten(2))
