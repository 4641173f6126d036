"""Sharded parameters between real ranks: equal to whole ones for awkward models, and what users may do with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.errors import EngineError
from tests.selection import wide
from tests.zero.awkward import AWKWARD, VOCABULARY, Chain, Skips

RunRanks = Callable[..., list[Any]]
ROWS = 2


def start(model: nn.Module, zero: dict[str, Any], example: Any = None, **changes: Any) -> Engine:
    """Two microbatches a step. Without clipping, whose factor depends on the order in which squares are added."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "zero_optimization": zero,
    }
    return engine.initialize(model, config | changes, example_batch=example)


def batch(eng: Engine, step: int) -> Tensor:
    """Another one on every data rank."""
    generator = torch.Generator().manual_seed(100 * step + eng.grid.coord().dp)
    return torch.randint(0, VOCABULARY, (2 * ROWS, 5), generator=generator)


def trained(model: nn.Module, zero: dict[str, Any], **changes: Any) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """(losses and norms, weights) of three steps, with an evaluation in between."""
    with start(model, zero, **changes) as eng:
        figures = []
        for step in range(3):
            report = eng.train_batch(batch(eng, step))
            figures.append((report.loss, report.grad_norm))
            if step == 1:
                figures.append((eng.eval_batch(batch(eng, 51)).loss, 0.0))
        return figures, eng.full_state_dict()


STAGE_3: tuple[dict[str, Any], ...] = (
    {"stage": 3},
    {"stage": 3, "gather": "step"},
    {"stage": 3, "reduce": "microbatch"},
    {"stage": 3, "keep_gathered_bytes": 5000},
)
ROUNDED = 1e-7  # a loss of a thousandth is a difference of logits of about one, in fp32
HARD = ("ReadsOutside", "Repeats", "SegmentsAgain", "FrozenMiddle")


def compare(names: list[str], modes: tuple[dict[str, Any], ...]) -> list[str]:
    """Body of a rank: what differs from whole parameters, by as much as one bit."""
    wrong = []
    for name in names:
        figures, weights = trained(AWKWARD[name](), {"stage": 1})
        for zero in modes:
            found, sharded = trained(AWKWARD[name](), zero)
            exact = zero.get("reduce") != "microbatch"  # which adds over ranks before it adds over microbatches
            close = torch.allclose(torch.tensor(figures), torch.tensor(found), rtol=1e-6, atol=ROUNDED)
            if not close or (exact and [loss for loss, _ in figures] != [loss for loss, _ in found]):
                wrong.append(f"{name} {zero}: {found} instead of {figures}")
            differing = [key for key in weights if exact and not torch.equal(weights[key], sharded[key])]
            if differing or weights.keys() != sharded.keys():
                wrong.append(f"{name} {zero}: weights differ, first {differing[:1]}")
    return wrong


@pytest.mark.parametrize("part", [0, 1, wide(2), wide(3)])
def test_sharded_parameters_train_to_the_bit_like_whole_ones(run_ranks: RunRanks, part: int) -> None:
    for wrong in run_ranks(compare, 2, sorted(AWKWARD)[part::4], STAGE_3[:1]):
        assert not wrong, wrong


@pytest.mark.parametrize("mode", [1, wide(2), wide(3)])
def test_they_do_in_every_mode(run_ranks: RunRanks, mode: int) -> None:
    for wrong in run_ranks(compare, 2, list(HARD), STAGE_3[mode : mode + 1]):
        assert not wrong, wrong


@pytest.mark.long
@pytest.mark.parametrize("name", AWKWARD)
def test_all_of_them_in_every_mode_on_three_ranks(run_ranks: RunRanks, name: str) -> None:
    for wrong in run_ranks(close_on_three, 3, name):
        assert not wrong, wrong


def close_on_three(name: str) -> list[str]:
    """Body of a rank: three ranks add in another order than their buckets do, so nothing is equal to the bit."""
    figures, _ = trained(AWKWARD[name](), {"stage": 1})
    found = [trained(AWKWARD[name](), zero)[0] for zero in STAGE_3]
    return [str(f) for f in found if not torch.allclose(torch.tensor(figures), torch.tensor(f), rtol=1e-6)]


