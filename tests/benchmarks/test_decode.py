from __future__ import annotations

import json

import pytest
import torch

from benchmarks import decode
from benchmarks.batches import make_actor
from benchmarks.peer.side_llama import _gguf_name
from benchmarks.peer.work import SCENARIOS
from tests.engines.sampling.compiled.native import requires_compiler


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


def test_an_unknown_argument_ends_the_program():
    with pytest.raises(SystemExit, match="unknown argument 'speed'"):
        decode.main(["speed=1"])


def test_every_weight_of_the_model_has_a_name_in_the_gguf_file():
    names = list(make_actor(SCENARIOS["tiny"]).engine.module.state_dict())
    found = [_gguf_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert {"token_embd.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.weight"} <= set(found)
