"""When there is an alarm and when there is none: writes of the program, loads, saves, skipped steps, frozen weights."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.checkpoint.memory_folder import TOKEN
from engine.errors import ConfigError, CorruptionError
from engine.integrity.copies import INTEGRITY
from engine.integrity.guard import Integrity
from tests import models
from tests.engine.integrity.flips import Flip, Setting, flip_one, guard_of, opened, steps

RunRanks = Callable[..., list[Any]]
WEIGHT, MOMENT = Flip("weight", "between", 0, 0, 3), Flip("exp_avg_sq", "between", 0, 0, 4)


def alarm(eng: engine.Engine, batches: Any, count: int = 1) -> bool:
    try:
        steps(eng, batches, count)
    except CorruptionError:
        return True
    return False


def writes(setting: Setting, folder: str) -> dict[str, Any]:
    """Body of a rank: everything that may change weights or state between two steps, and whether there is an alarm."""
    batches, found = models.batches_for("decoder", 4, 3), {}
    with opened(setting, batches) as eng, opened(setting, batches) as other:
        steps(eng, batches, 2)
        steps(other, batches, 1)
        with eng.full_parameters() as parameters, torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(0.5)
        found["full_parameters"] = alarm(eng, batches)
        with eng.masters("*norm*") as masters:
            for master in masters.values():
                master.mul_(2.0)
        found["masters"] = alarm(eng, batches)
        with eng.optimizer_state(local=True) as states:
            for state in states.values():
                state["exp_avg"].zero_()
        found["optimizer_state"] = alarm(eng, batches)
        eng.copy_weights_from(other)
        found["copy_weights_from"] = alarm(eng, batches)
        eng.full_state_dict()
        eng.eval_batch(models.take_rows(batches[0], 0, 4 // eng.grid.dp))
        found["reads"] = alarm(eng, batches)
        saved = eng.save_checkpoint(Path(folder)).wait()
        found["save_checkpoint"] = alarm(eng, batches)
        eng.load_checkpoint(saved)
        found["load_checkpoint"] = alarm(eng, batches)
        if setting.stage < 3 and eng.grid.tp * eng.grid.pp == 1:
            eng.module.load_state_dict({name: value * 0.5 for name, value in eng.module.state_dict().items()})
            found["load_state_dict"] = alarm(eng, batches)
            with torch.no_grad():
                eng.module.get_parameter("blocks.0.norm1.weight").clamp_(-0.5, 0.5)
            found["in place"] = alarm(eng, batches)
            for value in eng.optimizer.state.values():
                value["exp_avg"].mul_(0.5)
            found["state in place"] = alarm(eng, batches)
            eng.module.get_parameter("blocks.0.norm1.weight").data.mul_(0.5)
            found["through .data"] = alarm(eng, batches)
    return found


@pytest.mark.parametrize(
    ("grid", "stage", "bf16"),
    [
        pytest.param(*case, marks=[] if case == ("dp2", 1, True) else [pytest.mark.long])
        for case in [
            ("dp2", 1, True), ("dp2", 0, False), ("dp2", 3, True), ("tp2", 0, True), ("dp2 x pp2", 2, True),
            ("dp2 x tp2", 3, False),
        ]
    ],
)  # fmt: skip
def test_the_program_may_write(run_ranks: RunRanks, tmp_path: Path, grid: str, stage: int, bf16: bool) -> None:
    setting = Setting(grid, stage, bf16, 1)
    for found in run_ranks(writes, setting.ranks, setting, str(tmp_path)):
        assert len(found) == (11 if grid == "dp2" and stage < 3 else 7)
        assert {call for call, alarmed in found.items() if alarmed} == {"through .data"} & found.keys(), found


def saves(setting: Setting, folder: str) -> dict[str, Any]:
    """Body of a rank: what a flip before a save, before a read, and under "warn" leads to."""
    batches, found, heard = models.batches_for("decoder", 4, 3), dict[str, Any](), list[str]()
    with opened(setting, batches) as eng:
        steps(eng, batches, 1)
        saved = eng.save_checkpoint(Path(folder)).wait()
        for number, flip in enumerate((WEIGHT, MOMENT)):
            if eng.grid.rank == 0:
                flip_one(eng, flip)
            for call in ("first", "again"):
                with pytest.raises(CorruptionError) as caught:
                    eng.save_checkpoint(Path(folder))
                found[f"{call} save {number}"] = str(caught.value)
            eng.load_checkpoint(saved)
        if eng.grid.rank == 0:
            flip_one(eng, MOMENT)
        eng.full_state_dict()  # reads, and writes masters as far as torch can tell
        with eng.optimizer_state() as states:
            found["states"] = len(states)
        found["after reads"] = alarm(eng, batches, setting.every)
    with opened(setting, batches, integrity={"every": 2, "on_failure": "warn"}) as eng:
        steps(eng, batches, 2)
        logger, handler = logging.getLogger("trine"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        if eng.grid.rank == 0:
            flip_one(eng, MOMENT)
        steps(eng, batches, 4)
        logger.removeHandler(handler)
    return found | {"heard": heard}


def test_what_is_not_sound_is_not_saved(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(saves, 2, Setting("dp2", 1, True, 3), str(tmp_path))
    assert {**first, "heard": []} == {**second, "heard": []}
    assert len(list(tmp_path.glob("step-*"))) == 1
    for number, kind in enumerate(("weight", "exp_avg_sq")):
        said = first[f"first save {number}"]
        assert said == first[f"again save {number}"] and f" of {kind} '" in said and "on rank 0 (" in said
    assert first["after reads"]
    (warning,) = first["heard"]
    assert "exp_avg_sq" in warning and not second["heard"]


def test_what_is_not_sound_is_not_kept_in_memory_either(tmp_path: Path) -> None:
    def spoil(eng: engine.Engine, step: int) -> None:
        if step == 1:
            eng.module.get_parameter("weight").data.view(torch.int32)[0, 0] ^= 1

    checkpoint = {"folder": str(tmp_path), "memory_every": 4, "async": False}
    with pytest.raises(CorruptionError, match=r"bit 0 of element 0 of weight 'weight' has changed after update 1"):
        alone({"integrity": {"every": 1000}, "checkpoint": checkpoint}, [torch.ones(4, 3)] * 5, spoil)
    assert not (tmp_path / TOKEN).exists(), "no copy was begun"


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def frozen(stage: int) -> str:
    """Body of a rank: a bit of a frozen weight flips on rank 1."""
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "integrity": {"every": 3}}
    with engine.initialize(Adapted(), config, lambda y, x: (y - x).square().mean(), torch.ones(2, 8)) as eng:
        try:
            for step in range(12):
                eng.train_batch(torch.randn(2, 8))
                if step == 6 and eng.grid.rank == 1:
                    held = next(each for each in guard_of(eng)._at_rest.held if each.parameter(0) == "base.weight")
                    held.tensor.data.view(torch.uint8).view(-1)[5] ^= 8
        except CorruptionError as error:
            return f"{step} {error}"
    return ""


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
def test_frozen_weights_are_held_too(run_ranks: RunRanks, stage: int) -> None:
    for said in run_ranks(frozen, 2, stage):
        assert said.startswith("8 silent corruption: on rank 1 ("), said
        assert "bit 11 of element 1 of weight 'base.weight'" in said, said


def short_parameters() -> int:
    """Body of a rank: a pipeline whose other stage has a parameter of one element."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    config = {"train_batch_size": 2, "parallel": {"data": 1, "pipeline": 2}, "integrity": {"every": 1}}
    with engine.initialize(model, config, lambda y, _: y.square().mean(), torch.ones(2, 4)) as eng:
        for _ in range(2):
            eng.train_batch(torch.ones(2, 4))
        return eng.step_count


