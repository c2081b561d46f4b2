"""Runs JavaScript on a page in a headless Chromium (apt-get install chromium). Without one, the
test
is skipped."""

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--virtual-time-budget=60000",
    "--window-size=1700,900",
)
# a window cannot be narrower than 500 pixels, but a frame in it can
FRAME = """<!DOCTYPE html><meta charset="utf-8">
<iframe style="border: 0; width: {width}px; height: 800px" srcdoc="{page}"></iframe>"""
PAGE = """<!DOCTYPE html><script>
problems = []
onerror = onunhandledrejection = event => problems.push(event.reason?.stack ?? String(event))
</script>{page}<script type="module">
const found = await (async () => {{ {script} }})()
parent.document.title = JSON.stringify([found, problems])
</script>"""


def on_page(path, script, width=1200):
    """What the body of an asynchronous function returns on a page of this width. The page must
    raise
    no error."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if not chromium:
        pytest.skip("needs a browser: apt-get install chromium")
    page = PAGE.format(page=path.read_text(encoding="utf-8"), script=script)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        frame = Path(folder, "frame.html")
        frame.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
        dom = subprocess.run(
            [chromium, *FLAGS, f"--user-data-dir={folder}/user", "--dump-dom", frame.as_uri()],
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        ).stdout
    title = re.search("<title>(.*?)</title>", dom, re.S)
    assert title, f"the script did not end on {path}"
    found, problems = json.loads(html.unescape(title[1]))
    assert problems == []
    return found
