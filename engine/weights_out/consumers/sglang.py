"""Running SGLang servers: rank 0 broadcasts each version into their weights while they are paused.

    prepare   group of rank 0 and all ranks of the servers
    hold      pause
    commit    begin, update a bucket at a time, end, number of the version   live weights change in place
              continue

SGLang has no second memory for weights. So it takes a version over before other consumers do, and a server that fails
in between has a mix: it stays paused until a version succeeds, and its number ends with "incomplete" meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

import httpx
import torch
from torch import Tensor

from engine.errors import EngineError, GridError
from engine.kernels.device import collectives_for
from engine.outer.messages import StoreRefusedError
from engine.parallel.comm.host_group import BroadcastGroup, noting
from engine.weights_out.blocks import WeightBlocks, published
from engine.weights_out.consumers.inference_server import INCOMPLETE, InferenceServer, after_failure, on_all

_IN_PLACE = "in_place"


class SglangServer(InferenceServer):
    """HTTP connection to one SGLang server.

    Args:
        url: address of the server.
        pause: treatment of running requests at a new version: "abort" aborts them, "retract" (or its synonym
            "wait") computes them again, and "in_place" continues them with the new weights.
        ranks: tensor x pipeline ranks of the server.
        transport: httpx transport that replaces the network, for tests.
    """

    noun = "SGLang server"
    remedy = "start it, or check the address."

    def __init__(
        self, url: str, pause: str = "wait", ranks: int = 1, transport: httpx.BaseTransport | None = None
    ) -> None:
        super().__init__(url, "", transport)
        self.ranks, self._pause = ranks, "retract" if pause == "wait" else pause

    def absent(self, path: str) -> str:
        """Returns a remedy for an error about the missing route ``path``: the SGLang version to start."""
        return "start SGLang 0.5.23 or later."

    @property
    def version(self) -> str:
        """Version name that the server reports for its weights."""
        return str(self.call("GET", "/model_info")["weight_version"])

    def name_version(self, text: str) -> None:
        """Sets ``text`` as the version name that the server reports for its weights."""
        self.call("POST", "/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def join(self, host: str, port: int, offset: int, size: int, group: tuple[str, str]) -> None:
        """Makes the server's ranks join a collective group, in which the training's rank 0 broadcasts weights.

        Args:
            host: address of the group's rank 0.
            port: port of the group's rank 0.
            offset: rank that the server's first process gets in the group; its other processes get the next ranks.
            size: number of ranks in the group: the training's rank 0 and the ranks of all servers.
            group: (name, backend) of the group.
        """
        body = {
            "master_address": host, "master_port": port, "rank_offset": offset, "world_size": size,
            "group_name": group[0], "backend": group[1],
        }  # fmt: skip
        self.call("POST", "/init_weights_update_group", body, 0.0)

    def leave(self, name: str) -> None:
        """Makes the server's ranks leave the group ``name``; ignores a failure."""
        with suppress(StoreRefusedError, GridError):
            self.call("POST", "/destroy_weights_update_group", {"group_name": name}, 0.0)

    def pause(self) -> None:
        """Pauses generation; the constructor's ``pause`` decides about running requests."""
        self.call("POST", "/pause_generation", {"mode": self._pause})

    def resume(self) -> None:
        """Continues generation, unless a failed update has left weights of two versions on the server."""
        if not self.version.endswith(INCOMPLETE):
            self.call("POST", "/continue_generation", {})

    def begin(self) -> None:
        """Begins a weight update on the server; first ends an unfinished update of a killed trainer."""
        try:
            self.call("POST", "/begin_weight_update", {})
        except StoreRefusedError:
            self.call("POST", "/end_weight_update", {})
            self.call("POST", "/begin_weight_update", {})

    def update(self, tensors: Mapping[str, Tensor], group: str) -> None:
        """Makes the server receive ``tensors``, in this order, by broadcasts of the collective group ``group``.

        A failed request is not repeated.
        """
        body = {
            "names": [*tensors], "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()], "group_name": group, "flush_cache": False,
        }  # fmt: skip
        self.call("POST", "/update_weights_from_distributed", body, 0.0)

    def end(self) -> None:
        """Ends the weight update, and empties the prefix cache unless ``pause`` is "in_place"."""
        self.call("POST", "/end_weight_update", {})
        if self._pause != _IN_PLACE:
            self.call("POST", "/flush_cache", {})

    def checksum(self) -> str:
        """Returns the server's own hash of all its parameters."""
        found: Any = self.call("POST", "/weights_checker", {"action": "checksum"})
        return str(found["per_engine_checksum"])


