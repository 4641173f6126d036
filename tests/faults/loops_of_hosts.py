"""Faults of what a host's loop counts, reads and cuts: items, gradients in hooks, tensors that are not rows."""

from tests.faults.fault import Fault

_STEPS = "tests/engine/huggingface/test_whole_steps.py"

LOOPS_OF_HOSTS = (
    Fault(
        name="number-of-items-divided",
        about="A pipeline scales the number of items in place of the loss, and models that ignore it train by a part.",
        file="engine/huggingface/whole_steps.py",
        old="{_COUNT: given[_COUNT].sum()}",
        new="{_COUNT: given[_COUNT].sum() / 2}",
        tests=(f"{_STEPS}::test_the_average_of_a_step_is_the_loss_of_the_host",),
    ),
    Fault(
        name="means-filled-up",
        about="Rows without labels are added to a microbatch of a model whose loss is a mean over its rows.",
        file="engine/huggingface/whole_steps.py",
        old="        if not self._fills:\n",
        new="        if False:\n",
        tests=(f"{_STEPS}::test_rows_that_lack_are_refused_by_the_loss_itself_and_not_by_a_signature",),
    ),
)
