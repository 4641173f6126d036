"""Faults of lists of optimizers, and of updates of whole matrices that lie in parts."""

from tests.faults.fault import Fault

_PARITY = "tests/engine/parity/test_parity_optimizers.py"
_OWNERS = "tests/zero/optim/matrix/test_owner_exchange.py"
_AVERAGE = "tests/zero/optim/test_weight_average.py"
_KEPT = "tests/engine/parity/test_parity_preconditioned.py"
_ROUNDS = "tests/zero/optim/matrix/test_matrix_updates.py"
_SOAP = "tests/kernels/optim/test_preconditioned_rules.py"
_SHAMPOO = "tests/kernels/optim/test_preconditioned_rules.py"
_GROUPS = "tests/engine/optim/test_param_groups.py"

MATRIX_OPTIMIZERS = (
    Fault(
        name="last-match-wins",
        about="The last entry of a list whose pattern matches takes a parameter, not the first.",
        file="engine/optim/param_groups.py",
        old="in reversed(list(enumerate(config.before))):",
        new="in enumerate(config.before):",
        tests=(f"{_GROUPS}::test_the_first_entry_that_matches_takes_a_parameter_and_the_last_one_the_rest",),
    ),
    Fault(
        name="options-of-the-last-entry",
        about="Groups of an entry of a list are looked for in the last entry.",
        file="engine/optim/param_groups.py",
        old="_options(aliases, entries[taken[name]])",
        new="_options(aliases, entries[-1])",
        tests=(f"{_GROUPS}::test_groups_of_an_entry_are_for_its_own_parameters",),
    ),
    Fault(
        name="directions-not-gathered",
        about="An owner updates its matrices from its own part of the momentum, with zeros for those of other ranks.",
        file="zero/optim/matrix/owner_exchange.py",
        old="else _split(received[source], sizes)",
        new="else _split(torch.zeros_like(received[source]), sizes)",
        tests=(
            f"{_OWNERS}::test_pieces_come_to_their_owners_and_go_back",
            f"{_PARITY}::test_a_list_trains_as_one_process_of_torch",
        ),
    ),
    Fault(
        name="updates-of-the-wrong-rank-sent-back",
        about="Owners send every rank the part of an update that belongs to the first one.",
        file="zero/optim/matrix/owner_exchange.py",
        old="[[results[name][place] for name in mine] for place in places]",
        new="[[results[name][0] for name in mine] for place in places]",
        tests=(f"{_OWNERS}::test_pieces_come_to_their_owners_and_go_back",),
    ),
    Fault(
        name="one-owner-of-all-matrices",
        about="The first rank owns all matrices, and the others wait for it.",
        file="zero/optim/matrix/owner_exchange.py",
        old="        loads[chosen] += costs[name]\n",
        new="",
        tests=(f"{_OWNERS}::test_no_owner_has_more_than_a_fair_share_and_the_largest_matrix",),
    ),
    Fault(
        name="gathered-before-matrices",
        about="Parameters are gathered before their matrices are updated, so that other ranks go on with old ones.",
        file="zero/optim/sharded_optimizer.py",
        old="            if late is None or number not in late:\n",
        new="            late._missing.clear()\n            if True:\n",
        tests=(f"{_PARITY}::test_a_list_trains_as_one_process_of_torch",),
    ),
    Fault(
        name="parts-of-matrices-orthogonal",
        about="Where tensor ranks cut a matrix, the parts are put together in one order and taken apart in another.",
        file="zero/optim/matrix/matrix_updates.py",
        old="[_joined(_ranges(update, row, tp), update, row) for tp in range(len(kinds[0]))]",
        new="[_joined(_ranges(update, row, tp), update, row) for tp in reversed(range(len(kinds[0])))]",
        tests=(f"{_PARITY}::test_matrices_in_parts_train_as_one_process",),
    ),
    Fault(
        name="unused-matrices-updated",
        about="A matrix without a gradient in a step is decayed all the same.",
        file="zero/optim/matrix/matrix_updates.py",
        old="if name in step.weights and name not in step.unused:",
        new="if name in step.weights:",
        tests=(f"{_PARITY}::test_parameters_without_a_gradient_keep_weights_and_momenta",),
    ),
    Fault(
        name="matrix-traffic-not-planned",
        about="The plan leaves out what owners of matrices receive and send.",
        file="engine/planning/plan.py",
        old="            parts.append(Tally(self.matrix_owners.traffic(coord)))\n",
        new="            pass\n",
        tests=(f"{_PARITY}::test_bytes_sent_and_kept_are_those_of_the_plan",),
    ),
    Fault(
        name="average-counted-twice",
        about="The moving average of the weights takes each update in twice.",
        file="engine/step/rank_parts.py",
        old="            self.weights.moving.update()\n",
        new="            self.weights.moving.update()\n            self.weights.moving.update()\n",
        tests=(f"{_AVERAGE}::test_the_average_is_that_of_the_full_weights_after_each_update",),
    ),
    Fault(
        name="average-not-restored",
        about="A run that goes on from a checkpoint begins a new average.",
        file="zero/optim/averaged_weights.py",
        old='if any(name.startswith(f"{FAMILY}/") for name in stored) else ():',
        new="if not stored else ():",
        tests=(f"{_AVERAGE}::test_a_process_goes_on_with_its_average",),
    ),
    Fault(
        name="state-of-one-kind-planned",
        about="The plan counts as many optimizer values for every group of a list as for the first one.",
        file="engine/planning/budgets.py",
        old="sum(groups[segment.group].bytes(",
        new="sum(groups[0].bytes(",
        tests=(f"{_PARITY}::test_bytes_sent_and_kept_are_those_of_the_plan",),
    ),
    Fault(
        name="second-moments-in-the-old-order",
        about="SOAP orders the columns of a basis anew and leaves the second moments in the order from before.",
        file="kernels/optim/preconditioned_rules.py",
        old="state[SECOND].index_select(dim, order)",
        new="state[SECOND]",
        tests=(f"{_SOAP}::test_a_matrix_trains_as_the_paper_has_it",),
    ),
    Fault(
        name="roots-of-one-side-as-of-two",
        about="Shampoo takes the root -1/4 of a side although the other one has no preconditioner.",
        file="kernels/optim/preconditioned_rules.py",
        old="pow_(-0.5 / len(sides))",
        new="pow_(-0.25)",
        tests=(f"{_SHAMPOO}::test_a_side_that_is_too_long_leaves_the_other_the_root_of_both",),
    ),
    Fault(
        name="updates-counted-for-all-matrices",
        about="A matrix that had no gradient in some steps is updated as if it had had one in each.",
        file="zero/optim/matrix/matrix_updates.py",
        old='return int(group["step"]) - step.missed.get(name, 0)',
        new='return int(group["step"])',
        tests=(f"{_KEPT}::test_each_matrix_counts_its_own_updates",),
    ),
    Fault(
        name="rounds-one-after-another",
        about="A round of matrices begins only when the one before it has ended, so that no exchange hides.",
        file="zero/optim/matrix/matrix_updates.py",
        old="        for each in list(begun):\n",
        new="        for each in reversed(begun):\n",
        tests=(
            f"{_ROUNDS}::test_the_newest_round_begins_before_older_ones_go_on",
            f"{_ROUNDS}::test_a_round_is_gathered_while_the_one_before_is_computed",
        ),
    ),
    Fault(
        name="gathered-before-the-last-round",
        about="A bucket is gathered when the first of its matrices is updated, and not the last.",
        file="zero/optim/optimizer_tensors.py",
        old="        ready = [number for number, own in self._missing.items() if not own]\n",
        new="        ready = list(self._missing)\n",
        tests=(f"{_PARITY}::test_a_list_trains_as_one_process_of_torch",),
    ),
    Fault(
        name="state-of-matrices-kept-by-all",
        about="Every rank makes room for the preconditioners of all matrices, and not of those that it owns.",
        file="zero/optim/matrix/matrix_updates.py",
        old="for name in self._routes.made if not self.state else ():",
        new="for name in self._routes.rows if not self.state else ():",
        tests=(
            f"{_KEPT}::test_owners_keep_the_state_of_each_matrix_once",
            f"{_KEPT}::test_bytes_sent_and_kept_are_those_of_the_plan",
        ),
    ),
    Fault(
        name="state-of-cut-matrices-of-one-tensor-rank",
        about="A checkpoint has the state of a matrix that tensor ranks cut only if the first of them owns it.",
        file="engine/checkpoint/contents/local_tensors.py",
        old="(self.coord.tp == 0 or (updates.by_owner and row.dim is not None))",
        new="self.coord.tp == 0",
        tests=(f"{_KEPT}::test_tensor_ranks_store_what_they_own",),
    ),
)
