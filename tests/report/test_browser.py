"""Test the report in headless Chromium, by its DevTools protocol over a pipe, against the folder of a real run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realign.report.page import write_report
from tests.report.runs import HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ("overview", "curves", "samples", "tokens", "time", "system")
WIDTHS = (390, 1440)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


class Page:
    """A page of Chromium with its errors and requests."""

    def __init__(self, folder: Path) -> None:
        self.downloads = folder / "downloads"
        (command, out), (answer, into) = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        start = ["bash", "-c", f'exec "$@" 3<&{command} 4>&{into}', "bash", str(CHROMIUM), *flags]
        self.process = subprocess.Popen(start, pass_fds=(command, into), stderr=subprocess.DEVNULL)
        os.close(command), os.close(into)
        self._out, self._answers, self._ids = os.fdopen(out, "wb"), os.fdopen(answer, "rb"), itertools.count(1)
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def send(self, method: str, **params: Any) -> Any:
        """Return the result of a command; notes the events before it."""
        number = next(self._ids)
        self._out.write(json.dumps({"id": number, "method": method, "params": params} | self._session).encode() + b"\0")
        self._out.flush()
        while True:
            text = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                assert byte, "Chromium ended"
                text += byte
            message = json.loads(text)
            if message.get("id") == number:
                return message["result"]
            self._note(message.get("method"), message.get("params"))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if event == "Runtime.exceptionThrown" or (event == "Log.entryAdded" and params["entry"]["level"] == "error"):
            self.errors.append(json.dumps(params))

    def run(self, code: str) -> Any:
        """Return the value of an expression in JavaScript."""
        done = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (code, done)
        return done["result"].get("value")

    def wait(self, code: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 60
        while not self.run(code):
            assert time.monotonic() < end, code
            time.sleep(0.02)

    def show(self, width: int = 1000, scheme: str = "light") -> None:
        """Set the width of the window, and the color scheme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str, name: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{address}#{name}")
        self.wait(f"document.readyState == 'complete' && location.hash.startsWith('#{name}') && !!{CURRENT}")

    def click(self, name: str) -> None:
        """Press a button by its text or label."""
        self.run(
            f"[...document.querySelectorAll('button')].find((b) => [b.innerText.trim(), b.ariaLabel, b.title]"
            f".includes({name!r})).click()"
        )

    def search(self, text: str) -> None:
        """Fill in the filter."""
        self.run(
            f"(() => {{ const box = document.querySelector('input[type=search]'); box.value = {text!r}; "
            "box.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )

    def texts(self, selector: str) -> list[str]:
        """Return the visible texts of elements."""
        found: list[str] = self.run(f"[...document.querySelectorAll({selector!r})].map((x) => x.innerText)")
        return found


CURRENT = "document.querySelector('nav a[aria-current]')"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("chromium"))
    yield page
    page.process.terminate()
    page.process.wait()


@pytest.fixture(scope="module")
def report(run_folder, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([run_folder], out)
    return out.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_an_error_or_a_request(page, report, width, scheme):
    page.errors.clear(), page.requests.clear()
    page.show(width, scheme)
    for name in PAGES:
        page.open(report, name)
        assert page.texts("nav a[aria-current]")[0].lower() == name
        assert len(page.texts("main")[0]) > 40
        assert page.texts(".empty") == []
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), name
    assert page.errors == []
    assert {url.partition("#")[0] for url in page.requests if not url.startswith(("data:", "about:"))} == {report}


def test_the_table_of_responses_is_sorted_filtered_and_downloaded(page, report):
    page.errors.clear()
    page.show()
    page.open(report, "samples")
    page.click("Table")
    page.search("from=training step=4")
    page.click("sort by reward")
    heads = [text.split()[0] for text in page.texts("thead th")]
    rows = [row.split("\t") for row in page.texts("tbody tr")]
    rewards = [float(row[heads.index("reward")]) for row in rows]
    assert {row[heads.index("step")] for row in rows} == {"4"}
    assert rewards == sorted(rewards, reverse=True)
    page.click("Download CSV")
    end = time.monotonic() + 60
    while not (files := [*page.downloads.glob("*.csv")]):
        assert time.monotonic() < end
        page.run("1")
    assert len(files[0].read_text("utf-8-sig").splitlines()) == 1 + len(rows)
    page.search("")
    page.run("document.querySelector('td button.text').click()")
    assert "Mean reward of this prompt" in page.texts("main")[0]
    page.click("Side by side")
    assert "% fixed" in page.texts("main")[0]
    assert page.errors == []


def test_hostile_samples_are_shown_as_text(page, run_folder, tmp_path):
    folder = tmp_path / "hostile"
    shutil.copytree(run_folder, folder)
    samples = [{"step": 1, "id": text, "prompt": text, "response": text, "reward": 1.0} for text in HOSTILE]
    tokens = [json.loads((run_folder / "tokens.jsonl").read_text().splitlines()[0])]
    tokens[0]["text"] = [HOSTILE[i % len(HOSTILE)] for i in range(len(tokens[0]["text"]))]
    for name, records in (("samples", samples), ("tokens", tokens), ("eval_samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 1, "message": HOSTILE[0]}) + "\n")
    info = json.loads((folder / "run.json").read_text())
    info["name"] = HOSTILE[0]
    (folder / "run.json").write_text(json.dumps(info))
    write_report([folder], tmp_path / "hostile.html")
    page.errors.clear()
    for name in PAGES:
        page.open((tmp_path / "hostile.html").as_uri(), name)
        assert page.run("typeof window.hacked") == "undefined"
        assert page.run("document.images.length") == 0
    page.open((tmp_path / "hostile.html").as_uri(), "samples")
    shown = page.texts("main")[0]
    assert HOSTILE[0] in shown
    assert "U+202E" in shown
    assert "\u202e" not in page.texts("body")[0]
    assert page.errors == []
