"""A headless Chromium, spoken to by the WebDriver protocol."""

import base64
import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.serve.conftest import soon

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no Chromium: apt-get install chromium chromium-driver"


class Browser:
    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def ask(self, path: str, **body: Any) -> Any:
        return value(self._http.post(f"/session/{self._session}/{path}", json=body))

    def open(self, url: str, width: int, height: int) -> None:
        """Open a page in a window with so many CSS pixels inside."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=screen)
        self.ask("url", url=url)

    def run(self, script: str) -> Any:
        """Run a fragment of JavaScript and return its result."""
        return self.ask("execute/sync", script=script, args=[])

    def text(self, id_: str) -> str:
        return str(self.run(f"return document.getElementById('{id_}').textContent"))

    def console_errors(self) -> list[str]:
        """Return the errors that the page, or the browser about it, has logged since the last call."""
        return [
            entry["message"] for entry in self.ask("se/log", type="browser") if entry["level"] == "SEVERE"
        ]

    def screenshot(self, file: Path) -> None:
        found = self._http.get(f"/session/{self._session}/screenshot")
        file.write_bytes(base64.b64decode(value(found)))


def value(reply: httpx.Response) -> Any:
    answer = reply.json()["value"]
    assert reply.status_code == 200, answer
    return answer


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([str(DRIVER), f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL)
    options = {
        "goog:chromeOptions": {
            "binary": CHROMIUM,
            "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        },
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def is_there() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return bool(value(http.get("/status"))["ready"])
                return False

            soon(is_there)
            body = {"capabilities": {"alwaysMatch": options}}
            session = value(http.post("/session", json=body))["sessionId"]
            try:
                yield Browser(http, session)
            finally:
                http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)