class SglangServers:
    """Consumer that broadcasts each version from rank 0 into the weights of all SGLang servers.

    Args:
        servers: connections to the servers.
        device: device of rank 0, which also decides the backend of the broadcasts.
        host: address of this host that the servers can reach.
        check: True to check after each version that servers of the same number of ranks have equal parameters.
    """

    def __init__(
        self, servers: Sequence[SglangServer], device: torch.device, host: str = "127.0.0.1", check: bool = False
    ) -> None:
        self._servers, self._host, self._device, self._check = servers, host, device, check
        self._group: BroadcastGroup | None = None
        self._name = ""

    @property
    def last(self) -> int:
        """Highest number of a version that a server reports; 0 if none reports a number."""
        found = 0
        for server in self._servers:
            server.limit(1.0)
            with suppress(GridError, StoreRefusedError, ValueError, KeyError):
                found = max(found, int(server.version))
        return found

    def prepare(self, blocks: WeightBlocks) -> None:
        """Opens the collective group in which ``commit`` broadcasts ``blocks`` to all servers, unless it is open.

        Raises:
            EngineError: a server fails; the message names it.
        """
        for server in self._servers:
            server.limit(blocks.until - monotonic())
        if self._group is None:
            self._join(f"trine-{blocks.version.name}", blocks.until)

    def hold(self) -> None:
        """Pauses generation on all servers; raises EngineError with the name of a server that fails."""
        on_all(self._servers, SglangServer.pause)

    def commit(self, blocks: WeightBlocks) -> None:
        """Broadcasts the version of ``blocks`` into the servers' weights, bucket by bucket; then the servers generate
        again.

        Raises:
            EngineError: a server fails, and the message names it. A server with weights of two versions stays paused.
        """
        number, group = blocks.version.number, self._group
        assert group is not None, "the version is prepared"
        self._group = None  # a group that has lost a process is not used again
        on_all(self._servers, lambda server: server.name_version(f"{number} {INCOMPLETE}"))
        on_all(self._servers, SglangServer.begin)
        for tensors in blocks.iter_groups():
            self._send(group, published(tensors, blocks.geometry.tensors), blocks.until)
        on_all(self._servers, SglangServer.end)
        if self._check:
            self.compare(number)
        on_all(self._servers, lambda server: server.name_version(str(number)))
        self._group = group
        on_all(self._servers, SglangServer.resume)

    def drop(self) -> None:
        """Makes all servers generate again with the old weights. A server with weights of two versions stays paused."""
        with suppress(EngineError):
            on_all(self._servers, lambda server: after_failure(server, SglangServer.resume))

    def compare(self, number: int) -> None:
        """Checks, after the update to version ``number``, that servers with equally many ranks have equal parameters.

        Raises:
            EngineError: two servers have different parameters; the message names them.
        """
        sums, first = dict[str, str](), dict[int, SglangServer]()
        on_all(self._servers, lambda server: sums.update({server.url: server.checksum()}))
        for server in self._servers:
            other = first.setdefault(server.ranks, server)
            if sums[server.url] != sums[other.url]:
                raise EngineError(
                    f"version {number} has other parameters in the SGLang server {server.url} than in {other.url}; "
                    "publish the weights again."
                )

    def _join(self, name: str, until: float) -> None:
        """Opens the group of this process and all ranks of the servers."""
        places, size = dict[SglangServer, int](), 1
        for server in self._servers:
            if self._name:
                server.leave(self._name)
            places[server], size = size, size + server.ranks
        group, self._name = BroadcastGroup(self._host, size, name, self._device), name
        named = name, collectives_for(self._device)
        self._beside(
            lambda server: server.join(self._host, group.port, places[server], size, named),
            lambda: group.join(max(0.1, until - monotonic())),
        )
        self._group = group

    def _send(self, group: BroadcastGroup, tensors: Mapping[str, Tensor], until: float) -> None:
        def broadcast() -> None:
            for tensor in tensors.values():
                group.broadcast(tensor, max(0.1, until - monotonic()))

        self._beside(lambda server: server.update(tensors, self._name), broadcast)

    def _beside(self, step: Callable[[SglangServer], None], own: Callable[[], None]) -> None:
        """Performs a step on all servers while this process does its part of it in the group."""
        lost = list[EngineError]()

        def run() -> None:
            with noting(lost):
                own()

        thread = Thread(target=run, name="weights-out")  # if a server refuses, it waits for it until the deadline
        thread.start()
        on_all(self._servers, step)
        thread.join()
        if lost:
            raise lost[0]
