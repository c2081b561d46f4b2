"""Kills and full disks: what kill -9 interrupts goes on as if nothing had happened, and a full disk costs one line.

    python tests/kills.py                           100 kills of training runs with two ranks
    python tests/kills.py --count=10 --seed=2       fewer, at other moments
    python tests/kills.py writers --count=40        kills of what writes files outside of training
    python tests/kills.py disk                      the same commands on a disk that is too small (needs root for tmpfs)

A run is killed several times at random moments (one rank, both, or the launcher), goes on from its last checkpoint, and
is compared with a run that was not killed: bit for bit, or up to rounding where it ends with another number of ranks.
After each kill all processes must be gone within a minute. A writer is killed and called again; its files must be those
of a call that was not killed, and nothing may ever read a file that is half written.
"""
import argparse
import contextlib
import hashlib
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from conftest import ROOT, TINY, WORDS, assert_close_runs, assert_same_run, command, train_here, write_data

from common import files
from common.runs import read_checkpoint, read_run, read_weights

PATIENCE = 60                                   # seconds after which a process that is still there hangs

# ---------------------------------------------------------------------------------------------- processes, found by a mark


def processes(mark):
    """{process id: its environment} of all processes that a command with this mark has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):      # it has just ended
            environment = dict(entry.split("=", 1) for entry in
                               (folder / "environ").read_bytes().decode(errors="replace").split("\0") if "=" in entry)
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if environment.get("KILLS_MARK") == mark and state != "Z":
                found[int(folder.name)] = environment
    return found


class Command:
    """A command in a process of its own, which can be killed with all that it has started."""

    def __init__(self, argv, cwd=None, **environment):
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(word) for word in argv], cwd=cwd, stdout=self.log, stderr=subprocess.STDOUT,
            env=os.environ | {"KILLS_MARK": self.mark, "OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "FALSE"} | environment)

    def victims(self, who):
        """Process ids of a rank ("0", "1"), of "both" ranks, of the "launcher", or of "all"."""
        ranks = {pid: environment.get("RANK") for pid, environment in processes(self.mark).items()}
        wanted = {"both": ("0", "1"), "launcher": (None,), "all": (None, "0", "1")}.get(who, (who,))
        return [pid for pid, rank in ranks.items() if rank in wanted and (rank or pid == self.process.pid)]

    def kill(self, who):
        """kill -9. Returns whether there was anything to kill."""
        found = self.victims(who)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def end(self):
        """Wait until all processes are gone. Returns the seconds; those that outlive PATIENCE are killed."""
        began = time.monotonic()
        while (self.process.poll() is None or processes(self.mark)) and time.monotonic() - began < PATIENCE:
            time.sleep(0.05)
        passed = time.monotonic() - began
        for pid in processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return passed

    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


# ----------------------------------------------------------------------------------------------------------- training

FLAGS = ("--attn=elastic", "--n_layer=2", "--max_iters=240", "--eval_interval=8", "--log_interval=3", "--dropout=0.1",
         "--gradient_accumulation_steps=2")
WHO = ("0", "1", "both", "launcher")


def of_two_ranks(out, data, *flags):
    new = () if (out / "meta.json").exists() else (*TINY, *FLAGS, f"--dataset={data}", *flags)
    resume = ("--init_from=resume",) if (out / "meta.json").exists() else ()
    return command("train.py", f"--out_dir={out}", *new, *resume, ranks=2)


class Kill(NamedTuple):
    who: str
    steps: int                                  # in the checkpoint that was left
    seconds: float                              # until all processes were gone
    wrong: str | None


def rows(out):
    """The length of a run's log in bytes."""
    with contextlib.suppress(OSError):
        return (out / "log.csv").stat().st_size
    return 0


def kill_once(rng, out, data, *flags):
    """Begin or continue a run with two ranks, and kill it at a random moment. Returns a Kill, or None if it ended
    before."""
    begun, who, before = Command(of_two_ranks(out, data, *flags)), rng.choice(WHO), rows(out)
    if rng.random() < 0.25:                     # while it imports, loads, or meets the other rank
        time.sleep(rng.uniform(0, 10))
    else:                                       # while it trains, evaluates and saves
        deadline = time.monotonic() + 120
        while rows(out) in (0, before) and begun.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 1.5))
    if begun.process.poll() is not None or not begun.kill(who):
        begun.end()
        return None
    seconds = begun.end()
    wrong = f"processes were left after {PATIENCE} s: {begun.said()[-1500:]}" if seconds >= PATIENCE else None
    step = -1
    if (out / "ckpt.pt").exists():              # raises ValueError if a half-written one got its name
        step = read_checkpoint(out / "ckpt.pt")["step"]
        read_run(out)
    return Kill(who, step, seconds, wrong)


def finish(out, data, ranks, *flags):
    """Continue a run to its end, with this number of ranks."""
    if ranks == 1:
        train_here(f"--out_dir={out}", "--init_from=resume")
        return
    done = Command(of_two_ranks(out, data, *flags))
    code = done.process.wait(300)
    assert code == 0, done.said()[-3000:]


def train_kills(count, seed, most=4):
    """Kill runs `count` times in all. Returns the number of findings."""
    rng, killed, wrong = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        data = write_data(home / "fox", WORDS[:8000], WORDS[8000:12000])
        for name, flags in (("plain", ()), ("shard", ("--shard=1",))):
            finish(home / name, data, 2, *flags)
        while len(killed) < count:
            name, flags = rng.choice((("plain", ()), ("shard", ("--shard=1",))))
            out, ranks = home / f"{name}-{len(killed)}", rng.choice((2, 2, 1))
            for _ in range(min(rng.randint(1, most), count - len(killed))):
                if found := kill_once(rng, out, data, *flags):
                    killed.append(found)
                    print(f"{len(killed)}: {name}, {found.who}, step {found.steps}, gone after {found.seconds:.1f} s "
                          f"{found.wrong or ''}", flush=True)
                    wrong += found.wrong is not None
            if not (out / "meta.json").exists():
                continue                        # killed before it wrote anything
            finish(out, data, ranks, *flags)
            try:
                (assert_same_run if ranks == 2 else assert_close_runs)(out, home / name)
                print(f"   resumed by {ranks}: {'the same run' if ranks == 2 else 'equal up to rounding'}", flush=True)
            except AssertionError as e:
                wrong += 1
                print(f"   resumed by {ranks}, and DIFFERENT: {e}", flush=True)
            shutil.rmtree(out)
    print(f"{len(killed)} kills of training, {wrong} findings; the slowest end took "
          f"{max(found.seconds for found in killed):.1f} s")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="train", choices=("train",))
    parser.add_argument("--count", type=int, default=100, help="number of kills")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "FALSE"}
    torch.set_num_threads(1)
    sys.exit(train_kills(args.count, args.seed) > 0)


if __name__ == "__main__":
    main()
