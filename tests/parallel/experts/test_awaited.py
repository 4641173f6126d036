"""Work of a block between the start and the wait of the exchange of its experts, and the ways to use their result."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.experts.awaited import Arrival, Awaited
from engine.parallel.experts.dispatch import COMBINE
from tests.parallel.experts.moe import WIDTH, Member, Stacked, on_expert_ranks
from tests.parallel.experts.test_dispatch import drawn
from tests.parallel.experts.test_routed import given, share

EXPERTS = 4
Use = Callable[[Tensor], Tensor]


class Noted(torch.autograd.Function):
    """Work of a shared expert, noted in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        log.append("shared")
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("shared backward")
        return grad * 0.5, None


class Block(nn.Module):
    """Experts, and other matrices; the code of the block is ``use``."""

    def __init__(self, use: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.moe, self.use = Stacked(EXPERTS), use
        self.other: nn.Module = Member()

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Any:
        """Returns what the code of the block makes of the result of the experts."""
        return self.use(self.moe(x, numbers, weights))


class Beside(Block):
    """Block with a shared expert that is called after the experts (DeepSeek-V3, GLM-4)."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of both."""
        routed = self.moe(x, numbers, weights).view(1, *x.shape)
        y: Tensor = routed + Noted.apply(x, self.log)  # type: ignore[no-untyped-call]
        return y[0]


def within(block: Block, comm: Comm) -> Block:
    """Shares the experts of a block."""
    share(block, comm, EXPERTS)
    return block


def noted(comm: Comm, log: list[str], patch: pytest.MonkeyPatch) -> None:
    """Notes the starts and the waits of the exchanges of results."""
    exchange = comm.exchange

    def call(*args: Any) -> Pending:
        pending = exchange(*args)
        if args[-1] != COMBINE:
            return pending
        log.append("start")
        pending.beside(lambda: log.append("wait"))
        return pending

    patch.setattr(comm, "exchange", call)


@pytest.mark.parametrize("again", [False, True])
def test_a_shared_expert_is_computed_between_the_start_and_the_wait(again: bool) -> None:
    def body(comm: Comm) -> list[str]:
        log, part = list[str](), given(drawn(6, EXPERTS, 2, comm.grid.rank), comm.grid.rank)
        with pytest.MonkeyPatch.context() as patch:
            noted(comm, log, patch)
            block, x = within(Beside(log), comm), part.x.requires_grad_()
            if again:
                y = checkpoint(block, x, part.numbers, part.weights, use_reentrant=False)
            else:
                y = block(x, part.numbers, part.weights)
            y.square().sum().backward()
        return log

    forward = ["start", "shared", "wait"]
    backward = ["start", "shared backward", "wait"]
    logs = on_expert_ranks(2, body)
    assert logs[0] == logs[1]
    assert logs[0] == [*forward, *backward] or again
    if again:  # the block runs again before gradients are sent
        assert logs[0] == [*forward, *forward, *backward]


def test_a_schedule_fills_the_waits_for_results_and_for_their_gradients() -> None:
    def body(comm: Comm) -> list[str]:
        log, part = list[str](), given(drawn(6, EXPERTS, 2, comm.grid.rank), comm.grid.rank)
        block, x = within(Beside(log), comm), part.x.requires_grad_()
        comm.fill_wait = lambda: log.append("piece")
        y = block(x, part.numbers, part.weights)
        y.square().sum().backward()
        return log

    forward = ["piece", "shared", "piece"]  # in the wait of the dispatch, and in that of the results
    assert on_expert_ranks(2, body) == [[*forward, "shared backward", "piece", "piece"]] * 2


class Same(torch.autograd.Function):
    """Function that gives its input on, as hooks of modules do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Kept(torch.autograd.Function):
    """Function that reads its input in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, other)
        return other.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, other = ctx.saved_tensors
        return grad * other, grad * x


