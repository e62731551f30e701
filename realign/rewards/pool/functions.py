"""What a reward function can be, and how it is loaded.

The names of a function's arguments say what it scores, and what it gets (`realign.rewards.pool.binding`). Its name is
`package.module:function`, `path/to/file.py:function`, or a URL (`load_function`). A `Prepared` function examines the
machine or its server once, before the run loads a model.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from realign.errors import ConfigError
from realign.rewards.pool.binding import Binding, bind
from realign.rewards.pool.http import HttpReward


class Prepared(ABC):
    """Base class of reward functions that the pool prepares in the process of the run.

    Workers receive the result as a pickle, so they must be able to import its class by the name of its module.
    """

    @abstractmethod
    def prepare(self) -> Prepared:
        """Return the function that the workers call.

        Raises:
            ConfigError: the machine lacks what the settings require.
            TransientError: a server that the function needs does not accept connections.
        """

    @property
    @abstractmethod
    def note(self) -> str:
        """What `prepare` found, for the launch table; empty for nothing to say."""

    @abstractmethod
    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> Any:
        """Return the reward of one response, or None; can be an `async def`."""


RewardFunction: TypeAlias = Callable[..., Any]
"""A function with arguments of one `Convention`; `def` or `async def`."""

_SESSION = "session:"
"""Start of the name of a function that only one Python session has."""


class SessionFunction(str):
    """The name of a reward function of a Python session, such as a notebook, together with the function.

    Worker processes cannot import such a function, so it runs in a thread of the run. The name ends in a hash of the
    source. So everything that reads a config sees text, and resuming refuses a function that has changed.
    """

    function: RewardFunction

    @classmethod
    def of(cls, function: RewardFunction) -> SessionFunction:
        """Return the name of a function, with the function."""
        label = name_of(function).rpartition("<locals>.")[2]
        digest = hashlib.sha256((source_of(function) or _describe_code(function)).encode()).hexdigest()[:8]
        name = cls(f"{_SESSION}{label}@{digest}")
        name.function = function
        return name

    @property
    def label(self) -> str:
        """Name of the function itself."""
        return self.removeprefix(_SESSION).rpartition("@")[0]


def name_of(function: RewardFunction) -> str:
    """Return the name of a function, or of the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def source_of(function: RewardFunction) -> str:
    """Return the source code of a function, or of the class of a callable object; empty if Python has none."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):  # typed into a shell or made by exec, or written in C
        return ""


def _describe_code(function: RewardFunction) -> str:
    """Return a text that differs if the compiled code of a function differs; empty for a callable object."""

    def text(code: CodeType) -> str:
        constants = [text(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
        return f"{code.co_code.hex()} {code.co_names} {constants}"

    return text(function.__code__) if isinstance(function, FunctionType) else ""


_FORMS = "'package.module:function', 'path/to/file.py:function'"


def load_function(name: str, *, dense: bool = False, check: bool = True) -> Callable[..., Any]:
    """Import the reward function called `name`.

    A file is imported once per process, under a unique module name. It therefore needs no package and may have the name
    of an installed module. Its folder is appended to `sys.path`, so it can import other files of the folder. A URL
    becomes an `HttpReward`; no request is sent.

    Args:
        name: name of the function.
        dense: whether the function must accept the tokens of the response.
        check: whether to check the function's arguments.

    An exception that the module raises on import propagates, with a note that names the function.

    Raises:
        ConfigError: the module, file or function does not exist (the message lists existing and similar names), or the
            names of its arguments belong to no tool.
    """
    if "://" in name:
        return HttpReward(name)
    if name.startswith(_SESSION):
        raise ConfigError(
            f"reward function {name!r} was defined in a Python session, and no file has it. Continue the run there "
            "with realign.train(..., resume='auto'), or move the function to a file."
        )
    function: Callable[..., Any] = load_object(name, "reward function", f"{_FORMS} or 'http://host:port/path'")
    if check:
        check_function(function, name, dense=dense)
    return function


def load_object(name: str, kind: str, forms: str) -> Any:
    """Import the object `package.module:attribute` or `path/to/file.py:attribute`, like `load_function`.

    Args:
        name: name of the object.
        kind: kind of object, for messages.
        forms: valid forms of its name, for messages.

    An exception that the module raises on import propagates, with a note that names the object.

    Raises:
        ConfigError: the module, file or attribute does not exist (the message lists existing and similar names).
    """
    what = f"{kind} {name!r}"
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        raise ConfigError(f"{what}: the name must have the form {forms}.")
    if place.split(".")[0] in sys.stdlib_module_names and not place.endswith(".py"):
        raise ConfigError(f"{what} is in Python's standard library, which contains none. Nothing was imported.")
    module = _import_file(Path(place), what) if place.endswith(".py") else _import_module(place, what)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            own = getattr(value, "__name__", place)
            there = sorted(  # names defined in the module, without imported ones
                n
                for n, member in vars(value).items()
                if callable(member) and not n.startswith("_") and getattr(member, "__module__", own) == own
            )
            raise ConfigError(f"{what}: {place!r} has no {part!r}; {_nearest(part, there)}")
        value = getattr(value, part)
    return value


def is_async(function: Any) -> bool:
    """Return whether calling the function returns a coroutine: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_function(function: Any, name: str, *, dense: bool = False) -> Binding:
    """Return how the pool calls `function`.

    Raises:
        ConfigError: it is no function, or cannot be called by the names of its arguments.
    """
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"reward function {name!r} is a {type(function).__name__}; expected a function.")
    home = str(getattr(function, "__module__", None) or "").split(".")[0]
    if inspect.isroutine(function) and home in sys.stdlib_module_names:
        raise ConfigError(
            f"reward function {name!r} is in Python's standard library, which contains none. Use a function of a "
            "separate file."
        )
    if dense and is_async(function):
        raise ConfigError(
            f"reward function {name!r} is async, which dense rewards do not support. Define it with `def`."
        )
    return bind(function, name, dense=dense)


