"""eval.py routers: every form of a Focus run compared with full attention, and sweeps over its knobs."""
import json
import math
import subprocess

import pytest
import torch
from bounds import close, dice, same
from conftest import assert_says, meta, train_here

import eval as eval_script
from evals.instrument import Common, OpenedRun
from evals.routers import plain_attention, set_topk

FLAGS = ("--device=cpu", "--windows=3", "--repeats=1")


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    """A run of plain attention."""
    out = tmp_path_factory.mktemp("routers") / "base"
    train_here(f"--dataset={data}", f"--out_dir={out}")
    return out


@pytest.fixture(scope="module")
def focus_run(base, data):
    """A Focus router trained on the base."""
    out = base.with_name("focus")
    train_here(f"--dataset={data}", f"--out_dir={out}", f"--init_from={base}", "--attn=focus", "--train_only=focus",
               "--window=4", "--max_iters=3", "--eval_interval=3", "--eval_iters=1", "--batch_size=2", "--device=cpu")
    return out


def call(capsys, *flags):
    eval_script.main(["routers", *map(str, flags), *FLAGS])
    return capsys.readouterr().out


def test_full_attention_and_topk_of_all_groups_equal_the_base(focus_run, base):
    adapted, plain = (OpenedRun(Common(str(place), device="cpu"), {}).model for place in (focus_run, base))
    idx = torch.randint(257, (2, 16), generator=dice())
    with torch.no_grad():
        expected = plain(idx)[0]
        same(plain_attention(adapted, 0)(idx)[0], expected)
        close(set_topk(adapted, 4)(idx)[0], expected, terms=16)


def test_every_form_at_every_length(focus_run, base, capsys, tmp_path):
    found = json.loads(call(capsys, f"--out_dir={focus_run}", "--lengths=16,32", "--k=1,4", "--json",
                            f"--png={tmp_path / 'forms.png'}"))
    assert [part["length"] for part in found["lengths"]] == [16, 32] and found["training_length"] == 16
    for part in found["lengths"]:
        forms = part["forms"]
        assert list(forms) == ["full", "window", "soft", "k=1", "k=4"] and part["windows"] == 3
        close(forms["k=4"]["loss"], forms["full"]["loss"], terms=4, dtype=torch.float32)
        assert forms["k=4"]["kept"] == 1 and forms["k=1"]["kept"] < 1
        close(forms["k=1"]["perplexity"], math.exp(forms["k=1"]["loss"]))
        assert forms["full"]["speed"] == 1 and all(form["speed"] > 0 for form in forms.values())
    near = f"--window={OpenedRun(Common(str(focus_run), device='cpu'), {}).model.config.window}"
    for form, flags in (("k=1", [f"--out_dir={focus_run}", "--topk=1"]),
                        ("window", [f"--out_dir={base}", "--attn=window", near])):
        eval_script.main(["loss", *flags, "--length=32", "--windows=3", "--json", "--device=cpu"])
        alone = json.loads(capsys.readouterr().out)
        close(found["lengths"][1]["forms"][form]["loss"], alone["loss"], terms=4, dtype=torch.float32)
    assert (tmp_path / "forms.png").stat().st_size > 5_000


def test_a_sweep_trains_missing_routers_on_the_base(base, trainings, capsys, tmp_path):
    flags = (f"--out_dir={base}", "--sweep=groups", "--values=3,8", "--steps=2",
             "--train_args=--batch_size=2 --eval_iters=1")
    found = json.loads(call(capsys, *flags, "--json", f"--png={tmp_path / 'sweep.png'}"))
    three, eight = found["sweep"]["groups"]
    assert (three["value"], eight["value"]) == ("3", "8") and len(trainings) == 2
    assert eight["parameters"] - three["parameters"] == 5 * 16          # five centroids more
    same(three["full"], eight["full"])          # the base is not trained
    assert 0 < three["dominance"] <= 1
    made = meta(base.with_name("base-focus-groups-3"))
    assert made["knobs"]["window"] == 2 and made["knobs"]["balance"] == "sinkhorn" and made["trained"] > 0
    text = call(capsys, *flags)                 # both routers exist
    assert len(trainings) == 2 and "groups      3" in text
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


def test_an_unfinished_router_is_reported(base, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda argv, **how: subprocess.CompletedProcess(argv, 1))
    with pytest.raises(SystemExit):
        call(capsys, f"--out_dir={base}", "--sweep=window", "--values=1/4")
    assert_says("focus-window-1-4 was not finished", capsys.readouterr().err.splitlines()[-1])
