"""Ablations of attention, and how much each of them raises the loss on fixed windows.

An ablation changes the inputs or the output of a layer's `attend`; `instead` puts it in place. The
mask `chosen` (layers, heads) says which heads change. In a differential recipe a head has two
views, and a change acts on both. The first token is the first of the sequence, even if the sink is
an extra key.
"""

from functools import partial

import torch

from evals.instrument import instead, mean_and_error, progress
from evals.loss import token_losses
from evals.pictures import frame


def unchanged(attend, layer, module, *inputs):
    """Attention without a change."""
    return attend(*inputs)


def key_hidden(attend, layer, module, *inputs):
    """Attention in which only the first row sees the first key. The number n of a row's keys stays
    the same."""
    return attend(*inputs, mask=module.mask._replace(hidden=module.sink_tokens))


def every_head(model):
    """The mask `chosen` that selects all heads."""
    return torch.ones(len(model.transformer.h), model.transformer.h[0].attn.heads, dtype=torch.bool)


def value_zeroed(chosen, place=0, to_itself=True):
    """Attention in which the token at this place of the sequence has the value 0 for the chosen
    heads. The attention weights do not change. to_itself: its own row reads the value 0 as well.
    False changes the KV cache after the token was read, also while decoding."""

    def change(attend, layer, module, q, k, v, x, *more, **cached):
        if not chosen[layer].any():
            return attend(q, k, v, x, *more, **cached)
        if "cache" in cached or may_lack_first(module, q, v):
            raise ValueError(
                f"--attn={module.config.attn} does not keep the first value while decoding, so it "
                "cannot be zeroed: leave out --zero_above, or the tasks that generate text"
            )
        cached.pop("index", None)  # it may have the sum of the values: `attend` makes another
        # grouped heads: every head gets its own copy of values and keys
        if v.shape[1] < module.heads:
            k = module.for_score_heads(k, 1)
            v = v.repeat_interleave(module.heads // v.shape[1], 1)
        row = module.sink_tokens + place
        heads = chosen[layer].to(v.device)
        zeroed = v.clone()
        zeroed[:, :, row] = v[:, :, row].masked_fill(heads[:, None], 0.0)
        o = attend(q, k, zeroed, x, *more, **cached)
        # its own row is computed without the change; a step of decoding does not have it
        if not to_itself and q.shape[2] == v.shape[2]:
            upto = slice(row + 1 if module.causal else None)
            own = attend(q[:, :, upto], k[:, :, upto], v[:, :, upto], x[:, upto], *more)
            o[:, :, row] = own[:, :, row]
        return o

    return change


def may_lack_first(module, q, v):
    """Is this a step of decoding with a full window? See Layer.recall."""
    window = module.mask.window
    return window and not module.mask.first and q.shape[2] < v.shape[2] >= window


def output_zeroed(chosen):
    """Attention in which the chosen heads output 0, after any norm and gate."""

    def change(attend, layer, module, *inputs):
        o = attend(*inputs)  # (B, heads, T, E)
        return o.masked_fill(chosen[layer].to(o.device)[:, None, None], 0.0)

    return change


OTHER = 8  # the token whose value is zeroed, for comparison with the first token's
DRAWS = 3  # of random heads


def ablations(alpha_sink, threshold, prune):
    """The rows of the table, [(what is removed, in which heads, their number, [changes])]. Several
    changes are random draws of heads; the row shows their mean. Heads are chosen by alpha_sink
    (layers, heads), the weight on the sink. threshold: a head with a larger alpha_sink is dormant.
    prune: percentages of heads.

    Source: for the first value, table 1 of The Attention Sink as Native MoE; for whole heads its
    appendix A.5, after Sandoval-Segura et al. 2504.03889. Table 1 zeroes the value in the cache, so
    only later rows read the zero. We added the random heads and the heads with the least weight on
    the sink."""
    total = alpha_sink.numel()
    found = []
    every = torch.ones_like(alpha_sink, dtype=torch.bool)
    in_cache = partial(value_zeroed, to_itself=False)
    for what, change in (
        ("first key hidden", key_hidden),
        (f"value at {OTHER} zero", in_cache(every, OTHER)),
        ("first value zero", in_cache(every)),
        ("and also in its own row", value_zeroed(every)),
    ):
        found.append((what, "all heads", total, [change]))
    if dormant := int((alpha_sink > threshold).sum()):
        for where, masks in picked(alpha_sink, dormant).items():
            found.append(("first value zero", where, dormant, list(map(in_cache, masks))))
    for percent in prune:
        what = f"{percent} % of heads zero"
        count = round(percent / 100 * total)
        for where, masks in picked(alpha_sink, count, in_layers=True).items():
            found.append((what, where, count, list(map(output_zeroed, masks))))
    return found


def picked(alpha_sink, count, in_layers=False, seed=1337):
    """Choose `count` heads in three ways: those with the most weight on the sink, random heads
    (DRAWS times), and those with the least weight. Returns {where: [mask `chosen`, ...]}.

    in_layers: also choose them spread evenly over the layers, in each layer those with the most or
    the least weight. A remainder goes to the layers whose next head has the most or the least.
    (Without the spread, the heads with the least weight may fill whole layers. Then their depth
    matters more than their sink.)"""
    alpha = alpha_sink.cpu()
    dice = torch.Generator().manual_seed(seed)

    def first(order):
        chosen = torch.zeros(alpha.numel(), dtype=torch.bool)
        chosen[order[:count]] = True
        return chosen.view_as(alpha)

    order = alpha.flatten().argsort(descending=True, stable=True)
    found = {
        "most sink": [first(order)],
        "random": [first(torch.randperm(len(order), generator=dice)) for _ in range(DRAWS)],
        "least sink": [first(order.flip(0))],
    }
    if in_layers:
        for where, values in (("most sink", alpha), ("least sink", -alpha)):
            # 0: first in its layer
            rank = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1).flatten()
            order = values.flatten().argsort(descending=True, stable=True)
            by_rank = order[rank[order].argsort(stable=True)]  # then by value
            found[f"{where} of each layer"] = [first(by_rank)]
    return found


