"""What is said of hosts that differ, and of an ssh that does not lead to one."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import LaunchError
from engine.launch.cli import main
from engine.launch.jobs import remote
from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.remote import Answer, HostReply, SshRequest, differences, examine
from engine.launch.jobs.request import JobRequest, NodeCount

HERE = HostReply(
    host=Host(name="node0", slots=None),
    folder=True,
    python="3.11.7",
    torch="2.13.0",
    trine="0.1.0",
    script="a",
    engine="b",
    engine_folder="/opt/trine/engine",
    gpus=("NVIDIA H100",) * 8,
    port=29400,
    unknown=(),
)
THERE = replace(HERE, host=Host(name="node1", slots=None))


def test_equal_hosts_are_fine() -> None:
    assert not list(differences(THERE, HERE, "train.py"))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (replace(THERE, python="3.12.1"),
         "node1 has Python 3.12.1, but node0 has 3.11.7; all ranks need the same: give --python."),
        (replace(THERE, torch="2.11.0"),
         "node1 has torch 2.11.0, but node0 has 2.13.0; install the same version on all hosts."),
        (replace(THERE, trine=""),
         "node1 has no trine installed, but node0 has 0.1.0; install the same version on all hosts."),
        (replace(THERE, script="c"), "node1 has another train.py than node0; copy the same one to all hosts."),
        (replace(THERE, engine="", engine_folder=""),
         "node1 has other sources of Trine (none) than node0 (/opt/trine/engine); copy the same sources to all hosts, "
         "or install the same wheel."),
        (replace(THERE, gpus=("NVIDIA H100",) * 7),
         "node1 has 7 x NVIDIA H100, but node0 has 8 x NVIDIA H100; a job needs the same GPUs on all hosts; leave one "
         "of these hosts out."),
        (replace(THERE, gpus=("NVIDIA H100",) * 7 + ("NVIDIA A100",)),
         "node1 has 7 x NVIDIA H100, 1 x NVIDIA A100, but node0 has 8 x NVIDIA H100; a job needs the same GPUs on all "
         "hosts; leave one of these hosts out."),
        (replace(THERE, engine="c"),
         "node1 has other sources of Trine (/opt/trine/engine) than node0 (/opt/trine/engine); copy the same sources "
         "to all hosts, or install the same wheel."),
        (replace(THERE, gpus=()),
         "node1 has no GPU, but node0 has 8 x NVIDIA H100; a job needs the same GPUs on all hosts; leave one of these "
         "hosts out."),
    ],
)  # fmt: skip
def test_a_difference_is_a_sentence(facts: HostReply, sentence: str) -> None:
    assert [str(problem) for problem in differences(facts, HERE, "train.py")] == [sentence]


def refused(folder: Path, ssh: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said when this shell script stands for ssh: it is given the host as its last word but one."""
    (folder / "job.py").write_text("print('started')\n")
    (folder / "hosts").write_text("node0\nnode1:2\n")
    (folder / "ssh").write_text(f"#!/bin/bash\nhost=${{@:$#-1:1}} line=${{@:$#}}\n{ssh}\n")
    (folder / "ssh").chmod(0o700)
    os.chdir(folder)
    assert main(["launch", "--hostfile", "hosts", "--ssh", f"{folder}/ssh -q", *words, "job.py"]) == 1
    told = capsys.readouterr()
    assert not told.out
    return told.err.replace(str(folder), "DIR")


def test_a_host_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = refused(tmp_path, "exec sleep 100", capsys, "--preflight-timeout", "1")
    ends = "make `DIR/ssh -q {0}` work without a password, or remove {0} from hosts.\n"
    silent = "{0}: cannot be reached by ssh within 1 s (no answer); " + ends
    assert told == silent.format("node0") + silent.format("node1")
    told = refused(tmp_path, 'echo "me@$host: Permission denied (publickey)." >&2; exit 255', capsys)
    assert told.startswith("node0: cannot be reached by ssh within 10 s (me@node0: Permission denied (publickey));")
    told = refused(tmp_path, "ssh: Could not", capsys)
    assert told.startswith("node0: ") and " does not run there (" in told
    assert main(["launch", "--hostfile", "hosts", "--ssh", "/no/ssh", "job.py"]) == 1
    assert "within 10 s (/no/ssh cannot be started: No such file or directory);" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["node0", "node2"])
def test_an_elastic_job_is_examined_without_hosts_that_do_not_answer(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("node0", "node1", "node2")
    hosts = tuple(Host(name=name, slots=None) for name in names)

    def ask(ssh: SshRequest, host: Host, question: Mapping[str, Any]) -> Answer:
        if host.name == gone:
            return Answer(facts=None, lost=True, reason="No route to host")
        facts = {field.name: getattr(HERE, field.name) for field in fields(HERE) if field.name != "host"}
        port = 29400 if question["port"] is not None else 0
        return Answer(facts={**facts, "port": port, "unknown": [gone]})

    monkeypatch.setattr(remote, "ask", ask)
    ssh = SshRequest(hostfile=Path("hosts"), hosts=hosts, ssh=("ssh",), python="python", seconds=1)
    job = JobRequest(
        script="job.py", arguments=(), python="python", ranks_per_node=8,
        nodes=NodeCount(least=2, most=3, elastic=True), export={}, folder=tmp_path, name="job", port=None,
        join_seconds=60, grace_seconds=30,
    )  # fmt: skip
    examined = examine(job, ssh)
    assert [facts.host.name for facts in examined.found] == [name for name in names if name != gone]
    assert examined.found[0].port == 29400 and examined.absent == {Host(name=gone, slots=None): "No route to host"}
    for nodes in (NodeCount(least=3, most=3, elastic=True), NodeCount(least=3, most=3)):
        with pytest.raises(LaunchError, match=f"^{gone}: cannot be reached by ssh"):
            examine(replace(job, nodes=nodes), ssh)


def test_what_a_host_lacks_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100'\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = refused(tmp_path, 'echo "Welcome to $host"; exec sh -c "$line"', capsys)
    assert "node1 has 1 x NVIDIA H100 but 2 ranks; each needs its own GPU: give --ranks-per-node 1." in told
    assert (
        "node0 cannot resolve node0, node1; ranks connect by the names of hosts: write names or addresses there" in told
    )
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec /usr/bin/env python3 -I -S "$@"\n')
    python.chmod(0o700)
    told = refused(tmp_path, 'exec sh -c "$line"', capsys, "--python", str(python))
    assert "node0 has no torch for DIR/python; install torch there, or pass another --python PATH." in told
