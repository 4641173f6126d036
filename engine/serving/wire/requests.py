"""Requests as commands: bodies are checked here, and whatever passes is data that the ranks can run.

A numbered request that is wrong still takes its number: its future fails, and later numbers of the model run.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from engine.serving.bookkeeping.entry import FutureEntry, RequestRefusedError
from engine.serving.commands import (
    AdamParameters,
    Adapter,
    Array,
    Command,
    CreateModel,
    Datum,
    DefineLoss,
    Failure,
    ForwardBackward,
    LoadWeights,
    LossCall,
    OptimStep,
    SampleTokens,
    SamplingParameters,
    SaveWeights,
    UnloadModel,
)
from engine.serving.wire.arrays import array_from
from engine.serving.wire.directory import KIND, Directory, check_name, now
from engine.serving.wire.fields import BodyFields
from engine.serving.wire.messages import message_class
from engine.serving.wire.served_model import ServedModel

MOST_DATA, MOST_FIELDS, MOST_INPUTS, MOST_OPTIONS = 8192, 200_000, 16, 64
MOST_SAMPLES, MOST_TOP, MOST_STOPS, MOST_RANK, MOST_NODES = 1024, 64, 64, 4096, 4096
LONGEST_SEQUENCE_NUMBER = (1 << 31) - 1
_GRAPH_DEPTH = 24
_NODE_KINDS = ("placeholder", "call_function", "call_method", "output")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Commands of one request (``entries``), and fields for its immediate HTTP reply (``reply``).

    The client waits for the result of the last entry.
    """

    entries: tuple[FutureEntry, ...]
    reply: Mapping[str, Any]


