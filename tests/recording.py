"""Notes which lines of the code each default test executes, so that a mutant is judged by the tests that can see it.

record() runs the tests. pytest then loads this file as a plugin in each of its processes.
"""
import collections
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

recorded = {}                                   # {test: [seconds, its fixtures as "@name"]}


def now_runs(name):
    """Tell coverage, and the processes that a test starts, what runs now. Returns what ran before."""
    before, os.environ["RECORDED_AS"] = os.environ.get("RECORDED_AS", ""), name
    coverage.Coverage.current().switch_context(name)
    return before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.user_properties.append(("fixtures", [f"@{name}" for name in item.fixturenames]))
    now_runs(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """What a shared fixture executes counts for all tests that use it, not for the first alone."""
    before = now_runs(os.environ["RECORDED_AS"] if fixturedef.scope == "function" else f"@{fixturedef.argname}")
    try:
        return (yield)
    finally:
        now_runs(before)


def pytest_runtest_logreport(report):
    row = recorded.setdefault(report.nodeid, [0, dict(report.user_properties).get("fixtures", [])])
    row[0] += report.duration if report.passed else float("inf")


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        coverage.Coverage.current().save()      # xdist ends its workers at once
    else:
        passed = {test: row for test, row in recorded.items() if row[0] < float("inf")}
        Path(os.environ["RECORDED_IN"], "tests.json").write_text(json.dumps(passed))


def record(root, files, out, jobs):
    """Run the default tests once."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("coverage*"):
        old.unlink()
    include = ", ".join(str(root / pattern) for pattern in files.split())
    (out / "coveragerc").write_text(f"[run]\nparallel = true\nsigterm = true\ninclude = {include}\n"
                                    f"data_file = {out}/coverage\ncontext = ${{RECORDED_AS-}}\n")
    env = {"COVERAGE_PROCESS_START": f"{out}/coveragerc", "RECORDED_IN": str(out),
           "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, *"-m pytest -p recording -p no:cacheprovider --dist=load -n".split(), str(jobs)],
                   cwd=root, env=os.environ | env)
    coverage.Coverage(config_file=f"{out}/coveragerc").combine([str(out)])


class Recording:
    """What record() wrote into a folder."""

    def __init__(self, root, out):
        self.root, self.written, self.lines = root, (out / "tests.json").stat().st_mtime, {}
        self.tests = json.loads((out / "tests.json").read_text())
        self.data = coverage.CoverageData(f"{out}/coverage")
        self.data.read()

    def tests_for(self, file, places, limit):
        """{test: its seconds}, for tests that execute what changes and together take `limit` seconds. Cheap ones come
        first, but the tenth case of a test function counts as ten times as dear: it rarely sees more than the first."""
        if file not in self.lines:
            if (self.root / file).stat().st_mtime > self.written:
                sys.exit(f"{file} has changed since the tests were recorded: run with --record")
            self.lines[file] = self.data.contexts_by_lineno(str(self.root / file))
        names = ({name for line in range(first, last + 1) for name in self.lines[file].get(line, ()) if name}
                 for first, last in places)
        names = next(filter(None, names), set())
        found = {test: seconds for test, (seconds, fixtures) in self.tests.items()
                 if test in names or not names.isdisjoint(fixtures)}
        case = collections.defaultdict(lambda: itertools.count(1))
        cost = {test: (found[test] + 0.01) * next(case[test.split("[")[0]]) for test in sorted(found, key=found.get)}
        order = sorted(found, key=cost.get)
        total = itertools.accumulate(found[test] for test in order)
        return {test: found[test] for test, seconds in zip(order, total, strict=True) if seconds <= limit}
