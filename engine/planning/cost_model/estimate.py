"""Closed-form estimate of a training layout: seconds by part, memory, tokens per second. Pure arithmetic.

step = (microbatches x stage x (1 + idle) + exposed) x (1 + step overhead)

stage     blocks of the slowest rank, forward, backward and recomputation, with their tensor sums, and the head
tensor    two all-reduces a block in forward and backward, b s h elements each, one or two more with recomputation;
          overlapped ones cost (1 - overlap fraction) of their time
context   keys and values, gathered or around a ring during attention, and their gradients
data      gradients and parameters once a step (ZeRO 0 to 2), or parameters for every pass and gradients (ZeRO 3);
          counted: the time beyond the overlapped computation, and (1 - overlap fraction) of the rest
pipeline  bubbles of the schedule, and the messages of its first and last microbatch
update    memory bytes of the optimizer state that a rank updates

Memory of the fullest rank, with P its parameters and N data ranks, in 16 bits with fp32 masters and Adam; frozen
parameters have neither gradients nor optimizer state:

    parameters   2 P, ZeRO 3: 2 P / N
    gradients    4 P (or the engine's width), ZeRO 2 and 3 that reduce every microbatch: / N
    optimizer    12 P (master and two moments), ZeRO 1 to 3: / N
    activations  bytes per token x tokens of a microbatch x blocks of the rank x microbatches in flight; two blocks if
                 their inputs are on the host
    buffers      logits in 16 and 32 bits with their gradient, one recomputed block, gathered blocks of ZeRO 3,
                 one round of expert rows
    comm         buffers of the communication library
    slack        CUDA context, and memory that the allocator wastes
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from engine.planning.cost_model.expert_exchange import ExpertExchange
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import (
    EngineTraits,
    StageShare,
    TrainingLayout,
    idle_over_useful,
    microbatches_held,
    slowest,
)
from engine.planning.cost_model.links import UPDATE_BYTES, BlockSeconds, Links, Roofline
from engine.planning.cost_model.workload import Workload

CONTEXT_BYTES = 1.0e9
"""Bytes of the CUDA context and libraries (assumed)."""
CHANNEL_BYTES = 0.25e9
"""Bytes of NCCL buffers for each axis with several ranks (assumed)."""
LOGIT_HELD_BYTES = 12
"""Bytes stored per element of the logits: in 16 and 32 bits, and both gradients."""
SLACK = 0.1
"""Fraction of activations and buffers that the allocator wastes (assumed)."""


class BlockSample(NamedTuple):
    """Activation bytes of one transformer block on one tensor rank, per batch row, counted in a run on shapes."""

    kept: float
    """Bytes of activations that a block stores until its backward."""
    around: float
    """Other live bytes at the peak: of first and last layers, or of a recomputed block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Estimated bytes of GPU memory of one rank, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    communication: float
    slack: float

    @property
    def total(self) -> float:
        """Sum of the bytes of all kinds."""
        return sum(float(getattr(self, entry.name)) for entry in fields(self))


