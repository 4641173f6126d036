"""Copies that differ after a wrong update are named: by majority, or all of them; and steps that are run again."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import CorruptionError, EngineError
from engine.integrity.copies import odd_ones
from engine.models.decoder import Block, loss_sum
from tests import models
from tests.engine.integrity.flips import GRIDS, Setting, held_parts, opened, steps
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
NORM, HEAD = "blocks.1.norm1.weight", "tokens.weight"


def wrong_update(setting: Setting, ranks: tuple[int, ...], name: str, tied: bool) -> str:
    """Body of a rank: every update of ``ranks`` leaves one wrong bit in a weight, before anybody takes a digest."""
    batches = models.batches_for("decoder", 4, 3)
    with opened(setting, batches, tied=tied) as eng:

        def spoil(*_: object) -> None:
            part = dict(held_parts(eng, "weight")).get(name)
            if part is not None:
                part.view(torch.uint8)[4] ^= 1

        if eng.grid.rank in ranks:
            eng.optimizer.register_step_post_hook(spoil)
        try:
            steps(eng, batches, setting.every)
        except CorruptionError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("grid", "stage", "ranks", "name", "said"),
    [
        pytest.param(
            "dp4", 0, (1,), HEAD, r"rank 1 \(\S+\) holds .* with other bits than ranks 0, 2, 3,", id="majority"
        ),
        wide("dp2", 0, (1,), HEAD, r"ranks 0 \(\S+\), 1 \(\S+\) hold different .*no majority", id="dp2"),
        pytest.param("tp2", 0, (1,), NORM, r"ranks 0 \(\S+\), 1 \(\S+\) hold different copies", id="tp2"),
        wide("pp2", 0, (1,), HEAD, r"ranks 0 \(\S+\), 1 \(\S+\) hold different copies", id="tied"),
        pytest.param("dp2 x tp2", 3, (1, 3), NORM, r"hold different copies", id="tp, ZeRO 3", marks=pytest.mark.long),
        pytest.param("dp2 x pp2", 1, (0,), HEAD, r"hold different copies", id="tied, ZeRO 1", marks=pytest.mark.long),
    ],
)
def test_a_wrong_update(
    run_ranks: RunRanks, grid: str, stage: int, ranks: tuple[int, ...], name: str, said: str
) -> None:
    # over tensor ranks one wrong weight makes others differ in the next step
    setting = Setting(grid, stage, False, 1 if name == NORM else 2)
    found = run_ranks(wrong_update, setting.ranks, setting, ranks, name, name == HEAD)
    assert len(set(found)) == 1 and re.match("silent corruption: .*" + said, found[0]), found
    assert f"weight {name!r}" in found[0] and "after update 0" in found[0] and "integrity.rerun" in found[0]


def test_who_is_odd() -> None:
    assert odd_ones([7, 7, 8]) == ([2], 0) and odd_ones([8, 7, 7, 7, 9]) == ([0, 4], 1)
    assert odd_ones([7, 8]) == ([0, 1], 0) and odd_ones([7, 7, 8, 8])[0] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------ run again


class Noted(Block):
    """A block with running statistics and a counter that forward writes, and dropout."""

    calls: Tensor

    def watch(self, width: int) -> None:
        self.statistics = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        normed: Tensor = self.statistics(y.flatten(0, 1))
        return normed.view_as(y) * (1 + self.calls)


def noted() -> nn.Module:
    model: Any = models.decoder(dropout=0.1)
    for block in model.blocks:
        block.__class__ = Noted
        block.watch(32)
    return model  # type: ignore[no-any-return]


def twice(setting: Setting, section: dict[str, Any], flaky: int) -> tuple[list[float], list[Tensor], str]:
    """Body of a rank: losses, state and error of a run; rank ``flaky`` computes something else each time."""
    batches = models.batches_for("decoder", 4, 3)
    example, calls = models.take_rows(batches[0], 0, 4 // setting.config()["parallel"]["data"]), [0]

    def differ(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 1e-4 * calls[0])

    losses, said = [], ""
    parallel = GRIDS[setting.grid] | {
        "check_replicas": flaky < 0
    }  # which takes the first step's gradients for the plan's
    with engine.initialize(noted(), setting.config(integrity=section, parallel=parallel), loss_sum, example) as eng:
        if eng.grid.rank == flaky:
            eng.module.get_submodule("blocks.0.norm2").register_forward_hook(differ)
        try:
            for batch in batches:
                report = eng.train_batch(own_rows(eng, batch))
                losses.append(report.loss)
        except CorruptionError as error:
            said = str(error)
        state = [flat.kept.clone() for flat in eng._runtime.buckets]
        return losses, [*state, *(buffer.clone() for buffer in eng.module.buffers() if not buffer.is_meta)], said


@pytest.mark.parametrize(
    ("grid", "stage"),
    [("dp2", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in (("dp2", 0), ("pp2", 1), ("dp2 x tp2", 3)))],
)
def test_a_step_run_again_changes_nothing(run_ranks: RunRanks, grid: str, stage: int) -> None:
    setting = Setting(grid, stage, False, 1)
    plain = run_ranks(twice, setting.ranks, setting, {}, -1)
    again = run_ranks(twice, setting.ranks, setting, {"every": 2, "rerun": True}, -1)
    for (losses, state, _), (same, kept, said) in zip(plain, again, strict=True):
        assert losses == same and not said
        assert all(map(torch.equal, state, kept))


@pytest.mark.parametrize(
    ("grid", "stage", "said"),
    [
        ("dp2", 1, r"silent corruption: rank 1 \(\S+\) computed another gradient '\S+' when the step was run again\. "),
        pytest.param("dp2", 2, r"silent corruption: rank 1 \(\S+\) computed", marks=pytest.mark.long),
        pytest.param("tp2", 0, r"silent corruption: ranks 0 \(\S+\), 1 \(\S+\) computed each", marks=pytest.mark.long),
    ],
)
def test_a_machine_that_computes_something_else_is_named(run_ranks: RunRanks, grid: str, stage: int, said: str) -> None:
    setting = Setting(grid, stage, False, 1)
    for losses, _, found in run_ranks(twice, setting.ranks, setting, {"every": 2, "rerun": True}, 1):
        assert len(losses) == 1 and re.match(said, found), found


def test_a_loop_of_the_users_own_is_not_run_again() -> None:
    section = {"every": 1, "rerun": True}
    with engine.initialize(nn.Linear(2, 2), {"train_batch_size": 2, "integrity": section}) as eng:
        loss = eng(torch.ones(2, 2)).sum()
        with pytest.raises(EngineError, match=r"^integrity.rerun is true, but the engine cannot repeat a loop"):
            eng.backward(loss)
