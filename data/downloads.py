"""Downloads that continue where they stopped."""

import http.client
import os
import shutil
import urllib.request

from common import files

TIMEOUT = 20  # seconds that a server may be silent


def download(url, path, size, digest, what, otherwise):
    """Fetch a file. An earlier attempt is resumed, and the file gets its name once it is complete.

    size: in bytes; digest: sha256. what, otherwise: for error messages, what the file is and what
    to do without network. Raises ValueError."""
    part, again = path.with_name(path.name + ".part"), f"run this again, or {otherwise}"
    part.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {url} ({size / 1e6:,.1f} MB)", flush=True)
    have = part.stat().st_size if part.exists() else 0
    try:
        if have < size:
            rest = {"Range": f"bytes={have}-"} if have else {}
            request = urllib.request.Request(url, headers=rest)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                # 206: only the missing bytes. A server that cannot resume sends all of them
                with open(part, "ab" if answer.status == 206 else "wb") as f:
                    shutil.copyfileobj(answer, f)
            have = part.stat().st_size
    except (OSError, http.client.HTTPException) as e:  # no network, a timeout, a full disk
        raise ValueError(f"{what} could not be fetched to {part.parent} ({e}): {again}") from None
    if have < size:
        raise ValueError(f"{what}: the download stopped at {have:,} of {size:,} bytes: {again}")
    if files.sha256(part) != digest:
        part.unlink()
        raise ValueError(
            f"{what}: the fetched file is not the public one (sha256 differs): {again}"
        )
    os.replace(part, path)
