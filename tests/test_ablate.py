"""evals/ablate.py removes parts of a model's attention and measures how much the loss rises."""

import bounds
import pytest
import torch
from bounds import close, same
from conftest import enliven, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from layers import in_every_layer, token_ids

from common.machine import Machine
from evals import ablate
from evals.ablate import every_head, key_hidden, output_zeroed, picked, unchanged, value_zeroed
from evals.instrument import instead
from model import GPT

MACHINE = Machine("cpu", "float32")


def lively(**choices):
    """A model of 2 layers of 2 heads, whose attention affects the loss."""
    gpt = GPT(tiny_config(**{"n_layer": 2} | choices), bounds.SEED).eval()
    enliven(gpt)
    return gpt


def first_layer(**choices):
    """The attention of the first layer, its inputs q, k, v, x, table, and a function: its output
    with a change."""
    module, *inputs = in_every_layer(
        lambda *seen: seen, lively(**choices), token_ids(3, 17)[:, :-1]
    )[0]
    return (
        module,
        inputs,
        torch.no_grad()(lambda change, layer=0: change(module.attend, layer, module, *inputs)),
    )


def last_head(module):
    """A mask that selects the last head of the first of two layers."""
    return (torch.arange(2 * module.heads) == module.heads - 1).view(2, module.heads)


PLAIN = "softmax", "elastic", "diff2", "sink_token", "kv_bias"  # weights times values


@pytest.mark.parametrize("attn", PLAIN)
def test_a_zeroed_value_is_missing_in_the_chosen_head_and_for_later_rows_alone(
    attn,
):
    """The head's output loses that token's weight times its value. Earlier rows and other heads do
    not change."""
    shared = {} if attn == "softmax" else {"n_head": 4, "n_kv_head": 2}
    module, (q, k, v, x, table), output = first_layer(attn=attn, **shared)
    chosen = last_head(module)
    own = module.sink_tokens + 3
    before, to_all, to_later = map(
        output, (unchanged, value_zeroed(chosen, 3), value_zeroed(chosen, 3, False))
    )
    with torch.no_grad():
        w = module.weights_of(q, k, x, table)[:, -1, :, -v.shape[2] :]  # (B, T, T)
    expected = before.clone()
    expected[:, -1] -= w[..., own, None] * v[:, -1, None, own]
    close(to_all, expected, terms=16, size=before.abs().max().item())
    close(to_later[:, :, own], before[:, :, own], terms=16)
    same(to_later[:, :, own + 1 :], to_all[:, :, own + 1 :])
    assert not torch.equal(to_later, to_all)


KEPT = "softmax", "window", "streaming", "focus", "sparq", "magicpig"  # kinds of caches


@pytest.mark.parametrize("attn", KEPT)
def test_a_value_is_zero_in_the_cache_as_in_a_whole_pass(attn):
    few = {"topk": 3, "attn_args": "realloc=1"} if attn == "sparq" else {}
    gpt, idx = lively(attn=attn, **few), token_ids(2, 9)
    with instead(gpt, value_zeroed(every_head(gpt), to_itself=False)), torch.no_grad():
        cache, whole = gpt.new_cache(), gpt(idx)[0]
        steps = [gpt(part, cache=cache)[0] for part in idx.split([4, 1, 1, 3], 1)[:3]]
    close(torch.cat(steps, 1), whole[:, :6], terms=64)
    assert not torch.allclose(whole, gpt(idx)[0])


@pytest.mark.parametrize("choices", [{"attn": "gla"}, {"attn": "window", "window": 4}])
@torch.no_grad()
def test_a_first_value_that_the_cache_does_not_keep_is_refused(choices):
    gpt, idx = lively(**choices), token_ids(2, 9)
    with instead(gpt, value_zeroed(every_head(gpt))), pytest.raises(ValueError, match="leave out"):
        cache = gpt.new_cache()
        for part in idx.split(3, 1):
            gpt(part, cache=cache)


@pytest.mark.parametrize("attn", ["gated", "rela", "v_bias"])
def test_an_output_is_zeroed_after_gate_and_norm(attn):
    module, _, output = first_layer(attn=attn)
    change = output_zeroed(last_head(module))
    before = output(unchanged)
    expected = before.clone()
    expected[:, -1] = 0
    same(output(change), expected)
    same(output(change, layer=1), before)  # a head of another layer


@pytest.mark.parametrize("attn", ["softmax", "elastic", "sink_token"])
def test_a_hidden_key_has_no_weight(attn):
    module, (q, k, v, x, table), output = first_layer(attn=attn)
    with torch.no_grad():
        w = module.weights_of(q, k, x, table, mask=module.mask._replace(hidden=module.sink_tokens))
    assert not w[:, :, module.sink_tokens + 1 :, module.sink_tokens].any()
    close(output(key_hidden), w @ v, terms=16)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 20), st.integers(0, 9))
def test_heads_are_picked_by_their_sink_at_random_and_evenly_over_the_layers(
    layers, heads, count, seed
):
    def best(chosen, value):
        return not chosen.any() or chosen.all() or value[chosen].min() > value[~chosen].max()

    alpha = torch.rand(layers, heads, generator=bounds.dice(seed))
    count = min(count, layers * heads)
    found, evenly = (picked(alpha, count, in_layers, seed) for in_layers in (False, True))
    same({where: evenly[where] for where in found}, found)
    assert [len(picks) for picks in found.values()] == [1, 3, 1]
    assert all(chosen.sum() == count for picks in evenly.values() for chosen in picks)
    for most, value in (("most sink", alpha), ("least sink", -alpha)):
        (overall,), (spread,) = found[most], evenly[f"{most} of each layer"]
        counts, ordered = spread.sum(1), value.sort(1, descending=True)[0]
        assert best(overall, value) and all(map(best, spread, value))
        assert counts.max() - counts.min() <= 1
        # the next head of a layer that got one more is better than that of a layer that did not
        assert best(counts > counts.min(), ordered[:, min(counts.min(), heads - 1)])


@pytest.mark.parametrize("attn", ["softmax", "sink_token", "diff2"])
def test_costs_are_differences_of_the_losses_of_windows(attn):
    gpt = lively(attn=attn)
    rows = token_ids(3, 17)
    every = ablate.every_head(gpt)
    changes = {
        "0 % of heads zero": unchanged,
        "100 % of heads zero": output_zeroed(every),
        "first key hidden": key_hidden,
        "first value zero": value_zeroed(every, 0, False),
        "value at 8 zero": value_zeroed(every, 8, False),
        "and also in its own row": value_zeroed(every),
    }
    losses = {
        what: ablate.window_losses(change, gpt, rows, MACHINE, 3)
        for what, change in changes.items()
    }
    before = losses["0 % of heads zero"]
    found = ablate.ablations(torch.rand(every.shape), 0.5, [0, 100])
    for line in ablate.costs(found, gpt, rows, MACHINE, 2)["changes"]:
        if line["where"] == "all heads" or "%" in line["what"]:
            more = losses[line["what"]] - before  # of three windows
            expected = [more.mean().item(), more.std().item() / 3**0.5]
            close(
                [line["loss_change"], line["standard_error"]],
                expected,
                terms=4,
                size=before.mean().item(),
                dtype=torch.float32,
            )
        assert (line["over_draws"] is None) == (line["where"] != "random")
    # in rows that are not normalised, a hidden key is like one of value 0
    assert attn != "softmax" or len({loss.mean().item() for loss in losses.values()}) == len(losses)
