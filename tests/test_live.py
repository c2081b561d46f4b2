"""eval.py speed --live: the tiles of a trained run that hold any weight, and the speed gained by skipping others."""
import json

import pytest
import torch
from conftest import tiny_config
from layers import normal

import eval as eval_script
import kernels
from attention import Attention
from common.machine import Machine
from evals.live import gain_of_skipping, live_tiles


def test_live_tiles_of_a_trained_run_are_counted_and_printed(elastic_run, evaluate, tmp_path, capsys):
    flags = ("speed", "--live", "--dtype=float32", f"--out_dir={elastic_run}", "--lengths=16,150")
    found = evaluate(*flags, f"--out={tmp_path / 'live.json'}")
    assert json.loads((tmp_path / "live.json").read_text()) == found and found["tile"] == [128, 64]
    for T in (16, 150):
        layer, = found["lengths"][str(T)]
        assert 0 < layer["live_pairs"] < layer["pairs"] == 4 * 2 * T * (T + 1) // 2
    assert found["lengths"]["150"][0]["tiles"] == 4 * 2 * (2 + 3)       # rows 0..127 see two tiles, 128..149 three
    eval_script.main([*flags, "--device=cpu"])
    said = capsys.readouterr().out
    assert str(elastic_run) in said and "T=16: tiles of 128 rows and 64 keys" in said and "live pairs" in said


def test_live_tiles_are_those_that_hold_a_weight():
    """Only keys 0..63 have weights. Each block of rows has two or three tiles, and one of them is live."""
    module = Attention(tiny_config(attn="relu", n_head=1, n_embd=8), 0)
    q, k = torch.ones(1, 1, 150, 8), -torch.ones(1, 1, 150, 8)
    k[:, :, :64] = 1
    found = live_tiles(module, q, k, k, torch.zeros(1, 150, 8))
    assert found == {"tiles": 5, "live_tiles": 2, "pairs": 150 * 151 // 2, "live_pairs": 64 * 65 // 2 + 86 * 64}


@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs the kernels, at least in Triton's interpreter")
@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_the_gain_of_skipping_is_timed_only_with_a_kernel(kernel):
    machine = Machine("cuda" if torch.cuda.is_available() else "cpu", "float32")
    module = Attention(tiny_config(attn="relu", n_head=1, n_embd=16, kernel=kernel), 0).to(machine.device)
    q, k, v = normal(3, 1, 1, 20, 16, dtype=torch.float32).to(machine.device)
    gain = gain_of_skipping(module, machine, 1, q, k, v, None)
    assert gain > 0 if kernel == "triton" else gain is None
