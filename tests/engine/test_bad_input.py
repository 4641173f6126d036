"""Every mistake gets one sentence: what was given, the rule, what to do. Nothing hangs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.test_engine import CONFIG, batches

RunRanks = Callable[..., list[Any]]


def message(action: Callable[[], object], kind: type[Exception] = engine.EngineError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def train(batch: Any, loss_fn: Any = loss_sum, model: nn.Module | None = None) -> Callable[[], object]:
    def run() -> object:
        with engine.initialize(model or models.decoder(), CONFIG, loss_fn=loss_fn) as eng:
            return eng.train_batch(batch)

    return run


def test_wrong_leading_dim_names_the_key() -> None:
    batch = batches(1)[0]
    batch["labels"] = batch["labels"][:6]
    assert message(train(batch)) == (
        "batch['labels'] has leading dim 6, but a data rank's share has micro x accumulation = 2 x 4 = 8 rows; "
        "change the loader or the sizes in the configuration; if the tensor has no rows of the batch, pass "
        "whole=['labels'] to engine.initialize (or with engine_config), so that every microbatch gets all of it."
    )


def test_iterable_that_is_no_iterator() -> None:
    text = message(train(torch.utils.data.DataLoader([1, 2])))  # type: ignore[arg-type]
    assert (
        text.startswith("the batch is a DataLoader; give a tensor, tuple, dict or iterator") and "iter(loader)" in text
    )


def test_microbatch_of_wrong_size_in_an_iterator() -> None:
    text = message(train(iter(batches(1))))
    assert "batch['input_ids'] has leading dim 8" in text and "train_micro_batch_size_per_gpu = 2 rows" in text


def test_batch_without_tensors() -> None:
    assert "the batch has no tensor with a leading dim; give tensors of" in message(train({"a": 1}))


def test_loss_that_is_no_scalar() -> None:
    assert message(train(batches(1)[0], lambda output, batch: output.mean(dim=0))) == (
        f"the loss that loss_fn returned is a float32 tensor of shape ({models.LENGTH}, 61); a loss is a 0-dim "
        "floating tensor: return a mean, or (sum, weight)."
    )
    assert "is a float;" in message(train(batches(1)[0], lambda output, batch: 1.0))


def test_model_without_a_loss() -> None:
    text = message(train(batches(1)[0], None, nn.Sequential(models.decoder())), TypeError)
    assert "unexpected keyword" in text, "a call the model does not take is the model's own error"

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x)}

    assert message(train({"x": torch.ones(8, 2)}, None, Named())) == (
        "the model returned a dict without a loss; pass labels to the model, or loss_fn=... to engine.initialize."
    )


def test_loss_without_gradient() -> None:
    text = message(train(batches(1)[0], lambda output, batch: output.detach().mean()))
    assert text.startswith("the loss does not depend on any trainable parameter; check requires_grad")


def test_weight_zero_everywhere() -> None:
    batch = batches(1)[0]
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert "the weight of this step is 0 on all ranks" in message(train(batch))


def test_step_before_backward_and_too_many_backwards() -> None:
    with engine.initialize(models.nano(), CONFIG) as eng:
        assert message(eng.step) == (
            "step() before backward(): there is no gradient to step with; call backward first."
        )
        tokens = models.token_batches(2, 1)[0]
        for _ in range(4):
            eng.backward(eng(tokens[:, :-1], tokens[:, 1:])[1])
        text = message(lambda: eng.backward(eng(tokens[:, :-1], tokens[:, 1:])[1]))
        assert text.startswith("backward was called for 5 microbatches, but gradient_accumulation_steps is 4; call")
        assert "train_batch was called inside an unfinished accumulation" in message(lambda: eng.train_batch(None))
        assert eng.step() is not None, "the mistake did not spoil the step"


def test_failed_step_leaves_no_gradient_behind() -> None:
    with engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as eng:
        good = batches(1)[0]
        bad = {"input_ids": good["input_ids"].clone(), "labels": good["labels"].clone()}
        bad["input_ids"][6:] = 10**6
        with pytest.raises(IndexError):
            eng.train_batch(bad)
        report = eng.train_batch(good)
    with engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as clean:
        expected = clean.train_batch(good)
    assert (report.loss, report.grad_norm) == (expected.loss, expected.grad_norm)


def test_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    text = message(lambda: engine.initialize(models.decoder(), CONFIG | {"kernels": "triton"}), engine.ConfigError)
    assert text.startswith("kernels 'triton' on cpu: Triton kernels need a GPU and the package triton")


def test_compiling_needs_blocks() -> None:
    alone = torch.nn.Linear(4, 4)
    text = message(lambda: engine.initialize(alone, CONFIG | {"compile": True}), engine.ConfigError)
    assert text.startswith("compile true: the model has no chain of blocks")


def test_reduction_of_every_microbatch_needs_shards() -> None:
    settings = CONFIG | {"zero_optimization": {"stage": 1, "reduce": "microbatch"}}
    text = message(lambda: engine.initialize(models.decoder(), settings), engine.ConfigError)
    assert text.startswith(
        'zero_optimization.reduce: "microbatch" with stage 1: only stages 2 and 3 keep gradients as shards'
    )


@pytest.mark.parametrize(
    ("zero", "named"), [({"gather": "step"}, 'gather: "step"'), ({"keep_gathered_bytes": 9}, "keep_gathered_bytes: 9")]
)
def test_only_sharded_parameters_are_gathered(zero: dict[str, Any], named: str) -> None:
    settings = CONFIG | {"zero_optimization": {"stage": 2} | zero}
    assert message(lambda: engine.initialize(models.decoder(), settings), engine.ConfigError) == (
        f"zero_optimization.{named} with stage 2: only stage 3 gathers parameters; set stage to 3, or leave "
        f"{named.partition(':')[0]} out."
    )


class WholeMatrix(torch.optim.SGD):
    """Looks at more than one element."""


@pytest.mark.parametrize("stage", [1, 3])
def test_sharding_needs_an_optimizer_that_works_element_by_element(stage: int) -> None:
    settings = CONFIG | {"zero_optimization": {"stage": stage}}
    start = lambda: engine.initialize(models.decoder(), settings, optimizer=lambda p: WholeMatrix(p, lr=0.1))  # noqa: E731
    assert message(start, engine.ConfigError) == (
        "optimizer WholeMatrix is given shards of parameters by zero_optimization.stage 1 or more, which needs an "
        "optimizer that updates element by element; choose such an optimizer, set `elementwise = True` on its class if "
        "it does, or `whole_parameters = True` if it updates each parameter as a whole."
    )


def test_models_that_cannot_be_trained() -> None:
    def start(model: Any) -> Callable[[], object]:
        return lambda: engine.initialize(model, CONFIG, loss_fn=loss_sum)

    frozen = models.decoder().requires_grad_(False)
    with engine.initialize(frozen, CONFIG, loss_fn=loss_sum) as eng:
        assert message(lambda: eng.train_batch(batches(1)[0])) == (
            "train_batch was called, but the model has no trainable parameter; set requires_grad on the "
            "parameters to train before engine.initialize, or call eval_batch or predict."
        )
    assert "'tokens.weight' is float8_e4m3fn, a dtype that torch cannot train" in message(
        start(models.decoder().to(torch.float8_e4m3fn)), engine.PlanError
    )
    kept = CONFIG | {"keep_fp32": ["*norm*"]}
    assert "'tokens.weight' is bfloat16, but keep_fp32 keeps modules in fp32 only if" in message(
        lambda: engine.initialize(models.decoder().bfloat16(), kept, loss_fn=loss_sum), engine.PlanError
    )
    assert "model is a int; give an nn.Module or a callable" in message(start(3), engine.PlanError)
    assert "returned a int; it must return an nn.Module" in message(start(lambda: 3), engine.PlanError)
    shared = models.decoder()
    shared.get_parameter("head.weight").data = shared.get_parameter("tokens.weight").data
    assert message(start(shared), engine.PlanError) == (
        "parameters 'tokens.weight' and 'head.weight' are two objects over the same memory; tie them by assigning one "
        "nn.Parameter to both modules."
    )
    viewed = models.decoder()
    viewed.register_buffer("table", viewed.get_parameter("tokens.weight").detach().t())
    assert message(start(viewed), engine.PlanError) == (
        "buffer 'table' is a view of the parameter 'tokens.weight', which moves to other memory, so the buffer would "
        "keep its first values; read the parameter in forward instead, or clone the buffer."
    )
    viewed.get_parameter("tokens.weight").requires_grad_(False)
    engine.initialize(viewed, CONFIG, loss_fn=loss_sum).close()
    odd = models.decoder()
    odd.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    assert "parameter 'phase' is complex64, but only parameters of a real" in message(start(odd), engine.PlanError)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Flatten(), models.NanoBlock(4, 2), models.Nano())
    assert message(start(empty), engine.PlanError).startswith(
        "parameter '2.frozen_scale' is on the meta device and its module has no reset_parameters that sets it; add one"
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            lambda x: x.to_sparse(),
            "'table' is a tensor of the layout torch.sparse_coo, but parameters and buffers must be dense; register "
            "its dense parts, such as indices and values, and make the tensor from them in forward.",
        ),
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), "'table' is a nested tensor, but"),
        (
            lambda x: torch.conj(x.to(torch.complex64)),
            "'table' is a lazy conjugate of another tensor, whose values torch computes at each use; register "
            "table.resolve_conj() in its place.",
        ),
        (lambda x: torch.conj(x.to(torch.complex64)).imag, "'table' is a lazy negative of another tensor, whose"),
    ],
    ids=["sparse", "nested", "conjugate", "negative"],
)
def test_buffers_whose_memory_holds_no_values_are_refused(form: Callable[[Tensor], Tensor], expected: str) -> None:
    model = models.decoder()
    model.register_buffer("table", form(torch.eye(3)))
    assert message(lambda: engine.initialize(model, CONFIG, loss_fn=loss_sum), engine.PlanError).startswith(expected)


def test_patterns_that_match_nothing() -> None:
    optimizer = {"type": "AdamW", "no_weight_decay": ["*.bia"], "groups": [{"params": ["heads.*"], "lr": 0.1}]}
    text = message(lambda: engine.initialize(models.decoder(), CONFIG | {"optimizer": optimizer}), engine.ConfigError)
    assert text.startswith(
        "optimizer.no_weight_decay[0]: '*.bia'; optimizer.groups[0].params[0]: 'heads.*' matches no trainable parameter"
    )


def test_scheduler_that_is_neither() -> None:
    text = message(
        lambda: engine.initialize(models.decoder(), CONFIG, lr_scheduler=lambda anything: "fast"), engine.ConfigError
    )
    assert "pass a callable update -> factor or optimizer -> torch.optim.lr_scheduler.LRScheduler" in text


def test_scheduler_that_needs_a_metric() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    text = message(lambda: engine.initialize(models.decoder(), CONFIG, lr_scheduler=plateau), engine.ConfigError)
    assert text.startswith("lr_scheduler returned a ReduceLROnPlateau, which needs a metric at each step")


def test_bad_loss_given_to_backward_opens_no_step() -> None:
    with engine.initialize(models.nano(), CONFIG) as eng:
        text = message(lambda: eng.backward(torch.ones(3, requires_grad=True)))
        assert text.startswith("the loss given to backward is a float32 tensor of shape (3,)")
        assert message(eng.step).startswith("step() before backward()")


def test_parameters_that_left_the_engine_are_named() -> None:
    def spoil(how: Callable[[nn.Module], object]) -> str:
        with engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as eng:
            eng.train_batch(batches(1)[0])
            how(eng.module)
            return message(lambda: eng.train_batch(batches(1)[0]))

    def assign(model: nn.Module) -> None:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    for how in (assign, nn.Module.double):
        assert "is no longer in the engine's memory" in spoil(how)

    def add(model: nn.Module) -> None:
        model.get_submodule("blocks.0").register_module("adapter", nn.Linear(2, 2))

    assert spoil(add).startswith(
        "parameter 'blocks.0.adapter.weight' was added to the model after engine.initialize, so the engine does not"
    )


def test_a_lazy_layer_without_a_forward_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    assert message(lambda: engine.initialize(model, CONFIG)) == (
        "'1.weight' has no shape before a first forward (a lazy layer); run one forward of the model on a microbatch "
        "before engine.initialize."
    )
    model(torch.ones(1, 4))
    engine.initialize(model, CONFIG).close()


def test_a_parameter_that_forward_makes_is_named_before_the_first_update() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale: nn.Parameter | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = nn.Parameter(torch.ones(x.shape[-1]))
            out: Tensor = self.inner(x) * self.scale
            return out

    with engine.initialize(Late(), CONFIG, loss_fn=lambda out, _: out.square().mean()) as eng:
        text = message(lambda: eng.train_batch(torch.ones(8, 4)))
        assert (
            text.startswith("parameter 'scale' was added to the model after engine.initialize") and eng.step_count == 0
        )
        assert "if forward makes it, run one forward before engine.initialize" in text


def test_thawed_parameters_without_a_place_are_named() -> None:
    model = models.decoder()
    model.get_submodule("blocks.0.up").requires_grad_(False)
    with engine.initialize(model, CONFIG, loss_fn=loss_sum) as eng:
        eng.train_batch(batches(1)[0])
        eng.module.get_submodule("blocks.0.up").requires_grad_(True)
        assert message(lambda: eng.train_batch(batches(1)[0])) == (
            "parameter 'blocks.0.up.weight' was frozen when the engine was built and requires a gradient now, but has "
            "no place for gradient and optimizer state; name it in optimizer.include_frozen, or freeze it after "
            "engine.initialize."
        )
    nothing = {"type": "AdamW", "include_frozen": ["blocks.0.up.*"]}
    text = message(lambda: engine.initialize(models.decoder(), CONFIG | {"optimizer": nothing}), engine.ConfigError)
    assert "optimizer.include_frozen[0]: 'blocks.0.up.*' matches no frozen parameter" in text


def test_backward_through_a_graph_of_old_weights_is_refused() -> None:
    with engine.initialize(models.nano(), CONFIG | {"train_batch_size": 2}) as eng:
        tokens = models.token_batches(2, 2)
        losses = [eng(t[:, :-1], t[:, 1:])[1] for t in tokens]
        eng.backward(losses[0])
        eng.step()
        assert "the weights have changed since the forward" in message(lambda: eng.backward(losses[1]))


# ---------------------------------------------------------------------- several ranks


def ends_early() -> tuple[str, float]:
    """Rank 1's iterator holds too few microbatches; then all ranks go on with whole batches."""
    with engine.initialize(models.decoder(), CONFIG | {"train_batch_size": 16}, loss_fn=loss_sum) as eng:
        parts = [{k: v[i : i + 2] for k, v in batches(1)[0].items()} for i in (0, 2, 4, 6)]
        items: Iterator[Any] = iter(parts[:2] if eng.grid.rank else parts)
        text = message(lambda: eng.train_batch(items))
        assert eng.step_count == 0
        return text, eng.train_batch(batches(1)[0]).loss


