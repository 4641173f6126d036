"""Messages between stages in fewer bits: bounds, padding, what is not finite, and the bias of gradients."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.codecs.block_codec import SMALLEST_SCALE, BlockFormat, CastFormat, NumberFormat
from engine.kernels.dispatch import REFERENCE
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.encoded_collectives import ActivationFormat
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.parallel.pipeline.runtime.transport import CommTransport, Message
from tests.kernels.codecs.test_block_codec import DISTRIBUTIONS, ROUNDED

PLACE = (5, 0, 1)


def encoder(wire: NumberFormat, feedback: bool = False) -> MessageEncoder:
    return MessageEncoder(ActivationFormat(wire), REFERENCE, feedback)


def passed(one: MessageEncoder, tensor: Tensor, flow: str = "forward") -> Tensor:
    """What the receiver gets."""
    message = one.encode(tensor, flow, PLACE)  # type: ignore[arg-type]
    assert message.numel() == one.message_bytes(tensor.numel()) and message.dtype == torch.uint8
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    one.decode(message, out)
    return out


@pytest.mark.parametrize("wire", [BlockFormat(8, 64), BlockFormat(4, 64)], ids=str)
@pytest.mark.parametrize("flow", ["forward", "backward"])
def test_no_element_of_10000_blocks_errs_by_more_than_half_a_scale(wire: BlockFormat, flow: str) -> None:
    for name, make in DISTRIBUTIONS.items():  # of seven distributions: 10,500 blocks
        values = make(1500, wire.block)
        found = passed(encoder(wire), values, flow)
        scales = (values.double().abs().amax(1, keepdim=True) / wire.largest).clamp_min(SMALLEST_SCALE)
        error = (found.double() - values.double()).abs()
        assert bool((error <= scales / 2 * ROUNDED).all()), name


@pytest.mark.parametrize("wire", [BlockFormat(8, 64), BlockFormat(4, 64), CastFormat(torch.bfloat16)], ids=str)
def test_any_shape_and_strides_arrive_as_if_the_block_were_whole(wire: NumberFormat) -> None:
    values = torch.randn(7, 30, generator=torch.Generator().manual_seed(0)).t()
    found = passed(encoder(wire), values)
    padded = torch.zeros(256)
    padded[:210] = values.reshape(-1)
    assert found.shape == (30, 7) and torch.equal(found.reshape(-1), passed(encoder(wire), padded)[:210])


def test_a_cast_rounds_to_the_nearest() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(passed(encoder(CastFormat(dtype)), values), values.to(dtype).float())


@pytest.mark.parametrize(("dtype", "bits", "least"), [(torch.bfloat16, 8, 0.0), (torch.float16, 11, 2.0**-25)])
def test_casts_err_by_up_to_their_bound_and_no_less(dtype: torch.dtype, bits: int, least: float) -> None:
    values = torch.randn(10**5, generator=torch.Generator().manual_seed(0))
    values[:1000] *= 2.0**-20
    error = (passed(encoder(CastFormat(dtype)), values).double() - values.double()).abs()
    allowed = (values.double().abs() * 2.0**-bits).clamp_min(least)
    assert bool((error <= allowed).all()) and float((error / allowed).max()) > 0.9


def test_what_is_not_finite_arrives_as_nan_and_leaves_nothing_for_later() -> None:
    one, values = encoder(BlockFormat(8, 64), feedback=True), torch.ones(128)
    values[70] = math.inf
    assert passed(one, values, "backward").isnan().nonzero().flatten().tolist() == [70]
    assert all(bool(residual.isfinite().all()) for residual in one.residuals)


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_exact_arrives_as_it_is(exact: bool) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(2))
    values[5] = -math.inf
    message = Message("forward", 0, 0, source=0, target=1)

    def rank(world: World) -> tuple[Tensor | None, int]:
        grid = Grid(pp=2, rank=world.rank)
        assert world.connect is not None
        comm = Comm(grid, world.connect(grid))
        transport = CommTransport(comm, (0, 1), torch.device("cpu"), encoder(BlockFormat(8, 64)))
        if world.rank == 0:
            transport.send(message, values, exact=exact)
            transport.finish()
            return None, comm.tally.bytes()
        return transport.receive(message, values.shape, values.dtype, exact=exact)(), 0

    (_, sent), (found, _) = run_thread_ranks(2, rank)
    assert found is not None
    assert torch.equal(found, values) if exact else bool(found[5].isnan()) and not torch.equal(found[6:], values[6:])
    assert sent == (4 * 300 if exact else 320 + 320 // 64 * 4)


def bias(steps: int, feedback: bool, wire: NumberFormat) -> float:
    """The mean over steps of what has arrived, less that of the true gradients: the largest of all elements."""
    one, generator = encoder(wire, feedback), torch.Generator().manual_seed(1)
    error = torch.zeros(640, dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.randn(640, generator=generator) + 0.1
        error += passed(one, gradient, "backward").double() - gradient.double()
    return float((error / steps).abs().max())


@pytest.mark.parametrize("wire", [BlockFormat(8, 64), BlockFormat(4, 64), CastFormat(torch.bfloat16)], ids=str)
def test_with_error_feedback_the_bias_of_gradients_falls_as_one_over_the_messages(wire: NumberFormat) -> None:
    few, many = bias(10, True, wire), bias(400, True, wire)
    assert many < few / 20, f"{few} after 10 messages, {many} after 400"
    assert many < bias(400, False, wire) / 5, "without feedback it falls as the root of the messages"


def test_activations_and_other_values_have_no_part_in_a_residual() -> None:
    one, generator = encoder(BlockFormat(4, 64), feedback=True), torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 128, generator=generator)
    alone = passed(encoder(BlockFormat(4, 64)), second)
    passed(one, first, "forward")
    assert not one.residuals
    passed(one, first, "backward")
    assert torch.equal(passed(one, second, "forward"), alone)
    message = one.encode(second, "backward", (6, 0, 1))
    out = torch.empty(128)
    one.decode(message, out)
    assert torch.equal(out, alone), "the residual is that of another value"
    assert len(one.residuals) == 2
    passed(one, torch.randn(256, generator=generator), "backward")
    assert sorted(residual.numel() for residual in one.residuals) == [128, 256], "another shape starts at zero"
