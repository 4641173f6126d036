"""Training task of the scaling benchmark: a decoder on random tokens, with a fixed global batch or a fixed batch for
each data rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from benchmarks.scaling.ranking import GridChoice
from engine.config import Config, load_config
from engine.errors import ConfigError
from engine.models.decoder import Decoder, DecoderConfig, Projection, loss_sum
from engine.planning.analysis import PlanRequest
from engine.planning.plan import Plan, build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Training task: sizes of the model and of the batch."""

    decoder: DecoderConfig
    micro: int
    """Number of rows per microbatch."""
    rows: int
    """Number of rows per step: in total (strong scaling), or per data rank (weak)."""
    bf16: bool = False

    def data_rows(self, choice: GridChoice, mode: Mode) -> int:
        """Returns the number of rows per step on one data rank.

        Raises:
            ConfigError: the data ranks do not divide the rows.
        """
        rows, parts = (self.rows, choice.dp) if mode == "strong" else (self.rows, 1)
        if rows % (parts * self.micro):
            raise ConfigError(
                f"--rows {rows} cannot be shared by {parts} data ranks in microbatches of {self.micro}; "
                f"give a multiple of {parts * self.micro}."
            )
        return rows // parts

    def tokens(self, choice: GridChoice, mode: Mode) -> int:
        """Returns the number of tokens per step, over all ranks."""
        return self.data_rows(choice, mode) * choice.dp * self.decoder.context

    def flops(self, choice: GridChoice, mode: Mode) -> int:
        """Returns the FLOPs per step: three products per forward product; causal attention counts in full."""
        sizes = self.decoder
        weights = sizes.layers * 12 * sizes.width**2 + sizes.vocabulary * sizes.width
        attention = 12 * sizes.layers * sizes.width * sizes.context
        return (6 * weights + attention) * self.tokens(choice, mode)

    def config(self, choice: GridChoice, mode: Mode) -> Config:
        """Returns the resolved engine configuration."""
        return load_config(self.settings(choice, self.data_rows(choice, mode) // self.micro), _world(choice))

    def settings(self, choice: GridChoice, accumulation: int) -> dict[str, Any]:
        """Returns the engine configuration as a JSON object."""
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": accumulation,
            "parallel": {"data": choice.dp, "tensor": choice.tp, "pipeline": choice.pp, "schedule": "1f1b"},
            "zero_optimization": {"stage": choice.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.bf16},
        }

    def example(self) -> dict[str, Tensor]:
        """Returns the shapes of a microbatch, on the meta device."""
        ids = torch.empty((self.micro, self.decoder.context), dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}

    def batches(self, rows: int, rank: int, parts: int = 1) -> Iterator[Mapping[str, Tensor]]:
        """Yields random token batches of a data rank without end, from one of ``parts`` of the vocabulary."""
        generator = torch.Generator().manual_seed(1000 + rank)
        while True:
            size = (rows, self.decoder.context + 1)
            ids = torch.randint(0, self.decoder.vocabulary // parts, size, generator=generator)
            yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def model(self) -> Decoder:
        """Builds the model, with equal weights on every rank."""
        torch.manual_seed(1)
        return Decoder(self.decoder)

    def slice(self, parts: int) -> Decoder:
        """Builds a model with the computation of one of ``parts`` tensor ranks: full norms, sharded products."""
        model, width = self.model(), self.decoder.width
        for block in model.blocks:
            attention: Any = block.attention
            for name in ("query", "key", "value"):
                setattr(attention, name, Projection(width, width // parts))
            attention.output = Projection(width // parts, width)
            block.up = Projection(width, 4 * width // parts)
            block.down = Projection(4 * width // parts, width)
        model.head = Projection(width, self.decoder.vocabulary // parts, bias=False)
        return model

    def plan(self, choice: GridChoice, mode: Mode) -> Plan:
        """Plans a grid, without processes.

        Raises:
            EngineError: the grid is impossible.
        """
        config = self.config(choice, mode)
        with torch.device("meta"):
            model = Decoder(self.decoder)
        program = Program(model, loss_sum, make_precision(config, model), torch.device("cpu"))
        return build_plan(config, PlanRequest(program, self.example()))


def _world(choice: GridChoice) -> int:
    return choice.dp * choice.tp * choice.pp
