"""Faults of what the ranks of a replica must have alike: sizes of the whole, host random numbers, copies."""

from tests.faults.fault import Fault

COPIES = "tests/zero/reduce/test_weight_copies.py"
SIZES = "tests/engine/parity/test_whole_sizes.py"
HOST = "tests/engine/parity/test_host_randomness.py"

REPLICA_COPIES = (
    Fault(
        name="loss-reads-the-size-of-a-shard",
        about="A loss that divides by the vocabulary divides by the rows of one tensor rank.",
        file="parallel/model/whole_sizes.py",
        old='return asking.partition(".")[0] not in _COMPUTES_WITH_PARTS',
        new='return asking.partition(".")[0] in _COMPUTES_WITH_PARTS',
        tests=(f"{SIZES}::test_glue_and_loss_read_whole_sizes",),
    ),
    Fault(
        name="heads-outside-blocks-are-local",
        about="Glue that reads the number of heads of a block gets those of one tensor rank.",
        file="parallel/tensor/layers/size_answers.py",
        old="values[_WHOLE][name] if values[_RUNNING].asks_for_whole() else values[name]",
        new="values[name]",
        tests=(f"{SIZES}::test_glue_and_loss_read_whole_sizes",),
    ),
    Fault(
        name="host-draws-in-order-of-the-rank",
        about="A stage draws on the host after what it has drawn itself, so stages that skip blocks draw otherwise.",
        file="parallel/model/rng_streams.py",
        old="self.keyed = self._drawn or first",
        new="self.keyed = False",
        tests=(f"{HOST}::test_host_random_numbers_do_not_depend_on_the_grid",),
    ),
    Fault(
        name="block-draws-anew-when-it-runs-again",
        about="A recomputed block scales by other numbers of NumPy than its forward, and its gradients are wrong.",
        file="parallel/activation_checkpointing/blocks.py",
        old="with entered() if calls > 1 else",
        new="with entered() if calls > 2 else",
        tests=(f"{HOST}::test_host_random_numbers_do_not_depend_on_the_grid",),
    ),
    Fault(
        name="copies-are-not-compared-later",
        about="Weights of tensor ranks that begin to differ after the first steps drift apart, and nobody says it.",
        file="engine/step/rank_parts.py",
        old="due = self._steps > 2 and (",
        new="due = self._steps == 2 and (",
        tests=(f"{COPIES}::test_a_copy_that_differs_is_named_once",),
    ),
    Fault(
        name="signs-of-life-after-the-timeout",
        about="A search ends the start of a run whose timeout is shorter than the time between two signs of life.",
        file="parallel/comm/world.py",
        old="return min(_PATIENCE_SECONDS, group_timeout().total_seconds() / 4)",
        new="return _PATIENCE_SECONDS",
        tests=("tests/parallel/comm/test_agreement.py::test_a_short_timeout_of_the_environment_does_not_end_it",),
    ),
)
