"""The page of `maps --html`: every head of a model on one sentence, to look at in a browser.

evals/maps.html is the page; this module puts the numbers in. A page is one file that needs no network. Weights are 11
bits each, on the scale of the colours, so a page shows them with an error of at most 0.03 percent of the largest.
"""
import base64
import zlib

import numpy as np
import torch

from evals.ablate import output_zeroed, unchanged, window_losses
from evals.instrument import legend, progress, table, watch
from evals.measures import MEASURES, Probe
from evals.pictures import save_page
from evals.probe import rounded
from evals.sample import as_ids
from evals.stream import watching

SHOWN = ("sink", "entropy", "row_mass", "sparsity", "extra", "negative")        # measures that colour the heads
COST = "how much the loss of this sentence rises without the head, in nats per token"
LEVELS = 2047                                   # a weight is a whole number up to this, and a sign

# ---------------------------------------------------------------------------------------------------------- the numbers


def seen_in_every_head(run, ids):
    """What the page shows beyond the attention weights of a sentence ids (T,), for rows of T queries:

    about           the recipe
    measures        {name: (layers, heads)}, those of SHOWN that exist for this recipe
    hidden          {layer: (heads, T, keys)}, the weights if only the first row sees the first key
    value_norms     (layers, heads, T), the norm of each token's value
    stream          (layers + 1, T), the norm of each hidden state that enters a layer, and after the last
    """
    probes = [Probe() for _ in run.model.transformer.h]
    hidden, value_norms, stream = {}, [], {}

    def see(layer, module, q, k, v, x, table):
        probes[layer].see(module, q, k, v, x, table)
        w = module.weights_of(q, k, x, table, module.sight._replace(hidden=module.ahead))
        hidden[layer] = w[0].float().cpu()
        norms = v[0].float().norm(dim=-1)       # (Hv, T)
        value_norms.append(norms.repeat_interleave(module.heads // len(norms), 0).tolist())

    with watching(run.model, lambda layer, h: stream.update({layer: h[0].float().norm(dim=-1).tolist()})):
        watch(run.model, see, as_ids(ids, run.machine), run.machine)
    results = [rounded(probe.result()) for probe in probes]
    measures = {name: [result[name] for result in results] for name in SHOWN}
    for name in ("extra", "negative"):          # 0 in most recipes
        if not any(map(any, measures[name])):
            del measures[name]
    module = run.model.transformer.h[0].attn
    about = f"--attn={run.model.config.attn}" + ("" if module.exact else ": derivatives of outputs with respect to "
                                                 "values, since this recipe has no attention weights")
    return {"about": about, "measures": measures, "hidden": hidden, "value_norms": value_norms,
            "stream": list(stream.values())}


def costs(run, ids):
    """The loss that silencing each single head adds on a sentence, in nats per token: (layers, heads)."""
    modules, rows = [block.attn for block in run.model.transformer.h], as_ids(ids, run.machine)
    heads = modules[0].heads

    def loss(change):
        return window_losses(change, run.model, rows, run.machine, 1).item()

    before, found = loss(unchanged), []
    for chosen in progress(torch.eye(len(modules) * heads, dtype=torch.bool), run.machine.main):
        found.append(round(loss(output_zeroed(chosen.view(-1, heads))) - before, 6))
    return [found[i:i + heads] for i in range(0, len(found), heads)]


def in_words(path, numbers):
    """Where the page is, and the mean over heads of each measure, by layer."""
    measures = numbers["measures"]
    rows = [[str(layer), *(float(np.mean(values[layer])) for values in measures.values())]
            for layer in range(len(numbers["value_norms"]))]
    meanings = {name: MEASURES.get(name, COST) for name in measures}
    return f"open {path} in a browser\n\n{table(rows, ['layer', *meanings])}\n\n{legend(meanings)}"


# ------------------------------------------------------------------------------------------------------------- the page


def page(path, found):
    """Write the page. Several runs are tabs."""
    save_page(path, "maps.html", {"levels": LEVELS, "runs": [tab(place, numbers) for place, numbers in found.items()]})


def tab(place, numbers):
    """The data of one run, as evals/maps.html reads it."""
    weights = np.array([found["weights"] for found in numbers["maps"]])                 # (maps, T, keys)
    hidden = np.array([found["hidden"] for found in numbers["maps"]])
    most = max(np.abs(weights).max(), np.abs(hidden).max(), 1e-30)
    meanings = {name: MEASURES.get(name, COST) for name in numbers["measures"]}
    return {"name": place.removeprefix("out/"), "most": most, "meanings": meanings, "about": numbers["about"],
            "weights": packed(weights, most), "hidden": packed(hidden, most),
            **{name: numbers[name] for name in ("queries", "keys", "first", "measures")},
            "value_norms": brief(numbers["value_norms"]), "stream": brief(numbers["stream"])}


def packed(weights, most):
    """Weights as text: the square root of each |w| / most in LEVELS steps, the sign above it; all high bytes, then all
    low ones; deflated; base64. Only an exact zero becomes 0."""
    codes = np.round(np.sqrt(np.abs(weights) / most) * LEVELS).astype(np.uint16)
    codes = np.maximum(codes, weights != 0) + (LEVELS + 1) * (weights < 0).astype(np.uint16)
    planes = (codes >> 8).astype(np.uint8).tobytes() + (codes & 255).astype(np.uint8).tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def brief(values):
    """Nested lists of numbers, to four significant digits."""
    return [brief(value) for value in values] if isinstance(values, list) else float(f"{values:.4g}")
