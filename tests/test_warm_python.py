"""A process that starts warm is like any other: arguments, folder, environment, streams, exit status and signals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TELL = """
import atexit, json, os, sys, threading, time
atexit.register(lambda: print("at exit"))
heard = threading.Event()
threading.Thread(target=lambda: (heard.wait(), time.sleep(0.05), print("of a thread"))).start()
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["GIVEN"], "torch" in sys.modules, __name__, sys.path[0]]))
sys.stdout.write(sys.stdin.read())
heard.set()
if sys.argv[1] == "raise":
    def wrong():
        raise ValueError("a mistake")
    wrong()
sys.exit(int(sys.argv[1]))
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"GIVEN": "a value", "PYTHONPATH": "/elsewhere"}
    return subprocess.run(command, cwd=folder, env=environment, input="heard\n", capture_output=True, text=True)


def test_it_runs_a_script_as_python_does(tmp_path: Path, warm_python: str) -> None:
    script, folder = tmp_path / "tell.py", tmp_path / "folder"
    script.write_text(TELL)
    folder.mkdir()
    for given in ("0", "7", "raise"):
        warm, cold = (run([python, str(script), given, "b c"], folder) for python in (warm_python, sys.executable))
        assert warm.returncode == cold.returncode == (1 if given == "raise" else int(given))
        assert warm.stderr == cold.stderr, "a traceback begins with the script"
        told, *rest = warm.stdout.splitlines()
        assert json.loads(told) == [[given, "b c"], str(folder), "a value", True, "__main__", str(tmp_path)]
        assert json.loads(told.replace("true", "false")) == json.loads(cold.stdout.splitlines()[0])
        assert rest == cold.stdout.splitlines()[1:] == ["heard", "of a thread", "at exit"]


def test_it_runs_a_module(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])\nsys.exit('a reason')")
    done = run([warm_python, "-u", "-m", "mine", "-u"], tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("__main__ ['-u']\n", "a reason\n", 1)


WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"asked to stop\\n"), sys.exit(143)))
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, -10), (signal.SIGKILL, -9)])
def test_signals_reach_it_and_are_how_it_ends(
    tmp_path: Path, warm_python: str, number: signal.Signals, code: int
) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    with subprocess.Popen([warm_python, "wait.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout
        place = Path("/proc") / job.stdout.readline().strip()
        assert place.exists()
        job.send_signal(number)
        said = job.stdout.read()  # to the end: it holds the pipe
    assert job.returncode == code and said == ("asked to stop\n" if code == 143 else "")
    deadline = time.monotonic() + 10
    while place.exists():
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)
