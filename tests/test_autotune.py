"""AUTOTUNE=1: Triton's autotuner chooses warps and stages, and results stay the same."""
import pytest
import torch
from conftest import DEVICE, needs_triton

import kernels
from mixers import recurrent_kernels

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]      # see test_kernels.py


@pytest.mark.parametrize("state", [False, True])
def test_every_configuration_is_tried_once_and_changes_nothing(state, monkeypatch):
    """Also in scan_back, which overwrites what it reads."""
    tried = []

    def clock(tuner, call, quantiles):
        tried.append(call())
        return [1.0] * 3

    def results():
        o = recurrent_kernels.recur(q, k, v, None, erase) if state else kernels.attend("entmax", q, k, v)[0]
        return o, *torch.autograd.grad(o.sum(), (q, k, v))

    q, k, v = (torch.randn(1, 1, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    erase = torch.rand(1, 1, 20, 1, device=DEVICE)
    expected = results()
    monkeypatch.setattr("triton.runtime.autotuner.Autotuner.do_bench", clock)
    monkeypatch.setattr(kernels, "AUTOTUNE", True)
    for _ in range(2):
        for a, b in zip(results(), expected, strict=True):
            assert (a == b).all() if DEVICE == "cpu" else torch.allclose(a, b, atol=1e-4)
        assert len(tried) == 9 * (6 if state else 3)
