"""Faults by which a run differs from the same model in plain torch: what is rounded, run twice, or left unsaid."""

from tests.faults.fault import Fault

PLAIN_TORCH = (
    Fault(
        name="inputs-cast-at-the-door",
        about="A time step of 999.3 becomes 1000.0 in bf16 before the model's own code sees it.",
        file="engine/precision/dtypes.py",
        old="inputs=compute if config.cast_forward_inputs else None",
        new="inputs=compute",
        tests=("tests/engine/precision/test_wide_values.py::test_own_code_is_given_inputs_and_buffers_as_they_are",),
    ),
    Fault(
        name="marks-of-both-types-only-in-fp16",
        about="Routers that a model marks as fp32 are rounded in bf16, so other experts are chosen.",
        file="engine/precision/fp32_modules.py",
        old="module in model.named_modules():\n        patterns",
        new="module in model.named_modules() if compute == torch.float16 else ():\n        patterns",
        tests=(
            "tests/engine/precision/test_marked_modules.py::test_marked_tensors_train_in_fp32_and_the_banner_counts_them",
        ),
    ),
    Fault(
        name="running-statistics-of-two-runs",
        about="A recomputed block updates its running statistics once more in backward.",
        file="parallel/activation_checkpointing/second_run.py",
        old="for t in self._tensors if t.content is not None}",
        new="for t in self._tensors if t.content is None}",
        tests=("tests/parallel/activation_checkpointing/test_second_run.py",),
    ),
    Fault(
        name="a-schedule-that-a-second-run-finds-advanced",
        about="A recomputed block reads the counter that its first run has advanced, and computes something else.",
        file="parallel/activation_checkpointing/second_run.py",
        old="if name not in left and live.get(name, _NOTHING) is not value:",
        new="if name not in left and live.get(name, _NOTHING) is not value and not isinstance(value, int):",
        tests=("tests/parallel/activation_checkpointing/test_second_run.py",),
    ),
    Fault(
        name="eval-mode-looked-for-at-the-top",
        about="A model that came in eval mode trains without dropout inside a wrapper, and nothing says it.",
        file="engine/step/runner.py",
        old="if module.training or outer.training or not any",
        new="if module.training or model.training or not any",
        tests=("tests/engine/step/test_remarks.py::test_training_in_eval_mode_is_said_where_it_changes_something",),
    ),
    Fault(
        name="a-loss-of-nan-unsaid",
        about="An update with a loss of nan is made, and only the report of the step shows it.",
        file="engine/step/update.py",
        old="(finite and (unseen or math.isfinite(totals.loss)))",
        new="finite",
        tests=(
            "tests/engine/step/test_remarks.py::test_labels_that_are_all_ignored_train_as_in_one_process_and_are_said",
        ),
    ),
    Fault(
        name="one-batch-for-ever-unsaid",
        about="A loop that begins its loader anew in each step trains on one batch, and nothing says it.",
        file="engine/step/runner.py",
        old="if self._alike == _ALIKE:",
        new="if self._alike is None:",
        tests=("tests/engine/step/test_remarks.py::test_one_batch_for_ever_is_said_once",),
    ),
    Fault(
        name="operand-casts-off-after-the-first-forward",
        about="A model with rotary tables in fp32 trains one step in bf16, and then its products meet two dtypes.",
        file="parallel/model/operand_casts.py",
        old="self._needed.get(kind, False) or self._casts > before",
        new="False",
        tests=(
            "tests/engine/precision/test_wide_values.py::test_rotary_tables_and_masks_in_fp32_train_as_in_plain_torch_to_the_bit",
        ),
    ),
)
