"""The mixers as their papers define them, in float64: a state token by token, everything else as a matrix of weights.

    output(module, x)               a whole layer, (B, T, C) to (B, T, C)
    attend(module, q, k, v, x)      each head's output (B, H, T, E), from convolved and rotated q, k and v
    weights(module, q, k, x)        its attention weights (B, H, T, T), with an extra key's column first

Nothing here calls the code under test. It reads a layer's config, constants, parameters and buffers by name.
Shapes: B batch, H heads, T tokens, D width of q and k, E of v, C of the layer's input x (B, T, C).
"""
import math

import torch
from torch.nn import functional as F


def heads(y, H):
    """(B, T, H * width) to (B, H, T, width)."""
    return y.unflatten(-1, (H, -1)).transpose(1, 2)


def every_head(y, H):
    """Neighbouring heads share a head of keys or values: (B, K, ..) to (B, H, ..)."""
    return y.repeat_interleave(H // y.shape[1], 1)


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def rms(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


# ------------------------------------------------------------------------------------------- before and after the mixer


def output(module, x):
    return module.c_proj(attend(module, *projected(module, x), x).transpose(1, 2).flatten(2))


def projected(module, x):
    """q, k and v of a layer's input: projection, convolution over 4 tokens (H3, Mamba), learned norm, RoPE."""
    c, T, D = module.config, x.shape[1], module.config.head_width
    y = module.c_attn(x)
    if hasattr(module, "conv"):
        y = F.silu(sum(module.conv[:, 0, n] * F.pad(y, (0, 0, 3, 0))[:, n:n + T] for n in range(4)))
    H, K = (1, 1) if c.rule == "ssd" else (c.n_head, c.n_kv_head)       # Mamba2: all heads share one query and one key
    q, k, v = y.split([H * D, K * D, c.n_kv_head * D], -1)
    if c.qk_norm == "all":                      # OLMo 2
        q, k = rms(q, c.norm_eps) * module.q_norm.weight, rms(k, c.norm_eps) * module.k_norm.weight
    q, k = heads(q, H), heads(k, K)
    if c.qk_norm == "head":                     # Qwen3
        q, k = rms(q, c.norm_eps) * module.q_norm.weight, rms(k, c.norm_eps) * module.k_norm.weight
    if c.pos == "rope":                         # Su et al. 2021, paired half by half, angles in float32
        place = torch.arange(T) % module.args["chunk"] if c.rule == "descent" else torch.arange(T)      # TTT
        angle = place[:, None] * c.rope_base ** (-torch.arange(D // 2, dtype=torch.float32) / (D // 2))
        q, k = (rotated(y, angle.cos(), angle.sin()) for y in (q, k))
    return q, k, heads(v, c.n_kv_head)


def rotated(y, cos, sin):
    a, b, odd = y.split([cos.shape[1], cos.shape[1], y.shape[-1] % 2], -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, odd], -1)


def features(module, *qk):
    """q and k after the norm without weights and the feature map."""
    norm, feature = module.config.qk_norm, module.config.feature
    qk = [unit(y) if norm == "l2" else rms(y) if norm == "rms" else y for y in qk]
    if feature == "mlp":                        # When Attention Sink Emerges, table 6
        return [F.relu(y @ module.feature[0].weight.T) @ module.feature[2].weight.T for y in qk]
    return [F.elu(y) + 1 if feature == "elu" else y for y in qk]        # Katharopoulos et al. 2020, eq. 7


def scale(module):
    return 1.0 if module.config.scale == "one" else module.config.head_width ** -0.5


def attend(module, q, k, v, x):
    c, H = module.config, module.config.n_head
    if c.mixer == "recurrent":
        o = (learned if c.rule in ("descent", "momentum") else linear_state)(module, q, k, v, x)
    else:
        w = weights(module, q, k, x)
        o = w[..., -k.shape[2]:] @ every_head(v, H)
        if c.sink == "key_value":               # When Attention Sink Emerges, table 4
            o = o + w[..., :1] * every_head(module.sink_value[None, :, None], H)
    if c.value_bias == "on":
        o = o + module.value_bias[:, None]
    if c.gate != "none":                        # Qiu et al. 2505.06708; with silu RetNet, GLA, Mamba2
        gate = (F.silu if c.gate.startswith("silu") else torch.sigmoid)(heads(module.gate(x), H))
    o = o * gate if c.gate == "silu_first" else o                       # Mamba2 gates before its norm
    flat, eps = o.transpose(1, 2).flatten(2), module.args.get("out_norm_eps")
    if c.out_norm == "head":
        o = rms(o, eps) * module.out_norm.weight
    if c.out_norm in ("all", "gated"):          # ReLA, Zhang et al. 2021
        o = heads(rms(flat, eps) * module.out_norm.weight, H)
        o = o * heads(torch.sigmoid(module.norm_gate * flat), H) if c.out_norm == "gated" else o
    if c.out_norm == "layer":                   # TTT
        o = heads(F.layer_norm(flat, flat.shape[-1:], module.out_norm.weight, module.out_norm.bias, eps), H)
    return o * gate if c.gate in ("head", "element", "silu") else o


# --------------------------------------------------------------------------------------------------------------- states


def recurrence(q, k, v, keep, erase=None):
    """S_t = keep_t S_{t-1} + k_t^T (v_t - erase_t k_t keep_t S_{t-1}),  o_t = q_t S_t.

    The delta rule: Yang et al. 2406.06484; with forgetting 2412.06464. keep (B, H, T, 1 or D), erase (B, H, T, 1)."""
    S, outputs = torch.zeros(k.shape[3], v.shape[3]).to(v), []
    for t in range(v.shape[2]):
        q_t, k_t, u, keep_t = (y[:, :, t, None] for y in (q, k, v, keep))                   # (B, H or 1, 1, .)
        S = keep_t.mT * S
        if erase is not None:
            u = u - erase[:, :, t, None] * (k_t @ S)
        S = S + k_t.mT @ u
        outputs.append(q_t @ S)
    return torch.cat(outputs, 2)


def kept(module, x):
    """The share of a state that survives a token, (B, H, T, 1 or D)."""
    H, forget = module.config.n_head, module.config.forget
    one = torch.ones(len(x), H, x.shape[1], 1).to(x)
    if forget == "fixed":                       # RetNet, Sun et al. 2307.08621, eq. 8
        return one - 2.0 ** (-5 - torch.arange(H)[:, None, None])
    if forget == "channel":                     # GLA, Yang et al. 2312.06635, section 4.4
        return torch.sigmoid(heads(module.fade(x), H)) ** (1 / 16)
    if forget == "dt":                          # Mamba2, Dao and Gu 2405.21060
        return torch.exp(-module.A_log.exp()[:, None, None] * time_step(module, x))
    if forget == "alpha":                       # 1 - alpha_t: Titans, eq. 13
        return 1 - torch.sigmoid(heads(module.alpha(x) - module.forget_bias, H))
    return one


def time_step(module, x):
    return F.softplus(heads(module.dt(x) + module.dt_bias, module.config.n_head))


def written(module, x):
    """The share of its value that a token writes: DeltaNet's beta, TTT's and Titans' rate, Mamba2's time step."""
    if module.config.write in ("beta", "rate"):
        return torch.sigmoid(heads(module.beta(x), module.config.n_head))
    return time_step(module, x) if module.config.write == "dt" else torch.ones_like(kept(module, x)[..., :1])


def prepared(module, q, k, v):
    """q, k and v of a state, with a head of k for each head of q."""
    q, k = features(module, q, every_head(k, q.shape[1]))
    return scale(module) * q, k, every_head(v, module.config.n_head)


def linear_state(module, q, k, v, x):
    c, (q, k, v) = module.config, prepared(module, q, k, v)
    keep, write = kept(module, x), written(module, x)
    o = recurrence(q, k, write * v, keep, write if c.rule == "delta" else None)
    if c.normalize == "sum":                    # the weights' sum is what values of 1 return
        o = o / (recurrence(q, k, write * torch.ones_like(v), keep) + 1e-8)
    return o + module.skip[:, None, None] * v if c.rule == "ssd" else o # Mamba2: y = C h + D x


def learned(module, q, k, v, x):
    """A memory that learns by gradient descent on |answer(k_t) - v_t|^2 / 2, each gradient at the memory before t's
    chunk: M_t = keep_t M_{t-1} + P_t,  P_t = eta_t P_{t-1} - rate_t gradient_t. Titans, Behrouz et al. 2501.00663,
    eq. 13 and 14. TTT-linear, Sun et al. 2407.04620, has eta = 0, and the n-th token of a chunk sees 1 / n + a learned
    number of its chunk's steps."""
    c, (q, k, v), D, size = module.config, prepared(module, q, k, v), module.config.head_width, module.args["chunk"]
    keep, rate, ttt = kept(module, x), written(module, x), c.rule == "descent"
    if ttt:
        M, rate, place = (module.memory, module.memory_bias), rate / D, torch.arange(size)
        sees, eta, share = F.relu(1 / (place.to(x) + 1) + module.place), 0 * rate, 1 + 0 * rate
    else:                                       # ours: values have size 1, and rate times curvature is at most 2
        M, rate, v, sees = (module.memory_in, module.memory_out), rate / D ** 0.5, rms(v), torch.ones(size)
        eta = torch.sigmoid(heads(module.momentum(x), c.n_head))
        share = (1 - eta) / size

    def answer(M, y):
        if ttt:
            return y + F.layer_norm(y @ M[0] + M[1], (D,), eps=1e-6) * module.inner_scale + module.inner_bias
        return F.gelu(y @ M[0]) @ M[1]

    def loss(M, k, v):
        return (answer(M, k) - v).square().sum() / 2

    M, outputs = [m.expand(len(x), *m.shape) for m in M], []
    P = [torch.zeros_like(m) for m in M]
    for t in range(x.shape[1]):
        q_t, k_t, v_t, keep_t, eta_t, share_t, step = (y[:, :, t, None] for y in (q, k, v, keep, eta, share, rate))
        if t % size == 0:
            before = without = M                # without: the memory without this chunk's steps
        gradient = torch.func.grad(loss)(before, k_t, v_t)
        if not ttt:                             # along the gradient: |gradient in M|^2 / |gradient in answer|^2
            slope = sum(g.square().sum((-1, -2), keepdim=True) for g in gradient)
            step = step / (step * slope / (answer(before, k_t) - v_t).square().sum(-1, keepdim=True) / 2).clamp(min=1)
        P = [eta_t * p - share_t * step * g for p, g in zip(P, gradient, strict=True)]
        without, M = [keep_t * m for m in without], [keep_t * m + p for m, p in zip(M, P, strict=True)]
        seen = [m0 + sees[t % size] * (m - m0) for m0, m in zip(without, M, strict=True)]
        outputs.append(answer(seen, q_t))
        M = seen if t % size == size - 1 else M
    return torch.cat(outputs, 2)


# ------------------------------------------------------------------------------------------------- matrices of weights


def weights(module, q, k, x):
    """w_ij of o_i = sum_j w_ij v_j, before norms and gates."""
    c, H, T = module.config, module.config.n_head, k.shape[2]
    if c.mixer == "recurrent":                  # the outputs for one-hot values
        return linear_state(module, q, k, torch.eye(T).to(x).expand(len(x), H, T, T), x)
    q, k = features(module, q, every_head(k, H))
    n, past = torch.arange(1, T + 1).to(x)[:, None], torch.ones(T, T).tril().bool()[-q.shape[2]:]
    if c.scale == "log_n":                      # SSMax, Nakanishi 2501.19399
        q = q * module.sigma[:, None, None] * n.log()
    if c.scale == "asentmax":
        q = q * (1 + module.scale_beta[:, None, None] * (n + 1).log() ** module.scale_gamma[:, None, None])
    s = scale(module) * q @ k.mT
    if c.mixer == "focus":
        return softmax(module, q, *focus(module, s, past, x))
    if c.mixer == "selection":
        return selection(module, q, k, s, past)
    return random_features(module, q, k) if c.mixer == "performer" else routing(module, q, k, s, past)


def softmax(module, q, s, seen):
    """The softmax of the scores s over the keys that are seen, and over an extra key of score c, if there is one."""
    c = torch.zeros_like(s[..., :1])            # softmax1, Miller 2023
    if module.config.sink == "logit":           # GPT-OSS
        c = c + module.sink_logit[:, None, None]
    if module.config.sink.startswith("key"):    # When Attention Sink Emerges, table 4
        key, = features(module, every_head(module.sink_key[None, :, None], q.shape[1]))
        c = scale(module) * (q * key).sum(-1, keepdim=True)
    s = s.masked_fill(~seen, -math.inf)
    return torch.softmax(s if module.config.sink in ("none", "token") else torch.cat([c, s], -1), -1)


def random_features(module, q, k):
    """phi(q_i).phi(k_j), divided by its sum, with phi_w(y) = exp(w.y - |y|^2 / 2). Choromanski et al. 2009.14794."""
    q, k = (math.sqrt(scale(module)) * y for y in (q, k))               # q.k is the score
    q, k = (torch.exp(y @ module.directions.mT - y.square().sum(-1, keepdim=True) / 2) for y in (q, k))
    w = (q @ k.mT).tril()
    return w / w.sum(-1, keepdim=True)


def routing(module, q, k, s, past):
    """The mean over clusters of a softmax inside each. A cluster holds the queries and the keys whose directions are
    nearest to its mean. Roy et al. 2003.05997."""
    size = module.args["cluster_size"] or math.ceil(s.shape[-1] / module.args["clusters"])
    near = [(unit(y) @ module.means.mT).argsort(2, True).argsort(2) < size for y in (q, k)]     # (B, H, T, K)
    pairs = near[0].mT[..., :, None] & near[1].mT[..., None, :] & past                          # (B, H, K, T, T)
    e = pairs * s.exp()[:, :, None]
    w = (e / e.sum(-1, keepdim=True).clamp(min=1e-300)).sum(2)
    return w / pairs.any(-1).sum(2).clamp(min=1)[..., None]


# ---------------------------------------------------------------------------------------------------------------- Focus


def shares(module, x):
    """g: each token's shares of the groups, (B, T, K). Focus, eq. 1."""
    balance, N = module.config.balance, module.args.get("iterations", 0)
    x = x.detach() if balance in ("stop_gradient", "ema") else x        # table 8
    z = x @ module.router.weight.T - (module.middle if balance == "recluster" else 0)
    s = z @ module.centroids.T / module.args["temperature"]
    s = s - module.potential if balance == "potential" else s           # ours: Sinkhorn's result of past steps
    return sinkhorn(s, N) if balance == "sinkhorn" and N else torch.softmax(s, -1)


def sinkhorn(s, iterations):
    """Q = exp(s), divided in turn by its sums over tokens and by its sums over groups. Focus, section 2."""
    Q = s.exp()
    for _ in range(iterations):
        Q = Q / Q.sum(1, keepdim=True)
        Q = Q / Q.sum(2, keepdim=True)
    return Q


def focus(module, s, past, x):
    """Scores gated by g_i.g_j beyond the window (eq. 2), or a mask: distant pairs must share one of their topk largest
    groups (eq. 3)."""
    c, g = module.config, shares(module, x)
    near = past.triu(1 - c.window)
    if c.topk and not module.training:
        member = torch.zeros_like(g).scatter(-1, g.argsort(-1, True)[..., :c.topk], 1.0)
        return s, past & (near | (member @ member.mT > 0)[:, None])
    gate = torch.sigmoid(module.gate_scale * (g @ g.mT - module.gate_offset))[:, None]
    return torch.where(near, s, s + gate.log() if c.affinity == "log" else s * gate), past


# ------------------------------------------------------------------------------------------------------------ selection


def selection(module, q, k, s, past):
    """The softmax over the keys that each row selects, row by row."""
    seen, mass, s, (B, H, T, _) = torch.zeros_like(s, dtype=torch.bool), torch.ones_like(s[..., :1]), s.clone(), s.shape
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, T))).tolist():
        row = s[b, h, i, :i + 1].clone()
        chosen, change, mass[b, h, i] = CHOSEN[module.config.select](module, q[b, h, i], k[b, h, :i + 1], row)
        s[b, h, i, :i + 1], seen[b, h, i, :i + 1] = row + change, chosen
    sink, w = softmax(module, q, s, seen).tensor_split([-T], -1)
    mean = past / past.double().sum(-1, keepdim=True) * w.sum(-1, keepdim=True)     # SparQ: of all values
    return torch.cat([sink, mass * w + (1 - mass) * mean], -1)


