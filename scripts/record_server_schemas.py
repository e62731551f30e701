"""Record how vLLM and SGLang define the requests and answers that `realign.samplers.servers` uses.

    VLLM_PYTHON scripts/record_server_schemas.py vllm tests/samplers/servers/recorded_vllm.json
    python scripts/record_server_schemas.py sglang WHEEL_OR_FOLDER tests/samplers/servers/recorded_sglang.json

For vLLM the script runs in the environment of the server, and reads the OpenAPI schema of its application. SGLang is
not installed: the script reads the source in a wheel, or in a folder that contains `sglang/`. The files contain names
and types of fields only. Both projects have the license Apache-2.0.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

VLLM_PATHS = (
    "/collective_rpc",
    "/health",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/server_info",
    "/sleep",
    "/update_weight_version",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_info",
)
SGLANG_PATHS = (
    "/continue_generation",
    "/flush_cache",
    "/generate",
    "/load_lora_adapter",
    "/model_info",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/unload_lora_adapter",
    "/update_weight_version",
    "/update_weights_from_disk",
)
KEPT = ("type", "enum", "const", "minimum", "maximum", "required")
TEXT: Schema = {"type": "text"}
EMPTY: Schema = {"type": "empty"}


def record_vllm() -> Schema:
    """Return the definitions of the installed vLLM."""
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import inspect
    from argparse import Namespace
    from importlib.metadata import packages_distributions, version

    from fastapi import FastAPI
    from vllm.entrypoints.launchers.api_server.routers import register_api_routers
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    app = FastAPI()
    app.state.args = Namespace()
    register_api_routers(app.state.args, app, ("generate",))
    api = app.openapi()
    definitions = api["components"]["schemas"]
    functions = {
        name: (method, textwrap.dedent(inspect.getsource(function)))
        for name, method, function in _endpoints(app.routes)
        if name in VLLM_PATHS
    }
    paths = {}
    for name in VLLM_PATHS:
        ((method, found),) = api["paths"][name].items()
        assert functions[name][0] == method.upper()
        function = _function(functions[name][1])
        content = found.get("requestBody", {}).get("content", {}).get("application/json")
        read = _names_read(function, "body")
        body = _plain(content["schema"], definitions) if content else _any_fields(read) if read else None
        query = {x["name"]: _plain(x["schema"], definitions) for x in found.get("parameters", ())}
        query |= _any_fields(_names_read(function, "query_params"))["properties"]
        paths[name] = {"method": method.upper(), "query": query, "body": body, "answers": _answers(function)}
    response = CompletionResponse.model_json_schema()
    paths["/v1/completions"]["answers"] = [_plain(response, response["$defs"], deep=True)]
    package = packages_distributions()["vllm"][0]
    return {"server": "vllm", "version": version(package), "paths": paths}


def _endpoints(routes: Any) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield path, method and function of each route, also of included routers."""
    for route in routes:
        if hasattr(route, "endpoint") and hasattr(route, "methods"):
            yield route.path, min(route.methods), route.endpoint
        elif hasattr(route, "original_router"):
            yield from _endpoints(route.original_router.routes)


def _plain(schema: Schema, definitions: Schema, *, deep: bool = False) -> Schema:
    """Return a schema without texts, defaults and references. `deep` keeps the fields of nested objects."""
    nested = {"definitions": definitions, "deep": deep}
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        if "properties" in target and not deep and not schema.get("top", True):
            return {"type": "object"}
        return _plain(target, **nested)
    found: Schema = {key: schema[key] for key in KEPT if key in schema}
    if "properties" in schema:
        found["properties"] = {
            key: _plain({**value, "top": False}, **nested) for key, value in schema["properties"].items()
        }
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found["anyOf"] = [_plain({**value, "top": False}, **nested) for value in schema[key]]
    if "items" in schema:
        found["items"] = _plain({**schema["items"], "top": False}, **nested)
    if isinstance(schema.get("additionalProperties"), dict):
        found["values"] = _plain({**schema["additionalProperties"], "top": False}, **nested)
    return found


def _any_fields(names: list[str]) -> Schema:
    return {"type": "object", "properties": {name: {} for name in names}}


def _function(source: str) -> ast.AsyncFunctionDef | ast.FunctionDef:
    found = ast.parse(source).body[0]
    assert isinstance(found, ast.AsyncFunctionDef | ast.FunctionDef)
    return found


def _names_read(function: ast.AST, of: str) -> list[str]:
    """Return the constant names in `of.get(...)` and `of.getlist(...)`."""
    return sorted(
        call.args[0].value
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("get", "getlist")
        and ast.unparse(call.func.value).rpartition(".")[2] == of
        and isinstance(call.args[0], ast.Constant)
    )


def _answers(function: ast.AST) -> list[Schema]:
    """Return the kinds of successful answers of an endpoint: objects with certain keys, a text, or nothing."""
    assigned = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("Response"):
            continue
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        status = ast.unparse(options["status_code"]) if "status_code" in options else "200"
        if not ("200" in status or "OK" in status):
            continue
        content = options.get("content", call.args[0] if call.args else None)
        if isinstance(content, ast.Name):
            content = assigned.get(content.id, content)
        if isinstance(content, ast.Dict):
            names = sorted(_keys(content))
            found.append({**_any_fields(names), "required": names})
        else:
            found.append(EMPTY if content is None else TEXT)
    return [kind for i, kind in enumerate(found) if kind not in found[:i]] or [EMPTY]


