"""training/dry_run.py: a dry run predicts the peak memory of a real process, and counts tokens, FLOPs and hours."""
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import train
from common.machine import Machine
from model import GPT, GPTConfig
from training.dry_run import memory_of_a_step

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 257}
SIZES = [                                       # one dominated by activations, one by weights, gradients and AdamW
    "--n_layer=4 --n_head=4 --n_embd=256 --block_size=256 --batch_size=16",
    "--n_layer=6 --n_head=4 --n_embd=768 --block_size=64 --batch_size=2 --gradient_accumulation_steps=2"]

# The allocator returns every freed tensor, as it does by default. train.py tells it to keep them, which is faster and
# takes up to a third more: gaps between tensors
PROGRAM = """
import sys, train
from common import machine
machine.keep_freed_memory = lambda: None
def memory(field):                              # getrusage's peak can be that of the process which started this one
    with open("/proc/self/status") as f:
        return 1024 * int(f.read().split(field)[1].split()[0])
before = memory("VmRSS:")
try:
    train.main([*sys.argv[1:], "--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--device=cpu"])
finally:
    print("bytes:", memory("VmHWM:") - before)
"""


def dry_run(capsys, *flags):
    """What a dry run prints."""
    capsys.readouterr()
    train.main(["--dry_run", *flags])
    return capsys.readouterr().out


def size_of(part, text):
    """The bytes of one part of the memory."""
    number, unit = re.search(rf"^  {part} +([\d.,]+) (MB|GB)$", text, re.M).groups()
    return float(number.replace(",", "")) * {"MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("size", SIZES)
def test_the_predicted_peak_is_that_of_a_real_process(size, data, tmp_path, capsys, monkeypatch):
    """To 15 %, by the resident memory that the operating system reports."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")               # tensors above 64 KB get memory of their own
    flags = [f"--dataset={data}", "--dtype=float32", *size.split()]
    done = subprocess.run([sys.executable, "-c", PROGRAM, f"--out_dir={tmp_path}", *flags], capture_output=True,
                          text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    measured = int(re.search(r"^bytes: (\d+)", done.stdout, re.M)[1])
    assert size_of("together", dry_run(capsys, *flags)) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("attn", ["softmax", "elastic", "entmax", "diff", "focus", "performer", "gated_deltanet"])
def test_fake_tensors_are_as_large_as_real_ones(attn):
    """The peak of a step, counted in the same way on real tensors."""
    config, idx = GPTConfig(attn=attn, **SMALL), torch.zeros(2, 64, dtype=torch.long)
    model, memory = memory_of_a_step(train.Train(batch_size=2), config, Machine("cpu", "float32"))
    assert model.flops_per_token() > 6 * model.num_params(embeddings=False)
    real = Machine("cpu", "float32").peak_memory(lambda: GPT(config)(idx, idx)[1].backward())
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