class StageParameters(NamedTuple):
    """Numbers of parameters on one rank of a pipeline stage, before ZeRO shards them."""

    dense: float
    """Parameters outside of experts that data ranks share."""
    experts: float
    """Parameters of experts that are divided among data ranks."""

    def over(self, layout: TrainingLayout, sharded: bool) -> float:
        """Returns the number of parameters that one rank stores. ``sharded``: True if data and context ranks shard them
        (ZeRO).
        """
        ranks = layout.dp * layout.cp
        return self.dense / ranks + self.experts / (ranks // layout.ep) if sharded else self.dense + self.experts


def stage_parameters(work: Workload, layout: TrainingLayout, stage: StageShare) -> StageParameters:
    """Returns the number of parameters on a rank of the pipeline stage ``stage``, before ZeRO shards them."""
    whole = stage.blocks * work.block_parameters + stage.outer_parameters
    if work.experts is None or layout.ep == 1:
        return StageParameters(whole / layout.tp, 0.0)
    experts = stage.blocks * work.experts.parameters
    return StageParameters((whole - experts) / layout.tp, experts / layout.ep)


def working_bytes(work: Workload, layout: TrainingLayout, traits: EngineTraits) -> tuple[float, float, float]:
    """Returns (stored activations of a block, logits, activations of a recomputed block), in bytes per rank and
    microbatch.

    The last number is 0 without recomputation.
    """
    again = traits.products_again
    tokens = layout.micro * work.context / layout.cp
    least, kept = (work.keeps(mode).on(layout.tp, layout.sequence) * tokens for mode in ("full", layout.recomputation))
    kept = least + (1 - again) * (kept - least) if layout.recomputation == "selective" else kept
    logits = LOGIT_HELD_BYTES * tokens * work.vocabulary / layout.tp
    whole = work.keeps("none").on(layout.tp, layout.sequence) * tokens if layout.recomputation != "none" else 0.0
    if layout.cp > 1 and not traits.ring:
        keys = 2 * layout.micro * work.context * work.keys / layout.tp  # of all ranks
        return kept + keys * (layout.recomputation != "full"), logits, whole + 2 * keys * (whole > 0)
    return kept, logits, whole


def blocks_held(layout: TrainingLayout, blocks: float, microbatches: float) -> float:
    """Returns the number of (block, microbatch) pairs with activations on the GPU: ``blocks`` * ``microbatches``, but
    at most 2 if block inputs are on the host.

    ``blocks``: number of blocks of the rank. ``microbatches``: number of microbatches in flight.
    """
    return min(2.0, blocks * microbatches) if layout.inputs == "host" else blocks * microbatches


def block_exchange(work: Workload, layout: TrainingLayout) -> ExpertExchange | None:
    """Returns the sizes of one block's exchange of token rows between expert ranks; None if experts are not divided."""
    if layout.ep == 1 or work.experts is None:
        return None
    _, experts, chosen, _ = work.experts
    tokens = layout.micro * work.context / layout.cp / layout.tp
    return ExpertExchange(experts=experts, chosen=chosen, ranks=layout.ep, tokens=tokens, width=work.width)


def message_buffers(work: Workload, layout: TrainingLayout, stage: StageShare) -> float:
    """Returns the bytes of a rank's buffers for gathered parameters (ZeRO 3) and for token rows sent between expert
    ranks.
    """
    block = stage_parameters(work, layout, replace(stage, blocks=1, outer_parameters=0.0)).over(layout, sharded=False)
    gathered = 2 * 2 * block if layout.stage == 3 and layout.dp * layout.cp > 1 else 0.0
    exchange = block_exchange(work, layout)
    return gathered + (exchange.round_bytes if exchange is not None else 0.0)


def closed_memory(work: Workload, layout: TrainingLayout, traits: EngineTraits, stage: StageShare) -> RankMemory:
    """Returns the estimated GPU memory, by kind, of a rank with the share ``stage`` of the model, from formulas."""
    held = stage_parameters(work, layout, stage)
    kept, logits, again = working_bytes(work, layout, traits)
    last = logits if layout.pp == 1 else logits * (stage.outer_parameters > 0)
    activations = kept * blocks_held(layout, stage.blocks, microbatches_held(layout))
    buffers = max(last, again) + message_buffers(work, layout, stage)
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp))
    return RankMemory(
        parameters=2 * held.over(layout, layout.stage == 3) + work.buffer_bytes,
        gradients=traits.gradient_bytes * work.trained * held.over(layout, layout.keeps_gradient_shards),
        optimizer=work.optimizer_bytes * work.trained * held.over(layout, layout.stage > 0),
        activations=activations,
        buffers=buffers,
        communication=axes * CHANNEL_BYTES,
        slack=CONTEXT_BYTES + SLACK * (activations + buffers),
    )


def exchange_seconds(work: Workload, layout: TrainingLayout, links: Links) -> tuple[float, float]:
    """Returns (forward seconds, backward seconds) for sending one microbatch's token rows between expert ranks, over
    all blocks.

    Assumes even routing. With recomputation, the backward also repeats the forward's exchange.
    """
    exchange = block_exchange(work, layout)
    if exchange is None or work.experts is None:
        return 0.0, 0.0
    link, rows = links.experts(), exchange.mean()
    forward, backward = (
        work.experts.layers * link.seconds(2 * (layout.ep - 1), count)
        for count in (exchange.forward_bytes(rows), exchange.backward_bytes(rows))
    )
    return forward, backward + forward * (layout.recomputation != "none")


