"""eval.py routers: every form of a Focus run compared with full attention, and sweeps over its
knobs."""

import pytest
import torch
from bounds import close, same
from conftest import meta, tiny_config, train_here

from evals import routers
from model import GPT


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    """A run of plain attention."""
    out = tmp_path_factory.mktemp("routers") / "base"
    train_here(f"--dataset={data}", f"--out_dir={out}")
    return out


def test_every_form_is_measured_at_every_length(base, data, evaluate, tmp_path):
    train_here(
        f"--dataset={data}",
        f"--out_dir={tmp_path}",
        f"--init_from={base}",
        "--attn=focus",
        "--train_only=focus",
        "--window=4",
        "--max_iters=3",
        "--eval_iters=1",
        "--batch_size=2",
        "--device=cpu",
    )
    found = evaluate(
        "routers",
        f"--out_dir={tmp_path}",
        "--lengths=16,32",
        "--k=1,4",
        "--windows=3",
        "--repeats=1",
        "--rivals=window,performer",
        f"--png={tmp_path / 'forms.png'}",
    )
    for part, length in zip(found["lengths"], (16, 32), strict=True):
        forms = part["forms"]
        assert part["length"] == length
        assert list(forms) == ["full", "window", "performer", "soft", "k=1", "k=4"]
        close(forms["k=4"]["loss"], forms["full"]["loss"], terms=4, dtype=torch.float32)
        more = forms["k=1"]["loss"] - forms["full"]["loss"]
        close(forms["k=1"]["more"], more, terms=4, dtype=torch.float32)
        assert forms["k=1"]["kept"] < forms["k=4"]["kept"] == 1 == forms["full"]["speed"]
    near = f"--window={found['window']}"
    for form, *flags in (
        ("k=1", f"--out_dir={tmp_path}", "--topk=1"),
        ("full", f"--out_dir={base}"),
        ("window", f"--out_dir={base}", "--attn=window", near),
        ("performer", f"--out_dir={base}", "--attn=performer"),
    ):
        alone = evaluate("loss", *flags, "--length=32", "--windows=3")
        close(
            found["lengths"][1]["forms"][form]["loss"], alone["loss"], terms=4, dtype=torch.float32
        )
    assert (tmp_path / "forms.png").exists()


def test_what_a_form_adds_to_the_weights_is_printed(capsys):
    routers.in_form(GPT(tiny_config()), sink="logit")
    assert "not in the run, so at their initial values: sink_logit" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_sweep_trains_missing_routers_on_the_base(
    base, trainings, evaluate, tmp_path, monkeypatch
):
    monkeypatch.setitem(routers.SWEEPS, "groups", ("3", "8"))
    flags = (
        f"--out_dir={base}",
        "--sweep=groups",
        "--steps=2",
        "--finetune=1",
        "--windows=3",
        "--repeats=1",
        "--train_args=--batch_size=2 --eval_iters=1",
        f"--png={tmp_path / 'sweep.png'}",
    )
    three, eight = found = evaluate("routers", *flags)["sweep"]["groups"]
    assert eight["parameters"] - three["parameters"] == 5 * 16  # five centroids more
    same(three["full"], eight["full"])  # the base is not trained
    made = meta(base.with_name("base-focus-groups-3"))
    assert 0 < three["dominance"] <= 1 and made["knobs"]["balance"] == "sinkhorn"
    # all weights are trained from the router on, in another folder
    tuned = meta(base.with_name("base-focus-groups-3-all"))["knobs"]
    assert tuned["train_only"] == "all" and tuned["init_from"] != made["knobs"]["init_from"]
    assert three["tuned_soft"] != three["soft"] and tuned["attn"] == "focus"
    # all exist
    assert evaluate("routers", *flags)["sweep"]["groups"] == found and len(trainings) == 4
    assert (tmp_path / "sweep.png").exists()
