"""Backend ``trine_http`` of vLLM: each of its workers reads versions from the ranks that own them, on any other cut.

    init      the training has the tensors of the model in vLLM; the first difference is refused by name
    update    blocks of one bucket that have changed since the last version -> host memory of the worker
    finish    the version is whole -> live weights; otherwise the live weights do not change

vLLM finds ``register`` as a plugin in all its processes if trine is installed in its environment. This module imports
as much of the engine as a receiver does.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.format.host_image import kind_of, torch_dtype
from engine.errors import EngineError
from engine.weights_out.blocks import WeightBlocks, published
from engine.weights_out.reader import Known, WeightReader
from engine.weights_out.receiver import targets_of
from engine.weights_out.version import TOKEN_VARIABLE, Geometry, WeightVersion

BACKEND = "trine_http"
"""Name of the backend in vLLM's ``--weight-transfer-config``."""


@dataclass(frozen=True, slots=True)
class BackendInit:
    """Request that makes a vLLM server read the published weights of the training run ``run``."""

    url: str
    """Address of rank 0 of the training."""
    run: str
    """Run of the versions."""


@dataclass(frozen=True, slots=True)
class BackendUpdate:
    """Request that makes vLLM's workers read the tensors ``keys`` of a version; without keys, they drop the version."""

    number: int
    keys: Sequence[str]
    """Keys of the tensors."""
    seconds: float
    """Time within which they must arrive."""


@dataclass(frozen=True, slots=True)
class VllmModel:
    """Description of the model that vLLM serves, from its transformers configuration: class name, dtype and shapes."""

    architecture: str
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    """Full shapes by key; empty if transformers does not have the model."""

    def compare(self, geometry: Geometry) -> None:
        """Checks that this model is the one that ``geometry`` describes: architecture, keys, shapes and dtype.

        Raises:
            EngineError: something differs; the message names the first difference.
        """
        again = "start vLLM with the model that is trained."
        if self.architecture != geometry.architecture:
            raise EngineError(f"the trainer has {geometry.architecture}, and vLLM {self.architecture}; {again}")
        theirs = {name: tensor for key, tensor in geometry.tensors.items() for name in (key, *tensor.aliases)}
        for key, shape in self.shapes.items():
            if key not in theirs:
                raise EngineError(f"vLLM has {key!r}, which the trainer does not publish; {again}")
            if theirs[key].shape != shape:
                raise EngineError(
                    f"{key!r} has shape {list(theirs[key].shape)} in the trainer and {list(shape)} in vLLM; {again}"
                )
            if not theirs[key].served:
                raise EngineError(
                    f"{key!r} is frozen and not published, and vLLM loads whole models; set weights_out.frozen to true."
                )
        own = kind_of(torch.empty(0, dtype=self.dtype)).dtype
        for key, tensor in geometry.served.items():
            if self.shapes and not self.shapes.keys() & {key, *tensor.aliases}:
                raise EngineError(f"the trainer publishes {key!r}, which vLLM lacks; {again}")
        if geometry.served and own not in {tensor.dtype for tensor in geometry.served.values()}:
            key, tensor = next(iter(geometry.served.items()))
            raise EngineError(
                f"{key!r} is {tensor.dtype} in the trainer and {own} in vLLM; start vLLM with the dtype of the "
                "trainer's forward."
            )


