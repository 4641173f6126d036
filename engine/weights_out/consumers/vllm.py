"""Running vLLM servers: all of them take a version over, or none.

    prepare   init, start, update a bucket at a time   workers read blocks from owner ranks; live weights do not change
    pause     no request is generated
    finish    weights and number of the version        all servers have the whole version by now
    resume

A failure before "finish" drops the version on all servers, which continue with the old one. A server that fails in
"finish" may have a mix, so it stays paused until a version succeeds; its number ends with "incomplete" meanwhile.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import httpx
import torch

from engine.errors import EngineError, GridError
from engine.outer.messages import StoreRefusedError
from engine.weights_out.blocks import WeightBlocks
from engine.weights_out.consumers.inference_server import INCOMPLETE, InferenceServer, after_failure, on_all
from engine.weights_out.vllm_backend import BACKEND, BackendInit, BackendUpdate

_FUSED = (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."), (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj.")
"""Parameters of which vLLM makes one, in the order of the model."""
_ALIGNMENT = 64
"""vLLM rounds the rows of a vocabulary up to a multiple of it."""


class VllmServer(InferenceServer):
    """HTTP connection to one vLLM server.

    Args:
        url: address of the server.
        pause: treatment of running requests at a new version: "wait" finishes them first, "abort" aborts them, and
            "keep" continues them with the new weights.
        transport: httpx transport that replaces the network, for tests.
    """

    noun = "vLLM server"
    remedy = f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\', or check the address.'

    def __init__(self, url: str, pause: str = "wait", transport: httpx.BaseTransport | None = None) -> None:
        super().__init__(url, "", transport)
        self._pause = pause

    def absent(self, path: str) -> str:
        """Returns a remedy for an error about the missing route ``path``: the vLLM version and option to start."""
        started = "--enable-scale-out" if path.startswith("/inference") else "VLLM_SERVER_DEV_MODE=1"
        return f"start vLLM 0.32 or later with {started}."

    @property
    def version(self) -> str:
        """Version name that the server reports for its weights."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def prepare(self, blocks: WeightBlocks, url: str) -> None:
        """Makes the server's workers read the version of ``blocks`` into host memory, from the training at ``url``.

        The live weights do not change. Raises StoreRefusedError or GridError if the server fails.
        """
        self.limit(blocks.until - monotonic())
        init = BackendInit(url, blocks.version.run)
        self.call("POST", "/init_weight_transfer_engine", {"init_info": _fields(init)})
        try:
            self.call("POST", "/start_weight_update")
        except StoreRefusedError:  # a trainer that was killed has left its update open
            self.drop()
            self.call("POST", "/start_weight_update")
        for keys in blocks.groups():
            update = BackendUpdate(blocks.version.number, keys, max(0.0, blocks.until - monotonic()))
            self.call("POST", "/update_weights", {"update_info": _fields(update)})

    def drop(self) -> None:
        """Drops the version that the workers have read into host memory; the live weights do not change."""
        with suppress(StoreRefusedError):  # there is none, or a refusal has ended it
            self.call("POST", "/update_weights", {"update_info": _fields(BackendUpdate(0, (), 0.0))})
        with suppress(StoreRefusedError):
            self.call("POST", "/finish_weight_update")

    def pause(self) -> None:
        """Pauses generation; the constructor's ``pause`` decides about running requests."""
        self.call("POST", f"/pause?mode={self._pause}")

    def resume(self) -> None:
        """Continues generation, unless a failed update has left weights of two versions on the server."""
        if self.version.endswith(INCOMPLETE):
            return
        if self._pause == "keep":  # the other modes have emptied the cache
            self.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        self.call("POST", "/resume")

    def finish(self, number: int) -> None:
        """Overwrites the server's weights with the prepared version; the server then reports ``number`` as its version.

        Raises StoreRefusedError or GridError if the server fails.
        """
        self.call("POST", "/update_weight_version", {"new_version": f"{number} {INCOMPLETE}"})
        try:
            self.call("POST", "/finish_weight_update", {"weight_version": str(number)})
        except StoreRefusedError:
            if self.version != str(number):  # otherwise the reply to an earlier request was lost
                raise

    def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of each parameter by its name in vLLM; empty if several workers divide parameters."""
        found = self.call("POST", "/weight_checker", {"action": "checksum"})["checksums"]
        if any(":tp0:" not in key for key in found):
            return {}
        return {key.rpartition(":")[2]: value for key, value in found.items()}


class VllmServers:
    """Consumer that passes each version to all vLLM servers.

    Args:
        servers: connections to the servers.
        check: True to compare the servers' parameters with each new version.
    """

    def __init__(self, servers: Sequence[VllmServer], check: bool = False) -> None:
        self._servers, self._check = servers, check
        self._last: int | None = None

    @property
    def last(self) -> int:
        """Highest number of a version that a server reports; 0 if none reports a number."""
        if self._last is None:
            self._last = 0
            for server in self._servers:
                server.limit(1.0)
                with suppress(GridError, StoreRefusedError, ValueError):
                    self._last = max(self._last, int(server.version))
        return self._last

    def prepare(self, blocks: WeightBlocks) -> None:
        """Makes the workers of all servers read the version of ``blocks`` into host memory; live weights do not change.

        Raises:
            EngineError: a server fails; the message names it.
        """
        url = blocks.geometry.owners[0].url
        on_all(self._servers, lambda server: server.prepare(blocks, url))

    def hold(self) -> None:
        """Pauses generation on all servers; raises EngineError with the name of a server that fails."""
        on_all(self._servers, VllmServer.pause)

    def commit(self, blocks: WeightBlocks) -> None:
        """Makes the prepared version the weights of all servers; then the servers generate again.

        Raises:
            EngineError: a server fails, and the message names it. A server with weights of two versions stays paused.
        """
        on_all(self._servers, lambda server: _install(server, blocks.version.number))
        self._last = blocks.version.number
        if self._check:
            self.compare(blocks)

    def drop(self) -> None:
        """Drops the prepared version on all servers, and lets them generate again with the old weights.

        Exception: a server that failed while it overwrote its weights stays paused.
        """
        for step in (VllmServer.drop, VllmServer.resume):
            with suppress(EngineError):
                on_all(self._servers, lambda server, step=step: after_failure(server, step))  # type: ignore[misc]

    def compare(self, blocks: WeightBlocks) -> None:
        """Compares the parameters of all servers with the published version, read once more from ``blocks``.

        Skips parameters that vLLM pads, packs or divides among workers.

        Raises:
            EngineError: a server has wrong values; the message names server and tensors.
        """
        sums = {server.url: server.checksums() for server in self._servers}
        expected, empty = _digests(blocks), hashlib.sha256().hexdigest()
        for url, found in sums.items():
            wrong = [key for key in expected if found.get(key, empty) not in (empty, expected[key])]
            if wrong:
                raise EngineError(
                    f"version {blocks.version.number} in the vLLM server {url} has other values of "
                    f"{', '.join(map(repr, wrong[:4]))} ({len(wrong)} tensors); publish the weights again."
                )


def _install(server: VllmServer, number: int) -> None:
    server.finish(number)
    server.resume()


def _fields(message: BackendInit | BackendUpdate) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}


def _digests(blocks: WeightBlocks) -> dict[str, str]:
    """Returns the SHA-256 of the parameters that vLLM makes of a version, by their names in vLLM."""
    found = dict[str, Any]()
    for key, values in blocks:
        if values.dim() and values.shape[0] % _ALIGNMENT and key.endswith(("embed_tokens.weight", "lm_head.weight")):
            continue
        name = key
        for pattern, fused in _FUSED:
            name = pattern.sub(fused, name)
        found.setdefault(name, hashlib.sha256()).update(values.contiguous().view(-1).view(torch.uint8).numpy().data)
    return {name: digest.hexdigest() for name, digest in found.items()}
