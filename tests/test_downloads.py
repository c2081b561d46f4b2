"""data/downloads.py: a download resumes where it broke off, and only a file with the known hash is
kept."""

import hashlib
import io
import urllib.request

import pytest

from data import downloads

CONTENT = bytes(range(256)) * 4096


@pytest.mark.parametrize(
    "first, says, kept, have",
    [
        (
            CONTENT[:524_288],
            "stopped at 524,288 of 1,048,576 bytes: run this again.*do without",
            1,
            524_288,
        ),
        (None, "could not be fetched .*timed out.*do without", 0, 0),
        (CONTENT[::-1], "sha256 differs", 0, 0),
    ],
    ids=["half", "silent", "other"],
)
def test_a_download_resumes_where_it_broke_off(first, says, kept, have, tmp_path, monkeypatch):
    """first: the first answer, None: none comes in time. The second one is the rest that was asked
    for."""
    asked, answers = [], [first, CONTENT[have:]]

    def urlopen(request, timeout):
        asked.append(request.headers)
        answer = io.BytesIO(answers[len(asked) - 1] or b"")
        answer.status = 206 if request.headers else 200
        if answers[len(asked) - 1] is None:
            raise TimeoutError("timed out")
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    given = (
        "http://there/file",
        tmp_path / "new/file",
        len(CONTENT),
        hashlib.sha256(CONTENT).hexdigest(),
        "it",
    )
    with pytest.raises(ValueError, match=says):
        downloads.download(*given, "do without")
    assert [path.name for path in tmp_path.rglob("file*")] == ["file.part"] * kept
    downloads.download(*given, "do without")
    assert given[1].read_bytes() == CONTENT and [*given[1].parent.iterdir()] == [given[1]]
    assert asked == [{}, {"Range": f"bytes={have}-"} if have else {}]
