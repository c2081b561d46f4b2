"""eval.py speed: every recipe's training step and attention, the kernels, and what the zeros of a trained run gain."""
import json

import pytest
import torch
from conftest import complain, run, tiny_config

import eval as eval_script
import kernels
from attention import ATTENTIONS, Attention
from common.machine import Machine
from evals.kernels import PRODUCTS
from evals.live import gain_of_skipping, live_tiles


@pytest.fixture
def speed(capsys):
    def call(*flags):
        eval_script.main(["speed", "--json", "--device=cpu", "--dtype=float32", "--repeats=1", "--tokens=64",
                          "--lengths=32,64", *flags])
        return json.loads(capsys.readouterr().out)
    return call


def test_speed_times_every_recipe_and_saves_what_it_prints(speed, tmp_path):
    found = speed("--memory=", f"--out={tmp_path / 'speed.json'}")
    assert set(found["lengths"]["64"]) == {"softmax (sdpa)", "softmax (torch)", *ATTENTIONS} - {"softmax"}
    timed = [row for rows in found["lengths"].values() for row in rows.values()]
    assert all(row["tokens_per_s"] > 0 and row["forward"] > 0 for row in timed)
    assert found["lengths"]["32"]["softmax (sdpa)"]["step"] == 1
    assert json.loads((tmp_path / "speed.json").read_text()) == found


def test_memory_grows_linearly_with_the_length(speed):
    found = speed("--lengths=16", "--attn=all", "--memory=512,1024,2048", "--n_layer=1", "--n_head=2", "--n_embd=16")
    for name, row in found["memory_mb"].items():
        assert row["2048"] < 2.2 * row["1024"] < 2.2 * 2.2 * row["512"], name


def test_speed_of_the_kernels_runs_and_says_what_is_missing(speed):
    found = speed("--kernels", "--widths=16", "--n_embd=32", "--lengths=17")
    rows = found["sizes"]["width 16, T 17"]
    assert "missing" in rows["sdpa cudnn"] and rows["sdpa flash"]["forward"] > 0
    assert found["triton"] is None or set(PRODUCTS) <= set(rows)


def test_live_tiles_of_a_trained_run_are_counted(elastic_run, capsys, tmp_path):
    eval_script.main(["speed", "--live", "--json", "--device=cpu", "--dtype=float32", f"--out_dir={elastic_run}",
                      "--lengths=16,150", f"--out={tmp_path / 'live.json'}"])
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "live.json").read_text()) == found and found["tile"] == [128, 64]
    for T in (16, 150):
        layer, = found["lengths"][str(T)]
        assert 0 < layer["live_pairs"] < layer["pairs"] == 4 * 2 * T * (T + 1) // 2
        assert layer["live_tiles"] <= layer["tiles"]
    assert found["lengths"]["150"][0]["tiles"] == 4 * 2 * (2 + 3)       # rows 0..127 see two tiles of keys, 128.. three


def test_live_tiles_are_those_that_hold_a_weight():
    """Keys 0..63 only are looked at: one tile of three, or of two, in each block of rows."""
    module = Attention(tiny_config(attn="relu", n_head=1, n_embd=8), 0)
    q, k = torch.ones(1, 1, 150, 8), -torch.ones(1, 1, 150, 8)
    k[:, :, :64] = 1
    found = live_tiles(module, q, k, k, torch.zeros(1, 150, 8))
    assert found == {"tiles": 5, "live_tiles": 2, "pairs": 150 * 151 // 2, "live_pairs": 64 * 65 // 2 + 86 * 64}


@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs the kernels, if only in Triton's interpreter")
def test_what_skipping_gains_is_timed_where_a_kernel_runs():
    machine = Machine("cuda" if torch.cuda.is_available() else "cpu", "float32")
    for kernel, timed in (("triton", True), ("torch", False)):
        module = Attention(tiny_config(attn="relu", n_head=1, n_embd=16, kernel=kernel), 0).to(machine.device)
        q, k, v = (torch.randn(1, 1, 70, 16, device=machine.device) for _ in range(3))
        gain = gain_of_skipping(module, machine, 1, q, k, v, torch.zeros(1, 70, 16, device=machine.device))
        assert (gain is not None) == timed and (not timed or gain > 0) and module.skip


def test_live_wants_a_run(capsys):
    assert "--out_dir" in complain(eval_script.main, capsys, "speed", "--live")[1]


def test_wrong_numbers_are_named():
    done = run("eval.py", "speed", "--lengths=long", ok=False)
    assert done.returncode and "'long'" in done.stderr and "Traceback" not in done.stderr
