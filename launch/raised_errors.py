"""Every sentence that the product raises, read from its source: text, class, file and function.

A message may be a name, a call or a branch; :class:`Scope` follows it to the texts that it can be. A value is a
placeholder in braces, by a noun from its name in the code; a text that a branch adds is one with a question mark.
Errors that the product catches itself are left out.
"""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "ConfigError", "GridError", "PlanError", "ScheduleError", "EngineError", "LaunchError", "CorruptionError",
    "CheckpointError",
)  # fmt: skip
REFUSALS = "RefusedError"
"""Class name of the error that a configuration rule raises and ``Problems`` turns into a ConfigError."""


class RaisedError(NamedTuple):
    """Error message in the source code, with placeholders in braces, and its location."""

    kind: str
    """Name of the exception class."""
    text: str
    file: str
    """Path of the source file below the folder ``engine``."""
    line: int
    function: str
    """Name of the raising function; empty at module level."""
    about: str
    """Docstring of the function, or of the module."""


def raised_errors(root: Path = ROOT) -> Iterator[RaisedError]:
    """Yields every error message that a user can see, from the Python sources below ``root``.

    Variable parts of a message are placeholders in braces.
    """
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for file in sorted(files):
            path = Path(folder) / file
            if path.suffix == ".py":
                yield from _of_file(path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8")))


def _of_file(file: str, tree: ast.Module) -> Iterator[RaisedError]:
    for function, call in _calls(tree, None):
        kind, message, form = _message(call, Scope(function, tree))
        if message is None:
            continue
        about = (function and ast.get_docstring(function)) or ast.get_docstring(tree) or ""
        for text in map(form.format, Scope(function, tree).texts(message)):
            if re.search(r"[a-z]{3}", re.sub(r"\{.*?\}", "", text)) and not text.startswith("{["):
                name = function.name if function else ""
                yield RaisedError(kind, " ".join(text.split()), file, call.lineno, name, about)


def _calls(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        yield from _calls(child, child if isinstance(child, ast.FunctionDef) else function)


def _message(call: ast.Call, scope: "Scope") -> tuple[str, ast.expr | None, str]:
    """Returns the class of the error, its message (None if users never see it), and the sentence around the message."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name.endswith("Error") and call.args and not isinstance(call.args[0], ast.Starred):
        if name == REFUSALS:
            return "ConfigError", call.args[0], "{{key}}: {{value}} {}; give {{allowed values}}."
        kind = scope.public(name)
        return kind, call.args[0] if kind else None, "{}"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "add" and len(call.args) == 2:
        owner = ast.unparse(call.func.value)
        if "problems" in owner and not isinstance(call.args[0], ast.Starred):
            keys = scope.texts(call.args[0], depth=0)
            key = keys[0] if len(keys) == 1 else _placeholder(call.args[0])
            return (
                "ConfigError",
                call.args[1],
                (key or "{configuration}").replace("{", "{{").replace("}", "}}") + ": {}",
            )
    return name, None, "{}"


@dataclass(frozen=True, slots=True)
class Scope:
    """Function and module around an error message, in which the texts of the message's variables are searched."""

    function: ast.AST | None
    tree: ast.Module

    def texts(self, node: ast.expr, depth: int = 3) -> list[str]:
        """Returns every text that the expression ``node`` may have, with placeholders in braces for unknown parts.

        ``depth``: maximum number of assignments and calls to follow.
        """
        match node:
            case ast.Constant(value=str() as text):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(self._part(part) for part in parts)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [a + b for a in self.texts(left, depth) for b in self.texts(right, depth)]
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, depth) + self.texts(other, depth)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format")):
                return [text]
        found = self._values(node) if depth else []
        return [text for value in found for text in self.texts(value, depth - 1)] or [_placeholder(node)]

    def public(self, name: str) -> str:
        """Returns ``name`` if it is a public error class, or the name of its public base class; otherwise ""."""
        if name in PUBLIC:
            return name
        classes = (node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        bases = [base.id for node in classes for base in node.bases if isinstance(base, ast.Name)]
        return next((base for base in bases if base in PUBLIC), "")

    def _values(self, node: ast.expr) -> list[ast.expr]:
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._returns(name)
            case ast.Name(id=name):
                return self._assigned(name)
            case ast.Subscript(value=ast.Name(id=name)):
                tables = [table for table in self._assigned(name) if isinstance(table, ast.Dict)]
                return [value for table in tables for value in table.values]
        return []

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            return self._constant(part.value) or _placeholder(part.value)
        return str(part.value) if isinstance(part, ast.Constant) else ""

    def _constant(self, node: ast.expr) -> str:
        """Returns the text of a constant of this file or of the file that it is imported from; empty otherwise."""
        if not isinstance(node, ast.Name) or not node.id.isupper():
            return ""
        for tree in (self.tree, *(_parsed(one.module) for one in self.tree.body if _imports(one, node.id))):
            match Scope(None, tree)._assigned(node.id):
                case [ast.Constant(value=str() as text)]:
                    return text
        return ""

    def _returns(self, name: str) -> list[ast.expr]:
        return [
            node.value
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef) and function.name == name
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]

    def _assigned(self, name: str) -> list[ast.expr]:
        for scope in (self.function, self.tree):
            found = [
                node.value
                for node in (ast.walk(scope) if scope is self.function and scope else self.tree.body)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name) and target.id == name
            ]
            if found:
                return found
        return []


