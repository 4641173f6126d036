"""What forward is given of a batch: everything, what its signature takes, or what the user states."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F

import engine
from engine.errors import EngineError
from engine.program.forward_inputs import ForwardInputs, Inputs
from engine.verify import Parity, verify
from tests.engine.every_grid import every_grid
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Two(nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return x


class Optional(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args


class Keywords(nn.Module):
    def forward(self, input_ids: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        return input_ids


def given(model: nn.Module, batch: Any, stated: Inputs | None = None, separate_loss: bool = True) -> Any:
    return ForwardInputs.of(model, separate_loss, stated).take(batch)


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (One(), (1, 2), (1,)),
        (One(), [1, 2, 3], (1,)),
        (One(), 1, 1),
        (Two(), (1, 2, 3), (1, 2)),
        (Two(), (1, 2), (1, 2)),
        (Optional(), (1,), (1,)),
        (Anything(), (1, 2), (1, 2)),
        (One(), {"x": 1, "y": 2}, {"x": 1}),
        (Optional(), {"x": 1, "y": 2}, {"x": 1}),
        (Keywords(), {"input_ids": 1, "y": 2}, {"input_ids": 1, "y": 2}),
        (Keywords(), ({"input_ids": 1}, 2), {"input_ids": 1}),
        (Optional(), ({"x": 1}, 2), {"x": 1}),
        (One(), ({"a": 1}, 2), ({"a": 1},)),
        (nn.Sequential(nn.Linear(2, 2)), (1, 2), (1,)),
    ],
)
def test_forward_is_given_what_its_signature_takes(model: nn.Module, batch: Any, expected: Any) -> None:
    assert given(model, batch) == expected


def test_without_loss_fn_forward_is_given_everything() -> None:
    for batch in ((1, 2, 3), {"x": 1, "other": 2}):
        assert given(One(), batch, separate_loss=False) is batch


@pytest.mark.parametrize(
    ("stated", "batch", "expected"),
    [
        (0, (1, 2), (1,)),
        ((0, 2), (1, 2, 3), (1, 3)),
        ("x", {"x": 1, "y": 2}, {"x": 1}),
        (("x", "y"), {"x": 1, "y": 2, "z": 3}, {"x": 1, "y": 2}),
        (lambda batch: {"x": batch["ids"]}, {"ids": 1}, {"x": 1}),
    ],
)
def test_the_user_states_it(stated: Inputs, batch: Any, expected: Any) -> None:
    assert given(Optional(), batch, stated) == expected


@pytest.mark.parametrize(
    ("model", "batch", "stated", "words"),
    [
        (Optional(), (1, 2), None, "forward takes 1 to 2 (x, mask), so its inputs are ambiguous"),
        (Keywords(), (1, 2), None, "pass inputs=(0,) to engine.initialize for the first part only"),
        (One(), {"ids": 1}, None, "the batch has the keys 'ids', but forward takes x; name the keys as forward does"),
        (
            One(),
            (1, 2),
            (0, 5),
            "inputs lists 0, 5, but the batch has 2 parts; list only keys or indices that the batch has.",
        ),
        (
            One(),
            {"x": 1},
            "y",
            "inputs lists 'y', but the batch has the keys 'x'; list only keys or indices",
        ),
        (One(), (1, 2), "y", "the argument inputs lists 'y', but the batch has 2 parts"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(model: nn.Module, batch: Any, stated: Inputs | None, words: str) -> None:
    with pytest.raises(EngineError) as caught:
        given(model, batch, stated)
    assert words in str(caught.value)


def test_what_forward_is_not_given_is_said() -> None:
    inputs = ForwardInputs.of(One(), separate_loss=True, stated=None)
    assert inputs.note((1, 2)) == "batch: forward gets 1 of the 2 parts of a batch, loss_fn all"
    assert inputs.note({"x": 1, "y": 2}) == "batch: 'y' goes to loss_fn, not to forward"
    assert inputs.note({"x": 1, "y": 2, "z": 3}) == "batch: 'y', 'z' go to loss_fn, not to forward"
    assert inputs.note({"x": 1}) == inputs.note((1,)) == inputs.note(1) == ""


# ------------------------------------------------------------------------------------------------ on grids

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    "gradient_clipping": 0.1,
}


CUTS = {"0": "column", "2": "row"}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))


def pairs() -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)) for _ in range(3)]


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["y"] if isinstance(batch, dict) else batch[1])


def trained(grid: dict[str, int], form: str) -> Parity | None:
    """Body of a rank."""
    batches = pairs() if form == "tuple" else [{"input": x, "y": y} for x, y in pairs()]
    return verify(network, CONFIG | {"parallel": grid}, batches, cross_entropy)


@pytest.mark.parametrize(
    ("grid", "form"),
    [
        wide({"data": 2}, "tuple"),
        ({"pipeline": 2}, "mapping"),
        ({"tensor": 2, "tensor_plan": CUTS}, "tuple"),
    ],
)
def test_inputs_and_labels_on_every_axis(run_ranks: RunRanks, grid: dict[str, Any], form: str) -> None:
    parity = run_ranks(trained, 2, grid, form)[0]
    assert parity.holds(), str(parity)


def test_three_calls_pass_what_the_user_passes() -> None:
    with engine.initialize(network(), CONFIG, cross_entropy) as eng:
        (x, y), *_ = pairs()
        for start in range(0, 8, 2):
            eng.backward(F.cross_entropy(eng(x[start : start + 2]), y[start : start + 2]))
            eng.step()
        assert eng.step_count == 1
        assert eng.train_batch((x, y)).loss > 0


def test_ambiguous_batch_is_refused_before_the_step() -> None:
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)  # forward(src, tgt, src_mask=None, ...)
    batch, loss = (torch.ones(8, 3, 8), torch.ones(8, 3, 8), torch.ones(8)), lambda output, batch: output.mean()
    with (
        engine.initialize(model, CONFIG, loss) as eng,
        pytest.raises(EngineError, match="forward takes 2 to 11"),
    ):
        eng.train_batch(batch)
    with engine.initialize(model, CONFIG, loss, inputs=(0, 1)) as eng:
        assert eng.train_batch(batch).grad_norm > 0


def ambiguous() -> list[Any]:
    """Body of a rank: the sentence about a batch that leaves a doubt, and the loss of the next one."""
    x = torch.ones(4, 3)
    with engine.initialize(Summed(), CONFIG, lambda output, batch: output.square().mean()) as eng:
        try:
            eng.train_batch((x, x))
            said = ""
        except EngineError as error:
            said = str(error)
        return [said, eng.train_batch((x,)).loss]


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return self.layer(x if other is None else x + other)


def test_all_ranks_refuse_an_ambiguous_batch_and_go_on(run_ranks: RunRanks) -> None:
    one, other = run_ranks(ambiguous, 2, seconds=30.0)
    assert one == other and "forward takes 1 to 2 (x, other)" in one[0]


ADAM_OF_FOUR = {"train_batch_size": 4, "optimizer": {"type": "adamw", "params": {"lr": 1e-2, "eps": 1e-5}}}
X, Y = torch.arange(24.0).reshape(4, 6) / 24, torch.tensor([0, 2, 1, 2])


def losses(loss_fn: Any, batch: Any, **options: Any) -> list[float]:
    """Three steps."""
    torch.manual_seed(0)
    with engine.initialize(nn.Linear(6, 3), ADAM_OF_FOUR, loss_fn, **options) as eng:
        return [eng.train_batch(batch).loss for _ in range(3)]


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), functional.cross_entropy, partial(functional.cross_entropy, reduction="mean")]
)
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ((X, Y), {}),
        ({"input": X, "labels": Y}, {}),
        ([{"input": X}, Y], {}),
        ((Y, X), {"inputs": 1}),
        ({"labels": Y, "input": X}, {"inputs": ["input"]}),
    ],
)
def test_it_gets_the_part_that_forward_is_not_given(loss_fn: Any, batch: Any, options: dict[str, Any]) -> None:
    own = losses(lambda output, batch: functional.cross_entropy(output, Y), (X, Y))
    assert losses(loss_fn, batch, **options) == pytest.approx(own, rel=1e-6)


def output_of(parts: Any) -> Tensor:
    """The part that a function of ``inputs`` takes."""
    return parts[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("batch", "options", "found"),
    [
        (X, {}, "no part"),
        ((X, Y, Y), {}, "2 parts"),
        ((X, {"y": Y}), {}, "1 part that is no tensor"),
        ((X, Y), {"inputs": output_of}, "no part"),
    ],
)
def test_what_the_batch_does_not_tell_is_refused(batch: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(engine.EngineError) as caught:
        losses(nn.CrossEntropyLoss(), batch, **options)
    began = "loss_fn=CrossEntropyLoss() of torch needs one tensor of targets that forward does not get, but the batch "
    assert str(caught.value).startswith(f"{began}leaves {found} for the loss; pass a function such as")
    assert "loss_fn=lambda output, batch: CrossEntropyLoss()(output, batch[1])" in str(caught.value)


def on_grid(parallel: dict[str, int], stage: int, loss_fn: Any) -> list[tuple[float, float]]:
    """Losses and norms of three steps of a classifier, two microbatches each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    config = {
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // parallel["data"],
        "gradient_clipping": 0.1,
        "optimizer": ADAM_OF_FOUR["optimizer"],
    }
    rows, targets = torch.arange(48.0).reshape(8, 6).sin(), torch.arange(8) % 4
    with engine.initialize(model, config, loss_fn, example_batch=(rows[:2], targets[:2])) as eng:
        share = slice(None) if parallel["data"] == 1 else slice(eng.grid.coord().dp * 4, eng.grid.coord().dp * 4 + 4)
        reports = [eng.train_batch((rows[share], targets[share])) for _ in range(3)]
    return [(report.loss, report.grad_norm or 0.0) for report in reports]


@pytest.mark.parametrize(("parallel", "stage"), every_grid("tp2"))
def test_it_equals_one_process_on_every_grid(
    run_ranks: Callable[..., Any], parallel: dict[str, int], stage: int
) -> None:
    one = on_grid({"data": 1}, 0, lambda output, batch: functional.cross_entropy(output, batch[1]))
    for found in run_ranks(on_grid, prod(parallel.values()), parallel, stage, nn.CrossEntropyLoss()):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in one], rel=1e-6)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in one], rel=1e-5)
