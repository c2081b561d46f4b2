"""data/downloads.py: a download resumes where it broke off, and only a file with the known hash is
kept."""

import hashlib
import io
import urllib.request

import pytest

from data import downloads

CONTENT = bytes(range(256)) * 4096


HALF = 524_288
STOPPED = "stopped at 524,288 of 1,048,576 bytes: run this again.*do without"


@pytest.mark.parametrize(
    "first, says, kept, have",
    [
        (CONTENT[:HALF], STOPPED, 1, HALF),
        (None, "could not be fetched .*timed out.*do without", 0, 0),
        (CONTENT[::-1], "sha256 differs", 0, 0),
    ],
    ids=["half", "silent", "other"],
)
def test_a_download_resumes_where_it_broke_off(first, says, kept, have, tmp_path, monkeypatch):
    """first: the first answer, None: none comes in time. The second one is the rest that was asked
    for."""
    answers = [first, CONTENT[have:]]
    asked = []

    def urlopen(request, timeout):
        asked.append(request.headers)
        content = answers.pop(0)
        if content is None:
            raise TimeoutError("timed out")
        answer = io.BytesIO(content)
        answer.status = 206 if request.headers else 200
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    file = tmp_path / "new/file"
    digest = hashlib.sha256(CONTENT).hexdigest()
    given = "http://there/file", file, len(CONTENT), digest, "it"
    with pytest.raises(ValueError, match=says):
        downloads.download(*given, "do without")
    assert [path.name for path in tmp_path.rglob("file*")] == ["file.part"] * kept
    downloads.download(*given, "do without")
    assert file.read_bytes() == CONTENT and [*file.parent.iterdir()] == [file]
    assert asked == [{}, {"Range": f"bytes={have}-"} if have else {}]
