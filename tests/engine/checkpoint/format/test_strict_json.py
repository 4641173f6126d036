"""JSON that is read strictly."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.format.strict_json import Fields, dump, natural, naturals, parse
from engine.errors import CheckpointError

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), ANY, max_size=4))
def test_what_is_dumped_is_parsed(value: dict[str, Any]) -> None:
    data = dump(value)
    assert parse(data, "text") == value == json.loads(data) and dump(parse(data, "text")) == data


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse(data, "text"), dict)
    except CheckpointError as error:
        assert str(error).startswith("text is damaged")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "1", "null", '"x"', "{", '{"a":1,"a":2}', '{"x":{"a":1,"a":1}}', '{"a":NaN}', '{"a":Infinity}',
        '{"a":-Infinity}', "{'a':1}", '{"a":1,}', '{"a":01}', '{"a":' + "9" * 5000 + "}", "[" * 100_000,
        '{"a":' * 100_000, '\ufeff{"a":1}', '{"a":1} x',
    ],
)  # fmt: skip
def test_what_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^text is damaged"):
        parse(text.encode(), "text")


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError):
        dump({"a": float("nan")})


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, None, "1", [1], float("nan"), 10**400])
def test_what_is_no_natural_number(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^here is .* where a whole number of 0 or more belongs"):
        natural(value, "here")
    with pytest.raises(CheckpointError, match=r"^here is "):
        naturals([0, value], "here")


@pytest.mark.parametrize("value", [None, 1, "12", {"0": 1}])
def test_what_is_no_list_of_them(value: Any) -> None:
    with pytest.raises(CheckpointError, match="where a list belongs"):
        naturals(value, "here")


@pytest.mark.parametrize("read", ["text", "object", "list", "count"])
@pytest.mark.parametrize("value", [None, True, 1.5, ["x"], {"a": 1}, "x"])
def test_fields_name_what_is_wrong(read: str, value: Any) -> None:
    fields = Fields({"name": value}, "the file")
    if type(value) is {"text": str, "object": dict, "list": list, "count": int}[read]:
        assert getattr(fields, read)("name") == value
        return
    with pytest.raises(CheckpointError, match=r"^the file: name is " + re.escape(repr(value))):
        getattr(fields, read)("name")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        Fields({"name": "x" * 10_000}, "the file").count("name")
    assert len(str(caught.value)) < 200
