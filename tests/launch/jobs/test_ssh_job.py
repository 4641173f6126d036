"""How a job over ssh ends when an elastic one is done while a host comes back: shells stand for hosts."""

from contextlib import suppress
from pathlib import Path

import pytest

from engine.launch.jobs import ssh_job
from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.preflight import HostReply
from engine.launch.jobs.remote import Answer, SshRequest
from engine.launch.jobs.request import JobRequest, NodeCount
from engine.launch.jobs.ssh import HostRun, MeetingPlace, Screen, SshPlan
from engine.launch.jobs.ssh_job import SshJob
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
    scripts, made = {HERE.host: store, THERE.host: other}, list[HostRun]()

    def start(self: SshPlan, facts: HostReply, meeting: MeetingPlace, screen: Screen) -> HostRun:
        made.append(HostRun(facts.host, ["sh", "-c", scripts[facts.host]], {}, screen))
        made[-1].joined = True
        return made[-1]

    monkeypatch.setattr(SshPlan, "start", start)
    monkeypatch.setattr(ssh_job, "ask", lambda ssh, host, question: Answer(facts={}, reason=""))
    request = JobRequest(
        script="job.py", arguments=(), python="python", ranks_per_node=1,
        nodes=NodeCount(least=1, most=2, elastic=True), export={}, folder=tmp_path, name="job", port=None,
        join_seconds=60, grace_seconds=30,
    )  # fmt: skip
    ssh = SshRequest(
        hostfile=Path("hosts.txt"), hosts=(HERE.host, THERE.host), ssh=("ssh",), python="python", seconds=10
    )
    place = MeetingPlace(first=Host(name="node0", slots=None), port=1, identity="job")
    assert SshJob(SshPlan(request=request, ssh=ssh, hosts=(HERE, THERE)), place).run() == status
    for run in made:
        with suppress(BrokenPipeError), run._process:  # its pipes are closed, also the one that nobody reads
            pass
    assert said in capfd.readouterr().err
