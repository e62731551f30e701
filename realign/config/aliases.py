"""Names of settings in other tools, and the keys of realign with the same meaning.

A name with exactly one key of the same meaning and unit is accepted, and a note shows the key. A name whose meaning or
unit differs, or that fits several keys of the experiment, is an error that lists the keys (ADR 25).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realign.config.errors import ConfigError
from realign.config.source import class_at, fields_of
from realign.config.trees import get
from realign.config.words import TARGET, is_word

CHOOSES = ("experiment", "algorithm")
"""Config groups that decide which keys exist."""


@dataclass(frozen=True)
class Alias:
    """What to do with a name of another tool."""

    keys: tuple[str, ...] = ()
    """Keys of the same meaning and unit. `*` matches each role of the experiment that has the key."""
    answer: str = ""
    """Explanation for a name that has no key of the same meaning and unit."""


_EPOCHS = Alias(
    answer="realign counts training in steps: set steps to epochs x rows / batch_prompts. interfaces.actor.epochs is "
    "the number of passes over each rollout batch (PPO epochs)."
)
_BATCH = Alias(
    answer="set batch_prompts, the number of prompts per step over all devices. interfaces.actor.n_minibatches divides "
    "it into optimizer steps, and microbatch.max_tokens_per_microbatch limits memory, in tokens."
)
_ACCUMULATION = Alias(
    answer="gradients accumulate over micro-batches of at most microbatch.max_tokens_per_microbatch tokens. Lower it "
    "to save memory; the result does not change. interfaces.actor.n_minibatches sets the optimizer steps per step."
)
_SAVE = Alias(answer="save_every_steps saves the models, and checkpoint.every_steps writes checkpoints for resuming.")
_CLIP = Alias(answer="set interfaces.actor.objective.low and interfaces.actor.objective.high, which may differ.")
_LENGTH = Alias(answer="set data.max_prompt_tokens for prompts and interfaces.actor.generation.max_new_tokens.")
_TRACKER = Alias(
    answer="every run writes `metrics.jsonl`. Trackers are components: set "
    "`trackers.wandb._target_=realign.runtime.WandB` or `trackers.tb._target_=realign.runtime.TensorBoard`."
)
_LORA = Alias(
    answer="for adapters, set `models.actor.trains=lora`. Its keys are `models.actor.trains.rank`, "
    "`models.actor.trains.alpha` and others."
)
_REWARDS = Alias(
    answer="set interfaces.reward.function for one function, or interfaces.reward.functions for several with weights."
)
_SERVERS = Alias(
    answer="set `models.actor.sampler=vllm` (or sglang), and `models.actor.sampler.urls` or "
    "`models.actor.sampler.python`."
)
_STEPS = Alias(("steps",))
_RATE = Alias(("models.*.optimizer.lr",))
_NEW_TOKENS = Alias(("interfaces.*.generation.max_new_tokens", "evaluation.generation.max_new_tokens"))
_GROUP = Alias(("interfaces.*.generation.n",))
_KL = Alias(("interfaces.*.kl.coef",))
_DATA = Alias(("data.path",))
_MODEL = Alias(("models.*.path",))
_OUTPUT = Alias(("output_dir",))
_CLIP_NORM = Alias(("models.*.optimizer.grad_clip",))
_EVALUATION = Alias(("evaluation.every_steps",))
ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "epochs": _EPOCHS,
        "num_epochs": _EPOCHS,
        "num_train_epochs": _EPOCHS,
        "total_epochs": _EPOCHS,
        "ppo_epochs": Alias(("interfaces.*.epochs",)),
        "num_ppo_epochs": Alias(("interfaces.*.epochs",)),
        "max_steps": _STEPS,
        "num_steps": _STEPS,
        "total_steps": _STEPS,
        "total_training_steps": _STEPS,
        "lr": _RATE,
        "learning_rate": _RATE,
        "warmup_steps": Alias(("models.*.optimizer.schedule.warmup",)),
        "weight_decay": Alias(("models.*.optimizer.weight_decay",)),
        "max_grad_norm": _CLIP_NORM,
        "grad_clip": _CLIP_NORM,
        "batch_size": _BATCH,
        "train_batch_size": _BATCH,
        "per_device_train_batch_size": _BATCH,
        "rollout_batch_size": _BATCH,
        "micro_batch_size": _ACCUMULATION,
        "mini_batch_size": _BATCH,
        "gradient_accumulation_steps": _ACCUMULATION,
        "grad_accum": _ACCUMULATION,
        "gradient_checkpointing": Alias(("models.*.gradient_checkpointing",)),
        "max_new_tokens": _NEW_TOKENS,
        "max_tokens": _NEW_TOKENS,
        "max_completion_length": _NEW_TOKENS,
        "max_response_length": _NEW_TOKENS,
        "max_prompt_length": Alias(("data.max_prompt_tokens",)),
        "max_length": _LENGTH,
        "max_seq_length": _LENGTH,
        "num_generations": _GROUP,
        "group_size": _GROUP,
        "n_samples_per_prompt": _GROUP,
        "temperature": Alias(("interfaces.*.generation.temperature", "evaluation.generation.temperature")),
        "beta": Alias(("interfaces.*.beta", "interfaces.*.kl.coef")),
        "kl_coef": _KL,
        "init_kl_coef": _KL,
        "kl_coeff": _KL,
        "clip_range": _CLIP,
        "cliprange": _CLIP,
        "clip_eps": _CLIP,
        "epsilon": _CLIP,
        "model": _MODEL,
        "model_path": _MODEL,
        "model_name": _MODEL,
        "model_name_or_path": _MODEL,
        "dataset": _DATA,
        "dataset_path": _DATA,
        "dataset_name": _DATA,
        "train_file": _DATA,
        "dataset_split": Alias(("data.split",)),
        "dataset_train_split": Alias(("data.split",)),
        "dataset_config": Alias(("data.subset",)),
        "dataset_config_name": Alias(("data.subset",)),
        "dataset_streaming": Alias(("data.streaming",)),
        "output": _OUTPUT,
        "save_dir": _OUTPUT,
        "run_name": Alias(("name",)),
        "eval": Alias(("evaluation",)),
        "eval_steps": _EVALUATION,
        "eval_every": _EVALUATION,
        "save_steps": _SAVE,
        "reward_fn": Alias(("interfaces.reward.function",)),
        "reward_function": Alias(("interfaces.reward.function",)),
        "reward_funcs": _REWARDS,
        "reward_functions": _REWARDS,
        "reward_weights": _REWARDS,
        "report_to": _TRACKER,
        "wandb": _TRACKER,
        "tensorboard": _TRACKER,
        "lora": _LORA,
        "use_lora": _LORA,
        "use_peft": _LORA,
        "lora_r": _LORA,
        "lora_rank": _LORA,
        "lora_alpha": _LORA,
        "load_in_4bit": Alias(("models.*.load_in_4bit",)),
        "bf16": Alias(answer="set `models.actor.dtype=bfloat16`, and the same for the other roles."),
        "use_vllm": _SERVERS,
        "vllm_mode": _SERVERS,
        "vllm_server_base_url": _SERVERS,
        "logging_steps": Alias(answer="`metrics.jsonl` and `realign.log` contain every step."),
        "eval_dataset": Alias(("evaluation.data.path",)),
    }
)
"""Name of another tool -> keys of realign."""

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "eval": "an evaluation is part of a run. Set evaluation.every_steps; `realign help evaluation` lists its keys. "
        "To try a saved model, use realign chat MODEL.",
        "evaluate": "an evaluation is part of a run. Set evaluation.every_steps; `realign help evaluation` lists its "
        "keys. To try a saved model, use realign chat MODEL.",
        "resume": "to resume a run, repeat its command with resume=auto.",
        "sweep": "to start a sweep, add -m: realign -m experiment=NAME seed=0,1.",
        "merge": "to merge an adapter into its base model, use realign export RUN_OR_FOLDER --to DIR --merge.",
        "push": "to upload a model, use realign export RUN_OR_FOLDER --push OWNER/NAME.",
        "list": "`realign --help` lists the experiments and algorithms.",
    }
)
"""Commands of other tools that realign does not have, and what to do instead."""


def translate(overrides: Sequence[str], config_dir: Path | str | None = None) -> tuple[list[str], list[str]]:
    """Replace names of other tools by keys.

    Args:
        overrides: Overrides of the command line.
        config_dir: As for `compose`.

    Returns:
        The overrides, and a note for each name that was replaced.

    Raises:
        ConfigError: a name has no key of the same meaning and unit in this experiment, or several.
    """
    found, notes = [], []
    for word in overrides:
        sign, key, value = _parts(word)
        name, _, rest = key.partition(".")
        alias = ALIASES.get(name.replace("-", "_"))
        if alias is None or not value:
            found.append(word)
            continue
        if alias.answer:
            raise ConfigError(f"{key}: {alias.answer}")
        others = [
            other for other in overrides if other is not word and _parts(other)[1].partition(".")[0] not in ALIASES
        ]
        target = _only_key(name, alias, others, config_dir)
        new = f"{sign}{target}{f'.{rest}' if rest else ''}{value}"
        found.append(new)
        notes.append(f"{word} was read as {new}")
    return found, notes


def _parts(word: str) -> tuple[str, str, str]:
    """Return the sign (`+`, `~`), the key, and the rest of an override from `=` on."""
    bare = word.lstrip("+~")
    key, equals, value = bare.partition("=")
    return word[: len(word) - len(bare)], key, equals + value


def _only_key(name: str, alias: Alias, overrides: Sequence[str], config_dir: Path | str | None) -> str:
    if len(alias.keys) == 1 and "*" not in alias.keys[0]:
        return alias.keys[0]
    config = _composed(overrides, config_dir)
    found = [key for pattern in alias.keys for key in _matching(pattern, config)]
    if len(found) > 1:
        raise ConfigError(f"{name} may mean {' or '.join(found)}. Set the one that you mean.")
    if not found:
        raise ConfigError(f"{name}: no role of this experiment has the key {' or '.join(alias.keys)}.")
    place = found[0].removesuffix(".coef") + ".place"
    if found[0].endswith(".kl.coef") and get(config, tuple(place.split(".")), "none") in (None, "none"):
        raise ConfigError(
            f"{name}: {found[0]} has no effect with {place}=none. Set {place}=loss or {place}=reward, and {found[0]}."
        )
    return found[0]


def _composed(overrides: Sequence[str], config_dir: Path | str | None) -> dict[str, Any]:
    from realign.config.composition import compose_raw

    try:
        return compose_raw(overrides, config_dir)
    except ConfigError:  # such as a sweep; other errors are reported later
        return compose_raw([word for word in overrides if word.partition("=")[0] in CHOOSES], config_dir)


def _matching(pattern: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the experiment that a pattern matches."""
    root, *rest = pattern.split(".")
    nodes = {root: config.get(root)}
    if rest and rest[0] == "*":
        nodes = {f"{root}.{role}": node for role, node in (config.get(root) or {}).items()}
        rest = rest[1:]
    for prefix, node in nodes.items():
        if isinstance(node, Mapping) and node and _has(node, rest):
            yield ".".join([prefix, *rest])


def _has(node: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether a component has a key: its node sets the key, or its class has the fields."""
    if get(node, tuple(names), None) is not None:
        return True
    below = get(node, tuple(names[:1]), None)
    if names[0] == "optimizer" or (below is None and names[0] in node):
        return below is not None  # without an optimizer, the model is frozen
    cls = class_at(str(node.get(TARGET, "")))
    return cls is not None and names[0] in fields_of(cls) and not is_word(below)


__all__ = ["ALIASES", "COMMANDS", "Alias", "translate"]
