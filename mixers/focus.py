"""Focus: learned groups of tokens decide which distant pairs may attend to each other. Source:
Focus, section 2 and appendix D.

A router gives every token x_i a share g_ik of each of K groups. The product g_i . g_j of two
tokens' shares opens or shuts a gate on their score. Near pairs, i - j < window, have no gate. The
rest is plain softmax attention:

    near:     s'_ij = s_ij
    distant:  s'_ij = s_ij gated by sigmoid(gate_scale (g_i . g_j - gate_offset))

    g_i = balance(W x_i . C^T / temperature)

The heads of a layer share W (d_g x C) and the centroids C (K x d_g). A retrofit trains only these:
`train.py --init_from=RUN --attn=focus --train_only=focus`. Training computes every pair with its
soft gate. With --topk=k the model is evaluated as in the paper: a token is a member of its k
largest groups, and a distant pair attends if and only if the two tokens share a group. `sparse`
never computes the other distant pairs.

The axis --balance chooses `balance`. With the gradient alone, one group takes all tokens (section
4). The paper's Sinkhorn evens out the groups over all tokens of a sequence, so an early token's
groups depend on later tokens. The loss of such a model is not a prediction loss, and the model
cannot be decoded. The default therefore carries the result of Sinkhorn from batch to batch, one
number for each group. It is causal.

Shapes: B batch, H heads, R rows, T keys, D width of q and k, E of v, K groups.
x (B, T, C)   g (B, T, K)
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

import kernels
from attention import MASKED_SCORE, RULES, LogSumExp, softmax
from axes import options
from axes.base import Choice, Constant, Fixed, Normal, only
from axes.rows import SINKS, normalised_output
from kernels import Mask, for_products, grouped, scaled_scores, visible, wide
from mixers.base import Mixer, axes_of, largest

# -------------------------------------------------------- the axis balance: how tokens find a group


def by_softmax(layer, s):
    """g_i = softmax(s_i). Nothing keeps the groups even, and training shuts no gate. Section 4."""
    return s.softmax(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance(Choice):
    """How a token's scores become shares of groups.

    `count` returns a statistic of a training step's tokens. It is summed over micro-batches and
    ranks. If it is a `sample`, only that of the step's first micro-batch is kept. After the step,
    `update` updates the layer from it."""

    # layer, scores s over the temperature (B, T, K) -> g, whose rows sum to 1
    shares: Callable = by_softmax
    causal: bool = True  # no token's share depends on later tokens
    detached: bool = False  # the router's gradient ends at its input
    count: Callable | None = None  # layer, s, z (B, T, d_g) = W x, g -> a tensor
    sample: bool = False
    update: Callable | None = None  # layer, the statistic of the step
    penalty: Callable | None = None  # layer, g -> a term of the loss


def potentials(layer, s):
    """The potentials u (B, 1, K), mean 0, that Sinkhorn subtracts from the scores of each group.

    Starting from Q = exp(s), each of N iterations divides by the sum over tokens, then by the sum
    over groups. Here Q is in logarithms. After the last division, each row of Q is softmax(s_i -
    u). NOT causal: the sum over tokens includes later ones."""
    u = torch.zeros_like(s[:, :1])  # (B, 1, K)
    Q = s  # (B, T, K)
    for _ in range(layer.args["iterations"]):
        u = u + Q.logsumexp(1, keepdim=True)
        Q = (s - u).log_softmax(-1)
    return u - u.mean(-1, keepdim=True)


def sinkhorn(layer, s):
    """g = Q, the result of Sinkhorn, as in the paper's section 2."""
    return (s - potentials(layer, s)).softmax(-1)


def with_potential(layer, s):
    """g_i = softmax(s_i - u), where u averages Sinkhorn's potentials over the sequences of past
    steps. Causal: u is a constant for the gradient and in evaluation. It starts at 0 and moves by
    `rate`, so the groups are uneven in about the first twenty steps."""
    return (s - layer.potential).softmax(-1)


def sum_of_potentials(layer, s, z, g):
    """The potentials summed over sequences, and the number of sequences: (K + 1,)."""
    u = potentials(layer, s)  # (B, 1, K)
    return F.pad(u.sum((0, 1)), (0, 1), value=len(s))


