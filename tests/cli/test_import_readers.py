"""Test the readers of `realign import`: what people bring, as flat settings. Nothing of it runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from realign.cli.import_readers import evaluate, read_sources, read_text
from realign.config.errors import ConfigError

SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail
# a comment with 'quotes
DEVICE=${DEVICE:-$(python3 -c 'import x' && echo npu || echo gpu)}
BATCH=${BATCH:-64}   # a remark, with (brackets)
MINI=$((BATCH / 4))
FOLDER=$(cd "$(dirname "$0")/.." && pwd)
case "${DEVICE}" in
  gpu) offload=False ;;
  npu) offload=True ;;
esac
DATA=(
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']"
    # data.shuffle=False
    data.train_batch_size=${BATCH}
)
if [ "$BATCH" -gt 100 ]; then
    DATA+=(data.shuffle=False)
elif [ -n "${UNSET_NAME:-}" ]; then
    DATA+=(data.seed=1)
else
    DATA+=(data.seed=2)
fi
LAUNCH=(python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$MINI \\
    +actor_rollout_ref.actor.extra=1 ~trainer.logger \\
    trainer.logger='["console","wandb"]' \\
    trainer.experiment_name=run_$(date +%Y) \\
    reward.path=$FOLDER/reward.py \\
    actor_rollout_ref.ref.offload=$offload \\
    "$@"
"""


