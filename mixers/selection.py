"""Token selection: each query of a model that was trained with softmax attends to a few keys only.
Nothing is trained.

A decoding step of softmax attention reads every cached key and value. Here it first reads a smaller
index, which decides on a set S_i of keys for query i. Then it reads only the keys and values of
S_i:

    o_i = sum_{j in S_i} w_ij v_j,          w_i = softmax of (s_ij - log u_ij) over j in S_i

The axis `select` chooses S_i. u_ij is the probability that a random choice finds key j, and 1 for
the other methods.

    topk        the --topk keys of the highest scores. Its index is the keys themselves. The other
                methods approximate it
    sparq       the keys of the highest approximate scores, from the largest components of the query
    quest       whole pages of keys, by an upper bound on their scores
    magicpig    keys whose hashes collide with the query's, at random; it has no --topk

    python eval.py loss --out_dir=out/smollm2 --attn=sparq --topk=128

All of them are causal: S_i depends only on the keys up to i.

Differs from the papers: they select in decoding steps only, after a prefill with full attention.
Here every row selects, so the loss of a text measures the selection. Quest and MagicPIG exempt a
few layers, and SparQ's code selects the same keys for all heads that share a key head. Here each
head of each layer selects its own keys.

Shapes: B batch, H heads, Hk key heads, R query rows (the last R of T positions), T keys, D width of
q and k, E of v, m selected keys, L tables, P pages.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import kernels
from attention import RULES, softmax
from axes import options
from axes.base import Choice, Constant, Fixed, only
from axes.layer import Cache
from axes.queries_keys import SCALES
from axes.rows import SINKS, normalised_output
from kernels import grouped, scaled_scores, visible, visible_count, weighted_sum, wide
from mixers.base import Mixer, axes_of, largest

# ----------------------------------------------------------- the axis select: which keys a row sees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select(Choice):
    """One way to choose keys. An index is a dict of tensors about the keys."""

    # layer, k and v of T tokens, index (a Cache): brings the index up to date
    index_keys: Callable = lambda layer, k, v, index: None
    # layer, q, k, index, i (R,), seen (R, T) -> a mask of the selected keys (B, H, R, T), and their
    # estimated share of softmax (B, H, R, 1), or None for all of it
    selected: Callable | None = None
    # layer, q, k, index, i, j -> log u of the keys k at positions j
    log_chance: Callable | None = None
    # layer, k, index -> the bytes that `selected` reads for one query
    scanned: Callable | None = None


def indexed(index, name, axis):
    """How many keys or pages the index holds."""
    return index.kept[name].shape[axis] if name in index.kept else 0


def topk_mask(layer, rank, seen):
    """The mask of the --topk visible keys with the highest rank (B, H, R, T)."""
    rank = rank.detach().masked_fill(~seen, -math.inf)
    return largest(rank, layer.config.topk or rank.shape[-1]) & seen


def by_score(layer, q, k, index, i, seen):
    """The keys of the highest scores s_ij. Source: the oracle in SparQ, Quest and MagicPIG."""
    return topk_mask(layer, scaled_scores(q, k, layer.scale), seen), None


# SparQ. s^_ij = sum of q_id k_jd / sqrt(D) over the r components d with the largest |q_id|, divided
# by sqrt(c_i), where c_i = (sum of these |q_id|) / (sum of all |q_id|).
# Ribar et al. 2312.04985, section 4 and algorithm 1


def by_largest_components(layer, q, k, index, i, seen):
    """The --topk keys of the highest approximate scores s^_ij. A share --attn_args=local of them is
    reserved for the most recent keys.

    With --attn_args=realloc=1 the output is a_i o_i + (1 - a_i) m_i. m_i is the mean of all values
    that row i sees, and a_i the share that softmax(s^_i) gives to the selected keys.

    Differs from the paper: there the mean is over all values in the cache. While decoding they are
    the same."""
    size = q.abs()
    r = min(layer.args["components"], q.shape[-1])
    largest_sizes, d = size.topk(r, -1)  # (B, H, R, r)
    parts = q.gather(-1, d)  # (B, H, R, r)
    if q.shape[2] == 1:  # the index stores each component of all keys in one piece
        s = parts @ rows_at(index.kept["channels"], d[:, :, 0])  # (B, H, 1, T)
    else:
        rest_is_0 = torch.zeros_like(q).scatter(-1, d, parts)  # (B, H, R, D)
        s = grouped(rest_is_0, k.mT)  # (B, H, R, T)
    tiny = torch.finfo(q.dtype).tiny  # a query may be 0
    total = size.sum(-1, keepdim=True).clamp(min=tiny)
    c = largest_sizes.sum(-1, keepdim=True) / total  # (B, H, R, 1)
    c = c.clamp(min=tiny)
    s = wide(s * layer.scale) / c.sqrt()

    j = torch.arange(k.shape[2], device=k.device)
    local = int(layer.args["local"] * layer.config.topk)
    recent = i[:, None] - j < local  # (R, T)
    selected = topk_mask(layer, s.masked_fill(recent, math.inf), seen)
    share = None
    if layer.args["realloc"]:
        w = softmax(s, seen) * selected
        share = w.sum(-1, keepdim=True)  # a_i
    return selected, share


def channels(layer, k, v, index):
    """Keys in the order of their components (B, Hk, D, T), and the sum of all values (B, Hk, 1,
    E)."""
    known = indexed(index, "channels", 3)
    new_keys = k[:, :, known:]
    new_values = wide(v[:, :, known:])
    index.append("channels", new_keys.mT.contiguous(), 3)
    total = index.kept.get("total", 0)
    index.kept["total"] = total + new_values.sum(2, keepdim=True)


# Quest. A page is 16 consecutive keys (--attn_args=page). With the smallest and the largest value
# m_d and M_d of each component in a page, none of its keys has a score above
# sum_d max(q_d m_d, q_d M_d). Tang et al. 2406.10774, section 3


def by_page(layer, q, k, index, i, seen):
    """The keys of the --topk / page pages of the highest bounds. The row's own page is always among
    them."""
    T = k.shape[2]
    page = layer.args["page"]
    whole = T // page
    pages = math.ceil(T / page)  # the last one may be incomplete
    low = wide(index.kept["low"])[:, :, :whole].mT  # (B, Hk, D, whole)
    high = wide(index.kept["high"])[:, :, :whole].mT
    q = wide(q).detach()
    of_positive = grouped(q.relu(), high)  # (B, H, R, whole)
    of_negative = grouped((-q).relu(), low)
    rank = F.pad(of_positive - of_negative, (0, pages - whole))  # (B, H, R, P)
    p = torch.arange(pages, device=q.device)
    own = i[:, None] // page  # (R, 1)
    rank = rank.masked_fill(p >= own, -math.inf)
    rank = rank.masked_fill(p == own, math.inf)
    topk = layer.config.topk or T
    chosen = largest(rank, math.ceil(topk / page))
    return chosen.repeat_interleave(page, -1)[..., :T] & seen, None


def page_bounds(layer, k, v, index):
    """The smallest and the largest value of each component in every whole page: (B, Hk, P, D)
    each."""
    page = layer.args["page"]
    known = indexed(index, "low", 2)
    whole = k.shape[2] // page
    new = k[:, :, known * page : whole * page]
    new = new.unflatten(2, (whole - known, page))  # (B, Hk, new pages, page, D)
    index.append("low", new.amin(3))
    index.append("high", new.amax(3))


# MagicPIG. A table gives a vector the signs of its products with K random directions as a hash.
# With p = 1 - angle(q, k) / pi, the hashes of q and k are equal in one table with probability p^K,
# and in two or more of L tables with probability u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1).
# Chen et al. 2410.16179, section 4 and algorithm 1


def by_collision(layer, q, k, index, i, seen):
    """The keys whose hashes equal the query's in two or more tables, and always the first keys and
    the recent ones."""
    T = k.shape[2]
    own = hashes(layer, q)  # (B, H, L, R)
    codes = index.kept["codes"][..., :T]  # (B, Hk, L, T)
    own = own.unflatten(1, (codes.shape[1], -1))  # (B, Hk, H / Hk, L, R)
    # (B, Hk, H / Hk, R, T)
    count = torch.zeros(*own.shape[:3], q.shape[2], T, dtype=torch.short, device=q.device)
    for table in range(codes.shape[2]):
        count += own[..., table, :, None] == codes[:, :, None, table, None]
    collides = (count >= 2).flatten(1, 2)  # (B, H, R, T)
    j = torch.arange(T, device=k.device)
    exact = is_exact(layer, i[:, None], j)  # (R, T)
    return seen & (exact | collides), None


def is_exact(layer, i, j):
    """The first keys and the recent ones, which every row sees: u = 1."""
    first = j < layer.args["first"]
    recent = i - j < layer.args["recent"]
    return first | recent


def log_collision_chance(layer, q, k, index, i, j):
    """log u_ij, (B, H, R, T), for keys k (B, Hk or H, T, D) at positions j."""
    centre = index.kept["centre"]  # (B, Hk, 1, D)
    sharing = k.shape[1] // centre.shape[1]
    k = wide(k) - centre.repeat_interleave(sharing, 1)
    k = F.normalize(k, dim=-1)
    q = F.normalize(wide(q), dim=-1)
    cosine = grouped(q, k.mT)  # (B, H, R, T)
    eps = torch.finfo(cosine.dtype).eps
    near = 1 - 4 * eps  # the slope of acos is infinite at 1
    angle = torch.acos(cosine.clamp(-near, near))
    equal = (1 - angle / math.pi) ** layer.args["bits"]  # p^K
    others = layer.args["tables"] - 1
    # log (1 - u) = (L - 1) log (1 - p^K) + log (1 + (L - 1) p^K), since u may be far below 1
    log_missed = others * torch.log1p(-equal) + torch.log1p(others * equal)
    u = -torch.expm1(log_missed)
    u = u.clamp(min=eps**2)  # a key with such a small chance is never found
    exact = is_exact(layer, i, j)
    return torch.where(exact, 0.0, u.log())


def hashed_keys(layer, k, v, index):
    """The hashes of all keys (B, Hk, L, T) after subtraction of a `centre` (B, Hk, 1, D), since
    keys lie far from 0.

    Differs from the paper: its centre is the mean of all keys of the prompt, which early rows must
    not see. Here it is the mean of the `recent` keys that follow the `first` ones. Every row that
    samples a key comes after all of them."""
    first = layer.args["first"]
    exact = first + layer.args["recent"]
    known = indexed(index, "codes", 3)
    if known < exact:  # until now no key was sampled, and the centre changes
        known = 0
        index.kept.pop("codes", None)
        index.buffers.pop("codes", None)
        some = wide(k[:, :, first:exact])
        count = max(1, some.shape[2])
        index.kept["centre"] = some.sum(2, keepdim=True) / count
    new = wide(k[:, :, known:]) - index.kept["centre"]
    index.append("codes", hashes(layer, new), 3)


def hashes(layer, x):
    """The hash of x (B, H, T, D) in every table, a number of K bits: (B, H, L, T)."""
    x = wide(x.detach())
    with torch.autocast(x.device.type, enabled=False):
        bits = x @ layer.planes.to(x.dtype) > 0  # (B, H, T, L K)
    K = layer.args["bits"]
    bits = bits.unflatten(-1, (-1, K))  # (B, H, T, L, K)
    powers = 2 ** torch.arange(K, device=x.device, dtype=torch.short)
    codes = (bits * powers).sum(-1).short()  # (B, H, T, L)
    return codes.mT.contiguous()


def random_planes(layer):
    """The directions of all hashes (D, L K), drawn from --attn_args=seed and the layer's number."""
    seed = 1000 * layer.args["seed"] + layer.depth
    generator = torch.Generator().manual_seed(seed)
    shape = layer.width, layer.args["tables"] * layer.args["bits"]
    planes = torch.randn(shape, generator=generator, device="cpu")
    return {"planes": Fixed(planes)}


