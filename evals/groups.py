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

import numpy as np
import torch

from common.flags import knob
from evals.instrument import Windows, batches, explained, first_line, watch
from evals.pictures import figure_of, frame, line_panel, pyplot, whole_ticks
from mixers.focus import Focus, entropy

MEASURES = {  # name: its meaning, printed under the table
    "dominance": "share of tokens in the largest group (section 4); {even:.3f} if all are equal",
    "evenness": "entropy of the groups' shares of tokens, divided by log K: 1 if all are equal",
    "confidence": "a token's share in its own group, mean over tokens (section 5)",
    "stability": "share of tokens that --against has in the same group, after the best matching "
    "of groups (section 4); about {even:.3f} or more by chance",
}
KEPT = (
    "share of distant pairs, {window} apart or more, with a common group among the {k} largest "
    "of each (table 7)"
)
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
    module, T, config = focus_of(run)[0], run.window(args.length), run.model.config
    ids, own, layers = look(args, run, T)
    K = module.groups
    if args.against:
        other = run.beside(args.against, {"window": config.window, "topk": config.topk})
        theirs = [module.groups for module in focus_of(other)]
        if theirs != [K] * len(layers):
            raise ValueError(
                f"--against={args.against} has {theirs[0]} groups in each of {len(theirs)} layers, "
                f"where {run.out_dir} has {K} in each of {len(layers)}: name another run of the "
                "same model"
            )
        for layer, one, another in zip(layers, own, look(args, other, T)[1], strict=True):
            layer["stability"] = agreement(one, another, K)
    shown = int(np.argmax([layer["evenness"] for layer in layers]))
    numbers = run.reads(args.split, len(ids), T) | {
        "groups": K,
        "window": module.local,
        "topk": config.topk,
        "against": args.against,
        "mean": mean_of(layers),
        "layers": layers,
        "shown": {
            "layer": shown,
            "tokens": frequent_tokens(ids, own[shown], K, run.tokenizer),
            "passage": own[shown][0].tolist(),
        },
    }
    return numbers, in_words(numbers)


def focus_of(run):
    """The attention of each layer. Raises ValueError on a run without groups."""
    modules = [block.attn for block in run.model.transformer.h]
    if not all(isinstance(module, Focus) for module in modules):
        raise ValueError(
            f"{run.out_dir} has --attn={run.model.config.attn}, which has no groups: name a run "
            "that was trained with --attn=focus"
        )
    return modules


def look(args, run, T):
    """Measure the groups of every layer of a run on its windows of T tokens.

    Returns the tokens (windows, T), the group of each token in each layer, [(windows, T)], and the
    numbers of each layer: its MEASURES, "kept" {k: share of distant pairs}, and "shares", each
    group's share of tokens."""
    modules, places = focus_of(run), torch.arange(T, device=run.machine.device)
    far = places[:, None] - places >= modules[0].local  # (T, T): the distant pairs
    ids, own, seen = [], [[] for _ in modules], [[] for _ in modules]

    def see(layer, module, q, k, v, x, table):
        g = module.assign(x)  # (B, T, K)
        top, largest = g.max(-1)
        own[layer].append(largest.cpu().numpy())
        pairs = []
        for count in range(1, min(MOST, module.groups) + 1):
            members = module.memberships(g, count).to(g.dtype)
            pairs.append(((members @ members.mT > 0) & far).sum().item())
        seen[layer].append([top.double().sum().item(), *pairs])

    for rows in batches(run, args, T):
        ids.append(rows[:, :-1].cpu().numpy())
        watch(run.model, see, rows[:, :-1], run.machine)
    ids, own, layers = np.concatenate(ids), list(map(np.concatenate, own)), []
    for module, groups, sums in zip(modules, own, seen, strict=True):
        K, pairs = module.groups, len(ids) * far.sum().item()
        shares = np.bincount(groups.ravel(), minlength=K) / groups.size
        confidence, *kept = np.sum(sums, 0)
        layers.append(
            {
                "dominance": float(shares.max()),
                "evenness": entropy(torch.from_numpy(shares)).item() / np.log(K) if K > 1 else 1.0,
                "confidence": confidence / ids.size,
                "kept": {str(k): n / pairs if pairs else None for k, n in enumerate(kept, 1)},
                "shares": shares.tolist(),
            }
        )
    return ids, own, layers


def agreement(one, other, K):
    """The share of tokens in the same group in two labellings (windows, T), after the best matching
    of their groups. Up to 8 groups it tries all orders; with more it matches greedily, the largest
    agreement first."""
    both = np.bincount((one * K + other).ravel(), minlength=K * K).reshape(K, K)
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
    found = [name for name in MEASURES if name in layers[0]]
    mean = {name: np.mean([layer[name] for layer in layers]) for name in found}
    kept = {k: [layer["kept"][k] for layer in layers] for k in layers[0]["kept"]}
    mean["kept"] = {k: None if None in shares else np.mean(shares) for k, shares in kept.items()}
    return mean


