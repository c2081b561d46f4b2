"""The mixers as their papers define them, in float64: a state token by token, everything else as a
matrix of weights.

    layer(module, x)            a whole layer, (B, T, C) to (B, T, C)
    attend(module, q, k, v, x)  each head's output (B, H, T, E), from convolved and rotated q, k, v
    weights(module, q, k, x)    its attention weights (B, H, T, T), an extra key's column first

What mixers share with the rules of scores is in reference.py, and so is what a reference may read.
Shapes: B batch, H heads, T tokens, D width of q and k, E of v, C of the layer's input x (B, T, C).
"""

import math
from functools import partial

import reference
import torch
from reference import (
    TINY,
    by_mean_square,
    every_head,
    extra_score,
    factor,
    featured,
    postprocess,
    heads,
    weights_by_rule,
    with_extra,
)
from torch.nn import functional as F


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def attend(module, q, k, v, x, *_):
    c = module.config
    # Mamba2: all heads share one query and one key
    assert q.shape[1] == (1 if c.rule == "ssd" else c.n_head)
    if c.mixer != "recurrent":
        return reference.output(module, weights(module, q, k, x), v, x)
    run = MEMORIES.get(c.rule, linear_state)
    o = run(module, q, every_head(k, q.shape[1]), every_head(v, c.n_head), x)
    return postprocess(module, o, x, v)


layer = partial(reference.layer, attend=attend)


def weights(module, q, k, x):
    """w_ij of o_i = sum_j w_ij v_j, before norms and gates."""
    c = module.config
    H, T = c.n_head, k.shape[2]
    k = every_head(k, q.shape[1])
    if c.mixer == "recurrent":  # the outputs for one-hot values
        return linear_state(module, q, k, torch.eye(T).to(x).expand(len(x), H, T, T), x)
    causal = torch.ones(T, T).tril()[-q.shape[2] :].bool()  # (R, T), for the last R queries
    n = causal.sum(-1, keepdim=True).to(x)
    extra = extra_score(module, q, n)
    q = factor(module, n) * featured(module, q)
    k = featured(module, k)
    s = q @ k.mT
    if c.mixer == "focus":
        return weights_by_rule("softmax", *with_extra(*focus(module, s, causal, x), extra))
    if c.mixer == "selection":
        return selection(module, extra, q, k, s, causal)
    if c.mixer == "performer":
        return random_features(module, q, k)
    if c.mixer == "routing":
        return routing(module, q, k, s, causal)
    raise NotImplementedError(f"define the weights of mixer {c.mixer} here")


# States


def recurrence(q, k, v, keep, erase=None):
    """S_t = keep_t S_{t-1} + k_t^T (v_t - erase_t k_t keep_t S_{t-1}),  o_t = q_t S_t.

    The delta rule: Yang et al. 2406.06484; with forgetting 2412.06464. keep (B, H, T, 1 or D),
    erase (B, H, T, 1)."""
    S = torch.zeros(k.shape[3], v.shape[3]).to(v)
    outputs = []
    for t in range(v.shape[2]):
        q_t, k_t, v_t, keep_t = (y[:, :, t, None] for y in (q, k, v, keep))  # (B, H or 1, 1, .)
        S = keep_t.mT * S
        if erase is not None:
            v_t = v_t - erase[:, :, t, None] * (k_t @ S)
        S = S + k_t.mT @ v_t
        outputs.append(q_t @ S)
    return torch.cat(outputs, 2)


def kept(module, x):
    """The share of a state that survives a token, (B, H, T, 1 or D)."""
    H, forget = module.config.n_head, module.config.forget
    one = torch.ones(len(x), H, x.shape[1], 1).to(x)
    if forget == "fixed":  # RetNet, Sun et al. 2307.08621, eq. 8
        return one - 2.0 ** (-5 - torch.arange(H)[:, None, None])
    if forget == "channel":  # GLA, Yang et al. 2312.06635, section 4.4
        return torch.sigmoid(heads(module.fade(x), H)) ** (1 / 16)
    if forget in ("dt", "channel_dt"):  # Mamba2, Dao and Gu 2405.21060; a channel: KDA, 2510.26692
        return torch.exp(-module.A_log.exp()[:, None, None] * time_step(module, x))
    if forget == "alpha":  # 1 - alpha_t: Titans, eq. 13
        return 1 - torch.sigmoid(heads(module.alpha(x) - module.forget_bias, H))
    return one


