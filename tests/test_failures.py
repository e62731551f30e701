"""Test failures during runs with tiny models and real files. docs/robustness.md documents the behavior of each."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from realign.api import GenerationConfig, MicroBatchSpec
from realign.data import PromptData, SupervisedData
from realign.engines import OptimizerSpec, TransformersModel
from realign.engines.training import engine_state
from realign.errors import ConfigError, RunError
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import dataflow
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.interfaces.sft import SFTInterface
from realign.interfaces.sft import dataflow as sft_dataflow
from realign.models import Causal
from realign.records.checkpoint.folder import list_checkpoints
from realign.run_settings import CheckpointSpec
from realign.runtime import Experiment, run
from realign.runtime.local import LocalRuntime
from tests.tiny import VOCAB, save_tiny, tiny_tokenizer

EOS = 2
PROMPTS = ["1+1=", "2+3=", "7-4=", "9*9="]


def rows(path: Path, prompts: list[str] = PROMPTS, **columns: Any) -> str:
    lines = [json.dumps({"prompt": prompt, "answer": "1", **columns}) for prompt in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def model_folder(folder: Path, *, end: float = 0.0, **config: Any) -> str:
    """Write a tiny GPT-2. `end` is added many times to the logit of EOS after any text."""
    save_tiny(folder, "gpt2", **config)
    if end:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            model.transformer.ln_f.bias.fill_(1.0)  # a constant component of all hidden states
            model.transformer.wte.weight[EOS] += end
        model.save_pretrained(folder)
    return str(folder)


def length(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Reward longer responses."""
    return float(len(response))


def experiment(tmp_path: Path, path: str, **changes: Any) -> Experiment:
    """Build a GRPO run that rewards the length of responses, in this process."""
    generation = changes.pop("generation", GenerationConfig(n=4, max_new_tokens=6))
    reward = changes.pop("reward", RuleRewardInterface(function=f"{__file__}:length", workers=0))
    interfaces = {"actor": GRPOActorInterface(generation=generation), "reward": reward}
    settings: dict[str, Any] = {
        "name": "faults",
        "steps": 2,
        "batch_prompts": 2,
        "interfaces": interfaces,
        "models": {"actor": TransformersModel(path, optimizer=OptimizerSpec(lr=1e-3))},
        "data": PromptData(rows(tmp_path / "default.jsonl")),
        "output_dir": tmp_path / "run",
    }
    settings |= changes
    graph = settings.pop("graph", None) or dataflow(settings["interfaces"])
    return Experiment(graph=graph, **settings)


def test_a_model_that_only_ends_gives_responses_of_one_token_and_a_run_that_says_it_taught_nothing(tmp_path):
    path = model_folder(tmp_path / "model", end=20.0)
    runtime = LocalRuntime(experiment(tmp_path, path))
    values, batch = runtime.step(1)
    assert values["response_tokens"] == 1.0
    assert values["truncated_fraction"] == 0.0
    assert values["reward"] == 0.0
    assert set(batch["input_ids"][batch["loss_mask"]].tolist()) == {EOS}
    assert values["zero_gradient_steps"] == values["skipped_steps"] > 0
    with pytest.raises(RunError, match=r"the run made no optimizer step\. Every gradient was zero"):
        run(experiment(tmp_path, path))


def test_a_model_that_never_ends_is_cut_at_the_limit_and_the_fraction_says_so(tmp_path):
    path = model_folder(tmp_path / "model", end=-20.0)
    values, batch = LocalRuntime(experiment(tmp_path, path)).step(1)
    assert (values["response_tokens"], values["truncated_fraction"]) == (6.0, 1.0)
    assert batch["truncated"].all()


def test_a_model_with_more_tokens_than_the_tokenizer_trains_and_unknown_ids_are_no_text(tmp_path):
    """Embeddings are often padded to a round size, and an untrained model samples ids beyond the last token."""
    path = model_folder(tmp_path / "model", vocab_size=4 * VOCAB)
    assert len(tiny_tokenizer()) == VOCAB
    runtime = LocalRuntime(experiment(tmp_path, path))
    values, batch = runtime.step(1)
    sampled = batch["input_ids"][batch["loss_mask"]]
    assert int(sampled.max()) >= VOCAB
    assert values["missing_rewards"] == 0.0
    texts = [record["response"] for record in runtime.readable(batch, 1)]
    known = [int((ids[~given] < VOCAB).sum()) for ids, given in own(batch, 4)]
    assert all(len(text) <= 5 * n for text, n in zip(texts, known, strict=True))
    bounded = {"actor": TransformersModel(path, optimizer=OptimizerSpec(lr=1e-3), head=Causal(vocabulary=VOCAB))}
    _, batch = LocalRuntime(experiment(tmp_path, path, models=bounded)).step(1)
    assert int(batch["input_ids"].max()) < VOCAB


def own(batch, n):
    return list(zip(batch.sequences("input_ids"), batch.sequences("prompt_mask"), strict=True))[:n]


