"""Where two forwards of one model part: the first event that differs, by name.

A cut is planned for one timeline. A forward that takes another path later on reads what is not here, which is NaN, or
calls units in another order; which of its operations is to blame, two timelines tell.
"""

from itertools import zip_longest

from engine.parallel.pipeline.timeline import Call, Glue, Timeline, Value

Event = Call | Glue


def difference(before: Timeline, now: Timeline) -> str | None:
    """The first event that differs, as the end of a sentence that begins with "the forward"; None: they are alike.

    Events differ by what runs, by what they read, and by the shape, dtype and gradient of what they make. Where code
    stands in a file does not count.
    """
    for old, new in zip_longest(_events(before), _events(now)):
        if old is None:
            return f"goes on with {_name(new)} where it ended before"
        if new is None:
            return f"ends where it came to {_name(old)} before"
        if _kind(old) != _kind(new):
            return f"comes to {_name(new)} where it came to {_name(old)} before"
        if _reads(before, old) != _reads(now, new):
            return f"comes to {_name(new)}, which reads something else than before"
        if _makes(before, old) != _makes(now, new):
            return f"comes to {_name(new)}, which gives {_shown(now, new)} where it gave {_shown(before, old)} before"
    return None if before.result == now.result else "returns something else than before"


def _events(timeline: Timeline) -> list[Event]:
    return sorted((*timeline.calls, *timeline.glue), key=lambda event: event.event)


def _kind(event: Event) -> tuple[str, str]:
    return ("call", event.unit) if isinstance(event, Call) else ("glue", event.name)


def _name(event: Event | None) -> str:
    assert event is not None  # one of two that are not alike
    return f"a call of unit {event.unit!r}" if isinstance(event, Call) else f"{event.name} at {event.place}"


def _values(timeline: Timeline, event: Event) -> list[Value]:
    if isinstance(event, Glue):
        return [timeline.values[number] for number in event.makes]
    written = [number for _, number in event.writes]
    return [timeline.values[number] for number in (*written, *event.output.values())]


def _reads(timeline: Timeline, event: Event) -> object:
    if isinstance(event, Call):
        return event.inputs, event.parameters
    return [(value.inputs, value.parameters) for value in _values(timeline, event)]


def _makes(timeline: Timeline, event: Event) -> object:
    made = [(value.shape, value.dtype, value.grad) for value in _values(timeline, event)]
    return made, event.output, event.writes


def _shown(timeline: Timeline, event: Event) -> str:
    made = [f"{value.dtype} {value.shape}{'' if value.grad else ' without gradient'}"
            for value in _values(timeline, event)]  # fmt: skip
    return ", ".join(made) or "no value"
