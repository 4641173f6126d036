"""Streaming DiLoCo against torchft's own class, whose manager is replaced by a mean over the sites."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.build import step_parts
from tests.engine.outer.thread_sites import apart, make_store

pytestmark = pytest.mark.peers
SITES, STEPS, PERIOD, FRAGMENTS, DELAY, MIXING = 3, 13, 4, 2, 1, 0.5
RATES: dict[str, Any] = {"lr": 0.01, "eps": 1e-5, "weight_decay": 0.1}


class Layers(nn.Module):
    """Four equal blocks, so that the fragments are blocks 0 and 2, and blocks 1 and 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Returns values of the shape of ``x``."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_of(output: Tensor, batch: Any) -> Tensor:
    """Returns the mean square difference from the second half of a batch."""
    loss: Tensor = (output - batch["target"]).square().mean()
    return loss


def rows(site: int, step: int) -> dict[str, Tensor]:
    """Returns a batch that depends on site and step alone."""
    generator = torch.Generator().manual_seed(1000 * site + step)
    return {name: torch.randn(4, 8, generator=generator) for name in ("x", "target")}


class _Late:
    """Work of a collective over all sites: every site has sent before the first one waits, ``delay`` steps later."""

    def __init__(self, messages: list[list[Tensor]], number: int) -> None:
        self._messages, self._number = messages, number

    def wait(self) -> bool:
        """Writes the mean into the tensors of all sites; the second call changes nothing."""
        tensors = [site[self._number] for site in self._messages]
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)
        return True


def by_torchft() -> list[list[Tensor]]:
    """Returns the weights of all sites after torchft's DiLoCo."""
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager

    models, diloco, inner, rounds = list[nn.Module](), list[DiLoCo](), list[torch.optim.Optimizer](), [0] * SITES
    messages: list[list[Tensor]] = [[] for _ in range(SITES)]
    for site in range(SITES):
        model = Layers()
        manager = create_autospec(Manager)
        manager._use_async_quorum, manager.should_commit.return_value = False, True
        manager.current_step.side_effect = lambda site=site: rounds[site]

        def allreduce(tensor: Tensor, should_quantize: bool = False, site: int = site) -> Any:
            messages[site].append(tensor)
            return _Late(messages, len(messages[site]) - 1)

        manager.allreduce.side_effect = allreduce
        # fragment 1 is the first that is pushed
        parts = [nn.ModuleList([model.layers[i], model.layers[i + 2]]) for i in (1, 0)]
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        optimizer = torch.optim.AdamW(model.parameters(), **RATES)
        each = DiLoCo(manager, parts, optimizer, outer, PERIOD, fragment_sync_delay=DELAY, fragment_update_alpha=MIXING)
        each.__enter__()
        each._local_step = -DELAY  # torchft pushes ``delay`` steps before the end of a period, not at the end
        models.append(model)
        diloco.append(each)
        inner.append(optimizer)
    for step in range(STEPS):
        for site in range(SITES):
            inner[site].zero_grad()
            batch = rows(site, step)
            torch.autograd.backward(loss_of(models[site](batch["x"]), batch))
            torch.nn.utils.clip_grad_norm_(models[site].parameters(), 1.0)
            synced = diloco[site]._local_step + 1 == PERIOD // FRAGMENTS
            inner[site].step()
            rounds[site] += synced
    return [[p.detach().clone() for p in model.parameters()] for model in models]


def by_engines(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Returns the weights of all sites after the engine's outer loop."""
    outer = {
        "url": "http://store:8140", "sites": SITES, "rule": "diloco", "period": PERIOD, "fragments": FRAGMENTS,
        "delay": DELAY, "mixing": MIXING, "weights": "equal", "wire": "fp64",
    }  # fmt: skip
    base = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": RATES}, "gradient_clipping": 1.0}
    store = make_store(base | {"outer": outer})
    monkeypatch.setattr(step_parts, "open_link", lambda config, fragments: store)
    return _in_threads(base, outer)


def _in_threads(base: dict[str, Any], outer: dict[str, Any]) -> list[list[Tensor]]:
    start = Layers()

    def train(site: int) -> list[Tensor]:
        model = deepcopy(start)
        eng = engine.initialize(model, base | {"outer": outer | {"site": site}}, loss_fn=loss_of)
        for step in range(STEPS):
            eng.train_batch(rows(site, step))
        found = [p.detach().clone() for p in model.parameters()]
        eng.close()
        return found

    with ThreadPoolExecutor(SITES) as pool:
        return list(pool.map(train, range(SITES)))


def test_streaming_diloco_equals_torchft_over_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, theirs in zip(by_engines(monkeypatch), by_torchft(), strict=True):
        assert apart(ours, theirs) < 1e-6
