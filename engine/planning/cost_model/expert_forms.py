"""Shared experts on tensor ranks, whole or cut along their width: bytes, products and memory of both forms. Arithmetic.

Elements that a rank sends for a layer, with t tensor ranks, e expert ranks, d data ranks of equal experts, T tokens of
a microbatch, m microbatches, rows of width H, D other expert ranks of a token (even routing), k experts of a token, and
P expert parameters:

                    axis ep             axis tp                                       axis edp
    stack   whole   4 m T H D / t       2 m T H (t - 1) / t + 2 P (t - 1) / (t e)     2 P (d - 1) / (d e)
            cut     4 m T H D           4 m T H (t - 1) / t                           2 P (d - 1) / (d e t)
    list    whole   4 m T H k (e-1)/e   0                                             2 P (d - 1) / (d e)
            cut     4 m T H k (e-1)/e   4 m T H k (t - 1) / t                         2 P (d - 1) / (d e t)

Whole experts of a stack divide the rows, gather the results, and sum the gradients of experts over the tensor ranks
once a step. Cut experts of a stack get all rows, and sum results in the forward and gradients of rows in the backward.
A row is sent to each expert of a list. Tensor ranks of a list compute equal rows if its experts are whole, and sum them
on the rank of each expert if its experts are cut.
"""

from dataclasses import dataclass

from engine.parallel.comm.traffic import megabytes
from engine.planning.cost_model.expert_exchange import ExpertExchange
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.links import Links
from engine.planning.cost_model.workload import ExpertWork

STATE_BYTES = 16
"""Bytes of a parameter, its gradient and the state of Adam."""
LARGEST_STATE = 0.5
"""Largest share of a GPU's memory for the state of whole experts."""


@dataclass(frozen=True, slots=True)
class FormCost:
    """Cost per step and rank of MoE experts in one of two forms: sharded over tensor ranks, or in full on each tensor
    rank.
    """

    expert_bytes: float
    """Bytes a step over ep."""
    tensor_bytes: float
    """Bytes a step over tp."""
    gradient_bytes: float
    """Bytes a step over the data ranks of equal experts."""
    state_bytes: float
    flops: float
    """Floating-point operations of products in a step."""

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, summed over the axes ep, tp and dp."""
        return round(self.expert_bytes + self.tensor_bytes + self.gradient_bytes)

    def seconds(self, links: Links, gpu: GpuSpec) -> float:
        """Returns the seconds per step of the experts' matrix products plus their communication, without overlap."""
        over_data = self.gradient_bytes / links.ring("dp+cp").rate
        sent = self.expert_bytes / links.experts().rate + self.tensor_bytes / links.ring("tp").rate + over_data
        return sent + self.flops / (gpu.bf16_rate * gpu.reached.product)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertWork:
    """Token rows and parameters of the MoE experts in a rank's layers, for experts divided among data ranks."""

    tokens: int
    """Tokens of a microbatch and data rank."""
    width: int
    """Width of a row."""
    layers: int
    work: ExpertWork
    """Experts of a layer."""
    itemsize: int = 4
    """Bytes of an element of a row."""
    listed: bool = False
    """Experts are modules of a list; False: they are stacked in the parameters of one module."""

    def cost(self, layout: TrainingLayout, cut: bool) -> FormCost:
        """Returns the cost of a rank's experts per step. ``cut``: True if tensor ranks shard the experts along their
        width.
        """
        t, e, chosen = layout.tp, layout.ep, self.work.chosen
        tokens = layout.microbatches * self.tokens * self.layers / layout.cp
        rows, apart = tokens * self.width * self.itemsize, (t - 1) / t
        parameters = self.work.parameters * self.layers / e
        alike = layout.dp * layout.cp // e
        shared = parameters / t if cut else parameters
        if self.listed:
            expert, tensor = 4 * rows * chosen * (e - 1) / e, 4 * rows * chosen * apart if cut else 0.0
        else:
            sums = 0 if cut else 2 * 4 * parameters * apart
            expert = 4 * rows * self._other_ranks(e) / (1 if cut else t)
            tensor = (4 if cut else 2) * rows * apart + sums
        return FormCost(
            expert,
            tensor,
            2 * 4 * shared * (alike - 1) / alike,
            STATE_BYTES * shared / (alike if layout.stage else 1),
            6 * tokens * chosen * self.work.parameters / self.work.experts / (1 if self.listed and not cut else t),
        )

    def _other_ranks(self, ranks: int) -> float:
        """Returns the number of other ranks that a token of a stack is sent to, for even routing."""
        exchange = ExpertExchange(
            experts=self.work.experts, chosen=self.work.chosen, ranks=ranks, tokens=1, width=self.width
        )
        return exchange.mean().gives

    def choose(self, layout: TrainingLayout, gpu: GpuSpec, node: int) -> tuple[bool, str]:
        """Returns (cut, reason). ``cut`` is True if tensor ranks should shard the experts along their width; ``reason``
        is a text with the compared costs.

        ``node``: number of GPUs per node.
        """
        links = Links(layout, gpu, node)
        whole, cut = self.cost(layout, False), self.cost(layout, True)
        sends = f"{megabytes(cut.sent)} a rank and step cut, {megabytes(whole.sent)} whole, with even routing"
        state = f"{megabytes(round(cut.state_bytes))} of state instead of {megabytes(round(whole.state_bytes))}"
        if cut.seconds(links, gpu) <= whole.seconds(links, gpu):
            repeats = "; whole experts of a list compute each row on every tensor rank" * self.listed
            return True, f"{sends}; {state}{repeats}"
        if whole.state_bytes > LARGEST_STATE * gpu.memory_bytes:
            return True, f"{state}, which does not fit; {sends}"
        return False, sends
