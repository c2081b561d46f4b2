"""eval.py speed --live: the tiles of a trained run that hold any weight. test_everything.py times the gain."""
import json

import torch
from conftest import tiny_config

import eval as eval_script
from attention import Attention
from evals.live import live_tiles


def test_live_tiles_of_a_trained_run_are_counted_and_printed(elastic_run, evaluate, tmp_path, capsys):
    flags = ("speed", "--live", "--dtype=float32", f"--out_dir={elastic_run}", "--lengths=16,150")
    found = evaluate(*flags, f"--out={tmp_path / 'live.json'}")
    assert json.loads((tmp_path / "live.json").read_text()) == found and found["tile"] == [128, 64]
    for T in (16, 150):
        layer, = found["lengths"][str(T)]       # without a kernel nothing is timed
        assert layer["gain"] is None and 0 < layer["live_pairs"] < layer["pairs"] == 4 * 2 * T * (T + 1) // 2
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
