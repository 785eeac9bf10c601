"""Open the Replicas tab in headless Chromium, use it as a person does, and read what it has drawn.

    with chromium(work) as browser:
        page = Dashboard(browser, board.url)
        page.drawn("night")["loss"]["series"]

A picture of any page, for the README: `take_screenshot(url, path)`; `python -m dashboard.browser URL PATH` in tests/.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

__all__ = ["chromium", "Dashboard", "take_screenshot"]

# Chromium asks before a page's second download; it does not take the clicks of a driver for a person's.
_MANY_DOWNLOADS = "profile.default_content_setting_values.automatic_downloads"
# No sandbox: tests run as root in containers. The rest keeps the browser off the network and quiet.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


def missing() -> str | None:
    """Return what is not installed, or None: Debian has both as chromium and chromium-driver."""
    found = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(found)} not found: apt-get install chromium chromium-driver" if found else None


@contextlib.contextmanager
def chromium(work: Path, width: int = 1440, height: int = 1000) -> Iterator[webdriver.Chrome]:
    """Run a browser of its own, with nothing remembered, that downloads to `work / "downloads"`."""
    downloads = work / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*_FLAGS, f"--user-data-dir={work / 'profile'}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    prefs = {"download.default_directory": str(downloads), _MANY_DOWNLOADS: 1}
    options.add_experimental_option("prefs", prefs)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.set_script_timeout(60)
    try:
        yield browser
    finally:
        browser.quit()


class Dashboard:
    """The Replicas tab, in TensorBoard as a person sees it."""

    def __init__(self, browser: webdriver.Chrome, url: str, *, dark: bool = False, address: str = "") -> None:
        self.browser = browser
        # TensorBoard reads no new address from a change of the part after # alone.
        browser.get("about:blank")
        browser.get(f"{url}/?darkMode={str(dark).lower()}#replicas{address}")
        self.enter()

    def enter(self, timeout: float = 60.0) -> None:
        """Go into the tab's frame, and wait until everything is drawn."""
        deadline = time.monotonic() + timeout
        self.browser.switch_to.default_content()
        while not (frames := self.browser.find_elements(By.CSS_SELECTOR, 'iframe[src*="name=replicas"]')):
            assert time.monotonic() < deadline, f"TensorBoard shows no Replicas tab: {self.browser.current_url}"
            time.sleep(0.05)
        self.browser.switch_to.frame(frames[0])
        self.settle(timeout)

    def reset(self, *experiments: str) -> None:
        """Load the tab's frame anew, as if nothing had been chosen before, and choose experiments."""
        self.run("delete window.replicasDashboard; localStorage.clear()")
        self.run("parent.history.replaceState({}, '', '#replicas'); window.location.reload()")
        self.enter()
        if experiments:
            self.choose(*experiments)

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until everything that was asked for has been drawn."""
        deadline = time.monotonic() + timeout
        while not self.run("return Boolean(window.replicasDashboard?.idle)"):
            assert time.monotonic() < deadline, f"the page is not done after {timeout} s: {self.text()[:2000]}"
            time.sleep(0.03)

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript in the tab's frame."""
        return self.browser.execute_script(script, *args)

    def text(self) -> str:
        """Everything that can be read on the page."""
        return str(self.run("return document.body?.innerText ?? ''"))

    def drawn(self, experiment: str = "") -> dict[str, Any]:
        """Return what the charts of an experiment have drawn."""
        self.settle()
        found: dict[str, Any] = self.run("return window.replicasDashboard.drawn(arguments[0])", experiment)
        return found

    def lines(self, chart: str, experiment: str = "") -> dict[str, list[float | None]]:
        """Return the lines of a chart by name."""
        return {one["name"]: one["values"] for one in self.drawn(experiment)[chart]["series"]}

    def find(self, selector: str) -> WebElement:
        """Return the first element of a CSS selector."""
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Return every element of a CSS selector."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click an element, wherever on the page it is."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        self.settle()

    def choose(self, *experiments: str) -> None:
        """Tick these experiments, and no others, in the order given."""
        opener = "document.querySelector('[data-control=experiments][aria-expanded={}]')?.click()"
        for i, name in enumerate(experiments):
            self.run(opener.format("false"))  # opening one by its name closes the list
            elements = self.all(f".picker-list {'input' if i else 'button'}")
            next(one for one in elements if one.get_attribute("data-name") == name).click()
        self.run(opener.format("true"))
        self.settle()

    def drag(self, chart: str, start: float, end: float, experiment: str = "") -> None:
        """Drag over a chart, from one share of its width to another."""
        over = self.over(chart, experiment)
        width = over.size["width"]
        ActionChains(self.browser, duration=30).move_to_element_with_offset(
            over, round((start - 0.5) * width), 0
        ).click_and_hold().move_by_offset(round((end - start) * width / 2), 0).move_by_offset(
            round((end - start) * width / 2), 0
        ).release().perform()
        self.settle()

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        ActionChains(self.browser, duration=10).send_keys(*keys).perform()
        self.settle()

    def hover(self, chart: str, share: float, experiment: str = "") -> None:
        """Move the mouse over a chart, at a share of its width and half of its height."""
        over = self.over(chart, experiment)
        ActionChains(self.browser, duration=30).move_to_element_with_offset(
            over, round((share - 0.5) * over.size["width"]), 0
        ).move_by_offset(1, 0).perform()

    def over(self, chart: str, experiment: str = "") -> WebElement:
        """Return the part of a chart that the mouse acts on."""
        for card in self.all(f'.card[data-chart="{chart}"]'):
            if card.get_attribute("data-experiment") == experiment:
                over = card.find_element(By.CSS_SELECTOR, ".u-over, .split")
                self.run("arguments[0].scrollIntoView({block: 'center'})", over)
                return over
        raise AssertionError(f"no chart {chart!r} of {experiment!r}")

    def errors(self) -> list[str]:
        """Return what the browser complains about, but for fonts that TensorBoard itself does not find."""
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if entry["level"] == "SEVERE" and not any(word in entry["message"] for word in ("favicon", "font-roboto"))
        ]

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Save a picture of the whole tab, in a window as high as the page."""
        self.settle()
        wanted = height or int(self.run("return document.querySelector('.page').scrollHeight")) + 64
        self.browser.switch_to.default_content()
        width = self.browser.execute_script("return window.innerWidth")
        metrics = {"width": width, "height": wanted, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.enter()
        time.sleep(0.3)
        self.browser.switch_to.default_content()
        self.browser.save_screenshot(str(path))
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.enter()


def take_screenshot(
    url: str, path: Path | str, *, dark: bool = False, width: int = 1440, height: int | None = None, address: str = ""
) -> None:
    """Save a picture of the Replicas tab of the TensorBoard at `url`.

    Args:
        url: Where TensorBoard is, as in http://127.0.0.1:6006.
        path: A PNG file.
        dark: Whether to use TensorBoard's dark mode.
        width: Pixels of the window.
        height: Pixels of the window; as high as the page when not given.
        address: What follows #replicas, as in "&p.replicas.experiment=night".
    """
    with tempfile.TemporaryDirectory() as work, chromium(Path(work), width) as browser:
        Dashboard(browser, url, dark=dark, address=address).screenshot(Path(path), height)


if __name__ == "__main__":
    take_screenshot(sys.argv[1], sys.argv[2], dark="dark" in sys.argv[3:])
