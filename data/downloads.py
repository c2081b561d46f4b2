"""Downloads that continue where they stopped."""
import http.client
import os
import shutil
import urllib.request

from common import files

TIMEOUT = 20                                    # seconds that a server may be silent


def size_of(url):
    """Size in bytes of the file at a URL, as its server states it."""
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        if "Content-Length" not in answer.headers:
            raise OSError("the server does not state the file's size")
        return int(answer.headers["Content-Length"])


def download(url, path, size, digest, what, otherwise):
    """Fetch a file. An earlier attempt is resumed, and the file gets its name once it is complete.

    size: in bytes; None: as the server states it. digest: its sha256; None: not compared. what, otherwise: for error
    messages, what the file is and what to do without network. Raises ValueError."""
    part, again = path.with_name(path.name + ".part"), f"run this again, or {otherwise}"
    have = part.stat().st_size if part.exists() else 0
    try:
        size = size_of(url) if size is None else size
        here = f", {have / 1e6:,.1f} of them already here" if have else ""
        print(f"fetching {url} ({size / 1e6:,.1f} MB{here})", flush=True)
        if have < size:
            request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                part.parent.mkdir(parents=True, exist_ok=True)
                # 206: only the missing bytes. A server that cannot resume sends all of them
                with open(part, "ab" if answer.status == 206 else "wb") as f:
                    shutil.copyfileobj(answer, f)
    except (OSError, http.client.HTTPException) as e:   # no network, unknown address, timeout, broken connection
        if getattr(e, "errno", None) in files.FULL_DISK:
            again = "free some space there and run this again to continue"
        why = getattr(e, "reason", None) or e
        raise ValueError(f"{what} could not be fetched to {part.parent} ({why}): {again}") from None
    have = part.stat().st_size
    if have < size:
        raise ValueError(f"{what}: the download stopped at {have:,} of {size:,} bytes: {again}")
    if have != size or digest not in (None, files.sha256(part)):
        part.unlink()
        raise ValueError(f"{what}: the fetched file is not the public one (size or sha256 differs): {again}")
    os.replace(part, path)
