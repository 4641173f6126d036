"""Modules that one data rank calls once more than another, earlier, or not at all train as in one process (ZeRO 3)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engine
from engine.verify import Parity, TrainingRecord, train_alone, verify
from tests.models import take_rows
from tests.selection import wide
from tests.zero.awkward import VOCABULARY, Block, Chain

RunRanks = Callable[..., list[Any]]
STEPS, ROWS, WORDS = 3, 8, 5
ENV = {"TRINE_TIMEOUT_SECONDS": "40"}
"""Ranks that wait for a call which another one does not make end after half of it, by the watchdog."""


class Uneven(Chain):
    """The first word of a microbatch chooses the path."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(3))
        modules = dict(self._modules)  # the tower runs before the other blocks
        self._modules.clear()
        self._modules.update({"embed": modules["embed"], "tower": modules["tower"]} | modules)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.path(self.embed(ids), int(ids[0, 0]) % 3), ids)

    def path(self, x: Tensor, choice: int) -> Tensor:
        raise NotImplementedError

    def seen(self, x: Tensor) -> Tensor:
        for block in self.tower:
            x = block(x)
        return x


class TowerOnceMore(Uneven):
    """Images alone, or videos too, or neither."""

    def path(self, x: Tensor, choice: int) -> Tensor:
        parts = [self.seen(x * (1 + turn)) for turn in range(choice)]
        return self.run(x + sum(parts))


class Loops(Uneven):
    """A loop over the last blocks whose length depends on the data."""

    def path(self, x: Tensor, choice: int) -> Tensor:
        x = self.run(self.seen(x))
        for _ in range(choice):
            x = self.blocks[3](self.blocks[2](x))
        return x


class OtherOrder(Uneven):
    """Blocks change places."""

    def path(self, x: Tensor, choice: int) -> Tensor:
        x = self.seen(x)
        order = [0, 1, 2, 3] if choice else [2, 0, 3, 1]
        for index in order:
            x = self.blocks[index](x)
        return x


class RecomputesRegions(TowerOnceMore):
    """The whole tower is one region of the user's own checkpointing."""

    reentrant = False

    def seen(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().seen, x, use_reentrant=self.reentrant)
        return out


class RecomputesReentrant(RecomputesRegions):
    """The older kind."""

    reentrant = True


class ReadsOnOne(Uneven):
    """A weight is read without a call of its module, in some microbatches."""

    def path(self, x: Tensor, choice: int) -> Tensor:
        x = self.run(self.seen(x))
        aside: Any = self.tower[1]
        return x * aside.norm.weight if choice == 1 else x


class Frozen(TowerOnceMore):
    """The tower is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tower.requires_grad_(False)


class TiedTower(Uneven):
    """The tower shares a matrix with a block that always runs."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.blocks[1]
        last: Any = self.tower[2]
        last.up.weight = first.up.weight

    def path(self, x: Tensor, choice: int) -> Tensor:
        return self.run(sum((self.seen(x) for _ in range(choice)), x))


KINDS: Mapping[str, type[Uneven]] = MappingProxyType({
    kind.__name__: kind
    for kind in (
        TowerOnceMore, Loops, OtherOrder, RecomputesRegions, RecomputesReentrant, ReadsOnOne, Frozen, TiedTower,
    )
})  # fmt: skip


def batches() -> list[Tensor]:
    """Rows whose first words choose 0, 1 and 2, other ones on every data rank and in every microbatch."""
    tokens = torch.randint(0, VOCABULARY, (STEPS, ROWS, WORDS), generator=torch.Generator().manual_seed(5))
    tokens[:, :, 0] = torch.tensor([[0, 1, 2, 0, 1, 1, 2, 0], [2, 2, 0, 1, 0, 2, 1, 1], [0, 0, 0, 0, 0, 0, 0, 2]])
    return list(tokens)


