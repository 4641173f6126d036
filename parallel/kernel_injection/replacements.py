"""Finds modules that compute the same as a fused operator, by trials of their code, and makes forwards that use it.

    norm         an RMSNorm or a LayerNorm, whatever its class is called
    rotary       attention that rotates queries and keys by a function of its source file, as Hugging Face's does
    gated MLP    down(act(gate(x)) * up(x)), of three linear layers (Llama, T5, Gemma), or of two, the
                 first of which makes an output that is split in half (Phi-3, GLM)
    activation   linear layers whose output goes through an activation and nowhere else: both become one operator

A rotation is recognised by its parameters (q, k, cos, sin, ...) and its results. A module that calls it gets a copy of
its forward in which the function's name refers to our operator.

Trials of MLPs use small layers. In the model, the operator calls the layers as modules, so their hooks and sharding
remain. The trial of an activation runs twice: with the original layers, and with the activation moved into the linear
layer. Dropout is replaced by a nonlinear function, so that a dropout between the two is detected.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dis import get_instructions
from functools import partial
from inspect import signature
from itertools import permutations, product
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import REFERENCE, Kernels, is_autocast
from engine.kernels.ops.activations import ACTIVATIONS, Activation, activate, gated
from engine.kernels.ops.norm import Norm, norm
from engine.kernels.ops.rotary import Rotary, rotary
from engine.parallel.kernel_injection.equivalence import (
    agrees,
    agrees_in_use,
    is_hooked,
    is_linear_layer,
    own_forward,
    parameterless_copy,
    random,
    sizes_of,
    small_linear,
    twin,
)
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer, through_class, with_global
from engine.parallel.tensor.deferred_linear import is_linear, only_argument, set_outside
from engine.parallel.tensor.layers.linear import has_plain_forward

_NORM_SCALES = (1.0, 1e-3, 1e2, 0.0)
"""Scales of the trial's rows: among small values one eps differs from another."""


class NormModule(NamedTuple):
    """Description of the norm that a module computes: its settings, and the names of the module's parameters."""

    form: Norm
    weight: str
    bias: str | None

    @property
    def words(self) -> str:
        """Description of the norm for reports: its kind, its eps, and the number added to its weight, if any."""
        kind = "LayerNorm" if self.form.centered else "RMSNorm"
        return f"{kind}, eps {self.form.eps:g}{', weights from 1' * bool(self.form.offset)}"


def find_norm(module: nn.Module) -> NormModule | None:
    """Returns a description of the norm that ``module`` computes; None if no known norm fits.

    A known norm fits if it has the same outputs and gradients as a copy of ``module``.
    """
    forward, sizes = own_forward(module), [tuple(p.shape) for p in module._parameters.values() if p is not None]
    small = 0 < len(sizes) <= 2 and len(set(sizes)) == 1 and len(sizes[0]) == 1 and sizes[0][0] > 1
    if forward is None or not small or module._modules or module._buffers:
        return None
    names = [name for name, p in module._parameters.items() if p is not None]
    parameters = {name: random(*sizes[0], seed=number) for number, name in enumerate(names)}
    copy = twin(module, parameters, {})
    weights = list(copy.parameters())
    x = random(len(_NORM_SCALES), 2, *sizes[0], seed=3) * torch.tensor(_NORM_SCALES, dtype=torch.float64)[:, None, None]
    for form in _norm_forms(module, names):
        operator = _operator(copy, form)
        if all(agrees(partial(forward, copy.train(mode)), operator, [x], weights) for mode in (True, False)):
            return form if _rounds_alike(copy, forward, x) else None
    return None


def _norm_forms(module: nn.Module, names: list[str]) -> Iterator[NormModule]:
    named = vars(module).items()
    numbers = {value for name, value in named if "eps" in name and type(value) is float and 0 < value < 0.01}
    for eps, centered, offset in product(sorted(numbers), (False, True), (0.0, 1.0)):
        for weight, *bias in permutations(names):
            yield NormModule(Norm(eps, centered, offset), weight, bias[0] if bias else None)


def _operator(module: nn.Module, found: NormModule) -> Callable[[Tensor], Tensor]:
    weight: Any = getattr(module, found.weight)
    bias: Any = None if found.bias is None else getattr(module, found.bias)
    return lambda x: norm(x, weight, bias, found.form, REFERENCE)


