"""mixers/selection.py: what a decoding step reads, MagicPIG's hashes, commands. Formulas:
tests/reference_mixers.py."""

import math

import pytest
import torch
from bounds import SEED, below, close
from layers import fresh, inputs, layer, normal

from axes.layer import Cache


def test_magicpig_finds_a_key_with_the_probability_that_its_weight_is_divided_by():
    """Over the hashes of 500 seeds, within six standard errors."""
    T = 30
    i = torch.tensor([T - 1])
    q = normal(1, 1, 1, 8)
    k = normal(1, 1, T, 8, stream=1)
    found = 0
    for seed in range(500 * SEED, 500 * SEED + 500):
        args = f"first=0,recent=3,bits=2,tables=4,seed={seed}"
        module = fresh("magicpig", n_head=1, n_embd=8, attn_args=args)
        index = Cache()
        module.index_keys(k, k, index)
        found = found + module.selected(q, k, index, i, torch.ones(1, T).bool())[0].double()
    u = module.log_chance(q, k, index, i, torch.arange(T)).exp()
    assert (found[..., -3:] == 500).all()  # the recent keys
    found, u = found[..., :-3] / 500, u[..., :-3]
    below((found - u).abs() / (u * (1 - u) / 500).sqrt(), 6)


@pytest.mark.parametrize(
    "attn, args",
    [
        ("topk", ""),
        ("sparq", "components=3"),
        ("sparq", "components=3,local=0.5,realloc=1"),
        ("quest", "page=4"),
        ("magicpig", "first=1,recent=3,bits=2,tables=6"),
    ],
)
def test_a_step_reads_the_selected_keys_and_values_only(attn, args):
    """The others may be NaN once the index is made. topk's index is the keys themselves."""
    module = layer(attn, attn_args=args)
    plain = layer(attn, attn_args=args.replace("realloc=1", "realloc=0"))
    q, k, v, x = inputs(module, 45)
    # with realloc every value has a weight
    chosen = (plain.weights_of(q, k, x)[:, :, -1] > 0)[..., None]
    index = Cache()
    module.index_keys(k, v, index)
    expected = module.attend(q, k, v, x)[:, :, -1:]
    if attn != "topk":
        k = torch.where(chosen, k, math.nan)
    v = torch.where(chosen, v, math.nan)
    found = module.attend(q[:, :, -1:], k, v, x[:, -1:], index=index)
    close(found, expected, terms=45)


def test_every_instrument_takes_a_selection_over_a_softmax_run(toy_run, evaluate):
    run = f"--out_dir={toy_run}"
    flags = "--attn=sparq", "--topk=4", "--attn_args=components=4,realloc=1"
    full = evaluate("loss", run)["loss"]
    every_key = evaluate("loss", run, "--attn=topk", "--topk=1000")["loss"]
    assert every_key == pytest.approx(full, abs=1e-5)
    assert math.isfinite(evaluate("loss", run, *flags)["loss"])
    for command in (["probe"], ["heads"], ["maps"], ["sample", "--tokens=4"]):
        evaluate(*command, run, *flags)
