"""Faults of optimizers whose state is no number of fp32 for each element, and of averages in the place of weights."""

from tests.faults.fault import Fault

_CODES = "tests/kernels/optim/test_eight_bit_codes.py"
_ADAFACTOR = "tests/kernels/optim/test_adafactor_rule.py"
_PARITY = "tests/engine/parity/test_parity_state_forms.py"
_AVERAGED = "tests/zero/optim/test_averaged_weights.py"

STATE_FORMS = (
    Fault(
        name="second-moments-round-to-zero",
        about="A small second moment becomes zero, and an update is divided by eps alone.",
        file="kernels/optim/eight_bit_codes.py",
        old="if form.signed else y_KB > 0, code.clamp(min=1), code)",
        new="if form.signed else y_KB > 1, code.clamp(min=1), code)",
        tests=(f"{_CODES}::test_a_number_errs_by_a_sixteenth_and_the_largest_not_at_all",),
    ),
    Fault(
        name="blocks-over-shards",
        about="Parameters and shards begin inside of blocks, so each number of data ranks has other scales.",
        file="engine/planning/flat_layouts.py",
        old="max(formats.alignment, block_of_codes(site_optimizer(config.outer, config.optimizer)))",
        new="formats.alignment",
        tests=(f"{_PARITY}::test_data_ranks_train_as_one_process",),
    ),
    Fault(
        name="squares-of-a-shard-alone",
        about="Means of rows and columns are those of the squares that one data rank has.",
        file="zero/optim/rules/counted_parts.py",
        old="for axis, _ in self._routes.axes:\n            self._comm",
        new='for axis, _ in self._routes.axes:\n            if axis == "tp":\n                self._comm',
        tests=(f"{_PARITY}::test_data_ranks_train_as_one_process",),
    ),
    Fault(
        name="weights-of-copies-counted-twice",
        about="Every tensor rank adds the squares of weights that all of them hold, so their steps are too long.",
        file="zero/optim/rules/adafactor.py",
        old="part.own(part.weights.square()).sum()",
        new="part.weights.square().sum()",
        tests=(f"{_PARITY}::test_any_grid_trains_as_one_process",),
    ),
    Fault(
        name="means-of-the-other-dim",
        about="The mean of a column is that over its columns.",
        file="kernels/optim/update_rules.py",
        old="COLUMNS: sums[ROWS].shape[-2]",
        new="COLUMNS: sums[COLUMNS].shape[-1]",
        tests=(f"{_ADAFACTOR}::test_pieces_train_as_the_whole_does_in_torch",),
    ),
    Fault(
        name="weights-of-the-average-begin-anew",
        about="A run that goes on averages as if its first iterates had not been.",
        file="zero/optim/rules/schedule_free.py",
        old='    counted = ("step", "lr_max", "weight_sum")\n',
        new="",
        tests=(f"{_PARITY}::test_a_process_goes_on_from_its_checkpoint",),
    ),
    Fault(
        name="average-stays-in-the-model",
        about="After an evaluation the run goes on from the average.",
        file="zero/optim/averaged_weights.py",
        old="        for flat, before in zip(self._buckets, self._before or (), strict=False):\n"
        "            flat.weights.copy_(before)\n",
        new="",
        tests=(f"{_AVERAGED}::test_training_goes_on_as_without_evaluations",),
    ),
)
