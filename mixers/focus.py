"""Focus: learned groups of tokens decide which distant pairs may attend to each other. Source: Focus, section 2 and
appendix D.

A router gives every token x_i a share g_ik of each of K groups. The product g_i . g_j of two tokens' shares opens or
shuts a gate on their score. Near pairs, i - j < window, have no gate. The rest is plain softmax attention:

    s'_ij = s_ij                                near                g_i = balance(W x_i . C^T / temperature)
    s'_ij = s_ij gated by g_i . g_j             distant             gate = sigmoid(gate_scale (g_i . g_j - gate_offset))

The heads of a layer share W (d_g x C) and the centroids C (K x d_g). A retrofit trains only these:
`train.py --init_from=RUN --attn=focus --train_only=focus`. Training computes every pair with its soft gate. With
--topk=k the model is evaluated as in the paper: a token is a member of its k largest groups, and a distant pair attends
if and only if the two tokens share a group. Then the other distant pairs are never computed, see `sparse`.

The axis --balance chooses `balance`. With the gradient alone, one group takes all tokens (section 4). The paper's
Sinkhorn evens out the groups over all tokens of a sequence, so an early token's groups depend on later tokens. The loss
of such a model is not a prediction loss, and the model cannot be decoded. The default therefore carries the result of
Sinkhorn from batch to batch, one number for each group. It is causal.

Shapes: B batch, H heads, R rows, T keys, D width of q and k, E of v, K groups.  x (B, T, C)   g (B, T, K)
"""
import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

import kernels
from attention import MASKED, RULES, LogSumExp, choose_kernel, softmax, triton_obstacles
from axes import options
from axes.base import Choice, Constant, Fixed, Normal, only, wide
from axes.layer import Layer
from axes.outputs import GATES, OUT_NORMS, VALUE_BIASES
from axes.positions import WITHOUT_BIAS
from axes.queries_keys import QK_NORMS
from axes.rows import SINKS, normalised_output, share_of_keys
from axes.sight import Sight, visible
from kernels import for_products, grouped, scaled_scores, weighted_sum

# -------------------------------------------------------------------------- the axis balance: how tokens find a group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance(Choice):
    """How a token's scores become shares of groups.

    `count` returns a statistic of a training step's tokens, which is summed over micro-batches and ranks; if it is a
    `sample`, only the step's first one is kept. After the step, `settle` updates the layer from it."""
    shares: Callable | None = None              # layer, scores over the temperature (B, T, K) -> g, whose rows sum to 1
    causal: bool = True                         # no token's share depends on later tokens
    detached: bool = False                      # the router's gradient ends at its input
    count: Callable | None = None               # layer, s, z (B, T, d_g) = W x, g -> a tensor
    sample: bool = False
    settle: Callable | None = None              # layer, the statistic of the step
    penalty: Callable | None = None             # layer, g -> a term of the loss


def by_softmax(layer, s):
    """g_i = softmax(s_i). Nothing keeps the groups even, and training shuts no gate. Section 4."""
    return s.softmax(-1)


def potentials(layer, s):
    """The potentials u (B, 1, K), mean 0, that Sinkhorn subtracts from the scores of each group.

    Starting from Q = exp(s), each of N iterations divides by the sum over tokens, then by the sum over groups. Here Q
    is in logarithms. After the last division, each row of Q is softmax(s_i - u). NOT causal: the sum over tokens
    includes later ones."""
    Q, u = s, 0.0
    for _ in range(layer.args["iterations"]):
        u = u + Q.logsumexp(1, keepdim=True)
        Q = (s - u).log_softmax(-1)
    return u - u.mean(-1, keepdim=True) if layer.args["iterations"] else torch.zeros_like(s[:, :1])


def sinkhorn(layer, s):
    """g = Q, the result of Sinkhorn, as in the paper's section 2."""
    return (s - potentials(layer, s)).softmax(-1)