@contextmanager
def _noting(what: str) -> Iterator[None]:
    """Add a note to an exception of an imported module, so that it keeps its traceback and names the object."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError(
            f"{what}: its module exits while it is imported. Put code that must not run on import under "
            "`if __name__ == '__main__':`."
        ) from error
    except Exception as error:
        error.add_note(f"while importing {what}")
        raise


def _import_module(name: str, what: str) -> ModuleType:
    try:
        with _noting(what):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but lacks a package that it imports
        file = Path(name.replace(".", "/") + ".py")
        hint = f". There is a file {str(file)!r}; use '{file}:...'" if file.is_file() else ""
        raise ConfigError(f"{what}: no module named {error.name!r}{hint}.") from error


def _import_file(path: Path, what: str) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        folder = file.parent
        if not folder.is_dir():
            raise ConfigError(f"{what}: no file {str(file)!r}; the folder {str(folder)!r} does not exist")
        near = _nearest(file.name, sorted(p.name for p in folder.glob("*.py")))
        raise ConfigError(f"{what}: no file {str(file)!r}; {near}")
    main = sys.modules["__main__"]
    if (script := getattr(main, "__file__", None)) and Path(script).resolve() == file:
        return main  # the file is the running script; importing it would run it again
    name = f"_reward_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # Before its code runs, as in a normal import: dataclasses and pickle look their module up here.
    sys.modules[name] = module
    try:
        with _noting(what):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _nearest(name: str, there: Iterable[str]) -> str:
    names = list(there)
    near = difflib.get_close_matches(name, names, n=1)
    existing = f"found {', '.join(names[:12]) or 'nothing'}" + (", ..." if len(names) > 12 else "")
    return f"{existing}; did you mean {near[0]!r}?" if near else existing
