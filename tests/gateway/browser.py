"""A headless Chromium that a test drives over its debugging pipe."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DEADLINE_S = 30.0


class Browser:
    """One page. Calls of the protocol are answered in order; events are kept."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={profile}", "about:blank"]
        # The browser speaks on descriptors 3 and 4; not every shell knows descriptors above 9.
        shell = ["/bin/bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._from, False)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = next(t for t in self._targets() if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _targets(self) -> list[dict[str, Any]]:
        end_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < end_s:
            targets = self.call("Target.getTargets")["targetInfos"]
            if any(target["type"] == "page" for target in targets):
                return targets
            time.sleep(0.05)
        raise AssertionError("the browser opens no page")

    def close(self) -> None:
        os.close(self._to)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_DEADLINE_S)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; AssertionError when it fails or takes too long."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < end_s:
            answer = self._receive()
            if answer is None:
                time.sleep(0.005)
            elif answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            else:
                self.events.append(answer)
        raise AssertionError(f"the browser does not answer {method}")

    def _receive(self) -> dict[str, Any] | None:
        message, zero, rest = self._received.partition(b"\0")
        if zero:
            self._received = rest
            return json.loads(message)
        try:
            data = os.read(self._from, 1 << 20)
        except BlockingIOError:
            return None
        assert data, "the browser ended"
        self._received += data
        return None

    def view(self, width_px: int, height_px: int, *, dark: bool = False) -> None:
        """Be a screen of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width_px,
            height=height_px,
            deviceScaleFactor=1,
            mobile=width_px < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded and its script has run."""
        self.call("Page.navigate", url=url)
        loaded = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        end_s = time.monotonic() + _DEADLINE_S
        while not self.evaluate(loaded):
            assert time.monotonic() < end_s, f"{url} does not load"
            time.sleep(0.01)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])