def with_potential(layer, s):
    """g_i = softmax(s_i - u), where u averages Sinkhorn's potentials over the sequences of past steps. Causal: u is a
    constant for the gradient and in evaluation. It starts at 0 and moves by `rate`, so the groups are not
    even in the first twenty steps or so."""
    return (s - layer.potential).softmax(-1)


def sum_of_potentials(layer, s, z, g):
    """The potentials summed over sequences, and the number of sequences: (K + 1,)."""
    return F.pad(potentials(layer, s).sum((0, 1)), (0, 1), value=len(s))


def move_potential(layer, sums):
    layer.potential.lerp_(sums[:-1] / sums[-1], layer.args["rate"])


def confident_and_even(layer, g):
    """The mean entropy of a token's shares minus the entropy of the mean share. It is low where each token is sure of
    its group and the groups are even. The paper names "entropy and balance losses" without a formula; its "balance
    weight x5" is penalty=0.05 here. It is computed for each micro-batch, so it depends on how a batch is split."""
    return layer.args["penalty"] * (entropy(g).mean() - entropy(g.mean((0, 1))))


def entropy(p):
    return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)  # clamp: finite slope at p = 0


def sums_by_group(layer, s, z, g):
    """Each group's sum of shares, and its sum of tokens weighted by their shares: (K, 1 + d_g)."""
    return torch.cat([g.sum((0, 1))[:, None], torch.einsum("btk,btd->kd", g, z)], 1)


def move_centroids(layer, sums):
    """Move each centroid towards the mean of its tokens; the centroid of an empty group stays."""
    mass = sums[:, :1]
    means = torch.where(mass > 1e-3, sums[:, 1:] / mass.clamp(min=1e-3), layer.centroids)
    layer.centroids.lerp_(means, layer.args["rate"])


