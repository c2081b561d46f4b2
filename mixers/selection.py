"""Token selection: each query of a model that was trained with softmax attends to a few keys only.
Nothing is trained.

A decoding step of softmax attention reads every cached key and value. Here it first reads a smaller
index, which decides on a set S_i of keys for query i. Then it reads the keys and values of S_i
alone:

    o_i = sum_{j in S_i} w_ij v_j,          w_i = softmax of (s_ij - log u_ij) over j in S_i

The axis `select` chooses S_i. u_ij is the probability that a random choice finds key j, and 1 for
the other methods.

    topk        the --topk keys of the highest scores. Its index is the keys themselves. The others
                approximate it
    sparq       the keys of the highest approximate scores, from the largest components of the query
    quest       whole pages of keys, by an upper bound on their scores
    magicpig    keys whose hashes collide with the query's, at random; it has no --topk

    python eval.py loss --out_dir=out/smollm2 --attn=sparq --topk=128

All of them are causal: S_i depends on the keys up to i alone.

Differs from the papers: they select in decoding steps only, after a prefill with full attention.
Here every row selects, so the loss of a text measures the selection. Quest and MagicPIG exempt a
few layers, and SparQ's code selects the same keys for all heads that share a key head. Here each
head of each layer selects its own keys.

Shapes: B batch, H heads, Hk key heads, R query rows (the last R of T positions), T keys, D width of
q and k, E of v,
m selected keys, L tables, P pages.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import kernels
from attention import RULES, LogSumExp, softmax
from axes import options
from axes.base import Choice, Constant, Fixed, only
from axes.layer import Cache
from axes.queries_keys import SCALES
from axes.rows import SINKS, normalised_output
from kernels import grouped, scaled_scores, visible, visible_count, weighted_sum, wide
from mixers.base import Mixer, axes_of

# ----------------------------------------------------------- the axis select: which keys a row sees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select(Choice):
    """One way to choose keys. An index is a dict of tensors about the keys."""

    # layer, k and v of T tokens, index (a Cache) -> brings the index up to date
    index: Callable = lambda layer, k, v, index: None
    # layer, q, k, index, i (R,), seen (R, T) -> a mask of the selected keys
    selected: Callable | None = None
    # (B, H, R, T), and their estimated share of softmax
    # (B, H, R, 1), or None for all of it
    # layer, q, k, index, i, j -> log u of the keys k at positions j
    log_chance: Callable | None = None
    # layer, k, index -> the bytes that `selected` reads for one query
    scanned: Callable | None = None


def topk_mask(layer, rank, seen, always):
    """The mask of the --topk visible keys with the highest rank (B, H, R, T). Keys in `always` come
    first."""
    rank = rank.detach().masked_fill(always & seen, math.inf).masked_fill(~seen, -math.inf)
    places = rank.topk(min(layer.config.topk or rank.shape[-1], rank.shape[-1]), -1).indices
    return torch.zeros_like(rank, dtype=torch.bool).scatter(-1, places, True) & seen


def by_score(layer, q, k, index, i, seen):
    """The keys of the highest scores s_ij. Source: the oracle in SparQ, Quest and MagicPIG."""
    return topk_mask(layer, scaled_scores(q, k, layer.scale), seen, torch.zeros_like(seen)), None


# SparQ. s^_ij = sum of q_id k_jd / sqrt(D) over the r components d with the largest |q_id|, divided
# by sqrt(c_i), where c_i = (sum of these |q_id|) / (sum of all |q_id|). Ribar et al. 2312.04985,
# section 4 and algorithm 1


def by_largest_components(layer, q, k, index, i, seen):
    """The --topk keys of the highest approximate scores s^_ij. A share --attn_args=local of them is
    reserved for the most recent keys.

    With --attn_args=realloc=1 the output is a_i o_i + (1 - a_i) m_i. m_i is the mean of all values
    that row i sees, and a_i the share that softmax(s^_i) gives to the selected keys.
    Differs from the paper: there the mean is over all values in the cache. While decoding they are
    the same."""
    top = q.abs().topk(min(layer.args["components"], q.shape[-1]), -1)  # (B, H, R, r)
    # the index stores each component of all keys in one piece
    if q.shape[2] == 1 and "channels" in index.kept:
        s = q.gather(-1, top.indices) @ rows_at(index.kept["channels"], top.indices[:, :, 0])
    else:
        s = grouped(q * torch.zeros_like(q).scatter(-1, top.indices, 1.0), k.mT)  # (B, H, R, T)
    tiny = torch.finfo(q.dtype).tiny  # a query may be 0
    share = top.values.sum(-1, keepdim=True) / q.abs().sum(-1, keepdim=True).clamp(min=tiny)
    s = wide(s * layer.scale) / share.clamp(min=tiny).sqrt()
    j = torch.arange(k.shape[2], device=k.device)
    selected = topk_mask(
        layer, s, seen, i[:, None] - j < int(layer.args["local"] * layer.config.topk)
    )
    return selected, (softmax(s, seen) * selected).sum(-1, keepdim=True) if layer.args[
        "realloc"
    ] else None


def channels(layer, k, v, index):
    """Keys in the order of their components (B, Hk, D, T), and the sum of all values (B, Hk, 1,
    E)."""
    known = index.kept["channels"].shape[3] if "channels" in index.kept else 0
    index.append("channels", k[:, :, known:].mT.contiguous(), 3)
    total = wide(v[:, :, known:]).sum(2, keepdim=True)
    index.kept["total"] = index.kept.get("total", 0) + total


# Quest. A page is 16 consecutive keys (--attn_args=page). With the smallest and the largest value
# m_d and M_d of each component in a page, none of its keys has a score above sum_d max(q_d m_d, q_d
# M_d). Tang et al. 2406.10774, section 3


def by_page(layer, q, k, index, i, seen):
    """The keys of the --topk / page pages of the highest bounds, among them always the row's own
    page."""
    page, T, q = layer.args["page"], k.shape[2], wide(q)
    # (B, Hk, D, P) of whole pages
    low, high = (wide(index.kept[name])[:, :, : T // page].mT for name in ("low", "high"))
    bound = grouped(q.relu(), high) - grouped((-q).relu(), low)  # (B, H, R, P)
    p, own = torch.arange(-(-T // page), device=q.device), i[:, None] // page
    rank = F.pad(bound.detach(), (0, len(p) - bound.shape[-1]))  # the last page may be incomplete
    rank = rank.masked_fill(p >= own, -math.inf).masked_fill(p == own, math.inf)
    count = -(-(layer.config.topk or T) // page)
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(
        -1, rank.topk(min(count, len(p)), -1).indices, True
    )
    return chosen.repeat_interleave(page, -1)[..., :T] & seen, None


def page_bounds(layer, k, v, index):
    """The smallest and the largest value of each component in every whole page: (B, Hk, P, D)
    each."""
    page = layer.args["page"]
    known = index.kept["low"].shape[2] if "low" in index.kept else 0
    whole = k.shape[2] // page
    if whole > known or "low" not in index.kept:
        new = k[:, :, known * page : whole * page].unflatten(2, (whole - known, page))
        index.append("low", new.amin(3))
        index.append("high", new.amax(3))


# MagicPIG. A table gives a vector the signs of its products with K random directions as a hash.
# With p = 1 -
# angle(q, k) / pi, the hashes of q and k are equal in one table with probability p^K, and in two or
# more of L tables with probability u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1). Chen et al.
# 2410.16179, section 4 and algorithm 1


def by_collision(layer, q, k, index, i, seen):
    """The keys whose hashes equal the query's in two or more tables; always the first keys and the
    recent ones."""
    T, codes = k.shape[2], index.kept["codes"]  # (B, Hk, L, T)
    own = hashes(layer, q).unflatten(1, (codes.shape[1], -1))  # (B, Hk, H / Hk, L, R)
    count = torch.zeros(*own.shape[:3], q.shape[2], T, dtype=torch.int16, device=q.device)
    for table in range(codes.shape[2]):
        count += own[..., table, :, None] == codes[:, :, None, table, None, :T]
    j = torch.arange(T, device=k.device)
    return seen & (is_exact(layer, i[:, None], j) | (count >= 2).flatten(1, 2)), None


def is_exact(layer, i, j):
    """The first keys and the recent ones, which every row sees: u = 1."""
    return (j < layer.args["first"]) | (i - j < layer.args["recent"])


def log_collision_chance(layer, q, k, index, i, j):
    """log u_ij, (B, H, R, T), for keys k (B, Hk or H, T, D) at positions j."""
    k = wide(k) - index.kept["centre"].repeat_interleave(
        k.shape[1] // index.kept["centre"].shape[1], 1
    )
    cosine = grouped(F.normalize(wide(q), dim=-1), F.normalize(k, dim=-1).mT)
    near = 1 - 4 * torch.finfo(cosine.dtype).eps  # the slope of acos is infinite at 1
    equal, L = (
        (1 - torch.acos(cosine.clamp(-near, near)) / math.pi) ** layer.args["bits"],
        layer.args["tables"],
    )
    # (1 - x)^(L - 1) (1 + (L - 1) x) = 1 - u, in logarithms, since u may be far smaller than 1
    u = -torch.expm1((L - 1) * torch.log1p(-equal) + torch.log1p((L - 1) * equal))
    u = u.clamp(min=torch.finfo(u.dtype).eps ** 2)  # a key with such a small chance is never found
    return torch.where(is_exact(layer, i, j), 0.0, u.log())


def hashed_keys(layer, k, v, index):
    """The hashes of all keys (B, Hk, L, T) after subtraction of a `centre` (B, Hk, 1, D), since
    keys lie far from 0.

    Differs from the paper: its centre is the mean of all keys of the prompt, which early rows must
    not see. Here it is the mean of the `recent` keys that follow the `first` ones. Every row that
    samples a key comes after all of them."""
    first, recent = layer.args["first"], layer.args["recent"]
    known = index.kept["codes"].shape[3] if "codes" in index.kept else 0
    if known < first + recent:  # so far all keys are exact
        known = 0
        index.kept.pop("codes", None)
        index.buffers.pop("codes", None)
        some = wide(k[:, :, first : first + recent])
        index.kept["centre"] = some.sum(2, keepdim=True) / max(1, some.shape[2])
    index.append("codes", hashes(layer, wide(k[:, :, known:]) - index.kept["centre"]), 3)


def hashes(layer, x):
    """The hash of x (B, H, T, D) in every table, a number of K bits: (B, H, L, T)."""
    with torch.autocast(x.device.type, enabled=False):
        bits = wide(x.detach()) @ layer.planes.to(wide(x).dtype) > 0  # (B, H, T, L K)
    bits = bits.unflatten(-1, (layer.args["tables"], layer.args["bits"])).short()
    powers = 2 ** torch.arange(bits.shape[-1], device=x.device, dtype=torch.short)
    return (bits * powers).sum(-1).short().mT.contiguous()


def random_planes(layer):
    """The directions of all hashes (D, L K), drawn from --attn_args=seed and the layer's number."""
    generator = torch.Generator().manual_seed(1000 * layer.args["seed"] + layer.depth)
    shape = layer.width, layer.args["tables"] * layer.args["bits"]
    return {"planes": Fixed(torch.randn(shape, generator=generator, device="cpu"))}


