"""eval.py maps: the attention weights of a sentence, with readable labels, as a table and as a page
in a browser."""

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
from browser import on_page
from conftest import ROOT, tiny_config, train_here
from layers import in_every_layer

import eval as eval_script
from common.machine import Machine
from data import coders
from evals import maps
from evals.maps import Maps, labels_of, packed
from evals.stream import entering_the_score
from model import GPT


def test_labels_show_spaces_newlines_and_bytes():
    """Long labels are shortened. A tokenizer that adds a space decodes each token alone."""
    text, words = "a b\n\té$", " supercalifragilistic"
    assert labels_of([*text.encode()], text, coders.Bytes()) == [
        "a",
        "␣",
        "b",
        "↵",
        "⇥",
        r"\xc3",
        r"\xa9",
        "$",
    ]
    coder = SimpleNamespace(decode=lambda ids: words, lengths=np.array([21]))
    assert labels_of([0], words.strip(), coder) == ["␣supercalifra…"]
    assert labels_of([3, 64], "", coders.Numbers()) == ["3", "64"]


@pytest.mark.parametrize(
    "attn", ["softmax", "kv_bias", "sink_token", "diff_rela", "tda", "focus", "gated_deltanet"]
)
def test_maps_of_every_recipe_are_its_weights(attn, tmp_path):
    gpt = GPT(tiny_config(attn=attn, n_layer=2, vocab_size=257)).eval()
    text, differential = "fox jumps", attn.startswith(("diff", "tda"))
    run = SimpleNamespace(model=gpt, machine=Machine("cpu", "float32"), tokenizer=coders.Bytes())
    found, said = maps.command(Maps(text=text, layers="1", heads="0", views=differential), run)

    def look(module, q, k, v, x, table):
        views = module.views_of(q, k, x, table) if differential else ()
        return [w[0, 0] for w in (*views, module.weights_of(q, k, x, table))]

    _, whole = in_every_layer(look, gpt, torch.tensor([list(text.encode())]))
    assert [m["kind"] for m in found["maps"]] == (
        ["view a", "view b", "difference"] if differential else ["weights"]
    )
    close([torch.tensor(m["weights"]) for m in found["maps"]], whole)  # six digits are shown
    extra, ahead = gpt.transformer.h[0].attn.has_extra_key, gpt.sink_tokens
    assert found["queries"] == ["(sink token)"] * ahead + list("fox␣jumps")
    assert found["keys"] == ["(extra key)"] * extra + found["queries"]
    assert found["first"] == extra + ahead
    assert "sink" in said.split() and ("extra" in said.split()) == bool(extra or ahead)
    if attn in ("kv_bias", "diff_rela"):  # pictures with an extra key and with signed views
        maps.draw(tmp_path / "x.png", {"run": found})


@pytest.mark.parametrize(
    ("attn", "choices"),
    [
        ("softmax", {"qk_norm": "l2"}),
        ("kv_bias", {}),
        ("sink_token", {}),
        ("diff2", {}),
        ("linear", {}),
        ("mamba2", {}),  # its heads share q and k
        ("streaming", {"window": 3, "first": 2}),  # its q differs for the first keys
    ],
)
def test_products_and_cosines_are_those_that_enter_the_score_of_the_first_view(attn, choices):
    gpt = GPT(tiny_config(attn=attn, n_layer=2, n_head=2, vocab_size=257, **choices)).eval()
    run = SimpleNamespace(model=gpt, machine=Machine("cpu", "float32"), tokenizer=coders.Bytes())

    def look(module, q, k, *_):
        view = module.score_heads // module.heads  # of head 1
        recent = module.featured(q)[..., : module.width]
        return [y[0, view] for y in (*entering_the_score(module, q, k), recent)]

    _, (q, k, recent) = in_every_layer(look, gpt, torch.tensor([list(b"fox jumps")]))
    qk = torch.where(torch.arange(len(k)) < gpt.config.first, q @ k.mT, recent @ k.mT)
    of_both = q.norm(dim=-1)[:, None] * k.norm(dim=-1)
    cosines = torch.cosine_similarity(k[:, None], k[None], dim=-1)
    for of, expected in {"qk": qk, "cos_qk": qk / of_both, "cos_kk": cosines}.items():
        found, said = maps.command(Maps(text="fox jumps", layers="1", heads="1", of=of), run)
        assert [m["kind"] for m in found["maps"]] == [of] and "farthest from 0" in said
        assert found["keys"] == found["queries"]  # no column of an extra key
        close(torch.tensor(found["maps"][0]["weights"]), expected.tril(), terms=16)


SENTENCE = "</script> brown"  # it cannot end the page's data


@pytest.fixture(scope="module")
def page(tmp_path_factory, data):
    """The page of a run under three recipes, and the numbers of --json."""
    out = tmp_path_factory.mktemp("softmax_run")
    train_here(f"--dataset={data}", f"--out_dir={out}", "--attn=softmax", "--n_layer=3")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        eval_script.main(
            [
                "maps",
                f"--out_dir={out}",
                "--attn=softmax,softmax1,elastic",
                f"--text={SENTENCE}",
                "--device=cpu",
                f"--html={out / 'maps.html'}",
                "--cost",
                "--json",
            ]
        )
    return out / "maps.html", list(json.loads(printed.getvalue()).values())


