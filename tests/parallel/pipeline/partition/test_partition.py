"""Where stages begin, what travels, and who holds what."""

import re
from collections.abc import Callable
from itertools import chain, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.errors import PlanError
from engine.parallel.pipeline.partition.partition import Partition, balance, make_cut, repartition, units_for_split
from engine.parallel.pipeline.partition.stage_plan import MOST_DEAD_BYTES, VertexCut
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.tracer import trace_model
from tests import models
from tests.parallel.pipeline.play import batches_of
from tests.parallel.pipeline.zoo import CASES, LENGTH, ROWS, VOCABULARY, WIDTH, Own, albert, run_own, tokens

ACTIVATION = ROWS * (LENGTH - 1) * WIDTH * 4


def timeline_of(name: str, seed: int = 3) -> ModelTrace:
    case = CASES[name]
    model = case.build()
    batch = batches_of(case, 1, seed)[0]
    return trace_model(model, lambda: case.run(model, batch))


def first_units(timeline: ModelTrace, cut: Partition) -> list[str]:
    return [timeline.calls[cut.stage_of_call.index(stage)].unit for stage in range(len(cut.stages))]


# ---- balance


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4), st.data())
def test_balance_finds_the_smallest_largest_stage(cost: list[int], stages: int, data: Any) -> None:

    edges = [edge for edge in range(1, len(cost)) if data.draw(st.booleans())]
    if len(edges) < stages - 1:
        return

    def largest(starts: tuple[int, ...]) -> int:
        ends = [0, *starts, len(cost)]
        return max(sum(cost[a:b]) for a, b in pairwise(ends))

    found = balance(cost, edges, stages)
    assert set(found) <= set(edges) and sorted(set(found)) == found and len(found) == stages - 1
    assert largest(tuple(found)) == min(largest(starts) for starts in combinations(edges, stages - 1))


def test_the_head_counts() -> None:
    class WideHead(Own):
        def add(self) -> None:
            self.head = nn.Linear(WIDTH, 40 * VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)[..., :VOCABULARY]

    model, ids = WideHead(layers=6), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    timeline = trace_model(model, lambda: run_own(model, ids))
    assert first_units(timeline, make_cut(timeline, 2)) == ["embed", "blocks.5"]
    assert first_units(timeline_of("own"), make_cut(timeline_of("own"), 2)) == ["embed", "blocks.3"]


# ---- the vertex cut


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_vertex_cut_is_the_cheapest(data: Any) -> None:

    count = data.draw(st.integers(1, 6))
    weights = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    before = [sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(count)]
    wanted = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2))
    graph = VertexCut(wanted)
    for n in range(count):
        graph.add(n, weights[n], 0 if before[n] else float("inf"), before[n])

    def reached(without: set[int]) -> set[int]:
        open_: set[int] = set()
        for n in range(count):
            if n not in without and (not before[n] or open_ & set(before[n])):
                open_.add(n)
        return open_

    subsets = chain.from_iterable(combinations(range(count), size) for size in range(count + 1))
    valid = [set(subset) for subset in subsets if not reached(set(subset)) & wanted]
    found = graph.solve()
    assert found is not None and set(found) in valid
    assert sum(weights[n] for n in found) == min(sum(weights[n] for n in cut) for cut in valid)


# ---- what travels


@pytest.mark.parametrize(
    ("name", "values"),
    [("own", [1, 1, 1]), ("gated", [1, 1, 1]), ("x0", [2, 2, 2]), ("skips", [1, 3, 1]), ("in_place", [1, 1, 1]),
     ("uncalled", [1, 1, 1]), ("shared_by_blocks", [2, 2, 2]), ("unet", [1, 2, 2]), ("argument_written", [1, 1, 1])],
)  # fmt: skip
def test_as_few_values_as_can_be(name: str, values: list[int]) -> None:
    cut = make_cut(timeline_of(name), 4)
    assert [len(plan.receives) for plan in cut.stages[1:]] == values
    for plan in cut.stages:
        for number, source in plan.receives.items():
            assert source < plan.stage and plan.stage in cut.stages[source].sends[number]
        assert list(plan.receives) == sorted(plan.receives)
        assert all(list(takers) == sorted(takers) for takers in plan.sends.values())


