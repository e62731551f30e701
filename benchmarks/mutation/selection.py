"""Test files that import a module, found statically: by its name, or by a name that it defines and others re-export."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


class Project:
    """The modules of a package, and the test files beside it."""

    def __init__(self, root: Path, package: str) -> None:
        """Find all files.

        Args:
            root: folder of the project.
            package: name of the package, a folder of `root`.
        """
        self.root, self.package = root, package
        self.modules: dict[str, Path] = {}
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            self.modules[name.removesuffix(".__init__")] = path
        self.tests = [path.relative_to(root).as_posix() for path in sorted((root / "tests").rglob("test_*.py"))]
        self.resolve, self.imported, self.imports = cache(self._resolve), cache(self._imported), cache(self._imports)

    def module(self, file: str) -> str:
        """Return the name of the module in a file of the package."""
        return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")

    def mirror(self, file: str) -> str:
        """Return the path of the test file of the same name."""
        inner = Path(file).relative_to(self.package)
        return (Path("tests") / inner.parent / f"test_{inner.name}").as_posix()

    def tests_of(self, file: str) -> list[str]:
        """Return the test files that import a module, its mirror first.

        Without a mirror, test files that import a module which imports this one are included.
        """
        module, mirror = self.module(file), self.mirror(file)
        targets = {module}
        if mirror not in self.tests:
            targets |= {name for name, path in self.modules.items() if module in self.imported(path) - {name}}
            targets -= {name for name in targets if self.modules[name].name == "__init__.py"}
        found = {test for test in self.tests if targets & self.imported(self.root / test)} | {mirror}
        return sorted(found & set(self.tests), key=lambda test: (test != mirror, test))

    def _imported(self, path: Path) -> frozenset[str]:
        """Return the modules of the package whose names, or whose defined names, a file imports."""
        found, packages = set(), dict[str, str]()
        for module, name, bound in self.imports(path):
            target = self.resolve(module, name) if name else module
            found |= {target, module} & self.modules.keys()
            packages[bound] = target
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id=bound), attr=name) if packages.get(bound) in self.modules:
                    found.add(self.resolve(packages[bound], name))
        return frozenset(name for name in found if name in self.modules)

    def _imports(self, path: Path) -> list[tuple[str, str, str]]:
        """Return module, imported name ("" for the module itself) and bound name of every import from the package."""
        own = path.relative_to(self.root).with_suffix("").parts
        found = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [(each.name, "", each.asname or each.name) for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = own[: len(own) - node.level] if node.level else ()
                module = ".".join([*parents, *([node.module] if node.module else [])])
                found += [(module, each.name, each.asname or each.name) for each in node.names]
        return [each for each in found if each[0] in self.modules]

    def _resolve(self, module: str, name: str) -> str:
        """Return the module that defines a name which another one exports; "" if there is none in the package."""
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}"
        for origin, imported, bound in self.imports(self.modules[module]):
            if bound == name and (origin, imported) != (module, name):
                return self.resolve(origin, imported) if imported else origin
        return module
