"""data/downloads.py: a download resumes where it broke off, and only a file with the known hash is kept."""
import contextlib
import errno
import hashlib
from unittest import mock

import pytest

from data import downloads

CONTENT = bytes(range(256)) * 4096


@pytest.mark.parametrize("name, says, kept, have", [
    ("half", "stopped at 524,288 of 1,048,576 bytes: run this again.*do without", 1, 524_288),
    ("stuck", "could not be fetched .*timed out.*do without", 1, 524_288), ("other", "sha256 differs", 0, 0)])
def test_a_download_resumes_where_it_broke_off_also_after_a_full_disk(name, says, kept, have, server, tmp_path,
                                                                      monkeypatch):
    """"half" breaks off in the middle. "stuck" does so but keeps the connection open. "other" has different content."""
    server.files = dict.fromkeys(("whole", "half", "stuck"), CONTENT) | {"other": b"x" * len(CONTENT)}
    server.broken, server.silent = {"half", "stuck"}, "stuck"
    monkeypatch.setattr(downloads, "TIMEOUT", 0.5)

    def get(name, says=None):
        digest = hashlib.sha256(CONTENT).hexdigest()
        with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
            downloads.download(f"{server.url}/{name}", tmp_path / "new/file", len(CONTENT), digest, "it", "do without")
        return [path.name for path in (tmp_path / "new").iterdir()]

    assert get(name, says) == ["file.part"] * kept
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(downloads.urllib.request, "urlopen", mock.Mock(side_effect=full))
        assert get("whole", "No space left.*: free some space there") == ["file.part"] * kept
    assert get("whole") == ["file"] and (tmp_path / "new/file").read_bytes() == CONTENT
    assert [first for _, first, _ in server.asked] == [0, have]
