"""Activations on the host: the bits of a run that keeps everything, two blocks on the device, one copy of each run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config.sections import ActivationCheckpointingConfig
from engine.errors import ConfigError
from engine.parallel.activation_checkpointing import host_activations
from engine.parallel.activation_checkpointing.blocks import offloaded_blocks, recompute_blocks, recomputed_blocks
from engine.parallel.activation_checkpointing.blocks import selective_blocks as partly_recomputed
from engine.parallel.activation_checkpointing.host_activations import HostActivations
from engine.parallel.model.forward_patch import ForwardPatches
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.parallel.activation_checkpointing.test_selective import CASES, GRIDS, WAYS, trains
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Settings = dict[str, Any]
ROWS, WIDTH = 64, 64
BYTES = 4 * ROWS * WIDTH
"""Of one activation of :class:`Block`."""

OFFLOADS: dict[str, Settings] = {
    "all": {"mode": "offload"},
    "half, others full": {"mode": "offload", "every": 2, "others": "full"},
    "half, others selective": {"mode": "offload", "every": 2, "others": "selective"},
    "inputs of full": {"mode": "full", "inputs": "host"},
    "inputs of selective": {"mode": "selective", "inputs": "host"},
}


@pytest.fixture(autouse=True)
def small_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests train tiny models, whose activations would stay."""
    monkeypatch.setattr(host_activations, "_LEAST_BYTES", 1)


def offloads(name: str, settings: Settings, modes: list[Settings]) -> None:
    """Body of a rank."""
    host_activations._LEAST_BYTES = 1
    trains(name, settings, modes)


@pytest.mark.parametrize(
    ("name", "grid", "kinds"),
    [
        ("decoder", "pp2", ("half, others full",)),
        wide("llama", "tp2", ("all",)),
        *(wide(*case, tuple(OFFLOADS)) for case in CASES),
    ],
    ids=str,
)
def test_where_activations_wait_changes_no_bit(
    run_ranks: RunRanks, name: str, grid: str, kinds: tuple[str, ...]
) -> None:
    settings = config_for(GRIDS[grid].get("data", 1), 1, parallel={"data": 1} | GRIDS[grid])
    run_ranks(offloads, prod(GRIDS[grid].values()), name, settings, [OFFLOADS[kind] for kind in kinds])


@pytest.mark.long
@pytest.mark.parametrize("way", ["ZeRO 3", *(wide(way) for way in WAYS if way != "ZeRO 3")])
def test_every_way_of_running_gives_the_same(run_ranks: RunRanks, way: str) -> None:
    ranks, settings = WAYS[way]
    run_ranks(offloads, ranks, "decoder", settings, [OFFLOADS["all"], OFFLOADS["half, others full"]])


# ------------------------------------------------------------------------------------------------ memory


