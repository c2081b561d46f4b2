"""eval.py speed --everything: every part runs from end to end without a GPU, in Triton's interpreter."""
import dataclasses
import json
from functools import partial

import pytest
from bounds import below
from conftest import DEVICE, TINY, needs_triton

import eval as eval_script
import mixers
from common.machine import Machine
from evals import everything, kernels
from evals.decode import HARD

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]      # see test_kernels.py
FLAGS = ("speed", "--everything", "--device=cpu", "--dtype=float32")


@pytest.fixture(autouse=True)
def minutes(monkeypatch):
    """A fake clock: every look at it takes a minute, and every timed call, which runs once, a millisecond."""
    looks = iter(range(0, 10**6, 60))
    monkeypatch.setattr(everything, "clock", lambda: next(looks))
    monkeypatch.setattr(Machine, "race", lambda machine, cases, rounds: {
        name: (run(), 0.001)[1] for name, run in cases.items()})


@pytest.mark.skipif(DEVICE == "cuda", reason="the sizes of this trial are those without a GPU")
@pytest.mark.exhaustive
def test_every_part_runs_from_end_to_end(monkeypatch, data, tmp_path, capsys):
    trained = (*TINY, "--attn=tda", f"--dataset={data}", "--n_head=1", "--max_iters=2")
    monkeypatch.setattr(everything, "TRIAL", dataclasses.replace(everything.TRIAL, trained=trained))
    monkeypatch.setattr(kernels, "PRODUCTS", {"softmax": (2, 5), "tda": (1.5, 4)})
    eval_script.main([*FLAGS, "--minutes=10000", f"--out={tmp_path}"])
    printed, page = capsys.readouterr().out, (tmp_path / "gpu.md").read_text()
    assert printed == page and "No time was left" not in page
    found = {name: json.loads((tmp_path / f"gpu-{name}-cpu.json").read_text()) for name in everything.PARTS}
    assert all(part.about in page and found[name]["tables"] for name, part in everything.PARTS.items())
    assert '"error"' not in json.dumps(found)
    checked = found["check"]["tables"]["float32"]
    for row in checked.values():
        below(max(row[name] for name in ("output", "dq", "dk", "dv")), row["allowed"])
        below(row["parameters"] or 0, 4 * row["allowed"])               # PyTorch in float32 needs more than one as well
    assert {*HARD, *everything.CHECKED} <= checked.keys() and checked["tda"]["parameters"] > 0
    assert checked["tda"]["largest at"] in ("beta", "lambda_logit", "out_norm.weight")
    steps, = found["steps"]["tables"].values()
    assert steps.keys() == {"softmax (sdpa)", *mixers.trained_recipes()}
    assert all(row["tokens_per_s"] == 16000 and row["memory_gb"] > 0 for row in steps.values())
    assert any("gain" in row for table in found["live"]["tables"].values() for row in table.values())


def test_what_no_longer_fits_is_named_and_a_failure_stops_nothing(monkeypatch, tmp_path, capsys):
    """What the first part leaves over of its third of the nine minutes goes to the second."""
    def measure(name):
        if name == "bad":
            raise RuntimeError("the device\nis gone")
        return {name: {"x": 1}}

    def part(share, *names):
        return everything.Part("x", share, lambda *_: [everything.Step("table", n, partial(measure, n)) for n in names])

    monkeypatch.setattr(everything, "PARTS", {"one": part(1, "a", "bad"), "two": part(2, *"cdefghij")})
    eval_script.main([*FLAGS, "--minutes=9", f"--out={tmp_path}"])
    said, err = capsys.readouterr()
    one, two = (json.loads((tmp_path / f"gpu-{name}-cpu.json").read_text()) for name in ("one", "two"))
    assert one["tables"]["table"] == {"a": {"x": 1}, "bad": {"error": "RuntimeError: the device is gone"}}
    assert [*two["tables"]["table"]] == [*"cdefghi"] and two["left"] == ["table: j"]
    assert "bad is missing: RuntimeError: the device is gone" in said and "for 1 steps: table: j" in said
    assert "RuntimeError" in err and "| i | 1 |" in said and "# A trial without a GPU" in said
