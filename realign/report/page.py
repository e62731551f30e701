"""`report_page`: the HTML page of the report, with its styles, scripts and data in one file.

The data is compressed and base64-encoded, so no text of a model can end a script. The scripts insert text only as text
nodes, and a content security policy allows only the scripts of this package.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from realign.errors import ConfigError
from realign.own_files import make_folder, replace_bytes
from realign.report.data import SAMPLES_MB, run_data

STYLES = ("vendor/uPlot.min.css", "base.css", "parts.css", "pages.css")
SCRIPTS = (
    *("vendor/uPlot.iife.min.js", "dom.js", "format.js", "store.js", "charts.js", "graph.js"),
    *("page_runs.js", "page_overview.js", "page_curves.js", "page_table.js", "page_samples.js", "page_tokens.js"),
    *("page_time.js", "page_system.js", "page_compare.js", "app.js"),
)
"""Files in the order of their execution."""


def report_page(runs: Sequence[dict[str, Any]], title: str, *, live: bool = False) -> str:
    """Return the page.

    Args:
        runs: results of `run_data`; the viewer passes none.
        title: title of the page.
        live: whether the page loads its data from the server of `realign view`.
    """
    scripts = [_text(name) for name in SCRIPTS]
    environment = Environment(autoescape=True, loader=FunctionLoader(_template), undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=title,
        live=live,
        policy=policy(live=live),
        styles=[Markup(_text(name)) for name in STYLES],
        scripts=[Markup(script) for script in scripts],
        data="" if live else pack(list(runs)),
    )


def policy(*, live: bool) -> str:
    """Return the content security policy: only the package's scripts, and no network besides the viewer's server."""
    hashes = (base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode() for name in SCRIPTS)
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
    connect = "'self'" if live else "'none'"
    return (
        # Inline styles are harmless: default-src 'none' keeps them from loading anything.
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def pack(value: Any) -> str:
    """Return a value as base64 of compressed JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    # mtime=0, so that the same records give the same file. Half of a surrogate pair, which UTF-8 lacks, becomes a
    # question mark.
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 9, mtime=0)).decode()


def write_report(folders: Sequence[Path], out: Path, samples_mb: float = SAMPLES_MB) -> int:
    """Write the report of runs to a file, and return its size in bytes.

    Args:
        folders: folders of the runs.
        out: the file.
        samples_mb: maximum size of the samples and tokens of a run, in MB before compression.

    Raises:
        ConfigError: the file is a link, which may lead out of the folder of the run.
    """
    runs = [run_data(folder, key, samples_mb) for folder, key in zip(folders, unique_keys(folders), strict=True)]
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    content = report_page(runs, f"{title} · realign report").encode(errors="replace")
    if out.is_symlink():
        raise ConfigError(f"{str(out)!r} is a link. Remove it, or choose another file with --out.")
    make_folder(out.parent)
    replace_bytes(out, content)
    return len(content)


def unique_keys(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path that distinguishes the folders, for each of them."""
    absolute = [folder.absolute() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in absolute) + 1):
        keys = ["/".join(path.parts[-parts:]) for path in absolute]
        if len(set(keys)) == len(keys):
            return keys
    return [f"{path.name} ({i})" for i, path in enumerate(absolute, 1)]  # one folder is named twice


def _text(name: str) -> str:
    return (files("realign.report") / "static" / name).read_text(encoding="utf-8")


def _template(name: str) -> str:
    return (files("realign.report") / "templates" / name).read_text(encoding="utf-8")


__all__ = ["pack", "policy", "report_page", "unique_keys", "write_report"]
