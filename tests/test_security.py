"""Test each claim of docs/security.md."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import realign
from realign.api import RPC, DataflowGraph
from realign.cli.commands import main
from realign.config import ConfigError, build_experiment, compose
from realign.config.composition import config_of
from realign.config.experiment import resolve_config
from realign.draw import FORMATS
from realign.engines import TransformersModel
from realign.errors import DataError
from realign.records.metrics.samples import show
from realign.rewards.pool.functions import load_function
from realign.runtime.output_folder import check_output_folder
from realign.text import visible
from tests import security_traps
from tests.config_parts import EXPERIMENT, write_experiment
from tests.grids import rotating
from tests.syntax_trees import calls_of
from tests.tiny import save_tiny

PACKAGE = Path(realign.__file__).parent
TRAPS = "tests.security_traps"
TARGETS = (
    *("os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "pathlib.Path", "antigravity.webbrowser.open"),
    *(
        "realign.cli.commands.os.system",
        "realign.rewards.sandbox.subprocess.Popen",
        "realign.models.files.folders.Path",
    ),
    *(f"{TRAPS}.Made", f"{TRAPS}.MadeBeforeInit", f"{TRAPS}.Component", f"{TRAPS}.function", f"{TRAPS}.pathlib.Path"),
)


def nodes(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all mappings and values of a config, which are all places for a component."""
    if path:
        yield path
    items = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield from nodes(value, (*path, key))


def is_node(config: Any, path: tuple[Any, ...]) -> bool:
    """Return whether the value at `path` is a mapping, such as a component."""
    for key in path:
        config = config[key]
    return isinstance(config, Mapping)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """Return an experiment with a value at every place, including defaults."""
    config = compose(
        [
            "experiment=ppo_sentiment",
            f"+trackers.board._target_={TRAPS}.Tracker",
            "+dynamic_sampling.min_group_size=2",
            "+calibration.before=true",
            "+calibration.policy=actor",
            "+calibration.data={_target_: realign.data.SupervisedData, path: x}",
            "+data.template_options.x=1",
            "data.template=chat",
            "+data.excerpt.max_tokens=3",
            "+data.split.part=0",
        ]
    )
    return resolve_config(config, build_experiment(config))


@pytest.mark.parametrize("target", [TARGETS[0], *(pytest.param(t, marks=pytest.mark.slow) for t in TARGETS[1:])])
def test_a_config_makes_and_calls_only_what_its_place_allows(target, whole, monkeypatch):
    called: list[Any] = []
    monkeypatch.setattr(os, "system", lambda *a, **k: called.append(a))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: called.append(a))
    monkeypatch.setattr(security_traps, "MADE", called)
    before = set(sys.modules)
    places = [path for i, path in enumerate(nodes(whole)) if is_node(whole, path) or i % 9 == TARGETS.index(target) % 9]
    assert {path[0] for path in places} > {"models", "interfaces", "graph", "data", "evaluation", "trackers"}
    for path in places:
        plain = copy.deepcopy(whole)
        owner = plain
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = {"_target_": target}
        with pytest.raises(ConfigError, match=r"\S"):
            build_experiment(config_of(plain))
        assert called == [], path
    assert not {"antigravity", "webbrowser"} & (set(sys.modules) - before)


HYDRA = [
    "+hydra.callbacks.x._target_=os.system",
    "+hydra.callbacks.x={_target_: subprocess.Popen, args: [true]}",
    "hydra.callbacks=${graph}",
    "hydra.launcher._target_=os.system",
    "hydra.sweeper._target_=subprocess.Popen",
    "+hydra.launcher.x={_target_: os.system, command: true}",
    "+hydra.launcher.x=${graph}",
    "hydra.launcher={_target_: hydra_plugins.of_somebody.Launcher}",
    "hydra.launcher=${graph}",
    "+hydra.launcher.setup=[rm -rf x]",
    "+hydra.launcher.additional_parameters={wrap: 'true'}",
    "+hydra.job_logging.handlers.x.class=os.system",
    "+hydra.job_logging.handlers.x={'()': os.system, command: true}",
    "+hydra.job_logging.formatters.x={class: os.system}",
    "+hydra.hydra_logging.handlers.x={class: logging.StreamHandler, stream: 'ext://os.environ'}",
]


@pytest.mark.parametrize(("override", "sweep"), rotating(HYDRA, [[], ["-m", "seed=1,2"]]))
def test_hydra_calls_nothing_that_a_config_names(override, sweep, monkeypatch, capsys, tmp_path):
    called: list[Any] = []
    monkeypatch.setattr(os, "system", lambda *a, **k: called.append(a))
    monkeypatch.chdir(tmp_path)
    assert main(["experiment=sft_arithmetic", override, *sweep]) == 2
    assert "hydra" in capsys.readouterr().err
    assert called == []
    assert list(tmp_path.iterdir()) == []


def log_file(**handler: str) -> dict[str, Any]:
    """Return settings with which Python's logging would open a file."""
    return {"job_logging": {"handlers": {"file": {"class": "logging.FileHandler", "filename": "victim", **handler}}}}


