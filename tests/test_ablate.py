"""evals/ablate.py removes parts of a model's attention and measures how much the loss rises."""
import math

import bounds
import pytest
import torch
from bounds import close, same
from conftest import enliven, some_recipes, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from common.machine import Machine
from evals.ablate import (
    ablations,
    costs,
    every_head,
    key_hidden,
    mean_and_errors,
    output_zeroed,
    picked,
    picked_in_layers,
    unchanged,
    value_zeroed,
    window_losses,
)
from evals.instrument import instead
from model import GPT

MACHINE = Machine("cpu", "float32")


def lively(**choices):
    """A model of 2 layers of 2 heads, whose attention affects the loss."""
    gpt = GPT(tiny_config(**{"n_layer": 2} | choices), bounds.SEED).eval()
    enliven(gpt)
    return gpt


@pytest.fixture(scope="module")
def rows():
    return torch.randint(31, (3, 17), generator=bounds.dice())     # (N, T + 1)


def one_head(head, heads=2):
    """A mask that selects one head of the first of two layers."""
    return (torch.arange(2 * heads) == head).view(2, heads)


def inputs_of(gpt, rows):
    """The attention of the first layer and its inputs: q, k, v, x, table."""
    seen = []

    def look(attend, layer, module, *inputs):
        seen.append(inputs)
        return attend(*inputs)

    with instead(gpt, look), torch.no_grad():
        gpt(rows[:, :-1])
    return gpt.transformer.h[0].attn, seen[0]


def changed_output(change, module, inputs, layer=0):
    with torch.no_grad():
        return change(module.attend, layer, module, *inputs)


# including grouped heads and both kinds of two views
SHARED = {"n_head": 4, "n_kv_head": 2}
KINDS = [{"attn": "softmax"}, {"attn": "softmax", **SHARED}, {"attn": "elastic", **SHARED}, {"attn": "diff2", **SHARED},
         {"attn": "diff_rela", "out_norm": "none", **SHARED}, {"attn": "sink_token"}, {"attn": "kv_bias", **SHARED}]


@pytest.mark.parametrize("choices", KINDS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_value_is_zeroed_for_the_chosen_head_alone(choices, rows):
    """The head's output loses that token's weight times its value. Earlier rows and other heads do not change."""
    module, (q, k, v, x, table) = inputs_of(lively(**choices), rows)
    head, row = module.heads - 1, module.ahead + 3
    before, after = (changed_output(change, module, (q, k, v, x, table)) for change in (
        unchanged, value_zeroed(one_head(head, module.heads), 3)))
    with torch.no_grad():
        w = module.weights_of(q, k, x, table)[:, head, :, -v.shape[2]:]                     # (B, T, T)
    expected = before.clone()
    expected[:, head] -= w[..., row, None] * v[:, -1, None, row]
    close(after, expected, terms=16, size=before.abs().max().item())


@pytest.mark.parametrize("attn", some_recipes("softmax", "sink_token", "diff2", "streaming"))
def test_a_value_zeroed_for_later_rows_does_not_change_the_tokens_own_row(attn, rows):
    module, inputs = inputs_of(lively(attn=attn, **({} if attn.startswith("diff") else SHARED)), rows)
    chosen, own = one_head(module.heads - 1, module.heads), module.ahead + 3
    changes = (unchanged, value_zeroed(chosen, 3), value_zeroed(chosen, 3, to_itself=False))
    before, to_all, to_later = (changed_output(change, module, inputs) for change in changes)
    close(to_later[:, :, own], before[:, :, own], terms=16)
    same(to_later[:, :, own + 1:], to_all[:, :, own + 1:])
    if attn != "routing":                       # with clusters, a token may not see itself
        assert not torch.equal(to_later, to_all)


def test_an_output_is_zeroed_after_gate_and_norm(rows):
    for attn in ("gated", "rela", "v_bias"):
        module, inputs = inputs_of(lively(attn=attn), rows)
        o, before = (changed_output(change, module, inputs) for change in (output_zeroed(one_head(1)), unchanged))
        same(o[:, 0], before[:, 0])
        assert not o[:, 1].any()
        same(changed_output(output_zeroed(one_head(1)), module, inputs, layer=1), before)   # a head of another layer


@pytest.mark.parametrize("attn", ["softmax", "elastic", "sink_token"])
def test_a_hidden_key_has_no_weight(attn, rows):
    module, (q, k, v, x, table) = inputs_of(lively(attn=attn), rows)
    with torch.no_grad():
        w = module.weights_of(q, k, x, table, sight=module.sight._replace(hidden=module.ahead))
    assert not w[:, :, module.ahead + 1:, module.ahead].any()
    close(changed_output(key_hidden, module, (q, k, v, x, table)), w @ v, terms=16)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 20), st.integers(0, 9))
