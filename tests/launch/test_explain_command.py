"""``trine explain``: errors are found by their words, also when the values are filled in."""

import re
from functools import cache

import pytest

import engine
from engine.launch import explain_command
from engine.launch.cli import main
from engine.launch.raised_errors import PUBLIC
from tests.structure import raised_by_the_product

PURE = {name: cache(getattr(explain_command, name)) for name in ("pieces", "words_of")}


@pytest.fixture(autouse=True)
def the_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To parse it takes a second, and to split all messages a tenth."""
    monkeypatch.setattr(explain_command, "raised_errors", raised_by_the_product)
    for name, function in PURE.items():
        monkeypatch.setattr(explain_command, name, function)


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_some_words_find_an_error_with_its_remedy_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "page-locked", "memory", "offload_states")
    first = text.split("\n\n")[0]
    assert first.startswith("error   EngineError: offload_states: the host cannot allocate <size> bytes")
    assert "\nremedy  " in first and "\nraised  engine/zero/state/offloaded_states.py:" in first
    assert "\ncontext " in first


def test_an_error_with_its_values_finds_its_template_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(engine.ConfigError) as raised:
        engine.load_config({"train_batch_size": 8, "parallel": {"tensor": 3}}, 4)
    text = explained(capsys, str(raised.value).splitlines()[-1])
    assert text.count("raised  ") == 1 and "engine/config/" in text and "ConfigError" in text


NEAR = {
    "no layout fits: of 1,728 on 8 GPUs the smallest (pp8, ZeRO 0) needs 1.2 GiB, but a GPU has 1.0; give more GPUs": (
        "no layout fits: of <tried> on <world> GPUs the smallest (<layout>) needs <need> GiB"
    ),
    "rank 3 of 8 was started by slurm and the address of a rendezvous is not set; start with `srun x`": (
        "GridError: rank <rank> of <size> was started by <launcher>, and no address of a rendezvous is set"
    ),
    "the vocabluary of 50,257 rows; index of gather outside": "an index of gather is outside the vocabulary of <size>",
}


@pytest.mark.parametrize(("pasted", "found"), NEAR.items(), ids=["other words", "other order", "misspelled"])
def test_a_pasted_message_that_nearly_matches_is_found_first(
    pasted: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = explained(capsys, pasted).split("\n\n")[0]
    assert found in " ".join(first.split())


def test_placeholders_are_nouns_and_no_source() -> None:
    errors = raised_by_the_product()
    values = [value for error in errors for value in re.findall(r"\{([^{}\"'?][^{}\"']*)\}", error.text)]
    assert len(values) > 1000
    assert not [value for value in values if not re.fullmatch(r"[\w ,.\-]+", value)]


@pytest.mark.long
def test_nearly_every_template_is_found_by_its_own_text() -> None:
    from engine.launch.explain_command import closest

    errors = raised_by_the_product()
    some = [error for error in errors if error.kind in PUBLIC][::100]
    lost = [error.text for error in some if error.text not in {one.text for one in closest(errors, error.text)}]
    assert len(lost) <= len(some) // 10, lost


def test_all_errors_are_listed_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "--all").splitlines()
    assert len(lines) > 500 and lines == sorted(lines, key=lambda line: line.partition(":")[0])
    assert any(line.startswith("CheckpointError: ") for line in lines)
    fewer = explained(capsys, "--all", "page-locked").splitlines()
    assert fewer and all("page-locked" in line for line in fewer)


def test_words_of_no_error_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "xyzzy", "plugh"]) == 1
    assert "no error has the words 'xyzzy plugh'" in capsys.readouterr().err
    assert main(["explain"]) == 2
    assert "takes words of an error" in capsys.readouterr().err
