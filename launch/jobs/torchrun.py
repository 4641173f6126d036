"""Command line and environment of torchrun for each place, and its options for elastic jobs.

``ELASTIC_ENVIRONMENT`` is for every torchrun of an elastic job, also one started by hand.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.launch.jobs.bound_cores import MODULE
from engine.launch.jobs.request import JobRequest

JOIN_SECONDS = 60
ELASTIC_CONF = MappingProxyType({"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"})
"""Rendezvous settings of torchrun: 1 s more after MIN nodes joined; drop a silent node after 3 s instead of 15."""
MAX_RESTARTS = "--max-restarts=100"
ELASTIC_ENVIRONMENT = MappingProxyType({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
"""Environment of elastic torchruns. Otherwise torch caches the address of rank 0's first store, and a later node
hangs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousEndpoint:
    """Settings of torchrun's rendezvous on one node: its id, the store's address, and the node's own address."""

    address: str
    """Address of the node with the store, resolvable on all nodes."""
    port: int | str
    identity: str
    is_host: str
    """torchrun's ``is_host``: "1" on the node with the store, else "0"; torch's own guess can fail."""
    local_address: str | None = None
    """Address of this node, resolvable on the other nodes."""

    @property
    def endpoint(self) -> str:
        """Address and port of the rendezvous' store as "ADDRESS:PORT"; an IPv6 address is in brackets."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def torchrun_command(request: JobRequest, ranks: int, nodes: str, meeting: RendezvousEndpoint | None) -> list[str]:
    """Returns torchrun's command for one node, ``python -m torch.distributed.run ...``, as a list of words.

    ``ranks``: ranks on this node. ``nodes``: value of ``--nnodes``. ``meeting`` None: the job runs on this host only.
    """
    here = ["--standalone"]
    if request.port is not None:
        here = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{request.port}"]
    options = [*here, f"--nproc-per-node={ranks}"] if meeting is None else []
    if meeting is not None:
        conf = {"join_timeout": str(request.join_seconds), "read_timeout": str(request.join_seconds)}
        conf = {**(ELASTIC_CONF if request.elastic else {}), **conf, "is_host": meeting.is_host}
        options = [
            f"--nnodes={nodes}",
            f"--nproc-per-node={ranks}",
            *[MAX_RESTARTS] * request.elastic,
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meeting.endpoint}",
            f"--rdzv-id={meeting.identity}",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
            *([f"--local-addr={meeting.local_address}"] if meeting.local_address else []),
        ]
    return [request.python, "-m", "torch.distributed.run", *options, *_program(request), *request.arguments]


def _program(request: JobRequest) -> list[str]:
    """Returns the program of a rank, as torchrun's arguments for its form."""
    if request.cores is None:
        return [*{"script": [], "module": ["--module"], "program": ["--no-python"]}[request.form], request.script]
    runs = {"script": [request.python, "-u"], "module": [request.python, "-u", "-m"], "program": []}[request.form]
    listed = ["--cores", request.cores] if request.cores else []
    return ["--no-python", request.python, "-m", MODULE, *listed, *runs, request.script]


def torchrun_environment(request: JobRequest, devices: Sequence[int | str] = ()) -> dict[str, str]:
    """Returns the environment variables for torchrun on one node: the user's exports, and settings of the job.

    ``devices``: indices or identifiers of the GPUs for this node's ranks; empty: all.
    """
    elastic = ELASTIC_ENVIRONMENT if request.elastic else {}
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(request.grace_seconds), **elastic, **request.export, **seen}


def shell_line(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Returns ``command``, a list of words, as one quoted line for a shell.

    ``variables``: shell expressions for placeholders such as ``@HEAD@``, inserted without quotes.
    """
    line = shlex.join(command)
    for word, value in (variables or {}).items():
        line = line.replace(word, value)
    return line
