"""The facts of this machine, and the digest of sources."""

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

import engine
from engine.launch.doctor import examined
from engine.launch.doctor.examined import HostFacts, InterfaceFacts, network_interfaces
from engine.launch.jobs.probe import sources_digest
from engine.parallel.comm.launcher import addresses_of, route_address
from tests.launch.doctor.seen import host

ROOT = Path(__file__).parents[3]


def test_facts_of_this_machine() -> None:
    told = examined.host_facts({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^lo"}, "localhost")
    assert told.name == socket.gethostname() and told.identity
    assert told.versions["trine"] == engine.__version__
    assert told.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told.versions["torch"] != "not installed"
    assert (told.gloo_wish, told.nccl_wish) == ("lo", "^lo")
    assert told.shm_bytes is None or 0 <= told.shm_free <= told.shm_bytes
    assert told.memory_free is not None and told.memory_free > 1 << 20
    assert told.open_files is None or told.open_files > 8
    carrier = told.carrier()
    assert carrier is not None and carrier.loopback and carrier.up


def test_interfaces_of_this_machine() -> None:
    (loopback,) = [one for one in network_interfaces() if one.loopback]
    assert "127.0.0.1" in loopback.addresses and loopback.megabits is None
    assert {one.name for one in network_interfaces()} == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in addresses_of("localhost") and route_address("127.0.0.1") == "127.0.0.1"
    assert addresses_of("no-such-host.invalid") == () and route_address("no-such-host.invalid") == ""


@pytest.mark.parametrize(
    ("changes", "carrier"),
    [
        ({}, "eth0"),
        ({"gloo_wish": "lo"}, "lo"),
        ({"gloo_wish": "eth0,lo"}, "eth0"),
        ({"gloo_wish": "ib0"}, None),
        ({"named_addresses": ("127.0.1.1",)}, "eth0"),
        ({"named_addresses": ("127.0.1.1",), "route_address": "127.0.0.1"}, "lo"),
        ({"named_addresses": (), "route_address": "10.0.0.1"}, "eth0"),
        ({"named_addresses": ("10.9.9.9", "10.0.0.1")}, "eth0"),
        ({"named_addresses": ("10.9.9.9",), "route_address": ""}, None),
        ({"named_addresses": ("fd00::2",), "interfaces": (InterfaceFacts(name="e", addresses=("fd00::2",)),)}, "e"),
    ],
)
def test_the_interface_over_which_gloo_sends(changes: dict[str, object], carrier: str | None) -> None:
    found = host(0, **changes).carrier()
    assert (found and found.name) == carrier


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    linked, copied = tmp_path / "linked", tmp_path / "copied"
    other = tmp_path / "elsewhere"
    for folder in (linked, other):
        folder.mkdir()
    (linked / "a.py").write_text("x = 1\n")
    (other / "b.py").write_text("y = 2\n")
    os.symlink(other, linked / "inner")
    shutil.copytree(linked, copied)
    first = sources_digest(linked)
    assert first == sources_digest(copied) and len(first) == 12
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "a.py").write_text("left out")
    (copied / "notes.txt").write_text("left out")
    assert sources_digest(copied) == first
    (copied / "inner" / "b.py").write_text("y = 3\n")
    changed = sources_digest(copied)
    (copied / "inner" / "b.py").rename(copied / "inner" / "c.py")
    assert len({first, changed, sources_digest(copied)}) == 3


def asked(monkeypatch: pytest.MonkeyPatch, there: bool, visible: str = "0") -> HostFacts:
    monkeypatch.setattr(examined, "_has_gpu", lambda: there)
    return examined.with_gpus(host(0), {"CUDA_VISIBLE_DEVICES": visible}, "")


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("its GPUs can be used")
    assert asked(monkeypatch, there=False).gpu_problem == ""
    assert asked(monkeypatch, there=True, visible="").gpu_problem == "", "it is told to use none"
    problem = asked(monkeypatch, there=True).gpu_problem
    assert problem == "the installed torch is its CPU build" if torch.version.cuda is None else problem
