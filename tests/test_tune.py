"""eval.py speed --tune: the fastest tile is written to a file, the kernels read it, and a run keeps its tiles."""
import json

import pytest
import torch
from bounds import same
from conftest import DEVICE, complain, log_rows, meta, needs_triton, train_here, weights

import eval as eval_script
import kernels
from common.machine import Machine, gpu_name
from common.tiles import CHOSEN, tile_name
from evals import tune
from mixers import recurrent_kernels

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]      # see test_kernels.py
GPU = gpu_name(torch.device(DEVICE))
SMALL = ("--widths=16", "--n_embd=32", "--lengths=17", "--tokens=17", "--dtype=float32", "--repeats=1")


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """The file from which the kernels read their tiles, in a folder of the test's own. Nothing was read before."""
    monkeypatch.setattr("common.tiles.RESULTS", tmp_path)
    CHOSEN.clear()
    yield tmp_path / f"tiles-{GPU}.json"
    CHOSEN.clear()


def write_record(path, tiles, **other):
    path.write_text(json.dumps({"gpu": GPU, "triton": kernels.triton.__version__, "tiles": tiles} | other))


def name(column, row="plain"):
    return tile_name(column, row, 64, torch.float32)


def tile_of_a_call():
    """The tile of the forward kernel in a call of softmax, in a process that has read nothing yet."""
    CHOSEN.clear()
    x = torch.empty(1, 1, 40, 16)
    return kernels.tile("forward", kernels.named("softmax"), kernels.Call("softmax", x, x, x, *[None] * 5, 1.0, 0, 0))


def test_the_fastest_tile_is_chosen_saved_and_used(monkeypatch, evaluate, results, capsys):
    """Every look at the clock takes a minute. Of the neighbours of the table's tile one is twice as fast, one computes
    something else, one does not run and one gains less than the noise. The budget is two choices, of which one fails. A
    second call goes on with the others. A file that another Triton wrote is not read, one of another GPU refused."""
    fast, wrong, broken, near = (16, 16, 4, 1), (64, 16, 4, 1), (32, 32, 4, 1), (32, 16, 8, 1)
    launch, looks = kernels.launch, iter(range(0, 10**6, 60))

    def faulty(kernel, rule, call, args, diagonals=None):
        tile = kernel is kernels.forward and kernels.tile("forward", rule, call)
        if tile == broken or kernel is kernels.backward_rows:
            raise RuntimeError("out of resource: shared memory")
        launch(kernel, rule, call, args, diagonals)
        if tile == wrong:
            args[1].at.mul_(1.001)

    def tuned(*flags):
        return evaluate("speed", "--tune", *flags, *SMALL)

    columns, times = ["backward_rows", "forward", "backward_keys"], {wrong: 0.5, near: 1.99, fast: 1.0}
    monkeypatch.setattr(kernels, "launch", faulty)
    monkeypatch.setattr(tune, "clock", lambda: next(looks))
    monkeypatch.setattr(Machine, "seconds", lambda machine, run: times.get(run.args[0], 2.0))
    monkeypatch.setattr(tune, "all_choices", lambda *_: [tune.Choice(c, "plain", 64, torch.float32) for c in columns])
    found = tuned("--minutes=2", f"--out={results}")
    assert found["tiles"] == {name("forward"): [*fast]} and found["left"] == [name("backward_keys")]
    assert found["failed"] == {name("backward_rows"): "RuntimeError: out of resource: shared memory"}
    assert json.loads(results.read_text())["tiles"] == found["tiles"] and found["gpu"] == GPU and found["triton"]
    chosen = found["choices"][name("forward")]
    assert chosen["table"] == [32, 16, 4, 1] and chosen["gain"] == 2 and chosen["noise"] == tune.MARGIN
    assert "another result" in chosen["left_out"]["64x16x4x1"] and "shared memory" in chosen["left_out"]["32x32x4x1"]
    assert tile_of_a_call() == fast
    again = tuned("--minutes=1.5", f"--out={results}")
    assert all(again[key] == found[key] for key in ("tiles", "choices"))
    del times[fast], columns[0], columns[1]     # without it no gain counts, so the table's tile stays
    found = tuned()["choices"][name("forward")]
    assert found["tile"] == found["table"] and found["gain"] == 1
    write_record(results, {name("forward"): fast}, triton="2.0")
    assert tile_of_a_call() != fast
    results.write_text('{"gpu": "h200", "tiles": {}}')
    code, line = complain(eval_script.main, capsys, "speed", "--tune", f"--device={DEVICE}", f"--out={results}", *SMALL)
    assert code == 1 and "the tiles of h200, but this GPU is" in line and "delete it" in line and results.name in line


# a state, because its kernels are the quickest in the interpreter: 20 tokens are two chunks of 16, or one of 32
OTHER = {name("state", "states"): [16, 32, 32, 16]}


def test_a_run_keeps_its_tiles_whatever_the_file_holds(results, tmp_path, monkeypatch, data, evaluate):
    """A resumed run equals an uninterrupted one bit for bit. The report at the end takes most of the time and changes
    nothing."""
    monkeypatch.setattr("train.report", lambda *_: {})
    resumed, whole, without = (tmp_path / folder for folder in ("resumed", "whole", "without"))

    def trained(folder, *flags):
        CHOSEN.clear()                          # as in a new process
        new = () if "--init_from=resume" in flags else (
            "--attn=linear_state", "--kernel=triton", "--block_size=20", "--batch_size=1", "--n_head=1",
            "--lr_decay_iters=3", f"--device={DEVICE}", f"--dataset={data}")
        train_here(*new, f"--out_dir={folder}", *flags)

    x = [torch.randn(1, 1, 20, 16, device=DEVICE) for _ in range(3)]
    plain = recurrent_kernels.recur(*x)
    trained(without, "--max_iters=1")
    write_record(results, OTHER)
    CHOSEN.clear()
    assert (recurrent_kernels.recur(*x) != plain).any()                 # or the rest could not fail
    trained(whole, "--max_iters=3")
    trained(resumed, "--max_iters=1")
    trained(without, "--init_from=resume", "--max_iters=2")
    assert CHOSEN == {GPU: {}} and meta(without)["tiles"]["tiles"] == {}
    CHOSEN.clear()
    evaluate("loss", f"--out_dir={without}", "--windows=1", "--kernel=triton")
    assert CHOSEN == {GPU: {}}                  # an instrument uses the tiles of its run
    results.unlink()
    trained(resumed, "--init_from=resume", "--max_iters=3")
    same(weights(resumed), weights(whole))
    assert log_rows(resumed)[2:] == log_rows(whole)[2:]
    assert meta(resumed)["tiles"] == meta(whole)["tiles"] and meta(whole)["tiles"]["tiles"] == OTHER