def test_parameters_of_other_stages_are_not_read(run_ranks: RunRanks) -> None:
    assert run_ranks(short_parameters, 2) == [2, 2]


def alone(config: dict[str, Any], batches: list[Tensor], between: Callable[[engine.Engine, int], None]) -> int:
    """Steps that were made; ``between`` is called before each."""
    torch.manual_seed(1)
    with engine.initialize(nn.Linear(3, 3), {"train_batch_size": 4} | config, lambda y, x: y.square().mean()) as eng:
        for step, batch in enumerate(batches):
            between(eng, step)
            eng.train_batch(batch)
        return eng.skipped_steps


def test_skipped_steps_are_no_alarm_and_are_looked_at() -> None:
    batches = [torch.ones(4, 3) * (torch.inf if step in (1, 2, 5) else 1) for step in range(8)]
    assert alone({"integrity": {"every": 3}}, batches, lambda eng, step: None) == 3
    assert alone({"integrity": {"every": 3}, "fp16": {"enabled": True}}, batches, lambda eng, step: None) >= 3

    def spoil(eng: engine.Engine, step: int) -> None:
        if step == 1:
            eng.module.get_parameter("weight").data.view(torch.int32)[0, 0] |= 0x7F800000

    with pytest.raises(CorruptionError, match=r"on rank 0 \(.* 'weight' around element 0 has changed after update 1"):
        alone({"integrity": {"every": 1000}}, [torch.ones(4, 3)] * 3, spoil)


