"""Faults of experts that data ranks share: gradients, rows, rounds, lists and state."""

from tests.faults.fault import Fault

_DISPATCH, _ROUTED, _LISTED = (f"parallel/experts/{name}.py" for name in ("dispatch", "routed", "listed"))
_PROOF, _GRID, _PLAN = "parallel/experts/proof.py", "parallel/grid.py", "engine/planning/plan.py"
_TRAINED = "tests/engine/test_shared_experts.py::test_shared_experts_train_as_one_process"
_STORED = (
    "tests/engine/checkpoint/test_expert_ranks.py::"
    "test_expert_ranks_save_every_element_once_and_load_from_any_number[saved0-wanted0-Routed]"
)
_SENT = "tests/parallel/experts/test_dispatch.py::test_a_row_is_sent_once_to_each_rank_of_its_experts"
_SHARED = "tests/parallel/experts/test_routed.py::test_a_shared_module_is_one_process_with_all_experts"
_BOUND = "tests/parallel/experts/test_routed.py::test_a_bound_of_the_rows_of_a_round_changes_no_result"
_LIST = "tests/parallel/experts/test_listed.py"
_LIST_SHARED = f"{_LIST}::test_a_shared_list_is_one_process_with_all_experts"
_TRAP = "tests/parallel/experts/test_proof.py::test_each_rule_refuses_its_trap"

