"""Optimizers whose state is no number of fp32 for each element: one process's numbers, bytes as planned, any grid."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models
from tests.engine.parity.optimizer_grids import OPTIMIZER_GRIDS
from tests.engine.parity.test_fewer_bits_training import STEPS, losses
from tests.engine.parity.test_parity_optimizers import ADAMW, MUON, SGD
from tests.engine.parity.test_parity_optimizers import settings as warming
from tests.parallel.comm.small_decoder import batch, on_threads
from tests.planned_traffic import traffic_differs
from tests.resumed_runs import second_half
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
EIGHT_BITS: dict[str, Any] = {
    "type": "AdamW8bit", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1, "block_size": 128},
}  # fmt: skip
ADAFACTOR: dict[str, Any] = {"type": "Adafactor", "params": {"lr": 0.05, "weight_decay": 0.1}}
FREE: dict[str, Any] = {
    "type": "ScheduleFreeAdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1, "warmup_steps": 2},
}  # fmt: skip
EACH = {"8 bits": EIGHT_BITS, "adafactor": ADAFACTOR, "schedule-free": FREE}
LIST = [
    {"match": "first.*", **EIGHT_BITS},
    {"match": "blocks.0.*", **ADAFACTOR},
    {"match": "blocks.1.*", **MUON},
    {"match": "blocks.2.*", **FREE},
    SGD,
]
OPTIMIZERS: dict[str, Any] = EACH | {"list": LIST}


FALLING = {"type": "ExponentialLR", "params": {"gamma": 0.8}}
INPUTS = 20


def settings(optimizer: Any, parallel: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    """Clipped steps of microbatches, whose rate falls from the first update on."""
    return warming(optimizer, parallel, zero, scheduler=FALLING)


class Layers(nn.Module):
    """Blocks whose matrices shards cut; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 33)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(33, 17), nn.GELU(), nn.Linear(17, 33)) for _ in "1234")
        self.last = nn.Linear(33, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the outputs."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.last(x).square().mean()
        return loss


def layers() -> nn.Module:
    """In fp64, where no rounding of a sum moves a moment to the next code of 8 bits."""
    torch.manual_seed(3)
    return Layers().double()


@pytest.mark.parametrize(
    ("optimizer", "ranks", "zero"),
    [
        ("8 bits", 2, {"stage": 1}),
        ("adafactor", 2, {"stage": 3}),
        ("schedule-free", 2, {"stage": 2}),
        ("list", 2, {"stage": 1}),
        *(
            wide(name, ranks, zero)
            for name in OPTIMIZERS
            for ranks in (2, 4)
            for zero in (
                {"stage": 0},
                {"stage": 1, "reduce_bucket_size": 100},
                {"stage": 2, "reduce": "microbatch"},
                {"stage": 3, "reduce": "microbatch"},
            )
        ),
        wide("8 bits", 2, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
        wide("schedule-free", 2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        wide("8 bits", 2, {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    ],
)
def test_data_ranks_train_as_one_process(optimizer: str, ranks: int, zero: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(16, INPUTS, generator=generator, dtype=torch.float64) for _ in range(4)]
    found = verify(layers, settings(OPTIMIZERS[optimizer], {"data": ranks}, zero), batches, threads=ranks)
    assert found is not None and found.holds(1e-6, 1e-6, 1e-6), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.parametrize(("parallel", "zero", "ranks"), OPTIMIZER_GRIDS)
@pytest.mark.parametrize("kind", ["llama", wide("decoder"), wide("decoder tied")])
@pytest.mark.parametrize("optimizer", ["adafactor", wide("schedule-free"), wide("8 bits")])
def test_any_grid_trains_as_one_process(
    optimizer: str, kind: str, parallel: dict[str, Any], zero: dict[str, Any], ranks: int
) -> None:
    def build() -> nn.Module:
        return models.llama() if kind == "llama" else models.decoder(tied=kind == "decoder tied")

    name, config = kind.split()[0], settings(OPTIMIZERS[optimizer], parallel, zero)
    loss_fn = loss_sum if name == "decoder" else None
    found = verify(build, config, models.batches_for(name, 16, 3), loss_fn, threads=ranks)
    # tensor ranks have blocks of their own parts, and in fp32 a sum rounded otherwise takes another code
    bounds = (2e-3, 2e-2, 3e-2) if optimizer == "8 bits" else (1e-6, 1e-5, 1e-5)
    assert found is not None and found.holds(*bounds), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


def held_bytes(eng: Engine) -> int:
    """Bytes of the state that this rank keeps."""
    values = [value for state in eng.optimizer.state.values() for value in state.values()]
    values += [value for own in eng._runtime.optimizer.whole_state.values() for value in own.values()]
    return sum(value.nbytes for value in values)


def beside_plan(eng: Engine) -> list[str]:
    """What two steps send and keep that the plan does not say; the first step may search unused parameters."""
    eng.train_batch(batch(eng, 0))
    wrong = traffic_differs(eng, batch, range(1, 3))
    held, planned = held_bytes(eng), eng.plan.rank(eng.grid.rank).state_bytes["optimizer"]
    return wrong + [f"held {held}, planned {planned}"] * (held != planned)


DECODER: dict[str, Any] = EACH | {
    "list": [{"match": "blocks.0.*", **ADAFACTOR}, {"match": "blocks.1.*weight", **EIGHT_BITS}, FREE]
}
GRIDS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"data": 2}, {"stage": 2}),
    (2, {"data": 2}, {"stage": 3}),
    (4, {"data": 4}, {"stage": 3, "reduce": "microbatch"}),
    (4, {"data": 2, "tensor": 2}, {"stage": 1}),
    (4, {"data": 2, "pipeline": 2}, {"stage": 1}),
    (4, {"data": 4}, {"stage": 1, "shard_size": 2}),
]


@pytest.mark.parametrize(
    ("optimizer", "ranks", "parallel", "zero", "bf16"),
    [
        ("list", 2, {"data": 2}, {"stage": 1}, True),
        wide("adafactor", 2, {"tensor": 2}, {"stage": 0}, False),
        *(wide(name, *grid, bf16) for name in DECODER for grid in GRIDS for bf16 in (False, True)),
    ],
)
def test_bytes_sent_and_kept_are_those_of_the_plan(
    optimizer: str, ranks: int, parallel: dict[str, Any], zero: dict[str, Any], bf16: bool
) -> None:
    changes = {
        "parallel": parallel, "zero_optimization": zero | {"reduce_bucket_size": 20_000},
        "optimizer": DECODER[optimizer], "bf16": {"enabled": bf16},
    }  # fmt: skip
    assert on_threads(ranks, changes, beside_plan) == [[]] * ranks


Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def train(
    folder: str, ranks: int, parallel: dict[str, Any], zero: dict[str, Any], optimizer: Any, load: bool
) -> Trained:
    """Body of a rank: two steps and a checkpoint, or its load; then two steps more. Losses, weights, masters of rank 0.

    The weights are averages where the optimizer is schedule-free.
    """
    batches = models.batches_for("decoder", 16)
    config = load_config(settings(optimizer, parallel, zero), ranks)
    example = models.take_rows(batches[0], 0, config.micro)
    with engine.initialize(models.decoder, config, loss_sum, example) as eng:
        losses = second_half(eng, batches, folder, load)
        with eng.masters() as found:
            masters = {name: value.clone() for name, value in found.items()}
        return losses, eng.full_state_dict(), masters


def goes_on_bit_for_bit(folder: Path, optimizer: Any) -> None:
    """One process that loads its checkpoint trains as it does without a pause."""
    run = partial(train, str(folder), 1, {}, {"stage": 0}, optimizer)
    (losses, *weights), (again, *found) = (run(load) for load in (False, True))
    assert again == losses
    assert all(torch.equal(b[name], value) for a, b in zip(weights, found, strict=True) for name, value in a.items())


LASTING: dict[str, Any] = DECODER | {"muon": [{"match": "blocks.*", **MUON}, ADAMW]}


@pytest.mark.parametrize("optimizer", LASTING)
def test_a_process_goes_on_from_its_checkpoint(tmp_path: Path, optimizer: str) -> None:
    goes_on_bit_for_bit(tmp_path, LASTING[optimizer])


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "parallel", "zero"),
    [
        (2, {"data": 2}, {"stage": 1}),
        (2, {"data": 2}, {"stage": 3}),
        (2, {"data": 2}, {"stage": 0}),
        (2, {"tensor": 2}, {"stage": 0}),
        (2, {"pipeline": 2}, {"stage": 0}),
        (4, {"data": 2, "tensor": 2}, {"stage": 2}),
    ],
)
@pytest.mark.parametrize("optimizer", LASTING)
def test_a_run_goes_on_from_a_checkpoint_on_another_grid(
    run_ranks: RunRanks, tmp_path: Path, optimizer: str, ranks: int, parallel: dict[str, Any], zero: dict[str, Any]
) -> None:
    chosen = LASTING[optimizer]
    losses, weights, _ = run_ranks(train, 2, str(tmp_path), 2, {"data": 2}, {"stage": 1}, chosen, False)[0]
    again, found, _ = run_ranks(train, ranks, str(tmp_path), ranks, parallel, zero, chosen, True)[0]
    if (parallel, zero) == ({"data": 2}, {"stage": 1}):
        assert again == losses and all(torch.equal(found[name], value) for name, value in weights.items())
    coded = optimizer in ("8 bits", "list")  # see above
    assert again == pytest.approx(losses, rel=2e-3 if coded else 1e-6)
    worst = max(float((found[name] - value).abs().max()) for name, value in weights.items())
    assert worst <= (1e-2 if coded else 1e-5)


