"""Peaks of rows of actions, from numbers that a hand can add."""

from collections.abc import Mapping, Sequence

import pytest

from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.planning.activation_memory import ActionMemory, LivePeak, MessageBuffer, peak_of_row

Kinds = Mapping[str, ActionMemory]
F, B = ActionMemory(rise=30, left=10), ActionMemory(rise=15, left=-10)


def row(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def peak(text: str, kinds: Kinds, releases: Sequence[Sequence[int]] | None = None, base: int = 0) -> LivePeak:
    actions = row(text)
    return peak_of_row(actions, releases or [()] * len(actions), lambda action, *_: kinds[action.op.value], base)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0B0", (30, "0F0")),
        ("0F0 0F1 0B0 0B1", (40, "0F1")),
        ("0F0 0F1 0F2 0B0 0B1 0B2", (50, "0F2")),
        ("0F0 0F1 0B0 0F2 0B1 0B2", (40, "0F1")),
    ],
)
def test_what_forwards_leave_adds_up_until_its_backward(text: str, expected: tuple[int, str]) -> None:
    assert peak(text, {"F": F, "B": B}) == expected
    assert peak(text, {"F": F, "B": B}, base=7) == (expected[0] + 7, expected[1])


def test_a_split_backward_holds_until_its_weights() -> None:
    kinds = {"F": F, "I": ActionMemory(rise=15, left=-4), "W": ActionMemory(rise=2, left=-6)}
    assert peak("0F0 0I0 0W0 0F1 0I1 0W1", kinds) == (30, "0F0")
    assert peak("0F0 0I0 0F1 0I1 0W0 0W1", kinds) == (36, "0F1")


def test_a_sent_tensor_lives_until_it_is_released() -> None:
    kinds = {"F": ActionMemory(rise=12, left=10, sent=5), "B": ActionMemory(rise=0, left=-10)}
    text = "0F0 0F1 0F2 0B0 0B1 0B2"
    assert peak(text, kinds) == (10 + 10 + 10 + 3 * 5, "0F2")  # at the end of the step
    assert peak(text, kinds, [(), (0,), (1,), (2,), (), ()]) == (10 + 10 + 10 + 5, "0F2")


def test_buffers_are_offered_ahead_and_used_again() -> None:
    buffer = MessageBuffer((4,), "torch.float32", 16)
    forward = ActionMemory(rise=0, left=0, taken=(buffer,))
    back = ActionMemory(rise=0, left=0, given_back=(buffer,))
    assert peak("1F0 1B0 1F1 1B1", {"F": forward, "B": back}).bytes == 32  # the next one is offered during 1B0
    assert peak("1F0 1F1 1B0 1B1", {"F": forward, "B": back}).bytes == 32
    kept = ActionMemory(rise=0, left=16, kept=(buffer,))
    w = ActionMemory(rise=0, left=-16)
    assert peak("1F0 1I0 1F1 1I1 1W0 1W1", {"F": forward, "I": kept, "W": w}).bytes == 32


def test_the_second_step_begins_with_the_buffers_of_the_first() -> None:
    buffer = MessageBuffer((4,), "torch.float32", 16)
    forward = ActionMemory(rise=1, left=0)
    back = ActionMemory(rise=0, left=0, taken=(buffer,), given_back=(buffer,))
    first = row("0F0 0F1 0F2 0B0 0B1 0B2")
    memories = {Op.FORWARD: forward, Op.BACKWARD: back}
    found = peak_of_row(first, [()] * 6, lambda action, *_: memories[action.op])
    assert found == (33, "0F0")


def test_reductions_behind_the_last_action_count() -> None:
    found = peak_of_row(row("0F0 0B0"), [(), ()], lambda action, *_: {"F": F, "B": B}[action.op.value], 3, 40)
    assert found == (43, "end")


def test_first_and_last_of_a_kind_are_told() -> None:
    asked: list[tuple[str, int, int]] = []

    def memory_of(action: Action, number: int, total: int) -> ActionMemory:
        asked.append((str(action), number, total))
        return F if action.op is Op.FORWARD else B

    peak_of_row(row("0F0 1F0 1B0 0B0 0F1 0B1"), [()] * 6, memory_of)
    assert asked == [("0F0", 0, 2), ("1F0", 0, 1), ("1B0", 0, 1), ("0B0", 0, 2), ("0F1", 1, 2), ("0B1", 1, 2)]
