"""Tables of measured seconds: between sizes, beyond them, and through JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.planning.host_step.host_rates import (
    EngineSeconds,
    HostRates,
    SecondsTable,
    load_host_rates,
    measured_link,
    typical_rates,
)

LINE = SecondsTable(sizes=((10.0, 100.0, 1000.0),), seconds=(1e-6, 4e-6, 4e-5))
PLANE = SecondsTable(sizes=((8.0, 64.0), (8.0, 64.0)), seconds=(1.0, 8.0, 8.0, 32.0))


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (10, 1e-6), (100, 4e-6), (1000, 4e-5),
        (10**2.5, 4e-8 * 10**2.5),  # both neighbours take 4e-8 for a unit
        (10**1.5, (1e-7 * 4e-8) ** 0.5 * 10**1.5),  # half way in the logarithm
        (10**5, 4e-8 * 10**5),  # beyond: as at the edge
        (1, 1e-6), (0, 1e-6),  # nothing takes less than the least
    ],
)  # fmt: skip
def test_between_and_beyond_what_was_measured(size: float, seconds: float) -> None:
    assert LINE.at(size) == pytest.approx(seconds)


def test_two_directions() -> None:
    assert [PLANE.at(a, b) for a in (8, 64) for b in (8, 64)] == pytest.approx(PLANE.seconds)
    middle = 8 * 8**0.5
    assert PLANE.at(middle, 8) == pytest.approx(middle / 8)  # the same for a unit at both ends
    assert PLANE.at(64, middle) == pytest.approx((8 / 512 * 32 / 4096) ** 0.5 * 64 * middle)


def test_a_link_counts_what_a_rank_sends() -> None:
    link = measured_link(LINE, 0.5)
    assert link.seconds(2, 100) == pytest.approx(2 * LINE.at(100))  # two calls of 50 sent bytes, of tensors of 100
    assert link.seconds(0, 0) == 0 and link.latency == 1e-6 and link.rate == pytest.approx(500 / 4e-5)


RATES = HostRates(
    ranks=2,
    operators={"add": LINE, "product nt": PLANE},
    collectives={"dp all_reduce": LINE},
    overlap=0.5,
    engine=EngineSeconds(step=1.0, microbatch=2.0, operator=3.0),
)


def test_the_median_of_each_number_of_several_rounds() -> None:
    tables = [replace(LINE, seconds=seconds) for seconds in ((1.0, 5.0, 3.0), (2.0, 4.0, 9.0), (3.0, 6.0, 1.0))]
    rounds = [
        replace(
            RATES, overlap=overlap, operators={"add": table}, collectives={"dp all_reduce": table},
            engine=EngineSeconds(step=overlap, microbatch=1 - overlap, operator=7.0, gather=2 * overlap),
        )
        for table, overlap in zip(tables, (0.1, 0.9, 0.4), strict=True)
    ]  # fmt: skip
    found = typical_rates(rounds)
    assert found.operators["add"] == found.collectives["dp all_reduce"] == replace(LINE, seconds=(2.0, 5.0, 3.0))
    assert (found.ranks, found.overlap, found.engine.step, found.engine.operator) == (2, 0.4, 0.4, 7.0)
    assert found.engine.microbatch == pytest.approx(0.6) and found.engine.gather == pytest.approx(0.8)


def test_an_operator_that_was_not_measured_takes_what_a_sum_takes() -> None:
    assert RATES.seconds("unheard of", 20, 5) == LINE.at(100)
    assert RATES.seconds("product nt", 8, 8) == pytest.approx(1.0)


def test_rates_go_through_a_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(json.dumps({"name": "here", "host": RATES.as_json()}))
    assert load_host_rates(path) == RATES
    path.write_text('{"name": "a GPU"}')
    assert load_host_rates(path) is None and load_host_rates(Path("h100")) is None
    for broken in ({}, RATES.as_json() | {"operators": {"add": {"sizes": [[1, 2]], "seconds": [1]}}}):
        path.write_text(json.dumps({"host": broken}))
        with pytest.raises(ConfigError, match='has an entry "host" that is not whole'):
            load_host_rates(path)
