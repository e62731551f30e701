"""`ResponseReader`: content, reasoning and tool calls of a sampled response.

The parser is `ResponseParser` of transformers, which interprets the response template of a tokenizer. It reports the
regions of a text while the text grows: reasoning, content, and tool calls. Many tokenizers have no response template.
TRL contains those of many model families, and `response_template` chooses one by the text of the chat template.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realign.api.environment import ToolCall
from realign.errors import ConfigError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

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
        template = _of_file(Path(given))
    elif given == AUTO:
        template = _of_chat_template(tokenizer.chat_template)
        if template is None:
            raise ConfigError(
                f"response_template={AUTO}: TRL knows no response template for the chat template of the model. Set "
                f"the family whose format the model uses ({', '.join(_families())}), or a JSON file."
            )
    else:
        template = _of_family(given)
    try:
        tokenizer.parse_response("", template, prefix="")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"response_template={given}: invalid response template ({error}).") from error
    return template


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
    template = _of_chat_template(families[name].read_text(encoding="utf-8"))
    assert template is not None
    return template


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

    # Stands in for a tokenizer: TRL reads the first attribute, and sets the second.
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


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in response templates, as in transformers."""
_CALLS = "tool_calls"
_INCOMPLETE = "\ufffd"
"""End of a text whose last character has further bytes."""


@dataclass(frozen=True)
class ParsedResponse:
    """The parts of a response."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def can_parse(tokenizer: Any) -> bool:
    """Return whether a `ResponseReader` can find tool calls and reasoning."""
    return getattr(tokenizer, "response_template", None) is not None


def load_template(tokenizer: Any) -> ResponseTemplate | None:
    """Return the response template of a tokenizer for `ResponseReader`; None if it has none.

    Removes the alternative `$` from the ends of regions. A region always ends at the end of the text. However, `$` also
    matches the end of an unfinished text, and the parser then takes the beginning of a mark as content.

    Raises:
        ConfigError: the template is invalid.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    if not can_parse(tokenizer):
        return None
    spec: Any = copy.deepcopy(tokenizer.response_template)
    try:
        for field in spec["fields"].values():
            if "close_pattern" in field:
                field["close_pattern"] = field["close_pattern"].removesuffix("|$")
        return load_response_template(spec)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"response_template: the response template of the tokenizer is invalid ({error}). Set another one."
        ) from error


@dataclass
class _Region:
    """A part of a response."""

    field: str
    """Name of its field in the response template."""
    text: str = ""
    prefilled: int = 0
    """Number of characters at the beginning of `text` that belong to the prompt."""
    value: Any = None
    """Parsed text of a region that has ended."""
    ended: bool = False


