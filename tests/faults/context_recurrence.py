"""Faults of convolutions and recurrences over context ranks: halos, states, their gradients and resets."""

from tests.faults.fault import Fault

_ROWS, _RELAY, _PLACED, _HALO = (
    f"parallel/context/recurrence/{name}.py" for name in ("moved_rows", "relay", "placed", "halo")
)
_TESTS = "tests/parallel/context/test_recurrences.py"
_TRAINED = f"{_TESTS}::test_layers_along_positions_train_as_one_process"

CONTEXT_RECURRENCE = (
    Fault(
        name="halo-left-out",
        about="The first outputs of a run of a convolution read zeros in place of the rows of the rank before.",
        file=_ROWS,
        old="            received = _exchanged(axis, rows, _sizes(moves), moves.gets, first)",
        new="            received = torch.zeros_like(_exchanged(axis, rows, _sizes(moves), moves.gets, first))",
        tests=(f"{_TRAINED}[causal conv-cp2]",),
    ),
    Fault(
        name="gradient-of-a-halo-dropped",
        about="Rows that another rank read in its halo get the gradient of their own rank only.",
        file=_ROWS,
        old="                    own[start:stop] += received[place : place + stop - start]",
        new="                    own[start:stop] += 0 * received[place : place + stop - start]",
        tests=(f"{_TRAINED}[causal conv-cp2]",),
    ),
    Fault(
        name="halo-taken-from-the-other-run",
        about="A window of a zig-zag sharding reads the last rows of the rank's earlier run instead of the neighbours.",
        file=_HALO,
        old="        start += stop - first + reach\n",
        new="        start += stop - first\n",
        tests=(f"{_TRAINED}[causal conv-cp2]",),
    ),
    Fault(
        name="state-not-passed",
        about="A recurrence begins anew, from zeros, on every rank.",
        file=_RELAY,
        old="            return received.view(self.shape)",
        new="            return torch.zeros_like(received).view(self.shape)",
        tests=(f"{_TRAINED}[scan-cp2]",),
    ),
    Fault(
        name="gradient-of-a-state-dropped",
        about="Positions of earlier ranks get no gradient through the state of a recurrence.",
        file=_RELAY,
        old="        total = received.view(len(self.targets), *self.shape).sum(0)",
        new="        total = received.view(len(self.targets), *self.shape).sum(0).mul(0)",
        tests=(f"{_TRAINED}[scan-cp2]",),
    ),
    Fault(
        name="state-not-reset-between-documents",
        about="A state that a document's end sets to zero in place goes on to the next rank as it was before.",
        file=_PLACED,
        old="        state_of(target).relay.writes += 1\n",
        new="",
        tests=(f"{_TESTS}::test_a_reset_in_place_at_a_border_reaches_the_next_rank[cp2]",),
    ),
    Fault(
        name="scan-without-a-trial",
        about="A function that reads all positions runs on each rank's positions, because it returns a state.",
        file="parallel/context/recurrence/scans.py",
        old="    return along[0] if close and needed else None",
        new="    return along[0]",
        tests=(f"{_TESTS}::test_what_cannot_be_followed_is_gathered_and_named[trap]",),
    ),
    Fault(
        name="root-tried-on-negative-numbers",
        about="An autograd function that is defined for positive numbers gathers the sequence, or is refused.",
        file="parallel/context/rows/functions.py",
        old="for domain in (Tensor.clone, torch.sigmoid))",
        new="for domain in (Tensor.clone,))",
        tests=(f"{_TESTS}::test_a_custom_function_of_single_positions_gathers_nothing",),
    ),
    Fault(
        name="state-moved-to-its-device-on-all-ranks",
        about="A loop that moves its state to the device of the inputs sends the state to all ranks at every position.",
        file=_PLACED,
        old='        return torch.device("meta")\n',
        new="        return value\n",
        tests=(f"{_TESTS}::test_a_state_passes_each_border_once[reset loop]",),
    ),
)
