"""Measurements of Focus that only the ledger makes: checks on random tensors, by seed, and looks into routed runs."""
import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F

from evals import groups
from evals.instrument import Common, OpenedRun, watch, window_batches
from evals.lab_runs import FILE
from evals.ledger.quantities import rank_correlation
from mixers import focus
from model import GPT, GPTConfig

NEAR = 16                                       # keys that are near, in the checks

# ------------------------------------------------------------------------------------------- checks: seed -> numbers


def focus_leak(seed, T=64):
    """The largest change of earlier tokens' shares if only the last one changes, with Sinkhorn and with potentials."""
    x, found = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(seed)), {}
    for balance in ("sinkhorn", "potential"):
        config = GPTConfig(block_size=T, vocab_size=8, n_layer=1, n_head=4, n_embd=64, attn="focus", window=NEAR,
                           balance=balance)
        layer = GPT(config, seed).eval().transformer.h[0].attn
        other = torch.cat([x[:, :-1], -x[:, -1:]], 1)
        found[balance] = (layer.assign(x) - layer.assign(other))[:, :-1].abs().max().item()
    return found


def focus_gate(seed, T=256, K=4, d=64):
    """The mass of a row on distant pairs of different groups, whose gate is 0, in both forms of the gate."""
    dice, (i, j) = torch.Generator().manual_seed(seed), torch.tril_indices(T, T)
    s, group = torch.randn(32, T, T, generator=dice), torch.randint(K, (T,), generator=dice)
    seen = torch.zeros(T, T, dtype=torch.bool).index_put((i, j), torch.tensor(True))
    shut = seen & (group[:, None] != group) & (torch.arange(T)[:, None] - torch.arange(T) >= NEAR)
    found = {}
    for name, gate in (("score", focus.score_gate), ("log", focus.log_gate)):
        gated = torch.where(shut, gate(s, torch.tensor(-1e4)), s).masked_fill(~seen, -math.inf)
        found[name] = gated.softmax(-1)[:, shut].sum().item() / (len(s) * T)
    return found | {"shut pairs": (shut.sum() / seen.sum()).item()}


def focus_sinkhorn(seed, T=1024):
    """The largest group's share of tokens after N iterations, on random scores that are higher for one group. SD: the
    standard deviation of the scores; a new router starts near 1. t: the temperature."""
    dice, found = torch.Generator().manual_seed(seed), {}
    for deviation, K in itertools.product((0.25, 1), (4, 8)):
        scores = deviation * torch.randn(1, T, K, generator=dice) + 0.5 * F.one_hot(torch.tensor(0), K)
        for t, count in itertools.product((0.1, 0.5), (3, 5, 10, 20)):
            g = focus.sinkhorn(SimpleNamespace(args={"iterations": count}), scores / t)
            sizes = F.one_hot(g[0].argmax(-1), K).double().mean(0)      # a token is in the group of its largest share
            found[f"SD {deviation}, K {K}, t {t}, N {count}"] = sizes.max().item()
    return found


def focus_topk(seed, T=512, K=4):
    """For random balanced memberships: the share of distant pairs that top-2 and top-3 of 4 groups keep, and the
    largest difference of their output from full attention."""
    dice, far = torch.Generator().manual_seed(seed), torch.ones(T, T, dtype=torch.bool).tril(-NEAR)
    q, k, v = (torch.randn(1, 2, T, 32, generator=dice) for _ in range(3))
    full, found = F.scaled_dot_product_attention(q, k, v, is_causal=True), {}
    order = torch.rand(1, T, K, generator=dice)
    for count in (2, 3):
        members = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order.topk(count, -1).indices, True)
        meet = members[0].float() @ members[0].float().T > 0
        found[f"pairs, top-{count}"] = (meet & far).sum().item() / far.sum().item()
        o = focus.sparse(q, k, v, members, NEAR, 32 ** -0.5)[0]
        found[f"difference, top-{count}"] = (o - full).abs().max().item()
    return found


def focus_merge(seed, T=256, K=4, d=32):
    """Two ways to compute softmax over the pairs that are near or share a group, both from the log-sum-exps of parts:
    merge disjoint parts, or add overlapping parts and subtract the overlap. Largest error and least cosine of each, in
    float32 and float16."""
    def part_of(s, v, seen):                    # the output, 0 for a row without pairs, and the log-sum-exp (8, T, 1)
        e = s.exp() * seen
        total = e.sum(-1, keepdim=True)
        return (e / total.clamp(min=1e-6)) @ v, total.log()

    dice, places, found = torch.Generator().manual_seed(seed), torch.arange(T), {}
    q, k, v = (torch.randn(8, T, d, generator=dice) for _ in range(3))
    group, near = torch.randint(K, (T,), generator=dice), places[:, None] - places < NEAR
    past, same = places[:, None] >= places, group[:, None] == group
    s = q @ k.mT / d ** 0.5
    right = s.masked_fill(~(past & (same | near)), -math.inf).softmax(-1) @ v
    for name, kind in (("float32", torch.float32), ("float16", torch.float16)):
        sets = (same, near & ~same, near, near & same)
        group_part, other_near, all_near, overlap = (part_of(s.to(kind), v.to(kind), past & pairs) for pairs in sets)
        ways = {"merge": [(1, group_part), (1, other_near)],
                "subtract": [(1, group_part), (1, all_near), (-1, overlap)]}
        for way, parts in ways.items():
            whole = sum(sign * lse.exp() for sign, (_, lse) in parts).log()
            o = sum(sign * o * (lse - whole).exp() for sign, (o, lse) in parts).float()
            found |= {f"{way} {name} error": (o - right).abs().max().item(),
                      f"{way} {name} cosine": F.cosine_similarity(o, right, dim=-1).min().item()}
    return found


