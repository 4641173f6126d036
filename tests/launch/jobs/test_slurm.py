"""The batch script: bash takes it, and it runs with stand-ins of Slurm's commands that really start the ranks."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.launch.cli import main
from engine.launch.jobs.schedulers import WRITTEN, write_job_file
from tests.cluster.jobs import ROOT, copied

COMMANDS: Mapping[str, str] = {
    "scontrol": """
        echo "scontrol $*" >> calls
        [ "$1" = show ] && printf '127.0.0.1\\nother\\n'""",
    "srun": """
        echo "srun $1" >> calls
        while [ "${1#--}" != "$1" ]; do shift; done
        export SLURM_NODEID=0 SLURMD_NODENAME=127.0.0.1
        exec "$@" """,  # a task of the step, which gets the signals that srun would pass on to it
    "sbatch": """
        echo "sbatch $*" >> calls
        echo "Submitted batch job 7" """,
}
SCRIPT = """
import os, signal, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ["MINE"], flush=True)
if sys.argv[1] == "fail":
    sys.exit("odd input")
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
    time.sleep(100)
"""
OPTIONS = ("--nodes", "1", "--ranks-per-node", "2", "--gpus-per-node", "0", "--export", "MINE=a b")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the commands of Slurm on the path."""
    monkeypatch.chdir(tmp_path)
    for name, body in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "job.py").write_text(SCRIPT)
    return tmp_path


def batch(folder: Path, warm_python: str, *words: str, script: str = "job.py") -> "subprocess.Popen[str]":
    """Run the script of a job as Slurm would start it on the first of its nodes."""
    options = [*OPTIONS, "--name", "job", "--python", warm_python]
    assert main(["launch", "--slurm", *options, script, *words]) == 0
    slurm = {
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "1",
    }
    environment = os.environ | slurm | {"PYTHONPATH": str(ROOT), "PYTHON_EXEC": warm_python}
    command, pipe = ["bash", "job.sbatch"], subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("words", "processors"),
    [
        ([], ["--cpus-per-task=16"]),
        (["--cpus-per-rank", "12"], ["--cpus-per-task=24"]),
        (["--gpus-per-node", "0"], ["--cpus-per-task=2"]),
        (["--sbatch=--exclusive"], []),
        (["--sbatch=--cpus-per-gpu=4"], []),
    ],
)
def test_a_node_has_processors_for_all_of_its_ranks(
    words: list[str], processors: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--slurm", "--dry-run", "--nodes", "1", "--ranks-per-node", "2", *words, "job.py"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^#SBATCH (--cpus-per-task.*)$", text, re.MULTILINE) == processors
    assert "processors=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}\n" in text
    assert 'srun --kill-on-bad-exit=1 --cpus-per-task="$processors" --cpu-bind=none bash' in text


def test_the_script_has_the_options_of_sbatch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--time", "2:00:00", "--partition", "p", "--account", "a b", "--sbatch=--qos=high", "--grace", "240"]
    job = ["--nodes", "2:4", "--ranks-per-node", "8", "--name", "big #1", "--port", "29400", "job.py", "it's $HOME"]
    assert main(["launch", "--slurm", "--dry-run", *words, *job]) == 0
    text = capsys.readouterr().out
    assert not (folder / "big #1.sbatch").exists()
    assert re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE) == [
        "--job-name='big #1'", "--nodes=2-4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64",
        "--time=2:00:00", "--partition=p",
        "--account='a b'", "--signal=B:TERM@300", "--requeue", "--open-mode=append", "--output=%x-%j.out", "--no-kill",
        "--qos=high",
    ]  # fmt: skip
    assert "port=29400\n" in text and "srun --kill-on-bad-exit=0 " in text and "--nnodes=2:$SLURM_JOB_NUM_NODES" in text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_job_ends_as_its_ranks_do(folder: Path, warm_python: str) -> None:
    job = batch(folder, warm_python, "print", "it's $HOME")
    told, _ = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert all(f"rank {rank} of 2 ['print', \"it's $HOME\"] a b\n" in told for rank in range(2)), told
    assert (folder / "calls").read_text() == "scontrol show hostnames node[0-1]\nsrun --kill-on-bad-exit=1\n"
    job = batch(folder, warm_python, "fail")
    told, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and "odd input" in told and "requeue" not in (folder / "calls").read_text(), told


def test_a_job_at_its_time_limit_saves_and_is_queued_again(folder: Path, warm_python: str) -> None:
    job = batch(folder, warm_python, "wait")
    assert job.stdout is not None
    for rank in range(2):
        assert any(f"rank {rank} of 2" in line or "of 2" in line for line in job.stdout)
    time.sleep(0.3)  # their handlers stand
    job.send_signal(signal.SIGTERM)  # as --signal=B:TERM@.. does
    told, _ = job.communicate(timeout=60)
    assert told.count("saved\n") == 2 and job.returncode == 0, told
    assert "the time limit is near: job 7 is queued again\n" in told
    assert (folder / "calls").read_text().endswith("scontrol requeue 7\n")


@pytest.mark.long
def test_a_job_goes_on_from_what_it_saved_at_its_time_limit(folder: Path, warm_python: str) -> None:
    words = [str(folder / "run"), "60", "0.1"]
    script = copied("elastic.py", folder).name
    job = batch(folder, warm_python, *words, script=script)
    assert job.stdout is not None
    assert any("step 10 on 2 ranks" in line for line in job.stdout)
    time.sleep(0.25)  # between two of the checkpoints that it writes anyway
    job.send_signal(signal.SIGTERM)
    told, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and "is queued again" in told, told
    (done,) = re.findall(r"stopped by SIGTERM after update (\d+)", told)
    told, _ = batch(folder, warm_python, *words, script=script).communicate(timeout=60)
    assert f", {done} updates made;" in told and "step 60 on 2 ranks" in told, told


def test_the_script_is_submitted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--slurm", "--submit", "--out", "a.sbatch", *OPTIONS, "job.py"]) == 0
    assert (folder / "calls").read_text() == "sbatch a.sbatch\n" and "Submitted batch job 7" in capfd.readouterr().out


def test_without_slurm_the_script_is_written_and_the_absence_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "--slurm", "--submit", *OPTIONS, "job.py"]) == 1
    sentence = "--submit: there is no sbatch here; on a login node of the cluster, run: sbatch job.sbatch.\n"
    assert capsys.readouterr().err == sentence and WRITTEN in (folder / "job.sbatch").read_text()


def test_a_folder_whose_name_is_no_text_is_written_as_it_is(tmp_path: Path) -> None:
    write_job_file(tmp_path / "job.sbatch", os.fsdecode(b"cd /data/\xff\n"))
    assert (tmp_path / "job.sbatch").read_bytes() == b"cd /data/\xff\n"


def test_a_file_of_somebody_else_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["launch", "--slurm", *OPTIONS, "job.py"]) == 0
    assert "job.sbatch is written; submit it with: sbatch job.sbatch" in capsys.readouterr().out
    (folder / "job.sbatch").write_text("mine")
    assert main(["launch", "--slurm", *OPTIONS, "job.py"]) == 1
    sentence = "job.sbatch exists, but trine launch has not written it; give another --out, or move it.\n"
    assert capsys.readouterr().err == sentence and (folder / "job.sbatch").read_text() == "mine"
