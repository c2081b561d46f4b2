"""What a model loses when something is taken out of its attention: small changes of what goes into a layer's attend or
comes out of it, for `instead`, and their cost in loss on fixed windows.

`chosen` is a bool tensor (layers, heads): in which heads of the output. In a differential recipe each has two views,
and a change acts on both. The first token is the first of the sequence, also where the sink is an extra key.
"""
from functools import partial
from typing import NamedTuple

import torch

from evals.instrument import instead, progress, table
from evals.loss import token_losses
from evals.pictures import frame

# ------------------------------------------------------------------------------------------------------------ changes


def unchanged(attend, layer, module, *inputs):
    """Attention as it is."""
    return attend(*inputs)


def key_hidden(attend, layer, module, *inputs):
    """Attention whose first token is seen by itself alone. How many keys a row counts stays as it was."""
    return attend(*inputs, sight=module.sight._replace(hidden=module.ahead))


def every_head(model):
    """All of them chosen."""
    blocks = model.transformer.h
    return torch.ones(len(blocks), blocks[0].attn.heads, dtype=torch.bool)


def value_zeroed(chosen, place=0, to_itself=True):
    """Attention in which the token at this place, of the sequence, has the value 0 for the chosen heads. Its weights
    stay. to_itself: also in its own row; without, as where the cache of a token that has been read is changed."""
    def change(attend, layer, module, q, k, v, x, *more):
        if not chosen[layer].any():
            return attend(q, k, v, x, *more)
        if v.shape[1] < module.heads:           # heads that share a value get one each, and so their keys
            k, v = module.for_score_heads(k, 1), v.repeat_interleave(module.heads // v.shape[1], 1)
        row = module.ahead + place
        here = torch.arange(v.shape[2], device=v.device) == row
        o = attend(q, k, v.masked_fill(chosen[layer].to(v.device)[:, None, None] & here[:, None], 0.0), x, *more)
        if not to_itself:                       # what it saw itself, from the tokens up to it
            upto = slice(row + 1 if module.causal else None)
            o[:, :, row] = attend(q[:, :, upto], k[:, :, upto], v[:, :, upto], x[:, upto], *more)[:, :, row]
        return o
    return change


as_later_rows_see_it = partial(value_zeroed, to_itself=False)


def output_zeroed(chosen):
    """Attention whose chosen heads put out 0, whatever norm or gate they end in."""
    def change(attend, layer, module, *inputs):
        o = attend(*inputs)                     # (B, heads, T, E)
        return o.masked_fill(chosen[layer].to(o.device)[:, None, None], 0.0)
    return change


# ---------------------------------------------------------------------------------------------------- and their costs


class Ablation(NamedTuple):
    """One line of the table. Of several changes, each a draw of heads by chance, the mean counts."""
    what: str
    where: str
    heads: int                                  # in how many heads
    changes: list


def ablations(alpha_sink, threshold, prune, other, draws, seed):
    """What is taken away, in which heads, by their alpha_sink (layers, heads). threshold: of a dormant head; prune:
    percentages of heads; other: a place whose value is zeroed for comparison; draws, seed: of heads by chance.
    Source: the first value, table 1 of The Attention Sink as Native MoE, which zeroes it in the cache, so for later
    rows only, and has neither chance nor the reverse; whole heads, its appendix A.5, after Sandoval-Segura et al.
    2504.03889. Heads are chosen by what they do on the windows that the loss is taken on."""
    every = torch.ones_like(alpha_sink, dtype=torch.bool)
    found = [Ablation("first key hidden", "all heads", every.numel(), [key_hidden]),
             Ablation(f"value at {other} zero", "all heads", every.numel(), [as_later_rows_see_it(every, other)]),
             Ablation("first value zero", "all heads", every.numel(), [as_later_rows_see_it(every)]),
             Ablation("the same to itself, too", "all heads", every.numel(), [value_zeroed(every)])]
    dormant = int((alpha_sink > threshold).sum())
    counts = [("first value zero", as_later_rows_see_it, dormant)] if dormant else []
    counts += [(f"{percent} % of heads zero", output_zeroed, round(percent / 100 * every.numel())) for percent in prune]
    for what, change, count in counts:
        choices = picked(alpha_sink, count, draws, seed)
        if change is output_zeroed:
            choices |= picked_in_layers(alpha_sink, count)
        found += [Ablation(what, where, count, [change(chosen) for chosen in picks])
                  for where, picks in choices.items()]
    return found


def picked(alpha_sink, count, draws, seed):
    """So many heads: those with the most weight on the sink, as many by chance (several draws), those with the least.
    {where: [chosen, ...]}."""
    order = alpha_sink.flatten().argsort(descending=True, stable=True).cpu()
    dice = torch.Generator().manual_seed(seed)
    orders = {"most sink": [order], "random": [torch.randperm(len(order), generator=dice) for _ in range(draws)],
              "least sink": [order.flip(0)]}
    return {where: [the_first(count, ids, alpha_sink) for ids in several] for where, several in orders.items()}


def picked_in_layers(alpha_sink, count):
    """So many heads as evenly over the layers as can be, of each layer those with the most or the least: heads with the
    least of all may be whole layers, and then their depth counts, not their sink. A remainder goes to the layers in
    which the next head has the most or the least."""
    found = {}
    for where, values in (("most sink", alpha_sink.cpu()), ("least sink", -alpha_sink.cpu())):
        rank = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1).flatten()     # 0: first in its layer
        order = values.flatten().argsort(descending=True, stable=True)
        order = order[rank[order].argsort(stable=True)]                 # by rank, and of one rank by value
        found[f"{where} of each layer"] = [the_first(count, order, alpha_sink)]
    return found


