"""Commands of the training service and their results: the only data that passes between HTTP, journal and ranks.

HTTP thread of rank 0    parses a request into a command, and encodes a result for the client
journal                  stores the encoded command before its future is answered
command loop             sends the encoded command to all ranks, which run it in one order

``encode_message`` and ``decode_message`` write a JSON header and raw little-endian arrays, never pickle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Datum:
    """Training sequence of a client: token ids and the inputs of its loss."""

    tokens: Array
    """Token ids, int64 [n]."""
    inputs: Mapping[str, Array]
    """Inputs of the loss by name, such as target_tokens int64 [n] or [n, k] and weights fp32 [n]."""


@dataclass(frozen=True, slots=True)
class LossCall:
    """Loss of a ``ForwardBackward`` command: its name and options.

    The name "custom" selects the uploaded loss with the id ``options["loss_id"]``.
    """

    name: str
    options: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Configuration of a LoRA adapter: rank, seed of the initial values, and kinds of adapted layers."""

    rank: int
    """Rank r of each LoRA pair: A is [r, inputs], B is [outputs, r]."""
    seed: int = 0
    attention: bool = True
    perceptron: bool = True
    """Adapt the other linear layers of transformer blocks, except routers of experts."""
    unembedding: bool = True


@dataclass(frozen=True, slots=True)
class AdamParameters:
    """Hyperparameters of one AdamW update."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_norm: float = 0.0
    """L2 norm to which the gradient is clipped; 0: no clipping."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Settings of one sampling request, such as number of samples and temperature."""

    samples: int = 1
    max_tokens: int = 0
    """Maximum number of new tokens of a sequence; 0: only log-probabilities of the prompt."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end a sample."""
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    top_sample_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Command that creates a client's model: a LoRA adapter over the frozen base model, or a trainable full copy."""

    model: str
    base: str
    adapter: Adapter | None
    """None: all parameters are trained."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Command that computes the loss of each datum and, unless ``forward_only``, accumulates the model's gradient."""

    model: str
    data: tuple[Datum, ...]
    loss: LossCall
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Command that updates a model's weights with the accumulated gradient, and clears the gradient."""

    model: str
    adam: AdamParameters


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Command that saves a model's weights and, with ``optimizer``, its optimizer state under a name."""

    model: str
    name: str
    """Name below the service's folder, checked by the HTTP side: letters, digits, ".", "_", "-" and "/"."""
    optimizer: bool


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Command that loads saved weights and, with ``optimizer``, saved optimizer state into a model."""

    model: str
    name: str
    optimizer: bool


@dataclass(frozen=True, slots=True)
class DropWeights:
    """Command that removes the weights saved under ``name``; it also succeeds if there are none."""

    name: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Command that removes a model and frees its memory."""

    model: str


@dataclass(frozen=True, slots=True)
class DefineLoss:
    """Command that defines a custom loss: its id, the names of its inputs, and a graph of torch operations."""

    loss: str
    inputs: tuple[str, ...]
    graph: str
    """Graph as JSON text."""


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Command that samples token sequences from a model, from saved weights, or from the base model."""

    source: str
    """Id of a tenant, name of saved weights, or empty: the base model."""
    prompt: Array
    """Token ids, int64 [n]."""
    parameters: SamplingParameters


@dataclass(frozen=True, slots=True)
class ForwardTensors:
    """Command that runs a model's forward on a client's tensors.

    With a nonempty ``ticket``, the ranks store the autograd graph under this name for a later backward.
    """

    model: str
    tensors: Mapping[str, Array]
    ticket: str


@dataclass(frozen=True, slots=True)
class BackwardTensors:
    """Command that runs the backward of the stored autograd graph named ``ticket``, and then drops the graph.

    ``gradients`` has the gradients of the forward's outputs, by output name. The result has the inputs' gradients.
    """

    model: str
    ticket: str
    gradients: Mapping[str, Array]
    step: AdamParameters | None = None
    """Update after the backward; None: gradients accumulate."""


@dataclass(frozen=True, slots=True)
class DropTicket:
    """Command that drops the stored autograd graph named ``ticket``."""

    model: str
    ticket: str


@dataclass(frozen=True, slots=True)
class CallFunction:
    """Command that calls, by its name, a function registered on the server."""

    name: str
    tensors: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Stop:
    """Command that ends the command loop of every rank."""


Command = (
    CreateModel | ForwardBackward | OptimStep | SaveWeights | LoadWeights | DropWeights | UnloadModel | DefineLoss
    | SampleTokens | ForwardTensors | BackwardTensors | DropTicket | CallFunction | Stop
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainedOutput:
    """Result of :class:`ForwardBackward`: log-probabilities of each datum's target tokens, and metrics."""

    outputs: tuple[Mapping[str, Array], ...]
    """Outputs of each datum by name: logprobs fp32 of the shape of its target_tokens."""
    metrics: Mapping[str, float]
    """Metrics; a name ends in its reduction, such as "loss:sum"."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence: new tokens and their log-probabilities."""

    tokens: Array
    """int32 [n]."""
    logprobs: Array
    """fp32 [n]."""
    stopped: bool
    """True if a stop sequence ended it, False if its length did."""
    top_tokens: Array | None = None
    """int32 [n, k]."""
    top_logprobs: Array | None = None