def a_sequence(layer, s, z, g):
    """A sample for k-means: at most 512 tokens, evenly spaced, of the first sequence."""
    return z[0, ::-(-z.shape[1] // 512)]


def recluster(layer, z):
    """Every `every` steps: run k-means on the tokens z (n, d_g) minus their mean, and take the directions of its means
    as centroids."""
    layer.steps += 1
    if layer.steps % layer.args["every"] == 0:
        layer.middle.copy_(z.mean(0))
        layer.centroids.copy_(F.normalize(k_means(z - layer.middle, layer.groups), dim=-1))


def k_means(z, K):
    """K means (K, d) of points z (n, d), by ten rounds of k-means. Each mean starts at the point that is farthest
    from the earlier starts."""
    means = z[:1]
    for _ in range(1, K):
        means = torch.cat([means, z[torch.cdist(z, means).amin(1).argmax()][None]])
    for _ in range(10):
        member = F.one_hot(torch.cdist(z, means).argmin(1), K).to(z)    # (n, K)
        count = member.sum(0)[:, None]
        means = torch.where(count > 0, member.T @ z / count.clamp(min=1), means)
    return means


def router(layer):
    """W and the centroids. The paper gives no initial values. These give scores of unit variance for an input of unit
    variance."""
    C, d_g = layer.config.n_embd, layer.args["route_dim"]
    return {"router": nn.Linear(C, d_g, bias=False), "router.weight": Normal(C ** -0.5),
            "centroids": Normal(d_g ** -0.5, (layer.groups, d_g))}


def router_alone(layer):
    """The same, with centroids that have no gradient."""
    generator = torch.Generator().manual_seed(layer.depth)
    start = torch.randn(layer.groups, layer.args["route_dim"], generator=generator)
    return router(layer) | {"centroids": Fixed(F.normalize(start, dim=-1))}


def router_and_middle(layer):
    """The same, and the mean that is subtracted from every token before it is scored."""
    middle = torch.zeros(layer.args["route_dim"])
    return router_alone(layer) | {"middle": Fixed(middle), "steps": Fixed(torch.zeros(()))}


# 62: a token's set of groups is stored as the bits of an int64
ROUTER = {"groups": Constant(4, 1, 62), "route_dim": Constant(16, 1, 65536),
          "temperature": Constant(0.1, 1e-6, math.inf)}
SINKHORN = ROUTER | {"iterations": Constant(10, 0, 1000)}

BALANCES = {                                    # the default is ours; the others are the paper's: section 2, table 8
    "potential": Balance(learns=lambda layer: router(layer) | {"potential": Fixed(torch.zeros(layer.groups))},
                         args=SINKHORN | {"rate": Constant(0.1, 0.0, 1.0)}, shares=with_potential,
                         count=sum_of_potentials, settle=move_potential),
    "sinkhorn": Balance(learns=router, args=SINKHORN, shares=sinkhorn, causal=False),
    "softmax": Balance(learns=router, args=ROUTER, shares=by_softmax),
    "entropy": Balance(learns=router, args=ROUTER | {"penalty": Constant(0.01, 0.0, math.inf)}, shares=by_softmax,
                       penalty=confident_and_even),
    "stop_gradient": Balance(learns=router, args=ROUTER, shares=by_softmax, detached=True),
    "ema": Balance(learns=router_alone, args=ROUTER | {"rate": Constant(0.01, 0.0, 1.0)}, shares=by_softmax,
                   detached=True, count=sums_by_group, settle=move_centroids),
    "recluster": Balance(learns=router_and_middle, args=ROUTER | {"every": Constant(100, 1, 10**9)}, shares=by_softmax,
                         count=a_sequence, sample=True, settle=recluster),
}

# ------------------------------------------------------------------- the axis affinity: what a gate does to a score


def log_gate(s, z):
    """s + log sigmoid(z): the gate multiplies the weight, so a shut gate removes the pair, like a mask.

    Differs from the paper: its eq. 2 is `score_gate`. It has no value for gate_scale (its lambda) and no
    gate_offset.
    """
    return s + F.logsigmoid(z)


def score_gate(s, z):
    """s sigmoid(z), the paper's eq. 2. A shut gate makes the score 0, which is not a mask: exp(0) = 1 is a usual
    weight, and a negative score even rises. Without an offset, as in the paper, no gate is below 1/2."""
    return s * torch.sigmoid(z)


def no_window(config, args, choices):
    if not config.window:
        return "--attn=focus gates the pairs beyond a window, and --window=0 gates none: give --window=1 or more"


def numbers_of_gate(layer):
    return {name: torch.tensor(float(layer.args[name])) for name in ("gate_scale", "gate_offset")}


def gate_args(offset):
    return {"gate_scale": Constant(10.0), "gate_offset": Constant(offset), "learn_gate_scale": Constant(False),
            "learn_gate_offset": Constant(False)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Affinity(Choice):
    gated: Callable | None = None               # scores s, gate arguments z, broadcast to (B, H, R, T) -> s'


AFFINITIES = {
    "log": Affinity(learns=numbers_of_gate, args=gate_args(0.5), refuse=no_window, gated=log_gate),
    "score": Affinity(learns=numbers_of_gate, args=gate_args(0.0), refuse=no_window, gated=score_gate),
}

# ------------------------------------------------------------------------------------------------------ all the axes


def more_than_groups(config, args, choices):
    if config.topk > args["groups"]:
        return (f"--topk={config.topk} is more than the {args['groups']} groups: lower it, or raise "
                "--attn_args=groups=NUMBER")


AXES = options.defaults_but(
    only(RULES, "softmax"), balance=BALANCES, affinity=AFFINITIES, pos=WITHOUT_BIAS, qk_norm=QK_NORMS,
    value_bias=VALUE_BIASES, out_norm=OUT_NORMS, gate=GATES,
    sink={name: choice for name, choice in SINKS.items() if not choice.ahead})

REFUSED = {                                     # {axis: why Focus does not accept its other values}
    "window_every": "each layer has a router, which needs the layer's own window",
    "first": "its groups decide which keys a row sees beyond the window",
    "pos": "its sparse form sorts the keys by group, so a bias by distance cannot be added",
    "rule": "only softmax can be computed in parts, which are merged by their log-sum-exps",
}

# ------------------------------------------------------------------------------------- all pairs, a block at a time


def gated_block(affinity, local, sight, need_r, dropout, i, q, k, v, a, b):
    """Output (B, H, R, E) of one block of rows, and its log-sum-exp if need_r. a (B, 1, R, G) and b (B, 1, keys, G) are
    the factors of the gate arguments, see `Focus.gate_factors`."""
    w, r = gated_weights(affinity, local, sight, i, q, k, a, b, need_r)
    o = weighted_sum(w, v, dropout)
    return (o, r) if need_r else (o,)


def gated_weights(affinity, local, sight, i, q, k, a, b, need_r):
    """Weights (B, H, R, keys) of the rows at positions i (R,), and their log-sum-exp if need_r. affinity None: hard
    gates, open or shut."""
    j = torch.arange(k.shape[2], device=k.device) + (i[-1] + 1 - k.shape[2])
    near, seen = i[:, None] - j < local, visible(i[:, None], j, sight)
    s = scaled_scores(q, k, sight.scale)                                # (B, H, R, keys)
    z = grouped(a, b.mT)                                                # (B, 1, R, keys)
    if affinity:
        s = torch.where(near, s, affinity(s, z))
    else:
        seen = seen & (near | (z > 0))
    w = softmax(s, seen)
    return w, LogSumExp.apply(s, seen, w) if need_r else None


# --------------------------------------------------------------------------------------- the sparse form: open pairs


def sparse(q, k, v, members, local, scale, fused=False):
    """Attention with hard gates that skips shut pairs: o (B, H, T, E) and log-sum-exp (B, H, T, 1). members (B, T, K).

    Appendix D splits the open pairs into two disjoint parts: pairs that share a group, and near pairs that do not. It
    merges the outputs of both by their log-sum-exps. That is exact: a softmax over both parts is the mean of their
    outputs, weighted by their sums of exponentials.

    The paper has one group for each token. With k groups a pair may share several and must count once. So tokens are
    sorted by their set of groups, and the rows of one set see all keys whose sets share a group with it, in one
    softmax."""
    sequences = [sparse_sequence(*parts, local, scale, fused) for parts in zip(q, k, v, members, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*sequences, strict=True))


def sets_of(members):
    """The distinct sets of groups among tokens, from members (T, K).

    Returns each token's set as the bits of a number (T,), its index among the S sets (T,), the number of tokens in each
    set (S,), and which sets share a group (S, S)."""
    bits = (members * 2 ** torch.arange(members.shape[1], device=members.device)).sum(-1)
    sets, set_index, sizes = bits.unique(return_inverse=True, return_counts=True)
    return bits, set_index, sizes, (sets[:, None] & sets) != 0


def sparse_sequence(q, k, v, members, local, scale, fused):
    """One sequence: q (H, T, D), k and v with as many heads or fewer, members (T, K)."""
    bits, set_index, sizes, share_group = sets_of(members)
    order = set_index.argsort(stable=True)      # by set, and within a set by position
    outputs = []
    for number, rows in enumerate(order.split(sizes.tolist())):
        alone = share_group[number].sum() == 1  # it shares groups with itself only
        keys = rows if alone else share_group[number][set_index].nonzero()[:, 0]
        outputs.append(causal_softmax(q[:, rows], k[:, keys], v[:, keys], rows, keys, scale, fused))
    back = order.argsort()
    o, r = (torch.cat(parts, 1)[:, back] for parts in zip(*outputs, strict=True))
    near, near_r = near_softmax(q, k, v, bits, local, scale, fused)
    near_r = near_r.masked_fill(without_near_keys(set_index, share_group, local)[:, None], MASKED)
    share = torch.sigmoid(r - near_r)           # weight of the keys that share a group
    return o * share + near * (1 - share), torch.logaddexp(r, near_r)


def causal_softmax(q, k, v, rows, keys, scale, fused):
    """Softmax of the queries at positions `rows` over the keys at positions `keys` up to their own; both are
    sorted. Returns o (H, R, E) and log-sum-exp (H, R, 1)."""
    same_tokens = len(rows) == len(keys)        # plain causal attention
    if fused and same_tokens:
        o, r = kernels.attend("softmax", q[None], k[None], v[None], scale=scale)
        return wide(o[0]), r[0][..., None]
    if same_tokens and can_use_flash(q):
        return masked_softmax(q, k, v, None, scale)
    ends, outputs = torch.searchsorted(keys, rows, right=True).tolist(), []
    for start in range(0, len(rows), ROWS):
        block, end = rows[start:start + ROWS], ends[min(start + ROWS, len(rows)) - 1]
        outputs.append(masked_softmax(q[:, start:start + ROWS], k[:, :end], v[:, :end], keys[:end] <= block[:, None],
                                      scale))
    return tuple(torch.cat(parts, 1) for parts in zip(*outputs, strict=True))


def near_softmax(q, k, v, bits, local, scale, fused):
    """Softmax over the keys in the window that share no group with the row: o (H, T, E) and log-sum-exp (H, T, 1). Both
    are meaningless for the rows `without_near_keys`."""
    if fused:
        o, r = kernels.attend("softmax", q[None], k[None], v[None], scale=scale, window=local, sets=bits[None])
        return wide(o[0]), r[0][..., None]
    T, outputs = len(bits), []
    for start in range(0, T, ROWS):
        rows, keys = slice(start, min(start + ROWS, T)), slice(max(0, start + 1 - local), min(start + ROWS, T))
        i, j = (torch.arange(part.start, part.stop, device=q.device) for part in (rows, keys))
        seen = visible(i[:, None], j, Sight(window=local)) & ((bits[rows, None] & bits[keys]) == 0)
        outputs.append(masked_softmax(q[:, rows], k[:, keys], v[:, keys], seen, scale))
    return tuple(torch.cat(parts, 1) for parts in zip(*outputs, strict=True))


def without_near_keys(set_index, share_group, local):
    """Which rows (T,) share a group with all keys in their window."""
    i = torch.arange(len(set_index), device=set_index.device)
    # (S, T): up to each position, the last key that shares no group with the set
    last = torch.where(share_group[:, set_index], -1 - local, i).cummax(1).values
    return last[set_index, i] <= i - local


ROWS = 512                                      # rows of a block; large, because these blocks have few keys


def masked_softmax(q, k, v, seen, scale):
    """Softmax of queries (H, R, D) over the keys (Hk, T, D) in the mask `seen` (R, T): output (H, R, E) and
    log-sum-exp (H, R, 1). seen None: causal, with as many queries as keys."""
    if can_use_flash(q):                        # torch's fused kernel; its log-sum-exp has no gradient
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        bias = None if seen is None else torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)
        o, r = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], 0.0, seen is None, attn_mask=bias, scale=scale)
        return wide(o[0]), r[0][..., None]
    s = wide(heads_product(q * scale, k.mT))    # (H, R, T)
    w = softmax(s, seen)
    return wide(heads_product(w.to(v.dtype), v)), LogSumExp.apply(s, seen, w)


