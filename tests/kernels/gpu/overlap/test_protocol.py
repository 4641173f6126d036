"""Every interleaving of the protocol ends right, a defect in it does not, and a fault from outside is never a wrong
result."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.faults.communicating_kernels import COMMUNICATING_KERNELS
from tests.kernels.gpu.overlap.protocol import Action, End, Model, Program, Tiles, mixed, programs, without
from tests.selection import wide
from tests.tables import Table


@pytest.mark.parametrize(
    ("ranks", "tiles", "epochs"), [(2, 1, 3), wide(2, 3, 2), wide(2, 2, 4), wide(2, 1, 6), wide(3, 1, 2)], ids=str
)
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_every_interleaving_ends_right(kind: str, ranks: int, tiles: int, epochs: int) -> None:
    assert Model(programs(ranks, tiles, epochs, kind)).every() == {End.RIGHT}


@pytest.mark.parametrize(("ranks", "tiles", "epochs"), [(2, 1, 2), wide(2, 1, 4), wide(2, 2, 2)], ids=str)
def test_every_interleaving_of_sums_by_a_switch_ends_right(ranks: int, tiles: int, epochs: int) -> None:
    assert Model(programs(ranks, tiles, epochs, "switch")).every() == {End.RIGHT}


@pytest.mark.parametrize(
    "kinds",
    [
        ("scatter", "gather", "scatter"),
        wide(("gather", "switch", "scatter")),
        wide(("switch", "dispatch", "switch")),
        wide(("scatter", "return", "switch", "gather")),
    ],
    ids=str,
)
def test_calls_of_several_kinds_follow_each_other(kinds: tuple[str, ...]) -> None:
    assert Model(tuple(mixed(rank, 2, 1, kinds) for rank in range(2))).every() == {End.RIGHT}


RAGGED = ((1, 0), (2, 1))
"""Tiles by source and target: rank 0 has nothing for rank 1."""


@pytest.mark.parametrize(
    ("tiles", "epochs"),
    [(RAGGED, 2), wide(RAGGED, 4), wide(((0, 0), (0, 0)), 6), wide(((0, 1, 0), (1, 0, 0), (0, 0, 1)), 2)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["dispatch", "return"])
def test_every_interleaving_of_rows_of_experts_ends_right(kind: str, tiles: Tiles, epochs: int) -> None:
    assert isinstance(tiles, tuple)
    assert Model(programs(len(tiles), tiles, epochs, kind)).every() == {End.RIGHT}


def unsaid(made: Sequence[Program]) -> tuple[Program, ...]:
    """Ranks that have no rows for each other give no signal, and nobody waits for one."""
    with_rows = {(a.place.owner, a.place.writer) for each in made for a in each if a.place.kind == "slot"}
    return tuple(tuple(a for a in each if (a.place.owner, a.place.writer) in with_rows) for each in made)


@pytest.mark.parametrize("kind", ["dispatch", "return"])
def test_a_signal_without_rows_is_needed(kind: str) -> None:
    made = programs(2, ((0, 1), (0, 0)) if kind == "dispatch" else ((0, 0), (1, 0)), 3, kind)
    assert Model(made).every() == {End.RIGHT}
    assert End.WRONG in Model(unsaid(made)).every()


@pytest.mark.parametrize(("kind", "tiles"), [("gather", 1), ("dispatch", RAGGED)], ids=str)
def test_who_has_done_its_calls_may_close(kind: str, tiles: Tiles) -> None:
    """Others still wait for what it has signalled before, and get it; without the last look they might not."""
    made = programs(2, tiles, 2, kind)
    assert Model(made, watched=True).every() == {End.RIGHT}
    assert End.REPORTED in Model(made, watched=True, looks_again=False).every()


@pytest.mark.parametrize("kind", ["gather", "scatter", wide("dispatch"), wide("return")])
def test_nobody_waits_in_vain_for_a_rank_that_has_ended(kind: str) -> None:
    """It ends after each of its actions once; with nobody who watches, others wait until their time is over."""
    whole = programs(2, RAGGED if kind in ("dispatch", "return") else 1, 2, kind)
    late = 0
    for length in range(len(whole[1])):
        made = (whole[0], whole[1][:length])
        assert Model(made, watched=True).every() <= {End.RIGHT, End.REPORTED}
        late += End.TIMED_OUT in Model(made).every()
    assert late


def swapped(made: Sequence[Program]) -> tuple[Program, ...]:
    """A tile is signalled before it is written."""
    return tuple(tuple(_swap(each)) for each in made)


def _swap(actions: Program) -> list[Action]:
    found = list(actions)
    for index, action in enumerate(found[:-1]):
        if action.what == "write":
            found[index], found[index + 1] = found[index + 1], action
    return found


def next_call(made: Sequence[Program]) -> tuple[Program, ...]:
    """A rank goes on to its next call before it has waited for the last tile of this one."""
    found = []
    for actions in made:
        index = max(number for number, action in enumerate(actions) if action.what == "read" and action.epoch == 1)
        kept = list(actions)
        late = [kept.pop(index - 1) for _ in range(2)]
        after = max(number for number, action in enumerate(kept) if action.what == "signal" and action.epoch == 3)
        found.append((*kept[: after + 1], *late, *kept[after + 1 :]))
    return tuple(found)


def last_epoch(made: Sequence[Program]) -> tuple[Program, ...]:
    """Ranks wait for the arrivals of the call before."""
    return tuple(
        tuple(
            a._replace(epoch=max(a.epoch - 2, 0)) if (a.what, a.place.kind) == ("look", "arrival") else a for a in each
        )
        for each in made
    )


def one_buffer(made: Sequence[Program]) -> tuple[Program, ...]:
    """Slots do not alternate."""
    return tuple(
        tuple(a._replace(place=a.place._replace(parity=0)) if a.place.kind == "slot" else a for a in each)
        for each in made
    )


def from_the_end(made: Sequence[Program]) -> tuple[Program, ...]:
    """Ranks read what has come in the opposite order, as other programs of a kernel do."""
    return tuple(tuple(_reversed(each)) for each in made)


def _reversed(actions: Program) -> Iterator[Action]:
    for epoch in sorted({action.epoch for action in actions}):
        call = [action for action in actions if action.epoch == epoch]
        yield from (action for action in call if action.what in ("write", "signal"))
        looks = [index for index, action in enumerate(call) if action.what == "look"]
        for first, last in zip(reversed(looks), [len(call), *reversed(looks[1:])], strict=True):
            yield from call[first:last]


@pytest.mark.parametrize(("kind", "tiles"), [("gather", 2), ("dispatch", RAGGED)], ids=str)
def test_tiles_may_be_read_in_another_order(kind: str, tiles: Tiles) -> None:
    assert Model(from_the_end(programs(2, tiles, 2, kind))).every() == {End.RIGHT}


def crossed(made: Sequence[Program]) -> tuple[Program, ...]:
    """The signals of two tiles are swapped."""
    return from_the_end([_cross(each) for each in made])


def _cross(actions: Program) -> Program:
    found, places = list(actions), {action.place for action in actions}
    for index, action in enumerate(found):
        other = action.place._replace(tile=1 - action.place.tile)
        if action.what == "signal" and other in places:
            found[index] = action._replace(place=other)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A mistake in the protocol, and the mistake in a kernel that is its like."""

    about: str
    change: Callable[[Sequence[Program]], tuple[Program, ...]] = tuple
    tiles: int = 1
    released: bool = True
    watched: bool = False
    end: End = End.WRONG
    kinds: tuple[str, ...] = ("gather", "scatter", "switch", "dispatch", "return")
    """Of calls that can have it."""
    fault: str
    """Its name for ``python -m tests.faults``."""

    def model(self, kind: str) -> Model:
        """With the defect, two ranks and three calls, or fewer where they are enough."""
        tiles: Tiles = self.tiles
        if kind in ("dispatch", "return"):
            tiles = RAGGED if self.tiles == 2 else ((1, 1), (0, 1))
        epochs = 4 if kind == "switch" and not self.watched else 2 if self.watched or self.tiles == 2 else 3
        made = self.change(programs(2, tiles, epochs, kind))
        return Model(made, released=self.released, watched=self.watched, looks_again=not self.watched)


