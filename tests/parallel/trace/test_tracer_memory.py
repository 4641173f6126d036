"""A probe computes nothing that takes memory, also where an operation cannot run on meta tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.parallel.trace.model_trace import Material, ModelTrace
from engine.parallel.trace.tracer import trace_model
from tests.parallel.pipeline.zoo import hugging_face
from tests.parallel.pipeline.zoo_wide import GROUPED
from tests.selection import wide


class RealBytes(TorchDispatchMode):
    """Adds up all memory that is taken, as if none of it were ever given back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._seen: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.total += storage.nbytes()
        return out


def measured(model: nn.Module, program: Any) -> tuple[ModelTrace, int]:
    with RealBytes() as counted:
        timeline = trace_model(model, program)
    return timeline, counted.total


HIDDEN, INNER, EXPERTS, TOKENS, CHOSEN = 64, 1024, 8, 24, 2


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", wide("Qwen3MoeForCausalLM")])
def test_experts_are_looked_at_by_shapes_alone(name: str, experts: str) -> None:
    sizes = {"num_local_experts": EXPERTS} if name.startswith("Mix") else {"num_experts": EXPERTS}
    inner = "intermediate_size" if name.startswith("Mix") else "moe_intermediate_size"
    with torch.device("meta"):
        model = hugging_face(
            name, **{**GROUPED, "hidden_size": HIDDEN, inner: INNER}, **sizes, num_experts_per_tok=CHOSEN,
            output_router_logits=True, experts_implementation=experts,
        )  # fmt: skip
    ids = torch.zeros(2, TOKENS // 2, dtype=torch.long)
    timeline, taken = measured(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)
    one_block = sum(p.numel() * p.element_size() for p in model.model.layers[0].mlp.experts.parameters())
    assert one_block == EXPERTS * 3 * HIDDEN * INNER * 4
    assert taken < one_block / 10, "not even one expert of one block"
    assert taken < 300_000, "masks and positions only"
    flops = [call.flops for call in timeline.calls if call.unit.endswith("mlp.experts")]
    if name.startswith("Mix") and experts == "grouped_mm":
        assert flops == [2 * TOKENS * CHOSEN * 3 * HIDDEN * INNER] * 4


WIDE = 4096


class Reading(nn.Module):
    """``read`` does in a unit what no meta tensor can."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, WIDE), nn.Linear(WIDE, 2)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.second(self.read(x, self.second.weight))
        return out


def by_nonzero(x: Tensor, weight: Tensor) -> Tensor:
    return x + (x > 0).nonzero().numel() * weight.sum()


def by_host(x: Tensor, weight: Tensor) -> Tensor:
    return x * 2 if (x @ weight.t()).sum().item() > 0 else x * 3


def by_tolist(x: Tensor, weight: Tensor) -> Tensor:
    return x * len((weight > 0).sum(1).tolist())


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    kept = torch.zeros(3, WIDE)
    kept[(x[:, 0] > 0).nonzero()[:, 0]] += 1.0
    return x + kept.sum(0)


@pytest.mark.parametrize("read", [by_nonzero, by_host, by_tolist, in_place])
def test_what_meta_tensors_refuse_is_asked_of_zeros_without_memory(read: Any) -> None:
    torch.manual_seed(0)
    rows = 500
    model = Reading(read)
    batch = torch.randn(rows if read is not in_place else 3, 2)
    whole = rows * WIDE * 4
    units = nn.Sequential(model, nn.Linear(2, 2))
    timeline, taken = measured(units, lambda: units(batch).square().mean())
    assert [call.unit for call in timeline.calls] == ["0", "1"]
    assert timeline.values[0].shape == (len(batch), 2) and timeline.values[0].grad
    assert taken < whole / 20


class NotTorchs(torch.autograd.Function):
    """Of a kernel that takes its argument for dense, whatever the strides say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.is_meta:
            raise NotImplementedError
        assert x.is_contiguous(), "it would read beyond the end"
        return torch.from_numpy(x.numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_kernels_that_are_not_torchs_get_dense_zeros() -> None:
    model = Reading(lambda x, weight: NotTorchs.apply(x))  # type: ignore[no-untyped-call]
    units = nn.Sequential(model, nn.Linear(2, 2))
    timeline = trace_model(units, lambda: F.mse_loss(units(torch.ones(3, 2)), torch.ones(3, 2)))
    assert timeline.values[0].shape == (3, 2)


class Graph(nn.Module):
    """Layers on the nodes of a graph, whose matrix is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.sparse_coo_tensor(torch.arange(6).expand(2, -1), torch.ones(6), (6, 6), check_invariants=False)
        for layer in self.layers:
            x = torch.sparse.mm(edges, layer(x)).relu()
        return x.sum()


def test_memory_is_weighed_beside_sparse_tensors() -> None:
    model, material = Graph(), Material()
    assert len(trace_model(model, lambda: model(torch.ones(6, 4)), material=material).calls) == 2
    assert sum(material.kept_by_glue) >= 2 * 6 * 4 * 4
