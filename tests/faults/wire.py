"""Faults of activations in fewer bits: sums over tensor ranks, messages between stages, residuals, the plan."""

from tests.faults.fault import Fault

_COLLECTIVES = "tests/parallel/comm/test_encoded_collectives.py"
_MESSAGES = "tests/parallel/pipeline/runtime/test_encoded_messages.py"
_ENGINES = "tests/parallel/comm/test_encoded_engines.py"

WIRE = (
    Fault(
        name="own-part-of-a-sum-kept-exact",
        about="Each tensor rank keeps its own part of a sum as it was before it was encoded, so ranks differ.",
        file="parallel/comm/encoded_collectives.py",
        old="            self._codec.decode(full_Tm, tensor.view(-1, size))\n",
        new="            self._codec.decode(full_Tm, tensor.view(-1, size))\n"
        "            tensor.view(-1, size)[self._comm.grid.index(self._axis)] = sum_s.to(tensor.dtype)\n",
        tests=(f"{_COLLECTIVES}::test_all_ranks_hold_the_bits_of_one_rounded_sum",),
    ),
    Fault(
        name="messages-to-the-wrong-owner",
        about="Ranks exchange the parts of a sum in the opposite order, so each adds what belongs to another one.",
        file="parallel/comm/encoded_collectives.py",
        old="    received_Rm = torch.empty_like(given_Rm)\n",
        new="    given_Rm = given_Rm.flip(0).contiguous()\n    received_Rm = torch.empty_like(given_Rm)\n",
        tests=(f"{_COLLECTIVES}::test_shards_are_sums_of_what_was_rounded",),
    ),
    Fault(
        name="losses-rounded",
        about="Sums of losses and of statistics are encoded as activations are.",
        file="parallel/comm/encoded_collectives.py",
        old="        return label in self.labels and self.shortens(",
        new="        return self.shortens(",
        tests=(f"{_COLLECTIVES}::test_only_what_becomes_shorter_and_may_be_rounded_is_encoded",),
    ),
    Fault(
        name="casts-added-in-16-bits",
        about="What ranks have sent in bf16 is added in bf16, and every addition rounds.",
        file="kernels/codecs/block_codec.py",
        old="        total = first.float()\n        for other in others:\n            total += other\n",
        new="        total = first.clone()\n        for other in others:\n            total += other\n",
        tests=(f"{_COLLECTIVES}::test_shards_are_sums_of_what_was_rounded",),
    ),
    Fault(
        name="padding-taken-for-numbers",
        about="Gathered shards that do not fill whole blocks are joined with the zeros at their ends.",
        file="parallel/comm/encoded_collectives.py",
        old="    rows_Rp.copy_(values_Rs[:, : rows_Rp.shape[1]])\n",
        new="    rows_Rp.copy_(values_Rs.reshape(-1)[: out.numel()].view_as(rows_Rp))\n",
        tests=(f"{_COLLECTIVES}::test_a_gather_gives_every_rank_what_all_have_rounded_its_own_too",),
    ),
    Fault(
        name="one-collective-planned-for-two",
        about="The plan counts the exchange of an all-reduce in fewer bits and not its gather.",
        file="parallel/comm/encoded_collectives.py",
        old='            return ("all_to_all", size), ("all_gather", size)\n',
        new='            return (("all_to_all", size),)\n',
        tests=(f"{_COLLECTIVES}::test_bytes_are_those_of_the_format",),
    ),
    Fault(
        name="gradients-planned-exact",
        about="The plan counts gradients between stages with their exact bytes.",
        file="engine/planning/budgets.py",
        old="    backward = [message_bytes(values[number], form) for number in sources]\n",
        new="    backward = [values[number].bytes for number in sources]\n",
        tests=(f"{_ENGINES}::test_messages_between_stages_have_the_bytes_of_the_formula",),
    ),
    Fault(
        name="exact-messages-rounded",
        about="What must arrive as it is, such as a mask of infinities, is encoded between stages.",
        file="parallel/pipeline/runtime/transport.py",
        old="        if self._encoder is not None and not exact and self._encoder.encodes(tensor.dtype,",
        new="        if self._encoder is not None and self._encoder.encodes(tensor.dtype,",
        tests=(f"{_MESSAGES}::test_what_is_exact_arrives_as_it_is",),
    ),
    Fault(
        name="feedback-of-activations",
        about="What a message leaves out of activations is added to those of the next microbatch.",
        file="parallel/pipeline/runtime/encoded_messages.py",
        old='        kept = self._feedback and flow == "backward"\n',
        new="        kept = self._feedback\n",
        tests=(f"{_MESSAGES}::test_activations_and_other_values_have_no_part_in_a_residual",),
    ),
    Fault(
        name="residuals-of-all-values-mixed",
        about="What is left of the gradient of one value is added to that of another.",
        file="parallel/pipeline/runtime/encoded_messages.py",
        old="        kept = self._residuals.get(place)\n",
        new="        place = (0, 0, 0)\n        kept = self._residuals.get(place)\n",
        tests=(f"{_MESSAGES}::test_activations_and_other_values_have_no_part_in_a_residual",),
    ),
    Fault(
        name="residuals-between-stages-never-added",
        about="Error feedback is asked for, and messages between stages leave nothing for later.",
        file="parallel/pipeline/runtime/encoded_messages.py",
        old="self._residual(place, values) if kept else None",
        new="self._residual(place, values).zero_() if kept else None",
        tests=(f"{_MESSAGES}::test_with_error_feedback_the_bias_of_gradients_falls_as_one_over_the_messages",),
    ),
    Fault(
        name="casts-leave-nothing",
        about="Error feedback is asked for, and what a cast rounds away is forgotten.",
        file="kernels/codecs/block_codec.py",
        old="            residual_Rs.copy_((given - cast.float()).nan_to_num_(0.0, 0.0, 0.0))\n",
        new="            residual_Rs.zero_()\n",
        tests=(f"{_MESSAGES}::test_with_error_feedback_the_bias_of_gradients_falls_as_one_over_the_messages",),
    ),
    Fault(
        name="residuals-between-stages-of-a-skipped-step-kept",
        about="What a skipped step has left out of the gradients between stages is added to the next step.",
        file="engine/step/rank_parts.py",
        old="        for residual in (*self._reducer.residuals.values(), *sent):\n",
        new="        for residual in self._reducer.residuals.values():\n",
        tests=(f"{_ENGINES}::test_residuals_take_the_bytes_of_the_plan_and_a_skipped_step_leaves_none",),
    ),
)
