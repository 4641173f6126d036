"""Tensor plans found for whole models: what is cut and how, patterns, JSON and the table. One process."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.errors import PlanError
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import Reason, TensorPlan
from engine.planning.found_styles import as_patterns
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from engine.program.batch import Batch
from engine.program.program import Program
from engine.reporting.banner import reasons_table
from tests.engine.parity.architectures import ALL, REFUSED, find
from tests.models import NanoBlock, batches_for, gpt2, llama, nano, take_rows
from tests.parallel.tensor.plans import written_plan
from tests.selection import wide


def search(
    model: nn.Module, example: Batch, tp: int = 2, loss_fn: Callable[[Any, Any], Any] | None = None
) -> TensorPlan:
    """The plan that a run would find."""
    parallel = {"data": 1, "tensor": tp}
    config = load_config({"train_batch_size": 8, "parallel": parallel, "optimizer": {"type": "AdamW"}}, tp)
    for module in model.modules():  # as a run does
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            module.config.use_cache = False  # type: ignore[union-attr]
    program = Program(model, loss_fn, make_precision(config, model), torch.device("cpu"))
    return SearchedProgram(program, example).find_styles(tp).plan(model, tp)


def found(name: str, tp: int = 2) -> TensorPlan:
    """That of an architecture."""
    architecture = find(name)
    return search(architecture.build(), take_rows(architecture.batches(8)[0], 0, 2), tp, architecture.loss_fn)


def hows(plan: TensorPlan) -> list[str]:
    return [reason.how for reason in plan.reasons]


@pytest.mark.parametrize(("build", "kind"), [(gpt2, "gpt2"), (llama, "llama")])
def test_a_plan_that_is_found_cuts_what_a_person_would_cut(build: Callable[[], nn.Module], kind: str) -> None:
    model = build()
    plan, written = search(model, batches_for(kind, 2)[0]), find_tensor_plan(model, written_plan(model), 2)
    assert plan.parameters == written.parameters and plan.layers == written.layers
    assert set(hows(plan)) <= {"local", "local+"} and plan.source == "found by zero patterns, proven"


def test_one_pattern_for_all_blocks_and_the_vocabulary() -> None:
    plan = search(nano(), batches_for("nano", 2)[0])
    assert plan.patterns == {
        "wte": "vocabulary", "lm_head": "vocabulary", "h.*.c_attn.weight": "cut:0 fused:3 view",
        "h.*.c_attn.bias": "cut:0 fused:3 view", "h.*.c_proj.weight": "cut:1 view", "h.*.fc": "column",
        "h.*.proj": "row",
    }  # fmt: skip
    assert [(reason.pattern, reason.style, reason.how) for reason in plan.reasons] == [
        ("h.*", "c_attn -> c_proj", "view"), ("h.*", "fc -> proj", "local"),
    ]  # fmt: skip


def test_names_that_a_pattern_would_hit_by_accident_are_written_out() -> None:
    model = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    assert as_patterns(model, {"h.0": "column", "h.1": "column"}) == {"h.0": "column", "h.1": "column"}
    assert as_patterns(model, {f"h.{i}": "column" for i in range(3)}) == {"h.*": "column"}


def same_cuts(one: TensorPlan, other: TensorPlan) -> bool:
    return (one.parameters, one.layers, one.partial, one.shown, set(one.attributes)) == (
        other.parameters, other.layers, other.partial, other.shown, set(other.attributes)
    )  # fmt: skip


QUICK = ("GPT-2", "nanoGPT-like", "U-Net")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in QUICK else pytest.mark.long)
        for n in ALL
        if n not in ("glue that reads content",)
    ],
)
def test_a_plan_goes_through_a_file(name: str, tmp_path: Path) -> None:
    plan, path = found(name), tmp_path / "plan.json"
    plan.write(path)
    assert json.loads(path.read_text()) == dict(plan.patterns)
    if plan.patterns:  # a file that cuts nothing is no plan
        assert same_cuts(find_tensor_plan(find(name).build(), str(path), 2), plan)
    else:
        assert not plan.parameters and name in ("U-Net", "VGG-like")


def test_the_same_plan_in_every_process() -> None:
    """Every rank finds its own, so nothing may depend on the order of a set or on the process's random state."""
    torch.manual_seed(1)
    first = found("Qwen3")
    torch.manual_seed(2)
    second = found("Qwen3")
    assert first == second and list(first.patterns) == list(second.patterns)


def test_a_model_that_cannot_be_followed_is_searched_on_one_path_and_its_line_is_said() -> None:
    (note,) = found("glue that reads content").notes
    assert note.startswith("tensor ranks shard blocks alone, as one path of the forward calls them: ")
    assert re.search(r"architectures.py:\d+ reads the content of a tensor on the host", note)
    assert "GRU" in REFUSED and list(found("GRU").patterns) == ["embed", "head"]


