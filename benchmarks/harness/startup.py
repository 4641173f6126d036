"""Seconds from starting ``torchrun`` until all ranks are ready for their first step.

Includes the launcher, the import of torch on every rank, the process group and the engine, most of which the fork
server of ``team`` skips.

    python -m benchmarks step --torchrun        calls this for every mode of several ranks
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict

from benchmarks.peers.registry import make_trainer
from benchmarks.peers.workload import Mode, Workload

READY = "ready at"


def torchrun(ranks: int, *words: str) -> list[str]:
    """Returns the command that runs a module with its arguments on every rank of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", *words]


def launch(mode: Mode) -> float:
    """Runs torchrun once on the standard workload; returns the seconds until its ranks were ready.

    Raises:
        subprocess.CalledProcessError: the job failed.
    """
    started = time.time()
    command = torchrun(mode.ranks, "benchmarks.harness.startup", json.dumps(asdict(mode)))
    job = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    line = next(line for line in job.stdout.splitlines() if line.startswith(READY))
    return float(line.removeprefix(READY)) - started


def _rank(mode: Mode) -> None:
    """Body of one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = make_trainer(mode, Workload())
    dist.barrier()
    if dist.get_rank() == 0:
        print(READY, time.time(), flush=True)  # the wall clock is the one that two processes share
    del trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Mode(**json.loads(sys.argv[1])))
