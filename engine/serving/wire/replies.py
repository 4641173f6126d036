"""Results as replies of a poll: protobuf for forward_backward and asample, JSON otherwise."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from engine.serving.bookkeeping.entry import FutureEntry
from engine.serving.commands import Array, Failure, PlainOutput, Result, SampledOutput, TensorOutput, TrainedOutput
from engine.serving.wire.arrays import batched_tensor, top_tokens
from engine.serving.wire.messages import message_class
from engine.web.json_text import dump_json

JSON, PROTOBUF = "application/json", "application/x-protobuf"
_STOPPED, _TOO_LONG = 0, 1


def reply_of(entry: FutureEntry) -> tuple[bytes, str]:
    """Returns (body, media type) of the HTTP reply with the result of ``entry``.

    A failure becomes JSON with "error" and "category"; other results become JSON or protobuf.
    """
    result: Result | None = entry.result
    match result:
        case TrainedOutput():
            return trained_bytes(result), PROTOBUF
        case SampledOutput():
            return sampled_bytes(result, entry.about.get("last")), PROTOBUF
        case Failure():
            category = "user" if result.category == "gone" else result.category  # of these Tinker's client knows three
            return dump_json({"error": result.error, "category": category}), JSON
        case PlainOutput():
            return dump_json(_values(entry, result)), JSON
    values = {} if not isinstance(result, TensorOutput) else {"version": result.version}
    return dump_json(values), JSON


def _values(entry: FutureEntry, result: PlainOutput) -> Mapping[str, Any]:
    about = entry.about
    match entry.route:
        case "optim_step":
            given = result.values.get("metrics", result.values)
            numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
            return {"metrics": numbers}
        case "save_weights_for_sampler" if "sampler" in about:
            return {"type": about["type"], "sampling_session_id": about["sampler"]}
    return {name: about[name] for name in ("type", "path", "model_id", "loss_id") if name in about}


def trained_bytes(result: TrainedOutput) -> bytes:
    """Returns ``result`` as a serialized ForwardBackwardOutput message.

    Consecutive data with equal output names and shapes, apart from dim 0, share one ArrayRecord message.
    """
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        message.metrics[name] = value
    for shapes, group in groupby(result.outputs, lambda output: {name: one.shape[1:] for name, one in output.items()}):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
        for name in shapes:
            record.fields[name].CopyFrom(batched_tensor([np.atleast_1d(output[name]) for output in outputs]))
    return bytes(message.SerializeToString())


def sampled_bytes(result: SampledOutput, last: int | None) -> bytes:
    """Returns ``result`` as a serialized SampleResponse message.

    Args:
        last: number of tokens at the end of the prompt that get log-probabilities; earlier tokens get NaN. None: all.
    """
    message = message_class("SampleResponse")()
    for one in result.sequences:
        sequence = message.sequences.add(
            stop_reason=_STOPPED if one.stopped else _TOO_LONG,
            tokens=one.tokens.astype(np.int32).tobytes(),
            logprobs=one.logprobs.astype(np.float32).tobytes(),
        )
        if one.top_tokens is not None and one.top_logprobs is not None:
            sequence.topk_sampled_logprobs.CopyFrom(top_tokens(one.top_tokens, one.top_logprobs))
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _end_of(result.prompt_logprobs, last).tobytes()
    if result.top_prompt_tokens is not None and result.top_prompt_logprobs is not None:
        logprobs = _end_of(result.top_prompt_logprobs, last)
        message.topk_prompt_logprobs.CopyFrom(top_tokens(result.top_prompt_tokens, logprobs))
    return bytes(message.SerializeToString())


def _end_of(values: Array, last: int | None) -> Array:
    """Returns fp32 values with NaN before the last ``last`` ones."""
    found = np.array(values, np.float32)
    if last is not None:
        found[: len(found) - last] = np.nan
    return found
