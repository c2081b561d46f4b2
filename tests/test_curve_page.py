"""The page of `curve --html`, in a real browser: its weights are those of the rules."""
import math
import re

import pytest
import torch
from conftest import by_default

import attention
import eval as eval_script
import mixers
from evals import curve_page
from model import GPTConfig

NEAR = 1e-3                                     # what the page promises


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "rules.html"
    eval_script.main(["curve", f"--html={path}"])
    return path


@pytest.fixture
def opened(page, browser):
    browser.open(page)
    return browser


RULES = ["softmax", "sink", *(name for name in attention.RULES if name != "softmax")]
SCORES = {"even": [0.7] * 12, "one peak": [4.0] + [-1.0] * 9, "two keys": [-6.0, 6.0], "low": [-3.5, -3.0, -2.5, -5.0],
          "noise": [3 * math.sin(5 * i) for i in range(64)]}


def rule_weights(name, s, args=""):
    """The weights of one row of scores by the rule's definition, in float64."""
    config = GPTConfig(n_head=1, n_embd=64, block_size=64, attn=name, kernel="torch", attn_args=args)
    layer, s = attention.Attention(config, 0).double(), torch.tensor(s, dtype=torch.float64)
    n = torch.tensor([float(len(s))], dtype=torch.float64)
    t = layer.rule.row_input(layer, n) if layer.rule.row_input else None
    seen = torch.ones(len(s), dtype=torch.bool)
    with torch.no_grad():
        return layer.rule.weights(s, seen, t if t is None else t.flatten()).tolist()


def on_page(browser, rule, scores, **constants):
    """The page's weights of a rule, and outside the sequence."""
    found = browser.run("const [name, scores, constants] = arguments, i = page.rules.findIndex(r => r.name === name)\n"
                        "return weightsOf(page.rules[i].program, scores, {...state.constants[i], ...constants})",
                        rule, scores, constants)
    return found["weights"], found["outside"]


CASES = [by_default(rule in ("softmax", "elastic"), rule, "", {}) for rule in RULES] + [
    by_default(False, *case) for case in (
        ("elastic", "tau_init=0.3", {"tau": 0.3}), ("elastic", "tau_init=-0.5", {"tau": -0.5}),
        ("entmax", "alpha=1.2", {"alpha": 1.2}), ("entmax", "alpha=2", {"alpha": 2.0}),
        ("lssar", "power=3", {"power": 3.0}), ("tra", "beta_init=2", {"beta": 2.0}), ("tra", "kappa=4", {"kappa": 4.0}),
        ("tra", "power=1", {"power": 1.0}), ("sigmoid", "length_bias=0", {"t": 0.0}))]


@pytest.mark.parametrize("rule, args, constants", CASES, ids=str)
def test_weights_are_those_of_the_rule(rule, args, constants, opened):
    for scores in SCORES.values():
        found, outside = on_page(opened, rule, scores, **constants)
        expected = rule_weights(rule, scores, args)
        if rule == "sink":                      # an extra key of score 0
            total = sum(math.exp(s) for s in scores) + 1
            expected = [math.exp(s) / total for s in scores]
            assert outside == pytest.approx(1 / total, abs=NEAR)
        assert found == [pytest.approx(w, abs=NEAR) for w in expected]
        # zeros are exact, but a weight within rounding of 0 may be 0 in one of the two
        assert all((a == 0) == (b == 0) or max(abs(a), abs(b)) < 1e-12 for a, b in zip(found, expected, strict=True))


def test_presets_keys_bars_and_sliders(opened):
    """What a visitor does changes the numbers that the page says of a rule."""
    def said(rule):
        text = opened.text(f"article[aria-label={rule}] .numbers")
        return {name: float(number) for name, number in re.findall(r"(\w+) (-?[\d.]+)", text)}

    opened.click("#presets :first-child")       # even scores
    assert opened.run("return state.scores") == [0] * 24 and said("elastic")["sum"] == 0 and said("softmax")["sum"] == 1
    opened.run("setScores(arguments[0])", [2.0, 0.5, 0.0, -1.0])
    p = torch.tensor([2.0, 0.5, 0.0, -1.0]).double().softmax(0)
    assert said("softmax") == {"sum": 1, "zeros": 0, "entropy": pytest.approx(-(p * p.log()).sum().item(), abs=NEAR),
                               "largest": pytest.approx(p.max().item(), abs=NEAR)}
    opened.run("document.querySelector('[data-key=\"3\"]').focus()")
    opened.press("up", "up", "down")
    assert opened.run("return state.scores[3]") == pytest.approx(-0.8)
    opened.run("document.querySelector('[data-constant=tau]').focus()")
    opened.press("home")                        # τ = -1: nothing is cut off
    assert said("elastic")["sum"] == pytest.approx(2, abs=NEAR) and opened.errors() == []


@pytest.mark.exhaustive
def test_the_page_fits_a_narrow_window(page, browser):
    browser.open(page, 400, 800)
    assert browser.run("return document.documentElement.scrollWidth") <= 400


def test_every_rule_has_a_program_of_known_operations(page):
    """Also where there is no browser: an operation that the page lacks is seen here."""
    known = re.findall(r"(\w+):", page.read_text(encoding="utf-8").split("OPERATIONS = {")[1].split("\n}\n")[0])
    rules = curve_page.rules_for_page()
    assert [rule["name"] for rule in rules] == RULES
    assert {step[0] for rule in rules for step in rule["program"]["steps"]} <= set(known)


def test_a_new_rule_with_a_learned_scalar_has_a_slider(monkeypatch):
    """The page knows nothing of this rule: its scalar gets a slider around its initial value."""
    rule = attention.Rule(
        learns=lambda layer: {"gamma": torch.full((layer.heads,), 2.0)}, statistic=attention.row_sum,
        row_input=lambda layer, n: layer.gamma[:, None, None] / n[:, None],
        weights=lambda s, seen, t: (s * t).relu().masked_fill(~seen, 0.0))
    monkeypatch.setitem(attention.RULES, "sharp", rule)
    monkeypatch.setitem(mixers.AXES["rule"], "sharp", rule)
    sharp = curve_page.recorded("sharp")
    assert sharp["constants"] == [{"name": "gamma", "start": 2.0, "least": -2, "most": 6, "step": 0.1,
                                   "about": "learned"}]
    assert "gamma" in sharp["program"]["inputs"]
