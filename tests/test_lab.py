"""The sink lab: the task against its own tables, the exact loss, every figure on a model whose attention is known, and the command."""
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, meta, run
from torch.nn import functional as F

import eval as eval_script
from attention import ATTENTIONS, View, block_loop, block_weights
from data import tokens

MACHINE = eval_script.Machine("cpu", "float32")


def make(folder, *flags):
    run("data/backcopy.py", f"--out_dir={folder}", "--sequences=3000", "--val_sequences=300", *flags)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make(tmp_path_factory.mktemp("task") / "backcopy")


def sequences(folder, split="train"):
    """(N, length + 1) ids."""
    return np.array(tokens.read_shard(folder / f"{split}.bin")).astype(np.int64).reshape(-1, meta(folder)["stride"])


# -------------------------------------------------------------------------------------------------------------------- the task

def test_sequences_begin_with_bos_and_hold_symbols(task):
    x = sequences(task)
    assert (x[:, 0] == 64).all() and x[:, 1:].max() < 64 and x.shape == (3000, 65) and len(set(meta(task)["triggers"])) == 5


def test_triggers_copy_and_all_else_follows_the_table(task):
    x, about = sequences(task), meta(task)
    table, triggers = np.array(about["bigrams"]), about["triggers"]
    assert table.shape == (66, 64) and np.allclose(table.sum(1), 1)
    copies = np.isin(x[:, 1:-1], triggers) & (x[:, :-2] < 64)
    assert copies.mean() > 0.03 and (x[:, 2:][copies] == x[:, :-2][copies]).all()
    drawn = np.concatenate([x[:, 1], x[:, 2:][~copies]]), np.concatenate([x[:, 0], x[:, 1:-1][~copies]])
    counts = np.zeros((66, 64))
    np.add.at(counts, (drawn[1], drawn[0]), 1)
    seen = counts.sum(1) > 0
    expected = table[seen] * counts[seen].sum(1, keepdims=True)
    spread = np.sqrt(expected * (1 - table[seen]))
    large = expected > 20                       # where the counts are nearly normal: 4.5 standard errors for thousands of cells
    assert large.sum() > 500 and (np.abs(counts[seen] - expected)[large] < 4.5 * spread[large]).all()


