"""Test the HTML file: one file without network, hostile text as data, and the vendored files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files

from realign.report.data import run_data
from realign.report.page import SCRIPTS, STYLES, policy, report_page, write_report
from tests.report.runs import HOSTILE

STATIC = files("realign.report") / "static"


def embedded(page: str) -> list[dict]:
    match = re.search(r'id="data"[^>]*>([A-Za-z0-9+/=]*)</script>', page)
    assert match is not None
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def test_a_report_is_one_small_file_without_addresses(run_folder, tmp_path):
    out = tmp_path / "sub" / "report.html"
    size = write_report([run_folder], out)
    page = out.read_text(encoding="utf-8")
    assert size == out.stat().st_size < 2_000_000
    own = page.replace((STATIC / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8"), "")
    assert re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*\"", own) == []
    assert set(re.findall(r"https?://[\w./]+", own)) <= {"http://www.w3.org/2000/svg"}
    assert [run["key"] for run in embedded(page)] == [run_folder.name]


def test_hostile_text_is_only_in_the_compressed_data(tmp_path):
    for text in HOSTILE:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
        sample = {"step": 1, "id": text, "prompt": text, "response": text, "reward": 1.0}
        (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
        (tmp_path / "run.json").write_text(json.dumps({"name": text, "attempts": []}))
        page = report_page([run_data(tmp_path)], text)
        assert text not in page.replace("&#39;", "'") or "<" not in text  # the title contains the name
        assert f"<title>{7 * 7}" not in page
        assert page.count("<script") == len(SCRIPTS) + 1
        response = embedded(page)[0]["samples"][0]["response"]
        assert response == text.encode(errors="replace").decode()


def test_the_policy_allows_only_the_scripts_of_the_page(run_folder):
    page = report_page([run_data(run_folder)], "x")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts}
    rules = policy(live=False)
    assert len(hashes) == len(SCRIPTS)
    assert all(f"'sha256-{one}'" in rules for one in hashes)
    assert "default-src 'none'" in rules
    assert "connect-src 'none'" in rules
    assert "unsafe" not in rules.replace("style-src 'unsafe-inline'", "")
    assert "connect-src 'self'" in policy(live=True)


def test_every_static_file_is_in_the_page_and_the_vendored_ones_have_the_stated_hashes():
    names = {path.name for path in STATIC.iterdir() if path.name != "vendor"}
    assert names == {name for name in (*SCRIPTS, *STYLES) if "/" not in name}
    stated = (STATIC / "vendor/README.md").read_text(encoding="utf-8")
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        assert f"| `{name}` | `{hashlib.sha256((STATIC / 'vendor' / name).read_bytes()).hexdigest()}` |" in stated
    assert "MIT" in (STATIC / "vendor/uPlot.LICENSE").read_text(encoding="utf-8")
