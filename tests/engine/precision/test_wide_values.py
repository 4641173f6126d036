"""Inputs, buffers and marked tensors stay wide in a 16-bit run: what the model's own code computes with is what it was
given, as in plain torch with 16-bit parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
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


def test_deepspeed_has_the_same_words() -> None:
    asked = {"train_batch_size": ROWS, "fp16": {"enabled": True, "auto_cast": True}}
    assert load_config(asked | {"data_types": {"keep_in_fp32_modules": "auto"}}).cast_forward_inputs
    with pytest.raises(ConfigError, match=r"data_types.keep_in_fp32_modules.*name more in keep_fp32"):
        load_config(asked | {"data_types": {"keep_in_fp32_modules": ["router"]}})


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


class Kept(nn.Module):
    """Own code that writes 16-bit values among fp32 ones, which torch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x.sum(-1) > 0] = self.token
        return x.square().mean()


def test_own_products_take_the_dtype_of_the_parameter() -> None:
    with engine.initialize(Own(), {"train_batch_size": 2} | BF16) as eng:
        assert eng.train_batch(torch.ones(2, 3)).loss == 9.0


def test_own_code_that_torch_refuses_is_told_the_remedies_and_each_works() -> None:
    config = {"train_batch_size": 2} | BF16
    with engine.initialize(Kept(), config) as eng, pytest.raises(EngineError, match="mixes two dtypes") as told:
        eng.train_batch(torch.ones(2, 3))
    assert "set cast_forward_inputs to true, buffer_dtype to 'bf16', or keep_fp32 to" in str(told.value)
    with engine.initialize(Kept(), config | {"cast_forward_inputs": True}) as eng:
        assert eng.train_batch(torch.ones(2, 3)).loss == 1.0


class Attention(nn.Module):
    """Attention as people write it: rotary tables and an additive mask in fp32, and ``@``."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((FEATURES, FEATURES), -1e9).triu(1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = (y * cos + y.roll(1, -1) * sin for y in (q, k))
        mixed = (q @ k.transpose(-1, -2) / WIDTH**0.5 + self.mask).softmax(-1)
        out: Tensor = x + self.out(self.product(mixed, v))
        return out

    def product(self, mixed: Tensor, v: Tensor) -> Tensor:
        out: Tensor = mixed @ v
        return out


class PlainAttention(Attention):
    """The same with casts of its own, for plain torch."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.to(v_dtype(self)))).chunk(3, -1)
        q, k = (y * cos + y.roll(1, -1) * sin for y in (q, k))
        mixed = (q @ k.transpose(-1, -2) / WIDTH**0.5 + self.mask).softmax(-1)
        out: Tensor = x + self.out(mixed.to(v.dtype) @ v)
        return out


def v_dtype(attention: Attention) -> torch.dtype:
    return attention.qkv.weight.dtype


class Rotary(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.tokens, self.head = nn.Embedding(11, WIDTH), CastLinear(WIDTH, 11)
        angles = torch.arange(FEATURES).float().unsqueeze(-1) * torch.logspace(0, -2, WIDTH)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.blocks = nn.ModuleList(attention() for _ in range(4))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        out = self.head(x)
        return out, F.cross_entropy(out.float().flatten(0, 1), ids.flatten())


def tokens() -> list[tuple[Tensor]]:
    return [(torch.randint(11, (ROWS, FEATURES), generator=torch.Generator().manual_seed(i)),) for i in range(STEPS)]


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_rotary_tables_and_masks_in_fp32_train_as_in_plain_torch_to_the_bit(recomputed: str) -> None:
    config = config_for(1, 0, **BF16, gradient_clipping=CLIP, activation_checkpointing={"mode": recomputed})
    del config["scheduler"]
    with engine.initialize(Rotary(), config, lambda out, _: out[1]) as eng:
        losses = [eng.train_batch(batch).loss for batch in tokens()]
        weights = eng.full_state_dict()
    expected, masters = plain(Rotary(PlainAttention), tokens(), config)
    assert losses == expected
    assert max(float((weights[name] - master).abs().max()) for name, master in masters.items()) <= 1e-9


def test_casts_of_operands_are_off_after_a_forward_that_needs_none() -> None:
    for build, data, needed in ((Denoiser, batches(), False), (Rotary, tokens(), True)):
        with engine.initialize(build(), config_for(1, 0, **BF16), lambda out, _: out[1]) as eng:
            eng.train_batch(data[0])
            eng.eval_batch(data[0])
            operands = eng.plan.precision.operands
            assert operands is not None and operands._needed == {True: needed, False: needed}


GRIDS: dict[str, tuple[dict[str, int], int, int]] = {
    "dp2": ({"data": 2}, 0, 2),
    "zero 3": ({"data": 2}, 3, 2),
    "tp2": ({"data": 1, "tensor": 2}, 0, 2),
    "pp2": ({"data": 1, "pipeline": 2}, 0, 2),
    "tp2 x pp2": ({"data": 1, "tensor": 2, "pipeline": 2}, 1, 4),
}


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        pytest.param(grid, name, marks=[pytest.mark.long] * (name == "rotary" or grid == "tp2 x pp2"))
        for grid in GRIDS
        for name in ("denoiser", "rotary")
    ],
)
def test_every_grid_gives_what_one_process_gives(grid: str, name: str) -> None:
    parallel, stage, ranks = GRIDS[grid]
    config = config_for(1, stage, **BF16, parallel=parallel)
    build, data = (Denoiser, batches()) if name == "denoiser" else (Rotary, tokens())
    result = verify(build, config, data, lambda out, _: out[1], threads=ranks)
    assert result is not None
    bound = 2e-4 if "tp" in grid else 3e-5
    assert result.loss <= bound and abs(result.engine.losses[0] / result.reference.losses[0] - 1) <= bound, str(result)
