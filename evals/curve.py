"""The weights that recipes give to one row of scores: the weight of each key against its score.

    python eval.py curve softmax,elastic,entmax,tda --png=out/curve.png
    python eval.py curve softmax,elastic --spread=0.5       an idle row: no key is better than another
    python eval.py curve --html=out/rules.html                 a page on which one drags the scores

The row has --keys keys, whose scores q.k / sqrt(d) are spread evenly from -SPREAD to SPREAD. All recipes get the same
query and keys. Recipes that scale q and k to unit length get their cosines, from -1 to 1, as scores. Differential
recipes show their first view alone, and are named so. Learned scalars have their initial values.

The page, evals/page.html, has no formula of its own: `recorded` traces each recipe on a row, from its rule in
attention.py to its weights, and the page repeats PyTorch's operations (add, exp, sum, ...) with other scores. So a new
rule with a recipe of the same name is on it without another line.
"""
import inspect
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from axes import rows
from common.flags import Knobs, knob
from evals.instrument import recipe_names, table
from evals.mathml import explained
from evals.pictures import figure_of, frame, save_page
from model import GPTConfig

WIDTH = 64                                      # head dimension


@dataclass
class Curve(Knobs):
    """Flags of curve"""
    recipes: str = knob("softmax,elastic,entmax,tda", "recipes, separated by commas", positional=True)
    spread: float = knob(4.0, "the largest score of the row; the smallest is minus that", least=0)
    keys: int = knob(64, "how many keys the row sees", least=2)
    html: str = knob("", "also write a page for a browser into this file, to drag the scores")
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run=None):
    """The weights that recipes give to one row of scores."""
    names = recipe_names(args.recipes)
    if args.recipes == "all":
        names = [name for name in names if "mixer" not in attention.recipe(name)]
    scores, found = torch.linspace(-args.spread, args.spread, args.keys), {}
    for name in names:
        w, extra = row_of(name, scores)
        view = "first" if "diff" in attention.recipe(name) else None    # of the two of a differential recipe
        found[name] = {"view": view, "on_keys": sum(w), "extra": extra, "zeros": w.count(0) / len(w), "largest": max(w),
                       "weights": w}
    numbers = {"scores": scores.tolist(), "recipes": found}
    if args.html:                               # the recipe of each rule, and what may be around a rule
        numbers["rules"] = [recorded(name) for name in attention.ATTENTIONS if name in (*attention.RULES, *AROUND)]
    cells = [[shown(name, row), row["on_keys"], row["zeros"], row["largest"]] for name, row in found.items()]
    return numbers, (f"one row of {args.keys} keys, scores from {-args.spread:g} to {args.spread:g}\n\n"
                     + table(cells, ["recipe", "sum", "zeros", "largest weight"])
                     + "\n\nsum: of the weights on keys; zeros: share of weights that are exactly 0")


def shown(name, row):
    """The recipe's name, and whether the row is that of its first view alone, from which it subtracts the second."""
    return f"{name}, first view" if row["view"] else name


def row_of(name, scores):
    """The weights of one row, a list, and the weight of an extra key outside it (0 without one)."""
    axes = attention.recipe(name)
    if "mixer" in axes:
        raise ValueError(f"{name} has a mixer and computes no weights from scores: choose a recipe without a mixer")
    heads, T = 2 if axes.get("diff") == "v1" else 1, len(scores)        # v1 pairs heads
    torch.manual_seed(0)                        # for learned vectors, such as an extra key
    layer = attention.Attention(GPTConfig(
        n_head=heads, n_embd=heads * WIDTH, block_size=T, attn=name, kernel="torch",
        window=T if "window" in axes else 0), 0).eval()                 # a window that hides none of the keys
    # q and k lie in a plane. The cosine of key j is scores_j / most, and |q| |k| / sqrt(d) is most
    most = scores.abs().max().clamp(min=1e-6)
    length, keys = (most * WIDTH ** 0.5).sqrt(), torch.zeros(T, WIDTH)
    keys[:, 0], keys[:, 1] = scores / most, (1 - (scores / most) ** 2).clamp(min=0).sqrt()
    q, k = ((length * part).expand(1, layer.shapes[of][0], *part.shape)
            for of, part in (("q", torch.eye(1, WIDTH)), ("k", keys)))
    with torch.no_grad():
        w = (layer.weights_of(q, k, torch.zeros(1, 1, heads * WIDTH)) if layer.config.diff == "none" else
             layer.views_of(q, k, None)[0])
    outside = w.shape[-1] - T                   # w (1, heads, 1, T), or (..., 1 + T) with an extra key first
    return w[0, 0, 0, outside:].tolist(), float(w[0, 0, 0, :outside].sum())


