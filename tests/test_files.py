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


def test_too_little_memory_is_reported_in_one_line(capsys):
    with pytest.raises(SystemExit), files.one_line_errors():
        torch.empty(1 << 50)
    assert re.search("not enough memory.*lower --batch_size", capsys.readouterr().err)
    with pytest.raises(RuntimeError, match="another"), files.one_line_errors():
        raise RuntimeError("another")
