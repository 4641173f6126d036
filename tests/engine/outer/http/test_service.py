"""A store behind a real socket, and the command that starts it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from engine.config.outer_section import shared_settings
from engine.errors import ConfigError, EngineError, LaunchError
from engine.launch.cli import main
from engine.launch.outer_command import store_config
from engine.outer.http import service
from engine.outer.http.bodies import RANGE
from engine.outer.http.line import HttpLink
from engine.outer.messages import PushShare
from engine.outer.store.store import Store
from engine.web.sockets import address_of, listen
from tests.engine.outer.http.served import (
    ELEMENTS,
    body_of,
    join_request,
    layout_of,
    meta_of,
    settings_of,
)


@contextmanager
def running(store: Store, token: str = "") -> Iterator[tuple[str, service.StoreService]]:
    """Serves a store on a free port of this host, in a thread."""
    listening = listen("127.0.0.1", 0, service.SERVER)
    served = service.StoreService(store, token, listening)
    loop = asyncio.new_event_loop()
    thread = Thread(target=lambda: loop.run_until_complete(served.run()))
    address = address_of(listening)
    thread.start()
    try:
        yield address, served
    finally:
        loop.call_soon_threadsafe(served.stop)
        thread.join()
        loop.close()
        listening.close()


def test_a_site_trains_over_a_socket_and_half_a_body_leaves_no_trace() -> None:
    elements = RANGE // 2  # two ranges of fp32
    tensors = (("weight", (elements,)),)
    settings = settings_of(rule="diloco", period=10)
    store = Store(settings)
    weights = torch.randn(elements)
    with running(store, "secret") as (address, _):
        link = HttpLink([address], token="secret")
        joined = link.join(join_request(0, settings, tensors))
        link.register(joined.life, 0, layout_of(tensors))
        link.seed(joined.life, 0, 0, body_of(weights))
        offer = link.offer(joined.life, 0)
        assert offer is not None and torch.equal(link.pull(joined.life, 0, 0, 0), weights)
        before = store.status()
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = "POST /v1/push HTTP/1.1\r\nhost: s\r\nauthorization: Bearer secret\r\ncontent-length: 400\r\n\r\n"
            raw.sendall(head.encode() + bytes(200))
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(f"POST /v1/push HTTP/1.1\r\nhost: s\r\ncontent-length: {10**12}\r\n\r\n".encode())
            assert raw.recv(100).startswith(b"HTTP/1.1 401")
        link.push(meta_of(joined.life, 0, 0), 0, PushShare(), body_of(torch.zeros(elements)))
        after = link.offer(joined.life, 0)
        assert after is not None and after.version == 1
        assert torch.equal(link.pull(joined.life, 0, 0, 1), weights)
        assert list(store.status().waiting) == list(before.waiting) == []
        assert link.traffic.sent == link.traffic.received == 8 * elements and link.traffic.repeated == 0
        link.close()


def test_replies_do_not_wait_for_delayed_acknowledgements() -> None:
    with listen("127.0.0.1", 0, service.SERVER) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "store.example"])
def test_a_public_address_needs_a_token(host: str) -> None:
    with pytest.raises(LaunchError, match=f"--host {host} lets other hosts connect"):
        service.check_host(host, "")
    service.check_host(host, "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_host_needs_none(host: str) -> None:
    service.check_host(host, "")


def test_a_port_in_use_is_a_sentence() -> None:
    words = r"cannot listen at 127\.0\.0\.1 port .*; give an address"
    with listen("127.0.0.1", 0, service.SERVER) as taken, pytest.raises(LaunchError, match=words):
        listen("127.0.0.1", taken.getsockname()[1], service.SERVER)


TRAINING: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}, "gradient_clipping": 0.5,
    "outer": {"url": "http://a:1", "sites": 2, "site": 1, "rule": "bsp"},
}  # fmt: skip


def test_store_and_site_share_settings_though_the_store_ignores_other_keys() -> None:
    config = store_config({**TRAINING, "parallel": {"tensor": 2}, "of_the_script": [1], "fp16": "?"}, [])
    assert config.outer is not None
    found = shared_settings(config.outer, config.optimizer, config.gradient_clipping)
    assert found["optimizer"]["params"]["lr"] == 1e-3 and found["clipping"] == 0.5
    without = {key: value for key, value in TRAINING["outer"].items() if key != "url"}
    assert store_config({"outer": without}, []).outer.urls == ("http://127.0.0.1:8140",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (None, 'has no section "outer"'), ({"rule": "hogwild"}, "use no store"),
        ({"rule": "ssp", "staleness": -1}, "outer.staleness: -1 is below 0"),
        ({"perod": 3}, "Did you mean outer.period"),
    ],
)  # fmt: skip
def test_a_configuration_without_a_store_is_refused(outer: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        store_config({"outer": outer}, [])


def test_status_of_an_absent_store_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.outer.http.line._STATUS_SECONDS", 0.1)
    with listen("127.0.0.1", 0, service.SERVER) as taken:
        address = address_of(taken)
    assert main(["outer", "status", address]) == 1
    assert f"the store {address} does not answer" in capsys.readouterr().err
    assert main(["outer", "status", "http://[::1"]) == 1 and "is not an address" in capsys.readouterr().err
    assert main(["outer", "status"]) == 1 and "0 arguments; give the address" in capsys.readouterr().err


def test_status_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(rule="diloco", sites=2, period=10)
    with running(Store(settings)) as (address, _):
        link = HttpLink([address])
        for site in range(2):
            link.join(join_request(site, settings))
        link.close()
        assert main(["outer", "status", address.removeprefix("http://")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions none; 0 pushes wait; 0.0 MB received, 0.0 MB sent"
    assert [line.split() for line in lines[1:]] == [
        ["site", "life", "clock", "rows"], ["0", "0", "0", "0"], ["1", "1", "0", "0"],
    ]  # fmt: skip


def test_a_replay_compares_all_merges(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = settings_of(rule="diloco", period=10)
    store = Store(settings, tmp_path / "store", keep=True)
    life = store.join(join_request(0, settings)).life
    store.register(life, 0, layout_of())
    store.seed(life, 0, 0, body_of(torch.ones(ELEMENTS)))
    for seq in range(2):
        store.push(meta_of(life, seq, seq), 0, PushShare(), body_of(torch.randn(ELEMENTS)))
    store.close()
    assert main(["outer", "replay", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out == "2 merges have the same bits; versions 2\n"
    assert main(["outer", "replay", str(tmp_path / "none")]) == 1
    assert "give the folder that trine outer has written" in capsys.readouterr().err


def test_an_address_of_all_networks_has_the_name_of_the_host() -> None:
    with listen("0.0.0.0", 0, service.SERVER) as listening:
        assert address_of(listening).startswith(f"http://{socket.gethostname()}:")


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for name in ("engine.web.retries", "engine.outer.http.connection", "engine.outer.http.line"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineError, match="run: pip install httpx"):
        __import__("engine.outer.http.line")


@pytest.mark.long
def test_the_command_prints_its_address_and_ends_at_sigterm(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TRAINING))
    words = [sys.executable, "-m", "engine.launch.cli", "outer", str(config), "--port", "0", "--folder", "store"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("store at http://127.0.0.1:") and ": bsp, period 1, folder store" in line
        address = line.split()[2].rstrip(":")
        link = HttpLink([address])
        assert link.status().versions == (0,) or link.status().versions == ()
        link.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == f"store at {address} has ended\n"


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[4])
    return {**os.environ, "PYTHONPATH": root}
