"""The groups of tokens that Focus has learned (arXiv 2604.03260, sections 4 and 5): how even their sizes are, how
clearly tokens belong to them, which tokens they hold, and which and how many distant pairs they keep.

A token has a share in every group, and belongs to the group with its largest share. All measures are taken on fixed
windows, layer by layer. Every layer has its own groups: group 2 of one layer is unrelated to group 2 of another.
"""
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.flags import at_least, knob
from evals.instrument import Windows, batches, first_line, legend, table, watch
from evals.pictures import figure_of, frame, line_panel, pyplot, whole_ticks
from mixers.focus import Focus, entropy

MEASURES = {                                    # name: its meaning, printed under the table
    "dominance": "share of tokens in the largest group (section 4); {even:.3f} if all are equally large",
    "evenness": "entropy of the groups' shares of tokens, divided by log K: 1 if all groups are equally large",
    "confidence": "a token's share in its own group, mean over tokens (section 5)",
    "stability": "share of tokens that --against has in the same group, after the best matching of groups (section 4); "
                 "about {even:.3f} or more by chance",
    "kept": "share of distant pairs, {window} apart or more, that are open: they share one of their k largest groups "
            "(table 7)",
}
MOST = 4                                        # the largest k for the share of pairs kept


@dataclass
class Groups(Windows):
    """Flags of groups"""
    windows: int = knob(16, "fixed windows, spread evenly; the listed pairs are from the first window")
    against: str = knob("", "compare groups with this run of the same model, such as an earlier checkpoint")
    layer: int = knob(-1, "layer whose groups are listed, counted from 0; -1: the one with the most even groups")
    top: int = knob(8, "number of most frequent tokens to list for each group, and number of longest pairs")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, layer=-1, top=1)


def command(args, run):
    """Show the groups of tokens that Focus has learned, and which distant pairs of tokens they let attend."""
    check(run.model, run.out_dir)
    T, config = run.window(args.length), run.model.config
    if args.layer >= config.n_layer:
        raise ValueError(f"--layer={args.layer}, but the layers of {run.out_dir} are 0 to {config.n_layer - 1}")
    seen = look(args, run, run.model, T)
    found = [layer.result() for layer in seen]
    if args.against:
        other = run.beside(args.against, {"window": config.window, "topk": config.topk}).model
        check(other, args.against)
        theirs, ours = [block.attn.groups for block in other.transformer.h], [layer.groups for layer in seen]
        if theirs != ours:
            raise ValueError(f"--against={args.against} has {theirs[0]} groups in each of {len(theirs)} layers, where "
                             f"{run.out_dir} has {ours[0]} in each of {len(ours)}: name another run of the same model")
        for layer, one, another in zip(found, seen, look(args, run, other, T), strict=True):
            layer["stability"] = agreement(one.labels(), another.labels(), one.groups)
    shown = args.layer if args.layer >= 0 else int(np.argmax([layer["evenness"] for layer in found]))
    numbers = run.reads(args.split, len(seen[0].labels()), T) | {
        "groups": seen[0].groups, "window": seen[0].local, "topk": config.topk, "against": args.against,
        "mean": mean_of(found), "layers": found, "shown": spelled_out(seen[shown], shown, run.tokenizer, args.top)}
    return numbers, tell(args, {str(run.out_dir): numbers})


def check(model, out_dir):
    """Raise ValueError on a run without groups."""
    if not isinstance(model.transformer.h[0].attn, Focus):
        raise ValueError(f"{out_dir} has --attn={model.config.attn}, which has no groups: name a run that was "
                         "trained with --attn=focus")


class Layer:
    """Collects one layer's groups, batch by batch."""

    def __init__(self, module):
        self.groups, self.local, self.memberships = module.groups, module.local, module.memberships
        self.own, self.ids, self.confidence = [], [], 0.0
        self.kept, self.distant, self.passage = np.zeros(min(MOST, self.groups)), 0, None

    def see(self, g, idx):
        """Add the shares g (B, T, K) of the tokens idx (B, T)."""
        top, own = g.max(-1)
        self.own.append(own.to(torch.int16).cpu().numpy())
        self.ids.append(idx.cpu().numpy())
        self.confidence += top.double().sum().item()
        far = distant(g.shape[1], self.local, g.device)
        self.distant += len(g) * far.sum().item()
        for k in range(1, len(self.kept) + 1):
            m = self.memberships(g, k).to(g.dtype)
            self.kept[k - 1] += ((m @ m.mT > 0) & far).sum().item()
        self.passage = g[0].float().cpu() if self.passage is None else self.passage         # (T, K)

    def labels(self):
        """The group of every token, (windows, T)."""
        return np.concatenate(self.own)

    def result(self):
        """This layer's MEASURES, {name: value}; "kept" is {k: share}. "shares" has each group's share of tokens."""
        shares = np.bincount(self.labels().ravel(), minlength=self.groups) / self.labels().size
        evenness = entropy(torch.from_numpy(shares)).item() / np.log(self.groups) if self.groups > 1 else 1.0
        kept = {str(k): float(kept / self.distant) if self.distant else None for k, kept in enumerate(self.kept, 1)}
        return {"dominance": float(shares.max()), "evenness": evenness,
                "confidence": self.confidence / self.labels().size, "kept": kept, "shares": shares.tolist()}