def test_iterator_that_ends_early_on_one_rank_stops_all(run_ranks: RunRanks) -> None:
    (first, loss), (second, same) = run_ranks(ends_early, 2)
    assert (
        first.startswith("rank 1 (")
        and "so no rank updated its weights; see the error of the rank that failed: Engine" in first
    )
    assert second.startswith(
        "the iterator ended after 2 of 4 microbatches; a step needs gradient_accumulation_steps = 4"
    )
    assert loss == same


def unequal(what: str) -> str:
    """Ranks that were given different things."""
    import torch.distributed as dist

    rank = dist.get_rank()
    model: nn.Module = models.decoder()
    if what == "weights" and rank == 2:
        with torch.no_grad():
            model.get_parameter("blocks.1.up.bias")[3] += 1e-7
    if what == "dropout":
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(0.2 if rank == 2 else 0.1))
    settings = CONFIG | {"train_batch_size": 24, "seed": 5 + (what == "settings" and rank == 1)}
    if what == "grids" and rank:
        settings |= {"parallel": {"pipeline": 3}}
    return message(lambda: engine.initialize(model, settings, loss_fn=loss_sum))


def test_different_weights_or_settings_are_named(run_ranks: RunRanks) -> None:
    texts = run_ranks(unequal, 3, "weights")
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 0 and rank 2 were given different weights, first in 'blocks.1.up.bias'; build the")
    texts = run_ranks(unequal, 3, "settings")
    assert set(texts) == {
        "seed is 5 on ranks 0, 2 and 6 on rank 1: ranks were given different configurations; pass the same one on "
        "every rank."
    }
    texts = run_ranks(unequal, 3, "grids")
    assert set(texts) == {
        "parallel.data is 3 on rank 0 and 1 on ranks 1, 2: ranks were given different configurations; pass the same "
        "one on every rank."
    }
    texts = run_ranks(unequal, 3, "dropout")
    assert set(texts) == {
        "2.p is 0.1 on ranks 0, 1 and 0.2 on rank 2: ranks were given different models; build the same model on every "
        "rank."
    }