def planned_and_sent(name: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Body of a rank: traffic of a step by plan and as measured, for a model that was given an example."""
    example = torch.empty((ROWS, 5), dtype=torch.int64, device="meta")
    with start(AWKWARD[name](), {"stage": 3}, example) as eng:
        eng.train_batch(batch(eng, 0))
        before = eng.sent
        eng.train_batch(batch(eng, 1))
        sent, plan = eng.sent.since(before).rows(), eng.plan.rank(eng.grid.rank).traffic
    told, found = ({(row.axis, row.label): (row.calls, row.bytes) for row in rows} for rows in (plan, sent))
    return told, found


@pytest.mark.parametrize(
    "name", ["ReadsOutside", *(pytest.param(name, marks=pytest.mark.long) for name in ("HeadFirst", "PassesOn"))]
)
def test_with_an_example_the_plan_knows_in_which_order_modules_run(run_ranks: RunRanks, name: str) -> None:
    for planned, sent in run_ranks(planned_and_sent, 2, name):
        assert planned == sent


def skip(zero: dict[str, Any]) -> list[float]:
    """Body of a rank: losses of a model that skips another block on every rank."""
    with start(Skips(), zero) as eng:
        return [eng.train_batch(batch(eng, step)).loss for step in range(4)]


def test_ranks_that_skip_different_modules_still_meet(run_ranks: RunRanks) -> None:
    whole = run_ranks(skip, 2, {"stage": 1})
    assert all(run_ranks(skip, 2, zero) == whole for zero in STAGE_3[:2])


def three_calls() -> tuple[bool, bool]:
    """Body of a rank: the loop in three calls equals train_batch, and both end with everything freed."""
    losses, freed = [], True
    for in_calls in (False, True):
        with start(Chain(), {"stage": 3}) as eng:
            for step in range(3):
                rows = batch(eng, step)
                if in_calls:
                    for micro in torch.split(rows, ROWS):
                        eng.backward(eng(micro))
                        report = eng.step()
                    with torch.no_grad():
                        eng(rows)
                    eng(rows[:1])  # keeps the last group for a backward that never comes
                else:
                    report = eng.train_batch(rows)
                assert report is not None
                losses.append((report.loss, report.grad_norm))
            freed = freed and _gathered_bytes(eng) == 0 if not in_calls else freed
    return losses[:3] == losses[3:], freed


def _gathered_bytes(eng: Engine) -> int:
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in eng.module.parameters()}
    return sum(storages.values())


def test_the_loop_in_three_calls(run_ranks: RunRanks) -> None:
    assert run_ranks(three_calls, 2) == [(True, True)] * 2


def two_engines() -> bool:
    """Body of a rank: a teacher and a student, whose steps lie inside each other."""
    figures: list[list[float]] = []
    for together in (True, False):
        one = start(Chain(), {"stage": 3})
        two = start(Chain(), {"stage": 3, "reduce": "microbatch"}) if together else None
        losses = []
        for step in range(3):
            losses.append(one.train_batch(batch(one, step)).loss)
            if two is not None:
                losses_of_two = two.train_batch(batch(two, step)).loss
                assert abs(losses_of_two - losses[-1]) < 1e-5
        figures.append(losses)
        one.close()
        if two is not None:
            two.close()
    return figures[0] == figures[1]


def test_two_engines_in_one_process(run_ranks: RunRanks) -> None:
    assert run_ranks(two_engines, 2) == [True, True]


# what users do between steps


def user(grid: dict[str, int]) -> dict[str, Any]:
    """Body of a rank: what a user sees and is told."""
    seen: dict[str, Any] = {}
    eng = start(Chain(), {"stage": 3}, parallel=grid)
    if grid.get("pipeline"):
        eng.train_batch(batch(eng, 9))  # stages are known from the first batch on
    model: Any = eng.module
    name = "head.weight" if eng.grid.coord().pp == eng.grid.pp - 1 else "embed.weight"
    parameter = model.get_parameter(name)
    seen["shape"] = tuple(parameter.shape) == (VOCABULARY, 16) and parameter.numel() == VOCABULARY * 16
    seen["repr"] = repr(parameter)
    for what, read in {
        "sum": lambda: parameter.sum(),
        "state_dict": lambda: parameter.detach(),
        "write": lambda: parameter.data.zero_(),
    }.items():
        seen[what] = message(read)
    with torch.no_grad(), eng.full_parameters(name.replace("weight", "*")) as given:
        seen["names"] = sorted(given)
        before = given[name].clone()
        given[name][0] = 0.25
        with torch.enable_grad():
            seen["train inside"] = message(lambda: eng.train_batch(batch(eng, 0)))
    with eng.full_parameters(name) as given:
        seen["kept"] = bool((given[name][0] == 0.25).all()) and torch.equal(given[name][1:], before[1:])
    seen["hidden again"] = message(read)
    seen["nothing"] = message(lambda: eng.full_parameters("nose.*").__enter__())
    seen["different"] = message(lambda: _write_rank(eng, name))
    eng.train_batch(batch(eng, 1))
    eng.close()
    seen["closed"] = message(read)
    return seen


def _write_rank(eng: Engine, name: str) -> None:
    with torch.no_grad(), eng.full_parameters(name) as given:
        given[name].fill_(float(eng.grid.rank))


def message(act: Callable[[], object]) -> str:
    """What an EngineError says."""
    try:
        act()
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("grid", [{"data": 2}, {"data": 2, "pipeline": 2}], ids=str)
def test_parameters_keep_their_shape_and_full_parameters_their_value(run_ranks: RunRanks, grid: dict[str, int]) -> None:
    ranks = 2 * grid.get("pipeline", 1)
    for rank, seen in enumerate(run_ranks(user, ranks, grid)):
        name = "head.weight" if rank >= ranks - 2 else "embed.weight"
        assert seen["shape"] and seen["kept"], seen
        assert (
            seen["repr"]
            == f"Parameter of shape ({VOCABULARY}, 16) and torch.float32, sharded over the data ranks (ZeRO 3)"
        )
        expected = (
            f"parameter '{name}' is sharded over 2 data ranks (ZeRO 3) and is gathered only while the model or a "
            f"module of it runs; read or write it inside `with eng.full_parameters('{name}'):`, on all ranks."
        )
        for what in ("sum", "state_dict", "write", "hidden again"):
            assert seen[what] == expected
        assert seen["names"] == (["head.bias", "head.weight"] if name.startswith("head") else ["embed.weight"])
        assert seen["train inside"] == (
            "a step cannot run inside full_parameters, which keeps parameters gathered; leave its `with` block first."
        )
        assert seen["closed"] == (
            f"parameter '{name}' is sharded over 2 data ranks (ZeRO 3) and its engine is closed; call "
            "eng.full_state_dict() before closing it."
        )
        assert seen["nothing"].startswith("full_parameters: 'nose.*' matches no parameter;")
        assert seen["different"].startswith("full_parameters: data ranks have written different values into ")


class Looks(Chain):
    """Calls something in its forward."""

    look: Any = None

    def run(self, x: Tensor) -> Tensor:
        self.look()
        return super().run(x)


def inside() -> str:
    """Body of a rank."""
    model = Looks()
    with start(model, {"stage": 3}) as eng:
        messages: list[str] = []
        model.look = lambda: messages.append(message(lambda: eng.full_parameters("*").__enter__()))
        eng.train_batch(batch(eng, 0))
    return messages[0]


def test_full_parameters_inside_a_forward(run_ranks: RunRanks) -> None:
    told = (
        "full_parameters was called inside a forward, where parameters are gathered while their module runs; call it "
        "between steps, or read them in the module that owns them."
    )
    assert run_ranks(inside, 2) == [told, told]


def whole() -> bool:
    """Body of a rank: without sharding there is nothing to gather, and writing works the same."""
    with start(Chain(), {"stage": 1}) as eng:
        with torch.no_grad(), eng.full_parameters("head.bias") as given:
            given["head.bias"].fill_(3.0)
        return bool((eng.module.get_parameter("head.bias") == 3).all())


def test_full_parameters_without_sharding(run_ranks: RunRanks) -> None:
    assert run_ranks(whole, 2) == [True, True]


def masters() -> bool:
    """Body of a rank: what is written into bf16 parameters reaches the masters, and the rest of them stays exact."""
    bf16 = {"bf16": {"enabled": True}}
    with start(Chain(), {"stage": 3}, **bf16) as eng:
        eng.train_batch(batch(eng, 0))
        before = eng.full_state_dict()
        with torch.no_grad(), eng.full_parameters("head.*") as given:
            given["head.weight"][3] = 0.5
        after = eng.full_state_dict()
    if not after:
        return True
    row = after["head.weight"][3].clone()
    after["head.weight"][3] = before["head.weight"][3]
    return bool((row == 0.5).all()) and all(torch.equal(before[key], after[key]) for key in before)


def test_what_is_written_reaches_the_masters(run_ranks: RunRanks) -> None:
    assert run_ranks(masters, 2) == [True, True]
