"""A job over hosts that ssh reaches: it runs on all of them, ends on all of them, and says which one was the cause."""

import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from engine.launch.jobs import ssh as ssh_jobs
from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.remote import Answer, HostReply, SshRequest
from engine.launch.jobs.request import JobRequest, NodeCount
from engine.launch.jobs.ssh import HostRun, MeetingPlace, Screen, SshJob, SshPlan
from tests.cluster.jobs import ROOT, copied
from tests.launch.jobs.hosts import Hosts
from tests.launch.jobs.test_preflight import HERE, THERE
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
        "root@node2: cannot be reached by ssh within 10 s (Connection refused); make `ssh -p 2222",
        "node0: port 23456 of the rendezvous is taken; give another --port, or leave it out",
        "node1 has Python 3.9.1, but node0 has 3.11",
        "node1 has torch 2.9.1, but node0 has 2.",
        "node1 has another job.py than node0; copy the same one to all hosts.",
        f"node1 has other sources of Trine ({ROOT}/engine) than node0 ({ROOT}/engine); copy the same sources",
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
    assert "node1 cannot resolve node1; ranks connect by the names of" in ended.text


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
        assert ended.code == 255 and "trine launch: node1 was lost: its ssh connection ended (" in ended.text
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


LATE = "echo torch.distributed.elastic.rendezvous.api.RendezvousConnectionError >&2; exit 1"
BAD = "echo ValueError: odd input >&2; exit 1"
DONE = "exit 0"


def after(seconds: float, script: str) -> str:
    return f"sleep {seconds}; {script}"


