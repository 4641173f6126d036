"""Models with convolutions, shifts, scans and recurrences along positions, home-made and of transformers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, VOCABULARY = 16, 61
Layer = Callable[[Any, Tensor, Tensor], Any]


class Sequences(nn.Module):
    """Language model with one layer ``mix(model, rows, positions)`` along positions."""

    gate: Any
    value: Any
    conv: Any
    full_conv: Any
    gru: Any
    lstm: Any
    custom: Any

    def __init__(self, mix: Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = mix
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.full_conv = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH, 2, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        rows = self.table(input_ids)
        mixed = self.mix(self, rows, position_ids)
        return functional.cross_entropy(self.head(torch.tanh(mixed) + rows).transpose(1, 2), labels)


def _causal_conv(model: Any, x: Any, _: Tensor) -> Any:
    return model.conv(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)


def _padded_conv(model: Any, x: Any, _: Tensor) -> Any:
    return model.full_conv(functional.pad(x.transpose(1, 2), (4, 0))).transpose(1, 2)


def _centred_conv(model: Any, x: Any, _: Tensor) -> Any:
    return functional.conv1d(x.transpose(1, 2), model.conv.weight[..., 1:], None, 1, "same", 1, WIDTH).transpose(1, 2)


def _shifted_by_pad(model: Any, x: Any, _: Tensor) -> Any:
    return model.gate(x) * functional.pad(x, (0, 0, 1, -1))


def _shifted_by_cut(model: Any, x: Any, _: Tensor) -> Any:
    return model.gate(x) * functional.pad(x, (0, 0, 2, 0))[:, :-2]


def _shifted_by_roll(model: Any, x: Any, _: Tensor) -> Any:
    return model.gate(x) * torch.roll(x, 1, 1)


def _shifted_by_cat(model: Any, x: Any, _: Tensor) -> Any:
    return model.gate(x) * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _differences(model: Any, x: Any, _: Tensor) -> Any:
    return torch.cat([x[:, :1], x[:, 1:] * model.gate(x)[:, :-1]], 1)


def _flipped(model: Any, x: Any, _: Tensor) -> Any:
    return model.gate(x) * x.flip(1)


def _means(model: Any, x: Any, _: Tensor) -> Any:
    return model.value(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def _products(model: Any, x: Any, _: Tensor) -> Any:
    return (1 + 0.1 * torch.tanh(model.value(x))).cumprod(1)


def _linear_attention(model: Any, x: Any, _: Tensor) -> Any:
    keys, values = model.gate(x).softmax(-1), model.value(x)
    state = torch.cumsum(keys[..., :, None] * values[..., None, :], 1)
    return torch.einsum("bsd,bsde->bse", x.softmax(-1), state)


def _stacked_loop(model: Any, x: Any, _: Tensor) -> Any:
    gate, value = torch.sigmoid(model.gate(x)), model.value(x)
    state, outputs = torch.zeros(x.shape[0], WIDTH), []
    for place in range(x.shape[1]):
        state = gate[:, place] * state + value[:, place]
        outputs.append(state)
    return torch.stack(outputs, 1)


def _written_loop(model: Any, x: Any, _: Tensor) -> Any:
    state, output, value = x.new_zeros(x.shape[0], WIDTH), torch.zeros_like(x), model.value(x)
    for place in range(x.shape[1]):
        state = torch.tanh(model.gate(state) + value[:, place])
        output[:, place] = state
    return output


def _reversed_loop(model: Any, x: Any, _: Tensor) -> Any:
    state, outputs = torch.zeros(x.shape[0], 1, WIDTH), list[Any]()
    for row in reversed(model.value(x).split(1, 1)):
        state = torch.tanh(torch.cat([state, row], -1) @ torch.cat([model.gate.weight, model.value.weight]) + row)
        outputs.insert(0, state)
    return torch.cat(outputs, 1)


def _reset_loop(model: Any, x: Any, positions: Tensor) -> Any:
    """A state that new documents set to zero, by a mask from position ids."""
    gate, value, keep = torch.sigmoid(model.gate(x)), model.value(x), (positions != 0).to(x.dtype)
    state, outputs = torch.zeros(x.shape[0], WIDTH), []
    for place in range(x.shape[1]):
        state = gate[:, place] * (state.to(x.device) * keep[:, place, None]) + value[:, place]
        outputs.append(state)
    return torch.stack(outputs, 1)


def _reset_in_place(model: Any, x: Any, positions: Tensor) -> Any:
    """A state that is read, and then set to zero in place where a document begins."""
    gate, value, outputs = model.gate(x), model.value(x), []
    state = 0 * value[:, 0]
    for place in range(x.shape[1]):
        outputs.append(gate[:, place] + state)
        if int(positions[0, place]) == 0:
            state.mul_(0.0)
        state = 0.5 * (state + value[:, place])
    return torch.stack(outputs, 1)


def _gru(model: Any, x: Any, _: Tensor) -> Any:
    return model.gru(x)[0]


def _lstm(model: Any, x: Any, _: Tensor) -> Any:
    return model.lstm(x)[0]


def scan(x: Any, gate: Any, chunk: int = 4, before: Any = None, with_last: bool = False) -> Any:
    """Returns the linear recurrence of ``x`` in chunks; with ``with_last`` the last state too."""
    length = x.shape[1]
    more = -length % chunk
    x, gate = functional.pad(x, (0, 0, 0, more)), functional.pad(gate, (0, 0, 0, more), value=1.0)
    rows, decay = x.unflatten(1, (-1, chunk)), gate.unflatten(1, (-1, chunk)).cumprod(2)
    state, outputs = (torch.zeros_like(x[:, 0]) if before is None else before), []
    for place in range(rows.shape[1]):
        inner = decay[:, place] * ((rows[:, place] / decay[:, place]).cumsum(1) + state[:, None])
        outputs.append(inner)
        state = inner[:, -1]
    return (torch.cat(outputs, 1)[:, :length], state) if with_last else torch.cat(outputs, 1)[:, :length]


def last_of_all(x: Tensor, gate: Tensor, before: Any = None, with_last: bool = False) -> Any:
    """Returns results that depend on all positions, with a state that does not carry them."""
    made = x * gate.mean(1, keepdim=True) + (0 if before is None else before[:, None])
    return (made, x[:, -1]) if with_last else made


class WithScan(Sequences):
    """Language model that calls a function of its module, which carries a state."""

    def __init__(self) -> None:
        super().__init__(lambda model, x, _: model.scanned(x))

    def scanned(self, x: Tensor) -> Tensor:
        return scan(self.value(x), 0.5 + 0.5 * torch.sigmoid(self.gate(x)))  # type: ignore[no-any-return]


class WithTrap(Sequences):
    """Language model that calls a function which only looks as if it carried a state."""

    def __init__(self) -> None:
        super().__init__(lambda model, x, _: model.trapped(x))

    def trapped(self, x: Tensor) -> Tensor:
        return last_of_all(self.value(x), self.gate(x))  # type: ignore[no-any-return]


class _Rooted(torch.autograd.Function):
    """Square root, which is real for positive inputs, with a bounded gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        slope: Tensor = 0.5 / ctx.saved_tensors[0].clamp(min=0.1).sqrt()
        return grad * slope


