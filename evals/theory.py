"""Statements of papers 2, 3 and 4 that need no training, computed on random tensors in a second.

    python eval.py theory

A check draws its tensors from `dice`, a random generator, and returns one number. The statement
holds if this number lies within its bounds. The other arguments of a check are conditions of its
statement: tests/test_theory.py breaks each of them.

[2] Threshold Differential Attention, arXiv 2601.12145. [3] Focus, 2604.03260. [4] Attention Sink
Forges Native MoE, 2602.01203.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn import functional as F

import attention
from common.flags import Knobs, knob
from evals.instrument import legend, table_of_lines
from mixers import focus
from model import GPT, GPTConfig

WIDTH, NEAR = 64, 16  # head dimension; keys that Focus treats as near
PAIRS = 2**20  # of queries and keys, at each length


@dataclass
class Theory(Knobs):
    """Flags of theory"""

    seed: int = knob(2, "seed of all random tensors", least=0)
    json: bool = knob(False, "print JSON instead of a table")


def layer_of(attn, dice, **axes):
    """An untrained attention layer of four heads that reads inputs (B, 64, 64)."""
    config = GPTConfig(
        block_size=64, vocab_size=8, n_layer=1, n_head=4, n_embd=64, attn=attn, **axes
    )
    return GPT(config, dice.initial_seed()).eval().transformer.h[0].attn


# --------------------------------------------------------- [2] Threshold Differential Attention


def random_cosines(queries, n, d, dice):
    """Cosines of independent random directions, (queries, n)."""
    q = F.normalize(torch.randn(queries, d, generator=dice), dim=-1)
    k = F.normalize(torch.randn(n, d, generator=dice), dim=-1)
    return q @ k.T


def threshold(n, beta, kappa=1.0):
    """The threshold of eq. 1 for a row of n keys."""
    layer = SimpleNamespace(beta=torch.tensor([beta]), args={"kappa": kappa}, width=WIDTH)
    return attention.tra_threshold(layer, torch.tensor([float(n)])).item()


def survivors(dice, views=1, beta=1.0):
    """Unrelated keys that pass in all views: their mean number, less 3 standard errors, over the
    theorem's bound."""
    largest = 0.0
    for n, kappa in itertools.product((64, 512, 4096, 65_536), (1, 4)):
        cosines = [random_cosines(PAIRS // n, n, WIDTH, dice) for _ in range(views)]
        passed = torch.stack(cosines) > threshold(n, beta, kappa)  # (views, rows, n)
        count = passed.all(0).sum(-1).double()
        sure = count.mean() - 3 * count.std() / len(count) ** 0.5
        largest = max(largest, sure.item() * n ** (views - 1) / kappa**views)
    return largest


def dispersion(w):
    """The entropy of the absolute weights of a row, which are first divided by their sum, over
    log n: the mean over rows. An empty row has 0."""
    p = w.abs() / w.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    return (torch.special.entr(p).sum(-1) / math.log(w.shape[-1])).mean().item()


def spread(dice, mix=0.0, beta=1.0, related=4):
    """The dispersion of rows of 65,536 keys over that of 64 keys, with a few related keys."""
    found = []
    for n in (64, 65_536):
        cosines = torch.stack([random_cosines(PAIRS // n, n, WIDTH, dice) for _ in range(2)])
        cosines[..., :related] = 0.8
        seen = torch.ones(n, dtype=torch.bool)
        first, second = attention.tra(cosines, seen, threshold(n, beta))
        found.append(dispersion(first - mix * second))
    return found[1] / found[0]


@torch.no_grad()
def range_of_sums(dice, attn="diff"):
    """The largest difference of two row sums of one head."""
    layer = layer_of(attn, dice)
    q, k = (
        torch.randn(8, H, 64, D, generator=dice) for H, D in (layer.shapes["q"], layer.shapes["k"])
    )
    sums = layer.weights_of(q, k, torch.randn(8, 64, 64, generator=dice)).sum(-1)  # (B, H, T)
    return (sums.amax((0, 2)) - sums.amin((0, 2))).max().item()


# ------------------------------------------------------------------------------------ [3] Focus


@torch.no_grad()
def leak(dice, balance="sinkhorn"):
    """The largest change of earlier tokens' group shares if only the last token changes."""
    layer = layer_of("focus", dice, window=NEAR, balance=balance)
    x = torch.randn(1, 64, 64, generator=dice)
    other = torch.cat([x[:, :-1], -x[:, -1:]], 1)
    return (layer.assign(x) - layer.assign(other))[:, :-1].abs().max().item()


def mass_of_shut_pairs(dice, gate=focus.score_gate, T=256, K=4):
    """The mass of a row on distant pairs of different groups. Their sigmoid(z) is 0."""
    s = torch.randn(32, T, T, generator=dice)
    group = torch.randint(K, (T,), generator=dice)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    shut = seen.tril(-NEAR) & (group[:, None] != group)
    s = torch.where(shut, gate(s, torch.tensor(-1e4)), s).masked_fill(~seen, -math.inf)
    return s.softmax(-1)[:, shut].sum().item() / (len(s) * T)


def members_of(count, dice, T=512, K=4):
    """Random balanced groups: each token is a member of `count` of K groups, (1, T, K)."""
    order = torch.rand(1, T, K, generator=dice)
    members = torch.zeros_like(order, dtype=torch.bool)
    return members.scatter(-1, order.topk(count, -1).indices, True)


def pairs_kept(dice, count=2, K=4):
    """The share of distant pairs whose tokens have a group in common."""
    members = members_of(count, dice, K=K)[0].float()
    far = torch.ones(len(members), len(members), dtype=torch.bool).tril(-NEAR)
    return (members @ members.T > 0)[far].float().mean().item()


def change_by_routing(dice, count=3):
    """The largest difference between the outputs of sparse and of full attention."""
    q, k, v = torch.randn(3, 1, 2, 512, 32, generator=dice)
    full = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    routed, _ = focus.sparse(q, k, v, members_of(count, dice), NEAR, 32**-0.5)
    return (routed - full).abs().max().item()


def largest_group(dice, iterations=10, lead=0.5, K=8, temperature=0.1):
    """The largest group's share of tokens. Scores are N(0, 1), as those of a new router, and
    `lead` higher for one group."""
    scores = torch.randn(1, 1024, K, generator=dice)
    scores[..., 0] += lead
    router = SimpleNamespace(args={"iterations": iterations})
    groups = focus.sinkhorn(router, scores / temperature)[0].argmax(-1)
    return groups.bincount().max().item() / len(groups)


# appendix D: the sets of pairs whose softmaxes are combined, each with its sign
DISJOINT = {"same group": 1, "near, other group": 1}
OVERLAPPING = {"same group": 1, "near": 1, "near, same group": -1}


def cosine_of_parts(dice, parts=DISJOINT, dtype=torch.float32, T=256, K=4):
    """Attention over all pairs that are near or share a group, combined from parts by their
    log-sum-exps: the least cosine of a row with the exact output."""
    q, k, v = torch.randn(3, 8, T, 32, generator=dice)
    group = torch.randint(K, (T,), generator=dice)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    same = seen & (group[:, None] == group)
    near = seen.triu(1 - NEAR)
    sets = {
        "same group": same,
        "near, other group": near & ~same,
        "near": near,
        "near, same group": near & same,
    }
    s = q @ k.mT / 32**0.5
    exact = s.masked_fill(~(same | near), -math.inf).softmax(-1) @ v
    outputs = []
    for name, sign in parts.items():
        e = s.to(dtype).exp() * sets[name]
        mass = e.sum(-1, keepdim=True)  # 0 for a row without pairs
        outputs.append((sign, (e / mass.clamp(min=1e-6)) @ v.to(dtype), mass.log()))
    total = sum(sign * lse.exp() for sign, _, lse in outputs).log()
    o = sum(sign * o * (lse - total).exp() for sign, o, lse in outputs)
    return F.cosine_similarity(o.float(), exact, dim=-1).min().item()


# ------------------------------------------------------------------------------- [4] Native MoE


def error_of_gate(dice, value=0.0, T=64, d=32):
    """The error of softmax over the other keys times (1 - the sink's weight), over the norm of the
    output of softmax with the sink. value: the norm of the sink's value, over that of others."""
    s = torch.randn(T, T, generator=dice, dtype=torch.float64)
    v = torch.randn(T, d, generator=dice, dtype=torch.float64)
    s = s.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
    sink = torch.full((T, 1), 4.0, dtype=torch.float64)
    w = torch.cat([sink, s], 1).softmax(-1)
    sinks_value = value * v.norm(dim=-1).mean() / d**0.5  # d equal numbers
    o = w[:, 1:] @ v + w[:, :1] * sinks_value
    gated = (1 - w[:, :1]) * (s.softmax(-1) @ v)
    return ((gated - o).norm(dim=-1).mean() / o.norm(dim=-1).mean()).item()


# ------------------------------------------------------------------------------- the statements


class Statement(NamedTuple):
    place: str  # paper, and its section, equation or table
    check: Callable  # dice -> a number
    least: float  # bounds of the number
    most: float
    paper: str  # what the paper says about the number
    meaning: str  # the statement: what was computed


STATEMENTS = {
    "one view": Statement(
        "[2] theorem 4.3",
        survivors,
        -1,
        1,
        "at most 1",
        "at most kappa unrelated keys of a row pass: keys that pass, over kappa",
    ),
    "two views": Statement(
        "[2] theorem 4.6",
        partial(survivors, views=2),
        -1,
        1,
        "at most 1",
        "at most kappa^2 / n keys pass in both views: keys that pass in both, over this bound",
    ),
    "TRA is focused": Statement(
        "[2] theorem 4.4",
        spread,
        0,
        1,
        "tends to 0",
        "rows do not disperse: entropy over log n, at n = 65,536 over that at n = 64",
    ),
    "TDA is focused": Statement(
        "[2] theorem 4.7",
        partial(spread, mix=0.5),
        0,
        1,
        "tends to 0",
        "nor does the difference of two views: the same number",
    ),
    "free sum": Statement(
        "[2] table 1",
        range_of_sums,
        1e-3,
        math.inf,
        "not fixed",
        "no sum-to-1 in differential softmax: the largest difference of two row sums",
    ),
    "causal": Statement(
        "[3] section 2",
        leak,
        0,
        0,
        "not discussed",
        "training with Sinkhorn is causal: change of earlier shares if the last token changes",
    ),
    "pruning gate": Statement(
        "[3] eq. 2",
        mass_of_shut_pairs,
        0,
        0.01,
        "pruned",
        "a gate of 0 prunes a pair: mass of a row on the pairs whose gate is 0",
    ),
    "top-2 of 4": Statement(
        "[3] section 1",
        pairs_kept,
        0.45,
        0.75,
        "half",
        "two of four groups keep half of the distant pairs: share of pairs kept",
    ),
    "top-3 of 4": Statement(
        "[3] section 3.5",
        change_by_routing,
        0,
        1e-5,
        "exact",
        "three of four groups restore full attention: largest change of the output",
    ),
    "10 iterations": Statement(
        "[3] section 4",
        largest_group,
        0,
        3 / 16,
        "0.20",
        "Sinkhorn balances 8 groups in ten iterations: the largest group's share, 0.125 if even",
    ),
    "3 iterations": Statement(
        "[3] table 9",
        partial(largest_group, iterations=3),
        0.5,
        1,
        "0.95",
        "but not in three iterations: the same number",
    ),
    "merging": Statement(
        "[3] appendix D",
        cosine_of_parts,
        0.99995,
        1.00005,
        "1.0000",
        "attention over disjoint sets of pairs merges exactly: least cosine with the exact output",
    ),
    "subtracting": Statement(
        "[3] appendix D",
        partial(cosine_of_parts, parts=OVERLAPPING, dtype=torch.float16),
        -1,
        0.95,
        "0.79",
        "but subtracting an overlap is catastrophic: the same, in float16",
    ),
    "sink as gate": Statement(
        "[4] eq. 4",
        error_of_gate,
        0,
        1e-12,
        "exact",
        "a sink whose value is 0 is a gate on the output: relative error in float64",
    ),
    "token as gate": Statement(
        "[4] section 3.1",
        partial(error_of_gate, value=0.1),
        0,
        0.1,
        "negligible",
        "and so is a token with a small value: the same, if it has a tenth of the usual norm",
    ),
}


def verdict(statement, number):
    return "holds" if statement.least <= number <= statement.most else "fails"


def command(args, run=None):
    """Exact statements of three papers, computed on random tensors: which hold, which fail?"""
    found, lines = {}, {}
    for name, statement in STATEMENTS.items():
        number = statement.check(torch.Generator().manual_seed(args.seed))
        found[name] = {
            "place": statement.place,
            "number": number,
            "paper": statement.paper,
            "verdict": verdict(statement, number),
            "meaning": statement.meaning,
        }
        lines[name] = found[name] | {"number": f"{number:.3g}"}
    text = table_of_lines(lines, "statement", ("place", "number", "paper", "verdict"))
    meanings = legend({name: statement.meaning for name, statement in STATEMENTS.items()})
    return {"seed": args.seed, "statements": found}, f"{text}\n\n{meanings}"
