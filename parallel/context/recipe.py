"""Masks by recipe: a large tensor that is a pointwise function of short ones is computed in parts, where it is read.

    q[:, None] >= k[None, :]      [S] and [S] -> a recipe of [S, S]: nothing is computed
    recipe & (doc_q == doc_k)     a recipe of both
    torch.ones(S, S).tril()       a recipe; also full and triu
    recipe.box((rows, None))      the part of these rows, from the parts of the short tensors
    attention(q, k, v, recipe)    some rows of queries at a time over the keys that they see, each again in backward
    anything else                 the whole tensor, as torch makes it

Recipes have no gradient. Short tensors (position ids, documents, padding) are ordinary tensors. On a GPU, the mode also
computes short integer tensors that come from ``torch.arange`` on the host, so that ``if mask.all():`` does not wait.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from engine.kernels.device import is_host
from engine.parallel.model.operand_casts import QuietMode, is_watched
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.rules.attention import attention_arguments
from engine.parallel.trace.torch_function import METADATA

_LARGE = 1 << 24
"""Elements from which on a result stays a recipe."""
_ROWS, _LINES = 1 << 22, 64
"""Elements of a mask that attention makes at a time, and the minimum number of its rows."""
_LONG = 1 << 12
"""Positions from which on the tensors of a forward become recipes."""
_TWIN = 1 << 17
"""Maximum elements of a tensor that the host computes too."""

Part = Tensor | slice | None
"""Indices of one dim: a tensor of integers, a slice, or None for all."""
Function = Callable[..., Any]


def _functions(names: str) -> frozenset[Function]:
    return frozenset(
        getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)
    )


_BY_ELEMENT = _functions(
    "add sub mul div floor_divide remainder neg abs eq ne lt le gt ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not where float long int bool half double bfloat16 to type_as clamp masked_fill minimum "
    "maximum __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __floordiv__ __mod__ __truediv__ __and__ __rand__ "
    "__or__ __ror__ __invert__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__ __abs__ contiguous clone "
    "detach"
)
_CONSTANTS = (torch.ones, torch.full)
_TRIANGLES = {torch.tril: True, Tensor.tril: True, torch.triu: False, Tensor.triu: False}
"""Functions that keep a triangle; True: the lower one."""
_SELECTS = (Tensor.index_select, torch.index_select)
_ASKED = METADATA | _functions("size dim numel")
_INDEXED = Tensor.__getitem__
_FOLLOWED = _BY_ELEMENT | {_INDEXED} | _functions("unsqueeze expand view diff cumsum all any sum")
"""Functions that the host computes too, of tensors that it knows."""


class TensorRecipe(Tensor):
    """Tensor without memory, such as a long mask, that computes its elements only when code reads them.

    The callback ``part(wanted)`` computes the elements at given indices of each dim. ``made``: the whole tensor, None
    until code reads it.
    """

    part: Callable[[Sequence[Part]], Tensor]
    made: Tensor | None
    seen: dict[Hashable, "list[SeenLines]"]
    """Blocks of rows and the keys that they see, by runs of rows and choice of keys."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, part: Callable[[Sequence[Part]], Tensor]) -> "TensorRecipe":
        recipe: TensorRecipe = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        recipe.part, recipe.made, recipe.seen = part, None, {}
        return recipe

    def box(self, wanted: Sequence[Part]) -> Tensor:
        """Returns the elements at ``wanted``: for each dim a tensor of indices, a slice, or None for all."""
        return _box(self.made, wanted) if self.made is not None else self.part(wanted)

    def whole(self) -> Tensor:
        """Computes the whole tensor at the first call; returns it."""
        if self.made is None:
            self.made = self.part((None,) * self.ndim)
        return self.made

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and not any(
            issubclass(kind, GlobalTensor) for kind in types
        ):
            return _attention(func, *args, **kwargs)
        if any(issubclass(kind, GlobalTensor) for kind in types) and not isinstance(args[0], TensorRecipe):
            return NotImplemented
        made = recipe_of(func, args, kwargs)
        if made is not None:
            return made
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_made(args), **_made(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TensorRecipe({tuple(self.shape)}, {self.dtype})"


def _made(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.whole() if type(leaf) is TensorRecipe else leaf, tree, is_leaf=_is_tensor)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def recipe_of(func: Function, args: Any, kwargs: Any) -> TensorRecipe | None:
    """Returns ``func(*args, **kwargs)`` as a tensor without memory that is computed in parts when read.

    Returns None for a small result or an unsupported ``func``.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_tensor) if isinstance(leaf, Tensor)]
    if not tensors or any(type(leaf) not in (Tensor, TensorRecipe) or leaf.requires_grad for leaf in tensors):
        return None
    if func in _BY_ELEMENT:
        return _by_element(func, args, kwargs, tensors)
    first = args[0] if args else None
    if func in _TRIANGLES and type(first) is TensorRecipe:
        return _triangle(func, first, *args[1:], **kwargs)
    if type(first) is not TensorRecipe or (len(tensors) > 1 and func not in _SELECTS):
        return None
    if func is Tensor.expand:
        return _expanded(first, torch.Size(pytree.tree_leaves(args[1:])) if args[1:] else kwargs["size"])
    if func in _SELECTS and len(args) == 3:
        return _picked(first, tuple(args[2] if dim == args[1] % first.ndim else None for dim in range(first.ndim)))
    if func in (Tensor.unsqueeze, torch.unsqueeze) and len(args) == 2:
        place = args[1] % (first.ndim + 1)
        return _indexed(first, (slice(None),) * place + (None,))
    return _indexed(first, args[1] if isinstance(args[1], tuple) else (args[1],)) if func is _INDEXED else None


def _by_element(func: Function, args: Any, kwargs: Any, tensors: list[Tensor]) -> TensorRecipe | None:
    """Returns the recipe of a function of elements; None if the result is short, or no larger than a given tensor."""
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors))  # type: ignore[no-untyped-call]
    count = shape.numel()
    if count < _LARGE or any(type(leaf) is Tensor and 2 * leaf.numel() > count for leaf in tensors):
        return None

    def part(wanted: Sequence[Part]) -> Tensor:
        def aligned(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = wanted[len(wanted) - leaf.ndim :] if leaf.ndim else ()
            return _box(leaf, [None if size == 1 else each for size, each in zip(leaf.shape, own, strict=True)])

        own, named = pytree.tree_map(aligned, (args, kwargs), is_leaf=_is_tensor)
        out: Tensor = func(*own, **named)
        return out

    device = next((leaf.device for leaf in tensors if leaf.ndim), tensors[0].device)
    return TensorRecipe(_like(func, args, kwargs, shape), device, part)


def _constant(func: Function, args: Any, kwargs: Any) -> TensorRecipe | None:
    """Returns the recipe of a large square of equal elements, as masks begin with; None for other tensors."""
    if kwargs.keys() - {"size", "fill_value", "dtype", "device"} or not (args or "size" in kwargs):
        return None
    size, *more = (kwargs["size"], *args) if "size" in kwargs else args if isinstance(args[0], Sequence) else (args,)
    shape, value = torch.Size(size), kwargs.get("fill_value", more[0] if more else 1)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape.numel() < _LARGE or isinstance(value, Tensor):
        return None
    device = torch.device(kwargs.get("device") or torch.get_default_device())
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if func is torch.ones else torch.full((0,), value).dtype)

    def part(wanted: Sequence[Part]) -> Tensor:
        sizes = [_count(size, each) for size, each in zip(shape, wanted, strict=True)]
        return torch.full(sizes, value, dtype=dtype, device=device)

    return TensorRecipe(_shaped(shape, dtype), device, part)


def _triangle(func: Function, given: TensorRecipe, diagonal: int = 0, **named: Any) -> TensorRecipe | None:
    """Returns the recipe of ``tril`` or ``triu``; None if ``given`` is made, so that code may have written into it."""
    if given.ndim < 2 or named or given.made is not None:
        return None
    box = given.part

    def places(dim: int, wanted: Part) -> Tensor:
        every = torch.arange(given.shape[dim], device=given.device)
        return every if wanted is None else every[wanted]

    def part(wanted: Sequence[Part]) -> Tensor:
        edge, columns = places(-2, wanted[-2])[:, None] + diagonal, places(-1, wanted[-1])
        hidden = columns > edge if _TRIANGLES[func] else columns < edge
        return box(wanted).masked_fill(hidden, 0)

    return TensorRecipe(_shaped(given.shape, given.dtype), given.device, part)


def _like(func: Function, args: Any, kwargs: Any, shape: torch.Size) -> Tensor:
    """Returns a tensor on the meta device of ``shape`` with the dtype of the result."""
    empty = pytree.tree_map(
        lambda leaf: torch.empty((0,) * min(leaf.ndim, 1), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf,
        (args, kwargs), is_leaf=_is_tensor,
    )  # fmt: skip
    return _shaped(shape, func(*empty[0], **empty[1]).dtype)


def _shaped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta").expand(*shape)


def _box(given: Tensor, wanted: Sequence[Part]) -> Tensor:
    """Returns the part of a tensor or a recipe."""
    if type(given) is TensorRecipe:
        return given.box(wanted)
    for dim, part in enumerate(wanted):
        if isinstance(part, slice):
            given = given[(slice(None),) * dim + (part,)]
        elif part is not None:
            given = given.index_select(dim, part)
    return given


def _expanded(given: TensorRecipe, sizes: Sequence[int]) -> TensorRecipe | None:
    ahead = len(sizes) - given.ndim
    shape = [given.shape[dim - ahead] if size == -1 else size for dim, size in enumerate(sizes)]

    def part(wanted: Sequence[Part]) -> Tensor:
        own = [None if size == 1 else each for size, each in zip(given.shape, wanted[ahead:], strict=True)]
        found = given.box(own)
        return found.expand(
            *(_count(size, each) for size, each in zip(shape[:ahead], wanted[:ahead], strict=True)),
            *(_count(size, each) for size, each in zip(shape[ahead:], wanted[ahead:], strict=True)),
        )

    return TensorRecipe(_shaped(shape, given.dtype), given.device, part)


def _count(size: int, part: Part) -> int:
    return size if part is None else len(range(*part.indices(size))) if isinstance(part, slice) else len(part)


def _picked(given: TensorRecipe, own: tuple[Part, ...]) -> TensorRecipe:
    """Returns the recipe of a part."""
    shape = [_count(size, each) for size, each in zip(given.shape, own, strict=True)]

    def part(wanted: Sequence[Part]) -> Tensor:
        return given.box([_within(size, *each) for size, *each in zip(given.shape, own, wanted, strict=True)])

    def _within(size: int, outer: Part, inner: Part) -> Part:
        if outer is None or inner is None:
            return inner if outer is None else outer
        places = torch.arange(size, device=given.device)[outer] if isinstance(outer, slice) else outer
        return places[inner]

    return TensorRecipe(_shaped(shape, given.dtype), given.device, part)


def _indexed(given: TensorRecipe, index: tuple[Any, ...]) -> TensorRecipe | None:
    """Returns the recipe of ``given[index]`` for slices, None and an ellipsis."""
    if any(each is not None and each is not Ellipsis and not isinstance(each, slice) for each in index):
        return None
    used = sum(isinstance(each, slice) for each in index)
    filled = [*index] if Ellipsis in index else [*index, Ellipsis]
    place = filled.index(Ellipsis)
    filled[place : place + 1] = [slice(None)] * (given.ndim - used)
    slices = tuple(None if each == slice(None) else each for each in filled if each is not None)
    inner = given if not any(slices) else _picked(given, slices)
    if None not in filled:
        return inner
    added = [dim for dim, each in enumerate(filled) if each is None]
    shape = list(inner.shape)
    for dim in added:
        shape.insert(dim, 1)

    def part(wanted: Sequence[Part]) -> Tensor:
        found = inner.box([each for dim, each in enumerate(wanted) if dim not in added])
        for dim in added:
            found = found.unsqueeze(dim)
        return _box(found, [each if dim in added else None for dim, each in enumerate(wanted)])

    return TensorRecipe(_shaped(shape, given.dtype), given.device, part)


def _attention(func: Function, *args: Any, **options: Any) -> Tensor:
    """Runs attention [.., S, D] with a recipe as mask, some rows of queries at a time, over the keys that they see."""
    query, key, value, recipe, options = attention_arguments(args, options)
    if type(recipe) is not TensorRecipe:
        return func(*_made((query, key, value, recipe)), **options)  # type: ignore[no-any-return]

    def attend(rows: Tensor, key: Tensor, value: Tensor, lines: slice, keys: slice) -> Tensor:
        out: Tensor = func(rows, key, value, attn_mask=mask_block(recipe, lines, keys), **options)
        return out

    outs, graded, draws = list[Tensor](), torch.is_grad_enabled(), bool(options.get("dropout_p"))
    for lines, seen in seen_lines(recipe, (query.shape[-2],)):
        keys = slice(0, key.shape[-2]) if seen is None else seen
        given = query[..., lines, :], key[..., keys, :], value[..., keys, :], lines, keys
        out = checkpoint(attend, *given, use_reentrant=False, preserve_rng_state=draws) if graded else attend(*given)
        outs.append(out)
    return torch.cat(outs, -2) if len(outs) > 1 else outs[0]


class SeenLines(NamedTuple):
    """Block of rows of a mask (``lines``), with the range from the first to the last key that they see.

    ``keys`` None: no row sees a key.
    """

    lines: slice
    keys: slice | None


def mask_block(recipe: TensorRecipe, lines: slice, keys: Part) -> Tensor:
    """Returns the rows ``lines`` and columns ``keys`` of the mask ``recipe`` [.., rows or 1, columns or 1].

    Dims of size one stay whole. ``keys`` None: all columns.
    """
    wanted = (lines if recipe.shape[-2] != 1 else None, keys if recipe.shape[-1] != 1 else None)
    return recipe.box([*(None,) * (recipe.ndim - 2), *wanted])


def seen_lines(
    recipe: TensorRecipe, runs: Sequence[int], places: Tensor | None = None, key: Hashable = None
) -> list[SeenLines]:
    """Divides the rows of the mask ``recipe`` into blocks of limited size; returns each block with the range of keys
    that its rows see.

    The result is cached; the host waits once for the device. Rows of an additive mask count as seeing all keys.

    ``runs``: number of rows in each run of consecutive query positions; a block is within one run. ``places``: indices
    of the keys to consider; None: all keys. ``key``: identifier of ``places`` in the cache.
    """
    at = (tuple(runs), key)
    if at not in recipe.seen:
        count = recipe.shape[-1] if places is None else len(places)
        size = max(_LINES, _ROWS // max(1, recipe.shape[:-2].numel() * count))
        blocks, start = list[slice](), 0
        for run in runs:
            blocks += [slice(start + line, start + min(line + size, run)) for line in range(0, run, size)]
            start += run
        keys: list[slice | None] = [slice(0, count) if recipe.shape[-1] != 1 else slice(None)] * len(blocks)
        if recipe.dtype is torch.bool and recipe.shape[-1] != 1 and count and blocks:
            with torch.no_grad():
                ends = torch.stack([_ends(mask_block(recipe, lines, places)) for lines in blocks]).tolist()
            keys = [slice(first, last) if first < last else None for first, last in ends]
        recipe.seen[at] = [SeenLines(*pair) for pair in zip(blocks, keys, strict=True)]
    return recipe.seen[at]


def _ends(block: Tensor) -> Tensor:
    """Returns the first key that some row sees and the last one + 1; two zeros if there is none."""
    seen = block.flatten(0, -2).any(0).int()
    return torch.stack((seen.argmax(), len(seen) - seen.flip(0).argmax())) * seen.any()


class HostTwins:
    """Host copies of a forward's small integer tensors, so that code reads their values without a device wait.

    ``torch.arange`` runs on the host too; the copy of a batch is the host tensor that it was made from. Later
    operations run on the copies too.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}
        """(tensor, its version, the copy) by the tensor's id; the tensor is held, so that its id stays its own."""

    def follow(self, func: Function, args: Any, kwargs: Any, made: Any) -> None:
        """Registers the host copy of ``made``, a result of ``func``, by running ``func`` on the host copies of the
        arguments.

        Does nothing unless all tensor arguments have host copies and ``made`` is a short tensor of integers.
        """
        if func is not torch.arange and not any(id(each) in self._known for each in args):
            return
        if type(made) is not Tensor or made.numel() > _TWIN or made.is_floating_point() or made.is_inference():
            return
        if func is torch.arange and is_host(made.device):
            return
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        leaves, form = pytree.tree_flatten((args, kwargs), is_leaf=_is_tensor)
        own = [self.of(leaf) if isinstance(leaf, Tensor) else _on_host(leaf) for leaf in leaves]
        if all(twin is not None or leaf is None for twin, leaf in zip(own, leaves, strict=True)):
            args, kwargs = pytree.tree_unflatten(own, form)
            self._known[id(made)] = made, made._version, func(*args, **kwargs)

    def know(self, tensor: Tensor, twin: Tensor) -> None:
        """Registers the host tensor ``twin`` as the host copy of ``tensor``, unless ``tensor`` is large or
        floating-point.
        """
        short = tensor.numel() <= _TWIN and not tensor.is_floating_point() and not tensor.is_inference()
        if short and is_host(twin.device) and not is_host(tensor.device):
            self._known[id(tensor)] = tensor, tensor._version, twin

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns the host copy of ``tensor``; None without a copy, or if ``tensor`` was written after the copy."""
        _, version, twin = self._known.get(id(tensor), (None, 0, None))
        return twin if twin is not None and tensor._version == version else None


def _on_host(leaf: Any) -> Any:
    """Returns an argument for the host's copy; None if it may name a device in another way."""
    return torch.device("cpu") if isinstance(leaf, torch.device) else None if isinstance(leaf, str) else leaf


