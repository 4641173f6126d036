"""Errors of a step in which a rank has failed: every other rank raises one that names that rank, its host and its
error.
"""

import socket

import torch

from engine.errors import EngineError
from engine.parallel.comm.agreement import gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.failed_calls import worded
from engine.parallel.comm.rendezvous import name_ranks

_BYTES = 384
"""Bytes of a rank's host and error; longer ones are cut off."""


class OtherRankError(EngineError):
    """Error raised on this rank only because another rank has failed. The cause is in the error of that other rank."""


def problem_of_any(
    problem: BaseException | None, comm: Comm, device: torch.device, gathers: bool
) -> BaseException | None:
    """Returns the error with which this rank refuses a step before its first forward; None if the step can begin.

    The error is ``problem``, this rank's own, or else an :class:`OtherRankError` if another data rank has one. Ranks
    exchange it only if their forwards communicate: with ZeRO 3 (``gathers``) they exchange one byte over data ranks,
    without GPU synchronization; if they share experts, they all-reduce 8 bytes over the axis "ep".
    """
    failed = problem is not None
    if gathers:
        failed = any(map(any, comm.agree_on_gathers(bytes([failed]), "batch check")))
    if comm.grid.experts > 1:
        flag = torch.tensor([int(failed)], device=device)
        comm.all_reduce(flag, "ep", "batch check", "max").wait()
        failed = bool(flag)
    if problem is not None or not failed:
        return problem
    return OtherRankError(
        "another data rank has no batch, so no rank makes this step; see the error of the rank that failed."
    )


def failure_of_step(problem: BaseException | None, comm: Comm, device: torch.device) -> BaseException:
    """Returns the error to raise on this rank after a step has failed on this or any other rank.

    It is ``problem``, this rank's own error. If this rank has none, it is an error that names the failed ranks and
    quotes the first of their errors. Collective over the world: one all-gather of 384 bytes a rank, label "failed
    ranks".
    """
    own = problem if not isinstance(problem, OtherRankError) else None
    rows = gather_from_all(_as_row(own), comm, device, "failed ranks")
    told = {rank: _read_row(bytes(row)) for rank, row in enumerate(rows.tolist()) if any(row)}
    if own is not None:
        return own
    if not told:  # nobody but this rank knows of a problem
        return problem or EngineError(
            "a step failed on another rank, which has sent no error; look for the first traceback of the job."
        )
    hosts = [told[rank][0] if rank in told else "" for rank in range(comm.grid.world_size)]
    (_, error), *_ = told.values()
    return EngineError(
        f"{name_ranks(list(told), hosts)} failed in this step, so no rank makes it; see the error of the rank that "
        f"failed: {error}"
    )


def note_failure(call: str, error: BaseException, comm: Comm, alike: bool) -> EngineError | None:
    """Records that the engine method ``call`` has raised ``error`` on this rank, for other ranks that may still run it
    and wait.

    ``alike``: True if the engine stays usable when all ranks fail in the same call.

    If ``error`` only reports a lost connection to a rank that failed before, returns an error that names that rank.
    Else returns None.
    """
    comm.failed(call, error, alike)
    return comm.failures.sentence(error)


def _as_row(own: BaseException | None) -> torch.Tensor:
    row = torch.zeros(_BYTES, dtype=torch.uint8)
    if own is not None:
        text = f"{socket.gethostname()}\n{worded(own)}"
        data = text.encode(errors="backslashreplace")[:_BYTES]
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row


def _read_row(row: bytes) -> tuple[str, str]:
    """Returns the host and the error of a row."""
    host, _, error = row.rstrip(b"\0").decode(errors="ignore").partition("\n")
    return host, error
