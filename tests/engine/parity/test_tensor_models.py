"""Models as they are, shared by tensor ranks, train as in one process; docs/reference/proofs.md has the results.

Every plan is found, proven and carried out; what was sent is what was planned, to the byte. Many models share one
launch of ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from engine.parallel.tensor.plan.tensor_plan import Reason
from tests.engine.parity.launches import Compared, compare, settings
from tests.engine.parity.tensor_models import FOUR, HEADS, UNSEEN
from tests.models import LENGTH
from tests.tables import Table

RunRanks = Callable[..., list[Any]]
Results = Mapping[str, Compared | str]

CORE = ("BLOOM", "Mixtral", "nn.TransformerEncoder")
STANDARD = ("GPT-2", "Llama", "Qwen3", "Gemma", "Mistral", "OPT", "BLOOM", "BERT", "Phi-3", "nanoGPT-like",
            "nn.TransformerEncoder")  # fmt: skip
"""Those with attention and a perceptron one after the other in every block."""
ROWS, WIDTH, BLOCKS, MICROBATCHES = 2, 32, 2, 4


def grid(tp: int, pp: int = 1, stage: int = 0, sequence: bool = False, data: int = 1) -> dict[str, Any]:
    """Settings of a run."""
    axes = {"data": data, "tensor": tp, "pipeline": pp, "sequence_parallel": sequence}
    return settings(pp, parallel=axes, zero_optimization={"stage": stage})


def run(run_ranks: RunRanks, names: Iterable[str], config: Mapping[str, Any]) -> Mapping[str, Compared]:
    """All of ``names``, each as one process and with the planned traffic; results by name without the heads."""
    results = compare(run_ranks, [name + HEADS for name in names], config)
    return {name.removesuffix(HEADS): check(name, result) for name, result in results.items()}


def check(name: str, result: Compared | str) -> Compared:
    """Trained, equal, and nothing sent that was not planned."""
    assert isinstance(result, Compared), f"{name}: {result}"
    assert not result.uncounted, f"{name}: {result.uncounted}"
    return result


def standard_traffic(tp: int) -> dict[str, tuple[int, int]]:
    """(calls, bytes) in a step of what a block and its neighbours send (DESIGN section 7)."""
    one = 2 * 4 * ROWS * LENGTH * WIDTH * (tp - 1) // tp
    rows = 2 * BLOCKS
    calls = {"row outputs": rows, "column inputs": 2 * BLOCKS + 1}  # one more for the head
    return {label: (count * MICROBATCHES, count * MICROBATCHES * one) for label, count in calls.items()}


def check_standard(results: Results, tp: int) -> None:
    """Models with the standard block send what the formula says."""
    for name, result in results.items():
        if name in STANDARD and isinstance(result, Compared):
            labels = result.trained.labels
            views = any(reason.how == "view" for reason in result.trained.reasons)
            for label, expected in standard_traffic(tp).items():
                if not views:
                    assert labels[label] == expected, f"{name} {label}: {labels[label]}, not {expected}"


MIXED = ("Mamba", "Qwen3", "Mistral", "GPT-BigCode", "nanoGPT-like")
"""Own rows beside shared ones, norms of heads, a shared key head, queries and a shared key in one layer, ties."""


@pytest.mark.long
@pytest.mark.parametrize(
    "names, config",
    [
        (MIXED[:1], grid(2)),
        pytest.param(MIXED, grid(2, data=2), marks=pytest.mark.long),
        pytest.param(MIXED, grid(2, 2), marks=pytest.mark.long),
    ],
    ids=["tp2", "dp2 x tp2", "tp2 x pp2"],
)
def test_the_norm_counts_every_element_once(
    run_ranks: RunRanks, names: tuple[str, ...], config: Mapping[str, Any]
) -> None:
    for name, result in run(run_ranks, names, config).items():
        assert result.parity.norm <= 1e-6, f"{name}: {result.parity}"


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.long)])
def test_models_as_they_are_train_over_tensor_ranks(run_ranks: RunRanks, tp: int) -> None:
    check_standard(run(run_ranks, CORE, grid(tp)), tp)


GRIDS: Mapping[str, dict[str, Any]] = {
    "tp2": grid(2),
    "tp4": grid(4),
    "tp2, sequence": grid(2, sequence=True),
    "tp4, sequence": grid(4, sequence=True),
    "tp2 x pp2": grid(2, 2),
}
SAMPLE = ("GPT-2", "Qwen3", "nanoGPT-like")


def cell(result: Compared | str) -> str:
    """A deviation, or that the engine has refused."""
    return "refused" if isinstance(result, str) else f"{result.parity.loss:.0e}"


def how(reasons: Iterable[Reason]) -> str:
    """Of each kind of group, in the order of the forward: how it runs."""
    return (
        "; ".join(dict.fromkeys(f"{short(reason.style) or reason.pattern}: {reason.how}" for reason in reasons))
        or "whole on every rank"
    )


def short(style: str) -> str:
    """The layers without the modules around them."""
    return " -> ".join(", ".join(n.rpartition(".")[2] for n in side.split(", ")) for side in style.split(" -> "))


@pytest.mark.long
@pytest.mark.parametrize("column", GRIDS)
def test_the_table_of_models(run_ranks: RunRanks, tensor_models_table: Table, column: str) -> None:
    config, cells = GRIDS[column], tensor_models_table.cells
    results = compare(run_ranks, list(FOUR), config)
    for full, result in results.items():
        name = full.removesuffix(HEADS)
        if not (isinstance(result, str) and config["parallel"]["sequence_parallel"]):
            checked = check(name, result)
            if column == "tp2":
                cells[name, "how (tp2)"] = how(checked.trained.reasons)
        cells[name, column] = cell(result)
    if not config["parallel"]["sequence_parallel"] and config["parallel"]["pipeline"] == 1:
        check_standard({n.removesuffix(HEADS): r for n, r in results.items()}, config["parallel"]["tensor"])


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_axes_and_stages(run_ranks: RunRanks, tensor_models_table: Table, stage: int) -> None:
    for name, result in run(run_ranks, SAMPLE, grid(2, 2, stage, sequence=stage % 2 == 1, data=2)).items():
        tensor_models_table.cells[name, f"dp2 x tp2 x pp2, ZeRO {stage}"] = cell(result)


@pytest.mark.long
def test_families_that_the_search_was_not_made_with(run_ranks: RunRanks, unseen_models_table: Table) -> None:
    results = compare(run_ranks, list(UNSEEN), grid(2))
    for full, result in results.items():
        name = full.removesuffix(HEADS)
        checked = check(name, result)
        kept = [f"{reason.pattern} {short(reason.style)}: {reason.why}" for reason in checked.trained.reasons
                if reason.how == "replicate"]  # fmt: skip
        unseen_models_table.cells[name, "tp2"] = cell(result)
        unseen_models_table.cells[name, "how"] = how(checked.trained.reasons)
        unseen_models_table.cells[name, "replicated, why"] = "; ".join(kept)
