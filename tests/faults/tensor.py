"""Faults of layers, losses and random numbers over tensor ranks."""

from tests.faults.fault import Fault

TENSOR = (
    Fault(
        name="shared-gradient-summed-in-place",
        about="The gradient that a column layer sums over tensor ranks is also read by a residual, which sees the sum.",
        file="parallel/tensor/collectives.py",
        old="grad = grad.contiguous() if ctx.owned else grad.clone(memory_format=torch.contiguous_format)",
        new="grad = grad.contiguous()",
        tests=("tests/parallel/tensor/test_collectives.py::test_a_gradient_that_others_read_is_copied_before_its_sum",),
    ),
    Fault(
        name="sum-written-into-a-leaf",
        about="A sum is written into what another stage has sent, which autograd refuses.",
        file="parallel/tensor/collectives.py",
        old="if not x.is_contiguous() or x.is_leaf:",
        new="if not x.is_contiguous():",
        tests=("tests/parallel/tensor/test_collectives.py::test_a_sum_is_made_in_place_unless_autograd_begins_there",),
    ),
    Fault(
        name="bias-on-every-tensor-rank",
        about="Every tensor rank adds the bias of a row layer before the sum, so it counts several times.",
        file="parallel/tensor/layers/linear.py",
        old="return functional.linear(x_P, weight)",
        new='return functional.linear(x_P, weight, self._parameters["bias"])',
        tests=(
            "tests/parallel/tensor/layers/test_public_layers.py::test_a_model_written_with_them_is_the_whole_model",
        ),
    ),
    Fault(
        name="padding-in-gathered-columns",
        about="The columns that pad a narrower shard for its transfer stay in the gathered logits.",
        file="parallel/tensor/collectives.py",
        old="part[..., :width] for part, width",
        new="part[..., : max(width, own)] for part, width",
        tests=(
            "tests/parallel/tensor/layers/test_linear_ranks.py::test_layers_of_every_kind",
            "tests/parallel/tensor/logits/test_logits_ranks.py::test_every_use_has_the_value_and_the_gradient_of_the_whole",
        ),
    ),
    Fault(
        name="softmax-without-common-maximum",
        about="Each tensor rank shifts its logits by its own maximum, so the loss over the vocabulary is wrong.",
        file="parallel/tensor/logits/losses.py",
        old='    vocabulary.axis.all_reduce(largest_N, LOSS, "max")\n',
        new="",
        tests=("tests/parallel/tensor/logits/test_losses.py::test_losses_have_the_value_the_gradient_and_the_traffic",),
    ),
    Fault(
        name="label-picked-on-every-rank",
        about="Each tensor rank adds a logit of its own for a label that another one holds.",
        file="parallel/tensor/logits/losses.py",
        old="shifted_NW.gather(-1, place[0]).masked_fill_(place[1], 0).squeeze(-1)",
        new="shifted_NW.gather(-1, place[0]).squeeze(-1)",
        tests=("tests/parallel/tensor/logits/test_losses.py::test_losses_have_the_value_the_gradient_and_the_traffic",),
    ),
    Fault(
        name="ignored-labels-counted",
        about="Labels to ignore count in the loss of a vocabulary that is sharded.",
        file="parallel/tensor/logits/losses.py",
        old="self.form.reduced(losses_N.masked_fill(ignored_N, 0), counted_N)",
        new="self.form.reduced(losses_N, counted_N)",
        tests=("tests/parallel/tensor/logits/test_losses.py::test_losses_have_the_value_the_gradient_and_the_traffic",),
    ),
    Fault(
        name="embedding-of-other-ranks-rows",
        about="Every tensor rank adds a row of its own for a token whose row another rank holds.",
        file="parallel/tensor/layers/vocab_parallel.py",
        old="        x_D = zeroed(elsewhere.unsqueeze(-1), 0)\n",
        new="",
        tests=(
            "tests/parallel/tensor/layers/test_public_layers.py::test_a_model_written_with_them_is_the_whole_model",
        ),
    ),
    Fault(
        name="partial-gradient-not-summed",
        about="The sum of a norm's gradients over tensor ranks is thrown away, so its copies drift apart.",
        file="parallel/tensor/layers/partial_grads.py",
        old="            for parts, grad in places:\n                _copy(parts, grad, inward=False)\n",
        new="",
        tests=("tests/parallel/tensor/layers/test_partial_grads.py::test_every_holder_gets_the_sum_of_all_holders",),
    ),
    Fault(
        name="input-gradient-read-too-early",
        about="An input gradient is used while its sum over tensor ranks is still under way.",
        file="parallel/tensor/overlap/async_input_grad.py",
        old="        ctx.sum.wait()\n",
        new="",
        tests=(
            "tests/parallel/tensor/overlap/test_async_input_grad.py::test_all_weight_gradients_of_a_region_come_while_the_sum_travels",
        ),
    ),
    Fault(
        name="dropout-alike-on-tensor-ranks",
        about="All tensor ranks drop the same places of their shards, so whole features share a mask.",
        file="parallel/tensor/layers/parallel_region.py",
        old="draw_apart(device, self.axis.index)",
        new="draw_apart(device, 0)",
        tests=(
            "tests/parallel/tensor/test_randomness_ranks.py"
            "::test_masks_differ_where_activations_are_cut_and_recomputation_draws_them_again",
        ),
    ),
    Fault(
        name="residual-dropout-differs",
        about="Tensor ranks drop different places of activations that are equal, which then drift apart.",
        file="parallel/tensor/layers/parallel_region.py",
        old="            draw_alike(device, self._drawn)\n",
        new="",
        tests=(
            "tests/parallel/tensor/test_randomness_ranks.py"
            "::test_masks_differ_where_activations_are_cut_and_recomputation_draws_them_again",
            "tests/parallel/tensor/test_randomness_ranks.py"
            "::test_gpt2_drops_the_same_residuals_on_all_ranks_and_again_when_recomputed",
        ),
    ),
    Fault(
        name="fused-thirds-cut-as-one",
        about="A fused QKV weight is cut as one run of rows, so one tensor rank gets queries and the other values.",
        file="parallel/tensor/plan/ranges.py",
        old="    width = size // parts\n",
        new="    width, parts = size, 1\n",
        tests=("tests/parallel/tensor/plan/test_ranges.py::test_examples_of_the_docstring",),
    ),
    Fault(
        name="vocabulary-without-its-first-rows",
        about="A vocabulary that tensor ranks do not divide is cut from a later row on, and its first rows are lost.",
        file="parallel/tensor/plan/ranges.py",
        old="rank * small + min(rank, more)",
        new="rank * small + more",
        tests=(
            "tests/parallel/tensor/plan/test_ranges.py::test_ranges_cover_each_row_once_in_order_and_every_rank_holds_some",
        ),
    ),
)
