"""A batch script for Slurm: one torchrun a node, a checkpoint before the time limit, then the job queued again."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.errors import LaunchError
from engine.launch.jobs.job_file import WRITTEN
from engine.launch.jobs.request import JobRequest
from engine.launch.jobs.torchrun import Rendezvous, shell_line, torchrun_command, torchrun_environment

SECONDS_BEFORE_THE_END = 60
"""Between the end of the time for checkpoints and the time limit: torchrun and srun end in it."""
PROCESSORS_WITH_GPU = 8
"""Of a rank: Python, the threads of NCCL, and workers that read data. Nodes with GPUs have as many for each."""
_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
"""Below the range from which Linux takes ports of its own accord, and another one for each job of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """Options that only Slurm has."""

    time: str | None
    partition: str | None
    account: str | None
    gpus_per_node: int | None
    cpus_per_rank: int | None
    """None: ``PROCESSORS_WITH_GPU`` for a rank with a GPU, 1 for one without."""
    more: tuple[str, ...]
    """Other options of sbatch, as ``--qos=high``."""


def slurm_script(request: JobRequest, slurm: SlurmRequest) -> str:
    """The text of the script.

    Raises:
        LaunchError: nodes or ranks were not given.
    """
    if request.nodes is None:
        raise LaunchError("--slurm needs --nodes N, or --nodes MIN:MAX for an elastic job.")
    ranks = request.ranks("--slurm")
    meeting = Rendezvous(
        address="@HEAD@", port="@PORT@", identity="@JOB@", is_host="@FIRST@", local_address="@NODE@"
    )  # fmt: skip
    words = {
        "@HEAD@": '"$head"',
        "@PORT@": '"$port"',
        "@JOB@": '"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        "@FIRST@": "$((SLURM_NODEID == 0))",
        "@NODE@": '"$SLURMD_NODENAME"',
        "@NODES@": f"{request.nodes.least}:$SLURM_JOB_NUM_NODES" if request.elastic else '"$SLURM_JOB_NUM_NODES"',
    }
    torchrun = shell_line(torchrun_command(request, ranks, "@NODES@", meeting), words)
    return _TEXT.format(
        written=WRITTEN,
        head="\n".join(f"#SBATCH {option}" for option in _options(request, slurm, ranks)),
        variables="\n".join(f"export {k}={shlex.quote(v)}" for k, v in torchrun_environment(request).items()),
        folder=shlex.quote(str(request.folder)),
        port=request.port or _PORT,
        kill="0" if request.elastic else "1",
        torchrun=shlex.quote(f"exec {torchrun}"),
    )


def _processors(slurm: SlurmRequest, ranks: int, gpus: int) -> list[str]:
    """How the one task of a node, which is torchrun with all ranks, gets more than the one processor of sbatch."""
    given = {option.partition("=")[0].partition(" ")[0] for option in slurm.more}
    if given & {"--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive"}:
        return []
    each = slurm.cpus_per_rank or (PROCESSORS_WITH_GPU if gpus else 1)
    return [f"--cpus-per-task={each * ranks}"]


def _options(request: JobRequest, slurm: SlurmRequest, ranks: int) -> list[str]:
    nodes = request.nodes
    gpus = ranks if slurm.gpus_per_node is None else slurm.gpus_per_node
    given = {"time": slurm.time, "partition": slurm.partition, "account": slurm.account}
    return [
        f"--job-name={request.name}",
        f"--nodes={str(nodes).replace(':', '-')}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *_processors(slurm, ranks, gpus),
        *(f"--{option}={value}" for option, value in given.items() if value is not None),
        f"--signal=B:TERM@{request.grace_seconds + SECONDS_BEFORE_THE_END}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
        *(["--no-kill"] if request.elastic else []),
        *slurm.more,
    ]


_TEXT = """#!/bin/bash
{written}; `sbatch` takes it, and `sbatch --test-only` checks it.
{head}

cd {folder} || exit 1
{variables}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port={port}
export head port

# Slurm sends TERM to this shell before the time limit. The ranks get it through srun and torchrun, finish their step,
# commit a checkpoint and end; then the job is queued again, and goes on from there.
limit=no
step=
forward() {{ limit=yes; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null; }}
trap forward TERM

# srun does not take over how many processors a task has, and would bind all ranks of a node to those of one
processors=${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}
srun --kill-on-bad-exit={kill} --cpus-per-task="$processors" --cpu-bind=none bash -c {torchrun} &
step=$!
[ "$limit" = no ] || kill -TERM "$step"
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends wait early
    wait "$step"
    status=$?
done
if [ "$limit" = yes ] && [ "$status" -ne 0 ]; then
    echo "the time limit is near: job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
"""


def submit(path: Path) -> int:
    """Hand the script to Slurm; the exit status is that of sbatch.

    Raises:
        LaunchError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(f"--submit: there is no sbatch here; on a login node of the cluster: sbatch {path}.")
    sys.stdout.flush()
    return subprocess.run(["sbatch", str(path)], check=False).returncode