def summary(w, first):
    """Sum, entropy, weight outside and on the first token of a row, in float64."""
    w, outside = np.array(w)[first:], np.array(w)[:first].sum()
    p = np.abs(w) / (np.abs(w).sum() or 1)
    return w.sum(), -(p[p > 0] * np.log(p[p > 0])).sum(), outside, w[0]


def test_the_page_has_the_numbers_of_json(page):
    """Weights and norms of values, of every head in every tab, and what the page says of heads and
    of rows."""
    path, runs = page
    tabs, cells, rows = on_page(
        path,
        """
        await ready
        const tabs = page.runs.map(run => [run.queries, run.weights, run.value_norms])
        const cells = Object.keys(page.runs[0].measures).map(measure => [0, 1].map(hide => {
          set({ measure, hide })
          const cells = [...document.querySelectorAll("[role=gridcell]")]
          return cells.map(cell => +cell.ariaLabel.split(" ").at(-1))
        }))
        const rows = page.runs.map((_, run) => [0, 4, 14].map(row => {
          set({ run, layer: 2, head: 1, row, hide: 0 })
          return $("row").textContent
        }))
        return [tabs, cells, rows]""",
    )
    for (queries, weights, norms), said, run in zip(tabs, rows, runs, strict=True):
        L, H, T = np.shape(norms)
        assert "".join(queries) == SENTENCE.replace(" ", "␣")
        # the square root is stored in steps of 1 / 32767, so a share of the largest weight is off
        # by less
        expected = [[found[kind] for found in run["maps"]] for kind in ("weights", "hidden")]
        np.testing.assert_allclose(
            np.reshape(weights, (2, L * H, T, -1)), expected, rtol=0, atol=1 / 32767
        )
        np.testing.assert_allclose(
            norms, run["value_norms"], rtol=0, atol=np.max(run["value_norms"]) / 32767
        )
        for text, row in zip(said, (0, 4, 14), strict=True):
            shown = [float(number) for number in re.findall(r"\d+\.\d+", text)]
            weights_of_row = run["maps"][2 * H + 1]["weights"][row]
            assert shown == pytest.approx(summary(weights_of_row, run["first"]), abs=2e-3)
    for (name, seen), shown in zip(runs[0]["measures"].items(), cells, strict=True):
        hidden = runs[0]["hidden_measures"].get(name, seen)
        # three digits
        np.testing.assert_allclose(shown, [sum(seen, []), sum(hidden, [])], rtol=0, atol=6e-4)


def test_hidden_weights_are_those_of_a_row_without_the_first_key(page):
    for run in page[1][:2]:  # softmax, and softmax1, whose extra key gets a part of the weight
        for found in run["maps"]:
            w = torch.tensor(found["weights"])
            hidden = torch.tensor(found["hidden"])
            first = run["first"]
            w[1:, first] = 0
            close(hidden, w / w.sum(1, keepdim=True), dtype=torch.float32)
            measured = {
                name: layers[found["layer"]][found["head"]]
                for name, layers in run["hidden_measures"].items()
            }
            entropy = np.mean([summary(row, first)[1] for row in hidden.numpy()])
            expected = [0, hidden[0, first].item() / len(hidden), entropy]
            for name, value in zip(("sparsity", "sink", "entropy"), expected, strict=True):
                assert measured[name] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("width", (400, 1600))
def test_keys_and_pointer_choose_heads_and_rows(width, page):
    path, runs = page
    title, row, at, cell, wide = on_page(
        path,
        """
        await ready
        const press = (key, shiftKey) => document.body.dispatchEvent(
          new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }))
        document.querySelector("[aria-label^='layer 1, head 1']").click()
        press("ArrowDown"), press("ArrowLeft"), press("ArrowDown")      // the last layer is 2
        press("ArrowUp", true)
        const row = $("row").textContent
        const place = $("map").children[7].children[3]            // row 6, key 2, after labels
        place.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }))
        const { offsetWidth, offsetHeight } = document.querySelector("[role=gridcell]")
        return [$("title").textContent, row, $("at").textContent,
                Math.min(offsetWidth, offsetHeight), document.documentElement.scrollWidth]""",
        width,
    )
    assert title == "layer 2, head 0" and row.startswith("row 13, “w”")
    assert cell >= 24 and wide == width
    assert float(at.split()[-1]) == pytest.approx(runs[0]["maps"][4]["weights"][6][2], abs=1e-4)


def test_the_page_in_docs_is_the_present_one_and_its_links_lead_somewhere():
    paths = "evals/heads.html", "docs/sinks.html"
    template, text = ((ROOT / path).read_text(encoding="utf-8") for path in paths)
    before, after = template.split("DATA", 1)
    assert text.startswith(before) and text.endswith(after) and '"docs":"."' in text
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r'data-page="(.*?)"', text))


def test_only_an_exact_zero_is_packed_as_zero():
    most, text = packed([0, 1e-12, 2, -2, -1e-12])
    codes = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i2")
    assert most == 2 and codes.tolist() == [0, 1, 32767, -32767, -1]
