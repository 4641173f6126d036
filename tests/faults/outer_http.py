"""Faults of the outer loop's transport: requests that come twice, late or damaged, and requests of strangers."""

from tests.faults.fault import Fault

HTTP = "engine/outer/http"
TESTS = "tests/engine/outer/http"
REFUSED = f"{TESTS}/test_refusals.py::test_a_refused_request_has_a_status_and_a_sentence_and_changes_nothing"

OUTER_HTTP = (
    Fault(
        name="another-body-counts-as-repeated",
        about="A push that repeats a number with another body gets the reply of the first one.",
        file=f"{HTTP}/bodies.py",
        old="if last is not None and last[:2] == (key, whole):",
        new="if last is not None and last[0] == key:",
        tests=(REFUSED,),
    ),
    Fault(
        name="damaged-body-is-merged",
        about="A body whose ranges fit but whose whole is damaged reaches the merge.",
        file=f"{HTTP}/bodies.py",
        old="        if digest(upload.data) != part.whole:\n",
        new="        if len(upload.data) != part.total:\n",
        tests=(REFUSED,),
    ),
    Fault(
        name="doubled-range-counts-twice",
        about="A range that the network doubles is added to its body twice.",
        file=f"{HTTP}/bodies.py",
        old="        if part.offset == upload.arrived:\n",
        new="        if part.offset <= upload.arrived:\n",
        tests=(f"{TESTS}/test_bodies.py::test_a_doubled_and_a_late_range_change_nothing",),
    ),
    Fault(
        name="late-offer-moves-on",
        about="A late double of a request for an offer ends the version that the ranks of the site pull.",
        file=f"{HTTP}/server.py",
        old="        if latest is not None and call.asked <= latest[0]:\n",
        new="        if latest is not None and call.asked < latest[0]:\n",
        tests=(f"{TESTS}/test_link.py::test_a_late_double_of_an_offer_does_not_end_the_version_that_is_pulled",),
    ),
    Fault(
        name="repeated-join-starts-two-lives",
        about="A join whose reply is lost starts a second life, which ends the first one.",
        file=f"{HTTP}/server.py",
        old="        if joined is None or attempt != call.attempt:\n",
        new="        if joined is None or attempt:\n",
        tests=(f"{TESTS}/test_refusals.py::test_a_repeated_join_starts_one_life",),
    ),
    Fault(
        name="no-token-is-a-token",
        about="A request without a token is served.",
        file=f"{HTTP}/server.py",
        old="            if not hmac.compare_digest(given, self._token):\n",
        new="            if given and not hmac.compare_digest(given, self._token):\n",
        tests=(f"{TESTS}/test_refusals.py::test_without_the_token_nothing_is_read",),
    ),
    Fault(
        name="full-disk-loses-the-body",
        about="A body that the store cannot write because its disk is full has to be sent again, over a slow network.",
        file=f"{HTTP}/server.py",
        old="            if error.status < _IN_TROUBLE:\n",
        new="            if error.status:\n",
        tests=(f"{TESTS}/test_refusals.py::test_a_full_disk_is_one_sentence_and_the_push_follows_later",),
    ),
    Fault(
        name="body-size-is-not-checked",
        about="A body of any size is read into memory.",
        file=f"{HTTP}/server.py",
        old="        if part.total != size:\n",
        new="        if part.total < size:\n",
        tests=(REFUSED,),
    ),
    Fault(
        name="private-networks-need-no-token",
        about="A store without a token serves every host of a private network.",
        file="engine/web/sockets.py",
        old="        return ip_address(host).is_loopback\n",
        new="        return ip_address(host).is_private\n",
        tests=(f"{TESTS}/test_service.py::test_a_public_address_needs_a_token",),
    ),
    Fault(
        name="replies-wait-for-acknowledgements",
        about="Each reply of a store waits 40 ms for a delayed acknowledgement.",
        file="engine/web/sockets.py",
        old="    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n",
        new="",
        tests=(f"{TESTS}/test_service.py::test_replies_do_not_wait_for_delayed_acknowledgements",),
    ),
    Fault(
        name="leases-end-during-a-merge",
        about="A merge that lasts longer than a lease ends the lives of sites that have renewed theirs meanwhile.",
        file=f"{HTTP}/server.py",
        old="            await asyncio.get_running_loop().run_in_executor(self._thread, _end_of_queue)\n",
        new="",
        tests=(f"{TESTS}/test_link.py::test_a_renewal_during_a_long_merge_counts_before_leases_end",),
    ),
)
