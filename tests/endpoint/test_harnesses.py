"""Evaluation harnesses against `realign serve`: lm-eval and Inspect, as the documentation shows them.

The commands are searched in PATH. They may be installed in a separate environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from realign.cli.serve import serve_of
from tests.tiny import save_tiny, tiny_tokenizer

KEY = "the-key"
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(2)]
CHOICES = "0123"
SHARED = {"test_split": "test", "dataset_path": "json", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}"}
INSPECT_TASK = """\
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums():
    rows = json_dataset("rows.jsonl", FieldSpec(input="prompt", target="answer"))
    return Task(dataset=rows, solver=generate(), scorer=includes())
"""


def command(name: str, package: str) -> str:
    if (path := shutil.which(name)) is None:
        pytest.skip(f"the command {name} is not in PATH. Run pip install {package}, in any environment")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model, rows and tasks."""
    folder = tmp_path_factory.mktemp("harness")
    save_tiny(folder / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "tiny")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    generated = {
        "task": "sums",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chosen = {
        "task": "digits",
        "output_type": "multiple_choice",
        "doc_to_choice": list(CHOICES),
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (generated, chosen):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**SHARED, **data, **task}))
    (folder / "inspect_task.py").write_text(INSPECT_TASK)
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with serve_of([str(folder / "tiny"), "port=0"]).endpoint(KEY) as endpoint:
        endpoint.start()
        yield f"{endpoint.url}/v1"


def run(folder: Path, words: list[str], **variables: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**kept, **offline, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def lm_eval(folder: Path, model: str, task: str, settings: str, *more: str) -> tuple[dict, list[dict]]:
    """Run a task; return its results and its samples."""
    out = folder / "out" / f"{model}-{task}"
    words = [command("lm-eval", "lm-eval"), "--model", model, "--model_args", f"model=tiny,max_retries=1,{settings}"]
    words += ["--tasks", task, "--include_path", str(folder), "--output_path", str(out), "--log_samples", *more]
    run(folder, words, OPENAI_API_KEY=KEY)
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    return json.loads(results.read_text())["results"][task], list(map(json.loads, samples.read_text().splitlines()))


def first_greedy(folder: Path, prompt: str) -> str:
    """Return the text of the most likely token after a prompt."""
    return tiny_tokenizer().decode([int(logprobs(folder, prompt).argmax())], skip_special_tokens=True)


def logprobs(folder: Path, text: str) -> torch.Tensor:
    """Return the log-probs [V] of the token after a text, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0, -1], -1)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "path", "more"),
    [
        ("local-completions", "completions", []),
        ("local-chat-completions", "chat/completions", ["--apply_chat_template"]),
    ],
)
def test_lm_eval_generates_with_the_endpoint(folder, url, model, path, more):
    settings = f"base_url={url}/{path},tokenized_requests=False,tokenizer_backend=None,num_concurrent=4"
    results, samples = lm_eval(folder, model, "sums", settings, *more)
    assert len(samples) == len(ROWS)
    for sample in samples:
        assert sample["resps"][0][0].startswith(first_greedy(folder, sample["doc"]["prompt"]))
    right = [sample["filtered_resps"][0] == sample["doc"]["answer"] for sample in samples]
    assert results["exact_match,none"] == sum(right) / len(ROWS)


@pytest.mark.server
@pytest.mark.slow
def test_inspect_evaluates_the_endpoint(folder, url):
    words = [command("inspect", "inspect-ai openai"), "eval", "inspect_task.py", "--model", "openai-api/realign/tiny"]
    words += ["--max-tokens", "8", "--temperature", "0", "--display", "plain"]
    words += ["--log-dir", "logs", "--log-format", "json"]
    run(folder, words, REALIGN_BASE_URL=url, REALIGN_API_KEY=KEY)
    (log,) = (folder / "logs").glob("*.json")
    log_content = json.loads(log.read_text())
    assert log_content["status"] == "success"
    texts = {sample["input"]: sample["output"]["choices"][0]["message"]["content"] for sample in log_content["samples"]}
    assert len(texts) == len(ROWS)
    for prompt, text in texts.items():
        assert text.startswith(first_greedy(folder, prompt))
    right = [row["answer"] in texts[row["prompt"]] for row in ROWS]
    assert log_content["results"]["scores"][0]["metrics"]["accuracy"]["value"] == pytest.approx(sum(right) / len(ROWS))
