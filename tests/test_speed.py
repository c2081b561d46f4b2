"""eval.py speed: training steps, memory, the fused kernels alone, sparse Focus, decoding steps,
live tiles."""

import json

import pytest
import torch
from bounds import below
from conftest import needs_triton, tiny_config

import eval as eval_script
import kernels
from attention import ATTENTIONS, Attention
from evals import kernels as kernel_speed
from evals.speed import live_tiles


@pytest.fixture
def speed(evaluate):
    return lambda *flags: evaluate("speed", "--dtype=float32", "--repeats=1", *flags)


def test_recipes_are_timed_and_their_memory_grows_linearly_with_the_length(speed, tmp_path):
    """Eight times as many tokens take eight times the memory. With all weights in memory at once,
    they take 64 times."""
    found = speed(
        "--attn=elastic,deltanet",
        "--dense=elastic",
        f"--png={tmp_path / 'speed.png'}",
        f"--out={tmp_path / 'speed.json'}",
        "--n_layer=1",
        "--n_embd=16",
        "--tokens=32",
        "--lengths=16,32",
        "--memory=256,2048",
    )
    for rows in found["lengths"].values():
        names = {"nanoGPT", "softmax (sdpa)", "softmax (torch)", "elastic", "deltanet"}
        assert set(rows) == names | {"elastic (dense)"}
        assert all(
            row[name] > 0
            for row in rows.values()
            for name in ("tokens_per_s", "step", "forward", "both", "ms")
        )
    assert found["lengths"]["32"]["nanoGPT"]["step"] == 1
    assert found["lengths"]["32"]["elastic"]["kernel"] == "cpp"
    dense = found["memory_mb"]["elastic (dense)"]
    below(40 * dense["256"], dense["2048"])
    assert kernels.BLOCK == 128 and (tmp_path / "speed.png").exists()
    for name in names:
        row = found["memory_mb"][name]
        below(row["2048"], 20 * row["256"])
        below(2 * row["256"], row["2048"])
    assert json.loads((tmp_path / "speed.json").read_text()) == found


@needs_triton
@pytest.mark.parametrize(
    "names", [("softmax", "tda"), pytest.param((), marks=pytest.mark.exhaustive)]
)
def test_the_kernels_are_timed_and_missing_ones_are_reported(names, speed, monkeypatch):
    rules = {axes["rule"] for axes in ATTENTIONS.values() if "mixer" not in axes}
    assert set(kernel_speed.PRODUCTS) == rules | {"tda"}
    few = {name: kernel_speed.PRODUCTS[name] for name in names or kernel_speed.PRODUCTS}
    monkeypatch.setattr(kernel_speed, "PRODUCTS", few)
    found = speed("--kernels", "--widths=16", "--n_embd=32", "--lengths=17", "--tokens=17")
    rows = found["sizes"]["width 16, T 17"]
    assert "missing" in rows["sdpa cudnn"] and rows["sdpa flash"]["forward"] > 0
    assert set(few) <= set(rows) and rows["softmax"]["ratio"] == 1


def test_sparse_focus_is_timed(speed):
    row = speed("--focus", "--lengths=150", "--n_head=1")["lengths"]["150"]
    assert {"1 of 4", "2 of 8"} < row["speed"].keys()
    assert min(row["full_ms"], *row["speed"].values()) > 0


def test_decoding_steps_are_timed_and_their_bytes_counted(speed):
    """A key and its value take 1024 bytes: float32, two heads of width 64. The step adds a token to
    the cache."""
    few, many = speed("--decode", "--attn=all", "--lengths=40,256")["lengths"].values()
    assert {"lazy", "titans"} <= few.keys() and "routing" not in few
    assert all(
        number > 0 for rows in (few, many) for row in rows.values() for number in row.values()
    )
    token = 2 * 2 * 64 * 4
    expected = {
        "softmax": 257 * token,
        "window": 128 * token,
        "streaming": 132 * token,
        "retnet": 2 * 64 * 64 * 4,
        "focus": 257 * token + 257 * 4 * 4,  # and the shares of four groups
        "topk": 257 * token // 2 + 32 * token,
        "sparq": 257 * token // 8 + 32 * token,  # a quarter of the keys' components
        "quest": 16 * token + 17 * token,
    }  # 16 bounds; a whole page, and one of one key
    assert {name: many[name]["bytes"] for name in expected} == expected
    assert few["softmax"]["bytes"] == 41 * token
    assert 128 * token < many["focus (1 of 4 groups)"]["bytes"] < many["focus"]["bytes"]
    assert many["softmax"]["layer"] == many["softmax"]["attend"] == 1


def test_live_tiles_of_a_trained_run_are_printed_and_hold_a_weight(elastic_run, capsys):
    eval_script.main(
        [
            "speed",
            "--live",
            "--dtype=float32",
            f"--out_dir={elastic_run}",
            "--lengths=16",
            "--device=cpu",
        ]
    )
    assert "T=16: live share of tiles of 64 rows and keys" in capsys.readouterr().out
    # only keys 0..63 have weights: each row of tiles has one to three, and one of them is live
    module = Attention(tiny_config(attn="relu", n_head=1, n_embd=8), 0)
    q, k = torch.ones(1, 1, 150, 8), -torch.ones(1, 1, 150, 8)
    k[:, :, :64] = 1
    assert live_tiles(module, q, k, k, torch.zeros(1, 150, 8)) == 3 / 6