@dataclass(frozen=True, slots=True)
class SampledOutput:
    """Result of :class:`SampleTokens`: sampled sequences and, if requested, log-probabilities of the prompt."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: Array | None = None
    """fp32 [n]; the first is NaN."""
    top_prompt_tokens: Array | None = None
    top_prompt_logprobs: Array | None = None


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """Result of :class:`ForwardTensors`, :class:`BackwardTensors` and :class:`CallFunction`: tensors by name."""

    tensors: Mapping[str, Array]
    version: int = 0
    """Number of updates of the model's weights."""


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """Result of a command that returns no tensors: JSON values by name."""

    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Result of a failed command: a sentence with the error, and a category.

    The category is "user" for a client's error, "server" for the service's error, and "gone" if
    a backward names a forward that the service no longer has.
    """

    error: str
    category: str = "user"
    """"user", "server", or "gone": the command refers to something that has ended."""


Result = TrainedOutput | SampledOutput | TensorOutput | PlainOutput | Failure

_TYPES: Final[Mapping[str, type]] = {
    one.__name__: one
    for one in (
        Datum, LossCall, Adapter, AdamParameters, SamplingParameters, CreateModel, ForwardBackward, OptimStep,
        SaveWeights, LoadWeights, DropWeights, UnloadModel, DefineLoss, SampleTokens, ForwardTensors, BackwardTensors,
        DropTicket, CallFunction, Stop, TrainedOutput, SampledSequence, SampledOutput, TensorOutput, PlainOutput,
        Failure,
    )
}  # fmt: skip
_PRIMITIVE = (str, int, float, bool, type(None))


def encode_message(value: Command | Result) -> bytes:
    """Returns a command or result as bytes: header length (8 bytes), JSON header, array data."""
    arrays: list[Array] = []
    header = json.dumps(_pack(value, arrays), separators=(",", ":"), allow_nan=True).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])


def decode_message(data: bytes) -> Any:
    """Returns the command or result in ``data``, the bytes from ``encode_message``.

    Raises:
        ValueError: the bytes are no encoded command or result.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        reader = _Reader(memoryview(data)[8 + length :])
        return reader.unpack(json.loads(data[8 : 8 + length]))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{len(data)} bytes are no command of the service: {error!r}") from error


def array_bytes(value: Any) -> int:
    """Returns the total size in bytes of all NumPy arrays in a command or result."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(array_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(array_bytes, value))
    if is_dataclass(value):
        return sum(array_bytes(getattr(value, one.name)) for one in fields(value))
    return 0


def _pack(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, _PRIMITIVE):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": [value.dtype.str, list(value.shape)]}
    if isinstance(value, Mapping):
        return {"map": {str(name): _pack(one, arrays) for name, one in value.items()}}
    if isinstance(value, tuple | list):
        return {"tuple": [_pack(one, arrays) for one in value]}
    if is_dataclass(value) and type(value).__name__ in _TYPES:
        return {"is": type(value).__name__, "of": [_pack(getattr(value, one.name), arrays) for one in fields(value)]}
    raise TypeError(f"{type(value).__name__} is no value of a command")


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def unpack(self, value: Any) -> Any:
        if isinstance(value, _PRIMITIVE):
            return value
        if "is" in value:
            return _TYPES[value["is"]](*[self.unpack(one) for one in value["of"]])
        if "map" in value:
            return {name: self.unpack(one) for name, one in value["map"].items()}
        if "tuple" in value:
            return tuple(self.unpack(one) for one in value["tuple"])
        return self._array(*value["array"])

    def _array(self, dtype: str, shape: list[int]) -> Array:
        kind = np.dtype(dtype)
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        if kind.hasobject or self._at + size > len(self._data):
            raise ValueError(f"an array {dtype} {shape} does not fit the {len(self._data)} bytes of the body")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return np.frombuffer(taken, kind).reshape(shape)