def test_moments_of_8_bits_are_read_and_written_by_name() -> None:
    def body(eng: Engine) -> list[str]:
        eng.train_batch(batch(eng, 0))
        wrong, shapes = [], {name: p.shape for name, p in eng.module.named_parameters()}
        with eng.optimizer_state("blocks.*weight") as found:
            for name, state in found.items():
                right = state.keys() == {"exp_avg", "exp_avg_sq"} and state["exp_avg"].shape == shapes[name]
                wrong += [name] * (not right or not bool(state["exp_avg_sq"].any()))
                state["exp_avg"].zero_()
        written = {name for name in shapes if name.startswith("blocks") and name.endswith("weight")}
        with eng.optimizer_state() as found:
            wrong += [name for name, state in found.items() if bool(state["exp_avg"].any()) == (name in written)]
        return wrong + ["nothing found"] * (not found)

    changes = {"parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EIGHT_BITS}
    assert on_threads(2, changes, body) == [[], []]


def test_a_run_goes_on_with_moments_of_8_bits_after_fp32(tmp_path: Path) -> None:
    fp32 = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
    losses, *_ = train(str(tmp_path), 1, {}, {"stage": 0}, fp32, False)
    again, *_ = train(str(tmp_path), 1, {}, {"stage": 0}, EIGHT_BITS, True)
    assert again == pytest.approx(losses, rel=2e-3) and again != losses


@pytest.mark.parametrize("optimizer", EACH)
def test_parameters_without_a_gradient_keep_weights_and_state(optimizer: str) -> None:
    def body(eng: Engine) -> list[str]:
        eng.train_batch(batch(eng, 0))
        for name, parameter in eng.module.named_parameters():
            if name.startswith("blocks.1."):
                parameter.requires_grad_(False)
        before = kept(eng)
        eng.train_batch(batch(eng, 1))
        wrong = []
        for key, now in kept(eng).items():
            same, frozen = torch.equal(now, before[key]), "/blocks.1." in key
            wrong += [key] * (same != frozen and (frozen or key.endswith("weight")))
        return wrong + ["nothing"] * (not before)

    changes = {"parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EACH[optimizer]}
    assert on_threads(2, changes, body) == [[], []]


def waits(eng: Engine) -> list[float]:
    """Losses of four steps; state that is guarded waits on the host after two."""
    found = [eng.train_batch(batch(eng, step)).loss for step in range(2)]
    if eng.config.integrity.every:
        eng.offload_states(pin_memory=False)
        eng.reload_states()
    return found + [eng.train_batch(batch(eng, step)).loss for step in range(2, 4)]


@pytest.mark.parametrize("optimizer", [name if name == "8 bits" else wide(name) for name in EACH])
def test_state_is_guarded_and_waits_on_the_host(optimizer: str) -> None:
    changes = {"parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EACH[optimizer]}
    assert on_threads(2, changes | {"integrity": {"every": 1}}, waits) == on_threads(2, changes, waits)


def kept(eng: Engine) -> dict[str, Tensor]:
    """Weights and state of this rank by "kind/NAME"."""
    runtime = eng._runtime
    found: dict[str, Tensor] = {}
    for place in runtime.optimizer.places:
        state = {name: value for name, value in eng.optimizer.state.get(place.parameter, {}).items()}
        alike = {name: value for name, value in state.items() if value.shape == place.parameter.shape}
        for kind, value in (alike | {"weight": place.parameter.detach()}).items():
            found |= {f"{kind}/{slot.name}": value.view(-1)[part].clone() for slot, part in place.slots()}
    apart = runtime.optimizer.whole_state.items()
    return found | {f"{kind}/{name}": value.clone() for name, own in apart for kind, value in own.items()}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_moments_of_8_bits_end_within_one_per_cent_of_the_loss_of_fp32(run_ranks: RunRanks) -> None:
    adamw, coded = ({"optimizer": {"type": kind, "params": {"lr": 2e-3}}} for kind in ("AdamW", "AdamW8bit"))
    exact, found = (run_ranks(losses, 2, {"stage": 1}, each, STEPS, seconds=500)[0][0] for each in (adamw, coded))
    print(f"AdamW {exact:.4f}, AdamW8bit {found:.4f}: {found / exact - 1:+.2%}")
    assert abs(found / exact - 1) < 0.01, f"{found} instead of {exact}"
