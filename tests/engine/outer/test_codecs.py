"""Messages have the size counted before, lose what their codec rounds and nothing else, and are refused if damaged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.outer.codecs import BLOCK, DELTA_CODECS, DeltaCodec, encode_with_feedback, make_delta_codec

CODECS = {
    **{name: make_delta_codec(name) for name in DELTA_CODECS},
    "topk, 2 bits": make_delta_codec("topk", bits=2),
    "topk, chunks of 100": make_delta_codec("topk", density=0.1, chunk=100),
    "topk, chunks of 100, 2 bits": make_delta_codec("topk", density=0.1, bits=2, chunk=100),
    "topk, chunks of one": make_delta_codec("topk", chunk=1),
}
all_codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def received(codec: DeltaCodec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), len(values))


@all_codecs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_message_has_the_bytes_that_were_counted(codec: DeltaCodec, dtype: torch.dtype) -> None:
    for n in (0, 1, 7, 99, 100, 101, 255, 256, 257, 4095, 4096, 4097, 9000):
        message = codec.encode(normal(n, dtype=dtype))
        assert message.dtype is torch.uint8
        assert message.shape == (codec.message_bytes(n),)
        found = codec.decode(message, n)
        assert found.shape == (n,)
        assert found.dtype is torch.float64


@pytest.mark.parametrize(
    ("codec", "n", "size"),
    [
        (make_delta_codec("fp64"), 1000, 8000),
        (make_delta_codec("bf16"), 1000, 2000),
        (make_delta_codec("int8"), 1000, 1000 + 4 * 4),
        (make_delta_codec("int4"), 1000, 500 + 4 * 4),
        (make_delta_codec("int4"), 3, 2 + 4),
        # 123 of 4,096 and 27 of the last 904: 150 indexes of 12 bits
        (make_delta_codec("topk"), 5000, 225 + 150 * 4),
        (make_delta_codec("topk", bits=2), 5000, 225 + 2 * 2 * 4 + 38),
        # 10 of 100 and 5 of the last 50: 15 indexes of 7 bits
        (make_delta_codec("topk", density=0.1, chunk=100), 150, 14 + 15 * 4),
    ],
)
def test_sizes_are_those_of_the_layout(codec: DeltaCodec, n: int, size: int) -> None:
    assert codec.message_bytes(n) == size


def test_fp64_keeps_every_bit() -> None:
    values = torch.cat([normal(500), torch.tensor([0.0, -0.0, torch.inf, 5e-324], dtype=torch.float64)])
    codec = make_delta_codec("fp64")
    assert torch.equal(received(codec, values).view(torch.int64), values.view(torch.int64))
    assert [name for name in DELTA_CODECS if make_delta_codec(name).lossless] == ["fp64"]


@pytest.mark.parametrize("name", ["fp64", "fp32"])
def test_fp32_values_keep_every_bit(name: str) -> None:
    values = normal(1000, dtype=torch.float32)
    assert torch.equal(received(make_delta_codec(name), values).float(), values)


@pytest.mark.parametrize(("name", "error"), [("fp32", 2.0**-24), ("bf16", 2.0**-8)])
def test_casts_round_to_the_nearest(name: str, error: float) -> None:
    values = normal(1000)
    assert ((received(make_delta_codec(name), values) - values).abs() <= error * values.abs()).all()


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
@given(seed=st.integers(0, 1000), n=st.integers(1, 600))
@settings(max_examples=20, deadline=None)
def test_codes_err_by_half_a_scale_of_their_block(name: str, largest: int, seed: int, n: int) -> None:
    exponents = torch.randint(-30, 30, (n,), generator=torch.Generator().manual_seed(seed))
    values = normal(n, seed) * 2.0**exponents
    error = (received(make_delta_codec(name), values) - values).abs()
    for block, wrong in zip(torch.split(values, BLOCK), torch.split(error, BLOCK), strict=True):
        assert wrong.max() <= block.abs().max() / largest / 2 * (1 + 4e-5)


@pytest.mark.parametrize("chunk", [64, 100, 4096])
def test_topk_keeps_the_largest_of_each_chunk(chunk: int) -> None:
    values = normal(3 * chunk - 7, dtype=torch.float32)
    found = received(make_delta_codec("topk", density=0.1, chunk=chunk), values).float()
    for given_s, found_s in zip(torch.split(values, chunk), torch.split(found, chunk), strict=True):
        kept = found_s != 0
        assert kept.sum() == round(0.1 * len(given_s))
        assert torch.equal(found_s[kept], given_s[kept])
        assert given_s[kept].abs().min() >= given_s[~kept].abs().max()


def test_two_bits_send_a_sign_and_one_of_two_means() -> None:
    values = torch.tensor([0.0, 1, -3, 0.5, 8, -12, 0.25, 0.125, 0, 0])
    found = received(make_delta_codec("topk", density=0.4, bits=2, chunk=10), values)
    # kept are 1, 3, 8 and 12; the lower median is 3
    assert found.tolist() == [0, 2, -2, 0, 10, -10, 0, 0, 0, 0]
    assert received(make_delta_codec("topk", bits=2, chunk=10), values)[5] == -12, "one number is its own mean"
    assert not received(make_delta_codec("topk", bits=2), torch.zeros(50)).any()


@all_codecs
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 300, 4999])
def test_a_number_that_is_not_finite_stays_visible(codec: DeltaCodec, bad: float, at: int) -> None:
    values = normal(5000)
    values[at] = bad
    assert not received(codec, values)[at].isfinite()
    values[:] = bad
    assert not received(codec, values).isfinite().all()


@all_codecs
def test_a_message_of_another_size_is_refused(codec: DeltaCodec) -> None:
    message = codec.encode(normal(5000))
    for wrong, n in ((message[:-1], 5000), (torch.cat([message, message[:1]]), 5000), (message, 5300), (message, 0)):
        with pytest.raises(ValueError, match=r"has .* bytes, and .* values take .* bytes; "):
            codec.decode(wrong, n)
    with pytest.raises(ValueError, match=r"one run of uint8; pass the bytes as they came\."):
        codec.decode(message.view(torch.int8), 5000)


@all_codecs
def test_a_message_may_begin_anywhere_in_a_body(codec: DeltaCodec) -> None:
    message = codec.encode(normal(5000))
    body = torch.cat([torch.zeros(3, dtype=torch.uint8), message])
    assert torch.equal(codec.decode(body[3:], 5000), codec.decode(message, 5000))


def test_indexes_after_the_last_element_and_repeated_ones_are_refused() -> None:
    codec = make_delta_codec("topk", density=0.02, chunk=100)  # two numbers of a chunk, indexes of 7 bits
    message = codec.encode(normal(100))
    for first, second, sentence in (
        (3, 100, "after the last one of 100 values"),
        (100, 3, "after the last one of 100 values"),
        (3, 3, "do not ascend"),
        (4, 3, "do not ascend"),
    ):
        changed = message.clone()
        changed[:2] = torch.tensor([(first | second << 7) & 255, second >> 1], dtype=torch.uint8)
        with pytest.raises(ValueError, match=sentence):
            codec.decode(changed, 100)
    short = make_delta_codec("topk", density=0.02, chunk=128)
    with pytest.raises(ValueError, match="after the last one of 100 values"):
        short.decode(torch.cat([torch.tensor([3 | (101 << 7) & 255, 101 >> 1], dtype=torch.uint8), message[2:]]), 100)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "int7"}, "no codec is called 'int7'; take one of fp64, fp32, bf16, int8, int4, topk"),
        ({"name": "topk", "density": 0.0}, "density of 0.0"),
        ({"name": "topk", "bits": 4}, "values of 4 bits"),
        ({"name": "topk", "chunk": 0}, "chunks of 0 elements"),
    ],
)
def test_codecs_that_do_not_exist_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_delta_codec(**arguments)  # type: ignore[arg-type]


@all_codecs
def test_feedback_sends_all_in_time(codec: DeltaCodec) -> None:
    """The sum of all messages is the sum of all values, less the last residual."""
    n = 500
    residual = torch.zeros(n)
    wanted, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(60):
        values = normal(n, step)
        wanted += values
        sent += codec.decode(encode_with_feedback(codec, values, residual), n)
    torch.testing.assert_close(sent + residual.double(), wanted, rtol=0, atol=1e-4)
    assert residual.abs().max() < 60


def test_feedback_decays() -> None:
    codec, residual = make_delta_codec("topk", density=0.5, chunk=2), torch.zeros(2)
    encode_with_feedback(codec, torch.tensor([4.0, 2.0]), residual, decay=0.5)
    assert residual.tolist() == [0, 2]
    found = codec.decode(encode_with_feedback(codec, torch.tensor([0.5, 0.25]), residual, decay=0.5), 2)
    assert found.tolist() == [0, 1.25]
    assert residual.tolist() == [0.5, 0]


@all_codecs
def test_a_number_that_is_not_finite_leaves_no_residual(codec: DeltaCodec) -> None:
    residual, values = torch.zeros(300), normal(300)
    values[::2] = torch.nan
    assert not codec.decode(encode_with_feedback(codec, values, residual), 300).isfinite().all()
    assert residual.isfinite().all()
    assert codec.decode(encode_with_feedback(codec, normal(300), residual), 300).isfinite().all()
