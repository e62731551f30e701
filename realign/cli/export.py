"""`realign export`: write a saved model as a folder for other programs, with a model card, and push it to the hub."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from realign.cli.model_card import model_card
from realign.errors import ConfigError, DataError, TransientError
from realign.models.files.adapters import CONFIG, AdapterFolder, absolute, find_adapter
from realign.models.files.folders import AVERAGED, save_folder
from realign.models.files.model_folder import (
    check_hub,
    check_links,
    check_model_folder,
    check_path,
    quiet_transformers,
    weight_names,
)
from realign.models.files.tokenizers import (
    TOKENIZER_FILES,
    align_end_tokens,
    has_tokenizer,
    read_tokenizer,
    reread_difference,
    save_tokenizer,
)
from realign.own_files import copy_file, replace_text
from realign.report.files import is_run
from realign.text import visible

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_CARD = "README.md"
COPIED = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", CONFIG),
    *("interface_state*.json", "*processor_config.json", "LICENSE*", "NOTICE*"),
    *(*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *(f"{part}_*.py" for part in ("configuration", "modeling", "tokenization", "processing", "image_processing")),
)
"""Glob patterns of the files of a model. An export contains no other file of the folder."""


@dataclass(frozen=True)
class Export:
    """Settings of an export.

    Attributes:
        source: run folder, or model or adapter folder.
        to: new folder; None writes none, which requires `push`.
        merge: merge an adapter into its base model.
        push: hub name of a model repository; None pushes nothing.
    """

    source: str
    to: Path | None = None
    merge: bool = False
    push: str | None = None

    def run(self, say: Callable[[str], None]) -> None:
        """Write the folder, push it, and report both with `say`.

        Raises:
            RealignError: a setting is invalid, the model cannot be read, or the hub refuses the upload.
            OSError: the folder cannot be written.
        """
        folder = model_folder(self.source)
        adapter = find_adapter(f"export {self.source!r}", str(folder))
        self._check(adapter)
        check_links(folder)
        if adapter is not None and Path(adapter.base).is_dir():
            check_links(Path(adapter.base))
        with tempfile.TemporaryDirectory() as scratch:
            target = self.to or Path(scratch, "model")
            save_folder(target, lambda new: self._write(new, folder, adapter))
            if left_out := [name for name in _files(folder) if name != _CARD and not _is_copied(name)]:
                say(f"Left out, because a model has no such files: {visible(', '.join(left_out))}")
            if self.to is not None:
                say(f"{'Merged model' if self.merge else 'Adapter' if adapter else 'Model'} written to {self.to}")
            if self.push is not None:
                say(f"Pushed to {push_folder(target, self.push)}")

    def _check(self, adapter: AdapterFolder | None) -> None:
        if self.to is None and self.push is None:
            raise ConfigError("realign export: the target is missing. Set --to DIR, --push NAME, or both.")
        if self.to is not None and self.to.exists() and (not self.to.is_dir() or any(self.to.iterdir())):
            raise ConfigError(f"--to {self.to}: it exists and is not an empty folder. Choose a new folder.")
        if self.push is not None and not HUB_NAME.fullmatch(self.push):
            raise ConfigError(f"--push {self.push}: not a hub name. Use owner/name.")
        if adapter is None and self.merge:
            raise ConfigError(f"--merge: {self.source!r} is a full model, not an adapter. Remove --merge.")
        if adapter is None:
            return
        adapter.check(f"export {self.source!r}")
        if not Path(adapter.base).is_dir():
            check_hub(f"the base model of {self.source!r}", adapter.base)
        elif self.merge:
            weight_names(Path(adapter.base))
        elif self.push is not None:
            raise ConfigError(
                f"--push {self.push}: the base model of the adapter is the local folder {adapter.base!r}, which other "
                "machines do not have. Add --merge."
            )

    def _write(self, new: Path, folder: Path, adapter: AdapterFolder | None) -> None:
        new.mkdir()
        # An adapter folder of another tool often has no tokenizer of its own.
        source = adapter.base if adapter is not None and not has_tokenizer(str(folder)) else str(folder)
        tokenizer = read_tokenizer("export", source, trust_remote_code=False)
        if adapter is not None and self.merge:
            _write_merged(new, adapter, tokenizer)
        else:
            _copy_files(folder, new)
        if adapter is not None and not self.merge:
            kind = adapter.config.get("task_type") or (None if adapter.head_names() else "CAUSAL_LM")
            config = {**adapter.config, "base_model_name_or_path": absolute(adapter.base), "task_type": kind}
            replace_text(new / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        # AutoTokenizer shall read the tokenizer as realign does.
        if not has_tokenizer(str(new)) or reread_difference(tokenizer, new) is not None:
            save_tokenizer(tokenizer, new)
        name = self.push or (self.to.name if self.to is not None else "")
        replace_text(new / _CARD, model_card(name, folder, new, adapter))


def export(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign export`: write a saved model for other programs, and push it to the hub."""
    if len(words) != 1:
        raise ConfigError(f"realign export expects one run or model folder, found {words or 'none'}")
    disable_progress_bar()
    Export(words[0], None if args.to is None else Path(args.to), args.merge, args.push).run(print)
    return 0


