"""Engines whose data ranks send fewer bits: bytes as planned, equal values on all ranks, exact masters, skips."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.parallel.comm.agreement import bit_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests.kernels.interpreter import repair
from tests.planned_traffic import traffic_differs
from tests.selection import wide
from tests.zero.small import ROWS, Small, batch, start

RunRanks = Callable[..., list[Any]]
WEIGHTS = {"zero_quantized_weights": True, "zero_quantized_block_size": 64}
GRADIENTS = {"zero_quantized_gradients": True, "zero_quantized_block_size": 64}
FEEDBACK = GRADIENTS | {"zero_quantized_gradients_bits": 4, "zero_gradient_error_feedback": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def on_threads(ranks: int, changes: dict[str, Any], body: Callable[[Engine], Any], model: Any = Small) -> list[Any]:
    """``body(engine)`` of every rank, as threads."""

    def rank(world: World) -> Any:
        torch.manual_seed(5)
        config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2} | changes
        with engine.initialize(model(), config, world=world) as eng:
            return body(eng)

    return run_thread_ranks(ranks, rank)


def traffic_of_two_steps(eng: Engine) -> list[str]:
    """Where it is not the plan's."""
    return traffic_differs(eng, batch, range(2))


MODES = [
    ({"stage": 1} | GRADIENTS, {}, 2),
    ({"stage": 1} | WEIGHTS | FEEDBACK, BF16, 4),
    ({"stage": 2} | FEEDBACK | {"zero_quantized_gradients_bits": 1}, {}, 2),
    ({"stage": 2, "reduce": "microbatch"} | FEEDBACK, {"parallel": {"gpus_per_node": 2}}, 4),
    ({"stage": 3, "reduce": "microbatch"} | WEIGHTS | GRADIENTS, BF16 | {"parallel": {"gpus_per_node": 2}}, 4),
    ({"stage": 3} | WEIGHTS | FEEDBACK | {"zero_quantized_weights_bits": 4}, FP16, 2),
    ({"stage": 2} | WEIGHTS | GRADIENTS, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, 2),
]


@pytest.mark.parametrize(("zero", "changes", "ranks"), MODES)
def test_bytes_and_calls_are_those_of_the_plan(zero: dict[str, Any], changes: dict[str, Any], ranks: int) -> None:
    for wrong in on_threads(ranks, {"zero_optimization": zero} | changes, traffic_of_two_steps):
        assert not wrong, wrong