def draw(path, found):
    """Draw the weights against the scores, with a line for each recipe."""
    with figure_of(path, [3.6], [6]) as ((ax,),):
        for name, row in found["recipes"].items():
            ax.plot(found["scores"], row["weights"], label=f"{shown(name, row)}: sums to {row['on_keys']:.2f}")
        ax.legend(frameon=False, fontsize=8)
        if of_cosines := [name for name in found["recipes"] if attention.recipe(name).get("qk_norm") == "l2"]:
            most = found["scores"][-1] or 1     # --spread=0
            cosines = ax.secondary_xaxis("top", functions=(lambda score: score / most, lambda cosine: cosine * most))
            cosines.set_xlabel(f"cosine, which is the score of {', '.join(of_cosines)}")
        frame(ax, f"one row of {len(found['scores'])} keys", "score of the key", "its weight")


# ------------------------------------------------------------------------------------------------------------- the page

HIGH = 6                                        # scores go from -HIGH to HIGH. A cosine is a score divided by HIGH

# {recipe: {constant: (its least value, its largest, step, meaning, what to try)}}, for the sliders. A constant is a
# learned scalar of the layer, one of its --attn_args, the rule's row input t, or one of a second view (see
# `row_weights`). Other learned scalars have a slider around their initial value
TRA = {"beta": (0, 4, 0.1, "β, learned", "raise it until the row is empty"),
       "kappa": (1, 32, 1, "κ, how many unrelated keys may pass", "let more pass"),
       "power": (1, 4, 0.5, "power", "which weights shrink most?")}
CONSTANTS = {
    "sink": {"sink_logit": (-4, 8, 0.1, "b, the extra key's score; 0 is softmax1", "raise it: what do the keys lose?")},
    "elastic": {"tau": (-1, 5, 0.1, "τ, learned", "when does an even row spend nothing?")},
    "entmax": {"alpha": (1.05, 2, 0.05, "α", "near 1 it is softmax, at 2 sparsemax")},
    "lssar": {"power": (1, 30, 1, "power", "at 1, which keys come back?")},
    "tra": TRA,
    "tda": TRA | {"mix": (0, 1, 0.05, "λ, learned", "at 0 this is TRA"),
                  "second": (-1, 1, 0.1, "c: the second view sees c s", "at 1, what is left? And below 0?")},
    "sigmoid": {"t": (0, 8, 0.1, "t, the logarithm of the training length", "at 0, what does an even row spend?")},
}
STARTS = {"mix": 0.5, "second": 0.8}

# {recipe: its formulas and what they mean}, where its rule's docstring does not tell all
COSINE = f"Here queries and keys have length 1, and scores are cosines: a bar of {HIGH} is a cosine of 1."
NORMED = "Then a norm rescales the head's output: the sum of a row matters less than which keys are in it."
AROUND = {
    "sink": "w_ij = exp(s_ij) / (exp(b_h) + sum_k exp(s_ik)): an extra key of score b_h, outside the sequence, takes "
            "the rest. A sink need not be a token.",
    "lssar": "a_ij = softplus(s_ij) / sum_k softplus(s_ik), x_ij = relu(a_ij - t_i), w_ij = x_ij^power / sum_k "
             "x_ik^power, t_i = 1 / n_i: keys below the uniform share are cut off, and the power sharpens the others. "
             f"An even row is empty. {COSINE} They are multiplied by log(d) log(n).",
    "relu": "w_ij = relu(s_ij) / n_i: negative scores get zeros, and the others are divided by the number of keys, not "
            "by their sum. A row may sum to 0, so it needs no sink.",
    "tra": "w_ij = relu(s_ij - t_i)^power, t_i = beta_h sqrt(2 log(n_i / kappa) / d): few unrelated keys pass the "
           f"threshold, so most rows are nearly empty. {COSINE} {NORMED}",
    "tda": "w_ij = a_ij - lambda_h b_ij, a_ij = relu(s_ij - t_i)^power, b_ij = relu(c s_ij - t_i)^power: "
           f"two views by TRA, each with queries and keys of its own. What both see cancels. {COSINE} {NORMED}",
}


def page(path, numbers):
    save_page(path, {"rules": numbers["rules"], "high": HIGH})


