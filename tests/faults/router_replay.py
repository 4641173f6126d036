"""Faults of routing: replayed choices of routers, and balance losses over the rows of all data ranks."""

from tests.faults.fault import Fault

_REPLAY, _CHOICE = "engine/program/router_replay.py", "parallel/experts/router_choice.py"
_TESTS = "tests/engine/test_router_replay.py"
_LOOP = f"{_TESTS}::test_a_loop_of_your_own_replays_in_every_forward_and_second_run"
_FORMULA = (
    "tests/parallel/experts/test_router_choice.py::"
    "test_given_experts_have_the_weights_and_gradients_of_the_models_formula[softmax_first]"
)
_BALANCE = (
    "tests/engine/parity/test_global_balance.py::"
    "test_gathered_router_logits_give_the_balance_loss_of_the_global_batch[parallel0-whole_step]"
)

ROUTER_REPLAY = (
    Fault(
        name="replay-ignored",
        about="Routers choose themselves, though the batch has experts for them.",
        file=_REPLAY,
        old="with OtherChoice(choice, given, record if",
        new="with OtherChoice(choice, None, record if",
        tests=(
            f"{_TESTS}::test_gradients_of_routers_are_those_of_the_formula_in_plain_torch",
            f"{_TESTS}::test_a_part_of_the_positions_may_be_given",
        ),
    ),
    Fault(
        name="balance-of-one-microbatch",
        about="A balance loss over gathered router logits has only those of this rank's microbatch.",
        file="engine/program/loss.py",
        old="gathered: Tensor = rows if self.ranks == 1 else _GatherRows",
        new="gathered: Tensor = rows if self.ranks else _GatherRows",
        tests=(_BALANCE,),
    ),
    Fault(
        name="gathered-router-logits-are-detached",
        about="Routers get no gradient through gathered router logits.",
        file="engine/program/loss.py",
        old="        return own, None",
        new="        return own.zero_(), None",
        tests=(_BALANCE,),
    ),
    Fault(
        name="second-run-replays-the-last-forward",
        about="A block that runs again takes the experts of the forward that ran last, not those of its own.",
        file=_REPLAY,
        old="            self._now, self._runs, self._recorded = now, True, None\n",
        new="            self._runs, self._recorded = True, None\n",
        tests=(_LOOP,),
    ),
    Fault(
        name="backward-keeps-the-last-forwards-experts",
        about="Blocks that the model's own switch runs again take the experts of another microbatch of a pipeline.",
        file="engine/step/microbatches.py",
        old="            self._runtime.begin_backward(self._microbatches[action.microbatch])\n",
        new="            pass\n",
        tests=(f"{_TESTS}::test_the_models_own_switch_of_checkpoints_replays_each_microbatch",),
    ),
    Fault(
        name="weights-of-the-own-choice",
        about="Given experts have the weights of the experts that the router itself has chosen.",
        file=_CHOICE,
        old="            return plain.gather(-1, numbers), numbers\n",
        new="            return plain.gather(-1, own), numbers\n",
        tests=(_FORMULA, f"{_TESTS}::test_gradients_of_routers_are_those_of_the_formula_in_plain_torch"),
    ),
    Fault(
        name="gradients-end-at-given-weights",
        about="Routers get no gradient through the weights of given experts.",
        file=_CHOICE,
        old="            return plain.gather(-1, numbers), numbers\n",
        new="            return plain.detach().gather(-1, numbers), numbers\n",
        tests=(_FORMULA, f"{_TESTS}::test_gradients_of_routers_are_those_of_the_formula_in_plain_torch"),
    ),
    Fault(
        name="positions-without-an-entry-take-the-first-expert",
        about="A position with -1 goes to expert 0 and is not left to the router.",
        file=_CHOICE,
        old="return torch.where((given < 0).any(-1, keepdim=True), own, given)",
        new="return given.clamp(min=0)",
        tests=(f"{_TESTS}::test_a_part_of_the_positions_may_be_given",),
    ),
    Fault(
        name="traces-of-a-pipeline-are-recorded",
        about="The trace of a pipeline counts as a forward whose choices are recorded.",
        file="engine/step/runtime.py",
        old="self.program.replay.tracing() if self.program.replay is not None else nullcontext()",
        new="nullcontext()",
        tests=(f"{_TESTS}::test_choices_of_one_process_are_replayed_on_every_grid",),
    ),
    Fault(
        name="entries-of-layers-without-experts",
        about="With an entry for each layer of the model, routers take those of the layers from the first on.",
        file=_REPLAY,
        old="numbers = entry[:, :, place if entry.shape[2] == len(self._routers) else layer]",
        new="numbers = entry[:, :, place]",
        tests=(f"{_TESTS}::test_layers_without_experts_may_have_entries",),
    ),
)
