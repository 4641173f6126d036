"""``trine explain``: errors are found by their words, also when the values are filled in."""

import pytest

import engine
from engine.launch.cli import main
from engine.launch.raised_errors import PUBLIC, raised_errors


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_some_words_find_an_error_with_its_remedy_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "page-locked", "memory", "offload_states")
    first = text.split("\n\n")[0]
    assert first.startswith("error   EngineError: offload_states: the host cannot allocate {")
    assert "\nremedy  " in first and "\nraised  engine/zero/offload/offloaded_states.py:" in first
    assert "\ncontext " in first


def test_an_error_with_its_values_finds_its_template_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(engine.ConfigError) as raised:
        engine.load_config({"train_batch_size": 8, "parallel": {"tensor": 3}}, 4)
    text = explained(capsys, str(raised.value).splitlines()[-1])
    assert text.count("raised  ") == 1 and "engine/config/" in text and "ConfigError" in text


def test_nearly_every_template_is_found_by_its_own_text() -> None:
    from engine.launch.explain_command import closest

    errors = list(raised_errors())
    some = [error for error in errors if error.kind in PUBLIC][::25]
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