def test_heads_are_picked_by_their_sink_at_random_and_evenly_over_the_layers(layers, heads, count, seed):
    alpha, count = torch.rand(layers, heads, generator=bounds.dice(seed)), min(count, layers * heads)
    found, evenly = picked(alpha, count, draws=3, seed=seed), picked_in_layers(alpha, count)
    same(picked(alpha, count, draws=3, seed=seed), found)
    assert [len(picks) for picks in found.values()] == [1, 3, 1]
    assert all(chosen.sum() == count for picks in (found | evenly).values() for chosen in picks)
    for most, value in (("most sink", alpha), ("least sink", -alpha)):

        def best(chosen, value=value):
            return not chosen.any() or chosen.all() or value[chosen].min() > value[~chosen].max()

        (overall,), (spread,) = found[most], evenly[f"{most} of each layer"]
        counts = spread.sum(1)
        assert best(overall) and all(map(best, spread, value)) and counts.max() - counts.min() <= 1
        # the next head of a layer that got one more is better than that of a layer that did not
        ordered = value.sort(1, descending=True)[0]
        nexts = ordered[:, counts.min()] if counts.max() > counts.min() else ordered[:, 0]
        assert best(counts > counts.min(), nexts)


def test_each_ablation_counts_its_heads_and_changes():
    assert len(ablations(torch.tensor([[0.1, 0.4]]), 0.5, [50], other=4, draws=2, seed=0)) == 4 + 5     # none dormant
    found = ablations(torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.7]]), 0.5, [0, 50], other=4, draws=2, seed=0)
    counted = {(a.what, a.where): (a.heads, len(a.changes)) for a in found}
    for what, where, heads, changes in (
            ("first value zero", "all heads", 6, 1), ("value at 4 zero", "all heads", 6, 1),
            ("first value zero", "most sink", 3, 1), ("50 % of heads zero", "least sink", 3, 1),
            ("first value zero", "random", 3, 2), ("0 % of heads zero", "random", 0, 2)):
        assert counted[what, where] == (heads, changes)


def test_the_error_is_that_of_paired_differences():
    added = torch.tensor([[1.0, 2, 3, 6], [3, 2, 5, 2]], dtype=torch.float64)               # two draws, four windows
    found = mean_and_errors(added)
    close([found["loss_change"], found["over_draws"]], [3, 0], size=6)
    # means over the draws are 2, 2, 4, 4: squared deviations from 3 sum to 4, so the variance over windows is 4 / 3
    close(found["standard_error"], math.sqrt(4 / 3) / 2)
    assert mean_and_errors(added[:1, :1]) == {"loss_change": 1, "standard_error": None, "over_draws": None}


@pytest.mark.parametrize("attn", some_recipes("softmax", "gpt_oss", "sink_token", "diff2", "elastic", "linear"))
def test_costs_of_a_model(attn, rows):
    """Removing all heads or none costs the same for every choice of them and every batch size."""
    gpt = lively(attn=attn)
    every = every_head(gpt)
    changes = {"0 % of heads zero": unchanged, "100 % of heads zero": output_zeroed(every),
               "first key hidden": key_hidden, "first value zero": value_zeroed(every, to_itself=False),
               "value at 8 zero": value_zeroed(every, 8, to_itself=False),
               "and also in its own row": value_zeroed(every)}
    losses = {what: window_losses(change, gpt, rows, MACHINE, 3).mean().item() for what, change in changes.items()}
    before = losses["0 % of heads zero"]
    found = costs(ablations(torch.rand(every.shape), 0.5, [0, 100], other=8, draws=2, seed=0), gpt, rows, MACHINE, 2)
    for line in found["changes"]:
        if line["where"] == "all heads" or "%" in line["what"]:
            close(line["loss_change"], losses[line["what"]] - before, terms=4, size=before, dtype=torch.float32)
    # in rows that are not normalised, a hidden key is like one of value 0
    assert attn != "softmax" or len(set(losses.values())) == len(losses)