def time_step(module, x):
    return F.softplus(heads(module.dt(x) + module.dt_bias.flatten(), module.config.n_head))


def written(module, x):
    """The share of v that a token writes, (B, H, T, 1): a beta (DeltaNet), rate or time step."""
    c = module.config
    if c.write == "dt":
        return time_step(module, x)
    if c.write in ("beta", "rate"):
        return torch.sigmoid(heads(module.beta(x), c.n_head))
    return torch.ones(len(x), c.n_head, x.shape[1], 1).to(x)


def of_state(module, q, k, v, x):
    """q, k, v, the share a state keeps, and the share of v a token writes."""
    q = factor(module) * featured(module, q)
    return q, featured(module, k), v, kept(module, x), written(module, x)


def linear_state(module, q, k, v, x):
    c = module.config
    q, k, v, keep, write = of_state(module, q, k, v, x)
    o = recurrence(q, k, write * v, keep, write if c.rule == "delta" else None)
    if c.normalize == "sum":  # the weights' sum is what values of 1 return
        o = o / (recurrence(q, k, write * torch.ones_like(v), keep) + 1e-8)
    if c.rule == "ssd":  # Mamba2: y = C h + D x
        o = o + module.skip[:, None, None] * v
    return o


# Memories that learn by gradient descent on |answer(M, k_t) - v_t|^2 / 2. Each gradient is that at
# the memory before t's chunk. A memory M is a list of two tensors


def gradient_of(answer, M, k, v):
    def loss(M):
        return (answer(M, k) - v).square().sum() / 2

    return torch.func.grad(loss)(M)


def by_descent(module, q, k, v, x):
    """TTT-linear, Sun et al. 2407.04620: M_t = keep_t M_{t-1} - rate_t gradient_t. Its answer is
    y + LayerNorm(y W + b). The n-th token of a chunk sees the memory before the chunk, and 1 / n +
    a learned number of the chunk's steps."""
    q, k, v, keep, rate = of_state(module, q, k, v, x)
    D, size = q.shape[-1], module.args["chunk"]
    rate = rate / D
    sees = F.relu(1 / torch.arange(1, size + 1).to(x) + module.place)

    def answer(M, y):
        W, b = M
        normed = F.layer_norm(y @ W + b, (D,), eps=1e-6)
        return y + normed * module.inner_scale + module.inner_bias

    M = [m.expand(len(x), *m.shape) for m in (module.memory, module.memory_bias)]
    outputs = []
    for t in range(x.shape[1]):
        q_t, k_t, v_t, keep_t, rate_t = (y[:, :, t, None] for y in (q, k, v, keep, rate))
        if t % size == 0:
            before = without = M  # without: the memory without this chunk's steps
        gradient = gradient_of(answer, before, k_t, v_t)
        without = [keep_t * m for m in without]
        M = [keep_t * m - rate_t * g for m, g in zip(M, gradient, strict=True)]
        seen = [m0 + sees[t % size] * (m - m0) for m0, m in zip(without, M, strict=True)]
        outputs.append(answer(seen, q_t))
        if t % size == size - 1:
            M = seen
    return torch.cat(outputs, 2)


