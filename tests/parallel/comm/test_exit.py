"""At the exit of the interpreter no thread of a process group is left, which could abort a run that has ended well."""

import subprocess
import sys

import pytest

from tests.selection import wide

SCRIPT = """
import atexit, contextlib, glob

def running():
    names = []
    for task in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(task) as file:  # a thread that ends in between has no name any more
            names.append(file.read().strip())
    return sorted(name for name in names if "gloo" in name)

atexit.register(lambda: print("left", running()))  # registered first, so it runs last

import torch, engine

def start():
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

{start}
eng = engine.initialize(torch.nn.Linear(4, 4), {{"train_batch_size": 2}}, lambda output, batch: output.square().mean())
eng.train_batch(torch.ones(2, 4))
print("before", len(running()))
{end}
"""


UNFINISHED = "eng.backward(eng(torch.ones(2, 4)).square().mean())"


@pytest.mark.parametrize(
    ("start", "end"),
    [
        wide("", "", id="left open"),
        wide("start()", "eng.close()", id="group of the user, closed"),
        pytest.param("", UNFINISHED, id="unfinished"),
        pytest.param("start()", "", id="group of the user, left open", marks=pytest.mark.long),
        pytest.param("", "eng.close()", id="closed", marks=pytest.mark.long),
    ],
)
def test_no_thread_of_a_process_group_is_left(start: str, end: str) -> None:
    script = SCRIPT.format(start=start, end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *_, before, left = done.stdout.splitlines()
    assert before != "before 0" and left == "left []"
