"""Check values against the definitions that `scripts/record_server_schemas.py` recorded."""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


@cache
def recorded(kind):
    """Return the definitions of a server."""
    return json.loads((FOLDER / f"recorded_{kind}.json").read_text(encoding="utf-8"))


def request_faults(kind, method, path, query, body):
    """Return what is wrong with a request: an unknown path or field, or a value of another type."""
    operation = recorded(kind)["paths"].get(path)
    if operation is None or operation["method"] != method:
        return [f"{method} {path}: unknown"]
    known = {"type": "object", "properties": operation["query"]}
    faults = _faults({name: _parsed(value) for name, value in query.items()}, known, f"{path}?")
    if operation["body"] is None:
        return faults + ([f"{path}: takes no body"] if body else [])
    return faults + _faults(body, operation["body"], path)


def _parsed(value):
    """Return the number or boolean in a parameter of a URL, or its text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def answer_faults(kind, path, answer):
    """Return what is wrong with a successful answer: it is none of those that the server gives."""
    kinds = recorded(kind)["paths"][path]["answers"]
    faults_by_kind = [_faults(answer, one, path) for one in kinds]
    return [] if any(not faults for faults in faults_by_kind) else faults_by_kind[0]


def _faults(value, schema, where):
    """Return the differences between a value and a schema. Unlike in JSON Schema, unknown fields are errors."""
    if "anyOf" in schema:
        lists = [_faults(value, one, where) for one in schema["anyOf"]]
        return [] if any(not faults for faults in lists) else [f"{where}: {value!r:.80} has none of the types"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r:.80} is not in {schema['enum']}"]
    kind = schema.get("type")
    if kind == "empty":
        return [] if value is None else [f"{where}: {value!r:.80} is not empty"]
    kind = "string" if kind == "text" else kind
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where}: {value!r:.80} is no {kind}"]
    if ("minimum" in schema and value < schema["minimum"]) or ("maximum" in schema and value > schema["maximum"]):
        return [f"{where}: {value!r} is out of range"]
    if isinstance(value, list) and "items" in schema:
        return [fault for i, x in enumerate(value) for fault in _faults(x, schema["items"], f"{where}[{i}]")]
    if isinstance(value, dict):
        return _field_faults(value, schema, where)
    return []


def _field_faults(value, schema, where):
    faults = [f"{where}.{name}: missing" for name in schema.get("required", ()) if name not in value]
    if "values" in schema:
        return faults + [fault for key, x in value.items() for fault in _faults(x, schema["values"], f"{where}.{key}")]
    if "properties" not in schema:
        return faults
    for name, x in value.items():
        if name not in schema["properties"]:
            faults.append(f"{where}.{name}: unknown")
        else:
            faults += _faults(x, schema["properties"][name], f"{where}.{name}")
    return faults