def _rounds_alike(copy: nn.Module, forward: Callable[..., Any], x: Tensor) -> bool:
    """Returns True if a bfloat16 input makes a bfloat16 output."""
    return bool(forward(copy.bfloat16(), x.bfloat16()).dtype == torch.bfloat16)


def injected_norm(found: NormModule, own: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """Returns a forward that computes a norm with the fused operator.

    ``found``: description of the norm; ``own``: original forward, for unsupported inputs.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = getattr(self, found.weight)
        plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == weight.dtype
        if not plain or is_autocast(args[0]):
            return own(self, *args, **kwargs)
        bias = None if found.bias is None else getattr(self, found.bias)
        return norm(args[0], weight, bias, found.form, kernels)

    return forward


_PARAMETERS = ["q", "k", "cos", "sin"]


def rotary_globals(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yields (name, function) for each global function that the forward of ``module`` uses, with first parameters
    (q, k, cos, sin).
    """
    forward = own_forward(module)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return
    if any(step.opname == "STORE_GLOBAL" for step in get_instructions(forward)):
        return  # the copy of the forward would write its own globals
    for name in forward.__code__.co_names:
        value = forward.__globals__.get(name)
        if isinstance(value, FunctionType) and list(inspect.signature(value).parameters)[:4] == _PARAMETERS:
            yield name, value


def find_rotary(function: FunctionType) -> Rotary | None:
    """Returns a description of the rotary embedding that ``function(q, k, cos, sin)`` computes; None if it computes
    none.
    """
    given = [random(2, heads, 5, 8, seed=heads) for heads in (3, 1)]
    cos, sin = (random(2, 5, 8, seed=seed) for seed in (4, 5))
    for interleaved, heads_dim in product((False, True), (1, 2)):
        form = Rotary(interleaved, heads_dim)
        q, k = (x.transpose(1, heads_dim).contiguous() for x in given)
        operator = lambda q, k, f=form: rotary(q, k, cos, sin, f, REFERENCE)  # noqa: E731
        if agrees(lambda q, k: function(q, k, cos, sin), operator, [q, k]):
            return form
    return None


def injected_rotary(
    forward: Any, name: str, function: FunctionType, form: Rotary, kernels: Kernels
) -> Callable[..., Any]:
    """Returns a copy of ``forward`` in which the fused operator replaces the global function ``name``.

    Unsupported arguments use ``function``, the original. ``form``: description of the rotary embedding.
    """

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        full = cos.shape[-1] == q.shape[-1] == k.shape[-1] and cos.ndim == 3 and q.dtype == k.dtype == cos.dtype
        if args or kwargs or not full or is_autocast(q):
            return function(q, k, cos, sin, *args, **kwargs)
        return rotary(q, k, cos, sin, form, kernels)

    return with_global(forward, name, turned)


_HIDDEN, _INNER = 6, 10
"""Widths of the layers in a trial."""


class GatedModule(NamedTuple):
    """Gated MLP, down(act(gate(x)) * up(x)): the names of its linear layers, and its activation."""

    gate: str
    up: str | None
    """Name of the up layer; None: ``gate`` computes both halves."""
    down: str
    activation: Activation
    gate_first: bool = True
    """True if the first half of a joint layer's output is the gate."""

    @property
    def words(self) -> str:
        """Formula of the MLP, as text for reports."""
        return f"{self.activation}({self.gate}) * {self.up or 'its other half'}, {self.down}"

    def run(self, module: nn.Module, x: Tensor, kernels: Kernels) -> Tensor:
        """Returns the output of ``module`` for ``x``; the fused operator computes act(gate) * up."""
        layers: Any = module
        first = getattr(layers, self.gate)(x)
        if self.up is not None:
            gate, up = first, getattr(layers, self.up)(x)
        else:
            gate, up = first.chunk(2, dim=-1) if self.gate_first else reversed(first.chunk(2, dim=-1))
        out: Tensor = getattr(layers, self.down)(gated(gate, up, self.activation, kernels))
        return out


def find_gated(module: nn.Module) -> GatedModule | None:
    """Returns a description of the gated MLP that ``module`` computes; None if it computes none.

    The function tests the description on random inputs: its formula and a small copy of ``module`` must have equal
    outputs and gradients.
    """
    forward = own_forward(module)
    linear = {name: child for name, child in module.named_children() if is_linear(child)}
    others = [child for child in module.children() if not is_linear(child)]
    if forward is None or len(linear) not in (2, 3) or module._parameters or module._buffers:
        return None
    if any(True for child in others for _ in child.parameters()) or not all(map(has_plain_forward, linear.values())):
        return None
    if any(map(is_hooked, others)):
        return None
    for sizes in _roles(linear):
        copies = _small_gated(module, linear, sizes)
        for found in _gated_forms(sizes):
            operator = lambda x, f=found: f.run(copies, x, REFERENCE)  # noqa: B023, E731
            if agrees_in_use(copies, partial(forward, copies), operator, _HIDDEN):
                return found
    return None


def _roles(linear: Mapping[str, nn.Module]) -> Iterator[dict[str, str]]:
    """The possible assignments of the layers to "gate", "up", "down" or "both", with their names."""
    shapes = {name: sizes_of(layer) for name, layer in linear.items()}
    words = ("gate", "up", "down") if len(linear) == 3 else ("both", "down")
    for names in permutations(linear):
        roles = dict(zip(words, names, strict=True))
        inner, hidden = shapes[roles["down"]]
        first = [shapes[name] for name in names[:-1]]
        if all(size == (hidden, inner if len(linear) == 3 else 2 * inner) for size in first):
            yield roles


def _small_gated(module: nn.Module, linear: Mapping[str, nn.Module], roles: Mapping[str, str]) -> nn.Module:
    layers: dict[str, nn.Module] = {}
    for number, (role, name) in enumerate(roles.items()):
        inputs, outputs = {"down": (_INNER, _HIDDEN), "both": (_HIDDEN, 2 * _INNER)}.get(role, (_HIDDEN, _INNER))
        layers[name] = small_linear(inputs, outputs, linear[name], seed=number)
    rest = {name: parameterless_copy(child) for name, child in module.named_children() if name not in linear}
    return twin(module, {}, {**rest, **layers})


def _gated_forms(roles: Mapping[str, str]) -> Iterator[GatedModule]:
    for name in ACTIVATIONS:
        activation = cast(Activation, name)
        if "both" in roles:
            yield from (GatedModule(roles["both"], None, roles["down"], activation, first) for first in (True, False))
        else:
            yield GatedModule(roles["gate"], roles["up"], roles["down"], activation)


def injected_gated_mlp(found: GatedModule, own: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """Returns a forward that computes a gated MLP with the fused operator.

    ``found``: description of the MLP; ``own``: original forward, for unsupported inputs.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or is_autocast(args[0]):
            return own(self, *args, **kwargs)
        return found.run(self, args[0], kernels)

    return forward


_OUTSIDE = "tensor_outside"
"""Attribute of both modules of a pair: False while the pair's owner runs its forward."""


class _NotedOutside:
    """Value of ``tensor_outside`` in a trial: true, with a note that a call has read it."""

    def __init__(self) -> None:
        self.read = False

    def __bool__(self) -> bool:
        self.read = True
        return True


class ActivatedLinear(NamedTuple):
    """Linear layer and activation module that one kernel can compute: their names in the parent module, and the
    activation.
    """

    linear: str
    act: str
    activation: Activation


def find_activated(module: nn.Module) -> ActivatedLinear | None:
    """Returns the linear layer of ``module`` that feeds only an activation module, and this activation; None if there
    is none.

    The function tests this on a small copy of ``module``: if the activation moves into the layer, outputs and gradients
    must stay equal.
    """
    forward = own_forward(module)
    layers: dict[str, Any] = {name: child for name, child in module._modules.items() if is_linear_layer(child)}
    if forward is None or len(layers) not in (1, 2) or module._parameters or module._buffers:
        return None
    if len(signature(forward).parameters) != 2:  # self and x: other arguments may select other behaviour
        return None
    acts = [(name, kind) for name, child in module._modules.items() if child and (kind := _kind(child)) is not None]
    if len(acts) != 1:
        return None
    act, activation = acts[0]
    if any(is_hooked(child) for child in (module._modules[act], *layers.values())):
        return None
    small = _small_pair(layers)
    children = {name: parameterless_copy(child) for name, child in module._modules.items() if child} | small
    apart = twin(module, {}, children)
    sizes = {name: layer.in_features for name, layer in small.items()}
    for name in layers:
        found = ActivatedLinear(name, act, activation)
        together = twin(module, {}, children | {each: copy(children[each]) for each in (name, act)})
        for child, own in pair_forwards(found, REFERENCE).items():
            put_forward(together.get_submodule(child), own, "is tried", ForwardPatches())
        outside = _NotedOutside()
        for child in (name, act):
            object.__setattr__(together.get_submodule(child), _OUTSIDE, outside)
        operator = partial(_both_modes, apart, together)
        # a backward that recomputes a part of the forward calls the pair from outside
        if agrees_in_use(apart, partial(forward, apart), operator, sizes[name]) and not outside.read:
            return found
    return None


def _both_modes(leader: nn.Module, follower: nn.Module, x: Tensor) -> Any:
    """Run ``follower`` in the mode of ``leader``."""
    return follower.train(leader.training).forward(x)


def _small_pair(layers: Mapping[str, Any]) -> dict[str, nn.Linear]:
    """Small layers with other weights; equal sizes stay equal."""
    shapes = {name: sizes_of(layer) for name, layer in layers.items()}
    known = sorted({size for shape in shapes.values() for size in shape})
    small = {size: 6 + 4 * rank for rank, size in enumerate(known)}
    return {
        name: small_linear(small[inputs], small[outputs], layers[name], seed)
        for seed, (name, (inputs, outputs)) in enumerate(shapes.items())
    }


def _kind(child: nn.Module) -> Activation | None:
    """The activation that this child computes, found by running it on random values."""
    forward = own_forward(child)
    if forward is None or child._modules or child._parameters or child._buffers or isinstance(child, nn.Dropout):
        return None
    copy = twin(child, {}, {})
    for name, function in ACTIVATIONS.items():
        if name != "none" and agrees_in_use(copy, partial(forward, copy), function, _INNER):
            return cast(Activation, name)
    return None


def pair_forwards(found: ActivatedLinear, kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Returns new forwards that fuse the pair ``found``, by names of the owner's children; "" is the owner itself.

    Only calls from the owner's forward are fused: in other calls, such as of another module that calls the activation,
    each of the two modules computes alone.
    """
    return {found.linear: injected_activation(found, kernels), found.act: pass_through, "": _calling(found)}


def put_forward(module: nn.Module, forward: Callable[..., Any], note: str, patches: ForwardPatches) -> None:
    """Installs ``forward`` on ``module``, with the mark of a pair's module if it is made for one.

    ``note``: effect, for reports; ``patches`` records the change.
    """
    patches.replace_forward(module, PatchLayer.KERNEL, forward, note)
    if hasattr(forward, _OUTSIDE):
        with patches.changing(module, PatchLayer.KERNEL, note):
            object.__setattr__(module, _OUTSIDE, True)


def _calling(found: ActivatedLinear) -> Callable[..., Any]:
    """Returns a forward for the owner of a pair: the forward of its class, whose calls of the pair are fused."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pair = [self._modules[found.linear], self._modules[found.act]]
        before: list[Any] = [getattr(each, _OUTSIDE, None) for each in pair]
        if None in before:  # one of the two has been replaced since, so that the other computes alone
            return type(self).forward(self, *args, **kwargs)
        try:
            set_outside(pair, (False, False))
            return type(self).forward(self, *args, **kwargs)
        finally:
            set_outside(pair, before)

    return through_class(forward)


def injected_activation(found: ActivatedLinear, kernels: Kernels) -> Callable[..., Any]:
    """Returns a forward for the linear layer of ``found``: the forward of the layer's class, then the activation.

    ``found``: description of the layer, sharded or not, and its activation.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = type(self).forward(self, *args, **kwargs)
        return y if self.tensor_outside else activate(y, None, found.activation, kernels)

    vars(forward)[_OUTSIDE] = True
    return through_class(forward)


def pass_through(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the argument unchanged: the forward of an activation module that is fused into the linear layer before
    it. Calls from outside of the pair's owner run the forward of the module's class.
    """
    if self.tensor_outside:
        return type(self).forward(self, *args, **kwargs)
    return only_argument(args, kwargs)


vars(pass_through)[_OUTSIDE] = True
