"""Kills and full disks: a killed run or command goes on as if nothing had happened, and a full disk costs one line.

    python tests/kills.py                           100 kills of training runs with two ranks
    python tests/kills.py --count=10 --seed=2       fewer, at other moments
    python tests/kills.py writers --count=40        kills of other commands that write files
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
import io
import itertools
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
from data import tokens

PATIENCE = 60                                   # seconds after which a process that is still there hangs

# ------------------------------------------------------------------------------------------- processes, found by a mark


def processes(mark):
    """{process id: its environment} of all processes that a command with this mark has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):      # it has just ended
            environment = dict(entry.split("=", 1) for entry in
                               (folder / "environ").read_bytes().decode(errors="replace").split("\0") if "=" in entry)
            if environment.get("KILLS_MARK") == mark and is_running(folder.name):
                found[int(folder.name)] = environment
    return found


def is_running(process):
    """Is there a process with this id that has not ended?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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

FLAGS = ("--attn=elastic", "--n_layer=2", "--max_iters=160", "--eval_interval=8", "--log_interval=3",
         "--gradient_accumulation_steps=2",
         "--dropout=0",                         # dropout depends on the number of ranks
         "--learning_rate=3e-5")                # AdamW turns rounding of a gradient near 0 into a step of this size
WHO = ("0", "1", "both", "launcher")


def of_two_ranks(out, data, *flags):
    begun = (out / "meta.json").exists()
    how = ["--init_from=resume"] if begun else [*TINY, *FLAGS, f"--dataset={data}", *flags]
    return command("train.py", f"--out_dir={out}", *how, ranks=2)


class Kill(NamedTuple):
    who: str
    steps: int                                  # in the checkpoint that was left
    seconds: float                              # until all processes were gone
    wrong: str | None


def size_of_log(out):
    """The length of a run's log in bytes."""
    with contextlib.suppress(OSError):
        return (out / "log.csv").stat().st_size
    return 0


def kill_once(rng, out, data, *flags):
    """Begin or continue a run with two ranks, and kill it at a random moment. Returns a Kill, or None if it ended
    before."""
    begun, who, before = Command(of_two_ranks(out, data, *flags)), rng.choice(WHO), size_of_log(out)
    if rng.random() < 0.25:                     # while it imports, loads, or meets the other rank
        time.sleep(rng.uniform(0, 10))
    else:                                       # while it trains, evaluates and saves
        deadline = time.monotonic() + 120
        while size_of_log(out) in (0, before) and begun.process.poll() is None and time.monotonic() < deadline:
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
        with contextlib.redirect_stdout(io.StringIO()):
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


# ------------------------------------------------------------------------------------- other commands that write files


class Slow(http.server.BaseHTTPRequestHandler):
    """Offers one file, a megabyte at a time, and resumes."""
    content = random.Random(0).randbytes(12 << 20)

    def do_GET(self):
        first = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if self.headers["Range"] else 200)
        self.send_header("Content-Length", str(len(self.content) - first))
        self.end_headers()
        with contextlib.suppress(ConnectionError):                      # the client was killed
            for start in range(first, len(self.content), 1 << 20):
                self.wfile.write(self.content[start:start + (1 << 20)])
                time.sleep(0.05)

    def log_message(self, *args):
        pass


FETCH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from common import files
from data.downloads import download
with files.one_line_errors():
    path = Path(sys.argv[3])
    if not path.exists():
        download(sys.argv[2], path, None, sys.argv[4], "the file", "do without")
