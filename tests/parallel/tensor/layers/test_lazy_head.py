"""Logits that wait: losses, gradients and what is made of models as they are; all tensor ranks are threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.errors import EngineError, PlanError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops import linear_cross_entropy as chunks
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.tensor.deferred_linear import FusedForward, fuse
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.layers.lazy_head import install_lazy_head
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits, gather_logits
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import DryAxis, TensorAxis
from tests.kernels.interpreter import repair
from tests.parallel.tensor.models import build, tokens
from tests.parallel.tensor.plans import written_plan
from tests.parallel.tensor.sharded import assert_close, place

WIDTH, SIZE, BATCH, LENGTH = 4, 11, 2, 6
MODES = ("reference", "triton")
Use = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    repair()
    monkeypatch.setattr(chunks, "LEAST_CHUNK", 4)
    monkeypatch.setattr(chunks, "FAST_CHUNK", 4)


class Lonely(TensorAxis):
    """An axis of one rank without processes."""

    def __init__(self) -> None:
        self.index, self.size, self.dry, self.listener = 0, 1, False, None


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if type(leaf) is Tensor]
        self.largest = max(self.largest, *sizes, 0)
        return result


@contextmanager
def no_more_than(elements: int) -> Iterator[None]:
    """Nothing that operations inside give has more elements."""
    seen = Products()
    with seen:
        yield
    assert 0 < seen.largest <= elements, seen.largest


def head(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer, generator = nn.Linear(WIDTH, SIZE, bias), torch.Generator().manual_seed(0)  # of its own: ranks are threads
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer.to(dtype)


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states, labels with some to leave out."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, SIZE, (BATCH, LENGTH), generator=generator)
    labels[1, 2] = -100
    return x.requires_grad_(), labels


def shifted(x: Tensor, y: Tensor) -> Tensor:
    """The idiom of many scripts."""
    return functional.cross_entropy(x[..., :-1, :].contiguous().view(-1, x.size(-1)), y[..., 1:].reshape(-1))


def hugging_face(x: Tensor, y: Tensor) -> Tensor:
    """Transformers' own."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: Tensor = ForCausalLMLoss(x, y, x.shape[-1])
    return loss


def flat(**options: Any) -> Use:
    return lambda x, y: functional.cross_entropy(x.view(-1, x.shape[-1]), y.view(-1), **options)


def penalized(x: Tensor, y: Tensor) -> Tensor:
    """With a z-loss."""
    return flat()(x.float(), y) + 0.1 * torch.logsumexp(x.float(), -1).square().mean()


WAITING: dict[str, Use] = {
    "mean": flat(),
    "sum": flat(reduction="sum"),
    "none": flat(reduction="none"),
    "smooth": flat(label_smoothing=0.2),
    "smooth none": flat(label_smoothing=0.2, reduction="none"),
    "ignored": lambda x, y: flat(ignore_index=1)(x, y.clamp(0)),
    "module": lambda x, y: nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), y.flatten()),
    "weighted": lambda x, y: flat(weight=torch.linspace(0.5, 2, x.shape[-1]))(x, y),
    "keywords": lambda x, y: functional.cross_entropy(input=x.flatten(0, -2), target=y.flatten()),
    "dims": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "shifted": shifted,
    "rows": lambda x, y: functional.cross_entropy(x[:, :-1].reshape(-1, x.size(-1)), y[:, 1:].flatten()),
    "masked": lambda x, y: functional.cross_entropy(x[y >= 0], y[y >= 0]),
    "one token": lambda x, y: functional.cross_entropy(x[0, 0], y[0, 0]),
    "hugging face": hugging_face,
    "penalized": penalized,
    "pieces": lambda x, y: torch.stack(
        [functional.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in zip(x.chunk(3, 1), y.chunk(3, 1))]  # noqa: B905
    ).sum(),
    "twice": lambda x, y: flat()(x, y) + flat(reduction="sum")(x, y.flip(0)),
    "detached": lambda x, y: flat()(x, y) + flat()(x.detach(), y),
}
COMPUTED: dict[str, Use] = {
    "argmax": lambda x, y: flat()(x, y) + (x.argmax(-1) == y).float().mean(),
    "scaled": lambda x, y: flat()(x / 0.7, y),
    "softmax": lambda x, y: x.softmax(-1).square().sum() + flat()(x, y),
    "softmax of a part": lambda x, y: x[:, 1:].float().softmax(-1)[..., 2].sum(),
    "probabilities": lambda x, y: functional.cross_entropy(x.flatten(0, 1), torch.full((12, x.shape[-1]), 0.1)),
    "log_softmax": lambda x, y: functional.nll_loss(x.log_softmax(-1).mT, y),
    "metric first": lambda x, y: flat()(x, y) + 0 * x.detach().sum(),
    "half": lambda x, y: flat()(x.bfloat16().float(), y),
    "cat": lambda x, y: torch.cat([x, x.flip(0)]).square().sum(),
}