def has_no_topk(config, args, choices):
    if config.topk:
        return (
            f"--topk={config.topk}: how many keys --select=magicpig finds depends on its tables: give --topk=0 and "
            "--attn_args=bits=NUMBER,tables=NUMBER"
        )


SELECTS = {
    "topk": Select(selected=by_score, scanned=lambda layer, k, index: k.nbytes),
    "sparq": Select(
        args={
            "components": Constant(16, 1, 65536),
            "local": Constant(0.25, 0.0, 1.0),
            "realloc": Constant(False),
        },
        index=channels,
        selected=by_largest_components,
        scanned=lambda layer, k, index: (
            layer.heads / k.shape[1] * min(1, layer.args["components"] / layer.width) * k.nbytes
        ),
    ),
    "quest": Select(
        args={"page": Constant(16, 1, 65536)},
        index=page_bounds,
        selected=by_page,
        scanned=lambda layer, k, index: index.kept["low"].nbytes + index.kept["high"].nbytes,
    ),
    "magicpig": Select(
        args={
            "bits": Constant(8, 1, 15),
            "tables": Constant(75, 2, 32767),
            "first": Constant(4, 0, 65536),
            "recent": Constant(64, 1, 65536),
            "seed": Constant(0, 0, 2**31),
        },
        learns=random_planes,
        refuse=has_no_topk,
        index=hashed_keys,
        selected=by_collision,
        log_chance=log_collision_chance,
        scanned=lambda layer, k, index: index.kept["codes"].nbytes,
    ),
}

