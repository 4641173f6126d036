"""Our own operators (``engine.kernels``) on parts, so that their kernels run there.

    norm, add_norm     each rank normalises what it holds, where the width is whole
    rotary             heads may be cut otherwise for q and k; positions and sequences alike for both
    gated, activate    by element: ``elementwise`` is their rule

What is cut otherwise takes the steps of the reference, which have rules.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.kernels.norm import norm as norm_operator
from engine.kernels.norm import norm_reference
from engine.kernels.rotary import rotary_reference
from engine.parallel.tensor.views.index import Sets
from engine.parallel.tensor.views.operands import fit, join, layout_of, part
from engine.parallel.tensor.views.view import Function, View, like

if TYPE_CHECKING:
    from engine.parallel.tensor.views.context import Views


def norm(views: "Views", func: Function, x: Tensor, *affine_and_form: Any) -> Any:
    """Of the last dim; ``weight`` and ``bias`` may be whole or cut as it."""
    weight, bias, form, kernels = affine_and_form
    sets = layout_of(x).sets[-1:]
    weight, bias = _cut(views, weight, sets), None if bias is None else _cut(views, bias, sets)
    if type(x) is not View or any(sets):
        return norm_reference(x, weight, bias, form)
    return like(x, func(x.local, weight.local, None if bias is None else bias.local, form, kernels))


def add_norm(views: "Views", func: Function, x: Tensor, residual: Tensor, *affine_and_form: Any) -> Any:
    """The norm of the sum, and the sum."""
    (weight, bias), form, kernels = affine_and_form
    joined = join(views, (x, residual))
    if any(joined.sets[-1:]) or x.shape != residual.shape:
        stream = x + residual
        return norm_operator(stream, weight, bias, form, kernels), stream
    parts = [fit(views, tensor, own) for tensor, own in zip((x, residual), joined.operands, strict=True)]
    local = _cut(views, weight, (None,)).local, None if bias is None else _cut(views, bias, (None,)).local
    made = func(*parts, local, form, kernels)
    return tuple(View(one, joined.shape, joined.sets, views) for one in made)


def _cut(views: "Views", affine: Tensor, sets: Sets) -> View:
    """A weight or bias as the width is cut; the gradient of a plain one is noted as partial."""
    return View(part(views, affine, sets), affine.shape, sets, views)


def rotary(views: "Views", func: Function, q: Tensor, k: Tensor, *angles_and_form: Any) -> Any:
    """Each rank turns the heads that it holds; what is plain stays so."""
    cos, sin, form, kernels = angles_and_form
    length = 3 - form.heads_dim
    cuts = [layout_of(x).sets for x in (q, k)]
    shared = {(sets[0], sets[length]) for sets in cuts}
    plain = not any(type(angle) is View or angle.requires_grad for angle in (cos, sin))
    if len(shared) != 1 or any(sets[3] for sets in cuts) or not plain:
        return rotary_reference(q, k, cos, sin, form)
    ((batch, positions),) = shared
    wanted = (batch if cos.shape[0] != 1 else None, positions, None)
    angles = (fit(views, angle, wanted) for angle in (cos, sin))
    made = func(*(x.local if type(x) is View else x for x in (q, k)), *angles, form, kernels)
    return tuple(like(x, local) if type(x) is View else local for x, local in zip((q, k), made, strict=True))