def check(use: Use, ours: Callable[[nn.Linear], object], bias: bool = True) -> Any:
    """Loss and gradients with a late head are those of a plain one; the logits that it gave."""
    seen: list[Any] = []
    results = []
    for late in (False, True):
        layer, (x, labels) = head(bias), given()
        if late:
            ours(layer)
        logits = layer(x)
        loss = use(logits, labels)
        assert type(loss) is Tensor
        torch.autograd.backward((loss + x.sum()).sum())
        results.append((loss, x.grad, *(p.grad for p in layer.parameters())))
        seen.append(logits)
    for found, expected in zip(results[1], results[0], strict=True):
        assert found is not None and expected is not None and found.dtype == expected.dtype
        assert_close(found, expected, "late")
    return seen[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WAITING)
def test_losses_are_found_without_the_logits(name: str, mode: Any) -> None:
    logits = check(WAITING[name], lambda layer: install_lazy_head(layer, Lonely(), Kernels(mode), ForwardPatches()))
    assert logits.waits


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_computes_them_and_goes_on(name: str) -> None:
    logits = check(
        COMPUTED[name],
        lambda layer: install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches()),
        bias=False,
    )
    assert not logits.waits


@pytest.mark.parametrize("name", ["mean", "shifted", "smooth none", "penalized"])
def test_no_operation_gives_all_logits(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 64, bias=False)
    x, labels = torch.randn(2, 16, 2, requires_grad=True), torch.arange(32).view(2, 16)
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    with no_more_than(4 * 64):
        torch.autograd.backward(WAITING[name](layer(x), labels).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_may_be_widened_first(dtype: torch.dtype) -> None:
    layer, (x, labels) = head(dtype=dtype), given(dtype)
    expected = hugging_face(layer(x), labels)
    expected_narrow = flat()(layer(x), labels)
    install_lazy_head(layer, Lonely(), Kernels("triton"), ForwardPatches())
    logits = layer(x)
    assert logits.dtype == dtype and logits.float().dtype == torch.float32
    loss, narrow = hugging_face(logits, labels), flat()(logits, labels)
    assert logits.waits and loss.dtype == torch.float32 and narrow.dtype == dtype
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(narrow, expected_narrow)
    assert logits.to(torch.float64).dtype == torch.float64 and not logits.waits


def test_autocast_gives_its_dtype_and_waits() -> None:
    layer, (x, labels) = head(), given()
    with torch.autocast("cpu", torch.bfloat16):
        expected = hugging_face(layer(x), labels)
    expected.backward()  # type: ignore[no-untyped-call]
    theirs = [x.grad, layer.weight.grad]
    x.grad = layer.weight.grad = None
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer(input=x)
        loss = hugging_face(logits, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.waits and logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([x.grad, layer.weight.grad], theirs, rtol=2e-2, atol=1e-3)
    assert torch.equal(
        gather_logits(logits), functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    )


def test_what_is_written_is_seen_by_all_who_look() -> None:
    """On one rank logits are what any tensor is: in-place writes, hooks, gradients of their own."""
    layer, (x, labels) = head(), given()
    plain = layer(x)
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    logits: Any = layer(x)
    known = {logits: 1}
    rows, copy = logits.view(-1, SIZE), (logits + 0)
    logits[0, 0] = 7.0
    logits.mul_(2)
    assert bool((rows[0] == 14).all()) and torch.equal(rows[LENGTH:], 2 * plain[1])
    assert known[logits] == 1 and torch.equal(copy, plain) and bool((gather_logits(logits)[0, 0] == 14).all())
    other = layer(x)
    other.retain_grad()
    torch.autograd.backward(flat()(other, labels))
    assert other.grad is not None and other.grad.shape == plain.shape and bool(other.grad.any())


def test_a_copy_made_before_a_write_stays_what_it_was() -> None:
    layer, (x, _) = head(dtype=torch.bfloat16), given(torch.bfloat16)
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    logits: Any = layer(x)
    wide = logits.float()
    logits.zero_()
    assert bool(wide.abs().sum() > 0) and not bool(gather_logits(logits).any())


def test_a_write_to_the_hidden_states_before_the_loss_is_refused() -> None:
    layer, (x, labels) = head().requires_grad_(False), given()  # plain torch keeps no x for a frozen weight
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    hidden = x * 1
    logits = layer(hidden)
    hidden.mul_(0.5)
    with pytest.raises(EngineError, match="hidden states had changed, but lazy logits are computed at their first"):
        flat()(logits, labels)


class Squared(torch.autograd.Function):
    """Reaches the tensor below Python's dispatch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum of squares."""
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """2 x."""
        (x,) = ctx.saved_tensors
        slope: Tensor = 2 * gather_logits(x)
        return slope * grad


def custom(x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = Squared.apply(x)  # type: ignore[no-untyped-call]
    return loss + flat()(x, y)


def test_functions_that_python_does_not_see_have_their_gradients() -> None:
    check(custom, lambda layer: install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches()))


def test_without_gradients_on_dry_axes_and_on_meta_nothing_waits() -> None:
    layer, (x, labels) = head(), given()
    axis = Lonely()
    patches = ForwardPatches()
    install_lazy_head(layer, axis, Kernels("reference"), patches)
    with torch.no_grad():
        assert type(layer(x)) is Tensor
    with axis.dry_run():
        assert type(layer(x)) is Tensor
    assert type(deepcopy(layer).to("meta")(x.to("meta"))) is Tensor
    assert type(deepcopy(layer)(x)) is ShardedLogits
    logits = layer(x)
    with torch.no_grad():
        loss = flat()(logits, labels)
    assert logits.waits and not loss.requires_grad
    patches.remove()
    assert type(layer) is nn.Linear and "tensor_late" not in vars(layer) and type(layer(x)) is Tensor


def test_logits_nobody_looked_at_are_gone_with_their_weights() -> None:
    layer, (x, _) = head(), given()
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    early, late = layer(x), layer(x)
    values = early.argmax(-1)
    torch.autograd.graph.increment_version([layer.weight])
    assert torch.equal(early.argmax(-1), values)
    with pytest.raises(EngineError, match="read them before the step"):
        late.argmax(-1)
    written = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(EngineError, match="read them before the step"):
        written.argmax(-1)
    assert type(layer(x).sum()) is Tensor


def test_a_backward_that_is_split_has_plain_logits_and_its_products() -> None:
    layer, (x, labels) = head(), given()
    flat()(layer(x), labels).backward()  # type: ignore[no-untyped-call]
    expected, layer.weight.grad = layer.weight.grad, None
    install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())
    taken: dict[str, Tensor] = {}
    patches = ForwardPatches()
    waiting, leftover = SplitBackward(layer, patches), DeferredWeightGrads()
    logits = layer(x)
    with waiting.leaving(leftover):
        flat()(logits, labels).backward()  # type: ignore[no-untyped-call]
    leftover.compute(taken.__setitem__)
    assert type(logits) is Tensor and expected is not None and taken.keys() == {"weight", "bias"}
    assert_close(taken["weight"], expected, "put off")
    patches.remove()
    assert layer(x).waits


def test_a_head_by_kernels_can_wait_and_becomes_itself_again() -> None:
    layer, (x, _) = head(), given()
    fused, lazy = ForwardPatches(), ForwardPatches()
    fuse(layer, "none", Kernels("reference"), fused)
    install_lazy_head(layer, Lonely(), Kernels("reference"), lazy)
    assert layer(x).waits
    lazy.remove()
    assert type(layer(x)) is Tensor and isinstance(vars(layer)["forward"], FusedForward)
    fused.remove()
    fuse(layer, "gelu", Kernels("reference"), fused)
    with pytest.raises(PlanError):
        install_lazy_head(layer, Lonely(), Kernels("reference"), ForwardPatches())


def test_only_a_plain_product_can_wait() -> None:
    class Scaled(nn.Linear):
        """A forward of its own."""

        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(PlanError, match="Scaled was given as a head"):
        install_lazy_head(Scaled(WIDTH, SIZE), Lonely(), Kernels("reference"), ForwardPatches())


def losses_of(model: nn.Module, ids: Tensor, own: bool) -> Tensor:
    """The model's own loss, or that of a user's function."""
    if own:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    return shifted(model(input_ids=ids).logits, ids)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama-kv2", "gpt2", "qwen3-tied"])
def test_hugging_face_models_train_as_they_are(name: str, mode: Any, own: bool) -> None:
    plain, late, ids = build(name), build(name), tokens(rows=2)
    install_lazy_head(late.get_submodule("lm_head"), Lonely(), Kernels(mode), ForwardPatches())  # type: ignore[arg-type]
    assert late(input_ids=ids).logits.waits
    expected, found = losses_of(plain, ids, own), losses_of(late, ids, own)
    torch.autograd.backward((expected, found))
    assert_close(found, expected, "loss")
    theirs = gradients(plain)
    assert gradients(late).keys() == theirs.keys()
    for parameter, grad in gradients(late).items():
        assert_close(grad, theirs[parameter], parameter, floor=1e-2)


CUTS = [("llama-kv2", MODES[0], False), ("llama-kv2", MODES[1], True), ("gpt2", MODES[1], False),
        ("decoder-tied", MODES[0], True)]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "sequence"), CUTS)
