"""An update that runs beside the next step gives the bits of a run in which every gradient lacks the newest update."""

import threading
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import load_config
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.zero.offload.delayed_update import DelayedUpdate
from tests.selection import wide
from tests.zero.offload.test_offloaded_training import bits, unequal
from tests.zero.small import batch, start
from tests.zero.test_state_bytes import MODES, OPTIMIZERS, PRECISIONS

RunRanks = Callable[..., list[Any]]
Case = tuple[str, str, tuple[int, str]]
"""Optimizer, precision, (ZeRO stage, reduce)."""
STEPS = 4


def settings(case: Case, delayed: bool, **changes: Any) -> dict[str, Any]:
    name, precision, (stage, reduce) = case
    zero = {"stage": stage, "reduce": reduce, "reduce_bucket_size": 700} | changes.pop("zero", {})
    zero["offload_optimizer"] = {"device": "cpu", "delayed_update": delayed}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 0.002, "warmup_max_lr": 0.01}}
    options = {"optimizer": OPTIMIZERS[name][0], "gradient_clipping": 0.1, "scheduler": scheduler}
    return options | {"zero_optimization": zero} | PRECISIONS[precision] | changes


def backwards(eng: Engine, step: int, poisoned: int | None) -> None:
    """Forwards and backwards of a step; the gradient of the step ``poisoned`` is not finite."""
    for half in batch(eng, step).chunk(2):
        eng.backward(eng(half) * (float("inf") if step == poisoned else 1.0))


def write(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])


def held(eng: Engine) -> dict[str, Tensor]:
    with eng.masters(local=True) as masters:
        return {name: value.clone() for name, value in masters.items()}