def with_momentum(module, q, k, v, x):
    """Titans, Behrouz et al. 2501.00663, eq. 13 and 14: M_t = keep_t M_{t-1} + P_t, P_t = eta_t
    P_{t-1} - step_t gradient_t. Its answer is gelu(y M_in) M_out. Ours: values have size 1, step_t
    is rate_t (1 - eta_t) / chunk, and rate times curvature is at most 2."""
    q, k, v, keep, rate = of_state(module, q, k, v, x)
    D, size = q.shape[-1], module.args["chunk"]
    rate = rate / D**0.5
    v = by_mean_square(v)
    eta = torch.sigmoid(heads(module.momentum(x), q.shape[1]))

    def answer(M, y):
        into, out = M
        return F.gelu(y @ into) @ out

    M = [m.expand(len(x), *m.shape) for m in (module.memory_in, module.memory_out)]
    P = [torch.zeros_like(m) for m in M]
    outputs = []
    for t in range(x.shape[1]):
        q_t, k_t, v_t, keep_t, rate_t, eta_t = (
            y[:, :, t, None] for y in (q, k, v, keep, rate, eta)
        )
        if t % size == 0:
            before = M
        gradient = gradient_of(answer, before, k_t, v_t)
        # the curvature along the gradient: |gradient by M|^2 / |gradient by the answer|^2
        slope = sum(g.square().sum((-1, -2), keepdim=True) for g in gradient)
        # 1e-12: if nothing is stored and v_t is 0, both are 0
        curvature = slope / ((answer(before, k_t) - v_t).square().sum(-1, keepdim=True) + 1e-12)
        rate_t = rate_t / (rate_t * curvature / 2).clamp(min=1)
        step = rate_t * (1 - eta_t) / size
        P = [eta_t * p - step * g for p, g in zip(P, gradient, strict=True)]
        M = [keep_t * m + p for m, p in zip(M, P, strict=True)]
        outputs.append(answer(M, q_t))
    return torch.cat(outputs, 2)


MEMORIES = {"descent": by_descent, "momentum": with_momentum}

# Matrices of weights


def random_features(module, q, k):
    """phi(q_i).phi(k_j), divided by its sum, with phi_w(y) = exp(w.y - |y|^2 / 2). Choromanski et
    al. 2009.14794."""

    def phi(y):
        return torch.exp(y @ module.directions.mT - y.square().sum(-1, keepdim=True) / 2)

    root = math.sqrt(factor(module))  # q.k is the score: move its factor to both sides
    w = (phi(q / root) @ phi(k * root).mT).tril()
    return w / w.sum(-1, keepdim=True)


def routing(module, q, k, s, causal):
    """The mean over clusters of a softmax inside each. A cluster holds the queries and the keys
    whose directions are nearest to its mean. Roy et al. 2003.05997."""
    size = module.args["cluster_size"] or math.ceil(s.shape[-1] / module.args["clusters"])

    def members(y):  # (B, H, T, K)
        near = unit(y) @ module.means.mT
        return near.argsort(2, True).argsort(2) < size

    pairs = members(q).mT[..., :, None] & members(k).mT[..., None, :] & causal  # (B, H, K, T, T)
    e = pairs * s.exp()[:, :, None]
    w = (e / e.sum(-1, keepdim=True).clamp(min=1e-300)).sum(2)
    clusters = pairs.any(-1).sum(2)  # in which a row has keys
    return w / clusters.clamp(min=1)[..., None]


def shares(module, x):
    """g: each token's shares of the groups, (B, T, K). Focus, eq. 1."""
    balance = module.config.balance
    if balance in ("stop_gradient", "ema"):  # table 8
        x = x.detach()
    z = x @ module.router.weight.T
    if balance == "recluster":
        z = z - module.middle
    s = z @ module.centroids.T / module.args["temperature"]
    if balance == "potential":  # ours: Sinkhorn's result of past steps
        s = s - module.potential
    if balance == "sinkhorn":
        return sinkhorn(s, module.args["iterations"])
    return torch.softmax(s, -1)


def sinkhorn(s, iterations):
    """exp(s), divided in turn by its sums over tokens and over groups. 0 iterations: by the latter.
    Focus, 2."""
    if iterations == 0:
        return torch.softmax(s, -1)
    Q = s.exp()
    for _ in range(iterations):
        Q = Q / Q.sum(1, keepdim=True)
        Q = Q / Q.sum(2, keepdim=True)
    return Q


def focus(module, s, causal, x):
    """Scores gated by g_i.g_j beyond the window (eq. 2), or a mask: distant pairs share a topk
    group (eq. 3)."""
    c = module.config
    g = shares(module, x)
    near = causal.triu(1 - c.window)
    if c.topk and not module.training:
        member = torch.zeros_like(g).scatter(-1, g.argsort(-1, True)[..., : c.topk], 1.0)
        return s, causal & (near | (member @ member.mT > 0)[:, None])
    gate = torch.sigmoid(module.gate_scale * (g @ g.mT - module.gate_offset))[:, None]
    gated = s + gate.log() if c.affinity == "log" else s * gate
    return torch.where(near, s, gated), causal


