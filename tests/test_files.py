"""data/files.py: a file gets its name when it is complete, and a download resumes where it broke off."""
import hashlib
import os
import re

import pytest
import torch

from data import files


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


# ----------------------------------------------------------------------------------------------------------- downloads

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def server(server):
    """/half breaks off in the middle, /stuck then keeps the connection open, /other is something else."""
    server.files = dict.fromkeys(("whole", "half", "stuck"), CONTENT) | {"other": b"x" * len(CONTENT)}
    server.broken, server.silent = {"half", "stuck"}, "stuck"
    return server


def get(url, path):
    files.download(url, path, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "it", "do without")


def test_a_download_resumes_where_it_broke_off(server, tmp_path):
    path = tmp_path / "new" / "file"
    with pytest.raises(ValueError, match="broke off at 524,288 of 1,048,576 bytes: run this again.*do without"):
        get(server.url + "/half", path)
    assert not path.exists()
    get(server.url + "/whole", path)
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    assert [first for _, first, _ in server.asked] == [0, len(CONTENT) // 2]


def test_a_silent_server_is_not_waited_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 0.5)
    with pytest.raises(ValueError, match="could not be fetched .*timed out.*do without"):
        get(server.url + "/stuck", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_another_file_than_the_public_one_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match="sha256 differs"):
        get(server.url + "/other", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_reported_in_one_line(capsys):
    with pytest.raises(SystemExit), files.one_line_errors():
        torch.empty(1 << 50)
    assert re.search("not enough memory.*lower --batch_size", capsys.readouterr().err)
    with pytest.raises(RuntimeError, match="another"), files.one_line_errors():
        raise RuntimeError("another")
