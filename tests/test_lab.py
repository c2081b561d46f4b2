"""eval.py lab: the exact loss, every figure of a model with known attention, and the command."""
import contextlib
import io
import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import below, close
from conftest import ROOT, meta, tiny_config
from test_backcopy import make, sequences
from torch.nn import functional as F

import eval as eval_script
import train as train_script
from attention import ATTENTIONS
from axes.sight import Sight
from common.flags import Parser, add_flags, fields_of
from common.machine import Machine
from data import tokens
from evals import lab, sweeps
from evals.claims import ClaimsFlags
from evals.instrument import markdown
from evals.lab import lab_figures, true_process
from evals.lab_runs import RECIPES, flags_of, folder_of, train_flags
from evals.ledger import experiments
from mixers import trained_recipes
from model import GPT, GPTConfig

MACHINE = Machine("cpu", "float32")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make(tmp_path_factory.mktemp("task") / "backcopy")


# ----------------------------------------------------------------------------------------------------- the exact loss


class HandMade:
    """A substitute for an attention layer with given weights. It outputs the values."""
    ahead, heads, sight = 0, 1, Sight()

    def __init__(self, weights):
        self.weights, self.has_extra_key = weights, weights(64).shape[-1] > 64

    def weight_blocks(self, q, k, x, table):
        return self.weights(q.shape[2]).split(50, 2)

    def attend(self, q, k, v, x, table, sight=None):
        return v


class TrueProcess(torch.nn.Module):
    """A "model" that predicts the true process. Its one layer has given weights, so all figures are known."""

    def __init__(self, about, weights, values=None):
        super().__init__()
        self.config = SimpleNamespace(block_size=64, vocab_size=66)
        self.about, self.values = about, values
        self.transformer = SimpleNamespace(h=[SimpleNamespace(attn=HandMade(weights))])

    def forward(self, x):
        B, T = x.shape
        v = self.values(T) if self.values else torch.ones(B, 1, T, 4)
        y = self.transformer.h[0].attn.attend(torch.ones(B, 1, T, 4), None, v.expand(B, 1, T, 4), None, None)
        before = F.pad(x[:, :-1], (1, 0), value=64)
        copies = torch.isin(x, torch.tensor(self.about["triggers"])) & (before < 64)
        p = torch.tensor(self.about["bigrams"])[x]
        p[copies] = F.one_hot(before[copies], 64).to(p.dtype)
        return F.pad(p, (0, 2)).log().clamp(min=-80) + 0 * y.mean(), None


def figures(folder, weights, **values):
    about = meta(folder)
    return lab_figures(TrueProcess(about, weights, **values), tokens.Tokens(folder, "val"), about, MACHINE)


def close_figures(found, size=1.0, **expected):
    """Compare means of float32 numbers."""
    close({name: found[name] for name in expected}, expected, terms=2, size=size, dtype=torch.float32)


def on_first(T, mass=1.0):
    """Weights that put `mass` on the first token in every row."""
    return mass * F.one_hot(torch.tensor(0), T).float().expand(256, 1, T, T)


def test_the_true_process_has_no_excess_loss(task):
    close_figures(figures(task, on_first), size=math.log(64),
                  **dict.fromkeys(("excess_loss", "excess_copy", "excess_idle", "zero_cost", "hide_cost"), 0))


@pytest.mark.parametrize("flags", [("--no_bos",), ("--fixed_at=7",), ("--no_bos", "--fixed_at=0"), ("--length=30",)])
def test_the_exact_loss_in_every_form_of_the_task(flags, tmp_path):
    folder = make(tmp_path / "x", "--sequences=200", *flags)
    about, rows = meta(folder), torch.from_numpy(sequences(folder))[:20]
    loss, trigger = true_process(rows, about)
    expected, copies = torch.zeros(loss.shape, dtype=torch.float64), torch.zeros_like(trigger)
    for n, i in np.ndindex(*loss.shape):
        x, y = rows[n, i].item(), rows[n, i + 1].item()
        before = rows[n, i - 1].item() if i else 64
        copies[n, i] = x in about["triggers"]
        if not (i + 1 == about["fixed_at"] or copies[n, i] and before < 64):
            expected[n, i] = -math.log(about["bigrams"][x][y])
    close(loss, expected, terms=2)
    assert (loss[expected == 0] == 0).all() and (trigger == copies).all()


