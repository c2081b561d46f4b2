"""eval.py curve: the weights of one row are those of the recipe's formula, also on its page in a real browser."""
import json
import math
import re

import pytest
import torch
from bounds import close
from conftest import ROOT, by_default

import attention
import eval as eval_script
from evals import curve, mathml
from model import GPTConfig

NEAR = 1e-3                                     # what the page promises
SHOWN = [name for name in attention.ATTENTIONS if name in (*attention.RULES, "sink", "tda")]
SCORES = ([0.7] * 12, [4.0] + [-1.0] * 9, [-6.0, 6.0], [-3.5, -3, -2.5, -5], [3 * math.sin(5 * i) for i in range(64)])


def test_weights_equal_the_formulas_of_the_scores_and_every_recipe_without_a_mixer_is_drawn(tmp_path, capsys):
    eval_script.main(["curve", "softmax,elastic,softmax1,tda,diff2", "--keys=9", "--spread=3", "--json"])
    found = json.loads(capsys.readouterr().out)
    s, w = torch.tensor(found["scores"]), {name: torch.tensor(row["weights"]) for name, row in found["recipes"].items()}
    close(s, torch.linspace(-3, 3, 9))
    p = s.double().softmax(0)
    close(w["softmax"], p, terms=9)
    close(w["softmax1"], s.double().exp() / (1 + s.double().exp().sum()), terms=9)
    close(w["tda"], (s.double() / 3 - math.sqrt(2 * math.log(9) / 64)).clamp(min=0) ** 2, terms=64)     # of cosines
    close(w["diff2"], p, terms=9)
    assert {name: row["view"] for name, row in found["recipes"].items()} == dict.fromkeys(w) | {
        "tda": "first", "diff2": "first"}
    row, cut = (found["recipes"][name] for name in ("softmax1", "elastic"))
    assert row["zeros"] == 0 and row["largest"] == max(row["weights"])
    close(cut["zeros"], cut["weights"].count(0) / 9)
    close(row["on_keys"] + row["extra"], 1, terms=9, dtype=torch.float32)
    eval_script.main(["curve", "all", f"--png={tmp_path / 'curve.png'}"])
    said = capsys.readouterr().out
    assert [line.split(",")[0].strip() for line in said.splitlines() if ", first view" in line] == [
        name for name, axes in attention.ATTENTIONS.items() if "diff" in axes]
    said = said.replace(",", "").split()
    assert all(name in said for name, axes in attention.ATTENTIONS.items() if "mixer" not in axes)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "rules.html"
    eval_script.main(["curve", f"--html={path}"])
    return path


def weights_on(browser, name, scores, constants):
    """What the page gives these scores: {"weights": [..], "outside": a number}."""
    return browser.run("const [name, scores, given] = arguments, i = page.rules.findIndex(r => r.name === name)\n"
                       "return weightsOf(page.rules[i].program, scores, {...state.constants[i], ...given})",
                       name, scores, constants)


@pytest.mark.parametrize("name, args, constants", [
    *(by_default(name == "softmax", name, "", {}) for name in SHOWN if name != "tda"),
    ("elastic", "tau_init=-0.5", {"tau": -0.5})], ids=str)
@torch.no_grad()
def test_weights_are_those_of_the_recipe(name, args, constants, page, browser):
    browser.open(page)
    config = GPTConfig(n_head=1, n_embd=64, block_size=64, attn=name, kernel="torch", attn_args=args)
    layer = attention.Attention(config, 0).double()
    for scores in SCORES:
        found = weights_on(browser, name, scores, constants)
        w, s = (torch.tensor(values, dtype=torch.float64) for values in (found["weights"], scores))
        n = s.new_full((1,), len(s))
        if config.qk_norm == "l2":              # cosines; lssar's are multiplied by log d log n
            s = s / 6 * (math.log(64) * math.log(len(s)) if name == "lssar" else 1)
        t = layer.rule.row_input(layer, n) if layer.rule.row_input else None
        expected = layer.rule.weights(s, s.isfinite(), t if t is None else t.flatten())
        if name == "sink":                      # an extra key of score 0
            expected, (outside,) = torch.cat([s, s.new_zeros(1)]).softmax(0).split([len(s), 1])
            assert found["outside"] == pytest.approx(outside.item(), abs=NEAR)
        expected = expected / len(s) if name == "relu" else expected
        assert w.tolist() == pytest.approx(expected.tolist(), abs=NEAR)
        # zeros are exact, but a weight within rounding of 0 may be 0 in one of the two
        assert (((w == 0) == (expected == 0)) | (w.abs().maximum(expected.abs()) < 1e-12)).all()


