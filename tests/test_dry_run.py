"""train.py --dry_run: the memory of a step, tokens, FLOPs and hours, without training."""

import pytest
import torch
from bounds import below

import train
from common.machine import Machine
from model import GPT, GPTConfig

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 257}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "choices", [{}, {"mlp": "swiglu", "norm": "rmsnorm", "vocab_size": 4000, "n_layer": 6}]
)
def test_activations_are_estimated_within_a_factor_of_1_5(choices, dtype):
    """The other parts are exact: four bytes a weight and a gradient, eight for AdamW's averages."""
    config = GPTConfig(**SMALL | choices)
    model = GPT(config)
    machine = Machine("cpu", dtype)
    idx = torch.zeros(8, 64, dtype=torch.long)
    memory = train.memory_of_a_step(model, config, train.Train(batch_size=8, dtype=dtype))

    def step():  # of an earlier micro-batch there are gradients
        with machine.autocast():
            loss = model(idx, idx)[1]
        loss.backward()

    step()
    real = machine.peak_memory(step)
    below(max(real / memory["activations"], memory["activations"] / real), 1.5)
    assert memory["weights"] == memory["gradients"] == 4 * model.num_params()
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    optimizer.step()
    averages = [x for state in optimizer.state.values() for x in state.values()]
    assert memory["optimizer"] == sum(x.nbytes for x in averages if x.dim())


def test_memory_tokens_flops_and_hours_are_printed(capsys):
    """The hours at an MFU are those after which train.py's own column mfu would show it."""
    flags = "--batch_size=2 --max_iters=1000 --gradient_accumulation_steps=3 --gpu=A100 --mfu=0.5"
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    train.main(["--dry_run", *sizes, *flags.split()])
    text = capsys.readouterr().out
    model = GPT(GPTConfig(**SMALL))
    size = 4e-9 * model.num_params()
    flops = model.flops_per_token() * 384_000
    hours = flops / (312e12 * 0.5) / 3600
    assert model.flops_per_token() > 6 * model.num_params(embeddings=False)
    for words in (
        f" {2 * size:.3f} GB",
        f"{4 * size / 8:.3f} GB on each of 8 GPUs",
        "1,000 steps, 384,000 in all",
        f"{flops:.3g} in all",
        f"{hours:.3g} on 1 GPU, {hours / 8:.3g} on 8 GPUs",
    ):
        assert words in text


def test_a_dry_run_needs_neither_data_nor_memory(monkeypatch, tmp_path, capsys):
    """The weights of this model are 17 GB. Its data set does not exist."""
    monkeypatch.chdir(tmp_path)
    flags = "--preset=paper5-1b --n_layer=2 --n_embd=16384 --n_inner=4096 --block_size=64"
    train.main(["--dry_run", *flags.split()])
    assert "  weights         16.794 GB" in capsys.readouterr().out and not any(tmp_path.iterdir())
