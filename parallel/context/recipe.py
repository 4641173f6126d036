"""Masks by recipe: a large tensor that is a pointwise function of short ones is computed in parts, where it is read.

    q[:, None] >= k[None, :]      [S] and [S] -> a recipe of [S, S]: nothing is computed
    recipe & (doc_q == doc_k)     a recipe of both
    torch.ones(S, S).tril()       a recipe; also full and triu
    recipe.box((rows, None))      the part of these rows, from the parts of the short tensors
    attention(q, k, v, recipe)    some rows of queries at a time over the keys that they see, each again in backward
    anything else                 the whole tensor, as torch makes it

Recipes have no gradient. Short tensors (position ids, documents, padding) are ordinary tensors. Before code writes into
a recipe, all that share its memory in torch, and those that were made of them, become whole tensors.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.rules.attention import attention_arguments
from engine.parallel.trace.torch_function import METADATA, function_name, writes_in_place

_LARGE = 1 << 24
"""Elements from which on a result stays a recipe."""
_ROWS, _LINES = 1 << 22, 64
"""Elements of a mask that attention makes at a time, and the minimum number of its rows."""
_SHORT = 8
"""A recipe copies tensors of at most this part of its elements."""

Part = Tensor | slice | None
"""Indices of one dim: a tensor of integers, a slice, or None for all."""
Function = Callable[..., Any]


def functions_named(names: str) -> frozenset[Function]:
    """Returns the functions of torch and of tensors with ``names``, which spaces separate."""
    return frozenset(
        getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)
    )


BY_ELEMENT = functions_named(
    "add sub mul div floor_divide remainder neg abs eq ne lt le gt ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not where float long int bool half double bfloat16 to type_as clamp masked_fill minimum "
    "maximum __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __floordiv__ __mod__ __truediv__ __and__ __rand__ "
    "__or__ __ror__ __invert__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__ __abs__ contiguous clone "
    "detach"
)
CONSTANTS = (torch.ones, torch.full)
_TRIANGLES = {torch.tril: True, Tensor.tril: True, torch.triu: False, Tensor.triu: False}
"""Functions that keep a triangle; True: the lower one."""
_SELECTS = (Tensor.index_select, torch.index_select)
_ASKED = METADATA | functions_named("size dim numel")
INDEXED = Tensor.__getitem__
_VIEWS = frozenset((Tensor.expand, Tensor.unsqueeze, torch.unsqueeze, INDEXED)) | functions_named(
    "float long int bool half double bfloat16 to type_as contiguous detach"
)
"""Functions with a result that may share the memory of their first argument."""


class TensorRecipe(Tensor):
    """Tensor without memory, such as a long mask, that computes its elements only when code reads them.

    The callback ``part(wanted)`` computes the elements at given indices of each dim. ``made``: the whole tensor, None
    until code reads it.
    """

    part: Callable[[Sequence[Part]], Tensor]
    made: Tensor | None
    seen: dict[Hashable, "list[SeenLines]"]
    """Blocks of rows and the keys that they see, by runs of rows and choice of keys."""
    call: tuple[Function, Any, Any] | None
    """Function that made this recipe of others, and its arguments."""
    users: "list[ref[TensorRecipe]]"
    """Recipes that were made of this one."""
    shown: bool
    """True if code has the memory of the whole tensor, and may write into it."""
    snapshot: "TensorRecipe | None"

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, part: Callable[[Sequence[Part]], Tensor]) -> "TensorRecipe":
        recipe: TensorRecipe = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        recipe.part, recipe.made, recipe.seen = part, None, {}
        recipe.call, recipe.users, recipe.shown, recipe.snapshot = None, [], False, None
        return recipe

    def box(self, wanted: Sequence[Part]) -> Tensor:
        """Returns the elements at ``wanted``: for each dim a tensor of indices, a slice, or None for all."""
        return _box(self.made, wanted) if self.made is not None else self.part(wanted)

    def whole(self) -> Tensor:
        """Computes the whole tensor at the first call; returns it."""
        if self.made is None:
            self.made = self.part((None,) * self.ndim)
        return self.made

    def kept(self) -> Tensor:
        """Returns a recipe with the same elements, which later writes do not change; the whole tensor if it is known
        to code, since torch counts its writes.
        """
        if self.shown:
            return self.whole()
        if self.snapshot is None:
            self.snapshot = TensorRecipe(_shaped(self.shape, self.dtype), self.device, self.part)
            for source in (self, *_recipes_in(self.call)):
                source.users.append(ref(self.snapshot))
        return self.snapshot

    def show(self) -> None:
        """Computes the whole tensor before code gets its memory, all recipes that share this memory in torch, and those
        that were made of them.
        """
        first = self
        while (base := _viewed(first)) is not None:
            first = base
        waiting = [first]
        while waiting:
            one = waiting.pop()
            if one.shown:
                continue
            if one is not first and one.call is not None:
                func, args, kwargs = one.call
                one.made = func(*_made(args), **_made(kwargs))
            memory, one.shown, one.snapshot = _memory(one.whole()), True, None
            for user in (each() for each in one.users):
                if user is not None and _viewed(user) is one:
                    waiting.append(user)
                elif user is not None and _memory(user.whole()) == memory:
                    user.made = user.whole().clone()

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
        found = recipe_of(func, args, kwargs)
        if found is not None:
            return found
        for each in _recipes_in((args[:1] if writes_in_place(function_name(func)) else (), kwargs.get("out"))):
            each.show()
        made = func(*_made(args), **_made(kwargs))
        # a part that code takes from a mask is computed alone, and is then a copy
        held = [one for one in _recipes_in((args, kwargs)) if not one.shown and _viewed(one) is None]
        memories = {_memory(leaf) for leaf in pytree.tree_leaves(made, is_leaf=_is_tensor) if type(leaf) is Tensor}
        if all(_memory(one.whole()) not in memories for one in held):
            return made
        for each in held:
            each.show()
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for each in _recipes_in((args, kwargs)) if func._schema.is_mutable else ():
            each.show()
        return func(*_made(args), **_made(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TensorRecipe({tuple(self.shape)}, {self.dtype})"


def _made(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.whole() if type(leaf) is TensorRecipe else leaf, tree, is_leaf=_is_tensor)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _recipes_in(tree: Any) -> list[TensorRecipe]:
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_tensor) if type(leaf) is TensorRecipe]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _viewed(recipe: TensorRecipe) -> TensorRecipe | None:
    """Returns the recipe whose memory ``recipe`` may share in torch."""
    func, args, _ = recipe.call or (None, (), None)
    first = args[0] if args and func in _VIEWS else None
    return first if type(first) is TensorRecipe and first.dtype == recipe.dtype else None


def recipe_of(func: Function, args: Any, kwargs: Any) -> TensorRecipe | None:
    """Returns ``func(*args, **kwargs)`` as a tensor without memory that is computed in parts when read.

    Returns None for a small result, an unsupported ``func``, or a recipe whose memory code has.
    """
    made = _recipe_of(func, args, kwargs)
    sources = _recipes_in((args, kwargs))
    if made is not None and all(made is not each for each in sources):
        made.call = func, args, kwargs
        for source in sources:
            source.users.append(ref(made))
    return made


def _recipe_of(func: Function, args: Any, kwargs: Any) -> TensorRecipe | None:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_tensor) if isinstance(leaf, Tensor)]
    if not tensors or any(type(leaf) not in (Tensor, TensorRecipe) or leaf.requires_grad for leaf in tensors):
        return None
    if kwargs.get("out") is not None or any(type(leaf) is TensorRecipe and leaf.shown for leaf in tensors):
        return None
    if func in BY_ELEMENT:
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
    return _indexed(first, args[1] if isinstance(args[1], tuple) else (args[1],)) if func is INDEXED else None


def _by_element(func: Function, args: Any, kwargs: Any, tensors: list[Tensor]) -> TensorRecipe | None:
    """Returns the recipe of a function of elements; None if the result is short, or no larger than a given tensor."""
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors))  # type: ignore[no-untyped-call]
    count = shape.numel()
    if count < _LARGE or any(type(leaf) is Tensor and 2 * leaf.numel() > count for leaf in tensors):
        return None

    # code may write into a short tensor before the result is read
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.clone() if type(leaf) is Tensor and _SHORT * leaf.numel() <= count else leaf,
        (args, kwargs), is_leaf=_is_tensor,
    )  # fmt: skip

    def part(wanted: Sequence[Part]) -> Tensor:
        def aligned(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = wanted[len(wanted) - leaf.ndim :] if leaf.ndim else ()
            return _box(leaf, [None if size == 1 else each for size, each in zip(leaf.shape, own, strict=True)])

        own, named = pytree.tree_map(aligned, (args, kwargs), is_leaf=_is_tensor)
        out: Tensor = func(*own, **named)
        return out

    like = _like(func, args, kwargs)
    return TensorRecipe(_shaped(shape, like.dtype), like.device, part) if type(like) is Tensor else None


def constant_recipe(func: Function, args: Any, kwargs: Any) -> TensorRecipe | None:
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
    if given.ndim < 2 or named:
        return None

    def places(dim: int, wanted: Part) -> Tensor:
        every = torch.arange(given.shape[dim], device=given.device)
        return every if wanted is None else every[wanted]

    def part(wanted: Sequence[Part]) -> Tensor:
        edge, columns = places(-2, wanted[-2])[:, None] + diagonal, places(-1, wanted[-1])
        hidden = columns > edge if _TRIANGLES[func] else columns < edge
        return given.box(wanted).masked_fill(hidden, 0)

    return TensorRecipe(_shaped(given.shape, given.dtype), given.device, part)


def _like(func: Function, args: Any, kwargs: Any) -> Any:
    """Returns the result for tensors without elements: one of its dtype and device, or what is no tensor."""
    empty = pytree.tree_map(
        lambda leaf: torch.empty((0,) * min(leaf.ndim, 1), dtype=leaf.dtype, device=leaf.device)
        if isinstance(leaf, Tensor) else leaf,
        (args, kwargs), is_leaf=_is_tensor,
    )  # fmt: skip
    return func(*empty[0], **empty[1])


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
    recipe = recipe.kept() if type(recipe) is TensorRecipe else recipe
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