class RequestReader:
    """Parser of the requests that create or change a model, sample from it or define a loss.

    Each method returns the commands of a body, or raises RequestRefusedError. In the numbered requests of a model, an
    error in the command itself does not raise: the request uses up its ``seq_id``, and its result is a failure.
    """

    def __init__(self, model: ServedModel, directory: Directory) -> None:
        self._model, self._directory = model, directory

    # ---------------------------------------------------------------- numbered requests of a model

    def forward_backward(self, body: bytes) -> ParsedRequest:
        """Returns the command of a ``forward_backward`` request; ``body`` is a ForwardBackwardRequest in protobuf."""
        _count_fields(body)
        try:
            message = message_class("ForwardBackwardRequest").FromString(body)
        except Exception as error:  # protobuf's runtime has its own class of errors in each of its forms
            raise RequestRefusedError("the body is no ForwardBackwardRequest in protobuf; send one.") from error
        if message.seq_id < 1:
            raise RequestRefusedError(f"seq_id is {message.seq_id}; number the requests of a model from 1.", 422)

        def command() -> Command:
            data = tuple(self._datum(one) for one in message.data)
            if not data:
                raise RequestRefusedError("data is empty; give at least one datum.")
            options: dict[str, float | str] = dict(sorted(message.loss_fn_config.items()))
            for name, value in sorted(message.loss_fn_config_v2.items()):
                options[name] = value.text if value.WhichOneof("value") == "text" else value.number
            if len(options) > MOST_OPTIONS:
                raise RequestRefusedError(f"loss_fn_config has {len(options)} entries; give at most {MOST_OPTIONS}.")
            return ForwardBackward(message.model_id, data, LossCall(message.loss_fn, options), message.forward_only)

        return self._numbered("forward_backward", message.model_id, message.seq_id, command, body)

    def _datum(self, message: Any) -> Datum:
        parts = list[Array]()
        for chunk in message.model_input:
            if chunk.WhichOneof("chunk") != "encoded_text":
                raise RequestRefusedError("model_input has an image or sound; this service takes tokens only.")
            if len(chunk.encoded_text.tokens) % 4:
                raise RequestRefusedError("encoded_text has a part of an int32; send whole values.")
            parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
        tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        self._check_tokens(tokens, "model_input")
        if len(message.loss_fn_inputs) > MOST_INPUTS:
            raise RequestRefusedError(f"loss_fn_inputs has {len(message.loss_fn_inputs)} tensors; give at most 16.")
        inputs = {name: array_from(one, name) for name, one in sorted(message.loss_fn_inputs.items())}
        targets = inputs.get("target_tokens")
        if targets is not None and (targets.dtype.kind != "i" or targets.ndim < 1 or len(targets) != len(tokens)):
            raise RequestRefusedError(
                f"target_tokens is {targets.dtype} {list(targets.shape)}, and model_input has {len(tokens)} tokens; "
                "give an integer target for each token."
            )
        if targets is not None:
            self._check_ids(targets, "target_tokens")
        return Datum(tokens, inputs)

    def optim_step(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of an ``optim_step`` request, which updates a model by AdamW."""

        def command() -> Command:
            others = body.values.get("optimizer_params")
            if others is not None:
                raise RequestRefusedError("optimizer_params names another optimizer; this service has AdamW only.")
            given = body.mapping("adam_params" if "adam_params" in body.values else "optim_params", {})
            return OptimStep(
                body.text("model_id"),
                AdamParameters(
                    lr=given.real("learning_rate", 1e-4),
                    beta1=given.real("beta1", 0.9, high=1.0),
                    beta2=given.real("beta2", 0.95, high=1.0),
                    eps=given.real("eps", 1e-12),
                    weight_decay=given.real("weight_decay", 0.0),
                    max_norm=max(0.0, given.real("grad_clip_norm", 0.0, low=-1e30)),
                ),
            )

        return self._numbered_json("optim_step", body, command)

    def save_weights(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of a ``save_weights`` request, which saves weights with the optimizer state."""
        return self._save("save_weights", "weights", body)

    def save_weights_for_sampler(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of a ``save_weights_for_sampler`` request, which saves weights without optimizer state.

        If the request has no path, the reply to the client names a new sampling session, else the path of the weights.
        """
        return self._save("save_weights_for_sampler", "sampler_weights", body)

    def _save(self, route: str, kind: str, body: BodyFields) -> ParsedRequest:
        model, number = body.text("model_id"), body.integer("seq_id", low=1, high=LONGEST_SEQUENCE_NUMBER)
        name, about = body.text("path", None), dict[str, Any](type=route)
        if route == "save_weights_for_sampler" and name is None:
            sampler = body.integer("sampling_session_seq_id", high=LONGEST_SEQUENCE_NUMBER)
            about["sampler"] = f"{model.split(':')[0]}:sample:{sampler}"
        path = f"tinker://{model}/{kind}/{name or f'{number:06d}'}"

        def command() -> Command:
            if name is not None:
                check_name(name)
            known = self._directory.notes("weights").get(path)
            if known is not None and known["key"] != _key(model, number) and not body.flag("overwrite"):
                raise RequestRefusedError(f"{path} exists; give another name, or overwrite=true.")
            return SaveWeights(model, f"weights/{model.replace(':', '-')}/{number:09d}", kind == "weights")

        about |= {
            "path": path,
            "ttl_seconds": body.integer("ttl_seconds", None, low=1, high=1 << 34),
            "user_metadata": metadata_of(body),
        }
        return self._numbered_json(route, body, command, about)

    def load_weights(self, body: BodyFields) -> ParsedRequest:
        """Returns the commands of a ``load_weights`` request.

        Without a field ``model_id``, the first command creates a new model for the weights.
        """
        path, optimizer = body.text("path", most=1024), body.flag("optimizer")
        about = {"type": "load_weights", "path": path}
        if body.values.get("model_id") is None:
            return self._load_as_new(body, path, optimizer, about)
        model = body.text("model_id")

        def command() -> Command:
            return LoadWeights(model, self._directory.weights(path)["name"], optimizer)

        return self._numbered_json("load_weights", body, command, about | {"model_id": model})

    def _load_as_new(self, body: BodyFields, path: str, optimizer: bool, about: Mapping[str, Any]) -> ParsedRequest:
        session, number = body.text("session_id"), body.integer("model_seq_id", high=LONGEST_SEQUENCE_NUMBER)
        saved, model = self._directory.weights(path), f"{session}:train:{number}"
        self._check_optimizer(body)
        adapter = None
        if saved["is_lora"]:
            parts = [saved[one] is not False for one in ("train_attn", "train_mlp", "train_unembed")]
            adapter = Adapter(saved["lora_rank"], saved["seed"], *parts)
        run = {name: saved[name] for name in (*KIND, "seed")} | {"user_metadata": metadata_of(body), "time": now()}
        create = CreateModel(model, saved["base_model"], adapter)
        load = LoadWeights(model, saved["name"], optimizer)
        about = {**about, "model_id": model, "run": run}
        entries = (
            FutureEntry(f"{model}:create", session, create, route="create_model", about=about),
            FutureEntry(f"{model}:load", session, load, model, 0, "load_weights", about),
        )
        return ParsedRequest(entries, {"model_id": model})

    def _numbered_json(
        self, route: str, body: BodyFields, command: Any, about: Mapping[str, Any] | None = None
    ) -> ParsedRequest:
        number = body.integer("seq_id", low=1, high=LONGEST_SEQUENCE_NUMBER)
        raw = json.dumps(body.values, sort_keys=True).encode()
        return self._numbered(route, body.text("model_id"), number, command, raw, about)

    def _numbered(
        self, route: str, model: str, number: int, command: Any, raw: bytes, about: Mapping[str, Any] | None = None
    ) -> ParsedRequest:
        """Returns the entry of a numbered request; one whose future fails if the request is wrong."""
        entry = FutureEntry(_key(model, number), model.split(":")[0], None, model, number, route, about or {})
        try:
            entry.command = command()
        except RequestRefusedError as error:
            entry.result, entry.digest = Failure(str(error)), sha256(route.encode() + b"\0" + raw).hexdigest()
        return ParsedRequest((entry,), {"model_id": model})

    # ---------------------------------------------------------------- models, losses

    def create_model(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of a ``create_model`` request, which creates a LoRA adapter or a full copy of the base
        model.
        """
        session, number = body.text("session_id"), body.integer("model_seq_id", high=LONGEST_SEQUENCE_NUMBER)
        model, base = f"{session}:train:{number}", body.text("base_model")
        self.check_base(base)
        self._check_optimizer(body)
        adapter = None
        lora = body.mapping("lora_config", {})
        rank = lora.integer("rank", 0, high=MOST_RANK)
        if rank:
            seed = lora.integer("seed", int(sha256(model.encode()).hexdigest()[:8], 16))
            adapter = Adapter(
                rank,
                seed,
                lora.flag("train_attn", True),
                lora.flag("train_mlp", True),
                lora.flag("train_unembed", True),
            )
        run = {
            "base_model": base, "is_lora": rank > 0, "lora_rank": rank or None, "time": now(),
            "user_metadata": metadata_of(body), "seed": adapter.seed if adapter is not None else None,
            **{name: lora.flag(name, True) for name in ("train_attn", "train_mlp", "train_unembed") if rank},
        }  # fmt: skip
        about = {"type": "create_model", "model_id": model, "run": run}
        command = CreateModel(model, base, adapter)
        entry = FutureEntry(f"{model}:create", session, command, route="create_model", about=about)
        return ParsedRequest((entry,), {"model_id": model})

    def unload_model(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of an ``unload_model`` request, which frees a model's memory."""
        model = body.text("model_id")
        self._directory.run(model)
        about = {"type": "unload_model", "model_id": model}
        entry = FutureEntry(
            f"{model}:unload", model.split(":")[0], UnloadModel(model), None, None, "unload_model", about
        )
        return ParsedRequest((entry,), {"model_id": model})

    def check_base(self, base: str) -> None:
        """Raises RequestRefusedError unless ``base`` is a name of the served base model."""
        if base not in self._model.names:
            raise RequestRefusedError(f"base_model {base[:80]!r} is not served; give {' or '.join(self._model.names)}.")

    def _check_optimizer(self, body: BodyFields) -> None:
        given = body.mapping("optimizer_config", {}).text("type", "adamw")
        if given != "adamw":
            raise RequestRefusedError(f"optimizer_config.type is {given[:60]!r}; this service has adamw only.")

    def create_custom_loss(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of a ``create_custom_loss`` request.

        Checks the form and size of the loss's graph; the ranks check the operations in the graph.
        """
        session, number = body.text("session_id"), body.integer("custom_loss_seq_id", high=LONGEST_SEQUENCE_NUMBER)
        inputs = [BodyFields(_object(one, "inputs"), "inputs.").text("name") for one in body.items("inputs", most=16)]
        if not inputs or inputs[0] != "logprobs" or len(set(inputs)) != len(inputs):
            raise RequestRefusedError(
                "inputs of a loss do not begin with logprobs or repeat a name; give each once.", 422
            )
        graph = body.mapping("graph")
        for node in graph.items("nodes", most=MOST_NODES):
            _check_node(BodyFields(_object(node, "nodes"), "nodes."))
        loss = f"{session}:loss:{number}"
        command = DefineLoss(loss, tuple(inputs), json.dumps({"nodes": graph.values["nodes"]}, sort_keys=True))
        about = {"type": "create_custom_loss", "loss_id": loss}
        entry = FutureEntry(f"{loss}:create", session, command, route="create_custom_loss", about=about)
        return ParsedRequest((entry,), {})

    # ---------------------------------------------------------------- samples

    def asample(self, body: BodyFields) -> ParsedRequest:
        """Returns the command of an ``asample`` request, which samples token sequences."""
        sampler = body.text("sampling_session_id")
        number = body.integer("seq_id", high=LONGEST_SEQUENCE_NUMBER)
        note, key = self._directory.sampler(sampler), f"{sampler}:{number}"
        path, prompt = note.get("model_path"), self._prompt(body.mapping("prompt"))
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if body.values.get(name):
                raise RequestRefusedError(f"{name} is not served; leave it out.")
        if body.values.get("record_stability_info"):
            raise RequestRefusedError(
                "record_stability_info is for the loss stable_reinforce, which this server does not have; train with "
                "another loss_fn, such as importance_sampling."
            )
        parameters = self._sampling(body, len(prompt), key)
        last = body.integer("prompt_logprobs_last_n", None, low=1, high=max(1, len(prompt) - 1))
        source = self._directory.weights(path)["name"] if path else ""
        entry = FutureEntry(
            key, sampler.split(":")[0], SampleTokens(source, prompt, parameters), route="asample", about={"last": last}
        )
        return ParsedRequest((entry,), {"sample_sequence_ids": [f"{key}:{one}" for one in range(parameters.samples)]})

    def _prompt(self, body: BodyFields) -> Array:
        tokens = list[int]()
        for chunk in body.items("chunks"):
            fields = BodyFields(_object(chunk, "chunks"), "prompt.chunks.")
            if fields.text("type", "encoded_text") != "encoded_text":
                raise RequestRefusedError("the prompt has an image or sound; this service takes tokens only.")
            own = fields.items("tokens")
            if not all(type(one) is int and 0 <= one < self._model.vocabulary for one in own):
                raise RequestRefusedError(f"the prompt has a token outside of 0 to {self._model.vocabulary - 1}.", 422)
            tokens += own
        prompt = np.array(tokens, np.int64)
        self._check_tokens(prompt, "prompt")
        return prompt

    def _sampling(self, body: BodyFields, length: int, key: str) -> SamplingParameters:
        given, room = body.mapping("sampling_params", {}), self._model.context - length
        top = (given.integer("top_k", -1, low=-1), given.real("top_p", 1.0, high=1.0))
        return SamplingParameters(
            samples=body.integer("num_samples", 1, low=1, high=MOST_SAMPLES),
            max_tokens=min(room, given.integer("max_tokens", room)),
            temperature=given.real("temperature", 1.0, high=1e6),
            top_k=top[0],
            top_p=top[1],
            seed=given.integer("seed", int(sha256(key.encode()).hexdigest()[:12], 16), low=-(1 << 62)),
            stops=self._stops(given),
            prompt_logprobs=body.flag("prompt_logprobs"),
            top_prompt_logprobs=body.integer("topk_prompt_logprobs", 0, high=MOST_TOP),
            top_sample_logprobs=body.integer("topk_sample_logprobs", 0, high=MOST_TOP),
        )

    def _stops(self, given: BodyFields) -> tuple[tuple[int, ...], ...]:
        stop = given.values.get("stop")
        if stop is None:
            return tuple((one,) for one in self._model.ends)
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or len(stops) > MOST_STOPS:
            raise given.refuse("stop", f"give at most {MOST_STOPS} texts or tokens")
        found = list[tuple[int, ...]]()
        for one in stops:
            if type(one) is int and 0 <= one < self._model.vocabulary:
                found.append((one,))
            elif isinstance(one, str) and one and self._model.tokenize is not None:
                found.append(tuple(self._model.tokenize(one[:256])))
            else:
                raise given.refuse("stop", f"give tokens from 0 to {self._model.vocabulary - 1}")
        return tuple(found)

    # ---------------------------------------------------------------- checks

    def _check_tokens(self, tokens: Array, name: str) -> None:
        if not 1 <= len(tokens) <= self._model.context:
            raise RequestRefusedError(f"{name} has {len(tokens):,} tokens; give 1 to {self._model.context:,}.")
        self._check_ids(tokens, name)

    def _check_ids(self, ids: Array, name: str) -> None:
        if ids.size and not (ids.min() >= 0 and ids.max() < self._model.vocabulary):
            raise RequestRefusedError(
                f"{name} has a token outside of 0 to {self._model.vocabulary - 1}; give token ids."
            )


def _key(model: str, number: int) -> str:
    return f"{model}:{number}"


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestRefusedError(f"{name} has an entry that is no object; give objects.", 422)
    return value


def metadata_of(body: BodyFields) -> Mapping[str, str] | None:
    """Returns the field "user_metadata" of a request with all values as strings; None if missing or empty.

    Raises:
        RequestRefusedError: the field is longer than 16,384 characters as JSON.
    """
    given = body.mapping("user_metadata", {}).values
    if len(json.dumps(given)) > 1 << 14:
        raise RequestRefusedError("user_metadata is longer than 16,384 characters; give less.")
    return {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in given.items()} or None


def _check_node(node: BodyFields) -> None:
    if node.text("op") not in _NODE_KINDS:
        raise RequestRefusedError(
            f"a node of a loss is a {node.values['op'][:40]!r}; give {', '.join(_NODE_KINDS)}.", 422
        )
    node.text("name"), node.text("target")
    depth = max(_depth(node.items("args", [])), _depth(dict(node.mapping("kwargs", {}).values)))
    if depth > _GRAPH_DEPTH:
        raise RequestRefusedError(f"an argument of a loss is nested deeper than {_GRAPH_DEPTH}; simplify it.", 422)


def _depth(value: Any) -> int:
    """Returns the depth of nested lists and objects; the JSON reader has bounded it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _count_fields(body: bytes) -> None:
    """Refuses a protobuf with more fields than a request needs, before messages are made of them.

    An empty message takes two bytes on the wire and a hundred in memory.
    """
    count = data = 0
    for number, inner in _fields(memoryview(body)):
        count += 1
        if number == 3 and inner is not None:
            data += 1
            count += sum(1 for _ in _fields(inner))
        if data > MOST_DATA or count > MOST_FIELDS:
            raise RequestRefusedError(f"the request has more than {MOST_DATA:,} data; send fewer in a request.", 413)


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Yields number and bytes of each field of a protobuf message; None for numbers. Ends where it is damaged."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
                yield tag >> 3, None
            case 1 | 5:
                at += 8 if tag & 7 == 1 else 4
                yield tag >> 3, None
            case 2:
                size, at = _varint(data, at)
                yield tag >> 3, data[at : at + size]
                at += size
            case _:
                return


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at
