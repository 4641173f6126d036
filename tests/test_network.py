"""Networks of namespaces: as slow as they are said to be, and gone afterwards."""

import os
import socket
import subprocess
import sys
from time import monotonic

import pytest

from tests.network import can_make_networks, network

pytestmark = pytest.mark.long
RECEIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as link:
    count = 0
    while data := link.recv(1 << 16):
        count += len(data)
print(count)
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"


@pytest.fixture(scope="module", autouse=True)
def _needs_root() -> None:
    if not can_make_networks():
        pytest.skip("needs root, ip and tc")


def here() -> str:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in (names + links).splitlines() if str(os.getpid()) in line)


def test_a_link_has_its_rate_and_nothing_of_a_network_remains() -> None:
    megabyte = bytes(1 << 20)
    with network(2, "20mbit") as slow:
        assert all(name in here() for name in slow.names)
        with socket.create_server((slow.address, 0)) as listening:
            words = [sys.executable, "-c", RECEIVE, slow.address, str(listening.getsockname()[1])]
            with subprocess.Popen(slow.command(1, words), stdout=subprocess.PIPE, text=True) as site:
                link, _ = listening.accept()
                began = monotonic()
                with link:
                    link.sendall(megabyte)
                assert site.stdout is not None and int(site.stdout.read()) == len(megabyte)
                assert monotonic() - began > 0.38  # 8.4 Mbit at 20 Mbit/s take 0.42 s
    assert not here()


def test_a_failed_test_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), network(1):
        raise ZeroDivisionError
    assert not here()


def test_a_cut_link_is_mended() -> None:
    with network(1, "100mbit") as slow, socket.create_server((slow.address, 0)) as listening:
        words = slow.command(0, [sys.executable, "-c", CONNECT, slow.address, str(listening.getsockname()[1])])
        assert subprocess.run(words, check=False).returncode == 0
        slow.cut(0)
        assert subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode != 0
        slow.mend(0)
        assert subprocess.run(words, check=False).returncode == 0
