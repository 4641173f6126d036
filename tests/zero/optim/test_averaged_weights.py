"""The average in the place of the weights: what evaluations and exports get, and that training goes on as if not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import engine
from engine.engine import Engine
from engine.errors import EngineError
from engine.models.decoder import Decoder, loss_sum
from tests.parallel.comm.small_decoder import SIZES, batch, on_threads
from tests.selection import wide

EMA: dict[str, Any] = {"ema": {"decay": 0.75}}
FREE: dict[str, Any] = {"optimizer": {"type": "ScheduleFreeAdamW", "params": {"lr": 0.01}}}
MIXED: dict[str, Any] = {"optimizer": [{"match": "blocks.*", "type": "Muon"}, FREE["optimizer"]]}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def trained(eng: Engine) -> dict[str, Tensor]:
    """The weights that are trained, on every rank: what this rank updates."""
    return {str(n): place.parameter.detach().clone() for n, place in enumerate(eng._runtime.optimizer.places)}


def around_a_block(eng: Engine) -> list[str]:
    """What is not as it should be of weights before, in and after a block."""
    for step in range(3):
        eng.train_batch(batch(eng, step))
    expected = eng.full_state_dict(ema=eng._runtime.average is not None)
    before, own = trained(eng), eng.full_state_dict()
    plain = eng.eval_batch(batch(eng, 7)).loss
    with eng.averaged_weights():
        inside, loss = eng.full_state_dict(), eng.eval_batch(batch(eng, 7)).loss
        for call, name in ((lambda: eng.train_batch(batch(eng, 8)), "train_batch"), (eng.save_checkpoint, "save_ch")):
            with pytest.raises(EngineError, match=f"{name}.* inside averaged_weights"):
                call()
    wrong = differing(before, trained(eng)) + differing(own, eng.full_state_dict())
    wrong += differing(expected, inside)
    by_itself = eng._runtime.average is None
    wrong += ["the evaluation took other weights"] * ((plain == loss) != by_itself)
    return wrong + ["nothing averaged"] * (not by_itself and eng.grid.rank == 0 and not differing(own, inside))


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero", "changes"),
    [
        (2, {"data": 2}, {"stage": 1}, FREE | BF16),
        (2, {"data": 2}, {"stage": 3}, ADAMW | EMA),
        wide(2, {"data": 2}, {"stage": 0}, FREE),
        wide(2, {"data": 2}, {"stage": 2}, ADAMW | EMA | BF16),
        wide(2, {"data": 2}, {"stage": 3}, FREE | BF16),
        wide(2, {"tensor": 2}, {"stage": 0}, FREE),
        wide(2, {"pipeline": 2}, {"stage": 0}, MIXED),
        wide(4, {"data": 2, "tensor": 2}, {"stage": 2}, MIXED | BF16),
        wide(2, {"data": 2}, {"stage": 1, "zero_quantized_weights": True}, FREE | BF16),
        wide(2, {"data": 2}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}, FREE | BF16),
    ],
)
def test_the_model_has_the_average_until_the_block_ends(
    ranks: int, parallel: dict[str, Any], zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    settings = {"parallel": parallel, "zero_optimization": zero} | changes
    assert on_threads(ranks, settings, around_a_block) == [[]] * ranks


def losses(eng: Engine, between: Callable[[Engine], object]) -> list[float]:
    found = []
    for step in range(4):
        found.append(eng.train_batch(batch(eng, step)).loss)
        between(eng)
    return found


@pytest.mark.parametrize("changes", [FREE | BF16, ADAMW | EMA])
def test_training_goes_on_as_without_evaluations(changes: dict[str, Any]) -> None:
    settings = {"parallel": {"data": 2}, "zero_optimization": {"stage": 2}} | changes

    def evaluate(eng: Engine) -> None:
        with eng.averaged_weights():
            eng.eval_batch(batch(eng, 9))

    watched = on_threads(2, settings, lambda eng: losses(eng, evaluate))
    assert watched == on_threads(2, settings, lambda eng: losses(eng, lambda eng: None))


def test_a_schedule_free_run_evaluates_the_average() -> None:
    def body(eng: Engine) -> list[str]:
        for step in range(3):
            eng.train_batch(batch(eng, step))
        average = eng.full_state_dict()
        with eng.masters() as masters:
            weights = {name: value.clone() for name, value in masters.items()}
            (state,) = (eng.optimizer.state[p] for p in eng.optimizer.param_groups[0]["params"])
            iterate, point = state["z"], next(iter(eng.optimizer.state))
        x = (point.detach() - 0.1 * iterate) / 0.9
        found = torch.cat([value.reshape(-1) for value in average.values()])
        wrong = ["weights are averages"] * (not differing(weights, average))
        off = abs(float(found.double().sum() - x.double().sum()))
        return wrong + [f"averages off by {off}"] * (off > 1e-3)

    assert on_threads(1, {"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0} | FREE, body) == [[]]


def test_the_average_leaves_in_a_folder_of_transformers(tmp_path: Path) -> None:
    ids = torch.arange(4 * SIZES.context).view(4, -1) % SIZES.vocabulary
    rows = {"input_ids": ids, "labels": ids.flip(0)}
    config = {"train_batch_size": 4} | ADAMW | EMA
    torch.manual_seed(3)
    with engine.initialize(Decoder(SIZES), config, loss_sum, rows) as eng:
        for _ in range(3):
            eng.train_batch(rows)
        eng.save_pretrained(tmp_path / "average", ema=True)
        eng.save_pretrained(tmp_path / "weights")
        found = eng.full_state_dict(ema=True), eng.full_state_dict()
    for name, expected in zip(("average", "weights"), found, strict=True):
        (path,) = (tmp_path / name).glob("*.safetensors")
        stored = load_file(path)
        assert stored and all(torch.equal(value, expected[key]) for key, value in stored.items())
    assert differing(*found)


@pytest.mark.parametrize("call", ["averaged_weights", "save_pretrained(ema=True)"])
def test_a_run_without_an_average_says_so(tmp_path: Path, call: str) -> None:
    def body(eng: Engine) -> str:
        with pytest.raises(EngineError) as caught:
            if call == "averaged_weights":
                with eng.averaged_weights():
                    pass
            else:
                eng.save_pretrained(tmp_path, ema=True)
        return str(caught.value)

    (said,) = on_threads(1, {}, body)
    assert said.startswith(f'{call} was called in a run without an average of its weights; give "ema"')


def test_weights_that_a_schedule_free_run_is_given_are_what_it_evaluates() -> None:
    def body(eng: Engine) -> list[str]:
        for step in range(2):
            eng.train_batch(batch(eng, step))
        given = eng.full_state_dict()
        eng.load_full_state_dict(given)
        return differing(given, eng.full_state_dict())

    assert on_threads(1, FREE, body) == [[]]


def test_a_schedule_free_run_begins_again_at_a_checkpoint_without_updates(tmp_path: Path) -> None:
    def body(eng: Engine) -> list[str]:
        eng.save_checkpoint(tmp_path).wait()
        found = []
        for _ in range(2):
            eng.load_checkpoint(tmp_path)
            eng.train_batch(batch(eng, 0))
            found.append(eng.full_state_dict())
        return differing(*found)

    assert on_threads(1, FREE, body) == [[]]
