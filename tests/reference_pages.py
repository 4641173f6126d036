"""The generated parts of docs: keys of the configuration, commands, public names, folders and their order.

``python -m tests.reference_pages --write`` after one of them has changed; ``tests/test_documents.py`` compares.
"""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.harness.figures import ROOT, show
from engine.config.deepspeed.keys import TABLE, Moved
from engine.config.json_schema import schema
from engine.launch.cli import make_parser
from tests.public_names import PUBLIC, first_sentence, public_names, shown
from tests.structure import path_of, product
from tests.test_architecture import ORDERS

WITHOUT_DOCSTRING: Mapping[str, str] = MappingProxyType(
    {
        "engine/checkpoint/contents": "Tensors and state that a checkpoint stores.",
        "engine/checkpoint/format": "Files, hashes and commit of a checkpoint.",
        "engine/integrity": "Checks against silent corruption.",
        "engine/optim": "Optimizers by name, parameter groups, learning-rate schedules.",
        "engine/precision": "Dtypes, casts and the loss scale.",
        "engine/watchdog": "Hangs, stragglers and flight records.",
        "kernels": "Devices and the dispatch of operators.",
        "kernels/codecs": "Encodings with fewer bits.",
        "kernels/gpu": "Triton kernels.",
        "kernels/gpu/overlap": "Triton kernels that communicate.",
        "kernels/ops": "Operators with a reference in torch.",
        "kernels/optim": "Update rules.",
        "parallel/activation_checkpointing": "Recomputation of activations.",
        "parallel/comm": "Process groups, collectives, counters.",
        "parallel/comm/flight": "Records of collectives.",
        "parallel/kernel_injection": "Modules that fused operators replace.",
    }
)
"""Meanings of folders that have no file ``__init__.py``."""


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
        for option in [inner, *inner.get("anyOf", []), *inner.get("oneOf", []), inner.get("items", {})]:
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


def folders() -> list[str]:
    """Return the path of every folder of the product, layers first."""
    structure = product()
    return sorted({path_of(one) for one in {structure.folder(module) for module in structure.files}} | {"kernels"})


def folders_table() -> str:
    """Return every folder with the first sentence of its docstring."""
    rows = [f"| `{folder}` | {_cell(_meaning(folder))} |" for folder in folders()]
    return "\n".join(["| folder | contents |", "|---|---|", *rows])


def _meaning(folder: str) -> str:
    door = ROOT / folder / "__init__.py"
    if folder in WITHOUT_DOCSTRING:
        return WITHOUT_DOCSTRING[folder]
    return first_sentence(ast.get_docstring(ast.parse(door.read_text(encoding="utf-8"))) or "")


def public_names_table() -> str:
    """Return the public names of each module in a row."""
    return "\n".join(["| module | names |", "|---|---|", *(row for module in PUBLIC for row in _name_rows(module))])


def _name_rows(module: str) -> Iterator[str]:
    rows: dict[str, list[str]] = {module: []}
    for name in public_names(module):
        owner, _, short = name.path.rpartition(".")
        rows.setdefault(owner, []).append(f"`{short}`")
    for owner, names in rows.items():
        yield f"| `{owner}` | {', '.join(dict.fromkeys(names))} |"


def orders_table() -> str:
    """Return the order of the rooms of each folder, lowest first."""
    rows = [f"| `{path_of(folder)}` | {', '.join(order)} |" for folder, order in ORDERS.items()]
    return "\n".join(["| inside | from below to above |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("``", "`").split())


GENERATED: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "keys": keys_table,
        "commands": command_sections,
        "folders": folders_table,
        "public-names": public_names_table,
        "orders": orders_table,
        **{f"names-{module.replace('.', '-')}": partial(names_table, module) for module in PUBLIC},
    }
)
"""Sections that follow from the code, by name."""

if __name__ == "__main__" and "--write" in sys.argv:
    for section_name, body in GENERATED.items():
        show(section_name, body())
