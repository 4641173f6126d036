"""JSON that is read strictly, and files that are damaged or hostile."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.step_reader import ReadRequest, StepReader
from engine.checkpoint.format.strict_json import Fields, dump, natural, naturals, parse
from engine.errors import CheckpointError
from tests.engine.checkpoint.format.hostile import ATTACKS, HARMLESS, bomb_of, make
from tests.engine.checkpoint.test_crash import run_of
from tests.structure import ROOT, last_name
from tests.test_architecture import name_of, product_files
from tests.zero import small

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=40)
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
    with pytest.raises(CheckpointError, match=r"^here is .*, not a whole number of 0 or more"):
        natural(value, "here")
    with pytest.raises(CheckpointError, match=r"^here is "):
        naturals([0, value], "here")


@pytest.mark.parametrize("value", [None, 1, "12", {"0": 1}])
def test_what_is_no_list_of_them(value: Any) -> None:
    with pytest.raises(CheckpointError, match="not a list"):
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


MEMORY = 64 << 20


def test_hostile_checkpoints_are_refused(tmp_path: Path) -> None:
    with small.start({}) as eng:
        for index in range(2):
            eng.train_batch(small.batch(eng, index))
        sound = eng.save_checkpoint(tmp_path / "sound").wait()
    runs = {}
    for index, (name, attack) in enumerate({**ATTACKS, **HARMLESS}.items()):
        runs[f"{index:03d}"] = name
        make(attack, sound, tmp_path / "runs" / f"{index:03d}")
    script = Path(__file__).with_name("watched.py")
    folders = [str(tmp_path / "runs" / run) for run in runs]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "sound"), *folders],
        capture_output=True, text=True, timeout=250, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    bad = []
    for result in results[2:]:
        name = runs.get(result["run"], "sound")
        expected = "NoneType" if name in HARMLESS or name == "sound" else "CheckpointError"
        well = (
            result["error"] == expected and not result["code"] and result["bytes"] < MEMORY and result["seconds"] < 10
        )
        if not well or (expected == "CheckpointError" and str(tmp_path) not in result["message"]):
            bad.append((name, result))
    assert not bad, "\n".join(f"{name}: {result}" for name, result in bad)
    assert [result["run"] for result in results[3:-1]] == list(runs)
    assert not Path("/tmp/trine-checkpoint-ran-code").exists()
    most = max(result["bytes"] for result in results[2:])
    print(f"{len(ATTACKS)} hostile checkpoints refused, {len(HARMLESS)} harmless ones; at most {most / 2**20:.0f} MiB")
    assert len(ATTACKS) >= 60


def test_a_reader_makes_no_runs_of_a_shape_that_is_not_the_wanted_one(tmp_path: Path) -> None:
    """Where the caller has not looked at shapes: the columns of a tensor of 2**62 elements are 2**31 runs."""
    (sound,) = run_of(1).save(tmp_path / "sound")
    make(bomb_of("exp_avg/up.weight", [1 << 31, 1 << 31], [1, [[0, 1 << 31]]]), sound, tmp_path / "run")
    reader = StepReader(Files(), tmp_path / "run" / sound.name)
    with pytest.raises(CheckpointError, match=r"but this run needs shape \[53, 11\] and 4 bytes per element"):
        reader.read([ReadRequest("exp_avg/up.weight", Part((53, 11)).whole(), memoryview(bytearray(4 * 583)))])


BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "torch.load", "torch.save", "numpy.load", "np.load", "__import__"}
LAST_NAMES = {call.rpartition(".")[2] for call in BANNED_CALLS}
SUSPECT = re.compile(
    "|".join(sorted(BANNED_MODULES)) + r"|\b(eval|exec|__import__)\b|from torch import|\b(load|save)\("
)


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if not SUSPECT.search(text):  # most files, which need not be parsed
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not BANNED_MODULES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in BANNED_MODULES
            assert node.module != "torch" or not {"load", "save"} & {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and last_name(node.func) in LAST_NAMES:
            assert ast.unparse(node.func) not in BANNED_CALLS, f"{name_of(path)}:{node.lineno}"
