"""A real Chromium for tests of pages, driven as WebDriver asks: JSON over HTTP to chromedriver, and nothing between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.processes import free_port

WAIT_S = 60.0
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)


class Browser:
    """One window."""

    def __init__(self, driver: str, folder: Path) -> None:
        self._driver, self._session = driver, ""
        options = {"args": [*FLAGS.split(), f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *given: Any) -> Any:
        """Return what the body of a function comes to in the page; `arguments` holds what is given."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(given)})

    def wait(self, script: str, *given: Any, timeout_s: float = WAIT_S) -> Any:
        """Run a script until it comes to something, and return that."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := self.run(script, *given)):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {timeout_s:.0f} s for: {script}; the page says {self.text('body')[:2000]}")
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """Return the text that is seen in the first element that a selector finds."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def resize(self, width: int, height: int) -> None:
        """Show the page in a window of another size, also one smaller than windows may be, as phones have."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._cdp("Emulation.setDeviceMetricsOverride", **size)

    def colors(self, scheme: Literal["light", "dark"]) -> None:
        """Be in a system that prefers light or dark colours."""
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        path.write_bytes(base64.b64decode(self._cdp("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def cpu_s(self) -> float:
        """Return the CPU time that the process which shows the page has taken, which earlier pages may have shared."""
        self._cdp("Performance.enable", timeDomain="threadTicks")
        found = {one["name"]: one["value"] for one in self._cdp("Performance.getMetrics")["metrics"]}
        return float(found["ProcessTime"])

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console since this was last asked, refused scripts among them."""
        found = self._call("POST", "/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] in ("SEVERE", "WARNING")]

    def _cdp(self, command: str, **given: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": given})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._driver}{self._session}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Context with a browser whose files are in an empty folder; skips the test where there is none."""
    if not (shutil.which("chromedriver") and shutil.which("chromium")):
        pytest.skip("Chromium is not installed")
    port, home = free_port(), folder / "home"
    home.mkdir(parents=True)
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=log, stderr=log, env={**os.environ, "HOME": str(home)}
        )
    try:
        browser = _begin(f"http://127.0.0.1:{port}", folder, process)
        yield browser
        browser._call("DELETE", "")
    finally:
        process.terminate()
        process.wait(timeout=WAIT_S)


def _begin(driver: str, folder: Path, process: subprocess.Popen[bytes]) -> Browser:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return Browser(driver, folder / "profile")
        except urllib.error.URLError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError((folder / "driver.log").read_text()[-2000:]) from None
            time.sleep(0.05)