def test_a_shell_script_with_variables_arrays_and_tests(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    (source,) = read_text(SCRIPT, "/scripts/sub/run.sh")
    assert source.program == "verl.trainer.main_ppo"
    assert source.settings == {
        "data.train_files": ["/home/me/a.parquet", "/home/me/b.parquet"],
        "data.train_batch_size": 64,
        "data.seed": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.extra": 1,
        "trainer.logger": ["console", "wandb"],
        "trainer.experiment_name": "run_$(date +%Y)",
        "reward.path": "/scripts/reward.py",
        "actor_rollout_ref.ref.offload": False,
    }


HERE_DOCUMENT = """\
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --train.batch_size 8 \\
   --adam.lr 5e-7 \\
   --ds.packing_samples
EOF
     # --ref.offload
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


def test_the_variables_of_a_sourced_file_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common.sh").write_text("source run.sh  # itself\nLR=1e-6\nMODEL=org/name\n")
    script = 'source "$(dirname "$0")/common.sh"\n. ./absent.sh\ntrl sft --learning_rate $LR --model $MODEL --x $Y\n'
    (tmp_path / "run.sh").write_text(script)
    (read,) = read_sources(["run.sh"])
    assert read.settings == {"learning_rate": 1e-6, "model": "org/name", "x": "$Y"}


def test_a_here_document_that_deepspeed_starts():
    (source,) = read_text(HERE_DOCUMENT, "run.sh")
    assert source.program == "openrlhf.cli.train_dpo"
    assert source.settings == {"train.batch_size": 8, "adam.lr": 5e-7, "ds.packing_samples": True}


@pytest.mark.parametrize(
    ("line", "program", "settings"),
    [
        (
            "ray job submit --address=http://x -- python3 -m openrlhf.cli.train_ppo_ray --a.b 1 2",
            "openrlhf.cli.train_ppo_ray",
            {"a.b": [1, 2]},
        ),
        ("accelerate launch --num_processes 4 src/grpo.py --beta 1", "src/grpo.py", {"num_processes": 4, "beta": 1}),
        ("torchrun --nproc-per-node=2 -m verl.trainer.x a=b", "verl.trainer.x", {"num_processes": 2, "a": "b"}),
        ("trl dpo --beta -0.5 --bf16", "trl dpo", {"beta": -0.5, "bf16": True}),
        ("--reward.remote_url reward.py --a x", "", {"reward.remote_url": "reward.py", "a": "x"}),
    ],
)
def test_a_launch_command(line, program, settings):
    (source,) = read_sources(line.split())
    assert (source.program, source.settings) == (program, settings)


def test_the_file_of_a_config_flag_is_read_and_flags_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("beta: 0.1\nnum_generations: 4\n")
    (source,) = read_sources(["trl", "grpo", "--config", "recipe.yaml", "--beta", "0.2"])
    assert source.settings == {"beta": 0.2, "num_generations": 4}


def test_a_config_that_is_not_there_is_told_and_takes_no_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["areal.launcher.local", "my.py", "--config", "far.yaml", "trial_name=a", "actor.kl_ctl=0"]
    (source,) = read_sources(line)
    assert source.settings == {"trial_name": "a", "actor.kl_ctl": 0}
    why = "the file is not there, so its settings are missing; run this where it is"
    assert source.notes == (f"--config far.yaml: {why}",)


def test_a_config_of_accelerate_gives_the_number_of_processes_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n")
    source = read_sources(["accelerate", "launch", "--config_file", "zero3.yaml", "grpo.py", "--beta", "0.1"])[0]
    assert source.settings == {"num_processes": 8, "beta": 0.1}


@pytest.mark.parametrize(
    "end", ["> a.log 2>&1", "&> a.log", ">a.log 2> b.log < /dev/null", "2>&1 | tee a.log", '>> "$LOG" 2>&1 &']
)
def test_the_files_of_redirections_are_no_values(end):
    (source,) = read_text(f"trl grpo --output_dir here {end}\n", "run.sh")
    assert source.settings == {"output_dir": "here"}


def test_the_clipboard_is_read_from_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("python -m verl.trainer.main_ppo \\\n  a.b=1 \\\n  c=x\n"))
    (source,) = read_sources(["-", "a.b=2"])
    assert source.settings == {"a.b": 2, "c": "x"}


def test_interpolations_of_a_yaml_file():
    text = """\
actor: {path: m, lr: "${optim.lr}", again: "${.lr}", name: "a/${actor.path}/b", missing: "${nothing}"}
optim: {lr: 1e-6, same: "${oc.select:nothing,7}", environment: "${oc.env:HOME}"}
critic: {optim: "${optim}", up: "${..actor.path}"}
"""
    (source,) = read_text(text, "config.yaml")
    assert source.settings == {
        "actor.path": "m",
        "actor.lr": 1e-6,
        "actor.again": 1e-6,
        "actor.name": "a/m/b",
        "actor.missing": "${nothing}",
        "optim.lr": 1e-6,
        "optim.same": 7,
        "optim.environment": "${oc.env:HOME}",
        "critic.optim.lr": 1e-6,
        "critic.optim.same": 7,
        "critic.optim.environment": "${oc.env:HOME}",
        "critic.up": "m",
    }


PYTHON = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
BETA = 0.1
def correct(completions, **kwargs): ...
config = GRPOConfig(beta=BETA, num_generations=4, output_dir=f"{x}/y")
trainer = GRPOTrainer(model="org/m", args=config, reward_funcs=[correct, other], peft_config=LoraConfig(r=8),
                      train_dataset=load_dataset("org/data", split="train"))
"""


def test_a_python_script_as_far_as_it_is_literal():
    (source,) = read_text(PYTHON, "train.py")
    assert source.program == "GRPOConfig"
    assert source.settings["output_dir"].startswith("$(")
    expected = {"beta": 0.1, "num_generations": 4, "model_name_or_path": "org/m", "use_peft": True, "lora_r": 8}
    expected |= {"reward_funcs": ["reward.py:correct", "other"], "dataset_name": "org/data"}
    assert expected.items() <= source.settings.items()
    assert source.notes[0].startswith("move correct, and what it needs, to a file reward.py")


@pytest.mark.parametrize(
    "line",
    [
        "model = AutoModelForCausalLM.from_pretrained('a/b')",
        "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to('cuda')",
        "model, tokenizer = FastLanguageModel.from_pretrained(model_name=name, load_in_4bit=True)",
        "model = f'a/{end}'",
    ],
)
def test_a_model_that_a_script_loads_is_its_path(line):
    script = f"import trl\nname, end = 'a/b', 'b'\nname = 'a/b'\nend = 'b'\n{line}\ntrl.DPOTrainer(model=model)\n"
    assert read_text(script, "train.py")[0].settings == {"model_name_or_path": "a/b"}


def test_rows_that_a_script_changes_are_told():
    script = "import trl\nrows = load_dataset('a/b').map(chat)\ntrl.DPOTrainer('m', train_dataset=rows)\n"
    (note,) = read_text(script, "train.py")[0].notes
    assert note.startswith("the script changes its rows with map")


def test_a_script_that_names_no_program_says_so(tmp_path):
    (tmp_path / "run.sh").write_text('srun --label x bash -c "torchrun -m ${training_commands}"\n')
    with pytest.raises(ConfigError, match="no program that trains is named in it"):
        read_sources([str(tmp_path / "run.sh")])


def test_a_reward_of_a_script_that_trains_only_when_it_is_run_stays_where_it_is():
    guarded = PYTHON.replace("trainer = ", 'if __name__ == "__main__":\n    trainer = ')
    (source,) = read_text(guarded, "train.py")
    assert source.settings["reward_funcs"] == ["train.py:correct", "other"]
    assert source.notes == ()


def test_a_script_without_a_literal_config_asks_for_the_command():
    with pytest.raises(ConfigError, match="Give the command that starts the script"):
        read_text("import trl\nprint(1)\n", "train.py")


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("a * 2 / 4", 2),
        ("ceil(b * 3)", 2),
        ("missing | a.b | 1", 7),
        ("missing * 2", None),
        ("1 if a > 3 else 0", 1),
        ("xs[1]", 5),
        ("a - 1", 3),
        ("section('a')", {"b": 7}),
        ("a / 0", None),
    ],
)
def test_a_formula_over_settings(formula, value):
    assert evaluate(formula, {"a": 4, "b": 0.4, "a.b": 7, "xs": [4, 5]}) == value


@pytest.mark.parametrize("formula", ["__import__('os')", "a.__class__()", "[x for x in a]", "'a' * 2 * b"])
def test_a_formula_is_nothing_but_arithmetic(formula):
    with pytest.raises(ConfigError):
        evaluate(formula, {"a": "text", "b": "text"})