def move_potential(layer, sums):
    """Move the potential towards the mean of all sequences."""
    layer.potential.lerp_(sums[:-1] / sums[-1], layer.args["rate"])


def confident_and_even(layer, g):
    """The mean entropy of a token's shares minus the entropy of the mean share. It is low where
    each token is sure of its group and the groups are even. The paper names "entropy and balance
    losses" without a formula; its "balance weight x5" is penalty=0.05 here. It is computed for each
    micro-batch, so it depends on how a batch is split."""
    of_tokens = entropy(g).mean()
    of_groups = entropy(g.mean((0, 1)))
    return layer.args["penalty"] * (of_tokens - of_groups)


def entropy(p):
    # clamp: finite slope at p = 0
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    return -(p * log_p).sum(-1)


def sums_by_group(layer, s, z, g):
    """Each group's sum of shares, and its sum of tokens weighted by their shares: (K, 1 + d_g)."""
    mass = g.sum((0, 1))  # (K,)
    tokens = torch.einsum("btk,btd->kd", g, z)  # (K, d_g)
    return torch.cat([mass[:, None], tokens], 1)


def move_centroids(layer, sums):
    """Move each centroid towards the mean of its tokens. The centroid of an empty group stays."""
    mass = sums[:, :1]
    means = sums[:, 1:] / mass.clamp(min=1e-3)
    means = torch.where(mass > 1e-3, means, layer.centroids)
    layer.centroids.lerp_(means, layer.args["rate"])


def some_tokens(layer, s, z, g):
    """At most 512 tokens of the first sequence, (n, d_g)."""
    every = math.ceil(z.shape[1] / 512)
    return z[0, ::every]


def recluster(layer, z):
    """Every `every` steps: run k-means on the tokens z (n, d_g) minus their mean, and take the
    directions of its means as centroids."""
    layer.steps += 1
    if layer.steps % layer.args["every"] == 0:
        layer.middle.copy_(z.mean(0))
        means = k_means(z - layer.middle, layer.args["groups"])
        layer.centroids.copy_(F.normalize(means, dim=-1))


def k_means(z, K):
    """K means (K, d) of points z (n, d), by ten rounds of k-means. Each mean starts at the point
    that is farthest from the earlier starts."""
    means = z[:1]
    for _ in range(1, K):
        farthest = torch.cdist(z, means).amin(1).argmax()
        means = torch.cat([means, z[farthest][None]])
    for _ in range(10):
        member = F.one_hot(torch.cdist(z, means).argmin(1), K).to(z)  # (n, K)
        count = member.sum(0)[:, None]
        means = torch.where(count > 0, member.T @ z / count.clamp(min=1), means)
    return means


def router(layer):
    """W and the centroids. The paper gives no initial values. These give scores of unit variance
    for an input of unit variance."""
    C, d_g = layer.config.n_embd, layer.args["route_dim"]
    return {
        "router": nn.Linear(C, d_g, bias=False),
        "router.weight": Normal(C**-0.5),
        "centroids": Normal(d_g**-0.5, (layer.args["groups"], d_g)),
    }


def router_alone(layer):
    """The same, with centroids that have no gradient."""
    generator = torch.Generator().manual_seed(layer.depth)
    shape = layer.args["groups"], layer.args["route_dim"]
    start = torch.randn(shape, generator=generator)
    return router(layer) | {"centroids": Fixed(F.normalize(start, dim=-1))}


ROUTER = {
    "groups": Constant(4, 1, 62),  # a token's set of groups is stored as the bits of an int64
    "route_dim": Constant(16, 1, 65536),
    "temperature": Constant(0.1, 1e-6, math.inf),
}
SINKHORN = ROUTER | {"iterations": Constant(10, 0, 1000)}

