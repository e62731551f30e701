from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import realign
from realign.cli import commands as cli
from realign.config import experiment
from realign.config.files import Files, experiments_dir
from realign.config.index import FILE, _shipped
from realign.runtime.checks import before_loading
from tests.config_parts import EXPERIMENT, write_experiment
from tests.processes import CHECKOUT, printed_without, python


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter an empty current folder, with a folder of experiments next to it."""
    write_experiment(tmp_path / "conf")
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(CHECKOUT)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    return folder


def realign_main(*args: str) -> int:
    return cli.main(["--config-dir", "../conf", *args])


def test_help_lists_commands_and_experiments_without_torch_or_hydra(here):
    out = printed_without({"torch", "hydra", "transformers"}, ["--config-dir", "../conf", "--help"], here)
    assert "realign check <overrides>" in out
    assert re.search(r"^  bigram +A bigram model learns to say 3\.$", out, re.M)


@pytest.mark.parametrize(
    ("name", "ours", "other"), [("THP_MEM_ALLOC_ENABLE", "1", "0"), ("OMP_WAIT_POLICY", "PASSIVE", "ACTIVE")]
)
def test_torch_uses_large_pages_and_sleeps_unless_the_user_says_otherwise(name, ours, other, monkeypatch):
    for own, used in ((None, ours), (other, other)):
        monkeypatch.setattr(os, "environ", {} if own is None else {name: own})
        cli.configure_torch()
        assert os.environ[name] == used


def test_a_config_is_composed_without_torch(here):
    out = printed_without({"torch", "transformers"}, ["--cfg", "job", "experiment=grpo_arithmetic"], here)
    assert "realign.interfaces.grpo.GRPOActorInterface" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train",), "Start from experiment=NAME"),
        (("check",), "Start from experiment=NAME"),
        (("grph",), "unknown command 'grph'; did you mean 'graph'?"),
        (("grpo",), "realign has no command 'grpo'; did you mean `realign experiment=grpo key=value ...`?"),
        (("trl", "sft", "model=m"), "realign has no command 'trl'; did you mean `realign experiment=sft key=value"),
        (
            ("trl", "grpo", "--beta", "1"),
            "`realign import trl FILE` translates a whole config, script or command of TRL",
        ),
        (("verl.trainer.main_ppo", "data.train_files=a"), "`realign import verl FILE` translates a whole config"),
        (("--advantage_estimator", "rloo", "--pretrain", "a/b"), "`realign import openrlhf FILE` translates a whole"),
        (("dr_grpo",), "did you mean `realign experiment=NAME algorithm=dr_grpo key=value ...`?"),
        (("run", "experiment=grpo"), "realign has no command 'run': to train, name an experiment"),
        (
            ("experiment=grpo", "generation.n=4"),
            "unknown key 'generation.n'; did you mean interfaces.actor.generation.n?",
        ),
        (("experiment=grpo", "generation.min_p=0"), "interfaces.actor.generation.min_p?"),
        (("experiment=grpo", "kl.coef=0.1"), "unknown key 'kl.coef'; did you mean interfaces.actor.kl.coef?"),
        (("experiment=grpo", "lrr=1"), "unknown key 'lrr'; did you mean models.actor.optimizer.lr?"),
        (("experiment=grpo", "actor=ppo"), "unknown key 'actor'; did you mean models.actor or interfaces.actor?"),
        (("help", "lrr"), "unknown key 'lrr'; did you mean models.actor.optimizer.lr?"),
        (("experiment=grpo", "models.actr.path=x"), "models.actr: no interface plays 'actr'; did you mean 'actor'?"),
        (("experiment=grpo", "interfaces.actr.epochs=2"), "no role is called 'actr'; did you mean 'actor'?"),
        (("experiment=grpo", "trackers.x=wanbd"), "trackers.x: unknown choice 'wanbd'; did you mean 'wandb'?"),
        (("experiment=grpo", "models.actor.trains=loar"), "unknown choice 'loar'; did you mean 'lora'?"),
        (("experiment=grpo", "output_dir=true"), "output_dir: expected str, found True; for the text, quote the word"),
        (("experiment=grpo", "models.actor.path=m"), "missing values: data.path, interfaces.reward.function. Set a"),
        (("merge", "runs/x"), "use realign export RUN_OR_FOLDER --to DIR --merge"),
        (
            ("eval", "experiment=bigram"),
            "realign eval expects one model (a folder or hub name) and overrides, found none",
        ),
        (("experiment=bigram", "epochs=3"), "epochs: realign counts training in steps"),
        (("./nothing.yaml",), "experiment=nothing.yaml: this file does not exist"),
        (("experiment=bigrm",), "unknown experiment 'bigrm'; did you mean 'bigram'?"),
        (("experiment=bigram", "stepss=3"), "unknown key 'stepss'; did you mean 'steps'?"),
        (("experiment=bigram", "+stepss=3"), "unknown key 'stepss'; did you mean 'steps'?"),
        (("experiment=bigram", "interfaces.actor.adv_norm.stdd=none"), "unknown key 'interfaces.actor.adv_norm.stdd'"),
        (("experiment=bigram", "graph._target_=os.system"), "os.system is part of Python's standard library"),
        (("graph", "experiment=bigram", "--format", "png"), "invalid choice: 'png'"),
        (("experiment=bigram", "--out", "x.svg"), "--out does not apply to realign train; it applies to realign graph"),
        (("check", "experiment=bigram", "-m"), "does not apply to realign check"),
        (("-m", "experiment=bigram", "seed=0,1", "resume=auto"), "resume=auto: a sweep (-m) always starts new runs"),
        (("experiment=bigram", "--frmat", "svg"), "unrecognized arguments: --frmat"),
        (("experiment=bigram", "steps=0"), "steps=0: must be at least 1"),
    ],
)
def test_trap_g6_a_mistake_is_one_line_on_stderr_exit_2_and_leaves_no_file(here, capsys, args, message):
    assert realign_main(*args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err
    assert list(here.iterdir()) == []


def test_without_arguments_a_short_menu_is_printed(here, capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "realign experiment=NAME key=value ...   train" in out
    assert len(out.splitlines()) < 15
    assert list(here.iterdir()) == []


def test_train_is_the_default_command_and_flags_and_names_of_other_tools_work(here, capsys):
    assert realign_main("train", "experiment=bigram", "--max-steps", "1", "--output-dir=größe (1)") == 0
    assert capsys.readouterr().err == "note: max_steps=1 was read as steps=1\n"
    assert len((here / "größe (1)" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_yaml_file_is_an_experiment(here, capsys):
    (here / "my run.yaml").write_text(EXPERIMENT)
    assert realign_main("my run.yaml", "steps=1", "output_dir=a") == 0
    assert realign_main("-m", "experiment=./my run.yaml", "steps=1", "seed=1,2", "output_dir=b") == 0
    assert len(list((here / "b").glob("sweep_*/*/metrics.jsonl"))) == 2
    assert realign_main("graph", "./my run.yaml") == 0
    (here / "my run.yaml").write_text(f"{EXPERIMENT}hydra: {{job: {{env_set: {{A: b}}}}}}\n")
    assert realign_main("my run.yaml") == 2
    assert "hydra.job.env_set.A='b': a config cannot change this setting of Hydra" in capsys.readouterr().err


def test_debug_shows_the_traceback_and_keeps_the_exit_code(here, monkeypatch, capsys):
    for arguments in (("--debug",), ()):
        assert realign_main("experiment=bigram", "stepss=3", *arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last):")
        assert "ConfigError: unknown key 'stepss'" in err
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def test_train_runs_writes_its_config_and_litters_nothing(here, capsys):
    arguments = list(sys.argv)
    assert realign_main("experiment=bigram", "steps=3", "interfaces.actor.epochs=2") == 0
    assert sys.argv == arguments
    assert "HYDRA_FULL_ERROR" not in os.environ
    out = capsys.readouterr().out
    assert [p.name for p in here.iterdir()] == ["runs"]
    run = here / "runs" / "bigram"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["steps"] == 3
    assert saved["interfaces"]["actor"]["epochs"] == 2
    assert "interfaces.actor.epochs=2" in (run / ".hydra" / "overrides.yaml").read_text()
    for row in (
        r"prompts per step +4",
        r"group size .* 4",
        r"sequences per step +16",
        r"optimizer steps per step +2 \(2 epochs x 1 mini-batch\)",
        r"total optimizer steps +6",
        r"tokens per micro-batch +at most 16,384",
        r"KL to reference +not applied",
        r"advantage normalization +\(A - mean\(group\)\)",
        r"temperature +1 \(interfaces\.actor\.generation\.temperature\)",
    ):
        assert re.search(row, out), row
    assert not re.search(r"nothing reads|never read|neutral|none", out.split("tokens per micro-batch")[1]), out


@pytest.mark.parametrize("command", [[], ["check"], ["graph"]])
@pytest.mark.parametrize("words", [[], ["max_steps=1", "num_generations=4"]])
def test_one_launch_composes_once_builds_once_and_checks_once(here, monkeypatch, command, words):
    calls = []

    def counted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: calls.append(name) or function(*given))

    counted(Files, "read")
    counted(experiment, "build_experiment")
    counted(before_loading, "check_roles")
    assert realign_main(*command, "experiment=bigram", "steps=1", *words) == 0
    assert calls == ["read", "build_experiment", *(["check_roles"] if command != ["graph"] else [])]


def test_an_earlier_run_is_not_overwritten_by_accident(here, capsys):
    assert realign_main("experiment=bigram") == 0
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*")}
    assert realign_main("experiment=bigram", "seed=1") == 2
    assert "contains an earlier run" in capsys.readouterr().err
    assert before == {p: p.stat().st_mtime_ns for p in here.rglob("*")}
    assert realign_main("experiment=bigram", "overwrite=true") == 0


def test_a_sweep_makes_one_folder_for_each_run(here):
    assert realign_main("-m", "experiment=bigram", "steps=1", "seed=5", "interfaces.actor.epochs=1,2") == 0
    sweep = next((here / "runs" / "bigram").glob("sweep_*"))
    configs = [yaml.safe_load((sweep / str(i) / "config.yaml").read_text()) for i in range(2)]
    assert [(c["seed"], c["interfaces"]["actor"]["epochs"]) for c in configs] == [(5, 1), (5, 2)]
    assert all((sweep / str(i) / "metrics.jsonl").exists() for i in range(2))
    assert [p.name for p in here.iterdir()] == ["runs"]


def test_a_mistake_in_a_sweep_is_one_line(here, capsys):
    assert realign_main("-m", "experiment=bigram", "interfaces.actor.epochs=0,1") == 2
    err = capsys.readouterr().err
    assert err == "error: interfaces.actor.epochs=0: must be at least 1\n"


def test_cfg_prints_the_composed_config(here, capsys):
    assert realign_main("experiment=bigram", "--cfg", "job", "steps=11") == 0
    assert yaml.safe_load(capsys.readouterr().out)["steps"] == 11
    assert list(here.iterdir()) == []


def test_graph_in_every_format(here, capsys):
    assert realign_main("graph", "experiment=bigram") == 0
    assert "rewards ──▶ actor_train" in capsys.readouterr().out
    assert realign_main("graph", "experiment=bigram", "--format", "mermaid") == 0
    assert capsys.readouterr().out.startswith("flowchart TD")
    assert realign_main("graph", "--out", "made/graph.svg", "experiment=bigram") == 0
    assert (here / "made" / "graph.svg").read_text().startswith("<svg")
    assert capsys.readouterr().out == ""


def test_check_does_everything_but_train(here, capsys, monkeypatch):
    from realign.interfaces.grpo import GRPOActorInterface

    monkeypatch.setattr(GRPOActorInterface, "train_step", lambda *_: pytest.fail("it trained"))
    assert realign_main("check", "experiment=bigram") == 0
    out = capsys.readouterr().out
    for part in (
        "sequences per step",
        "1. actor_gen",
        "GiB free",
        "CPU with",
        "8 rows",
        "rewards",
        ": reward ",
        "All good",
    ):
        assert part in out, part
    assert list(here.iterdir()) == []


def test_ctrl_c_is_one_line_and_exit_130(here, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("realign.runtime.run", interrupted)
    assert realign_main("experiment=bigram") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_keeps_its_traceback(here, capsys, monkeypatch):
    def fails(*_, **__):
        raise ValueError("raised outside realign: a bug of somebody's")

    monkeypatch.setattr("realign.runtime.run", fails)
    with pytest.raises(ValueError, match="a bug of somebody's"):
        realign_main("experiment=bigram")


def test_a_class_in_a_file_of_the_current_folder_is_found(here):
    source = (
        "from dataclasses import dataclass\nfrom realign.interfaces.grpo import GRPOActorInterface\n"
        "@dataclass\nclass Mine(GRPOActorInterface):\n    my_coef: float = 0.5\n"
    )
    (here / "my_algorithm_in_cwd.py").write_text(source)
    args = [
        "--config-dir",
        "../conf",
        "graph",
        "experiment=bigram",
        "interfaces.actor._target_=my_algorithm_in_cwd.Mine",
    ]
    code = (
        "import sys; from realign.cli.commands import main; sys.path.remove('')\n"
        f"assert main({[*args, 'interfaces.actor.my_coef=2']!r}) == 0\n"
        f"sys.exit(main({[*args, 'interfaces.actor.my_coeff=2']!r}))"
    )
    done = python(code, here)
    assert done.returncode == 2, done.stderr
    assert "unknown key 'interfaces.actor.my_coeff'; did you mean 'my_coef'?" in done.stderr


def test_experiments_are_found_from_an_installed_package_in_an_empty_folder(here, tmp_path):
    site = tmp_path / "site"
    package = Path(realign.__file__).parent
    shutil.copytree(package, site / "realign", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(experiments_dir(), site / "realign" / "experiments")  # the wheel contains the same copy
    # so does it contain this index; without it, the first use would import every module
    (site / "realign" / FILE.relative_to(package)).write_text(json.dumps(_shipped()))
    write_experiment(site / "realign" / "experiments", "shipped", EXPERIMENT)
    done = python(
        "from realign.config import compose; print(compose(['experiment=shipped']).name)", here, PYTHONPATH=str(site)
    )
    assert done.stdout == "bigram\n", done.stderr
    wheel = CHECKOUT.joinpath("pyproject.toml").read_text()
    assert '"experiments" = "realign/experiments"' in wheel


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("experiment=grpo steps=3", "realign train experiment=grpo: importing torch and transformers"),
        ("train --steps 3 experiment=grpo", "realign train experiment=grpo: importing torch and transformers"),
        ("check ./mine.yaml", "realign check ./mine.yaml: importing torch and transformers"),
        ("", ""),
        ("check", ""),
        ("graph experiment=grpo", ""),
        ("--cfg job experiment=grpo", ""),
        ("experiment=grpo --cfg=job", ""),
        ("check experiment=grpo --help", ""),
    ],
)
def test_the_first_line_says_what_starts(line, first):
    assert cli.first_line(line.split()) == first


def test_only_the_first_rank_prints_the_first_line(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli.first_line(["experiment=grpo"]) == ""
