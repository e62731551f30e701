"""Read tokenizers as their `tokenizer.json` defines them, save them so that AutoTokenizer reads them, and compare them.

transformers selects the class of a tokenizer by the family of the model in the same folder. For some families (qwen2,
phi3 and others), it ignores the class in `tokenizer_config.json` and rebuilds any `tokenizer.json` as the family's own
tokenizer. A tokenizer of another kind then drops or changes text without a warning.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from realign.api.model import TokenizerSource
from realign.errors import ConfigError, DataError
from realign.models.files.model_folder import (
    GENERATION_CONFIG,
    check_hub,
    check_path,
    is_other_file,
    parse_object,
    quiet_transformers,
    read_object,
    readable,
    refuse_pointer,
    stop_tokens_in,
)
from realign.own_files import remove_file, replace_text
from realign.text import brief

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Tokenizer files. Without any of them, AutoTokenizer silently builds an empty tokenizer of the model's family."""

_PROBES = (
    "The quick brown fox, 1234567.89 + 3 = ?",
    "  two  blanks\tand a tab ",
    "first line\nsecond line\r\n\n\nfifth line\n",
    'def f(x):\n    return {"key": [x**2, -1]}  # 50%',
    "Größe, naïve café, coöperate",
    "Съешь ещё этих мягких булок; Ξεσκεπάζω την ψυχή",
    "السلام عليكم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "汉字和かな交じり文、한국어",
    "emoji 👩‍👩‍👧 🇪🇺 and e\u0301 combined",
)
"""Texts on which two tokenizers are compared, in addition to their own tokens."""

_CONFIG = "tokenizer_config.json"
MODULE, CLASS = "tokenizer_of_file", "TokenizerOfFile"