class StagedVersion:
    """Host memory of one vLLM worker for all tensors of a version; vLLM loads them at the end of its weight update.

    Args:
        connect: callback from the address of the training's rank 0 to a reader, for tests.
    """

    def __init__(self, connect: Callable[[str], WeightReader] | None = None) -> None:
        self._connect = connect or (lambda url: WeightReader(url, os.environ.get(TOKEN_VARIABLE, "")))
        self._reader: WeightReader | None = None
        self._init: BackendInit | None = None
        self._values: dict[str, Tensor] = {}
        self._known: dict[tuple[str, ...], Known] = {}
        self._number: int | None = None
        self._arrived: set[str] = set()

    def open(self, init: BackendInit, model: Callable[[], VllmModel]) -> None:
        """Connects to the training that ``init`` names; does nothing if this connection exists.

        Args:
            model: callback for the description of vLLM's model, which must fit the published model.

        Raises:
            EngineError: the training has another model, or does not answer.
        """
        if init == self._init:
            return
        self.close()
        self._reader = self._connect(init.url)
        model().compare(self._reader.geometry(init.run, monotonic() + self._reader.deadline))
        self._init = init

    def read(self, update: BackendUpdate) -> None:
        """Reads the tensors ``update.keys`` of a version into host memory; without keys, drops the version.

        Transfers only blocks that differ from the values in this memory.

        Raises:
            EngineError: the version has not arrived in time, or the training has dropped it.
        """
        if not update.keys:
            return self.drop()
        if self._reader is None or self._init is None:
            raise EngineError(
                "vLLM got POST /update_weights before it had the address of the training; send POST "
                "/init_weight_transfer_engine with init_info (url, run) to the vLLM server first."
            )
        if update.number != self._number:
            self._number, self._arrived = update.number, set()
        keys, version = tuple(update.keys), WeightVersion(self._init.run, update.number, None, 0)
        blocks = WeightBlocks(self._reader, version, monotonic() + update.seconds)
        held = all(key in self._values for key in keys)
        if not held:
            kinds = {key: blocks.geometry.tensors[key].kind for key in keys}
            self._values |= {key: torch.empty(kind.shape, dtype=torch_dtype(kind)) for key, kind in kinds.items()}
        known = self._known.pop(keys, None)  # not known while the values change
        self._known[keys] = blocks.fetch(blocks.bucket(keys, lambda: self._values, held), known if held else None)
        self._arrived.update(keys)

    def whole(self) -> Mapping[str, Tensor] | None:
        """Returns all tensors of the arrived version by their Hugging Face names; None if the version was dropped.

        Raises:
            EngineError: a tensor has not arrived.
        """
        if self._number is None or self._reader is None:
            return None
        geometry = self._reader.geometry()
        for key in geometry.served:
            if key not in self._arrived:
                raise EngineError(
                    f"vLLM got version {self._number} of the weights without tensor {key!r}; send POST /update_weights "
                    "with the keys of all tensors to the vLLM server before /finish_weight_update."
                )
        return published(self._values, geometry.tensors)

    def drop(self) -> None:
        """Drops the version; its memory remains allocated for the next version."""
        self._number, self._arrived = None, set()

    def close(self) -> None:
        """Closes the connection and frees the memory."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._init = None
        self._values, self._known = {}, {}
        self.drop()


def vllm_model(config: Any, dtype: torch.dtype) -> VllmModel:
    """Returns the description of the model with the transformers configuration ``config`` and dtype ``dtype``.

    Allocates no weights.
    """
    import transformers

    architecture = (config.architectures or [type(config).__name__])[0]
    shapes = dict[str, tuple[int, ...]]()
    if (built := getattr(transformers, architecture, None)) is not None:
        with torch.device("meta"):
            shapes = {key: tuple(target.values.shape) for key, target in targets_of(built(config)).items()}
    return VllmModel(architecture, dtype, shapes)


def register() -> None:
    """Registers the weight-transfer backend "trine_http" in this process; vLLM calls it as a plugin."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, _backend_class())


def _backend_class() -> type[Any]:
    """Returns the class of the backend, whose base is vLLM's."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class TrineBackend(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = BackendInit, BackendUpdate
        supports_draft_weight_update = False

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self._staged = StagedVersion()

        def init_transfer_engine(self, init_info: BackendInit) -> None:
            self._staged.open(init_info, lambda: vllm_model(self.model_config.hf_config, self.model_config.dtype))

        def start_weight_update(self) -> None:
            self._staged.drop()

        def update_weights(self, update_info: dict[str, Any]) -> None:  # vLLM's own synchronizes an accelerator
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: BackendUpdate) -> None:
            self._staged.read(update_info)

        def finish_weight_update(self) -> None:
            values = self._staged.whole()
            if values is None:
                return
            initialize_layerwise_reload(self.model)  # layers with packed weights load anew
            self.model.load_weights(iter(values.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            self._staged.drop()

        def shutdown(self) -> None:
            self._staged.close()

    return TrineBackend
