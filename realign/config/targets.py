"""Import the object that a `_target_` names, check its kind, and suggest alternatives in errors."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

from realign.config.errors import ConfigError, one_line, suggest

OURS = "realign"
PACKAGES = ("interfaces", "engines", "data", "runtime")
"""Packages of realign that contain components."""
NEAR = 0.75
"""Minimum similarity (0 to 1) of two names to suggest one for the other."""
EXTRAS: Mapping[str, str] = MappingProxyType({"bitsandbytes": "realign-rl[quantization]"})
"""Extra of realign that installs an optional package with components."""
EXAMPLE_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "ModelInterface": "realign.interfaces.grpo.GRPOActorInterface",
        "reward": "realign.interfaces.rule_reward.RuleRewardInterface",
        "ModelSpec": "realign.engines.TransformersModel",
        "DataSpec": "realign.data.PromptData",
        "DataflowGraph": "realign.interfaces.grpo.dataflow",
        "Evaluator": "realign.runtime.Evaluation",
        "TrackerSpec": "realign.runtime.TensorBoard",
    }
)
"""Example component of realign for each kind of component, or for each name of a role."""
Fits: TypeAlias = Callable[[Any], bool]
"""Predicate for the objects that a config key accepts."""


def import_target(path: Any, where: str, fits: Fits | None = None) -> Any:
    """Import the object at a dotted path. Errors suggest the nearest existing object.

    Args:
        path: Import path of the object.
        where: Config key, for messages.
        fits: Predicate for the objects to suggest; None accepts all.

    Raises:
        ConfigError: the module or attribute does not exist, or the module lacks a package or has invalid syntax.
        Exception: any other exception that the module raises, with the key as a note.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{where} must be an import path such as package.module.Class, found {path!r}")
    if path.split(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{where}: {path} is part of Python's standard library, which has no components. Nothing was imported."
        )
    found: Any = None
    done = ""
    for part in path.split("."):
        name = f"{done}.{part}" if done else part
        step = getattr(found, part, None) if found is not None else None
        if step is None and (found is None or isinstance(found, ModuleType)):
            step = _import(name, where)
        if step is None:
            if name in EXTRAS:
                raise ConfigError(f"{where}={path}: {name} is not installed. Run pip install {EXTRAS[name]!r}.")
            place = done or "the current directory and the installed packages"
            raise ConfigError(f"{where}: there is no {part!r} in {place}{_hint(path, part, found, fits)}")
        found, done = step, name
    return found


def _import(name: str, where: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise ConfigError(f"{where}: importing {name} failed: {one_line(error)}") from error
    except SyntaxError as error:
        raise ConfigError(f"{where}: importing {name} failed: {one_line(error)}") from error
    except SystemExit as error:
        raise ConfigError(f"{where}: importing {name} failed: the module calls sys.exit({error})") from error
    except Exception as error:  # a bug in the module: its traceback is printed
        error.add_note(f"while importing {name} for {where}")
        raise


def _contents(found: Any, fits: Fits | None) -> Iterable[str]:
    """Return valid continuations of an import path: submodules, and accepted objects defined in `found`."""
    if found is None:
        return (module.name for module in pkgutil.iter_modules())
    if not isinstance(found, ModuleType):
        return (name for name in vars(found) if not name.startswith("_"))
    modules = (module.name for module in pkgutil.iter_modules(getattr(found, "__path__", [])))
    return [*_defined(found, fits), *(name for name in modules if not name.startswith("_"))]


def _defined(module: ModuleType, fits: Fits | None) -> list[str]:
    """Return the names of the accepted classes and functions that a module defines or lists in `__all__`."""
    offered = getattr(module, "__all__", ())
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or name in offered)
        and (fits is None or fits(value))
    ]


def beside(path: str, fits: Fits, kind: str) -> str:
    """Return the end of a message about an object of the wrong kind: accepted objects of the same module.

    If the module has none, the message ends with an example from realign.

    Args:
        path: Import path of the object.
        fits: Predicate for the accepted objects.
        kind: Name of the required kind.
    """
    module = sys.modules.get(path.rpartition(".")[0])
    names = sorted(_defined(module, fits)) if module is not None else []
    if module is not None and names:
        return f" ({', '.join(names)} of {module.__name__} would fit)"
    return such_as(kind)


def such_as(kind: str, where: str = "") -> str:
    """Return the end of a message about a required kind of component at the key `where`: an example from realign."""
    example = EXAMPLE_TARGETS.get(where.rpartition(".")[2]) or EXAMPLE_TARGETS.get(kind)
    return f", such as {example}" if example and kind in EXAMPLE_TARGETS else ""


def _hint(path: str, part: str, found: Any, fits: Fits | None) -> str:
    """Return the end of a message about an import path whose name `part` does not exist in `found`."""
    names = list(_contents(found, fits))
    here = difflib.get_close_matches(part, names, n=1, cutoff=NEAR)
    elsewhere = _elsewhere(path, found, fits) if fits is not None else None
    if elsewhere is not None and (not here or elsewhere.rpartition(".")[2] == part):
        return f"; did you mean {elsewhere}?"
    return suggest(part, names) if names else ""


def _elsewhere(path: str, found: Any, fits: Fits) -> str | None:
    """Return the import path of the accepted object of realign whose name is nearest to the last name of `path`.

    `path` may be a bare name. Searches only modules of realign, because importing other modules can have side effects.
    """
    packages: tuple[str, ...]
    if found is None:
        packages = PACKAGES if "." not in path else ()
    else:
        package = getattr(found, "__name__", "") if hasattr(found, "__path__") else getattr(found, "__package__", None)
        packages = tuple(name for name in PACKAGES if package == f"{OURS}.{name}")
    known: dict[str, str] = {}
    for package in packages:
        for info in pkgutil.iter_modules(importlib.import_module(f"{OURS}.{package}").__path__, f"{OURS}.{package}."):
            module = importlib.import_module(info.name)
            own = (name for name in _defined(module, fits) if getattr(module, name).__module__ == info.name)
            known |= {name: f"{info.name}.{name}" for name in own}
    near = difflib.get_close_matches(path.rpartition(".")[2], known, n=1, cutoff=NEAR)
    return known[near[0]] if near else None


def misfit(cls: type, kind: Any) -> str | None:
    """Return why a class is not of the required kind, as the end of a message; None if it is."""
    if not getattr(kind, "_is_protocol", False):
        if not (inspect.isclass(kind) and issubclass(cls, kind)):
            return ""
        members = inspect.getmembers_static(cls)
        missing = [name for name, member in members if getattr(member, "__isabstractmethod__", False)]
        return f": it does not implement {', '.join(missing)}" if missing else None
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        wanted = inspect.signature(method)
        positional = [p.name for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(getattr(cls, name)).bind(*positional, **keywords)
        except (AttributeError, TypeError, ValueError):
            call = ", ".join([*positional[1:], *(f"{keyword}=" for keyword in keywords)])
            return f": it needs a method {name}({call})"
    return None
