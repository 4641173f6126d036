"""Faults of modules of positions (proof, run on context ranks, tiles) and of masks by recipe."""

from tests.faults.fault import Fault

_PROOF, _RUN = "parallel/context/rows/rowwise_proof.py", "parallel/context/rows/rowwise.py"
_RECIPE = "parallel/context/recipe.py"
_TILES = "parallel/activation_checkpointing/tiles.py"
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
        name="positions-run-behind-a-hook",
        about="A hook inside a module of positions receives the positions of one rank only.",
        file=_RUN,
        old="        if any(other.startswith(inside) for other in mixing) or is_heard(module):",
        new="        if any(other.startswith(inside) for other in mixing):",
        tests=(f"{_ROWS}::test_a_module_is_refused_while_a_hook_listens_inside",),
    ),
    Fault(
        name="positions-of-tensor-ranks-run-local",
        about="A norm on positions that tensor ranks shard loses the other ranks' gradient of its weight.",
        file=_RUN,
        old=' if one.views.axis.name == "cp"), None)\n        if first',
        new="), None)\n        if first",
        tests=(f"{_ROWS}::test_a_tensor_that_tensor_ranks_shard_alone_stays_a_global_one",),
    ),
    Fault(
        name="strides-of-one-rank-in-a-trace",
        about="Code between stages is refused where the strides of a rank's shard allow no view.",
        file="parallel/tensor/global_tensor/rules/shapes.py",
        old="        if is_watched():  # strides",
        new="        if not is_watched():  # strides",
        tests=(f"{_ROWS}::test_code_between_stages_attends_and_reshapes_on_context_ranks",),
    ),
    Fault(
        name="attention-traced-with-more-operations",
        about="Attention in code between stages is refused, because its trace has an operation that no run has.",
        file="parallel/context/key_flow.py",
        old="            whole = local.new_empty(parcel.boxes.made)\n",
        new="            whole = local.detach().new_empty(parcel.boxes.made)\n",
        tests=(f"{_ROWS}::test_code_between_stages_attends_and_reshapes_on_context_ranks",),
    ),
    Fault(
        name="tiles-draw-other-masks",
        about="Modules with dropout run in tiles, which draw other masks than the whole module.",
        file=_TILES,
        old="if not any(form.draws for form in each.forms))",
        new="if each.forms)",
        tests=(f"{_TILED}::test_a_module_with_dropout_stays_whole_and_trains_as_one_process",),
    ),
    Fault(
        name="tiles-keep-intermediate-tensors",
        about="Tiles keep what they compute until backward, so that they save no memory.",
        file=_TILES,
        old="            if torch.is_grad_enabled():",
        new="            if not torch.is_grad_enabled():",
        tests=(f"{_TILED}::test_tiles_alone_halve_the_peak_of_a_long_step",),
    ),
    Fault(
        name="recipes-lose-the-last-key",
        about="Queries do not see the last of the keys that their mask allows.",
        file=_RECIPE,
        old="len(seen) - seen.flip(0).argmax()",
        new="len(seen) - 1 - seen.flip(0).argmax()",
        tests=("tests/parallel/context/test_recipe.py::test_packed_and_padded_batches_train_as_one_process",),
    ),
    Fault(
        name="recipes-make-the-whole-mask",
        about="Attention makes the mask of all queries and keys before it reads some rows.",
        file=_RECIPE,
        old="        return _box(self.made, wanted) if self.made is not None else self.part(wanted)",
        new="        return _box(self.whole(), wanted)",
        tests=("tests/parallel/context/test_recipe.py::test_no_mask_is_made_whole",),
    ),
    Fault(
        name="rows-not-local-with-tensor-ranks",
        about="Modules of positions run by the rules of global tensors where tensor ranks shard them.",
        file="engine/planning/analysis.py",
        old="tokens, on_ranks = config.activation_checkpointing.tile_tokens, config.cp > 1",
        new="tokens, on_ranks = config.activation_checkpointing.tile_tokens, config.cp > 1 and config.tp == 1",
        tests=(
            "tests/parallel/context/test_rowwise.py"
            "::test_modules_of_positions_run_on_local_tensors_with_tensor_ranks[autograd function-{}]",
        ),
    ),
)
