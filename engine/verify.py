"""Parity check: the same training in one process of plain torch, compared with the engine's run.

The reference uses as little of Trine as possible: a loop over all microbatches of all data ranks in order,
``torch.optim``, ``clip_grad_norm_``. Every grid must reproduce its losses, norms and weights.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.api import initialize
from engine.build.place_model import make_model
from engine.config import Config, load_config
from engine.config.optim_sections import OptimizerConfig
from engine.errors import GridError
from engine.kernels.device import indexed
from engine.optim.built_in import plain_optimizer
from engine.optim.lr_schedules import SchedulerArgument, check_scheduler, make_learning_rate
from engine.optim.param_groups import assign_groups
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World, read_world
from engine.parallel.kernel_injection.flex_calls import redirect_flex
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.materialize import materialize
from engine.parallel.model.rng_streams import RandomStreams
from engine.precision.dtypes import make_precision, place_rest
from engine.precision.fp32_modules import put_casts
from engine.precision.frozen_weights import round_frozen
from engine.precision.loss_scaler import make_loss_scale
from engine.program.batch import Batch, call_model, cast_floats, map_tensors
from engine.program.batch_rows import BatchRows, Name
from engine.program.forward_inputs import ForwardInputs, Inputs, with_targets
from engine.program.loss import LossFunction, RowGather, find_loss
from engine.zero.optim.inner_optimizer import OptimizerFactory
from engine.zero.optim.rules.schedule_free import take_averages

ModelBuilder = Callable[[], nn.Module]
Steps = Sequence[Batch]
"""A global batch for each step."""


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """Record of a training run: loss and gradient norm of each step, and the final weights by parameter name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Parity:
    """Comparison of the engine's training run with a run in one process of plain torch."""

    engine: TrainingRecord
    reference: TrainingRecord

    @property
    def loss(self) -> float:
        """Largest relative deviation between the losses of the two runs, over all steps."""
        return _worst(self.engine.losses, self.reference.losses)

    @property
    def norm(self) -> float:
        """Largest relative deviation between the gradient norms of the two runs, over all steps."""
        return _worst(self.engine.norms, self.reference.norms)

    @property
    def weights(self) -> dict[str, float]:
        """Largest absolute deviation between the final values of each parameter in the two runs, by parameter name."""
        return {name: _distance(self.engine.weights[name], value) for name, value in self.reference.weights.items()}

    @property
    def weight(self) -> float:
        """Largest absolute deviation between the final weights of the two runs, over all elements."""
        return _largest(self.weights.values())

    def holds(self, loss: float = 1e-6, norm: float = 1e-5, weight: float = 1e-5) -> bool:
        """Returns True if all deviations are within the bounds. The defaults are the engine's guarantee for fp32.

        ``loss`` and ``norm`` bound relative deviations. ``weight`` bounds the absolute deviation; its default assumes
        an Adam eps of about 1e-5.
        """
        return self.loss <= loss and self.norm <= norm and self.weight <= weight

    def __str__(self) -> str:
        name, deviation = max(self.weights.items(), key=lambda item: item[1])
        return (
            f"losses {self.loss:.1e} relative, norms {self.norm:.1e} relative, weights {deviation:.1e} absolute "
            f"(largest in {name}) over {len(self.engine.losses)} steps"
        )


