"""Job files for schedulers.

Slurm        a batch script: one torchrun a node, a checkpoint before the time limit, then the job queued again
Kubernetes   manifests: a JobSet, or a TrainJob of Kubeflow Trainer v2 with the runtime that it needs

A JobSet ``jobset.x-k8s.io/v1alpha2`` gives its pods the DNS names ``<set>-<job>-<job index>-<pod index>.<set>`` by a
headless service. A ``TrainJob`` of ``trainer.kubeflow.org/v1alpha1`` fills the container ``node`` of the job that is
labelled as the trainer. Volumes are in its runtime, because version 2.2 has renamed the fields that patch them.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import LaunchError
from engine.launch.jobs.request import JobRequest
from engine.launch.jobs.torchrun import RendezvousEndpoint, shell_line, torchrun_command, torchrun_environment

WRITTEN = "# Written by trine launch"
"""First line of written files; other files are never overwritten."""


def write_job_file(path: Path, text: str) -> None:
    """Writes ``text``, a batch script or manifest, to ``path``; overwrites only files that ``trine launch`` has
    generated.

    Raises:
        LaunchError: ``path`` is a file that ``trine launch`` has not generated, or cannot be written.
    """
    try:
        if path.exists() and WRITTEN not in path.read_text(encoding="utf-8", errors="replace"):
            raise LaunchError(f"{path} exists, but trine launch has not written it; give another --out, or move it.")
        path.write_text(text, encoding="utf-8", errors="surrogateescape")  # paths may be no text
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror}); give another --out.") from error


SECONDS_BEFORE_THE_END = 60
"""Seconds between the deadline of the last checkpoint and Slurm's time limit, for torchrun and srun to end."""
PROCESSORS_WITH_GPU = 8
"""CPUs per rank with a GPU, for Python, NCCL's threads and data workers."""
_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
"""Port below Linux's ephemeral range, different for each job of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """Options of ``trine launch`` for Slurm only."""

    time: str | None
    partition: str | None
    account: str | None
    gpus_per_node: int | None
    cpus_per_rank: int | None
    """CPUs per rank; None: ``PROCESSORS_WITH_GPU`` with a GPU, else 1."""
    more: tuple[str, ...]
    """Other options of sbatch, such as ``--qos=high``."""


def slurm_script(request: JobRequest, slurm: SlurmRequest) -> str:
    """Returns the batch script for Slurm's ``sbatch`` as text.

    Raises:
        LaunchError: nodes or ranks are not specified.
    """
    if request.nodes is None:
        raise LaunchError("--slurm needs --nodes N, or --nodes MIN:MAX for an elastic job.")
    ranks = request.ranks("--slurm")
    meeting = RendezvousEndpoint(
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
    """Returns sbatch's option for the processors of a node's one task, torchrun with all ranks; its default is one."""
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
        f"--job-name={shlex.quote(request.name)}",
        f"--nodes={str(nodes).replace(':', '-')}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *_processors(slurm, ranks, gpus),
        *(f"--{option}={shlex.quote(value)}" for option, value in given.items() if value is not None),
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
# commit a checkpoint and end; then the job is queued again, and continues from there.
limit=no
step=
forward() {{ limit=yes; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null; }}
trap forward TERM

# srun does not inherit the processors of a task, and would bind all ranks of a node to those of one
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
    """Submits the batch script ``path`` to Slurm; returns the exit status of ``sbatch``.

    Raises:
        LaunchError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"--submit: there is no sbatch here; on a login node of the cluster, run: sbatch {shlex.quote(str(path))}."
        )
    sys.stdout.flush()
    return subprocess.run(["sbatch", str(path)], check=False).returncode


KINDS = ("jobset", "trainer")
PORT = 29500
"""Port of the store, as Kubeflow Trainer opens it."""
NODE = "node"
"""Name of the replicated job and of its container, which Kubeflow Trainer requires."""
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
SECONDS_AFTER_GRACE = 30
LONGEST_NAME = 40
"""Maximum length of the job's name, since pods append indices, up to 63 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """Options of ``trine launch`` for Kubernetes only."""

    kind: str
    image: str | None
    namespace: str | None
    gpus_per_node: int | None
    max_restarts: int


def manifest(request: JobRequest, wish: KubernetesRequest) -> str:
    """Returns the Kubernetes manifest of a job as YAML text.

    Raises:
        LaunchError: image, nodes or ranks are missing, or the name is invalid.
    """
    if not wish.image:
        raise LaunchError("--kubernetes needs --image NAME: a container with Python, torch, Trine and the script.")
    if request.nodes is None:
        raise LaunchError("--kubernetes needs --nodes N, or --nodes MIN:MAX for an elastic job.")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", request.name) or len(request.name) > LONGEST_NAME:
        raise LaunchError(
            f"--name {request.name}: Kubernetes accepts up to {LONGEST_NAME} lower-case letters, digits and hyphens, "
            "beginning with a letter; give another --name."
        )
    documents = _jobset(request, wish) if wish.kind == "jobset" else _train_job(request, wish)
    return f"{WRITTEN}; `kubectl apply -f` takes it.\n" + "---\n".join(
        "".join(f"{line}\n" for line in _yaml(document)) for document in documents
    )


def _command(request: JobRequest, ranks: int) -> list[str]:
    """Returns the command of every pod; the pod's index decides whether it has the store."""
    meeting = RendezvousEndpoint(
        address=f"{request.name}-{NODE}-0-0.{request.name}",
        port=request.port or PORT,
        identity=request.name,
        is_host="@FIRST@",
        local_address=f"{request.name}-{NODE}-0-@INDEX@.{request.name}",
    )
    words = {"@FIRST@": "$((JOB_COMPLETION_INDEX == 0))", "@INDEX@": '"$JOB_COMPLETION_INDEX"'}
    line = shell_line([*map(_literal, torchrun_command(request, ranks, str(request.nodes), meeting))], words)
    return ["sh", "-c", f"exec {line}"]


