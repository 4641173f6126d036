"""Training with products that communicate inside their kernels is that of one process, at the bytes of the plan."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.verify import Parity, verify
from tests.engine.parity.launches import Compared, compare, settings
from tests.engine.parity.tensor_models import HEADS
from tests.kernels.interpreter import repair
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
FUSED = {"overlap": "fused", "pipeline": 1}
SHAPE = DecoderConfig(vocabulary=32, layers=1, width=16, heads=4, context=8)
LAUNCHES = ("launch_gather_product", "launch_product_scatter", "launch_forward_slots")


def trained(parallel: dict[str, Any]) -> tuple[Parity | None, dict[str, int]]:
    """Body of a rank: two steps of two microbatches, and how often each kernel was launched."""
    repair()
    from engine.kernels.gpu.overlap import launches

    launched: Counter[str] = Counter()
    for name in LAUNCHES:
        setattr(launches, name, _counted(name, getattr(launches, name), launched))
    tokens = torch.randint(0, 32, (2, 2, 9), generator=torch.Generator().manual_seed(3))
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]
    config = settings(1, parallel=FUSED | parallel) | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}

    def build() -> Decoder:
        torch.manual_seed(1)
        return Decoder(SHAPE)

    return verify(build, config, batches, loss_sum), dict(launched)


def _counted(name: str, launch: Callable[..., Any], launched: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        launched[name] += 1
        return launch(*args)

    return counting


@pytest.mark.parametrize(
    ("parallel", "launched"),
    [
        # a block gathers and scatters twice each in forward, and the other way round in backward
        ({"tensor": 2, "sequence_parallel": True}, {"launch_gather_product": 16, "launch_product_scatter": 16}),
        ({"tensor": 2}, {"launch_product_scatter": 8}),
        wide({"tensor": 4}, {"launch_product_scatter": 8, "launch_forward_slots": 8}),
    ],
    ids=str,
)
def test_the_decoder_trains_as_one_process(
    run_ranks: RunRanks, parallel: dict[str, Any], launched: dict[str, int]
) -> None:
    for parity, counted in run_ranks(trained, parallel["tensor"], parallel, seconds=200.0):
        assert parity is None or parity.holds(), str(parity)
        assert counted == launched


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "ranks", "changes"),
    [
        (("Llama", "Phi-3", "GPT-2", "Qwen3"), 2, {"parallel": {"sequence_parallel": True}}),
        (("Llama", "GPT-2"), 2, {"zero_optimization": {"stage": 1}}),
        (("Llama", "GPT-2", "Phi-3", "Qwen3"), 4, {"parallel": {"sequence_parallel": True}}),
        (("Llama", "GPT-2"), 4, {}),
    ],
    ids=str,
)
def test_models_train_as_one_process(
    run_ranks: RunRanks, names: tuple[str, ...], ranks: int, changes: dict[str, Any]
) -> None:
    parallel = FUSED | {"tensor": ranks} | changes.get("parallel", {})
    config = settings(1, **changes | {"parallel": parallel})
    for name, result in compare(run_ranks, [f"{name}{HEADS}" for name in names], config).items():
        assert isinstance(result, Compared), f"{name}: {result}"
        assert not result.uncounted, f"{name}: {result.uncounted}"
