"""Rank 0's front over a socket, as the command loop uses it; and the command's check of a journal."""

from dataclasses import replace
from pathlib import Path
from threading import Thread

import httpx
import pytest

from engine.config import load_config
from engine.config.serve_section import ServeConfig
from engine.errors import ConfigError, LaunchError
from engine.launch.cli import main
from engine.serving.commands import Stop
from engine.serving.host.front import LedgerSource, open_front, service_token
from tests.engine.serving.executors import CountingExecutor
from tests.engine.serving.wire.tinker_calls import BASE, MODEL, forward_backward, optim_step


def run_loop(source: LedgerSource, executor: CountingExecutor) -> None:
    """Runs commands as rank 0's main thread does."""
    while True:
        taken = source.take(0.1)
        if taken is not None and isinstance(taken[1], Stop):
            return
        if taken is not None:
            source.finish(taken[0], executor.run(taken[1]))


def result(client: httpx.Client, key: str) -> httpx.Response:
    """Returns the reply of a poll."""
    return client.post("retrieve_future", json={"request_id": key})


def train(serve: ServeConfig, executor: CountingExecutor, model: str, numbers: range) -> str:
    """Serves until some commands are done; returns the id of the model."""
    lines = list[str]()
    with open_front(serve, MODEL, lines.append) as source:
        thread = Thread(target=run_loop, args=(source, executor))
        thread.start()
        address = lines[0].split()[2].rstrip(":")
        with httpx.Client(base_url=f"{address}/api/v1/", headers={"x-api-key": "t0"}, timeout=20) as client:
            while client.post("client/config", json={}).status_code == 503:
                pass
            if not model:
                session = client.post("create_session", json={"tags": []}).json()["session_id"]
                body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
                created = client.post("create_model", json=body).json()
                assert result(client, created["request_id"]).json()["model_id"] == created["model_id"]
                model = created["model_id"]
            for number in numbers:
                if number % 2:
                    reply = client.post("forward_backward", content=forward_backward(model, number, ((number,),)))
                else:
                    reply = client.post("optim_step", json=optim_step(model, number))
                assert result(client, reply.json()["request_id"]).status_code == 200
        source.stop()
        thread.join(20)
    assert "token in TRINE_TOKEN" in lines[0] and BASE in lines[0]
    return model


def test_a_service_stops_and_starts_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRINE_TOKEN", "t0")
    serve = load_config({"serve": {"port": 0, "folder": str(tmp_path), "journal": {"snapshot_every": 4}}}).serve
    assert serve is not None
    first = CountingExecutor()
    model = train(serve, first, "", range(1, 8))
    second = CountingExecutor()
    second.saved = first.saved
    train(serve, second, model, range(8, 11))
    assert second.log[:5] == ["CreateModel", "LoadWeights", "ForwardBackward", "OptimStep", "ForwardBackward"]
    alone = CountingExecutor()
    train(replace(serve, folder=str(tmp_path / "alone")), alone, "", range(1, 11))
    assert list(alone.models.values()) == list(second.models.values())
    assert main(["serve", "--replay", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "the journal is whole: 1 sessions, 1 models, 1 snapshots; a start runs" in shown


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org"])
def test_other_hosts_need_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINE_TOKEN", raising=False)
    with pytest.raises(LaunchError, match="a service serves them only with a token"):
        service_token(ServeConfig(host=host))
    assert service_token(ServeConfig()) == ""
    monkeypatch.setenv("TRINE_TOKEN", "a b")
    with pytest.raises(ConfigError, match="one word"):
        service_token(ServeConfig(host=host))


def test_the_command_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) != 0 and "--model FOLDER" in capsys.readouterr().err
    assert main(["serve", "--replay", str(tmp_path)]) != 0 and "has no journal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"queue": {"depth": 2}}, "serve.queue.per_session: 32 with a queue depth of 2"),
        ({"tls_key": "a"}, "serve.tls_certificate: missing"),
        ({"prot": 1}, "serve.prot"),
        ({"sampler": "vllm"}, "serve.sampler"),
    ],
)
def test_mistakes_of_the_section_are_named(section: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_config({"serve": section})