_CODE = f'''"""Reads tokenizer.json as it is, instead of as the tokenizer of the model's family."""

from transformers import PreTrainedTokenizerFast


class {CLASS}(PreTrainedTokenizerFast):
    """The tokenizer in tokenizer.json."""
'''

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(key: str, source: str, *, trust_remote_code: bool, cure: str = "") -> Any:
    """Read a tokenizer. If transformers' class would change the text of `tokenizer.json`, the file is used instead.

    Args:
        key: key of the setting that contains `source`, for messages.
        source: folder or hub name.
        trust_remote_code: whether to run code in the folder or hub repository.
        cure: end of the message about a folder without a tokenizer.

    Raises:
        ConfigError: `source` is neither a folder nor a hub name.
        DataError: the folder has no tokenizer, the tokenizer cannot be read, or a chat template is a link to a file of
            another name: a run saves its text with each model.
    """
    from transformers import AutoTokenizer

    path = _check_tokenizer(key, source, cure)
    for file in [*Path(path).glob("*.jinja"), *Path(path).glob("additional_chat_templates/*")]:
        if is_other_file(file):
            raise DataError(f"{key}: {str(file)!r} is a link to another file. Replace it by a copy, or remove it.")
    with readable(f"{key}: cannot load a tokenizer from {path!r}"):
        _check_pointers(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception:
            for file in sorted(Path(path).glob("*.json")):
                parse_object(file)  # names the damaged file
            raise
        return _as_in_file(key, tokenizer, path)


def _check_tokenizer(key: str, source: str, cure: str = "") -> str:
    """Return the path of a tokenizer folder or a hub name; see `read_tokenizer` for arguments and errors."""
    try:
        return check_path(key, source, TOKENIZER_FILES)
    except DataError as error:
        raise DataError(f"{error}{cure}") from error


def _check_pointers(path: str) -> None:
    """Raise DataError if a file of a tokenizer is a Git LFS pointer; others are not read beside `tokenizer.json`."""
    read = (
        ("tokenizer*.json", "*.jinja")
        if Path(path, "tokenizer.json").is_file()
        else (*TOKENIZER_FILES, "*.jinja", "*.txt")
    )
    for file in sorted(file for pattern in read for file in Path(path).glob(pattern) if file.is_file()):
        refuse_pointer(file)


def end_tokens(source: Any) -> list[int]:
    """Return the end tokens of a tokenizer or of a generation config: none, one, or several."""
    ids = getattr(source, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def align_end_tokens(module: Any, tokenizer: Any) -> None:
    """Let the `generate` of a model, and of what it is saved as, stop where its responses end in training.

    The config of many models has only the end token of the base model. End tokens that it has stay.
    """
    config = getattr(module, "generation_config", None)
    if config is not None and (new := [i for i in end_tokens(tokenizer) if i not in end_tokens(config)]):
        ids = [*new, *end_tokens(config)]
        config.eos_token_id = ids if len(ids) > 1 else ids[0]


def end_tokens_beside(tokenizer: Any) -> list[int]:
    """Return the end tokens in the `generation_config.json` of the folder or hub name of a tokenizer.

    Raises:
        DataError: the file is not a JSON object with token ids.
    """
    path = getattr(tokenizer, "name_or_path", None)
    file = _file_of(path, GENERATION_CONFIG) if path else None
    return [] if file is None else stop_tokens_in(file)


def has_tokenizer(path: str) -> bool:
    """Return whether a local folder contains a tokenizer; False for a hub name."""
    folder = Path(path).expanduser()
    return folder.is_dir() and any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def _as_in_file(key: str, tokenizer: Any, path: str) -> Any:
    """Return `tokenizer`, or the tokenizer in its `tokenizer.json` if the class of `tokenizer` changes the text."""
    from transformers import PreTrainedTokenizerFast

    rebuilt = isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer) is not PreTrainedTokenizerFast
    if not rebuilt or _is_remote_code(tokenizer) or _file_of(path, "tokenizer.json") is None:
        return tokenizer
    with quiet_transformers():
        exact = PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
    _keep_special(exact, tokenizer)
    changed = difference(tokenizer, exact)
    if changed is None:
        return tokenizer
    logger.info(
        "%s: the tokenizer is read from tokenizer.json, since %s of transformers changes it: %s.",
        *(key, type(tokenizer).__name__, changed),
    )
    return exact


def _file_of(path: str, name: str) -> Path | None:
    """Return a file of a folder, or of the cached files of a hub name; None if there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(path).is_dir():
        return file if (file := Path(path, name)).is_file() else None
    try:
        cached = try_to_load_from_cache(path, name)
    except HFValidationError:  # a folder that was removed, or that another machine has
        return None
    return Path(cached) if isinstance(cached, str) else None


def _is_remote_code(tokenizer: Any) -> bool:
    """Return whether the class comes from a user's code in a model folder; `_name_class` writes no such code."""
    return type(tokenizer).__module__.startswith("transformers_modules.") and type(tokenizer).__name__ != CLASS


def _keep_special(exact: Any, tokenizer: Any) -> None:
    """Copy special tokens and chat template that only the class defines, if the vocabulary contains the tokens."""
    vocabulary = exact.get_vocab()
    for name in _SPECIAL:
        token = getattr(tokenizer, name)
        if getattr(exact, name) is None and token in vocabulary:
            exact.add_special_tokens({name: token})  # setattr alone does not make it one token of a text
    if exact.chat_template is None:
        exact.chat_template = tokenizer.chat_template


def difference(tokenizer: Any, expected: Any) -> str | None:
    """Return how `tokenizer` differs from `expected`, as a phrase; None if it does not.

    Compares token ids and decoded text of `_PROBES` and of the tokenizer's own tokens, the number of tokens, the
    special tokens and the chat template.
    """
    for text in _probes(expected):
        for special in (False, True):
            ids, expected_ids = (_ids(side, text, special) for side in (tokenizer, expected))
            if ids != expected_ids:
                return f"the text {brief(text, 60)} has {len(ids)} tokens, expected {len(expected_ids)} or other ids"
        if (decoded := tokenizer.decode(expected_ids)) != expected.decode(expected_ids):
            return f"the text {brief(text, 60)} is decoded as {brief(decoded, 60)}"
    if len(tokenizer) != len(expected):
        return f"it has {len(tokenizer)} tokens, expected {len(expected)}"
    for name in (*_SPECIAL, "chat_template"):
        if getattr(tokenizer, name) != getattr(expected, name):
            return f"{name} is {brief(getattr(tokenizer, name), 60)}, expected {brief(getattr(expected, name), 60)}"
    return None


def _probes(tokenizer: Any) -> Sequence[str]:
    ids = sorted(tokenizer.get_vocab().values())
    own = tokenizer.decode(ids[:: max(1, len(ids) // 64)])
    # Special tokens also between letters and blanks, since a token may strip the blanks beside it.
    special = tokenizer.all_special_tokens
    return (*_PROBES, own, "".join(special), *(f"a{token} b\n{token}" for token in special))


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    # `verbose=False`: no warning about a text that is longer than the model.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def save_tokenizer(tokenizer: Any, folder: Path, final: Path | None = None) -> None:
    """Save a tokenizer, read it back as users and as realign do, and compare.

    If AutoTokenizer would rebuild it as another kind of tokenizer, a class that reads `tokenizer.json` is named in
    `tokenizer_config.json`. A remaining difference is a warning, since the weights of the run must still be saved.

    Args:
        tokenizer: tokenizer to save.
        folder: folder to write to.
        final: folder that `folder` is renamed to afterwards, for the warning; None if it keeps its name.
    """
    tokenizer.save_pretrained(folder)
    _forget_class(folder)
    changed = reread_difference(tokenizer, folder)
    if changed is not None and (folder / "tokenizer.json").is_file() and not _is_remote_code(tokenizer):
        _name_class(folder)
        changed = reread_difference(tokenizer, folder)
    if changed is not None:
        warnings.warn(
            f"{final or folder}: the saved tokenizer differs from the tokenizer of the run: {changed}. The save "
            "continues. Copy the tokenizer files that the run started with into this folder.",
            stacklevel=2,
        )


def reread_difference(tokenizer: Any, folder: Path) -> str | None:
    """Return how the tokenizer saved in `folder` differs when it is read back, as a phrase; None if it does not."""
    from transformers import AutoTokenizer

    trusted = _is_remote_code(tokenizer)
    try:
        with quiet_transformers():
            back = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
            changed = difference(back, tokenizer)
            # Realign reads it with `_as_in_file`, so both ways must agree with the tokenizer of the run.
            if changed is None:
                return difference(_as_in_file(str(folder), back, str(folder)), tokenizer)
    except Exception as error:  # transformers raises many kinds
        return f"AutoTokenizer cannot read it ({type(error).__name__}: {error})"
    return f"AutoTokenizer reads it as {type(back).__name__}: {changed}"


def _name_class(folder: Path) -> None:
    """Make AutoTokenizer read `tokenizer.json` as it is.

    With an `auto_map`, AutoTokenizer does not replace the class by that of the model's family. Without
    `trust_remote_code`, it then uses `tokenizer_class`, and with it, the class in the file that `auto_map` names.
    """
    config = read_object(folder / _CONFIG) or {}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": [None, f"{MODULE}.{CLASS}"]}}
    _write_config(folder, config)
    replace_text(folder / f"{MODULE}.py", _CODE)


def _forget_class(folder: Path) -> None:
    """Remove what `_name_class` wrote into the folder that the tokenizer was read from: transformers saves it again."""
    config = read_object(folder / _CONFIG) or {}
    if f"{MODULE}.{CLASS}" in json.dumps(config.get("auto_map")):
        del config["auto_map"]
        _write_config(folder, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
        remove_file(folder / f"{MODULE}.py")


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
    replace_text(folder / _CONFIG, f"{text}\n")


@runtime_checkable
class HasVocabulary(Protocol):
    """A tokenizer whose vocabulary can be compared."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""


def check_vocabulary(role: str, own: HasVocabulary, lead: str, known: HasVocabulary) -> None:
    """Check that every token has the same id in the vocabularies of two roles, which exchange token ids and not text.

    Additional tokens of one role (padding or reserved tokens) are harmless.

    Args:
        role: the role, for messages.
        own: its tokenizer.
        lead: the role whose tokenizer tokenizes the data.
        known: the tokenizer of `lead`.

    Raises:
        ConfigError: a token has two ids, or an id two tokens. The message contains the role and the token.
    """
    start = f"models.{role}: its vocabulary differs from that of models.{lead}, but roles exchange token ids. "
    cure = f"Choose models with one tokenizer, or set models.{role}.tokenizer if this folder contains a wrong one."
    ids, lead_ids = own.get_vocab(), known.get_vocab()
    if differing := [token for token in lead_ids.keys() & ids.keys() if lead_ids[token] != ids[token]]:
        token = min(differing)
        raise ConfigError(
            f"{start}Token {token!r} has id {ids[token]} in models.{role} and {lead_ids[token]} in models.{lead} "
            f"({len(differing)} tokens differ). {cure}"
        )
    words, lead_words = _words(own), _words(known)
    if unlike := [i for i in lead_words.keys() & words.keys() if lead_words[i] != words[i]]:
        i = min(unlike)
        raise ConfigError(
            f"{start}Id {i} is {words[i]!r} in models.{role} and {lead_words[i]!r} in models.{lead} ({len(unlike)} ids "
            f"differ). {cure}"
        )


def _words(tokenizer: Any) -> Mapping[int, str]:
    """Return the ids and tokens of a vocabulary, without added tokens such as padding and reserved ones."""
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return {i: token for token, i in tokenizer.get_vocab().items() if token not in added}


def check_source(source: TokenizerSource, model_path: str) -> None:
    """Check a tokenizer before anything is loaded; `model_path` is the path of the role's model, checked before."""
    path = _check_tokenizer(source.key, source.path, _cure(source))
    if not Path(path).is_dir() and source.path != model_path:
        check_hub(source.key, path, "tokenizer_config.json")


def read_source(name: str, source: TokenizerSource, words: int) -> Any:
    """Read a tokenizer, and check that it fits a model of `words` tokens.

    Args:
        name: the role of the model, for messages.
        source: where the tokenizer is.
        words: number of rows of the model's embedding.

    Raises:
        DataError: the tokenizer cannot be read, or has ids that the model does not have.
    """
    tokenizer = read_tokenizer(source.key, source.path, trust_remote_code=source.trust_remote_code, cure=_cure(source))
    if (largest := max(tokenizer.get_vocab().values(), default=-1)) >= words:  # ids can have gaps
        raise DataError(
            f"models.{name}: the tokenizer of {source.key}={source.path!r} has ids up to {largest}, but the model has "
            f"only {words} tokens. Set models.{name}.tokenizer to the tokenizer of the model."
        )
    return tokenizer


def check_inherited(name: str, source: TokenizerSource, tokenizer: Any, own: str, *, trust_remote_code: bool) -> None:
    """Check that the tokenizer of another role agrees with the one in the folder of the model, if that has one.

    Args:
        name: the role of the model, for messages.
        source: where the tokenizer of the other role is.
        tokenizer: that tokenizer.
        own: folder or hub name with the tokenizer of the model.
        trust_remote_code: whether to run code in `own`.
    """
    if source.path != own and has_tokenizer(own):
        expected = read_tokenizer(f"models.{name}.path", own, trust_remote_code=trust_remote_code)
        check_vocabulary(name, expected, source.role, tokenizer)


def _cure(source: TokenizerSource) -> str:
    """Return the end of the message about a folder without a tokenizer."""
    return "" if source.key.endswith(".tokenizer") else f" Set models.{source.role}.tokenizer to a tokenizer."