@pytest.mark.parametrize("call", [2, 4], ids=["first run", "second run"])
def test_a_failed_step_is_no_difference_of_its_two_runs(call: int) -> None:
    calls = list[int]()

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        calls.append(len(calls))
        if len(calls) == call:
            raise ValueError("a mistake of the user")
        return output.square().mean()

    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "integrity": {"every": 1, "rerun": True}}
    with engine.initialize(nn.Linear(3, 3), config, loss_fn=loss) as eng:
        guard = eng._parts.runtime.parts.find(Integrity)
        assert guard is not None
        with pytest.raises(ValueError, match="a mistake of the user"):
            eng.train_batch(torch.ones(4, 3))
        guard.check()  # as a save does
        eng.train_batch(torch.ones(4, 3))


def test_a_loop_of_the_users_own() -> None:
    with engine.initialize(nn.Linear(3, 3), {"train_batch_size": 4, "integrity": {"every": 2}}) as eng:
        for step in range(6):
            eng.backward(eng(torch.ones(4, 3)).square().mean())
            if step == 4:
                eng.module.get_parameter("weight").data.view(torch.int32)[0, 0] ^= 1
            if step == 5:
                with pytest.raises(CorruptionError, match="bit 0 of element 0 of weight 'weight' has changed"):
                    eng.step()
            else:
                eng.step()


def test_an_optimizer_of_the_users_own() -> None:
    """Its state has tensors of other shapes, such as a step count."""
    model = nn.Linear(3, 3)
    given = torch.optim.Adam(model.parameters())
    config = {"train_batch_size": 4, "optimizer": None, "integrity": {"every": 2}}
    with engine.initialize(model, config, lambda y, x: y.square().mean(), optimizer=given) as eng:
        for _ in range(4):
            eng.train_batch(torch.ones(4, 3))
        next(iter(eng.optimizer.state.values()))["step"].data.view(torch.int32).bitwise_xor_(1 << 20)
        with pytest.raises(CorruptionError, match=r"bit 20 of element 0 of step 'bias' has changed"):
            for _ in range(2):
                eng.train_batch(torch.ones(4, 3))


def traffic(setting: Setting) -> list[int]:
    """Body of a rank: calls with our label in each step."""
    batches, calls = models.batches_for("decoder", 4, 3), []
    with opened(setting, batches) as eng:
        assert (eng._runtime.parts.find(Integrity) is None) == (setting.every == 0)
        for _ in range(6):
            before = eng.sent.copy()
            steps(eng, batches, 1)
            calls.append(sum(row.calls for row in eng.sent.since(before).rows() if row.label == INTEGRITY))
        assert INTEGRITY not in eng.traffic_report()  # the steps themselves send what is planned
    return calls


def test_what_is_sent(run_ranks: RunRanks) -> None:
    assert run_ranks(traffic, 2, Setting("dp2", 1, False, 3)) == [[0, 0, 2] * 2] * 2
    assert run_ranks(traffic, 2, Setting("dp2", 1, False, 0)) == [[0] * 6] * 2


@pytest.mark.parametrize(("key", "value"), [("rerun", True), ("on_failure", "warn")])
def test_a_key_that_would_do_nothing_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"integrity\.{key}: .* while integrity\.every is 0"):
        engine.load_config({"train_batch_size": 1, "integrity": {key: value}})