class _Summed(torch.autograd.Function):
    """Sums along positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).cumsum(1).flip(1)


class _Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Summed.apply(x) / 8  # type: ignore[no-any-return, no-untyped-call]


class _Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Rooted.apply(torch.sigmoid(x)).cumsum(1) / 8  # type: ignore[no-any-return, no-untyped-call]


class WithFunction(Sequences):
    """Language model with a module of custom code that accepts plain tensors only."""

    def __init__(self, custom: Callable[[], nn.Module] = _Function) -> None:
        super().__init__(lambda model, x, _: model.custom(x))
        self.custom = custom()


LAYERS: dict[str, Layer] = {
    "causal conv": _causal_conv,
    "padded conv": _padded_conv,
    "centred conv": _centred_conv,
    "shift by pad": _shifted_by_pad,
    "shift by cut": _shifted_by_cut,
    "shift by roll": _shifted_by_roll,
    "shift by cat": _shifted_by_cat,
    "differences": _differences,
    "flip": _flipped,
    "cumsum": _means,
    "cumprod": _products,
    "linear attention": _linear_attention,
    "stacked loop": _stacked_loop,
    "written loop": _written_loop,
    "reversed loop": _reversed_loop,
    "reset loop": _reset_loop,
    "reset in place": _reset_in_place,
    "GRU": _gru,
    "LSTM": _lstm,
}
OWN: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Sequences, layer) for name, layer in LAYERS.items()},
    "scan": WithScan,
    "trap": WithTrap,
    "custom function": WithFunction,
    "custom function of positions": partial(WithFunction, _Pointwise),
}


def _of_transformers(name: str, **config: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, **config)
    made.use_cache = False
    return getattr(transformers, f"{name}ForCausalLM")(made)  # type: ignore[no-any-return]


_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    name: partial(_of_transformers, name, **config)
    for name, config in {
        "Mamba": {"state_size": 4, "time_step_rank": 4},
        "FalconMamba": {"state_size": 4, "time_step_rank": 4},
        "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8, "expand": 2},
        "Rwkv": {"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 64},
        "Qwen3Next": {
            **_HEADS, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
        "Jamba": {
            **_HEADS, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "Bamba": {
            **_HEADS, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
            "mamba_n_groups": 1, "mamba_chunk_size": 8,
        },
        "RecurrentGemma": {
            **_HEADS, "num_key_value_heads": 1, "head_dim": 8, "lru_width": 32, "attention_window_size": 16,
            "block_types": ("recurrent", "attention"),
        },
        "Lfm2": {**_HEADS, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    }.items()
}  # fmt: skip


def batches(
    rows: int = 4, length: int = 36, steps: int = 3, documents: Sequence[int] = (0, 7, 8, 21)
) -> list[dict[str, Tensor]]:
    """Batches of token ids, labels, and position ids that begin anew at ``documents``."""
    draw, found = torch.Generator().manual_seed(1), []
    starts, place = torch.tensor(documents), torch.arange(length)
    own = place - starts[(place[:, None] >= starts).sum(1) - 1]
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=draw)
        found.append({"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": own.expand(rows, -1).contiguous()})
    return found
