"""Executors of tests, one that only counts and one in plain torch, and loops that run them."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, Protocol

import numpy as np
import torch

from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.commands import (
    Adapter,
    Command,
    CreateModel,
    Datum,
    DefineLoss,
    DropWeights,
    Failure,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    PlainOutput,
    Result,
    SampledOutput,
    SampledSequence,
    SampleTokens,
    SaveWeights,
    TrainedOutput,
    UnloadModel,
)

VOCABULARY, CONTEXT = 256, 256


class Runs(Protocol):
    """Executor of commands."""

    def run(self, command: Command) -> Result:
        """Runs a command; what fails is a Failure."""


class CountingExecutor:
    """Executor whose models are one number each: it depends on all commands and on their order."""

    def __init__(self) -> None:
        self.models: dict[str, list[int]] = {}
        self.saved: dict[str, int] = {}
        self.log: list[str] = []

    def run(self, command: Command) -> Result:
        """Runs a command."""
        self.log.append(type(command).__name__)
        model = getattr(command, "model", None)
        if model not in (None, *self.models) and not isinstance(command, CreateModel):
            return Failure("the model is unknown.")
        match command:
            case CreateModel(model=model):
                self.models[model] = [7, 0]
            case ForwardBackward(model=model, data=data):
                state = self.models[model]
                if not command.forward_only:
                    for one in data:
                        state[1] = (state[1] * 31 + int(one.tokens.sum())) % (1 << 40)
                outputs = tuple({"logprobs": np.full(len(one.tokens), state[0], np.float32)} for one in data)
                return TrainedOutput(outputs, {"loss:sum": float(state[0] % 1000)})
            case OptimStep(model=model):
                state = self.models[model]
                self.models[model] = [(state[0] * 131 + state[1]) % (1 << 40), 0]
                return PlainOutput({"version": float(self.models[model][0])})
            case SaveWeights(model=model, name=name):
                self.saved[name] = self.models[model][0]
            case LoadWeights(model=model, name=name):
                if name not in self.saved:
                    return Failure("no such weights.")
                self.models[model] = [self.saved[name], 0]
            case DropWeights(name=name):
                self.saved.pop(name, None)
            case UnloadModel(model=model):
                del self.models[model]
            case SampleTokens(prompt=prompt, parameters=parameters):
                tokens = (prompt.sum() + np.arange(parameters.max_tokens)).astype(np.int32) % VOCABULARY
                drawn = SampledSequence(tokens, np.zeros(len(tokens), np.float32), False)
                return SampledOutput((drawn,) * parameters.samples)
        return PlainOutput()


def loop(queue: FairQueue, ledger: Ledger, executor: Runs) -> None:
    """Runs commands until the queue is closed."""
    while not queue.is_closed:
        entry = queue.next(0.1)
        if entry is not None:
            assert entry.command is not None
            ledger.finish(entry, executor.run(entry.command))


def drain(queue: FairQueue, ledger: Ledger, executor: Runs) -> None:
    """Runs all queued commands, and those that follow from them."""
    while (entry := queue.next(0.02)) is not None:
        assert entry.command is not None
        ledger.finish(entry, executor.run(entry.command))


@contextmanager
def running(queue: FairQueue, ledger: Ledger, executor: Runs) -> Iterator[None]:
    """Runs commands in a thread until the block ends."""
    thread = Thread(target=loop, args=(queue, ledger, executor), daemon=True)
    thread.start()
    try:
        yield
    finally:
        queue.close()
        thread.join()


class _PlainTenant:
    def __init__(self, adapter: Adapter | None, weights: dict[str, torch.Tensor]) -> None:
        self.adapter, self.weights = adapter, weights
        self.moments = {name: (torch.zeros_like(one), torch.zeros_like(one)) for name, one in weights.items()}
        self.steps = 0


class PlainExecutor:
    """Executor in plain torch: a Qwen3 of two layers, adapters or all parameters of it, one datum at a time."""

    def __init__(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        )  # fmt: skip
        made: Any = Qwen3ForCausalLM(config)
        self.model = made.eval().requires_grad_(False)
        self.tenants: dict[str, _PlainTenant] = {}
        self.saved: dict[str, Any] = {}
        self.losses: dict[str, Callable[..., torch.Tensor]] = {}
        self._active: _PlainTenant | None = None
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(self._adapt(name))

    def _adapt(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            tenant = self._active
            if tenant is None or tenant.adapter is None or f"{name}.A" not in tenant.weights:
                return output
            low: torch.Tensor = args[0] @ tenant.weights[f"{name}.A"].T
            return output + (low @ tenant.weights[f"{name}.B"].T) * (32 / tenant.adapter.rank)

        return hook

    def run(self, command: Command) -> Result:
        """Runs a command."""
        try:
            return self._run(command)
        except (KeyError, ValueError) as error:
            return Failure(f"{type(command).__name__} failed: {error!r}.")

    def _run(self, command: Command) -> Result:
        match command:
            case CreateModel():
                self.tenants[command.model] = self._created(command.adapter)
            case ForwardBackward():
                return self._forward_backward(command)
            case OptimStep():
                return self._step(self.tenants[command.model], command)
            case SaveWeights():
                one = self.tenants[command.model]
                state = {name: value.detach().clone() for name, value in one.weights.items()}
                moments = {name: tuple(part.clone() for part in pair) for name, pair in one.moments.items()}
                self.saved[command.name] = (one.adapter, state, moments, one.steps)
            case LoadWeights():
                adapter, state, moments, steps = self.saved[command.name]
                tenant = _PlainTenant(adapter, {name: one.clone().requires_grad_() for name, one in state.items()})
                if command.optimizer:
                    tenant.moments = {name: (pair[0].clone(), pair[1].clone()) for name, pair in moments.items()}
                    tenant.steps = steps
                self.tenants[command.model] = tenant
            case DropWeights():
                self.saved.pop(command.name, None)
            case UnloadModel():
                del self.tenants[command.model]
            case DefineLoss():
                self.losses[command.loss] = lambda p: (p**2).mean()  # the only loss of the tests
            case SampleTokens():
                return self._sample(command)
        return PlainOutput()

    def _created(self, adapter: Adapter | None) -> _PlainTenant:
        if adapter is None:
            weights = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        else:
            weights = {}
            for name, module in self.model.named_modules():
                if isinstance(module, torch.nn.Linear):
                    digest = hashlib.sha256(f"{adapter.seed}/{name}".encode()).digest()
                    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                    weights[f"{name}.A"] = torch.randn(adapter.rank, module.in_features, generator=generator) / 8
                    weights[f"{name}.B"] = torch.zeros(module.out_features, adapter.rank)
        return _PlainTenant(adapter, {name: one.requires_grad_() for name, one in weights.items()})

    def _logits(self, tenant: _PlainTenant | None, tokens: torch.Tensor) -> torch.Tensor:
        self._active = tenant
        if tenant is not None and tenant.adapter is None:
            output = torch.func.functional_call(self.model, tenant.weights, (tokens[None],), tie_weights=False)
        else:
            output = self.model(tokens[None])
        self._active = None
        found: torch.Tensor = output.logits[0]
        return found

    def _logprobs(self, tenant: _PlainTenant, datum: Datum) -> torch.Tensor:
        table = torch.log_softmax(self._logits(tenant, torch.from_numpy(datum.tokens.copy())), -1)
        targets = torch.from_numpy(datum.inputs["target_tokens"].copy())
        index = targets if targets.ndim == 2 else targets[:, None]
        chosen = table.gather(-1, index)
        return chosen if targets.ndim == 2 else chosen[:, 0]

    def _forward_backward(self, command: ForwardBackward) -> Result:
        tenant, outputs, total = self.tenants[command.model], [], 0.0
        for datum in command.data:
            values = self._logprobs(tenant, datum)
            inputs = {name: torch.from_numpy(one.copy()) for name, one in datum.inputs.items()}
            match command.loss.name:
                case "cross_entropy":
                    loss = -(values * inputs["weights"]).sum()
                case "importance_sampling":
                    loss = -(torch.exp(values - inputs["logprobs"]) * inputs["advantages"]).sum()
                case "custom":
                    loss = self.losses[str(command.loss.options["loss_id"])](values)
                case name:
                    raise ValueError(f"loss {name} is not here")
            if not command.forward_only:
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            outputs.append({"logprobs": values.detach().numpy()})
        return TrainedOutput(tuple(outputs), {"loss:sum": total})

    def _step(self, tenant: _PlainTenant, command: OptimStep) -> Result:
        adam = command.adam
        tenant.steps += 1
        with torch.no_grad():
            for name, weight in tenant.weights.items():
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                m, v = tenant.moments[name]
                m.lerp_(gradient, 1 - adam.beta1)
                v.mul_(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
                root = (v / (1 - adam.beta2**tenant.steps)).sqrt_().add_(adam.eps)
                weight.addcdiv_(m, root, value=-adam.lr / (1 - adam.beta1**tenant.steps))
                weight.grad = None
        return PlainOutput({"steps": float(tenant.steps), "odd": float("nan")})

    @torch.no_grad()
    def _sample(self, command: SampleTokens) -> Result:
        tenant, given = None, command.parameters
        if command.source:
            adapter, state, _, _ = self.saved[command.source]
            tenant = _PlainTenant(adapter, state)
        prompt, sequences = torch.from_numpy(command.prompt.copy()), []
        for number in range(given.samples):
            generator, tokens = torch.Generator().manual_seed(given.seed + number), prompt
            drawn, logprobs, stopped = list[int](), list[float](), False
            while len(drawn) < given.max_tokens and not stopped:
                table = torch.log_softmax(self._logits(tenant, tokens)[-1], -1)
                token = int(torch.multinomial(table.exp(), 1, generator=generator))
                drawn.append(token)
                logprobs.append(float(table[token]))
                tokens = torch.cat([tokens, torch.tensor([token])])
                stopped = (token,) in given.stops
            sequences.append(SampledSequence(np.array(drawn, np.int32), np.array(logprobs, np.float32), stopped))
        output = SampledOutput(tuple(sequences))
        if not (given.prompt_logprobs or given.top_prompt_logprobs):
            return output
        table = torch.log_softmax(self._logits(tenant, prompt), -1)
        values = torch.full((len(prompt),), torch.nan)
        values[1:] = table[:-1].gather(-1, prompt[1:, None])[:, 0]
        top = max(1, given.top_prompt_logprobs)
        best = table[:-1].topk(top)
        ids, chances = torch.zeros(len(prompt), top, dtype=torch.int32), torch.full((len(prompt), top), torch.nan)
        ids[1:], chances[1:] = best.indices.int(), best.values
        return SampledOutput(
            tuple(sequences), values.numpy() if given.prompt_logprobs else None,
            ids.numpy() if given.top_prompt_logprobs else None, chances.numpy() if given.top_prompt_logprobs else None,
        )  # fmt: skip
