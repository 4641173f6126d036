"""Every rule, in the forms in which code calls its function, along each dim: as plain torch, or gathered.

``d`` and ``e`` are dims, of which any may be sharded; torch's numpy names (``axis``, ``keepdims``) are forms of their
own. What plain torch refuses is not asked.
"""

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parallel.tensor.global_tensor.rig import Given, compare, normal

SHAPE = (6, 12, 6)
CALLS = """
softmax: x.softmax(d); x.softmax(dim=d); torch.softmax(x, d, torch.float64); F.softmax(x, dim=d);
    F.softmax(x, d, 3, torch.float64); F.softmin(x, dim=d); F.softmin(x, d)
log_softmax: x.log_softmax(d); torch.log_softmax(x, dim=d); F.log_softmax(x, d);
    F.log_softmax(x, dim=d, dtype=x.dtype)
cumsum: x.cumsum(d); x.cumsum(dim=d); torch.cumsum(x, d, dtype=torch.float64); x.cumsum(axis=d)
cumprod: x.cumprod(d); torch.cumprod(x, dim=d)
logcumsumexp: x.logcumsumexp(d); torch.logcumsumexp(x, dim=d)
flip: x.flip(d); x.flip(d, e); x.flip([d]); x.flip((d, e)); x.flip(dims=[d]); torch.flip(x, [d, e]);
    torch.flip(x, dims=(d,))
roll: x.roll(1, d); x.roll(2); x.roll((1, 2), (d, e)); x.roll(shifts=1, dims=d); torch.roll(x, 1, d);
    torch.roll(x, shifts=(1,), dims=(d,))
tril: x.tril(); x.tril(1); torch.tril(x, diagonal=-1)
triu: x.triu(); x.triu(diagonal=1); torch.triu(x, 2)
pad: F.pad(x, (1, 0)); F.pad(x, (0, 0, 1, -1)); F.pad(x, (0, 0, 1, 2)); F.pad(x, (0, 0, 0, 0, 1, 1));
    F.pad(x, [1, -1]); F.pad(x, (-1, 1, 2, -2, -1, 1)); F.pad(x, pad=(1, 1), mode='constant', value=3.0);
    F.pad(x, (1, 2), 'reflect'); F.pad(x, (2, 1), mode='circular'); F.pad(x, (0, 0), value=1.0)
sum: x.sum(); x.sum(d); x.sum(d, True); x.sum((d, e)); x.sum(dim=d, keepdim=True); x.sum([d]); torch.sum(x, d);
    torch.sum(x); x.sum(axis=d); torch.sum(x, axis=(d, e), keepdims=True); x.sum(dtype=torch.float64); x.sum(())
mean: x.mean(); x.mean(d); x.mean((d, e), keepdim=True); torch.mean(x, d, True); x.mean(axis=d);
    x.mean(dim=[d], dtype=torch.float64); x.mean(d, keepdims=True)
var: x.var(); x.var(d); x.var(False); x.var(d, False); x.var(d, unbiased=False, keepdim=True);
    x.var((d, e), correction=0); torch.var(x, d); torch.var(x, dim=d, correction=1, keepdim=True); x.var(axis=d);
    torch.var(x, d, False, True)
std: x.std(); x.std(d); x.std(d, False, True); torch.std(x, dim=(d, e)); x.std(axis=d, keepdims=True)
amax: x.amax(d); x.amax((d, e)); x.amax(dim=d, keepdim=True); torch.amax(x, [d], True); x.amax(axis=d); x.amax()
amin: x.amin(d); torch.amin(x, dim=(d, e)); x.amin()
max: x.max(); x.max(d)[0]; x.max(d, True).values; torch.max(x, dim=d).values; torch.max(x, x * 0.5); x.max(x * 2);
    x.max(axis=d)[0]
min: x.min(); x.min(d).values; torch.min(x, d, keepdim=True)[0]; torch.min(x, other=x.detach())
argmax: x.argmax().double(); x.argmax(d).double(); torch.argmax(x, dim=d, keepdim=True).double();
    x.argmax(axis=d).double()
argmin: x.argmin().double(); x.argmin(d, True).double()
logsumexp: x.logsumexp(d); x.logsumexp((d, e), keepdim=True); torch.logsumexp(x, dim=d)
any: (x > 1).any().double(); (x > 1).any(d).double(); torch.any(x > 2, dim=d, keepdim=True).double();
    (x > 1).any(axis=d).double()
all: (x > -1).all().double(); (x > -1).all(d).double(); (x > -2).all(dim=d, keepdim=True).double()
median: x.median(); x.median(d)[0]; torch.median(x, dim=d).values
aminmax: x.aminmax(dim=d)[1]; torch.aminmax(x).max
norm: x.norm(); x.norm(2, d); x.norm(dim=d); x.norm(p=1, dim=d, keepdim=True); torch.norm(x, 2, d);
    torch.norm(x, dim=(d,)); x.norm(2, (d,), True)
linalg_vector_norm: torch.linalg.vector_norm(x); torch.linalg.vector_norm(x, 2, d);
    torch.linalg.vector_norm(x, dim=(d, e)); torch.linalg.vector_norm(x, ord=1, dim=d, keepdim=True)
topk: x.topk(2)[0]; x.topk(2, d).values; x.topk(k=2, dim=d, largest=False)[0]; torch.topk(x, 2, dim=d)[0]
layer_norm: F.layer_norm(x, (6,)); F.layer_norm(x, x.shape[-2:]); F.layer_norm(x, [6], eps=1e-3);
    torch.layer_norm(x, (6,), None, None, 1e-4)
rms_norm: F.rms_norm(x, (6,)); F.rms_norm(x, (12, 6)); F.rms_norm(x, [6], eps=1e-3); torch.rms_norm(x, (6,))
view: x.view(72, 6); x.view(-1); x.view((6, 72)); x.view(6, 2, 6, 6); x.view(size=(6, 12, 2, 3)); x.view(36, -1)
reshape: x.reshape(6, -1); x.reshape((72, 6)); torch.reshape(x, (6, 3, 4, 6)); x.reshape(shape=(36, 12))
view_as: x.view_as(torch.zeros(72, 6))
reshape_as: x.reshape_as(torch.zeros(6, 72))
permute: x.permute(2, 0, 1); x.permute((1, 0, -1)); torch.permute(x, (d, e, 3 - d % 3 - e % 3));
    x.permute(dims=(0, 2, 1))
transpose: x.transpose(d, e); torch.transpose(x, dim0=d, dim1=e)
swapdims: x.swapdims(d, e)
swapaxes: x.swapaxes(d, e); torch.swapaxes(x, axis0=d, axis1=e)
t: x[0].t(); x.select(d, 0).t()
adjoint: x.adjoint()
get mT: x.mT
get T: x[0].T
movedim: x.movedim(d, e); torch.movedim(x, (d, e), (0, 1)); x.movedim(source=d, destination=0)
moveaxis: x.moveaxis(d, e)
flatten: x.flatten(); x.flatten(1); x.flatten(0, 1); torch.flatten(x, start_dim=-2); x.flatten(end_dim=1)
ravel: x.ravel()
unflatten: x.unflatten(d, (2, -1)); x.unflatten(dim=d, sizes=(3, -1)); torch.unflatten(x, d, (2, -1))
unsqueeze: x.unsqueeze(d); torch.unsqueeze(x, dim=d); x.unsqueeze(-1)
squeeze: x.unsqueeze(d).squeeze(d); x.unsqueeze(0).squeeze(); x[:, None].squeeze(dim=1); x.squeeze(d);
    x[None, :, None].squeeze((0, 2)); x[None].squeeze(axis=0)
expand: x[None].expand(2, -1, -1, -1); x.unsqueeze(1).expand(6, 3, 12, 6); x.expand(x.shape);
    x[:, None].expand((-1, 2, -1, -1))
broadcast_to: x.broadcast_to((2, 6, 12, 6)); torch.broadcast_to(x, size=(2, 6, 12, 6))
expand_as: x[:, :, :1].expand_as(x) + x; x.expand_as(torch.zeros(2, 6, 12, 6))
repeat: x.repeat(1, 2, 1); x.repeat(2, 1, 1, 1); x.repeat((1, 1, 3)); x.repeat(2, 2, 2)
tile: x.tile(2); x.tile((2, 1)); torch.tile(x, (2, 1, 1))
repeat_interleave: x.repeat_interleave(2, d); x.repeat_interleave(2); torch.repeat_interleave(x, 3, dim=d);
    x.repeat_interleave(repeats=2, dim=d); x.repeat_interleave(torch.arange(x.shape[d]), d)
narrow: x.narrow(d, 1, 3); torch.narrow(x, dim=d, start=0, length=4); x.narrow(d, -3, 2); x.narrow(d, 2, 1)
select: x.select(d, 1); x.select(dim=d, index=-1); torch.select(x, d, 0)
unbind: x.unbind(d); torch.unbind(x, dim=d); list(x)
split: x.split(2, d); x.split(4, dim=d); torch.split(x, 3, d); x.split([2, x.shape[d] - 2], d);
    torch.split(x, split_size_or_sections=5, dim=d)
split_with_sizes: x.split_with_sizes([1, x.shape[d] - 1], d); torch.split_with_sizes(x, (2, x.shape[d] - 2), dim=d)
chunk: x.chunk(2, d); x.chunk(4, dim=d); torch.chunk(x, chunks=3, dim=d); x.chunk(5, d)
tensor_split: x.tensor_split(4, d); x.tensor_split((1, 3), dim=d); torch.tensor_split(x, 2, dim=d);
    x.tensor_split(indices_or_sections=3, dim=d)
__getitem__: x[1]; x[-1]; x[:, 1]; x[:, 1:]; x[..., :-1]; x[:, ::2]; x[:, -3:, 0]; x[None, 2:4]; x[[0, 2]];
    x[:, torch.tensor([1, 0, 3])]; x[x > 0]; x[:, :, torch.tensor([[0, 1], [2, 3]])]; x[1, 2, 3]; x[:, 5:2];
    x[torch.tensor([0, 1]), torch.tensor([2, 3])]; x[0:1]; x[:, 2:3]; x[..., 1:2, :]; x[:2, :, 3:]; x[:, 20:]
index_select: x.index_select(d, torch.tensor([0, 2, 1])); torch.index_select(x, dim=d, index=torch.tensor([1]))
cat: torch.cat([x, x * 2], d); torch.cat((x, x[:1]), 0); torch.cat([x, plain], dim=d);
    torch.cat([plain, x], axis=d); torch.cat([x[:, :1] * 0, x[:, :-1]], dim=1); torch.concat([x, x], -1);
    torch.concatenate([x], d); torch.cat([x, torch.zeros(0)], d)
stack: torch.stack([x, x * 2]); torch.stack([x, plain], d); torch.stack((x,), dim=-1)
add: x + plain; 1 + x; x.add(plain, alpha=2); torch.add(x, x); x + plain[0]; x + plain[:, :1]; x + plain[..., 0:1];
    x[0] + plain
sub: x - 1; plain - x; torch.sub(x, plain, alpha=3); torch.rsub(x, 1)
mul: x * plain; plain * x; 2 * x; x.mul(other=plain)
div: x / 2; x / (plain.abs() + 1); 1 / (x.abs() + 1); x.div(2, rounding_mode='floor')
pow: x ** 2; 2 ** x; x.pow(3); torch.pow(x, exponent=2)
clamp: x.clamp(-1, 1); x.clamp(min=0); torch.clamp(x, max=0.5); x.clip(0, 1)
where: torch.where(x > 0, x, 0.0); torch.where(plain > 0, x, plain); x.where(plain > 0, x * 2);
    torch.where(x > 0, plain, x)
masked_fill: x.masked_fill(plain > 0, 1.0); x.masked_fill(x > 0, value=2.0); x.masked_fill(plain[0, 0] > 0, 0)
lerp: x.lerp(plain, 0.3); torch.lerp(plain, x, weight=0.5)
addcmul: torch.addcmul(x, plain, x, value=0.5); x.addcmul(plain, plain)
maximum: torch.maximum(x, plain); x.minimum(plain); torch.fmax(x, plain)
gelu: F.gelu(x); F.gelu(x, approximate='tanh'); F.silu(x); F.relu(x, inplace=False); F.leaky_relu(x, 0.1);
    F.hardtanh(x, -0.5, 0.5); F.softplus(x, beta=2)
to: x.to(torch.float64); x.to(plain); x.double(); x.float().double(); x.type(torch.float64); x.type_as(plain);
    x.to('cpu'); x.to(dtype=torch.float64); x.contiguous(); x.clone()
dropout: F.dropout(x, 0.0); F.dropout(x, p=0.5, training=False); torch.dropout(x, 0.0, True)
zeros_like: x + torch.zeros_like(x); x * torch.ones_like(x, dtype=torch.float64); x + x.new_zeros(6, 12, 6);
    x + torch.full_like(x, 2.0); x + x.new_full((1, 1), 3.0)
fill_: (x * 1).fill_(2.0) + x; (x * 1).mul_(2); (x * 1).add_(plain); (x * 1).masked_fill_(plain > 0, 1.0);
    (x * 1).clamp_(min=0); (x * 1).zero_() + x; (x * 1).copy_(plain) + x
linear: F.linear(x, plain[0]); F.linear(x, plain[0], plain[1, :, 0]); F.linear(x, weight=plain[0], bias=None);
    F.linear(plain, x[0])
matmul: x @ plain[0].T; x @ plain.mT; plain[0].T @ x; torch.matmul(x, plain[0, 0]); x.matmul(plain.mT); x @ x.mT;
    x[0] @ plain[0].T
bmm: torch.bmm(x, plain.mT); x.bmm(mat2=plain.mT); plain.bmm(x.mT)
mm: torch.mm(x[0], plain[0].T); x[0].mm(plain[0].T)
mv: x[0].mv(plain[0, 0])
dot: x[0, 0].dot(plain[0, 0])
addmm: torch.addmm(plain[0, 0], x[0], plain[0, :6]); torch.baddbmm(x[:, :, :1] * 0, x, plain.mT[:, :, :1]);
    torch.addmv(plain[0, :, 0], x[0], plain[0, 0])
einsum: torch.einsum('abc,dc->abd', x, plain[0]); torch.einsum('abc,abc->ab', x, plain);
    torch.einsum('abc->cab', x); torch.einsum('bij,bkj->bik', [x, plain]);
    torch.einsum('...i,i->...', x, plain[0, 0]); torch.einsum('abc,abd->cd', x, plain)
embedding: F.embedding(torch.tensor([[0, 2], [1, 1]]), x[0]); F.embedding(torch.arange(3), weight=x[:, 0])
scaled_dot_product_attention: F.scaled_dot_product_attention(x, plain, x);
    F.scaled_dot_product_attention(x, x, x, is_causal=True);
    F.scaled_dot_product_attention(x[None], plain[None], plain[None], attn_mask=plain[0, :, :1] > 0, scale=0.5)
"""
"""For each function its calls, one after the other; a line that is indented goes on with those of the line above."""
KINDS = ("blocks", "shared", "thirds")