def test_a_cut_head_waits_and_sends_what_it_would_send(name: str, mode: Any, sequence: bool) -> None:
    plain, ids = build(name), tokens(rows=2)
    models = [build(name) for _ in range(4)]
    named = "head" if name.startswith("decoder") else "lm_head"

    def loss_of(model: nn.Module) -> Tensor:
        if named == "head":
            return hugging_face(model(ids), ids)
        return losses_of(model, ids, own=True)

    def body(axis: TensorAxis) -> tuple[Tensor, dict[str, Tensor], list[Any]]:
        sent = []
        for late in (False, True):
            model = models[axis.index + 2 * late]
            plan = find_tensor_plan(model, written_plan(model), axis.size, sequence)
            apply_plan(model, plan, axis, ForwardPatches())
            if late:
                install_lazy_head(model.get_submodule(named), axis, Kernels(mode), ForwardPatches())  # type: ignore[arg-type]
            axis.called.clear()  # type: ignore[attr-defined]
            loss = loss_of(model)
            torch.autograd.backward(loss)
            sent.append(sorted(call[:3] for call in axis.called))  # type: ignore[attr-defined]
        assert sent[0] == sent[1]
        found, early = gradients(model), gradients(models[axis.index])
        assert found.keys() == early.keys()
        for parameter, grad in found.items():
            assert_close(grad, early[parameter], parameter, 2e-6, floor=1e-2)
        for parameter, grad in found.items():
            cut = plan.parameters.get(parameter)
            if cut is not None:
                found[parameter] = place(grad, cut, max(piece.stop for piece in cut.ranges), axis.index)
            if cut is not None or parameter in plan.partial:
                axis.all_reduce(found[parameter], "test")
        return loss.detach(), found, sent[1]

    expected = loss_of(plain)
    torch.autograd.backward(expected)
    theirs = gradients(plain)
    for loss, found, _ in run_tensor_ranks(2, body):
        assert_close(loss, expected, "loss")
        assert found.keys() == theirs.keys()
        for parameter, grad in found.items() if not sequence else ():  # the engine sums what runs show to be partial
            assert_close(grad, theirs[parameter], parameter, 2e-6, floor=1e-2)