def has_no_topk(config, args, choices):
    if config.topk:
        return (
            f"--topk={config.topk}: how many keys --select=magicpig finds depends on its tables: "
            "give --topk=0 and --attn_args=bits=NUMBER,tables=NUMBER"
        )


def bytes_of_components(layer, k, index):
    """SparQ: every head reads a share of the components of all keys."""
    share = min(1, layer.args["components"] / layer.width)
    return layer.heads / k.shape[1] * share * k.nbytes


SELECTS = {
    "topk": Select(selected=by_score, scanned=lambda layer, k, index: k.nbytes),
    "sparq": Select(
        args={
            "components": Constant(16, 1, 65536),
            "local": Constant(0.25, 0.0, 1.0),
            "realloc": Constant(False),
        },
        index_keys=channels,
        selected=by_largest_components,
        scanned=bytes_of_components,
    ),
    "quest": Select(
        args={"page": Constant(16, 1, 65536)},
        index_keys=page_bounds,
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
        index_keys=hashed_keys,
        selected=by_collision,
        log_chance=log_collision_chance,
        scanned=lambda layer, k, index: index.kept["codes"].nbytes,
    ),
}

AXES = axes_of(
    only(RULES, "softmax"),
    select=SELECTS,
    scale=SCALES,
    sink=SINKS,
)

