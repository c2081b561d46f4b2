"""data/downloads.py: a download resumes where it broke off, and only a file with the known hash is kept."""
import errno
import hashlib

import pytest

from data import downloads

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def get(server, tmp_path):
    """get(name) downloads to tmp_path/new/file. "half" breaks off in the middle. "stuck" does so but keeps the
    connection open. "other" has different content."""
    server.files = dict.fromkeys(("whole", "half", "stuck"), CONTENT) | {"other": b"x" * len(CONTENT)}
    server.broken, server.silent = {"half", "stuck"}, "stuck"
    digest = hashlib.sha256(CONTENT).hexdigest()
    return lambda name: downloads.download(f"{server.url}/{name}", tmp_path / "new/file", len(CONTENT), digest, "it",
                                           "do without")


def test_a_download_resumes_where_it_broke_off_also_after_a_full_disk(get, server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="stopped at 524,288 of 1,048,576 bytes: run this again.*do without"):
        get("half")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="No space left.*: free some space there"):
        patch.setattr(downloads, "append_rest", full)
        get("whole")
    assert not (tmp_path / "new/file").exists()
    get("whole")
    assert (tmp_path / "new/file").read_bytes() == CONTENT and len(list((tmp_path / "new").iterdir())) == 1
    assert [first for _, first, _ in server.asked] == [0, len(CONTENT) // 2]


@pytest.mark.parametrize("name, says, kept", [
    ("stuck", "could not be fetched .*timed out.*do without", 1), ("other", "sha256 differs", 0)])
def test_a_silent_server_times_out_and_another_content_is_refused(name, says, kept, get, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT", 0.5)
    with pytest.raises(ValueError, match=says):
        get(name)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.part"] * kept
