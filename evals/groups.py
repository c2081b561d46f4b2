"""The groups of tokens that Focus has learned (arXiv 2604.03260, sections 4 and 5): how even their
sizes are, how clearly tokens belong to them, which tokens they hold, and how many distant pairs
they keep.

A token has a share in every group, and belongs to the group with its largest share. All measures
are taken on fixed windows, layer by layer. Every layer has its own groups: group 2 of one layer is
unrelated to group 2 of another.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from common.flags import knob
from evals.instrument import Windows, batches, explained, first_line, watch
from evals.pictures import figure_of, frame, line_panel, pyplot, whole_ticks
from mixers.focus import Focus, entropy

MEASURES = {  # name: its meaning, printed under the table
    "dominance": "share of tokens in the largest group (section 4); {even:.3f} if all are equally large",
    "evenness": "entropy of the groups' shares of tokens, divided by log K: 1 if all groups are equally large",
    "confidence": "a token's share in its own group, mean over tokens (section 5)",
    "stability": "share of tokens that --against has in the same group, after the best matching of groups (section 4); "
    "about {even:.3f} or more by chance",
}
KEPT = "share of distant pairs, {window} apart or more, with a common group among the {k} largest of each (table 7)"
MOST = 4  # the largest of these k
LISTED = 8  # the most frequent tokens of each group


@dataclass
class Groups(Windows):
    """Flags of groups"""

    against: str = knob(
        "", "compare groups with this run of the same model, such as an earlier checkpoint"
    )


def command(args, run):
    """Show the groups of tokens that Focus has learned, and how many distant pairs of tokens they
    keep."""
    check(run)
    T, config = run.window(args.length), run.model.config
    seen = look(args, run, T)
    layers, K = [layer.numbers for layer in seen], seen[0].groups
    if args.against:
        other = run.beside(args.against, {"window": config.window, "topk": config.topk})
        check(other)
        theirs = [block.attn.groups for block in other.model.transformer.h]
        if theirs != [layer.groups for layer in seen]:
            raise ValueError(
                f"--against={args.against} has {theirs[0]} groups in each of {len(theirs)} layers, where "
                f"{run.out_dir} has {K} in each of {len(seen)}: name another run of the same model"
            )
        for layer, one, another in zip(layers, seen, look(args, other, T), strict=True):
            layer["stability"] = agreement(one.own, another.own, K)
    shown = int(np.argmax([layer["evenness"] for layer in layers]))
    numbers = run.reads(args.split, len(seen[0].own), T) | {
        "groups": K,
        "window": seen[0].local,
        "topk": config.topk,
        "against": args.against,
        "mean": mean_of(layers),
        "layers": layers,
        "shown": spelled_out(seen[shown], shown, run.tokenizer),
    }
    return numbers, in_words(numbers)


def check(run):
    """Raise ValueError on a run without groups."""
    if not all(isinstance(block.attn, Focus) for block in run.model.transformer.h):
        raise ValueError(
            f"{run.out_dir} has --attn={run.model.config.attn}, which has no groups: name a run that was "
            "trained with --attn=focus"
        )


def look(args, run, T):
    """Measure the groups of every layer of a run on its windows of T tokens. For each layer, the
    result has

    groups, local   the number of groups K, and the distance from which on pairs are distant
    ids, own        every token, and the group that it belongs to, (windows, T)
    numbers         its MEASURES, "kept" {k: share of distant pairs}, and "shares", each group's
                    share of tokens
    """
    layers = [
        SimpleNamespace(
            groups=block.attn.groups,
            local=block.attn.local,
            ids=[],
            own=[],
            confidence=0.0,
            kept=np.zeros(min(MOST, block.attn.groups)),
        )
        for block in run.model.transformer.h
    ]
    far = distant(T, layers[0].local, run.machine.device)

    def see(at, module, q, k, v, x, table):
        layer, g = layers[at], module.assign(x)  # g (B, T, K)
        top, own = g.max(-1)
        layer.own.append(own.to(torch.int16).cpu().numpy())
        layer.confidence += top.double().sum().item()
        for i in range(len(layer.kept)):
            members = module.memberships(g, i + 1).to(g.dtype)
            layer.kept[i] += ((members @ members.mT > 0) & far).sum().item()

    ids = []
    for rows in batches(run, args, T):
        ids.append(rows[:, :-1].cpu().numpy())
        watch(run.model, see, rows[:, :-1], run.machine)
    for layer in layers:
        layer.ids, layer.own = np.concatenate(ids), np.concatenate(layer.own)
        shares = np.bincount(layer.own.ravel(), minlength=layer.groups) / layer.own.size
        evenness = (
            entropy(torch.from_numpy(shares)).item() / np.log(layer.groups)
            if layer.groups > 1
            else 1.0
        )
        pairs = len(layer.own) * far.sum().item()
        layer.numbers = {
            "dominance": float(shares.max()),
            "evenness": evenness,
            "confidence": layer.confidence / layer.own.size,
            "kept": {
                str(k): float(kept / pairs) if pairs else None
                for k, kept in enumerate(layer.kept, 1)
            },
            "shares": shares.tolist(),
        }
    return layers


def distant(T, local, device="cpu"):
    """The mask (T, T) of distant pairs, whose key is at least `local` tokens before the row."""
    places = torch.arange(T, device=device)
    return places[:, None] - places >= local


def agreement(one, other, K):
    """The share of tokens in the same group in two labellings (windows, T), after the best matching
    of their groups.
    Up to 8 groups it tries all orders; with more it matches greedily, the largest agreement
    first."""
    both = np.bincount((one.astype(np.int64) * K + other).ravel(), minlength=K * K).reshape(K, K)
    if K <= 8:
        orders = map(list, itertools.permutations(range(K)))
        return float(max(both[range(K), order].sum() for order in orders) / one.size)
    matched = 0
    for _ in range(K):
        i, j = np.unravel_index(both.argmax(), both.shape)
        matched += both[i, j]
        both[i], both[:, j] = -1, -1
    return float(matched / one.size)


def mean_of(layers):
    """The mean of each measure over layers. The share of pairs kept is None if no pair is
    distant."""
    mean = {
        name: float(np.mean([layer[name] for layer in layers]))
        for name in MEASURES
        if name in layers[0]
    }
    kept = {k: [layer["kept"][k] for layer in layers] for k in layers[0]["kept"]}
    return mean | {
        "kept": {
            k: None if None in shares else float(np.mean(shares)) for k, shares in kept.items()
        }
    }


def spelled_out(seen, layer, tokenizer):
    """The texts of a layer's groups. "tokens": the most frequent ones of each group, [[text, count,
    share of the text's occurrences that are in this group]]. "passage": the groups of the tokens of
    the first window."""
    own, ids, common = seen.own.ravel(), seen.ids.ravel(), []
    everywhere = np.bincount(ids)
    for group in range(seen.groups):
        counts = np.bincount(ids[own == group], minlength=len(everywhere))
        best = [i for i in counts.argsort(kind="stable")[::-1][:LISTED] if counts[i]]
        common.append(
            [
                [tokenizer.decode([int(i)]), int(counts[i]), float(counts[i] / everywhere[i])]
                for i in best
            ]
        )
    return {"layer": layer, "tokens": common, "passage": seen.own[0].tolist()}


def in_words(numbers):
    """The numbers as text: a line for each layer, then the tokens of one layer's groups."""
    lines = {str(i): layer for i, layer in enumerate(numbers["layers"])} | {"all": numbers["mean"]}
    lines = {
        name: line | {f"kept, k={k}": share for k, share in line["kept"].items()}
        for name, line in lines.items()
    }
    meanings = {name: text.format(even=1 / numbers["groups"]) for name, text in MEASURES.items()}
    meanings |= {
        f"kept, k={k}": KEPT.format(window=numbers["window"], k=k)
        for k in numbers["mean"]["kept"]
        if int(k) < numbers["groups"]
    }
    shown = numbers["shown"]
    text = [
        first_line(numbers),
        "",
        explained(lines, meanings, "layer"),
        "",
        f"layer {shown['layer']}: the most frequent tokens of each group, x count (share of all occurrences)",
    ]
    text += [
        f"{group:>3}  "
        + (
            "  ".join(f"{token!r} x{count} ({share:.0%})" for token, count, share in common)
            or "(no token)"
        )
        for group, common in enumerate(shown["tokens"])
    ]
    return "\n".join(text)


