"""Experts that data ranks share, beside every other feature: three clipped steps equal one process."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.errors import EngineError, PlanError
from engine.parallel.model.quantized_layers import quantized_layers
from tests.engine.parity.expert_runs import GRIDS, ROWS, WORDS, assert_equal, mixture, own_batch, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
ENCODED = {"zero_quantized_gradients": True}
INTEGRITY: Mapping[str, Any] = {"integrity": {"every": 1}}
STATE: Mapping[str, Mapping[str, Any]] = {
    "integrity-zero0": INTEGRITY,
    "integrity-zero1": {"zero_optimization": {"stage": 1}, **INTEGRITY},
    "integrity-zero3": {"zero_optimization": {"stage": 3}, **INTEGRITY},
    "adafactor-zero0": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2, "d": 100.0}}},
    "adafactor-zero3": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3}},
    "lamb-zero0": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
    "lars-zero1": {"optimizer": {"type": "LARS", "params": {"lr": 1e-1}}, "zero_optimization": {"stage": 1}},
}


class BiasedExperts(nn.Module):
    """A router and experts that stack matrices and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), _Stack()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns a loss of rows made of token ids."""
        x = torch.stack([input_ids.flatten() * 0.01 * place for place in range(1, 9)], 1)
        weights, numbers = self.router(x).softmax(-1).topk(2)
        loss: Tensor = self.experts(x, numbers, weights).square().mean() + 0 * labels.sum()
        return loss


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.rand(4, 8, 8)), nn.Parameter(torch.rand(4, 8))

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(len(self.matrix)):
            row, slot = (numbers == expert).nonzero().unbind(1)
            out = (x[row] @ self.matrix[expert] + self.bias[expert]) * weights[row, slot, None]
            y = y.index_add(0, row, out)
        return y


def cases(often: set[tuple[str, str]]) -> list[Any]:
    """Every state on every grid; all but those in ``often`` are long."""
    every = [(grid, state) for grid in GRIDS for state in STATE]
    return [pytest.param(*case, id="-".join(case), marks=() if case in often else pytest.mark.long) for case in every]


@pytest.mark.parametrize(
    ("grid", "state"),
    cases({
        ("ep2", "integrity-zero0"), ("dp4-ep2", "integrity-zero3"), ("dp4-ep2", "adafactor-zero0"),
        ("ep2", "lars-zero1"),
    }),
)  # fmt: skip
def test_state_of_shared_experts_trains_as_one_process(grid: str, state: str) -> None:
    alone = {"optimizer": STATE[state]["optimizer"]} if "optimizer" in STATE[state] else {}
    assert_equal(run(GRIDS[grid], STATE[state]), run({"data": 1}, alone))


@pytest.mark.parametrize(
    ("parallel", "zero"),
    [
        ({"data": 4, "expert": 2}, {"stage": 2}),
        pytest.param({"data": 2, "expert": 2}, {"stage": 1}, marks=pytest.mark.long),
        pytest.param({"data": 4, "expert": 2}, {"stage": 3}, marks=pytest.mark.long),
        pytest.param({"data": 4, "expert": 2}, {"stage": 2, "reduce": "microbatch"}, marks=pytest.mark.long),
        pytest.param({"data": 8, "expert": 4}, {"stage": 1, "shard_size": 2}, marks=pytest.mark.long),
        pytest.param({"data": 8, "expert": 2, "gpus_per_node": 4}, {"stage": 3}, marks=pytest.mark.long),
    ],
)
def test_encoded_gradients_of_experts_are_sent_to_the_ranks_that_hold_them_as_planned(
    parallel: dict[str, Any], zero: dict[str, Any]
) -> None:
    def encoded(eng: Engine) -> list[str]:
        before = eng.sent
        eng.train_batch(own_batch(eng, 4))
        rows = {(row.axis, row.label): row.bytes for row in eng.sent.since(before).rows() if "gradients" in row.label}
        planned = {
            (row.axis, row.label): row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if "gradients" in row.label
        }
        return [] if rows == planned else [f"found {rows}, planned {planned}"]

    found = run(parallel, {"zero_optimization": zero | ENCODED}, after=encoded)
    assert_equal(found, run({"data": 1}), loss=1e-3, norm=1e-2, weight=4e-2)
    assert found.extra == [[]] * len(found.extra)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks for it
@pytest.mark.parametrize(("grid", "stage"), [("ep2", 0), ("dp4-ep2", 3)])
def test_compiled_blocks_leave_shared_experts_out(grid: str, stage: int) -> None:
    found = run(GRIDS[grid], {"compile": True, "zero_optimization": {"stage": stage}})
    assert_equal(found, run({"data": 1}))


def test_matrix_optimizers_of_shared_experts_are_refused_before_training() -> None:
    optimizer = [{"match": "*bias", "type": "Muon"}, {"type": "AdamW"}]
    with pytest.raises(PlanError, match=r"updates 'experts.bias' as a whole matrix, but parallel.expert divides"):
        run(GRIDS["ep2"], {"optimizer": optimizer}, BiasedExperts)


def loads(eng: Engine) -> dict[str, Any]:
    """Rows of each expert in a further step."""
    return dict(eng.train_batch(own_batch(eng, 3)).expert_load)


@pytest.mark.parametrize("grid", ["ep2", pytest.param("ep2-tp2", marks=pytest.mark.long)])
def test_rows_of_shared_experts_are_counted_as_in_one_process(grid: str) -> None:
    monitor = {"monitor": {"expert_load": True}}
    found, wanted = run(GRIDS[grid], monitor, after=loads), run({"data": 1}, monitor, after=loads)
    assert found.extra == wanted.extra * len(found.extra) and wanted.extra[0]


def routed_to_the_first(chosen: int, learned: bool) -> nn.Module:
    """A mixture whose routers see no difference between experts, so that all rows go to the first ``chosen``."""
    model = mixture(num_experts_per_tok=chosen)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.zeros_(parameter)
            parameter.requires_grad_(learned)
    return model


@pytest.mark.parametrize("learned", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("chosen", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 8))])
@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ({"data": 4, "expert": 4}, {}),
        pytest.param({"data": 3, "expert": 3}, {"train_batch_size": 6}, marks=pytest.mark.long),
        pytest.param(GRIDS["ep2-tp2"], {"zero_optimization": {"stage": 3}}, marks=pytest.mark.long),
        pytest.param(GRIDS["ep2-pp2"], {"activation_checkpointing": {"mode": "full"}}, marks=pytest.mark.long),
    ],
)
def test_forced_routing_trains_as_one_process(
    parallel: dict[str, Any], changes: dict[str, Any], chosen: int, learned: bool
) -> None:
    make = partial(routed_to_the_first, chosen, learned)
    alone = {key: value for key, value in changes.items() if key == "train_batch_size"}
    assert_equal(run(parallel, changes, make), run({"data": 1}, alone, make))


LENGTHS = (1, 12, 2, 7, 1, 1, 5, 9)
"""Tokens of each microbatch of a step."""


def uneven_batch(eng: Engine, step: int) -> Iterator[dict[str, Tensor]]:
    """Microbatches of this data rank, of one row with any number of tokens."""
    draw = torch.Generator().manual_seed(step)
    rows = [torch.randint(0, WORDS, (1, LENGTHS[(place + step) % ROWS]), generator=draw) for place in range(ROWS)]
    return iter([{"input_ids": row} for row in rows[eng.grid.row_rank :: eng.grid.row_ranks]])


def sum_of_squares(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss with a weight for each token."""
    return output.logits.square().sum(), torch.tensor(float(batch["input_ids"].numel()))


