"""The generated parts of docs/reference: keys of the configuration, commands, public names.

``python -m tests.reference_pages --write`` after one of them has changed; ``tests/test_documents.py`` compares.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.harness.figures import show
from engine.config.deepspeed.keys import TABLE, Moved
from engine.config.json_schema import schema
from engine.launch.cli import make_parser
from tests.public_names import PUBLIC, public_names, shown


def keys_table() -> str:
    """Return every key of a configuration as a table."""
    others = {key.target: path for path, key in TABLE.items() if isinstance(key, Moved)}
    head = "| key | type | default | meaning | DeepSpeed's other name |\n|---|---|---|---|---|"
    return "\n".join([head, *(_key_row(path, body, others.get(path, "")) for path, body in _keys(schema()))])


def _keys(body: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, inner in body.get("properties", {}).items():
        if key == "$schema":
            continue
        here = f"{path}.{key}" if path else key
        yield here, inner
        for option in [inner, *inner.get("anyOf", []), *inner.get("oneOf", [])]:
            yield from _keys(option, here)


def _key_row(path: str, body: dict[str, Any], other: str) -> str:
    default = f"`{json.dumps(body['default'])}`" if "default" in body else ""
    about = _cell(body.get("description", "").split("\n\n")[0])
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


def command_sections() -> str:
    """Return every command of ``trine`` with its arguments."""
    return "\n\n".join(_commands(make_parser()))


def _commands(parser: argparse.ArgumentParser, help_text: str = "") -> Iterator[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    nested = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield f"## {parser.prog}\n\n{help_text[:1].upper()}{help_text[1:]}."
        if rows := [_argument_row(action) for action in actions if action.help != argparse.SUPPRESS]:
            yield "\n".join(["| argument | meaning |", "|---|---|", *rows])
    for action in nested:
        texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, inner in action.choices.items():
            yield from _commands(inner, texts.get(name, ""))


def _argument_row(action: argparse.Action) -> str:
    names = list(action.option_strings) or [str(action.metavar or action.dest)]
    value = ""
    if action.option_strings and action.nargs != 0:
        metavar = action.metavar if isinstance(action.metavar, str) else None
        value = f" {metavar or (_choices(action) if action.choices else action.dest.upper())}"
    about = action.help or ""
    if "%(" in about:
        about %= vars(action) | {"prog": ""}
    return f"| `{', '.join(names)}{value}` | {_cell(about)} |".replace("`-- `", "`--`")


def _choices(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices or ())) + "}"


def names_table(module: str) -> str:
    """Return the public names of ``module`` with the first sentence of each."""
    rows = [f"| `{shown(name)}` | {_cell(name.sentence)} |" for name in public_names(module)]
    return "\n".join(["| name | meaning |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("``", "`").split())


GENERATED: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "keys": keys_table,
        "commands": command_sections,
        **{f"names-{module.replace('.', '-')}": partial(names_table, module) for module in PUBLIC},
    }
)
"""Sections that follow from the code, by name."""

if __name__ == "__main__" and "--write" in sys.argv:
    for section_name, body in GENERATED.items():
        show(section_name, body())
