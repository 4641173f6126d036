"""SOAP and Shampoo, whose owners keep preconditioners of whole matrices: one process's numbers, bytes as planned, any
grid."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import read_manifest
from engine.engine import Engine
from engine.errors import CheckpointError
from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models
from tests.engine.parity.optimizer_grids import OPTIMIZER_GRIDS
from tests.engine.parity.test_parity_optimizers import MUON
from tests.engine.parity.test_parity_state_forms import (
    INPUTS,
    RunRanks,
    beside_plan,
    goes_on_bit_for_bit,
    held_bytes,
    kept,
    layers,
    settings,
    train,
    waits,
)
from tests.parallel.comm.small_decoder import batch, on_threads
from tests.selection import wide

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
SOAP: dict[str, Any] = {
    "type": "SOAP", "params": {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1, "precondition_frequency": 1},
}  # fmt: skip
SHAMPOO: dict[str, Any] = {
    "type": "Shampoo",
    "params": {"lr": 3e-3, "epsilon": 1e-6, "weight_decay": 0.1, "precondition_frequency": 2, "grafting_epsilon": 1e-5},
}
ONE_SIDE = SOAP | {"params": SOAP["params"] | {"max_precond_dim": 20}}
BOTH = [
    {"match": "blocks.0.*", **SOAP},
    {"match": "blocks.1.*", **SHAMPOO},
    {"match": "blocks.2.*", **MUON},
    {"match": "blocks.3.*", **ONE_SIDE},
    ADAMW,
]
EACH: dict[str, Any] = {"soap": [{"match": "*", **SOAP}, ADAMW], "shampoo": [{"match": "*", **SHAMPOO}, ADAMW]}


@pytest.mark.parametrize(
    ("ranks", "zero"),
    [
        (2, {"stage": 1}),
        *(
            wide(ranks, zero)
            for ranks in (2, 4)
            for zero in (
                {"stage": 0},
                {"stage": 1, "reduce_bucket_size": 100},
                {"stage": 2},
                {"stage": 2, "reduce": "microbatch"},
                {"stage": 3},
                {"stage": 3, "reduce": "microbatch"},
            )
        ),
    ],
)
def test_data_ranks_train_as_one_process(ranks: int, zero: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(16, INPUTS, generator=generator, dtype=torch.float64) for _ in range(5)]
    found = verify(layers, settings(BOTH, {"data": ranks}, zero), batches, threads=ranks)
    assert found is not None and found.holds(1e-6, 1e-6, 1e-6), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.parametrize(("parallel", "zero", "ranks"), OPTIMIZER_GRIDS)
@pytest.mark.parametrize("kind", ["llama", wide("decoder"), wide("decoder tied")])
@pytest.mark.parametrize("optimizer", ["soap", wide("shampoo")])
def test_any_grid_trains_as_one_process(
    optimizer: str, kind: str, parallel: dict[str, Any], zero: dict[str, Any], ranks: int
) -> None:
    def build() -> nn.Module:
        return models.llama() if kind == "llama" else models.decoder(tied=kind == "decoder tied")

    name, config = kind.split()[0], settings(EACH[optimizer], parallel, zero)
    loss_fn = loss_sum if name == "decoder" else None
    found = verify(build, config, models.batches_for(name, 16, 3), loss_fn, threads=ranks)
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


DECODER: list[dict[str, Any]] = [
    {"match": "blocks.0.*", **SOAP}, {"match": "blocks.1.*", **SHAMPOO}, {"match": "*", **ONE_SIDE}, ADAMW,
]  # fmt: skip
GRIDS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"data": 2}, {"stage": 0}),
    (2, {"data": 2}, {"stage": 2}),
    (2, {"data": 2}, {"stage": 3}),
    (2, {"tensor": 2}, {"stage": 0}),
    (4, {"data": 4}, {"stage": 3, "reduce": "microbatch"}),
    (4, {"data": 2, "pipeline": 2}, {"stage": 1}),
    (4, {"data": 4}, {"stage": 1, "shard_size": 2}),
]


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero", "bf16"),
    [
        (4, {"data": 2, "tensor": 2}, {"stage": 1}, False),
        *(wide(*grid, bf16) for grid in GRIDS for bf16 in (False, True)),
    ],
)
def test_bytes_sent_and_kept_are_those_of_the_plan(
    ranks: int, parallel: dict[str, Any], zero: dict[str, Any], bf16: bool
) -> None:
    changes = {
        "parallel": parallel, "zero_optimization": zero | {"reduce_bucket_size": 20_000}, "optimizer": DECODER,
        "bf16": {"enabled": bf16},
    }  # fmt: skip
    assert on_threads(ranks, changes, beside_plan) == [[]] * ranks


def test_owners_keep_the_state_of_each_matrix_once() -> None:
    def body(eng: Engine) -> tuple[int, list[tuple[str, int]]]:
        eng.train_batch(batch(eng, 0))
        runtime = eng._runtime
        matrices = {name for name, p in eng.module.named_parameters() if p.dim() == 2}
        whole = runtime.optimizer.whole_state
        assert matrices >= whole.keys()
        state = [(name, sum(value.nbytes for value in own.values())) for name, own in whole.items()]
        return held_bytes(eng), state

    changes = {"parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EACH["soap"]}
    (one, mine), (other, theirs) = on_threads(2, changes, body)
    ((alone, state),) = on_threads(1, changes | {"parallel": {"data": 1}}, body)
    assert sorted([*mine, *theirs]) == sorted(state) and mine and theirs
    assert max(one, other) < 0.7 * alone, "costs are balanced, and bytes with them"


@pytest.mark.parametrize("optimizer", ["soap", "shampoo"])
def test_a_process_goes_on_from_its_checkpoint(tmp_path: Path, optimizer: str) -> None:
    goes_on_bit_for_bit(tmp_path, EACH[optimizer])


def test_the_plan_knows_what_is_stored(tmp_path: Path) -> None:
    def body(eng: Engine) -> int:
        eng.train_batch(batch(eng, 0))
        eng.save_checkpoint(str(tmp_path)).wait()
        return eng.plan.stored_bytes

    (planned,) = on_threads(1, {"optimizer": DECODER}, body)
    (step,) = tmp_path.glob("step-*")
    assert sum(tensor.kind.bytes for tensor in read_manifest(Files(), step).tensors.values()) == planned


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
        (4, {"data": 4}, {"stage": 1, "shard_size": 2}),
    ],
)
@pytest.mark.parametrize("saved", [(2, {"data": 2}, {"stage": 1}), (4, {"data": 2, "tensor": 2}, {"stage": 2})])
def test_a_run_goes_on_from_a_checkpoint_on_another_grid(
    run_ranks: RunRanks, tmp_path: Path, saved: Any, ranks: int, parallel: dict[str, Any], zero: dict[str, Any]
) -> None:
    losses, weights, _ = run_ranks(train, saved[0], str(tmp_path), *saved, DECODER, False)[0]
    again, found, _ = run_ranks(train, ranks, str(tmp_path), ranks, parallel, zero, DECODER, True)[0]
    if (ranks, parallel, zero) == saved:
        assert again == losses and all(torch.equal(found[name], value) for name, value in weights.items())
    assert again == pytest.approx(losses, rel=1e-6)
    worst = max(float((found[name] - value).abs().max()) for name, value in weights.items())
    assert worst <= 1e-5


def test_tensor_ranks_store_what_they_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    run = (2, str(tmp_path), 2, {"tensor": 2}, {"stage": 0}, EACH["soap"])
    losses, weights, _ = run_ranks(train, *run, False)[0]
    again, found, _ = run_ranks(train, *run, True)[0]
    assert again == losses and all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([{"match": "blocks.*", **ONE_SIDE}, ADAMW], "soap_left_basis [32, 32], soap_right [32, 32]"),
        ([{"match": "head.*", **SOAP}, ADAMW], ""),
        ([{"match": "blocks.0.*", **SOAP}, {"match": "head.*", **SHAMPOO}, ADAMW], "SOAP + Shampoo + AdamW"),
    ],
    ids=["preconditioners", "patterns", "kinds"],
)
def test_state_of_other_matrices_is_refused_in_one_sentence(tmp_path: Path, other: Any, said: str) -> None:
    def save(eng: Engine) -> None:
        eng.train_batch(batch(eng, 0))
        eng.save_checkpoint(str(tmp_path)).wait()

    def load(eng: Engine) -> str:
        with pytest.raises(CheckpointError) as caught:
            eng.load_checkpoint(str(tmp_path))
        before = {name: p.detach().clone() for name, p in eng.module.named_parameters()}
        eng.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        for step in range(2):
            eng.train_batch(batch(eng, step))
        still = [name for name, p in eng.module.named_parameters() if torch.equal(p, before[name])]
        assert not still
        return str(caught.value)

    saved = [{"match": "blocks.*", **SOAP}, ADAMW]
    on_threads(1, {"optimizer": saved}, save)
    (found,) = on_threads(1, {"optimizer": other}, load)
    assert said in found and found.count(". ") == 0
    if "SOAP +" not in said:
        assert ": the optimizer state of '" in found
        assert found.endswith("configure the optimizer as in the saved run, or load with load_optimizer_states=False.")


def test_without_strict_matrices_that_lack_state_begin_anew(tmp_path: Path) -> None:
    def save(eng: Engine) -> None:
        for step in range(3):
            eng.train_batch(batch(eng, step))
        eng.save_checkpoint(str(tmp_path)).wait()

    def load(eng: Engine) -> list[str]:
        eng.load_checkpoint(str(tmp_path), strict=False)
        eng.train_batch(batch(eng, 3))
        before = {name: p.detach().clone() for name, p in eng.module.named_parameters()}
        eng.train_batch(batch(eng, 4))
        moved = {name: p.detach() - before[name] for name, p in eng.module.named_parameters() if p.dim() == 2}
        return [name for name, step in moved.items() if not (bool(step.isfinite().all()) and step.abs().max() > 1e-6)]

    on_threads(1, {"optimizer": [{"match": "blocks.0.*", **SOAP}, ADAMW]}, save)
    assert on_threads(1, {"optimizer": [{"match": "blocks.*", **SOAP}, ADAMW]}, load) == [[]]


@pytest.mark.parametrize("optimizer", ["soap", "shampoo"])
def test_matrices_without_a_gradient_keep_weights_and_state(optimizer: str) -> None:
    def body(eng: Engine) -> list[str]:
        eng.train_batch(batch(eng, 0))
        eng.train_batch(batch(eng, 1))
        for name, parameter in eng.module.named_parameters():
            if name.startswith("blocks.1."):
                parameter.requires_grad_(False)
        before = kept(eng)
        eng.train_batch(batch(eng, 2))
        wrong = []
        for key, now in kept(eng).items():
            same, frozen = torch.equal(now, before[key]), "/blocks.1." in key
            moves = key.endswith("weight") and "_root/" not in key  # roots are made in every second update
            wrong += [key] * (same != frozen and (frozen or moves))
        return wrong + ["nothing"] * (not any(key.startswith(optimizer) for key in before))

    changes = {"parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EACH[optimizer]}
    assert on_threads(2, changes, body) == [[], []]


@pytest.mark.parametrize(
    ("ranks", "zero"), [(2, {"stage": 1}), wide(2, {"stage": 0}), wide(4, {"stage": 1, "shard_size": 2})]
)
def test_state_is_guarded_and_waits_on_the_host(ranks: int, zero: dict[str, Any]) -> None:
    changes = {"parallel": {"data": ranks}, "zero_optimization": zero, "optimizer": DECODER}
    assert on_threads(ranks, changes | {"integrity": {"every": 1}}, waits) == on_threads(ranks, changes, waits)


class Turns(nn.Module):
    """A trunk, and two heads of which steps use one, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 4) for name in "ab"})

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """``turn``: 0 and 1 for one head, 2 for both."""
        hidden = torch.tanh(self.trunk(x))
        chosen = [n for i, n in enumerate("ab") if int(turn[0]) in (i, 2)]
        return torch.stack([self.heads[name](hidden).square().mean() for name in chosen]).sum()