def costs(found, model, rows, machine, batch_size):
    """The loss that each ablation adds on windows rows (N, T + 1), in nats per token: {"loss":
    without ablation, "changes": [{"what", "where", "heads", "loss_change", "standard_error",
    "over_draws"}]}. standard_error: of the mean difference over the windows, None for one window.
    over_draws: standard deviation of the loss over the draws, None for one draw."""
    before = window_losses(unchanged, model, rows, machine, batch_size)
    lines = []
    for what, where, heads, changes in progress(found, machine.main):
        losses = [window_losses(change, model, rows, machine, batch_size) for change in changes]
        added = torch.stack(losses) - before  # (draws, windows)
        mean, error = mean_and_error(added.mean(0))
        over_draws = added.mean(1).std().item() if len(added) > 1 else None
        lines.append(
            {
                "what": what,
                "where": where,
                "heads": heads,
                "loss_change": mean,
                "standard_error": error,
                "over_draws": over_draws,
            }
        )
    return {"loss": before.mean().item(), "changes": lines}


def window_losses(change, model, rows, machine, batch_size):
    """The mean loss of each window of rows (N, T + 1) with this change: (N,) float64, on the
    CPU."""
    losses = [losses_with(change, model, batch, machine) for batch in rows.split(batch_size)]
    return torch.cat(losses).double().mean(1).cpu()


@torch.no_grad()
def losses_with(change, model, rows, machine):
    """Each target's loss, (N, T), with `change` in place of every layer's attention."""
    with instead(model, change):
        return token_losses(model, rows, machine)


def draw_costs(ax, cost):
    """Draw a bar for each ablation, dark for the heads with the most sink. Lines are two standard
    errors."""
    lines = [line for line in cost["changes"][::-1] if line["heads"]]  # bars start at the bottom
    gains = [line["loss_change"] for line in lines]
    errors = [2 * (line["standard_error"] or 0) for line in lines]
    labels = [f"{line['what']}, {line['where']}" for line in lines]
    colours = {
        "most sink": "#08306b",
        "random": "#b0b0b0",
        "least sink": "#9ecae1",
        "all heads": "#d94801",
    }
    shown = [colours[line["where"].removesuffix(" of each layer")] for line in lines]
    bars = ax.barh(
        range(len(lines)),
        gains,
        color=shown,
        xerr=errors,
        error_kw={"elinewidth": 1, "ecolor": "#606060"},
    )
    ax.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    ax.set_yticks(range(len(lines)), labels, fontsize=8)
    ax.margins(x=0.25)
    frame(ax, f"increase of the loss\n(nats per token, from {cost['loss']:.3f})")