class Block(nn.Module):
    """Saves its input, and the tangent that is its output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        return y


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def weight(self, block: int) -> nn.Parameter:
        return self.get_parameter(f"blocks.{block}.linear.weight")


def offloaded(model: nn.Module, **settings: Any) -> HostActivations:
    patches = ForwardPatches()
    return recompute_blocks(model, ActivationCheckpointingConfig(mode="offload", **settings), patches)


def _note(events: list[str], word: str, grad: Tensor) -> None:
    events.append(word)


@contextmanager
def copies_back() -> Iterator[list[str]]:
    """What comes back, in order: the calls by number, and tangents that are computed between."""
    events: list[str] = []
    bring = HostActivations._bring
    numbers: dict[int, int] = {}

    def noted(self: HostActivations, run: Any) -> None:
        numbers.setdefault(id(run), len(numbers))
        events.append(f"in {sum(kept.back is None for kept in run.runs())}")
        bring(self, run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActivations, "_bring", noted)
        yield events


def test_each_run_of_memory_goes_out_once() -> None:
    model = Chain(4)
    host = offloaded(model)
    y = model(torch.randn(ROWS, WIDTH))
    # the first input, and one output a block, which is the input of the next one; weights stay
    assert host.bytes_out == 5 * BYTES
    torch.autograd.backward(y.sum())
    y = model(torch.randn(ROWS, WIDTH))
    assert host.bytes_out == 10 * BYTES, "the memory of a past step is not taken for that of this one"


def test_a_block_comes_back_while_the_one_after_it_computes() -> None:
    model = Chain(4)
    offloaded(model)
    y = model(torch.randn(ROWS, WIDTH))
    events: list[str]
    with copies_back() as events:
        for number in range(4):
            hook: Any = model.weight(number).register_hook
            hook(partial(_note, events, f"gradient {number}"))
        torch.autograd.backward(y.sum())
    assert events == [
        "in 2", "in 1", "gradient 3",  # two tensors of block 3; one of block 2 is the input of block 3
        "in 1", "gradient 2", "in 1", "gradient 1", "gradient 0",
    ]  # fmt: skip


def test_the_device_holds_two_blocks_at_most() -> None:
    """Copies that are back, at each gradient of a weight; of a graph that is kept, too."""
    model = Chain(6)
    host = offloaded(model)
    y = model(torch.randn(ROWS, WIDTH))
    held: list[int] = []
    for number in range(6):
        hook: Any = model.weight(number).register_hook
        hook(lambda grad: held.append(sum(kept.back is not None for kept in set(host._by_memory.values()))))
    torch.autograd.backward(y.sum(), retain_graph=True)
    assert held == [3, 3, 3, 3, 3, 2], "two blocks have three activations, one of them shared"
    del y
    assert not host._by_memory, "nothing is left after the graph"


def test_microbatches_in_flight_bring_back_their_own() -> None:
    """Forwards of two microbatches, backwards in either order."""
    for order in ((0, 1), (1, 0)):
        model, plain = Chain(3), Chain(3)
        offloaded(model)
        batches = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)]
        outputs = [[one(batch) for batch in batches] for one in (model, plain)]
        for number in order:
            for kind in outputs:
                torch.autograd.backward(kind[number].square().sum())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_what_is_written_after_it_was_saved_comes_back_as_it_was_saved() -> None:
    model, plain = Chain(1), Chain(1)
    offloaded(model)
    x = torch.randn(ROWS, WIDTH)
    given = x.clone()
    y = model(given)
    given.zero_()
    torch.autograd.backward(y.sum())
    torch.autograd.backward(plain(x).sum())
    found, expected = model.weight(0).grad, plain.weight(0).grad
    assert found is not None and expected is not None and torch.equal(found, expected)


def test_a_tensor_that_two_blocks_save_is_sent_again_once_it_was_written() -> None:
    """A running sum, as of a model that adds to its hidden state in place."""
    model, plain = Chain(2), Chain(2)
    offloaded(model)
    for one, changed in ((model, torch.Tensor.mul_), (plain, torch.Tensor.mul)):  # autograd refuses the write in place
        state = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
        first = one.blocks[0](state)
        second = one.blocks[1](changed(state, 0.5))
        torch.autograd.backward((first + second).square().sum())
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None and torch.equal(found.grad, expected.grad)


def test_views_gaps_and_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(ROWS, WIDTH)
    assert host_activations._extent(x.t()) == ROWS * WIDTH
    assert host_activations._extent(x[:, : WIDTH // 2]) == ROWS * WIDTH - WIDTH // 2, "half of it are gaps"
    assert host_activations._extent(x[:, :4]) == 0, "most of it are gaps"
    assert host_activations._extent(torch.randn(WIDTH).expand(ROWS, WIDTH)) == WIDTH
    assert host_activations._extent(torch.empty(0)) == 0
    monkeypatch.setattr(host_activations, "_LEAST_BYTES", 4096)
    assert host_activations._extent(torch.randn(1023)) == 0
    assert host_activations._extent(torch.randn(1024)) == 1024


def test_a_retained_graph_is_walked_twice() -> None:
    model = Chain(3)
    offloaded(model)
    y = model(torch.randn(ROWS, WIDTH)).square().sum()
    weights = list(model.parameters())
    first = torch.autograd.grad(y, weights, retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(torch.autograd.grad(y, weights), first, strict=True))


# ------------------------------------------------------------------------------------------------ choice


def names(model: nn.Module, **settings: Any) -> tuple[list[str], list[str], list[str]]:
    config = ActivationCheckpointingConfig(mode="offload", **settings)
    return (
        list(offloaded_blocks(model, config)),
        list(recomputed_blocks(model, config)),
        list(partly_recomputed(model, config)),
    )


def test_which_blocks_go_to_the_host_and_what_the_others_do() -> None:
    model = Chain(4)
    even, odd = ["blocks.1", "blocks.3"], ["blocks.0", "blocks.2"]
    assert names(model) == (["blocks.0", "blocks.1", "blocks.2", "blocks.3"], [], [])
    assert names(model, every=2) == (even, [], [])
    assert names(model, every=2, others="full") == (even, odd, [])
    assert names(model, every=2, others="selective") == (even, [], odd)
    with pytest.raises(ConfigError) as caught:
        names(model, every=5)
    assert str(caught.value) == (
        "activation_checkpointing.every is 5, but the model has 4 blocks, so that none would be kept on the host; give "
        "a smaller number, or leave activation_checkpointing out."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"mode": "full", "others": "full"},
            'activation_checkpointing.others: "full" applies to the blocks that mode offload leaves on the device; '
            'give mode "offload" and the key every, or leave others out.',
        ),
        (
            {"mode": "offload", "others": "full"},
            'activation_checkpointing.others: "full" applies to the blocks that mode offload leaves on the device; '
            'give mode "offload" and the key every, or leave others out.',
        ),
        (
            {"mode": "offload", "inputs": "host"},
            'activation_checkpointing.inputs: "host" with mode "offload", which recomputes nothing; set the mode to '
            '"full" or "selective", or leave inputs out.',
        ),
        (
            {"mode": "offload", "save": ["matmul"]},
            'activation_checkpointing.save: given with mode "offload"; set the mode to "selective", or leave save out.',
        ),
    ],
)
def test_what_cannot_be_meant_is_said(settings: Settings, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.load_config({"activation_checkpointing": settings})
    assert str(caught.value) == sentence


def test_inputs_of_recomputed_blocks_alone_go_out() -> None:
    model, patches = models.decoder(layers=4), ForwardPatches()
    config = ActivationCheckpointingConfig(mode="full", inputs="host")
    host = recompute_blocks(model, config, patches)
    model(torch.arange(24).view(2, 12))
    width = model.get_parameter("tokens.weight").shape[1]
    assert host.bytes_out == 4 * 4 * 24 * width


class _Signs(torch.autograd.Function):
    """Saves the same memory as numbers and as their bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.view(torch.int32))
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, bits = ctx.saved_tensors
        return grad * (1 + 2 * (bits >> 31)) * (x != 0)


class OneMemory(nn.Module):
    """Saves one run of memory in two ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, x: Tensor) -> Any:
        if self._kind == "bits":
            return _Signs.apply(2 * x)  # type: ignore[no-untyped-call]
        wave = torch.fft.fft(x)
        return (wave * wave.conj() * torch.exp(1j * x)).real


@pytest.mark.parametrize("kind", ["conjugated", "bits"])
def test_one_memory_that_is_saved_in_two_ways_comes_back_in_both(kind: str) -> None:
    x, found = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), list[Any]()
    for host in (None, HostActivations(torch.device("cpu"))):
        block, given = OneMemory(kind), x.clone().requires_grad_()
        forward = block if host is None else host.keeping(block)
        forward(given).square().sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)
