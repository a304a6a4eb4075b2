"""A headless Chromium for tests, driven by the DevTools protocol over a pipe: no package and no port is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The browser reads commands from descriptor 3 and answers on 4, each message ended by a zero byte.
LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
KEYS |= {f"Arrow{way}": (code, "") for way, code in (("Left", 37), ("Up", 38), ("Right", 39), ("Down", 40))}
PATIENCE = 30


class Browser:
    """One page of it."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        """what the page wrote to the console as an error, and what it raised"""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        self._writes.write(json.dumps(message).encode() + b"\0")
        self._writes.flush()
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> Any:
        found = bytearray()
        while (byte := self._reads.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        return json.loads(found)

    def _note(self, event: Any) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"].get("exception", told)))
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(told["entry"]["text"] + " " + told["entry"].get("url", ""))

    # What a person does

    def go(self, address: str) -> None:
        assert "errorText" not in (answer := self.ask("Page.navigate", url=address)), answer
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (found := self.run(condition)):
            assert time.monotonic() < end, f"it did not come about: {condition}; {self.problems}"
            time.sleep(0.02)
        return found

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        held = {"modifiers": 8} if shift else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **about, **held, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about, **held)

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer over an element, and click."""
        script = "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
        script += f"return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        x, y = self.run(script)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        script = "((e, v) => { e.value = v; e.dispatchEvent(new Event('change', {bubbles: true})); return e.value })"
        assert self.run(f"{script}(document.querySelector({json.dumps(selector)}), {json.dumps(value)})") == value

    def give(self, selector: str, file: Path) -> None:
        """Choose a file where the page asks for one."""
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def keep_downloads(self, folder: Path) -> None:
        self.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    # How it is looked at

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        seen = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.ask("Emulation.setDeviceMetricsOverride", **seen)

    def prefer(self, scheme: str) -> None:
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def shoot(self, file: Path) -> bytes:
        found = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(found)
        return found


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder; skips the test where none is installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed; apt-get install chromium")
    its_reads, writes = os.pipe()
    reads, its_writes = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    command = [sys.executable, "-c", LAUNCH, str(its_reads), str(its_writes), program, *options]
    process = subprocess.Popen(command, pass_fds=(its_reads, its_writes), stderr=subprocess.DEVNULL)
    os.close(its_reads)
    os.close(its_writes)
    browser = Browser(reads, writes)
    try:
        yield browser
    finally:
        browser._session = None
        browser.ask("Browser.close")
        browser._reads.close()
        browser._writes.close()
        process.wait(30)