def model_or_run(command: str, path: str) -> str:
    """Return the model of a command: a model folder or hub name as it is, and the final model of a run folder.

    Raises:
        RealignError: the run has several models, or the folder contains no model.
    """
    return str(model_folder(path, command)) if Path(path).expanduser().is_dir() else path


def model_folder(source: str, command: str = "export") -> Path:
    """Return the model folder that a path means: the folder itself, or the model in `final` of a run folder.

    Args:
        source: path of a model, a run, or its folder `final` or `best`.
        command: command that asks, for messages.

    Raises:
        ConfigError: the path does not exist, or the run has several models and none is an actor.
        DataError: the folder contains neither a model nor a run.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        check_path(command, source)  # raises, unless it is a hub name
        raise ConfigError(f"{command} {source!r}: this folder does not exist.")
    final = folder if folder.name in ("final", "best") else folder / "final"
    if final.is_symlink() and final != folder:
        raise DataError(
            f"{command} {source!r}: {str(final)!r} is a link to {os.readlink(final)!r}. Name that folder itself."
        )
    models = {path.name: path for path in sorted(final.glob("*")) if _is_model(path)}
    if _is_model(folder) or not models:
        if (folder / CONFIG).is_file():
            return folder
        if is_run(folder) and not _is_model(folder):
            raise ConfigError(f"{command} {source!r}: the run has not saved a final model.{_saves(folder)}")
        return Path(check_path(command, str(folder)))
    trained = [name for name in models if not name.endswith(AVERAGED)]
    if "actor" not in models and len(trained) != 1:
        raise ConfigError(
            f"{command} {source!r}: the run has several models. Choose one: {', '.join(map(str, models.values()))}."
        )
    chosen = models["actor" if "actor" in models else trained[0]]
    if chosen.is_symlink():
        raise DataError(f"{str(chosen)!r} is a link to {os.readlink(chosen)!r}. Name that folder itself.")
    return chosen


def _saves(run: Path) -> str:
    """Return the end of the message about a run without a final model: what it saved so far."""
    saved = [path for below in ("best/*", "step_*/*") for path in sorted(run.glob(below)) if _is_model(path)]
    if saved:
        return f" Choose one of its other models, such as {str(saved[-1])!r}, or wait until the run ends."
    return " Wait until it ends; a stopped run continues with resume=auto."


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", CONFIG))


def _files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, except hidden ones."""
    return sorted(file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _is_copied(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in COPIED)


def _copy_files(folder: Path, new: Path) -> None:
    """Copy the files of a model folder that `COPIED` lists."""
    check_model_folder(folder)
    for name in filter(_is_copied, _files(folder)):
        copy_file(folder / name, new / name)


def _write_merged(new: Path, adapter: AdapterFolder, tokenizer: Any) -> None:
    """Write the base model with the adapter merged into it, in fp32. It stops at the end tokens of the tokenizer."""
    from realign.models.module_reader import ModuleReader
    from realign.models.network.heads import Causal, Score

    head = Score() if adapter.head_names() else Causal()
    reader = ModuleReader("model", f"export {str(adapter.path)!r}", str(adapter.path), adapter, head)
    with quiet_transformers():
        merged = reader.read(merge=True)
        align_end_tokens(merged, tokenizer)
        merged.save_pretrained(new)
    for file in adapter.path.iterdir():
        if file.name.startswith("interface_state") or file.name == "value_head.safetensors":
            copy_file(file, new / file.name)


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder to a model repository of the hub, which is created if it does not exist. Return its URL.

    The token comes from `HF_TOKEN` or `hf auth login`; no message contains it.

    Raises:
        ConfigError: the hub refuses the upload.
        TransientError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        repository = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Export from realign")
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE=1 disables the hub. Unset it.") from error
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        # The text of an error can contain the token. `from None` below keeps the cause out of tracebacks too.
        text = text.replace(token, "***") if (token := get_token()) else text
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            raise ConfigError(
                f"--push {name}: the hub refuses access ({text}). Set HF_TOKEN to a token with write access."
            ) from None
        if isinstance(error, HfHubHTTPError) and status is not None and status < 500:
            raise ConfigError(f"--push {name}: the hub refuses the upload ({text}).") from None
        raise TransientError(f"--push {name}: the hub cannot be reached ({text}). Repeat the command later.") from None
    return str(repository)


__all__ = ["Export", "model_folder", "push_folder"]