"""
LAB = ("--max_iters=40 --eval_interval=10 --n_embd=16 --block_size=16 --batch_size=4 --eval_iters=1 --device=cpu "
       "--dataset={data}")
CLAIM = "postnorm"                              # two runs of the lab


def make_sources(home):
    """What the writers read. Returns the address of the server."""
    from test_refusals import MAKE
    write_data(home / "data", WORDS[:8000], WORDS[8000:12000])
    with contextlib.redirect_stdout(io.StringIO()):
        train_here(f"--dataset={home / 'data'}", f"--out_dir={home / 'run'}", "--max_iters=1", "--n_layer=2",
                   "--n_head=4", "--norm=rmsnorm", "--mlp=swiglu", "--n_embd=256")
        MAKE["llama"](home / "llama", {"llama_run": home / "run"}.__getitem__)
    MAKE["questions"](home / "questions", None)
    rows = ({"text": f"page {n} " * 400} for n in range(400))
    (home / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run(command("data/backcopy.py", f"--out_dir={home / 'symbols'}", "--length=20", "--sequences=400"),
                   check=True, stdout=subprocess.DEVNULL)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/file"


def writers(home, address):
    """{name: a function from the folder to write to its command}."""
    lab = LAB.format(data=home / "symbols")
    return {
        "weights": lambda out: command("data/weights.py", home / "llama", f"--out={out / 'run'}"),
        "export": lambda out: command("data/weights.py", "export", home / "run", out / "llama"),
        "fineweb_edu": lambda out: command(
            "data/fineweb_edu.py", f"--source={home / 'pages.jsonl'}", f"--out_dir={out}", "--tokenizer=bytes",
            "--shard_tokens=25000"),
        "text": lambda out: command(
            "data/text.py", f"--source={home / 'pages.jsonl'}", f"--out_dir={out}", "--tokenizer=bytes"),
        "benchmarks": lambda out: command("data/benchmarks.py", f"--source={home / 'questions'}", f"--out_dir={out}"),
        "download": lambda out: [sys.executable, "-c", FETCH, ROOT, address, out / "file",
                                 hashlib.sha256(Slow.content).hexdigest()],
        "lab": lambda out: command("eval.py", "lab", "--attn=softmax", "--seeds=0", f"--out_dir={out / 'runs'}",
                                   f"--results={out / 'lab'}", f"--train_args={lab}"),
        "claims": lambda out: command("eval.py", "claims", f"--run={CLAIM}", "--seeds=0", f"--out_dir={out / 'runs'}",
                                      f"--results={out / 'claims.json'}", f"--train_args={lab}"),
    }


def result(name, out):
    """What a writer has made, without what depends on the clock and on the folder's name."""
    if name == "lab":
        runs = files.read_json(out / "lab.json")["runs"]
        return {run: [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
                for run, rows in runs.items()}
    if name == "claims":
        return {where: row["numbers"] for where, row in files.read_json(out / "claims.json")["claims"][CLAIM].items()}
    found = {str(path.relative_to(out)): files.sha256(path) for path in sorted(out.rglob("*")) if path.is_file()}
    if name == "weights":
        found["run/ckpt.pt"] = {key: value.sum().item() for key, value in read_weights(out / "run").items()}
    return {key: value for key, value in found.items() if not key.endswith(("run/meta.json",))}


def complete(name, out):
    """Check what a killed writer has left: what has its final name can be read. Raises ValueError or AssertionError."""
    for path in out.rglob("*"):
        if path.name in ("meta.json", "progress.json", "config.json", "lab.json", "claims.json"):
            files.read_json(path)
        if path.name == "ckpt.pt":
            read_checkpoint(path)
        if path.suffix == ".bin":
            tokens.read_shard(path)
        if path.name == "file":
            assert path.read_bytes() == Slow.content


def kill_writer(make, name, expected, seconds, rng, folder):
    """Kill a writer once or twice at random moments, and call it again. Returns (kills, what is wrong or None)."""
    kills, wrong = 0, None
    for _ in range(rng.choice((1, 2))):
        begun = Command(make(folder))
        time.sleep(rng.uniform(0.1, 1.05) * seconds)
        if begun.process.poll() is None:
            begun.kill("launcher")
            kills += 1
        if (passed := begun.end()) >= PATIENCE:
            wrong = f"processes were left after {passed:.0f} s"
        complete(name, folder)
    if name == "export" and result(name, folder) == expected:           # done: it does not overwrite a whole model
        return kills, wrong
    again = Command(make(folder))
    if again.process.wait(300):
        return kills, f"the next call failed: {again.said()[-800:]}"
    if left := list(folder.rglob(".*.tmp")):
        wrong = f"temporary files are left: {left}"
    if result(name, folder) != expected:
        wrong = f"other files: {result(name, folder)}, expected {expected}"
    return kills, wrong


def writer_kills(count, seed, only=None, sources=None):
    """Kill writers `count` times in all, in turn. only: the name of one writer. sources: a folder and what make_sources
    returned for it. Returns the number of findings."""
    rng, total, findings = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        found = writers(*(sources or (home, make_sources(home))))
        found = {name: make for name, make in found.items() if only in (None, name)}
        expected = {}
        for name, make in itertools.cycle(found.items()):
            if total >= count:
                break
            if name not in expected:
                began = time.monotonic()
                (home / f"whole-{name}").mkdir()
                whole = Command(make(home / f"whole-{name}"))
                assert whole.process.wait(300) == 0, whole.said()
                expected[name] = time.monotonic() - began, result(name, home / f"whole-{name}")
            folder = home / f"{name}-{total}"
            folder.mkdir()
            kills, wrong = kill_writer(make, name, expected[name][1], expected[name][0], rng, folder)
            total, findings = total + kills, findings + (wrong is not None)
            print(f"{total}: {name}, {kills} kills, {wrong or 'goes on to the same files'}", flush=True)
            shutil.rmtree(folder)
    print(f"{total} kills of writers, {findings} findings")
    return findings


# ---------------------------------------------------------------------------------------------------------- a full disk


@contextlib.contextmanager
def small_disk(place, size):
    """A disk of `size` bytes at a folder. Raises OSError if this process may not mount one."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        raise OSError(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def size_of(folder):
    """Bytes of a folder's files, in whole pages, as tmpfs counts them."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def full_disks(seed, only=None):
    """Every writer, and training, on disks with too little space, then with enough. Returns the number of findings."""
    findings, rng = 0, random.Random(seed)
    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        address = make_sources(home)
        new = [*TINY, f"--dataset={home / 'data'}", "--n_embd=64"]
        commands = writers(home, address) | {"train": lambda out: command(
            "train.py", f"--out_dir={out / 'run'}",
            *(["--init_from=resume"] if (out / "run/meta.json").exists() else new))}
        for name, make in commands.items():
            if only not in (None, name):
                continue
            whole = home / f"whole-{name}"
            whole.mkdir()
            done = Command(make(whole))
            assert done.process.wait(300) == 0, done.said()
            for share in (0.05, rng.uniform(0.1, 0.5), rng.uniform(0.5, 0.9)):
                place = home / "disk"
                with small_disk(place, max(4096, int(size_of(whole) * share))):
                    first = Command(make(place))
                    code = first.process.wait(300)
                    lines = [line for line in first.said().splitlines() if ": error: " in line]
                    complete(name, place)
                    wrong = None if code and lines and "Traceback" not in first.said() else first.said()[-1500:]
                    subprocess.run(["mount", "-o", "remount,size=1g", str(place)], check=True)
                    again = Command(make(place))
                    if again.process.wait(300):
                        wrong = f"with more space: {again.said()[-800:]}"
                    elif name == "train":
                        assert_same_run(place / "run", whole / "run")
                    elif result(name, place) != result(name, whole):
                        wrong = "other files with more space"
                    findings += wrong is not None
                    print(f"{name}, {share:.0%} of the space: {wrong or lines[-1]}", flush=True)
                place.rmdir()
    print(f"{findings} findings on full disks")
    return findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="train", choices=("train", "writers", "disk"))
    parser.add_argument("--count", type=int, default=100, help="number of kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[*writers(ROOT, ""), "train"],
                        help="only this writer, or train on a full disk")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "FALSE"}
    torch.set_num_threads(1)
    found = (train_kills(args.count, args.seed) if args.what == "train" else
             writer_kills(args.count, args.seed, args.only) if args.what == "writers" else
             full_disks(args.seed, args.only))
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