def test_the_seed_decides(tmp_path):
    a, b, c = (make(tmp_path / name, f"--seed={seed}", "--sequences=20", "--val_sequences=20") for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert meta(a)["shards"] == meta(b)["shards"] and (sequences(a) != sequences(c)).any() and (sequences(a) != sequences(a, "val")).any()


def test_other_lengths_no_bos_and_a_fixed_token(tmp_path):
    folder = make(tmp_path / "x", "--length=20", "--no_bos", "--fixed_at=4", "--sequences=50")
    x = sequences(folder)
    assert x.shape == (50, 21) and (x[:, 4] == 65).all() and np.delete(x, 4, 1).max() < 64 and len(set(x[:, 0])) > 10


@pytest.mark.parametrize("flags", [("--fixed_at=99",), ("--length=0",), ("--sequences=0",)])
def test_impossible_tasks_are_refused_in_one_line(flags, tmp_path):
    done = run("data/backcopy.py", f"--out_dir={tmp_path / 'x'}", *flags, ok=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and flags[0].split("=")[0] in done.stderr


# -------------------------------------------------------------------------------------------------------------- the exact loss

class HandMade:
    """Stands in for an attention layer: its weights are given, and it hands the values on."""
    hide, ahead, view = -1, 0, View()

    def __init__(self, weights, extra):
        self.weights, self.has_extra_key = weights, extra

    def weight_blocks(self, q, k, x, table):
        return self.weights(q.shape[2]).split(50, 2)

    def attend(self, q, k, v, x, table):
        return v


class TrueProcess(torch.nn.Module):
    """A "model" that predicts as the process does. Its one layer attends by hand-made weights, so every figure is known."""

    def __init__(self, about, weights, extra=False, values=None):
        super().__init__()
        self.config = SimpleNamespace(block_size=64, vocab_size=66)
        self.about, self.values = about, values
        self.transformer = SimpleNamespace(h=[SimpleNamespace(attn=HandMade(weights, extra))])

    def forward(self, x):
        B, T = x.shape
        v = self.values(T) if self.values else torch.ones(B, 1, T, 4)
        y = self.transformer.h[0].attn.attend(torch.ones(B, 1, T, 4), None, v.expand(B, 1, T, 4), None, None)
        before = F.pad(x[:, :-1], (1, 0), value=64)
        copies = torch.isin(x, torch.tensor(self.about["triggers"])) & (before < 64)
        p = torch.tensor(self.about["bigrams"])[x]
        p[copies] = F.one_hot(before[copies], 64).to(p.dtype)
        return F.pad(p, (0, 2)).log().clamp(min=-80) + 0 * y.mean(), None


def figures(folder, *args, **kwargs):
    about = meta(folder)
    return eval_script.lab(TrueProcess(about, *args, **kwargs), tokens.Tokens(folder, "val"), about, MACHINE)


def rows_on_first(T, mass=1.0):
    w = torch.zeros(256, 1, T, T)
    w[..., 0] = mass
    return w


def test_the_true_process_has_no_excess_loss(task):
    found = figures(task, rows_on_first)
    assert all(abs(found[name]) < 1e-6 for name in ("excess_loss", "excess_copy", "excess_idle", "zero_cost", "hide_cost"))


@pytest.mark.parametrize("flags", [("--no_bos",), ("--fixed_at=7",), ("--no_bos", "--fixed_at=0"), ("--length=30",)])
def test_its_loss_is_exact_in_every_form_of_the_task(flags, tmp_path):
    folder = make(tmp_path / "x", "--sequences=200", *flags)
    about, rows = meta(folder), torch.from_numpy(sequences(folder))
    loss, trigger = eval_script.true_process(rows, about)
    table = np.array(about["bigrams"])
    for n, i in [(n, i) for n in range(20) for i in range(rows.shape[1] - 1)]:
        x, y, before = rows[n, i].item(), rows[n, i + 1].item(), rows[n, i - 1].item() if i else 64
        if i + 1 == about["fixed_at"] or x in about["triggers"] and before < 64:
            assert loss[n, i] == 0
        else:
            assert loss[n, i].item() == pytest.approx(-math.log(table[x, y]), rel=1e-5)
        assert trigger[n, i] == (x in about["triggers"])


# ----------------------------------------------------------------------------------------------------------------- the figures

def test_all_weight_on_the_first_token(task):
    found = figures(task, rows_on_first)
    for name in ("sink_idle", "sink_copy", "share_idle", "share_copy", "row_mass_idle", "row_mass_copy"):
        assert found[name] == pytest.approx(1, abs=1e-6), name
    assert found["times_uniform_idle"] > 20 and found["extra_idle"] == 0 and found["empty_rows"] == 0
    assert found["sparsity"] == pytest.approx(1 - 64 / (64 * 65 / 2), abs=1e-6) and found["value_norm_ratio"] == pytest.approx(1, abs=1e-6)


def test_even_rows_are_once_uniform_and_empty_rows_have_no_share(task):
    even = figures(task, lambda T: (torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]).expand(256, 1, T, T))
    assert even["times_uniform_idle"] == pytest.approx(1, abs=1e-5) and even["sparsity"] == 0
    empty = figures(task, lambda T: torch.zeros(256, 1, T, T))
    assert empty["empty_rows"] == 1 and empty["share_idle"] == 0 and empty["row_mass_idle"] == 0 and empty["sparsity"] == 1


def test_raw_weight_mass_and_share_are_told_apart(task):
    def small(T):                               # a quarter on the first token and a quarter on oneself
        return 0.25 * rows_on_first(T) + 0.25 * torch.eye(T)
    found = figures(task, small)
    assert found["sink_idle"] == pytest.approx(0.25, abs=1e-6) and found["row_mass_idle"] == pytest.approx(0.5, abs=1e-6)
    assert found["share_idle"] == pytest.approx(0.5, abs=1e-6)


def test_an_extra_key_is_counted_apart_from_the_first_token(task):
    found = figures(task, lambda T: torch.cat([torch.full((256, 1, T, 1), 0.75), rows_on_first(T, 0.25)], -1), extra=True)
    assert found["extra_idle"] == pytest.approx(0.75, abs=1e-6) and found["sink_idle"] == pytest.approx(0.25, abs=1e-6)
    assert found["row_mass_idle"] == pytest.approx(0.25, abs=1e-6) and found["share_idle"] == pytest.approx(0.25, abs=1e-6)


def test_value_norms_are_compared_with_the_mean_of_the_others(task):
    def values(T):
        v = torch.ones(256, 1, T, 4)
        v[:, :, 0], v[:, :, 1::2] = 0.5, 3.0
        return v
    others = (32 * 3 + 31 * 1) / 63
    assert figures(task, rows_on_first, values=values)["value_norm_ratio"] == pytest.approx(0.5 / others, rel=1e-5)


def test_copy_and_idle_rows_are_told_apart_and_begin_at_position_8(task):
    about = meta(task)
    starts = eval_script.fixed_windows(tokens.Tokens(task, "val"), 64, 256, 65)
    x = torch.from_numpy(tokens.Tokens(task, "val").windows(starts, 65, 66))[:, :-1]
    trigger = torch.isin(x, torch.tensor(about["triggers"]))

    def by_row(T):                              # 1 on rows at triggers, 0.25 on the others, and nonsense before position 8
        w = rows_on_first(T, 0.25)
        w[trigger[:, None].expand(-1, 1, -1)] = F.one_hot(torch.tensor(0), T).float()
        w[:, :, :8] = 100.0
        return w
    found = figures(task, by_row)
    assert found["sink_copy"] == pytest.approx(1, abs=1e-6) and found["sink_idle"] == pytest.approx(0.25, abs=1e-6)


def test_zero_and_hide_cost_what_the_first_value_and_key_are_worth(task):
    """A trained model: attention recomputed by hand, with the first value zeroed and with the first key hidden."""
    from model import GPT, GPTConfig
    about, split = meta(task), tokens.Tokens(task, "val")
    gpt = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=64, vocab_size=66, attn="sink", pos="learned")).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(10 if p.dim() > 1 else 1)
    found = eval_script.lab(gpt, split, about, MACHINE)
    rows = torch.from_numpy(split.windows(eval_script.fixed_windows(split, 64, 256, 65), 65, 66))
    attn, losses = gpt.transformer.h[0].attn, {}

    def by_hand(change):
        def attend(q, k, v, x, table=None):
            s = (q @ k.mT * attn.scale).masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf)
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
    assert found["zero_cost"] == pytest.approx(losses["zero"] - losses["none"], abs=2e-5)
    assert found["hide_cost"] == pytest.approx(losses["hide"] - losses["none"], abs=2e-5)
    assert abs(found["zero_cost"]) > 1e-4 and abs(found["hide_cost"]) > 1e-4