CHECKS = {check.__name__: check for check in (focus_leak, focus_gate, focus_sinkhorn, focus_topk, focus_merge)} | {
    # their own table 9: rank correlation of perplexity and dominance, of centroids alone and of all weights
    "focus_table": lambda seed: {name: rank_correlation(*zip(*rows, strict=True))
                                 for name, rows in FILE["table_9"].items()}}

# -------------------------------------------------------------------------------------------- looks: a run -> numbers


def classes(place):
    """How much a token's group tells about its class, in the layer that tells most: the mutual information over the
    classes' entropy, minus that of random groups of the same sizes. Also the `purity` of punctuation."""
    run = OpenedRun(Common(out_dir=place), {})
    T, dice, best = run.model.config.block_size, np.random.default_rng(0), {"mutual information": -math.inf}
    for layer in groups.look(groups.Groups(), run, T):
        own, ids = layer.own.ravel(), layer.ids.ravel()
        kinds = classes_of([run.tokenizer.decode([i]) or " " for i in ids])
        chance = [mutual_information(dice.permutation(own), kinds) for _ in range(5)]
        found = {"mutual information": mutual_information(own, kinds) - np.mean(chance), "purity": purity(own, kinds)}
        best = max(best, found, key=lambda found: found["mutual information"])
    return {name: float(value) for name, value in best.items()}


def purity(own, kinds):
    """The share of punctuation in the group that holds most of it. own, kinds (tokens,): groups and classes."""
    mark = kinds == list(CLASSES).index("punctuation")
    return mark[own == np.bincount(own[mark], minlength=1).argmax()].mean()


PREPOSITIONS = "of in to for with on at from by about into over after under".split()
CLASSES = {                                     # {class: is a word, or one other character, of it?}; the first counts
    "article": lambda word: word.lower() in ("a", "an", "the"),
    "preposition": lambda word: word.lower() in PREPOSITIONS, "digit": str.isdigit, "space": str.isspace,
    "punctuation": lambda word: not word.isalpha(), "capitalised": lambda word: word[0].isupper(), "other": str.isalpha}


def classes_of(tokens):
    """The index in CLASSES of each token's last character; a letter has the class of its word. tokens: their texts."""
    text = "".join(tokens)
    found = np.empty(len(text), np.int64)
    for match in re.finditer(r"[A-Za-z]+|.", text, re.S):
        found[slice(*match.span())] = next(n for n, fits in enumerate(CLASSES.values()) if fits(match[0]))
    return found[np.cumsum([len(token) for token in tokens]) - 1]


def mutual_information(a, b):
    """The mutual information of two labels over the entropy of the second: 1 if a determines b."""
    joint = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(joint, (a, b), 1 / len(a))
    both, one, other = (focus.entropy(torch.from_numpy(p.ravel())) for p in (joint, joint.sum(1), joint.sum(0)))
    return ((one + other - both) / other).item()


def shut(place, windows=16):
    """What a trained gate does to pairs of different groups: distant pairs whose tokens have different largest groups.
    Their mean mass in a row with the gate, and without it for the same queries and keys; their share of all pairs."""
    run, found = OpenedRun(Common(out_dir=place), {}), []

    def see(layer, module, q, k, v, x, table):
        T, near, own = x.shape[1], module.local, module.assign(x).argmax(-1)
        apart = (own[:, :, None] != own[:, None]) & groups.distant(T, near, x.device)   # (B, T, T)
        gated = module.weights_of(q, k, x)                              # (B, H, T, T)
        module.local = T                        # now all pairs are near, and near pairs have no gate
        plain, module.local = module.weights_of(q, k, x), near
        mass = [(w * apart[:, None]).sum(-1).mean().item() for w in (gated, plain)]
        found.append([*mass, apart.sum().item() / (len(x) * T * (T + 1) / 2)])

    for rows in window_batches(run.model, run.split("val"), run.machine, run.model.config.block_size, windows, 1):
        watch(run.model, see, rows[:, :-1], run.machine)
    return dict(zip(("with the gate", "without", "pairs"), np.mean(found, 0).tolist(), strict=True))


THEIR_TASKS = ("hellaswag", "arc_easy", "piqa", "lambada")              # of tables 1 to 4
LOOKS = {look.__name__: look for look in (classes, shut)}
