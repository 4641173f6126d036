"""SGLang servers of this process: the states and refusals of SGLang 0.5.23, with ranks in a real group of gloo."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engine.weights_out.consumers.sglang import SglangServer

SECONDS = timedelta(seconds=3)


@dataclass(slots=True)
class FakeSglang:
    """Server whose weights an update changes in place, as SGLang does it."""

    ranks: int = 1
    by_torch: bool = False
    """Joins a group by torch's own function, which SGLang calls; a process can do so once for each name."""
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """Live weights of each rank."""
    version: str = "default"
    paused: bool = False
    open: bool = False
    calls: list[str] = field(default_factory=list)
    """Paths of all requests."""
    received: int = 0
    """Bytes that the first rank has received."""
    fails: Callable[[str], httpx.Response | Exception | None] = lambda path: None
    """Failure of a request before the server has it."""
    loses: Callable[[str], bool] = lambda path: False
    """True: the server performs a request, and its reply is lost."""
    groups: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = [{} for _ in range(self.ranks)]

    def server(self, url: str = "http://sglang", **options: Any) -> SglangServer:
        """Returns a connection to this server."""
        return SglangServer(url, ranks=self.ranks, transport=httpx.MockTransport(self.answer), **options)

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answers a request."""
        path = request.url.path.removeprefix("/")
        self.calls.append(path)
        failure = self.fails(path)
        if isinstance(failure, httpx.Response):
            return failure
        if failure is not None:
            raise failure
        body = json.loads(request.read()) if request.method == "POST" else {}
        try:
            reply = getattr(self, path)(**body) or {}
        except RuntimeError as error:
            return httpx.Response(400, json={"success": False, "message": str(error)})
        if self.loses(path):
            raise httpx.ReadTimeout("lost")
        return httpx.Response(200, json={"success": True, "message": "Success"} | reply)

    def _on_ranks(self, step: Callable[[int], None]) -> None:
        problems = list[RuntimeError]()

        def run(rank: int) -> None:
            try:
                step(rank)
            except RuntimeError as error:
                problems.append(error)

        threads = [Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins a group as in SGLang."""
        assert backend == "gloo"
        members: list[Any] = [None] * self.ranks

        def join(rank: int) -> None:
            store = TCPStore(master_address, master_port, world_size, False, SECONDS)
            members[rank] = self._member(PrefixStore(group_name, store), rank_offset + rank, world_size, group_name)

        self._on_ranks(join)
        self.groups[group_name] = members

    def _member(self, store: Any, rank: int, size: int, name: str) -> Any:
        if self.by_torch:
            make: Any = dist.distributed_c10d._new_process_group_helper
            return make(size, rank, [], dist.Backend("gloo"), store, group_name=name, timeout=SECONDS)[0]
        inner = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
        return dist.ProcessGroupGloo(inner, rank, size, SECONDS)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leaves a group."""
        if self.groups.pop(group_name, None) is None:
            raise RuntimeError("The group to be destroyed does not exist.")

    def pause_generation(self, mode: str) -> None:
        """Ends or holds requests."""
        assert mode in ("abort", "in_place", "retract")
        self.paused = True

    def continue_generation(self) -> None:
        """Continues."""
        self.paused = False

    def begin_weight_update(self) -> None:
        """Opens a session."""
        if self.open:
            raise RuntimeError("A weight update session is already open.")
        self.open = True

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, flush_cache: bool
    ) -> None:
        """Receives broadcasts of the first rank into the live weights."""
        if not self.open:
            raise RuntimeError("update_weights_from_distributed needs begin_weight_update.")
        if group_name not in self.groups:
            raise RuntimeError(f"Group {group_name} not in {list(self.groups)}.")
        assert self.paused and not flush_cache, "weights change while requests run"

        def receive(rank: int) -> None:
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = 0, SECONDS
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                value = torch.empty(shape, dtype=getattr(torch, dtype))
                self.groups[group_name][rank].broadcast([value], options).wait()
                self.weights[rank][name] = value
                self.received += value.nbytes if rank == 0 else 0

        self._on_ranks(receive)

    def end_weight_update(self) -> None:
        """Completes the session."""
        if not self.open:
            raise RuntimeError("end_weight_update needs begin_weight_update.")
        self.open = False

    def flush_cache(self) -> None:
        """Empties the cache."""

    def update_weight_version(self, new_version: str, abort_all_requests: bool) -> None:
        """Names the version."""
        assert not abort_all_requests
        self.version = new_version

    def model_info(self) -> Any:
        """Describes the model."""
        return {"weight_version": self.version}

    def weights_checker(self, action: str) -> Any:
        """Hashes the parameters."""
        assert action == "checksum"
        sums = [
            {name: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16] for name, value in each.items()}
            for each in self.weights
        ]
        whole = hashlib.sha256(json.dumps(sums).encode()).hexdigest()
        return {"ranks": [{"checksums": each} for each in sums], "per_engine_checksum": whole}