def largest(rank, count):
    return torch.zeros(len(rank)).bool().scatter(0, rank.argsort(descending=True)[:count or len(rank)], True)


def by_score(module, q, K, s):
    return largest(s, module.config.topk), 0.0, 1.0


def by_components(module, q, K, s):
    """SparQ, Ribar et al. 2312.04985, algorithm 1."""
    parts, topk = q.abs().argsort(descending=True)[:module.args["components"]], module.config.topk
    cover = q[parts].abs().sum() / q.abs().sum() if q.any() else torch.ones(())
    rough = torch.softmax(scale(module) * K[:, parts] @ q[parts] / cover.sqrt(), 0)
    local = torch.arange(len(K)) >= len(K) - int(module.args["local"] * topk)
    chosen = largest(rough + local, topk)
    return chosen, 0.0, (rough * chosen).sum() if module.args["realloc"] else 1.0


def by_page(module, q, K, s):
    """Quest, Tang et al. 2406.10774, section 3. The row's own page, the last one, comes first."""
    pages = K.split(module.args["page"])
    bounds = [torch.maximum(q * page.amin(0), q * page.amax(0)).sum().item() for page in pages[:-1]] + [math.inf]
    chosen = largest(torch.tensor(bounds), math.ceil(module.config.topk / module.args["page"]))
    return chosen.repeat_interleave(torch.tensor([len(page) for page in pages])), 0.0, 1.0


def by_hash(module, q, K, s):
    """MagicPIG, Chen et al. 2410.16179, algorithm 1: keys that share two or more hashes with the query, and s - log u,
    where u is the chance that they do. Ours: the centre is the mean of early keys."""
    first, recent, bits, tables = (module.args[name] for name in ("first", "recent", "bits", "tables"))
    j, n = torch.arange(len(K)), len(K)
    exact = (j < first) | (j >= n - recent)
    K = torch.where(exact.all(), K, K - K[first:first + recent].mean(0))
    hashes = [(y @ module.planes.to(y) > 0).unflatten(-1, (tables, bits)) for y in (q, K)]
    equal = (hashes[0] == hashes[1]).all(-1).sum(-1)
    p = (1 - torch.acos(unit(K[~exact]) @ unit(q)) / math.pi) ** bits
    u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
    return exact | (equal >= 2), torch.zeros_like(s).masked_scatter(~exact, -u.clamp(min=1e-30).log()), 1.0


CHOSEN = {"topk": by_score, "sparq": by_components, "quest": by_page, "magicpig": by_hash}
