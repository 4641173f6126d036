"""Engines whose nodes keep secondary shards (hpZ): bits of a run without them, bytes as planned, nothing stale."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.errors import ConfigError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.planning.budgets import ranks_with_secondary_shards
from tests.selection import wide
from tests.zero.small import forget_the_living, live_bytes

RunRanks = Callable[..., list[Any]]
WIDTH, ROWS = 6, 2
EXAMPLE = torch.ones(ROWS, WIDTH)
ZERO3: dict[str, Any] = {"stage": 3}
PAIRS: dict[str, Any] = ZERO3 | {"zero_hpz_partition_size": 2}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


class Blocks(nn.Module):
    """Four blocks between two layers, one of which is frozen; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH)) for _ in "1234"
        )
        self.last = nn.Linear(WIDTH, 4)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the outputs, fp32."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.last(x).float().square().mean()
        return loss


def rows(eng: Engine, step: int) -> Tensor:
    """This data rank's share of a step."""
    generator = torch.Generator().manual_seed(100 * step + eng.grid.coord().dp)
    return torch.randn(ROWS * eng.config.accumulation, WIDTH, generator=generator)


def begin(changes: dict[str, Any], world: World | None = None) -> Engine:
    """An engine over fresh blocks."""
    torch.manual_seed(3)
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.5} | changes
    return engine.initialize(Blocks(), config, example_batch=EXAMPLE, world=world)


def on_threads(ranks: int, changes: dict[str, Any], body: Callable[[Engine], Any]) -> list[Any]:
    """``body(engine)`` of every rank, as threads."""

    def rank(world: World) -> Any:
        with begin(changes, world) as eng:
            return body(eng)

    return run_thread_ranks(ranks, rank)


def sent_beside_plan(eng: Engine, step: int) -> tuple[float, list[str]]:
    """(loss, what a step sends that is not in the plan, or the other way)."""
    before = eng.sent
    loss = eng.train_batch(rows(eng, step)).loss
    found = {(r.axis, r.label): (r.calls, r.bytes) for r in eng.sent.since(before).rows() if r.label != "used"}
    planned = {(r.axis, r.label): (r.calls, r.bytes) for r in eng.plan.rank(eng.grid.rank).traffic}
    return loss, [f"step {step}: found {found}, planned {planned}"] * (found != planned)


def forward(eng: Engine) -> float:
    """Loss of a forward between steps, which leaves secondary shards; a pipeline evaluates."""
    if eng.grid.pp > 1:
        return eng.eval_batch(rows(eng, 77)).loss
    with torch.no_grad():
        return float(eng(rows(eng, 77)[:ROWS]))


def history(eng: Engine, folder: str = "") -> tuple[list[Any], dict[str, Tensor], list[str]]:
    """(values seen, weights, traffic beside the plan) of steps, forwards, writes, an evaluation and a load."""
    loss, wrong = sent_beside_plan(eng, 0)
    seen: list[Any] = [loss, forward(eng)]
    if folder:
        eng.save_checkpoint(folder).wait()
    with eng.full_parameters("blocks.1.*") as found, torch.no_grad():
        seen += [value.clone().tolist() for value in found.values()]
        for value in found.values():
            value.mul_(1.5)
    seen += [forward(eng), eng.eval_batch(rows(eng, 50)).loss, forward(eng)]
    with eng.masters("last.weight") as masters:
        for master in masters.values():
            master.add_(0.25)
    seen.append(forward(eng))
    loss, more = sent_beside_plan(eng, 1)
    seen += [loss, forward(eng)]
    if folder:
        eng.load_checkpoint(folder)
        seen.append(forward(eng))
    seen.append(eng.train_batch(rows(eng, 2)).loss)
    return seen, eng.full_state_dict(), wrong + more


def check_alike(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    """Equal values and weights, to the bit, and all traffic in the plan."""
    assert left[2] == right[2] == []
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys() and all(torch.equal(v, right[1][k]) for k, v in left[1].items())


QUANTIZED: dict[str, Any] = {"zero_quantized_weights": True, "zero_quantized_block_size": 64}


@pytest.mark.parametrize(
    ("zero", "changes"),
    [
        ({}, {}),
        (QUANTIZED, BF16),
        wide(QUANTIZED, {}),
        wide({"reduce": "microbatch"}, BF16),
        wide({"keep_gathered_bytes": 1000}, {}),
        wide({}, {"activation_checkpointing": {"mode": "full"}}),
        wide({}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        wide({"zero_quantized_gradients": True} | QUANTIZED, {"parallel": {"gpus_per_node": 2}}),
    ],
)
def test_two_nodes_train_to_the_bits_of_none_and_use_nothing_stale(
    zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    accumulated = {"gradient_accumulation_steps": 2} | changes
    plain, near = (on_threads(4, {"zero_optimization": own | zero} | accumulated, history) for own in (ZERO3, PAIRS))
    for left, right in zip(plain, near, strict=True):
        check_alike(left, right)


def dp_bytes(eng: Engine) -> dict[str, int]:
    """Bytes over dp of a step by label, as sent."""
    before = eng.sent
    eng.train_batch(rows(eng, 0))
    return {row.label: row.bytes for row in eng.sent.since(before).rows() if row.axis == "dp"}


def test_each_parameter_crosses_nodes_once_a_step() -> None:
    """Three quarters of each bucket over dp once, halves of it within nodes: in 2 forwards and 2 backwards."""

    def body(eng: Engine) -> tuple[dict[str, int], list[int], int]:
        buckets = eng.plan.layout(eng.grid.coord())
        sizes = [4 * bucket.elements for bucket in (*buckets.buckets, *buckets.frozen)]
        return dp_bytes(eng), sizes, eng.plan.rank(eng.grid.rank).state_bytes["secondary shards"]

    for sent, sizes, kept in on_threads(4, {"zero_optimization": PAIRS, "gradient_accumulation_steps": 2}, body):
        assert sent["parameters"] == sum(sizes) * 3 // 4
        assert kept == sum(sizes) // 2
        assert 0 < sent["parameters within nodes"] <= sum(sizes) * 3 // 2, "halves, and at most three times each"


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 2}, "only stage 3 gathers parameters"),
        (PAIRS | {"gather": "step"}, "no gather would read secondary shards"),
        (ZERO3 | {"zero_hpz_partition_size": 3}, "3 does not divide the 4 data ranks"),
        (ZERO3 | {"zero_hpz_partition_size": 8}, "8 does not divide the 4 data ranks"),
        (ZERO3 | {"zero_hpz_partition_size": "node"}, 'give a number of data ranks, or "auto"'),
    ],
)
def test_refused_before_anything_is_sent(zero: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}, world_size=4)