def by_hand(case: Case, poisoned: int | None, **changes: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """The same delay without a thread: gradients at weights that are swapped in, updates on the newest ones."""
    found = []
    with start(settings(case, False, **changes)) as eng:
        newest = older = held(eng)
        for step in range(STEPS):
            with eng.masters(local=True) as masters:
                write(masters, older)
            backwards(eng, step, poisoned)
            with eng.masters(local=True) as masters:
                write(masters, newest)
            report = eng.step()
            assert report is not None
            found.append((report.loss, report.grad_norm, report.skipped))
            older, newest = newest, held(eng)
        return found, bits(eng)


def delayed(case: Case, poisoned: int | None, **changes: Any) -> tuple[list[Any], dict[str, Tensor]]:
    found = []
    with start(settings(case, True, **changes)) as eng:
        for step in range(STEPS):
            backwards(eng, step, poisoned)
            report = eng.step()
            assert report is not None
            found.append((report.loss, report.grad_norm, report.skipped))
        return found, bits(eng)


def compare_all(cases: list[Case], several: list[dict[str, Any]], poisoned: int | None) -> list[str]:
    """Body of a rank: one line for each case whose bits are not those of the delay by hand."""
    wrong = []
    for case, changes in product(cases, several):
        expected, found = by_hand(case, poisoned, **changes), delayed(case, poisoned, **changes)
        same = repr(expected[0]) == repr(found[0])
        if not same or (names := unequal(expected[1], found[1])):
            wrong.append(f"{case} {changes}: {expected[0]} {found[0]} {names[:3] if same else ''}")
    return wrong


CORE: list[Case] = [("AdamW", "bf16", (1, "step")), ("Lion", "fp32", (3, "microbatch"))]
CASES: list[Case] = [
    case for case in product(OPTIMIZERS, PRECISIONS, MODES) if "alone" not in case[1]
]  # without masters there is nothing to put the newest weights into between backward and step
BESIDE: list[dict[str, Any]] = [
    {"zero": {"offload_param": {"device": "cpu"}}},
    {"zero": {"zero_quantized_gradients": True, "zero_gradient_error_feedback": True}},
    {"integrity": {"every": 1}},
    {"activation_checkpointing": {"mode": "full"}},
]


@pytest.mark.parametrize(
    ("dp", "cases", "several", "poisoned"),
    [
        (1, CORE[:1], [{}], None),
        (1, CORE[:1], [{}], 1),
        wide(2, CORE, [{}], None, id="2 core"),
        *(wide(dp, CASES, [{}], None, id=f"{dp} all") for dp in (1, 2)),
        wide(2, CASES[::3], [{}], 2, id="2 with a skipped step"),
        wide(2, [("AdamW", "bf16", (3, "step")), ("AdamW", "fp32", (3, "step"))], BESIDE, None, id="2 beside"),
        wide(4, CORE, [{"zero": {"shard_size": 2}}], None, id="4 in shard groups"),
    ],
)
def test_bits_are_those_of_the_same_delay_by_hand(
    run_ranks: RunRanks, dp: int, cases: list[Case], several: list[dict[str, Any]], poisoned: int | None
) -> None:
    for rank, wrong in enumerate(run_ranks(compare_all, dp, cases, several, poisoned, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


BF16: Case = ("AdamW", "bf16", (1, "step"))


def pending(eng: Engine) -> bool:
    late = eng._runtime.optimizer.delayed
    assert late is not None
    return late.pending


def test_the_update_runs_while_the_next_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is let go in the backward of the next step, so a step that waited for it before would never end."""
    may_go, events, launch = threading.Event(), list[str](), DelayedUpdate.launch

    def held_back(self: DelayedUpdate, update: Callable[[], None]) -> None:
        def work() -> None:
            assert may_go.wait(60)
            update()
            events.append("updated")

        launch(self, work)

    monkeypatch.setattr(DelayedUpdate, "launch", held_back)
    with start(settings(BF16, True)) as eng:
        backwards(eng, 0, None)
        eng.step()
        before = [parameter.detach().clone() for parameter in eng.module.parameters()]
        backwards(eng, 1, None)
        events.append("second backward")
        assert all(torch.equal(*pair) for pair in zip(before, eng.module.parameters(), strict=True))
        may_go.set()
        eng.step()
        assert events[:2] == ["second backward", "updated"]
        assert not all(torch.equal(*pair) for pair in zip(before, eng.module.parameters(), strict=True))


def test_a_save_finishes_the_update_and_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    def steps(eng: Engine, numbers: range) -> list[Any]:
        return [eng.train_batch(batch(eng, step)).loss for step in numbers]

    with start(settings(BF16, True)) as eng:
        steps(eng, range(2))
        assert pending(eng)
        eng.save_checkpoint(tmp_path).wait()
        assert not pending(eng)
        expected = steps(eng, range(2, 5)), bits(eng)
    with start(settings(BF16, True)) as eng:
        steps(eng, range(1))
        eng.load_checkpoint(tmp_path)
        assert eng.step_count == 2
        found = steps(eng, range(2, 5)), bits(eng)
    assert expected[0] == found[0] and not unequal(expected[1], found[1])


def test_what_reads_state_finishes_the_update_and_an_evaluation_does_not() -> None:
    with start(settings(BF16, True)) as eng:
        reads: list[Callable[[], object]] = [
            eng.full_state_dict,
            lambda: eng.masters(local=True).__enter__(),
            lambda: eng.full_parameters().__enter__(),
            lambda: eng.optimizer_state(local=True).__enter__(),
            lambda: eng.offload_states(include=["optim_states"]),
        ]
        for step, read in enumerate(reads):
            eng.train_batch(batch(eng, step))
            eng.eval_batch(batch(eng, 90))
            assert pending(eng)
            read()
            assert not pending(eng)
            eng.reload_states()


def test_weights_that_are_written_beside_the_update_are_one_sentence() -> None:
    with start(settings(BF16, True)) as eng:
        eng.train_batch(batch(eng, 0))
        eng.module.get_parameter("up.weight").data.mul_(0.5)
        with pytest.raises(
            EngineError, match=r"written while its delayed update .* would overwrite the values.*eng.masters"
        ):
            eng.train_batch(batch(eng, 1))


def test_weights_that_are_written_through_the_engine_are_used() -> None:
    with start(settings(BF16, True)) as eng:
        eng.train_batch(batch(eng, 0))
        with eng.full_parameters("up.*") as parameters, torch.no_grad():
            parameters["up.weight"].zero_()
        eng.train_batch(batch(eng, 1))
        weight = eng.full_state_dict()["up.weight"]
        assert float(weight.abs().max()) < 0.05


def test_an_update_that_fails_is_told_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, *_: object) -> None:
        raise MemoryError("no memory left")

    with start(settings(BF16, True)) as eng:
        monkeypatch.setattr(type(eng.optimizer), "_update", fails)
        eng.train_batch(batch(eng, 0))
        with pytest.raises(EngineError, match=r"failed during the next step .MemoryError: no memory left.*load"):
            eng.train_batch(batch(eng, 1))


def test_a_closed_engine_leaves_the_newest_weights_in_the_model() -> None:
    with start(settings(BF16, False)) as eng:
        eng.train_batch(batch(eng, 0))
        expected = eng.module.get_parameter("up.weight").detach().clone()
    with start(settings(BF16, True)) as eng:
        eng.train_batch(batch(eng, 0))
        module = eng.module
        assert not torch.equal(module.get_parameter("up.weight"), expected)
    assert torch.equal(module.get_parameter("up.weight"), expected)


@pytest.mark.parametrize(
    ("offload", "told"),
    [
        ({"device": "none"}, 'true with device "none"'),
        ({"device": "nvme", "nvme_path": "/tmp"}, 'true with device "nvme"'),
        ({"device": "cpu", "ratio": 0.5}, "true with ratio 0.5"),
        ({"device": "cpu", "ratio": "auto", "memory_limit": 3}, 'true with ratio "auto"'),
    ],
)
def test_another_placement_is_refused(offload: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"zero_optimization": {"offload_optimizer": offload | {"delayed_update": True}}})


def test_an_average_of_weights_is_refused() -> None:
    offload = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    with pytest.raises(ConfigError, match=r"delayed_update: true with ema, which would read weights during"):
        load_config({"zero_optimization": offload, "ema": {"decay": 0.9}})


def test_an_optimizer_in_code_is_refused() -> None:
    changes = settings(BF16, True) | {"optimizer": None, "scheduler": None}
    with pytest.raises(ConfigError, match="only the built-in optimizers update beside a step"):
        start(changes, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.1))
