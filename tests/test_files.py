"""Files are never half written, names in them lead to no other folder, and errors are one line.
Damaged files: test_refusals.py."""

import math
import os

import pytest
import torch
from conftest import assert_says
from hypothesis import given
from hypothesis import strategies as st

from common import files


def test_a_file_is_renamed_into_place_only_when_complete(tmp_path):
    path, gone, here = (
        tmp_path / name for name in ("a.txt", f".a.txt.{1 << 22}.tmp", f".a.txt.{os.getppid()}.tmp")
    )
    for left in (gone, here):  # no process has the first id, and the second one is alive
        left.write_text("half")
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), files.replacing(path, "w") as f:
        f.write("half")
        f.flush()
        assert path.read_text() == "before"
        raise KeyboardInterrupt
    assert path.read_text() == "before" and sorted(os.listdir(tmp_path)) == [here.name, "a.txt"]
    with files.replacing(path, "w") as f:
        f.write("after")
    assert path.read_text() == "after" and sorted(os.listdir(tmp_path)) == [here.name, "a.txt"]


def test_too_little_memory_is_reported_in_one_line_and_an_error_raised_with_traceback_1(
    monkeypatch, capsys
):
    for error in (None, MemoryError(), RuntimeError("Storage size calculation overflowed")):
        with pytest.raises(SystemExit), files.one_line_errors():
            raise error or torch.empty(1 << 50)
        assert_says(
            "there is not enough memory.*smaller sizes, such as --batch_size",
            capsys.readouterr().err,
        )
    for call in (
        lambda: torch.ones(1).add_(1, alpha=1e308),
        lambda: torch.full((1,), 1e308),
        lambda: math.exp(1e4),
    ):
        with pytest.raises(SystemExit), files.one_line_errors():
            call()
        assert_says(
            "a number is too large.*use smaller ones, such as --learning_rate",
            capsys.readouterr().err,
        )
    for traceback, error in (("", RuntimeError("another")), ("1", ValueError("one"))):
        monkeypatch.setenv("TRACEBACK", traceback)
        with pytest.raises(type(error), match=str(error)), files.one_line_errors():
            raise error


@given(st.text("ab./\\*?[]~ \0\n-_é", max_size=5))
def test_a_plain_name_stays_in_its_folder(name):
    try:
        files.check_name(name, "--name")
    except ValueError:
        return
    path = os.path.join("data", name)
    assert os.path.normpath(path) == path
    assert os.path.split(path) == ("data", name)
    assert "*" not in name