BALANCES = {  # the default is ours; the others are the paper's: section 2, table 8
    "potential": Balance(
        learns=lambda layer: (
            router(layer) | {"potential": Fixed(torch.zeros(layer.args["groups"]))}
        ),
        args=SINKHORN | {"rate": Constant(0.1, 0.0, 1.0)},
        shares=with_potential,
        count=sum_of_potentials,
        update=move_potential,
    ),
    "sinkhorn": Balance(learns=router, args=SINKHORN, shares=sinkhorn, causal=False),
    "softmax": Balance(learns=router, args=ROUTER),
    "entropy": Balance(
        learns=router,
        args=ROUTER | {"penalty": Constant(0.01, 0.0, math.inf)},
        penalty=confident_and_even,
    ),
    "stop_gradient": Balance(learns=router, args=ROUTER, detached=True),
    "ema": Balance(
        learns=router_alone,
        args=ROUTER | {"rate": Constant(0.01, 0.0, 1.0)},
        detached=True,
        count=sums_by_group,
        update=move_centroids,
    ),
    "recluster": Balance(
        learns=lambda layer: (
            router_alone(layer)
            | {
                "middle": Fixed(torch.zeros(layer.args["route_dim"])),
                "steps": Fixed(torch.zeros(())),
            }
        ),
        args=ROUTER | {"every": Constant(100, 1, 10**9)},
        sample=True,
        count=some_tokens,
        update=recluster,
    ),
}

# --------------------------------------------------- the axis affinity: what a gate does to a score


def log_gate(s, z):
    """s + log sigmoid(z): the gate multiplies the weight, so a shut gate removes the pair, like a
    mask.

    Differs from the paper: its eq. 2 is `score_gate`. It has no value for gate_scale (its lambda)
    and no gate_offset."""
    return s + F.logsigmoid(z)


def score_gate(s, z):
    """s sigmoid(z), the paper's eq. 2. A shut gate makes the score 0, which is not a mask: exp(0) =
    1 is a usual weight, and a negative score even rises. Without an offset, as in the paper, no
    gate is below 1/2."""
    return s * torch.sigmoid(z)