@pytest.mark.parametrize(
    ("asked", "node", "ranks"), [(1, None, 1), (0, 2, 1), (2, None, 2), ("auto", 2, 2), ("auto", None, 1), (4, None, 1)]
)
def test_auto_takes_the_data_ranks_of_a_node(asked: int | str, node: int | None, ranks: int) -> None:
    config = load_config(
        {
            "zero_optimization": ZERO3 | {"zero_hpz_partition_size": asked},
            "parallel": {"gpus_per_node": node},
            "train_micro_batch_size_per_gpu": 1,
        },
        world_size=4,
    )
    assert ranks_with_secondary_shards(config) == ranks


def loaded(folder: str) -> tuple[float, float, float]:
    """Body of a rank: the loss of a forward at a checkpoint, later, and after its load."""
    with begin({"zero_optimization": PAIRS}) as eng:
        eng.save_checkpoint(folder).wait()
        first = forward(eng)
        eng.train_batch(rows(eng, 0))
        later = forward(eng)
        eng.load_checkpoint(folder)
        return first, later, forward(eng)


def test_a_load_ends_what_nodes_have_kept(run_ranks: RunRanks, tmp_path: Path) -> None:
    for first, later, again in run_ranks(loaded, 4, str(tmp_path)):
        assert first != later and again == first


def in_processes(folder: str, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor], list[str]]:
    """Body of a rank: its history, with a checkpoint in the middle."""
    with begin({"gradient_accumulation_steps": 2} | changes) as eng:
        return history(eng, folder)


@pytest.mark.parametrize(
    ("ranks", "grid", "zero", "changes"),
    [
        wide(4, {}, {}, {}),
        wide(8, {"tensor": 2}, {}, {}),
        wide(8, {"pipeline": 2}, {}, {}),
        wide(8, {"pipeline": 2}, QUANTIZED, BF16),
        wide(8, {"tensor": 2, "order": "tp-pp-dp"}, {"zero_hpz_partition_size": "auto"}, {}),
    ],
)
def test_processes_train_and_resume_to_the_bits_of_none(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, grid: dict[str, Any], zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    parallel, alone = (
        {"gpus_per_node": 4, "prove_plan": False, "check_replicas": False} | grid,
        ZERO3 | zero | {"zero_hpz_partition_size": 1},
    )
    plain, near = (
        run_ranks(in_processes, ranks, str(tmp_path / name), {"zero_optimization": own, "parallel": parallel} | changes)
        for name, own in (("plain", alone), ("near", PAIRS | zero))
    )
    for left, right in zip(plain, near, strict=True):
        check_alike(left, right)


def skipping(eng: Engine) -> list[Any]:
    """(skipped, loss) of steps, of which the second has a gradient that is not finite on the last rank."""
    found: list[Any] = []
    weight: Any = dict(eng.module.named_parameters())["last.weight"]
    for step in range(3):
        poisoned = step == 1 and eng.grid.rank == eng.grid.world_size - 1
        handle = weight.register_hook(lambda grad, spoil=poisoned: grad.clone().fill_(math.nan) if spoil else grad)
        report = eng.train_batch(rows(eng, step))
        handle.remove()
        found += [report.skipped, report.loss if step != 1 else 0.0]
    return found


@pytest.mark.long
def test_a_step_that_is_skipped_changes_nothing() -> None:
    plain, near = (on_threads(4, {"zero_optimization": zero}, skipping) for zero in (ZERO3, PAIRS))
    assert plain == near and near[0][2] is True


def measure(changes: dict[str, Any]) -> tuple[int, int]:
    """(bytes alive, planned) between steps."""
    forget_the_living()
    eng = begin(changes)
    for step in range(2):
        eng.train_batch(rows(eng, step))
    planned = sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
    deadline = time.monotonic() + 2
    while (found := live_bytes()) != planned and time.monotonic() < deadline:
        time.sleep(0.01)
    eng.close()
    return found, planned


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, BF16])
def test_state_is_what_the_plan_says(run_ranks: RunRanks, changes: dict[str, Any]) -> None:
    for found, planned in run_ranks(measure, 4, {"zero_optimization": PAIRS} | changes):
        assert found == planned
