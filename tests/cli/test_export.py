"""Test `realign export`: folders that transformers and peft load, model cards, and pushes to a stub of the hub."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import realign
from realign.api import MicroBatchSpec
from realign.cli import commands as cli
from realign.engines import OptimizerSpec, TransformersModel
from realign.models import Lora, Score
from realign.version import installed_version
from tests.processes import served
from tests.tiny import random_sample, save_tiny, tiny_tokenizer

TEXT = "1 + 2\n= 3"
TOKEN = "hf_verysecrettoken"
DATA = random_sample(((9, 4), (7,)))


def adapter(folder: Path, base: Path, head=None) -> None:
    """Save a trained adapter."""
    fields = {} if head is None else {"head": head}
    spec = TransformersModel(
        str(base), device="cpu", optimizer=OptimizerSpec(lr=1e-2), trains=Lora(rank=4, merge_on_save=False), **fields
    )
    engine = spec.load("actor", seed=0).engine

    def loss(out, mb):
        return (out.logprobs().sum() if head is None else out.scores().square().sum()), {}

    engine.train_batch(DATA, MicroBatchSpec(), loss, lambda d: torch.tensor(1.0))
    engine.save(folder)


@pytest.fixture
def run(tmp_path) -> Path:
    """Return a run folder with an adapter on a qwen2 model whose tokenizer transformers would misread."""
    base = save_tiny(tmp_path / "base", "qwen2")
    out = tmp_path / "run"
    adapter(out / "final" / "actor", base)
    config = {
        "name": "my_grpo",
        "steps": 20,
        "batch_prompts": 4,
        "seed": 3,
        "graph": {"_target_": "realign.interfaces.grpo.dataflow"},
        "models": {"actor": {"path": str(base)}},
        "interfaces": {"actor": {"_target_": "realign.interfaces.grpo.GRPOActorInterface", "beta": 0.5}},
        "data": {"_target_": "realign.data.PromptData", "path": "owner/questions:train"},
    }
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    records = [{"step": 0, "eval/reward": 0.125}, {"step": 20, "eval/reward": 0.75, "reward": 0.5, "time/x": 1.0}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return out


def export(*words: object) -> int:
    return cli.main(["export", *map(str, words)])


def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.detach()


def test_an_adapter_of_a_run_is_merged_into_a_plain_folder(run, tmp_path, capsys):
    assert export(run, "--to", tmp_path / "out", "--merge") == 0
    assert f"Merged model written to {tmp_path / 'out'}" in capsys.readouterr().out
    expected = AutoPeftModelForCausalLM.from_pretrained(run / "final" / "actor")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(model), logits(expected), atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]
    assert not list((tmp_path / "out").glob("adapter*"))


def test_an_adapter_is_exported_with_an_absolute_base(run, tmp_path, monkeypatch):
    file = run / "final" / "actor" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "base"}))
    monkeypatch.chdir(tmp_path)
    assert export("run", "--to", "out") == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    monkeypatch.chdir("/")
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()


def test_a_reward_model_keeps_its_head_when_it_is_merged(tmp_path):
    adapter(tmp_path / "reward", save_tiny(tmp_path / "base"), Score(init="normal"))
    assert export(tmp_path / "reward", "--to", tmp_path / "out", "--merge") == 0
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    spec = TransformersModel(str(tmp_path / "reward"), device="cpu", head=Score())
    assert torch.equal(model.score.weight, spec.load("reward", seed=0).engine.head.weight_1H)
    assert "pipeline_tag: text-classification" in (tmp_path / "out" / "README.md").read_text()


def test_a_full_model_is_copied_and_its_tokenizer_mended(tmp_path):
    model = save_tiny(tmp_path / "model", "qwen2")
    (model / "README.md").write_text("old card")
    assert export(model, "--to", tmp_path / "out") == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]
    assert "old card" not in (tmp_path / "out" / "README.md").read_text()


def test_the_model_card_tells_base_data_algorithm_metrics_config_and_version(run, tmp_path):
    assert export(run, "--to", tmp_path / "out", "--merge") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "datasets": ["owner/questions"],
        "pipeline_tag": "text-generation",
        "tags": ["realign", "grpo"],
    }
    assert "| Base model | .../base |" in body
    assert "| Algorithm | grpo (GRPOActorInterface) |" in body
    assert "| Data | owner/questions:train |" in body
    assert "| Steps | 20, with 4 prompts each, seed 3 |" in body
    assert f"| realign | {installed_version()} |" in body
    assert "| eval/reward | 0.125 (step 0) | 0.75 (step 20) |" in body
    assert "time/x" not in body
    assert "beta: 0.5" in body
    assert str(tmp_path) not in card


def test_no_link_that_leads_out_of_the_folder_is_followed(tmp_path, capsys):
    (tmp_path / "secret").write_text("PRIVATE KEY")
    for number, name in enumerate(("notes.txt", "chat_template.jinja", "additional_chat_templates/x.jinja", "code")):
        model = save_tiny(tmp_path / f"model{number}", "qwen2")
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).symlink_to(tmp_path / "secret" if name != "code" else tmp_path)
        assert export(model, "--to", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert f"{str(model / name)!r} is a link to" in error
        assert str(tmp_path) in error.partition("is a link to")[2]
        assert not (tmp_path / "out").exists()


def test_a_model_in_the_cache_of_the_hub_is_exported_as_regular_files(tmp_path, capsys):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    save_tiny(snapshot, "qwen2")
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = blobs / f"{number:040x}"
        file.rename(blob)
        file.symlink_to(Path("..", "..", "blobs", blob.name))
    assert export(snapshot, "--to", tmp_path / "out") == 0
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    (blobs / ("f" * 40)).symlink_to(tmp_path / "secret")  # a blob that leads out of the cache
    (snapshot / "notes.txt").symlink_to(Path("..", "..", "blobs", "f" * 40))
    assert export(snapshot, "--to", tmp_path / "again") == 2


def test_only_files_of_a_model_are_copied(tmp_path, capsys):
    model = save_tiny(tmp_path / "model", "qwen2")
    names = {"interface_state.json": "{}", "preprocessor_config.json": "{}", "LICENSE": "MIT", "modeling_x.py": ""}
    for name, text in {**names, ".env": "KEY=1", "id_rsa": "PRIVATE", "optimizer.pt": ""}.items():
        (model / name).write_text(text)
    assert export(model, "--to", tmp_path / "out") == 0
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {*names, "config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= files
    assert not {".env", "id_rsa", "optimizer.pt"} & files
    assert "Left out, because a model has no such files: id_rsa, optimizer.pt" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["y\n" * 9])
def test_merging_runs_no_code_of_the_base_model(answer, run, tmp_path, capsys, monkeypatch):
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "trap", "auto_map": {"AutoConfig": "trap.TrapConfig"}}
    file.write_text(json.dumps(config))
    (tmp_path / "base" / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))  # as from `yes`
    assert export(run, "--to", tmp_path / "out", "--merge") == 2
    assert "custom code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}"], "the target is missing. Set --to DIR, --push NAME, or both"),
        (["{run}", "--to", "{run}"], "it exists and is not an empty folder"),
        (["{run}", "--push", "a/b/c"], "--push a/b/c: not a hub name"),
        (["{run}", "--push", "a/b"], "the base model of the adapter is the local folder .* Add --merge"),
        (["{base}", "--to", "{new}", "--merge"], "--merge: .* is a full model, not an adapter"),
        (["{new}", "--to", "{new}"], "neither a model folder nor a hub name"),
        (["{empty}", "--to", "{new}"], "the folder has no config.json"),
        (["{several}", "--to", "{new}"], "the run has several models. Choose one: .*critic, .*reward"),
        ([], "expects one run or model folder, found none"),
        (["a", "b"], r"expects one run or model folder, found \['a', 'b'\]"),
    ],
)
def test_a_mistake_of_an_export_is_one_line(run, tmp_path, capsys, words, message):
    (tmp_path / "empty").mkdir()
    for role in ("critic", "reward"):
        save_tiny(tmp_path / "several" / "final" / role)
    names = {"run": run, "base": tmp_path / "base", "empty": tmp_path / "empty"}
    names |= {"new": tmp_path / "new", "several": tmp_path / "several"}
    assert export(*(word.format(**names) for word in words)) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert re.search(message, error)
    assert not (tmp_path / "new").exists()


class Hub(BaseHTTPRequestHandler):
    """Stub of the hub: accepts every file as a regular one, or answers each request with `server.refuses`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        if self.server.refuses:
            return self._answer({"error": f"no: {self.headers.get('Authorization')}"}, self.server.refuses)
        if self.path.endswith("/repos/create"):
            name = json.loads(body)
            return self._answer({"url": f"{self.server.url}/{name['organization']}/{name['name']}"})
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if "/commit/" in self.path:
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    self.server.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            return self._answer({"commitUrl": f"{self.server.url}/owner/name/commit/1", "commitOid": "1"})
        return self._answer({})

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        name = self.path.split("/api/models/")[-1].split("?")[0].split("/revision")[0]
        self._answer({"id": name, "sha": "0" * 40, "siblings": [], "tags": [], "private": False})

    def _answer(self, content: dict, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.requests, server.refuses = {}, [], 0
    with served(server) as server.url:
        yield server


def push(hub, run: Path, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, since huggingface_hub reads HF_ENDPOINT when it is imported."""
    everything = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf"), **env}
    everything["PYTHONPATH"] = str(Path(realign.__file__).parents[1])
    everything.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "realign", "export", str(run), "--push", "owner/name", "--merge"]
    return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_model_is_pushed_to_the_hub_and_the_token_is_never_printed(hub, run, tmp_path):
    done = push(hub, run, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Pushed to {hub.url}/owner/name" in done.stdout
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= hub.files.keys()
    assert b"base_model" not in hub.files["README.md"].split(b"---")[1]
    assert {token for path, token in hub.requests if "/commit/" in path} == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr
    assert not any(TOKEN.encode() in content for content in hub.files.values())
