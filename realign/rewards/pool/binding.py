"""Which arguments a user's function gets: by their names, which are those of one tool.

`CONVENTIONS` says what each tool passes to a reward function. `bind` finds the one whose names a function has. Every
other name is a column of the row. docs/guides/rewards.md has the same table for readers.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from realign.errors import ConfigError


class RewardScope(StrEnum):
    """How many responses a reward function scores in one call."""

    response = "response"
    """One response."""
    group = "group"
    """All responses to one prompt: returns a list with a number or None for each."""
    batch = "batch"
    """All responses of the batch: returns a list with a number or None for each."""


class Scored(NamedTuple):
    """A response, and what belongs to it."""

    prompt: str
    response: str
    row: Mapping[str, Any]
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()


def _messages(of: Scored) -> list[Any] | None:
    """Return the prompt as chat messages; None if the row has none whose last one is in the prompt."""
    names = ("prompt",) if "prompt" in of.row else ("messages", "conversations", "conversation")
    given = next((of.row[name] for name in names if name in of.row), None)
    if not isinstance(given, list) or not all(isinstance(m, Mapping) and "role" in m for m in given):
        return None
    end = len(given)  # without an answer, which the prompt does not continue
    while end and given[end - 1]["role"] == "assistant" and not of.prompt.endswith(_content(given[end - 1])):
        end -= 1
    return given[:end] if end and _content(given[end - 1]) in of.prompt else None


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def _prompt(of: Scored) -> Any:
    messages = _messages(of)
    return of.prompt if messages is None else messages[: len(messages) - _starts_answer(messages)]


def _completion(of: Scored) -> Any:
    messages = _messages(of)
    if messages is None:
        return of.response
    start = str(messages[-1]["content"]) if _starts_answer(messages) else ""
    return [{"role": "assistant", "content": start + of.response}]


def _starts_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt ends with the start of the answer, which TRL passes as part of the answer."""
    return messages[-1]["role"] == "assistant"


def _ground_truth(of: Scored) -> Any:
    nested = of.row.get("reward_model")
    return nested["ground_truth"] if isinstance(nested, Mapping) else of.row["ground_truth"]


def _extra_info(of: Scored) -> Any:
    info = of.row.get("extra_info")
    return {} if info is None else info


def _info(of: Scored) -> Any:
    info = of.row["info"]
    with suppress(TypeError, ValueError):  # verifiers stores it as JSON
        return json.loads(info)
    return info


