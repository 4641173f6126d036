"""Inputs, buffers and marked tensors stay wide in a 16-bit run: what the model's own code computes with is what it was
given, as in plain torch with 16-bit parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.engine import Engine
from engine.errors import EngineError
from engine.verify import verify
from tests.engine.parity.test_parity import config_for
from tests.engine.precision.test_bf16 import CLIP, ROWS, plain

WIDTH, FEATURES, STEPS = 32, 8, 3
BF16 = {"bf16": {"enabled": True}}


class CastLinear(nn.Linear):
    """A linear layer that casts its input, as code for plain torch does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Denoiser(nn.Module):
    """A diffusion model: float rows, time steps and noise as inputs, and a schedule as a buffer."""

    kept: Tensor

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.register_buffer("kept", torch.linspace(0.9999, 0.0001, 1000))
        self.rows, self.time, self.head = linear(FEATURES, WIDTH), linear(8, WIDTH), linear(WIDTH, FEATURES)
        self.blocks = nn.ModuleList(Block(linear) for _ in range(2))
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        part = self.kept[t.long().clamp(max=999)].unsqueeze(-1)
        angles = t.unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.01, 0.001])
        h = self.rows(part.sqrt() * x + (1 - part).sqrt() * noise)
        h = h + self.time(torch.cat((angles.sin(), angles.cos()), -1))
        for block in self.blocks:
            h = block(h)
        out = self.head(h)
        return out, F.mse_loss(out, noise)


class Watching(Denoiser):
    """Keeps what its own code is given."""

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append((float(t.max()), t.dtype, self.kept.dtype))
        return super().forward(x, t, noise)


def batches(rows: int = ROWS) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(3)
    return [
        (torch.randn(rows, FEATURES), torch.full((rows,), 999.3) - torch.arange(rows), torch.randn(rows, FEATURES))
        for _ in range(STEPS)
    ]


def one_process(model: nn.Module, **changes: Any) -> Engine:
    return engine.initialize(model, {"train_batch_size": ROWS} | BF16 | changes)


@pytest.mark.parametrize(
    ("changes", "time", "kept"),
    [
        ({}, (999.3, torch.float32), torch.float32),
        ({"cast_forward_inputs": True}, (1000.0, torch.bfloat16), torch.float32),
        ({"buffer_dtype": "bf16"}, (999.3, torch.float32), torch.bfloat16),
        ({"data_types": {"buffer_dtype": "bf16"}}, (999.3, torch.float32), torch.bfloat16),
    ],
)
def test_own_code_is_given_inputs_and_buffers_as_they_are(
    changes: dict[str, Any], time: tuple[float, torch.dtype], kept: torch.dtype
) -> None:
    model = Watching()
    with one_process(model, **changes) as eng:
        eng.train_batch(batches()[0])
        assert eng.module.get_buffer("kept").dtype == kept
        notes = "\n".join(eng.plan.notes)
    value, dtype, buffer = model.seen[-1]
    assert (round(value, 3), dtype, buffer) == (*time, kept)
    assert ("inputs of forward are rounded to bf16" in notes) == ("cast_forward_inputs" in changes)
    assert ("buffers are rounded to bf16: kept" in notes) == (kept == torch.bfloat16)


def test_keys_that_cast_nothing_in_fp32_are_named() -> None:
    config = {"train_batch_size": ROWS, "cast_forward_inputs": True, "buffer_dtype": "bf16"}
    with engine.initialize(Denoiser(), config) as eng:
        (note,) = [note for note in eng.plan.notes if "cast nothing" in note]
    assert note.startswith("precision: cast_forward_inputs and buffer_dtype cast nothing in a run without bf16.enabled")


def test_losses_and_masters_equal_plain_torch_to_the_bit() -> None:
    config = config_for(1, 0, **BF16, gradient_clipping=CLIP)
    del config["scheduler"]
    with engine.initialize(Denoiser(), config, lambda out, _: out[1]) as eng:
        losses = [eng.train_batch(batch).loss for batch in batches()]
        weights = eng.full_state_dict()
    expected, masters = plain(Denoiser(CastLinear), batches(), config)
    assert losses == expected
    assert max(float((weights[name] - master).abs().max()) for name, master in masters.items()) <= 1e-9


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 4), (3, 6)),
    "convolution": (nn.Conv2d(3, 4, 2), (2, 3, 5, 5)),
    "layer norm": (nn.LayerNorm(6), (3, 6)),
    "group norm": (nn.GroupNorm(2, 4), (3, 4, 5)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), (2, 5, 8)),
    "recurrent": (nn.GRU(6, 4), (3, 2, 6)),
    "batch norm": (nn.BatchNorm1d(6), (4, 6)),
    "prelu": (nn.PReLU(), (3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_torch_takes_wide_rows(name: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYERS[name][0]

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            loss: Tensor = (out[0] if isinstance(out, tuple) else out).float().square().mean()
            return loss

    rows = torch.randn(LAYERS[name][1])
    with engine.initialize(Plain(), {"train_batch_size": len(rows)} | BF16) as eng:
        report = eng.train_batch(rows)
    assert not report.skipped and report.grad_norm > 0


class Own(nn.Module):
    """Own code that multiplies a parameter with an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x @ self.weight).square().mean()
        return loss


def test_own_code_that_torch_refuses_is_told_the_remedies_and_each_works() -> None:
    config = {"train_batch_size": 2} | BF16
    with (
        engine.initialize(Own(), config) as eng,
        pytest.raises(EngineError, match="the forward meets two dtypes") as told,
    ):
        eng.train_batch(torch.ones(2, 3))
    assert "set cast_forward_inputs to true, buffer_dtype to 'bf16', or keep_fp32" in str(told.value)
    with engine.initialize(Own(), config | {"cast_forward_inputs": True}) as eng:
        assert eng.train_batch(torch.ones(2, 3)).loss == 9.0


GRIDS: dict[str, tuple[dict[str, int], int, int]] = {
    "dp2": ({"data": 2}, 0, 2),
    "zero 3": ({"data": 2}, 3, 2),
    "tp2": ({"data": 1, "tensor": 2}, 0, 2),
    "pp2": ({"data": 1, "pipeline": 2}, 0, 2),
    "tp2 x pp2": ({"data": 1, "tensor": 2, "pipeline": 2}, 1, 4),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_gives_what_one_process_gives(grid: str) -> None:
    parallel, stage, ranks = GRIDS[grid]
    config = config_for(1, stage, **BF16, parallel=parallel)
    result = verify(Denoiser, config, batches(), lambda out, _: out[1], threads=ranks)
    assert result is not None
    bound = 2e-4 if "tp" in grid else 3e-5
    assert result.loss <= bound and abs(result.engine.losses[0] / result.reference.losses[0] - 1) <= bound, str(result)