@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        ("ep4", 1), *(pytest.param(*case, marks=pytest.mark.long) for case in (("ep2", 0), ("dp4-ep2", 3))),
        pytest.param("ep2-tp2", 3, marks=pytest.mark.long), pytest.param("ep2-pp2", 1, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_unequal_numbers_of_tokens_train_as_one_process(grid: str, stage: int) -> None:
    changes = {"zero_optimization": {"stage": stage}}
    found = run(GRIDS[grid], changes, batch=uneven_batch, loss_fn=sum_of_squares)
    assert_equal(found, run({"data": 1}, batch=uneven_batch, loss_fn=sum_of_squares))


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_bad_batch_of_one_data_rank_raises_on_all_that_share_experts(stage: int) -> None:
    def fails(eng: Engine) -> tuple[str, float]:
        batch = own_batch(eng, 3)
        short = {name: rows[:-1] for name, rows in batch.items()}
        with pytest.raises(EngineError) as caught:
            eng.train_batch(short if eng.grid.rank == 2 else batch)
        return str(caught.value), eng.train_batch(batch).loss

    found = run(GRIDS["dp4-ep2"], {"zero_optimization": {"stage": stage}}, after=fails).extra
    wanted = run({"data": 1}, after=lambda eng: eng.train_batch(own_batch(eng, 3)).loss).extra
    assert all("leading dim" in text or "rank 2" in text for text, _ in found), found
    assert [loss for _, loss in found] == pytest.approx(wanted * 4, rel=1e-6)


@pytest.mark.parametrize("grid", ["ep2", pytest.param("ep2-tp2", marks=pytest.mark.long)])
def test_data_ranks_predict_and_generate_for_unequal_rows(grid: str) -> None:
    def calls(eng: Engine) -> tuple[Tensor, list[int]]:
        ids = own_batch(eng, 3)["input_ids"]
        rows = ids[: 3 if eng.grid.row_rank else 1]
        made = eng.generate(
            rows[:1, : 2 + eng.grid.row_rank], max_new_tokens=2 + 2 * eng.grid.row_rank, do_sample=False
        )
        return eng.predict({"input_ids": rows}).logits, made.tolist()

    def alone(eng: Engine) -> list[tuple[Tensor, list[int]]]:
        ids = own_batch(eng, 3)["input_ids"]
        found = []
        for rank, rows in enumerate((ids[::2][:1], ids[1::2][:3])):
            made = eng.generate(rows[:1, : 2 + rank], max_new_tokens=2 + 2 * rank, do_sample=False)
            found.append((eng.predict({"input_ids": rows}).logits, made.tolist()))
        return found

    found, (wanted,) = run(GRIDS[grid], after=calls).extra, run({"data": 1}, after=alone).extra
    for place, (logits, made) in enumerate(found):
        expected = wanted[place * 2 // len(found)]
        assert made == expected[1]
        torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-5)


def adapted(**targets: Any) -> nn.Module:
    """A mixture with LoRA adapters that are not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **targets)
    return get_peft_model(mixture(), config)


def in_fp64(make: Callable[[], nn.Module]) -> nn.Module:
    """A model in fp64: the random adapters amplify fp32's rounding to 1e-5 of a norm in plain data parallelism too."""
    made = make().double()
    for module in made.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # type: ignore[union-attr]  # grouped products have no fp64
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "stage"),
    [("ep2", 3), *(pytest.param(grid, stage, marks=pytest.mark.long) for grid in GRIDS for stage in (0, 1))],
)
def test_adapters_beside_shared_experts_train_as_one_process(grid: str, stage: int) -> None:
    make = partial(in_fp64, partial(adapted, target_modules=["q_proj", "v_proj"]))
    assert_equal(run(GRIDS[grid], {"zero_optimization": {"stage": stage}}, make), run({"data": 1}, make=make))