def no_window(config, args, choices):
    if not config.window:
        return (
            "--attn=focus gates the pairs beyond a window, and --window=0 gates none: give "
            "--window=1 or more"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Affinity(Choice):
    """A value of the axis affinity."""

    # scores s, gate arguments z, broadcast to (B, H, R, T) -> s'
    gated_score: Callable


def affinity(gated_score, offset):
    """A row of the table: this gate, and the default of its offset."""
    return Affinity(
        gated_score=gated_score,
        refuse=no_window,
        learns=lambda layer: {
            name: torch.tensor(float(layer.args[name])) for name in ("gate_scale", "gate_offset")
        },
        args={
            "gate_scale": Constant(10.0),
            "gate_offset": Constant(offset),
            "learn_gate_scale": Constant(False),
            "learn_gate_offset": Constant(False),
        },
    )


AFFINITIES = {"log": affinity(log_gate, 0.5), "score": affinity(score_gate, 0.0)}

# ------------------------------------------------------------------------------------- all the axes


def more_than_groups(config, args, choices):
    if config.topk > args["groups"]:
        groups = args["groups"]
        return (
            f"--topk={config.topk} is more than the {groups} groups: lower it, or raise "
            "--attn_args=groups=NUMBER"
        )


AXES = axes_of(
    only(RULES, "softmax"),
    balance=BALANCES,
    affinity=AFFINITIES,
    sink={name: choice for name, choice in SINKS.items() if not choice.tokens},
)

# ---------------------------------------------------------------------- the sparse form: open pairs


def sparse(
    q,  # (B, H, T, D)
    k,  # (B, Hk, T, D)
    v,  # (B, Hk, T, E)
    members,  # (B, T, K): is the token in the group?
    local,  # pairs nearer than this have no gate
    scale,
    kernel="torch",  # or "triton" or "cpp"
):
    """Attention with hard gates that skips shut pairs: o (B, H, T, E) and log-sum-exp (B, H, T, 1).

    Appendix D splits the open pairs into disjoint parts: the near pairs that share no group, and
    the pairs of each group. A softmax over all parts is exactly the mean of their outputs, weighted
    by their sums of exponentials. The paper has one group for each token. With k groups a pair may
    share several. It then counts in the part of the first one only."""
    sequences = []
    for n in range(len(q)):
        one = slice(n, n + 1)
        sequences.append(sparse_sequence(q[one], k[one], v[one], members[n], local, scale, kernel))
    o, r = zip(*sequences, strict=True)
    return torch.cat(o), torch.cat(r)


def sparse_sequence(
    q,  # (1, H, T, D)
    k,  # (1, Hk, T, D)
    v,  # (1, Hk, T, E)
    members,  # (T, K)
    local,
    scale,
    kernel,
):
    """`sparse` of one sequence."""
    powers = 2 ** torch.arange(members.shape[1], device=members.device)  # (K,)
    sets = (members * powers).sum(-1)  # (T,): each token's set of groups, as the bits of a number
    o, r = (x.clone() for x in one_part(q, k, v, sets, local, scale, kernel))
    for g, power in enumerate(powers.tolist()):
        n = members[:, g].nonzero()[:, 0]  # the group's tokens
        if len(n):
            earlier = sets[n] & (power - 1)  # the groups before this one
            qkv = [x.index_select(2, n) for x in (q, k, v)]
            o_g, r_g = one_part(*qkv, earlier, 0, scale, kernel)
            share = torch.sigmoid(r_g - r[:, :, n])  # weight of the group's keys
            o[:, :, n] = o[:, :, n].lerp(o_g, share)
            r[:, :, n] = torch.logaddexp(r[:, :, n], r_g)
    return o, r


def one_part(
    q,  # (1, H, N, D)
    k,  # (1, Hk, N, D)
    v,  # (1, Hk, N, E)
    sets,  # (N,): a row sees no key whose set shares a bit with its own
    local,  # a row sees only the last keys, so many; 0: all
    scale,
    kernel,
):
    """Causal softmax over the pairs of one part: o (1, H, N, E) and log-sum-exp (1, H, N, 1). Of a
    row without keys, o is meaningless and r is MASKED_SCORE, which makes its weight 0."""
    sets = sets if sets.any() else None
    mask = Mask(window=local)
    if kernel != "torch":
        bits = None if sets is None else sets[None]
        cpp = kernel == "cpp"
        o, r = kernels.attend("softmax", q, k, v, scale=scale, window=local, sets=bits, cpp=cpp)
        r = r[..., None]
    elif sets is None and not local and can_flash(q):
        o, r = flash(q, k, v, None, scale)
    else:
        one_block = partial(masked_softmax, sets, scale, mask)
        o, r = kernels.block_loop(one_block, mask, ("rows", "keys", "keys"), q, k, v)
    if sets is not None:
        r = r.masked_fill(without_keys(sets, local or len(sets))[:, None], MASKED_SCORE)
    return wide(o), r


def without_keys(sets, local):
    """The rows (N,) that see none of their last `local` keys, as all sets share a bit with
    theirs."""
    distinct, number = sets.unique(return_inverse=True)  # (S,), (N,)
    i = torch.arange(len(sets), device=sets.device)
    # the last key up to each position that shares no bit with the set: (S, N), then (N,)
    last = torch.where((distinct[:, None] & sets) == 0, i, -local).cummax(1).values
    return last[number, i] <= i - local


def masked_softmax(
    sets,  # (N,), or None
    scale,
    mask,
    i,  # (R,)
    q,  # (1, H, R, D)
    k,  # (1, Hk, keys, D)
    v,  # (1, Hk, keys, E)
):
    """`one_part` for the rows at positions i, see kernels.block_loop."""
    j = torch.arange(k.shape[2], device=k.device) + (i[-1] + 1 - k.shape[2])
    seen = visible(i[:, None], j, mask)
    if sets is not None:
        seen = seen & ((sets[i, None] & sets[j]) == 0)
    if can_flash(q):
        return flash(q, k, v, seen, scale)
    s = scaled_scores(q, k, scale)  # (1, H, R, keys)
    w = softmax(s, seen)
    return kernels.weighted_sum(w, v, 0.0), LogSumExp.apply(s, seen, w)


def can_flash(q):
    """Can torch's fused kernel for CPUs compute it? Its log-sum-exp has no gradient."""
    return q.device.type == "cpu" and not torch.is_grad_enabled()


def flash(q, k, v, seen, scale):
    """The output and the log-sum-exp by torch's fused kernel. seen: None means causal."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = None
    if seen is not None:
        bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)
    o, r = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, seen is None, attn_mask=bias, scale=scale
    )
    return o, r[..., None]


# ---------------------------------------------------------------------------------------- the layer


class Focus(Mixer):
    """A layer of softmax attention with a router: (B, T, C) to (B, T, C).

    The cache of generation also holds the tokens' shares of groups."""

    axes = AXES
    retrofit = True
    in_blocks = True
    decided_by_x = "the token's groups"
    refused = {  # {axis: why Focus does not accept its other values}
        "window_every": "each layer has a router, which needs the layer's own window",
        "first": "its groups decide which keys a row sees beyond the window",
        "pos": "its sparse form gathers the keys of a group, so a bias by distance cannot be added",
        "rule": "only softmax can be computed in parts, which are merged by their log-sum-exps",
    }
    numbers = {"window": options.NUMBERS["window"], "topk": options.Number(0, more_than_groups)}
    added = (
        "router.weight",
        "centroids",
        "gate_scale",
        "gate_offset",
        "potential",
        "middle",
        "steps",
    )

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.balance = self.choices["balance"]
        self.affinity = self.choices["affinity"].gated_score
        self.groups = self.args["groups"]
        self.local = self.mask.window  # pairs nearer than this have no gate
        self.mask = self.mask._replace(window=0)  # every earlier key is visible
        self.causal = self.cached = self.balance.causal
        self.penalized = self.balance.penalty is not None
        self.counted = None  # the statistic of this training step

    @property
    def hard(self):
        """The number of groups of each token under hard gates; 0: soft gates. Training always uses
        soft gates, because no gradient flows through a mask to the router."""
        return 0 if self.training else self.config.topk

    # ------------------------------------------------------------------ routing

    def assign(self, x):
        """Map the layer's normed input x (B, T, C) to the tokens' shares of groups g (B, T, K).
        Each token's shares sum to 1. They are float32, because the division by the temperature
        amplifies rounding."""
        balance = self.balance
        if balance.detached:
            x = x.detach()
        with torch.autocast(x.device.type, enabled=False):
            z = F.linear(wide(x), self.router.weight)  # (B, T, d_g)
            middle = getattr(self, "middle", 0.0)
            s = (z - middle) @ self.centroids.mT / self.args["temperature"]  # (B, T, K)
            g = balance.shares(self, s)
        if self.training and balance.penalty:
            self.penalty = balance.penalty(self, g)
        if self.training and balance.count:
            statistic = balance.count(self, s.detach(), z.detach(), g.detach())
            if self.counted is None:
                self.counted = statistic
            elif not balance.sample:  # the first micro-batch has the step's first sequence
                self.counted = self.counted + statistic
        return g

    @torch.no_grad()
    def finish_step(self, machine):
        """After a training step: update the router from the step's statistic, equally on all
        ranks."""
        self.penalty = 0.0  # free its graph
        counted = self.counted
        self.counted = None
        # a frozen router keeps its groups
        if counted is None or not self.router.weight.requires_grad:
            return
        if self.balance.sample:  # all ranks take the main rank's: the others add 0 to the mean
            counted = counted * machine.world * machine.main
        self.balance.update(self, machine.mean(counted))

    # shares g (B, T, K) and k -> a mask of the k largest groups of each token, (B, T, K)
    memberships = staticmethod(largest)

    def gate_factors(self, g):
        """Two factors a, b (B, 1, T, K + 1) such that a_i . b_j is the argument of the gate of
        tokens i and j. For hard gates, it is above 0 if and only if they share a group."""
        scale = self.gate_scale
        offset = self.gate_offset
        if self.hard:
            g = self.memberships(g, self.hard).to(g.dtype)
            scale = 1.0
            offset = 0.5
        ones = torch.ones_like(g[..., :1])  # (B, T, 1)
        a = torch.cat([g * scale, -scale * offset * ones], -1)
        b = torch.cat([g, ones], -1)
        return a[:, None], b[:, None]

    # ------------------------------------------------------------------ the layer's interface

    def remember(self, cache, x, k, v):
        """Cache the shares of all tokens."""
        return {"g": cache.append("g", self.assign(x), 1)}

    def attend(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk, T, D)
        v,  # (B, Hk, T, E)
        x,  # (B, T, C)
        table=None,
        mask=None,
        g=None,  # (B, T, K)
    ):
        """Softmax over the gated pairs, see Mixer. g: shares of all T tokens; None: computed from
        x."""
        self.check(k, x if g is None else g, table)
        if g is None:
            g = self.assign(x)
        R = q.shape[2]
        mask = mask or self.mask
        q = self.featured(q)
        k = self.featured(k)
        if self.hard and R == k.shape[2] and mask.hidden < 0:
            kernel = self.kernel_on(q.device.type)
            if kernel == "cpp" and q.dtype == torch.float64:
                kernel = "torch"
            qkv = [q, k, v]
            if kernel != "triton":  # kernels.cpp computes in float32 under autocast as well
                qkv = [wide(y) if kernel == "cpp" else for_products(y) for y in qkv]
            o, r = sparse(*qkv, self.memberships(g, self.hard), self.local, self.scale, kernel)
            o = normalised_output(self, o, q, r, None)  # an extra key takes its share
        else:
            a, b = self.gate_factors(g)
            one_block = partial(self.block, partial(self.gated_weights, mask))
            parts = "rows", "keys", "keys", "rows", "keys"
            (o,) = kernels.block_loop(one_block, mask, parts, q, k, v, a[:, :, -R:], b)
        return self.postprocess(o, x[:, -R:], v)

    def gated_weights(self, mask, i, q, k, a, b):
        """The weights (B, H, R, keys) of the rows at positions i (R,), see Mixer.softmax.
        a (B, 1, R, K + 1) and b (B, 1, keys, K + 1): see `gate_factors`."""
        j = torch.arange(k.shape[2], device=k.device)
        near = i[:, None] - j < self.local  # (R, keys)
        seen = visible(i[:, None], j, mask)  # (R, keys)
        s = scaled_scores(q, k, self.scale)  # (B, H, R, keys)
        z = grouped(a, b.mT)  # (B, 1, R, keys)
        if self.hard:
            seen = seen & (near | (z > 0))
        else:
            s = torch.where(near, s, self.affinity(s, z))
        return self.softmax(s, seen)

    def weight_blocks(self, q, k, x, table=None, mask=None):
        """See Mixer."""
        self.check(k, x, table)
        a, b = self.gate_factors(self.assign(x))

        def weights(i, q, k):
            return self.gated_weights(mask or self.mask, i, q, k, a[:, :, i], b[:, :, : k.shape[2]])

        return self.softmax_blocks(weights, self.featured(q), self.featured(k))

    def bytes_read(self, q, k, v, x, table=None, g=None):
        """The shares of all tokens, and the keys and values of the open pairs. A soft gate is never
        shut."""
        T = k.shape[2]
        all_pairs = super().bytes_read(q, k, v, x)
        if not self.hard:
            return all_pairs + g.nbytes
        members = self.memberships(g, self.hard)  # (B, T, K)
        near = torch.arange(T, device=g.device) > T - 1 - self.local
        share_group = (members & members[:, -1:]).any(-1)  # (B, T)
        open_share = (near | share_group).double().mean().item()
        return all_pairs * open_share + g.nbytes

    # ------------------------------------------------------------------ limits

    @staticmethod
    def cannot_learn(config):
        groups = options.constants(config, AXES)["groups"]
        size = config.block_size
        if groups == 1:
            return (
                "--attn_args=groups=1: with one group there is nothing to learn; use two or more "
                "groups"
            )
        if groups > size:
            return (
                f"--attn_args=groups={groups}: more groups than the {size} tokens of --block_size "
                "cannot be even; use fewer groups"
            )
        if size <= config.window:
            return (
                f"--block_size={size} is no longer than --window={config.window}, so all pairs "
                "are near and the router would learn nothing: lower --window or raise --block_size"
            )

    def obstacles(self, device):
        topk = self.config.topk
        reason = "the soft gate of every pair has no kernel; hard gates (--topk=N) have one"
        for kernel in ("triton", "cpp"):
            yield kernel, not topk, reason
        if topk:
            yield from self.cpp_obstacles(device, [("softmax", 1)])
        yield from self.obstacles_of_kernels(device)
