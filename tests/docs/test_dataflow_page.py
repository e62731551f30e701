"""The config on the page about dataflows builds with the file on the page."""

from __future__ import annotations

from pathlib import Path

from realign.config import build_experiment, compose
from realign.rewards.judge import Judge
from tests.docs import pages

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "dataflow.md"


def test_the_config_of_the_page_builds_with_the_file_of_the_page(tmp_path, monkeypatch):
    code_blocks = pages.blocks(PAGE.read_text(encoding="utf-8"))
    code = next(block.code for block in code_blocks if block.language == "python")
    (config,) = (block.code for block in code_blocks if block.language == "yaml")
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "two_rewards.yaml").write_text(config, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    made = build_experiment(compose(["experiment=two_rewards"], tmp_path))
    assert [rpc.name for rpc in made.graph.order] == [
        "actor_gen",
        "helpful_inf",
        "harmless_inf",
        "judge_inf",
        "sum_inf",
        "actor_train",
    ]
    assert isinstance(made.interfaces["judge"].functions["llm"], Judge)
    assert made.evaluation.reward is None