STACKS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        ("ep2", 3),
        *(
            pytest.param(grid, stage, marks=pytest.mark.long)
            for grid in GRIDS for stage in (0, 1, 3) if (grid, stage) != ("ep2", 3)
        ),
    ],
)  # fmt: skip
def test_adapters_of_stacks_are_shared_with_their_experts(grid: str, stage: int) -> None:
    make, counted = partial(adapted, **STACKS), {"monitor": {"expert_load": True}}
    found = run(GRIDS[grid], {"zero_optimization": {"stage": stage}, **counted}, make, loads)
    alone = run({"data": 1}, counted, make, loads)
    assert_equal(found, alone)
    assert found.extra == alone.extra * len(found.extra) and alone.extra[0]
    assert any(".experts.lora_A." in name for name in found.weights)


@pytest.mark.long
def test_stacks_with_adapters_are_whole_on_tensor_ranks_and_refused_as_cut() -> None:
    make = partial(adapted, **STACKS)
    form = run(GRIDS["ep2-tp2"], make=make, steps=0, after=lambda eng: eng.plan.shared_experts).extra[0].form
    assert form == "whole on 2 tensor ranks (auto: they have adapters)"
    said = r'"cut", but the experts of \S*layers.0.mlp.experts cannot be cut along their width: they have adapters; set'
    with pytest.raises(PlanError, match=said):
        run({**GRIDS["ep2-tp2"], "expert_tensor": "cut"}, make=make, steps=0)


