"""Python's and NumPy's generators in several threads, each with an engine."""

import subprocess
import sys

import pytest

THREADS = """
import sys, threading, time
from engine.parallel.model.rng_streams import HostDraws

sys.setswitchinterval(1e-6)
until = time.monotonic() + 4

def forwards():
    while time.monotonic() < until:
        draws = HostDraws()
        with draws.forward(0, (0,), True, None):
            pass

threads = [threading.Thread(target=forwards) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.long
def test_threads_exchange_the_generators_one_after_the_other() -> None:
    """NumPy frees the exchanged generator while another thread copies it, which ended the process by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
