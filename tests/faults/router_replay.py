"""Faults of the replay of routers: second runs, weights, positions and layers."""

from tests.faults.fault import Fault

_REPLAY, _CHOICE = "engine/program/router_replay.py", "parallel/experts/router_choice.py"
_TESTS = "tests/engine/test_router_replay.py"
_LOOP = f"{_TESTS}::test_a_loop_of_your_own_replays_in_every_forward_and_second_run"
_FORMULA = (
    "tests/parallel/experts/test_router_choice.py::"
    "test_given_experts_have_the_weights_and_gradients_of_the_models_formula[softmax_first]"
)

ROUTER_REPLAY = (
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
        old="        self._runtime.begin_backward(self._microbatches[action.microbatch])\n",
        new="",
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
