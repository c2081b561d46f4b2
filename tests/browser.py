"""A headless Chromium for tests of pages, driven by chromedriver over the WebDriver protocol, which is JSON over HTTP.

Debian and Ubuntu: apt-get install chromium chromium-driver. A test that needs it is skipped if either is missing.
"""
import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"                         # the key of an element in the protocol
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "shift": "\ue008", "home": "\ue011",
        "end": "\ue010"}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--force-device-scale-factor=1")


class Browser:
    """One window. `folder` is an empty folder for the browser's own files."""

    def __init__(self, folder):
        chromium, driver = (next(filter(None, map(shutil.which, names)), None) for names in (
            ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)))
        if not chromium or not driver:
            pytest.skip("needs a browser and its driver: apt-get install chromium chromium-driver")
        self.driver = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        said = iter(self.driver.stdout.readline, "")
        port = next(filter(None, (re.search(r"started successfully on port (\d+)", line) for line in said)))[1]
        self.url = f"http://127.0.0.1:{port}/session"
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={folder}"]}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"},
                 "timeouts": {"script": 300_000, "pageLoad": 300_000}}          # of a busy machine
        self.url += "/" + self.ask("POST", "", {"capabilities": {"alwaysMatch": asked}})["sessionId"]

    def ask(self, method, path, body=None):
        """Send one command, and return its value."""
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{method} {path}: {json.load(e)['value']['message']}") from None

    def close(self):
        self.ask("DELETE", "")
        self.driver.terminate()
        self.driver.wait()

    # ------------------------------------------------------------------------------------------------------ the page

    def open(self, path, width=1024, height=768, dark=False):
        """Open a file in a window whose page has this size, and wait until it is ready."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=features)
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                      mobile=False)
        self.ask("POST", "/url", {"url": path.resolve().as_uri()})
        self.run("const done = arguments[0], wait = () => document.body.dataset.ready ? done() : setTimeout(wait, 20)\n"
                 "wait()", kind="async")

    def devtools(self, command, **parameters):
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script, *arguments, kind="sync"):
        """Run JavaScript in the page. Elements go in and out as this class finds them."""
        return self.ask("POST", f"/execute/{kind}", {"script": script, "args": list(arguments)})

    def find(self, selector):
        return self.ask("POST", "/elements", {"using": "css selector", "value": selector})

    def named(self, role, name):
        """The only element of this role and name in the accessibility tree."""
        tree = self.devtools("Accessibility.getFullAXTree")["nodes"]
        found = [node for node in tree if not node["ignored"] and node["role"]["value"] == role
                 and re.fullmatch(name, node.get("name", {}).get("value", ""))]
        assert len(found) == 1, f"{len(found)} of role {role} are named {name}"
        return found[0]

    def names(self, role):
        """The names of all elements of this role in the accessibility tree."""
        tree = self.devtools("Accessibility.getFullAXTree")["nodes"]
        return [node["name"]["value"] for node in tree if not node["ignored"] and node["role"]["value"] == role]

    def text(self, selector):
        element, = self.find(selector)
        return self.ask("GET", f"/element/{element[ELEMENT]}/text")

    def click(self, selector):
        element, = self.find(selector)
        self.ask("POST", f"/element/{element[ELEMENT]}/click")

    def point(self, selector, x=0, y=0, drag=None):
        """Move the pointer to a place of an element, counted in pixels from its middle; with drag=(x, y), press there
        and move to this place."""
        element, = self.find(selector)

        def move(x, y):
            return {"type": "pointerMove", "duration": 0, "origin": element, "x": round(x), "y": round(y)}

        steps = [move(x, y)]
        if drag:
            steps += [{"type": "pointerDown", "button": 0}, move(*drag), {"type": "pointerUp", "button": 0}]
        self.act({"type": "pointer", "id": "mouse", "actions": steps})

    def press(self, *keys):
        """Press keys one after another: a letter, a name of KEYS, or "shift+up"."""
        steps = []
        for key in keys:
            codes = [KEYS.get(part, part) for part in key.split("+")]
            steps += [{"type": "keyDown", "value": code} for code in codes]
            steps += [{"type": "keyUp", "value": code} for code in reversed(codes)]
        self.act({"type": "key", "id": "keyboard", "actions": steps})

    def act(self, actions):
        self.ask("POST", "/actions", {"actions": [actions]})

    def screenshot(self, whole=False):
        """A PNG of the window, or of the whole page."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def errors(self):
        """What the page has written to the console as errors or warnings since the last call."""
        log = self.ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]