ATTACKS = {
    "a log that is written to a file": log_file(),
    "a log that cuts a file to nothing": log_file(mode="w"),
    "a log of Hydra's that is written to a file": {"hydra_logging": log_file()["job_logging"]},
    "lines of a script in a log": {
        "job_logging": {"formatters": {"simple": {"format": "\ntouch PWNED #%(message)s"}}, "root": {"level": "DEBUG"}}
    },
    "the class of a formatter": {"job_logging": {"formatters": {"simple": {"class": "tests.security_traps.Made"}}}},
    "a module that Python imports at its start": {"job": {"env_set": {"PYTHONPATH": "victims"}}},
    "a library that the system loads": {"job": {"env_set": {"LD_PRELOAD": "victim.so"}}},
    "a variable of the environment": {"job": {"env_copy": ["HOME"]}},
    "the name of the log": {"job": {"name": "../../victim"}},
    "a callback": {"callbacks": {"x": {"_target_": "os.system", "command": "touch victim"}}},
    "a launcher": {"launcher": {"_target_": "os.system", "command": "touch victim"}},
    "a sweeper": {"sweeper": {"_target_": "os.system", "command": "touch victim"}},
    "an argument of the sweeper": {"sweeper": {"params": {"_target_": "os.system", "command": "touch victim"}}},
    "a variable by way of the sweeper": {"sweeper": {"params": {"+hydra.job.env_set.PYTHONPATH": "victims"}}},
    "an override by way of Hydra's record": {"overrides": {"hydra": ["hydra.job.env_set={LD_PRELOAD: victim.so}"]}},
    "a folder of config.yaml": {"output_subdir": "../victims"},
    "a secret in the name of a folder": {"run": {"dir": "runs/${oc.env:HF_TOKEN}"}},
    "permissions of a folder": {"sweep": {"mode": "777"}},
    "a node of the config": {"job_logging": "${data.template_options}"},
}
COMMANDS = {
    "train": [],
    "--cfg job": ["--cfg", "job"],
    "--cfg all": ["--cfg", "all"],
    "--info": ["--info", "config"],
    "check": ["check"],
    "graph": ["graph"],
    "-m": ["-m", "seed=1,2"],
    "-m, one run": ["-m"],
    "Ray": ["runtime=ray"],
}


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a file that must not change. Experiments are in `conf` next to the folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "victim").write_text("precious")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return folder


