"""Fused linear layer (bias, activation, residual), and the matrix products of its backward.

    y = act(x W' + b) + residual     d = dy act'(x W' + b)     dx = d W     dW = d' x     db = sum d

The fused kernel applies bias, activation and residual to the fp32 sums before they are stored. If gradients are
required and the activation's derivative needs x W', the kernel stores it too; for relu it stores x W' + b, whose sign
survives the rounding. ``tuned.json`` calls the forward "linear"
and the products of the backward "linear_backward"; each runs in Triton or in the vendor library (cuBLAS). After a
product of the library, bias, activation and residual run as the pointwise operator ("activation").

A weight with a main gradient (``kernels/dispatch.py``) gets no dW: the last launch of the layer's backward adds d' x to
the main gradient.

Shape suffixes: M rows (all leading dims together), I inputs, O outputs.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.device import is_host, multiplies_wide
from engine.kernels.dispatch import Kernels, MainGradient, eager_apply, fused_operator, is_autocast, is_narrow, open_sum
from engine.kernels.ops.activations import ACTIVATIONS, Activation, activate, activate_backward

_ALIGNED = 16
"""Alignment in bytes of a matrix row, which tensor descriptors (TMA) require."""
_SLAB = 8192
"""Rows per addition if the matrix product cannot accumulate into fp32."""


class LinearForm(NamedTuple):
    """Activation of a linear layer, and memory order of its weight."""

    activation: Activation = "none"
    transposed: bool = False
    """True for a weight stored as [I, O], as in Hugging Face's Conv1D."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: LinearForm, kernels: Kernels, residual: Tensor | None = None
) -> Tensor:
    """Computes f(x W' + b) + residual: x [.., I] -> [.., O], with the activation f of ``form``. Differentiable.

    ``weight`` is W [O, I], or its transpose W' [I, O] with ``form.transposed``. If ``kernels`` has a main gradient of
    the weight (Megatron-LM: ``main_grad``), the backward may add to it in place; autograd then gets no weight gradient.
    """
    given = x, weight, bias, residual
    if has_torch_function(given):
        return handle_torch_function(linear, given, x, weight, bias, form, kernels, residual=residual)
    if is_autocast(x) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    main = kernels.main.use(weight) if torch.is_grad_enabled() and weight.ndim == 2 else None
    if main is not None and x.dtype == weight.dtype:
        return _with_main((x, weight, bias, residual), form, kernels, main)
    matrix_IO = weight if form.transposed or weight.ndim != 2 else weight.t()
    if not _fits(x, matrix_IO, bias):
        return linear_reference(x, weight, bias, form, residual)
    backward = kernels.triton("linear_backward", x, x.shape[-1])
    if kernels.triton("linear", x, x.shape[-1]):
        return _fused(x, matrix_IO, bias, (form.activation, backward), residual)
    pointwise = form.activation != "none" and kernels.triton("activation", x, matrix_IO.shape[1])
    if not pointwise and not backward:
        return linear_reference(x, weight, bias, form, residual)
    # relu's derivative jumps: a product that is rounded before the bias is added may have the wrong sign
    early, late = (None, bias) if pointwise and form.activation != "relu" else (bias, None)
    pre = _by_library(x, matrix_IO, early) if backward else functional.linear(x, matrix_IO.t(), early)
    return activate(pre, late, form.activation, kernels, residual)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: LinearForm, residual: Tensor | None = None
) -> Tensor:
    """Computes f(x W' + b) + residual in PyTorch, with the activation f of ``form``.

    ``weight`` is W, or W' with ``form.transposed``.
    """
    y = ACTIVATIONS[form.activation](functional.linear(x, weight.t() if form.transposed else weight, bias))
    return y if residual is None else y + residual


_Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x, weight, bias and residual of a linear layer."""


def _with_main(given: _Given, form: LinearForm, kernels: Kernels, main: MainGradient) -> Tensor:
    """Computes :func:`linear` of a weight with a main gradient; unfused operations run after the product."""
    x, weight, bias, residual = given
    multiply = kernels.for_products(x)
    fused = multiply.takes("linear", x)
    fused = fused and _fits(x, weight if form.transposed else weight.t(), bias)
    within, inside = False, None
    if fused and residual is not None:
        shape = (*x.shape[:-1], weight.shape[1 if form.transposed else 0])
        within = residual.dtype == x.dtype and residual.shape == shape
        inside = _rows(residual) if within else None
    how = MainProduct(form.transposed, form.activation if fused else "none", fused, multiply, main)
    y: Tensor = _multiply_main(x, weight, bias, inside, how)
    if not fused and form.activation != "none":
        return activate(y, None, form.activation, kernels, residual)
    return y if residual is None or within else y + residual


def _fused(
    x: Tensor, matrix_IO: Tensor, bias: Tensor | None, how: tuple[Activation, bool], residual: Tensor | None
) -> Tensor:
    """Runs the fused kernel; ``how``: (activation, True if Triton computes the backward)."""
    activation, backward = how
    shape = (*x.shape[:-1], matrix_IO.shape[1])
    added = residual is not None and residual.dtype == x.dtype and residual.shape == shape
    inside = _rows(residual) if residual is not None and added else None
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x, matrix_IO, bias) if t is not None)
    # the derivative of a ReLU follows from its result
    keeps = wanted and activation != "none" and not (activation == "relu" and inside is None)
    y_MO: Tensor = _linear(_rows(x), matrix_IO, bias, inside, activation, keeps, backward)[0]
    y = y_MO.view(shape)
    return y if residual is None or added else y + residual


def _by_library(x: Tensor, matrix_IO: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies with the vendor library in forward, and with Triton in backward."""
    y: Tensor = _library_linear(_rows(x), matrix_IO, bias)
    return y.view(*x.shape[:-1], matrix_IO.shape[1])


def product(a: Tensor, b: Tensor, kernels: Kernels) -> Tensor:
    """Returns ``a`` [.., K] @ ``b`` [K, N], for use in a backward.

    The result is not differentiable if ``kernels`` selects Triton.
    """
    if has_torch_function((a, b)):
        return handle_torch_function(product, (a, b), a, b, kernels)
    if not kernels.takes("linear_backward", a) or b.ndim != 2 or not _multiply(a, b):
        return torch.mm(a, b) if a.ndim == b.ndim == 2 else a @ b
    a_MK = a if a.ndim == 2 and _lies(a) else _rows(a)
    if not _lies(a_MK):
        return a @ b
    out: Tensor = _product(a_MK, b)
    return out.view(*a.shape[:-1], b.shape[1])


def add_product_(into: Tensor, a: Tensor, b: Tensor, kernels: Kernels, fresh: bool = False) -> None:
    """Adds ``a`` [M, K] @ ``b`` [K, N] to ``into`` [M, N] in place; with ``fresh`` it overwrites ``into``.

    ``into`` may be fp32 for bf16 or fp16 operands; the sum is then computed in fp32.
    """
    chosen = kernels.takes("linear_backward", a)
    if chosen and _multiply(a, b) and _lies(a) and into.shape == (a.shape[0], b.shape[1]) and _is_written(into, a):
        _add_product(into, a, b, fresh)
    elif into.dtype == a.dtype or is_host(a.device) or multiplies_wide(a.device):
        add_by_library_(into, a, b, fresh)
    elif fresh:  # a product in fp32 would take longer than a narrow product in separate memory
        into.copy_(a @ b)
    else:
        into += a @ b


def add_by_library_(total: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """Computes ``total += a @ b``, or ``total = a @ b`` if ``fresh``, with a vendor library such as cuBLAS.

    The sum is computed in the dtype of ``total``.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if fresh else 1)
    elif not multiplies_wide(a.device):
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if fresh else 1)
    elif fresh:  # the product overwrites total: zeros would cost a write and a read
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif _adds_wide(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        for rows, its in zip(torch.split(total, _SLAB), torch.split(a, _SLAB), strict=True):
            rows += torch.mm(its, b, out_dtype=total.dtype)


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if this torch adds a product of ``dtype`` to fp32 in place; older ones require equal dtypes."""
    narrow = torch.zeros((16, 16), dtype=dtype, device=device)
    wide = torch.zeros_like(narrow, dtype=torch.float32)
    try:
        torch.addmm(wide, narrow, narrow, out_dtype=wide.dtype, out=wide)
    except RuntimeError:
        return False
    return True


def added_to_main(main: MainGradient | None, node: Any | None, a: Tensor, b: Tensor, kernels: Kernels) -> bool:
    """Adds ``a`` [M, K] @ ``b`` [K, N] to the main gradient ``main`` [M, N], if it is available; returns True if so.

    On False, nothing was added, and the caller must return the gradient to autograd. ``node``: as for
    :meth:`MainGradient.begin`.
    """
    opened = open_sum(main, node)
    if main is None or opened is None:
        return False
    add_product_(opened.into, a, b, kernels, fresh=not opened.holds)
    main.end(node)
    return True


def _fits(x: Tensor, matrix_IO: Tensor, bias: Tensor | None) -> bool:
    if matrix_IO.ndim != 2 or not _multiply(x, matrix_IO) or not _is_aligned(x.shape[-1], x):
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == matrix_IO.shape[1:] and bias.is_contiguous())


