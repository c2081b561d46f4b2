"""common/runs.py: earlier runs are kept, a full disk loses nothing, one run a folder."""

import contextlib
import multiprocessing
import os
import resource
import runpy
import socket
import sys
from types import SimpleNamespace

import pytest
from conftest import FILES, ROOT, assert_says, complain, log_rows, train_here
from hypothesis import given
from hypothesis import strategies as st

import train as train_script
from common import files
from common.runs import Run, read_run

MACHINE = SimpleNamespace(main=True, peak_flops=lambda: None, share=lambda value: value)
GONE, HERE = 1 << 22, socket.gethostname()  # no process has this id


USUAL = {
    "rope_share": 1.0,
    "n_expert": 8,
    "n_active": 2,
    "expert_balance": 0.0,
    "optimizer": "adamw",
    "sharded_ckpt": False,
}  # in each run of an earlier version


def test_a_run_of_an_earlier_version_is_read_unless_it_has_what_is_gone(copy):
    meta = read_run(copy)[0]
    for name, value in (
        ("attn", "fox"),
        ("layers", "softmax*2+fox"),
        ("layers", "lazy,forget=sigmoid"),
        ("forget", "sigmoid"),
        ("mlp", "moe"),
        ("norm_place", "parallel"),
        ("rope_share", 0.25),
        ("rope_scaling", "yarn:8,4,1,8"),
        ("optimizer", "muon"),
        ("sharded_ckpt", True),
    ):
        knobs = meta["knobs"] | USUAL | {name: value}
        files.write_json(copy / "meta.json", meta | {"knobs": knobs})
        with pytest.raises(ValueError, match=f"was trained with {name}=.*git checkout 55b941e"):
            read_run(copy)
    files.write_json(copy / "meta.json", meta | {"knobs": meta["knobs"] | USUAL})
    train_here(f"--out_dir={copy}", "--init_from=resume", "--max_iters=9")


@pytest.mark.parametrize("name", ["lock", "old"])
def test_a_run_follows_no_link_out_of_its_folder(name, copy, tmp_path, elastic_run, capsys):
    (tmp_path / "target/mine").mkdir(parents=True)
    (copy / name).symlink_to(tmp_path / "target")
    flags = "--init_from=resume", f"--out_dir={copy}", "--max_iters=9"
    _, err = complain(train_script.main, capsys, *flags)
    assert_says(f"copy/{name} is a symbolic link, .*: remove the link, or name another", err)
    assert [*(tmp_path / "target").iterdir()] == [tmp_path / "target/mine"]
    assert all((copy / file).read_bytes() == (elastic_run / file).read_bytes() for file in FILES)


@given(
    st.sampled_from([GONE, 1 << 70, os.getpid(), os.getppid(), 1]),
    st.sampled_from([HERE, "elsewhere"]),
    st.sampled_from(["process {} on {}", "process {}", ""]),
)
def test_a_lock_is_taken_over_only_from_a_process_of_this_host_that_has_ended(
    tmp_path_factory, process, host, form
):
    run = Run(tmp_path_factory.mktemp("run"), MACHINE)
    text = form.format(process, host)
    run.lock.write_text(text)
    ended = "on" in text and host == HERE and process not in (os.getppid(), 1)
    if ended or not text:
        with run.locked(MACHINE):
            assert run.lock.read_text() == f"process {os.getpid()} on {HERE}"
        assert not [*run.folder.iterdir()]
    else:
        says = f"{text} trains in {run.folder}: .*, delete {run.lock}"
        if "on" not in text:
            says = f"{run.lock} is not a run's lock: remove it"
        with pytest.raises(ValueError, match=says), run.locked(MACHINE):
            pass
        assert [path.read_text() for path in run.folder.iterdir()] == [text]
        # every other rank gets the main rank's error from `share`
        told = {"main": False, "share": lambda _: "of the main rank"}
        rank = SimpleNamespace(**vars(MACHINE) | told)
        other = Run(run.folder, rank)
        with pytest.raises(ValueError, match="of the main rank"), other.locked(rank):
            pass


def take(folder, together, taken):
    """One of several processes that begin a run together, and live until all have tried."""
    run = Run(folder, MACHINE)
    together.wait(60)
    try:
        run.take_lock()
        taken.put(run.process)
    except ValueError:
        taken.put("")
    together.wait(60)


@pytest.mark.parametrize("stale", [False, True])
def test_of_runs_that_begin_together_one_has_the_lock(stale, tmp_path):
    new = multiprocessing.get_context("fork")
    lock = tmp_path / "lock"
    for _ in range(10):
        lock.unlink(missing_ok=True)
        if stale:
            lock.write_text(f"process {GONE} on {HERE}")
        taken = new.Queue()
        together = new.Barrier(3)
        runs = [new.Process(target=take, args=(tmp_path, together, taken)) for _ in range(3)]
        for process in runs:
            process.start()
        found = [taken.get(timeout=60) for _ in runs]
        for process in runs:
            process.join(60)
        assert sorted(found)[:2] == ["", ""] and max(found) == lock.read_text()


COLUMNS = st.sampled_from((7, 7, 7, 1, 6, 8))


@given(st.lists(COLUMNS, max_size=12), st.integers(0, 12), st.integers(0, 300))
def test_rows_of_the_log_that_a_kill_cut_short_or_with_other_columns_are_dropped(
    tmp_path_factory, columns, last, cut
):
    """Row n has its own number of columns: 7 is right."""
    run = Run(tmp_path_factory.mktemp("run"), MACHINE)
    rows = [[str(n), *["12.5"] * (count - 1)] for n, count in enumerate(columns, 9)]
    text = "".join(",".join(row) + "\n" for row in [run.columns, *rows])
    run.log_csv.write_text(text := text[: len(text) - cut])
    whole = rows[: max(0, text.count("\n") - 1)]
    expected = [row for row in whole if len(row) == 7 and int(row[0]) <= 9 + last]
    assert run.rows_until(9 + last) == expected
    run.columns = ("mfu", *run.columns)  # as on a GPU that goes on
    assert run.rows_until(9 + last) == [["", *row] for row in expected]


@contextlib.contextmanager
def small_disk(limit):
    """Limit every file of this process. 20 kB are enough for a log but not for a checkpoint, 500
    bytes for neither."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(SystemExit, match="1"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "limit, says",
    [(20000, "step 12.*checkpoint of step 8 is still there"), (500, "copy at step 8")],
)
def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_can_go_on(
    limit, says, copy, elastic_run, capsys
):
    flags = ("--init_from=resume", f"--out_dir={copy}", "--max_iters=12")
    with small_disk(limit):
        train_script.main([*flags])
    assert (copy / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert sorted(p.name for p in copy.iterdir()) == sorted(FILES)
    # the lines before are the progress bar
    line = capsys.readouterr().err.rstrip("\n").splitlines()[-1]
    assert_says(f"{says}.*(space|resume)", line)  # what is safe, and what to do
    train_here(*flags)
    assert [row[0] for row in log_rows(copy)[1:]] == [str(step) for step in range(1, 13)]


def test_a_full_disk_leaves_no_half_data_set(tmp_path, monkeypatch, capsys):
    script = str(ROOT / "data/stdlib.py")
    monkeypatch.setattr(
        sys, "argv", [script, f"--source={ROOT / 'evals'}", f"--out_dir={tmp_path}"]
    )
    with small_disk(20000):
        runpy.run_path(script, run_name="__main__")
    assert_says(
        "stdlib.py: error: .*train.bin could not be written .*free some space",
        capsys.readouterr().err,
    )
    assert not list(tmp_path.iterdir())
