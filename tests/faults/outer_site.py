"""Faults of a site of the outer loop: updates that differ between sites, and outages that nobody sees."""

from tests.faults.fault import Fault

ODD = "tests/engine/outer/test_odd_sites.py"

OUTER_SITE = (
    Fault(
        name="parameters-of-other-sites-are-skipped",
        about="At period 1 a site skips the update of a parameter that only another site has used, so weights differ.",
        file="engine/step/update.py",
        old="else runtime.reducer.unused - step.used\n",
        new="else runtime.reducer.unused\n",
        tests=(f"{ODD}::test_a_parameter_that_another_site_uses_is_updated_as_in_one_process",),
    ),
    Fault(
        name="outage-of-a-store-is-silent",
        about="A site waits for a store that does not answer, and its log has no word about it.",
        file="engine/outer/http/line.py",
        old="        if silent is not None:\n            raise silent\n",
        new="",
        tests=(
            "tests/engine/outer/http/test_link.py::test_an_absent_store_is_one_sentence_at_the_join_and_no_error_later",
        ),
    ),
    Fault(
        name="outage-warns-at-every-renewal",
        about="The warning about a store that does not answer comes again at every renewal of the lease.",
        file="engine/outer/exchange.py",
        old="                if failed == _WARNED and",
        new="                if failed >= _WARNED and",
        tests=(f"{ODD}::test_an_outage_is_one_warning_and_its_end_one_note",),
    ),
    Fault(
        name="renewal-ends-the-outage-of-a-push",
        about="A store with a full disk renews leases, and the site takes the outage of its push for ended.",
        file="engine/outer/http/connection.py",
        old='        self.outage = next(iter(list(self._in_trouble.values())), "")\n',
        new='        self.outage = ""\n',
        tests=("tests/engine/outer/http/test_link.py::test_a_renewal_describes_a_push_that_the_store_cannot_write",),
    ),
    Fault(
        name="end-waits-for-a-silent-store",
        about="A site that is interrupted while its store does not answer waits for its pushes before it ends.",
        file="engine/outer/exchange.py",
        old="        leave = leave and not self._link.outage\n",
        new="",
        tests=(f"{ODD}::test_the_end_of_a_site_asks_only_a_store_that_answers",),
    ),
)