class ReadsWeights(nn.Module):
    """The head multiplies with a weight without calling its layer: that of the embedding, or of a tied layer."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(61, 16), nn.ModuleList([NanoBlock(16, 4)])
        self.head = nn.Linear(16, 61, bias=False) if layer else None
        if self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.embed.weight if self.head is None else self.head.weight
        logits: Tensor = self.blocks[0](self.embed(ids)) @ weight.t()
        return logits.logsumexp(-1).mean()


@pytest.mark.parametrize("layer", [True, False])
def test_a_vocabulary_that_other_code_reads_stays_whole(layer: bool) -> None:
    plan = search(ReadsWeights(layer), torch.randint(0, 61, (2, 6)))
    assert "vocabulary" not in plan.patterns.values() and hows(plan) == ["view", "local"]


class Awkward(nn.Module):
    """A block that a view cannot follow and whose parts give something else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Scaled.apply(self.up(x))  # type: ignore[no-untyped-call]
        out: Tensor = x + self.down(hidden)
        return out


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * x.shape[-1]

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * gradient.shape[-1]


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_what_is_replicated_says_so_with_its_bytes() -> None:
    plan = search(Chain(NanoBlock(16, 4), Awkward(), Awkward()), torch.randn(2, 6, 16))
    assert hows(plan) == ["view", "local", "replicate"] and plan.reasons[-1].pattern == "blocks.*"
    assert plan.reasons[-1].bytes == 2 * (16 * 24 + 24 + 24 * 16) * 4 and not plan.reasons[0].bytes
    assert not any(name.startswith(("blocks.1", "blocks.2")) for name in plan.parameters)


def test_the_table_of_a_plan() -> None:
    reasons = [
        Reason("h.*", "fc -> proj", "local", "plain tensors"),
        Reason("gate", "", "replicate", "does not run alone: it reads more", 3 * 2**20),
    ]
    assert reasons_table(reasons).splitlines() == [
        "groups of layers: 1 local, 1 replicate",
        "h.*: fc -> proj  local      plain tensors",
        "gate             replicate  does not run alone: it reads more; 3.0 MiB",
    ]


@cache  # both sizes below name the same ones that fit
def hows_of_nano(tp: int) -> list[str]:
    return hows(search(nano(), batches_for("nano", 2)[0], tp))


@pytest.mark.parametrize("tp", [wide(3), wide(5)])
def test_a_size_that_does_not_fit_names_those_that_do(tp: int) -> None:
    with pytest.raises(PlanError) as caught:
        search(nano(), batches_for("nano", 2)[0], tp)
    assert str(caught.value).startswith(
        f"tensor = {tp} does not divide the heads or the width between c_attn and c_proj in h.0 (32 wide); choose a "
    )
    (listed,) = str(caught.value).split("choose a size that fits: ")[1:]
    for size in map(int, listed.split(", or give")[0].split(", ")):
        assert "replicate" not in hows_of_nano(size)


def test_rows_are_for_the_ranks_that_they_list() -> None:
    model = find("Falcon").build()
    plan = found("Falcon")
    assert plan.patterns["transformer.h.*.self_attention.query_key_value"].startswith("column rows:")
    assert same_cuts(find_tensor_plan(model, plan.patterns, 2), plan)
    with pytest.raises(
        PlanError, match=r"lists rows for 2 tensor ranks, but parallel\.tensor is 4; list the rows for 4"
    ):
        find_tensor_plan(model, plan.patterns, 4)


def test_positions_are_whole_even_with_as_many_rows_as_there_are_words() -> None:
    torch.manual_seed(7)
    model = Decoder(DecoderConfig(vocabulary=16, layers=2, width=16, heads=2, context=16))
    ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(1))
    plan = search(model, {"input_ids": ids, "labels": ids}, loss_fn=loss_sum)
    assert plan.layers["tokens"].kind == "embedding" and plan.layers["head"].kind == "head"
    assert "positions" not in plan.layers


class NarrowBetween(nn.Module):
    """Queries and values through 24 numbers, which three ranks could share; the heads are for two ranks or four."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_b = nn.Linear(16, 24), nn.Linear(24, 32)
        self.v_a, self.v_b = nn.Linear(16, 24), nn.Linear(24, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, v = (
            part.view(*x.shape[:2], -1, 8).transpose(1, 2) for part in (self.q_b(self.q_a(x)), self.v_b(self.v_a(x)))
        )
        y = nn.functional.scaled_dot_product_attention(q, v, v).transpose(1, 2).flatten(2)
        out: Tensor = x + self.out(y)
        return out


def test_a_width_that_other_sizes_could_share_is_no_miss_where_its_layer_is_cut_already() -> None:
    plan = search(Chain(NarrowBetween(), NarrowBetween()), torch.randn(2, 6, 16))
    assert plan.patterns == {"blocks.*.q_b": "column", "blocks.*.v_b": "column", "blocks.*.out": "row"}


class Widening(nn.Module):
    """Gives float64 whatever it gets, as blocks do that keep their stream in more bits than their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x + self.down(self.up(x.to(self.up.weight.dtype)).relu())).double()
        return out


def test_blocks_that_differ_in_the_dtype_of_their_input_are_searched_once() -> None:
    plan = search(Chain(nn.Linear(16, 16), Widening(), Widening()), torch.randn(2, 6, 16))
    assert [(reason.pattern, reason.style) for reason in plan.reasons] == [("blocks.*", "up -> down")]
