"""A pickle's values are read, and nothing that it asks for is imported, called or built."""

import collections
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.foreign.pickle_values import PickledName, PickledObject, plain, read_pickle
from engine.errors import CheckpointError


class Runs:
    """Unpickling this touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


VALUE = {
    "numbers": [0, 1, -7, 255, 2**16, 2**31, 2**80, 1.5, True, False, None],
    "texts": ("", "ä", "x" * 300),
    "bytes": b"\0\1",
    ("a", 1): {"nested": [[], (), {}]},
}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_themselves(protocol: int) -> None:
    value = {key: item for key, item in VALUE.items() if key != "bytes" or protocol > 2}
    assert read_pickle(pickle.dumps(value, protocol), "it") == value


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_runs(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"state": Runs(tmp_path / "ran")}, protocol)
    value = read_pickle(data, "it")["state"]
    assert not (tmp_path / "ran").exists()
    assert isinstance(value, PickledObject)
    pickle.loads(data)
    assert (tmp_path / "ran").exists(), "the pickle would run something"


HOSTILE = {
    "a system command": b"cos\nsystem\n(S'touch ran'\ntR.",
    "an eval": b'cbuiltins\neval\n(S\'open("ran", "w")\'\ntR.',
    "a nested call": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'touch ran'\ntR.",
    "a build with a state of slots": b"\x80\x02cos\nsystem\n)\x81N}S'__setstate__'\ncos\nsystem\ns\x86b.",
    "an extension": b"\x80\x02\x82\x01.",
    "an instance": b"(S'touch ran'\nios\nsystem\n.",
    "no value": b".",
    "two values": b"NN.",
    "a lone mark": b"(.",
    "an unknown memo": b"h\x07.",
    "a persistent id": b"\x80\x02X\x03\0\0\0abcQ.",
    "items of a list": b"\x80\x02]NNs.",
    "a list as key": b"\x80\x02}]Ns.",
    "cut off": pickle.dumps(VALUE)[:-9],
    "a length beyond the file": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_run_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        value = read_pickle(HOSTILE[name], "it")
    except CheckpointError as error:
        assert str(error).startswith("it")
    else:
        assert isinstance(value, PickledObject | int), name
    assert not list(tmp_path.iterdir())


def test_a_call_is_known_by_its_name_arguments_and_state() -> None:
    data = pickle.dumps(pytest.approx(1.0), 2)
    value = read_pickle(data, "it")
    assert isinstance(value, PickledObject)
    names = {str(item) for item in (value.name, *value.arguments) if isinstance(item, PickledName)}
    assert any("ApproxScalar" in name for name in names)
    assert value.get("expected") == 1.0


@pytest.mark.parametrize("depth", [10, 100_000])
def test_a_deep_value_is_no_crash(depth: int) -> None:
    value = read_pickle(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", "it")
    if depth > 100:
        with pytest.raises(CheckpointError, match="too many values"):
            plain(value, [])
    assert isinstance(value, list)
    tuples = b"\x80\x02)" + b"\x85" * depth + b"N"
    with pytest.raises(CheckpointError, match="damaged"):
        read_pickle(b"\x80\x02}" + tuples[2:] + b"s.", "it")


def test_a_value_that_refers_to_itself_a_billion_times_is_not_copied() -> None:
    value: Any = ["ha"] * 10
    for _ in range(12):
        value = [value] * 10
    with pytest.raises(CheckpointError, match="too many values"):
        plain(read_pickle(pickle.dumps({"client": value}), "it"), [])


def test_what_is_no_json_is_dropped_by_its_path() -> None:
    given = {"epoch": 3, "args": collections.Counter(a=1), "times": [1.0, float("inf")], "pair": (1, {"x": b"no"})}
    dropped: list[str] = []
    value = plain(read_pickle(pickle.dumps(given), "it"), dropped)
    assert value == {"epoch": 3, "times": [1.0, None], "pair": [1, {}]}
    assert dropped == ["args", "times[1]", "pair[1].x"]


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_mutated_pickles_end_in_one_sentence() -> None:
    buffer = io.BytesIO()
    pickle.dump({"state": VALUE, "more": collections.OrderedDict(a=1), "call": Path("x")}, buffer, 2)
    sound, draw = buffer.getvalue(), random.Random(0)
    refused = 0
    for _ in range(4000):
        data = bytearray(sound)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            plain(read_pickle(bytes(data), "it"), [])
        except CheckpointError:
            refused += 1
    assert refused > 1000
