"""Faults of sequences that context ranks share: gradients, labels, causal runs, order and entry."""

from tests.faults.fault import Fault

_PROGRAM, _RULES = "engine/program/context_program.py", "parallel/context/rules.py"
_SIGHT = "parallel/context/sight.py"
_REDISTRIBUTE = "parallel/tensor/global_tensor/redistribute.py"
_TRAINED = "tests/parallel/context/test_context_training.py"
_FAMILIES = f"{_TRAINED}::test_families_train_as_one_process"
_LLAMA, _NANO = f"{_FAMILIES}[Llama-cp2]", f"{_FAMILIES}[nanoGPT-like-cp2]"
_PADDED = f"{_TRAINED}::test_masks_and_positions_stay_as_they_are[left-sdpa-cp2]"
_LOOP = f"{_TRAINED}::test_the_loop_of_a_script_trains_as_train_batch[{{'context': 2}}-of the model]"
_OUTER = f"{_TRAINED}::test_the_loop_of_a_script_trains_as_train_batch[{{'context': 2}}-of logits]"
_CALLED = "tests/parallel/context/test_outputs.py::test_a_call_of_the_engine_sends_the_bytes_of_train_batch"

CONTEXT = (
    Fault(
        name="loss-seeded-on-every-context-rank",
        about="Every context rank starts the backward of the same loss, so that gradients are multiplied.",
        file=_PROGRAM,
        old="            total = gradient_to_owner(total, self._sequences.axis)",
        new="            total = total.view_as(total)",
        tests=(_LLAMA,),
    ),
    Fault(
        name="called-output-seeded-on-every-context-rank",
        about="The output of a call passes the gradient on all context ranks, so that a script trains on multiples.",
        file=_PROGRAM,
        old="        return gradient_to_owner(value, self._sequences.axis).clone() if needs else value",
        new="        return value.clone() if needs else value",
        tests=(_LOOP,),
    ),
    Fault(
        name="call-not-sharded-along-positions",
        about="Every context rank computes all positions in a call of the engine.",
        file=_PROGRAM,
        old="self._entered(moved, run, sharing=not self.plan.halo)",
        new="run()",
        tests=(_CALLED,),
    ),
    Fault(
        name="labels-of-other-positions",
        about="A context rank compares its zig-zag positions with the labels of a block in rank order.",
        file=_RULES,
        old="    own = fit(context, target, rows)\n",
        new="    own = target.chunk(context.axis.size)[context.axis.index]\n",
        tests=(_LLAMA,),
    ),
    Fault(
        name="mean-of-context-means",
        about="The mean loss is that of the ranks' means, though ranks have different numbers of labels.",
        file=_RULES,
        old="sum_parts(torch.stack((total.to(wide), count)), context.axis, LOSS)",
        new="sum_parts(torch.stack((total.to(wide) / count, count / count)), context.axis, LOSS)",
        tests=(_PADDED,),
    ),
    Fault(
        name="run-reads-its-first-key-twice",
        about="A run of queries under the causal mask reads one key too many before its own keys.",
        file=_SIGHT,
        old="    yield from block(first, last, start, min(stop, first))",
        new="    yield from block(first, last, start, min(stop, first + 1))",
        tests=(_NANO,),
    ),
    Fault(
        name="causal-mask-dropped",
        about="Queries of a context rank read later keys of their own run.",
        file=_SIGHT,
        old="    yield from block(low, high, low, high, causal=True)",
        new="    yield from block(low, high, low, high)",
        tests=(_NANO,),
    ),
    Fault(
        name="gathered-in-the-order-of-ranks",
        about="Gathered tensors stay in the order of ranks, which is not that of positions.",
        file=_REDISTRIBUTE,
        old="    if index.blocks:\n        return joined",
        new="    if index.even:\n        return joined",
        tests=(_OUTER, f"{_FAMILIES}[T5-cp2]"),
    ),
    Fault(
        name="parameters-not-summed-over-context",
        about="Gradients of parameters are summed over data ranks alone, so that context ranks drift apart.",
        file="parallel/grid.py",
        old='    GridAxis("cp", "context", copies=True, sums=True),',
        new='    GridAxis("cp", "context", copies=True),',
        tests=(_LLAMA,),
    ),
    Fault(
        name="freed-batch-recognised-by-its-address",
        about="A recomputed activation in memory of a freed batch is sharded again.",
        file="parallel/context/sequences.py",
        old="        return memory is not None and not memory.expired()  # type: ignore[no-untyped-call]",
        new="        return memory is not None",
        tests=("tests/parallel/context/test_sequences.py::test_memory_of_a_freed_batch_belongs_to_another_tensor",),
    ),
    Fault(
        name="flex-attention-on-local-positions",
        about="The mask of flex attention is read at positions of the rank, not of the sequence.",
        file="parallel/tensor/global_tensor/flex_parts.py",
        old="            return modifier(*self._places(b, h, q), k)\n",
        new="            return modifier(b, h, q, k)\n",
        tests=(
            "tests/parallel/context/test_flex_attention.py::test_a_part_of_a_mask_has_the_rows_and_heads_of_the_whole",
        ),
    ),
    Fault(
        name="flex-scores-on-local-heads",
        about="The change of flex attention's scores is read at heads and positions of the rank.",
        file="parallel/tensor/global_tensor/flex_parts.py",
        old="            return modifier(score, *self._places(b, h, q), k)\n",
        new="            return modifier(score, b, h, q, k)\n",
        tests=("tests/parallel/context/test_flex_attention.py::test_every_grid_trains_as_one_process",),
    ),
    Fault(
        name="flex-blocks-that-overlap",
        about="A block of queries that overlaps two blocks of the whole mask sees the keys of one of them.",
        file="parallel/tensor/global_tensor/flex_parts.py",
        old="        return [*_listed((seen > 0) & ~full), *_listed(full)], function\n",
        new="        return [*_listed((bounded > 0) & (seen > 1)), *_listed(full)], function\n",
        tests=(
            "tests/parallel/context/test_flex_attention.py::test_a_part_of_a_mask_has_the_rows_and_heads_of_the_whole",
        ),
    ),
    Fault(
        name="flex-full-blocks-unseen",
        about="Blocks of flex attention without a hidden key are not computed.",
        file="kernels/ops/flex_attention.py",
        old="    return (kinds == FULL) | ((kinds == PARTIAL)",
        new="    return ((kinds == PARTIAL)",
        tests=("tests/parallel/kernel_injection/test_flex_calls.py::test_the_operator_is_flex_attention_of_torch",),
    ),
    Fault(
        name="flex-function-of-a-shard",
        about="A function of flex attention's scores that reads a shard ends in an error of torch without a remedy.",
        file="parallel/tensor/global_tensor/flex_parts.py",
        old="        if any(type(one) is GlobalTensor for one in _captured(modifier)):\n",
        new="        if any(type(one) is FlexPart for one in _captured(modifier)):\n",
        tests=("tests/parallel/kernel_injection/test_flex_calls.py::test_a_function_that_reads_a_shard_is_refused",),
    ),
    Fault(
        name="flex-attention-not-followed",
        about="Flex attention that a model calls through a function of its own is not followed.",
        file="parallel/model/method_globals.py",
        old="        if made is given and isinstance(given, FunctionType) and not _is_library(given):\n",
        new="        if made is given and isinstance(given, FunctionType) and _is_library(given):\n",
        tests=(
            "tests/parallel/kernel_injection/test_flex_calls.py::"
            "test_every_call_has_a_gradient_until_the_patches_are_removed",
        ),
    ),
)
