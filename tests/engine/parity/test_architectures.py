"""Models as they are, cut into pipeline stages, train as in one process; docs/reference/proofs.md has the results.

Many models share one launch of ranks. What a model cannot is a sentence, the same on every rank.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.parity.architectures import ALL, HUGGING_FACE, OWN, REFUSED, WIDE
from tests.engine.parity.launches import Compared, compare, settings
from tests.tables import Table

RunRanks = Callable[..., list[Any]]

WHY: Mapping[str, str] = {
    "GRU": "but its forward calls only 0 blocks",
    "glue that reads content": "reads the content of a tensor on the host (__bool__) between units",
}


def check(results: Mapping[str, Compared | str], pp: int) -> None:
    """Those that can be cut have been trained, all others say why."""
    for name, result in results.items():
        if name in REFUSED:
            assert isinstance(result, str) and WHY[name] in result, f"{name}: {result}"
        else:
            assert isinstance(result, Compared), f"{name}: {result}"
            received = result.trained.values
            assert len(received) == pp - 1 and all(received), "every stage but the first receives something"


ELSEWHERE = ("GPT-2", "Llama", "T5", "nanoGPT-like", "skips and gates", "Qwen3", "Gemma", "GPT-NeoX")
"""Rows of ``test_covering_array`` train them, or models that pass the same tensors between their blocks."""
CORE = {
    2: tuple(name for name in (*HUGGING_FACE, *OWN, *REFUSED) if name not in ELSEWHERE)[::3],
    4: ("T5", "Mixtral", "ALBERT", "U-Net", "skips and gates"),
}


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.long)])
def test_models_as_they_are_train_over_stages_as_in_one_process(run_ranks: RunRanks, pp: int) -> None:
    check(compare(run_ranks, CORE[pp], settings(pp)), pp)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_table_of_models(run_ranks: RunRanks, architectures_table: Table) -> None:
    names = [*HUGGING_FACE, *WIDE, *OWN, *REFUSED]
    by_pp = {pp: compare(run_ranks, names, settings(pp)) for pp in (2, 4)}
    virtual = {
        f"pp2, {kind}": compare(run_ranks, names, settings(2, parallel={"schedule": kind, "virtual_stages": 2}))
        for kind in ("interleaved", "zb-v")
    }
    cells = architectures_table.cells
    for name in names:
        special = ALL[name].special
        for pp, results in by_pp.items():
            check({name: results[name]}, pp)
            result = results[name]
            cells[name, f"pp{pp}"] = "refused" if isinstance(result, str) else f"{result.parity.loss:.0e}"
            special = special or str(result).replace(f"{Path.cwd()}/", "")
        for column, results in virtual.items():
            check({name: results[name]}, 4)
            result = results[name]
            cells[name, column] = "refused" if isinstance(result, str) else f"{result.parity.loss:.0e}"
        for pp, results in by_pp.items():
            result = results[name]
            numbers = "" if isinstance(result, str) else ", ".join(map(str, result.trained.values))
            cells[name, f"values, pp{pp}"] = numbers
        widest = by_pp[4][name]
        cells[name, "bytes, pp4"] = "" if isinstance(widest, str) else ", ".join(map(str, widest.trained.bytes))
        cells[name, "what is special"] = special