def recorded(name):
    """One recipe as the page reads it: its name, formulas, words, sliders and program."""
    layer = attention.Attention(GPTConfig(n_head=1, n_embd=WIDTH, block_size=64, attn=name, kernel="torch"), 0).eval()
    sliders, inputs = [], {"s": torch.linspace(-1, 2, 7).view(1, 1, 1, -1),
                           "seen": torch.ones(1, 1, 1, 7, dtype=torch.bool), "n": torch.tensor([7.0])}
    ranges = {scalar: (start.item() - 4, start.item() + 4, 0.1, "learned", "what does it change?")
              for scalar, start in layer.rule.learns(layer).items()
              if isinstance(start, torch.Tensor) and start.numel() == 1}
    for constant, (least, most, step, meaning, ask) in (ranges | CONSTANTS.get(name, {})).items():
        start = (STARTS[constant] if constant in STARTS else layer.args[constant] if constant in layer.args else
                 getattr(layer, constant).item() if constant != "t" else
                 layer.rule.row_input(layer, torch.tensor([64.0])).item())
        inputs[constant] = torch.tensor(float(start))
        sliders.append({"name": constant, "start": round(start, 2), "least": least, "most": most, "step": step,
                        "about": meaning, "ask": ask})
    with torch.no_grad():
        steps = program(partial(row_weights, layer), inputs)
    function = layer.rule.weights               # its docstring begins with the formula
    paragraph, *_ = (inspect.getdoc(getattr(function, "func", function)) or "").split("\n\n")
    formulas, words = explained(AROUND.get(name, " ".join(paragraph.split("\nSource")[0].split())))
    return {"name": name, "formulas": formulas, "about": words, "constants": sliders, "program": steps}


def row_weights(layer, s, seen, n, **constants):
    """The weights of one row of scores s (1, 1, 1, T) under the layer's recipe: on keys (1, 1, 1, T), and on an extra
    key. seen: as in rules. n (1,): how many keys the row sees. constants: replace the layer's own. t is the row input.
    A second view has the scores `second` times s, and is subtracted `mix` times."""
    t, mix, second = (constants.pop(name, None) for name in ("t", "mix", "second"))
    for name, value in constants.items():
        if name in layer.args:
            layer.args[name] = value
        else:
            del layer._parameters[name]
            setattr(layer, name, value.view(1))
    if mix is not None:
        first, _ = row_weights(layer, s, seen, n)
        other, outside = row_weights(layer, second * s, seen, n)
        return first - mix * other, outside
    rule, scale = attention.RULES[layer.config.rule], layer.choices["scale"]
    if layer.config.qk_norm == "l2":            # here the scores are cosines, as the norm makes them
        s = s / HIGH * layer.sight.scale
    if scale.factor:
        s = s * scale.factor(layer, n)
    if t is None and rule.row_input:
        t = rule.row_input(layer, n)
    w = rule.weights(s, seen, t, **({"power": rule.power(layer.args)} if rule.power else {}))
    share = rows.share_of_keys(layer, s, rule.statistic and rule.statistic(s, seen, w), n)
    return (w if share is None else w * share), 1 - share if layer.has_extra_key else torch.zeros(1)


class Unfinished(TorchDispatchMode):
    """Inside this context, a rule that asks whether it has finished gets the answer no, so that it runs all passes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return False if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def program(function, inputs):
    """The operations of PyTorch in function(**inputs) that its results need. A step is [operation, its number,
    arguments]: an argument is a number, [the number of an earlier step], or null. Numbers below 0 are the inputs'."""
    def traced(*values):
        with Unfinished():
            return function(**dict(zip(inputs, values, strict=True)))

    traced_module = make_fx(traced)(*inputs.values())
    graph = traced_module.graph
    graph.eliminate_dead_code()
    *nodes, results = graph.nodes               # the inputs are first
    numbers = {node: i - len(inputs) if i >= len(inputs) else -1 - i for i, node in enumerate(nodes)}

    def read(argument):                         # None for an argument left out, and for shapes, which rows do not need
        if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":       # a learned scalar without a slider
            argument = getattr(traced_module, argument.target).item()
        if isinstance(argument, torch.fx.Node):
            return [numbers[argument]]
        return float(argument) if isinstance(argument, float | int) and not isinstance(argument, bool) else None

    steps = [[node.target.overloadpacket.__name__.strip("_"), numbers[node], [*map(read, node.args)]]
             for node in nodes if node.op == "call_function"]
    return {"inputs": list(inputs), "steps": steps, "results": [numbers[node] for node in results.args[0]]}