# -------------------------------------------------------------------------------------------------------- the figures


@pytest.mark.parametrize("weights, expected", [
    pytest.param(on_first, dict.fromkeys(
        ("sink_idle", "sink_copy", "share_idle", "share_copy", "row_mass_idle", "row_mass_copy", "value_norm_ratio"), 1)
        | {"extra_idle": 0, "empty_rows": 0, "sparsity": 1 - 64 / (64 * 65 / 2)}, id="all on the first token"),
    pytest.param(lambda T: (torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]).expand(256, 1, T, T),
                 {"times_uniform_idle": 1, "sparsity": 0}, id="even"),
    pytest.param(lambda T: torch.zeros(256, 1, T, T),
                 {"empty_rows": 1, "sparsity": 1, "share_idle": 0, "row_mass_idle": 0}, id="empty"),
    pytest.param(lambda T: on_first(T, 0.25) + 0.25 * torch.eye(T),
                 {"sink_idle": 0.25, "row_mass_idle": 0.5, "share_idle": 0.5}, id="half a row"),
    pytest.param(lambda T: torch.cat([torch.full((256, 1, T, 1), 0.75), on_first(T, 0.25)], -1),
                 {"extra_idle": 0.75, "sink_idle": 0.25, "row_mass_idle": 0.25, "share_idle": 0.25},
                 id="with an extra key")])
def test_figures_of_known_weights(weights, expected, task):
    close_figures(figures(task, weights), **expected)


def test_a_sink_has_more_than_ten_times_the_weight_of_an_even_spread(task):
    below(10, figures(task, on_first)["times_uniform_idle"])


def test_value_norms_are_compared_with_the_mean_of_the_others(task):
    def values(T):
        v = torch.ones(256, 1, T, 4)
        v[:, :, 0], v[:, :, 1::2] = 0.5, 3.0
        return v
    close_figures(figures(task, on_first, values=values), value_norm_ratio=0.5 / ((32 * 3 + 31 * 1) / 63))


def test_copy_and_idle_rows_are_told_apart_and_begin_at_position_8(task):
    about = meta(task)
    starts = tokens.fixed_windows(tokens.Tokens(task, "val"), 64, 256, 65)
    x = torch.from_numpy(tokens.Tokens(task, "val").windows(starts, 65, 66))[:, :-1]
    trigger = torch.isin(x, torch.tensor(about["triggers"]))

    def by_row(T):                              # 1 on rows at triggers, 0.25 on the others, nonsense before position 8
        w = torch.where(trigger[:, None, :, None], 1.0, 0.25) * on_first(T)
        w[:, :, :8] = 100.0
        return w
    close_figures(figures(task, by_row), sink_copy=1, sink_idle=0.25)


