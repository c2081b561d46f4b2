"""Files are never half written, names in them lead to no other folder, and errors are one line.
Damaged files: test_refusals.py."""

import math
import os
from pathlib import Path

import pytest
import torch
from conftest import assert_says
from hypothesis import given
from hypothesis import strategies as st

from common import files


def test_a_file_is_renamed_into_place_only_when_complete(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), files.replacing(path, "w") as f:
        f.write("half")
        f.flush()
        assert path.read_text() == "before"
        raise KeyboardInterrupt
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.txt"]
    with files.replacing(path, "w") as f:
        f.write("after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["a.txt"]


GONE = 1 << 22, 1 << 70  # no processes have these ids


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["a.txt", "b.txt", "old.a.txt", "a.txt.b"]),
            st.sampled_from([*GONE, os.getppid(), "x"]),
        ),
        st.sampled_from(["file", "folder", "link"]),
        max_size=9,
    )
)
def test_only_temporary_files_of_killed_processes_are_deleted(tmp_path_factory, left):
    folder = tmp_path_factory.mktemp("some")
    kept = {"a.txt", "target"}
    (folder / "target").touch()
    make = {
        "file": Path.touch,
        "folder": Path.mkdir,
        "link": lambda path: path.symlink_to("target"),
    }
    for (name, process), kind in left.items():
        make[kind](path := folder / f".{name}.{process}.tmp")
        if (name, kind) != ("a.txt", "file") or process not in GONE:
            kept.add(path.name)
    with files.replacing(folder / "a.txt", "w"):
        pass
    assert {path.name for path in folder.iterdir()} == kept


def test_too_little_memory_is_reported_in_one_line_and_an_error_raised_with_traceback_1(
    monkeypatch, capsys
):
    small = "there is not enough memory.*smaller sizes, such as --batch_size"
    large = "a number is too large.*use smaller ones, such as --learning_rate"
    for says, call in (
        (small, lambda: torch.empty(1 << 50)),
        (small, lambda: torch.empty(1 << 62)),  # the size itself overflows
        (small, lambda: bytearray(1 << 60)),
        (large, lambda: torch.ones(1).add_(1, alpha=1e308)),
        (large, lambda: torch.full((1,), 1e308)),
        (large, lambda: math.exp(1e4)),
    ):
        with pytest.raises(SystemExit), files.one_line_errors():
            call()
        assert_says(says, capsys.readouterr().err)
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
    assert os.path.normpath(path) == path and os.path.split(path) == ("data", name)
    assert "*" not in name
