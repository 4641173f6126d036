"""Diagnosis of a hang from the views of all ranks.

    rank 0   in all_reduce 'gradients' #17 ----waits for----> rank 2, which has begun only #16 of this stream
    rank 1   in receive from rank 0        ----waits for----> rank 0
    rank 2   in F of stage 1, since 61 s                      waits for no rank: it is the cause

A rank that has ended or was stopped is the cause. Otherwise it is a rank that others wait for, directly or indirectly,
and that waits for none. If all wait for each other, the first call that differs identifies a minority.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.parallel.comm.flight.layout import CALLS
from engine.parallel.comm.rendezvous import name_ranks
from engine.reporting.failure_message import is_consequence
from engine.watchdog.view import CallView, RankView

_MOST_NAMED = 4
_ORDERLY = "exit status 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Cause of a hang in the watchdog's report: global ranks, kind of cause, and a sentence for the user."""

    ranks: tuple[int, ...]
    kind: str
    """Kind of cause: ended, stopped, computing, outside, different, host or link."""
    sentence: str
    certain: bool = True
    """False if the error of this rank blames another rank, whose view has not arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentHost:
    """Host without messages to the watchdog for ``seconds``, with the global ranks on it."""

    host: str
    ranks: tuple[int, ...]
    seconds: float


def diagnose(
    views: Mapping[int, RankView], size: int, timeout: float, silent: Sequence[SilentHost] = ()
) -> Blame | None:
    """Returns the cause of a hang or of a rank's failure; None if no rank hangs or has failed.

    A rank hangs if it waits longer than ``timeout`` for another rank.

    Args:
        views: last known state of each rank, by global rank.
        size: number of ranks of the job.
        timeout: seconds that a rank may wait for another rank.
        silent: hosts without messages. A host that is silent for more than half of ``timeout`` is the cause of a hang.
    """
    waiting = {view.rank: view for view in views.values() if view.waiting is not None and view.runs}
    overdue = [view for view in waiting.values() if view.waiting is not None and view.waiting.seconds > timeout]
    gone = [view for view in views.values() if not view.runs and view.phase != "ENDED"]
    # a rank that has exited in order between two steps is no cause until another rank waits too long
    bad = [view for view in gone if overdue or view.words or view.ended not in ("", _ORDERLY) or view.phase == "STEP"]
    if bad:
        return _ended(bad, views)
    if not overdue:
        return None
    # a silent host comes before its ranks: their last views are old, so they only seem to wait or to compute
    late = [host for host in silent if host.seconds > timeout / 2]
    if late:
        return _lost(late, size)
    stopped = [view for view in views.values() if view.process in ("T", "t")]
    if stopped:
        return _still(stopped, overdue, "stopped", "has been stopped, by SIGSTOP or a debugger, for {}")
    blamed = _roots(overdue, views)  # without a root all wait in a ring, so their calls must differ
    if any(view.rank not in waiting for view in blamed):
        return _not_waiting([view for view in blamed if view.rank not in waiting], overdue)
    return _another_call(views) or _different(overdue, views) or _no_arrival(overdue, views, silent)


def _ended(gone: Sequence[RankView], views: Mapping[int, RankView]) -> Blame:
    """Blames an ended rank: the first one with a message that does not blame another rank.

    A rank that is still ending may already have reported the cause.
    """
    causes = [view for view in gone if not is_consequence(view.words)]
    causes = causes or [view for view in views.values() if view.words and not is_consequence(view.words)]
    first = max(causes or gone, key=lambda view: view.idle)
    how = _words(first) or first.ended or "it left no message"
    told = f"{first.name} has ended: {how}{_doing(first)}{_finished(first)}."
    return Blame(ranks=(first.rank,), kind="ended", sentence=told, certain=bool(causes))


def _lost(late: Sequence[SilentHost], size: int) -> Blame:
    ranks = tuple(sorted(rank for host in late for rank in host.ranks))
    names, seconds = ", ".join(host.host for host in late), max(host.seconds for host in late)
    silence = "have not answered" if len(late) > 1 else "has not answered"
    told = (
        f"{names} with {name_ranks(ranks)} of {size} {silence} for {seconds:.1f} s: the machine or its network is down."
    )
    return Blame(ranks=ranks, kind="host", sentence=told)


def _roots(overdue: Sequence[RankView], views: Mapping[int, RankView]) -> list[RankView]:
    """Returns the ranks that others wait for, directly or over other ranks, and that wait for none; all ranks of a
    ring."""
    seen: dict[int, RankView] = {}
    todo = list(overdue)
    roots: dict[int, RankView] = {}
    while todo:
        view = todo.pop()
        if view.rank in seen:
            continue
        seen[view.rank] = view
        if view.waiting is None:
            roots[view.rank] = view
        todo += [views[rank] for rank in _awaited(view, views)]
    return [roots[rank] for rank in sorted(roots)] or [seen[rank] for rank in sorted(seen)]


def _awaited(view: RankView, views: Mapping[int, RankView]) -> list[int]:
    """Returns the known ranks that have not begun the call in which ``view`` waits."""
    call = view.waiting
    if call is None:
        return []
    return [rank for rank in call.peers if rank != view.rank and rank in views and not views[rank].begun(call)]


def _not_waiting(blamed: Sequence[RankView], overdue: Sequence[RankView]) -> Blame:
    computing = [view for view in blamed if view.phase == "STEP"]
    if computing:
        return _still(computing, overdue, "computing", "has computed for {} without reaching the call")
    closed = [view for view in blamed if view.phase == "ENDED"]
    what = "closed its engine {} ago" if closed else "has run the user's code for {} without calling the engine"
    found = _still(closed or blamed, overdue, "outside", what)
    return replace(found, sentence=_alone(closed or blamed, overdue) + found.sentence)


def _still(blamed: Sequence[RankView], overdue: Sequence[RankView], kind: str, what: str) -> Blame:
    told = [
        f"{view.name} {what.format(_since(view, kind))}{_doing(view)}{_finished(view)}{_said(view)}"
        for view in blamed[:_MOST_NAMED]
    ]
    more = f"; and {len(blamed) - _MOST_NAMED} more" * (len(blamed) > _MOST_NAMED)
    ranks = tuple(view.rank for view in blamed)
    others = [view for view in overdue if view.rank not in ranks]
    waiters = f"; {_waiters(others)}" if others else ""
    return Blame(ranks=ranks, kind=kind, sentence=f"{'; '.join(told)}{more}{waiters}.")


def _since(view: RankView, kind: str) -> str:
    return f"{view.in_phase if kind == 'outside' else view.idle:.1f} s"


def _doing(view: RankView) -> str:
    if view.waiting is not None:
        return f", in {view.waiting.text}"
    if view.action is not None:
        return f", in {view.action.text} of step {view.step + 1}"
    return f", in step {view.step + 1}" if view.phase == "STEP" else f", after {view.step} steps"


def _finished(view: RankView) -> str:
    return f", last finished {view.last.text}" if view.last is not None else ""


def _said(view: RankView) -> str:
    return f", after {_words(view)}" if view.words else ""


def _words(view: RankView) -> str:
    return view.words.strip().rstrip(".")  # the sentence goes on


def _waiters(others: Sequence[RankView]) -> str:
    first, call = _longest(others)
    longest = f"for {call.seconds:.1f} s in {call.text}"
    if len(others) == 1:
        return f"rank {first.rank} has waited {longest}"
    return f"{name_ranks(tuple(sorted(view.rank for view in others)))} wait, rank {first.rank} {longest}"


def _alone(blamed: Sequence[RankView], overdue: Sequence[RankView]) -> str:
    """Returns the remedy for a call of the engine that some ranks do not make, before the description of these
    ranks."""
    _, call = _longest(overdue)
    if call.stream != CALLS:
        return ""
    came = name_ranks(tuple(sorted(view.rank for view in overdue)))
    absent = name_ranks(tuple(view.rank for view in blamed))
    return (
        f"{call.text} was called on {came} and for {call.seconds:.1f} s not on {absent}: every rank must call it, so "
        "move it out of `if rank == 0:`; "
    )


def _longest(waiting: Sequence[RankView]) -> tuple[RankView, CallView]:
    """Returns the rank with the longest wait, and its call."""
    calls = [(view, view.waiting) for view in waiting if view.waiting is not None]
    return max(calls, key=lambda each: each[1].seconds)


def _another_call(views: Mapping[int, RankView]) -> Blame | None:
    """Blames ranks with other calls of the engine than the rest, such as one that evaluates while the rest trains."""
    calls = _first_unlike(CALLS, views)
    return None if calls is None else _unlike(calls, views)


def _different(overdue: Sequence[RankView], views: Mapping[int, RankView]) -> Blame | None:
    """Blames ranks that wait for each other in different calls: by the first call of a stream that differs."""
    found: list[dict[int, CallView]] = []
    for view in overdue:
        assert view.waiting is not None
        peers = {rank: views[rank] for rank in view.waiting.peers if rank in views}
        if (calls := _first_unlike(view.waiting.stream, peers)) is not None:
            found.append(calls)
    if not found:
        return _unequal(overdue, views)
    return _unlike(max(found, key=lambda calls: max(call.seconds for call in calls.values())), views)


def _first_unlike(stream: str, views: Mapping[int, RankView]) -> dict[int, CallView] | None:
    """Returns the first call of a stream that differs between ranks, by rank; None if all known calls are equal."""
    made = {
        rank: {call.count: call for call in view.recent if call.stream == stream}
        for rank, view in sorted(views.items())
    }  # fmt: skip
    for count in sorted({count for calls in made.values() for count in calls}):
        calls = {rank: each[count] for rank, each in made.items() if count in each}
        if len({call.likeness for call in calls.values()}) > 1:
            return calls
    return None


def _unlike(calls: Mapping[int, CallView], views: Mapping[int, RankView]) -> Blame:
    """Blames the minority among ranks that should make the same call."""
    usual, _ = Counter(call.likeness for call in calls.values()).most_common(1)[0]
    odd = tuple(sorted(rank for rank, call in calls.items() if call.likeness != usual))
    others = tuple(sorted(rank for rank, call in calls.items() if call.likeness == usual))
    names = ", ".join(views[rank].name for rank in odd[:_MOST_NAMED])
    rule = "all ranks of a group must make the same calls in the same order."
    if calls[odd[0]].stream == CALLS:
        rule = "all ranks must call the engine in the same order, so move its calls out of `if rank == 0:`."
    told = (
        f"{names} {'are' if len(odd) > 1 else 'is'} in {calls[odd[0]].text}, while {name_ranks(others)} "
        f"{'are' if len(others) > 1 else 'is'} in {calls[others[0]].text}: {rule}"
    )
    return Blame(ranks=odd, kind="different", sentence=told)


def _unequal(overdue: Sequence[RankView], views: Mapping[int, RankView]) -> Blame | None:
    """Blames ranks in a ring of waits: the ones that have not reached the call of the longest wait."""
    first, _ = _longest(overdue)
    behind = [views[rank] for rank in _awaited(first, views)]
    return _still(behind, overdue, "different", "has waited elsewhere for {}") if behind else None


def _no_arrival(
    overdue: Sequence[RankView], views: Mapping[int, RankView], silent: Sequence[SilentHost]
) -> Blame | None:
    """Blames the network between hosts: all ranks are in the same call, and no data arrives."""
    _, call = _longest(overdue)
    if silent:
        return _lost(silent, len(views))
    unheard = tuple(rank for rank in call.peers if rank not in views)
    if unheard:
        have, down = ("have", "their hosts are") if len(unheard) > 1 else ("has", "its host is")
        told = (
            f"{name_ranks(unheard)} of {len(call.peers)} {have} never answered the watchdog: {down} down, or the "
            f"engine was closed there within seconds; {_waiters(overdue)}."
        )
        return Blame(ranks=unheard, kind="host", sentence=told)
    hosts = sorted({views[rank].host for rank in call.peers})
    told = (
        f"{name_ranks(call.peers)} have all reached {call.text}, which has not finished for {call.seconds:.1f} s: "
        f"no data passes between {', '.join(hosts)}."
    )
    return Blame(ranks=call.peers, kind="link", sentence=told)