# ----------------------------------------------------------------------------------------------------------------- the command

SHORT = "--max_iters=3 --eval_interval=3 --batch_size=4 --eval_iters=1 --device=cpu"


def test_a_run_prints_every_figure_on_a_line(tmp_path, task):
    done = run("train.py", "--preset=lab", "--attn=lazy", f"--out_dir={tmp_path}", f"--dataset={task}", *SHORT.split())
    lines = dict(line.split(": ") for line in done.stdout.splitlines() if line.count(": ") == 1 and " " not in line.split(": ")[0])
    names = ("excess_loss", "excess_copy", "excess_idle", "sink_idle", "sink_copy", "row_mass_idle", "share_idle", "value_norm_ratio", "zero_cost",
             "hide_cost")
    assert all(math.isfinite(float(lines[name])) for name in names)
    assert meta(tmp_path)["knobs"]["pos"] == "rope+bias" and meta(tmp_path)["knobs"]["n_layer"] == 1


def test_the_command_compares_recipes_and_trains_nothing_twice(tmp_path, task):
    flags = ("lab", "--attn=softmax,gated", "--seeds=0,1", f"--out_dir={tmp_path / 'runs'}", f"--results={tmp_path / 'lab'}",
             f"--train_args={SHORT} --dataset={task}")
    first = run("eval.py", *flags)
    assert first.stderr.count("training") == 6 and "softmax" in first.stdout and "gated" in first.stdout
    again = run("eval.py", *flags, "--json")
    found = json.loads((tmp_path / "lab.json").read_text())
    assert "training" not in again.stderr and json.loads(again.stdout) == found
    assert list(found["runs"]) == ["softmax", "gated", "blind"] and len(found["runs"]["gated"]) == 2
    assert found["runs"]["gated"][0]["parameters"] == found["runs"]["softmax"][0]["parameters"] + 64 + 1
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_results_have_every_recipe_and_three_seeds():
    found = json.loads((ROOT / "results" / "lab.json").read_text())
    assert set(found["runs"]) == {*ATTENTIONS, "blind"} and all(len(group) == 3 for group in found["runs"].values())


def test_in_the_committed_results_every_recipe_learns_what_no_bigram_table_can():
    """On copy rows each loses less than the same model without attention, with every seed."""
    runs = json.loads((ROOT / "results" / "lab.json").read_text())["runs"]
    blind = min(run["excess_copy"] for run in runs["blind"])
    assert blind > 1 and {name: run["excess_copy"] for name, group in runs.items() for run in group
                          if name != "blind" and not run["excess_copy"] < blind - 0.5} == {}


def test_one_row_of_the_block_loop_is_the_block_loop():
    """The lab's instruments rest on weight_blocks showing what attend uses."""
    from attention import RULES
    q, k, v = (torch.randn(1, 1, 300, 8, dtype=torch.float64) for _ in range(3))
    o, r = block_loop(RULES["softmax"], q, k, v, None, View(0.5), need_r=True)
    w, last = block_weights(RULES["softmax"], View(0.5), q[:, :, -1:] * 0.5, k, None, None, torch.tensor([299]), need_r=True)
    torch.testing.assert_close(o[:, :, -1:], w @ v)
    torch.testing.assert_close(r[:, :, -1:], last)