def _column(*names: str) -> Callable[[Scored], Any]:
    return lambda of: of.row[next((name for name in names if name in of.row), names[0])]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a tool calls reward functions."""

    tool: str
    arguments: Mapping[str, Callable[[Scored], Any]]
    """Names that the tool passes, and what they are of a response. A `KeyError` means that the row lacks it."""
    needs: tuple[frozenset[str], ...]
    """Sets of names; a function of the tool has at least one name of each. The last ones are the response."""
    scope: RewardScope = RewardScope.response
    lists: frozenset[str] | None = frozenset()
    """Arguments that are lists with one element per response; None: all of them, columns too."""
    columns: bool = True
    """Whether the tool passes columns of the row to `**kwargs`, and to arguments with a default."""
    lacking: frozenset[str] = frozenset()
    """Names that the tool passes, but realign has no such thing."""
    hidden: frozenset[str] = frozenset()
    """Columns that the tool does not pass to `**kwargs`."""
    special_tokens: bool = False
    """Whether texts contain special tokens."""
    result: str = ""
    """Key of the reward, where a function may return a mapping."""

    @property
    def signature(self) -> str:
        """The arguments as text."""
        return f"({', '.join(self.arguments)})"


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)


_TEXT: Mapping[str, Callable[[Scored], Any]] = {
    "prompt": lambda of: of.prompt,
    "response": lambda of: of.response,
    "row": lambda of: of.row,
}
_NO_TOKENS = _names("tokens")
OURS = "realign"
CONVENTIONS = (
    Convention(tool=OURS, arguments=_TEXT, needs=(_names("response"),), lacking=_NO_TOKENS),
    Convention(
        tool=OURS,
        arguments={"prompt": _TEXT["prompt"], "responses": _TEXT["response"], "row": _TEXT["row"]},
        needs=(_names("responses"),),
        scope=RewardScope.group,
        lists=_names("responses"),
        lacking=_NO_TOKENS,
    ),
    Convention(
        tool=OURS,
        arguments={"prompts": _TEXT["prompt"], "responses": _TEXT["response"], "rows": _TEXT["row"]},
        needs=(_names("prompts", "rows"), _names("responses")),
        scope=RewardScope.batch,
        lists=None,
        lacking=_NO_TOKENS,
    ),
    Convention(
        tool="TRL",
        arguments={"prompts": _prompt, "completions": _completion, "completion_ids": lambda of: list(of.response_ids)},
        needs=(_names("completions", "completion_ids"),),
        scope=RewardScope.group,
        lists=None,
        lacking=_names("trainer_state", "log_extra", "log_metric", "environments"),
        hidden=_names("prompt", "completion"),
    ),
    Convention(
        tool="verl",
        arguments={
            "data_source": _column("data_source"),
            "solution_str": _TEXT["response"],
            "ground_truth": _ground_truth,
            "extra_info": _extra_info,
        },
        needs=(_names("solution_str"),),
        columns=False,
        lacking=_names("reward_router_address", "reward_model_tokenizer"),
        result="score",
    ),
    Convention(
        tool="verl",
        arguments={
            "data_sources": _column("data_source"),
            "solution_strs": _TEXT["response"],
            "ground_truths": _ground_truth,
            "extra_infos": _extra_info,
        },
        needs=(_names("solution_strs"),),
        scope=RewardScope.batch,
        lists=None,
        columns=False,
        result="score",
    ),
    Convention(
        tool="verifiers",
        arguments={"prompt": _prompt, "completion": _completion, "info": _info},
        needs=(_names("completion"),),
        lacking=_names("state", "parser"),
    ),
    Convention(
        tool="OpenRLHF",
        arguments={
            "queries": lambda of: of.prompt + of.response,
            "prompts": _TEXT["prompt"],
            "labels": _column("label", "labels"),
        },
        needs=(_names("queries"),),
        lists=None,
        columns=False,
        special_tokens=True,
        result="rewards",
    ),
    Convention(
        tool="AReaL",
        arguments={
            "prompt": _TEXT["prompt"],
            "completions": _TEXT["response"],
            "prompt_ids": lambda of: list(of.prompt_ids),
            "completion_ids": lambda of: list(of.response_ids),
        },
        needs=(_names("prompt", "prompt_ids"), _names("completions", "completion_ids")),
        special_tokens=True,
    ),
)
"""What each tool passes."""
_DENSE = Convention(tool=OURS, arguments={**_TEXT, "tokens": _TEXT["response"]}, needs=(_names("tokens"),))
"""How realign calls a function of dense rewards; the pool replaces `tokens`."""
_USUAL = _names("data_source", "ground_truth", "extra_info", "labels", "info")
"""Names of tools that are also usual names of columns."""
_OWNED = frozenset(name for c in CONVENTIONS for name in c.arguments) - _USUAL
_RESPONSES = frozenset().union(*(c.needs[-1] for c in CONVENTIONS))
_WORKS = "(prompt, response, row)"


@dataclass(frozen=True)
class Binding:
    """The arguments of a function, found by their names."""

    name: str
    convention: Convention
    signature: inspect.Signature
    columns: tuple[str, ...]
    """Arguments that are columns of the row."""
    required: tuple[str, ...]
    """Arguments without a default."""
    fixed: frozenset[str]
    """Arguments that `functools.partial` has set."""

    @property
    def scope(self) -> RewardScope:
        """How many responses a call scores."""
        return self.convention.scope

    @property
    def token_ids(self) -> bool:
        """Whether the function may read token ids."""
        ids = {"prompt_ids", "completion_ids"} & self.convention.arguments.keys()
        return bool(ids & self.signature.parameters.keys()) or (bool(ids) and self._rest is not None)

    @property
    def _rest(self) -> str | None:
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        return next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), None)

    @property
    def returns_list(self) -> bool:
        """Whether the function returns a list with one reward per response."""
        return self.scope is not RewardScope.response or self.convention.lists is None

    def describe_missing(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return what the function needs and no row has, with the columns that exist; empty for nothing."""
        values = [self._values([Scored("", "", row)]) for row in rows]
        for needed in self.required if rows else ():
            if not any(needed in found for found in values):
                there = sorted({str(column) for row in rows for column in row})
                near = difflib.get_close_matches(needed, [*there, *self.convention.arguments], n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                return (
                    f"reward function {self.name!r} asks for {needed!r}, which is no column. Columns: "
                    f"{', '.join(there) or 'none'}. {self.convention.tool} passes {self.convention.signature}.{hint}"
                )
        return ""

    def arguments(self, scored: Sequence[Scored], **replaced: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call for these responses; `replaced` are other values."""
        values = self._values(scored) | replaced
        named: dict[str, Any] = {name: values[name] for name in self.signature.parameters if name in values}
        if self._rest is not None:
            named[self._rest] = {name: value for name, value in values.items() if name not in self.signature.parameters}
        call = inspect.BoundArguments(self.signature, OrderedDict(named))
        return call.args, call.kwargs

    def _values(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return everything that can be passed for these responses, by name."""
        convention = self.convention
        names = {str(name): _column(name) for name in self.columns}
        if self._rest is not None and convention.columns:
            there = dict.fromkeys(str(name) for of in scored for name in of.row)
            names |= {name: _column(name) for name in there if name not in convention.hidden | convention.lacking}
        values: dict[str, Any] = {}
        for name, read in {**names, **convention.arguments}.items():
            found = [_try_read(read, of) for of in scored]
            if name not in self.fixed and any(has for has, _ in found):
                several = convention.lists is None or name in convention.lists
                values[name] = [value for _, value in found] if several else found[0][1]
        return values

    def describe(self) -> str:
        """Return how the function is called, such as `exact(completion, answer: column) as verifiers calls it`."""
        shown = []
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                shown.append(f"**{name}: columns" if self.convention.columns else f"**{name}")
            elif name in self.columns:
                shown.append(f"{name}: column")
            elif name in self.convention.arguments:
                shown.append(name)
        whose = "" if self.convention.tool == OURS else f", as {self.convention.tool} calls it"
        once = {RewardScope.response: "", RewardScope.group: ", once per prompt", RewardScope.batch: ", once per batch"}
        return f"{self.name.rpartition(':')[2].rpartition('<locals>.')[2]}({', '.join(shown)}){whose}{once[self.scope]}"


def _try_read(read: Callable[[Scored], Any], of: Scored) -> tuple[bool, Any]:
    try:
        return True, read(of)
    except KeyError:
        return False, None


def signature_of(function: Callable[..., Any], what: str) -> inspect.Signature:
    """Return the signature of a function: that of its decorator, unless this one only passes its arguments on.

    Raises:
        ConfigError: it has no names, as some functions written in C.
    """
    for follow in (False, True):
        with suppress(TypeError, ValueError):
            signature = inspect.signature(function, follow_wrapped=follow)
            kinds = {parameter.kind for parameter in signature.parameters.values()}
            if follow or kinds - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                return signature
    raise ConfigError(
        f"{what} has no names of arguments, since it is written in C. Call it from a Python function {_WORKS}."
    )


def bind(function: Callable[..., Any], name: str, *, dense: bool = False) -> Binding:
    """Return how a reward function is called, by the names of its arguments.

    Args:
        function: the function.
        name: its name, for messages.
        dense: whether it rewards every token.

    Raises:
        ConfigError: its names belong to no tool or to several, it has `*args`, or it needs something that realign does
            not have.
    """
    signature = signature_of(function, f"reward function {name!r}")
    parameters, takes = signature.parameters, f"reward function {name!r} takes {signature}"
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ConfigError(f"{takes}: arguments are passed by name, so *args would get nothing. Write {_WORKS}.")
    if dense and not ("tokens" in parameters and _OWNED & parameters.keys() <= _DENSE.arguments.keys()):
        raise ConfigError(f"{takes}, but dense=true calls it as {_DENSE.signature}.")
    convention = _DENSE if dense else _convention(parameters, takes)
    fixed = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()
    columns, required = [], []
    for own, parameter in parameters.items():
        needed = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD or own in fixed:
            continue
        if own in convention.lacking:
            if needed:
                cure = "Set dense=true" if own == "tokens" else "Give it a default, or set it with functools.partial"
                raise ConfigError(f"{takes}: realign has no {own!r}. {cure}.")
            continue
        if own not in convention.arguments and (needed or convention.columns):
            columns.append(own)
        if needed:
            required.append(own)
    return Binding(name, convention, signature, tuple(columns), tuple(required), fixed)


def _convention(names: Collection[str], takes: str) -> Convention:
    """Return the convention whose names these are."""
    known = {name: [c for c in CONVENTIONS if name in c.arguments] for name in names if name in _OWNED}
    fits = [c for c in CONVENTIONS if all(c in own for own in known.values()) and all(s & {*known} for s in c.needs)]
    if len({c.tool for c in fits}) == 1:
        return fits[0]
    if not _RESPONSES & {*known}:
        near = next((found for name in names if (found := difflib.get_close_matches(name, _RESPONSES, n=1))), [])
        hint = "".join(f" Did you mean {name!r}?" for name in near)
        forms = "; ".join(f"{c.signature} of {c.tool}" for c in CONVENTIONS)
        raise ConfigError(f"{takes}, and none of these names is the response.{hint} Write one of: {forms}.")
    whose = "; ".join(f"{name} of {' and '.join(dict.fromkeys(c.tool for c in own))}" for name, own in known.items())
    raise ConfigError(
        f"{takes}, which mixes names of several calls ({whose}). Write {_WORKS}, or all names of one tool."
    )


def named_arguments(function: Callable[..., Any], what: str, names: Collection[str]) -> tuple[str, ...]:
    """Return those of `names` that a function takes as arguments; all of them with `**kwargs`.

    Raises:
        ConfigError: it has `*args` or positional-only arguments, or one without a default that is none of `names`.
    """
    signature = signature_of(function, what)
    passed = ", ".join(names)
    for name, parameter in signature.parameters.items():
        unknown = name not in names and parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) or (
            unknown and parameter.kind is not parameter.VAR_KEYWORD
        ):
            raise ConfigError(f"{what} takes {signature}, but is called by the names ({passed}), without {name!r}.")
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return tuple(names)
    return tuple(name for name in names if name in signature.parameters)
