"""training/dry_run.py: a dry run predicts the peak memory of a step, and counts tokens, FLOPs and hours."""
import re

import pytest
import torch

import train
from common.machine import Machine
from model import GPT, GPTConfig
from training.dry_run import memory_of_a_step

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 257}


def dry_run(capsys, *flags):
    """What a dry run prints."""
    capsys.readouterr()
    train.main(["--dry_run", *flags])
    return capsys.readouterr().out


def size_of(part, text):
    """The bytes of one part of the memory."""
    number, unit = re.search(rf"^  {part} +([\d.,]+) (MB|GB)$", text, re.M).groups()
    return float(number.replace(",", "")) * {"MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.parametrize("attn, steps", [
    ("softmax", 1), ("softmax", 2), ("elastic", 1), ("entmax", 1), ("diff", 1), ("focus", 1), ("performer", 1),
    ("gated_deltanet", 1)])
def test_fake_tensors_are_as_large_as_real_ones(attn, steps):
    """The peak of a step, counted in the same way on real tensors. From the second micro-batch on, gradients exist."""
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


def test_memory_tokens_flops_and_hours_follow_from_the_knobs(capsys):
    """Weights, gradients and AdamW's two averages have four bytes a parameter; two decimals of a megabyte are printed.
    The hours at an MFU are those after which train.py's own column mfu would show it."""
    flags = ("--batch_size=2", "--gradient_accumulation_steps=3", "--max_iters=1000", "--gpu=A100", "--mfu=0.5")
    text = dry_run(capsys, *(f"--{name}={value}" for name, value in SMALL.items()), *flags)
    model, tokens = GPT(GPTConfig(**SMALL)), 2 * 3 * 64 * 1000
    size, flops = 4 * model.num_params(), model.flops_per_token() * tokens
    parts = {"weights": size, "gradients": size, "optimizer": 2 * size}
    assert {part: size_of(part, text) for part in parts} == pytest.approx(parts, abs=5e3)
    assert size_of("together", text) == pytest.approx(4 * size + size_of("activations", text), abs=2e4)
    assert f"with --shard=1 the first three take {4 * size / 8 / 1e6:.2f} MB on each of 8 GPUs" in text
    assert "tokens: 384 a step, 1,000 steps, 384,000 in all" in text and f"{flops:.3g} in all" in text
    hours = flops / (312e12 * 0.5) / 3600
    assert f"{hours:.3g} on 1 GPU, {hours / 8:.3g} on 8 GPUs" in text


def test_a_dry_run_needs_neither_data_nor_memory(monkeypatch, tmp_path, capsys):
    """The weights of this model are 5 GB. Its data set does not exist."""
    monkeypatch.chdir(tmp_path)
    text = dry_run(capsys, "--preset=paper5-1b", "--n_layer=2", "--n_embd=16384", "--n_inner=4096", "--block_size=64")
    assert size_of("weights", text) > 5e9 and not any(tmp_path.iterdir())
    with pytest.raises(SystemExit):             # a model of fake tensors must not depend on their content
        train.main(["--dry_run", "--mlp=moe", "--device=cpu"])
    assert "cannot count --attn=softmax with --mlp=moe" in capsys.readouterr().err
