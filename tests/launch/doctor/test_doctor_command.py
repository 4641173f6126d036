"""The command: one process, ranks of torchrun, what training would refuse, and a rank that does not come."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch.cli import main
from tests.selection import wide
from tests.warm_python import warm_torchrun

MODULE = ("-m", "engine.launch.doctor")


def run(command: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_TIMEOUT_SECONDS", "77")
    told = tmp_path / "told.json"
    assert main(["doctor", "--json", str(told)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("1 rank of 1 on 1 host, 1 pipeline x 1 data x 1 tensor\n")
    assert "\ntraining would start" in shown.out and not shown.err
    seen = json.loads(told.read_text())
    assert seen["starts"] and seen["facts"][0]["pid"] == os.getpid() and seen["axes"] == []
    assert os.environ["TRINE_TIMEOUT_SECONDS"] == "77", "as it was"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 4, "parallel": {"tensor": 2, "pipeline": 3}}, "only this one was started; start with"),
        ({"train_batch": 4}, "train_batch: unknown key. Did you mean train_batch_size?"),
        (None, "this file does not exist; give the path"),
    ],
)  # fmt: skip
def test_a_configuration_that_training_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, words: str
) -> None:
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(path)])
    shown = capsys.readouterr().out
    assert ended.value.code == 1
    assert words in shown and shown.endswith("training would not start: 1 error\n")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE is set and MASTER_ADDR, MASTER_PORT is missing"),
        ({"TRINE_TIMEOUT_SECONDS": "soon"}, "TRINE_TIMEOUT_SECONDS='soon' is not a number of 0 or more"),
        ({"TRINE_SHARED_MEMORY": "no"}, "TRINE_SHARED_MEMORY='no' is not a number of 0 or more"),
    ],
)
def test_an_environment_that_training_would_refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        status: object = main(["doctor"])
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert status == 1 and words in shown.out + shown.err


def test_mistakes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--timeout", "0"]) == 1
    assert "--timeout 0 is below 1" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere" / "told.json"
    assert main(["doctor", "--json", str(nowhere)]) == 1
    said = capsys.readouterr().err
    assert f"--json {nowhere} cannot be written: No such file or directory; give another path." in said


def test_an_interface_that_is_not_there(warm_python: str) -> None:
    done = run([warm_python, *MODULE, "--timeout", "5"], GLOO_SOCKET_IFNAME="ib9")
    assert done.returncode == 1, done.stderr
    assert (
        "error: GLOO_SOCKET_IFNAME=ib9 on " in done.stdout and " matches no interface; set it to one of " in done.stdout
    )
    assert "rank 0 of 1 could not join the job" in done.stdout, "what training would say"


def test_a_host_that_hangs_ends(tmp_path: Path, warm_python: str) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)  # nobody writes into it
    done = run([warm_python, *MODULE, str(pipe), "--timeout", "1"])
    assert done.returncode == 1 and "could not examine its host within 1 s: a file system" in done.stderr


@pytest.mark.long
def test_a_meeting_point_that_is_nowhere(warm_python: str) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    done = run([warm_python, *MODULE, "--timeout", "1"], **place)
    assert done.returncode == 1 and done.stdout.endswith("training would not start: 1 error\n"), done
    assert "could not join the job at no-such-host.invalid:29500, " in done.stdout


def test_torchrun_of_four_ranks(tmp_path: Path, warm_python: str) -> None:
    config, told = tmp_path / "config.json", tmp_path / "told.json"
    config.write_text(json.dumps({"train_batch_size": 8, "parallel": {"tensor": 2, "pipeline": 2}}))
    done = run([*warm_torchrun(warm_python), "--nproc_per_node", "4", *MODULE, str(config), "--json", str(told)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 ranks of 4 on 1 host, 2 pipeline x 1 data x 2 tensor\n") == 1
    seen = json.loads(told.read_text())
    axes = {(one["axis"], tuple(one["ranks"])): one for one in seen["axes"]}
    assert set(axes) == {("tp", (0, 1)), ("tp", (2, 3)), ("pp", (0, 2)), ("pp", (1, 3))}
    assert {one["over"] for key, one in axes.items() if key[0] == "tp"} == {"shared memory"}
    assert all(0 < one["latency"] < 1 and one["rate"] > 1e6 for one in axes.values())
    assert [one["rank"] for one in seen["facts"]] == [0, 1, 2, 3] and seen["shared_bytes"] == 1 << 20
    assert len({one["pid"] for one in seen["facts"]}) == 4


@pytest.mark.parametrize("ranks", [wide(3)])
def test_a_grid_that_does_not_fit_is_said_once(tmp_path: Path, warm_python: str, ranks: int) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 8, "parallel": {"tensor": 2}}))
    done = run([*warm_torchrun(warm_python), f"--nproc_per_node={ranks}", *MODULE, str(config)])
    assert done.returncode == 1
    sentence = "= 2 does not divide the world size 3; parallel.tensor 1 or 3 would fit."
    assert done.stdout.count(sentence) == 1 and sentence in done.stderr, "torchrun ends with it, too"


def test_a_rank_that_does_not_come_and_one_that_differs(tmp_path: Path, warm_python: str) -> None:
    """Three ranks by hand: of four the last is absent; of three one has another configuration."""
    config, other = tmp_path / "config.json", tmp_path / "other.json"
    config.write_text(json.dumps({"train_batch_size": 12}))
    other.write_text(json.dumps({"train_batch_size": 24}))
    for size, words in ((4, "error: rank 3 of 4 did not join at localhost:"), (3, "error: train_batch_size is 12 on ")):
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        seconds = "3" if size == 4 else "30"
        running = [
            subprocess.Popen(
                [warm_python, *MODULE, str(config if size == 4 or rank < 2 else other), "--timeout", seconds],
                env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        told = [one.communicate(timeout=60) for one in running]
        assert [one.returncode for one in running] == [1, 1, 1], told
        assert words in told[0][0] and "training would not start: 1 error" in told[0][0], told
        assert not told[1][0] and not told[2][0], "only rank 0 prints"


def test_the_command_needs_no_torch_to_say_what_it_takes() -> None:
    code = """
import sys
from engine.launch.cli import main
try:
    main(["doctor", "--help"])
except SystemExit:
    sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--timeout SECONDS" in done.stdout
