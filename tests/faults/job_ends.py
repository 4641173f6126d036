"""Faults of the end of a job: processes that outlive it."""

from tests.faults.fault import Fault

JOB_ENDS = (
    Fault(
        name="a-monitor-waits-for-ranks-that-have-gone",
        about="A monitor whose ranks have closed before its first look waits for them and hangs, and so do pipes.",
        file="engine/watchdog/monitor.py",
        old="over = all(",
        new="over = bool(own) and all(",
        tests=(
            "tests/engine/watchdog/test_short_jobs.py::"
            "test_a_monitor_ends_when_its_ranks_have_closed_before_its_first_look",
        ),
    ),
)
