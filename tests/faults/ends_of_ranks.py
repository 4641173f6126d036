"""Faults of the time that ranks have to end by themselves before the watchdog kills them."""

from tests.faults.fault import Fault

_ENDS = "tests/engine/watchdog/test_ends_of_ranks.py"

ENDS_OF_RANKS = (
    Fault(
        name="ranks-die-before-they-name-the-cause",
        about="The watchdog kills the other ranks while they still find the cause and close their groups.",
        file="engine/watchdog/monitor.py",
        old="_LEAVE_SECONDS = 15.0\n",
        new="_LEAVE_SECONDS = 4.0\n",
        tests=(f"{_ENDS}::test_the_time_exceeds_that_of_a_rank_to_find_the_cause_and_to_close",),
    ),
    Fault(
        name="the-last-rank-of-the-first-host-ends-all-hosts",
        about="Ranks of other hosts are killed as soon as those of the first host have ended.",
        file="engine/watchdog/monitor.py",
        old='self.cause, self.ends_at = message["end"], time.monotonic() + message.get("seconds", 0.0)\n',
        new='self.cause, self.ends_at = message["end"], time.monotonic()\n',
        tests=(f"{_ENDS}::test_another_host_kills_its_ranks_when_that_time_is_over",),
    ),
    Fault(
        name="ranks-are-killed-without-a-word",
        about="Nothing says that the watchdog has killed a rank.",
        file="engine/watchdog/monitor.py",
        old="        if running := self.local.running:\n",
        new="        if running := list[int]():\n",
        tests=(f"{_ENDS}::test_a_line_names_the_ranks_that_are_killed_and_the_cause",),
    ),
)
