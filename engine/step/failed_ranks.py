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
    """Error raised on this rank because another rank has failed; the cause is in that rank's error."""


def problem_of_any(
    problem: BaseException | None, comm: Comm, device: torch.device, gathers: bool
) -> BaseException | None:
    """Returns ``problem`` or, if only another data rank has a problem, an :class:`OtherRankError`; else None.

    Call it before a step's first forward. With ZeRO 3 (``gathers``), data ranks exchange one byte. With expert
    parallelism, ranks all-reduce 8 bytes over ep. Otherwise it does not communicate, and returns ``problem``.
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
    """Returns the error to raise on this rank after a step has failed on any rank.

    It is ``problem``, or an error that names the failed ranks and quotes their first error. One all-gather of 384 bytes
    a rank over the world, label "failed ranks".
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
        f"{name_ranks(list(told), hosts)} failed in this step, so no rank updated its weights; see the error of the "
        f"rank that failed: {error}"
    )


def note_failure(call: str, error: BaseException, comm: Comm, alike: bool) -> EngineError | None:
    """Records that the engine method ``call`` has raised ``error`` on this rank. Starts a vote of all ranks in a
    thread, by which the engine stays usable or ends.

    If ``error`` reports a lost rank, waits a few seconds for the vote; if this ends the engine, returns an error that
    names the rank that failed first. Else returns None.

    ``alike``: True if the engine stays usable when all ranks fail in the same call.
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
