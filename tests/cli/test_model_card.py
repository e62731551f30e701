"""Test that a model card shows the texts of a run as texts, without credentials, and reads damaged runs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import yaml

from realign.cli.model_card import model_card

SECRET = "s3cret"
HOSTILE = 'a | b <img src=x> [link](http://evil)\n```\n# Title\n"; import os; "\x1b]0;pwn\x07'


def card(folder: Path, config: Any, metrics: str = "", name: str = "name") -> str:
    """Return the model card of the role actor of a run."""
    model = folder / "run" / "final" / "actor"
    model.mkdir(parents=True, exist_ok=True)
    (folder / "run" / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    (folder / "run" / "metrics.jsonl").write_text(metrics)
    (model / "config.json").write_text('{"architectures": [1, "LlamaForCausalLM"]}')
    return model_card(name, model, model, None)


def test_texts_of_a_run_stay_in_their_place(tmp_path):
    config = {
        "name": HOSTILE,
        "steps": HOSTILE,
        "graph": {"_target_": f"x.{HOSTILE}.y"},
        "models": {"actor": {"path": HOSTILE}},
        "interfaces": {"actor": {"_target_": f"x.{HOSTILE}"}},
        "data": {"path": HOSTILE, "note": "````\n```"},
    }
    text = card(tmp_path, config, json.dumps({"step": 1, f"eval/{HOSTILE}": 1.0}), HOSTILE)
    head, _, shown = text.partition("## Config\n\n")
    assert "\x1b" not in text
    fence = re.match("`+", shown)[0]
    assert shown.endswith(f"\n{fence}\n")
    assert fence not in shown[len(fence) : -len(fence) - 1]
    lines = head.splitlines()
    assert [line for line in lines if line.startswith("#")][1:] == ["## Use", "## Metrics"]
    assert lines.count("```") == 1
    assert not any(re.search(r"(?<!\\)[<>\[\]]", line) for line in lines if line.startswith(("|", "# ")))
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4) for line in lines if line.startswith("|"))
    code = head.partition("```python\n")[2].partition("\n```")[0]
    texts = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert texts == [HOSTILE, HOSTILE]


def test_the_card_contains_no_credentials(tmp_path):
    sampler = {"environment": {"HF_TOKEN": SECRET, "PROXY": f"http://u:{SECRET}@h", "OMP_NUM_THREADS": "4"}}
    config = {
        "models": {"actor": {"sampler": {**sampler, "launch": f"vllm serve --api-key {SECRET} --max-tokens 100"}}},
        "interfaces": {
            "agent": {"mcp": [f"https://u:{SECRET}@h/mcp?api_key={SECRET}", f"env KEY={SECRET} npx server"]},
            "other": {"command": ["program", "--auth-token", SECRET, "--max-tokens", "100"]},
        },
    }
    text = card(tmp_path, config)
    assert SECRET not in text
    for kept in ("OMP_NUM_THREADS: '4'", "--max-tokens 100", "https://***@h/mcp?api_key=***", "npx server", "'100'"):
        assert kept in text
