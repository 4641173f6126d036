"""Faults of flat layouts, reductions, gathers and sharded updates."""

from tests.faults.fault import Fault

_STEP = "tests/zero/reduce/test_step_reducer.py"
_MICROBATCH = "tests/zero/reduce/test_microbatch_reducer.py"
_OPTIMIZER = "tests/zero/optim/test_sharded_optimizer.py"

ZERO = (
    Fault(
        name="tied-gradients-not-summed",
        about="The gradients of a tied weight are not summed over the stages that hold it, so its copies drift apart.",
        file="zero/reduce/step_reducer.py",
        old="            self._add_ties(progress.flat, self._part(progress.flat))\n",
        new="            continue\n",
        tests=(f"{_STEP}::test_late_buckets_wait_for_finish_and_are_summed_around_their_reduction",),
    ),
    Fault(
        name="sums-before-a-further-backward-lost",
        about="What was reduced before a further backward of the step is not added to what is reduced after it.",
        file="zero/reduce/step_reducer.py",
        old="            if progress.sums is not None:\n",
        new="            if False:\n",
        tests=("tests/engine/step/test_user_loop.py::test_every_loop_trains_as_torch_in_one_process",),
    ),
    Fault(
        name="last-bucket-not-reduced",
        about="The last bucket is never reduced, so data ranks update its weights from their own rows.",
        file="zero/reduce/step_reducer.py",
        old="        while self._next < len(self._progress):\n",
        new="        while self._next < len(self._progress) - 1:\n",
        tests=(f"{_STEP}::test_each_bucket_is_one_collective_a_step",),
    ),
    Fault(
        name="stale-gradient-of-an-unused-parameter",
        about="A parameter without a gradient in this step is updated with that of the step before.",
        file="zero/reduce/step_reducer.py",
        old="            if not place.touched:\n                place.view.zero_()\n        grads, shard",
        new="            place.touched = True\n        grads, shard",
        tests=(f"{_STEP}::test_a_parameter_without_gradient_gives_zero_and_nothing_stale",),
    ),
    Fault(
        name="last-microbatch-only",
        about="With gradients kept as shards only the last microbatch of a step counts.",
        file="zero/reduce/microbatch_reducer.py",
        old="        flight.filling.touched = True\n",
        new="",
        tests=(f"{_MICROBATCH}::test_shards_hold_the_sum_over_microbatches",),
    ),
    Fault(
        name="padding-not-blank",
        about="What a reused buffer held between the parameters is reduced too and counts in the gradient norm.",
        file="zero/reduce/microbatch_reducer.py",
        old="        _blank(full, filling)\n",
        new="",
        tests=("tests/zero/reduce/test_microbatch_reducer.py::test_shards_hold_the_sum_over_microbatches",),
    ),
    Fault(
        name="kept-part-of-a-split-backward-lost",
        about="Gradients of the first part of a split backward are dropped where gradients are kept as shards.",
        file="zero/reduce/microbatch_reducer.py",
        old="            for name, grad in self._kept.pop(place, ()):\n                self.take(name, grad)\n",
        new="            self._kept.pop(place, None)\n",
        tests=("tests/engine/parity/test_parity_schedules.py::test_a_schedule_from_a_file",),
    ),
    Fault(
        name="bucket-not-padded",
        about="A bucket is not padded to the number of data ranks, so its last elements belong to nobody.",
        file="zero/layout.py",
        old="_aligned(max(end, 1), alignment * kind.spread.ranks)",
        new="_aligned(max(end, 1), alignment)",
        tests=("tests/zero/test_layout.py::test_buckets_divide_evenly_and_are_padded_no_more_than_that",),
    ),
    Fault(
        name="shards-in-another-order",
        about="Data ranks own shards in another order than collectives place them, so a gather swaps their weights.",
        file="zero/layout.py",
        old="return slice(index * size, (index + 1) * size)",
        new="return slice((self.spread.ranks - 1 - index) * size, (self.spread.ranks - index) * size)",
        tests=("tests/zero/test_layout.py::test_shards_partition_each_bucket_equally",),
    ),
    Fault(
        name="copies-counted-in-the-norm",
        about="Rows that several tensor ranks hold count once for each of them in the gradient norm.",
        file="zero/layout.py",
        old="for first, last in copies if yes else ():",
        new="for first, last in ():",
        tests=("tests/zero/test_layout.py::test_the_norm_leaves_out_the_copies_in_a_parameter",),
    ),
    Fault(
        name="parameters-not-gathered",
        about="Each data rank goes on with its own shard updated and the shards of the others as they were.",
        file="zero/optim/sharded_optimizer.py",
        old="if self._sharded and not flat.sharded:",
        new="if self._sharded and flat.sharded:",
        tests=(f"{_OPTIMIZER}::test_parameters_are_gathered_bucket_by_bucket_at_stage_1_only",),
    ),
    Fault(
        name="masters-not-copied-to-parameters",
        about="Masters are updated and the bf16 parameters of the forward are not, so nothing is learned.",
        file="zero/optim/sharded_optimizer.py",
        old="if flat.master is not None and not rounded:",
        new="if flat.master is not None and rounded:",
        tests=(f"{_OPTIMIZER}::test_bf16_runs_update_the_fp32_masters",),
    ),
    Fault(
        name="written-weights-overwritten",
        about="Weights that a user has loaded after initialize are overwritten by the next update.",
        file="zero/optim/sharded_optimizer.py",
        old="        flat = self._buckets[number]\n        sync_masters(flat)\n",
        new="        flat = self._buckets[number]\n",
        tests=("tests/engine/precision/test_bf16.py::test_weights_loaded_after_initialize_survive_the_next_update",),
    ),
    Fault(
        name="step-count-of-unused-parameters",
        about="The bias correction of a parameter that was unused for a while is that of the other parameters.",
        file="zero/optim/flat_optimizers.py",
        old='age, piece = group["step"] - missed, weight.detach().view(-1)[part]',
        new='age, piece = group["step"], weight.detach().view(-1)[part]',
        tests=("tests/zero/optim/test_unused.py::test_one_process",),
    ),
    Fault(
        name="write-into-gathered-parameter-lost",
        about="What a forward writes into a sharded parameter is lost without a word when its memory is freed.",
        file="zero/gather/unsharded_buckets.py",
        old="                if old != new:\n",
        new="                if old > new:\n",
        tests=(
            "tests/zero/gather/test_gather_refused.py::test_what_a_forward_writes_into_parameters_is_not_lost_in_silence",
        ),
    ),
)