def the_first(count, order, alpha_sink):
    """The first heads of an order of all, chosen."""
    return torch.zeros(len(order), dtype=torch.bool).index_fill(0, order[:count], True).view_as(alpha_sink)


def costs(found, model, rows, machine, batch_size):
    """What each of these ablations adds to the loss of windows rows (N, T + 1), in nats per token: {"loss": as it is,
    "changes": [{"what", "where", "heads", "loss_change", "standard_error", "over_draws"}]}.

    The windows are the same, so the error is that of the mean of their differences, and None of a single one.
    over_draws: standard deviation of the loss over the draws, None where there are not several."""
    before = window_losses(unchanged, model, rows, machine, batch_size)
    jobs = [(number, change) for number, ablation in enumerate(found) for change in ablation.changes]
    added = [[] for _ in found]                 # for each ablation, (N,) from each of its changes
    for number, change in progress(jobs, machine.main):
        added[number].append(window_losses(change, model, rows, machine, batch_size) - before)
    return {"loss": before.mean().item(), "changes": [
        {"what": ablation.what, "where": ablation.where, "heads": ablation.heads, **mean_and_errors(torch.stack(more))}
        for ablation, more in zip(found, added, strict=True)]}


def mean_and_errors(added):
    """added (draws, windows): losses after less before."""
    draws, windows = added.shape
    error = added.mean(0).std().item() / windows ** 0.5 if windows > 1 else None
    return {"loss_change": added.mean().item(), "standard_error": error,
            "over_draws": added.mean(1).std().item() if draws > 1 else None}


def window_losses(change, model, rows, machine, batch_size):
    """The mean loss of each window of rows (N, T + 1), with this change: (N,) float64, on the CPU."""
    return torch.cat([losses_with(change, model, some, machine).double().mean(1).cpu()
                      for some in rows.split(batch_size)])


@torch.no_grad()
def losses_with(change, model, rows, machine):
    """Each target's loss, (N, T), with `change` in place of every layer's attention."""
    with instead(model, change):
        return token_losses(model, rows, machine)


def cost_table(found):
    """What `costs` found, a row for each ablation."""
    rows = [[line["what"], line["where"], str(line["heads"]),
             *(line[name] for name in ("loss_change", "standard_error", "over_draws"))] for line in found["changes"]]
    header = ["taken away", "in the heads", "heads", "loss change", "standard error", "over draws"]
    text = f"loss as it is: {found['loss']:.4f} nats per token\n\n{table(rows, header)}"
    nobody = f"\nfirst value zero in dormant heads: no head above {found['threshold']:g}"
    return text + ("" if found["dormant"] else nobody)


def draw_costs(ax, cost):
    """A bar and a number for each ablation, a line for twice its standard error; dark are the heads with the most
    weight on the sink, as in the maps."""
    lines = [line for line in cost["changes"][::-1] if line["heads"]]   # bars are counted from the bottom
    gains, errors = [line["loss_change"] for line in lines], [2 * (line["standard_error"] or 0) for line in lines]
    colours = {"most sink": "#08306b", "random": "#b0b0b0", "least sink": "#9ecae1", "all heads": "#d94801"}
    ax.barh(range(len(lines)), gains, color=[colours[line["where"].removesuffix(" of each layer")] for line in lines],
            xerr=errors, error_kw={"elinewidth": 1, "ecolor": "#606060"})
    for y, (gain, error) in enumerate(zip(gains, errors, strict=True)):
        ax.text(max(gain + error, 0), y, f" {gain:.3f}", va="center", fontsize=8)
    ax.set_yticks(range(len(lines)), [f"{line['what']}, {line['where']}" for line in lines], fontsize=8)
    ax.margins(x=0.15)
    frame(ax, f"what the loss gains\n(nats per token, over {cost['loss']:.3f})")
