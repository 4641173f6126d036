"""Files that list hosts, as DeepSpeed and MPI write them."""

from pathlib import Path

import pytest

from engine.errors import LaunchError
from engine.launch.jobs.hostfile import Host, read_hostfile


def hosts_of(folder: Path, text: str) -> list[Host]:
    path = folder / "hosts"
    path.write_text(text)
    return read_hostfile(path)


@pytest.mark.parametrize(
    ("line", "name", "slots"),
    [
        ("node0", "node0", None),
        ("node0 slots=4", "node0", 4),
        ("node0   slots = 4 max_slots=8   # a comment", "node0", 4),
        ("node0:4", "node0", 4),
        ("me@node-0.site.org:2", "me@node-0.site.org", 2),
        ("10.0.0.7 slots=1", "10.0.0.7", 1),
        ("node0 slots=4 gpu=h100 rack = 7", "node0", 4),
        ("node0 gpu=h100", "node0", None),
        ("[fe80::1] slots=2", "fe80::1", 2),
        ("fe80::1%eth0 slots=2 gpu=h100", "fe80::1%eth0", 2),
        ("me@[2001:db8::7]:4", "me@2001:db8::7", 4),
        ("::1", "::1", None),
    ],
)
def test_forms_of_a_line(tmp_path: Path, line: str, name: str, slots: int | None) -> None:
    assert hosts_of(tmp_path, f"# all\n\n{line}\n") == [Host(name=name, slots=slots)]


def test_a_host_is_known_to_others_without_its_user(tmp_path: Path) -> None:
    assert [host.address for host in hosts_of(tmp_path, "a\nme@b\n")] == ["a", "b"]


def test_all_wrong_lines_are_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        hosts_of(tmp_path, "node0 slots=four\nnode1:0\nnode2\nme@node2:4\nnode3 node4\n")
    path = tmp_path / "hosts"
    assert str(caught.value).splitlines() == [
        f"{path}:1: 'node0 slots=four' is not a host; write NAME, NAME slots=N or NAME:N.",
        f"{path}:2: node1 has 0 slots; a host has at least 1 rank, so remove the line.",
        f"{path}:4: me@node2 is listed twice; write it once, with all of its slots.",
        f"{path}:5: 'node3 node4' is not a host; write NAME, NAME slots=N or NAME:N.",
    ]


def test_no_hosts_at_all(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="names no host; write one a line"):
        hosts_of(tmp_path, "# none yet\n")
    with pytest.raises(LaunchError, match=r"--hostfile .*none cannot be read"):
        read_hostfile(tmp_path / "none")
