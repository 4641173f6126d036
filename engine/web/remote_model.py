"""Model of a server as a function with gradients that cross the network (Shumai's ``remote_model``).

    out = model(x)              POST /v1/forward    the server runs its model and retains the graph
    my_loss(out).backward()     POST /v1/backward   the gradient of ``out`` goes there, that of ``x`` comes back
    model.step(lr=1e-3)         POST /v1/step       AdamW on the server's accumulated gradient

Remote models compose as any function: in branches, in series, with local layers, inside another server's function.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.web.remote_line import RemoteError, RemoteLine


class RemoteModel:
    """Model on a training service, called with tensors like a local module; ``backward`` sends gradients over HTTP.

    Args:
        url: address of the server.
        model: id of the model; by default "shared", the model that all clients share.
        token: secret of the server; empty: none.
        optimize: AdamW options (lr, beta1, beta2, eps, weight_decay, max_norm) of an update after each backward; None:
            gradients accumulate until ``step``.
        certificate: PEM file with the server's certificate; empty: the authorities that this host trusts.
        line: existing connection to use; ``url``, ``token`` and ``certificate`` are then ignored.
    """

    def __init__(
        self, url: str = "", model: str = "shared", *, token: str = "", optimize: Mapping[str, float] | None = None,
        certificate: str = "", line: RemoteLine | None = None,
    ) -> None:  # fmt: skip
        self.line = line or RemoteLine(url, token, certificate=certificate)
        self.model, self.version = model, 0
        """Id of the model, and the version of its weights in the last reply."""
        self._optimize = {"step": json.dumps(dict(optimize))} if optimize is not None else {}

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Returns the model's output: a tensor, or a dict of tensors by name.

        Under ``torch.no_grad`` the server retains no graph.

        Raises:
            RemoteError: the server refuses the tensors, or does not answer.
        """
        named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        names, values = list(named), list(named.values())
        if not torch.is_grad_enabled():
            reply = self.line.post(f"/v1/forward/{self.model}", named)
            return self._outputs(list(reply.tensors), _near(values, reply.tensors.values()), reply.version)
        call = _Call(self, names)
        anchor = torch.zeros((), requires_grad=True)  # so that weights of the server train without an input's gradient
        found = _Remote.apply(call, anchor, *values)  # type: ignore[no-untyped-call]
        return self._outputs(call.outputs, list(found), call.version)

    async def call(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Returns the result of :meth:`__call__` as a coroutine, so that other calls run while this one waits for its
        server.
        """
        graded = torch.is_grad_enabled()

        def run() -> Any:
            with torch.set_grad_enabled(graded):
                return self(*args, **kwargs)

        return await asyncio.to_thread(run)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteModel":
        """Returns itself: copies of a module share the connection to its server."""
        return self

    def step(self, **adam: float) -> int:
        """Updates the weights on the server by AdamW with the accumulated gradient.

        Returns the new version of the weights, which counts updates and loads of saved weights.

        Args:
            adam: AdamW options: lr, beta1, beta2, eps, weight_decay and max_norm.
        """
        self.version = int(self.line.ask(f"/v1/step/{self.model}", adam)["version"])
        return self.version

    def function(self, name: str, tensor: Tensor | None = None) -> Tensor | None:
        """Calls the server's function ``name``, with ``tensor`` if given; returns the function's tensor or None.

        No gradient flows through the call.
        """
        return self.line.fetch(f"/v1/call/{name}", tensor)

    def statistics(self) -> Any:
        """Returns a dict with the entry "routes": by route, numbers "requests" and "refused", and total "seconds"."""
        return self.line.ask("/v1/statistics", method="GET")

    def close(self) -> None:
        """Closes the connection; the server drops this session's autograd graphs some time later."""
        self.line.close()

    def _outputs(self, names: list[str], values: list[Tensor], version: int) -> Any:
        self.version = version
        return values[0] if names == ["output"] else dict(zip(names, values, strict=True))

    @property
    def options(self) -> Mapping[str, str]:
        """Query parameters of each backward: "step" with the AdamW options as JSON; empty if gradients accumulate."""
        return self._optimize


class _Call:
    """Forward of a remote model, until its backward."""

    def __init__(self, remote: RemoteModel, names: list[str]) -> None:
        self.remote, self.names = remote, names
        self.outputs: list[str] = []
        self.version = 0
        self.ticket = ""

    def forward(self, values: tuple[Tensor, ...]) -> list[Tensor]:
        """Runs the forward on the server, which retains its graph."""
        line, given = self.remote.line, dict(zip(self.names, values, strict=True))
        self.ticket = line.new_ticket()
        reply = line.post(f"/v1/forward/{self.remote.model}", given, {"ticket": self.ticket})
        self.outputs, self.version = list(reply.tensors), reply.version
        return _near(values, reply.tensors.values())

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Sends the outputs' gradients; returns the inputs' gradients, None for inputs without."""
        sent = {name: value for name, value in zip(self.outputs, gradients, strict=True) if value is not None}
        path = f"/v1/backward/{self.remote.model}/{self.ticket}"
        reply = self.remote.line.post(path, sent, self.remote.options)
        self.remote.version = reply.version
        return [reply.tensors.get(name) for name in self.names]


def _near(values: Sequence[Tensor], outputs: Iterable[Tensor]) -> list[Tensor]:
    """Returns ``outputs`` on the device of the first of ``values``; on the CPU without values."""
    return [output.to(values[0].device) if values else output for output in outputs]


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.devices = call, [value.device for value in values]
        ctx.set_materialize_grads(False)
        outputs = call.forward(values)
        ctx.mark_non_differentiable(*(value for value in outputs if not value.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        found = ctx.call.backward(gradients)
        for name, gradient, wants in zip(ctx.call.names, found, wanted, strict=True):
            if wants and gradient is None:
                raise RemoteError(
                    f"the server returned no gradient for input {name!r}, which requires one; its model is on a "
                    "pipeline, or the input is not floating."
                )
        moved = [
            gradient.to(device) if wants and gradient is not None else None
            for gradient, device, wants in zip(found, ctx.devices, wanted, strict=True)
        ]
        return None, None, *moved


def remote(url: str, model: str = "shared", **options: Any) -> RemoteModel:
    """Returns a :class:`RemoteModel` for ``model`` of the service at ``url``.

    ``options`` are the other arguments of :class:`RemoteModel`.
    """
    return RemoteModel(url, model, **options)
