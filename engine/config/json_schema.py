"""JSON Schema of the configuration file, generated from the fields and rules of the reader.

It describes Trine's keys. DeepSpeed's own keys, which the reader also accepts, are left out, so that an editor offers
one name for each setting.
"""

import ast
import inspect
import json
import textwrap
from dataclasses import replace
from functools import cache
from typing import Any

from engine.config import Config
from engine.config.reader import Section, Sections, Typed, settings
from engine.config.rules import AnyOf, Choice, Flag, Int, ListOf, Real, Rule, Text, TextMap

Schema = dict[str, Any]


def schema() -> Schema:
    """Returns the JSON Schema (draft 2020-12) of a configuration file."""
    body = _section(Config)
    body["properties"] = {"$schema": {"type": "string"}, **body["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Trine config", **body}


def _section(cls: type[Any]) -> Schema:
    docs = {name: doc for base in reversed(cls.__mro__) for name, doc in _field_docs(base).items()}
    properties: Schema = {}
    required = []
    for key, entry in settings(cls).items():
        rule, doc = entry.metadata["rule"], {"description": docs[entry.name]}
        if entry.metadata["required"]:
            required.append(key)
        elif not (isinstance(rule, Section) and not isinstance(rule, Sections)):
            doc["default"] = json.loads(json.dumps(rule.dump(entry.default)))
        properties[key] = {**_rule(rule), **doc}
    body: Schema = {"type": "object", "description": inspect.getdoc(cls), "properties": properties}
    return {**body, "additionalProperties": False} | ({"required": required} if required else {})


def _rule(rule: Rule) -> Schema:
    body = _shape(rule)
    if rule.null and body.get("type") == "object":
        return {**body, "type": ["object", "null"]}
    options = body.get("anyOf", [body])
    return {"anyOf": [*options, {"type": "null"}]} if rule.null else body


def _shape(rule: Rule) -> Schema:
    match rule:
        case Flag():
            return {"type": "boolean"}
        case Real():
            return _number(rule)
        case Choice():
            # other letter cases are accepted too; the schema offers the two spellings that files use
            lower = [str(option).lower() for option in rule.options if rule.fold]
            return {"enum": list(dict.fromkeys([*rule.options, *lower, *rule.also]))}
        case Text():
            ends = "|".join(end.replace(".", r"\.") for end in rule.ends)
            return {"type": "string", "minLength": 1} | ({"pattern": f"({ends})$"} if ends else {})
        case ListOf():
            least = {"minItems": rule.least} if rule.least else {}
            size = least if rule.length is None else {"minItems": rule.length, "maxItems": rule.length}
            return {"type": "array", "items": _rule(rule.each), **size}
        case TextMap():
            return {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}
        case AnyOf():
            return {"anyOf": [*map(_rule, rule.rules), *([_section(rule.section)] if rule.section else [])]}
        case Typed():
            return _typed(rule) if rule.several is None else {"anyOf": [_typed(rule), _listed(rule, rule.several)]}
        case Sections():
            return {"type": "array", "items": _section(rule.cls)}
        case Section():
            return _section(rule.cls)
    raise TypeError(f"no JSON Schema for rule {type(rule).__name__}")


def _number(rule: Real) -> Schema:
    named = {
        "minimum": rule.low,
        "exclusiveMinimum": rule.above,
        "exclusiveMaximum": rule.below,
        "maximum": rule.high,
    }
    bounds = {word: bound for word, bound in named.items() if bound is not None}
    return {"type": "integer" if isinstance(rule, Int) else "number", **bounds}


def _listed(rule: Typed, several: type[Any]) -> Schema:
    """Returns the schema of a list of such sections, in which all but the last one have a ``match``."""
    entry = _typed(replace(rule, cls=several))
    entry.pop("required", None)
    return {"type": "array", "minItems": 1, "items": entry}


def _typed(rule: Typed) -> Schema:
    """Returns the schema of a section with a ``type`` that selects its ``params``."""
    body = _section(rule.cls)
    docs = {name: doc for base in reversed(rule.cls.__mro__) for name, doc in _field_docs(base).items()}
    body["properties"]["params"] = {"type": "object", "description": docs["params"]}
    default = settings(rule.cls)["type"].default
    cases = []
    for name, cls in rule.kinds.items():
        params = _section(cls)
        needs = ["type"] if name != default else []
        needed_params = ["params"] if params.get("required") else []
        cases.append({
            "if": {"properties": {"type": {"enum": [name, name.lower()]}}, "required": needs},
            "then": {"properties": {"params": params}, "required": needed_params},
        })  # fmt: skip
    return {**body, "allOf": cases}


@cache  # finding a class in its source takes milliseconds, and the sections of a schema share their bases
def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Maps each field to the string literal below it in the source."""
    if cls is object:
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            docs[field.target.id] = str(text)
    return docs
