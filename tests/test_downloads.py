"""data/downloads.py: a download resumes where it broke off, and only a file with the known hash is kept."""
import errno
import hashlib

import pytest

from data import downloads

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def server(server):
    """/half breaks off in the middle. /stuck does so but keeps the connection open. /other has different content."""
    server.files = dict.fromkeys(("whole", "half", "stuck"), CONTENT) | {"other": b"x" * len(CONTENT)}
    server.broken, server.silent = {"half", "stuck"}, "stuck"
    return server


def get(url, path):
    downloads.download(url, path, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "it", "do without")


def test_a_download_resumes_where_it_broke_off(server, tmp_path):
    path = tmp_path / "new" / "file"
    with pytest.raises(ValueError, match="stopped at 524,288 of 1,048,576 bytes: run this again.*do without"):
        get(server.url + "/half", path)
    assert not path.exists()
    get(server.url + "/whole", path)
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    assert [first for _, first, _ in server.asked] == [0, len(CONTENT) // 2]


def test_a_silent_server_times_out(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT", 0.5)
    with pytest.raises(ValueError, match="could not be fetched .*timed out.*do without"):
        get(server.url + "/stuck", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_full_disk_keeps_what_is_there(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="stopped"):
        get(server.url + "/half", tmp_path / "file")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="No space left.*: free some space there"):
        patch.setattr(downloads, "append_rest", full)
        get(server.url + "/whole", tmp_path / "file")
    get(server.url + "/whole", tmp_path / "file")
    assert [first for _, first, _ in server.asked][-1] == len(CONTENT) // 2


def test_a_file_with_another_hash_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match="sha256 differs"):
        get(server.url + "/other", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
