"""Files and the network: writing that never leaves half a file, downloads that go on where they stopped, errors in one
line. The lowest room of the house: it imports nothing of ours.
"""
import contextlib
import hashlib
import http.client
import importlib
import json
import os
import re
import sys
import urllib.request
from pathlib import Path

# -------------------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def replacing(path, mode="wb"):
    """Write a file under a temporary name and rename it when all is written: a reader never meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")       # the same folder: renaming is one act there
    try:
        with open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())                # on the disk before it gets its name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    with replacing(path, "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:                     # not JSON, or not even text
        raise ValueError(f"{path} is not valid JSON ({e}): delete it and make it again") from None


def sha256(path):
    """The hash of a file of any size, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- downloads


TIMEOUT = 20                                    # seconds that a server may be silent


def fetch(url, part, have):
    """Append what is missing to a partial download that has `have` bytes, or begin again where the server cannot do
    that."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab" if answer.status == 206 else "wb") as f:   # 206: it sends what was asked for, not all
            while chunk := answer.read(1 << 20):
                f.write(chunk)


def size_of(url):
    """Bytes of the file at an address, by its server's word."""
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        if "Content-Length" not in answer.headers:
            raise OSError("the server does not say how large it is")
        return int(answer.headers["Content-Length"])


def download(url, path, size, digest, what, otherwise):
    """Fetch a file of known size and sha256, going on where an earlier attempt stopped; it gets its name when all of it
    is there. size None: what the server says; digest None: not compared. For messages: `what` it is, and what to do
    `otherwise`, where there is no network. Raises ValueError."""
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    try:
        size = size_of(url) if size is None else size
        here = f", {have / 1e6:,.1f} of them are here" if have else ""
        print(f"fetching {url} ({size / 1e6:,.1f} MB{here})", flush=True)
        if have < size:
            fetch(url, part, have)
    except (OSError, http.client.HTTPException) as e:   # no network, an unknown address, silence, a broken connection
        raise ValueError(f"{what} could not be fetched ({getattr(e, 'reason', None) or e}): "
                         f"run this again with network, or {otherwise}") from None
    have = part.stat().st_size
    if have < size:
        raise ValueError(f"{what}: the download broke off at {have:,} of {size:,} bytes: "
                         f"run this again, it goes on from there, or {otherwise}")
    if have != size or digest not in (None, sha256(part)):
        part.unlink()
        raise ValueError(f"{what}: what came is not the public file (sha256 differs) and was deleted: "
                         f"run this again, or {otherwise}")
    os.replace(part, path)


# ------------------------------------------------------------------------------------------------------------- errors


def optional(module):
    """Import something that not every installation has."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"this needs the package {package}, which is not installed: pip install {package}") from None


@contextlib.contextmanager
def one_line_errors():
    """A mistake in the input or on the disk ends a command with one clear sentence instead of a traceback."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:                     # whoever read the output has read enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still wants to flush
        sys.exit(1)
    except (ValueError, OSError, KeyboardInterrupt, RuntimeError) as e:
        if isinstance(e, RuntimeError):         # of these, a mistake in the input can only be asking for too much
            if not re.search("out of memory|can't allocate memory|not enough memory", str(e)):
                raise
            e = f"there is not enough memory ({str(e).splitlines()[0]}): lower --batch_size or --block_size"
        if os.environ.get("TRACEBACK"):         # TRACEBACK=1 python train.py ... shows where it came from
            raise
        what = "interrupted" if isinstance(e, KeyboardInterrupt) else f"error: {' '.join(str(e).split())}"
        rank = f" (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
        print(f"{Path(sys.argv[0]).name}{rank}: {what}", file=sys.stderr, flush=True)
        sys.exit(130 if isinstance(e, KeyboardInterrupt) else 1)
