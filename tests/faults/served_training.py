"""Planted faults of the service's ranks: training calls, losses of clients, the command loop, tensors."""

from tests.faults.fault import Fault

_SERVING, _TESTS = "engine/serving", "tests/engine/serving"

SERVED_TRAINING = (
    Fault(
        name="sums-of-losses-are-means",
        about="Each datum weighs one, so that the gradient of a client's sum is divided by its data.",
        file=f"{_SERVING}/training.py",
        old="engine.backward((loss, 1.0 if first else 0.0))",
        new="engine.backward((loss, 1.0))",
        tests=(f"{_TESTS}/test_training.py::test_every_grid_trains_as_torch_does[one]",),
    ),
    Fault(
        name="data-start-at-rank-0-in-each-request",
        about="A request's first datum belongs to data rank 0, so that bits depend on the cut of requests.",
        file=f"{_SERVING}/training.py",
        old="first = self._seen % ranks",
        new="first = 0",
        tests=(f"{_TESTS}/test_training.py::test_bits_do_not_depend_on_how_requests_are_cut[dp2 ZeRO-1]",),
    ),
    Fault(
        name="a-retained-forward-outlives-an-update",
        about="A forward before an update serves a backward after it, with the gradient of old weights.",
        file=f"{_SERVING}/tensor_calls.py",
        old="following - one.version > self._staleness:",
        new="following - one.version > self._staleness + 1:",
        tests=(f"{_TESTS}/test_tensor_door.py::test_two_forwards_before_the_first_backward_give_both_gradients",),
    ),
    Fault(
        name="late-backwards-use-the-newest-weights",
        about="A backward after an update differentiates its forward at the newest weights.",
        file="engine/step/held_weights.py",
        old="zip(self._buckets, held.copies or (), strict=False)",
        new="zip(self._buckets, (), strict=False)",
        tests=(
            f"{_TESTS}/test_retained.py::test_a_backward_within_the_staleness_runs_on_the_weights_of_its_forward[tp2]",
            "tests/engine/step/test_held_weights.py::test_a_late_backward_has_the_gradient_of_its_own_weights[one]",
        ),
    ),
    Fault(
        name="gathered-weights-outlive-the-exchange",
        about="A late backward uses weights that the pass before has left gathered (ZeRO 3).",
        file="engine/step/held_weights.py",
        old="            self._gatherer.end()  # what a pass has left gathered has the other weights\n",
        new="            pass\n",
        tests=(
            "tests/engine/step/test_held_weights.py::test_a_late_backward_has_the_gradient_of_its_own_weights"
            "[dp2 ZeRO-3]",
        ),
    ),
    Fault(
        name="held-weights-are-never-freed",
        about="The copy of a version stays after its last late backward.",
        file="engine/step/held_weights.py",
        old="held, self._present = list(self._present), WeakSet()",
        new="held = self._kept = list(self._present)",
        tests=("tests/engine/step/test_held_weights.py::test_holds_of_one_version_share_a_copy_that_ends_with_them",),
    ),
    Fault(
        name="updates-copy-weights-for-dropped-forwards",
        about="Each update of a service without staleness copies the weights.",
        file=f"{_SERVING}/tensor_calls.py",
        old="            del loss, retained  # its weights need no copy\n",
        new="",
        tests=(f"{_TESTS}/test_retained.py::test_an_update_copies_weights_only_for_forwards_that_may_still_use_them",),
    ),
    Fault(
        name="held-bytes-of-the-first-rank",
        about="Retained graphs of other ranks than the first do not count.",
        file=f"{_SERVING}/loop.py",
        old='max(int.from_bytes(end[:_WIDTH], "little") for end in ends)',
        new='int.from_bytes(ends[0][:_WIDTH], "little")',
        tests=(f"{_TESTS}/test_loop.py::test_all_ranks_run_commands_in_one_order_and_a_split_end_spoils_the_model",),
    ),
    Fault(
        name="graphs-are-not-counted",
        about="Only inputs and outputs of a retained forward count, and its graph does not.",
        file=f"{_SERVING}/tensor_calls.py",
        old="        saved.append(tensor)\n",
        new="",
        tests=(f"{_TESTS}/test_retained.py::test_live_storages_are_counted_once_and_end_with_their_forwards",),
    ),
    Fault(
        name="losses-write-into-tensors",
        about="An uploaded loss passes out= and writes into the inputs of another call.",
        file=f"{_SERVING}/loss_graph.py",
        old='_FORBIDDEN = frozenset({"out", ',
        new="_FORBIDDEN = frozenset({",
        tests=(f"{_TESTS}/test_loss_graph.py::test_what_a_loss_may_not_do_is_one_sentence",),
    ),
    Fault(
        name="losses-take-all-memory",
        about="An uploaded loss makes results of any size.",
        file=f"{_SERVING}/loss_graph.py",
        old="MOST_ELEMENTS = 1 << 24",
        new="MOST_ELEMENTS = 1 << 62",
        tests=(f"{_TESTS}/test_loss_graph.py::test_what_a_loss_may_not_do_is_one_sentence",),
    ),
    Fault(
        name="half-failed-commands-succeed",
        about="A command that failed on one rank only counts as done, and ranks go on with different weights.",
        file=f"{_SERVING}/loop.py",
        old="same = ends is None or len(set(ends)) == 1",
        new="same = True",
        tests=(f"{_TESTS}/test_loop.py::test_all_ranks_run_commands_in_one_order_and_a_split_end_spoils_the_model",),
    ),
    Fault(
        name="snapshots-between-forward-and-backward",
        about="A snapshot covers a retained forward, so that its backward fails after a restart.",
        file=f"{_SERVING}/bookkeeping/line.py",
        old="return not self.has_gradient and not self.tickets",
        new="return not self.has_gradient",
        tests=(f"{_TESTS}/test_ledger.py::test_a_line_is_clean_without_gradient_and_retained_forward",),
    ),
    Fault(
        name="earlier-weights-sampled-as-the-last",
        about="A client that names earlier weights gets tokens of the ones in the vLLM server.",
        file=f"{_SERVING}/vllm_samples.py",
        old="if command.source != self._name:",
        new="if False:",
        tests=(f"{_TESTS}/test_vllm_samples.py::test_the_weights_saved_last_are_sampled_and_others_are_refused",),
    ),
    Fault(
        name="log-probabilities-after-temperature",
        about="Clients get vLLM's log-probabilities after temperature as those under the model.",
        file=f"{_SERVING}/vllm_samples.py",
        old="if not self._is_raw and",
        new="if False and",
        tests=(f"{_TESTS}/test_vllm_samples.py::test_a_request_that_vllm_would_answer_differently_is_refused",),
    ),
)
