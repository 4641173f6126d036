"""A job over hosts that ssh reaches: it runs on all of them, ends on all of them, and says which one was the cause."""

import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.jobs import ROOT, copied
from tests.launch.jobs.hosts import Hosts
from tests.selection import wide

MakeHosts = Callable[[int], Hosts]

JOB = """
import os, signal, sys, time
what, rank = sys.argv[1], int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, sys.argv[1:], flush=True)
print(os.environ.get("SECRET"), os.environ.get("NCCL_DEBUG"), os.getcwd(), file=sys.stderr, flush=True)

def save(number, frame):
    print("saved by", rank, flush=True)
    sys.exit(143)

if what != "print":
    signal.signal(signal.SIGTERM, save)
    if what == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if what == "fail" and rank == 1:
        sys.exit("odd input")
    time.sleep(1000)
"""
LEFT = ("torch.distributed.run", "job.py", "trine_launch", "exec(json")
"""Words of command lines that a job has on a host."""
QUICK = "-o ServerAliveInterval=1"


def script_in(folder: Path) -> str:
    (folder / "job.py").write_text(JOB)
    return "job.py"


def survivors(hosts: Hosts) -> list[str]:
    """Processes of a job that are left, after the second that an orphan may need to be seen."""
    deadline = time.monotonic() + 5
    while (left := [line for node in hosts.nodes for line in hosts.processes(node, LEFT)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    return left


def test_a_job_runs_on_all_hosts(hosts: MakeHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    made = hosts(2)
    ended = made.launch("--export", "SECRET=a 'b' $c", script_in(tmp_path), "print", "--x", "it's").end()
    assert ended.code == 0, ended.text
    for rank in range(2):
        assert f"[node{rank}] rank {rank} of 2 on node{rank} ['print', '--x', \"it's\"]\n" in ended.text
        assert f"[node{rank}] a 'b' $c WARN {tmp_path}\n" in ended.text
    assert not survivors(made)


@pytest.mark.long
def test_a_job_over_ssh_trains_as_one_process(hosts: MakeHosts, tmp_path: Path) -> None:
    copied("parity.py", tmp_path)
    ended = hosts(2).launch("--ranks-per-node", "2", "parity.py", "data=2,tensor=2", "1").end(120)
    assert ended.code == 0 and "[node0] holds" in ended.text, ended.text


def test_all_that_differs_is_said_at_once_and_nothing_starts(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(2)
    script = script_in(tmp_path)
    made.hostfile.write_text("node0\nnode1:1\nroot@node2 slots=1\n")  # the desk has no sshd
    other = tmp_path / "other"
    (other / "torch-2.9.1.dist-info").mkdir(parents=True)
    (other / "torch-2.9.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.1\n")
    (other / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.9.1'\n")
    python = made.interpreter("fake", "false", f'[ "$(hostname)" = node1 ] && export PYTHONPATH={other}')
    for name, real in (("job.py", tmp_path / script), ("errors.py", ROOT / "engine" / "errors.py")):
        (other / name).write_text("print('another')\n")
        mount = ["mount", "--bind", str(other / name), str(real)]
        assert made.nodes[1].start(mount).wait(10) == 0
    taken = "import socket, time; s = socket.create_server(('', 23456)); print('taken', flush=True); time.sleep(100)"
    made.hold(made.nodes[0], sys.executable, "-c", taken)
    time.sleep(0.5)
    ended = made.launch("--python", str(python), "--port", "23456", script, "print").end()
    assert ended.code == 1 and "rank 0" not in ended.text
    for sentence in (
        "root@node2: cannot be reached by ssh within 10 s (Connection refused); `ssh -p 2222",
        "node0: port 23456 is taken, and the ranks are to meet there; give another --port, or none",
        "node1 has Python 3.9.1 and node0 has 3.11",
        "node1 has torch 2.9.1 and node0 has 2.",
        "node1 has another job.py than node0; copy the same one to all hosts.",
        f"node1 has another code of Trine ({ROOT}/engine) than node0 ({ROOT}/engine); copy the same sources",
    ):
        assert sentence in ended.text, ended.text
    assert ended.text.count("\n") == 6, ended.text


@pytest.mark.long
def test_names_and_folders_that_a_host_lacks(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(2)
    script = script_in(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "names").write_text(f"127.0.0.1 localhost\n{made.nodes[0].address} node0\n")
    assert made.nodes[1].start(["mount", "--bind", str(tmp_path / "names"), "/etc/hosts"]).wait(10) == 0
    assert made.nodes[0].start(["mount", "-t", "tmpfs", "none", str(tmp_path / "empty")]).wait(10) == 0
    (tmp_path / "empty" / "job.py").write_text(JOB)
    ended = made.launch("--python", "/no/python", script, "print").end()
    assert ended.code == 1 and "node0: /no/python does not run there (" in ended.text, ended.text
    ended = made.launch("empty/job.py", "print").end()
    assert ended.code == 1, ended.text
    assert f"node0 has no empty/job.py in {tmp_path}; share the folder or copy the script." in ended.text
    assert "node1 cannot resolve node1; ranks meet by the names of" in ended.text


@pytest.mark.parametrize("fault", ["fail", wide("power"), wide("cable")])
def test_a_job_ends_everywhere_with_one_host(hosts: MakeHosts, tmp_path: Path, fault: str) -> None:
    made = hosts(2)
    what = "fail" if fault == "fail" else "sleep"
    cold = ["--python", sys.executable] if fault == "cable" else []  # what is killed takes its own children with it
    launch = made.launch("--grace", "5", *cold, script_in(tmp_path), what, ssh=QUICK)
    if fault != "fail":
        for rank in range(2):
            launch.wait_for(f"rank {rank} of 2")
        began = time.monotonic()
        if fault == "power":
            made.nodes[1].end()
        else:
            made.cluster.unplug(made.nodes[1])
        ended = launch.end(30)
        assert time.monotonic() - began < 15, ended.text
        assert ended.code == 255 and "trine launch: node1 was lost, its ssh connection ended (" in ended.text
    else:
        ended = launch.end(30)
        assert ended.code == 1 and "[node1] odd input" in ended.text, ended.text
        assert "trine launch: node1 was the first to fail: its torchrun ended with exit status 1" in ended.text
    assert ended.text.endswith("; the job has ended on all hosts.\n") and "[node0] saved by 0" in ended.text
    if fault == "power":
        made.nodes.pop()
    if fault == "cable":  # nobody can tell it, so it gives up by itself
        time.sleep(45)
    assert not survivors(made)


@pytest.mark.long
def test_a_signal_is_passed_on_and_a_second_one_ends_at_once(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(2)
    launch = made.launch(script_in(tmp_path), "sleep")
    for rank in range(2):
        launch.wait_for(f"rank {rank} of 2")
    launch.signal(signal.SIGTERM)
    ended = launch.end(30)
    assert ended.code == 1 and all(f"[node{rank}] saved by {rank}\n" in ended.text for rank in range(2)), ended.text
    assert ended.text.endswith("trine launch: stopped by SIGTERM; the job has ended on all hosts.\n")
    launch = made.launch("--python", sys.executable, "job.py", "stubborn")
    for rank in range(2):
        launch.wait_for(f"rank {rank} of 2")
    for _ in range(2):
        launch.signal(signal.SIGINT)
        time.sleep(1.5)
    ended = launch.end(30)
    assert ended.code != 0 and "stopped by SIGINT" in ended.text
    assert not survivors(made)


@pytest.mark.long
def test_nothing_outlives_the_launcher(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(2)
    launch = made.launch(script_in(tmp_path), "sleep")
    for rank in range(2):
        launch.wait_for(f"rank {rank} of 2")
    assert survivors(made), "they are seen while they run"
    launch.signal(signal.SIGKILL)
    launch.process.wait(10)
    assert not survivors(made)


@pytest.mark.long
def test_a_host_that_does_not_join_is_named(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(2)
    made.nodes[1].held.run(f"ip route add unreachable {made.nodes[0].address}")
    ended = made.launch("--join-timeout", "4", "--port", "23456", script_in(tmp_path), "print").end(60)
    assert ended.code not in (0, None), ended.text
    assert (
        "trine launch: node1 did not join the others within 4 s: it has not reached port 23456 of node0" in ended.text
    )
    assert "node0 did not join" not in ended.text and not survivors(made)


def test_free_ports_are_free() -> None:
    from engine.launch.jobs.probe import _free_port

    with socket.create_server(("", 0)) as taken:
        assert _free_port(taken.getsockname()[1]) == 0
    assert _free_port(None) == 0 and _free_port(0) > 0
