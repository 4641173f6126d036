"""How a job over ssh ends when an elastic one is done while a host comes back: shells stand for hosts."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from engine.launch.jobs import ssh as ssh_jobs
from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.remote import Answer, HostReply, SshRequest
from engine.launch.jobs.request import JobRequest, NodeCount
from engine.launch.jobs.ssh import HostRun, MeetingPlace, Screen, SshJob, SshPlan
from tests.launch.jobs.test_preflight import HERE, THERE

LATE = "echo torch.distributed.elastic.rendezvous.api.RendezvousConnectionError >&2; exit 1"
BAD = "echo ValueError: odd input >&2; exit 1"
DONE = "exit 0"


def after(seconds: float, script: str) -> str:
    return f"sleep {seconds}; {script}"


@pytest.mark.parametrize(
    ("store", "other", "status", "said"),
    [
        (DONE, after(0.5, LATE), 0, "node1 came back when others had ended well.\n"),
        (after(0.5, DONE), LATE, 0, "node1 came back when others had ended well.\n"),
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
    said = "trine launch: node1 does not answer (No route to host); 1 hosts begin, and it is tried again."
    assert said in capfd.readouterr().err