BUCKETS = 8.0
"""Data-parallel collectives per step whose latency counts; further ones overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsByPart:
    """Estimated seconds of a training step by part, such as computation and pipeline idle time."""

    computation: float
    recomputation: float
    tensor: float
    context: float
    bubble: float
    pipeline: float
    data: float
    update: float
    besides: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.computation, self.recomputation, self.tensor, self.context, self.bubble)
        return sum(parts) + self.pipeline + self.data + self.update + self.besides


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEstimate:
    """Estimated seconds and memory of a training step with one parallel layout."""

    layout: TrainingLayout
    seconds: SecondsByPart
    memory: RankMemory
    tokens: int
    """Number of tokens per step, over all ranks."""
    flops_of_token: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank."""
        return self.tokens / self.seconds.total / self.layout.world

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s per rank."""
        return self.tokens_per_second * self.flops_of_token


class StepModel:
    """Estimator of step time and memory of layouts, for one workload, GPU type and number of GPUs per node."""

    def __init__(self, work: Workload, gpu: GpuSpec, node: int, traits: EngineTraits | None = None) -> None:
        self._work, self._gpu, self._node, self._traits = work, gpu, node, traits or EngineTraits()

    def estimate(self, layout: TrainingLayout) -> LayoutEstimate:
        """Returns the estimated step time and memory of ``layout``, from formulas alone."""
        work, traits = self._work, self._traits
        roofline, links = Roofline(work, layout, self._gpu, traits), Links(layout, self._gpu, self._node)
        block, head, m = roofline.block(), roofline.head(), layout.microbatches
        again = roofline.recomputed(block)
        sums = self._tensor_sums(layout, links) + sum(exchange_seconds(work, layout, links)) / work.blocks
        rings = self._context_keys(layout, block, links)
        one = block.forward + block.backward + again + sums + rings
        share = slowest(work, layout.pp, one, head, traits.balanced)
        mean = (work.blocks * one + head) / layout.pp
        stage = share.blocks * one + share.heads * head
        bubble = m * min(mean, stage) * idle_over_useful(layout)
        window = share.blocks * (block.forward + block.backward)
        seconds = SecondsByPart(
            computation=m * (share.blocks * (block.forward + block.backward) + share.heads * head),
            recomputation=m * share.blocks * again,
            tensor=m * share.blocks * sums,
            context=m * share.blocks * rings,
            bubble=bubble,
            pipeline=self._messages(layout, links),
            data=self._data(layout, links, stage_parameters(work, layout, share), window),
            update=self._update(layout, stage_parameters(work, layout, share)),
            besides=0.0,
        )
        return LayoutEstimate(
            layout=layout,
            seconds=replace(seconds, besides=self._gpu.reached.step * seconds.total),
            memory=closed_memory(work, layout, traits, share),
            tokens=layout.rows * work.context,
            flops_of_token=work.flops_of_token(),
        )

    def _tokens(self, layout: TrainingLayout) -> float:
        return layout.micro * self._work.context / layout.cp

    def _tensor_sums(self, layout: TrainingLayout, links: Links) -> float:
        """Returns the seconds that a block and microbatch waits for sums over tensor ranks."""
        t = layout.tp
        if t == 1:
            return 0.0
        ring = links.ring("tp")
        count = (2 if self._traits.parallel_block else 4) * (1.5 if layout.recomputation == "full" else 1.0)
        size = 2 * 2 * self._tokens(layout) * self._work.width * (t - 1) / t
        whole = count * (size / ring.rate + 2 * (t - 1) * ring.latency)
        beside = self._traits.tensor_overlap * whole
        return whole - beside + (1 - self._gpu.reached.overlap) * beside

    def _context_keys(self, layout: TrainingLayout, block: BlockSeconds, links: Links) -> float:
        """Returns the seconds that a block and microbatch waits for keys, values and their gradients."""
        c = layout.cp
        if c == 1:
            return 0.0
        moved = 2 * self._tokens(layout) * self._work.keys / layout.tp * (c - 1)
        ring, passes = links.ring("cp"), 3 if layout.recomputation == "none" else 4  # keys come again in backward
        if not self._traits.ring:
            return passes * (moved / ring.rate + (c - 1) * ring.latency)
        whole = moved * passes / ring.rate
        return max(0.0, whole - 3.5 * block.attention) + (1 - self._gpu.reached.overlap) * whole

    def _messages(self, layout: TrainingLayout, links: Links) -> float:
        if layout.pp == 1:
            return 0.0
        hop, size = links.hop(), 2 * self._tokens(layout) * self._work.width
        size /= layout.tp if layout.sequence else 1
        one = hop.latency + size / hop.rate
        ways = 2 * (layout.pp - 1) * one
        steady = 2 * layout.microbatches * layout.virtual * one * (1 - self._gpu.reached.overlap)
        return ways + steady

    def _data(self, layout: TrainingLayout, links: Links, parameters: StageParameters, window: float) -> float:
        """Returns the exposed seconds of gradients and parameters; ``window``: seconds that can hide them."""
        n, m = layout.dp * layout.cp, layout.microbatches
        if n == 1:
            return 0.0
        ring, alike = links.ring("dp+cp"), n // layout.ep
        one = (parameters.dense * (n - 1) / n + parameters.experts * (alike - 1) / alike) / ring.rate
        latency = ring.latency * (n - 1) * BUCKETS
        rounds = m if layout.keeps_gradient_shards else 1
        gradients, gathers = rounds * self._traits.gradient_bytes * one, 2 * one
        lost = 1 - self._gpu.reached.overlap
        if layout.stage == 3:
            passes = m * (2 if self._traits.regathers else 1)
            whole = passes * gathers + gradients
            hidden = min(whole, m * window)
            return whole - hidden + lost * hidden + latency
        if self._traits.gathers_hidden:
            hidden = min(gradients, rounds * window * 2 / 3) + min(gathers, window / 3)
            return gradients + gathers - hidden + lost * hidden + latency
        hidden = min(gradients, rounds * window * 2 / 3)
        return gradients - hidden + lost * hidden + gathers + latency

    def _update(self, layout: TrainingLayout, parameters: StageParameters) -> float:
        owned = parameters.over(layout, layout.stage > 0)
        return owned * UPDATE_BYTES / (self._gpu.memory_rate * self._gpu.reached.memory)
