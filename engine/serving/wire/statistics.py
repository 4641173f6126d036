"""Figures of a running service: requests, seconds and losses, for the page and for people."""

from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from engine.serving.bookkeeping.entry import FutureEntry
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.line import ModelLine
from engine.serving.commands import Failure, ForwardBackward, Result, TrainedOutput
from engine.serving.wire.served_model import ServedModel

_POINTS, _MODELS = 200, 64


class ServiceStatistics:
    """Counts of requests and failures, and the latest losses of each model, for the status page."""

    def __init__(self) -> None:
        self._started = monotonic()
        self._routes: dict[str, list[float]] = {}
        self._losses: dict[str, deque[float]] = {}
        self._failures = 0

    def record_request(self, route: str, seconds: float, status: int) -> None:
        """Counts one request of ``route``, which took ``seconds`` and got the HTTP ``status``.

        A ``status`` of 400 or higher, except 408, also counts as refused.
        """
        row = self._routes.setdefault(route, [0, 0.0, 0])
        row[0] += 1
        row[1] += seconds
        row[2] += status >= 400 and status != 408

    def record_result(self, entry: FutureEntry, result: Result) -> None:
        """Counts ``result`` if it is a failure. After a ``forward_backward``, stores the model's loss per token."""
        self._failures += isinstance(result, Failure)
        command = entry.command
        if isinstance(result, TrainedOutput) and isinstance(command, ForwardBackward) and not command.forward_only:
            tokens = max(1, sum(len(one.tokens) for one in command.data))
            if command.model not in self._losses and len(self._losses) >= _MODELS:
                self._losses.pop(next(iter(self._losses)))
            curve = self._losses.setdefault(command.model, deque(maxlen=_POINTS))
            curve.append(result.metrics.get("loss:sum", float("nan")) / tokens)

    def status(self, model: ServedModel, ledger: Ledger) -> Mapping[str, Any]:
        """Returns the state of the service as JSON values: queue, sessions, models with losses, and routes."""
        now, is_well = ledger.clock(), ledger.journal is None or ledger.journal.problem is None
        facts = {"name": model.names[0], "architecture": model.architecture, "grid": model.grid}
        sessions = [
            {"session": one.name, "waiting": one.waiting(), "quiet_seconds": now - one.seen}
            for one in list(ledger.sessions.values())
        ]
        return {
            "model": facts | {"context": model.context, "vocabulary": model.vocabulary},
            "health": "ok" if is_well else "the journal cannot be written",
            "uptime_seconds": monotonic() - self._started,
            "commands": ledger.commands_done,
            "failures": self._failures,
            "queue": {"waiting": len(ledger.queue), "depth": ledger.limits.depth, "result_bytes": ledger.result_bytes},
            "retained": {"forwards": len(ledger.retained), "bytes": ledger.retained.bytes},
            "sessions": sessions,
            "tenants": [self._tenant(line, ledger) for line in list(ledger.lines.values())],
            "routes": self.routes(),
        }

    def routes(self) -> Mapping[str, Any]:
        """Returns the number of "requests", the number "refused" and the total "seconds" of each route."""
        return {
            route: {"requests": int(row[0]), "seconds": row[1], "refused": int(row[2])}
            for route, row in list(self._routes.items())
        }

    def _tenant(self, line: ModelLine, ledger: Ledger) -> Mapping[str, Any]:
        run = ledger.notes.get("run", {}).get(line.model, {})
        kind = {name: run.get(name) for name in ("is_lora", "lora_rank")}
        place = {"model": line.model, "done": line.done, "held": len(line.held), "snapshot": line.covered}
        return place | kind | {"losses": list(self._losses.get(line.model, ()))}
