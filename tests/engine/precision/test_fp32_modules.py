"""Modules that stay in fp32 inside a bf16 or fp16 model: the same on every grid, and exact in every budget."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import ConfigError
from engine.models.decoder import loss_sum
from engine.parallel.model.forward_patch import ForwardPatches
from engine.precision.fp32_modules import find_fp32_modules, keep_in_fp32
from engine.verify import Parity, verify
from tests import models
from tests.engine.parity.test_axes import GRIDS
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Build = Callable[[], nn.Module]

# what is kept: norms, layers that tensor ranks cut, whole attentions, a block of its own, both ends
PATTERNS: dict[str, tuple[str, ...]] = {
    "norms": ("*norm*",),
    "cut layers": ("*.down", "*.query", "head"),
    "attention and ends": ("blocks.*.attention", "tokens", "blocks.2"),
}
CASES = [
    ("norms", "dp2"),
    ("norms", "pp2"),
    ("cut layers", "tp2"),
    ("attention and ends", "tp2 x pp2"),
    ("attention and ends", "dp2 x pp2"),
    ("cut layers", "dp2 x tp2"),
]
ROUNDED_OTHERWISE = 2.6e-5
"""What one process deviates from itself in four steps if the last bits of its fp32 weights differ (worst of 24 tries):
such a bit flips the bf16 rounding of a weight every few steps."""
SOME = [*((*case, 1) for case in CASES), ("attention and ends", "dp2 x pp2", 3), ("cut layers", "dp2 x tp2", 3)]


def settings(name: str, grid: str, stage: int, **changes: Any) -> dict[str, Any]:
    config = config_for(1, stage, parallel={"data": 1} | GRIDS[grid], keep_fp32=list(PATTERNS[name]))
    return config | {"bf16": {"enabled": True}} | changes


def build() -> nn.Module:
    return models.decoder(layers=4)


def compare(config: dict[str, Any]) -> Parity | None:
    """Body of a rank."""
    return verify(build, config, models.batches_for("decoder", 16, 3), loss_sum)


@pytest.mark.parametrize(
    ("name", "grid", "stage"),
    [case if case == SOME[1] else wide(*case) for case in SOME],
)
def test_every_grid_gives_what_one_process_gives(run_ranks: RunRanks, name: str, grid: str, stage: int) -> None:
    result = run_ranks(compare, prod(GRIDS[grid].values()), settings(name, grid, stage))[0]
    tensor = "tp" in grid
    first = abs(result.engine.losses[0] / result.reference.losses[0] - 1)
    assert first <= (2e-4 if tensor else 1e-6), str(result)
    assert result.loss <= (2e-4 if tensor else ROUNDED_OTHERWISE), str(result)


def measure(name: str, grid: str, mode: str, stage: int) -> dict[str, Any]:
    """Body of a rank: what is sent and held, beside the plan, and the dtypes of parameters."""
    batches = models.batches_for("decoder", 16, 3)
    config = engine.load_config(
        settings(name, grid, stage, activation_checkpointing={"mode": mode}), prod(GRIDS[grid].values())
    )
    with engine.initialize(build(), config, loss_sum, take_rows(batches[0], 0, config.micro)) as eng:
        losses = []
        for batch in batches:
            before = eng.sent
            losses.append(eng.train_batch(own_rows(eng, batch)).loss)
        sent = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.sent.since(before).rows()}
        plan = eng.plan.rank(eng.grid.rank)
        buckets = eng._runtime.buckets
        held = [
            t
            for flat in buckets
            for t in (flat.kept if flat.sharded else flat.params, flat.grads, flat.master)
            if t is not None
        ]
        held += [value for state in eng.optimizer.state.values() for value in state.values()]
        present = {row.name for row in eng.plan.table.held_by(eng.grid.holder())}
        dtypes = {n: str(p.dtype) for n, p in eng.module.named_parameters() if n in present}
        return {
            "losses": losses,
            "sent": sent,
            "planned": {(row.axis, row.label): (row.calls, row.bytes) for row in plan.traffic},
            "held": sum(tensor.untyped_storage().nbytes() for tensor in held),
            "state": sum(plan.state_bytes.values()),
            "dtypes": dtypes,
        }


def measure_all(name: str, grid: str) -> list[dict[str, Any]]:
    """Body of a rank: without and with recomputation."""
    return [measure(name, grid, mode, stage) for mode, stage in (("none", 1), ("full", 3))]


@pytest.mark.parametrize(
    ("name", "grid"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[1] != "tp2")) for case in CASES[2:]],
)
def test_bytes_sent_and_held_meet_the_plan_and_recomputation_changes_no_bit(
    run_ranks: RunRanks, name: str, grid: str
) -> None:
    kept = find_fp32_modules(build(), PATTERNS[name]).tensors
    for rank, found in enumerate(run_ranks(measure_all, prod(GRIDS[grid].values()), name, grid)):
        for run in found:
            assert run["sent"] == run["planned"], rank
            assert run["held"] == run["state"], rank
            assert run["dtypes"] == {n: "torch.float32" if n in kept else "torch.bfloat16" for n in run["dtypes"]}
        assert found[0]["losses"] == found[1]["losses"]


class Spy(nn.Module):
    """Remembers what its forward was given, returns it in a nest, with a loss and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen = [x.dtype, *(value.dtype for value in others.values())]
        y = self.inner(x)
        return y, {"loss": y.sum(), "index": y.argmax(), "wide": y.double()}


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_casts_reach_into_nests_and_leave_what_is_no_narrow_number(compute: torch.dtype) -> None:
    model = nn.ModuleDict({"spy": Spy()})
    patches = ForwardPatches()
    keep_in_fp32(model, ["spy"], compute, patches)
    x = torch.ones(2, 3, dtype=compute, requires_grad=True)
    y, rest = model["spy"](x, {"ids": torch.ones(2, dtype=torch.int64), "wide": x.double(), "narrow": x})
    assert model["spy"].seen == [torch.float32, torch.int64, torch.float64, torch.float32]
    assert (y.dtype, rest["loss"].dtype, rest["index"].dtype) == (compute, torch.float32, torch.int64)
    assert rest["wide"].dtype == torch.float64
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == compute
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    patches.remove()
    assert "forward" not in vars(model["spy"])