def test_the_second_view_of_tda_is_subtracted(page, browser):
    browser.open(page)
    scores = [6.0, 3.0, -3.0, 0.0]
    t = math.sqrt(2 * math.log(4) / 64)
    a, b = ([max(c * s / 6 - t, 0) ** 2 for s in scores] for c in (1, -0.5))
    found = weights_on(browser, "tda", scores, {"mix": 0.3, "second": -0.5})["weights"]
    assert found == pytest.approx([x - 0.3 * y for x, y in zip(a, b, strict=True)], abs=1e-6) and min(found) < 0


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_traces_what_the_layer_computes(name):
    """Without a browser: row_weights, which the page repeats, equals the layer's own path from queries and keys."""
    scores = torch.linspace(-curve.HIGH, curve.HIGH, 9)
    layer = attention.Attention(GPTConfig(n_head=1, n_embd=64, block_size=9, attn=name, kernel="torch"), 0)
    with torch.no_grad():
        w, outside = curve.row_weights(layer, scores.view(1, 1, 1, -1), torch.ones(1, 1, 1, 9, dtype=torch.bool),
                                       torch.tensor([9.0]))
    expected, extra = curve.row_of(name, scores)                        # of tda the first view
    close(w.flatten(), torch.tensor(expected, dtype=torch.float64), terms=64)
    assert outside.item() == pytest.approx(extra, abs=1e-6)


def test_keys_bars_and_sliders_change_the_numbers(page, browser):
    """What a visitor does changes the numbers that the page says of a rule."""
    def said(rule):
        text = browser.text(f"article[aria-label={rule}] .numbers")
        return {name: float(number) for name, number in re.findall(r"(\w+) (-?[\d.]+)", text)}

    browser.open(page)
    browser.run("set({ scores: arguments[0] })", [2.0, 0.5, 0.0, -1.0])
    p = torch.tensor([2.0, 0.5, 0.0, -1.0]).double().softmax(0)
    assert said("softmax")["entropy"] == pytest.approx(-(p * p.log()).sum().item(), abs=NEAR)
    browser.run("document.querySelector('#scores :nth-child(4)').focus()")
    browser.press("up", "up", "down")
    assert browser.run("return state.scores[3]") == pytest.approx(-0.8)
    browser.run("document.querySelector('[aria-label=\"elastic tau\"]').focus()")
    browser.press("home")                        # τ = -1: nothing is cut off
    assert said("elastic")["sum"] == pytest.approx(2, abs=NEAR) and browser.errors() == []


@pytest.mark.parametrize("width", (420, 800, 1400))
def test_sums_are_on_one_axis_and_a_drag_selects_no_text(width, page, browser):
    browser.open(page, width=width, height=800)
    browser.run("setKeys(24, 'even')")

    def heights(name):
        """Of the largest bar of a weight and of the bar of the sum, in pixels."""
        return browser.run("return [...document.querySelectorAll(`[aria-label=${arguments[0]}] .bars`)].map("
                           "bars => Math.max(...[...bars.children].map(bar => bar.offsetHeight)))", name)

    assert heights("softmax")[0] <= 6 and heights("softmax")[1] == heights("entmax")[1] >= 85
    assert heights("elastic")[1] <= 1           # an even row of elastic spends nothing
    assert browser.run("return document.documentElement.scrollWidth") == width
    browser.run("scrollTo(0, 2000)")
    assert browser.run("return document.elementFromPoint(30, 20).closest('#scores, #top') !== null")
    assert width > 600 or browser.run("return document.querySelector('#scores').offsetHeight") <= 80
    browser.drag("#scores", (-100, -10), (100, 30))
    assert min(browser.run("return state.scores")) < -2 and browser.run("return String(getSelection())") == ""
    assert browser.text("#said").startswith("Score of key") and browser.errors() == []


@pytest.mark.parametrize("name", ("rules", "sinks"))
def test_the_page_in_docs_is_the_present_one_and_its_links_lead_somewhere(name):
    template, text = ((ROOT / path).read_text(encoding="utf-8") for path in ("evals/page.html", f"docs/{name}.html"))
    before, after = template.split("DATA", 1)
    assert text.startswith(before) and text.endswith(after) and '"docs":"."' in text
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r'data-page="(.*?)"', text))


@pytest.mark.parametrize("text, drawn", [
    ("w_i = x^2", "<msub><mi>w</mi><mrow><mi>i</mi></mrow></msub><mo>=</mo><msup><mi>x</mi><mn>2</mn></msup>"),
    ("a = (b + 1) / sqrt(tau)", "<mi>a</mi><mo>=</mo><mfrac><mrow><mi>b</mi><mo>+</mo><mn>1</mn></mrow>"
                                "<mrow><msqrt><mrow><mi>τ</mi></mrow></msqrt></mrow></mfrac>"),
    ("the row = 1", None), ("w = (2", None), ("w = 2)", None)])
def test_formulas_become_mathematics(text, drawn):
    assert mathml.mathml(text) == (drawn and f"<math>{drawn}</math>")


def test_a_paragraph_is_formulas_and_words():
    formulas, words = mathml.explained("w_ij = relu(p_ij - t_i), with the best p_ij: a row may sum to 0.")
    assert len(formulas) == 1 and "relu" in formulas[0]
    assert words.startswith("With the best <math><msub>") and words.endswith("</math>: a row may sum to 0.")


def test_every_rule_has_a_program_of_known_operations(page):
    """Also where there is no browser: an operation that the page lacks is seen here."""
    text = page.read_text(encoding="utf-8")
    known = re.findall(r"(\w+):", text.split("OPERATIONS = {")[1].split("\n}\n")[0])
    rules = json.loads(re.search(r'application/json">(.*?)</script>', text)[1])["rules"]
    assert [rule["name"] for rule in rules] == SHOWN and all(rule["formulas"] for rule in rules)
    assert {step[0] for rule in rules for step in rule["program"]["steps"]} <= set(known)
