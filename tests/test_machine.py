"""common/machine.py: peak speeds of known GPUs, and live memory."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from common.machine import LiveMemory, Machine, pick_dtype


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_peaks_are_known_by_name_and_only_for_16_bits(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    machine = Machine("cpu", "float32")
    machine.device = torch.device("cuda")
    for machine.dtype, expected in (("float32", None), ("bfloat16", peak)):
        assert machine.peak_flops() == expected


@pytest.mark.parametrize("generation, dtype", [(7, "float16"), (8, "bfloat16")])
def test_bfloat16_is_chosen_where_the_gpu_multiplies_it(generation, dtype, monkeypatch):
    """A T4 (7.5) has bfloat16 tensors, but multiplies them in software."""
    about = SimpleNamespace(major=generation)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "get_device_properties": about,
        "_check_bf16_tensor_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert (pick_dtype("auto", "cuda"), pick_dtype("float32", "cuda")) == (dtype, "float32")


def test_live_memory_counts_a_storage_once_and_drops_freed_ones():
    with LiveMemory() as memory:
        kept = torch.zeros(1000)  # 4,000 bytes
        assert kept.view(10, 100).t().shape == (100, 10) and memory.now == 4000
        kept + 1  # freed at once
    assert (memory.now, memory.peak) == (4000, 8000)


@pytest.mark.parametrize(
    "given",
    ["RANK=-1", "RANK=1", "RANK=", "RANK=2 WORLD_SIZE=2", "LOCAL_RANK=-2", "LOCAL_RANK=0.5"]
    + ["WORLD_SIZE=0", "WORLD_SIZE=x", "WORLD_SIZE=2"],
)
def test_variables_that_name_no_rank_are_refused(given, monkeypatch):
    for pair in given.split():
        monkeypatch.setenv(*pair.split("="))
    with pytest.raises(ValueError, match=f"{given.split()[-1]}.* name no rank.*unset them"):
        Machine("cpu")


@pytest.mark.parametrize(
    "given, waits", [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
@pytest.mark.parametrize("module", ["train", "eval", "pretrained.convert"])
def test_threads_sleep_while_they_wait_unless_the_user_decides(module, given, waits):
    """It is decided before torch, which cannot be imported here, reads it."""
    code = "import os, sys; sys.modules['torch'] = None\ntry: import {}\n"
    code += "except ImportError: pass\nfinally: print(os.environ['OMP_WAIT_POLICY'])"
    env = {name: os.environ[name] for name in os.environ if "OMP_" not in name} | given
    argv = [sys.executable, "-c", code.format(module)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == f"{waits}\n"
