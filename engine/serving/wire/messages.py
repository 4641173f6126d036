"""Protobuf messages of messages.proto: classes made at run time, without a compiler and generated files."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILE = Path(__file__).with_name("messages.proto")
_SCALARS: Final[Mapping[str, int]] = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bytes", "string", "bool", "double", "int32", "int64", "uint32")
}
_BLOCK = re.compile(r"(message|enum|oneof) (\w+) \{")
_ENTRY = re.compile(r"(?:(repeated) )?(?:map<(\w+), (\w+)>|(\w+)) (\w+) = (\d+);")
_VALUE = re.compile(r"(\w+) = (\d+);")


@cache
def message_class(name: str) -> Any:
    """Returns the protobuf class of the message ``name`` in messages.proto, the service's wire format."""
    return _classes()[f"{_package(_FILE.read_text())}.{name}"]


@cache
def _classes() -> Mapping[str, Any]:
    text = _FILE.read_text()
    file = descriptor_pb2.FileDescriptorProto(name=_FILE.name, package=_package(text), syntax="proto3")
    _fill(file, (line.split("//")[0].strip() for line in text.splitlines()))
    pool = descriptor_pool.DescriptorPool()  # of its own: tinker's client in the same process has the same names
    pool.Add(file)
    classes: Mapping[str, Any] = message_factory.GetMessageClassesForFiles([_FILE.name], pool)
    return classes


def _package(text: str) -> str:
    found = re.search(r"package (\w+);", text)
    assert found is not None
    return found[1]


def _fill(file: Any, lines: Iterator[str]) -> None:
    """Adds messages and enums; those of the file are one level deep."""
    enums, message, oneof = set[str](), None, None
    for line in lines:
        block = _BLOCK.fullmatch(line)
        if block is not None and block[1] == "enum":
            enums.add(block[2])
            enum = file.enum_type.add(name=block[2])
            for entry in iter(lines.__next__, "}"):
                value = _VALUE.fullmatch(entry)
                assert value is not None, entry
                enum.value.add(name=value[1], number=int(value[2]))
        elif block is not None and block[1] == "message":
            message = file.message_type.add(name=block[2])
        elif block is not None:
            assert message is not None
            oneof = len(message.oneof_decl)
            message.oneof_decl.add(name=block[2])
        elif line == "}":
            message, oneof = (message, None) if oneof is not None else (None, None)
        elif message is not None:
            _add_field(file.package, message, line, enums, oneof)


def _add_field(package: str, message: Any, line: str, enums: set[str], oneof: int | None) -> None:
    found = _ENTRY.fullmatch(line)
    assert found is not None, line
    repeated, key, value, kind, name, number = found.groups()
    kinds = descriptor_pb2.FieldDescriptorProto
    if key is not None:
        entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        for index, own in ((1, key), (2, value)):
            _add_field(package, entry, f"{own} {('key', 'value')[index - 1]} = {index};", enums, None)
        kind, repeated = f"{message.name}.{entry.name}", "repeated"
    label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = kinds.TYPE_ENUM if kind in enums else kinds.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"
    if oneof is not None:
        field.oneof_index = oneof
