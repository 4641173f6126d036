"""Plans as data, and every sentence that a wrong plan is answered with. No processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import ConfigError, PlanError
from engine.kernels.dispatch import REFERENCE
from engine.parallel.kernel_injection.replacements import ActivatedLinear, injected_activation
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.shard_table import Range
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, LayerCut, ParameterCut, TensorPlan
from tests.models import nano
from tests.parallel.tensor import models
from tests.parallel.tensor.plans import written_plan

NANO = {
    "*.c_attn": "column:3 head:8", "*.c_proj": "row", "*.fc": "column", "*.proj": "row",
    "wte": "vocabulary", "lm_head": "vocabulary",
}  # fmt: skip


def refusal(model: nn.Module, setting: Any, tp: int = 2) -> str:
    with pytest.raises(PlanError) as caught:
        find_tensor_plan(model, setting, tp)
    return str(caught.value)


class Pair(nn.Module):
    """Two layers, of which one feeds the other."""

    def __init__(self, inputs: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)
        self.norm = nn.LayerNorm(inputs)
        self.count: Any = hidden


PAIR = {"up": "column", "down": "row"}


def in_model(module: nn.Module) -> nn.Module:
    """A model with ``module`` as its only block."""
    return nn.ModuleDict({"block": module})


# plans


def written(model: nn.Module, tp: int = 2) -> TensorPlan:
    """The plan that a user writes for ``model``."""
    return find_tensor_plan(model, written_plan(model), tp)


def test_the_plan_of_the_reference_decoder() -> None:
    plan = written(models.decoder(tied=True))
    assert plan.source == "parallel.tensor_plan" and not plan.attributes and not plan.partial
    assert plan.layers["blocks.1.attention.query"] == LayerCut(
        "blocks.1.attention.query", "column", "blocks.1.attention"
    )
    assert plan.layers["blocks.1.down"] == LayerCut("blocks.1.down", "row", "blocks.1")
    assert plan.layers["tokens"].kind == "embedding" and plan.layers["head"].kind == "head"
    assert plan.parameters["tokens.weight"] == ParameterCut(0, (Range(0, 31, (0,)), Range(31, 61, (1,))))
    assert plan.parameters["blocks.0.down.weight"] == ParameterCut(1, (Range(0, 64, (0,)), Range(64, 128, (1,))))
    assert "blocks.0.down.bias" not in plan.parameters and "blocks.0.up.bias" in plan.parameters
    assert "head.weight" not in plan.parameters  # its first name is that of the embedding


def test_the_plan_of_gpt2_cuts_thirds_along_the_outputs_of_conv1d() -> None:
    plan = written(models.gpt2(), 2)
    cut = plan.parameters["transformer.h.0.attn.c_attn.weight"]
    assert cut.dim == 1 and plan.parameters["transformer.h.0.attn.c_attn.bias"] == ParameterCut(0, cut.ranges)
    assert [part.holders for part in cut.ranges] == [(0,), (1,)] * 3
    assert plan.parameters["transformer.h.0.mlp.c_proj.weight"].dim == 0
    changes = {(change.attribute, change.value) for change in plan.attributes}
    assert changes == {("split_size", 16), ("num_heads", 2)}


def test_kv_heads_are_shared_where_there_are_fewer_than_ranks() -> None:
    plan = written(models.llama(kv_heads=2), 4)
    cut = plan.parameters["model.layers.0.self_attn.k_proj.weight"]
    assert cut == ParameterCut(0, (Range(0, 8, (0, 1)), Range(8, 16, (2, 3))))
    assert plan.attributes[0] == AttributeChange("model.layers.0.self_attn", "num_key_value_groups", 1)


def test_head_norms_are_partial() -> None:
    plan = written(models.qwen3(), 2)
    assert plan.partial == {
        f"model.layers.{layer}.self_attn.{norm}_norm.weight" for layer in range(2) for norm in ("q", "k")
    }


def test_a_plan_needs_no_memory() -> None:
    with torch.device("meta"):
        assert written(models.gpt2(), 4).parameters


def test_a_plan_from_a_mapping_and_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(NANO))
    written, given = find_tensor_plan(nano(), str(path), 2), find_tensor_plan(nano(), NANO, 2)
    assert (written.source, given.source) == (str(path), "parallel.tensor_plan")
    assert written.parameters == given.parameters and written.layers == given.layers
    assert given.layers["h.0.fc"].region == "h.0"


def test_one_rank_cuts_nothing_but_still_reads_the_patterns() -> None:
    assert not find_tensor_plan(nano(), NANO, 1).layers
    assert not find_tensor_plan(Pair(), PAIR, 1).parameters
    assert "matches no module" in refusal(Pair(), PAIR | {"upp": "column"}, 1)


# sizes


def test_sizes_that_do_not_fit_list_those_that_do() -> None:
    llama, gpt2 = models.llama(kv_heads=2), models.gpt2()
    assert refusal(llama, written_plan(llama), 3) == (
        "tensor = 3 neither divides nor is a multiple of the 4 heads of width 8 of model.layers.0.self_attn.q_proj; "
        "choose a size that fits the whole model: 1, 2, 4."
    )
    assert refusal(gpt2, written_plan(gpt2), 8) == (
        "tensor = 8 does not divide the 4 heads of width 8 of transformer.h.0.attn.c_proj; "
        "choose a size that fits the whole model: 1, 2, 4."
    )
    assert refusal(Pair(), PAIR, 5) == (
        "tensor = 5 does not divide the 12 outputs of up; choose a size that fits the whole model: 1, 2, 3, 4, 6, 12."
    )
    few = nn.ModuleDict({"pair": Pair(), "rows": nn.Embedding(3, 8)})
    assert refusal(few, {"*.up": "column", "*.down": "row", "rows": "vocabulary"}, 4) == (
        "tensor = 4 is more than the 3 vocabulary rows of rows; choose a size that fits the whole model: 1, 2, 3."
    )
    assert refusal(Pair(), PAIR | {"": "replicate"}, 2).startswith("parallel.tensor_plan: '' matches no module")


def test_heads_that_do_not_make_up_the_outputs() -> None:
    assert refusal(Pair(), {"up": "column head:5", "down": "row"}) == (
        "up has 12 outputs, but its style 'column head:5' needs a multiple of 5 (head width 5 times 1 fused part); "
        "set another head:WIDTH or fused:PARTS in the style of up in parallel.tensor_plan."
    )


# patterns and styles


def test_a_pattern_that_names_nothing() -> None:
    assert refusal(models.decoder(), {"blocks.*.attention.querry": "column"}) == (
        "parallel.tensor_plan: 'blocks.*.attention.querry' matches no module and no parameter; similar names are "
        "blocks.*.attention.query, blocks.*.attention.key, blocks.*.attention.query.bias; write a pattern of whole "
        "names, with * for any characters."
    )
    assert refusal(Pair(), {"zzz": "row"}) == (
        "parallel.tensor_plan: 'zzz' matches no module and no parameter; the model has up, down, norm, up.weight, "
        "up.bias, down.weight, down.bias, norm.weight; write a pattern of whole names, with * for any characters."
    )


def test_two_styles_for_one_module() -> None:
    assert refusal(Pair(), {"u*": "column", "*p": "row"}) == (
        "up gets two styles, 'column' from 'u*' and 'row' from '*p', but takes only one; narrow one of the patterns."
    )


@pytest.mark.parametrize("style", ["colum", "column:0", "row:2", "vocabulary head:4", "column row", "", "divide:",
                                   "column divide:a", "ratio:a=b"])  # fmt: skip
def test_styles_that_are_not_in_the_language(style: str) -> None:
    said = refusal(Pair(), {"up": style})
    assert said.startswith(f"parallel.tensor_plan has the style {style!r}, but ")
    assert said.endswith(
        "is no word of a style; write column, column+gather, row or cut:0 (each may be followed by fused:3, head:64, "
        "rows:0-4/4-8 and view), vocabulary, experts, partial, replicate, divide:a,b, set:a=2, ratio:a=q/k or "
        "heads:a=q."
    )


def test_files_that_hold_no_plan(tmp_path: Path) -> None:
    for text, said in (
        (None, "cannot be read (No such file or directory); name a JSON file with"),
        ("{", "cannot be read (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); name"),
        ('{"a": 3}', "must contain a JSON object from name patterns to styles; write it as"),
        ("[]", "must contain a JSON object from name patterns to styles; write it as"),
    ):
        path = tmp_path / "plan.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            find_tensor_plan(Pair(), str(path), 2)
        assert str(caught.value).startswith(f"parallel.tensor_plan = {str(path)!r} {said}")


# modules that a style does not suit


def test_styles_on_the_wrong_module() -> None:
    assert refusal(Pair(), PAIR | {"norm": "column"}) == (
        "norm is a LayerNorm, but the style 'column' is for nn.Linear and Conv1D; narrow its pattern or give it "
        'the style "replicate".'
    )
    assert refusal(Pair(), {"up": "column"}) == (
        'up has the style "column" and needs a layer with the style "row", which sums its outputs, but no module '
        'around up has a free one; give this style to a layer, or give up the style "replicate" in '
        "parallel.tensor_plan."
    )
    assert 'needs a layer with the style "column", which shards its inputs' in refusal(Pair(), {"down": "row"})
    assert refusal(Pair(), PAIR | {"norm": "divide:eps"}).startswith(
        'norm.eps is 1e-05, but the words "divide", "set", "ratio" and "heads" of a style change'
    )
    assert refusal(in_model(Pair()), {"*.up": "column", "*.down": "row", "block": "ratio:count=up/down"}) == (
        "the style 'ratio:count=up/down' of block needs the number of outputs of block.down on each tensor rank, but "
        'block.down does not have the style "column"; in parallel.tensor_plan, give block.down this style, or name a '
        'layer with the style "column" in the style of block.'
    )


def test_a_forward_that_calls_the_one_of_the_class_stays_on_a_sharded_layer() -> None:
    model, patches = Pair(), ForwardPatches()
    plain, found = find_tensor_plan(model, PAIR, 2), ActivatedLinear("up", "act", "relu")
    patches.replace_forward(model.up, PatchLayer.KERNEL, injected_activation(found, REFERENCE), "with relu")
    assert find_tensor_plan(model, PAIR, 2) == plain


def test_modules_that_pass_the_cut_by() -> None:
    model = Pair()
    model.up.forward = model.down.forward  # type: ignore[method-assign]
    assert refusal(model, PAIR) == (
        "up has a forward assigned to the module object, which would bypass the sharded layer; restore the forward "
        "of its class."
    )
    model = Pair()
    model.up.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert refusal(model, PAIR) == (
        'up has the parameter scale, but this style shards only weight and bias; give up the style "replicate".'
    )
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 8)})
    assert "is inside an nn.MultiheadAttention" in refusal(attention, {"a.out_proj": "row", "up": "column"})


def test_ties_must_be_cut_alike() -> None:
    model = Pair(8, 8)
    model.down.weight = model.up.weight
    assert refusal(model, PAIR) == (
        "up.weight is shared by up and down, but their styles shard it differently; give both the same sharding, or "
        'give both the style "replicate".'
    )
    assert refusal(models.decoder(tied=True), {"tokens": "vocabulary"}) == (
        "tokens.weight is sharded, but head uses the same parameter unsharded; give head the same style, or give both "
        'the style "replicate".'
    )


def test_embeddings_that_need_all_rows() -> None:
    model = nn.ModuleDict({"rows": nn.Embedding(9, 4, max_norm=1.0)})
    assert refusal(model, {"rows": "vocabulary"}) == (
        "rows has max_norm = 1.0, which needs all rows of the vocabulary on one rank; build it without max_norm, or "
        'give it the style "replicate" in parallel.tensor_plan.'
    )


def test_a_norm_over_all_heads_is_not_partial() -> None:
    model = models.qwen3()
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(32)  # type: ignore[union-attr, index]
    assert refusal(model, written_plan(model)) == (
        'model.layers.0.self_attn.q_norm.weight has the shape (32,), but the style "partial" is for norms over one '
        "head of width 8; set parallel.tensor to 1, or give model.layers.0.self_attn and its layers the style "
        '"replicate" in parallel.tensor_plan.'
    )
