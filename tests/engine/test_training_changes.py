"""What users change while they train, by hand: the same in plain torch, value by value."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests import models
from tests.engine.step.test_user_loop import loss_of
from tests.selection import wide

ROWS, STEPS, CLIP = 4, 6, 0.3
"""Rows of a data rank in a step, in two microbatches; norms are about 3."""

RunRanks = Callable[..., list[Any]]
Change = Callable[[int, nn.Module, list[dict[str, Any]]], None]
"""(step, model, optimizer groups): what the user does before a step."""


def freeze(part: str, frozen: bool, model: nn.Module) -> None:
    model.get_submodule(part).requires_grad_(not frozen)


def freeze_and_thaw(step: int, model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """The first block is frozen for two steps, then a part of the second one for the rest."""
    if step == 1:
        freeze("blocks.0", True, model)
        freeze("tokens", True, model)
    if step == 3:
        freeze("blocks.0", False, model)
        freeze("blocks.1.up", True, model)


def thaw_one_by_one(step: int, model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Blocks that begin frozen are thawed one after the other, the last one first."""
    if step == 2:
        freeze("blocks.1", False, model)
    if step == 4:
        freeze("blocks.0", False, model)


def rates_by_hand(step: int, model: nn.Module, groups: list[dict[str, Any]]) -> None:
    if step == 1:
        groups[0]["lr"] = 3e-3
    if step == 3:
        groups[0]["lr"] = torch.tensor(5e-3)
    if step == 4:
        groups[0]["weight_decay"] = 0.2
        groups[0]["betas"] = (0.8, 0.9)


CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "freeze and thaw": (freeze_and_thaw, ()),
    "thaw one by one": (thaw_one_by_one, ("blocks.0", "blocks.1")),
    "rates by hand": (rates_by_hand, ()),
}
"""The change, and the modules that are frozen from the start."""


def made(frozen: tuple[str, ...]) -> nn.Module:
    model = models.decoder()
    for part in frozen:
        freeze(part, True, model)
    return model


def data(world: int) -> list[Tensor]:
    """[rows of all data ranks, tokens] for each step."""
    return [ids[:, : models.LENGTH] for ids in models.token_batches(ROWS * world, STEPS)]


def settings(grid: dict[str, int], stage: Any, frozen: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    dp = grid.get("data", 1)
    included = {"include_frozen": [f"{part}.*" for part in frozen]} if frozen else {}
    return {
        "train_batch_size": ROWS * dp,
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}} | included,
        "zero_optimization": stage if isinstance(stage, dict) else {"stage": stage},
        "parallel": grid,
        **more,
    }