def test_a_decoder_sends_one_activation_a_boundary() -> None:
    for stages in (1, 2, 3, 4):
        cut = make_cut(timeline_of("own"), stages)
        assert cut.crossing_bytes == (stages - 1) * ACTIVATION
        assert [plan.tier for plan in cut.stages] == [1] * stages
        assert [plan.last for plan in cut.stages] == [False] * (stages - 1) + [True]


def test_a_value_comes_straight_from_the_stage_that_makes_it() -> None:
    cut = make_cut(timeline_of("x0"), 4)
    assert [list(plan.receives.values()) for plan in cut.stages[1:]] == [[0, 0], [0, 1], [0, 2]]
    assert cut.stages[0].sends[0] == (1, 2, 3)


def test_a_boundary_slides_to_where_less_crosses() -> None:
    timeline = timeline_of("t5")
    even = [call.unit for call in timeline.calls].index("decoder.block.0")
    assert timeline.calls[even - 1].unit == "decoder.embed_tokens"
    before_block = make_cut(timeline, 2, ["decoder.block.0"])
    before_embedding = make_cut(timeline, 2, ["decoder.embed_tokens"])
    assert before_embedding.crossing_bytes < before_block.crossing_bytes


def test_stages_one() -> None:
    cut = make_cut(timeline_of("mixtral"), 1)
    (plan,) = cut.stages
    assert (plan.receives, plan.sends, plan.tier, plan.last, cut.crossing_bytes) == ({}, {}, 1, True, 0)
    assert set(cut.owners.values()) == {(0,)}
    model = nn.Linear(2, 2)  # no chain at all
    assert make_cut(trace_model(model, lambda: model(torch.ones(1, 2)).sum()), 1).boundaries == ()


# ---- who holds what


def test_every_parameter_has_an_owner() -> None:
    cut = make_cut(timeline_of("nano"), 4)
    owners = cut.owners
    assert set(owners) == set(timeline_of("nano").parameter_bytes)
    assert owners["wte.weight"] == (0, 3)  # tied: also the head
    assert owners["frozen_scale"] == (3,)  # read by glue
    assert owners["never_used"] == (3,)  # beside its neighbour
    assert owners["h.1.c_attn.weight"] == (1,)


def test_a_block_called_again_and_again_has_all_its_stages() -> None:
    model: Any = albert()
    ids = tokens(torch.Generator().manual_seed(1))
    timeline = trace_model(model, lambda: model(input_ids=ids, labels=ids).loss)
    cut = make_cut(timeline, 4)
    block = "albert.encoder.albert_layer_groups.0"
    assert cut.boundaries == tuple((block, occurrence) for occurrence in (1, 2, 3))
    assert cut.owners[f"{block}.albert_layers.0.ffn.weight"] == (0, 1, 2, 3)
    assert make_cut(timeline, 2, [f"{block}:3"]).boundaries == ((block, 3),)
    assert cut.stage_of_buffer(timeline, f"{block}.steps") == 3, "its last call leaves the current copy"


def test_lasting_writes_have_one_stage() -> None:
    timeline = timeline_of("buffered")
    lasting = {index for index, glue in enumerate(timeline.glue) if glue.buffers == {"mean"}}
    cut = make_cut(timeline, 4)
    assert len(lasting) == 1
    assert [plan.stage for plan in cut.stages if lasting & plan.glue] == [1]
    assert cut.stage_of_buffer(timeline, "mean") == 1
    assert cut.stage_of_buffer(timeline, "blocks.5.norm.running_mean") == 3


# ---- split and recut


def test_split_names_the_calls_that_start_stages() -> None:
    timeline = timeline_of("own")
    cut = make_cut(timeline, 3, ["blocks.1", "head"])
    assert first_units(timeline, cut) == ["embed", "blocks.1", "head"]
    opened = timeline_of("shared_by_blocks")
    assert first_units(opened, make_cut(opened, 2, ["blocks.4"])) == ["embed", "blocks.4.own"]


