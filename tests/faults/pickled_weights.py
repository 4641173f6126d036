"""Faults of pickles of weights in training, of calls that one rank makes alone, and of remarks on batches."""

from tests.faults.fault import Fault

_PICKLED = "tests/engine/build/test_pickled_weights.py"

PICKLED_WEIGHTS = (
    Fault(
        name="an-entry-is-pickled-with-its-bucket",
        about="torch.save of one entry of state_dict() writes all weights of its bucket.",
        file="engine/build/held_module.py",
        old="            lay_apart(entry, storages)\n",
        new="            pass\n",
        tests=(f"{_PICKLED}::test_tied_entries_stay_tied_and_copies_keep_their_values",),
    ),
    Fault(
        name="memory-of-an-entry-is-freed-with-its-bucket",
        about="An entry of a state dict reads freed memory after a bucket of ZeRO 3 has been released.",
        file="zero/flat_buckets.py",
        old="if self.apart or not self.params",
        new="if not self.params",
        tests=("tests/zero/test_flat_buckets.py::test_memory_of_a_sharded_bucket_stays_with_what_lies_apart_in_it",),
    ),
    Fault(
        name="a-rank-that-has-left-is-waited-for",
        about="A save on rank 0 waits to its time-out for a rank whose script has ended.",
        file="parallel/comm/rendezvous.py",
        old='            if self._store.check(["left"]):\n',
        new="            if False:\n",
        tests=(
            "tests/parallel/comm/test_joint_calls.py::test_nobody_waits_for_a_rank_that_has_left_but_for_its_last_call",
        ),
    ),
    Fault(
        name="a-batch-is-looked-at-at-the-start-alone",
        about="A loop that gives one batch for ever is not remarked on if it begins after good steps.",
        file="engine/step/runner.py",
        old="elif self._steps % _EVERY < 2 and",
        new="elif not self._steps and",
        tests=("tests/engine/step/test_remarks.py::test_one_batch_for_ever_is_said_once",),
    ),
)
