"""1F1B pipeline by DeepSpeed, on the CPU.

Set-up as in ``deepspeed``. Stages get equally many parameters; sends and receives block; any number of microbatches
works.

In fp32 without ZeRO, DeepSpeed clips by the norm of the first stage's gradients, unless parameters are marked
``model_parallel``. They are marked here, except with ``own_clipping``, which measures the default behaviour.
"""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from benchmarks.peers.deepspeed import announce, make_config
from benchmarks.peers.pipelining import Entry
from benchmarks.peers.workload import Mode, Workload, make_adamw, make_model, mean_loss
from engine.models.decoder import Block, Decoder, DecoderConfig, Projection


class DeepSpeedPipeline:
    """DeepSpeed's pipeline: ``PipelineModule`` of ``LayerSpec``, and ``train_batch``, as in its tutorial."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        announce(mode)
        with redirect_stdout(io.StringIO()):  # what it tells of its extension, its cut and its layers
            import deepspeed  # here, so that its import counts as its start-up, and after what it reads
            from deepspeed.pipe import PipelineModule

            deepspeed.init_distributed()
            stage = PipelineModule(_layers(workload.decoder), num_stages=mode.ranks, loss_fn=mean_loss)
            self._names = _load(stage, make_model(workload))
            parameters = list(stage.parameters())
            for parameter in parameters:
                parameter.model_parallel = not mode.own_clipping
            optimizer = make_adamw(parameters, workload)
            config = make_config(mode, workload, sum(parameter.numel() for parameter in parameters))
            self._engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
        self._accumulation = mode.accumulation

    def step(self, rows: Tensor) -> float:
        """Trains one step; returns the loss of all sequences."""
        parts = ((part[:, :-1], part[:, 1:]) for part in rows.chunk(self._accumulation))
        return float(self._engine.train_batch(parts).item())

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights of this rank's stage by name."""
        return {name: parameter.detach() for name, parameter in self._names.items()}


class _FirstLayer(Entry):
    """Built from sizes alone, as a ``LayerSpec`` asks for it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(Decoder(replace(config, layers=1)))


def _layers(config: DecoderConfig) -> list[Any]:
    """The decoder as a list of layers; each rank builds those of its own stage."""
    from deepspeed.pipe import LayerSpec

    blocks = [LayerSpec(Block, config) for _ in range(config.layers)]
    last = [LayerSpec(nn.LayerNorm, config.width), LayerSpec(Projection, config.width, config.vocabulary, bias=False)]
    return [LayerSpec(_FirstLayer, config), *blocks, *last]


def _load(stage: Any, model: Decoder) -> dict[str, nn.Parameter]:
    """Give the layers of ``stage`` the weights of ``model``; its parameters by the names that they have there."""
    sources: list[nn.Module] = [Entry(model), *model.blocks, model.norm, model.head]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for source, layer in zip(sources[stage._local_start : stage._local_stop], stage.forward_funcs, strict=True):
        layer.load_state_dict(source.state_dict())
        pairs = zip(source.parameters(), layer.parameters(), strict=True)
        found |= {names[id(theirs)]: ours for theirs, ours in pairs}
    return found