READ_AT_ONCE = ("gather", "scatter", "dispatch", "return")
"""Kinds in which a tile is read when it has come; a switch adds when all ranks have theirs."""
DEFECTS = (
    Defect(about="a signal releases nothing (no fence)", released=False, fault="signal-without-release"),
    Defect(
        about="a tile is read before anybody waits for it",
        change=lambda made: without(made, "look", "arrival"),
        fault="tile-read-unasked",
    ),
    Defect(about="a signal comes before its tile", change=swapped, fault="signal-before-its-tile"),
    Defect(
        about="the signals of two tiles are swapped",
        change=crossed,
        tiles=2,
        kinds=READ_AT_ONCE,
        fault="signals-swapped",
    ),
    Defect(
        about="a slot is written again before it was read",
        change=next_call,
        kinds=READ_AT_ONCE,
        fault="empty-tile-not-waited-for",
    ),
    Defect(about="an epoch is forgotten", change=last_epoch, fault="arrival-of-an-old-call"),
    Defect(
        about="slots do not alternate", change=one_buffer, kinds=READ_AT_ONCE, fault="slots-do-not-alternate"
    ),  # two signals of all ranks lie between calls by the switch, so it would do with one
    Defect(
        about="ranks without rows for each other give no signal",
        change=unsaid,
        kinds=("dispatch", "return"),
        fault="no-signal-without-rows",
    ),
    Defect(
        about="no last look at a rank that has ended: what it has sent before counts as missing",
        watched=True,
        end=End.REPORTED,
        fault="no-last-look",
    ),
)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    made = Table("protocol-defects", "defect")
    yield made
    if request.config.getoption("--write-figures"):
        made.write()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.fault)