class Wrapped(nn.Module):
    """A module that wraps a model without a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attributes()

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids)


class Attributes(Own):
    """Its blocks are attributes."""

    def add(self) -> None:
        self.first, self.second = self.blocks[:2]
        del self.blocks

    def trunk(self, x: Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("build", "split", "start"),
    [
        (Own, "blocks.3.down", "blocks.3.down"),
        (Own, "blocks.3", "blocks.3"),
        (Wrapped, "inner.second", "inner.second"),
        (Wrapped, "inner.first.up:0", "inner.first.up"),
    ],
)
def test_split_names_calls_inside_a_unit(build: Callable[[], nn.Module], split: str, start: str) -> None:
    model, ids = build(), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    units = units_for_split(model, [split], 2)
    timeline = trace_model(model, lambda: run_own(model, ids), units, stages=2)
    cut = make_cut(timeline, 2, [split])
    assert cut.boundaries == ((start, 0),)
    again = repartition(timeline, cut.boundaries, [plan.parameters for plan in cut.stages])
    assert again.owners == cut.owners
    assert units_for_split(model, "auto", 2) is units_for_split(model, [split], 1) is None


def test_a_whole_block_may_be_named_beside_its_parts() -> None:
    model, ids, split = Own(), torch.zeros(ROWS, LENGTH, dtype=torch.int64), ["blocks.3", "blocks.3.down"]
    timeline = trace_model(model, lambda: run_own(model, ids), units_for_split(model, split, 3), stages=3)
    assert first_units(timeline, make_cut(timeline, 3, split)) == ["embed", "blocks.3.norm", "blocks.3.down"]


@pytest.mark.parametrize(
    ("build", "name", "hint"),
    [
        (
            Wrapped, "first",
            "similar names are inner.first; name a module that it calls (inner), or a module with parameters inside "
            "one of them.",
        ),
        (
            Own, "zzz",
            "name a module that it calls (embed, blocks.0 to blocks.5, norm, head), or a module with parameters "
            "inside one of them.",
        ),
    ],
)  # fmt: skip
def test_a_wrong_split_is_told_the_names_that_it_could_use(
    build: Callable[[], nn.Module], name: str, hint: str
) -> None:
    model, ids = build(), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    timeline = trace_model(model, lambda: run_own(model, ids), units_for_split(model, [name], 2), stages=2)
    with pytest.raises(PlanError) as caught:
        make_cut(timeline, 2, [name])
    assert str(caught.value).endswith(f"calls no unit {name!r}; {hint}")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["blocks.1"], "parallel.split names 1 calls, but 3 stages need 2; name the call that starts each stage"),
        (
            ["blocks.1", "block.2"],
            "parallel.split: the forward calls no unit 'block.2'; similar names are blocks.2",
        ),
        (["blocks.2", "blocks.1"], "parallel.split: the entry 'blocks.1' does not come after the entry 'blocks.2' in"),
        (["embed", "blocks.1"], "parallel.split: the entry 'embed' names the first module call of the forward, but"),
        (["blocks.1", "blocks.2:1"], "parallel.split: 'blocks.2:1' names call 1 of 'blocks.2', but the forward "),
        (["blocks.1", "blocks.2:x"], "parallel.split: 'blocks.2:x' names call x of 'blocks.2'"),
    ],
)
def test_a_wrong_split_is_refused(split: list[str], message: str) -> None:
    with pytest.raises(PlanError, match="^" + re.escape(message)):
        make_cut(timeline_of("own"), 3, split)


def test_fewer_blocks_than_stages() -> None:
    message = "parallel.pipeline cuts the model into 9 stages, but its forward calls only 6 blocks"
    with pytest.raises(PlanError, match="^" + re.escape(message)):
        make_cut(timeline_of("own"), 9)


def test_a_shared_name_of_memory_written_in_place_cannot_travel() -> None:
    class Viewed(Own):
        def trunk(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                part = x[:, 0]
                x.mul_(2)
                x = x + part.unsqueeze(1)
                self.sink = x
            return x

    model = Viewed(layers=4)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    timeline = trace_model(model, lambda: run_own(model, ids))
    assert [len(plan.receives) for plan in make_cut(timeline, 4).stages[1:]] == [1, 1, 1]  # cut beside it


def test_only_a_shared_name_could_travel() -> None:
    class Written(nn.Linear):
        def forward(self, x: Tensor, part: Tensor) -> Tensor:  # type: ignore[override]
            x.mul_(2)
            return super().forward(x)

    class Stuck(Own):
        def add(self) -> None:
            self.blocks = nn.ModuleList(Written(WIDTH, WIDTH) for _ in range(4))

        def trunk(self, x: Tensor) -> Tensor:
            x = x * 1
            part = x[:, 0]
            for block in self.blocks:
                block(x, part)
            return x + part.unsqueeze(1)

    model = Stuck()
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    message = "stage 1 needs the output of unit 'blocks.2', written in place to memory that other tensors share"
    with pytest.raises(PlanError, match="^" + re.escape(message)):
        make_cut(trace_model(model, lambda: run_own(model, ids)), 2)


def test_recut_keeps_the_boundaries_on_another_input() -> None:
    case = CASES["llama"]
    model = case.build()
    batch = batches_of(case, 1)[0]
    cut = make_cut(trace_model(model, lambda: case.run(model, batch)), 3)
    shorter = {name: tensor[:, :5] for name, tensor in batch.items()}
    with torch.no_grad():
        other = trace_model(model, lambda: case.run(model, shorter))
    again = repartition(other, cut.boundaries, [plan.parameters for plan in cut.stages])
    assert again.boundaries == cut.boundaries and again.owners == cut.owners
    assert again.crossing_bytes * models.LENGTH == cut.crossing_bytes * 5


def test_recut_refuses_another_path() -> None:
    timeline = timeline_of("own")
    with pytest.raises(PlanError, match=r"^a stage starts at call 1 of 'blocks.2', but this input makes 1 calls of it"):
        repartition(timeline, [("blocks.2", 1)])
    with pytest.raises(
        PlanError, match=r"^this input calls the units that start stages \(blocks.2, blocks.1\) in anoth"
    ):
        repartition(timeline, [("blocks.2", 0), ("blocks.1", 0)])
    cut = make_cut(timeline, 2)
    with pytest.raises(PlanError, match=r"^this input makes stage 1 need parameter 'blocks.3"):
        repartition(timeline, cut.boundaries, [cut.stages[0].parameters, set()])


def test_boundaries_inside_an_opened_block_fit_the_block_and_back() -> None:
    opened = timeline_of("shared_by_blocks")
    cut = make_cut(opened, 3)
    assert repartition(opened, [("blocks.2", 0), ("blocks.4", 0)]).boundaries == cut.boundaries
    assert repartition(timeline_of("own"), cut.boundaries).boundaries == (("blocks.2", 0), ("blocks.4", 0))


def test_glue_that_cannot_run_on_nan_or_would_take_much_memory_is_skipped() -> None:
    class Between(Own):
        def trunk(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.between(block(x))
            return x

        def between(self, x: Tensor) -> Tensor:
            return x * 1.0

    class Sampled(Between):
        def between(self, x: Tensor) -> Tensor:
            return x * torch.bernoulli(x.sigmoid())

    def tiers(kind: type[Own], rows: int) -> list[int]:
        with torch.device("meta"):
            model, ids = kind(layers=4), torch.zeros(rows, LENGTH, dtype=torch.int64)
        return [plan.tier for plan in make_cut(trace_model(model, lambda: run_own(model, ids)), 2, ["blocks.2"]).stages]

    assert tiers(Between, 8) == [1, 1]
    assert tiers(Sampled, 8) == [1, 2]
    # the second stage makes its own input from the output of block 1; the product after block 0 is not for it
    rows = MOST_DEAD_BYTES // ((LENGTH - 1) * WIDTH * 4)
    assert tiers(Between, rows) == [1, 1]
    assert tiers(Between, rows + 1) == [1, 2]
