"""eval.py curve: the weights of one row are those of the recipe's formula, also in
docs/rules.html."""

import dataclasses
import json
import math
import random
import re
import shutil
import subprocess

import bounds
import pytest
import torch
from bounds import close
from browser import on_page
from conftest import ROOT

import attention
import eval as eval_script
from model import GPTConfig

PAGE = ROOT / "docs/rules.html"
SHOWN = [name for name in attention.ATTENTIONS if name in (*attention.RULES, "sink", "tda")]


def test_a_row_has_its_extra_key_view_and_zeros_and_every_recipe_without_a_mixer_is_drawn(
    tmp_path, capsys
):
    eval_script.main(["curve", "softmax1,tda,elastic", "--keys=9", "--spread=3", "--json"])
    found = json.loads(capsys.readouterr().out)
    s, (row, tda, cut) = torch.tensor(found["scores"]).double(), found["recipes"].values()
    close(s, torch.linspace(-3, 3, 9).double())
    close(torch.tensor(row["weights"]), s.exp() / (1 + s.exp().sum()), terms=9)
    close(row["on_keys"] + row["extra"], 1, terms=9, dtype=torch.float32)
    first_view = (s / 3 - math.sqrt(2 * math.log(9) / 64)).clamp(min=0) ** 2  # of cosines
    close(torch.tensor(tda["weights"]), first_view, terms=64)
    assert (row["view"], tda["view"]) == (None, "first")
    close(cut["sparsity"], cut["weights"].count(0) / 9)
    eval_script.main(["curve", "all", f"--png={tmp_path / 'curve.png'}"])
    said = capsys.readouterr().out.replace(",", "").split()
    assert all(name in said for name, axes in attention.ATTENTIONS.items() if "mixer" not in axes)
    assert (tmp_path / "curve.png").exists()


def in_node(expression):
    """The value of a JavaScript expression that may use the rules of docs/rules.html."""
    node = shutil.which("node") or pytest.skip("needs node: apt-get install nodejs")
    script = re.search(
        r'<script id="rules">(.*?)</script>', PAGE.read_text(encoding="utf-8"), re.S
    )[1]
    script += f"\nconsole.log(JSON.stringify({expression}))"
    found = subprocess.run(
        [node, "-"], input=script, stdout=subprocess.PIPE, encoding="utf-8", check=True
    )
    return json.loads(found.stdout)


def recipe_weights(name, s, given):
    """The weights that a recipe gives to scores s (T,), and after them that of an extra key. given:
    {slider: value} for learned scalars, --attn_args, the row input t, and a second view."""
    if "mix" in given:
        constants = {key: given[key] for key in ("beta", "kappa", "power")}
        first, second = (recipe_weights("tra", c * s, constants) for c in (1, given["second"]))
        return first - given["mix"] * second
    rule = attention.RULES[attention.recipe(name)["rule"]]
    args = ",".join(f"{key}={value}" for key, value in given.items() if key in rule.args)
    layer = attention.Attention(
        GPTConfig(n_head=1, n_embd=64, block_size=64, attn=name, kernel="torch", attn_args=args), 0
    ).double()
    learned = {key: s.new_tensor([value]) for key, value in given.items() if hasattr(layer, key)}
    layer.load_state_dict(learned, strict=False)
    if "t" in given:
        t = s.new_tensor(given["t"])
        layer.rule = dataclasses.replace(layer.rule, row_input=lambda layer, n: t)
    q, k = s.new_zeros(1, 1, 1, 64), s.new_zeros(1, 1, len(s), 64)
    q[..., 0] = 8  # keys have length 6: a score is six times a cosine
    k[..., 0], k[..., 1] = s, (36 - s**2).sqrt()
    w = layer.weights_of(q, k, s.new_zeros(1, 1, 64)).flatten()
    return w.roll(-1) if layer.has_extra_key else w


@pytest.mark.parametrize("name", SHOWN)
@torch.no_grad()
def test_each_rule_of_the_page_computes_the_weights_of_its_recipe(name):
    """At the sliders' start and at two other places of each."""
    dice = random.Random(bounds.SEED)
    sliders = in_node(f"RULES.{name}.sliders ?? {{}}")
    drawn = [
        [dice.uniform(-most, most) for _ in range(n)] for n, most in ((5, 0.1), (24, 3), (64, 6))
    ]
    cases = []
    for scores in ([0.7] * 12, [4.0] + [-1.0] * 9, [-6.0, 6.0], [-3.5, -3, -2.5, -5], *drawn):
        cases.append((scores, {key: start for key, (start, *_) in sliders.items()}))
        for _ in range(2):
            given = {key: dice.uniform(*ends) for key, (_, *ends, _, _, _) in sliders.items()}
            cases.append((scores, given))
    found = in_node(f"{json.dumps(cases)}.map(([s, given]) => RULES.{name}.weights(s, given))")
    for (scores, given), w in zip(cases, found, strict=True):
        w, s = (torch.tensor(values, dtype=torch.float64) for values in (w, scores))
        expected = recipe_weights(name, s, given)
        # lssar's factor log(d) is stored in float32
        dtype = torch.float32 if name == "lssar" else torch.float64
        close(w, expected, size=expected.abs().max().clamp(min=1), dtype=dtype)
        # zeros are exact, but a weight within rounding of 0 may be 0 in one of the two
        assert (((w == 0) == (expected == 0)) | (w.abs().maximum(expected.abs()) < 1e-12)).all()


def test_the_page_has_every_rule_and_its_links_lead_somewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^  (\w+): \{\n    weights:", text, re.M) == SHOWN
    assert all((PAGE.parent / link).exists() for link in re.findall(r'href="([^":$]+)"', text))


@pytest.mark.parametrize("width", (400, 1600))
def test_keys_bars_and_sliders_change_the_numbers(width):
    """What a visitor does changes the numbers that the page says of a rule."""
    said, scores, wide = on_page(
        PAGE,
        """
        setKeys(4, "even")
        const bars = $("scores").getBoundingClientRect()
        const above = { buttons: 1, clientX: bars.left + 1, clientY: bars.top - 9 }
        $("scores").dispatchEvent(new PointerEvent("pointermove", above))
        for (const key of ["ArrowUp", "ArrowUp", "ArrowDown"]) {
          const down = new KeyboardEvent("keydown", { key, bubbles: true })
          $("scores").children[1].dispatchEvent(down)
        }
        const slider = document.querySelector("[aria-label='elastic tau']")
        slider.value = -1                       // nothing is cut off
        slider.dispatchEvent(new Event("input"))
        const said = document.querySelectorAll("#rule-softmax .numbers, #rule-elastic .numbers")
        const wide = document.documentElement.scrollWidth
        return [[...said].map(text => text.textContent), state.scores, wide]
        """,
        width,
    )
    assert scores == [6, pytest.approx(0.2), 0, 0] and wide == width
    p = torch.tensor(scores, dtype=torch.float64).softmax(0)
    assert said[0].startswith(f"sum 1.000, zeros 0 %, entropy {-(p * p.log()).sum():.3f}")
    assert said[1].startswith("sum 2.000, zeros 0 %")
