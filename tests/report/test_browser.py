"""Test the report in headless Chromium, against the folder of a real run. Needs Chromium, and mostly Playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from realign.report.page import write_report
from tests.report.runs import HOSTILE

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


def test_the_table_of_responses_is_sorted_filtered_and_downloaded(watched, report):
    page = watched.open(report, "samples")
    page.get_by_role("button", name="Table").click()
    page.fill("input[type=search]", "from=training step=4")
    page.get_by_role("button", name="sort by reward").click()
    heads = [text.split()[0] for text in page.locator("thead th").all_inner_texts()]
    rows = [row.split("\t") for row in page.locator("tbody tr").all_inner_texts()]
    rewards = [float(row[heads.index("reward")]) for row in rows]
    assert {row[heads.index("step")] for row in rows} == {"4"}
    assert rewards == sorted(rewards, reverse=True)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    lines = download.value.path().read_text("utf-8-sig").splitlines()
    assert len(lines) == 1 + len(rows)
    page.fill("input[type=search]", "")
    page.locator("td button.text").first.click()
    assert "Mean reward of this prompt" in page.inner_text("main")
    page.get_by_role("button", name="Side by side").click()
    assert "% fixed" in page.inner_text("main")
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
