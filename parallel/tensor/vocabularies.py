"""Which embeddings and heads are cut by vocabulary when a plan is found automatically.

Those that belong together by a tie or by their number of rows; without a head, the embedding with the most rows.
Others (positions, token types) are small, and whole on every rank they need no sum.
"""

from collections.abc import Mapping

from torch import nn

from engine.errors import PlanError
from engine.parallel.tensor.product import is_conv1d, is_linear
from engine.parallel.tensor.vocabulary import check_embedding

STYLE = "vocabulary"


def vocabulary_styles(model: nn.Module, called: Mapping[str, nn.Module], tp: int) -> dict[str, str]:
    """ "vocabulary" for modules of ``model`` by first name; ``called``: the embeddings that the forward calls."""
    embeddings: dict[str, nn.Embedding] = {}
    for name, module in called.items():
        if isinstance(module, nn.Embedding) and _can_be_cut(module, name, tp):
            embeddings[name] = module
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    rows = {module.num_embeddings for module in embeddings.values()}
    heads = {name: module for name, module in linears.items() if _outputs(module) in rows and _outputs(module) > 1}
    tied = {id(module.weight) for module in heads.values()}
    sizes = {_outputs(module) for module in heads.values()}
    words = {n: m for n, m in embeddings.items() if id(m.weight) in tied} or {
        n: m for n, m in embeddings.items() if m.num_embeddings in sizes
    }
    if not words and embeddings:
        return {max(embeddings, key=lambda name: embeddings[name].weight.shape[0]): STYLE}
    shared = {id(module.weight) for module in words.values()}
    words |= {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and id(m.weight) in shared}
    wanted = {m.num_embeddings for m in words.values()}
    found = [name for name, module in heads.items() if _outputs(module) in wanted and _is_head(name)]
    return dict.fromkeys((*words, *found), STYLE)


def _can_be_cut(module: nn.Embedding, name: str, tp: int) -> bool:
    if module.num_embeddings < tp:
        return False
    try:
        check_embedding(module, name)
    except PlanError:
        return False
    return True


def _outputs(module: nn.Module) -> int:
    weight = module.weight
    return int(weight.shape[1 if is_conv1d(module) else 0])  # type: ignore[index]


def _is_head(name: str) -> bool:
    """Whether a linear layer lies in no chain of blocks."""
    return not any(part.isdecimal() for part in name.split("."))
