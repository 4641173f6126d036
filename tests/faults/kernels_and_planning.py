"""Faults of kernels, update rules, and of the plan that is made before the run."""

from tests.faults.fault import Fault

_ENTROPY = "tests/kernels/ops/test_cross_entropy.py"

KERNELS_AND_PLANNING = (
    Fault(
        name="last-block-of-logits-unmasked",
        about="Columns beyond the vocabulary in the last block count as logits of zero in the softmax.",
        file="kernels/gpu/cross_entropy.py",
        old='x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)',
        new="x = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)",
        tests=(f"{_ENTROPY}::test_a_vocabulary_of_several_blocks_is_read_to_its_end",),
    ),
    Fault(
        name="ignored-row-has-a-gradient",
        about="Rows with labels to ignore send a gradient into the model.",
        file="kernels/ops/linear_cross_entropy.py",
        old="form.slopes(counted_N[part].to(losses_C.dtype) * unit",
        new="form.slopes(torch.ones_like(losses_C) * unit",
        tests=("tests/kernels/ops/test_linear_cross_entropy.py::test_error_is_at_most_twice_eager_torchs",),
    ),
    Fault(
        name="mean-over-ignored-rows",
        about="The mean of a loss is taken over all rows, those to ignore included.",
        file="kernels/ops/cross_entropy.py",
        old="total / counted_N.sum()",
        new="total / counted_N.numel()",
        tests=(f"{_ENTROPY}::test_sums_and_means_leave_out_what_is_ignored",),
    ),
    Fault(
        name="variance-of-padding",
        about="The lanes beyond the width of a row count in the variance of a LayerNorm.",
        file="kernels/gpu/norm.py",
        old="s = tl.where(inside, s - middle, 0.0)",
        new="s = s - middle",
        tests=("tests/kernels/ops/test_norm.py::test_error_is_at_most_twice_eager_torchs",),
    ),
    Fault(
        name="head-gradient-in-bf16",
        about="The weight gradient of the head is summed over chunks in bf16, and later chunks are rounded away.",
        file="kernels/ops/linear_cross_entropy.py",
        old="wide = torch.promote_types(head.weight.dtype, torch.float32)",
        new="wide = head.weight.dtype",
        tests=(
            "tests/kernels/ops/test_linear_cross_entropy.py::test_a_weight_gradient_of_many_chunks_is_rounded_once",
        ),
    ),
    Fault(
        name="small-shares-underflow-in-fp16",
        about="Gradients of unlikely tokens underflow to zero in fp16 whatever the loss scale is.",
        file="kernels/ops/linear_cross_entropy.py",
        old="unit = _FP16_SLOPE if hidden_NH.dtype == torch.float16 else 1.0",
        new="unit = 1.0",
        tests=(
            "tests/kernels/ops/test_linear_cross_entropy.py"
            "::test_small_shares_of_the_softmax_count_in_fp16_as_they_do_with_a_loss_scale",
        ),
    ),
    Fault(
        name="rotary-gradient-turned-forward",
        about="Gradients of queries and keys are turned by the angle in place of back by it.",
        file="kernels/ops/rotary.py",
        old="ctx.interleaved, not ctx.transposed)",
        new="ctx.interleaved, ctx.transposed)",
        tests=("tests/kernels/ops/test_rotary.py::test_error_is_at_most_twice_that_of_models_code",),
    ),
    Fault(
        name="update-although-the-device-says-no",
        about="A step that the device has decided to skip moves weights all the same.",
        file="kernels/ops/adamw.py",
        old="go = decision.go != 0",
        new="go = decision.factor != 0",
        tests=("tests/kernels/ops/test_adamw.py::test_no_bit_changes_where_the_device_says_no",),
    ),
    Fault(
        name="adam-one-step-ahead",
        about="Adam's bias correction is that of the next update, so the first updates are too small.",
        file="kernels/optim/update_rules.py",
        old="torch.full((), float(rule.age(step) - 1), device=w.device)",
        new="torch.full((), float(step), device=w.device)",
        tests=("tests/kernels/optim/test_update_rules.py::test_adam_is_torchs",),
    ),
    Fault(
        name="lion-without-decay",
        about="Lion decays weights by the decay alone and not by its product with the rate.",
        file="kernels/optim/update_rules.py",
        old="weight.mul_(1 - rule.lr * rule.weight_decay)",
        new="weight.mul_(1 - rule.weight_decay)",
        tests=("tests/kernels/optim/test_update_rules.py::test_lion_is_algorithm_2_of_its_paper",),
    ),
    Fault(
        name="rounding-has-a-bias",
        about="Stochastic rounding rounds down too often, so bf16 weights shrink over a run.",
        file="kernels/optim/stochastic_rounding.py",
        old="(random_bits(index, key) >> 16).to(torch.int32)",
        new="(random_bits(index, key) >> 17).to(torch.int32)",
        tests=("tests/kernels/optim/test_stochastic_rounding.py::test_the_mean_is_kept",),
    ),
    Fault(
        name="copies-in-the-sum-of-squares",
        about="Copies that another rank counts are added to the gradient norm.",
        file="kernels/ops/norm.py",
        old="* (1.0 if counts else 0.0)",
        new="* 1.0",
        tests=("tests/kernels/ops/test_norm.py::test_what_is_not_counted_adds_nothing",),
    ),
    Fault(
        name="replicated-parameter-counted-by-all",
        about="A replicated parameter counts once for each tensor rank in the gradient norm.",
        file="engine/planning/flat_layouts.py",
        old="counted=row.counted(pp, tp),",
        new="counted=True,",
        tests=("tests/engine/parity/test_axes.py::test_norm_is_of_the_whole_model[2]",),
    ),
    Fault(
        name="tie-missing-in-the-layout",
        about="The plan forgets that a weight is tied over stages, so each stage trains a copy of its own.",
        file="engine/planning/flat_layouts.py",
        old="ties=row.owners if row.trainable and len(row.owners) > 1 else (),",
        new="ties=(),",
        tests=("tests/engine/planning/test_budgets.py::test_a_decoder_sends_what_the_formulas_say",),
    ),
    Fault(
        name="tied-copies-counted-by-all-stages",
        about="A tied weight counts once for each stage that holds it in the gradient norm.",
        file="parallel/shard_table.py",
        old="return pp == self.owners[0] and any(",
        new="return any(",
        tests=("tests/parallel/test_shard_table.py::test_exactly_one_copy_of_every_element_is_counted",),
    ),
    Fault(
        name="cut-although-the-output-is-read-whole",
        about="A layer is cut although its output also leaves the block past the row layer, where it is needed whole.",
        file="parallel/tensor/auto/coupled_parameters.py",
        old="if self._goes_elsewhere(rows, columns):",
        new="if False:",
        tests=(
            "tests/parallel/tensor/auto/test_coupled_parameters.py::test_what_also_leaves_the_block_is_no_column",
            "tests/parallel/tensor/auto/test_coupled_parameters.py::test_an_output_that_somebody_reads_keeps_its_layer_whole",
        ),
    ),
    Fault(
        name="proof-blind-to-forgotten-sums",
        about="The proof of a tensor plan does not look at gradients of inputs, so a missing sum passes.",
        file="parallel/tensor/auto/equivalence.py",
        old='        yield from _of_leaves("input", rank, (outcome.inputs, truth.inputs), largest)\n',
        new="",
        tests=("tests/parallel/tensor/auto/test_equivalence.py::test_sums_that_are_forgotten",),
    ),
    Fault(
        name="proof-of-a-module-for-that-of-its-block",
        about="Strategies that are right in the modules of a block are taken without a proof of the block.",
        file="parallel/tensor/auto/search.py",
        old="        right = not together.styles or self._try({}, together, tp).holds\n",
        new="        right = True\n",
        tests=(
            "tests/parallel/tensor/auto/test_enclosing_module.py::"
            "test_what_is_right_in_a_module_is_refused_where_the_block_is_wrong",
        ),
    ),
    Fault(
        name="gradients-of-large-weights-unproven",
        about="The proof of a tensor plan does not look at the gradients of low-rank weights.",
        file="parallel/tensor/auto/low_rank_weight.py",
        old="        return parameter.parts.zeros\n",
        new="        return (parameter,)\n",
        tests=("tests/parallel/tensor/auto/test_low_rank_weight.py::test_a_matrix",),
    ),
    Fault(
        name="low-rank-weight-read-without-a-graph",
        about="Code that reads a large weight without a graph is proven as if its gradient reached that weight.",
        file="parallel/tensor/auto/low_rank_weight.py",
        old="if not torch.is_grad_enabled() or name.startswith",
        new="if name.startswith",
        tests=(
            "tests/parallel/tensor/auto/test_low_rank_weight.py::"
            "test_what_factors_cannot_answer_is_refused_and_remembered",
        ),
    ),
    Fault(
        name="kept-tensor-plan-of-another-model",
        about="A start takes the tensor plan that was kept for a block whose methods were other ones.",
        file="engine/planning/found_styles.py",
        old="self._take_names(vars(base), set(vars(base)))",
        new="pass",
        tests=(
            "tests/engine/planning/tensor_search/test_styles_cache.py::"
            "test_code_that_was_changed_while_it_runs_has_another_digest",
        ),
    ),
    Fault(
        name="damaged-tensor-plan-is-read",
        about="A file of the plan cache that was changed on disk is taken for a proven plan.",
        file="engine/planning/found_styles.py",
        old=' or kept["sha256"] != _sha256(found)',
        new="",
        tests=(
            "tests/engine/planning/tensor_search/test_styles_cache.py::"
            "test_what_is_damaged_or_of_another_digest_is_not_read",
        ),
    ),
    Fault(
        name="stages-balanced-by-their-number-of-calls",
        about="Stages are cut by the smallest stage in place of the largest, so one stage keeps all others waiting.",
        file="parallel/pipeline/partition/partition.py",
        old="(max(known[0], before[ends[j]] - before[ends[i]]), [*known[1], ends[j]])",
        new="(min(known[0], before[ends[j]] - before[ends[i]]), [*known[1], ends[j]])",
        tests=("tests/parallel/pipeline/partition/test_partition.py::test_balance_finds_the_smallest_largest_stage",),
    ),
    Fault(
        name="bias-correction-always",
        about="Adam divides by what its averages lack although the configuration says not to.",
        file="kernels/optim/update_rules.py",
        old="return step if self.bias_correction else _UNBIASED",
        new="return step",
        tests=("tests/kernels/ops/test_adamw.py::test_100_steps_err_at_most_twice_as_much_as_torchs_fused_kernel",),
    ),
)