def distant(T, local, device="cpu"):
    """The mask (T, T) of distant pairs, whose key is at least `local` tokens before the row."""
    places = torch.arange(T, device=device)
    return places[:, None] - places >= local


def look(args, run, model, T):
    """Measure every layer of a model on the run's windows of T tokens: a list of Layer."""
    layers = [Layer(block.attn) for block in model.transformer.h]
    for rows in batches(run, args, T):
        idx = rows[:, :-1]                      # (B, T)

        def see(layer, module, q, k, v, x, table, idx=idx):
            layers[layer].see(module.assign(x), idx)

        watch(model, see, idx, run.machine)
    return layers


def agreement(one, other, K):
    """The share of tokens in the same group in two labellings (windows, T), after the best matching of their groups.
    Up to 8 groups it tries all orders; with more it matches greedily, the largest agreement first."""
    both = np.bincount((one.astype(np.int64) * K + other).ravel(), minlength=K * K).reshape(K, K)
    if K <= 8:
        return float(max(both[range(K), order].sum() for order in map(list, itertools.permutations(range(K))))
                     / one.size)
    matched, left = 0, both.astype(float)
    for _ in range(K):
        i, j = np.unravel_index(left.argmax(), left.shape)
        matched += both[i, j]
        left[i], left[:, j] = -1, -1
    return float(matched / one.size)


def mean_of(layers):
    """The mean of each measure over layers."""
    def mean(values):
        return None if None in values else float(np.mean(values))

    found = {name: mean([layer[name] for layer in layers]) for name in MEASURES
             if name in layers[0] and name != "kept"}
    return found | {"kept": {k: mean([layer["kept"][k] for layer in layers]) for k in layers[0]["kept"]}}


def spelled_out(seen, layer, tokenizer, top):
    """The texts of a layer's groups. "tokens": the most frequent tokens of each group, [[text, count, share of the
    token's occurrences that are in this group]]. "passage": the group of every token of the first window. "pairs": the
    longest pairs of that window."""
    own, ids = seen.labels().ravel(), np.concatenate(seen.ids).ravel()
    everywhere, common = np.bincount(ids), []
    spelling = functools.cache(lambda i: tokenizer.decode([int(i)]))
    for group in range(seen.groups):
        counts = np.bincount(ids[own == group], minlength=len(everywhere))
        best = [i for i in counts.argsort(kind="stable")[::-1][:top] if counts[i]]
        common.append([[spelling(i), int(counts[i]), float(counts[i] / everywhere[i])] for i in best])
    texts = [spelling(i) for i in seen.ids[0][0]]
    return {"layer": layer, "tokens": common, "passage": seen.own[0][0].tolist(),
            "pairs": longest_pairs(texts, seen.passage, seen.local, top)}


def longest_pairs(texts, g, local, top):
    """The pairs of a passage that share a group and are farthest apart, longest first. Groups take turns, and a text
    appears in one pair only. Otherwise all pairs would contain the tokens at both ends. If tokens are words, only whole
    words of three letters or more count.

    texts: those of the T tokens. g (T, K): their shares of the groups. Returns [{"one", "at", "other", "to",
    "distance", "affinity", "group"}]; the affinity is g_i . g_j."""
    words = [i for i, text in enumerate(texts) if text[:1].isspace() and len(text) > 3 and text[1:].isalpha()]
    places, own = words or range(len(texts)), g.argmax(-1).tolist()
    pairs = sorted(((j - i, i, j) for i, j in itertools.combinations(places, 2)
                    if own[i] == own[j] and j - i >= local and texts[i].lower() != texts[j].lower()), reverse=True)
    found, used, turns = [], set(), dict.fromkeys(own, 0)
    while pairs and len(found) < top:
        turn = min(turns[own[i]] for _, i, _ in pairs)
        distance, i, j = next(pair for pair in pairs if turns[own[pair[1]]] == turn)
        found.append({"one": texts[i], "at": i, "other": texts[j], "to": j, "distance": distance,
                      "affinity": (g[i] @ g[j]).item(), "group": own[i]})
        turns[own[i]] += 1
        used |= {texts[i].lower(), texts[j].lower()}
        pairs = [pair for pair in pairs if not used & {texts[pair[1]].lower(), texts[pair[2]].lower()}]
    return sorted(found, key=lambda pair: -pair["distance"])