class Doubled(torch.autograd.Function):
    """Function that writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def in_place(y: Tensor) -> Tensor:
    """Writes into a view, then reads the whole."""
    rows = y.view(1, -1, WIDTH)
    rows += 1
    rows[:, 1:3].mul_(2)
    y[0] = 3.0
    return y.sin()


def hooked(y: Tensor) -> Tensor:
    """Scales the gradient by a hook."""
    if y.requires_grad:
        y.register_hook(lambda grad: 3 * grad)  # type: ignore[no-untyped-call]
    return y + 1


def unread(y: Tensor) -> Tensor:
    """Reads the norm without a gradient, then views."""
    with torch.no_grad():
        size: Tensor = y.view(-1).norm()
    return y.flatten().unsqueeze(0) * size


USES: dict[str, Use] = {
    "add": lambda y: y + 1,
    "index": lambda y: y[1:, 2] * 2,
    "views of views": lambda y: torch.unflatten(y.view(1, -1, WIDTH).flatten(0, 1), 1, (2, -1)).squeeze()[None].sin(),
    "two uses": lambda y: y.view(-1).cos() + y.reshape(-1) * y.flatten(),
    "in place": in_place,
    "list": lambda y: torch.cat([y, y.view(-1, WIDTH)]),
    "matrix": lambda y: y @ torch.ones(WIDTH, 2, dtype=y.dtype),
    "other bits": lambda y: y.view(torch.int32).view(torch.float32) + y,
    "cast": lambda y: y.to(torch.float64).to(torch.float32),
    "identity": lambda y: Same.apply(y) * y,  # type: ignore[no-untyped-call]
    "identity, view": lambda y: Same.apply(y).view(-1).sin() + y.view(-1),  # type: ignore[no-untyped-call]
    "read in backward": lambda y: Kept.apply(y, torch.full_like(y, 2.0, requires_grad=True)),  # type: ignore[no-untyped-call]
    "doubled": lambda y: Doubled.apply(y) + 1,  # type: ignore[no-untyped-call]
    "doubled, then read": lambda y: (Doubled.apply(y), y * 3)[1],  # type: ignore[no-untyped-call]
    "hook": hooked,
    "unread": unread,
    "detached": lambda y: y * y.detach(),
    "hook of a module": lambda y: _hooked_module()(y) * 2,
    "transposed": lambda y: y.t().contiguous().view(WIDTH, -1).sin(),
    "linear": lambda y: nn.functional.linear(y, torch.ones(3, WIDTH)),
    "nothing": lambda y: torch.zeros_like(y) * 2 + 0 * y.shape[0],
}


def _four_times(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
    return (4 * inputs[0],)


def _hooked_module() -> nn.Module:
    module = nn.Identity()
    module.register_full_backward_hook(_four_times)
    return module


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("grad", [True, False, None], ids=["grad", "no grad", "inference"])
def test_every_use_of_the_result_is_that_of_one_process(name: str, grad: bool | None) -> None:
    use, numbers = USES[name], [drawn(6, EXPERTS, 2, rank) for rank in range(2)]

    def run(module: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        part = given(numbers[rank], rank)
        x = part.x.clone().requires_grad_(bool(grad))
        with nullcontext() if grad else torch.no_grad() if grad is False else torch.inference_mode():
            y = module(x, part.numbers, part.weights)
        if y.requires_grad:
            y.square().sum().backward()
        assert type(y) is Tensor
        return y.detach(), torch.zeros(()) if x.grad is None else x.grad

    found = on_expert_ranks(2, lambda comm: run(within(Block(use), comm), comm.grid.rank))
    for rank, both in enumerate(found):
        for own, right in zip(both, run(Block(use), rank), strict=True):
            torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)


def test_metadata_and_shapes_wait_for_nothing_and_unread_rows_have_no_memory() -> None:
    def use(y: Tensor) -> tuple[Tensor, Tensor]:
        shown = y.shape, y.dtype, y.device, y.dim(), y.size(1), len(y), y.requires_grad, y.is_contiguous(), y.numel()
        assert shown == (torch.Size((6, WIDTH)), torch.float32, torch.device("cpu"), 2, WIDTH, 6, True, True, 6 * WIDTH)
        view = y.reshape(2, 3, -1)
        assert isinstance(y, Awaited) and isinstance(view, Awaited) and view.shape == (2, 3, WIDTH)
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            for each in (y, view):  # as an extension in C++ reads them
                with pytest.raises(RuntimeError, match="data pointer"):
                    each.exp_()
                with pytest.raises(RuntimeError, match="data pointer"):
                    each.untyped_storage().data_ptr()
        assert view._arrival.sums.isnan().all()
        assert torch.equal(view.detach().view(-1), y.detach().view(-1)) and not view.isnan().any()
        return y, view

    def body(comm: Comm) -> None:
        part = given(drawn(6, EXPERTS, 2, 0), 0)
        y, view = within(Block(use), comm)(part.x, part.numbers, part.weights)
        assert type(y) is type(view) is Tensor, "no awaited tensor leaves the block"

    on_expert_ranks(2, body)


def test_a_result_that_nobody_reads_has_arrived_at_the_end_of_its_block() -> None:
    def body(comm: Comm) -> list[bool]:
        part, arrivals = given(drawn(6, EXPERTS, 2, 0), 0), list[Arrival]()
        block = within(Block(lambda y: arrivals.append(y._arrival)), comm)  # type: ignore[attr-defined]
        block(part.x, part.numbers, part.weights)
        return [bool(each.sums.isfinite().all()) for each in arrivals]

    assert on_expert_ranks(2, body) == [[True], [True]]


def test_a_block_without_other_experts_or_in_compiled_code_gets_plain_results() -> None:
    def body(comm: Comm) -> list[bool]:
        part, found = given(drawn(6, EXPERTS, 2, 0), 0), list[bool]()

        def counted(full: Tensor, own: Tensor, *route: Any) -> Pending:
            full.copy_(own)
            return Pending()

        vars(comm)["all_gather"] = counted  # one rank sends nothing
        for compiled in (False, True):
            block = Block(lambda y: found.append(type(y) is Tensor))
            if not compiled:
                block.other = nn.Linear(WIDTH, EXPERTS)
            within(block, comm)
            if compiled:
                vars(block.moe)["forward"] = torch.compiler.disable(block.moe.forward)  # type: ignore[no-untyped-call]
            call = torch.compile(block, backend="eager") if compiled else block
            with torch.no_grad():
                call(part.x, part.numbers, part.weights)
        return found

    assert on_expert_ranks(1, body) == [[True, True]]
