"""Manifests: YAML of the forms that the resource definitions of JobSet and Kubeflow Trainer require."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.launch.cli import main

NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 1}


def record(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """A mapping with these keys and no others: a resource definition drops or refuses what it does not know."""
    properties = required | (optional or {})
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
    }  # fmt: skip


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


VARIABLES = {"type": "array", "items": record({"name": {"type": "string"}, "value": {"type": "string"}})}
RESOURCES = record({"limits": {"type": "object", "additionalProperties": {"type": "integer"}}})
PROGRAM = {"command": items({"type": "string"}), "env": VARIABLES}
CONTAINER = record(
    {
        "name": {"const": "node"},
        "image": {"type": "string"},
        "ports": items(record({"containerPort": COUNT})),
        "volumeMounts": items(record({"name": NAME, "mountPath": {"const": "/dev/shm"}})),
    },
    PROGRAM | {"resources": RESOURCES},
)
POD = record(
    {
        "restartPolicy": {"enum": ["Never", "OnFailure"]},
        "terminationGracePeriodSeconds": COUNT,
        "containers": items(CONTAINER),
        "volumes": items(record({"name": NAME, "emptyDir": record({"medium": {"const": "Memory"}})})),
    }
)
JOB = record(
    {
        "completionMode": {"const": "Indexed"},
        "backoffLimit": {"type": "integer", "minimum": 0},
        "template": record({"spec": POD}),
    },
    {"parallelism": COUNT, "completions": COUNT},
)
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
REPLICATED = record(
    {
        "name": NAME,
        "replicas": {"const": 1},  # the admission of Kubeflow Trainer takes no other
        "template": record({"spec": JOB}, {"metadata": record({"labels": LABELS})}),
    }
)
SET = record(
    {
        "failurePolicy": record({"maxRestarts": {"type": "integer", "minimum": 0}}),
        "network": record({"enableDNSHostnames": {"const": True}, "publishNotReadyAddresses": {"const": True}}),
        "replicatedJobs": items(REPLICATED),
    }
)
METADATA = record({"name": NAME}, {"namespace": NAME, "labels": LABELS})
TRAINER = "trainer.kubeflow.org/v1alpha1"


def document(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return record({"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": METADATA, "spec": spec})


JOBSET = document("jobset.x-k8s.io/v1alpha2", "JobSet", SET)
RUNTIME = document(
    TRAINER,
    "TrainingRuntime",
    record(
        {
            "mlPolicy": record({"numNodes": COUNT, "torch": record({})}),
            "template": record({"spec": SET}),
        }
    ),
)
TRAIN_JOB = document(
    TRAINER,
    "TrainJob",
    record(
        {
            "runtimeRef": record(
                {"apiGroup": {"const": "trainer.kubeflow.org"}, "kind": {"const": "TrainingRuntime"}, "name": NAME}
            ),
            "trainer": record(
                {
                    "image": {"type": "string"},
                    "numNodes": COUNT,
                    "numProcPerNode": COUNT,
                    "resourcesPerNode": RESOURCES,
                    **PROGRAM,
                }
            ),
        }
    ),
)
WORDS = (
    "--image",
    "site/image:1",
    "--ranks-per-node",
    "4",
    "--grace",
    "60",
    "--export",
    "MINE=no",
    "--export",
    "ODD=a$$b $(MINE) \N{GRINNING FACE}\x7f",
    "job.py",
    "it's $X$$(MINE)",
)


def manifest(capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> list[Any]:
    assert main(["launch", "--kubernetes", kind, "--dry-run", *words, *WORDS]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def expanded(text: str) -> str:
    """As Kubernetes reads a text of a command or variable: ``$$`` is ``$``, and ``$(MINE)`` is replaced."""
    return re.sub(r"\$\$|\$\(MINE\)", lambda found: "$" if found[0] == "$$" else "no", text)


def line_of(command: list[str], index: str, folder: Path) -> list[str]:
    """What the pod with this index really starts: its shell runs here, and ``python`` prints its arguments."""
    command = [expanded(word) for word in command]
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "python").chmod(0o700)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": index}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_jobset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (found,) = manifest(capsys, "jobset", "--nodes", "2", "--name", "big", "--namespace", "us", "--max-restarts", "3")
    jsonschema.validate(found, JOBSET)
    assert found["metadata"] == {"name": "big", "namespace": "us"}
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 3}
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    variables = {one["name"]: expanded(one["value"]) for one in container["env"]}
    assert variables["MINE"] == "no", "a text, and no truth value"
    assert variables["ODD"] == "a$$b $(MINE) \N{GRINNING FACE}\x7f"
    assert line_of(container["command"], "1", tmp_path) == [
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d",
        "--rdzv-endpoint=big-node-0-0.big:29500", "--rdzv-id=big",
        "--rdzv-conf=join_timeout=600,read_timeout=600,is_host=0", "--local-addr=big-node-0-1.big", "job.py",
        "it's $X$$(MINE)",
    ]  # fmt: skip
    assert "--rdzv-conf=join_timeout=600,read_timeout=600,is_host=1" in line_of(container["command"], "0", tmp_path)


def test_an_elastic_jobset_replaces_pods_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (found,) = manifest(capsys, "jobset", "--elastic", "2:4", "--gpus-per-node", "0")
    jsonschema.validate(found, JOBSET)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 40)
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {}}
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert {"--nnodes=2:4", "--max-restarts=100"} <= set(line_of(container["command"], "0", tmp_path))


def test_a_train_job_and_its_runtime(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runtime, job = manifest(capsys, "trainer", "--nodes", "3")
    jsonschema.validate(runtime, RUNTIME)
    jsonschema.validate(job, TRAIN_JOB)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "job"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node", "the first pod is JOB-node-0-0.JOB"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 4)
    assert not any(one["name"].startswith("PET_") for one in trainer["env"]), "the controller's own"
    assert "--rdzv-endpoint=job-node-0-0.job:29500" in line_of(trainer["command"], "0", tmp_path)


def test_the_manifest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--kubernetes", "jobset", "--nodes", "2", *WORDS]) == 0
    assert capsys.readouterr().out == "job.yaml is written; start it with: kubectl apply -f job.yaml\n"
    jsonschema.validate(yaml.safe_load((tmp_path / "job.yaml").read_text()), JOBSET)
