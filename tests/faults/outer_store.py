"""Faults of the store of the outer loop: orders of merges, deaths of sites, bounds of reads, and crashes."""

from tests.faults.fault import Fault

_FOLDER = "tests/engine/outer/store"
_ARITHMETIC, _RULES = f"{_FOLDER}/test_arithmetic.py", f"{_FOLDER}/test_rules.py"
_REQUESTS, _CRASHES = f"{_FOLDER}/test_requests.py", f"{_FOLDER}/test_crashes.py"
_SOME_CRASHES = f"{_CRASHES}::test_a_crash_at_some_call_of_the_system_changes_no_bit"

OUTER_STORE = (
    Fault(
        name="merges-in-the-order-of-arrival",
        about="The site that pushes first is added first, so the bits of a merge depend on the network.",
        file="engine/outer/store/rules.py",
        old="return tuple(pushes[site].key for site in sorted(pushes))",
        new="return tuple(pushes[site].key for site in pushes)",
        tests=(f"{_ARITHMETIC}::test_no_order_of_arrival_changes_a_bit",),
    ),
    Fault(
        name="clipped-by-the-first-group",
        about="The norm misses the gradients of all parameter groups but the first, so clipping is too weak.",
        file="engine/outer/store/arithmetic.py",
        old="parts = [(values, True) for values in total if values.numel()]",
        new="parts = [(values, True) for values in total[:1] if values.numel()]",
        tests=(f"{_ARITHMETIC}::test_an_optimizer_on_the_store_is_that_of_one_process_to_the_bit",),
    ),
    Fault(
        name="numbers-that-are-not-finite-are-merged",
        about="One site with a NaN destroys the weights of all sites.",
        file="engine/outer/store/arithmetic.py",
        old="used = [each for each in contributions if each.finite]",
        new="used = list(contributions)",
        tests=(f"{_ARITHMETIC}::test_a_push_with_a_number_that_is_not_finite_has_no_effect",),
    ),
    Fault(
        name="experts-placed-from-the-first-on",
        about="The pieces of every expert rank are placed at the first experts.",
        file="engine/outer/store/placement.py",
        old="tensor.narrow(0, part.outer[0], part.outer[1] - part.outer[0])",
        new="tensor.narrow(0, 0, part.outer[1] - part.outer[0])",
        tests=(f"{_ARITHMETIC}::test_sites_on_different_grids_meet_as_whole_ones_do",),
    ),
    Fault(
        name="silent-sites-are-waited-for",
        about="A site whose lease has ended still counts as live, so one dead host hangs all sites.",
        file="engine/outer/store/members.py",
        old="return (life for life in self.lives.values() if life.live)",
        new="return (life for life in self.lives.values() if not life.ended)",
        tests=(f"{_RULES}::test_nobody_waits_for_a_site_that_is_silent_and_it_may_come_back",),
    ),
    Fault(
        name="bounded-reads-one-clock-later",
        about="Under SSP a site takes versions over while it is one push further ahead than configured.",
        file="engine/outer/store/rules.py",
        old="own.clock - slowest <= self.staleness",
        new="own.clock - slowest <= self.staleness + 1",
        tests=(
            f"{_RULES}::test_a_bounded_site_waits_for_the_slowest_live_one",
            f"{_FOLDER}/test_random_sites.py::test_random_sites_read_bounded_versions_and_lose_nothing",
        ),
    ),
    Fault(
        name="clocks-of-returned-sites-are-old",
        about="A site that comes back has the clock of its death, and all others wait until it has caught up.",
        file="engine/outer/store/state.py",
        old="            life.lost = False\n            self.members.credit(life)",
        new="            life.lost = False",
        tests=(f"{_RULES}::test_a_bounded_site_waits_for_the_slowest_live_one",),
    ),
    Fault(
        name="offered-versions-are-forgotten",
        about="A version that ranks of a site still pull vanishes with the next merge.",
        file="engine/outer/store/state.py",
        old="            kept.add(fragment.version)",
        new="            kept = {fragment.version}",
        tests=(f"{_RULES}::test_an_offered_version_stays_until_the_next_offer",),
    ),
    Fault(
        name="gaps-of-pushes-are-accepted",
        about="A push that was lost on its way is noticed by nobody.",
        file="engine/outer/store/store.py",
        old="            if key.seq != own.next:",
        new="            if key.seq < own.next:",
        tests=(f"{_REQUESTS}::test_a_wrong_push_is_refused_and_changes_nothing",),
    ),
    Fault(
        name="moments-missing-in-snapshots",
        about="After a restart the store's optimizer begins with the moments of its first step.",
        file="engine/outer/store/snapshot.py",
        old='        found |= {f"{index}/optimizer/{name}": values',
        new='        found |= {f"{index}/optimizer/{name}": values * 0',
        tests=(f"{_SOME_CRASHES}[bsp]",),
    ),
    Fault(
        name="half-written-lines-stay",
        about="After a crash within a write the next event is appended to half a line, and the journal is lost.",
        file="engine/outer/store/replay.py",
        old="    journal.cut(position)\n",
        new="",
        tests=(_SOME_CRASHES,),
    ),
)