def test_buffers_of_islands_stay_and_the_state_dict_has_the_given_values() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.other = nn.BatchNorm1d(3), nn.Linear(3, 3)
            self.kept.register_buffer("scale", torch.full((3,), 1.001))
            self.other.register_buffer("scale", torch.full((3,), 1.001))

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.other(self.kept(x)).square().mean()
            return loss

    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "keep_fp32": ["kept"]}
    with engine.initialize(Both(), config) as eng:
        dtypes = {name: tensor.dtype for name, tensor in eng.module.state_dict().items()}
        assert {dtype for name, dtype in dtypes.items() if name.startswith("kept") and "num" not in name} == {
            torch.float32
        }
        assert (dtypes["other.weight"], dtypes["other.scale"]) == (torch.bfloat16, torch.float32)
        report = eng.train_batch(torch.randn(4, 3))
        assert not report.skipped and eng.full_state_dict()["kept.scale"][0] == torch.tensor(1.001)
        masters = [flat.master is None for flat in eng._runtime.buckets if flat.params.dtype == torch.float32]
        assert masters == [True], "its own master"


class BufferOwner(nn.Module):
    """Has batch norms under names that are no patterns and under two names, and buffers with two names or owners."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"[0]": nn.BatchNorm1d(3), "first": nn.BatchNorm1d(3)})
        self.norms["second"] = self.norms["first"]
        self.other = nn.Linear(3, 3)
        scale = torch.ones(3)
        for owner, name in ((self, "scale"), (self, "alias"), (self.other, "scale")):
            owner.register_buffer(name, scale)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms.values():
            x = norm(x)
        loss: Tensor = (self.other(x) * self.scale).square().mean()
        return loss


def test_batch_norm_stays_whatever_its_names_are_and_owners_share_a_rounded_buffer() -> None:
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "buffer_dtype": "bf16"}
    with engine.initialize(BufferOwner(), config) as eng:
        module: Any = eng.module
        assert module.norms["[0]"].running_mean.dtype == module.norms["first"].weight.dtype == torch.float32
        buffers = [module.scale, module.alias, module.other.scale]
        assert buffers[0].dtype == torch.bfloat16 and all(buffer is buffers[0] for buffer in buffers)
        assert not eng.train_batch(torch.randn(4, 3)).skipped


@pytest.mark.parametrize("bf16", [True, False])
def test_a_pattern_that_matches_nothing_is_one_sentence(bf16: bool) -> None:
    config = {"train_batch_size": 4, "bf16": {"enabled": bf16}, "keep_fp32": ["blocks.*.norm1", "nrom"]}
    with pytest.raises(ConfigError) as caught:
        engine.initialize(build(), config, loss_sum)
    assert str(caught.value) == (
        "keep_fp32[1]: 'nrom' matches no module; similar names are norm; write a pattern of whole names, with * for "
        "any characters."
    )


def test_a_tied_parameter_half_kept_is_one_sentence() -> None:
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "keep_fp32": ["head"]}
    with pytest.raises(
        ConfigError, match=r"^keep_fp32: 'head.weight' is the same tensor as 'tokens.weight', which is outside"
    ):
        engine.initialize(models.decoder(tied=True), config, loss_sum)
    with engine.initialize(models.decoder(tied=True), config | {"keep_fp32": ["head", "tokens"]}, loss_sum) as eng:
        assert eng.module.get_parameter("head.weight").dtype == torch.float32


def test_only_the_outermost_modules_are_wrapped() -> None:
    kept = find_fp32_modules(build(), ("blocks.1", "*norm1", "blocks.*.attention"))
    assert [name for name in kept.modules if name.startswith("blocks.1")] == ["blocks.1"]
    assert {"blocks.0.norm1", "blocks.0.attention"} <= set(kept.modules) and "blocks.0.up.weight" not in kept.tensors
