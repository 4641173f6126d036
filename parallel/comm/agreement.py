"""Agreement among ranks: all fail together, rank 0 decides for all, tensors are compared by their bits.

all_or_none       over ``Comm``       the failed rank raises its own error, the others say which rank it was
raise_together    over a host group   all raise the sentence of the first rank that failed
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch
from torch import Tensor

from engine.errors import CheckpointError, EngineError
from engine.kernels.device import use_device
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import HostGroup, announce, collect
from engine.parallel.grid import Axis

_UNREADY = "could not prepare for this run, so no rank starts"


@contextmanager
def all_or_none(comm: Comm, device: torch.device, failure: str = _UNREADY) -> Iterator[None]:
    """Runs the block on every rank; if it fails on any rank, every rank raises.

    A failed rank re-raises its own error; the others raise an EngineError with its rank and the text ``failure``. Costs
    one all-reduce of 8 bytes over the world. The block itself must not communicate.
    """
    problem: BaseException | None = None
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        problem = error
    failed = first_rank(problem is not None, comm, device, "start")
    if problem is not None:
        raise problem
    if failed is not None:
        raise EngineError(f"rank {failed} {failure}; read its error.")


@contextmanager
def raise_together(
    host: HostGroup, describe: Callable[[Exception], str], advice: Callable[[], str] = str
) -> Iterator[None]:
    """Runs the block on every rank; if it fails on any rank, all ranks raise the same CheckpointError.

    Its text is ``describe(error)`` from the lowest failed rank, then ``advice()`` from rank 0. ``host``: group of all
    ranks; the block must not use it.

    Raises:
        CheckpointError: a rank has failed, or rank 0 has lost it.
        EngineError: this rank has lost rank 0, or is rank 0 and cannot send the text to a rank.
    """
    problem = ""
    try:
        yield
    except Exception as error:  # any failure: the other ranks wait for an answer
        problem = describe(error)
    first = ""
    try:
        texts = collect(host, problem.encode(errors="backslashreplace"))
        first = next((text.decode() for text in texts or [] if text), "")
        first += advice() if first else ""
    except EngineError as lost:
        if host.rank:
            raise
        first = str(lost)
    first = announce(host, first.encode(errors="backslashreplace")).decode()
    if first:
        raise CheckpointError(first) from None


def take_from(data: Tensor, first: bool, comm: Comm, axis: Axis, label: str) -> None:
    """Broadcasts ``data`` (uint8, any shape) in place over ``axis`` from the rank that passes ``first`` = True.

    Uses one all-reduce, named ``label``.
    """
    if not first:
        data.zero_()
    comm.all_reduce(data, axis, label).wait()


def from_first(make: Callable[[], bytes], comm: Comm, device: torch.device, patience: float | None = None) -> bytes:
    """Calls ``make()`` on rank 0 and returns its result on every rank.

    Communicates by all-reduces of tensors on ``device`` over the world. Ranks all-reduce a keep-alive message every
    ``patience`` seconds, so that ``make`` may run longer than the timeout of a collective; None: no messages.

    Raises:
        EngineError: ``make`` has failed. Rank 0 re-raises the error of ``make``. The other ranks raise an equal error
            if it is an EngineError, otherwise an EngineError that refers to rank 0.
    """
    made, problem = b"", None
    if comm.grid.rank == 0:
        try:
            with _still_there(comm, device, patience):
                made = make()
        except Exception as error:
            problem = error
            made = _worded(error).encode(errors="backslashreplace")
    length, busy = _reduced(comm, device, -len(made) if problem is not None else len(made))
    while busy:
        length, busy = _reduced(comm, device, 0)
    data = torch.zeros(abs(length), dtype=torch.uint8, device=device)
    if made:
        data.copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
    take_from(data, comm.grid.rank == 0, comm, "world", "start")
    if problem is not None:
        raise problem
    received = data.cpu().numpy().tobytes()
    if length < 0:
        raise _error_of_first(received.decode())
    return received


@contextmanager
def _still_there(comm: Comm, device: torch.device, patience: float | None) -> Iterator[None]:
    """Sends the other ranks a sign of life from rank 0 while the block runs, because groups time out."""
    if patience is None:
        yield
        return
    ended = Event()
    lost: Exception | None = None

    def tell() -> None:
        nonlocal lost
        use_device(device)
        try:
            while not ended.wait(patience):
                _reduced(comm, device, 0, busy=True)
        except Exception as error:  # raised below: this thread has nobody who hears it
            lost = error

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
    if lost is not None:
        raise lost


def _reduced(comm: Comm, device: torch.device, length: int, busy: bool = False) -> tuple[int, bool]:
    """All-reduces rank 0's length of its message and its flag "busy" over the world; returns both."""
    head = torch.tensor([length, busy], dtype=torch.int64, device=device)
    comm.all_reduce(head, "world", "start").wait()
    return int(head[0]), bool(head[1])


def _worded(error: Exception) -> str:
    """Kind and sentence of an error of ours; of a private kind the public one that it is."""
    if not isinstance(error, EngineError):
        return ":"
    kinds = {EngineError, *EngineError.__subclasses__()}
    return f"{next(kind for kind in type(error).__mro__ if kind in kinds).__name__}:{error}"


def _error_of_first(text: str) -> EngineError:
    name, _, sentence = text.partition(":")
    kind = next((kind for kind in EngineError.__subclasses__() if kind.__name__ == name), EngineError)
    return kind(sentence or f"rank 0 {_UNREADY}; read its error.")


def gather_from_all(
    values: Tensor, comm: Comm, device: torch.device, label: str = "equal weights", axis: Axis = "world"
) -> Tensor:
    """All-gathers ``values`` [elements] over ``axis``; returns a tensor [ranks, elements] on the CPU, on every rank.

    ``values`` has the same length and dtype on all ranks. The all-gather, named ``label``, uses tensors on ``device``.
    """
    here = comm.grid.index(axis)
    table = torch.zeros(comm.grid.size(axis), values.numel(), dtype=values.dtype, device=device)
    table[here] = values.to(device)
    comm.all_gather(table.view(-1), table[here], axis, label).wait()
    return table.cpu()


def first_rank(own: bool, comm: Comm, device: torch.device, label: str) -> int | None:
    """Returns the lowest rank of the world that passes ``own`` = True, or None; the result is equal on all ranks.

    Communicates one all-reduce of 8 bytes, named ``label``, with a tensor on ``device``.
    """
    size = comm.grid.world_size
    highest = torch.tensor([(size - comm.grid.rank) * own], dtype=torch.int64, device=device)
    comm.all_reduce(highest, "world", label, "max").wait()
    found = size - int(highest)
    return found if found < size else None


def differing(values: Tensor, comm: Comm, device: torch.device, label: str) -> list[bool]:
    """Returns, for each element of ``values`` (int64), True if any two ranks differ; the result is equal on all ranks.

    Communicates one all-reduce over the world, named ``label``, with 16 bytes per element on ``device``.
    """
    both = torch.stack([values, ~values]).to(device)  # the complement reverses the order, and every integer has one
    comm.all_reduce(both, "world", label, "max").wait()
    return (both[0] != ~both[1]).tolist()


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def bit_sum(tensor: Tensor) -> Tensor:
    """Returns a checksum of ``tensor``, independent of the order of its elements, as a 0-dim int64 tensor.

    It is on the device of ``tensor``; for a meta tensor it is a zero on the CPU.
    """
    if tensor.is_meta or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
    flat = tensor.detach().contiguous().reshape(-1)
    word = next(word for size, word in _WORDS if flat.element_size() % size == 0)
    return flat.view(word).sum(dtype=torch.int64)
