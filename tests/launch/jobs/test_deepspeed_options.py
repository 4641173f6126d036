"""Options of the deepspeed launcher: what each becomes on ``trine launch``, and what is said of it."""

import importlib.util
import re
from pathlib import Path

import pytest

from engine.launch.cli import main
from engine.launch.jobs.hostfile import Host, chosen_hosts
from engine.launch.jobs.request import IDLE, IDLE_VALUES, REFUSED, TAKEN


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and a hostfile; the home folder is another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "job.py").touch()
    (tmp_path / "alone").write_text("localhost slots=2\n")
    (tmp_path / "six").write_text("[fe80::1]:2\nme@fe80::2 slots=2\nw1:1\n")
    (tmp_path / "hosts").write_text("w0 slots=4 gpu=h100\nw1 slots=4\nw2 slots=2\n")
    return tmp_path


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[str]]:
    """What would be started, and what is said beside it."""
    assert main(["launch", "--dry-run", *words]) == 0
    told = capsys.readouterr()
    return told.out, told.err.splitlines()


@pytest.mark.parametrize(
    ("words", "begun", "said"),
    [
        (["--num_gpus", "2", "job.py"], "--standalone --nproc-per-node=2 job.py",
         "--num_gpus 2: taken as --ranks-per-node 2."),
        (["--num_accelerators=2", "job.py"], "--nproc-per-node=2 job.py",
         "--num_accelerators 2: taken as --ranks-per-node 2."),
        (["--num_gpus=2", "--num_nodes=1", "job.py"], "--standalone --nproc-per-node=2 job.py",
         "--num_nodes 1: taken as --nodes 1."),
        (["--num_gpus=1", "--master_port", "29501", "job.py"],
         "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:29501 --nproc-per-node=1 job.py",
         "--master_port 29501: taken as --port 29501."),
        (["--num_gpus=1", "--local_rank", "job.py", "--x"], "job.py '--local_rank=${local_rank}' --x",
         "--local_rank: taken as --local-rank."),
        (["--num_gpus=1", "--module", "pack.train", "--x"], "--nproc-per-node=1 --module pack.train --x", ""),
        (["--num_gpus=1", "-m", "pack.train"], "--nproc-per-node=1 --module pack.train", ""),
        (["--num_gpus=1", "--no_python", "bash", "-c", "x"], "--nproc-per-node=1 --no-python bash -c x",
         "--no_python: taken as --no-python."),
        (["--num_gpus=2", "--bind_cores_to_rank", "job.py", "--x"], "-m engine.launch.jobs.bound_cores ",
         "--bind_cores_to_rank: taken as --bind-cores."),
        (["--num_gpus=2", "--bind_core_list", "0-3,8", "-m", "pack.train"],
         "-m engine.launch.jobs.bound_cores --cores 0-3,8 ", "--bind_core_list 0-3,8: taken as --bind-cores-to 0-3,8."),
        (["-H", "alone", "job.py"], "--standalone --nproc-per-node=2 job.py",
         "alone lists only this host, so ssh is not used."),
        (["-H", "alone", "--include", "localhost:1", "job.py"], "CUDA_VISIBLE_DEVICES=1 ", ""),
        (["-H", "alone", "--ssh", "ssh -p 2222", "job.py"], "ssh -p 2222 -o BatchMode=yes", ""),
        (["-H", "six", "--master_port", "29501", "job.py"], "'--rdzv-endpoint=[fe80::1]:29501' ", ""),
        (["-H", "six", "-i", "me@fe80::2:1", "job.py"], "CUDA_VISIBLE_DEVICES=1 ", ""),
        (["-H", "six", "-e", "[fe80::1]:0@w1", "job.py"], "CUDA_VISIBLE_DEVICES=1 ", ""),
        (["--include", "localhost:1,3", "job.py"], "CUDA_VISIBLE_DEVICES=1,3 ", ""),
        (["-H", "hosts", "-i", "w0@w1:0,2", "job.py"], "CUDA_VISIBLE_DEVICES=0,2 ", ""),
        (["-H", "hosts", "--exclude", "w2@w1:0", "job.py"], "CUDA_VISIBLE_DEVICES=1,2,3 ", ""),
        (["-H", "hosts", "--num_nodes", "2", "--ssh_port", "2222", "job.py"], "ssh -p 2222 -o BatchMode=yes",
         '--ssh_port 2222: taken as --ssh "ssh -p 2222".'),
    ],
)  # fmt: skip
def test_a_spelling_is_taken_and_said(
    words: list[str], begun: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = dry(capsys, *words)
    assert begun in out, out
    assert not said or f"trine launch: {said}" in err, err


def test_the_environment_file_reaches_all_hosts_and_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".deepspeed_env").write_text("# of the cluster\nNCCL_IB=1\nB=x=y\n")
    out, err = dry(capsys, "-H", "hosts", "job.py")
    assert out.count("NCCL_IB=1 B=x=y ") == 3
    assert f"trine launch: all hosts get NCCL_IB, B of {folder}/.deepspeed_env." in err
    (folder / ".deepspeed_env").write_text("no pair\n")
    assert main(["launch", "-H", "hosts", "job.py"]) == 1
    assert capsys.readouterr().err.endswith(
        ".deepspeed_env:1: 'no pair' is not NAME=VALUE; correct or remove the line.\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--autotuning", "run"], "--autotuning is an option of deepspeed that trine launch lacks; trine plan"),
        (["--launcher", "slurm"], "--launcher slurm is not a launcher of trine launch; give --slurm."),
        (["--launcher=mvapich"], "--launcher mvapich is not a launcher of trine launch; start the script with mp"),
        (
            ["--no_ssh"],
            "--no_ssh is an option of deepspeed that trine launch lacks; give --hostfile, or start torchrun",
        ),
        (["-H", "hosts", "--include", "w9"], "--include w9: 'w9' is not one of w0, w1, w2; name hosts of this job."),
        (["-H", "hosts", "--include", "w2:2"], "--include w2:2: w2 has 2 slots, counted from 0, and no"),
        (
            ["-H", "hosts", "--include", "w2:a"],
            "--include w2:a: 'w2:a' is not a host with GPUs; write NAME or NAME:0,2",
        ),
        (["-H", "hosts", "--exclude", "w0@w1@w2"], "--exclude w0@w1@w2 leaves no host; name fewer."),
        (["-H", "hosts", "--include", "w0", "--exclude", "w1"], "--include and --exclude both select hosts; give one"),
        (["--num_nodes", "2"], "--nodes does not apply to a job on this host; use it with --hostfile or"),
    ],
)
def test_what_is_otherwise_here_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words, "job.py"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)


