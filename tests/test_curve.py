"""eval.py curve: the weights of one row are those of the recipe's formula, also on its page in a real browser."""
import json
import math
import re

import pytest
import torch
from bounds import close
from conftest import by_default

import attention
import eval as eval_script
from model import GPTConfig

NEAR = 1e-3                                     # what the page promises
RULES = ["softmax", "sink", *(name for name in attention.RULES if name != "softmax")]
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
    row, cut = (found["recipes"][name] for name in ("softmax1", "elastic"))
    assert row["zeros"] == 0 and row["largest"] == max(row["weights"])
    close(cut["zeros"], cut["weights"].count(0) / 9)
    close(row["on_keys"] + row["extra"], 1, terms=9, dtype=torch.float32)
    eval_script.main(["curve", "all", f"--png={tmp_path / 'curve.png'}"])
    said = capsys.readouterr().out.split()
    assert all(name in said for name, axes in attention.ATTENTIONS.items() if "mixer" not in axes)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "rules.html"
    eval_script.main(["curve", f"--html={path}"])
    return path


@pytest.mark.parametrize("rule, args, constants", [
    *(by_default(rule == "softmax", rule, "", {}) for rule in RULES), ("elastic", "tau_init=-0.5", {"tau": -0.5})],
    ids=str)
@torch.no_grad()
def test_weights_are_those_of_the_rule(rule, args, constants, page, browser):
    browser.open(page)
    config = GPTConfig(n_head=1, n_embd=64, block_size=64, attn=rule, kernel="torch", attn_args=args)
    layer = attention.Attention(config, 0).double()
    for scores in SCORES:
        found = browser.run(
            "const [name, scores, given] = arguments, i = page.rules.findIndex(r => r.name === name)\n"
            "return weightsOf(page.rules[i].program, scores, {...state.constants[i], ...given})",
            rule, scores, constants)
        w, s = (torch.tensor(values, dtype=torch.float64) for values in (found["weights"], scores))
        t = layer.rule.row_input(layer, s.new_full((1,), len(s))) if layer.rule.row_input else None
        expected = layer.rule.weights(s, s.isfinite(), t if t is None else t.flatten())
        if rule == "sink":                      # an extra key of score 0
            expected, (outside,) = torch.cat([s, s.new_zeros(1)]).softmax(0).split([len(s), 1])
            assert found["outside"] == pytest.approx(outside.item(), abs=NEAR)
        assert w.tolist() == pytest.approx(expected.tolist(), abs=NEAR)
        # zeros are exact, but a weight within rounding of 0 may be 0 in one of the two
        assert (((w == 0) == (expected == 0)) | (w.abs().maximum(expected.abs()) < 1e-12)).all()


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


def test_every_rule_has_a_program_of_known_operations(page):
    """Also where there is no browser: an operation that the page lacks is seen here."""
    text = page.read_text(encoding="utf-8")
    known = re.findall(r"(\w+):", text.split("OPERATIONS = {")[1].split("\n}\n")[0])
    rules = json.loads(re.search(r'application/json">(.*?)</script>', text)[1])["rules"]
    assert [rule["name"] for rule in rules] == RULES
    assert {step[0] for rule in rules for step in rule["program"]["steps"]} <= set(known)