def selection(module, extra, q, k, s, causal):
    """The softmax over the keys that each row selects, row by row."""
    B, H, T, _ = s.shape
    s = s.clone()
    seen = torch.zeros_like(s, dtype=torch.bool)
    mass = torch.ones_like(s[..., :1])
    choose = CHOSEN[module.config.select]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, T))).tolist():
        row = s[b, h, i, : i + 1].clone()
        chosen, change, mass[b, h, i] = choose(module, q[b, h, i], k[b, h, : i + 1], row)
        s[b, h, i, : i + 1] = row + change
        seen[b, h, i, : i + 1] = chosen
    sink, w = weights_by_rule("softmax", *with_extra(s, seen, extra)).tensor_split([-T], -1)
    # SparQ: the rest of a row's weight goes to the mean of all values
    mean = causal / causal.double().sum(-1, keepdim=True) * w.sum(-1, keepdim=True)
    return torch.cat([sink, mass * w + (1 - mass) * mean], -1)


# How a row selects: its query q (D,), the keys K (n, D) that it sees and their scores s (n,) to the
# chosen keys (n,), what to add to scores, and the share of the weight that the chosen keys have


def largest(rank, count):
    """The `count` largest, or all if count is 0."""
    chosen = torch.zeros(len(rank)).bool()
    return chosen.scatter(0, rank.argsort(descending=True)[: count or len(rank)], True)


def by_score(module, q, K, s):
    return largest(s, module.config.topk), 0.0, 1.0


def by_components(module, q, K, s):
    """SparQ, Ribar et al. 2312.04985, algorithm 1."""
    topk = module.config.topk
    parts = q.abs().argsort(descending=True)[: module.args["components"]]
    cover = q[parts].abs().sum() / q.abs().sum() if q.any() else torch.ones(())
    rough = torch.softmax(K[:, parts] @ q[parts] / cover.sqrt(), 0)
    local = torch.arange(len(K)) >= len(K) - int(module.args["local"] * topk)
    chosen = largest(rough + local, topk)
    return chosen, 0.0, (rough * chosen).sum() if module.args["realloc"] else 1.0


def by_page(module, q, K, s):
    """Quest, Tang et al. 2406.10774, section 3. The row's own page, the last one, comes first."""
    pages = K.split(module.args["page"])
    bounds = [torch.maximum(q * page.amin(0), q * page.amax(0)).sum() for page in pages]
    bounds[-1] = torch.tensor(math.inf)
    count = math.ceil(module.config.topk / module.args["page"])
    chosen = largest(torch.stack(bounds), count)
    return chosen.repeat_interleave(torch.tensor([len(page) for page in pages])), 0.0, 1.0


def by_hash(module, q, K, s):
    """MagicPIG, Chen et al. 2410.16179, algorithm 1: keys that share two or more hashes with the
    query, and s - log u, where u is the chance that they do. Ours: the centre is the mean of early
    keys."""
    first, recent, bits, tables = (module.args[a] for a in ("first", "recent", "bits", "tables"))
    n = len(K)
    j = torch.arange(n)
    exact = (j < first) | (j >= n - recent)
    if exact.all():
        return exact, 0.0, 1.0
    K = K - K[first : first + recent].mean(0)

    def hashes(y):
        return (y @ module.planes.to(y) > 0).unflatten(-1, (tables, bits))

    equal = (hashes(q) == hashes(K)).all(-1).sum(-1)
    p = (1 - torch.acos(unit(K[~exact]) @ unit(q)) / math.pi) ** bits
    u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
    change = torch.zeros_like(s).masked_scatter(~exact, -u.clamp(min=TINY).log())
    return exact | (equal >= 2), change, 1.0


CHOSEN = {"topk": by_score, "sparq": by_components, "quest": by_page, "magicpig": by_hash}