def draw(path, found):
    """Draw four panels for each run: each group's share of tokens, how sure tokens are of theirs,
    and the distant pairs that k groups keep, all by layer; and the pairs of the first window in one
    layer, light blue if near, dark blue if of one group, grey if closed."""
    kinds = pyplot().matplotlib.colors.ListedColormap(["white", "#eeeeee", "#9ecae1", "#08519c"])
    with figure_of(path, [4.1] * len(found), [4, 3, 3, 4]) as axes:
        for (sizes, tokens, pairs, window), (place, numbers) in zip(
            axes, found.items(), strict=True
        ):
            layers, shown = numbers["layers"], numbers["shown"]
            draw_sizes(sizes, layers, f"{Path(place).name}: tokens by group")
            draw_by_layer(
                tokens,
                {
                    name: [layer[name] for layer in layers]
                    for name in ("confidence", "stability")
                    if name in layers[0]
                },
                "mean over tokens",
            )
            draw_by_layer(
                pairs,
                {
                    f"{k} of {numbers['groups']} groups": [layer["kept"][k] for layer in layers]
                    for k, mean in numbers["mean"]["kept"].items()
                    if mean is not None and int(k) < numbers["groups"]
                },
                "share of distant pairs kept",
            )
            own = np.array(shown["passage"])  # the group of each token, (T,)
            i, j = np.arange(len(own))[:, None], np.arange(len(own))
            kind = np.where(
                j > i,
                0,
                np.where(i - j < numbers["window"], 2, np.where(own[:, None] == own, 3, 1)),
            )
            window.imshow(kind, cmap=kinds, vmin=0, vmax=3, interpolation="none")
            window.set_title(f"layer {shown['layer']}: near, or of one group (dark)", fontsize=10)
            window.set(xlabel="key", ylabel="row")


def draw_sizes(ax, layers, title):
    """A bar for each layer: its groups' shares of tokens, the largest first and darkest. Dotted:
    equal groups."""
    shares = np.sort([layer["shares"] for layer in layers])[:, ::-1]  # (layers, K)
    starts, K = shares.cumsum(1) - shares, shares.shape[1]
    shades = pyplot().get_cmap("Blues")(np.linspace(0.9, 0.2, K))
    for group in range(K):
        ax.barh(
            range(len(layers)),
            shares[:, group],
            0.85,
            starts[:, group],
            color=shades[group],
            edgecolor="white",
        )
        ax.axvline(group / K, color="black", linestyle=":", linewidth=0.8)
    ax.invert_yaxis()
    whole_ticks(ax.yaxis)
    frame(ax, title, "share of tokens, largest group first (dotted: equal)", "layer")


def draw_by_layer(ax, lines, title):
    line_panel(
        ax,
        {label: (range(len(values)), values) for label, values in lines.items()},
        title,
        "layer",
        legend=bool(lines),
    )
    ax.set_ylim(0, 1.03)
    whole_ticks(ax.xaxis)
