"""Pool of tenants on one grid of ranks: adapters over one frozen base, and full-parameter models that take turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from engine.api import initialize
from engine.build.place_model import make_model
from engine.config import Config
from engine.config.optim_sections import OptimizerConfig
from engine.config.outer_section import ConsumerConfig, WeightsOutConfig
from engine.config.sections import CheckpointConfig, MonitorConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.parallel.comm.world import Lender, World, read_world
from engine.program.batch import Batch
from engine.serving.commands import Adapter
from engine.serving.tenants.adapters import adapted
from engine.serving.tenants.skeleton import lender_of, tenant_config, without_memory

_TOKENS = 32
"""Tokens of the example with which plans are made; other lengths are traced when they come."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a :class:`TenantPool` on all its ranks: numbers of adapters and full copies, and LoRA rank."""

    adapters: int = 1024
    """Maximum number of tenants with adapters."""
    full: int = 0
    """Maximum number of full-parameter tenants."""
    rank: int = 512
    """Maximum rank of an adapter."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of LoRA adapters and full copies in a pool of clients' models, on this rank."""

    adapters: int
    full: int
    resident: tuple[str, ...]
    """Full-parameter tenants with their state on the device: at most one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds in which each tenant was created, by id."""


@dataclass(slots=True)
class _Tenant:
    engine: Engine
    full: bool
    seconds: float
    parked: bool = False