def _read(text: str) -> Mapping[str, list[str]]:
    """The forms by name."""
    joined = text.strip().replace("\n   ", "")
    pairs = (line.split(":", 1) for line in joined.splitlines())
    return MappingProxyType({name: [form.strip() for form in forms.split(";")] for name, forms in pairs})


FORMS = _read(CALLS)


def cases(
    name: str, rng: random.Random, cuts: tuple[int, ...] = (0, 1, 2)
) -> Iterator[tuple[str, dict[str, int], dict[int, str]]]:
    """Each form with dims and with a way to shard each of ``cuts``, all drawn."""
    for form in FORMS[name]:
        for cut in ({dim: ""} for dim in cuts):
            d = rng.choice([0, 1, 2, -1, -2])
            e = rng.choice([one for one in (0, 1, 2) if one != d % 3])
            yield form, {"d": d, "e": e}, {dim: rng.choice(KINDS) for dim in cut}


def check(form: str, dims: dict[str, int], cut: dict[int, str]) -> None:
    """Compare one call, if plain torch takes it."""
    code = compile(form, form, "eval")

    def program(x: Any, plain: Tensor) -> list[Tensor]:
        out = eval(code, {"torch": torch, "F": F, "x": x, "plain": plain, **dims})
        outs = list(out) if isinstance(out, tuple | list) else [out]
        return [*outs, x * 2]  # a gradient reaches x in any case

    given = {"x": Given(normal(*SHAPE), cut), "plain": Given(normal(*SHAPE, seed=5))}
    try:
        program(**{name: one.tensor.clone() for name, one in given.items()})
    except (RuntimeError, IndexError, TypeError, AttributeError):
        return
    compare(program, given, 2)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_call_is_as_plain_torch(name: str) -> None:
    for form, dims, cut in cases(name, random.Random(name), (0, 2)):
        try:
            check(form, dims, cut)
        except BaseException as error:
            error.add_note(f"{form} with {dims}, x sharded {cut}")
            raise


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_every_form_along_other_dims(seed: int) -> None:
    for name in FORMS:
        for form, dims, cut in cases(name, random.Random(f"{name} {seed}")):
            check(form, dims, cut)