AXES = axes_of(only(RULES, "softmax"), select=SELECTS, scale=SCALES, sink=SINKS)

# ---------------------------------------------------------------------------------------- the layer


def rows_at(y, places):
    """The rows of y (B, Hk, N, W) at places (B, H, m), for each of the H heads: (B, H, m, W)."""
    B, H, _ = places.shape
    batch, head = (
        torch.arange(B, device=y.device),
        torch.arange(H, device=y.device) // (H // y.shape[1]),
    )
    return y[batch[:, None, None], head[:, None], places]


class Selection(Mixer):
    """A layer of softmax attention over selected keys: (B, T, C) to (B, T, C).

    The cache of generation also holds the index of the keys."""

    axes, added, trains = AXES, ("planes",), False
    numbers = {"topk": options.Number(0)}
    refused = {
        "window": "it selects among all earlier keys",
        "window_every": "it has no window",
        "first": "it has no window",
        "pos": "its indexes know nothing of a bias by distance: use rope, none, sinusoidal or learned",
        "rule": "it selects keys for softmax",
    }

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.select = self.choices["select"]

    def remember(self, cache, x, k, v):
        """The index of all keys."""
        self.select.index(self, self.featured(k), v, cache)
        return {"index": cache}

    def attend(self, q, k, v, x, table=None, mask=None, index=None):
        """Softmax over the selected keys, see Mixer. index: of all T keys; None: made here."""
        self.check(k, x, table)
        mask = mask or self.mask
        q, k, index = self.rule_inputs(q, k, v, mask, index)
        if q.shape[2] == 1 and mask.hidden < 0:
            o, *r = self.step(q, k, v, index)
        else:
            one_block = partial(self.block, partial(self.row_weights, index, mask))
            o, *r = kernels.run_blocks(one_block, mask, ("rows", "keys", "keys"), q, k, v)
        # an extra key takes its share of the weights
        o = normalised_output(self, o, q, r[0] if r else None, None)
        return self.postprocess(o, x, v)

    def rule_inputs(self, q, k, v, mask, index=None):
        """q and k after norm and learned factor, and the index of all keys, in which a hidden key
        is 0."""
        q, k = self.featured(q), self.featured(k)
        if index is None:
            j = torch.arange(k.shape[2], device=k.device)
            index = Cache()
            self.select.index(self, k.masked_fill((j == mask.hidden)[:, None], 0.0), v, index)
        if self.score_factor:
            i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
            n = visible_count(i, mask).to(wide(q).dtype)
            q = (q * self.score_factor(n)).to(q.dtype)
        return q, k, index

    def step(self, q, k, v, index):
        """One query, which reads only the keys and values that it selects: output (B, H, 1, E), and
        the log-sum-exp if an extra key needs it."""
        i, selected, share = self.selected_now(q, k, index)
        counts = selected.sum(-1)  # (B, H, 1): how many keys each head selects
        places = pad_sequence(
            selected.nonzero()[:, -1].split(counts.flatten().tolist()), batch_first=True
        )
        # (B, H, m): of the selected keys, then padding
        places = places.view(*selected.shape[:2], -1)
        # (B, H, 1, m)
        real = torch.arange(places.shape[-1], device=selected.device) < counts[..., None]
        w, *r = self.weights(q, rows_at(k, places), index, real, i, places[:, :, None])
        o = weighted_sum(w, rows_at(v, places), self.dropout * self.training)
        if share is not None:
            o = share * o + (1 - share) * self.for_score_heads(index.kept["total"], 1) / k.shape[2]
        return o, *r

    def selected_now(self, q, k, index):
        """The position (1,) of the last query, the mask of the keys that it selects, and their
        share of softmax: see `Select.selected`."""
        i = torch.tensor([k.shape[2] - 1], device=k.device)
        return i, *self.select.selected(
            self, q, k, index, i, i.new_ones(1, k.shape[2], dtype=torch.bool)
        )

    def row_weights(self, index, mask, i, q, k):
        """The weights (B, H, R, keys) of the rows at positions i (R,), and their log-sum-exp if it
        is needed."""
        j = torch.arange(k.shape[2], device=k.device)
        seen = visible(i[:, None], j, mask)  # (R, keys)
        selected, share = self.select.selected(self, q, k, index, i, seen)
        w, *r = self.weights(q, k, index, selected, i[:, None], j)
        return w if share is None else share * w + (1 - share) * seen / seen.sum(
            -1, keepdim=True
        ), *r

    def weights(self, q, k, index, selected, i, j):
        """The softmax (B, H, R, keys) over the selected keys, and its log-sum-exp if an extra key
        needs it."""
        s = scaled_scores(q, k, self.scale)
        if chance := self.select.log_chance:
            s = s - chance(self, q, k, index, i, j)
        w = softmax(s, selected)
        return (w, LogSumExp.apply(s, selected, w)) if self.has_extra_key else (w,)

    # ------------------------------------------------------------------ for instruments

    def weight_blocks(self, q, k, x, table=None, mask=None):
        """See Mixer. A mask replaces the selection of keys."""
        self.check(k, x, table)
        mask = mask or self.mask
        q, k, index = self.rule_inputs(q, k, k, mask)  # the values do not change the weights
        return self.softmax_blocks(partial(self.row_weights, index, mask), q, k)

    def bytes_read(self, q, k, v, x, table=None, mask=None, index=None):
        """The bytes that the choice of keys reads, and those of the selected keys and values of
        every head."""
        q, k = self.featured(q), self.featured(k)
        selected = self.selected_now(q, k, index)[1]
        attended = selected.sum().item() * (
            k.shape[-1] * k.element_size() + v.shape[-1] * v.element_size()
        )
        return self.select.scanned(self, k, index) + attended

    @staticmethod
    def cannot_learn(config):
        return (
            f"--attn={config.attn} selects keys in a model that was trained with softmax, and is not trained "
            f"itself: train with --attn=softmax, then give --attn={config.attn} to eval.py"
        )
