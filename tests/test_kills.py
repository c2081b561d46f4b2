"""Kills: what is killed goes on as if nothing had happened, and nothing outlives it. Moments are
random; --hypothesis-seed draws others, and --all also kills ranks, launchers and other commands."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import bounds
import pytest
from conftest import ROOT, TINY, assert_same_run, by_default, command, contents, meta, train_here

from common import files, machine
from common.runs import read_checkpoint
from data import tokens

PATIENCE = 60  # seconds after which a process that is still there hangs


def ranks_of(mark):
    """{process id: its rank as text, or None} of a command and all it has started and that has not
    ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if mark in environment:
                variables = dict(pair.partition("=")[::2] for pair in environment)
                found[int(folder.name)] = variables.get("RANK")
    return found


def kill(argv, out, wait, ranks=(), how=signal.SIGKILL):
    """Begin a command, and send the signal `how` to some ranks, or () to itself, after
    wait(process). All that it has started ends as well, and what has its final name in `out` can be
    read. Returns its exit code and its output."""
    mark = f"KILLS_MARK={os.getpid()}-{time.monotonic_ns()}"
    begun = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict([mark.split("=")]),
    )
    wait(begun)
    chosen = [process for process, rank in ranks_of(mark).items() if rank in ranks]
    for process in chosen if ranks else [begun.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, how)
    said, _ = begun.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while ranks_of(mark):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    assert_complete(out)
    return begun.returncode, said


def assert_complete(out):
    for path in out.rglob("[!.]*.json"):
        files.read_json(path)
    for path in out.rglob("[!.]*.bin"):
        tokens.read_shard(path)
    for path in out.rglob("ckpt.pt"):
        read_checkpoint(path)


finish = partial(subprocess.run, check=True, capture_output=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "ranks, kills, flags", [(1, 1, ()), (1, 3, ()), (2, 6, ()), (2, 6, ("--shard=1",))]
)
def test_a_killed_run_goes_on_to_the_same_weights(ranks, kills, flags, tmp_path, data):
    """It is killed some steps after a checkpoint, or while it saves for the first time. A single
    process has no stdout then, and what it prints is lost. It is also stopped by Ctrl-C. Resuming a
    finished run changes nothing."""
    rng = random.Random(bounds.SEED)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    long = "--max_iters=80 --eval_interval=8 --log_interval=3 --gradient_accumulation_steps=2"
    model = "--attn=elastic --n_layer=2 --dropout=0.1"
    new = [*TINY, f"--dataset={data}", *long.split(), *model.split(), *flags]

    def train(folder):
        how = ["--init_from=resume"] if (folder / "meta.json").exists() else new
        return command("train.py", f"--out_dir={folder}", *how, ranks=ranks)

    def wait_until_it_saves(begun):
        while begun.poll() is None and not [*out.glob(".ckpt.pt.*.tmp")]:
            time.sleep(0.001)

    def wait_until_it_has_saved(begun):
        began = time.time()
        while begun.poll() is None and all(
            path.stat().st_mtime < began for path in out.glob("ckpt.pt")
        ):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))

    anytime = [wait_until_it_saves, lambda _: time.sleep(rng.uniform(0, 15))]
    waits = [wait_until_it_has_saved]
    if kills > 1:
        waits = [wait_until_it_saves, *waits, *rng.choices(anytime, k=kills - 2)]
    finish(train(whole))
    mute = ["sh", "-c", 'exec "$@" >&-', "sh"] if ranks == 1 else []
    for n, wait in enumerate(waits):
        alone = rng.choice(((), ("0",), ("1",), ("0", "1"))) if ranks > 1 else ()
        code, _ = kill([*mute, *train(out)], out, wait, alone)
        assert code or n > 1  # a later one may end first
        if ranks == 1 and n == min(1, kills - 1):
            code, said = kill(train(out), out, wait_until_it_has_saved, how=signal.SIGINT)
            step = read_checkpoint(out / "ckpt.pt")["step"]
            command_again = f"python train.py --out_dir={out} --init_from"
            assert code == 130
            assert f"saved at step {step}; go on with: {command_again}" in said
    finish(train(out))  # takes over the lock of a killed process
    assert_same_run(out, whole)
    train_here("--init_from=resume", f"--out_dir={out}")
    assert_same_run(out, whole)
    assert not (out / "lock").exists()
    assert meta(out)["losses"] == meta(whole)["losses"]


@pytest.mark.parametrize(
    "script", ["data/fineweb_edu.py --shard_tokens=25000", by_default(False, "data/text.py")]
)
def test_a_killed_data_script_goes_on_to_the_same_files(script, tmp_path):
    rng = random.Random(bounds.SEED)
    pages, whole, out = (tmp_path / name for name in ("pages.jsonl", "whole", "out"))
    pages.write_text("".join(json.dumps({"text": f"page {n} " * 400}) + "\n" for n in range(400)))
    writing = [*command(*script.split()), f"--source={pages}", "--tokenizer=bytes", "--out_dir"]
    began = time.monotonic()
    finish([*writing, whole])
    seconds = time.monotonic() - began
    for _ in range(2):
        kill([*writing, out], out, lambda _: time.sleep(rng.uniform(0.3, 1) * seconds))
    finish([*writing, out])
    assert contents(out) == contents(whole)


def test_a_process_ends_with_its_killed_parent(tmp_path):
    child = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.machine import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(99)
"""
    parent = """
import os, subprocess, sys
os.environ["STARTED_BY"] = str(os.getpid())
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
    kill([sys.executable, "-c", parent, child], tmp_path, lambda begun: begun.stdout.readline())


def test_a_process_that_comes_too_late_says_that_its_parent_has_ended(monkeypatch):
    monkeypatch.delattr("ctypes.CDLL")  # so that this process itself outlives its parent
    monkeypatch.setenv("STARTED_BY", str(os.getpid()))
    with pytest.raises(ValueError, match="the command that started this one has ended"):
        machine.end_with_parent()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9")
    with pytest.raises(ValueError, match="torchrun, which started this rank, has ended"):
        machine.check_launcher()
