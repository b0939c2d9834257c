"""A page in headless Chromium, driven by its own protocol over a pipe: nothing else is installed.

with Browser() as browser:
    page = browser.open(path, width=390, dark=True)
    page.evaluate("document.title"), page.said, page.screenshot()
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds that Chromium may take to end


def chromium() -> str | None:
    """Where a Chromium is; CHROMIUM names one that is nowhere on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One Chromium, for as long as the block lasts."""

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._write = os.pipe()  # Chromium reads 3 and writes 4
        self._read, theirs_too = os.pipe()
        found = chromium()
        assert found
        command = [
            *("bash", "-c", f'exec "$@" 3<&{theirs} 4>&{theirs_too}', "bash", found),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe"),
            *("--disable-background-networking", "--disable-component-update"),
            *(f"--user-data-dir={self._profile.name}", "about:blank"),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs, theirs_too),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_too)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.ask("Browser.close")
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._profile.cleanup()

    def ask(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        """What the protocol answers; events that come before are kept."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": given}
        if session:
            asked["sessionId"] = session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._read, 1 << 20)
            if not got:
                raise EOFError("Chromium ended")
            self._rest += got
        one, self._rest = self._rest.split(b"\0", 1)
        return json.loads(one)

    def open(
        self,
        path: Path,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
    ) -> "Page":
        """A file, once it is loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.size(width, height)
        page.prefer("dark" if dark else "light")
        page.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.ask("Page.navigate", url=path.resolve().as_uri())
        page.wait_for("Page.loadEventFired")
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **given)

    def wait_for(self, event: str) -> None:
        while not any(each["method"] == event for each in self._events()):
            self.browser.events.append(self.browser._next())

    def _events(self) -> list[dict[str, Any]]:
        return [each for each in self.browser.events if each.get("sessionId") == self.session]

    def size(self, width: int, height: int) -> None:
        phone = width < 600
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    @property
    def said(self) -> list[str]:
        """Everything in its console, and every exception."""
        self.evaluate("1")  # after which all that was said before has come
        of = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(each["params"]) for each in self._events() if each["method"] in of]

    @property
    def asked_for(self) -> list[str]:
        """Every address that it has asked for."""
        events = [e for e in self._events() if e["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in events]

    def screenshot(self) -> bytes:
        """All of it as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=self._whole())
        return base64.b64decode(shot["data"])

    def _whole(self) -> dict[str, float]:
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