def in_one_process(change: Change, frozen: tuple[str, ...], dp: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch: norms of all steps, and weights after them."""
    model, norms = made(frozen), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step, ids in enumerate(data(dp)):
        change(step, model, optimizer.param_groups)
        loss_of(model(ids), ids).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def on_ranks(config: dict[str, Any], change: Change, frozen: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    norms = []
    model = made(frozen)
    with engine.initialize(model, config, loss_of, example_batch=data(1)[0][: ROWS // 2]) as eng:
        for step, batch in enumerate(data(eng.grid.dp)):
            change(step, model, eng.optimizer.param_groups)
            norms.append(eng.train_batch(batch.chunk(eng.grid.dp)[eng.grid.coord().dp]).grad_norm)
        return norms, eng.full_state_dict()


def all_changes(grid: dict[str, int], stage: Any, more: dict[str, Any]) -> dict[str, str]:
    """Body of a rank: what differs from plain torch, by change."""
    found = {}
    for name, (change, frozen) in CHANGES.items():
        norms, weights = on_ranks(settings(grid, stage, frozen, **more), change, frozen)
        if torch.distributed.get_rank() == 0:
            expected = in_one_process(change, frozen, grid.get("data", 1))
            assert min(expected[0]) > CLIP, "clipping must be active"
            norm = max(abs(a - b) / b for a, b in zip(norms, expected[0], strict=True))
            far = max(float((weights[key] - value).abs().max()) for key, value in expected[1].items())
            found[name] = "" if norm <= 1e-5 and far <= 1e-5 else f"norms {norm:.1e}, weights {far:.1e}"
    return found


GRIDS = [
    wide({"data": 2}, 0, {}, id="dp2-zero0"),
    wide({"data": 2}, 1, {}, id="dp2-zero1"),
    pytest.param({"data": 2}, {"stage": 2, "reduce": "microbatch"}, {}, id="dp2-zero2", marks=pytest.mark.long),
    pytest.param({"data": 2}, 3, {}, id="dp2-zero3"),
    wide({"data": 1, "tensor": 2}, 0, {}, id="tp2"),
    wide({"data": 1, "pipeline": 2}, 0, {}, id="pp2"),
    pytest.param({"data": 2, "tensor": 2}, 3, {}, id="dp2-tp2-zero3", marks=pytest.mark.long),
    pytest.param({"data": 2, "pipeline": 2}, 3, {}, id="dp2-pp2-zero3", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("grid", "stage", "more"), GRIDS)
def test_changes_by_hand_train_as_in_plain_torch(
    grid: dict[str, int], stage: Any, more: dict[str, Any], run_ranks: RunRanks
) -> None:
    found = run_ranks(all_changes, math.prod(grid.values()), grid, stage, more, seconds=300.0)[0]
    assert found.keys() == CHANGES.keys()
    assert {name: text for name, text in found.items() if text} == {}


def frozen_on_one_rank(stage: int) -> str:
    """Body of a rank: rank 0 alone freezes a parameter."""
    with engine.initialize(models.decoder(), settings({"data": 2}, stage), loss_of) as eng:
        eng.train_batch(data(1)[0])
        if eng.grid.rank == 0:
            freeze("blocks.0.up", True, eng.module)
        with pytest.raises(engine.EngineError) as caught:
            eng.train_batch(data(1)[1])
        return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_one_rank_freezes_is_refused_by_all(stage: int, run_ranks: RunRanks) -> None:
    texts = run_ranks(frozen_on_one_rank, 2, stage)
    assert (
        texts[0]
        == texts[1]
        == (
            "parameter 'blocks.0.up.weight' is frozen on 1 rank(s) and trained on 1, so no rank makes this step; make "
            "the same requires_grad_ calls on every rank."
        )
    )


ALONE = settings({"data": 1}, 0)


def test_a_frozen_parameter_is_left_where_unused_ones_are_updated() -> None:
    config = ALONE | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "update_unused": True}}
    with engine.initialize(models.decoder(), config, loss_of) as eng:
        eng.train_batch(data(1)[0])
        freeze("blocks.0", True, eng.module)
        before = eng.full_state_dict()
        eng.train_batch(data(1)[1])
        changed = {name for name, value in eng.full_state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.startswith("blocks.0.")}


def test_rates_by_hand_are_overridden_by_a_schedule_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    with engine.initialize(models.decoder(), ALONE | {"scheduler": warmup}, loss_of) as eng:
        rates = []
        for ids in data(1)[:4]:
            rates.append(eng.train_batch(ids).lr)
            eng.optimizer.param_groups[0]["lr"] = 0.5
    assert rates == sorted(rates) and max(rates) < 0.01
    told = [record.message for record in caplog.records if "by hand" in record.message]
    assert told == [
        "the learning rate of optimizer group 0 was set to 0.5 by hand, but the schedule sets it again before each "
        "update; leave the scheduler out to set rates by hand."
    ]


def test_options_by_hand_go_on_from_a_checkpoint_unless_the_configuration_has_changed(tmp_path: Path) -> None:
    def start(**params: float) -> engine.Engine:
        options = ALONE["optimizer"] | {"params": ALONE["optimizer"]["params"] | params}
        return engine.initialize(models.decoder(), ALONE | {"optimizer": options}, loss_of)

    with start() as eng:
        eng.train_batch(data(1)[0])
        eng.optimizer.param_groups[0].update(lr=3e-3, betas=(0.5, 0.6))
        eng.save_checkpoint(tmp_path).wait()
        expected = [eng.train_batch(ids).loss for ids in data(1)[1:4]]
    with start() as eng:
        eng.load_checkpoint(tmp_path)
        assert eng.lr == 3e-3 and eng.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
        assert [eng.train_batch(ids).loss for ids in data(1)[1:4]] == expected
    with start(lr=2e-3) as eng:
        eng.load_checkpoint(tmp_path)
        assert eng.lr == 2e-3 and eng.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
