"""Faults of modules of positions: their proof, their run on context ranks, and their tiles."""

from tests.faults.fault import Fault

_PROOF, _RUN = "parallel/context/rowwise_proof.py", "parallel/context/rowwise.py"
_TILES, _SELECTIVE = "parallel/activation_checkpointing/tiles.py", "parallel/activation_checkpointing/selective.py"
_TRAPS = "tests/parallel/context/test_rowwise.py::test_a_module_that_mixes_positions_or_has_state_is_refused"
_ROWS = "tests/parallel/context/test_rowwise.py"
_TILED = "tests/parallel/activation_checkpointing/test_tiles.py"

CONTEXT_ROWS = (
    Fault(
        name="positions-proven-by-values-alone",
        about="A module with a backward that mixes positions runs on the positions of a rank, with wrong gradients.",
        file=_PROOF,
        old="        return all(self._close(one, self._kept(other, dim, keep)) for one, other, dim in pairs)",
        new="        return True or bool(pairs)",
        tests=(f"{_TRAPS}[backward that mixes]",),
    ),
    Fault(
        name="positions-proven-without-state",
        about="A module that counts its calls or keeps activations is taken for one of positions.",
        file=_PROOF,
        old="        if drawn() or not _same_state(before, _state(self._twin)):",
        new="        if drawn():",
        tests=(f"{_TRAPS}[counter]",),
    ),
    Fault(
        name="positions-proven-with-own-draws",
        about="A module that adds noise is taken for one of positions, so that ranks draw other noise.",
        file=_PROOF,
        old="        if drawn() or not _same_state(before, _state(self._twin)):",
        new="        if not _same_state(before, _state(self._twin)):",
        tests=(f"{_TRAPS}[dropout of channels]",),
    ),
    Fault(
        name="positions-run-behind-a-hook",
        about="A hook inside a module of positions receives the positions of one rank only.",
        file=_RUN,
        old="        if any(other.startswith(inside) for other in mixing) or is_heard(module):",
        new="        if any(other.startswith(inside) for other in mixing):",
        tests=(f"{_ROWS}::test_a_module_is_refused_while_a_hook_listens_inside",),
    ),
    Fault(
        name="tiles-draw-other-masks",
        about="Dropout draws another mask when a tile runs again in backward.",
        file=_TILES,
        old="use_reentrant=False, preserve_rng_state=draws)",
        new="use_reentrant=False, preserve_rng_state=False)",
        tests=(f"{_TILED}::test_dropout_in_a_tile_draws_the_same_mask_again",),
    ),
    Fault(
        name="tiles-keep-intermediate-tensors",
        about="Tiles keep what they compute until backward, so that they save no memory.",
        file=_TILES,
        old="            if torch.is_grad_enabled():",
        new="            if not torch.is_grad_enabled():",
        tests=(f"{_TILED}::test_tiles_alone_halve_the_peak_of_a_long_step",),
    ),
)
