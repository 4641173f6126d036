"""Flat tensors that follow the layout, with the user's parameters as views of them.

For each bucket (glossary in ``zero/__init__.py``), here with N = 4 and an fp32 master:

    params   bf16  [ shard 0 | shard 1 | shard 2 | shard 3 ]   parameter.data are views of it
    kept     bf16            [ shard 1 ]                       the owned part: a slice of ``params``, except at ZeRO 3
    grads    fp32  [ shard 0 | shard 1 | shard 2 | shard 3 ]   sums of the gradients; ZeRO 2 or 3 with a reduction in
                                                               every microbatch holds its shard only
    master   fp32            [ shard 1 ]                       on the rank that owns shard 1, on the device or the host
    host_sums fp32           [ shard 1 ]                       copy of its gradients on the host, if the master is there

At ZeRO 3 ``kept`` may be in host memory and is copied to ``params`` before each gather. If parameters are fp32, or bf16
without a master (``optim/bf16_updates``), the optimizer updates ``kept`` directly. At ZeRO 3 ``params`` has memory only
while it is gathered; views of it, including those saved by autograd, are valid again after every gather.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.kernels.codecs.block_codec import BlockCodec
from engine.kernels.device import host_zeros, is_host
from engine.parallel.grid import Grid, Spread
from engine.parallel.model.placeholders import PLANNED_TRAINABLE, trainable
from engine.zero.layout import Bucket, FlatLayout, Slot

_OURS = ("__reduce_ex__", PLANNED_TRAINABLE)
"""Attributes that the engine sets on a parameter."""
Storages = MutableMapping[tuple[int, int], torch.UntypedStorage]
"""Storages over slices of larger storages, by (address, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBucket:
    """Memory of one bucket on this rank: flat tensors for its parameters, gradients and master weights."""

    bucket: Bucket
    params: Tensor
    """Flat parameters [elements] in the compute dtype; the user's parameters are views of it."""
    kept: Tensor
    """Owned slice [owned] of ``params``; separate memory at ZeRO 3."""
    grads: Tensor
    """Flat gradients [held] in the accumulation dtype; empty for a frozen bucket."""
    held: slice
    """Elements with gradients on this rank: all, or its shard."""
    owned: slice
    """Elements that this rank updates: its shard, or all at ZeRO 0."""
    shard: slice
    """Elements that this rank counts in the gradient norm: its 1/N of the bucket at every stage."""
    master: Tensor | None
    """Master weights [owned] that the optimizer updates: fp32 for narrower ``params``, any dtype on the host; None: the
    optimizer updates ``kept``.
    """
    parameters: tuple[nn.Parameter, ...]
    """The user's parameters, in the order of the slots."""
    views: tuple[Tensor, ...]
    """Views of ``params``, the data of ``parameters``; made once, because torch makes no view of a tensor without
    memory.
    """
    sharded: bool
    """True at ZeRO 3: ``params`` has memory only while gathered. False for experts on a single rank."""
    codec: BlockCodec | None = None
    """Codec of gathered weights; None: they are sent unencoded."""
    counts: bool = True
    """True if this rank counts its shard in the norm; False if another shard group does."""
    host_sums: Tensor | None = None
    """Reduced gradients [owned] in host memory, if the host updates the bucket; otherwise None."""
    kept_on_host: bool = False
    """True if ``kept`` is in host memory."""
    apart: WeakValueDictionary[tuple[int, int], torch.UntypedStorage] = field(default_factory=WeakValueDictionary)
    """Storages of single parameters over the memory of ``params``, which pickles and state dicts refer to."""

    @property
    def rounds_in_gathers(self) -> bool:
        """True if the quantized all-gather after an update also rounds this rank's own parameters to quantized values:
        the bucket is not sharded, and its fp32 master stores the unrounded values.
        """
        return self.codec is not None and self.wide is not None and not self.sharded

    def gradient(self, part: slice) -> Tensor:
        """Returns a view of the gradients of the bucket's elements ``part``, which must be within ``held``, this rank's
        elements with gradients.
        """
        return self.grads[part.start - self.held.start : part.stop - self.held.start]

    @property
    def weights(self) -> Tensor:
        """Flat tensor of the weights that the optimizer updates on this rank: the master weights, or the parameters if
        the bucket has no master weights.
        """
        return self.kept if self.master is None else self.master

    @property
    def wide(self) -> Tensor | None:
        """Master weights of this rank's elements, if their dtype differs from the dtype of the parameters; otherwise
        None.
        """
        return None if self.master is None or self.master.dtype == self.kept.dtype else self.master

    def place(self, slot: Slot, given: Tensor) -> None:
        """Copies ``given``, the full values of the parameter with the range ``slot``, into the bucket. This rank's
        elements go to ``kept`` (its slice of the parameters) and to the master weights. All elements go to ``params``,
        unless the bucket is sharded (ZeRO 3).
        """
        flat = given.reshape(-1)
        start, stop = max(slot.start, self.owned.start), min(slot.stop, self.owned.stop)
        if start < stop:
            part, ours = flat[start - slot.start : stop - slot.start], slice(start - self.owned.start, None)
            for target in (self.kept, self.master):
                if target is not None:
                    target[ours][: stop - start].copy_(part)
        if not self.sharded:
            self.params[slot.start : slot.stop].copy_(flat)

    def reserve(self) -> None:
        """Allocates uninitialized memory for ``params`` of a sharded bucket, before a gather writes to it."""
        self.params.untyped_storage().resize_(self.params.numel() * self.params.element_size())

    def release(self) -> None:
        """Frees the memory of ``params`` of a sharded bucket. Views of ``params`` are valid again after :meth:`reserve`
        and a gather.

        NumPy, another process or state-dict entries retain memory that they share with ``params``.
        """
        if self.apart or not self.params.untyped_storage().resizable():
            self.move()
        self.params.untyped_storage().resize_(0)

    @property
    def escaped(self) -> bool:
        """True if a tensor outside the bucket, such as a user's view, shares the memory of ``params``."""
        storage = self.params.untyped_storage()
        parameters = sum(p.untyped_storage()._cdata == storage._cdata for p in self.parameters)
        own = 2 + len(self.views) + parameters  # ``params`` and ``storage``
        return bool(torch._C._storage_Use_Count(storage._cdata) > own)

    def move(self) -> None:
        """Moves ``params``, and the parameters that are views of it, to new uninitialized memory. Other tensors retain
        the old memory.
        """
        fresh = torch.empty_like(self.params)
        for slot, parameter, view in zip(self.bucket.slots, self.parameters, self.views, strict=True):
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data = view.data = slot_view(fresh, slot).data
        self.params.data = fresh


def lay_apart(tensor: Tensor, storages: Storages) -> None:
    """Gives ``tensor``, a slice of larger memory, its own storage object over only its bytes, so that a pickle contains
    only these bytes. Copies nothing.

    ``storages``: storage objects by (address, bytes). Tensors over the same bytes share an object; a new object is
    added to ``storages``.
    """
    whole, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.is_meta or not tensor.is_contiguous() or not 0 < size < whole.nbytes() or start + size > whole.nbytes():
        return
    key = (tensor.data_ptr(), size)
    own = storages.get(key)
    if own is None:
        own = storages[key] = whole[start : start + size]
    # by ``data``: the tensor keeps its counter of versions, which tells of writes
    tensor.data = tensor.new_empty(0).set_(own, 0, tensor.shape, tensor.stride())


def storages_of(parameter: nn.Parameter) -> Storages | None:
    """Returns the mapping (address, bytes) -> storage object for the bucket of ``parameter``. Each object covers the
    bytes of one parameter. Returns None if the parameter is in no bucket.
    """
    made = vars(parameter).get("__reduce_ex__")
    storages: Storages | None = made.args[1] if isinstance(made, partial) and made.func is _reduce else None
    return storages


def _reduce(reference: "ref[nn.Parameter]", storages: Storages, protocol: int) -> Any:
    """Reduces the parameter for pickle and ``copy.copy`` to its own bytes, without the rest of its bucket."""
    parameter = reference()
    assert parameter is not None  # whoever asks it to reduce itself has it
    own = parameter.detach()
    lay_apart(own, storages)
    alone = nn.Parameter(own, parameter.requires_grad)
    vars(alone).update({name: value for name, value in vars(parameter).items() if name not in _OURS})
    return nn.Parameter.__reduce_ex__(alone, protocol)  # type: ignore[no-untyped-call]


def slot_view(flat: Tensor, slot: Slot) -> Tensor:
    """Returns the range ``slot`` of ``flat``, the elements of a bucket, as a view in the parameter's shape."""
    return flat[slot.start : slot.stop].view(slot.shape)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Share of a rank in all buckets: its index among the data ranks, and the ZeRO states that are sharded."""

    index: int
    ranks: int
    sharded: bool
    """True: the rank updates its shard only (ZeRO 1)."""
    sharded_gradients: bool = False
    """True: the rank stores only its shard of the gradients (ZeRO 2 with ``reduce: microbatch``). Gradients partial
    over tensor ranks stay full: they are summed over tensor ranks first.
    """
    sharded_parameters: bool = False
    """True: the rank stores its shard of the parameters only (ZeRO 3)."""
    master: bool = True
    """True: narrow parameters have fp32 masters. False: they are updated directly, and gradients are summed in their
    dtype.
    """
    hosted: frozenset[int] = frozenset()
    """Indices of the trained buckets that the host updates, with masters, gradients and moments in host memory."""
    grid: Grid | None = None
    """Grid of this rank; None: ``index`` is the shard in every bucket, and there is one shard group."""
    pinned: bool = True
    """True: host memory for copies to and from an accelerator is page-locked."""
    mapped: Callable[[int, torch.dtype], Tensor] | None = None
    """Function (count, dtype) that allocates zeros in file-backed host memory; None: ordinary memory."""
    hosted_parameters: bool = False
    """True: the shards of the parameters are in host memory (ZeRO 3)."""
    pinned_parameters: bool = True
    """True: the host memory of the parameters is page-locked."""
    delayed: bool = False
    """True: updates overlap with the next step, which still computes with the old weights."""
    lent: Mapping[tuple[str, ...], Tensor] = field(default_factory=dict)
    """Shards of frozen buckets that another engine on this rank has, by the names of their slots."""

    def index_of(self, spread: Spread) -> int:
        """Returns the index of this rank's shard in a bucket that is sharded over the axis ``spread.sharding``."""
        return self.index if self.grid is None else self.grid.index(spread.sharding)

    def counts(self, spread: Spread) -> bool:
        """Returns True if this rank includes its shard in the gradient norm: only the first rank along
        ``spread.shard_copies``, the axis of equal shards, does.
        """
        return self.grid is None or self.grid.is_first(spread.shard_copies)


def reserve(
    layout: FlatLayout, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device
) -> tuple[FlatBucket, ...]:
    """Allocates zeroed memory on ``device`` for the buckets of ``layout``. Returns trainable buckets, then frozen
    buckets. :func:`fill` copies the values later.

    The full parameters of sharded buckets (ZeRO 3) get no memory yet. ``who``: this rank's share.
    """
    trained = [_reserve(bucket, parameters, who, device, trainable=True) for bucket in layout.buckets]
    return (*trained, *(_reserve(bucket, parameters, who, device, trainable=False) for bucket in layout.frozen))


def fill(flat: FlatBucket, placed: Collection[str] = ()) -> None:
    """Copies the parameters of a bucket into its flat memory, and makes the parameters views of it. Skips parameters
    with names in ``placed``.
    """
    for slot, parameter, view in zip(flat.bucket.slots, flat.parameters, flat.views, strict=True):
        if slot.name not in placed:
            flat.place(slot, parameter.detach())
            parameter.data = view
        if type(parameter).__reduce_ex__ is nn.Parameter.__reduce_ex__:
            vars(parameter)["__reduce_ex__"] = partial(_reduce, ref(parameter), flat.apart)


def leave(flat: FlatBucket) -> None:
    """Gives each parameter of an unsharded bucket a storage object of only its own bytes, when the engine closes.
    Copies nothing. Does nothing for a sharded bucket (ZeRO 3).
    """
    for parameter in flat.parameters if not flat.sharded else ():
        vars(parameter).pop("__reduce_ex__", None)
        lay_apart(parameter, flat.apart)


def _reserve(
    bucket: Bucket, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device, trainable: bool
) -> FlatBucket:
    dtype = getattr(torch, bucket.dtype)
    wide = torch.promote_types(dtype, torch.float32) if trainable and who.master else dtype
    shard, whole = bucket.shard(who.index_of(bucket.spread)), slice(0, bucket.elements)
    owned, hosted = shard if who.sharded else whole, who.hosted_parameters
    held = shard if who.sharded_gradients and not bucket.partial else whole
    on_host = partial(_on_host, owned, who, device)
    sharded = who.sharded_parameters and (bucket.spread.ranks > 1 or who.ranks == 1 or hosted)

    def zeros(part: slice, dtype: torch.dtype) -> Tensor:
        make = who.mapped if who.mapped is not None and is_host(device) else partial(_zeros, device)
        return make(part.stop - part.start, dtype)

    kept = who.lent.get(tuple(slot.name for slot in bucket.slots))
    if not sharded:
        params = zeros(whole, dtype) if kept is None else kept
        kept = params[owned] if kept is None else kept
    else:
        params = torch.empty(bucket.elements, dtype=dtype, device=device)
    kept = kept if kept is not None else on_host(dtype, "offload_param") if hosted else zeros(owned, dtype)
    # .data: gathers write into the bucket, which autograd must not count as a change of the parameter
    views = tuple(slot_view(params, slot).data for slot in bucket.slots)
    if sharded:
        params.untyped_storage().resize_(0)
    grads = zeros(held if trainable else slice(0, 0), wide)
    master = host_sums = None
    if trainable and bucket.index in who.hosted:
        host_sums = on_host(wide, "offload_optimizer")
        if wide != dtype or not who.hosted_parameters or who.delayed:  # else the host updates the weights directly
            master = on_host(wide, "offload_optimizer")
    elif wide != dtype:
        master = zeros(owned, wide)
    return FlatBucket(
        bucket=bucket,
        params=params,
        kept=kept,
        grads=grads,
        held=held,
        owned=owned,
        shard=shard,
        master=master,
        parameters=tuple(parameters[slot.name] for slot in bucket.slots),
        views=views,
        sharded=sharded,
        counts=who.counts(bucket.spread),
        host_sums=host_sums,
        kept_on_host=who.hosted_parameters,
    )


def _zeros(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def _on_host(owned: slice, who: Ownership, device: torch.device, dtype: torch.dtype, section: str) -> Tensor:
    """Allocates zeros [owned] in host memory, for a copy of memory of ``device``, as a section of ``zero_optimization``
    asks."""
    count = owned.stop - owned.start
    if who.mapped is not None:
        return who.mapped(count, dtype)
    pinned = who.pinned_parameters if section == "offload_param" else who.pinned
    try:
        return host_zeros(count, dtype, device if pinned else torch.device("cpu"))
    except RuntimeError as error:
        kind, lower = "page-locked " * pinned, "lower ratio, " * (section == "offload_optimizer")
        raise EngineError(
            f"zero_optimization.{section}: the system cannot allocate {count * dtype.itemsize:,} bytes of {kind}memory "
            f"({str(error).splitlines()[0]}); raise its limit (ulimit -l), set pin_memory to false, {lower}or "
            "use more data ranks."
        ) from error


def squared_norms(buckets: Sequence[FlatBucket], names: Sequence[str], factor: Callable[[FlatBucket], float]) -> Tensor:
    """Returns the sum of squared gradients of each parameter in ``names``, fp64 [len(names)], over this rank's
    elements. The sum over all ranks counts each element once.

    ``factor``: callback that returns the factor by which a bucket's gradients are multiplied first.
    """
    found: dict[str, Tensor] = {}
    for flat in buckets:
        for part in flat.bucket.counted(flat.shard) if flat.counts else ():
            for slot in flat.bucket.slots:
                own = slice(max(part.start, slot.start), min(part.stop, slot.stop))
                if own.start < own.stop:
                    square = (flat.gradient(own).double() * factor(flat)).square().sum()
                    found[slot.name] = found[slot.name] + square if slot.name in found else square
    zero = buckets[0].params.new_zeros((), dtype=torch.float64) if buckets else torch.zeros((), dtype=torch.float64)
    return torch.stack([found.get(name, zero).to(zero.device) for name in names])


def norm_parts(buckets: Sequence[FlatBucket]) -> list[tuple[Tensor, bool]]:
    """Returns pairs (gradient slice, counted) for the gradient norm, over this rank's shards of all buckets.

    ``counted`` is False if another rank counts the slice. An infinity or NaN in the slice still makes the norm
    non-finite.
    """
    return [
        (flat.gradient(part), counts and flat.counts)
        for flat in buckets
        for counts, parts in ((True, flat.bucket.counted(flat.shard)), (False, flat.bucket.uncounted(flat.shard)))
        for part in parts
    ]


@dataclass(frozen=True, slots=True)
class _Tie:
    name: str
    module: nn.Module
    leaf: str
    """Name of the parameter in ``module``."""
    parameter: nn.Parameter
    flat: FlatBucket | None
    """The bucket of the parameter; None for a parameter outside the buckets, or without elements."""
    offset: int
    """Offset in the bucket's storage."""


class Attachment:
    """Record of a model's parameter objects and their positions in the flat buckets, made when the engine is built."""

    def __init__(self, model: nn.Module, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = buckets
        held = {id(parameter): flat for flat in buckets for parameter in flat.parameters if parameter.numel()}
        self._ties = [
            _Tie(
                f"{path}.{leaf}" if path else leaf,
                module,
                leaf,
                parameter,
                held.get(id(parameter)),
                int(parameter.storage_offset()) if id(parameter) in held else 0,
            )
            for path, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        ]
        self._trained = {id(tie.parameter) for tie in self._ties if trainable(tie.parameter)}
        self._model, self._modules = model, list(model.modules())
        self._members = self._count()

    def check(self) -> None:
        """Checks that no parameter was added, replaced or moved since the engine was built, and that the engine can
        train each parameter that requires a gradient.

        Raises:
            EngineError: a check fails; the message names the parameter.
        """
        if self._count() != self._members:
            self._refuse_added()
        storages = {id(flat): flat.params.untyped_storage()._cdata for flat in self._buckets}
        for tie in self._ties:
            moved = tie.flat is not None and _place(tie.parameter) != (storages[id(tie.flat)], tie.offset)
            if moved or tie.module._parameters.get(tie.leaf) is not tie.parameter:
                raise EngineError(
                    f"parameter {tie.name!r} is no longer in the engine's memory (a new .data, in forward too, "
                    "model.to(), load_state_dict(assign=True), or a second engine on this model); write into the "
                    "parameter in place instead."
                )
            if tie.parameter.requires_grad and id(tie.parameter) not in self._trained:
                raise EngineError(
                    f"parameter {tie.name!r} was frozen when the engine was built and requires a gradient now, but has "
                    "no place for gradient and optimizer state; name it in optimizer.include_frozen, or freeze it "
                    "after engine.initialize."
                )

    def _count(self) -> int:
        """Returns the number of parameters and children of all modules, which grows with each addition to a module."""
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

    def _refuse_added(self) -> None:
        known = {id(tie.parameter) for tie in self._ties}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                raise EngineError(
                    f"parameter {name!r} was added to the model after engine.initialize, so the engine does not train "
                    "it; if forward makes it, run one forward before engine.initialize, else save a checkpoint, close "
                    "the engine, call engine.initialize with the larger model, and continue with "
                    "eng.load_checkpoint(folder, strict=False)."
                )
        self._modules = list(self._model.modules())
        self._members = self._count()


def _place(parameter: nn.Parameter) -> tuple[int, int]:
    """Returns (storage, offset), which do not change when the storage is freed and allocated again."""
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset())
