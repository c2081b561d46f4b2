"""Judges the tests: a mutant is the code with one small random change (changes.py), and a test must notice it.

    python tests/mutants.py --record            run the default tests once, and note which of them execute which line
    python tests/mutants.py                     judge 400 mutants; a campaign that was stopped goes on where it stopped
    python tests/mutants.py --again             judge the survivors once more, after tests were added and recorded
    python tests/mutants.py --show              print the share noticed by file, and the survivors

--root=DIR judges another checkout with its own tests. mutants.md judges the survivors one by one.
No library does this: mutmut leaves out decorated functions, and so every Triton kernel, and cosmic-ray starts all tests
in a new process for each mutant, where importing torch takes longer than the one test that notices the change.
"""
import argparse
import collections
import compileall
import faulthandler
import importlib
import json
import multiprocessing
import operator
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import changes
import hypothesis
import pytest
import recording

HERE, FORK = Path(__file__).resolve().parent, multiprocessing.get_context("fork")
FILES = "attention.py kernels.py model.py train.py axes/*.py mixers/*.py common/*.py data/tokens.py"
# a process that has imported all this forks those of the mutants
WARM = ("torch._dynamo", "triton.language", "numpy", "hypothesis", "xdist", "transformers", "safetensors.torch",
        "tokenizers", "tiktoken", "gguf", "matplotlib")


class Judge:
    """A plugin of pytest that runs the chosen tests in their order, and writes down which one has started."""

    def __init__(self, tests, log):
        self.tests, self.log = tests, log

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self):
        """A case that fails need not become smaller."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("judge", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("judge")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        order = {test: i for i, test in enumerate(self.tests)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid):
        self.log.write_text(nodeid)
        faulthandler.dump_traceback_later(60 + 10 * self.tests[nodeid], exit=True)      # an endless loop is noticed


def run_tests(folder, tests, log):
    """Run tests in a copy of the repository until one fails. The process ends with pytest's exit code."""
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(log.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 34, 1 << 34))
    faulthandler.dump_traceback_later(180, exit=True)
    sys.path.remove(str(HERE))
    options = "-x -q -n 0 -o addopts= -p no:cacheprovider --assert=plain".split()
    os._exit(pytest.main(options + sorted({test.split("::")[0] for test in tests}), [Judge(tests, log)]))


def judge(mutants, root, out, limit):
    """Judge mutants one after another. Appends a line of JSON for each."""
    recorded = recording.Recording(root, out)
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch, "copy"), Path(scratch, "test")
        folder.mkdir()
        files = f"git ls-files -zco --exclude-standard | xargs -0 cp -p --parents -t {folder}"
        subprocess.run(files, shell=True, cwd=root)
        compileall.compile_dir(folder, quiet=2)
        for row, source, places in mutants:
            began, noticed, tests = time.monotonic(), None, recorded.tests_for(row["file"], places, limit)
            if tests:
                log.write_text("the import of the code")
                (folder / row["file"]).write_bytes(source)
                os.utime(folder / row["file"], (1, 1))          # no compiled file has this time
                process = FORK.Process(target=run_tests, args=(folder, tests, log))
                process.start()
                process.join()
                subprocess.run(["pkill", "-KILL", "-s", str(process.pid)])      # what its tests left running
                noticed = None if process.exitcode in (0, 5) else log.read_text()
                shutil.copy2(root / row["file"], folder / row["file"])
            row |= {"noticed_by": noticed, "exit": process.exitcode if tests else 0, "tests": len(tests)}
            row["seconds"] = round(time.monotonic() - began, 1)
            with (out / "mutants.jsonl").open("a") as f:
                f.write(json.dumps(row) + "\n")
            print("{file}:{line} {seconds} s {noticed_by}".format(**row), flush=True)


def show(rows):
    """Print the share noticed by file, how many of all by a hang, a crash or too much memory, and the survivors."""
    files = collections.defaultdict(list)
    for row in rows:
        for name in (row["file"], "total"):
            files[name].append(row["noticed_by"] is not None)
    for name, noticed in sorted(files.items()):
        print(f"{name:<30} {sum(noticed):>4} of {len(noticed):>4} {sum(noticed) / len(noticed):6.1%}")
    print(f"{sum(row['noticed_by'] is not None and row.get('exit', 1) != 1 for row in rows)} of them by no failed test")
    for row in rows:
        if row["noticed_by"] is None:
            print(f"\n{row['file']}:{row['line']}   {row['tests']} tests pass")
            for sign, text in ("-", row["was"]), ("+", row["now"]):
                print("\n".join(sign + line for line in text.splitlines()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("record", "again", "show"):
        parser.add_argument(f"--{name}", action="store_true", help="see above")
    for name, default, meaning in (
            ("root", HERE.parent, "another checkout of this repository"), ("count", 400, "how many mutants"),
            ("out", HERE.parent / "out/mutants", "folder of recording and results"), ("seed", 0, "draws other mutants"),
            ("files", FILES, "the files that mutants change"), ("jobs", 2, "how many processes at a time"),
            ("seconds", 120.0, "how long the tests of a mutant may take")):
        kind = Path if isinstance(default, Path) else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=meaning)
    args = parser.parse_args()
    root, out, identity = args.root.resolve(), args.out.resolve(), operator.itemgetter("file", "line", "was", "now")
    if args.record:
        return recording.record(root, FILES, out, args.jobs)
    results = out / "mutants.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    rows = {identity(row): row for row in map(json.loads, lines)}       # the last judgement of each mutant
    if args.show:
        return show(rows.values())
    if not (out / "tests.json").exists():
        sys.exit(f"no recording in {out}: run python tests/mutants.py --record first")
    drawn = changes.draw(root, args.files, args.seed, args.count)
    todo = [mutant for mutant in drawn if identity(mutant[0]) not in rows
            or args.again and rows[identity(mutant[0])]["noticed_by"] is None]
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for name in WARM:
        importlib.import_module(name)
    jobs = [FORK.Process(target=judge, args=(todo[i::args.jobs], root, out, args.seconds)) for i in range(args.jobs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    sys.exit(max(job.exitcode for job in jobs))


if __name__ == "__main__":
    main()
