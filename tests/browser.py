"""A headless Chromium for tests of pages, driven by selenium. A test that needs it is skipped if a part is missing.

Debian and Ubuntu: apt-get install chromium chromium-driver; pip install selenium
"""
import shutil
from functools import partial

import pytest

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--force-device-scale-factor=1")


class Browser:
    """One window. `folder` is an empty folder for the browser's own files."""

    def __init__(self, folder):
        webdriver = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if not chromium or not (driver := shutil.which("chromedriver")):
            pytest.skip("needs a browser and its driver: apt-get install chromium chromium-driver")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(driver))
        self.find, self.run = partial(self.driver.find_element, "css selector"), self.driver.execute_script
        self.actions = webdriver.ActionChains(self.driver, duration=0)
        self.keys = {name: getattr(webdriver.Keys, name.upper()) for name in (
            "left", "up", "right", "down", "shift", "home", "end")}

    def open(self, path, width=1024, height=768):
        """Open a file in a window whose page has this size, and wait until it is ready."""
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
        self.driver.set_script_timeout(300)
        self.driver.get(path.resolve().as_uri())
        self.driver.execute_async_script(
            "let done = arguments[0], wait = () => document.body.dataset.ready ? done() : setTimeout(wait, 20); wait()")

    def names(self, role):
        """The names of all elements of this role in the accessibility tree."""
        tree = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [node["name"]["value"] for node in tree if not node["ignored"] and node["role"]["value"] == role]

    def text(self, selector):
        return self.find(selector).text

    def click(self, selector):
        self.find(selector).click()

    def point(self, selector, x=0, y=0):
        """Move the pointer to a place of an element, counted in pixels from its middle."""
        self.actions.move_to_element_with_offset(self.find(selector), round(x), round(y)).perform()

    def drag(self, selector, start, end):
        """Press the pointer at one place of an element and release it at another, both as in `point`."""
        element = self.find(selector)
        self.actions.move_to_element_with_offset(element, *start).click_and_hold()
        self.actions.move_to_element_with_offset(element, *end).release().perform()

    def press(self, *keys):
        """Press keys one after another: a letter, a name of `keys`, or "shift+up"."""
        for key in keys:
            *held, last = (self.keys.get(part, part) for part in key.split("+"))
            for name in held:
                self.actions.key_down(name)
            self.actions.send_keys(last)
            for name in held:
                self.actions.key_up(name)
        self.actions.perform()

    def errors(self):
        """What the page has written to the console as errors or warnings since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