def _literal(text: str) -> str:
    """Escapes a text for the command or a variable of a pod, where Kubernetes replaces ``$(NAME)`` and ``$$``."""
    return text.replace("$", "$$")


def _environment(request: JobRequest) -> list[dict[str, str]]:
    return [{"name": name, "value": _literal(value)} for name, value in torchrun_environment(request).items()]


def _limits(wish: KubernetesRequest, ranks: int) -> dict[str, int]:
    gpus = ranks if wish.gpus_per_node is None else wish.gpus_per_node
    return {"nvidia.com/gpu": gpus} if gpus else {}


def _pod(request: JobRequest, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace_seconds + SECONDS_AFTER_GRACE,
        "containers": [
            {
                "name": NODE,
                **container,
                "ports": [{"containerPort": request.port or PORT}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _set(wish: KubernetesRequest, job: Mapping[str, Any], labels: Mapping[str, str]) -> Any:
    """Returns the part that a JobSet and the template of a runtime share."""
    template = {**({"metadata": {"labels": dict(labels)}} if labels else {}), "spec": dict(job)}
    return {
        "failurePolicy": {"maxRestarts": wish.max_restarts},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def _job(request: JobRequest, wish: KubernetesRequest, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job: a failing pod restarts a static set; in an elastic one only the pod is replaced."""
    most = request.nodes.most if request.nodes is not None else 1
    return {
        "completionMode": "Indexed",
        "backoffLimit": wish.max_restarts * most if request.elastic else 0,
        "template": {"spec": dict(pod)},
    }


def _metadata(request: JobRequest, wish: KubernetesRequest) -> dict[str, str]:
    return {"name": request.name, **({"namespace": wish.namespace} if wish.namespace else {})}


def _jobset(request: JobRequest, wish: KubernetesRequest) -> list[dict[str, Any]]:
    ranks, most = request.ranks("--kubernetes"), request.nodes.most if request.nodes is not None else 1
    container = {
        "image": wish.image,
        "command": _command(request, ranks),
        "env": _environment(request),
        "resources": {"limits": _limits(wish, ranks)},
    }
    job = {"parallelism": most, "completions": most, **_job(request, wish, _pod(request, container))}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(request, wish),
            "spec": _set(wish, job, {}),
        }
    ]


def _train_job(request: JobRequest, wish: KubernetesRequest) -> list[dict[str, Any]]:
    ranks, most = request.ranks("--kubernetes"), request.nodes.most if request.nodes is not None else 1
    version, metadata = "trainer.kubeflow.org/v1alpha1", _metadata(request, wish)
    template = _set(wish, _job(request, wish, _pod(request, {"image": wish.image})), {ANCESTOR: "trainer"})
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": most, "torch": {}}, "template": {"spec": template}},
    }
    trainer = {
        "image": wish.image,
        "command": _command(request, ranks),
        "env": _environment(request),
        "numNodes": most,
        "numProcPerNode": ranks,
        "resourcesPerNode": {"limits": _limits(wish, ranks)},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": request.name}
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [runtime, job]


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yields the lines of a value; texts are written as JSON, which is also YAML."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{indent}{key}:", inner, f"{indent}  ")
    elif isinstance(value, list) and value:
        for inner in value:
            first, *rest = _yaml(inner, f"{indent}  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest
    else:
        plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value)
        taken = str(value).lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
        yield f"{indent}{value if plain and not taken else _quoted(value)}"


def _quoted(value: Any) -> str:
    """Returns JSON of a value; YAML reads no pairs of surrogates, and no DEL."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(
        letter if letter < "\x7f" else f"\\u{ord(letter):04x}" if ord(letter) < 1 << 16 else f"\\U{ord(letter):08x}"
        for letter in text
    )


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list) and value:
        yield head
        yield from _yaml(value, indent)
    else:
        yield f"{head} {next(_yaml(value))}"