def verify(
    build_model: ModelBuilder,
    config: Any,
    batches: Steps,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    lr_scheduler: SchedulerArgument | None = None,
    *,
    inputs: Inputs | None = None,
    whole: Name | Sequence[Name] = (),
    threads: int | None = None,
    device: str | torch.device | None = None,
) -> Parity | None:
    """Trains with the engine and in one process of plain torch, and compares losses, gradient norms and weights.

    Every rank calls it.

    Args:
        build_model: builds the model; it is called under the configured seed.
        config: as for :func:`engine.initialize`.
        batches: one global batch for each step: tensors with ``train_batch_size`` rows, the same on all ranks.
        loss_fn: as for :func:`engine.initialize`.
        optimizer: as for :func:`engine.initialize`.
        lr_scheduler: as for :func:`engine.initialize`.
        inputs: as for :func:`engine.initialize`.
        whole: as for :func:`engine.initialize`.
        threads: run this many ranks as threads of this process, instead of the ranks of the job.
        device: the device that these threads share, such as "cuda"; None: the CPU.

    Returns:
        The comparison on rank 0, None elsewhere.

    Raises:
        GridError: a device is passed without threads that could share it.
    """
    check_scheduler(lr_scheduler, None)
    options = VerifyOptions(loss_fn, optimizer, lr_scheduler, inputs, whole)
    if threads is not None:
        shared = indexed(torch.device(device or "cpu"))
        body = partial(train_on_grid, build_model, config, batches, options)
        ranks = run_thread_ranks(threads, body, [shared] * threads)
        alone = World(0, threads, 0, shared)
        return Parity(ranks[0], train_alone(build_model, config, batches, options, alone))
    if device is not None:
        raise GridError(
            f"verify got device={str(device)!r} without threads, but each rank of a job has its own device; "
            "give threads=N for N ranks that share it, or leave device out."
        )
    ours = train_on_grid(build_model, config, batches, options)
    return None if read_world().rank else Parity(ours, train_alone(build_model, config, batches, options))


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Arguments of :func:`engine.initialize` that ``verify`` passes on."""

    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerArgument | None = None
    inputs: Inputs | None = None
    whole: Name | Sequence[Name] = ()

    @property
    def rows(self) -> BatchRows:
        """Rule that divides a global batch into the rows of data ranks and microbatches."""
        return BatchRows.of(self.whole, None, 0)


PLAIN = VerifyOptions()
"""Options of a run with the model's own loss and the configured optimizer."""


def train_on_grid(
    build_model: ModelBuilder, config: Any, batches: Steps, wishes: VerifyOptions = PLAIN, world: World | None = None
) -> TrainingRecord:
    """Trains one step on each batch with the engine. Returns losses, gradient norms and, on rank 0, the final weights.

    ``batches``: global batches, equal on every rank. ``wishes``: further arguments of :func:`engine.initialize`.
    ``world``: this rank's identity; None: read from the launcher.
    """
    world = world or read_world()
    resolved = load_config(config, world.size)
    part = wishes.rows.take_rows
    arguments = (wishes.loss_fn, part(batches[0], 0, resolved.micro), wishes.optimizer, wishes.lr_scheduler)
    forward: dict[str, Any] = {"inputs": wishes.inputs, "whole": wishes.whole}
    with initialize(build_model, resolved, *arguments, **forward, world=world) as engine:
        rank, rows = engine.grid.row_rank, resolved.micro * resolved.accumulation
        reports = [engine.train_batch(part(batch, rank * rows, rows)) for batch in batches]
        weights = engine.full_state_dict()
    return TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), weights)


def train_alone(
    build_model: ModelBuilder, config: Any, batches: Steps, wishes: VerifyOptions = PLAIN, world: World | None = None
) -> TrainingRecord:
    """Trains one step on each batch in one process of plain torch. Returns losses, gradient norms and final weights.

    The microbatches of all data ranks run one after the other. ``world`` gives the device and the number of ranks;
    None: read from the launcher.
    """
    world = world or read_world()
    resolved = load_config(config, world.size)
    model = make_model(build_model, resolved.seed, world.device)
    everything = [name for name, _ in model.named_parameters()]
    materialize(model, everything, resolved.seed, world.device, lambda name, full: full)
    model.to(world.device)
    return _Reference(model, resolved, wishes).train(batches)


