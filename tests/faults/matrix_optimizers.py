"""Faults of lists of optimizers, and of updates of whole matrices that lie in parts."""

from tests.faults.fault import Fault

_PARITY = "tests/engine/parity/test_parity_optimizers.py"
_OWNERS = "tests/zero/optim/test_owner_exchange.py"
_AVERAGE = "tests/zero/optim/test_weight_average.py"
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
        file="zero/optim/owner_exchange.py",
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
        file="zero/optim/owner_exchange.py",
        old="[[results[name][place] for name in mine] for place in places]",
        new="[[results[name][0] for name in mine] for place in places]",
        tests=(f"{_OWNERS}::test_pieces_come_to_their_owners_and_go_back",),
    ),
    Fault(
        name="one-owner-of-all-matrices",
        about="The first rank owns all matrices, and the others wait for it.",
        file="zero/optim/owner_exchange.py",
        old="        loads[chosen] += costs[name]\n",
        new="",
        tests=(f"{_OWNERS}::test_no_owner_has_more_than_a_fair_share_and_the_largest_matrix",),
    ),
    Fault(
        name="gathered-before-matrices",
        about="Parameters are gathered before their matrices are updated, so that other ranks go on with old ones.",
        file="zero/optim/sharded_optimizer.py",
        old="            if number not in late:\n",
        new="            late.clear()\n            if True:\n",
        tests=(f"{_PARITY}::test_a_list_trains_as_one_process_of_torch",),
    ),
    Fault(
        name="parts-of-matrices-orthogonal",
        about="Where tensor ranks cut a matrix, the parts are put together in one order and taken apart in another.",
        file="zero/optim/matrix_updates.py",
        old="[_joined(_ranges(update, row, tp), update, row) for tp in range(len(parts))]",
        new="[_joined(_ranges(update, row, tp), update, row) for tp in reversed(range(len(parts)))]",
        tests=(f"{_PARITY}::test_matrices_in_parts_train_as_one_process",),
    ),
    Fault(
        name="unused-matrices-updated",
        about="A matrix without a gradient in a step is decayed all the same.",
        file="zero/optim/matrix_updates.py",
        old="                if slot.name not in unused:\n",
        new="                if True:\n",
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
        file="engine/step/update.py",
        old="            runtime.average.update()\n",
        new="            runtime.average.update()\n            runtime.average.update()\n",
        tests=(f"{_AVERAGE}::test_the_average_is_that_of_the_full_weights_after_each_update",),
    ),
    Fault(
        name="average-not-restored",
        about="A run that goes on from a checkpoint begins a new average.",
        file="zero/optim/weight_average.py",
        old='if all(f"{FAMILY}/{name}" in stored for name in place.names()):',
        new="if not place.names():",
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
)