@pytest.mark.parametrize("optimizer", ["soap", "shampoo"])
def test_each_matrix_counts_its_own_updates(optimizer: str) -> None:
    """A head that begins late, or waits, has the state of the gradients that it got."""
    generator = torch.Generator().manual_seed(2)
    batches = [
        {"x": torch.randn(8, 8, generator=generator), "turn": torch.full((8,), turn)} for turn in (0, 0, 1, 2, 0, 2, 1)
    ]
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1,
        "parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EACH[optimizer],
    }  # fmt: skip
    found = verify(Turns, config, batches, lambda output, batch: output, threads=2)
    assert found is not None and found.holds(), str(found)


def losses_of(optimizer: Any, steps: int) -> float:
    """Body of a rank: the mean loss of the last 50 steps on real text."""
    from tests.engine.parity.test_fewer_bits_training import losses

    return losses({"stage": 1}, {"optimizer": optimizer}, steps)[0]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_losses_on_real_text_beside_adamw(run_ranks: RunRanks) -> None:
    adamw = {"type": "AdamW", "params": {"lr": 2e-3}}
    soap, shampoo = (
        [{"match": "blocks.*", "type": kind, "params": {"lr": 2e-3}}, adamw] for kind in ("SOAP", "Shampoo")
    )
    found = [run_ranks(losses_of, 2, each, 300, seconds=800)[0] for each in (adamw, soap, shampoo)]
    print("mean loss of steps 251 to 300: " + ", ".join(f"{loss:.4f}" for loss in found))
    assert all(loss < 1.05 * found[0] for loss in found)
