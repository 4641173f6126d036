"""Every kind of adapter that PEFT has trains on every grid as in one process, and PEFT loads what was saved."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.errors import PlanError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, train_alone
from tests.engine.parity.launches import settings
from tests.engine.parity.peft_kinds import BASE, KINDS, OF_SAVED, UNTRAINABLE, base, batches, build
from tests.models import take_rows
from tests.selection import wide

ROWS, CLIPPING = 4, 1e-5
GRIDS: Mapping[str, dict[str, Any]] = {
    "dp2": {"parallel": {"data": 2}},
    "ZeRO 3": {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}},
    "tp2": {"parallel": {"tensor": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
}
OFTEN = {
    ("LoRA of a classifier", "ZeRO 3"), ("P-tuning", "pp2"), ("IA3", "tp2"),
}  # fmt: skip
CASES = [(kind, grid) if (kind, grid) in OFTEN else wide(kind, grid) for kind in KINDS for grid in GRIDS]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]


def rank(kind: str, config: Mapping[str, Any], folder: str, world: World) -> TrainingRecord:
    """Body of a rank: train and save the adapters."""
    given = batches(kind, ROWS)[:3]
    example = take_rows(given[0], 0, config["train_micro_batch_size_per_gpu"])
    with engine.initialize(partial(build, kind), dict(config), example_batch=example, world=world) as eng:
        rows = eng.config.micro * eng.config.accumulation
        mine = [take_rows(batch, eng.grid.coord().dp * rows, rows) for batch in given]
        reports = [eng.train_batch(batch) for batch in mine]
        eng.save_pretrained(folder)
        losses, norms = tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports)
        return TrainingRecord(losses, norms, eng.full_state_dict())


def test_every_kind_of_peft_is_tried() -> None:
    import peft

    given = [getattr(peft, name)(task_type="CAUSAL_LM", **settings) for name, settings in KINDS.values()]
    assert {config.peft_type for config in given} == set(peft.PeftType)


def stored(folder: Path) -> dict[str, bytes]:
    """The tensors of an adapter folder, by file."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


@pytest.mark.parametrize(("kind", "grid"), CASES)
def test_adapters_train_and_are_saved_on_every_grid(kind: str, grid: str, tmp_path: Path) -> None:
    from peft import PeftModel

    changes = {key: dict(value) for key, value in GRIDS[grid].items()}
    config = settings(1, train_batch_size=ROWS, gradient_clipping=CLIPPING, **changes)
    body = partial(rank, kind, config, str(tmp_path / "adapters"))
    if kind in UNTRAINABLE:
        with pytest.raises(engine.EngineError, match=UNTRAINABLE[kind]):
            run_thread_ranks(2, body)
        return
    run = run_thread_ranks(2, body)[0]
    alone = config | {"parallel": {"data": 1}, "zero_optimization": {"stage": 0}}
    parity = Parity(run, train_alone(partial(build, kind), alone, batches(kind, ROWS)[:3]))
    assert parity.holds() and min(parity.reference.norms) > CLIPPING, str(parity)
    trained: Any = build(kind)
    trained.load_state_dict(run.weights)
    if kind in OF_SAVED:  # PEFT does not load what it writes of this kind
        trained.save_pretrained(tmp_path / "by PEFT")
        assert stored(tmp_path / "adapters") == stored(tmp_path / "by PEFT")
        return
    loaded: Any = PeftModel.from_pretrained(base(kind), tmp_path / "adapters")
    seen = {key: value for key, value in batches(kind, ROWS)[0].items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**seen).logits, trained.eval()(**seen).logits)


def two_adapters() -> Any:
    """A model with an adapter that is on, and one that is off and trained all the same."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    plain: Any = BASE.build()
    model: Any = get_peft_model(plain, config)
    model.add_adapter("late", config)
    return model


def switched(world: World) -> tuple[list[float], list[str]]:
    """Body of a rank: losses without adapters and with those of the plan, and what is said of another one."""
    batch = take_rows(batches("LoRA", 2)[0], 0, 2)
    config = settings(1, train_batch_size=2, parallel={"tensor": 2})
    told = []
    with engine.initialize(two_adapters, config, example_batch=batch, world=world) as eng:
        model: Any = eng.module
        with model.disable_adapter():
            losses = [eng.eval_batch(batch).loss]
        model.set_adapter("late", inference_mode=True)
        for call in (eng.eval_batch, eng.predict):
            with pytest.raises(PlanError) as error:
                call(batch)
            told.append(str(error.value))
        model.set_adapter("default")
        return [*losses, eng.train_batch(batch).loss], told


def test_an_adapter_that_was_off_in_the_plan_is_refused_by_its_name() -> None:
    plain: Any = BASE.build()
    expected = float(plain(**batches("LoRA", 2)[0]).loss)
    for losses, told in run_thread_ranks(2, switched):
        assert losses == pytest.approx([expected] * 2, rel=1e-6)
        assert all(each.startswith("adapter 'late' was switched on after the tensor plan") for each in told)
