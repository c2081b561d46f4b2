"""The weights that recipes give to one row of scores: the weight of each key against its score.

    python eval.py curve softmax,elastic,entmax,tda --png=curve.png
    python eval.py curve softmax,elastic --spread=0.5       an idle row: no key is better than another
    python eval.py curve --html=rules.html                  a page on which one drags the scores

The row has --keys keys, whose scores q.k / sqrt(d) are spread evenly from -SPREAD to SPREAD. All recipes get the same
query and keys. Recipes that scale q and k to unit length get their cosines, from -1 to 1, as scores. Differential
recipes show their first view. Learned scalars have their initial values.
"""
from dataclasses import dataclass

import torch

import attention
from common.flags import at_least, knob
from evals import curve_page
from evals.instrument import recipe_names, table
from evals.pictures import frame, pyplot, save_figure
from model import GPTConfig

WIDTH = curve_page.WIDTH                        # head dimension


@dataclass
class Curve:
    """Flags of curve"""
    recipes: str = knob("softmax,elastic,entmax,tda", "recipes, separated by commas", positional=True)
    spread: float = knob(4.0, "the largest score of the row; the smallest is minus that")
    keys: int = knob(64, "how many keys the row sees")
    html: str = knob("", "also write a page for a browser into this file, on which one drags the scores and sees the "
                         "weights under every rule")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, keys=2, spread=0)


def command(args, run=None):
    """The weights that recipes give to one row of scores."""
    names = recipe_names(args.recipes)
    if args.recipes == "all":
        names = [name for name in names if "mixer" not in attention.recipe(name)]
    scores = torch.linspace(-args.spread, args.spread, args.keys)
    rows = {name: row_of(name, scores) for name in names}
    found = {name: {"on_keys": sum(w), "extra": extra, "zeros": sum(x == 0 for x in w) / len(w), "largest": max(w),
                    "weights": w} for name, (w, extra) in rows.items()}
    numbers = {"scores": scores.tolist(), "recipes": found}
    if args.html:
        numbers["rules"] = curve_page.rules_for_page()
    cells = [[name, row["on_keys"], row["zeros"], row["largest"]] for name, row in found.items()]
    text = table(cells, ["recipe", "sum", "zeros", "largest weight"])
    about = f"one row of {args.keys} keys, scores from {-args.spread:g} to {args.spread:g}"
    return numbers, f"{about}\n\n{text}\n\nsum: of the weights on keys; zeros: share of weights that are exactly 0"


def row_of(name, scores):
    """The weights of one row, a list, and the weight of an extra key outside it (0 without one)."""
    axes = attention.recipe(name)
    if "mixer" in axes:
        raise ValueError(f"{name} has a mixer and computes no weights from scores: choose a recipe without a mixer")
    heads = 2 if axes.get("diff") == "v1" else 1                        # v1 pairs heads
    window = len(scores) if "window" in axes else 0                     # a window that hides none of the keys
    config = GPTConfig(n_head=heads, n_embd=heads * WIDTH, block_size=len(scores), attn=name, kernel="torch",
                       window=window)
    torch.manual_seed(0)                        # for learned vectors, such as an extra key
    layer = attention.Attention(config, 0).eval()
    # q and k lie in a plane: the cosine of key j is scores_j / the largest, and |q| |k| / sqrt(d) is the largest
    most = scores.abs().max().clamp(min=1e-6)
    cosines = scores / most
    keys = torch.zeros(len(scores), WIDTH)      # (T, D)
    keys[:, 0], keys[:, 1] = cosines, (1 - cosines ** 2).clamp(min=0).sqrt()
    length = (most * WIDTH ** 0.5).sqrt()
    query = torch.zeros(1, WIDTH)               # (1, D)
    query[0, 0] = 1
    q, k = ((length * part).expand(1, layer.shapes[of][0], *part.shape) for of, part in (("q", query), ("k", keys)))
    with torch.no_grad():
        if config.diff == "none":
            w = layer.weights_of(q, k, torch.zeros(1, 1, config.n_embd))
        else:
            w, _ = layer.views_of(q, k, None)
    w = w[0, 0, 0]                              # (T,), or (1 + T,) with an extra key first
    outside = len(w) - len(scores)
    return w[outside:].tolist(), float(w[:outside].sum())


page = curve_page.page


def draw(path, found):
    """Draw the weights against the scores, with a line for each recipe."""
    figure, ax = pyplot().subplots(figsize=(6, 3.6), layout="constrained")
    for name, row in found["recipes"].items():
        ax.plot(found["scores"], row["weights"], label=f"{name}: sums to {row['on_keys']:.2f}")
    ax.legend(frameon=False, fontsize=8)
    frame(ax, f"one row of {len(found['scores'])} keys", "score of the key", "its weight")
    save_figure(figure, path)
