"""Faults of schedules, of messages between stages, and of what a stage keeps."""

from tests.faults.fault import Fault

_EXECUTOR = "tests/parallel/pipeline/runtime/test_executor.py"

PIPELINE = (
    Fault(
        name="one-warm-up-forward-too-few",
        about="1F1B runs one forward too few ahead, so every rank but the last stands idle in each step.",
        file="parallel/pipeline/schedule/one_f_one_b.py",
        old="_one_for_one(forwards, backwards, ranks - stage - 1)",
        new="_one_for_one(forwards, backwards, max(ranks - stage - 2, 0))",
        tests=(
            "tests/parallel/pipeline/schedule/test_schedule.py::test_one_f_one_b_runs_ahead_by_the_ranks_that_follow",
        ),
    ),
    Fault(
        name="gpipe-backwards-in-reverse",
        about="GPipe sums the gradients of microbatches in reverse, so a run no longer repeats that of one process.",
        file="parallel/pipeline/schedule/one_f_one_b.py",
        old="_run(Op.BACKWARD, stage, every)",
        new="_run(Op.BACKWARD, stage, every[::-1])",
        tests=(
            "tests/parallel/pipeline/schedule/test_kinds.py"
            "::test_gradients_of_gpipe_and_looped_bfs_add_up_in_the_order_of_one_process",
        ),
    ),
    Fault(
        name="order-of-messages-not-checked",
        about="A schedule file whose stages take microbatches in different orders trains on each other's activations.",
        file="parallel/pipeline/schedule/validate.py",
        old="        rules.order(rules.with_rendezvous(receives_ahead))\n    _check_message_order(schedule)\n",
        new="        rules.order(rules.with_rendezvous(receives_ahead))\n",
        tests=(
            "tests/parallel/pipeline/schedule/test_validate.py::test_messages_are_taken_in_the_order_in_which_they_are_sent",
        ),
    ),
    Fault(
        name="send-released-too-early",
        about="A rank waits for a send that its receiver has not offered to take, and an interleaved pipeline hangs.",
        file="parallel/pipeline/schedule/simulate.py",
        old="offer = max(taker - receives_ahead, rules.rows[there].start)",
        new="offer = rules.rows[there].start",
        tests=(
            "tests/parallel/pipeline/schedule/test_send_completion.py::test_a_message_that_waits_long_is_let_go_late",
        ),
    ),
    Fault(
        name="receives-not-offered-ahead",
        about="A rank offers a receive only when it needs it, and stages that send to each other may stand still.",
        file="parallel/pipeline/runtime/executor.py",
        old="row.actions[index : min(index + 1 + RECEIVES_AHEAD, part.stop)]",
        new="row.actions[index : index + 1]",
        tests=(f"{_EXECUTOR}::test_receives_are_offered_early_and_sends_waited_for_when_they_are_released",),
    ),
    Fault(
        name="gradient-of-one-reader-only",
        about="A value that two later stages read gets the gradient of one of them.",
        file="parallel/pipeline/runtime/executor.py",
        old="grads[message.value] = grads[message.value] + grad if message.value in grads else grad",
        new="grads[message.value] = grad",
        tests=(f"{_EXECUTOR}::test_any_schedule_gives_every_gradient_of_the_uncut_model",),
    ),
    Fault(
        name="gradients-added-in-place",
        about="Gradients are added into the memory of one that another stage of the rank still uses.",
        file="parallel/pipeline/runtime/executor.py",
        old="grads[message.value] = grads[message.value] + grad if message.value in grads else grad",
        new="grads[message.value] = grads[message.value].add_(grad) if message.value in grads else grad",
        tests=(f"{_EXECUTOR}::test_a_gradient_that_stages_of_one_rank_share_is_added_to_none",),
    ),
    Fault(
        name="weight-gradients-never-computed",
        about="A weight gradient that a zero-bubble schedule has deferred is dropped, so those layers do not learn.",
        file="parallel/pipeline/runtime/split_backward.py",
        old="                take(name, grad)\n",
        new="                take(name, torch.zeros_like(grad))\n",
        tests=(
            "tests/parallel/pipeline/runtime/test_split_backward.py::test_two_parts_give_the_gradients_of_a_whole_backward",
        ),
    ),
    Fault(
        name="receive-buffer-reused-too-early",
        about="The memory of a received activation is reused while the model still holds it.",
        file="parallel/pipeline/runtime/transport.py",
        old="own is not None and _names(own) <= _OURS",
        new="own is not None",
        tests=(
            "tests/parallel/pipeline/runtime/test_receive_buffers.py::test_what_a_model_autograd_or_a_message_keeps_is_left_to_them",
        ),
    ),
    Fault(
        name="deferred-input-overwritten",
        about="A deferred weight gradient is computed from an activation that the model has overwritten since.",
        file="parallel/pipeline/runtime/split_backward.py",
        old="if _version(work.compute) != work.version:",
        new="if _version(work.compute) < work.version:",
        tests=(
            "tests/parallel/pipeline/runtime/test_split_backward.py::test_what_is_written_while_it_waits_is_not_used",
        ),
    ),
    Fault(
        name="computed-ahead-and-forgotten",
        about="A weight gradient that was computed while a collective travelled is dropped.",
        file="parallel/pipeline/runtime/split_backward.py",
        old="while self._done or self._work:\n            name, grad = self._done.popleft() if self._done else ",
        new="while self._work:\n            name, grad = ",
        tests=(
            "tests/parallel/pipeline/runtime/test_split_backward.py"
            "::test_what_is_computed_ahead_is_the_same_to_the_bit_and_nobody_sees_it",
        ),
    ),
    Fault(
        name="computed-ahead-in-a-foreign-mode",
        about="Selective recomputation of one microbatch takes the weight gradient of another for its own product.",
        file="parallel/pipeline/runtime/split_backward.py",
        old="        stack.enter_context(_disable_current_modes())\n",
        new="",
        tests=(
            "tests/parallel/pipeline/runtime/test_split_backward.py"
            "::test_what_is_computed_ahead_is_the_same_to_the_bit_and_nobody_sees_it",
        ),
    ),
    Fault(
        name="weights-beside-not-ended",
        about="A weight gradient is computed beside the very backward that has not deferred it yet.",
        file="parallel/pipeline/schedule/actions.py",
        old="if following and (following[0].stage, following[0].microbatch) in ended:",
        new="if following:",
        tests=(
            "tests/parallel/pipeline/schedule/test_schedule.py"
            "::test_weights_of_one_microbatch_are_beside_what_another_sends",
        ),
    ),
    Fault(
        name="recomputed-with-other-masks",
        about="A recomputed block draws other dropout masks in backward than in forward.",
        file="parallel/activation_checkpointing/blocks.py",
        old="out = checkpoint(run, *args, use_reentrant=False, **kwargs)",
        new=(
            "out = checkpoint(\n            run, *args, use_reentrant=False, "
            "preserve_rng_state=False, **kwargs\n        )"
        ),
        tests=(
            "tests/parallel/activation_checkpointing/test_blocks.py"
            "::test_a_recomputed_block_draws_the_masks_of_its_forward_again",
        ),
    ),
    Fault(
        name="buffer-of-the-wrong-stage",
        about="A checkpoint stores a buffer of a block that several stages call as the first of them has left it.",
        file="parallel/pipeline/partition/partition.py",
        old="return max(stages, default=len(self.stages) - 1)",
        new="return min(stages, default=len(self.stages) - 1)",
        tests=(
            "tests/parallel/pipeline/partition/test_partition.py::test_a_block_called_again_and_again_has_all_its_stages",
        ),
    ),
)
