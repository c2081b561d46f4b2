"""training/dry_run.py: a dry run predicts the peak memory of a step, and counts tokens, FLOPs and hours."""
import re

import pytest
import torch

import train
from common.machine import Machine
from model import GPT, GPTConfig
from training.dry_run import memory_of_a_step

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 257}


@pytest.mark.parametrize("attn, steps", [("softmax", 2), *((attn, 1) for attn in (
    "softmax", "elastic", "entmax", "diff", "focus", "performer", "gated_deltanet"))])
def test_fake_tensors_are_as_large_as_real_ones(attn, steps):
    """The peak of a step, counted in the same way on real tensors. From the second micro-batch on, gradients exist.
    Weights, gradients and AdamW's two averages have four bytes a parameter."""
    config, idx = GPTConfig(attn=attn, **SMALL), torch.zeros(2, 64, dtype=torch.long)
    knobs = train.Train(batch_size=2, gradient_accumulation_steps=steps)
    model, memory = memory_of_a_step(knobs, config, Machine("cpu", "float32"))
    assert model.flops_per_token() > 6 * model.num_params(embeddings=False)

    def step():
        gpt = GPT(config)
        for _ in range(steps):
            gpt(idx, idx)[1].backward()

    real = Machine("cpu", "float32").peak_memory(step)
    assert sum(memory.values()) - memory["optimizer"] == pytest.approx(real, rel=0.02)
    assert memory["optimizer"] == 2 * memory["gradients"] == 8 * model.num_params()
    assert 0 <= memory["weights"] - memory["gradients"] < 6000          # buffers


def test_memory_tokens_flops_and_hours_are_printed(capsys):
    """The hours at an MFU are those after which train.py's own column mfu would show it."""
    flags = SMALL | {"batch_size": 2, "max_iters": 1000, "gradient_accumulation_steps": 3, "gpu": "A100", "mfu": 0.5}
    train.main(["--dry_run", *(f"--{name}={value}" for name, value in flags.items())])
    model, text = GPT(GPTConfig(**SMALL)), capsys.readouterr().out
    size, flops = 4e-6 * model.num_params(), model.flops_per_token() * 384_000
    hours = flops / (312e12 * 0.5) / 3600
    for words in (f" {2 * size:.2f} MB", f"{4 * size / 8:.2f} MB on each of 8 GPUs", "1,000 steps, 384,000 in all",
                  f"{flops:.3g} in all", f"{hours:.3g} on 1 GPU, {hours / 8:.3g} on 8 GPUs"):
        assert words in text


def test_a_dry_run_needs_neither_data_nor_memory(monkeypatch, tmp_path, capsys):
    """The weights of this model are 5 GB. Its data set does not exist."""
    monkeypatch.chdir(tmp_path)
    train.main("--dry_run --preset=paper5-1b --n_layer=2 --n_embd=16384 --n_inner=4096 --block_size=64".split())
    assert re.search(r"^  weights +\d[\d.]+ GB$", capsys.readouterr().out, re.M) and not any(tmp_path.iterdir())
