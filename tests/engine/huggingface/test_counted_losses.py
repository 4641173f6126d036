"""A model may take the number of items of a step and ignore it: the Trainer's loss is the host's on every grid."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.huggingface.counted_models import MODELS, Counted, CountedRun, run_counted

HALF = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
GRIDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp2": (1, {}),
    "zero3": (1, {"zero_optimization": {"stage": 3}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2 x pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "dp2 x pp2": (2, {"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 1}}),
}
"""Ranks of a replica, and the configuration."""
TWO_REPLICAS = ("dp2", "zero3", "dp2 x pp2")
pytestmark = pytest.mark.long  # every run imports transformers' Trainer in each rank


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Counted]]:
    """The host alone on one process, and on two."""
    folder = str(tmp_path_factory.mktemp("host"))
    return {
        ranks: run_counted(CountedRun(folder=folder, models=tuple(MODELS), arguments=HALF if ranks == 2 else {}), ranks)
        for ranks in (1, 2)
    }


@pytest.mark.parametrize("grid", GRIDS)
def test_losses_norms_and_weights_are_those_of_the_host_alone(
    grid: str, hosts: dict[int, dict[str, Counted]], tmp_path: Any
) -> None:
    """Of models that divide by the number of items, ignore it, or divide a part; the last step has one microbatch."""
    replica, config = GRIDS[grid]
    replicas = 2 if grid in TWO_REPLICAS else 1
    run = CountedRun(
        folder=str(tmp_path), models=tuple(MODELS), config=config, arguments=HALF if replicas == 2 else {}
    )  # fmt: skip
    for name, found in run_counted(run, replica * replicas).items():
        host = hosts[replicas][name]
        assert not found.error and len(found.losses) == 4, (name, found.error)
        assert found.losses == pytest.approx(host.losses, rel=1e-5), name
        assert found.norms == pytest.approx(host.norms, rel=1e-4), name
        # the balance of experts couples the rows of a microbatch, and evaluation makes two of six rows
        assert found.evaluated == pytest.approx(host.evaluated, rel=1e-3 if name == "mixture" else 1e-5), name
        for key, value in found.weights.items():
            assert abs(value - host.weights[key]).max() < 1e-5, (name, key)


def test_a_mean_is_refused_the_rows_that_lack_and_a_sum_is_not(tmp_path: Any) -> None:
    """26 rows end with two, of microbatches of four; only the loss itself tells a model that ignores the number."""
    run = CountedRun(folder=str(tmp_path), models=("bert", "sum of own"), config=GRIDS["pp2"][1], rows=26)
    host = run_counted(CountedRun(folder=str(tmp_path), models=("sum of own",), rows=26), 1)
    found = run_counted(run, 2)
    assert "a microbatch of 2 of 4 rows" in found["bert"].error and "dataloader_drop_last" in found["bert"].error
    assert found["sum of own"].losses == pytest.approx(host["sum of own"].losses, rel=1e-5)


def test_an_evaluation_weighs_the_microbatches_of_a_causal_mean_by_its_shifted_labels(tmp_path: Any) -> None:
    """Six ragged rows are two microbatches on a pipeline, and one forward of the host."""
    host, found = (
        run_counted(CountedRun(folder=str(tmp_path), models=("llama of means",), config=config, rows=24), ranks)
        for ranks, config in ((1, None), GRIDS["pp2"])
    )
    assert found["llama of means"].evaluated == pytest.approx(host["llama of means"].evaluated, rel=1e-6)
