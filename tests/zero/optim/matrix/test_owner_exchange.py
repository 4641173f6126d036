"""Owners of matrices: fair shares, messages of one size, and pieces that come together and go back."""

import random

import torch
from torch import Tensor

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from engine.zero.optim.matrix.owner_exchange import ROUNDS, OwnerExchange, OwnerRoute, balanced_owners, rounds_of


def test_no_owner_has_more_than_a_fair_share_and_the_largest_matrix() -> None:
    dice = random.Random(5)
    for _ in range(200):
        ranks, names = dice.randint(1, 8), [f"w{index}" for index in range(dice.randint(1, 30))]
        costs = {name: dice.randint(0, 1000) for name in names}
        held = {name: [dice.randint(0, 9) for _ in range(ranks)] for name in names}
        owners = balanced_owners(costs, held)
        loads = [sum(costs[name] for name in names if owners[name] == rank) for rank in range(ranks)]
        assert list(owners) == names
        assert max(loads) <= -(-sum(costs.values()) // ranks) + max(costs.values())


def test_who_holds_most_of_a_matrix_owns_it_where_work_is_fair() -> None:
    held = {"a": [6, 0], "b": [0, 6], "c": [2, 4], "d": [5, 1]}
    assert balanced_owners(dict.fromkeys(held, 1), held) == {"a": 0, "b": 1, "c": 1, "d": 0}
    # rank 0 holds everything, and may do half of it
    everything = {name: [6, 0] for name in held}
    assert sorted(balanced_owners(dict.fromkeys(held, 1), everything).values()) == [0, 0, 1, 1]


def test_rounds_give_every_owner_about_the_same_part_of_its_work() -> None:
    dice = random.Random(7)
    for _ in range(200):
        ranks, names = dice.randint(1, 5), [f"w{index}" for index in range(dice.randint(1, 40))]
        costs = {name: dice.randint(1, 1000) for name in names}
        owners = {name: dice.randrange(ranks) for name in names}
        rounds = rounds_of(owners, costs, {name: (cost,) for name, cost in costs.items()}, names)
        assert [name for each in rounds for name in each if owners[name] == 0] == [n for n in names if owners[n] == 0]
        assert sorted(name for each in rounds for name in each) == sorted(names)
        most = max(sum(owner == rank for owner in owners.values()) for rank in range(ranks))
        assert len(rounds) <= min(ROUNDS, most)
        for rank in range(ranks):
            own = [costs[name] for name in names if owners[name] == rank]
            parts = [sum(costs[name] for name in each if owners[name] == rank) for each in rounds]
            assert max(parts) <= sum(own) / min(ROUNDS, most) + max(own, default=0)


def test_large_matrices_are_gathered_in_more_rounds() -> None:
    names = [f"w{index}" for index in range(12)]
    owners, alike = {name: index % 2 for index, name in enumerate(names)}, dict.fromkeys(names, 1)
    assert len(rounds_of(owners, alike, dict.fromkeys(names, (1,)), names)) == ROUNDS
    found = rounds_of(owners, alike, dict.fromkeys(names, (1 << 24,)), names)
    assert found == [names[at : at + 2] for at in range(0, 12, 2)]


def test_rounds_add_at_most_a_quarter_to_what_is_sent() -> None:
    dice, fewer = random.Random(11), 0
    for _ in range(100):
        names = [f"w{index}" for index in range(dice.randint(1, 30))]
        held = {name: tuple(dice.choice((0, 0, 1, 50)) for _ in range(4)) for name in names}
        owners = balanced_owners(dict.fromkeys(names, 1), held)
        rounds = rounds_of(owners, dict.fromkeys(names, 1), held, names)
        parts = [OwnerRoute("dp", (0, 1, 2, 3), {n: owners[n] for n in each}, held) for each in [names, *rounds]]
        assert sum(part.message for part in parts[1:]) <= 1.25 * parts[0].message
        fewer += len(rounds) < min(ROUNDS, max(sum(o == r for o in owners.values()) for r in range(4)))
    assert fewer, "some would have sent more"


ROUTE = OwnerRoute(
    "dp", (0, 1, 2), {"a": 0, "b": 2, "c": 2}, {"a": (4, 1, 0), "b": (0, 3, 3), "c": (2, 2, 2)}
)  # fmt: skip


def test_messages_have_the_size_of_the_largest_and_own_pieces_are_not_sent() -> None:
    assert ROUTE.message == 5, "rank 1 sends rank 2 its pieces of b and c"
    (row,) = ROUTE.traffic("dp", 4)
    assert (row.axis, row.label, row.calls, row.bytes) == ("dp", "matrices", 2, 2 * 4 * 5 * 2)
    alone = OwnerRoute("dp", (3,), {"a": 0}, {"a": (7,)})
    assert alone.message == 0 and alone.traffic("dp", 4) == ()


def piece(name: str, rank: int) -> Tensor:
    """Numbers that tell matrix, rank and place."""
    size = ROUTE.sizes[name][rank]
    return torch.arange(size, dtype=torch.float32) + 100 * rank + 1000 * "abc".index(name)


def test_pieces_come_to_their_owners_and_go_back() -> None:
    def body(world: World) -> None:
        grid = Grid(dp=3, rank=world.rank)
        comm = Comm(grid, world.connect(grid))  # type: ignore[misc]
        exchange, blank = OwnerExchange(ROUTE, comm), torch.empty(0)
        own = {name: piece(name, world.rank) for name in "abc" if ROUTE.sizes[name][world.rank]}
        found = exchange.gather(own, blank).wait()
        assert list(found) == ROUTE.owned(world.rank)
        for name, parts in found.items():
            assert [part.tolist() for part in parts] == [piece(name, rank).tolist() for rank in range(3)]
        back = exchange.scatter({name: [-part for part in parts] for name, parts in found.items()}, blank).wait()
        assert {name: part.tolist() for name, part in back.items()} == {
            name: (-piece(name, world.rank)).tolist() for name in "abc"
        }
        assert comm.tally.rows() == ROUTE.traffic("dp", 4)

    run_thread_ranks(3, body)
