"""Choices of routers: the call of torch by which a module chooses the experts of each row, found by trial.

    topk, argmax, max over scores [.., experts]      the call returns other indices, and the scores at them

The code around the call stays the model's own, so it computes the weights of the given experts in the same way as
for its own choice, and gradients pass through the scores.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.errors import EngineError
from engine.parallel.experts.forms import list_members
from engine.parallel.experts.proof import random_copy, required_argument
from engine.parallel.model.placeholders import is_without_content
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import full

_CHOICES = ("topk", "argmax", "max")
_REASON = "a router chooses among all experts"
_SHAPES = ((2, 5), (10,))
"""Leading dims of the rows in trials."""


@dataclass(frozen=True, slots=True)
class RouterChoice:
    """Torch call (topk, argmax or max) with which a router chooses experts."""

    router: str
    """Name of the module with the call in its forward."""
    place: int
    """Index of the call among the calls of this forward that choose from ``experts`` scores."""
    experts: int
    """Number of scores per row, at most the number of experts."""
    chosen: int
    """Number of experts chosen per row."""

    def inside(self, block: str) -> "RouterChoice":
        """Returns a copy with the router's full name in the model; its present name is relative to ``block``."""
        return replace(self, router=".".join(filter(None, (block, self.router))))


class _Choices(TorchFunctionMode):
    """Mode that meets the calls that choose among ``sizes`` scores."""

    def __init__(self, sizes: range) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func``; its result is replaced if :meth:`met` returns another one."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if getattr(func, "__name__", "") not in _CHOICES:
            return made
        scores = args[0] if args else kwargs.get("input")
        indices = made if isinstance(made, Tensor) else made[1]
        if not isinstance(scores, Tensor) or not scores.ndim or indices.is_floating_point():
            return made
        if scores.shape[-1] not in self._sizes:
            return made
        alone = indices.ndim == scores.ndim - 1
        own = indices[..., None] if alone else indices
        if own.shape[:-1] != scores.shape[:-1]:  # over another dim
            return made
        found = self.met(scores, own)
        if found is None:
            return made
        values, indices = (each[..., 0] for each in found) if alone else found
        return indices if isinstance(made, Tensor) else type(made)((values, indices))

    def met(self, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns (values, indices) [.., k] for a call with ``scores`` that returns ``own``; None: as they are."""
        raise NotImplementedError


class OtherChoice(_Choices):
    """Torch function mode that replaces a router's expert indices by ``given``, for one forward.

    Args:
        choice: the call that chooses experts.
        given: expert indices [T, k] of T rows; a row with -1 retains the router's choice. None: all rows retain it.
        seen: callback for the resulting expert indices [.., k] of all rows; None: no call.
    """

    def __init__(self, choice: RouterChoice, given: Tensor | None, seen: Callable[[Tensor], object] | None) -> None:
        super().__init__(range(choice.experts, choice.experts + 1))
        self._choice, self._given, self._seen, self._calls = choice, given, seen, 0

    def met(self, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the (scores, expert indices) [.., k] that replace the result of a torch call.

        Returns None, to leave the result unchanged, if the call is not ``choice`` or if ``given`` is None (arguments of
        the constructor). ``scores``: scores of all experts. ``own``: expert indices that the router has chosen.

        Raises:
            EngineError: ``given`` and ``own`` have different numbers of entries.
        """
        self._calls += 1
        inside = own.local if isinstance(own, GlobalTensor) else own
        if self._calls != self._choice.place + 1 or is_without_content(inside):
            return None
        if self._given is None:
            self._note(own)
            return None
        if self._given.numel() != own.numel():
            raise EngineError(
                f"{self._choice.router} chooses {own.shape[-1]} experts for each of {own[..., 0].numel()} rows, but "
                f"routed_experts has {self._given.shape[-1]} for each of {len(self._given)}; give one entry for each "
                "position of the batch."
            )
        whole = self._given.view(own.shape)
        if not isinstance(own, GlobalTensor):
            plain = full(scores, _REASON) if isinstance(scores, GlobalTensor) else scores
            numbers = _merged(whole, own)
            self._note(numbers)
            return plain.gather(-1, numbers), numbers
        assert isinstance(scores, GlobalTensor), "sharded choices come from scores that are sharded in the same way"
        with torch._C.DisableTorchFunction():
            for dim, index in enumerate(own.sets):
                if index is not None:
                    held = torch.from_numpy(index.ranks[own.views.axis.index]).to(whole.device)
                    whole = whole.index_select(dim, held)
            local = _merged(whole, own.local)
            values = scores.local.gather(-1, local)
        numbers = GlobalTensor(local, tuple(own.full), own.sets, own.views)
        self._note(numbers)
        return GlobalTensor(values, tuple(own.full), own.sets, own.views), numbers

    def _note(self, numbers: Tensor) -> None:
        if self._seen is not None:
            self._seen(full(numbers, _REASON) if isinstance(numbers, GlobalTensor) else numbers)


def _merged(given: Tensor, own: Tensor) -> Tensor:
    """Returns ``given``, and ``own`` in rows with -1."""
    given = given.to(own)
    return torch.where((given < 0).any(-1, keepdim=True), own, given)


# ------------------------------------------------------------------ the trial


class _Noted(_Choices):
    """Mode that notes each call with the innermost module around it; ``around``: the modules whose forwards run."""

    def __init__(self, experts: int, around: list[str]) -> None:
        super().__init__(range(2, experts + 1))
        self._around, self._count = around, Counter[tuple[str, int]]()
        self.found: list[RouterChoice] = []

    def met(self, scores: Tensor, own: Tensor) -> None:
        """Notes a call."""
        router, size = self._around[-1], scores.shape[-1]
        self._count.update((name, size) for name in set(self._around))
        self.found.append(RouterChoice(router, self._count[router, size] - 1, size, own.shape[-1]))


class _Member(nn.Module):
    """Stand-in for experts: it notes its arguments, and returns rows that depend on its number."""

    def __init__(self, number: int, asked: "list[tuple[int, Sequence[Tensor]]]") -> None:
        super().__init__()
        self.number, self._asked = number, asked

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Notes the arguments."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self._asked.append((self.number, given))
        return given[0] * (1 + self.number / 8)


def find_router_choice(block: nn.Module, child: str, count: int) -> RouterChoice | str:
    """Finds, by trial runs of a copy of ``block``, the torch call with which a router chooses among the ``count``
    experts in the submodule ``child``.

    Returns the reason as text if there is none. The router's name in the result is relative to ``block``.
    """
    argument = required_argument(block)
    if argument is None:
        return "its block is not called with one tensor"
    trial = _Trial(block, child, count, argument)
    reasons = []
    for width in sorted({size for each in trial.twin.parameters() if each.dim() == 2 for size in each.shape}):
        for shape in _SHAPES:
            found = trial.run(torch.randn(*shape, width, generator=torch.Generator().manual_seed(2)))
            if isinstance(found, RouterChoice):
                return found
            reasons.append(found)
    given = [reason for reason in reasons if reason]
    return given[0] if given else "its block cannot be called for a trial"


class _Trial:
    """Calls of a copy of a block with random parameters and stand-ins for its experts."""

    def __init__(self, block: nn.Module, child: str, count: int, argument: str) -> None:
        self._count, self._argument = count, argument
        self._asked: list[tuple[int, Sequence[Tensor]]] = []
        owner = block.get_submodule(child)
        self._listed = isinstance(owner, nn.ModuleList | nn.ModuleDict)
        members = list(list_members(owner).values()) if self._listed else [owner]
        memo: dict[int, nn.Module] = {id(each): _Member(number, self._asked) for number, each in enumerate(members)}
        self.twin = random_copy(block, memo, torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run(self, x: Tensor) -> RouterChoice | str:
        """Returns the proven call for rows ``x``, or the reason why there is none; empty: the block refuses them."""
        around = list[str]()
        hooks = [hook for name, module in self.twin.named_modules() for hook in _watched(name, module, around)]
        noted = _Noted(self._count, around)
        with noted:
            plain = self._call(x)
        for hook in hooks:
            hook.remove()
        if plain is None or not self._asked:
            return ""
        for choice in reversed(noted.found):
            if self._holds(choice, x, plain):
                return choice
        if not noted.found:
            return f"its block calls none of torch.{', torch.'.join(_CHOICES)} on scores of all experts"
        return "given choices do not reach its experts, or have the weight 0"

    def _holds(self, choice: RouterChoice, x: Tensor, plain: Tensor) -> bool:
        """Returns True if given numbers reach the experts, and the call's own ones change nothing."""
        rows, draw = x[..., 0].numel(), torch.Generator().manual_seed(3)
        given = torch.stack([torch.randperm(choice.experts, generator=draw)[: choice.chosen] for _ in range(rows)])
        seen = list[Tensor]()
        self._forced(choice, x, None, seen.append)
        if len(seen) != 1 or seen[0].numel() != given.numel():
            return False
        same = self._forced(choice, x, seen[0].reshape(given.shape), None)
        if same is None or not torch.allclose(same, plain, atol=1e-6):
            return False
        if self._forced(choice, x, given, None) is None:
            return False
        return self._reaches_list(given) if self._listed else self._reaches_stack(given)

    def _reaches_list(self, given: Tensor) -> bool:
        sizes = Counter[int]()
        for number, tensors in self._asked:
            sizes[number] += tensors[0][..., 0].numel()
        counts = torch.bincount(given.flatten(), minlength=self._count)
        return all(sizes[number] == int(count) for number, count in enumerate(counts))

    def _reaches_stack(self, given: Tensor) -> bool:
        tensors = self._asked[0][1][1:]
        numbers = [each for each in tensors if not each.is_floating_point()]
        weights = [each for each in tensors if each.is_floating_point() and each.numel() == given.numel()]
        counts = torch.bincount(given.flatten(), minlength=self._count)
        reached = any(
            (each.numel() == given.numel() and torch.equal(each.reshape(given.shape).long(), given))
            or (each.shape == counts.shape and torch.equal(each.long(), counts))
            for each in numbers
        )
        return reached and all(bool((each != 0).all() and each.isfinite().all()) for each in weights)

    def _forced(
        self, choice: RouterChoice, x: Tensor, given: Tensor | None, seen: Callable[[Tensor], object] | None
    ) -> Tensor | None:
        router = self.twin.get_submodule(choice.router)
        own: Callable[..., Any] = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with OtherChoice(choice, given, seen):
                return own(*args, **kwargs)

        object.__setattr__(router, "forward", forward)
        try:
            return self._call(x)
        finally:
            object.__delattr__(router, "forward")

    def _call(self, x: Tensor) -> Tensor | None:
        """Returns the first tensor of the output; None: the block raises."""
        self._asked.clear()
        try:
            out: object = self.twin(**{self._argument: x.clone()})
        except Exception:  # any: it is code of the user with rows that it may not be made for
            return None
        first = out[0] if isinstance(out, tuple | list) and out else out
        return first if isinstance(first, Tensor) else None


def _watched(name: str, module: nn.Module, around: list[str]) -> Iterator[Any]:
    """Registers hooks that keep the names of the modules whose forwards run in ``around``."""

    def leave(*_: Any) -> None:
        around.pop()

    yield module.register_forward_pre_hook(lambda *_: around.append(name))
    yield module.register_forward_hook(leave, always_call=True)
