"""The pages of `maps --html` and `curve --html`, in a real browser: what they show, and what a visitor can do."""
import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch
from bounds import close
from conftest import train_here

import eval as eval_script
from evals.maps_page import packed

SENTENCE = "the quick brown"


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory, data):
    out = tmp_path_factory.mktemp("softmax_run")
    train_here(f"--dataset={data}", f"--out_dir={out}", "--attn=softmax", "--n_layer=3")
    return out


@pytest.fixture(scope="module")
def maps(softmax_run, tmp_path_factory):
    """The page of a run under three recipes, and the numbers of --json."""
    path = tmp_path_factory.mktemp("page") / "maps.html"
    mp = pytest.MonkeyPatch()
    printed = []
    mp.setattr("builtins.print", lambda *text, file=None: printed.extend(text if file is None else ()))
    eval_script.main(["maps", f"--out_dir={softmax_run}", "--attn=softmax,softmax1,elastic", f"--text={SENTENCE}",
                      "--device=cpu", f"--html={path}", "--cost", "--json"])
    mp.undo()
    return path, list(json.loads(printed[-1]).values())


def summary(w, first):
    """Sum, entropy, weight outside and on the first token of a row, in float64."""
    w, outside = np.array(w)[first:], np.array(w)[:first].sum()
    p = np.abs(w) / (np.abs(w).sum() or 1)
    return w.sum(), -(p[p > 0] * np.log(p[p > 0])).sum(), outside, w[0]


NEAR = 1e-3                                     # three digits of numbers, and 11 bits of weights


def shown(browser):
    """The numbers of the chosen row, as the page says them."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", browser.text("#row").partition("(")[0])]


def test_rows_have_the_weights_of_json_in_every_tab(maps, browser):
    path, runs = maps
    browser.open(path)
    for name, values in runs[0]["measures"].items():                    # every head's measure, in a grid
        browser.run("setMeasure(arguments[0])", name)
        found = [float(cell.split()[-1]) for cell in browser.names("gridcell")]
        assert found == [pytest.approx(value, abs=5.1e-4) for layer in values for value in layer]
    tabs = [name.split("--attn=")[1] for name in browser.names("tab")]
    assert tabs == ["softmax", "softmax1", "elastic"]
    for number, run in enumerate(runs):
        browser.press(str(number + 1))
        assert browser.text("#about").startswith(f"--attn={tabs[number]};")
        assert ("trained with softmax" in browser.text("#about")) == (tabs[number] != "softmax")
        for found in run["maps"][1::2]:         # head 1 of every layer
            browser.run("openHead(arguments[0], arguments[1])", found["layer"], found["head"])
            for row in (0, 4, len(SENTENCE) - 1):
                browser.run("openRow(arguments[0])", row)
                for hide, kind in enumerate(("weights", "hidden")):
                    browser.run("setHidden(arguments[0])", hide)
                    assert shown(browser) == [pytest.approx(x, abs=NEAR) for x in
                                              summary(found[kind][row], run["first"])]
                    titles = browser.run("return [...document.querySelectorAll('#text button')].map(b => +b.title)")
                    assert titles == [pytest.approx(w, abs=NEAR) for w in found[kind][row]]
    assert browser.errors() == []


def test_hidden_weights_are_those_of_a_row_without_the_first_key(maps):
    """Softmax over the other keys; elastic with the same threshold, since a hidden key counts."""
    for run, rule in zip(maps[1][:2], ("softmax", "softmax1"), strict=True):
        for found in run["maps"]:
            w, hidden, first = np.array(found["weights"]), np.array(found["hidden"]), run["first"]
            assert rule == "softmax" or (w[1:, 0] < hidden[1:, 0]).all()        # the extra key gets a part
            assert (hidden[1:, first] == 0).all() and (hidden[0] == w[0]).all()
            rest = np.delete(w[1:], first, 1)
            close(torch.tensor(np.delete(hidden[1:], first, 1)), torch.tensor(rest / rest.sum(1, keepdims=True)),
                  dtype=torch.float32)


def test_keys_and_pointer_choose_heads_rows_and_tabs(maps, browser):
    path, runs = maps
    browser.open(path)
    browser.click("[data-layer='1'][data-head='1']")
    browser.press("down", "left", "down")                               # the last layer is 2
    assert browser.text("#title") == "layer 2, head 0"
    before = browser.text("#row")
    browser.press("shift+up")
    assert before.startswith("row 14") and browser.text("#row").startswith("row 13, “w”")
    browser.point("#text button:nth-of-type(5)")
    assert browser.text("#row").startswith("row 4, “q”")
    box = browser.run("const { left, top, cell } = place, c = document.getElementById('map')\n"
                      "return [left - c.clientWidth / 2, top - c.clientHeight / 2, cell]")
    browser.point("#map", box[0] + 2.5 * box[2], box[1] + 6.5 * box[2])         # row 6, key 2
    assert float(browser.text("#at").split()[-1]) == pytest.approx(runs[0]["maps"][4]["weights"][6][2], abs=NEAR)
    browser.click("#map")                       # the middle: row 7. A click keeps its row, the next click lets it go
    browser.point("#text button:nth-of-type(5)")
    assert browser.text("#row").startswith("row 7 (kept)")
    browser.press("h")
    assert "with the first key" in browser.text("#row") and browser.run("return hide.value") == "1"
    browser.click("#tabs :nth-child(3)")
    browser.press("right", "right")
    assert browser.run("return state.run") == 1 and browser.errors() == []


def test_only_an_exact_zero_is_packed_as_zero():
    data = zlib.decompress(base64.b64decode(packed([0, 1e-12, 1, -1, -1e-12], 7)))
    high, low = np.frombuffer(data, np.uint8).reshape(2, -1).astype(int)
    assert (high * 256 + low).tolist() == [0, 1, 7, 15, 9]


@pytest.mark.exhaustive
def test_a_label_cannot_end_the_data(softmax_run, tmp_path, browser, capsys):
    path = tmp_path / "x.html"
    eval_script.main(["maps", f"--out_dir={softmax_run}", "--text=</script><b>", "--device=cpu", f"--html={path}"])
    browser.open(path)
    assert browser.run("return page.runs[0].queries.join('')") == "</script><b>" and browser.errors() == []
    assert f"open {path} in a browser" in capsys.readouterr().out