# ------------------------------------------------------------------------------------------------- text and a picture


def tell(args, found):
    """For one run: a line for each layer, then the tokens of one layer's groups. For several runs: a line for each."""
    several, (numbers, *_) = len(found) > 1, found.values()
    if several:
        lines = {Path(place).name: numbers["mean"] for place, numbers in found.items()}
    else:
        lines = {str(i): layer for i, layer in enumerate(numbers["layers"])} | {"all": numbers["mean"]}
    lines = {name: {measure: line[measure] for measure in MEASURES if measure in line and measure != "kept"}
             | {f"kept, k={k}": share for k, share in line["kept"].items()} for name, line in lines.items()}
    header = max(lines.values(), key=len)       # runs may have different numbers of groups
    rows = [[name, *(line.get(column) for column in header)] for name, line in lines.items()]
    widest = max(found.values(), key=lambda numbers: numbers["groups"])
    fill = {"even": 1 / widest["groups"], "window": widest["window"]}
    meanings = {name: text.format(**fill) for name, text in MEASURES.items() if name in widest["mean"]}
    parts = [table(rows, ["run" if several else "layer", *header]), legend(meanings)]
    return "\n\n".join(parts if several else [first_line(numbers), *parts, in_words(numbers["shown"])])


def in_words(shown):
    """The shown layer's groups: their most frequent tokens, and the longest pairs of the first window."""
    lines = [f"layer {shown['layer']}: the most frequent tokens of each group, x count (share of all occurrences)"]
    for group, common in enumerate(shown["tokens"]):
        spelled = "  ".join(f"{text!r} x{count} ({share:.0%})" for text, count, share in common)
        lines.append(f"{group:>3}  {spelled or '(no token)'}")
    if shown["pairs"]:
        lines += ["", "the pairs of tokens that share a group and are farthest apart in the first window"]
        lines += [f"{p['group']:>3}  {p['one']!r} at {p['at']}  {p['other']!r} at {p['to']}  distance {p['distance']}, "
                  f"affinity {p['affinity']:.3f}" for p in shown["pairs"]]
    return "\n".join(lines)


def draw(path, found):
    """Draw three panels for each run: each group's share of tokens, by layer; the measures, by layer; and the pairs of
    the first window that may attend, by the groups of one layer."""
    with figure_of(path, [4.1] * len(found), [4, 4, 4]) as axes:
        for (left, middle, right), (place, numbers) in zip(axes, found.items(), strict=True):
            layers, K = numbers["layers"], numbers["groups"]
            shares = np.sort([layer["shares"] for layer in layers])[:, ::-1]        # (layers, K), the largest first
            ends = shares.cumsum(1)
            for group in range(K):
                left.barh(range(len(layers)), shares[:, group], 0.85, ends[:, group] - shares[:, group],
                          color=("#08519c", "#9ecae1")[group % 2], edgecolor="white", linewidth=0.5)
                left.axvline(group / K, color="black", linestyle=":", linewidth=0.8)
            left.invert_yaxis()
            whole_ticks(left.yaxis)
            frame(left, f"{Path(place).name}: tokens by group (dotted: equal groups)",
                  "share of tokens, the largest group first", "layer")
            lines = {name: [layer[name] for layer in layers] for name in ("dominance", "confidence", "stability")
                     if name in layers[0]}
            lines |= {f"pairs kept, k={k}": [layer["kept"][k] for layer in layers]
                      for k, mean in numbers["mean"]["kept"].items() if mean is not None and int(k) < K}
            curves = {label: (range(len(layers)), values) for label, values in lines.items()}
            line_panel(middle, curves, "shares, by layer", "layer")
            middle.set_ylim(0, 1.03)
            whole_ticks(middle.xaxis)
            draw_passage(right, numbers)


def draw_passage(ax, numbers):
    """Draw the pairs: white if the key is later, grey if closed, light blue if near, dark blue if of one group."""
    own = np.array(numbers["shown"]["passage"])
    i, j = np.arange(len(own))[:, None], np.arange(len(own))
    kind = np.where(j > i, 0, np.where(i - j < numbers["window"], 2, np.where(own[:, None] == own, 3, 1)))
    colours = pyplot().matplotlib.colors.ListedColormap(["white", "#eeeeee", "#9ecae1", "#08519c"])
    ax.imshow(kind, cmap=colours, vmin=0, vmax=3, interpolation="none")
    ax.set_title(f"layer {numbers['shown']['layer']}: near, or of one group (dark)", fontsize=10)
    ax.set(xlabel="key", ylabel="row")
