"""eval.py lab: the exact loss, every figure of a random model, and the command."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from bounds import below, close
from conftest import ROOT, meta, tiny_config
from layers import in_every_layer
from test_backcopy import make, sequences

import eval as eval_script
from common.machine import Machine
from data import tokens
from evals import lab, lab_figures, pictures
from evals.ablate import every_head, key_hidden, losses_with, unchanged, value_zeroed
from evals.instrument import markdown
from evals.lab import SWEEPS
from evals.measures import Probe
from mixers import trained_recipes
from model import GPT

# with --init_from, the fixture `trainings` adds no flags: a run is found again by its flags
SHORT = (
    "--init_from=scratch --max_iters=3 --eval_interval=3 --batch_size=4 --eval_iters=1 --device=cpu"
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make(tmp_path_factory.mktemp("task") / "backcopy")


@pytest.mark.parametrize(
    "flags", [("--no_bos",), ("--fixed_at=7",), ("--no_bos", "--fixed_at=0"), ("--length=30",)]
)
def test_the_exact_loss_equals_its_enumeration_in_every_form(flags, tmp_path):
    folder = make(tmp_path / "x", "--sequences=200", *flags)
    about, rows = meta(folder), torch.from_numpy(sequences(folder))[:20]
    loss, trigger = lab_figures.true_process(rows, about)
    for n, i in np.ndindex(*loss.shape):
        before, x, y = rows[n, i - 1].item() if i else 64, rows[n, i].item(), rows[n, i + 1].item()
        copies = x in about["triggers"]
        certain = i + 1 == about["fixed_at"] or copies and before < 64
        close(
            loss[n, i],
            0.0 if certain else -math.log(about["bigrams"][x][y]),
            terms=2,
            dtype=torch.float32,
        )
        assert trigger[n, i] == copies


@torch.no_grad()
@pytest.mark.parametrize("attn", ["sink", "relu"])
def test_every_figure_is_of_the_rows_and_the_change_in_its_name(attn, task):
    """test_measures.py has the measures of chosen rows, test_ablate.py the changes."""
    about, split, machine, T = meta(task), tokens.Tokens(task, "val"), Machine("cpu", "float32"), 64
    gpt = GPT(tiny_config(block_size=T, vocab_size=66, attn=attn, pos="learned")).eval()
    for p in gpt.parameters():
        p.mul_(20 if p.dim() > 1 else 1)
    found = lab_figures.lab_figures(gpt, split, about, machine)
    rows = torch.from_numpy(split.windows(tokens.fixed_windows(split, T, 256), T + 1, 66))
    as_is, zero, hide = (
        losses_with(change, gpt, rows, machine).double()
        for change in (unchanged, value_zeroed(every_head(gpt)), key_hidden)
    )
    trigger, late = torch.isin(rows[:, :-1], torch.tensor(about["triggers"])), torch.arange(T) >= 8
    excess = as_is - lab_figures.true_process(rows, about)[0]
    expected = {
        "excess_loss": excess.mean(),
        "zero_cost": (zero - as_is).mean(),
        "hide_cost": (hide - as_is).mean(),
    }
    kinds = {"_idle": late & ~trigger, "_copy": late & trigger, "": torch.ones_like(trigger)}
    for kind, counted in kinds.items():
        probe = Probe()
        in_every_layer(partial(probe.see, counted=counted), gpt, rows[:, :-1])
        means = {"excess": excess[counted].mean()} | probe.result()
        names = "sparsity empty_rows sink_eps extra_eps value_norm_ratio"
        if kind:
            names = "excess sink share row_mass extra times_uniform"
        for name in names.split():
            expected[name + kind] = torch.as_tensor(means[name]).double().mean()
    expected = {name: value.item() for name, value in expected.items() if not value.isnan()}
    assert attn == "sink" or "extra_eps" not in expected  # only the sink has an extra key
    close(found, expected, size=as_is.max().item(), dtype=torch.float32)
    below(
        1e-3,
        torch.tensor(
            [abs(found[name]) for name in ("zero_cost", "hide_cost", "sink_idle", "excess_copy")]
        ),
    )


def test_models_of_several_tables_are_trained_once():
    """The lab and its sweeps ask for the same folder and flags, or for another folder."""
    asked = {name: lab.lab_flags(name) for name in trained_recipes()}
    for table in SWEEPS.values():
        for flags, *_ in table.values():
            assert asked.setdefault(lab.folder_name(flags), flags) == flags
    # with its own beta no key passes
    assert asked["tra"].endswith("--attn_args=beta_init=0.1")


def test_the_command_compares_recipes_and_trains_nothing_twice(
    tmp_path, task, capsys, trainings, evaluate
):
    flags = [
        "lab",
        "--attn=gated",
        "--seeds=0,1",
        f"--out_dir={tmp_path / 'runs'}",
        f"--results={tmp_path / 'lab'}",
        f"--train_args={SHORT} --dataset={task}",
    ]
    eval_script.main(flags)
    first = capsys.readouterr().out
    eval_script.main([*flags, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(trainings) == 4 and "gated" in first and list(found["runs"]) == ["gated", "blind"]
    assert json.loads((tmp_path / "lab.json").read_text()) == found
    assert (tmp_path / "lab.png").exists()
    metas = [meta(tmp_path / "runs" / f"gated-{seed}") for seed in (0, 1)]
    assert found["runs"]["gated"] == [
        {key: one[key] for key in ("parameters", "seconds")} | one["report"] for one in metas
    ]
    assert metas[1]["knobs"]["seed"] == metas[1]["knobs"]["n_layer"] == 1
    shown = evaluate("probe", "--all", f"--out_dir={tmp_path}/runs/gated-1")["lab"]
    assert {*metas[1]["report"]} - {*shown} == {"train", "val"}  # every figure of the lab


def test_the_committed_tables_show_the_committed_figures():
    for name in ("", *SWEEPS):  # a sweep's table shows the paper's numbers beside ours
        place = f"results/lab-{name}".rstrip("-")
        runs = json.loads((ROOT / f"{place}.json").read_text())["runs"]
        assert (ROOT / f"{place}.md").read_text() == markdown(*lab.rows_of(runs, name)) + "\n"
        assert set(runs) == ({*SWEEPS[name]} if name else {*trained_recipes(), "blind"})
        assert all(len(group) == 3 for group in runs.values())


def test_no_dot_of_a_picture_lies_outside_its_axes(tmp_path, monkeypatch):
    runs = json.loads((ROOT / "results/lab.json").read_text())["runs"]
    figures = []
    monkeypatch.setattr(pictures.pyplot(), "close", figures.append)
    pictures.draw_recipes(tmp_path / "lab.png", runs, lab.PANELS)
    for ax in figures[0].axes:
        low, high = ax.get_xlim()
        for line in ax.lines:
            x = line.get_xdata()
            assert ((low <= x) & (x <= high) | np.isnan(x)).all()