def quantized(eng: Engine) -> tuple[int, int]:
    """Number of layers that read codes, and bytes of frozen parameters on this rank."""
    return len(quantized_layers(eng.module)), eng.plan.rank(eng.grid.rank).state_bytes["frozen parameters"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "stage", "dtype"),
    [
        ("ep2", 1, "nf4"),
        *(
            pytest.param(grid, stage, dtype, marks=pytest.mark.long)
            for grid in GRIDS for stage in (0, 2, 3) for dtype in ("int8", "nf4")
        ),
    ],
)  # fmt: skip
def test_quantized_experts_with_adapters_are_shared(grid: str, stage: int, dtype: str) -> None:
    codes = {"quantize_frozen": {"dtype": dtype}, "checkpoint": {"frozen": False}}
    make = partial(adapted, **STACKS)
    found = run(GRIDS[grid], codes | {"zero_optimization": {"stage": stage}}, make, quantized)
    alone = run({"data": 1}, codes, make, quantized)
    assert_equal(found, alone)
    (layers, whole), stages = alone.extra[0], GRIDS[grid].get("pipeline", 1)
    assert layers == 10 and all(count == layers // stages for count, _ in found.extra)
    assert max(held for _, held in found.extra) < whole


def with_frozen_experts() -> nn.Module:
    model = mixture()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    return model


@pytest.mark.long
@pytest.mark.parametrize("form", ["whole", "cut"])
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_quantized_experts_on_tensor_ranks_train_as_one_process(dtype: str, form: str) -> None:
    codes = {"quantize_frozen": {"dtype": dtype}, "checkpoint": {"frozen": False}}
    found = run({**GRIDS["ep2-tp2"], "expert_tensor": form}, codes, with_frozen_experts)
    assert_equal(found, run({"data": 1}, codes, with_frozen_experts))


NAMED = "model.layers.0.mlp.experts.down_proj"


def named_state(eng: Engine) -> dict[str, Any]:
    """State by name after a step: of one parameter of experts, cut to its own experts, and norms of all gradients."""
    found: dict[str, Any] = {"norms": eng.gradient_norms()}
    with eng.optimizer_state(NAMED) as state:
        found |= {kind: value.clone() for kind, value in state.get(NAMED, {}).items()}
    with eng.gradients(NAMED) as gradients:
        found["gradient"] = gradients[NAMED].clone()
    with eng.masters(NAMED) as masters:
        found["master"] = masters[NAMED].clone()
    with eng.full_parameters(NAMED) as parameters:
        found["parameter"] = parameters[NAMED].detach().clone()
        for value in parameters.values():
            value.data.mul_(2)
    weights = {name: value.clone() for name, value in eng.full_state_dict().items()}
    eng.load_full_state_dict({name: value + 1 for name, value in weights.items()})
    eng.load_full_state_dict(weights)
    found["after"] = eng.eval_batch(own_batch(eng, 3)).loss
    return found


@pytest.mark.parametrize(
    ("grid", "stage", "form"),
    [
        ("dp4-ep2", 3, "auto"), pytest.param("dp4-ep2", 1, "auto", marks=pytest.mark.long),
        *(pytest.param("ep2-tp2", z, form, marks=pytest.mark.long) for z in (0, 3) for form in ("whole", "cut")),
    ],
)  # fmt: skip
def test_state_by_name_is_that_of_the_experts_of_a_rank(grid: str, stage: int, form: str) -> None:
    parallel = {**GRIDS[grid], "expert_tensor": form}
    found = run(parallel, {"zero_optimization": {"stage": stage}}, after=named_state).extra
    (wanted,) = run({"data": 1}, after=named_state).extra
    ranks = parallel.get("tensor", 1)
    for place, own in enumerate(found):
        assert own["norms"] == pytest.approx(wanted["norms"], rel=1e-4, abs=1e-8)
        assert own["after"] == pytest.approx(wanted["after"], rel=1e-6)
        cut = slice(4) if place // ranks % 2 == 0 else slice(4, 8)
        width = slice(8 * (place % ranks), 8 * (place % ranks) + 8) if form == "cut" else slice(None)
        for kind in {*own} - {"norms", "after"}:
            torch.testing.assert_close(
                own[kind], wanted[kind][cut, :, width], rtol=1e-3, atol=1e-6, msg=f"{place} {kind}"
            )
