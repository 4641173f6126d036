"""Events of ranks on several hosts on one clock."""

import json

from engine.watchdog.local_ranks import MOST, TimedEvent, merged_text, perfetto_trace, timed
from tests.engine.watchdog.test_view import event

NOW = 10_000_000_000


def test_events_are_merged_by_their_begin() -> None:
    # the second host was started later, so its clock says less
    ranks = {
        0: timed([event(1, begun=100, ended=2_000_100), event(2, begun=500, ended=0)], wall_offset=4_000_000_000),
        1: timed([event(1, begun=50, ended=60)], wall_offset=4_000_000_200),
    }
    assert ranks[1] == [TimedEvent(4_000_000_250, 4_000_000_260, ranks[1][0].text, "dp")]
    lines = merged_text(ranks, NOW).splitlines()
    assert [line.split("rank ")[1][0] for line in lines] == ["0", "1", "0"]
    assert lines[0].startswith("   -6.000 s  rank 0  gradients over dp (#1 of 'dp'") and lines[0].endswith("  2.000 ms")
    assert lines[2].endswith("not ended")


def test_the_trace_has_a_process_for_each_rank_and_ends_now() -> None:
    ranks = {3: timed([event(1, begun=0, ended=0)], 4_000_000_000)}
    name, span = json.loads(perfetto_trace(ranks, NOW))["traceEvents"]
    assert name["args"] == {"name": "rank 3"} and name["pid"] == span["pid"] == 3
    assert (span["ts"], span["dur"], span["tid"]) == (4_000_000.0, 6_000_000.0, "dp")


def test_only_the_newest_are_told() -> None:
    told = timed([event(number, begun=number, ended=number) for number in range(1, 500)], 0)
    assert len(told) == MOST and told[-1].begun == 499
