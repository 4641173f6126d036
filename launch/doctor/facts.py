"""The facts of this rank and its host. Only ``with_gpus`` needs torch."""

import array
import os
import platform
import resource
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fcntl import ioctl
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import engine
from engine.errors import first_line
from engine.launch.doctor.examined import GpuFacts, HostFacts, InterfaceFacts
from engine.launch.jobs.probe import sources_digest
from engine.parallel.comm.host_barrier import NO_HOST, host_identity
from engine.parallel.comm.launcher import route_address


def host_facts(variables: Mapping[str, str], target: str) -> HostFacts:
    """What can be known without torch; ``target``: where the ranks meet."""
    name, identity = socket.gethostname(), host_identity()
    size, free = _shared_memory()
    return HostFacts(
        name=name,
        identity=name if identity == NO_HOST else identity.hex(),
        versions={"python": platform.python_version(), "trine": engine.__version__}
        | {package: _version(package) for package in ("torch", "triton")},
        digest=sources_digest(Path(engine.__file__).parent),
        interfaces=network_interfaces(),
        named_addresses=addresses_of(name),
        route_address=route_address(target),
        gloo_wish=variables.get("GLOO_SOCKET_IFNAME", ""),
        nccl_wish=variables.get("NCCL_SOCKET_IFNAME", ""),
        shm_bytes=size,
        shm_free=free,
        memory_free=_memory_free(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=Path("/sys/class/infiniband").exists(),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _limit(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _shared_memory() -> tuple[int | None, int]:
    try:
        told = os.statvfs("/dev/shm")
    except OSError:
        return None, 0
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def _memory_free() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def with_gpus(host: HostFacts, variables: Mapping[str, str], device: str) -> HostFacts:
    """The facts with GPUs and NCCL, for which torch has to be asked; ``device``, that of this rank, is tried."""
    import torch

    if not torch.cuda.is_available():
        return replace(host, gpu_problem=_unavailable(variables))
    problem, gpus = "", list[GpuFacts]()
    try:
        for index in range(torch.cuda.device_count()):
            told = torch.cuda.get_device_properties(index)
            gpus.append(GpuFacts(name=told.name, bytes=told.total_memory))
        if device:
            torch.ones(8, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        problem = f"{device or 'a GPU'} does not compute: {first_line(error)}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return replace(host, gpus=tuple(gpus), gpu_problem=problem, versions={**host.versions, "nccl": nccl})


def _unavailable(variables: Mapping[str, str]) -> str:
    """Why torch uses no GPU although this host has one; empty if it has none or is told to use none."""
    import torch

    if variables.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "none") or not _has_gpu():
        return ""
    if torch.version.cuda is None:
        return "the installed torch is its CPU build"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch.cuda.is_available() is False"


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*"))


_FLAGS, _ADDRESS, _ETHTOOL = 0x8913, 0x8915, 0x8946
"""Requests SIOCGIFFLAGS, SIOCGIFADDR and SIOCETHTOOL of Linux."""
_UP, _LOOPBACK = 1, 8
_SETTINGS = struct.Struct("IIIHBBBBBBIIHBBI8x")
"""``struct ethtool_cmd``: the first number is the command, 1 to read; speed stands in two halves."""
_UNKNOWN = 0xFFFFFFFF


def network_interfaces() -> tuple[InterfaceFacts, ...]:
    """All of them, with addresses and speed as far as they tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return tuple(_interface(asking, name) for _, name in socket.if_nameindex())


def _interface(asking: socket.socket, name: str) -> InterfaceFacts:
    request = struct.pack("16s24x", name.encode())
    flags, addresses = 0, list[str]()
    with suppress(OSError):  # it has gone
        (flags,) = struct.unpack_from("H", ioctl(asking, _FLAGS, request), 16)
    with suppress(OSError):  # it has no address
        addresses.append(socket.inet_ntoa(ioctl(asking, _ADDRESS, request)[20:24]))
    return InterfaceFacts(
        name=name,
        addresses=(*addresses, *_addresses_6(name)),
        up=bool(flags & _UP),
        loopback=bool(flags & _LOOPBACK),
        megabits=_megabits(asking, name),
    )


def _addresses_6(name: str) -> Iterator[str]:
    with suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, device = line.split()
            if device == name:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _megabits(asking: socket.socket, name: str) -> int | None:
    answer = array.array("B", _SETTINGS.pack(1, *[0] * 15))
    try:
        ioctl(asking, _ETHTOOL, struct.pack("16sP16x", name.encode(), answer.buffer_info()[0]))
    except OSError:
        return None
    told = _SETTINGS.unpack(answer)
    speed = int(told[3]) | int(told[12]) << 16
    return speed if 0 < speed < _UNKNOWN else None


def addresses_of(name: str) -> tuple[str, ...]:
    """Addresses of a host's name; none if nobody knows it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(place[0]) for *_, place in found))
