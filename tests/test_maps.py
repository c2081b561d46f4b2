"""eval.py maps: the attention weights of a sentence, with readable labels, as a table and as a page in a browser."""
import base64
import contextlib
import io
import json
import re
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import close
from conftest import RECIPES, tiny_config, train_here
from layers import in_every_layer

import eval as eval_script
from common.machine import Machine
from data import coders
from evals import maps
from evals.maps import Maps, labels_of, packed
from model import GPT


def test_labels_show_spaces_newlines_and_bytes():
    """Long labels are shortened. A tokenizer that adds a space decodes each token alone."""
    text, words = "a b\n\té$", ["", " When", "supercalifragilistic"]
    assert labels_of([*text.encode()], text, coders.Bytes()) == ["a", "␣", "b", "↵", "⇥", r"\xc3", r"\xa9", "$"]
    coder = SimpleNamespace(decode=lambda ids: words[ids[0]], lengths=np.array([0, 6, 20]))
    assert labels_of([1, 2], "Whensupercalifragilistic", coder) == ["␣When", "supercalifrag…"]
    assert labels_of([3, 64], "", coders.Numbers()) == ["3", "64"]


@pytest.mark.parametrize("attn", RECIPES)
def test_maps_of_every_recipe_are_its_weights(attn, tmp_path):
    gpt = GPT(tiny_config(attn=attn, n_layer=2, vocab_size=257)).eval()
    text, differential = "fox jumps", attn.startswith(("diff", "tda"))
    run = SimpleNamespace(model=gpt, machine=Machine("cpu", "float32"), tokenizer=coders.Bytes())
    found, said = maps.command(Maps(text=text, layers="1", heads="0", views=differential), run)

    def look(module, q, k, v, x, table):
        views = module.views_of(q, k, x, table) if differential else ()
        return [w[0, 0] for w in (*views, module.weights_of(q, k, x, table))]

    _, whole = in_every_layer(look, gpt, torch.tensor([list(text.encode())]))
    assert [m["kind"] for m in found["maps"]] == (["view a", "view b", "difference"] if differential else ["weights"])
    close([torch.tensor(m["weights"]) for m in found["maps"]], whole)   # six digits are shown
    extra, ahead = gpt.transformer.h[0].attn.has_extra_key, gpt.ahead
    assert found["queries"] == ["(sink token)"] * ahead + list("fox␣jumps")
    assert found["keys"] == ["(extra key)"] * extra + found["queries"] and found["first"] == extra + ahead
    assert "first token, all rows" in said and ("extra key, all rows" in said) == extra
    if attn in ("kv_bias", "diff_rela"):        # pictures with an extra key and with signed views
        maps.draw(tmp_path / "x.png", {"run": found})


SENTENCE = "</script> brown"                    # it cannot end the page's data
NEAR = 1e-3                                     # three digits of numbers, and 11 bits of weights


@pytest.fixture(scope="module")
def page(tmp_path_factory, data):
    """The page of a run under three recipes, and the numbers of --json."""
    out = tmp_path_factory.mktemp("softmax_run")
    train_here(f"--dataset={data}", f"--out_dir={out}", "--attn=softmax", "--n_layer=3")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        eval_script.main(["maps", f"--out_dir={out}", "--attn=softmax,softmax1,elastic", f"--text={SENTENCE}",
                          "--device=cpu", f"--html={out / 'maps.html'}", "--cost", "--json"])
    return out / "maps.html", list(json.loads(printed.getvalue()).values())


def summary(w, first):
    """Sum, entropy, weight outside and on the first token of a row, in float64."""
    w, outside = np.array(w)[first:], np.array(w)[:first].sum()
    p = np.abs(w) / (np.abs(w).sum() or 1)
    return w.sum(), -(p[p > 0] * np.log(p[p > 0])).sum(), outside, w[0]