class Source:
    """The source files of SGLang, in a wheel or in a folder."""

    def __init__(self, path: Path) -> None:
        """Open the wheel or folder."""
        self._path = path
        self.version = path.name.split("-")[1] if path.suffix == ".whl" else path.name

    def tree(self, name: str) -> ast.Module:
        """Return the syntax tree of a file below `sglang/srt`."""
        name = f"sglang/srt/{name}"
        if self._path.is_dir():
            return ast.parse((self._path / name).read_text(encoding="utf-8"))
        with zipfile.ZipFile(self._path) as wheel:
            return ast.parse(wheel.read(name))


def record_sglang(source: Source) -> Schema:
    """Return the definitions in the source of SGLang."""
    classes = _classes(source.tree("managers/io_struct.py"))
    sampling = _fields("SamplingParams", _classes(source.tree("sampling/sampling_params.py")))
    paths = {}
    for name, method, function in _sglang_endpoints(source.tree("entrypoints/http_server.py")):
        wanted = [x.annotation for x in function.args.args if x.arg == "obj" and x.annotation is not None]
        body = _fields(_class_name(wanted[0]), classes) if wanted else None
        paths[name] = {"method": method, "query": {}, "body": body, "answers": _answers(function)}
    returned = next(
        function
        for name, _, function in _sglang_endpoints(source.tree("entrypoints/http_server.py"))
        if name == "/model_info"
    )
    names = _keys_of_variable(returned, "result")
    paths["/model_info"]["answers"] = [_any_fields(names)]
    for name in ("/load_lora_adapter", "/unload_lora_adapter"):
        paths[name]["answers"] = [_fields("LoRAUpdateOutput", classes)]
    paths["/generate"]["body"]["properties"]["sampling_params"] = sampling
    meta = _keys_of_variable(source.tree("managers/tokenizer_manager.py"), "meta_info")
    reasons = _finish_reasons(source.tree("managers/schedule_batch.py"))
    facts = _any_fields(meta)
    facts["properties"]["finish_reason"] = {"anyOf": reasons}
    outputs = {"text": {"type": "string"}, "output_ids": {"type": "array"}, "meta_info": facts}
    paths["/generate"]["answers"] = [{"type": "object", "required": ["meta_info"], "properties": outputs}]
    return {"server": "sglang", "version": source.version, "paths": {name: paths[name] for name in SGLANG_PATHS}}


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _sglang_endpoints(tree: ast.Module) -> Iterator[tuple[str, str, ast.AsyncFunctionDef]]:
    """Yield path, method and function of the endpoints that are used."""
    for function in tree.body:
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        for call in function.decorator_list:
            if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Constant):
                continue
            name, kind = call.args[0].value, ast.unparse(call.func).rpartition(".")[2]
            if name in SGLANG_PATHS:
                yield name, "GET" if kind == "get" else "POST", function


def _class_name(annotation: ast.expr) -> str:
    """Return the class in `Class`, `Annotated[Class, ...]` and `Annotated[Optional[Class], ...]`."""
    while isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        annotation = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    return ast.unparse(annotation)


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> Schema:
    """Return names and types of the fields of a class and its base classes."""
    found: Schema = {"type": "object", "required": [], "properties": {}}
    for base in classes[name].bases:
        if (parent := ast.unparse(base)) in classes:
            found["properties"] |= _fields(parent, classes)["properties"]
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found["properties"][node.target.id] = _type(node.annotation)
            if node.value is None:
                found["required"].append(node.target.id)
    return found


def _type(annotation: ast.expr) -> Schema:
    """Return the schema of an annotation; that of any value for unknown ones."""
    plain = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "None": "null"}
    if isinstance(annotation, ast.Subscript):
        kind, inner = ast.unparse(annotation.value), annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if kind == "Annotated":
            return _type(parts[0])
        if kind in ("Optional", "Union"):
            extra = [{"type": "null"}] if kind == "Optional" else []
            return {"anyOf": [*(_type(part) for part in parts), *extra]}
        if kind in ("List", "Set", "list", "set"):
            return {"type": "array", "items": _type(parts[0])}
        if kind in ("Dict", "dict"):
            return {"type": "object", "values": _type(parts[1])}
        if kind == "Literal":
            return {"enum": [part.value for part in parts if isinstance(part, ast.Constant)]}
    name = ast.unparse(annotation)
    return {"type": plain[name]} if name in plain else {}


def _keys_of_variable(tree: ast.AST, variable: str) -> list[str]:
    """Return the constant keys that code sets in a dictionary."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == variable and isinstance(node.value, ast.Dict):
                    found |= set(_keys(node.value))
                elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == variable:
                    found |= {target.slice.value} if isinstance(target.slice, ast.Constant) else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{variable}.update":
            found |= {key for argument in node.args if isinstance(argument, ast.Dict) for key in _keys(argument)}
    return sorted(name for name in found if isinstance(name, str))


def _keys(found: ast.Dict) -> list[str]:
    """Return the constant keys of a dictionary in code."""
    return [key.value for key in found.keys if isinstance(key, ast.Constant)]


def _finish_reasons(tree: ast.Module) -> list[Schema]:
    """Return the values of `finish_reason`: an object per reason."""
    found = []
    for name, node in _classes(tree).items():
        if not name.startswith("FINISH"):
            continue
        for value in ast.walk(node):
            if isinstance(value, ast.Dict) and "type" in (keys := _keys(value)):
                fields = {key: {} for key in keys}
                fields["type"] = {"enum": [ast.literal_eval(value.values[keys.index("type")])]}
                reason = {"type": "object", "required": ["type"], "properties": fields}
                found += [reason] if reason not in found else []
    return found


def main(server: str, *rest: str) -> None:
    """Write the definitions of a server to a file."""
    found = record_vllm() if server == "vllm" else record_sglang(Source(Path(rest[0])))
    Path(rest[-1]).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
