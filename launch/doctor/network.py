"""Network interfaces of this host, asked of the kernel by socket: /sys may show those of another network namespace."""

import array
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

from engine.launch.doctor.examined import InterfaceFacts

_FLAGS, _ADDRESS, _ETHTOOL = 0x8913, 0x8915, 0x8946
"""Requests SIOCGIFFLAGS, SIOCGIFADDR and SIOCETHTOOL of Linux."""
_UP, _LOOPBACK = 1, 8
_SETTINGS = struct.Struct("IIIHBBBBBBIIHBBI8x")
"""``struct ethtool_cmd``: the first number is the command, 1 to read; speed stands in two halves."""
_UNKNOWN = 0xFFFFFFFF


def network_interfaces() -> tuple[InterfaceFacts, ...]:
    """All of them, with addresses and speed as far as they tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return tuple(_facts(asking, name) for _, name in socket.if_nameindex())


def _facts(asking: socket.socket, name: str) -> InterfaceFacts:
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
