"""Test the report in headless Chromium, against the folder of a real run. Needs Chromium, and mostly Playwright."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from realign.report.page import write_report
from tests.report.runs import HOSTILE, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ("overview", "curves", "samples", "tokens", "time", "system")
pytestmark = pytest.mark.slow


class Watched:
    """A page of the browser with its console errors and requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str, name: str) -> Any:
        self.page.goto(f"{address}#{name}")
        self.page.reload()
        self.page.wait_for_selector("nav a[aria-current]")
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=["light", "dark"])
def watched(request, browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1000, "height": 800}, color_scheme=request.param)
    yield Watched(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def report(run_folder, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([run_folder], out)
    return out.as_uri()


def test_every_page_opens_without_an_error_or_a_request(watched, report):
    for name in PAGES:
        page = watched.open(report, name)
        assert page.inner_text("nav a[aria-current]").lower() == name
        assert len(page.inner_text("main")) > 40
        assert page.locator(".empty").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert watched.errors == []
    assert {url.partition("#")[0] for url in watched.requests if not url.startswith("data:")} == {report}


def test_the_tooltip_of_a_token_shows_the_numbers_in_the_file(watched, report, run_folder):
    page = watched.open(report, "tokens")
    records = [json.loads(line) for line in (run_folder / "tokens.jsonl").read_text().splitlines()]
    record = next(one for one in records if one["step"] == records[-1]["step"])
    i = record["mask"].index(1)
    page.locator(".tokens").first.locator(".token").nth(i).hover()
    shown = page.locator(".tip:visible").inner_text()
    for name in ("logprobs", "advantages", "ratio", "entropy", "kl", "versions"):
        value = record[name][i]
        text = page.evaluate("x => String(x)", value)
        assert text in shown.split("\n"), (name, shown)


def test_the_filters_of_samples_and_curves_change_what_is_shown(watched, report):
    page = watched.open(report, "samples")
    page.fill("input[type=search]", "no response contains this")
    assert "No group matches" in page.inner_text("main")
    page.get_by_role("button", name="Before and after training").click()
    assert page.locator(".responses.two").count() > 0
    page = watched.open(report, "curves")
    before = page.locator(".chart").count()
    page.fill("input[type=search]", "entropy")
    assert 0 < page.locator(".chart").count() < before
    assert "entropy" in (page.locator(".plot").first.get_attribute("aria-label") or "")


def test_a_point_of_a_curve_leads_to_samples_and_these_to_tokens(watched, report, run_folder):
    page = watched.open(report, "curves")
    page.locator(".u-over").first.click(position={"x": 150, "y": 60})
    page.wait_for_selector(".response")
    step = int(re.search(r"#samples\?step=(\d+)", page.url)[1])
    steps = {json.loads(line)["step"] for line in (run_folder / "samples.jsonl").read_text().splitlines()}
    assert step in steps
    assert page.locator(".histogram").count() == 2
    page.reload()  # the address restores the step
    page.wait_for_selector(".response")
    assert page.inner_text(".stepper output") == str(step)
    page.locator(".response a").first.click()
    page.wait_for_selector(".tokens")
    assert f"step={step}" in page.url
    assert watched.errors == []


def test_several_runs_are_overlaid_and_compared(watched, run_folder, tmp_path):
    for seed in (1, 2):
        folder = tmp_path / f"seed{seed}"
        shutil.copytree(run_folder, folder)
        (folder / "config.yaml").write_text(f"seed: {seed}\nlr: 1\n")
    write_report([tmp_path / "seed1", tmp_path / "seed2"], tmp_path / "both.html")
    address = (tmp_path / "both.html").as_uri()
    page = watched.open(address, "curves")
    assert "mean of 2 seeds" in page.inner_text("main")
    assert "seed" in watched.open(address, "compare").inner_text("main")
    page.locator(".chip").first.click()
    assert page.locator(".chip input:checked").count() == 1
    assert watched.errors == []


def test_hostile_samples_are_shown_as_text(watched, run_folder, tmp_path):
    folder = tmp_path / "hostile"
    shutil.copytree(run_folder, folder)
    samples = [{"step": 1, "id": text, "prompt": text, "response": text, "reward": 1.0} for text in HOSTILE]
    tokens = [json.loads((run_folder / "tokens.jsonl").read_text().splitlines()[0])]
    tokens[0]["text"] = [HOSTILE[i % len(HOSTILE)] for i in range(len(tokens[0]["text"]))]
    for name, records in (("samples", samples), ("tokens", tokens), ("eval_samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    warning = {"step": 1, "message": HOSTILE[0]}
    (folder / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    info = json.loads((folder / "run.json").read_text())
    info["name"] = HOSTILE[0]
    (folder / "run.json").write_text(json.dumps(info))
    write_report([folder], tmp_path / "hostile.html")
    address = (tmp_path / "hostile.html").as_uri()
    for name in PAGES:
        page = watched.open(address, name)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
    page = watched.open(address, "samples")
    assert HOSTILE[0] in page.inner_text("main")
    assert "U+202E" in page.inner_text("main")
    assert "\u202e" not in page.inner_text("body")
    assert watched.errors == []


def test_the_viewer_shows_new_steps_while_the_run_goes_on(browser, tmp_path):
    out = make_run(tmp_path / "runs" / "live")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "realign", "view", str(tmp_path / "runs"), f"view.port={port}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), cwd=tmp_path)
    try:
        assert server.stdout is not None
        assert f"http://127.0.0.1:{port}" in server.stdout.readline()
        _wait_for(f"http://127.0.0.1:{port}/api/runs")
        context = browser.new_context()
        watched = Watched(context.new_page())
        page = watched.page
        page.goto(f"http://127.0.0.1:{port}/")
        page.click("text=live")
        page.wait_for_selector(".kpi:nth-child(3) .value")
        assert page.inner_text(".kpi:nth-child(3) .value").startswith("4")
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**last, "step": 5}) + "\n")
        value = page.locator(".kpi:nth-child(3) .value", has_text="5 of 4 steps")
        value.wait_for()
        assert watched.errors == []
        assert all(
            url.startswith(f"http://127.0.0.1:{port}/") for url in watched.requests if not url.startswith("data:")
        )
        context.close()
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