def unequal_models(what: str) -> str:
    """Ranks whose models differ in what is trained, or in size."""
    import torch.distributed as dist

    model: nn.Module = models.decoder()
    if dist.get_rank():
        if what == "frozen":
            model.get_parameter("blocks.0.up.weight").requires_grad_(False)
        else:
            model = nn.Sequential(model, nn.Linear(2, 2))
    return message(lambda: engine.initialize(model, CONFIG | {"train_batch_size": 16}, loss_fn=loss_sum))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "frozen",
            "blocks.0.up.weight is (128, 32) torch.float32 on rank 0 and (128, 32) torch.float32, frozen on rank 1",
        ),
        ("size", "class of the model is Decoder on rank 0 and Sequential on rank 1"),
    ],
)
def test_different_models_are_refused(run_ranks: RunRanks, what: str, expected: str) -> None:
    texts = run_ranks(unequal_models, 2, what)
    assert set(texts) == {f"{expected}: ranks were given different models; build the same model on every rank."}


def fails_on_one_rank(zero: dict[str, Any]) -> tuple[str, float]:
    """Rank 1's loss fails in its second microbatch; the next step is made by all."""
    calls = 0

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2 and eng.grid.rank:
            raise RuntimeError("the user's own mistake")
        return loss_sum(output, batch)

    config = CONFIG | {"train_batch_size": 16, "zero_optimization": zero}
    with engine.initialize(models.decoder(), config, loss_fn=loss) as eng:
        text = message(lambda: eng.train_batch(batches(1)[0]), Exception)
        return text, eng.train_batch(batches(1)[0]).loss


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2, "reduce": "microbatch", "reduce_bucket_size": 5000}])
def test_an_error_in_the_middle_of_a_step_reaches_all_ranks(run_ranks: RunRanks, zero: dict[str, Any]) -> None:
    (first, loss), (second, same) = run_ranks(fails_on_one_rank, 2, zero)
    assert (
        first.startswith("rank 1 (")
        and "failed in this step" in first
        and first.endswith(second)
        and second == "the user's own mistake"
    )
    assert loss == same


def does_not_fit() -> str:
    """A configuration for four ranks on two."""
    settings = CONFIG | {"parallel": {"data": 4}}
    return message(lambda: engine.initialize(models.decoder(), settings, loss_fn=loss_sum), engine.ConfigError)


def test_world_size_that_does_not_fit(run_ranks: RunRanks) -> None:
    texts = run_ranks(does_not_fit, 2)
    assert texts[0] == texts[1] and "is not the world size 2" in texts[0] and "parallel.data 2" in texts[0]
