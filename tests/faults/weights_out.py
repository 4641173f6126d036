"""Faults of published weights: versions that mix, bytes that are sent twice or for nothing, groups that divide."""

from tests.faults.fault import Fault

OUT, TESTS = "engine/weights_out", "tests/engine/weights_out"

WEIGHTS_OUT = (
    Fault(
        name="unchecked-blocks",
        about="A damaged block is taken over.",
        file=f"{OUT}/reader.py",
        old="                if digest_of(part) != hashes[number][block]:\n",
        new="                if False:\n",
        tests=(f"{TESTS}/test_transfer.py::test_damaged_blocks_are_repeated_and_never_taken_over",),
    ),
    Fault(
        name="image-of-two-versions",
        about="A reader of a version that is replaced gets blocks of the next one.",
        file=f"{OUT}/image.py",
        old="        if number < self._number:\n",
        new="        if number < self._number - 1:\n",
        tests=(f"{TESTS}/test_kills.py::test_a_version_that_is_replaced_while_it_is_read_is_dropped",),
    ),
    Fault(
        name="blocks-into-live-tensors",
        about="Blocks are written to the live tensors, so that a sender that dies leaves a mix.",
        file=f"{OUT}/receiver.py",
        old="make=lambda index: torch.empty(live[index].shape, dtype=live[index].dtype).copy_(live[index]),\n",
        new="make=lambda index: live[index],\n",
        tests=(f"{TESTS}/test_kills.py::test_a_sender_that_is_killed_leaves_the_old_version_or_the_new_one",),
    ),
    Fault(
        name="own-decision-of-a-late-receiver",
        about="A receiver at its deadline keeps the old version, though the group has decided for the new one.",
        file=f"{OUT}/commit.py",
        old="                    decision = self._decide(attempt, _ABORT)\n",
        new="                    decision = _ABORT\n",
        tests=(f"{TESTS}/test_commit.py::test_the_first_decision_counts_for_all",),
    ),
    Fault(
        name="commit-before-all-are-prepared",
        about="A version is decided for before the last receiver of the group has it.",
        file=f"{OUT}/commit.py",
        old="for i in range(self.members)):\n",
        new="for i in range(self.members - 1)):\n",
        tests=(f"{TESTS}/test_commit.py::test_nobody_commits_before_all_are_prepared",),
    ),
    Fault(
        name="unchanged-blocks-sent",
        about="Blocks of unchanged tensors are sent again with each version.",
        file=f"{OUT}/reader.py",
        old="lacked.append(np.flatnonzero(own != theirs) if own is not None else np.arange(flow.blocks))",
        new="lacked.append(np.arange(flow.blocks))",
        tests=(f"{TESTS}/test_transfer.py::test_one_changed_layer_is_sent_alone",),
    ),
    Fault(
        name="stale-hashes-of-an-image",
        about="Hashes of an earlier version are served for a tensor that was written again.",
        file=f"{OUT}/image.py",
        old="        if found is not None and written == stamp:\n",
        new="        if found is not None:\n",
        tests=(f"{TESTS}/test_transfer.py::test_one_changed_layer_is_sent_alone",),
    ),
    Fault(
        name="versions-of-two-runs",
        about="A trainer that has started again completes a version of its last run, which has the same number.",
        file=f"{OUT}/sender.py",
        old="    if call.run != run:\n",
        new="    if False:\n",
        tests=(
            f"{TESTS}/test_transfer.py::test_a_trainer_that_starts_again_does_not_complete_a_version_of_its_last_run",
        ),
    ),
    Fault(
        name="strangers-read-weights",
        about="A request with a wrong token is answered.",
        file=f"{OUT}/sender.py",
        old='        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._token):\n',
        new="        if False:\n",
        tests=(f"{TESTS}/test_server.py::test_a_token_is_needed_where_there_is_one",),
    ),
)
