"""eval.py maps: the attention weights of a sentence, with readable labels."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import close
from conftest import RECIPES, tiny_config
from layers import in_every_layer

from common.machine import Machine
from data import coders
from evals import maps
from evals.maps import Maps, extremes, labels_of, spread
from model import GPT


def opened(gpt):
    """An opened run of a model that was never saved."""
    return SimpleNamespace(model=gpt, machine=Machine("cpu", "float32"), tokenizer=coders.Bytes())


def test_labels_show_spaces_newlines_and_bytes():
    text = "a b\n\té$"
    found = labels_of(coders.Bytes().encode(text), text, coders.Bytes())
    assert found == ["a", "␣", "b", "↵", "⇥", r"\xc3", r"\xa9", "$"]


def test_a_tokenizer_that_adds_a_space_and_symbols_have_labels():
    """If the tokens have another number of bytes than the text, each is decoded alone. Long labels are shortened."""
    words = ["", " When", "supercalifragilistic"]
    coder = SimpleNamespace(decode=lambda ids: words[ids[0]], lengths=np.array([0, 6, 20]))
    assert labels_of([1, 2], "Whensupercalifragilistic", coder) == ["␣When", "supercalifrag…"]
    assert labels_of([3, 64], "", coders.Numbers()) == ["3", "64"]


def test_four_layers_and_the_two_most_different_heads_are_shown():
    assert spread(1) == [0] and spread(3) == [0, 1, 2] and spread(30) == [0, 10, 19, 29]
    w = torch.zeros(3, 4, 5)                    # three heads; column 0 is an extra key, column 1 the first token
    w[:, :, 0], w[0, :, 1], w[1, :, 1], w[2, :, 1] = 1, 0.2, -0.9, 0.1
    assert extremes(w, 1) == [1, 2] and extremes(w[:1], 1) == [0]


@pytest.mark.parametrize("attn", RECIPES)
def test_maps_of_every_recipe_are_its_weights(attn, tmp_path):
    gpt = GPT(tiny_config(attn=attn, n_layer=2, vocab_size=257)).eval()
    text, differential = "fox jumps", attn.startswith(("diff", "tda"))
    found, said = maps.command(Maps(text=text, layers="1", heads="0", views=differential), opened(gpt))
    whole = in_every_layer(lambda module, q, k, v, x, table: module.weights_of(q, k, x, table)[0, 0], gpt,
                           torch.tensor([list(text.encode())]))
    *_, shown = found["maps"]                   # the last is the difference, if there are views
    assert [m["kind"] for m in found["maps"]] == (["view a", "view b", "difference"] if differential else ["weights"])
    close(torch.tensor(shown["weights"]), whole[1])              # six digits are shown
    extra, ahead = gpt.transformer.h[0].attn.has_extra_key, gpt.ahead
    assert found["queries"] == ["(sink token)"] * ahead + list("fox␣jumps")
    assert found["keys"] == ["(extra key)"] * extra + found["queries"] and found["first"] == extra + ahead
    assert np.shape(shown["weights"]) == (len(found["queries"]), len(found["keys"]))
    assert "mean on f" in said and ("mean on (extra key)" in said) == extra
    if attn in ("kv_bias", "diff_rela"):        # pictures with an extra key and with signed views
        maps.draw(tmp_path / "x.png", {"run": found})


def test_the_difference_is_view_a_minus_lambda_view_b():
    gpt = GPT(tiny_config(attn="tda", vocab_size=257, attn_args="beta_init=0.01,lambda_init=0.25")).eval()
    found = maps.command(Maps(text="the quick brown", views=True, heads="0,1"), opened(gpt))[0]["maps"]
    for a, b, difference in (found[:3], found[3:]):
        a, b, difference = (np.array(m["weights"]) for m in (a, b, difference))
        close(difference, a - 0.25 * b, dtype=torch.float32)
        assert (b > 0).any()


def test_text_names_the_key_with_the_most_weight():
    """An empty row has none. A small weight is not rounded to 0, because pictures show exact zeros in a colour."""
    w = maps.rounded(torch.tensor([[1.0, 0.0, 0.0], [1e-9, -0.75, 1 / 3], [0.0, 0.0, 0.0]]))
    assert w[1] == [1e-9, -0.75, 0.333333]
    numbers = {"queries": [*"abc"], "keys": [*"abc"], "first": 0,
               "maps": [{"layer": 3, "head": 1, "kind": "weights", "weights": w}]}
    lines = [line.split() for line in maps.in_words(numbers).splitlines()]
    assert lines[1:] == [["3.1"], ["a", "a", "1.00"], ["b", "b", "-0.75"], ["c", "-"], ["mean", "on", "a", "0.333"]]
