"""common/files.py: a file gets its name only when it is complete, and an error ends a command with one line."""
import os
import re

import pytest
import torch

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


def test_temporary_files_of_killed_processes_are_deleted(tmp_path):
    gone, here = tmp_path / ".a.txt.4999999.tmp", tmp_path / f".a.txt.{os.getppid()}.tmp"
    for left in (gone, here):                   # no process has the first id, and the second one is alive
        left.write_text("half")
    with files.replacing(tmp_path / "a.txt", "w") as f:
        f.write("whole")
    assert sorted(os.listdir(tmp_path)) == [here.name, "a.txt"]


def test_lists_that_are_nested_too_deeply_are_no_json(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="deep.json is not valid JSON.*nested too deeply.*make it again"):
        files.read_json(tmp_path / "deep.json")


def test_too_little_memory_is_reported_in_one_line(capsys):
    with pytest.raises(SystemExit), files.one_line_errors():
        torch.empty(1 << 50)
    assert re.search("not enough memory.*smaller sizes, such as --batch_size", capsys.readouterr().err)
    for error in (MemoryError(), MemoryError("5 GB"), RuntimeError("Storage size calculation overflowed, sizes=[9]")):
        with pytest.raises(SystemExit), files.one_line_errors():
            raise error
        assert capsys.readouterr().err.count("there is not enough memory") == 1
    with pytest.raises(RuntimeError, match="another"), files.one_line_errors():
        raise RuntimeError("another")