def test_a_prompt_that_leaves_no_room_is_refused_at_the_start(tmp_path):
    path = model_folder(tmp_path / "model")
    data = PromptData(rows(tmp_path / "rows.jsonl", [*PROMPTS, "1" * 120]))
    generation = GenerationConfig(n=2, max_new_tokens=16)
    message = (
        "models.actor: its context window has 128 positions, but a row of data has 120 tokens and its response up to "
        "16. Limit the rows to 112 tokens, or set interfaces.actor.generation.max_new_tokens to at most 8."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        LocalRuntime(experiment(tmp_path, path, data=data, generation=generation))
    data.max_prompt_tokens = 112
    assert len(LocalRuntime(experiment(tmp_path, path, data=data, generation=generation)).dataset) == 4
    generation = GenerationConfig(n=2, max_new_tokens=128)
    with pytest.raises(ConfigError, match=r"Set interfaces\.actor\.generation\.max_new_tokens to at most \d+\.$"):
        LocalRuntime(experiment(tmp_path, path, generation=generation))


def test_demonstrations_longer_than_the_model_are_refused_at_the_start(tmp_path):
    path = model_folder(tmp_path / "model")
    file = rows(tmp_path / "rows.jsonl", ["1" * 120], response="2" * 10)
    parts = {"graph": sft_dataflow(), "interfaces": {"actor": SFTInterface()}, "batch_prompts": 1}
    with pytest.raises(ConfigError, match=r"window has 128 positions, but a row of data has 131 tokens"):
        LocalRuntime(experiment(tmp_path, path, data=SupervisedData(file), **parts))


def test_groups_of_equal_rewards_make_no_step_and_a_run_of_nothing_else_fails(tmp_path):
    path = model_folder(tmp_path / "model")
    reward = RuleRewardInterface(function=f"{__file__}:constant", workers=0)
    with pytest.raises(RunError, match="Check whether all rewards are equal"):
        run(experiment(tmp_path, path, reward=reward))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r.get("zero_gradient_steps") for r in records[1:]] == [1.0, 1.0]


def constant(prompt: str, response: str, row: dict[str, Any]) -> float:
    return 0.25


def same_weights(a: Path, b: Path) -> bool:
    return (a / "actor" / "model.safetensors").read_bytes() == (b / "actor" / "model.safetensors").read_bytes()


@pytest.fixture
def full(monkeypatch):
    """Simulate a full disk for line files after `full()`. `full(False)` frees space."""
    state = {"full": False}

    class Disk(io.FileIO):
        def write(self, data):
            if state["full"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    plain = os.fdopen
    monkeypatch.setattr(
        os, "fdopen", lambda n, mode="r", *a, **k: Disk(n, mode) if mode == "ab" else plain(n, mode, *a, **k)
    )
    return lambda on=True: state.update(full=on)


def test_a_disk_that_is_full_for_a_while_costs_no_line_and_no_step(tmp_path, full):
    path = model_folder(tmp_path / "model")
    settings = {"steps": 4, "checkpoint": CheckpointSpec(every_steps=1, keep=9)}
    run(experiment(tmp_path, path, output_dir=tmp_path / "undisturbed", **settings))

    class Fills:
        def log(self, step, metrics):
            full(step in (1, 2))

        def close(self):
            pass

    with pytest.warns(
        UserWarning, match=r"metrics\.jsonl cannot be written after byte \d+ \(No space left on device\)"
    ):
        result = run(experiment(tmp_path, path, **settings), trackers=[Fills()])
    for name in ("metrics", "samples"):
        stats = [read(tmp_path / run_ / f"{name}.jsonl") for run_ in ("undisturbed", "run")]
        assert stats[0] == stats[1] != []
    assert same_weights(tmp_path / "undisturbed" / "final", result.output_dir / "final")
    first, second = (list_checkpoints(tmp_path / run_ / "checkpoints") for run_ in ("undisturbed", "run"))
    assert [c.step for c in first] == [1, 2, 3, 4]
    assert [c.step for c in second] == [3, 4]  # nor can a checkpoint be written before there is space
    for a, b in zip(first[2:], second, strict=True):
        for file in sorted(a.path.glob("*.safetensors")):
            assert file.read_bytes() == (b.path / file.name).read_bytes()


def test_models_of_the_last_step_that_find_no_room_are_saved_by_a_resume(tmp_path, monkeypatch):
    path = model_folder(tmp_path / "model")
    settings = {"steps": 3, "checkpoint": CheckpointSpec(every_steps=1)}
    run(experiment(tmp_path, path, output_dir=tmp_path / "undisturbed", **settings))

    def full(folder, *values):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(engine_state, "write_network", full)
        with pytest.raises(OSError, match=r"final was not saved: .*No space left on device"):
            run(experiment(tmp_path, path, **settings))
    run(experiment(tmp_path, path, resume="auto", **settings))
    assert same_weights(tmp_path / "undisturbed" / "final", tmp_path / "run" / "final")
    assert read(tmp_path / "run" / "metrics.jsonl") == read(tmp_path / "undisturbed" / "metrics.jsonl")


def test_a_run_folder_that_cannot_be_written_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    path = model_folder(tmp_path / "model")

    def load(*args, **more):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(TransformersModel, "load", load)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"output_dir='.*/file/run': '.*/file' is not a folder"):
        run(experiment(tmp_path, path, output_dir=tmp_path / "file" / "run"))

    def no_file(*args, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_file)
    with pytest.raises(OSError, match=r"output_dir='.*/run': cannot write to '.*' \(Read-only file system\)"):
        run(experiment(tmp_path, path))
    assert not (tmp_path / "run").exists()