def test_zero_and_hide_cost_what_the_first_value_and_key_are_worth(task):
    """Attention of a random model is recomputed by hand with the first value zeroed and with the first key hidden."""
    about, split = meta(task), tokens.Tokens(task, "val")
    gpt = GPT(tiny_config(block_size=64, vocab_size=66, attn="sink", pos="learned")).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(20 if p.dim() > 1 else 1)
    found = lab_figures(gpt, split, about, MACHINE)
    rows = torch.from_numpy(split.windows(tokens.fixed_windows(split, 64, 256, 65), 65, 66))
    attn, losses = gpt.transformer.h[0].attn, {}

    def by_hand(change):
        def attend(q, k, v, x, table=None):
            s = (q @ k.mT * attn.sight.scale).masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf)
            if change == "zero":
                v = torch.cat([0 * v[:, :, :1], v[:, :, 1:]], 2)
            if change == "hide":
                s[:, :, 1:, 0] = -math.inf
            return torch.cat([attn.sink_logit[:, None, None].expand(len(s), 2, 64, 1), s], -1).softmax(-1)[..., 1:] @ v
        return attend

    for change in ("none", "zero", "hide"):
        attn.attend = by_hand(change)
        with torch.no_grad():
            losses[change] = gpt(rows[:, :-1], rows[:, 1:])[1].item()
    expected = {f"{change}_cost": losses[change] - losses["none"] for change in ("zero", "hide")}
    close_figures(found, size=losses["none"], **expected)
    below(1e-3, torch.tensor([expected["zero_cost"], expected["hide_cost"]]).abs())


# -------------------------------------------------------------------------------------------------------- the command

SHORT = "--max_iters=3 --eval_interval=3 --batch_size=4 --eval_iters=1 --device=cpu"


