"""The figures of the sink lab: a run's loss less the best possible one, and its attention in *idle*
and *copy* rows."""

import math

import torch
from torch.nn import functional as F

from evals.ablate import every_head, key_hidden, losses_with, value_zeroed
from evals.instrument import seeing, window_batches
from evals.measures import Probe, mean_of

FIRST_ROW = 8  # earlier rows see few keys, and are neither idle nor copy


def lab_figures(model, split, data_meta, machine):
    """Every figure of the sink lab on 256 fixed sequences, as {name: value}.

    Losses are the excess over the loss of the true process, so 0 is perfect. *Copy* rows are
    queries at triggers, *idle* rows all others, both from position 8. zero_cost is the increase of
    the loss when the first token's value is zero, hide_cost the increase when no later row sees the
    first key (the rows' counts n do not change).
    """
    T = model.config.block_size
    (rows,) = window_batches(model, split, machine, T, 256, 256)  # whole sequences (N, T + 1)
    bayes, trigger = true_process(rows, data_meta)
    kinds = kinds_of_rows(trigger) | {"all": torch.ones_like(trigger)}
    probes = {kind: [Probe() for _ in model.transformer.h] for kind in kinds}

    def see(layer, module, *inputs):
        for kind, counted in kinds.items():
            probes[kind][layer].see(module, *inputs, counted=counted)

    # the same sequences three times: unchanged, without the first value, without the first key
    changes = (seeing(see), value_zeroed(every_head(model)), key_hidden)
    as_is, zero, hide = (losses_with(change, model, rows, machine) for change in changes)
    figures = {}
    for kind, name in (("all", "loss"), ("copy", "copy"), ("idle", "idle")):
        figures[f"excess_{name}"] = (as_is - bayes)[kinds[kind]].mean().item()
    mean = {kind: mean_of(layers) for kind, layers in probes.items()}
    for name in ("sink", "share", "times_uniform", "row_mass", "extra"):
        for kind in ("idle", "copy"):
            figures[f"{name}_{kind}"] = mean[kind][name]
    for name in ("value_norm_ratio", "sparsity", "empty_rows", "sink_eps", "extra_eps"):
        figures[name] = mean["all"][name]
    figures["zero_cost"] = (zero - as_is).mean().item()
    figures["hide_cost"] = (hide - as_is).mean().item()
    # nan: undefined for this recipe
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def kinds_of_rows(trigger):
    """Which queries are of a kind, {"idle", "copy": (N, T)}. trigger (N, T): which tokens are
    triggers."""
    late = torch.arange(trigger.shape[1], device=trigger.device) >= FIRST_ROW
    return {"idle": ~trigger & late, "copy": trigger & late}


def true_process(rows, data_meta):
    """Of sequences (N, T + 1): each target's loss under the true process, (N, T), and which queries
    are triggers."""
    x, y = rows[:, :-1], rows[:, 1:]
    symbols = data_meta["symbols"]  # larger ids, BOS and the fixed token, are never copied
    before = F.pad(x[:, :-1], (1, 0), value=symbols)  # no token precedes the first query
    trigger = torch.isin(x, torch.tensor(data_meta["triggers"], device=x.device))
    # (ids, symbols)
    bigrams = torch.tensor(data_meta["bigrams"], dtype=torch.float64).to(x.device, torch.float32)
    usual, copied = bigrams[x, y.clamp(max=symbols - 1)], (y == before).float()
    # after a trigger the token before it is certain, if it is a symbol
    p = torch.where(trigger & (before < symbols), copied, usual)
    # the fixed token's place is known
    p[:, torch.arange(1, y.shape[1] + 1) == data_meta["fixed_at"]] = 1.0
    return -p.log(), trigger
