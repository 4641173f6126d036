"""Options of ``trine launch``: what they start, as ``--dry-run`` prints it, and what is said of wrong ones."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.launch.cli import main
from tests.cluster.jobs import ROOT

SCRIPT = """
import os, signal, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ.get("MINE"), flush=True)
if sys.argv[1] == "fail":
    sys.exit(3)
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, where the launcher is started; no variable of this machine is passed on."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if re.match(r"NCCL_|GLOO_|TRINE_|OMP_NUM|PYTHONPATH|CUDA_VISIBLE", name):
            monkeypatch.delenv(name)
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("node0 slots=4\nme@node1:4\nnode2\n")
    return tmp_path


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(
        capsys, "--ranks-per-node", "2", "--export", "A=b c", "--grace", "90", "job.py", "--x", "it's", "--dry-run"
    )
    assert told == (
        f"env TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90 'A=b c' {sys.executable} -m torch.distributed.run --standalone "
        "--nproc-per-node=2 job.py --x 'it'\"'\"'s' --dry-run\n"
    )


def test_gpus_are_counted_and_their_absence_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{folder}")
    assert main(["launch", "--dry-run", "job.py"]) == 0
    told = capsys.readouterr()
    assert "--nproc-per-node=1 " in told.out
    assert told.err == (
        "trine launch: nvidia-smi lists no GPU of this host, so 1 rank starts; --ranks-per-node N starts more.\n"
    )
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100'\necho 'NVIDIA H100'\necho 'NVIDIA A100'\n")
    (folder / "nvidia-smi").chmod(0o700)
    for visible, ranks in ((None, 3), ("0,2", 2), ("", 1), ("-1", 1), ("GPU-8a", 1)):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert f"--nproc-per-node={ranks} " in dry(capsys, "job.py")
    for given, second in (("2, 0", "0"), ("GPU-8a,GPU-8b", "GPU-8b")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert f" CUDA_VISIBLE_DEVICES={second} " in dry(capsys, "--include", "localhost:1", "job.py")
    exported = dry(capsys, "--export", "CUDA_VISIBLE_DEVICES=1,2", "job.py")
    assert "=1,2 " in exported
    assert "--nproc-per-node=2 " in exported


def test_hosts_of_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NOT_ASKED", "1")
    monkeypatch.setenv("ASKED", "2")
    words = ["--hostfile", "hosts", "--ssh", "ssh -p 2222", "--export", "ASKED", "job.py", "x"]
    lines = dry(capsys, *words).splitlines()
    assert len(lines) == 6 and lines[2] == (
        "[me@node1] ssh -p 2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 "
        "-o ServerAliveCountMax=3 -T me@node1"
    )
    assert lines[3] == (
        f"[me@node1] cd {folder} && env TORCH_ELASTIC_SHUTDOWN_TIMEOUT=30 NCCL_DEBUG=WARN ASKED=2 {sys.executable} "
        "-m torch.distributed.run --nnodes=3 --nproc-per-node=4 --rdzv-backend=c10d "
        "--rdzv-endpoint=node0:A_FREE_PORT_OF_node0 --rdzv-id=job-0 "
        "--rdzv-conf=join_timeout=60,read_timeout=60,is_host=0 --local-addr=node1 job.py x"
    )
    assert "is_host=1 --local-addr=node0" in lines[1] and "--nproc-per-node=NUMBER_OF_GPUS" in lines[5]
    told = dry(capsys, "--nodes", "2", "--port", "29400", "--join-timeout", "9", *words)
    assert told.count("--nnodes=2 --nproc-per-node=4") == 2 and "--rdzv-endpoint=node0:29400" in told
    assert "join_timeout=9,read_timeout=9" in told and "node2" not in told
    (folder / "hosts").write_text("[fe80::1]:1\n")
    assert "--rdzv-endpoint=[fe80::1]:A_FREE_PORT_OF_fe80::1'" in dry(capsys, *words)


@pytest.mark.parametrize("option", ["--elastic", "--nodes"])
def test_an_elastic_job_has_the_options_that_a_plain_torchrun_needs(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = dry(capsys, "--hostfile", "hosts", option, "1:3", "job.py")
    restarts = "--max-restarts=100"
    conf = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
    assert told.count(restarts) == 3 and told.count(conf) == 3 and told.count("--nnodes=1:3") == 3
    assert told.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--slurm", "--nodes", "two", "job.py"],
         "--nodes two: give a number of nodes, such as 4, or MIN:MAX, such as 2:4."),
        (["--hostfile", "hosts", "--elastic", "4", "job.py"], "--elastic 4: give MIN:MAX, such as 2:4."),
        (["--hostfile", "hosts", "--elastic", "4:2", "job.py"],
         "--elastic 4:2: a job has at least 1 node, and MAX is at least MIN; give N, or MIN:MAX such as 2:4."),
        (["--nodes", "2", "job.py"],
         "--nodes does not apply to a job on this host; use it with --hostfile or --slurm or --kubernetes."),
        (["--slurm", "--kubernetes", "jobset", "job.py"],
         "--slurm and --kubernetes: a job runs in one place; give one."),
        (["--hostfile", "hosts", "--nodes", "9", "job.py"],
         "9 nodes are requested, but hosts lists 3; add hosts to it."),
        (["--hostfile", "hosts", "--nodes", "2", "--elastic", "1:2", "job.py"],
         "--nodes and --elastic both set the number of nodes; give one of them."),
        (["--hostfile", "hosts", "--ssh", "ssh -o 'A=b", "job.py"],
         """--ssh "ssh -o 'A=b" is no command; give a program and its options, such as 'ssh -p 2222'."""),
        (["--hostfile", "hosts", "--ssh", " ", "job.py"],
         "--ssh ' ' is no command; give a program and its options, such as 'ssh -p 2222'."),
        (["none.py"], "none.py is not a file in {folder}; give the path of the training script."),
        (["--export", "NO_SUCH", "job.py"],
         "--export NO_SUCH: the launcher has no such variable; set it, or give NO_SUCH=VALUE."),
        (["--export", "a-b=1", "job.py"],
         "--export a-b=1: 'a-b' is not the name of a variable; give NAME or NAME=VALUE."),
        (["--slurm", "--nodes", "2", "job.py"],
         "--slurm needs --ranks-per-node N, since the GPUs of its nodes cannot be counted from here."),
        (["--slurm", "job.py"], "--slurm needs --nodes N, or --nodes MIN:MAX for an elastic job."),
        (["--kubernetes", "jobset", "--image", "x", "job.py"],
         "--kubernetes needs --nodes N, or --nodes MIN:MAX for an elastic job."),
        (["--kubernetes", "jobset", "--nodes", "2", "job.py"],
         "--kubernetes needs --image NAME: a container with Python, torch, Trine and the script."),
        (["--kubernetes", "jobset", "--nodes", "2", "--image", "x", "--name", "A_b", "job.py"],
         "--name A_b: Kubernetes accepts up to 40 lower-case letters, digits and hyphens, beginning with a letter; "
         "give another --name."),
        (["--python", "/no/python", "--ranks-per-node", "1", "job.py"],
         "/no/python cannot be started (No such file or directory); give --python PATH."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["launch", *words]) == 1
    assert capsys.readouterr().err == sentence.format(folder=folder) + "\n"


@pytest.mark.parametrize("count", ["0", "-2", "x"])
def test_counts_are_whole_numbers(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", f"--ranks-per-node={count}", "job.py"])
    assert f"argument --ranks-per-node: {count!r} is not a whole number of at least 1" in capsys.readouterr().err
    for option in ("--gpus-per-node", "--max-restarts"):
        with pytest.raises(SystemExit):
            main(["launch", f"{option}=-1", "job.py"])
        assert f"argument {option}: '-1' is not a whole number of at least 0" in capsys.readouterr().err


def started(warm_python: str, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """The launcher on this host; torchrun and ranks start warm."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON_EXEC": warm_python}
    command = [sys.executable, "-m", "engine.launch.cli", "launch", "--python", warm_python, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_a_job_on_this_host_is_torchrun(warm_python: str, folder: Path) -> None:
    job = started(warm_python, folder, "--num_gpus", "2", "--export", "MINE=1", "--local_rank", "job.py", "print")
    told, _ = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert all(f"rank {rank} of 2 ['--local_rank={rank}', 'print'] 1\n" in told for rank in range(2)), told
    job = started(warm_python, folder, "--ranks-per-node", "1", "job.py", "fail")
    told, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and "exitcode  : 3" in told, told


def test_a_signal_reaches_the_ranks(warm_python: str, folder: Path) -> None:
    job = started(warm_python, folder, "--ranks-per-node", "1", "job.py", "wait")
    assert job.stdout is not None
    assert any("rank 0 of 1" in line for line in job.stdout)
    time.sleep(0.3)  # its handler stands
    job.send_signal(signal.SIGTERM)
    told, _ = job.communicate(timeout=60)
    assert "saved" in told and job.returncode == 1, told


def test_the_launcher_imports_no_torch() -> None:
    lines = "from engine.launch.cli import main; import sys; main(['launch', '--dry-run', 'job.py']); "
    command = [sys.executable, "-c", f"{lines}assert not {{'torch', 'numpy'}} & set(sys.modules)"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
