"""State moves to host memory between two phases and comes back with the same bytes; what needs it meanwhile is told."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.engine import Engine
from engine.zero.state.offloaded_states import GRADIENTS, KINDS, MASTERS, MOMENTS, PARAMETERS, chosen_kinds
from tests.selection import wide
from tests.zero.offload.test_offloaded_training import Case, bits, settings, unequal
from tests.zero.small import batch, forget_the_living, live_bytes, start
from tests.zero.test_state_bytes import MODES, OPTIMIZERS, PRECISIONS, settled_bytes

RunRanks = Callable[..., list[Any]]
KINDS_OF_PLAN = {
    "optimizer": MOMENTS, "master": MASTERS, "gradients": GRADIENTS, "error feedback": GRADIENTS,
    "parameters": PARAMETERS, "frozen parameters": PARAMETERS, "secondary shards": PARAMETERS,
}  # fmt: skip


def with_breaks(changes: dict[str, Any], breaks: bool) -> tuple[list[Any], dict[str, Any]]:
    """Three steps; with ``breaks`` all state is away between them, in two calls, and comes back."""
    with start(changes) as eng:
        reports = []
        for step in range(3):
            reports.append(eng.train_batch(batch(eng, step)))
            if breaks:
                eng.offload_states(include=["optim_states", "hp_params"], non_blocking=True)
                eng.offload_states(non_blocking=step == 1)
                eng.reload_states()
        return [(r.loss, r.grad_norm, r.skipped) for r in reports], bits(eng)


def compare_all(cases: list[Case], beside: dict[str, Any]) -> list[str]:
    """Body of a rank: one line for each case whose bits change when state is away between steps."""
    wrong = []
    for case in cases:
        for device in ("none", "cpu"):
            changes = settings(case, device)
            changes["zero_optimization"] |= beside
            plain, broken = with_breaks(changes, breaks=False), with_breaks(changes, breaks=True)
            if plain[0] != broken[0] or (names := unequal(plain[1], broken[1])):
                wrong.append(f"{case} {device}: {plain[0]} {broken[0]} {names[:3] if plain[0] == broken[0] else ''}")
    return wrong


CORE: list[Case] = [("AdamW", "bf16", (1, "step"), 0.5), ("Lion", "fp32", (3, "microbatch"), 0.5)]
CASES: list[Case] = [*product(OPTIMIZERS, PRECISIONS, MODES, (0.4,))]
SHARDED: list[Case] = [("AdamW", "bf16", (3, "step"), 0.5), ("AdamW", "fp32", (3, "microbatch"), 0.5)]
BESIDE: list[dict[str, Any]] = [
    {"shard_size": 2},
    {"zero_hpz_partition_size": 2},
    {"zero_quantized_gradients": True, "zero_gradient_error_feedback": True},
    {"offload_param": {"device": "cpu"}},
]


@pytest.mark.parametrize(
    ("dp", "cases", "beside"),
    [
        (1, CORE[:1], {}),
        wide(2, CORE, {}, id="2 core"),
        *(wide(dp, CASES, {}, id=f"{dp} all") for dp in (1, 2)),
        *(wide(4, SHARDED, beside, id=f"4 {next(iter(beside))}") for beside in BESIDE),
    ],
)
def test_bits_are_those_of_a_run_without_a_break(
    run_ranks: RunRanks, dp: int, cases: list[Case], beside: dict[str, Any]
) -> None:
    for rank, wrong in enumerate(run_ranks(compare_all, dp, cases, beside, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def measure_all(cases: list[Case]) -> list[str]:
    """Body of a rank: one line for each kind that frees other bytes than planned, or costs the host others."""
    wrong = []
    for case in cases:
        forget_the_living()
        with start(settings(case, "cpu")) as eng:
            for step in range(2):
                eng.train_batch(batch(eng, step))
            plan = eng.plan.rank(eng.grid.rank)
            whole = sum(plan.state_bytes.values()) + sum(plan.host_bytes.values())
            settled_bytes(whole)
            for kind in KINDS:
                planned = sum(count for name, count in plan.state_bytes.items() if KINDS_OF_PLAN[name] == kind)
                before = eng._runtime.offloaded.bytes
                eng.offload_states(include=[kind])
                copied = eng._runtime.offloaded.bytes - before
                # on a CPU the copy is in the memory that the walk counts too
                if copied != planned or live_bytes() != whole:
                    wrong.append(f"{case} {kind}: copied {copied}, planned {planned}; {live_bytes()} of {whole} live")
            eng.reload_states()
            if eng._runtime.offloaded.bytes or live_bytes() != whole:
                wrong.append(f"{case}: {live_bytes()} bytes live again, planned {whole}")
    return wrong


@pytest.mark.parametrize(("dp", "cases"), [(1, CORE[:1]), wide(2, CASES, id="2 all")])
def test_moved_bytes_are_those_of_the_plan(run_ranks: RunRanks, dp: int, cases: list[Case]) -> None:
    for rank, wrong in enumerate(run_ranks(measure_all, dp, cases, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def stepped(**changes: Any) -> Engine:
    """An engine after a step."""
    eng = start(BF16 | changes)
    eng.train_batch(batch(eng, 0))
    return eng


def calls(eng: Engine, folder: Path) -> dict[str, Callable[[], object]]:
    """Calls of a user, by name."""
    rows = batch(eng, 1)
    return {
        "train_batch": lambda: eng.train_batch(rows),
        "eng(batch)": lambda: eng(rows),
        "eval_batch": lambda: eng.eval_batch(rows),
        "predict": lambda: eng._parts.resources.refuse_closed("predict"),
        "save_checkpoint": lambda: eng.save_checkpoint(folder).wait(),
        "load_checkpoint": lambda: eng.load_checkpoint(folder),
        "full_state_dict": eng.full_state_dict,
        "masters": lambda: eng.masters(local=True).__enter__(),
        "optimizer_state": lambda: eng.optimizer_state(local=True).__enter__(),
        "gradients": lambda: eng.gradients(local=True).__enter__(),
        "full_parameters": lambda: eng.full_parameters().__enter__(),
    }


REFUSED = {
    MOMENTS: {"train_batch", "save_checkpoint", "load_checkpoint", "optimizer_state"},
    MASTERS: {"train_batch", "save_checkpoint", "load_checkpoint", "full_state_dict", "masters"},
    GRADIENTS: {"train_batch", "eng(batch)", "save_checkpoint", "load_checkpoint", "gradients"},
    PARAMETERS: {
        "train_batch", "eng(batch)", "eval_batch", "predict", "save_checkpoint", "load_checkpoint", "full_state_dict",
        "masters", "full_parameters",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_need_what_is_away_are_one_sentence_and_others_run(kind: str, tmp_path: Path) -> None:
    with stepped() as eng:
        eng.save_checkpoint(tmp_path).wait()
        eng.offload_states(include=[kind])
        refused = set()
        for name, call in calls(eng, tmp_path).items():
            try:
                call()
            except engine.EngineError as error:
                assert f"{name} while" in str(error) and kind in str(error) and "reload_states() first" in str(error)
                refused.add(name)
        assert refused == REFUSED[kind]
        eng.reload_states()
        eng.train_batch(batch(eng, 1))


def test_a_checked_run_trains_on_and_a_flip_while_state_is_away_is_found() -> None:
    with stepped(integrity={"every": 1}) as eng:
        eng.offload_states()
        eng.reload_states()
        eng.train_batch(batch(eng, 1))
        eng.offload_states(include=["optim_states"])
        (away,) = [each for each in eng._runtime.offloaded._moved[MOMENTS] if each.copy.numel() > 100][:1]
        away.copy.view(torch.uint8)[64] ^= 1
        eng.reload_states()
        with pytest.raises(engine.CorruptionError, match="exp_avg"):
            eng.train_batch(batch(eng, 2))


def test_frozen_parameters_and_those_of_a_reader_are_guarded() -> None:
    with stepped() as eng:
        frozen = eng.module.get_parameter("frozen")
        eng.offload_states()
        assert frozen.untyped_storage().nbytes() == 0 and "in host memory" in repr(frozen)
        with pytest.raises(engine.EngineError, match=r"'frozen' is in host memory .offload_states.*reload_states"):
            frozen + 1
        eng.reload_states()
        assert type(frozen) is torch.nn.Parameter and bool((frozen == 1).all())


def test_a_graph_of_weights_that_were_away_is_refused_by_autograd() -> None:
    with stepped() as eng:
        loss = (eng.module.get_parameter("up.weight") * eng.module.get_parameter("down.weight").T).sum()
        eng.offload_states()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)
        eng.reload_states()


BLOCKS: list[Callable[[Engine], AbstractContextManager[object]]] = [
    lambda eng: eng.masters(local=True),
    lambda eng: eng.gradients(local=True),
    lambda eng: eng.optimizer_state(local=True),
    lambda eng: eng.full_parameters(),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_state_to_which_a_block_refers_stays(block: Callable[[Engine], AbstractContextManager[object]]) -> None:
    with stepped() as eng:
        with block(eng), pytest.raises(engine.EngineError, match=r"inside a `with` block of .*leave the block"):
            eng.offload_states()
        eng.offload_states()
        eng.reload_states()
        eng.train_batch(batch(eng, 1))


def test_a_closed_engine_leaves_the_parameters_with_their_values() -> None:
    eng = stepped()
    before = eng.module.get_parameter("up.weight").detach().clone()
    eng.offload_states()
    eng.close()
    assert torch.equal(eng.module.get_parameter("up.weight"), before)
    with pytest.raises(engine.EngineError, match="reload_states was called after close"):
        eng.reload_states()


def test_bad_input_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with stepped(gradient_accumulation_steps=2) as eng:
        with pytest.raises(engine.EngineError, match=r"'moments'.*the kinds of state are optim_states, hp_params"):
            eng.offload_states(include=["moments"])
        with pytest.raises(engine.EngineError, match=r"device 'nvme'.*give \"cpu\""):
            eng.offload_states(device="nvme")
        eng.backward(eng(batch(eng, 1)[:4]))
        with pytest.raises(engine.EngineError, match="offload_states was called inside an unfinished accumulation"):
            eng.offload_states()
        eng.zero_grad()

        def refuses(*_: object) -> None:
            raise RuntimeError("the system has no such memory\nfrom a stack")

        monkeypatch.setattr("engine.zero.state.offloaded_states.host_bytes", refuses)
        with pytest.raises(
            engine.EngineError, match=r"cannot allocate \d+ bytes of memory .the system has no such memory.;"
        ):
            eng.offload_states()
        eng.train_batch(batch(eng, 1))


def test_deepspeeds_names_and_enumerations_are_understood() -> None:
    class Member:
        value = "contiguous_grad_buffer"

    assert chosen_kinds(None) == set(KINDS)
    assert chosen_kinds([Member(), "hp_params"]) == {GRADIENTS, MASTERS}