def test_bytes_of_int8_are_those_of_the_formula() -> None:
    def body(eng: Engine) -> dict[str, tuple[int, int]]:
        elements = [b.elements for b in eng.plan.layout(eng.grid.coord()).buckets if b.dtype == "float32"]
        wide_ones = [b.elements for b in eng.plan.layout(eng.grid.coord()).buckets if b.dtype == "float64"]
        rows = {row.label: row.bytes for row in eng.plan.rank(0).traffic if row.axis == "dp"}
        message = [count // 2 + count // 2 // 64 * 4 for count in elements]
        return {"gradients": (rows["gradients"], sum(message) + sum(8 * count // 2 for count in wide_ones))}

    (found, _) = on_threads(2, {"zero_optimization": {"stage": 1} | GRADIENTS}, body)
    assert found["gradients"][0] == found["gradients"][1]


class Seen(Small):
    """Remembers what its forwards compute with."""

    def forward(self, ids: Tensor) -> Tensor:
        self.seen = [bit_sum(p.detach()).item() for p in self.parameters()]
        self.values = self.up.weight.detach().clone()
        return super().forward(ids)


def computed_with(eng: Engine) -> tuple[list[list[float]], Tensor, Tensor]:
    """(bits of all parameters in every step, the values and the exact ones of one of them, at the end)."""
    model: Any = eng.module
    bits = []
    for step in range(3):
        eng.train_batch(batch(eng, step))
        bits.append(model.seen)
    used = model.values
    eng.eval_batch(batch(eng, 9))
    with eng.masters("up.weight") as found:
        exact = found["up.weight"].clone()
    return bits, model.values if used.shape == exact.shape else used, exact


@pytest.mark.parametrize(
    ("zero", "changes"),
    [({"stage": 3} | WEIGHTS, {}), ({"stage": 3} | WEIGHTS | FEEDBACK, BF16), ({"stage": 1} | WEIGHTS, BF16)],
)
def test_all_data_ranks_compute_with_the_same_rounded_values(zero: dict[str, Any], changes: dict[str, Any]) -> None:
    found = on_threads(4, {"zero_optimization": zero} | changes, computed_with, Seen)
    first = found[0]
    for bits, values, exact in found:
        assert bits == first[0], "the bits of some parameter differ between data ranks"
        error = (values.float() - exact.float()).abs().view(-1)
        assert 0 < float(error.max()) <= float(exact.abs().max()) / 64, "rounded, and not by more"


def masters(eng: Engine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after two steps with a rate of zero."""
    before = eng.full_state_dict()
    for step in range(2):
        eng.train_batch(batch(eng, step))
    return before, eng.full_state_dict()


@pytest.mark.parametrize(
    ("stage", "changes"), [(3, {}), (3, BF16), (1, BF16), (2, FP16)], ids=["3 fp32", "3 bf16", "1 bf16", "2 fp16"]
)
def test_masters_stay_exact_at_their_owner(stage: int, changes: dict[str, Any]) -> None:
    still = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}}
    zero = {"zero_optimization": {"stage": stage, "zero_quantized_weights_bits": 4} | WEIGHTS}
    before, after = on_threads(2, zero | still | changes, masters)[0]
    torch.manual_seed(5)
    given = Small().state_dict()
    for name, weight in given.items():
        assert torch.equal(before[name], after[name]), name
        if stage < 3 or not changes:  # there the master has what was given, to the bit
            assert torch.equal(after[name], weight), name


def written(eng: Engine) -> Tensor:
    """A weight that the user has written before the second step, after it."""
    eng.train_batch(batch(eng, 0))
    with torch.no_grad(), eng.full_parameters("up.bias") as found:
        found["up.bias"].fill_(2.0)
    eng.train_batch(batch(eng, 1))
    return eng.full_state_dict().get("up.bias", torch.empty(0))


@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_user_writes_reaches_the_masters(stage: int) -> None:
    still = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}}
    found = on_threads(2, {"zero_optimization": {"stage": stage} | WEIGHTS} | still | BF16, written)[0]
    assert torch.equal(found, torch.full((53,), 2.0))


def skipping(eng: Engine) -> tuple[bool, int, list[float], Any]:
    """(whether the step was skipped, how many are, losses, the name told) with a NaN on the last rank alone."""
    losses = [eng.train_batch(batch(eng, 0)).loss]
    poisoned = eng.grid.rank == eng.grid.world_size - 1
    weight: Any = dict(eng.module.named_parameters())["down.weight"]
    handle = weight.register_hook(lambda grad: grad.clone().fill_(math.nan) if poisoned else grad)
    report = eng.train_batch(batch(eng, 1))
    handle.remove()
    losses.append(eng.train_batch(batch(eng, 2)).loss)
    return report.skipped, eng.skipped_steps, losses, report.nonfinite


@pytest.mark.parametrize(
    "zero",
    [{"stage": 1} | FEEDBACK, {"stage": 2, "reduce": "microbatch"} | FEEDBACK, {"stage": 3} | WEIGHTS | GRADIENTS],
)
def test_a_nan_of_one_rank_skips_the_step_on_all_and_names_the_parameter(zero: dict[str, Any]) -> None:
    found = on_threads(4, {"zero_optimization": zero, "parallel": {"gpus_per_node": 2}}, skipping)
    assert {(skipped, count) for skipped, count, _, _ in found} == {(True, 1)}
    assert all(math.isfinite(loss) for _, _, losses, _ in found for loss in losses)
    assert all("down.weight" in str(told) for *_, told in found)


def resumed(folder: str, zero: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    """Body of a rank: weights that differ between a run that went on and one that was resumed, after the same steps."""
    with start({"zero_optimization": zero} | changes) as eng:
        for step in range(2):
            eng.train_batch(batch(eng, step))
        eng.save_checkpoint(folder).wait()
        losses = [eng.train_batch(batch(eng, step)).loss for step in (2, 3)]
        straight = eng.full_state_dict()
    with start({"zero_optimization": zero} | changes) as eng:
        eng.load_checkpoint(folder)
        again = [eng.train_batch(batch(eng, step)).loss for step in (2, 3)]
        found = eng.full_state_dict()
    wrong = [name for name, weight in straight.items() if not torch.equal(weight, found[name])]
    return wrong + [f"{losses} and {again}"] * (losses != again)


@pytest.mark.parametrize(
    ("zero", "changes"),
    [
        ({"stage": 1} | WEIGHTS | FEEDBACK, BF16),
        wide({"stage": 3} | WEIGHTS | FEEDBACK, {}),
        wide({"stage": 2, "reduce": "microbatch"} | FEEDBACK, FP16),
    ],
)
def test_a_resumed_run_goes_on_bit_by_bit(
    run_ranks: RunRanks, tmp_path: Path, zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    for wrong in run_ranks(resumed, 2, str(tmp_path), zero, changes):
        assert not wrong


def rank_bits(changes: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Body of a rank: (its stage, bits of the parameters that no tensor rank cuts) after three steps."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
                            for _ in range(3)))  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2} | changes
    generator = torch.Generator().manual_seed(3)
    loss: Any = lambda out, rows: out.square().mean()  # noqa: E731
    with engine.initialize(model, config, loss, torch.ones(2, 16)) as eng:
        for _ in range(3):
            rows = torch.randn(eng.grid.dp * 4, 16, generator=generator).view(eng.grid.dp, 4, 16)
            eng.train_batch(rows[eng.grid.coord().dp])
        cut = set() if eng.plan.tensor is None else set(eng.plan.tensor.parameters)
        here = {row.name for row in eng.plan.table.held_by(eng.grid.holder())} - cut
        with eng.full_parameters("*") as found:
            bits = {name: bit_sum(found[name].detach()).item() for name in sorted(here)}
        return eng.grid.coord().pp, bits


@pytest.mark.parametrize(
    ("grid", "ranks", "stage"),
    [
        ({"tensor": 2}, 4, 1),
        wide({"tensor": 2}, 4, 3),
        wide({"pipeline": 2}, 4, 2),
        wide({"tensor": 2, "pipeline": 2}, 8, 3),
        wide({"tensor": 2, "gpus_per_node": 4}, 8, 2),
    ],
)
def test_copies_on_tensor_ranks_keep_equal_bits(
    run_ranks: RunRanks, grid: dict[str, int], ranks: int, stage: int
) -> None:
    """Blocks of parameters that are not cut have the same scales on all tensor ranks, whatever lies beside them."""
    zero = {"stage": stage} | FEEDBACK | (WEIGHTS if stage == 3 else {}) | {"zero_quantized_block_size": 256}
    found = run_ranks(rank_bits, ranks, {"zero_optimization": zero, "parallel": grid})
    for pp, bits in found:
        others = [other for stage_, other in found if stage_ == pp]
        assert bits and all(other == bits for other in others)


def skip_and_look(eng: Engine) -> list[float]:
    """The largest residual after a step, and after one that was skipped."""
    found = []
    weight: Any = dict(eng.module.named_parameters())["down.weight"]
    for value in (0.0, math.inf):
        handle = weight.register_hook(lambda grad, value=value: grad + value)
        eng.train_batch(batch(eng, 0))
        handle.remove()
        reducer = eng._runtime.reducer
        found.append(max(float(residual.abs().max()) for residual in reducer.residuals.values()))
    return found


def test_a_skipped_step_leaves_no_residual() -> None:
    for made, skipped in on_threads(2, {"zero_optimization": {"stage": 1} | FEEDBACK}, skip_and_look):
        assert made > 0 and skipped == 0


def shown(eng: Engine) -> Tensor:
    """A weight as it is shown after a step without a rate."""
    eng.train_batch(batch(eng, 0))
    with eng.full_parameters("up.weight") as found:
        return found["up.weight"].detach().clone()


def test_what_full_parameters_shows_is_exact() -> None:
    still = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}}
    torch.manual_seed(5)
    given = Small().up.weight
    for found in on_threads(2, {"zero_optimization": {"stage": 3} | WEIGHTS} | still, shown):
        assert torch.equal(found, given)


def figures(eng: Engine) -> tuple[list[float], dict[str, Tensor], bool]:
    """(losses, weights, whether the device decides about updates)."""
    losses = [eng.train_batch(batch(eng, step)).loss for step in range(3)]
    return losses, eng.full_state_dict(), eng._runtime.optimizer.decides_on_device


@pytest.mark.long
@pytest.mark.parametrize("zero", [{"stage": 1} | WEIGHTS | FEEDBACK, {"stage": 3} | WEIGHTS | GRADIENTS])
def test_kernels_train_as_torch_where_the_device_decides(zero: dict[str, Any]) -> None:
    repair()
    found = [
        on_threads(2, {"zero_optimization": zero, "kernels": kernels} | BF16, figures)[0]
        for kernels in ("reference", "triton")
    ]
    (plain, weights, _), (ours, others, decides) = found
    assert decides and ours == pytest.approx(plain, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-6, msg=name)