def _multiply(a: Tensor, b: Tensor) -> bool:
    if not is_narrow(a) or a.dtype != b.dtype or not a.numel() or a.shape[-1] != b.shape[0]:
        return False
    return _lies(b) and _is_aligned(b.shape[1], b)


def _is_written(into: Tensor, a: Tensor) -> bool:
    """Returns True if a kernel can add to ``into`` in place."""
    # a tensor without content has no address; torch's allocations are aligned
    address = into.storage_offset() * into.element_size() if isinstance(into, FakeTensor) else into.data_ptr()
    aligned = _is_aligned(into.shape[1], into) and not address % _ALIGNED
    return into.dtype in (a.dtype, torch.float32) and into.is_contiguous() and aligned


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _lies(matrix: Tensor) -> bool:
    """Returns True if a kernel can read the matrix, or its transpose, without a copy."""
    rows, columns = matrix.shape
    plain = matrix.is_contiguous() and _is_aligned(columns, matrix)
    return plain or (matrix.t().is_contiguous() and _is_aligned(rows, matrix))


def _is_aligned(size: int, tensor: Tensor) -> bool:
    return size > 0 and size * tensor.element_size() % _ALIGNED == 0


@fused_operator("trine::linear")
def _linear(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, keeps: bool,
    backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (y, input of the derivative or an empty tensor); ``matrix`` is [I, O].

    With ``backward``, Triton computes the backward too.
    """
    from engine.kernels.gpu.matmul import Follows, launch_matmul

    return launch_matmul(x, matrix, Follows(bias, activation, residual, keeps))


@fused_operator("trine::library_linear")
def _library_linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, matrix.t(), bias)


@fused_operator("trine::product")
def _product(a: Tensor, b: Tensor) -> Tensor:
    from engine.kernels.gpu.matmul import Follows, launch_matmul

    return launch_matmul(a, b, Follows())[0]


@fused_operator("trine::add_product", mutates=("into",))
def _add_product(into: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    from engine.kernels.gpu.matmul import Follows, launch_matmul

    launch_matmul(a, b, Follows(residual=None if fresh else into), into)


@_linear.register_fake
def _(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, keeps: bool,
    backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(x.shape[0], matrix.shape[1])
    return y, torch.empty_like(y) if keeps else y.new_empty(0)


@_library_linear.register_fake
def _(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[1])


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@_add_product.register_fake
def _(into: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    return None


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, matrix, bias, residual, ctx.activation, keeps, ctx.backward = inputs
    y, pre = output
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)
    ctx.by_result = ctx.activation == "relu" and residual is None
    needed = pre if keeps else y if ctx.by_result else None
    ctx.save_for_backward(x, matrix, bias if keeps and ctx.activation != "relu" else None, needed)
    ctx.bias = None if bias is None else bias.dtype


def _linear_gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, matrix, bias, needed = ctx.saved_tensors
    if not any(ctx.needs_input_grad[:3]):  # without these gradients, forward has not saved the input of the derivative
        return None, None, None, dy if ctx.needs_input_grad[3] else None, None, None, None
    d, dbias = _before_activation(ctx, dy, bias, needed)
    dx, dmatrix = _operand_gradients(ctx, d, x, matrix, triton=ctx.backward)
    return dx, dmatrix, dbias, dy if ctx.needs_input_grad[3] else None, None, None, None


def _before_activation(ctx: Any, dy: Tensor, bias: Tensor | None, needed: Tensor | None) -> tuple[Tensor, Any]:
    """Returns (d, db or None); ``needed``: the input of the activation's derivative."""
    d, dbias = dy.contiguous(), None
    if ctx.activation != "none":
        d, dbias = activate_backward(d, needed, bias, ctx.activation)
    elif ctx.bias is None:
        return d, None
    if ctx.bias is not None and (dbias is None or not dbias.numel()):
        dbias = d.sum(0, dtype=torch.promote_types(d.dtype, torch.float32))
    return d, None if ctx.bias is None or dbias is None else dbias.to(ctx.bias)


def _operand_gradients(
    ctx: Any, d: Tensor, x: Tensor, matrix: Tensor, *, triton: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Returns dx, and dW in the memory order of W."""
    times = _product if triton else torch.mm
    needs_x, needs_matrix = ctx.needs_input_grad[:2]
    dx = times(d, matrix.t()) if needs_x else None
    if not needs_matrix:
        return dx, None
    return dx, times(x.t(), d) if matrix.is_contiguous() else times(d.t(), x).t()


def _keep_library_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, matrix, bias = inputs
    ctx.save_for_backward(x, matrix)
    ctx.bias = None if bias is None else bias.dtype


def _library_linear_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, matrix = ctx.saved_tensors
    d = dy.contiguous()
    dbias = None if ctx.bias is None else d.sum(0, dtype=torch.float32).to(ctx.bias)
    return *_operand_gradients(ctx, d, x, matrix, triton=True), dbias


_linear.register_autograd(_linear_gradients, setup_context=_keep_linear)


_library_linear.register_autograd(_library_linear_gradients, setup_context=_keep_library_linear)


class MainProduct(NamedTuple):
    """Settings of a linear layer. ``main``: buffer that sums its weight gradients over microbatches."""

    transposed: bool
    activation: Activation
    """Activation fused into the Triton kernel; otherwise "none"."""
    fused: bool
    """True if the product runs in Triton."""
    kernels: Kernels
    main: MainGradient


def unviewed(y: Tensor) -> Tensor:
    """Returns ``y`` with the same data, but not as a view for autograd.

    In-place operations such as ReLU(inplace=True) are then allowed.
    """
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


class _MainLinear(torch.autograd.Function):
    """Linear layer x [.., I] -> act(x W' + b) + residual [.., O], residual as rows, of the parameter itself.

    Views of rows as a matrix are made inside, without nodes of the graph.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, how: MainProduct
    ) -> Tensor:
        ctx.how, ctx.activation, ctx.bias = how, how.activation, None if bias is None else bias.dtype
        keeps = how.activation != "none" and not (how.activation == "relu" and residual is None)
        if how.fused:
            backward = how.kernels.triton("linear_backward", x, x.shape[-1])
            matrix = weight if how.transposed else weight.t()
            y_MO, pre = _linear(_rows(x), matrix, bias, residual, how.activation, keeps, backward)
            y = unviewed(y_MO.view(*x.shape[:-1], y_MO.shape[1]))
        else:
            y = pre = unviewed(functional.linear(x, weight.t() if how.transposed else weight, bias))
        needed = pre if keeps else y if how.activation == "relu" else None
        ctx.save_for_backward(x, weight, bias if keeps and how.activation != "relu" else None, needed)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, needed = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, _ = ctx.needs_input_grad
        how, dweight = ctx.how, None
        dy_MO = dy.reshape(-1, dy.shape[-1])
        d_MO, dbias = _before_activation(ctx, dy_MO, bias, None if needed is None else needed.view(dy_MO.shape))
        dx = product(d_MO, weight.t() if how.transposed else weight, how.kernels).view(x.shape) if needs_x else None
        if needs_weight:
            x_MI = x.reshape(-1, x.shape[-1])
            left, right = (x_MI, d_MO) if how.transposed else (d_MO, x_MI)
            if not added_to_main(how.main, ctx.next_functions[1][0], left.t(), right, how.kernels):
                dweight = product(left.t(), right, how.kernels)
        return dx, dweight, dbias if needs_bias else None, dy_MO if needs_residual else None, None


_multiply_main = eager_apply(_MainLinear)
