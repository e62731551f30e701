"""Test the layout of the package: no import cycles between files, and tests mirror the package."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

from realign.api import ModelInterface
from tests.interfaces.declared import trainers
from tests.syntax_trees import trees_of

ROOT = Path(__file__).resolve().parent.parent


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of `known` that a file imports, including imports in functions and for types only."""
    name = module_of(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                modules.add(inner if inner in known else base)
    return {other for other in modules if other in known and other != name}


def test_no_file_imports_itself_by_way_of_others():
    known = {module_of(path) for path in (ROOT / "realign").rglob("*.py")}
    files = trees_of(ROOT / "realign", r"\bimport\b")
    sorter = graphlib.TopologicalSorter({module_of(path): imports(path, tree, known) for path, tree in files})
    sorter.prepare()  # raises CycleError with the names of the files


def test_every_folder_of_tests_is_a_package_of_the_project():
    ours = {"benchmarks", "docs", "examples", "fuzz", "virtual_cuda"}
    for folder in {path.parent for path in (ROOT / "tests").rglob("*.py")} - {ROOT / "tests"}:
        place = folder.relative_to(ROOT / "tests")
        if place.parts[0] not in ours:
            assert (ROOT / "realign" / place).is_dir(), place


def test_no_test_module_is_imported_by_another():
    """What several test modules need is a fixture, or a module without tests."""
    known = {module_of(path) for path in (ROOT / "tests").rglob("*.py")}
    imports_of_tests = {
        f"{path.relative_to(ROOT)} imports {other}"
        for path, tree in trees_of(ROOT / "tests", r"^\s*(from|import)\b.*\btest_|^\s+test_\w+,$")
        for other in imports(path, tree, known)
        if other.rpartition(".")[2].startswith("test_")
    }
    assert imports_of_tests == set()


def test_no_assert_computes_something_that_the_code_needs():
    """`python -O` removes asserts, so the only check of a setting must not be the side effect of one."""
    asserts = [
        f"{path}:{node.lineno}"
        for path, tree in trees_of(ROOT / "realign", r"^ *assert (.*:=|.*[(\[{]$|await\b|[\w.]+ *($|[,#]))")
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        and (
            isinstance(node.test, ast.Attribute | ast.Name | ast.Await)
            or any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test))
        )
    ]
    assert asserts == []


def test_runtime_and_config_never_ask_for_the_class_of_an_interface():
    """They read what an interface declares, so that an interface of a user can do all that a shipped one does."""
    known = {cls.__name__ for cls in trainers()} | {ModelInterface.__name__}
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {part.id}"
        for package in ("runtime", "config")
        for path, tree in trees_of(ROOT / "realign" / package, rf"\b({'|'.join(known)})\b")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("isinstance", "issubclass")
        for part in ast.walk(node.args[1])
        if isinstance(part, ast.Name) and part.id in known
    ]
    assert asked == []


def test_only_engines_and_commands_name_the_class_of_an_engine_or_its_spec():
    """Runtime, samplers and caches go by the contract in `realign.api`, which an engine of a user has too."""
    known = {"TransformersEngine", "TransformersModel", "ShardedEngine"}
    own = ("engines/__init__.py", "engines/transformers_model.py", "engines/training/", "engines/distributed/", "cli/")
    named = {
        path.relative_to(ROOT / "realign").as_posix()
        for path, tree in trees_of(ROOT / "realign", rf"\b({'|'.join(known)})\b")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in known)
        or (isinstance(node, ast.Attribute) and node.attr in known)
        or (isinstance(node, ast.alias) and node.name in known)
    }
    assert {path for path in named if not path.startswith(own)} == set()


def test_only_the_model_gives_new_weights_to_samplers():
    """Whoever changes weights calls `Model.publish_weights`, and need not know which samplers have copies."""
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees_of(ROOT / "realign", r"\.update\(.*engine")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update"
        for argument in node.args
        if isinstance(argument, ast.Attribute) and argument.attr == "engine"
    ]
    assert {call.rpartition(":")[0] for call in calls} == {"realign/api/model.py"}