def can_use_flash(q):
    return q.device.type == "cpu" and not torch.is_grad_enabled()


def heads_product(a, b):
    """a @ b of one sequence, (H, R, .); a group of heads may share one head of b."""
    return grouped(a[None], b[None])[0]


# ---------------------------------------------------------------------------------------------------------- the layer


class Focus(Layer):
    """A layer of softmax attention with a router: (B, T, C) to (B, T, C).

    past, the cache of generation, also holds the tokens' shares of groups.
    """
    axes, refused = AXES, REFUSED
    numbers = {"window": options.NUMBERS["window"], "topk": options.Number(0, more_than_groups)}
    added = ("router.weight", "centroids", "gate_scale", "gate_offset", "potential", "middle", "steps")
    retrofit = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.local = self.sight.window          # pairs nearer than this have no gate
        self.sight = self.sight._replace(window=0)                      # every earlier key is visible
        self.causal = self.cached = self.choices["balance"].causal
        self.counted = None                     # the statistic of this training step
        self.penalized = self.choices["balance"].penalty is not None

    @property
    def groups(self):
        return self.args["groups"]

    @property
    def hard(self):
        """The number of groups of each token under hard gates; 0: soft gates. Training always uses soft gates, because
        no gradient flows through a mask to the router."""
        return 0 if self.training else self.config.topk

    # ------------------------------------------------------------------ routing

    def assign(self, x):
        """The tokens' shares of groups g (B, T, K), whose rows sum to 1, from the layer's normed input x (B, T, C). In
        float32, because the division by the temperature amplifies rounding."""
        balance = self.choices["balance"]
        with torch.autocast(x.device.type, enabled=False):
            z = F.linear(wide(x.detach() if balance.detached else x), self.router.weight)       # (B, T, d_g)
            middle = getattr(self, "middle", 0.0)
            s = (z - middle) @ self.centroids.mT / self.args["temperature"]             # (B, T, K)
            g = balance.shares(self, s)
        if self.training and balance.penalty:
            self.penalty = balance.penalty(self, g)
        if self.training and balance.count:
            statistic = balance.count(self, s.detach(), z.detach(), g.detach())
            if self.counted is None:
                self.counted = statistic
            elif not balance.sample:            # a sample: the first micro-batch has the step's first sequence
                self.counted = self.counted + statistic
        return g

    @torch.no_grad()
    def finish_step(self, machine):
        """After a training step: update the router from the step's statistic, equally on all ranks."""
        self.penalty = 0.0                      # free its graph
        balance, counted, self.counted = self.choices["balance"], self.counted, None
        if counted is None or not self.router.weight.requires_grad:     # a frozen router keeps its groups
            return
        if balance.sample:                      # all ranks take the main rank's: the others add 0 to the mean
            counted = counted * machine.world * machine.main
        balance.settle(self, machine.mean(counted))

    @staticmethod
    def memberships(g, k):
        """The k largest groups of each token: (B, T, K), true or false."""
        return torch.zeros_like(g, dtype=torch.bool).scatter(-1, g.topk(k, -1).indices, True)

    def gate_factors(self, g):
        """Two factors a, b (B, 1, T, K + 1) such that a_i . b_j is the argument of the gate of tokens i and j. For hard
        gates, it is above 0 if and only if they share a group."""
        if self.hard:
            g, scale, offset = wide(self.memberships(g, self.hard).to(g.dtype)), 1.0, 0.5
        else:
            scale, offset = self.gate_scale, self.gate_offset
        ones = torch.ones_like(g[..., :1])
        return torch.cat([g * scale, -scale * offset * ones], -1)[:, None], torch.cat([g, ones], -1)[:, None]

    # ------------------------------------------------------------------ the layer's interface

    def forward(self, x, past=None):
        """x (B, R, C), the layer's normed input. past: a dict, the cache of keys, values and shares."""
        q, k, v = self.heads_of(self.c_attn(x))
        shares = {}                             # of all tokens; without a cache attend computes them from x
        if past is not None:
            k, v, _ = self.recall(past, k, v)
            g = self.assign(x)
            past["g"] = torch.cat([past["g"], g], 1) if "g" in past else g
            shares = {"g": past["g"]}
        if self.choices["pos"].rotates:
            q, k = self.rotated(q, k)
        return self.output(self.attend(q, k, v, x, None, **shares))

    def attend(self, q, k, v, x, table=None, sight=None, g=None):
        """From rotated queries and keys, values and the layer's input x (B, T, C) to each head's output (B, H, R, E).
        With fewer queries than keys, the queries are the last positions. sight: the layer's own, or with another
        `hidden`. g: shares of all T tokens; None: computed from x, which then has T rows."""
        dtype, q, k = v.dtype, self.featured(q), self.featured(k)
        o, r = self.mixed(q, k, v, self.check(k, x, table, g), sight or self.sight)
        o = normalised_output(self, o, q, r, None)                      # an extra key takes its share of the weights
        o = self.choices["value_bias"].corrected(self, o)
        o = self.choices["out_norm"].normed(self, o)
        return self.choices["gate"].gated(self, o, x[:, -q.shape[2]:]).to(dtype)

    def check(self, k, x, table, g):
        """The shares of all tokens. Raises ValueError on inputs that Focus cannot use."""
        self.refuse_table(table)
        if g is None and x.shape[1] != k.shape[2]:
            raise ValueError(f"x has {x.shape[1]} rows for {k.shape[2]} keys: Focus needs the layer's input at every "
                             "token, which decides the token's group")
        return self.assign(x) if g is None else g

    def mixed(self, q, k, v, g, sight):
        """Softmax over the gated pairs: output, and the log-sum-exp if an extra key needs it."""
        if self.hard and q.shape[2] == k.shape[2] and sight.hidden < 0:
            fused = choose_kernel(self.config, q.device.type, self.obstacles) == "triton"
            if not fused:
                q, k, v = for_products(q), for_products(k), for_products(v)
            return sparse(q, k, v, self.memberships(g, self.hard), self.local, sight.scale, fused)
        a, b = self.gate_factors(g)
        dropout = self.config.dropout if self.training else 0.0
        one_block = partial(gated_block, self.gate_of_pairs, self.local, sight, self.has_extra_key, dropout)
        parts, a = ("rows", "keys", "keys", "rows", "keys"), a[:, :, -q.shape[2]:]
        o, *r = kernels.run_blocks(one_block, sight, parts, q, k, v, a, b)
        return o, r[0] if r else None

    @property
    def gate_of_pairs(self):
        return None if self.hard else self.choices["affinity"].gated

    def weight_blocks(self, q, k, x, table=None, sight=None):
        """weights_of one block of rows at a time: yields (B, H, BLOCK or fewer, T or 1 + T)."""
        q, k = self.featured(q), self.featured(k)
        sight = sight or self.sight
        a, b = self.gate_factors(self.check(k, x, table, None))
        R, T = q.shape[2], k.shape[2]
        for block, i in kernels.row_blocks(R, T, q.device):
            qb, end = q[:, :, block], i[-1] + 1
            w, r = gated_weights(self.gate_of_pairs, self.local, sight, i, qb, k[:, :, :end], a[:, :, i],
                                 b[:, :, :end], self.has_extra_key)
            share = share_of_keys(self, qb, r, None)
            w = F.pad(w if share is None else w * share, (0, T - end))
            yield torch.cat([1 - share, w], -1) if self.has_extra_key else w

    def bytes_read(self, q, k, v, x, table=None, sight=None, g=None):
        """The shares of all tokens, and the keys and values of the open pairs. A soft gate is never shut."""
        every, T = super().bytes_read(q, k, v, x), k.shape[2]
        if not self.hard:
            return every + g.nbytes
        members = self.memberships(g, self.hard)                        # (B, T, K)
        near = torch.arange(T, device=g.device) > T - 1 - self.local
        is_open = near | (members & members[:, -1:]).any(-1)
        return every * is_open.double().mean().item() + g.nbytes

    # ------------------------------------------------------------------ limits

    @staticmethod
    def cannot_learn(config):
        """The reason why the router cannot learn with this config, or None."""
        groups = options.constants(config, AXES)["groups"]
        if groups == 1:
            return "--attn_args=groups=1: with one group there is nothing to learn; use two or more groups"
        if groups > config.block_size:
            return (f"--attn_args=groups={groups}: more groups than the {config.block_size} tokens of --block_size "
                    "cannot be even; use fewer groups")
        if config.block_size <= config.window:
            return (f"--block_size={config.block_size} is no longer than --window={config.window}, so all pairs are "
                    "near and the router would learn nothing: lower --window or raise --block_size")

    @staticmethod
    def obstacles(config, device):
        """Triples (kernel, condition under which it cannot run on this device, reason)."""
        yield "triton", not config.topk, "the soft gate of every pair has no kernel; hard gates (--topk=N) have one"
        yield "triton", config.head_width > 256, "its heads are wider than 256"
        yield from triton_obstacles(config, device)
        yield "sdpa", True, f"it computes plain softmax only, not --attn={config.attn}"