def write_attack(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write an experiment that runs in a second, with Hydra settings."""
    write_experiment(folder, "evil", EXPERIMENT + yaml.safe_dump({"hydra": dict(settings)}))


@pytest.mark.parametrize(("attack", "command"), rotating(ATTACKS, COMMANDS))
def test_a_file_of_experiments_reaches_nothing_through_hydra(attack, command, victim, monkeypatch, capsys):
    called: list[Any] = []
    monkeypatch.setattr(os, "system", lambda *a, **k: called.append(a))
    monkeypatch.setattr(security_traps, "MADE", called)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # which the command sets otherwise
    environment = dict(os.environ)
    write_attack(victim.parent / "conf", ATTACKS[attack])
    words = COMMANDS[command]
    first, rest = (words[:1], words[1:]) if words[:1] in (["check"], ["graph"]) else ([], words)
    assert main([*first, "--config-dir", "../conf", "experiment=evil", *rest]) == 2
    told = capsys.readouterr()
    assert re.match(r"error: (experiment/evil\.yaml: unknown key ')?hydra\.", told.err)
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert "hf_secret" not in told.err
    assert called == []
    assert dict(os.environ) == environment
    assert sorted(path.name for path in victim.parent.rglob("*")) == [
        "conf",
        "evil.yaml",
        "experiment",
        "here",
        "victim",
    ]
    assert (victim / "victim").read_text() == "precious"


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "shutil:move", "subprocess:call", "os.path:join"])
def test_a_reward_function_is_none_of_pythons_own(name):
    with pytest.raises(ConfigError, match="in Python's standard library"):
        load_function(name)
    home, _, function = name.partition(":")
    if home in ("os", "subprocess"):
        with pytest.raises(ConfigError, match=r"in Python's standard library|is called as function"):
            load_function(f"realign.rewards.sandbox:{home}.{function}")


UNPICKLES = ("pickle.load", "pickle.loads", "Unpickler", "torch.load", "joblib.load", "dill.load", "marshal.loads")
PIPES = {"rewards/pool/worker.py", "runtime/ray/workers.py"}
"""Files with the ends of pipes between a run and its workers. They only unpickle data of the same run."""


def test_nothing_is_unpickled_but_what_the_processes_of_one_run_tell_each_other():
    files = []
    for file, name, node in calls_of(PACKAGE, r"pickle|Unpickler|shelve|(torch|np|joblib|dill|marshal)\.load"):
        safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        numpy = name.endswith("np.load") and any(word.arg == "allow_pickle" for word in node.keywords)
        if (name.endswith(UNPICKLES) and not safe) or numpy or name in ("pd.read_pickle", "shelve.open"):
            files.append(str(file.relative_to(PACKAGE)))
    assert set(files) == PIPES


def test_no_text_is_evaluated_and_only_known_files_start_programs():
    starts = []
    for file, name, node in calls_of(PACKAGE, r"\beval\(|\bexec\(|os\.(system|popen)|subprocess\.|\bshell\s*="):
        shell = any(word.arg == "shell" for word in node.keywords)
        if name in ("eval", "exec", "os.system", "os.popen") or name.startswith("subprocess.") or shell:
            starts.append(f"{file.relative_to(PACKAGE)}: {name}")
    assert starts == [
        "cli/import_config.py: subprocess.run",
        "environments/adapters/verifiers_agent.py: subprocess.Popen",
        "rewards/sandbox.py: subprocess.Popen",
        "samplers/in_process/compiled/library.py: subprocess.run",
        "samplers/servers/guard.py: subprocess.Popen",
        "samplers/servers/inference_server.py: subprocess.Popen",
        "samplers/servers/weights.py: subprocess.Popen",
        "time_machine/commands.py: subprocess.run",
        "time_machine/why.py: subprocess.run",
    ]


class Trap:
    def __reduce__(self):
        return (security_traps.MADE.append, ("unpickled",))


def test_weights_in_a_pickle_are_refused(tmp_path):
    folder = save_tiny(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"trap": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"safetensors"):
        TransformersModel(path=str(folder)).load("actor", seed=0)
    assert "unpickled" not in security_traps.MADE


def test_code_beside_the_weights_is_not_run_unless_it_is_named(tmp_path):
    folder = save_tiny(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.Trap"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(DataError, match=r"custom code .* Set trust_remote_code=true of this role to run it\."):
        TransformersModel(path=str(folder)).load("actor", seed=0)
    assert not (tmp_path / "ran").exists()
    assert TransformersModel("x").trust_remote_code is False


def test_every_loader_of_transformers_is_told_whether_to_run_code():
    """Without the argument, transformers asks on the terminal, and a `y` in stdin runs the code."""
    loaders = []
    for folder in (PACKAGE, PACKAGE.parent / "examples"):
        for _, name, node in calls_of(folder, "from_pretrained|from_config"):
            loads = name.rpartition(".")[2] in ("from_pretrained", "from_config")
            if loads and not any(word.arg == "trust_remote_code" for word in node.keywords):
                loaders.append(name)
    # the first is a class that is loaded already, and reads no folder; the others have no such argument, and read JSON
    assert loaders == ["family.from_pretrained", "GenerationConfig.from_pretrained", "PeftConfig.from_pretrained"]


BAD_NAMES = ("../up", "a/b", ".hidden", "")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_of_roles_runs_and_trackers_lead_nowhere(name, whole):
    for key in ("models", "interfaces", "trackers"):
        plain = copy.deepcopy(whole)
        plain[key][name] = next(iter(plain[key].values()))
        with pytest.raises(ConfigError, match="is not a valid file name"):
            build_experiment(config_of(plain))
    with pytest.raises(ConfigError, match="is not a valid file name"):
        build_experiment(config_of({**whole, "name": name}))


@pytest.mark.parametrize("name", ["final", "step_000002", "metrics.jsonl", "config.yaml", "best"])
def test_a_run_does_not_write_through_links(name, tmp_path, whole):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(elsewhere)
    for overwrite in (False, True):
        plain = {**whole, "output_dir": str(tmp_path / "run"), "overwrite": overwrite}
        with pytest.raises(ConfigError, match="is a link to"):
            check_output_folder(build_experiment(config_of(plain)))


MARKUP = (
    "[bold red]x[/] [link=http://e.vil]y[/link] <script>z</script> \x1b]0;title\x07\x1b[2J\x9b2J {7*7} ${HOME} `id`"
)


def printed(act: Any) -> str:
    console = Console(force_terminal=True, width=500, record=True)
    with console.capture() as capture:
        act(console)
    return capture.get()


def test_responses_are_shown_as_text_and_reach_no_terminal():
    text = printed(lambda c: show(c, 1, [{"id": "a", "prompt": MARKUP, "response": MARKUP, "reward": None}]))
    assert repr(MARKUP) in text
    assert not any(mark in text for mark in ("\x1b]0;", "\x1b[2J", "\x9b", "\x07"))
    shown = visible(MARKUP)
    assert "[bold red]x[/]" in shown
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
    assert visible("two\nlines\tand é 漢 🙂") == "two\nlines\tand é 漢 🙂"


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_names_in_drawings_are_text(form):
    name = '<script>alert(1)</script>"&'
    graph = DataflowGraph((RPC(name, name, "inference", (), (name,)),), results=(name,))
    drawn = FORMATS[form](graph, {name: name})
    assert form == "text" or "<script" not in drawn


def test_a_chat_template_cannot_leave_its_sandbox(tmp_path):
    from realign.data.writer import Template, Writer
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match="the chat template failed: SecurityError"):
        Writer(tokenizer, Template.chat).prompt("x")