@pytest.mark.parametrize("name", [*WAITING, *(pytest.param(name, marks=pytest.mark.long) for name in COMPUTED)])
def test_losses_of_a_cut_head_are_those_of_a_whole_one(name: str) -> None:
    """Every use, with kernels on the logits that are computed, without and with waiting."""
    use = WAITING.get(name) or COMPUTED[name]

    def body(axis: TensorAxis) -> None:
        axis.kernels = Kernels("triton")
        layer, (x, labels) = head(), given()
        expected = use(layer(x), labels)
        torch.autograd.backward((expected + x.sum()).sum())
        for late in (False, True):
            layers, (own, _) = [head()], given()
            mine = nn.Sequential(*layers)
            apply_plan(mine, find_tensor_plan(mine, {"0": "vocabulary"}, axis.size), axis, ForwardPatches())
            if late:
                install_lazy_head(layers[0], axis, Kernels("triton"), ForwardPatches())
            loss = use(mine(own), labels)
            assert_close(loss, expected, name)
            torch.autograd.backward((loss + own.sum()).sum())
            assert own.grad is not None and x.grad is not None and layer.weight.grad is not None
            assert_close(own.grad, x.grad, name)
            rows, slope = cast(Vocabulary, layers[0].tensor_vocabulary), layers[0].weight.grad
            assert slope is not None
            part = layer.weight.grad.narrow(0, rows.start, rows.width)
            assert_close(slope, part, name, floor=float(layer.weight.grad.abs().max()))

    run_tensor_ranks(2, body)


def test_a_dry_axis_is_told_what_a_cut_head_sends_as_before() -> None:
    told: list[Any] = []
    axis = DryAxis(2, lambda what, _: told.append(what))
    model = nn.Sequential(head())
    apply_plan(model, find_tensor_plan(model, {"0": "vocabulary"}, 2), axis, ForwardPatches())
    x, _ = given()
    model(x)
    before = list(told)
    install_lazy_head(model[0], axis, Kernels("reference"), ForwardPatches())  # type: ignore[arg-type]
    told.clear()
    assert type(model(x)) is Tensor and told == before and before