# ---------------------------------------------------------------------------------------- the layer


def rows_at(y, places):
    """The rows of y (B, Hk, N, W) at places (B, H, m), for each of the H heads: (B, H, m, W)."""
    B, H, _ = places.shape
    batch = torch.arange(B, device=y.device)
    key_head = torch.arange(H, device=y.device) // (H // y.shape[1])
    return y[batch[:, None, None], key_head[:, None], places]


class Selection(Mixer):
    """A layer of softmax attention over selected keys: (B, T, C) to (B, T, C).

    The cache of generation also holds the index of the keys."""

    axes = AXES
    numbers = {"topk": options.Number(0)}
    added = ("planes",)
    trains = False
    in_blocks = True
    refused = {  # {axis: why selection does not accept its other values}
        "window": "it selects among all earlier keys",
        "window_every": "it has no window",
        "first": "it has no window",
        "pos": "its indexes ignore a bias by distance: use rope, none, sinusoidal or learned",
        "rule": "it selects keys for softmax",
    }

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.bind("select", "index_keys", "selected", "log_chance", "scanned")

    def remember(self, cache, x, k, v):
        """Bring the index of all keys up to date."""
        self.index_keys(self.featured(k), v, cache)
        return {"index": cache}

    def attend(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk, T, D)
        v,  # (B, Hk, T, E)
        x,  # (B, R or T, C)
        table=None,
        mask=None,
        index=None,
    ):
        """Softmax over the selected keys, see Mixer. index: of all T keys; None: made here."""
        self.check(k, x, table)
        mask = mask or self.mask
        q, k, index = self.rule_inputs(q, k, v, mask, index)
        if q.shape[2] == 1 and mask.hidden < 0:
            o = self.step(q, k, v, index)
        else:
            one_block = partial(self.block, partial(self.row_weights, index, mask))
            parts = "rows", "keys", "keys"
            (o,) = kernels.block_loop(one_block, mask, parts, q, k, v)
        return self.postprocess(o, x, v)

    def rule_inputs(self, q, k, v, mask, index=None):
        """q and k after norm and learned factor, and the index of all keys, in which a hidden key
        is 0."""
        q = self.featured(q)
        k = self.featured(k)
        j = torch.arange(k.shape[2], device=k.device)
        if index is None:
            index = Cache()
            is_hidden = (j == mask.hidden)[:, None]
            self.index_keys(k.masked_fill(is_hidden, 0.0), v, index)
        if self.score_factor:
            i = j[-q.shape[2] :]
            n = visible_count(i, mask).to(wide(q).dtype)  # (R,)
            q = (q * self.score_factor(n)).to(q.dtype)
        return q, k, index

    def step(self, q, k, v, index):
        """The output (B, H, 1, E) of one query, which reads only the keys and values that it
        selects."""
        i, selected, share = self.selected_now(q, k, index)
        counts = selected.sum(-1)  # (B, H, 1): how many keys each head selects
        places = selected.nonzero()[:, -1]  # the keys of all heads, one head after another
        places = places.split(counts.flatten().tolist())
        places = pad_sequence(places, batch_first=True)  # (B H, m): selected keys, then padding
        places = places.view(*selected.shape[:2], -1)  # (B, H, m)
        m = torch.arange(places.shape[-1], device=k.device)
        real = m < counts[..., None]  # (B, H, 1, m)
        k_few = rows_at(k, places)  # (B, H, m, D)
        v_few = rows_at(v, places)  # (B, H, m, E)
        w, r = self.weights(q, k_few, index, real, i, places[:, :, None])
        o = weighted_sum(w, v_few, self.dropout * self.training)
        if share is not None:
            total = self.for_score_heads(index.kept["total"], 1)  # (B, H, 1, E)
            mean = total / k.shape[2]
            o = share * o + (1 - share) * mean
        return normalised_output(self, o, q, r, None)

    def selected_now(self, q, k, index):
        """The position (1,) of the last query, and what `Select.selected` returns for it."""
        T = k.shape[2]
        i = torch.tensor([T - 1], device=k.device)
        seen = i.new_ones(1, T, dtype=torch.bool)
        return i, *self.selected(q, k, index, i, seen)

    def row_weights(self, index, mask, i, q, k):
        """The weights (B, H, R, keys) of the rows at positions i (R,), see Mixer.softmax."""
        j = torch.arange(k.shape[2], device=k.device)
        seen = visible(i[:, None], j, mask)  # (R, keys)
        selected, share = self.selected(q, k, index, i, seen)
        w, r = self.weights(q, k, index, selected, i[:, None], j)
        if share is not None:
            n = seen.sum(-1, keepdim=True)  # (R, 1)
            w = share * w + (1 - share) * seen / n
        return w, r

    def weights(
        self,
        q,  # (B, H, R, D)
        k,  # (B, Hk or H, keys, D)
        index,
        selected,  # (B, H, R, keys)
        i,  # positions of the queries, broadcastable with j
        j,  # positions of the keys
    ):
        """The softmax over the selected keys, see Mixer.softmax."""
        s = scaled_scores(q, k, self.scale)  # (B, H, R, keys)
        if self.log_chance:
            s = s - self.log_chance(q, k, index, i, j)
        return self.softmax(s, selected)

    # ------------------------------------------------------------------ for instruments

    def weight_blocks(self, q, k, x, table=None, mask=None):
        """See Mixer. A mask replaces the selection of keys."""
        self.check(k, x, table)
        mask = mask or self.mask
        q, k, index = self.rule_inputs(q, k, k, mask)  # the values do not change the weights
        return self.softmax_blocks(partial(self.row_weights, index, mask), q, k)

    def bytes_read(self, q, k, v, x, table=None, index=None):
        """The bytes that the choice of keys reads, and those of the selected keys and values of
        every head."""
        q = self.featured(q)
        k = self.featured(k)
        _, selected, _ = self.selected_now(q, k, index)
        of_key = k[0, 0, 0].nbytes
        of_value = v[0, 0, 0].nbytes
        attended = selected.sum().item() * (of_key + of_value)
        return self.scanned(k, index) + attended

    @staticmethod
    def cannot_learn(config):
        attn = config.attn
        return (
            f"--attn={attn} selects keys in a model that was trained with softmax, and is not "
            f"trained itself: train with --attn=softmax, then give --attn={attn} to eval.py"
        )