class RecipeMode(QuietMode):
    """Function mode that replaces large results, which elementwise functions broadcast from small tensors, by
    :class:`TensorRecipe`.

    ``twins``: host copies of short tensors, which ``bool``, ``int`` and ``item`` read without a wait; None: no copies.
    """

    def __init__(self, twins: HostTwins | None = None) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _CONSTANTS and (made := _constant(func, args, kwargs)) is not None:
            return made
        if func in _BY_ELEMENT and (made := recipe_of(func, args, kwargs)) is not None:
            return made
        if self._twins is None or not (func in _FOLLOWED or func in _STARTS or func in _ANSWERS):
            return func(*args, **kwargs)
        if func in _ANSWERS and (twin := self._twins.of(args[0])) is not None:
            return func(twin)
        made = func(*args, **kwargs)
        self._twins.follow(func, args, kwargs, made)
        return made


_STARTS, _ANSWERS = (torch.arange,), (Tensor.__bool__, Tensor.item, Tensor.__int__)


@contextmanager
def masks_by_recipe(batch: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Opens a context for one forward, in which large masks are computed in parts when read.

    For a batch on a device, short integer tensors get host copies. Does nothing for a short batch in host memory, or if
    another function mode is active.

    ``batch``: pairs (tensor, the tensor that it was copied from).
    """
    pairs = [pair for pair in batch if pair[0].ndim > 1]
    given = [tensor for tensor, _ in pairs]
    plain = all(type(tensor) is Tensor and not tensor.is_meta for tensor in given)
    waits = any(not is_host(tensor.device) for tensor in given)
    if plain and (waits or any(tensor.shape[1] >= _LONG for tensor in given)) and not is_watched():
        twins = HostTwins()
        for pair in pairs:
            twins.know(*pair)
        with RecipeMode(twins if waits else None):
            yield
    else:
        yield
