"""eval.py speed --tune: the fastest tile is written to a file, the kernels read it, and a run keeps its tiles."""
import json

import pytest
import torch
from bounds import below, same
from conftest import DEVICE, complain, log_rows, meta, needs_triton, train_here, weights
from test_kernels import draw, outputs_and_gradients

import eval as eval_script
import kernels
from common import files
from common.machine import Machine, gpu_name
from common.tiles import CHOSEN, tile_name
from evals import tune
from evals.compile import ATTENTION, CALLS
from evals.speed import Speed
from mixers import recurrent_kernels

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]      # see test_kernels.py
GPU = gpu_name(torch.device(DEVICE))
SMALL = ("--widths=16", "--n_embd=32", "--lengths=17", "--tokens=17", "--dtype=float32", "--repeats=1")


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """A results folder of the test's own, from which the kernels read their tiles. Nothing was read before."""
    monkeypatch.setattr("common.tiles.RESULTS", tmp_path)
    CHOSEN.clear()
    yield tmp_path / f"tiles-{GPU}.json"
    CHOSEN.clear()


def write_record(path, tiles, **other):
    record = {"gpu": GPU, "triton": kernels.triton.__version__, "tiles": tiles} | other
    path.write_text(json.dumps(record))


def name(column, row="plain"):
    return tile_name(column, row, 64, torch.float32)


@pytest.fixture
def fake_clock(monkeypatch):
    """A device on which some tiles are fast: call it with {part of a tile's name: tile}. Every look at the clock takes
    a minute."""
    fast = {}

    def seconds(machine, run):
        tile, name = run.args[0], list(CHOSEN[GPU])[-1]                  # the timed tile, and the choice of this moment
        return 1.0 if any(part in name and tile == fast[part] for part in fast) else 2.0

    looks = iter(range(0, 10**6, 60))
    monkeypatch.setattr(Machine, "seconds", seconds)
    monkeypatch.setattr(tune, "clock", lambda: next(looks))
    return fast.update


def choices(*kinds):
    """A function in place of tune.all_choices that knows only these choices: (column, row)."""
    return lambda *_: [tune.Choice(*kind, 64, torch.float32) for kind in kinds]


def test_the_fastest_tile_is_chosen_saved_and_used(fake_clock, monkeypatch, evaluate, results):
    """The budget is one choice. A second call keeps it and goes on with the others, here without a budget for any."""
    monkeypatch.setattr(tune, "all_choices", choices(("forward", "plain"), ("backward_keys", "plain")))
    fake_clock({"forward, plain": (16, 16, 4, 1)})
    found = evaluate("speed", "--tune", "--minutes=1", f"--out={results}", *SMALL)
    assert found["tiles"] == {name("forward"): [16, 16, 4, 1]} and found["left"] == [name("backward_keys")]
    assert json.loads(results.read_text())["tiles"] == found["tiles"]
    assert found["gpu"] == GPU and found["torch"] == torch.__version__ and found["triton"]
    chosen = found["choices"][name("forward")]
    assert chosen["table"] == [32, 16, 4, 1] and chosen["gain"] == 2 and chosen["noise"] == tune.MARGIN
    used = tiles_of_a_call()
    assert used["forward"] == (16, 16, 4, 1) and used["backward_keys"] == (16, 32, 4, 1)       # the table's
    again = evaluate("speed", "--tune", "--minutes=0.5", f"--out={results}", *SMALL)
    assert again == found


def test_all_rows_of_the_tables_are_chosen():
    """Every row and column that a call of evals/compile.py reads, and no other."""
    args = Speed(widths="64,128", dtype="float32")
    found = {(choice.row, choice.column) for choice in tune.all_choices(args, Machine("cpu", "float32"))}
    with_u = {row for row, calls in CALLS.items()
              if "states" not in row and any(kernels.named(ATTENTION[call][0]).save_u for call in calls)}
    assert found == {(row, column) for row in CALLS for column in ("state", *kernels.COLUMNS) if (
        column == "state" if "states" in row else column == "forward with U" and row in with_u
        or column == "backward_table" and "busy" in row or column in ("forward", "backward_rows", "backward_keys"))}


