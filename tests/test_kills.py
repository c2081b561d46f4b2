"""Kills and full disks: what is killed goes on as if nothing had happened, nothing outlives it, and a full disk costs one
line. The moments are random; --hypothesis-seed draws others, and --all kills two ranks, the launcher and more writers."""
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import bounds
import pytest
from conftest import ROOT, TINY, assert_same_run, by_default, command, run, train_here

from common import files, machine
from common.runs import read_checkpoint, read_weights
from data import tokens
from data import weights as weights_script

PATIENCE = 60                                   # seconds after which a process that is still there hangs


def is_running(process):
    """Is there a process with this id that has not ended?"""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


class Begun:
    """A command in a process of its own, found again with all that it has started by a mark in their environment."""

    def __init__(self, argv):
        self.mark = f"KILLS_MARK={os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env=os.environ | dict([self.mark.split("=")]))

    def ranks(self):
        """{process id: its rank, or None for a launcher and a single process}"""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if self.mark in environment and is_running(folder.name):
                    found[int(folder.name)] = next((e[5:] for e in environment if e.startswith("RANK=")), None)
        return found

    def until(self, ready):
        """Wait until ready() or the end of the process."""
        while not ready() and self.process.poll() is None:
            time.sleep(0.002)

    def kill(self, *ranks):
        """kill -9. All other processes end as well."""
        for process, rank in self.ranks().items():
            if rank in ranks and (rank or process == self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        said, deadline = self.process.communicate(timeout=PATIENCE)[0], time.monotonic() + PATIENCE
        while self.ranks():
            assert time.monotonic() < deadline, said
            time.sleep(0.05)


def complete(folder):
    """What has its final name can be read."""
    for path in folder.rglob("[!.]*"):
        for name, read in (("*.json", files.read_json), ("ckpt.pt", read_checkpoint), ("*.bin", tokens.read_shard)):
            if path.match(name):
                read(path)


FLAGS = (*TINY, "--attn=elastic", "--n_layer=2", "--dropout=0.1", "--max_iters=160", "--eval_interval=8", "--log_interval=3",
         "--gradient_accumulation_steps=2")


@pytest.mark.parametrize("ranks, kills, flags", [
    by_default(True, 1, 2, ()), by_default(False, 2, 5, ()), by_default(False, 2, 5, ("--shard=1",))])
def test_a_run_that_is_killed_goes_on_to_the_same_weights(ranks, kills, flags, tmp_path, data):
    rng, whole, out = random.Random(bounds.SEED), tmp_path / "whole", tmp_path / "killed"
    flags = [*FLAGS, *flags, f"--dataset={data}"]

    def train(folder):
        how = ["--init_from=resume"] if (folder / "meta.json").exists() else flags
        return command("train.py", f"--out_dir={folder}", *how, ranks=ranks)
    subprocess.run(train(whole), check=True, capture_output=True)
    for kill in range(kills):
        begun = Begun(train(out))
        if kill == 0 or rng.random() < 0.5:
            begun.until(lambda: [*out.glob(".ckpt.pt.*.tmp")])          # while it saves
        else:                                   # while it starts, trains or evaluates
            before = files.sha256(out / "log.csv")
            begun.until(lambda before=before: rng.random() < 1e-3 or files.sha256(out / "log.csv") != before)
            time.sleep(rng.uniform(0, 1))
        begun.kill(*rng.choice((("0",), ("1",), ("0", "1"), (None,)) if ranks == 2 else ((None,),)))
        complete(out)
    subprocess.run(train(out), check=True, capture_output=True)
    assert_same_run(out, whole)


# ------------------------------------------------------------------------------------- other commands that write files

WRITERS = {
    "weights": "data/weights.py {home}/llama --out={out}/run",
    "text": "data/text.py --source={home}/pages.jsonl --out_dir={out} --tokenizer=bytes",
    "fineweb_edu": "data/fineweb_edu.py --source={home}/pages.jsonl --out_dir={out} --tokenizer=bytes --shard_tokens=25000",
    "lab": "eval.py lab --attn=softmax --seeds=0 --out_dir={out}/runs --results={out}/lab --train_args='--max_iters=40 "
           "--eval_interval=10 --n_embd=16 --block_size=16 --batch_size=4 --eval_iters=1 --device=cpu --dataset={symbols}'"}


def result(out):
    """What a writer has made, without what depends on the clock and on the folder's name."""
    found = {}
    for path in sorted(path.relative_to(out) for path in out.rglob("*") if (path.is_file())):
        if path.name == "lab.json":
            found[path] = [row["curve"] if "curve" in row else {key: row[key] for key in row if key != "seconds"}
                           for rows in files.read_json(out / path)["runs"].values() for row in rows]
        elif path.name == "ckpt.pt" and path.parts[0] == "run":
            found[path] = {key: value.sum().item() for key, value in read_weights(out / "run").items()}
        elif path.parts[0] != "runs" and path.name != "lab.md" and str(path) != "run/meta.json":
            found[path] = files.sha256(out / path)
    return found


@pytest.mark.parametrize("name", [by_default(name == "fineweb_edu", name) for name in WRITERS])
def test_a_writer_that_is_killed_or_has_no_space_left_goes_on_to_the_same_files(name, tmp_path, data, backcopy):
    rng = random.Random(bounds.SEED)
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": f"page {n} " * 400}) + "\n" for n in range(400)))
    if name == "weights":
        pytest.importorskip("safetensors")
        train_here(f"--dataset={data}", f"--out_dir={tmp_path}/llama_run", "--max_iters=1", "--norm=rmsnorm",
                   "--mlp=swiglu", "--n_embd=256")
        weights_script.main(["export", f"{tmp_path}/llama_run", f"{tmp_path}/llama"])

    def write(out):
        out.mkdir(exist_ok=True)
        script, *argv = shlex.split(WRITERS[name].format(home=tmp_path, symbols=backcopy, out=out))
        return command(script, *argv)
    began, whole, killed, disk = time.monotonic(), tmp_path / "whole", tmp_path / "killed", tmp_path / "disk"
    subprocess.run(write(whole), check=True, capture_output=True)
    seconds = time.monotonic() - began
    for _ in range(2):
        begun = Begun(write(killed))
        time.sleep(rng.uniform(0.3, 1) * seconds)
        begun.kill(None)
        complete(killed)
    subprocess.run(write(killed), check=True, capture_output=True)
    assert result(killed) == result(whole) and not [*killed.rglob(".*.tmp")]

    space = sum(-(-path.stat().st_size // 4096) * 4096 for path in whole.rglob("*") if path.is_file())
    disk.mkdir()
    size = max(4096, int(rng.uniform(0.05, 0.9) * space))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        done = subprocess.run(write(disk), capture_output=True, text=True)
        errors = [line for line in done.stderr.splitlines() if ": error: " in line]
        assert done.returncode and errors and "Traceback" not in done.stderr, done.stderr
        complete(disk)
        subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
        subprocess.run(write(disk), check=True, capture_output=True)
        assert result(disk) == result(whole)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# --------------------------------------------------------------------------------------------- nothing outlives a parent

CHILD = (f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r}); from common.machine import end_with_parent; "
         "end_with_parent(); print(os.getpid(), flush=True); time.sleep(99)")
PARENT = ("import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], "
          "env=os.environ | {'STARTED_BY': str(os.getpid())})")


def test_a_process_ends_with_its_killed_parent():
    begun = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    child = int(begun.stdout.readline())
    begun.kill()
    begun.wait()
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_comes_too_late_says_that_its_parent_has_ended(monkeypatch):
    monkeypatch.setenv("STARTED_BY", str(os.getpid()))
    with pytest.raises(ValueError, match="the command that started this one has ended"):
        machine.check_parent()
    monkeypatch.setenv("STARTED_BY", str(os.getppid()))
    machine.check_parent()
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun, which started this rank, has ended"):
        machine.check_launcher()
