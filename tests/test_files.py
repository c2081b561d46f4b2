"""data/files.py: a file gets its name when it is complete, and a download goes on where it broke off."""
import hashlib
import http.server
import os
import re
import threading

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


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT: /whole, /half (breaks off in the middle), /stuck (sends half and falls silent), /other (something
    else)."""

    def do_GET(self):
        start = int(self.headers["Range"][6:-1]) if self.headers["Range"] else 0
        body = CONTENT[start:] if self.path != "/other" else b"x" * len(CONTENT)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.server.asked.append(start)
        self.wfile.write(body[:len(body) // 2] if self.path in ("/half", "/stuck") else body)
        self.wfile.flush()
        if self.path == "/stuck":
            self.server.release.wait(20)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.release, server.url = [], threading.Event(), f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()


def get(url, path):
    files.download(url, path, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "it", "do without")


def test_a_download_goes_on_where_it_broke_off(server, tmp_path):
    path = tmp_path / "new" / "file"
    with pytest.raises(ValueError, match="broke off at 524,288 of 1,048,576 bytes: run this again.*do without"):
        get(server.url + "/half", path)
    assert not path.exists()
    get(server.url + "/whole", path)
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    assert server.asked == [0, len(CONTENT) // 2]


def test_a_silent_server_is_not_waited_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 0.5)
    with pytest.raises(ValueError, match="could not be fetched .*timed out.*do without"):
        get(server.url + "/stuck", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_another_file_than_the_public_one(server, tmp_path):
    with pytest.raises(ValueError, match="sha256 differs"):
        get(server.url + "/other", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_one_line(capsys):
    with pytest.raises(SystemExit), files.one_line_errors():
        torch.empty(1 << 50)
    assert re.search("not enough memory.*lower --batch_size", capsys.readouterr().err)
    with pytest.raises(RuntimeError, match="another"), files.one_line_errors():
        raise RuntimeError("another")