def test_rows_have_the_weights_of_json_in_every_tab(page, browser):
    def near(values):
        return [pytest.approx(value, abs=NEAR) for value in values]

    path, runs = page
    browser.open(path)
    assert browser.run("return page.runs[0].queries.join('')") == SENTENCE.replace(" ", "␣")
    for name, seen in runs[0]["measures"].items():                      # every head's measure, in a grid
        for hide, values in enumerate((seen, runs[0]["hidden_measures"].get(name, seen))):
            browser.run("set({ measure: arguments[0], hide: arguments[1] })", name, hide)
            assert [float(cell.split()[-1]) for cell in browser.names("gridcell")] == near(sum(values, []))
            assert name == "cost" or not hide or browser.text("#meaning").endswith("with the first key hidden")
    tabs = [name.split("--attn=")[1] for name in browser.names("tab")]
    assert tabs == ["softmax", "softmax1", "elastic"]
    for number, run in enumerate(runs):
        browser.press(str(number + 1))
        about = browser.text("#about")
        assert about.startswith(f"--attn={tabs[number]};") and ("trained with softmax" in about) == (number > 0)
        for found in run["maps"][1::2]:         # head 1 of every layer
            for row in (0, 4, len(SENTENCE) - 1):
                for hide, kind in enumerate(("weights", "hidden")):
                    browser.run("set(arguments[0])", {"layer": found["layer"], "head": 1, "row": row, "hide": hide})
                    shown = re.findall(r"-?\d+\.\d+", browser.text("#row").partition("(")[0])
                    assert [float(number) for number in shown] == near(summary(found[kind][row], run["first"]))
                    titles = browser.run("return [...document.querySelectorAll('#text button')].map(b => +b.title)")
                    assert titles == near(found[kind][row])
    assert browser.errors() == []


def test_hidden_weights_are_those_of_a_row_without_the_first_key(page):
    for run in page[1][:2]:                     # softmax, and softmax1, whose extra key gets a part of the weight
        for found in run["maps"]:
            w, hidden, first = torch.tensor(found["weights"]), torch.tensor(found["hidden"]), run["first"]
            assert (hidden[1:, first] == 0).all() and (hidden[0] == w[0]).all()
            w[1:, first] = 0
            close(hidden, w / w.sum(1, keepdim=True), dtype=torch.float32)
            measured = {name: layers[found["layer"]][found["head"]] for name, layers in run["hidden_measures"].items()}
            T, entropies = len(hidden), [summary(row.numpy(), first)[1] for row in hidden]
            assert measured["sparsity"] == 0
            assert measured["sink"] == pytest.approx(hidden[0, first].item() / T, abs=1e-5)
            assert measured["entropy"] == pytest.approx(sum(entropies) / T, abs=1e-5)


def test_keys_and_pointer_choose_heads_and_rows(page, browser):
    path, runs = page
    browser.open(path)
    browser.click("[aria-label^='layer 1, head 1']")
    browser.press("down", "left", "down")                               # the last layer is 2
    assert browser.text("#title") == "layer 2, head 0"
    browser.press("shift+up")
    assert browser.text("#row").startswith("row 13, “w”")
    browser.point("#text button:nth-of-type(5)")
    assert browser.text("#row").startswith("row 4, “r”")
    browser.point("#map :nth-child(8) > :nth-child(4)")                 # below and right of the labels: row 6, key 2
    assert float(browser.text("#at").split()[-1]) == pytest.approx(runs[0]["maps"][4]["weights"][6][2], abs=NEAR)
    assert browser.errors() == []


@pytest.mark.parametrize("width", (420, 800, 1400))
def test_cells_can_be_hit_and_norms_are_beside_the_map_on_a_wide_screen(width, page, browser):
    browser.open(page[0], width=width, height=800)
    sizes = browser.run("return [...document.querySelectorAll('[role=gridcell]')].flatMap(cell => ["
                        "cell.offsetWidth, cell.offsetHeight])")
    assert min(sizes) >= 24 and browser.run("return document.documentElement.scrollWidth") == width
    map_end, norms = browser.run("return ['map', 'stream'].map(id => document.getElementById(id)).map("
                                 "(part, i) => part.getBoundingClientRect()[i ? 'top' : 'bottom'])")
    assert (norms < map_end) == (width == 1400) and browser.errors() == []


def test_only_an_exact_zero_is_packed_as_zero():
    data = zlib.decompress(base64.b64decode(packed([0, 1e-12, 1, -1, -1e-12], 7)))
    high, low = np.frombuffer(data, np.uint8).reshape(2, -1).astype(int)
    assert (high * 256 + low).tolist() == [0, 1, 7, 15, 9]