def _imports(node: ast.stmt, name: str) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)


@cache
def _parsed(module: str | None) -> ast.Module:
    path = ROOT.joinpath(*str(module).split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8") if str(module).startswith("engine.") else "")


def _placeholder(node: ast.expr) -> str:
    noun = re.sub(r"[{}]", "", _noun(node))
    return "{" + noun + "}"


def _noun(node: ast.expr) -> str:
    """Returns a noun for a value of a message; a text that a branch adds begins with a question mark."""
    match node:
        case ast.Constant(value=value):
            return f"?{value}" if isinstance(value, str) else str(value)
        case ast.Name(id=name):
            return _words(name)
        case ast.Attribute(value=owner, attr=name):
            return _noun(owner) if name in _PLAIN else _words(name)
        case ast.BinOp(left=ast.Constant(value=str() as text), op=ast.Mult()):
            return f"?{text}"
        case ast.BinOp(op=ast.Div(), right=right):
            return _noun(right)
        case ast.BinOp(left=ast.Constant(), right=operand) | ast.BinOp(left=operand) | ast.Compare(left=operand):
            return _noun(operand)
        case ast.IfExp(body=body, orelse=other):
            return " or ".join(filter(None, dict.fromkeys((_noun(body), _noun(other).removeprefix("?")))))
        case ast.BoolOp(values=values):
            return " or ".join(dict.fromkeys(_noun(value).removeprefix("?") for value in values))
        case ast.GeneratorExp(elt=inner) | ast.ListComp(elt=inner) | ast.NamedExpr(value=inner):
            return _noun(inner)
        case ast.Starred(value=inner) | ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return _noun(inner)
        case ast.JoinedStr(values=parts):
            values = [part.value for part in parts if isinstance(part, ast.FormattedValue)]
            return _noun(values[0]) if values else ""
        case ast.Call():
            return _noun_of_call(node)
    return "value"


_PLAIN = ("name", "text", "words", "value", "__name__", "args")
"""Attributes that a noun leaves out."""
_METHODS = ("removeprefix", "removesuffix", "replace", "strip", "rstrip", "splitlines", "lower", "format", "get")
"""Methods whose object is the noun."""


def _noun_of_call(node: ast.Call) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
            return f"{_noun(inner).removeprefix('?')}, ..."
        case ast.Call(func=ast.Name(id="type"), args=[inner]):
            return f"type of {_noun(inner)}"
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            return f"number of {_noun(inner)}"
        case ast.Call(func=ast.Name(), args=[*_, inner]):
            return _noun(inner)
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return _noun(owner) if name in _METHODS else _words(name)
        case ast.Call(func=ast.Name(id=name)):
            return _words(name)
    return "value"


def _words(name: str) -> str:
    words = name.strip("_").replace("_", " ").lower()
    return {"what": "item", "why": "reason", "how": "means"}.get(words, words)