class TenantPool:
    """Engines of clients' models (tenants), which share one frozen base model.

    A tenant is a LoRA adapter over the base, or a full copy of it. At most one full copy is on the device; the others
    are offloaded to the host. All ranks call all methods in the same order.

    Args:
        build_base: function that builds the base model, equal on all ranks; it may use the meta device if
            ``checkpoint.init_from`` is set.
        config: grid, ZeRO, precision and optimizer of the base and of every tenant; AdamW by default.
        limits: maximum numbers of tenants, and maximum LoRA rank.
        example_batch: example of a tenant's microbatch, traced to plan tensor and pipeline parallelism; None: one row
            of token ids.
        world: rank, world size and device of this rank, if ranks are threads; None: read from the launcher.
    """

    def __init__(
        self,
        build_base: Callable[[], nn.Module],
        config: Config,
        limits: TenantLimits | None = None,
        example_batch: Batch = None,
        world: World | None = None,
    ) -> None:
        self._build, self._limits = build_base, limits or TenantLimits()
        self._world = world or read_world()
        tokens = {"input_ids": torch.zeros(1, _TOKENS, dtype=torch.int64)}
        self._example = tokens if example_batch is None else example_batch
        config = config.resolve(self._world.size)
        self._config = replace(
            config,
            optimizer=config.optimizer or OptimizerConfig(),
            scheduler=None,
            gradient_clipping=0.0,
            monitor=MonitorConfig(),
        )
        self._tenants: dict[str, _Tenant] = {}
        model = make_model(build_base, config.seed, self._world.device)
        self._skeleton = without_memory(model)
        model.requires_grad_(False)
        frozen = replace(self._config, optimizer=None, checkpoint=replace(config.checkpoint, every=0, memory_every=0))
        self._base = self._initialize(model, frozen)

    @property
    def base(self) -> Engine:
        """Engine of the frozen base model."""
        return self._base

    def create(self, model_id: str, adapter: Adapter | None) -> Engine:
        """Creates the tenant ``model_id`` and returns its engine.

        With an ``adapter``, the tenant is a LoRA adapter over the base; with None, a trainable full copy of the base.

        Raises:
            ConfigError: the pool is full, or the adapter does not fit the base.
            EngineError: a tenant of this id exists.
        """
        if model_id in self._tenants:
            raise EngineError(
                f"tenant {model_id!r} exists already; call drop({model_id!r}) first, or give another model_id."
            )
        self._refuse_full(adapter)
        began = time.perf_counter()
        engine = self._adapted(adapter) if adapter is not None else self._full()
        self._tenants[model_id] = _Tenant(engine, adapter is None, time.perf_counter() - began)
        return engine

    def get(self, model_id: str) -> Engine:
        """Returns the engine of a tenant.

        If the tenant is a full copy, it first moves to the device, and all other full copies move to the host.

        Raises:
            EngineError: there is no such tenant.
        """
        tenant = self._tenants.get(model_id)
        if tenant is None:
            raise EngineError(
                f"the pool has no tenant with model_id {model_id!r}; call create({model_id!r}, adapter) of TenantPool "
                "first."
            )
        self._park_others(tenant)
        return tenant.engine

    def drop(self, model_id: str) -> None:
        """Removes a tenant and frees its memory; the base model stays.

        Raises:
            EngineError: there is no such tenant.
        """
        engine = self.get(model_id)
        del self._tenants[model_id]
        engine.close()

    def close(self) -> None:
        """Closes all tenants and the base."""
        for model_id in list(self._tenants):
            self.drop(model_id)
        self._base.close()

    def statistics(self) -> PoolStatistics:
        """Returns the numbers of LoRA adapters and full copies on this rank, without communication."""
        full = {name: tenant for name, tenant in self._tenants.items() if tenant.full}
        return PoolStatistics(
            adapters=len(self._tenants) - len(full),
            full=len(full),
            resident=tuple(name for name, tenant in full.items() if not tenant.parked),
            seconds={name: tenant.seconds for name, tenant in self._tenants.items()},
        )

    def _refuse_full(self, adapter: Adapter | None) -> None:
        limits, full = self._limits, sum(tenant.full for tenant in self._tenants.values())
        if adapter is None and full >= limits.full:
            raise ConfigError(
                f"{full} full-parameter tenants exist and the limit serve.tenants.full is {limits.full}; train an "
                "adapter, unload a model, or raise the limit."
            )
        if adapter is not None and len(self._tenants) - full >= limits.adapters:
            raise ConfigError(
                f"{limits.adapters} tenants with adapters exist, and the limit serve.tenants.most is "
                f"{limits.adapters}; unload a model, or raise the limit."
            )
        if adapter is not None and not 1 <= adapter.rank <= limits.rank:
            raise ConfigError(f"the adapter has rank {adapter.rank}; give a rank from 1 to {limits.rank}.")

    def _adapted(self, adapter: Adapter) -> Engine:
        model = adapted(without_memory(self._skeleton), adapter)
        config = tenant_config(self._config, self._base, self._skeleton, model)
        config = replace(config, checkpoint=CheckpointConfig(frozen=False))
        return self._initialize(model, config, lender_of(self._base, model))

    def _full(self) -> Engine:
        self._park_others(None)
        model = make_model(self._build, self._config.seed, self._world.device)
        weights = CheckpointConfig(init_from=self._config.checkpoint.init_from)
        config = replace(self._config, checkpoint=weights)
        if config.serve is not None and config.serve.sampler.vllm is not None:
            published = config.weights_out or WeightsOutConfig()
            server = ConsumerConfig(vllm=config.serve.sampler.vllm)
            config = replace(config, weights_out=replace(published, to=(server,)))
        return self._initialize(model, config)

    def _park_others(self, chosen: _Tenant | None) -> None:
        """Moves the state of full-parameter tenants other than ``chosen`` to the host, and that of ``chosen`` back."""
        if chosen is not None and not chosen.full:
            return
        for tenant in self._tenants.values():
            if tenant.full and tenant is not chosen and not tenant.parked:
                tenant.engine.offload_states(unfinished=True)
                tenant.parked = True
        if chosen is not None and chosen.parked:
            chosen.engine.reload_states()
            chosen.parked = False

    def _initialize(self, model: nn.Module, config: Config, lender: Lender | None = None) -> Engine:
        return initialize(model, config, None, self._example, world=replace(self._world, lender=lender))
