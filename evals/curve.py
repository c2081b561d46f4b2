"""The weights that recipes give to one row of scores: the weight of each key against its score.

    python eval.py curve softmax,elastic,entmax,tda --png=out/curve.png
    python eval.py curve softmax,elastic --spread=0.5     an idle row: no key is better than another

The row has --keys keys, whose scores q.k / sqrt(d) are spread evenly from -SPREAD to SPREAD. All
recipes get the same query and keys. Recipes that scale q and k to unit length get their cosines,
from -1 to 1, as scores. Differential recipes show their first view alone, and are named so. Learned
scalars have their initial values.

In docs/rules.html, a page for a browser, one drags the scores instead.
"""

from dataclasses import dataclass

import torch

import attention
from common.flags import Knobs, knob
from evals.instrument import explained, recipe_names
from evals.pictures import figure_of, frame
from model import GPTConfig

WIDTH = 64  # head dimension
MEANINGS = {
    "on_keys": "sum of the weights on keys",
    "extra": "weight on an extra key",
    "sparsity": "share of weights that are exactly 0",
    "largest": "the largest weight",
}


@dataclass
class Curve(Knobs):
    """Flags of curve"""

    recipes: str = knob(
        "softmax,elastic,entmax,tda", "recipes, separated by commas", positional=True
    )
    spread: float = knob(4.0, "the largest score of the row; the smallest is minus that", least=0)
    keys: int = knob(64, "how many keys the row sees", least=2)
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run=None):
    """The weights that recipes give to one row of scores."""
    names = recipe_names(args.recipes)
    if args.recipes == "all":
        names = [name for name in names if "mixer" not in attention.recipe(name)]
    scores = torch.linspace(-args.spread, args.spread, args.keys)
    found = {}
    lines = {}
    for name in names:
        w, extra = row_of(name, scores)
        found[name] = {
            "view": "first" if "diff" in attention.recipe(name) else None,
            "on_keys": sum(w),
            "extra": extra,
            "sparsity": w.count(0) / len(w),
            "largest": max(w),
            "weights": w,
        }
        lines[shown(name, found[name])] = found[name]
    numbers = {"scores": scores.tolist(), "recipes": found}
    return numbers, (
        f"one row of {args.keys} keys, scores from {-args.spread:g} to {args.spread:g}\n\n"
        + explained(lines, MEANINGS, "recipe")
    )


def shown(name, row):
    """The recipe's name, and whether the row is that of its first view alone, from which it
    subtracts the second."""
    return f"{name}, first view" if row["view"] else name


@torch.no_grad()
def row_of(name, scores):
    """The weights of one row, a list, and the weight of an extra key outside it (0 without one)."""
    axes = attention.recipe(name)
    if "mixer" in axes:
        raise ValueError(f"{name} computes no weights from scores: give a recipe without a mixer")
    heads = 2 if axes.get("diff") == "v1" else 1  # v1 pairs heads
    T = len(scores)
    torch.manual_seed(0)  # for learned vectors, such as an extra key
    config = GPTConfig(
        n_head=heads,
        n_embd=heads * WIDTH,
        block_size=T,
        attn=name,
        kernel="torch",
        window=T if "window" in axes else 0,  # which hides none of the keys
    )
    layer = attention.Attention(config, 0).eval()
    # q and k lie in a plane. The cosine of key j is scores_j / most, and |q| |k| / sqrt(d) is most
    most = scores.abs().max().clamp(min=1e-6)
    length = (most * WIDTH**0.5).sqrt()
    q = torch.zeros(1, WIDTH)
    k = torch.zeros(T, WIDTH)
    q[0, 0] = length
    k[:, 0] = length * scores / most
    k[:, 1] = length * (1 - (scores / most) ** 2).clamp(min=0).sqrt()
    q = q.expand(1, layer.shapes["q"][0], 1, WIDTH)
    k = k.expand(1, layer.shapes["k"][0], T, WIDTH)
    if layer.config.diff == "none":
        w = layer.weights_of(q, k, torch.zeros(1, 1, heads * WIDTH))
    else:
        w = layer.views_of(q, k, None)[0]
    outside = w.shape[-1] - T  # w (1, heads, 1, T), or (..., 1 + T) with an extra key first
    return w[0, 0, 0, outside:].tolist(), float(w[0, 0, 0, :outside].sum())


def draw(path, found):
    """Draw the weights against the scores, with a line for each recipe."""
    with figure_of(path, [3.6], [6]) as ((ax,),):
        for name, row in found["recipes"].items():
            ax.plot(
                found["scores"],
                row["weights"],
                label=f"{shown(name, row)}: sums to {row['on_keys']:.2f}",
            )
        ax.legend(frameon=False, fontsize=8)
        names = [n for n in found["recipes"] if attention.recipe(n).get("qk_norm") == "l2"]
        if names:
            most = found["scores"][-1] or 1  # --spread=0
            both_ways = (lambda score: score / most, lambda cosine: cosine * most)
            cosines = ax.secondary_xaxis("top", functions=both_ways)
            cosines.set_xlabel(f"cosine, which is the score of {', '.join(names)}")
        frame(ax, f"one row of {len(found['scores'])} keys", "score of the key", "its weight")
