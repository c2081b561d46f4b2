"""tests/kills.py: what is killed goes on, and nothing outlives it. `python tests/kills.py` kills many more."""
import os
import subprocess
import sys
import time

import kills
import pytest
from conftest import ROOT

from common import machine


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    pytest.importorskip("safetensors")
    home = tmp_path_factory.mktemp("sources")
    return home, kills.make_sources(home)


CHILD = "import os, time; {setup}; print(os.getpid(), flush=True); time.sleep(99)"
MARKED = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from common.machine import end_with_parent; end_with_parent()"


def test_a_process_ends_with_its_killed_parent():
    parent = ("import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], "
              "env=os.environ | {'STARTED_BY': str(os.getpid())}); child.wait()")
    begun = subprocess.Popen([sys.executable, "-c", parent, CHILD.format(setup=MARKED)], stdout=subprocess.PIPE)
    child = int(begun.stdout.readline())
    begun.kill()
    begun.wait()
    deadline = time.monotonic() + 10
    while kills.is_running(child):
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


def test_a_killed_writer_goes_on(sources):
    assert not kills.writer_kills(1, seed=0, only="fineweb_edu", sources=sources)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", kills.writers(ROOT, ""))
def test_every_killed_writer_goes_on(name, sources):
    assert not kills.writer_kills(1, seed=1, only=name, sources=sources)


@pytest.mark.exhaustive
def test_killed_runs_of_two_ranks_go_on():
    assert not kills.train_kills(2, seed=1)