def test_a_file_of_variables_is_said_to_be_for_other_jobs_on_one_host(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".deepspeed_env").write_text("A=1\n")
    out, err = dry(capsys, "--num_gpus=1", "job.py")
    assert (
        "A=1" not in out and ".deepspeed_env is read only for jobs over ssh, as in DeepSpeed; --export NAME=" in err[-1]
    )


def test_a_host_that_is_named_twice_has_the_gpus_of_both() -> None:
    hosts = [Host(name="w0", slots=4), Host(name="w1", slots=4)]
    assert [host.devices for host in chosen_hosts(hosts, "w0:2@w1@w0:0@w1:1", None)] == [(0, 2), ()]


def test_hosts_without_slots_cannot_lose_some() -> None:
    hosts = [Host(name="w0", slots=None), Host(name="w1", slots=2)]
    assert [host.name for host in chosen_hosts(hosts, None, "w0")] == ["w1"]
    assert chosen_hosts(hosts, "w0:1", None) == [Host(name="w0", slots=1, devices=(1,))]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["launch", "--num_gpuz", "2", "job.py"], "--num_gpuz is not an option of this command; did you mean --num_gp"),
        (["launch", "--xyzzy", "x.py"], "--xyzzy is not an option of this command; trine launch --help lists its "),
        (["watch", "--evry", "2"], "--evry is not an option of this command; did you mean --every?"),
    ],
)  # fmt: skip
def test_an_unknown_option_is_answered_by_the_command_itself(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    told = capsys.readouterr().err
    assert caught.value.code == 2 and told.startswith(f"usage: trine {words[0]} ")
    assert f"trine {words[0]}: error: {sentence}" in told


@pytest.mark.peers
def test_every_option_of_the_deepspeed_launcher_is_known() -> None:
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    source = Path(str(found.origin)).with_name("launcher") / "runner.py"
    theirs = set(re.findall(r'"(--?\w+)"', source.read_text().partition("def parse_args")[2].partition("\ndef ")[0]))
    ours = {*IDLE, *IDLE_VALUES, *REFUSED, *TAKEN, *(name for names in TAKEN.values() for name in names)}
    assert theirs and not theirs - ours - {"--module", "--no_ssh", "--ssh_port", "--launcher"}
