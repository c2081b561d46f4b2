"""The page of `maps --html`: every head of a model on one sentence, to look at in a browser.

evals/maps.html is the page; this module puts the numbers in. A page is one file that needs no network. To keep it
small, it stores the square root of each weight in 11 bits. If the largest weight is 1, the error is at most 0.001.
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
LEVELS, FINE = 1023, 32767                      # a weight, or a sum of a row, is a whole number up to this, and a sign

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
    return {"about": about(run), "measures": measures, "hidden": hidden, "value_norms": value_norms,
            "stream": list(stream.values())}


def about(run):
    """The recipe, and what a reader of its maps must know."""
    attn, trained = run.model.config.attn, run.meta["knobs"]["attn"]
    derivatives = "" if run.model.transformer.h[0].attn.exact else (
        ": derivatives of outputs with respect to values, since this recipe has no attention weights")
    return f"--attn={attn}{derivatives}" + (f"; the model was trained with {trained}" if trained != attn else "")


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
    save_page(path, "maps.html", {"levels": LEVELS, "fine": FINE,
                                   "runs": [tab(place, numbers) for place, numbers in found.items()]})


def tab(place, numbers):
    """The data of one run, as evals/maps.html reads it."""
    w = torch.tensor([[found[kind] for found in numbers["maps"]] for kind in ("weights", "hidden")],
                     dtype=torch.float64)       # (2, maps, T, keys)
    tokens = w[..., numbers["first"]:]
    share = tokens.abs() / tokens.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    rows = {"weights": w, "sums": tokens.sum(-1), "entropies": torch.special.entr(share).sum(-1),       # as in measures
            "value_norms": torch.tensor(numbers["value_norms"])}
    most = {name: max(values.abs().max().item(), 1e-30) for name, values in rows.items()}
    root = (w.abs() / most["weights"]).sqrt() * w.sign()        # small weights are as exact as their colours
    packs = {"weights": packed(root, LEVELS)} | {
        name: packed(rows[name] / most[name], FINE) for name in ("sums", "entropies", "value_norms")}
    meanings = {name: MEASURES.get(name, COST) for name in numbers["measures"]}
    return {"name": place.removeprefix("out/"), "most": most, "packed": packs, "meanings": meanings,
            **{name: numbers[name] for name in ("about", "queries", "keys", "first", "measures")},
            "stream": brief(numbers["stream"])}


def packed(values, levels):
    """Values from -1 to 1 as text: the size of each in so many steps, the sign in the bit above; all high bytes, then
    all low ones; deflated; base64. Only an exact zero becomes 0."""
    values = np.asarray(values)
    codes = np.maximum(np.round(np.abs(values) * levels), values != 0) + (levels + 1) * (values < 0)
    codes = codes.astype(np.uint16)
    planes = (codes >> 8).astype(np.uint8).tobytes() + (codes & 255).astype(np.uint8).tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def brief(values):
    """Nested lists of numbers, to four significant digits."""
    return [brief(value) for value in values] if isinstance(values, list) else float(f"{values:.4g}")