def settings(data: int, zero: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Microbatches of one row; clipping active."""
    return {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "parallel": {"data": data},
        "zero_optimization": zero,
    } | changes


def trained(names: list[str], ways: list[dict[str, Any]]) -> list[TrainingRecord]:
    """Body of a rank: each model in each way, with an evaluation after each step."""
    found = []
    for name in names:
        for config in ways:
            with engine.initialize(KINDS[name](), config) as eng:
                rows = eng.config.micro * eng.config.accumulation
                mine = [take_rows(batch, eng.grid.coord().dp * rows, rows) for batch in batches()]
                reports = []
                for batch in mine:
                    reports.append(eng.train_batch(batch))
                    eng.eval_batch(batch)
                losses, norms = tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports)
                found.append(TrainingRecord(losses, norms, eng.full_state_dict()))
    return found


def check(run_ranks: RunRanks, names: list[str], ways: list[dict[str, Any]], data: int) -> None:
    """Each model in each way equals one process."""
    found = iter(run_ranks(trained, data, names, ways, env=ENV)[0])
    for name in names:
        alone = train_alone(KINDS[name], settings(1, {"stage": 0}), batches())
        for config in ways:
            parity = Parity(next(found), alone)
            assert parity.holds(), f"{name}, {config}: {parity}"
            assert min(parity.reference.norms) > config["gradient_clipping"]


MODES: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "gather": "step"},
    {"stage": 3, "reduce": "microbatch"},
    {"stage": 3, "gather": "step", "reduce": "microbatch"},
    {"stage": 3, "keep_gathered_bytes": 9000},
]


def test_data_ranks_may_make_other_calls(run_ranks: RunRanks) -> None:
    ways = [settings(2, zero) for zero in ({"stage": 2}, MODES[0], MODES[3])]
    check(run_ranks, ["TowerOnceMore", "Loops", "ReadsOnOne"], ways, 2)


@pytest.mark.parametrize("data", [wide(2), wide(4)])
@pytest.mark.parametrize("name", KINDS)
def test_they_do_in_every_mode(run_ranks: RunRanks, name: str, data: int) -> None:
    check(run_ranks, [name], [settings(data, zero) for zero in ({"stage": 2}, *MODES)], data)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_they_do_where_blocks_are_recomputed(run_ranks: RunRanks, mode: str) -> None:
    ways = [settings(2, zero, activation_checkpointing={"mode": mode}) for zero in MODES]
    check(run_ranks, ["TowerOnceMore", "Loops"], ways, 2)


def three_calls() -> tuple[list[float], list[float]]:
    """Body of a rank: losses of a loop of the user's own at ZeRO 3 and 2."""

    def losses(stage: int) -> list[float]:
        with engine.initialize(TowerOnceMore(), settings(2, {"stage": stage})) as eng:
            rows = eng.config.micro * eng.config.accumulation
            mine = [take_rows(batch, eng.grid.coord().dp * rows, rows) for batch in batches()]
            found = []
            for row in torch.cat(mine):
                loss = eng(row[None])
                eng.backward(loss)
                eng.step()
                found.append(float(loss.detach()))
            return found

    return losses(3), losses(2)


def test_they_do_in_a_loop_of_three_calls(run_ranks: RunRanks) -> None:
    for sharded, whole in run_ranks(three_calls, 2, env=ENV):
        assert sharded == pytest.approx(whole, rel=1e-6)


PLAN = {"*.up": "column", "*.down": "row"}


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("data", "stage"), [(1, 0), (2, 3)], ids=["tp2", "dp2-tp2-zero3"])
def test_tensor_ranks_make_the_calls_that_the_data_choose(name: str, data: int, stage: int) -> None:
    config = settings(data, {"stage": stage}) | {"parallel": {"data": data, "tensor": 2, "tensor_plan": PLAN}}
    parity = verify(KINDS[name], config, batches(), threads=2 * data)
    assert parity is not None and parity.holds(), str(parity)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tensor", [1, 2], ids=["pp2", "tp2-pp2"])
def test_stages_refuse_calls_that_the_data_choose(name: str, tensor: int) -> None:
    parallel = {"data": 1, "pipeline": 2} | ({"tensor": 2, "tensor_plan": PLAN} if tensor > 1 else {})
    with pytest.raises(
        engine.EngineError, match=r"for all inputs of the same shapes|choose its path only by shapes of the input"
    ):
        verify(KINDS[name], settings(1, {"stage": 0}) | {"parallel": parallel}, batches(), threads=2 * tensor)
