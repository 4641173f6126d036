"""Faults of traffic in fewer bits: codes, reductions by messages, gathers of codes, residuals."""

from tests.faults.fault import Fault

_CODEC = "tests/kernels/codecs/test_block_codec.py"
_REDUCTION = "tests/zero/reduce/test_encoded_reduction.py"
_ENGINES = "tests/zero/test_fewer_bits.py"
_FORMATS = "tests/zero/test_wire_formats.py"

FEWER_BITS = (
    Fault(
        name="own-shard-kept-exact",
        about="The owner of a shard computes with its exact weights, and the other data ranks with rounded ones.",
        file="zero/gather/encoded_gather.py",
        old="        self.codec.decode(self.full.view(ranks, -1), self.flat.params.view(ranks, -1))\n",
        new="        self.codec.decode(self.full.view(ranks, -1), self.flat.params.view(ranks, -1))\n"
        "        self.flat.params[self.flat.shard] = self.flat.weights.to(self.flat.params.dtype)\n",
        tests=(f"{_ENGINES}::test_all_data_ranks_compute_with_the_same_rounded_values",),
    ),
    Fault(
        name="masters-overwritten-by-codes",
        about="What a gather has rounded is taken for something that the user has written, and replaces the masters.",
        file="zero/optim/master_weights.py",
        old="    if flat.codec is not None and flat.rounds_in_gathers:",
        new="    if flat.codec is None and flat.rounds_in_gathers:",
        tests=(f"{_ENGINES}::test_masters_stay_exact_at_their_owner",),
    ),
    Fault(
        name="scale-of-the-neighbouring-block",
        about="Numbers are decoded with the scale of the block before theirs.",
        file="kernels/codecs/block_codec.py",
        old="    values = codes_RKB.float() * scale_RK1\n",
        new="    values = codes_RKB.float() * scale_RK1.roll(1, 1)\n",
        tests=(f"{_CODEC}::test_no_element_of_10000_blocks_errs_by_more_than_half_a_scale",),
    ),
    Fault(
        name="nan-lost-in-encoding",
        about="A gradient that is not finite is sent as zero, so that a step is made which had to be skipped.",
        file="kernels/codecs/block_codec.py",
        old="    codes = torch.where(finite, codes, float(-wire.largest - 1)).to(torch.int8)",
        new="    codes = codes.to(torch.int8)",
        tests=(f"{_CODEC}::test_what_is_not_finite_arrives_as_nan_at_its_place",),
    ),
    Fault(
        name="nan-kept-in-the-residual",
        about="A gradient that was not finite once stays in the residual and spoils every later step.",
        file="kernels/codecs/block_codec.py",
        old="        left = torch.where(finite, known - codes * scale_RK1, 0.0)",
        new="        left = x_RKB - codes * scale_RK1",
        tests=(f"{_REDUCTION}::test_a_nan_arrives_at_its_owner_and_leaves_no_trace_in_later_steps",),
    ),
    Fault(
        name="codes-cut-instead-of-rounded",
        about="Codes are cut towards zero, so that every weight and gradient that is sent is too small.",
        file="kernels/codecs/block_codec.py",
        old=".round_()",
        new=".trunc_()",
        tests=(f"{_CODEC}::test_no_element_of_10000_blocks_errs_by_more_than_half_a_scale",),
    ),
    Fault(
        name="denormal-scales",
        about="The scale of a block of the smallest numbers underflows, and they come out as infinite or NaN codes.",
        file="kernels/codecs/block_codec.py",
        old=".clamp_min(SMALLEST_SCALE)",
        new=".clamp_min(0.0)",
        tests=(
            f"{_CODEC}::test_zeros_stay_zero_and_denormal_numbers_err_by_less_than_the_smallest_normal_one",
            f"{_CODEC}::test_no_element_of_10000_blocks_errs_by_more_than_half_a_scale",
        ),
    ),
    Fault(
        name="halves-of-a-byte-swapped",
        about="The kernel that decodes 4 bits gives each number the place of its neighbour.",
        file="kernels/gpu/codecs.py",
        old="        tl.store(out + place + 1, odd.to(kind), mask=inside)",
        new="        tl.store(out + place + 1, even.to(kind), mask=inside)",
        tests=(f"{_CODEC}::test_triton_gives_the_bits_of_torch",),
    ),
    Fault(
        name="residual-added-twice",
        about="What an encoding leaves out is added two times to the next gradient.",
        file="kernels/codecs/block_codec.py",
        old="else values_Rs.float() + residual_Rs\n",
        new="else values_Rs.float() + 2 * residual_Rs\n",
        tests=(f"{_CODEC}::test_the_residual_is_what_the_code_leaves_out_and_is_added_once",),
    ),
    Fault(
        name="residual-of-the-node-sums-dropped",
        about="Error feedback covers the hop within nodes and not the one across them.",
        file="zero/reduce/encoded_reduction.py",
        old="        residual = self.residuals[hop] if self.residuals else None\n",
        new="        residual = self.residuals[hop] if self.residuals and not hop else None\n",
        tests=(f"{_REDUCTION}::test_with_error_feedback_the_bias_falls_as_one_over_the_steps",),
    ),
    Fault(
        name="sums-stay-in-their-node",
        about="The hop across nodes is left out, so each node trains on its own gradients.",
        file="zero/reduce/encoded_reduction.py",
        old="        self._send(self._encode(sums_As, 1), 1, out).wait()\n",
        new="        out.copy_(sums_As[self._comm.grid.index('dp') // self._hops[0].ranks])\n",
        tests=(f"{_REDUCTION}::test_on_two_nodes_sums_of_a_node_are_encoded_again",),
    ),
    Fault(
        name="messages-to-the-wrong-place-of-a-node",
        about="Within a node, shards go to the ranks of another place than that of their owners.",
        file="zero/reduce/encoded_reduction.py",
        old="        given_WAm = messages.view(nodes, within, -1).transpose(0, 1).contiguous()\n",
        new="        given_WAm = messages.view(within, nodes, -1)\n",
        tests=(f"{_REDUCTION}::test_on_two_nodes_sums_of_a_node_are_encoded_again",),
    ),
    Fault(
        name="blocks-over-two-parameters",
        about="Blocks hold the end of a parameter and the start of the next, so copies on tensor ranks drift apart.",
        file="engine/planning/flat_layouts.py",
        old="max(formats.alignment, block_of_codes(site_optimizer(config.outer, config.optimizer)))",
        new="block_of_codes(site_optimizer(config.outer, config.optimizer))",
        tests=(f"{_ENGINES}::test_copies_on_tensor_ranks_keep_equal_bits",),
    ),
    Fault(
        name="residuals-of-a-skipped-step-kept",
        about="What a skipped step has left out of its gradients is added to the next step.",
        file="engine/step/rank_parts.py",
        old="        self.scaled(0.0)\n\n    def undo_step(self)",
        new="        pass\n\n    def undo_step(self)",
        tests=(f"{_ENGINES}::test_a_skipped_step_leaves_no_residual",),
    ),
    Fault(
        name="residuals-not-saved",
        about="A resumed run starts with residuals of zero and does not go on as the run that was saved.",
        file="engine/checkpoint/run_state.py",
        old=" | states | self.residuals",
        new=" | states",
        tests=(f"{_ENGINES}::test_a_resumed_run_goes_on_bit_by_bit",),
    ),
    Fault(
        name="exact-weights-after-a-load",
        about="After a load data ranks compute with exact weights, until the first update rounds them.",
        file="engine/checkpoint/load.py",
        old="        if flat.rounds_in_gathers:\n",
        new="        if False:\n",
        tests=(f"{_ENGINES}::test_a_resumed_run_goes_on_bit_by_bit",),
    ),
    Fault(
        name="full-parameters-rounded",
        about="`with eng.full_parameters()` shows rounded weights, and writes them into the shards when it ends.",
        file="zero/gather/gatherer.py",
        old="self._whole.ask_alike(opened, exact=True)",
        new="self._whole.ask_alike(opened)",
        tests=(f"{_ENGINES}::test_what_full_parameters_shows_is_exact",),
    ),
)
