"""`response_template`: the description by which transformers finds reasoning and tool calls in responses of a model.

Transformers parses responses with the response template of the tokenizer (`tokenizer.parse_response`). Many tokenizers
have none. TRL contains response templates of many model families, and chooses one by the text of the chat template.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realign.errors import ConfigError

AUTO = "auto"
"""Setting that chooses the response template by the chat template."""


def response_template(tokenizer: Any, given: str) -> dict[str, Any] | None:
    """Return the response template for a tokenizer; None if it has none and no other one is requested.

    Args:
        tokenizer: tokenizer of transformers.
        given: empty: the tokenizer's own one; `auto`: otherwise the one that TRL has for the same chat template; a
            family, such as `qwen3`: the one that TRL has for this family; or the path of a JSON file.

    Raises:
        ConfigError: the template cannot be found or is invalid, or the extra `tools` is missing.
    """
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if not given or (given == AUTO and own is not None):
        return own
    if given.endswith(".json"):
        found = _of_file(Path(given))
    elif given == AUTO:
        found = _of_chat_template(tokenizer.chat_template)
        if found is None:
            raise ConfigError(
                f"response_template={AUTO}: TRL knows no response template for the chat template of the model. Set "
                f"the family whose format the model uses ({', '.join(_families())}), or a JSON file."
            )
    else:
        found = _of_family(given)
    try:
        tokenizer.parse_response("", found, prefix="")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"response_template={given}: invalid response template ({error}).") from error
    return found


def fits(template: Mapping[str, Any], prompt: str) -> bool:
    """Return whether a prompt contains the text after which a response template expects a response."""
    literals = template.get("start_anchor", ())
    if isinstance(literals, str):
        return literals in prompt
    pattern = template.get("start_anchor_pattern")
    return any(text in prompt for text in literals) or (pattern is not None and bool(re.search(pattern, prompt)))


def _of_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"response_template={path}: cannot read the file as JSON ({error}).") from error


def _of_family(name: str) -> dict[str, Any]:
    families = _families()
    if name not in families:
        raise ConfigError(
            f"response_template={name}: unknown family. Set one of {', '.join(families)}, or a file that ends in .json."
        )
    found = _of_chat_template(families[name].read_text(encoding="utf-8"))
    assert found is not None
    return found


def _families() -> dict[str, Path]:
    """Return the chat templates in TRL that have a response template, by name."""
    _check_installed()
    import trl

    folder = Path(str(trl.__file__)).parent / "chat_templates"
    known = {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    return {
        name: path for name, path in known.items() if _of_chat_template(path.read_text(encoding="utf-8")) is not None
    }


def _of_chat_template(text: str | None) -> dict[str, Any] | None:
    """Return the response template that TRL has for a chat template; None if TRL does not know it."""
    _check_installed()
    from trl.chat_template_utils import add_response_schema

    class Tokenizer:
        chat_template = text
        response_template: dict[str, Any] | None = None

    tokenizer = Tokenizer()
    try:
        add_response_schema(tokenizer)
    except ValueError:
        return None
    return copy.deepcopy(tokenizer.response_template)


def _check_installed() -> None:
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("response_template: the package trl is not installed. Run pip install 'realign-rl[tools]'.")
