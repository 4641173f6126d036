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
    Fault(
        name="a-failed-send-closes-before-the-last-message",
        about="A host whose hub has just closed loses the cause of the hang, and blames another rank.",
        file="engine/watchdog/exchange.py",
        old='self._outward, self._broken = b"", True',
        new="self.close()",
        tests=("tests/engine/watchdog/test_exchange.py::test_the_last_message_of_a_hub_that_has_closed_is_read",),
    ),
)