def tiles_of_a_call():
    """The tile that each kernel takes in a call of softmax, in a process that has read nothing yet."""
    CHOSEN.clear()
    x = torch.empty(1, 1, 40, 16)
    call, rule = kernels.Call("softmax", x, x, x, *[None] * 5, 1.0, 0, 0), kernels.named("softmax")
    return {kernel: kernels.tile(kernel, rule, call) for kernel in ("forward", "backward_keys")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("column, row", [
    (choice.column, choice.row)
    for choice in tune.all_choices(Speed(widths="64", dtype="float32"), Machine("cpu", "float32"))])
def test_every_kind_of_kernel_can_be_chosen(column, row, fake_clock, monkeypatch, evaluate):
    """The first neighbour is the fastest, and it runs in all calls of its row."""
    monkeypatch.setattr(tune, "all_choices", choices((column, row)))
    choice, = tune.all_choices()
    first, *_ = tune.neighbours(column, choice.present(torch.device(DEVICE)))
    fake_clock({column: first})
    found = evaluate("speed", "--tune", *SMALL)["choices"][choice.name]
    assert tuple(found["tile"]) == first and found["gain"] == 2 and not found["left_out"]


def test_a_tile_that_does_not_run_or_computes_something_else_is_left_out(fake_clock, monkeypatch, evaluate):
    wrong, broken = (64, 16, 4, 1), (16, 16, 4, 1)
    launch = kernels.launch

    def faulty(kernel, rule, call, args, diagonals=None):
        if kernel is kernels.forward and kernels.tile("forward", rule, call) == broken:
            raise RuntimeError("out of resource: shared memory")
        launch(kernel, rule, call, args, diagonals)
        if kernel is kernels.forward and kernels.tile("forward", rule, call) == wrong:
            args[1].at.mul_(1.001)

    monkeypatch.setattr(kernels, "launch", faulty)
    monkeypatch.setattr(tune, "all_choices", choices(("forward", "plain")))
    fake_clock({"forward": wrong})
    found = evaluate("speed", "--tune", *SMALL)["choices"][name("forward")]
    assert found["tile"] == found["table"] and found["gain"] == 1
    assert "another result" in found["left_out"]["64x16x4x1"] and "shared memory" in found["left_out"]["16x16x4x1"]


@pytest.mark.exhaustive
def test_a_gain_within_the_noise_does_not_count(monkeypatch, evaluate):
    """The table's tile takes 2.0 seconds and, the second time, 2.3. So 1.8 seconds are no gain, and 1.6 are."""
    monkeypatch.setattr(tune, "all_choices", choices(("forward", "plain")))
    for time_of_others, gains in ((1.8, False), (1.6, True)):
        monkeypatch.setattr(Machine, "race", lambda machine, cases, rounds, time=time_of_others: {
            case: {0: 2.0, len(cases) - 1: 2.3}.get(number, time) for number, case in enumerate(cases)})
        CHOSEN.clear()
        found = evaluate("speed", "--tune", *SMALL)["choices"][name("forward")]
        assert (found["tile"] != found["table"]) == gains


def test_a_choice_that_fails_is_noted_and_the_next_one_follows(fake_clock, monkeypatch, evaluate, capsys, results):
    """The table's tile of one kernel does not fit. A second call tries it again."""
    launch = kernels.launch

    def faulty(kernel, *args):
        if kernel is kernels.backward_keys:
            raise RuntimeError("out of resource: shared memory")
        launch(kernel, *args)

    monkeypatch.setattr(tune, "neighbours", lambda *_: [])
    monkeypatch.setattr(tune, "all_choices", choices(("backward_keys", "plain"), ("forward", "plain")))
    monkeypatch.setattr(kernels, "launch", faulty)
    found = evaluate("speed", "--tune", *SMALL, f"--out={results}")
    assert found["failed"] == {name("backward_keys"): "RuntimeError: out of resource: shared memory"}
    assert list(found["tiles"]) == list(found["choices"]) == [name("forward")]
    monkeypatch.setattr(kernels, "launch", launch)
    other = results.with_name("other.json")
    results.rename(other)
    eval_script.main(["speed", "--tune", *SMALL, f"--device={DEVICE}", f"--out={other}"])
    said = capsys.readouterr().out
    assert name("backward_keys") in said and "failed" not in said and f"read only {results}: copy it there" in said


def test_a_width_without_tiles_is_refused(capsys):
    code, line = complain(eval_script.main, capsys, "speed", "--tune", f"--device={DEVICE}", *SMALL, "--widths=64,512")
    assert code == 1 and "--widths=64,512: the kernels have tiles for head dimensions up to 256" in line


# ----------------------------------------------------------------------------------------------------- reading the file


def test_a_state_reads_the_same_file(results):
    q = torch.empty(1, 1, 40, 16)
    write_record(results, {name("state", "states"): [16, 32, 32, 16]})
    assert recurrent_kernels.tiles(q, False) == (16, 32, 32, 16)
    assert recurrent_kernels.tiles(q, True) == recurrent_kernels.SMALL[True]


@pytest.mark.exhaustive
def test_the_result_is_the_same_with_other_tiles(results):
    x, options = draw("elastic", 45, W=9)
    expected = outputs_and_gradients(kernels.attend, "elastic", x, options)
    tiles = {name(column, "plain+busy"): [16, 16, 4, 1] for column in kernels.COLUMNS}
    write_record(results, tiles)
    CHOSEN.clear()
    found = outputs_and_gradients(kernels.attend, "elastic", x, options)
    below(tune.largest_error(found.values(), expected.values()), 1e-5)


@pytest.mark.parametrize("content, says", [
    ("{", "not valid JSON"), ("[]", "does not hold tiles"),
    ('{"tiles": {"forward, plain": [24, 16, 4, 1]}}', "does not hold"),
    ('{"tiles": {"backward_table, plain+busy": [32, 16, 4, 1]}}', "does not"),
    ('{"gpu": "h200", "tiles": {}}', "the tiles of h200, but this GPU is"),
    ('{"gpu": [1], "tiles": {}}', "does not hold tiles")])
def test_a_damaged_or_foreign_file_is_one_line(content, says, results, data, capsys):
    import train
    results.write_text(content)
    run = ("--attn=softmax", "--kernel=triton", "--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16",
           f"--device={DEVICE}", "--dtype=float32", f"--dataset={data}", f"--out_dir={results.parent / 'run'}")
    code, line = complain(train.main, capsys, *run)
    assert code == 1 and says in line and "delete it" in line and results.name in line
    assert not (results.parent / "run").exists()
    code, line = complain(eval_script.main, capsys, "speed", "--tune", f"--device={DEVICE}", *SMALL)
    assert says in line


def test_tiles_that_another_triton_chose_are_not_used(results):
    write_record(results, {name("forward"): [16, 16, 4, 1]}, triton="2.0")
    assert tiles_of_a_call()["forward"] != (16, 16, 4, 1)


# ------------------------------------------------------------------------------------------------------ a run's tiles

OTHER = {name("state", "states"): [16, 32, 32, 16]}
# a state, because its kernels are the quickest in the interpreter: 20 tokens are two chunks of 16, or one of 32
RUN = ("--attn=linear_state", "--kernel=triton", "--block_size=20", "--batch_size=1", "--n_head=1",
       "--lr_decay_iters=3", f"--device={DEVICE}")


@pytest.fixture
def trained(monkeypatch, data):
    """Train a run, without the report at its end, which takes most of the time in the interpreter and changes nothing.
    Returns its weights."""
    monkeypatch.setattr("train.report", lambda *_: {})

    def call(folder, *flags):
        CHOSEN.clear()                          # as in a new process
        new = () if "--init_from=resume" in flags else (*RUN, f"--dataset={data}")
        train_here(*new, f"--out_dir={folder}", *flags)
        return weights(folder)
    return call


def test_a_run_resumes_with_its_tiles_when_the_file_is_gone(results, trained, tmp_path):
    """It then equals an uninterrupted run bit for bit."""
    write_record(results, OTHER)
    whole = trained(tmp_path / "whole", "--max_iters=3")
    trained(tmp_path / "resumed", "--max_iters=1")
    results.unlink()
    same(trained(tmp_path / "resumed", "--init_from=resume", "--max_iters=3"), whole)
    assert log_rows(tmp_path / "resumed")[2:] == log_rows(tmp_path / "whole")[2:]
    assert meta(tmp_path / "resumed")["tiles"] == meta(tmp_path / "whole")["tiles"]
    assert meta(tmp_path / "whole")["tiles"]["tiles"] == OTHER


def test_a_run_without_chosen_tiles_resumes_without_them(results, trained, tmp_path):
    trained(tmp_path, "--max_iters=1")
    write_record(results, OTHER)
    trained(tmp_path, "--init_from=resume", "--max_iters=2")
    assert CHOSEN == {GPU: {}} and meta(tmp_path)["tiles"]["tiles"] == {}


def test_other_tiles_add_in_another_order(results):
    """Without this, the test above could not fail."""
    x = [torch.randn(1, 1, 20, 16, device=DEVICE) for _ in range(3)]
    outputs = []
    for tiles in ({}, OTHER):
        write_record(results, tiles)
        CHOSEN.clear()
        outputs.append(recurrent_kernels.recur(*x))
    assert (outputs[0] != outputs[1]).any()


def test_a_damaged_entry_of_a_run_is_one_line(trained, tmp_path, capsys):
    trained(tmp_path, "--max_iters=1")
    files.write_json(tmp_path / "meta.json", meta(tmp_path) | {"tiles": [1]})
    capsys.readouterr()
    code, line = complain(eval_script.main, capsys, "loss", f"--out_dir={tmp_path}")
    assert code == 1 and f'the entry "tiles" in {tmp_path / "meta.json"} does not hold tiles' in line


def test_an_instrument_uses_the_tiles_of_its_run(results, trained, tmp_path, evaluate):
    trained(tmp_path / "run", "--max_iters=1")                          # without a file: the table's tiles
    write_record(results, OTHER)
    CHOSEN.clear()
    evaluate("loss", f"--out_dir={tmp_path / 'run'}", "--windows=1", "--kernel=triton")
    assert CHOSEN == {GPU: {}}