EXPERTS = (
    Fault(
        name="experts-summed-over-data",
        about="Gradients of different experts are summed with each other, over all data ranks.",
        file=_GRID,
        old='return Spread(sharding, "edp_replicate", "edp", "edp", "edp_replicate", self.size(sharding))',
        new='return Spread(sharding, "edp_replicate", "dp", "edp", "edp_replicate", self.size(sharding))',
        tests=(f"{_TRAINED}[Routed-parallel0-0]",),
    ),
    Fault(
        name="experts-averaged-over-expert-ranks",
        about="Gradients of experts are divided by the ranks that share them, though each row was computed once.",
        file="zero/reduce/step_reducer.py",
        old="        wire = self._on_wire(grads)\n        if self._scatter:",
        new='        wire = self._on_wire(grads)\n        if progress.flat.bucket.spread.sums == "edp":\n'
        '            wire = wire.div_(self._comm.grid.size("ep"))\n        if self._scatter:',
        tests=(f"{_TRAINED}[Routed-parallel0-0]",),
    ),
    Fault(
        name="experts-not-summed-over-tensor-ranks",
        about="Each tensor rank trains stacked experts on its share of the rows alone.",
        file=_PLAN,
        old="partial=partial.union(shared.divided if shared is not None and config.tp > 1 else ()),",
        new="partial=partial,",
        tests=(f"{_TRAINED}[Routed-parallel2-3]",),
    ),
    Fault(
        name="listed-experts-summed-over-tensor-ranks",
        about="Listed experts, whose rows every tensor rank sends, get the sum of equal gradients.",
        file=_PLAN,
        old="partial=partial.union(shared.divided if shared is not None and config.tp > 1 else ()),",
        new="partial=partial.union(shared.cuts if shared is not None and config.tp > 1 else ()),",
        tests=(f"{_TRAINED}[Always-parallel3-0]",),
    ),
    Fault(
        name="norm-counts-experts-on-every-tensor-rank",
        about="The gradient norm counts an expert once for each tensor rank, so that clipping is too strong.",
        file="parallel/shard_table.py",
        old="any(each.holders[0] == holder.tp for each in self.ranges)",
        new="any(self.experts or each.holders[0] == holder.tp for each in self.ranges)",
        tests=(
            "tests/parallel/test_shard_table.py::test_each_expert_is_held_by_one_expert_rank_and_counted_once",
            f"{_TRAINED}[Always-parallel3-0]",
        ),
    ),
    Fault(
        name="norm-counts-experts-of-one-rank",
        about="The gradient norm has only the experts of the first expert rank.",
        file="parallel/shard_table.py",
        old="return holder.pp == self.owners[0] and any(",
        new="return holder.pp == self.owners[0] and not (self.experts and holder.ep) and any(",
        tests=(
            "tests/parallel/test_shard_table.py::test_each_expert_is_held_by_one_expert_rank_and_counted_once",
            f"{_TRAINED}[Routed-parallel0-0]",
        ),
    ),
    Fault(
        name="weights-without-gradient",
        about="The weights of experts travel without a gradient, so that the router does not learn from results.",
        file=_ROUTED,
        old="whole = (x[token], weight, local",
        new="whole = (x[token], weight.detach(), local",
        tests=(f"{_SHARED}[even]",),
    ),
    Fault(
        name="rows-without-gradient",
        about="Rows travel without a gradient, so that layers before the experts do not learn through them.",
        file=_ROUTED,
        old="whole = (x[token], weight, local",
        new="whole = (x[token].detach(), weight, local",
        tests=(f"{_SHARED}[even]",),
    ),
    Fault(
        name="rank-without-rows-leaves-the-backward",
        about="A rank whose experts get no rows does not join the exchange of gradients, and others wait for it.",
        file=_ROUTED,
        old="ties = (rows, weight, *self._module.parameters()) if len(row) == 0 else ()",
        new="ties = ()",
        tests=(f"{_SHARED}[an idle rank]",),
    ),
    Fault(
        name="rank-without-rows-sends-again-too-late",
        about="A rank without rows in a round sends gradients before it sends rows again, and others the reverse.",
        file=_DISPATCH,
        old="        _ = ctx.saved_tensors\n",
        new="",
        tests=(f"{_SHARED}[one expert]",),
    ),
    Fault(
        name="last-round-dropped",
        about="Rows after the last full round are sent to nobody.",
        file=_DISPATCH,
        old="range(0, max(most, 1), step)",
        new="range(0, max(most - step + 1, 1), step)",
        tests=(f"{_SENT}[3-eight to one]", f"{_BOUND}[3-eight to one]"),
    ),
    Fault(
        name="rounds-of-one-rank",
        about="A rank makes as many rounds as its own rows need, and others more.",
        file=_DISPATCH,
        old="most = max(map(max, self._counts))",
        new="most = max(self._counts[self._index])",
        tests=(f"{_SENT}[1-no token on a rank]", f"{_BOUND}[1-uneven]"),
    ),
    Fault(
        name="owner-of-even-shares",
        about="Rows of an expert go to the rank that would hold it if ranks held equally many.",
        file=_DISPATCH,
        old="owner = torch.bucketize(numbers, bounds[1:-1], right=True)",
        new="owner = (numbers // (bounds[-1] // ranks)).clamp(0, ranks - 1)",
        tests=(f"{_SENT}[None-uneven]", f"{_SHARED}[uneven]"),
    ),
    Fault(
        name="rows-of-nobody-sent",
        about="Rows that no expert is asked for, such as padding, are sent to the first rank.",
        file=_DISPATCH,
        old=".masked_fill(numbers < 0, ranks)",
        new="",
        tests=(f"{_SENT}[None-rows of nobody]",),
    ),
    Fault(
        name="second-pass-draws-other-noise",
        about="The second pass of a block draws other random numbers than the first, and asks other experts.",
        file=_LISTED,
        old="                generator.set_state(state)\n",
        new="                pass\n",
        tests=(f"{_LIST}::test_noise_is_drawn_once_by_every_generator",),
    ),
    Fault(
        name="both-passes-move-buffers",
        about="Buffers and counters of a block move twice in each call.",
        file=_LISTED,
        old="out = self._state.run_twice(ask, answer, (*args, *kwargs.values()))",
        new="ask()\n            out = answer()",
        tests=(f"{_LIST_SHARED}[4-rows0]",),
    ),
    Fault(
        name="answers-by-expert",
        about="Answers go back in the order of experts first and of ranks second, which other ranks read otherwise.",
        file=_LISTED,
        old="[answers[index] for index in sorted(answers)]",
        new="[answers[index] for index in answers]",
        tests=(f"{_LIST_SHARED}[4-rows0]",),
    ),
    Fault(
        name="rows-of-the-second-pass-not-compared",
        about="A block that asks for other rows in its second pass gets the answers to those of the first.",
        file=_LISTED,
        old="for expert in self._experts) or self._asked_others():",
        new="for expert in self._experts):",
        tests=(f"{_LIST}::test_other_rows_in_the_second_pass_are_an_error_that_names_the_block",),
    ),
    Fault(
        name="no-decay-of-experts-without-rows",
        about="An expert that is called without rows has no gradient, so that its weights do not decay.",
        file=_LISTED,
        old="if not called[:, number].any():",
        new="if not counts[:, number].any():",
        tests=(f"{_LIST}::test_an_expert_that_is_called_without_rows_has_a_gradient_of_zeros",),
    ),
    Fault(
        name="full-state-of-one-expert-rank",
        about="The full state dict has the experts of one rank, and zeros for the others.",
        file="engine/checkpoint/full_state.py",
        old="if row.experts:  # an expert of one rank",
        new="if False:",
        tests=(f"{_TRAINED}[Always-parallel3-0]",),
    ),
    Fault(
        name="checkpoint-of-one-expert-rank",
        about="A checkpoint lacks the experts of all ranks but the first.",
        file="engine/checkpoint/contents/local_tensors.py",
        old="if first and row.held(holder._replace(pp=row.owners[0])) else None",
        new="if first and not (row.experts and holder.ep) else None",
        tests=(_STORED,),
    ),
    Fault(
        name="moments-of-other-expert-ranks",
        about="A run with another number of expert ranks reads the moments of other experts from a checkpoint.",
        file="engine/checkpoint/contents/local_tensors.py",
        old="        part = local_region(row, self.grid.holder(coord))\n        found =",
        new="        part = local_region(row, self.grid.holder(coord)._replace(ep=0))\n        found =",
        tests=(_STORED,),
    ),
    Fault(
        name="moments-of-experts-not-loaded",
        about="Experts keep the moments from before the load of a checkpoint with other expert ranks.",
        file="engine/checkpoint/load.py",
        old="self._fill(held for held in self.local_tensors.state(moments) if not self._left_out(held.tensor))",
        new="own = self.local_tensors.state(moments)\n"
        "        self._fill(held for held in own if not held.row.experts and not self._left_out(held.tensor))",
        tests=(_STORED,),
    ),
    Fault(
        name="trial-in-evaluation-alone",
        about="Experts that drop rows only in training are shared, though a rank drops others than one process.",
        file=_PROOF,
        old="self._twin.train(training)\n        x, n, w",
        new="self._twin.train(False)\n        x, n, w",
        tests=(_TRAP,),
    ),
)