class ResponseReader:
    """Parses a response while it grows.

    Args:
        template: the response template.
        prompt: text of the prompt, which may contain the beginning of a region, such as of the reasoning.
        tools: tools of the request.
        special: texts of special tokens, which content never contains.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special: Iterable[str] = (),
    ) -> None:
        self._template, self._prompt, self._special = template, prompt, tuple(special)
        self._tools: list[Any] | None = list(tools) if tools else None
        self._text = ""
        self._failed = False
        self._parser, self._regions = self._start_parser()

    def part(self, text: str) -> ParsedResponse:
        """Return the parts of an unfinished response that further text does not change.

        Args:
            text: the text so far, including special tokens.
        """
        stable = text.rstrip(_INCOMPLETE)
        if stable.startswith(self._text):
            self._read(stable)
        return self._parse()

    def whole(self, text: str, plain: str) -> ParsedResponse:
        """Return the parts of the finished response.

        Args:
            text: the whole text, including special tokens.
            plain: the whole text without special tokens.
        """
        if not text.startswith(self._text):  # the decoded text changed before its end
            self._text, self._failed = "", False
            self._parser, self._regions = self._start_parser()
        self._read(text)
        if not self._failed:
            try:
                _collect(self._parser.finalize()[1], self._regions)
            except Exception:  # see `_read`
                self._failed = True
        parsed = self._parse()
        return parsed if parsed.content or parsed.tool_calls or parsed.reasoning else ParsedResponse(plain)

    def _start_parser(self) -> tuple[ResponseParser, list[_Region]]:
        from transformers.utils.chat_parsing import ResponseParser

        try:
            parser = ResponseParser(self._template, prefix=self._prompt, tools=self._tools)
        except Exception:  # the prompt contains text that the parser rejects, such as an invalid tool call
            parser = ResponseParser(self._template, prefix="", tools=self._tools)
        regions = _collect(parser.initial_events, [])
        for region in regions:
            region.prefilled = len(region.text)
        return parser, regions

    def _read(self, text: str) -> None:
        """Parse a text that begins with the text so far. After a failure, nothing is parsed."""
        known, self._text = len(self._text), text
        if self._failed:
            return
        try:
            events = self._parser.feed(text[known:])
        except Exception:  # a policy can write anything, and the parsers raise many types of errors
            self._failed = True
            self._regions = self._regions_before_failure(known)
        else:
            _collect(events, self._regions)

    def _regions_before_failure(self, known: int) -> list[_Region]:
        """Return the regions of the longest beginning of the text that can be parsed; the next character ends one.

        Args:
            known: length of a beginning that can be parsed.
        """
        fails, parsed = len(self._text), self._regions_of(known) or []
        # Bisection: `known` characters can be parsed, `fails` characters cannot.
        while fails - known > 1:
            middle = (known + fails) // 2
            regions = self._regions_of(middle)
            if regions is None:
                fails = middle
            else:
                known, parsed = middle, regions
        return parsed

    def _regions_of(self, length: int) -> list[_Region] | None:
        """Return the regions of a beginning of the text; None if the parser fails."""
        parser, regions = self._start_parser()
        try:
            return _collect(parser.feed(self._text[:length]), regions)
        except Exception:  # see `_read`
            return None

    def _parse(self) -> ParsedResponse:
        contents: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for number, region in enumerate(self._regions):
            region_calls = self._calls_of(region)
            if region_calls is None:  # an invalid region
                if number and self._regions[number - 1].field == "content":  # keeps the white space in between
                    contents.pop()
                    number -= 1
                contents.append(self._plain_from(number).strip())
                break
            calls += region_calls
            if region.field in _REASONING:
                reasoning.append(self._text_of(region))
            elif region.field == "content":
                contents.append(self._text_of(region))
        return ParsedResponse(_join(contents), tuple(calls), _join(reasoning) or None)

    def _calls_of(self, region: _Region) -> list[ToolCall] | None:
        """Return the tool calls of a region; None if the region is invalid, so that its text is content."""
        if not region.ended:
            return None if self._failed else []
        if region.field != _CALLS:
            return []
        try:
            return list(map(_tool_call, region.value if isinstance(region.value, list) else [region.value]))
        except Exception:  # the value has any type
            return None

    def _text_of(self, region: _Region) -> str:
        """Return the text of a region, without white space at its end that may not be part of it."""
        if region.ended:
            return str(region.value)
        strips = self._template.fields[region.field].content_args.get("strip", True)
        return region.text.strip() if strips else region.text

    def _plain_from(self, number: int) -> str:
        """Return the text from the beginning of a region on, without special tokens."""
        place = 0
        for region in self._regions[:number]:
            body = region.text[region.prefilled :]
            if (start := self._text.find(body, place)) >= 0:
                place = start + len(body)
        region = self._regions[number]
        opening = self._template.fields[region.field].open_re
        if opening is None:
            place = max(place, self._text.find(region.text[region.prefilled :], place))
        elif (match := opening.search(self._text, place)) is not None:
            place = match.start()
        plain = self._text[place:]
        return re.sub("|".join(map(re.escape, self._special)), "", plain) if self._special else plain


def _collect(events: Iterable[Mapping[str, Any]], regions: list[_Region]) -> list[_Region]:
    """Add the events of a parser to its regions."""
    for event in events:
        if event["type"] == "region_open":
            regions.append(_Region(event["field"]))
        elif event["type"] == "region_chunk":
            regions[-1].text += event["text"]
        else:
            regions[-1].value, regions[-1].ended = event["value"], True
    return regions


def _join(parts: Sequence[str]) -> str:
    """Return the parts that are not empty, in separate lines."""
    return "\n".join(filter(None, parts))


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    return ToolCall(str(function["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
