from __future__ import annotations

import json

import pytest
import torch

from benchmarks import decode
from tests.samplers.in_process.compiled.native import requires_compiler


@pytest.mark.slow
@requires_compiler
def test_every_number_of_rows_is_measured_on_each_side(capsys, monkeypatch):
    monkeypatch.setattr(decode, "missing", lambda side: "not installed")
    threads = torch.get_num_threads()
    decode.main(["rows=1,3", "tokens=4", "repeats=1", "scenario=tiny", f"threads={threads}"])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["rows"] for row in report["rows"]] == [1, 3]
    assert all({"torch_ms", "compiled_ms", "ratio", "trunk_ratio"} <= row.keys() for row in report["rows"])
    assert "not installed" in out
