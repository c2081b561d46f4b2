"""data/downloads.py: a download resumes where it broke off, and only a file with the known hash is kept."""
import contextlib
import hashlib

import pytest

from data import downloads

CONTENT = bytes(range(256)) * 4096


@pytest.mark.parametrize("name, says, kept, have", [
    ("half", "stopped at 524,288 of 1,048,576 bytes: run this again.*do without", 1, 524_288),
    ("stuck", "could not be fetched .*timed out.*do without", 1, 524_288), ("other", "sha256 differs", 0, 0)])
def test_a_download_resumes_where_it_broke_off(name, says, kept, have, server, tmp_path, monkeypatch):
    """"half" breaks off in the middle. "stuck" does so but keeps the connection open. "other" has different content."""
    server.files = dict.fromkeys(("whole", "half", "stuck"), CONTENT) | {"other": b"x" * len(CONTENT)}
    server.broken, server.silent = {"half", "stuck"}, "stuck"
    monkeypatch.setattr(downloads, "TIMEOUT", 0.5)
    path, digest = tmp_path / "new/file", hashlib.sha256(CONTENT).hexdigest()
    for file, message, found in (name, says, ["file.part"] * kept), ("whole", None, ["file"]):
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            downloads.download(f"{server.url}/{file}", path, len(CONTENT), digest, "it", "do without")
        assert [place.name for place in path.parent.iterdir()] == found
    assert path.read_bytes() == CONTENT and [first for _, first, _ in server.asked] == [0, have]