class _Reference:
    """Trainer in one process of plain torch: gradients are summed in fp32 on fp32 masters.

    The bounds of the promise hold in fp32. In bf16 a rounding difference of 1e-8 flips the bf16 rounding of some weight
    every few steps, after which two correct runs drift apart: expect about 1e-5 in a loss.
    """

    def __init__(self, model: nn.Module, config: Config, wishes: VerifyOptions) -> None:
        self.model, self.config, self.rows = model, config, wishes.rows
        self.inputs = ForwardInputs.of(model, wishes.loss_fn is not None, wishes.inputs)
        self.loss_fn = with_targets(wishes.loss_fn, self.inputs)
        self.updates = 0
        self.precision = make_precision(config, model)
        self.device = next(model.parameters()).device
        self.dtypes = {key: value.dtype for key, value in model.state_dict().items()}
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = parameter.data.to(self.precision.parameter(name, parameter.dtype))
        place_rest(model, self.precision, self.device)
        round_frozen(model, config)
        patches = ForwardPatches()
        redirect_flex(model, patches)  # torch has no backward of flex attention on CPUs
        put_casts(model, self.precision.kept, self.precision.compute, patches)
        self.scale = make_loss_scale(config.fp16)
        self.streams = RandomStreams(model, self.device, patches)
        assigned, groups = assign_groups(model, config.optimizer)
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for name, group in assigned.items():
            members[group].append(self.masters[name])
        options = [{"params": m, **g.as_kwargs()} for m, g in zip(members, groups, strict=True) if m]
        assert wishes.optimizer is not None or config.optimizer is not None  # initialize() refuses a run without one
        built_in = partial(plain_optimizer, config.optimizer or OptimizerConfig())
        self.optimizer = (wishes.optimizer or built_in)(options)
        self.rate = make_learning_rate(self.optimizer, config.scheduler, wishes.lr_scheduler)

    def train(self, batches: Sequence[Batch]) -> TrainingRecord:
        """Trains on all batches; the weights returned are the masters, in the dtypes of the model as passed."""
        steps = [self._step(batch) for batch in batches]
        take_averages(self.optimizer)
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].data = master.detach()
        state = {key: value.to("cpu", self.dtypes[key]) for key, value in self.model.state_dict().items()}
        return TrainingRecord(tuple(loss for loss, _ in steps), tuple(norm for _, norm in steps), state)

    def _step(self, batch: Batch) -> tuple[float, float]:
        total = weight = 0.0
        given = self.config.optimizer
        for master in self.masters.values():
            master.grad = torch.zeros_like(master) if given is not None and given.update_unused else None
        micro, added = self.config.micro, self.config.row_ranks if self.config.gradient_allreduce_op == "sum" else 1
        for index in range(self.config.row_ranks * self.config.accumulation):
            part = self.rows.take_rows(batch, index * micro, micro)
            with self.streams.forward(self.config.seed, self.updates, index), self.precision.forward(self.device):
                moved = map_tensors(part, lambda t: t.to(self.device))
                output = call_model(self.model, cast_floats(self.inputs.take(moved), self.precision.inputs))
                loss = find_loss(output, moved, RowGather().given_to(self.loss_fn))
            torch.autograd.backward(loss.sum.float() * self.scale.value if self.config.fp16.enabled else loss.sum)
            self._collect()
            total, weight = total + float(loss.sum.detach()), weight + float(loss.weight)
        for master in self.masters.values():
            # "sum" adds the means of the data ranks, so the mean over all rows is multiplied by their number
            divisor = weight * self.scale.value / added
            master.grad = None if master.grad is None else master.grad / divisor
        clip = self.config.gradient_clipping or math.inf
        norm = nn.utils.clip_grad_norm_(self.masters.values(), clip, foreach=False)
        finite = math.isfinite(norm)
        self.scale = self.scale.after(overflow=not finite)
        if finite:
            self._update()
        return total / weight, float(norm)

    def _collect(self) -> None:
        for name, parameter in self.parameters.items():
            grad, parameter.grad = parameter.grad, None
            master = self.masters[name]
            if grad is not None:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
                master.grad += grad

    @torch.no_grad()
    def _update(self) -> None:
        self.rate.prepare(self.updates)
        self.updates += 1
        self.optimizer.step()
        self.rate.done()
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)


def _worst(ours: Sequence[float], reference: Sequence[float]) -> float:
    return _largest(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(ours, reference, strict=True))


def _distance(ours: Tensor, reference: Tensor) -> float:
    if not reference.numel():
        return 0.0
    wide = torch.promote_types(reference.dtype, torch.float64)  # a complex number keeps its imaginary part
    return float((ours.to(wide) - reference.to(wide)).abs().nan_to_num(nan=math.inf).max())


def _largest(deviations: Iterable[float]) -> float:
    """Returns the largest value, or infinity if any is not a number, which ``max`` alone would overlook."""
    return max((value if math.isfinite(value) else math.inf for value in deviations), default=0.0)
