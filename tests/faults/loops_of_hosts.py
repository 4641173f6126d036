"""Faults of what a host's loop counts, reads and cuts: items, gradients in hooks, tensors that are not rows."""

from tests.faults.fault import Fault

_STEPS = "tests/engine/huggingface/test_whole_steps.py"
_GUARD = "tests/zero/reduce/test_gradient_guard.py"

LOOPS_OF_HOSTS = (
    Fault(
        name="number-of-items-divided",
        about="A pipeline scales the number of items in place of the loss, and models that ignore it train by a part.",
        file="engine/huggingface/trainer.py",
        old="{_COUNT: given[_COUNT].sum()}",
        new="{_COUNT: given[_COUNT].sum() / 2}",
        tests=(f"{_STEPS}::test_the_average_of_a_step_is_the_loss_of_the_host",),
    ),
    Fault(
        name="means-filled-up",
        about="Rows without labels are added to a microbatch of a model whose loss is a mean over its rows.",
        file="engine/huggingface/trainer.py",
        old="        if not self._fills:\n",
        new="        if False:\n",
        tests=(f"{_STEPS}::test_rows_that_lack_are_refused_by_the_loss_itself_and_not_by_a_signature",),
    ),
    Fault(
        name="gradient-of-another-stage-is-none",
        about="Code that looks for the gradient of a parameter finds None on the ranks that do not hold it.",
        file="zero/reduce/gradient_guard.py",
        old="if p.requires_grad or id(p) in self._absent)",
        new="if p.requires_grad)",
        tests=(f"{_GUARD}::test_a_look_is_refused_on_every_rank_whoever_holds_the_parameter",),
    ),
    Fault(
        name="gradient-of-a-shard-is-none",
        about="Code that looks for the gradient of a sharded parameter finds None and says nothing.",
        file="zero/reduce/gradient_guard.py",
        old="            self._guarded = [p for p in trained if type(p) in _TAKEN]\n",
        new="            self._guarded = [p for p in trained if type(p) is nn.Parameter]\n",
        tests=(f"{_GUARD}::test_a_look_is_refused_on_every_rank_whoever_holds_the_parameter",),
    ),
    Fault(
        name="patches-counted-as-rows",
        about="The number of rows of a microbatch is that of its first tensor, also where that holds patches.",
        file="engine/program/batch_rows.py",
        old="for path, tensor in tensors_by_path(batch) if tensor.ndim and not self.is_whole(path))\n        return",
        new="for path, tensor in tensors_by_path(batch) if tensor.ndim)\n        return",
        tests=(
            "tests/engine/program/test_batch_rows.py::test_a_named_tensor_may_be_missing_from_a_batch",
            f"{_STEPS}::test_patches_count_no_rows_and_cannot_be_filled_up",
        ),
    ),
)
