"""Faults of the grid, of collectives and messages, and of what ranks agree on."""

from tests.faults.fault import Fault

GRID_AND_COMMUNICATION = (
    Fault(
        name="grid-axes-in-another-order",
        about="Data ranks lie next to each other where tensor ranks should, so groups are formed of the wrong ranks.",
        file="parallel/grid.py",
        old="block, tp = divmod(rank, self.tp)",
        new="tp, block = divmod(rank, self.dp * self.pp)",
        tests=("tests/parallel/test_grid.py::test_coord_and_rank_at_are_inverse_and_run_in_order",),
    ),
    Fault(
        name="replica-without-tensor-ranks",
        about="A replica leaves its other tensor ranks out, so nobody compares the batches that they are given.",
        file="parallel/grid.py",
        old="for pp in range(self.pp) for tp in range(self.tp))",
        new="for pp in range(self.pp) for tp in (here.tp,))",
        tests=("tests/parallel/test_grid.py::test_a_replica_is_all_ranks_of_one_data_coordinate",),
    ),
    Fault(
        name="maximum-is-a-sum",
        about="A maximum over ranks that share memory is a sum, so the softmax of large logits underflows.",
        file="parallel/comm/shared_memory.py",
        old="_combine(slots, piece_n, op)",
        new='_combine(slots, piece_n, "sum")',
        tests=("tests/parallel/comm/test_shared_memory.py::test_all_reduce_of_every_size",),
    ),
    Fault(
        name="last-piece-not-sent",
        about="The last piece of a tensor that is larger than a slot of shared memory is never reduced.",
        file="parallel/comm/shared_memory.py",
        old="for start in range(0, elements, size))",
        new="for start in range(0, max(elements - size, 1), size))",
        tests=("tests/parallel/comm/test_shared_memory.py::test_all_reduce_of_every_size",),
    ),
    Fault(
        name="strided-sum-not-copied-back",
        about="The sum of a tensor that is not contiguous stays in a copy, and the rank goes on with its own summand.",
        file="parallel/comm/shared_memory.py",
        old="        if not tensor.is_contiguous():\n            tensor.copy_(flat.view(tensor.shape))\n",
        new="",
        tests=("tests/parallel/comm/test_shared_memory.py::test_shapes_strides_and_gradients_do_not_matter",),
    ),
    Fault(
        name="barrier-without-time-limit",
        about="The time limit of a barrier is never armed, so a job whose rank has died hangs.",
        file="parallel/comm/host_barrier.py",
        old="ready.poll(round(1e3 * self._seconds))",
        new="ready.poll()",
        tests=("tests/parallel/comm/test_host_barrier.py::test_a_rank_that_does_not_come_is_given_up",),
    ),
    Fault(
        name="narrow-sum-in-bf16",
        about="bf16 gradients of many data ranks are added in bf16, so small ones are lost.",
        file="parallel/comm/torch_backend.py",
        old="total = first.float() if first.element_size() < 4 else first",
        new="total = first",
        tests=("tests/parallel/comm/test_comm_ranks.py::test_reduce_scatter_adds_in_rank_order_every_time",),
    ),
    Fault(
        name="gathered-slices-misplaced",
        about="A large all-gather puts the slices that it receives into the places of other ranks.",
        file="parallel/comm/torch_backend.py",
        old="dist.irecv(slices[source], group=group, group_src=source)) for source in sources]",
        new="dist.irecv(slices[to], group=group, group_src=source)) for source, to in zip(sources, targets)]",
        tests=("tests/parallel/comm/test_comm_ranks.py::test_each_slice_of_a_large_gather_is_in_its_place",),
    ),
    Fault(
        name="sends-before-receives",
        about="Large slices are sent before receives are announced, so a link carries one way after the other.",
        file="parallel/comm/torch_backend.py",
        old="    waits += [_finisher(dist.isend(given[target], group=group, group_dst=target))"
        " for target in targets]\n",
        new="    sent = [_finisher(dist.isend(given[target], group=group, group_dst=target)) for target in targets]\n"
        "    waits = sent + [_finisher(dist.irecv(slices[s], group=group, group_src=s)) for s in sources]\n",
        tests=("tests/parallel/comm/test_all_to_all.py::test_large_slices_arrive_and_receives_are_posted_first",),
    ),
    Fault(
        name="flows-share-a-tag",
        about="State and activations between two stages share a tag, so a stage may take one for the other.",
        file="parallel/comm/torch_backend.py",
        old='tag = 3 * place + ("state", "forward", "backward").index(channel.flow)',
        new="tag = place",
        tests=("tests/parallel/comm/test_comm_ranks.py::test_flows_between_two_stages_do_not_mix",),
    ),
    Fault(
        name="group-with-torchs-time-limit",
        about="A group waits as long as torch says, so a job whose rank has died stands still for half an hour.",
        file="parallel/comm/world.py",
        old="wait = group_timeout() if timeout is None else timeout",
        new="wait = timeout",
        tests=("tests/parallel/comm/test_comm_ranks.py::test_every_group_waits_as_long_as_it_was_told",),
    ),
    Fault(
        name="failure-told-to-nobody",
        about="A rank that cannot load raises alone, and the other ranks go on with another checkpoint than it.",
        file="parallel/comm/agreement.py",
        old="    if first:\n        raise CheckpointError(first) from None",
        new="    if first and problem:\n        raise CheckpointError(first) from None",
        tests=(
            "tests/parallel/comm/test_agreement.py::test_all_raise_the_problem_of_the_first_rank_with_the_advice_of_rank_0",
        ),
    ),
)