def frequent_tokens(ids, own, K, tokenizer):
    """The most frequent tokens of each group of a layer, [[text, count, share of the text's
    occurrences that are in this group]]. ids, own: the tokens and their groups, (windows, T)."""
    found, everywhere = [], np.bincount(ids.ravel())
    for group in range(K):
        counts = np.bincount(ids[own == group], minlength=len(everywhere))
        listed = []
        for i in counts.argsort(kind="stable")[::-1][:LISTED].tolist():
            if counts[i]:
                text, share = tokenizer.decode([i]), counts[i] / everywhere[i]
                listed.append([text, int(counts[i]), float(share)])
        found.append(listed)
    return found


def in_words(numbers):
    """The numbers as text: a line for each layer, then the tokens of one layer's groups."""
    meanings = {name: text.format(even=1 / numbers["groups"]) for name, text in MEASURES.items()}
    for k in numbers["mean"]["kept"]:
        if int(k) < numbers["groups"]:
            meanings[f"kept, k={k}"] = KEPT.format(window=numbers["window"], k=k)
    lines = {}
    for name, line in [*enumerate(numbers["layers"]), ("all", numbers["mean"])]:
        kept = {f"kept, k={k}": share for k, share in line["kept"].items()}
        lines[str(name)] = line | kept
    shown, by_group = numbers["shown"], []
    for group, common in enumerate(shown["tokens"]):
        words = [f"{token!r} x{count} ({share:.0%})" for token, count, share in common]
        by_group.append(f"{group:>3}  {'  '.join(words) or '(no token)'}")
    return "\n".join(
        [
            first_line(numbers),
            "",
            explained(lines, meanings, "layer"),
            "",
            f"layer {shown['layer']}: the most frequent tokens of each group, "
            "x count (share of all occurrences)",
            *by_group,
        ]
    )


def draw(path, found):
    """Draw four panels for each run: each group's share of tokens, how sure tokens are of theirs,
    and the distant pairs that k groups keep, all by layer; and the pairs of the first window in one
    layer, light blue if near, dark blue if of one group, grey if closed."""
    kinds = pyplot().matplotlib.colors.ListedColormap(["white", "#eeeeee", "#9ecae1", "#08519c"])
    with figure_of(path, [4.1] * len(found), [4, 3, 3, 4]) as axes:
        for line, (place, numbers) in zip(axes, found.items(), strict=True):
            sizes, tokens, pairs, window = line
            layers, shown, mean = (numbers[part] for part in ("layers", "shown", "mean"))
            draw_sizes(sizes, layers, f"{Path(place).name}: tokens by group")
            sure, kept = {}, {}
            for name in ("confidence", "stability"):
                if name in mean:
                    sure[name] = [layer[name] for layer in layers]
            for k, share in mean["kept"].items():
                if share is not None and int(k) < numbers["groups"]:
                    name = f"{k} of {numbers['groups']} groups"
                    kept[name] = [layer["kept"][k] for layer in layers]
            draw_by_layer(tokens, sure, "mean over tokens")
            draw_by_layer(pairs, kept, "share of distant pairs kept")
            own = np.array(shown["passage"])  # the group of each token, (T,)
            distance = np.subtract.outer(range(len(own)), range(len(own)))
            kind = np.where(own[:, None] == own, 3, 1)
            kind[distance < numbers["window"]] = 2
            kind[distance < 0] = 0
            window.imshow(kind, cmap=kinds, vmin=0, vmax=3, interpolation="none")
            window.set_title(f"layer {shown['layer']}: near, or of one group (dark)", fontsize=10)
            window.set(xlabel="key", ylabel="query")


def draw_sizes(ax, layers, title):
    """A bar for each layer: its groups' shares of tokens, the largest first and darkest. Dotted:
    equal groups."""
    shares = np.sort([layer["shares"] for layer in layers])[:, ::-1]  # (layers, K)
    starts, K = shares.cumsum(1) - shares, shares.shape[1]
    shades = pyplot().get_cmap("Blues")(np.linspace(0.9, 0.2, K))
    for group, (share, start, shade) in enumerate(zip(shares.T, starts.T, shades, strict=True)):
        ax.barh(range(len(layers)), share, 0.85, start, color=shade, edgecolor="white")
        ax.axvline(group / K, color="black", linestyle=":", linewidth=0.8)
    ax.invert_yaxis()
    whole_ticks(ax.yaxis)
    frame(ax, title, "share of tokens, largest group first (dotted: equal)", "layer")


def draw_by_layer(ax, lines, title):
    curves = {label: (range(len(values)), values) for label, values in lines.items()}
    line_panel(ax, curves, title, "layer", legend=bool(lines))
    ax.set_ylim(0, 1.03)
    whole_ticks(ax.xaxis)
