"""Mistakes of a new user: each is one sentence within a second, and the service goes on."""

import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest
import torch

from engine.config import load_config
from engine.config.serve_section import ServeConfig
from engine.errors import ConfigError, EngineError, LaunchError
from engine.launch.cli import main
from engine.serving.host.front import check_front, open_front
from engine.web.remote_line import RemoteError, RemoteLine
from engine.web.remote_model import RemoteModel
from tests.engine.serving.doors import tensor_server
from tests.engine.serving.executors import CountingExecutor
from tests.engine.serving.test_front import run_loop
from tests.engine.serving.test_tensor_door import layer, rows
from tests.engine.serving.wire.tinker_calls import MODEL

LONGEST_SECONDS = 2.0  # one second on a quiet machine


def refused(call: Callable[[], object], sentence: str, kind: type[Exception] = RemoteError) -> None:
    """Check that a call ends with one sentence, in time."""
    began = time.monotonic()
    with pytest.raises(kind, match=sentence) as found:
        call()
    assert time.monotonic() - began < LONGEST_SECONDS
    said = str(found.value)
    assert said.endswith((".", "?")) and "\n" not in said and "Traceback" not in said, said


def test_mistakes_of_a_client(tmp_path: Path) -> None:
    x = rows(1)
    with tensor_server(layer, tmp_path, {"double": dict}, x, "a-secret") as url:
        model = RemoteModel(url, token="a-secret")
        with socket.create_server(("127.0.0.1", 0)) as unused:
            closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        out = model(x.requires_grad_())
        for call, sentence in (
            (lambda: RemoteModel(url, token="other")(x), "wrong X-API-Key or none; give the token of the service"),
            (lambda: RemoteModel(url, token="schlüssel")(x), "check the address, the token"),
            (lambda: RemoteModel(f"{url}/api", token="a-secret")(x), "is no request to this service"),
            (lambda: RemoteModel(url.removeprefix("http://")), "is no address of a server; give http://HOST:PORT"),
            (lambda: RemoteModel(""), "is no address of a server"),
            (lambda: RemoteModel(closed)(x), r"does not answer \(ConnectError: .*; check the address"),
            (lambda: RemoteModel(url.replace("http", "https"))(x), r"does not answer \(ConnectError: .*http or https"),
            (lambda: RemoteModel(url, certificate="none.pem"), "the certificate 'none.pem'"),
            (lambda: RemoteModel(url, "mine", token="a-secret")(x), "there is no model mine; create it"),
            (lambda: model(torch.ones(2, 3)), "the model failed on these tensors: mat1"),
            (lambda: model(torch.ones(2, 4, dtype=torch.int64)), "the model failed on these tensors: "),
            (lambda: model(x, x), "the model failed on these tensors: "),
            (lambda: model.function("treble"), "there is no function 'treble'; this server has double"),
            (lambda: model.step(lr=1e-3), "an update came without a gradient since the last one"),
            (lambda: model.step(rate=1.0), "an update takes a JSON object of beta1"),
        ):  # fmt: skip
            refused(call, sentence)
        out.sum().backward(retain_graph=True)
        assert x.grad is not None and model.step(lr=1e-3) == 1, "the service goes on"
        refused(lambda: out.sum().backward(), "there is no forward .* that waits for gradients; call forward again")
        reply = httpx.post(f"{url}/v1/backward/shared/none", headers={
            "x-api-key": "a-secret", "x-trine-session": "s", "x-trine-number": "1",
        })  # fmt: skip
        assert reply.status_code == 410 and reply.json()["final"] is True


def test_a_server_that_ends_later_is_waited_for_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    replies = [httpx.Response(200, json={"routes": {}})]

    def handle(request: httpx.Request) -> httpx.Response:
        if not replies:
            raise httpx.ConnectError("refused")
        return replies.pop()

    line = RemoteLine("http://x", patience=0.2, transport=httpx.MockTransport(handle))
    assert line.ask("/v1/statistics", method="GET") == {"routes": {}}
    with caplog.at_level(logging.WARNING, "trine"):
        refused(lambda: line.ask("/v1/step/shared", {}), r"does not answer for 0 s \(ConnectError: refused\)")
    assert len(caplog.records) == 1 and "repeats for up to 0.2 s" in caplog.text


def test_mistakes_at_the_start_are_found_before_a_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRINE_TOKEN", raising=False)
    files = {"tls_certificate": str(tmp_path / "none.crt"), "tls_key": str(tmp_path / "none.key")}
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        for settings, sentence, kind in (
            (ServeConfig(host="0.0.0.0"), "with a token; set the environment variable TRINE_TOKEN", LaunchError),
            (ServeConfig(port=port), f"cannot listen at 127.0.0.1 port {port} .* a free port with --port", LaunchError),
            (ServeConfig(port=0, **files), "are no certificate with its key .* give PEM files", ConfigError),  # type: ignore[arg-type]
        ):
            refused(lambda settings=settings: check_front(settings, 0), sentence, kind)  # type: ignore[misc]
        config = tmp_path / "config.json"
        config.write_text(f'{{"serve": {{"port": {port}}}}}')
        assert main(["serve", str(config), "--model", str(tmp_path)]) != 0
        assert "Address already in use" in capsys.readouterr().err, "before the model, which is none"
    refused(
        lambda: load_config({"serve": {"prot": 1}}), r"serve\.prot: unknown key\. Did you mean serve\.port", EngineError
    )


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Make a certificate for this host, and its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl: apt-get install openssl")
    found = {"tls_certificate": str(tmp_path / "crt.pem"), "tls_key": str(tmp_path / "key.pem")}
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", found["tls_key"], "-out", found["tls_certificate"], "-subj", "/CN=service",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    yield found


def test_a_client_checks_the_certificate_of_a_service(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINE_TOKEN", "t0")
    serve = ServeConfig(port=0, folder=str(tmp_path), **files)  # type: ignore[arg-type]
    check_front(serve, 0)
    lines = list[str]()
    with open_front(serve, MODEL, lines.append) as source:
        thread = Thread(target=run_loop, args=(source, CountingExecutor()))
        thread.start()
        url = lines[0].split()[2].rstrip(":")
        assert url.startswith("https://127.0.0.1:")
        model = RemoteModel(url, token="t0", certificate=files["tls_certificate"])
        assert "routes" in model.statistics()
        refused(lambda: RemoteModel(url, token="t0").statistics(), "CERTIFICATE_VERIFY_FAILED")
        plain = url.replace("https", "http")
        refused(lambda: RemoteModel(plain, token="t0").statistics(), "check the address, http or https")
        named = url.replace("127.0.0.1", "localhost")
        elsewhere = RemoteModel(named, token="t0", certificate=files["tls_certificate"])
        refused(elsewhere.statistics, "CERTIFICATE_VERIFY_FAILED.*Hostname mismatch")
        model.close()  # else the server, which ends, waits for its last words
        source.stop()
        thread.join(20)