@pytest.mark.parametrize(
    ("store", "other", "status", "said"),
    [
        (DONE, after(0.5, LATE), 0, "node1 came back after other hosts had finished.\n"),
        (after(0.5, DONE), LATE, 0, "node1 came back after other hosts had finished.\n"),
        (DONE, after(0.5, BAD), 1, "node1 was the first to fail: its torchrun ended with exit status 1"),
        (after(0.5, BAD), LATE, 1, "node1 was the first to fail: its torchrun ended with exit status 1"),
    ],
)
def test_a_host_that_comes_back_too_late_fails_nothing(
    store: str, other: str, status: int, said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert ended(monkeypatch, tmp_path, {HERE.host: store, THERE.host: other}, elastic=True) == status
    assert said in capfd.readouterr().err


def ended(
    monkeypatch: pytest.MonkeyPatch, folder: Path, scripts: Mapping[Host, str], elastic: bool,
    absent: Mapping[Host, str] | None = None,
) -> int:  # fmt: skip
    """The status of a job on the hosts that have scripts, of which those that are ``absent`` do not begin."""
    made = list[HostRun]()

    def start(self: SshPlan, facts: HostReply, meeting: MeetingPlace, screen: Screen) -> HostRun:
        made.append(HostRun(facts.host, ["sh", "-c", scripts[facts.host]], {}, screen))
        made[-1].joined = True
        return made[-1]

    monkeypatch.setattr(SshPlan, "start", start)
    monkeypatch.setattr(ssh_jobs, "ask", lambda ssh, host, question: Answer(facts={}, reason=""))
    request = JobRequest(
        script="job.py", arguments=(), python="python", ranks_per_node=1,
        nodes=NodeCount(least=1, most=2, elastic=elastic), export={}, folder=folder, name="job", port=None,
        join_seconds=60, grace_seconds=30,
    )  # fmt: skip
    ssh = SshRequest(
        hostfile=Path("hosts.txt"), hosts=(HERE.host, THERE.host), ssh=("ssh",), python="python", seconds=10
    )
    place = MeetingPlace(first=Host(name="node0", slots=None), port=1, identity="job")
    hosts = tuple(facts for facts in (HERE, THERE) if facts.host not in (absent or {}))
    status = SshJob(SshPlan(request=request, ssh=ssh, hosts=hosts), place, absent).run()
    for run in made:
        with suppress(BrokenPipeError), run._process:  # its pipes are closed, also the one that nobody reads
            pass
    return status


GONE = r"""
cat >&2 <<'END'
[W1126 18:28:47.240984633 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3): Connection reset
Exception raised from recvBytes at /__w/pytorch/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f7eed979b8d in libc10.so)
<omitting python frames>
frame #27: <unknown function> + 0x2724a (0x7f7eefc4524a in libc.so.6)

W1126 18:28:47.491000 21794 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1298] The node 'a' has failed to shutdown the rendezvous 'j' due to an error of type RendezvousConnectionError.
END
echo a line of the script >&2
"""  # noqa: E501


@pytest.mark.parametrize("status", [0, 1])
def test_what_torchrun_says_of_a_store_that_ended_first_is_shown_with_an_error_only(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = {HERE.host: DONE, THERE.host: f"{GONE}exit {status}"}
    assert ended(monkeypatch, tmp_path, scripts, elastic=False) == status
    told = capfd.readouterr().err
    assert "[node1] a line of the script" in told
    assert told.count("frame #") == 2 * status and told.count("[node1]") == 1 + 7 * status


TORCHRUN = r"""
cat >&2 <<'END'
Root Cause (first observed failure):
[0]:
  exitcode  : {code} (pid: 12957)
  traceback : {words}
END
exit 1
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "EngineError: control failed. A peer has probably stopped: rank 1."),
        (-15, "Signal 15 (SIGTERM)"),
    ],
)
def test_a_host_that_another_one_has_taken_down_is_not_called_the_first(
    code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = {
        HERE.host: TORCHRUN.format(code=code, words=words),
        THERE.host: after(0.6, TORCHRUN.format(code=3, words="ValueError: odd").replace("exit 1", "exit 3")),
    }
    assert ended(monkeypatch, tmp_path, scripts, elastic=False) == 3
    said = "trine launch: node1 was the first to fail: its torchrun ended with exit status 3"
    assert said in capfd.readouterr().err


def test_an_elastic_job_begins_without_a_host_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts, absent = {HERE.host: after(0.3, DONE)}, {THERE.host: "No route to host"}
    assert ended(monkeypatch, tmp_path, scripts, True, absent) == 0
    said = "trine launch: node1 does not answer (No route to host); 1 hosts start without it, and it is tried again."
    assert said in capfd.readouterr().err


STEPS = {"power": 120, "cable": 300}
"""A host that is cut off has the store and trains on alone, until its guard ends it after 30 s without a word from the
launcher; then there are some left for the others."""


def grids(run: Path) -> list[str]:
    """Numbers of ranks that trained one after the other, as the updates tell them that were made last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = [line["grid"].partition(" ")[0] for line in {line["step"]: line for line in lines}.values()]
    return ranks[:1] + [now for before, now in pairwise(ranks) if now != before]


@pytest.mark.long
@pytest.mark.parametrize(("lost", "fault"), [(0, "power"), (1, "power"), (0, "cable")])
def test_a_host_is_lost_and_comes_back(hosts: Callable[[int], Hosts], tmp_path: Path, lost: int, fault: str) -> None:
    made, run = hosts(2), tmp_path / "run"
    copied("elastic.py", tmp_path)
    node = made.nodes[lost]
    launch = made.launch("--elastic", "1:2", "elastic.py", str(run), str(STEPS[fault]), "0.2", ssh=QUICK)
    launch.wait_for("step 10 on 2 ranks")
    if fault == "power":
        node.end()
    else:
        made.cluster.unplug(node)
    launch.wait_for(f"trine launch: {node.name} was lost (")
    launch.wait_for("on 1 ranks", 60)
    if fault == "power":
        made.cluster.boot(node)
        made.start_sshd(node)
    else:
        made.cluster.plug(node)  # what was cut off still runs there, and gives way
    launch.wait_for(f"trine launch: {node.name} answers again; torchrun starts there.", 20)
    ended = launch.end(90)
    assert ended.code == 0, ended.text
    assert ("node1 has the store now; torchrun restarts on 1 hosts" in ended.text) is (lost == 0), ended.text
    assert grids(run) == ["2", "1", "2"] and not survivors(made)


@pytest.mark.long
def test_too_few_hosts_end_the_job(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    made = hosts(2)
    copied("elastic.py", tmp_path)
    launch = made.launch("--elastic", "2:2", "elastic.py", str(tmp_path / "run"), "1000", "0.1", ssh=QUICK)
    launch.wait_for("step 10 on 2 ranks")
    made.nodes.pop().end()
    ended = launch.end(40)
    assert ended.code == 255, ended.text
    assert ", and only 1 of at least 2 hosts are left; the job has ended on all hosts." in ended.text
    assert not survivors(made)
