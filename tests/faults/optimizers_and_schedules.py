"""Faults of optimizers and schedules: those passed in code, layer-wise ones, and what a resumed run has of them."""

from tests.faults.fault import Fault

_UNUSED = "tests/engine/optim/test_own_optimizer_unused.py"
_WHOLE = "tests/engine/parity/test_own_whole_optimizer.py"
_CHANGED = "tests/engine/checkpoint/contents/test_contents.py"
_GIVEN = "tests/engine/optim/test_param_groups.py"
_LAYERS = "tests/engine/parity/test_parity_layerwise.py"

OPTIMIZERS_AND_SCHEDULES = (
    Fault(
        name="unused-parameters-of-own-optimizers-updated",
        about="An optimizer passed in code is given zeros for a parameter without a gradient, and counts the step.",
        file="zero/optim/sharded_optimizer.py",
        old="                place.parameter.grad = None\n",
        new="                place.grads.zero_()\n",
        tests=(f"{_UNUSED}::test_every_parameter_counts_its_own_updates_as_in_torch",),
    ),
    Fault(
        name="own-counts-lost",
        about="A checkpoint gives every parameter of a group the step count of the first one.",
        file="engine/checkpoint/contents/optimizer_state.py",
        old=" | own.get(name, {})\n",
        new="\n",
        tests=(f"{_UNUSED}::test_counts_go_on_from_a_checkpoint_on_another_grid",),
    ),
    Fault(
        name="norms-of-parts",
        about="LAMB and LARS take the norm of a part of a parameter for that of the whole.",
        file="zero/optim/rules/layerwise.py",
        old="        self._reduce(squares)\n",
        new="",
        tests=(
            f"{_LAYERS}::test_data_ranks_train_as_one_process",
            f"{_LAYERS}::test_any_grid_trains_as_one_process",
        ),
    ),
    Fault(
        name="layer-wise-updates-counted-for-all",
        about="LAMB corrects averages by the number of all updates, also those that a parameter had no gradient for.",
        file="zero/optim/rules/layerwise.py",
        old='group["step"] - missed.get(part.row.name, 0)',
        new='group["step"]',
        tests=(f"{_LAYERS}::test_each_parameter_counts_its_own_updates",),
    ),
    Fault(
        name="own-whole-state-begun-anew",
        about="The owner of a parameter gives the user's optimizer no state of earlier updates.",
        file="zero/optim/matrix/own_whole.py",
        old="        if step > 1:\n",
        new="        if step > 1000:\n",
        tests=(f"{_WHOLE}::test_each_parameter_counts_its_own_updates",),
    ),
    Fault(
        name="changed-schedule-as-saved",
        about="A run that goes on with another schedule keeps the saved one, though a line names the new one.",
        file="engine/checkpoint/resume.py",
        old="(stored is None or self._changes(reader, RATES))",
        new="stored is None",
        tests=(f"{_CHANGED}::test_a_changed_schedule_is_where_it_would_be",),
    ),
    Fault(
        name="steps-of-the-user-made-too",
        about="A scheduler that is passed in code moves twice where the user steps it after each update.",
        file="engine/optim/lr_schedules.py",
        old='{"step": lambda *_, **__: self._leave_out()}',
        new="{}",
        tests=(f"{_GIVEN}::test_a_scheduler_that_the_user_steps_too_moves_once",),
    ),
)