def test_a_defect_of_the_protocol_is_found(defect: Defect, table: Table) -> None:
    for kind in defect.kinds:
        steps = defect.model(kind).ends().get(defect.end)
        assert steps is not None, kind
        table.cells[defect.about, kind] = f"{steps} steps"
    (like,) = (fault for fault in COMMUNICATING_KERNELS if fault.name == defect.fault)
    table.cells[defect.about, "in the kernels, killed by"] = f"`{like.name}`: `{like.tests[0].rpartition('/')[2]}`"


def lost(made: tuple[Program, ...], chance: random.Random) -> Model:
    """A signal of some rank never comes."""
    return Model(_without_one(made, chance))


def dead(made: tuple[Program, ...], chance: random.Random) -> Model:
    """A rank ends somewhere."""
    victim = chance.randrange(len(made))
    kept = made[victim][: chance.randrange(len(made[victim]))]
    return Model((*made[:victim], kept, *made[victim + 1 :]))


def repeated(made: tuple[Program, ...], chance: random.Random) -> Model:
    """A signal comes a second time, at any moment after the first."""
    signals = [action for actions in made for action in actions if action.what == "signal"]
    stray = chance.choice(signals)
    # after the first: a copy on its way waits for what it is a copy of
    return Model(made, strays=(Action("look", stray.place, stray.epoch, 1 << 30), stray))


def ahead(made: tuple[Program, ...], chance: random.Random) -> Model:
    """A rank has made one call more than the others and is two epochs on from there: its calls are out of step."""
    victim, after = chance.randrange(len(made)), chance.randrange(1, 3)
    moved = tuple(_later(action, after) for action in made[victim])
    return Model((*made[:victim], moved, *made[victim + 1 :]))


def _later(action: Action, after: int) -> Action:
    """Signals from call ``after`` on are those of two calls later, which have the same slots."""
    if action.epoch < after or action.what != "signal":
        return action
    return action._replace(epoch=action.epoch + 2)


def _without_one(made: tuple[Program, ...], chance: random.Random) -> tuple[Program, ...]:
    places = [
        (rank, index) for rank, actions in enumerate(made) for index, a in enumerate(actions) if a.what == "signal"
    ]
    victim, gone = chance.choice(places)
    kept = tuple(a for index, a in enumerate(made[victim]) if index != gone)
    return (*made[:victim], kept, *made[victim + 1 :])


FAULTS = {"lost": lost, "dead": dead, "repeated": repeated, "ahead": ahead}


@pytest.mark.parametrize("count", [300, wide(10_000)])
def test_random_interleavings_and_faults_are_never_wrong(count: int) -> None:
    chance, ends = random.Random(count), dict.fromkeys(FAULTS, 0)
    for _ in range(count):
        ranks, epochs = chance.choice((2, 2, 3)), chance.randrange(1, 5)
        kind = chance.choice(("gather", "scatter", "dispatch", "return"))
        tiles: Tiles = chance.randrange(1, 4)
        if kind in ("dispatch", "return"):
            tiles = tuple(tuple(chance.randrange(3) for _ in range(ranks)) for _ in range(ranks))
        made = programs(ranks, tiles, epochs, kind)
        assert Model(made, watched=chance.random() < 0.5).one(chance) is End.RIGHT
        name = chance.choice(list(FAULTS))
        end = FAULTS[name](made, chance).one(chance)
        assert end is not End.WRONG, name
        ends[name] += end in (End.REPORTED, End.TIMED_OUT)
    assert ends["lost"] and ends["dead"] and ends["ahead"], f"faults are reported: {ends}"