def read(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {k: v for k, v in r.items() if not k.startswith("time/") and not k.endswith(("_s", "seconds"))} for r in records
    ]


def test_a_run_folder_that_vanishes_is_made_again(tmp_path):
    path = model_folder(tmp_path / "model")

    class Removes:
        def log(self, step, metrics):
            if step == 1:
                shutil.rmtree(tmp_path / "run")

        def close(self):
            pass

    with pytest.warns(UserWarning, match=r"metrics\.jsonl was removed or moved during the run"):
        result = run(
            experiment(tmp_path, path, steps=3, checkpoint=CheckpointSpec(every_steps=1)), trackers=[Removes()]
        )
    assert [c.step for c in list_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 3]
    assert [r["step"] for r in read(tmp_path / "run" / "metrics.jsonl")] == [2, 3]
    assert [r["step"] for r in result.history] == [0, 1, 2, 3]
    assert (tmp_path / "run" / "final" / "actor" / "model.safetensors").is_file()


def test_a_tracker_that_fails_costs_its_own_record_only(tmp_path):
    path = model_folder(tmp_path / "model")

    class Broken:
        def open(self, name, output_dir):
            return self

        def log(self, step, metrics):
            raise ConnectionError("no network")

        def close(self):
            pass

    with pytest.warns(UserWarning, match="Tracker 'mine'") as told:
        result = run(experiment(tmp_path, path, trackers={"mine": Broken()}))
    assert len(result.history) == 3
    assert [str(w.message).split(" (")[0] for w in told if "mine" in str(w.message)] == [
        "Tracker 'mine' failed at step 0",
        "Tracker 'mine' missed 3 steps, from 0 to 2.",
    ]


def test_a_screen_that_cannot_be_written_ends_no_run(tmp_path):
    class FullLog(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    path = model_folder(tmp_path / "model")
    console = Console(file=FullLog(), width=80)
    assert len(run(experiment(tmp_path, path, print_samples_every_steps=1), console=console).history) == 3


def test_prompts_whose_gradient_is_not_finite_are_named_by_their_place_in_the_data(tmp_path):
    path = model_folder(tmp_path / "model")

    class Poisoned(GRPOActorInterface):
        def loss(self, output, minibatch):
            total, stats = super().loss(output, minibatch)
            return total * (math.nan if "2@0" in minibatch.ids else 1.0), stats

    parts = {
        "actor": Poisoned(generation=GenerationConfig(n=4, max_new_tokens=6)),
        "reward": RuleRewardInterface(function=f"{__file__}:length", workers=0),
    }
    settings = {"interfaces": parts, "batch_prompts": 4, "shuffle": False, "microbatch": MicroBatchSpec(64)}
    with pytest.warns(UserWarning, match="from the loss of id '2@0'"):
        values, _ = LocalRuntime(experiment(tmp_path, path, **settings)).step(1)
    assert values["nonfinite_steps"] == 1.0


def test_rows_said_twice_are_prompts_of_their_own(tmp_path):
    path = model_folder(tmp_path / "model")
    data = PromptData(rows(tmp_path / "rows.jsonl", ["1+1="] * 3, id="same"))
    _, batch = LocalRuntime(experiment(tmp_path, path, data=data, batch_prompts=3)).step(1)
    assert sorted(batch.ids) == ["0@0", "1@0", "2@0"]
    assert batch.lengths["input_ids"].counts.tolist() == [4, 4, 4]


def test_a_run_whose_every_loss_is_not_finite_ends_with_the_ids(tmp_path):
    path = model_folder(tmp_path / "model")

    class Poisoned(GRPOActorInterface):
        def loss(self, output, minibatch):
            total, stats = super().loss(output, minibatch)
            return total * math.nan, stats

    models = {"actor": TransformersModel(path, optimizer=OptimizerSpec(lr=1e-3, max_nonfinite_in_a_row=2))}
    parts = {
        "actor": Poisoned(generation=GenerationConfig(n=4, max_new_tokens=6)),
        "reward": RuleRewardInterface(function=f"{__file__}:length", workers=0),
    }
    with (
        pytest.warns(
            UserWarning, match="The step is skipped and training continues. Consecutive skips: 1; the run ends at 2."
        ),
        pytest.raises(RunError, match=r"of 2 consecutive optimizer steps was not finite.*ids '\d@0', '\d@0'"),
    ):
        run(experiment(tmp_path, path, models=models, interfaces=parts))
