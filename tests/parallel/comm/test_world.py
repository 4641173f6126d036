"""Who we are, and what is said when the others cannot be found."""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import GridError
from engine.parallel.comm.launcher import Place
from engine.parallel.comm.world import (
    World,
    _listen,
    _rendezvous_failure,
    open_store,
    read_world,
    shares_memory,
    timeout_seconds,
    watchdog_seconds,
)

Start = Callable[[dict[str, str]], "subprocess.Popen[str]"]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without any variable of torchrun."""
    for name in (*TORCHRUN, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_we_are_alone() -> None:
    world = read_world()
    assert (world.rank, world.size, world.local_rank) == (0, 1, 0)


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN | {"LOCAL_RANK": "0"})
    world = read_world()
    assert (world.rank, world.size, world.local_rank) == (1, 2, 0)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_incomplete_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    set_all(monkeypatch, {name: value for name, value in TORCHRUN.items() if name != missing})
    with pytest.raises(GridError, match="start with torchrun") as caught:
        read_world()
    given, rule = str(caught.value).split(" is missing: ")
    assert given.endswith(f" is set and {missing}")
    assert all(name in given for name in TORCHRUN)
    assert rule.startswith("a distributed job needs all four of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT")


@pytest.mark.parametrize("value", ["", "-1", "two", "1.0", "1 2"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    set_all(monkeypatch, TORCHRUN | {name: value})
    with pytest.raises(GridError) as caught:
        read_world()
    assert str(caught.value) == f"{name}={value!r} is not a number of 0 or more; let torchrun set it."


@pytest.mark.parametrize("digits", [10, 30, 5000])
def test_a_number_that_no_clock_or_job_has_is_refused(monkeypatch: pytest.MonkeyPatch, digits: int) -> None:
    set_all(monkeypatch, TORCHRUN | {"WORLD_SIZE": "9" * digits, "TRINE_TIMEOUT_SECONDS": "9" * digits})
    for call, remedy in ((read_world, "let torchrun set it"), (timeout_seconds, "give fewer seconds")):
        with pytest.raises(GridError, match=rf" has {digits} digits, and at most 9 are allowed; {remedy}\.$"):
            call()


def test_a_digit_that_int_cannot_read_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN | {"RANK": "\u00b2"})  # superscript two
    with pytest.raises(GridError):  # str.isdigit alone would let it pass
        read_world()


# joining: in processes of their own, side by side because each waits for its time-out

JOIN = """
import warnings
warnings.simplefilter("error")
import torch
from engine.errors import GridError
from engine.parallel.comm.world import open_world, read_world
try:
    world = read_world()
    open_world(world)
    if world.size > 1:
        torch.distributed.barrier()  # a rank that leaves at once closes connections that the others are making
    print("joined", world.size)
except GridError as error:
    print("refused:", error)
"""


def closed_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, warm_python: str) -> Start:
    """A process that tries to join a job within two seconds."""
    script, pipe = tmp_path / "join.py", subprocess.PIPE
    script.write_text(JOIN)

    def begin(environment: dict[str, str]) -> "subprocess.Popen[str]":
        merged = {**os.environ, "TRINE_TIMEOUT_SECONDS": "2", **environment}
        return subprocess.Popen([warm_python, str(script)], env=merged, stdout=pipe, stderr=pipe, text=True)

    return begin


def test_a_world_that_cannot_be_joined_is_refused_with_its_address(start: Start) -> None:
    port, wrong = closed_port(), {"GLOO_SOCKET_IFNAME": "nope0"}
    started = [
        start(TORCHRUN | {"MASTER_PORT": port}),
        start(TORCHRUN | {"MASTER_PORT": closed_port(), "RANK": "0", "WORLD_SIZE": "1"} | wrong),
        start({}),
    ]
    closed, misnamed, single = (process.communicate(timeout=120)[0].strip() for process in started)
    assert f"refused: rank 1 of 2 could not join the job at 127.0.0.1:{port}, given up after " in closed
    assert "the same MASTER_ADDR and an open MASTER_PORT" in closed and "no network interface is set" in closed
    assert "refused: rank 0 of 1 could not join" in misnamed and "nope0" in misnamed
    assert "interface settings are {'GLOO_SOCKET_IFNAME': 'nope0'}" in misnamed
    assert single == "joined 1"


def test_the_time_that_is_told_is_the_time_that_has_passed() -> None:
    world = World(1, 2, 1, torch.device("cpu"), Place(1, 2, 1, "10.0.0.7", 29500))
    text = str(_rendezvous_failure(world, 2.4, RuntimeError("refused\nframe #0: c10::Error")))
    assert text.startswith("rank 1 of 2 could not join the job at 10.0.0.7:29500, given up after 2 s (refused); all")
    text = str(_rendezvous_failure(world, 0.1, RuntimeError("refused")))
    assert "10.0.0.7:29500, which failed at once (refused); all" in text, "0 s would look like a timeout"


def test_tasks_of_srun_join_at_the_first_node_of_their_step(start: Start) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    given = slurm | {"MASTER_PORT": closed_port(), "TRINE_TIMEOUT_SECONDS": "100"}
    started = [start(given | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["joined 2"] * 2


def listens_at(port: int) -> set[str]:
    """Addresses, as the kernel writes them, at which somebody listens on this port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


@pytest.mark.parametrize(
    ("address", "bound"), [("127.0.0.1", {"0100007F"}), ("192.0.2.1", set())], ids=["of this machine", "elsewhere"]
)
def test_the_store_listens_where_the_address_says(address: str, bound: set[str]) -> None:
    port = int(closed_port())
    descriptor = _listen(Place(0, 2, 0, address, port))
    assert listens_at(port) == bound
    assert (descriptor is not None) is bool(bound)
    if descriptor is not None:
        socket.close(descriptor)


def test_rank_zero_opens_the_store_there_and_another_rank_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = int(closed_port())
    worlds = [World(rank, 2, rank, torch.device("cpu"), Place(rank, 2, rank, "127.0.0.1", port)) for rank in (0, 1)]
    first, second = (open_store(world) for world in worlds)
    first.set("a", "b")
    assert second.get("a") == b"b" and listens_at(port) == {"0100007F"}


@pytest.mark.parametrize(("given", "shares"), [(None, True), ("1", True), ("0", False)])
def test_shared_memory_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, given: str | None, shares: bool) -> None:
    monkeypatch.delenv("TRINE_SHARED_MEMORY", raising=False)
    if given is not None:
        monkeypatch.setenv("TRINE_SHARED_MEMORY", given)
    assert shares_memory() is shares


def test_a_switch_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_SHARED_MEMORY", "off")
    with pytest.raises(GridError, match=r"TRINE_SHARED_MEMORY='off' is not a number of 0 or more"):
        shares_memory()


def test_the_watchdog_acts_before_a_collective_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRINE_TIMEOUT_SECONDS", "TRINE_WATCHDOG_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    assert (watchdog_seconds(), watchdog_seconds(90)) == (300.0, 45.0)
    monkeypatch.setenv("TRINE_TIMEOUT_SECONDS", "1800")
    assert watchdog_seconds(90) == 900.0
    monkeypatch.setenv("TRINE_WATCHDOG_SECONDS", "3")
    assert watchdog_seconds(90) == 3.0