def train_here(argv):
    """Run train.py with these arguments in this process. Returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        with pytest.raises(SystemExit) as stop:
            train_script.main(argv)
    assert stop.value.code == 0
    return said.getvalue()


RUN = subprocess.run


def process_here(argv, **how):
    """A substitute for subprocess.run that runs train.py in this process, to save time."""
    if Path(argv[1]).name != "train.py":
        return RUN(argv, **how)
    train_here(argv[2:])
    return subprocess.CompletedProcess(argv, 0)


def output_here(script, *flags, **variables):
    """A substitute for common.runs.output_of that runs train.py in this process, to save time."""
    assert script == "train.py"
    return train_here(flags)


def test_a_run_prints_every_figure_on_a_line(tmp_path, task):
    said = train_here(["--preset=lab", "--attn=lazy", f"--out_dir={tmp_path}", f"--dataset={task}", *SHORT.split()])
    pairs = (line.split(": ") for line in said.splitlines() if line.count(": ") == 1)
    lines = {name: value for name, value in pairs if " " not in name}
    names = ("excess_loss", "excess_copy", "excess_idle", "sink_idle", "sink_copy", "row_mass_idle", "share_idle",
             "value_norm_ratio", "zero_cost", "hide_cost")
    assert all(math.isfinite(float(lines[name])) for name in names)
    assert meta(tmp_path)["knobs"]["pos"] == "rope+bias" and meta(tmp_path)["knobs"]["n_layer"] == 1


def test_the_lab_its_sweeps_and_the_ledger_share_runs():
    """The same model has the same folder and flags, so the second command finds it trained."""
    job = experiments.train_job("postnorm", 3, experiments.Place())
    run = sweeps.cases("norm_place")["post"]
    assert job.place == folder_of(run, 3, lab.Lab().out_dir)
    assert list(job.words[1:]) == train_flags(run, 3, lab.Lab().out_dir)
    assert lab.Lab().seeds == ClaimsFlags().seeds
    tuned = experiments.train_job("heads-eq9@long", 3, experiments.Place())
    assert f"--init_from={folder_of('heads@long', 3, 'out/lab')}" in tuned.words
    assert tuned.after[1] == experiments.train_job("heads@long", 3, experiments.Place())


def test_the_command_compares_recipes_and_trains_nothing_twice(tmp_path, task, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", process_here)
    flags = ["lab", "--attn=softmax,gated", "--seeds=0,1", f"--out_dir={tmp_path / 'runs'}",
             f"--results={tmp_path / 'lab'}", f"--train_args={SHORT} --dataset={task}"]
    eval_script.main(flags)
    first = capsys.readouterr()
    eval_script.main([*flags, "--json"])
    again, found = capsys.readouterr(), json.loads((tmp_path / "lab.json").read_text())
    assert first.err.count("training ") == 6 and "softmax" in first.out and "gated" in first.out
    assert "training " not in again.err and json.loads(again.out) == found
    assert list(found["runs"]) == ["softmax", "gated", "blind"] and len(found["runs"]["gated"]) == 2
    assert found["runs"]["gated"][0]["parameters"] == found["runs"]["softmax"][0]["parameters"] + 64 + 1
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")


def test_training_runs_in_its_own_process_and_shows_its_error(tmp_path, task, capfd):
    args = lab.Lab(out_dir=str(tmp_path), train_args=f"{SHORT} --dataset={task}")
    one, = lab.train_all({"": "softmax"}, [3], args)[""]
    assert one["report"].keys() >= {"excess_copy", "hide_cost"}
    assert one == meta(tmp_path / "softmax-3") and one["knobs"]["seed"] == 3
    args.train_args += " --n_head=5"
    with pytest.raises(ValueError, match="elastic-3 was not finished"):
        lab.train_all({"": "elastic"}, [3], args)
    assert "n_head" in capfd.readouterr().err.splitlines()[-1]


def test_recipes_get_the_flags_that_they_need():
    for name, *more in (["softmax"], ["streaming", "--window=16"], ["focus", "--window=16"], ["diff", "--n_head=2"],
                        ["tra", "--attn_args=beta_init=0.1"]):
        assert flags_of(name).split() == [f"--attn={name}", *more]
    assert RECIPES.keys().isdisjoint(ATTENTIONS)                        # or the lab would train another set-up
    assert flags_of("lazy", "gpu") == "--attn=lazy --pos=rope+bias"
    assert flags_of("streaming", "gpu") == "--attn=streaming"


# ------------------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_every_row_of_a_sweep_is_a_model(name):
    parser = Parser(prog="train.py")
    add_flags(parser, train_script.Train, GPTConfig)
    for run in sweeps.cases(name).values():
        knobs = train_script.settle_knobs(parser.parse_args(train_flags(run, 2, "out")))[0]
        GPT(GPTConfig(**fields_of(GPTConfig, knobs) | {"vocab_size": 66}))


def test_a_sweep_is_shown_next_to_the_papers_table(tmp_path, task, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", process_here)
    eval_script.main(["lab", "--sweep=norm_place", "--seeds=0", f"--out_dir={tmp_path}",
                      f"--train_args={SHORT} --dataset={task}"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "13.54" in lines["post"] and "18.18" in lines["pre"]
    found = json.loads((tmp_path / "lab-norm_place.json").read_text())["runs"]
    assert list(found) == list(sweeps.cases("norm_place")) and (tmp_path / "lab-norm_place.png").exists()
    assert (tmp_path / "postnorm-0" / "meta.json").exists()


# -------------------------------------------------------------------------------------------------- committed results


@pytest.fixture(scope="module")
def runs():
    return json.loads((ROOT / "results" / "lab.json").read_text())["runs"]


def test_the_committed_results_have_every_recipe_and_three_seeds(runs):
    assert set(runs) == {*trained_recipes(), "blind"}
    assert all(len(group) == 3 for group in runs.values())


def test_the_committed_table_shows_the_committed_figures(runs):
    assert (ROOT / "results" / "lab.md").read_text() == markdown(*lab.mean_rows(runs)) + "\n"


def test_the_committed_results_beat_the_model_without_attention_on_copy_rows(runs):
    """On copy rows, every recipe with every seed has a lower loss than the model without attention. The exception is
    routing, whose clusters seldom hold both a trigger and the token that it copies. rela, whose rows sum to more than
    100, copies badly with one seed of three, and has half of the margin."""
    blind = min(run["excess_copy"] for run in runs["blind"])
    assert blind > 1 and {name: run["excess_copy"] for name, group in runs.items() for run in group
                          if name not in ("blind", "routing")
                          and not run["excess_copy"] < blind - (0.25 if name == "rela" else 0.5)} == {}
