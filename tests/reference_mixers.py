"""The mixers as their papers define them, in float64: a state token by token, all others as a matrix of weights.

    output(module, x)               a whole layer, (B, T, C) to (B, T, C)
    attend(module, q, k, v, x)      each head's output (B, H, T, E), from convolved and rotated q, k and v
    weights(module, q, k, x)        its attention weights (B, H, T, T), with an extra key's column first

Nothing here calls the code under test: it reads a layer's config, constants, parameters and buffers by name.
Shapes: B batch, H heads, T tokens, D width of q and k, E of v, C of the layer's input x (B, T, C).
"""
import math

import torch


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def heads(y, H):
    """(B, T, H * width) to (B, H, T, width)."""
    return y.unflatten(-1, (H, -1)).transpose(1, 2)


def side_by_side(o):
    """The reverse: all heads in one row."""
    return o.transpose(1, 2).flatten(2)


def every_head(y, H):
    """A group of neighbouring heads shares a head of keys or values."""
    return y.repeat_interleave(H // y.shape[1], 1)


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def rms(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(x, eps=1e-6):
    return rms(x - x.mean(-1, keepdim=True), eps)


def silu(x):
    return x * torch.sigmoid(x)


def elu_plus_one(x):
    return torch.where(x > 0, x + 1, x.exp())


# ------------------------------------------------------------------------------------------- before and after the mixer


def output(module, x):
    o = attend(module, *projected(module, x), x)
    return linear(module.c_proj, side_by_side(o))


def projected(module, x):
    """q, k and v of a layer's input: projection, convolution over 4 tokens (H3, Mamba), learned norm, RoPE."""
    c, T, D = module.config, x.shape[1], module.config.head_width
    y = linear(module.c_attn, x)
    if c.mixer in ("recurrent", "performer") and c.conv == "on":
        before = torch.cat([torch.zeros_like(y[:, :1]).expand(-1, 3, -1), y], 1)
        y = silu(sum(module.conv[:, 0, n] * before[:, n:n + T] for n in range(4)))
    H, K = (1, 1) if c.rule == "ssd" else (c.n_head, c.n_kv_head)       # Mamba2: all heads share one query and one key
    q, k, v = y.split([H * D, K * D, c.n_kv_head * D], -1)
    if c.qk_norm == "all":                      # OLMo 2
        q, k = rms(q, c.norm_eps) * module.q_norm.weight, rms(k, c.norm_eps) * module.k_norm.weight
    q, k, v = heads(q, H), heads(k, K), heads(v, c.n_kv_head)
    if c.qk_norm == "head":                     # Qwen3
        q, k = rms(q, c.norm_eps) * module.q_norm.weight, rms(k, c.norm_eps) * module.k_norm.weight
    if c.pos == "rope":                         # Su et al. 2021, paired half by half; TTT rotates within a chunk
        place = torch.arange(T).double() % (module.args["chunk"] if c.rule == "descent" else T)
        angle = place[:, None] * c.rope_base ** (-torch.arange(D // 2).double() / (D // 2))
        q, k = (torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest], -1)
                for a, b, rest in (y.split([D // 2, D // 2, D % 2], -1) for y in (q, k)))
    return q, k, v


def features(module, q, k):
    """q and k after the norm without weights and the feature map, with a head of k for each head of q."""
    c = module.config
    if c.qk_norm == "l2":
        q, k = unit(q), unit(k)
    if c.qk_norm == "rms":
        q, k = rms(q), rms(k)
    if c.feature == "elu":                      # Katharopoulos et al. 2020, eq. 7
        q, k = elu_plus_one(q), elu_plus_one(k)
    if c.feature == "mlp":                      # When Attention Sink Emerges, table 6
        q, k = (y @ module.feature[0].weight.T for y in (q, k))
        q, k = (y.relu() @ module.feature[2].weight.T for y in (q, k))
    return q, every_head(k, q.shape[1])


def attend(module, q, k, v, x):
    c = module.config
    if c.mixer == "recurrent":
        o = (learned if c.rule in ("descent", "momentum") else linear_state)(module, q, k, v, x)
    else:
        w = weights(module, q, k, x)
        o = w[..., -k.shape[2]:] @ every_head(v, c.n_head)
        if c.sink == "key_value":               # When Attention Sink Emerges, table 4
            o = o + w[..., :1] * every_head(module.sink_value[None], c.n_head)[:, :, None]
    if c.value_bias == "on":
        o = o + module.value_bias[:, None]
    if c.gate != "none":                        # Qiu et al. 2505.06708; with silu RetNet, GLA, Mamba2
        gate = heads(linear(module.gate, x), c.n_head)
        gate = silu(gate) if c.gate.startswith("silu") else torch.sigmoid(gate)
    o = o * gate if c.gate == "silu_first" else o                       # Mamba2 gates before its norm
    eps = module.args.get("out_norm_eps")
    if c.out_norm == "head":
        o = rms(o, eps) * module.out_norm.weight
    if c.out_norm in ("all", "gated"):          # ReLA, Zhang et al. 2021
        y = rms(side_by_side(o), eps) * module.out_norm.weight
        o = heads(y * torch.sigmoid(module.norm_gate * side_by_side(o)) if c.out_norm == "gated" else y, c.n_head)
    if c.out_norm == "layer":                   # TTT
        o = heads(layer_norm(side_by_side(o), eps) * module.out_norm.weight + module.out_norm.bias, c.n_head)
    return o * gate if c.gate in ("head", "element", "silu") else o


# --------------------------------------------------------------------------------------------------------------- states


def recurrence(q, k, v, keep, erase=None):
    """S_t = keep_t S_{t-1} + k_t^T (v_t - erase_t k_t keep_t S_{t-1}),  o_t = q_t S_t.

    The delta rule: Yang et al. 2406.06484; with forgetting 2412.06464. keep (B, H, T, 1 or D), erase (B, H, T, 1)."""
    q, k = (y.expand(*v.shape[:2], -1, -1) for y in (q, k))
    S, outputs = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
    for t in range(v.shape[2]):
        S, u = keep[:, :, t, :, None] * S, v[:, :, t]
        if erase is not None:
            u = u - erase[:, :, t] * torch.einsum("bhd,bhde->bhe", k[:, :, t], S)
        S = S + torch.einsum("bhd,bhe->bhde", k[:, :, t], u)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], S))
    return torch.stack(outputs, 2)


def kept(module, x):
    """The share of a state that survives a token, (B, H, T, 1 or D)."""
    H, forget = module.config.n_head, module.config.forget
    if forget == "fixed":                       # RetNet, Sun et al. 2307.08621, eq. 8
        keep = 1 - 2.0 ** (-5 - torch.arange(H).to(x))
        return keep[:, None, None].expand(len(x), -1, x.shape[1], 1)
    if forget == "channel":                     # GLA, Yang et al. 2312.06635, section 4.4
        return torch.sigmoid(heads(linear(module.fade[1], linear(module.fade[0], x)), H)) ** (1 / 16)
    if forget == "dt":                          # Mamba2, Dao and Gu 2405.21060
        return torch.exp(-module.A_log.exp()[:, None, None] * time_step(module, x))
    if forget == "alpha":                       # 1 - alpha_t: Titans, eq. 13
        return 1 - torch.sigmoid(heads(linear(module.alpha, x) - module.forget_bias, H))
    return torch.ones(len(x), H, x.shape[1], 1).to(x)


def time_step(module, x):
    return heads((linear(module.dt, x) + module.dt_bias).exp().log1p(), module.config.n_head)           # softplus


def written(module, x):
    """The share of its value that a token writes, (B, H, T, 1): DeltaNet's beta, TTT's and Titans' rate, Mamba2's dt."""
    H, write = module.config.n_head, module.config.write
    if write == "dt":
        return time_step(module, x)
    return torch.ones(len(x), H, x.shape[1], 1).to(x) if write == "one" else torch.sigmoid(heads(
        linear(module.beta, x), H))


def linear_state(module, q, k, v, x):
    c, (q, k), v = module.config, features(module, q, k), every_head(v, module.config.n_head)
    q, keep, write = scale(module) * q, kept(module, x), written(module, x)
    o = recurrence(q, k, write * v, keep, write if c.rule == "delta" else None)
    if c.normalize == "sum":                    # the weights' sum is what values of 1 return
        o = o / (recurrence(q, k, write * torch.ones_like(v), keep) + 1e-8)
    return o + module.skip[:, None, None] * v if c.rule == "ssd" else o # Mamba2: y = C h + D x


def scale(module):
    return 1.0 if module.config.scale == "one" else module.config.head_width ** -0.5


def learned(module, q, k, v, x):
    """A memory that learns by gradient descent on |answer(k_t) - v_t|^2 / 2, each gradient at the memory before t's
    chunk: M_t = keep_t M_{t-1} + P_t,  P_t = eta_t P_{t-1} - share_t rate_t gradient_t. Titans, Behrouz et al.
    2501.00663, eq. 13 and 14. TTT-linear, Sun et al. 2407.04620, has eta = 0 and lets the n-th token of a chunk see
    1 / n + a learned number of its chunk's steps."""
    c, (q, k), v = module.config, features(module, q, k), every_head(v, module.config.n_head)
    T, D, size, keep, rate = x.shape[1], c.head_width, module.args["chunk"], kept(module, x), written(module, x)
    q, sees, share, eta, most = scale(module) * q, torch.ones(T), 1, torch.zeros_like(rate), math.inf
    if c.rule == "descent":
        M, rate, place = (module.memory, module.memory_bias), rate / D, torch.arange(T) % size
        sees = (1 / (place + 1.0).double() + module.place[place]).relu()
    else:                                       # ours: a rate times curvature above 2 is lowered, values have size 1
        M, rate, v, most = (module.memory_in, module.memory_out), rate / D ** 0.5, rms(v), 2
        eta = torch.sigmoid(heads(linear(module.momentum, x), c.n_head))
        share = (1 - eta) / size

    def answer(M, y):
        if c.rule == "descent":
            return y + layer_norm(y @ M[0] + M[1]) * module.inner_scale + module.inner_bias
        a = y @ M[0]
        return (a * (1 + torch.erf(a / math.sqrt(2))) / 2) @ M[1]       # gelu

    def loss(M, k, v):
        return (answer(M, k) - v).square().sum() / 2

    M = tuple(m.expand(len(x), *m.shape) for m in M)
    P, outputs = [torch.zeros_like(m) for m in M], []
    for t in range(T):
        q_t, k_t, v_t, keep_t, eta_t, step = (y[:, :, t:t + 1] for y in (q, k, v, keep, eta, rate))
        if t % size == 0:
            anchor = without = M                # without: the memory without this chunk's steps
        gradient = torch.func.grad(loss)(anchor, k_t, v_t)
        if most < math.inf:
            slope = sum(g.square().sum((-1, -2), keepdim=True) for g in gradient)
            curvature = slope / (answer(anchor, k_t) - v_t).square().sum(-1, keepdim=True)
            step = step / (step * curvature / most).clamp(min=1)
        step = step * (share if c.rule == "descent" else share[:, :, t:t + 1])
        P = [eta_t * p - step * g for p, g in zip(P, gradient, strict=True)]
        without = [keep_t * m for m in without]
        M = tuple(keep_t * m + p for m, p in zip(M, P, strict=True))
        seen = tuple(m0 + sees[t] * (m - m0) for m0, m in zip(without, M, strict=True))
        outputs.append(answer(seen, q_t))
        M = seen if t % size == size - 1 else M
    return torch.cat(outputs, 2)


# ------------------------------------------------------------------------------------------------- matrices of weights


def weights(module, q, k, x):
    """w_ij of o_i = sum_j w_ij v_j, before norms and gates."""
    c, (B, H, T, D) = module.config, (*q.shape[:2], *k.shape[2:])
    if c.mixer == "recurrent":                  # the outputs for one-hot values
        return linear_state(module, q, k, torch.eye(T).to(x).expand(B, c.n_head, T, T), x)
    q, k = features(module, q, k)
    if c.mixer == "performer":
        return random_features(module, q, k)
    q = q * scores_grow(module, T)
    s, past = scale(module) * q @ k.mT, torch.ones(T, T).tril().bool()
    if c.mixer == "routing":
        return routing(module, q, k, s, past)
    if c.mixer == "focus":
        return softmax(module, q, *focus(module, s, past, x))
    s, seen, mass = selection(module, q, k, s)
    sink, w = softmax(module, q, s, seen).tensor_split([-T], -1)
    mean = past.double() / past.sum(-1, keepdim=True) * w.sum(-1, keepdim=True)
    return torch.cat([sink, w if mass is None else mass * w + (1 - mass) * mean], -1)


def softmax(module, q, s, seen):
    """The softmax of the scores s (B, H, T, T) over the keys that are seen, and an extra key of score c if there is
    one. Its column comes first."""
    sink, H = module.config.sink, module.config.n_head
    if sink not in ("none", "token"):           # a token is an ordinary key
        c = torch.zeros_like(s[..., :1])        # softmax1, Miller 2023
        if sink == "logit":                     # GPT-OSS
            c = c + module.sink_logit[:, None, None]
        if sink.startswith("key"):              # When Attention Sink Emerges, table 4
            _, key = features(module, q, every_head(module.sink_key[None, :, None], H))
            c = scale(module) * (q * key).sum(-1, keepdim=True)
        s, seen = torch.cat([c, s], -1), torch.cat([torch.ones_like(c).bool(), seen.expand_as(s)], -1)
    return torch.softmax(s.masked_fill(~seen, -math.inf), -1)


def scores_grow(module, T):
    """The factor on the scores of row i, with n = i + 1 keys."""
    n = torch.arange(1, T + 1).double()[:, None]
    if module.config.scale == "log_n":          # SSMax, Nakanishi 2501.19399
        return module.sigma[:, None, None] * n.log()
    if module.config.scale == "asentmax":       # Vasylenko et al. 2506.16640
        return 1 + module.scale_beta[:, None, None] * (n + 1).log() ** module.scale_gamma[:, None, None]
    return 1.0


def random_features(module, q, k):
    """phi(q_i).phi(k_j), divided by its sum, with phi_w(y) = exp(w.y - |y|^2 / 2). Choromanski et al. 2009.14794."""
    q, k = (math.sqrt(scale(module)) * y for y in (q, k))               # q.k is then the score
    phi_q, phi_k = (torch.exp(y @ module.directions.mT - y.square().sum(-1, keepdim=True) / 2) for y in (q, k))
    w = (phi_q @ phi_k.mT).tril()
    return w / w.sum(-1, keepdim=True)


def routing(module, q, k, s, past):
    """The mean over clusters of a softmax inside each: a cluster holds the w queries and w keys whose direction is
    nearest to its mean. Roy et al. 2003.05997."""
    T, K = s.shape[-1], module.means.shape[1]
    size = min(T, module.args["cluster_size"] or math.ceil(T / K))
    q_in, k_in = (torch.zeros_like(near, dtype=torch.bool).scatter(2, near.argsort(2, True)[:, :, :size], True)
                  for near in (unit(y) @ module.means.mT for y in (q, k)))                  # (B, H, T, K)
    pairs = q_in.mT[..., :, None] & k_in.mT[..., None, :] & past                            # (B, H, K, T, T)
    e = pairs * s.exp()[:, :, None]
    w = (e / e.sum(-1, keepdim=True).clamp(min=1e-300)).sum(2)
    return w / pairs.any(-1).sum(2).clamp(min=1)[..., None]


# ---------------------------------------------------------------------------------------------------------------- Focus


def shares(module, x):
    """g: each token's shares of the groups, (B, T, K). Focus, eq. 1."""
    c, args = module.config, module.args
    x = x.detach() if c.balance in ("stop_gradient", "ema") else x      # table 8
    z = x @ module.router.weight.T - (module.middle if c.balance == "recluster" else 0)
    s = z @ module.centroids.T / args["temperature"]
    if c.balance == "potential":                # ours: Sinkhorn's result from past steps
        s = s - module.potential
    if c.balance == "sinkhorn" and args["iterations"]:
        return sinkhorn(s, args["iterations"])
    return torch.softmax(s, -1)


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
    c, g, T = module.config, shares(module, x), s.shape[-1]
    near = past & ~torch.ones(T, T).tril(-c.window).bool()
    if c.topk and not module.training:
        member = torch.zeros_like(g).scatter(-1, g.argsort(-1, True)[..., :c.topk], 1.0)
        return s, past & (near | (member @ member.mT > 0)[:, None])
    gate = torch.sigmoid(module.gate_scale * (g @ g.mT - module.gate_offset))[:, None]
    return torch.where(near, s, s + gate.log() if c.affinity == "log" else s * gate), past


# ------------------------------------------------------------------------------------------------------------ selection


def selection(module, q, k, s):
    """Row by row: scores, which keys a row selects, and with SparQ's realloc the share of softmax that they have."""
    rows = [SELECTS[module.config.select](module, q[b, h, i], k[b, h, :i + 1], s[b, h, i, :i + 1])
            for b, h, i in torch.cartesian_prod(*map(torch.arange, s.shape[:3])).tolist()]
    s, seen = (torch.stack([torch.cat([y, y.new_zeros(s.shape[-1] - len(y))]) for y in part]).view_as(s)
               for part in list(zip(*rows, strict=True))[:2])
    mass = [row[2] for row in rows]
    return s, seen.bool(), None if mass[0] is None else torch.stack(mass).view(*s.shape[:3], 1)


def largest(rank, count):
    return torch.zeros(len(rank)).scatter(0, rank.argsort(descending=True)[:count or len(rank)], 1.0)


def top_row(module, q, K, s):
    return s, largest(s, module.config.topk), None


def sparq_row(module, q, K, s):
    """Ribar et al. 2312.04985, algorithm 1."""
    n, args, topk = len(K), module.args, module.config.topk
    parts = q.abs().argsort(descending=True)[:args["components"]]
    cover = q[parts].abs().sum() / q.abs().sum() if q.any() else torch.ones(())
    rough = torch.softmax(scale(module) * K[:, parts] @ q[parts] / cover.sqrt(), 0)
    chosen = largest(rough + (torch.arange(n) >= n - int(args["local"] * topk)), topk)
    return s, chosen, (rough * chosen).sum() if args["realloc"] else None


def quest_row(module, q, K, s):
    """Tang et al. 2406.10774, section 3. The row's own page, the last one, comes first."""
    pages = K.split(module.args["page"])
    bounds = [torch.maximum(q * page.amin(0), q * page.amax(0)).sum().item() for page in pages[:-1]] + [math.inf]
    chosen = largest(torch.tensor(bounds), math.ceil(module.config.topk / module.args["page"]))
    return s, chosen.repeat_interleave(torch.tensor([len(page) for page in pages])), None


def magicpig_row(module, q, K, s):
    """Chen et al. 2410.16179, algorithm 1: keys that share two or more hashes with the query, and s - log u for the
    chance u that they do. Ours: the centre is a mean of early keys."""
    n, (first, recent, bits, tables) = len(K), (module.args[name] for name in ("first", "recent", "bits", "tables"))
    exact = (torch.arange(n) < first) | (torch.arange(n) >= n - recent)
    if exact.all():
        return s, exact.double(), None
    K = K - K[first:first + recent].mean(0)
    hash_q, hash_k = ((y @ module.planes.to(y) > 0).unflatten(-1, (tables, bits)) for y in (q, K))
    equal = (hash_q == hash_k).all(-1).sum(-1)
    p = (1 - torch.acos(unit(K) @ unit(q)) / math.pi) ** bits
    u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
    return torch.where(exact, s, s - u.clamp(min=1e-30).log()), (exact | (equal >= 2)).double(), None


SELECTS = {"topk": top_row, "sparq": sparq_row, "quest": quest_row, "magicpig": magicpig_row}
