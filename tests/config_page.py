"""The table of keys in ``docs/configuration.md``, from the JSON Schema of the configuration.

``python -m tests.config_page --write`` after a key has changed; a test compares.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.figures import show
from engine.config.deepspeed.keys import TABLE, Moved
from engine.config.json_schema import schema

HEAD = "| key | type | default | meaning | DeepSpeed's other name |\n|---|---|---|---|---|"


def keys_table() -> str:
    """Markdown."""
    others = {key.target: path for path, key in TABLE.items() if isinstance(key, Moved)}
    rows = [_row(path, body, others.get(path, "")) for path, body in _keys(schema())]
    return "\n".join([HEAD, *rows])


def _keys(body: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, inner in body.get("properties", {}).items():
        if key == "$schema":
            continue
        here = f"{path}.{key}" if path else key
        yield here, inner
        for option in [inner, *inner.get("anyOf", []), *inner.get("oneOf", [])]:
            yield from _keys(option, here)


def _row(path: str, body: dict[str, Any], other: str) -> str:
    default = f"`{json.dumps(body['default'])}`" if "default" in body else ""
    about = body.get("description", "").split("\n\n")[0]
    about = " ".join(about.replace("|", "\\|").replace("``", "`").split())
    return f"| `{path}` | {_type(body)} | {default} | {about} | {f'`{other}`' if other else ''} |"


def _type(body: dict[str, Any]) -> str:
    if "enum" in body:
        return ", ".join(f"`{json.dumps(option)}`" for option in body["enum"])
    if "const" in body:
        return f"`{json.dumps(body['const'])}`"
    if "anyOf" in body or "oneOf" in body:
        return " or ".join(dict.fromkeys(_type(option) for option in body.get("anyOf") or body["oneOf"]))
    kind = body.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


if __name__ == "__main__" and "--write" in sys.argv:
    show("keys", keys_table())
