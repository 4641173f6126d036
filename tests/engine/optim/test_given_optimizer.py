"""An optimizer that the user has built: class, groups and options are the run's, or a sentence says why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

CONFIG: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0}


class Net(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "lr": 0.02, "weight_decay": 0.3}, {"params": biases, "betas": (0.5, 0.6)}]


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW in groups": lambda model: torch.optim.AdamW(grouped(model), lr=0.01, eps=1e-5, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "RMSprop by name": lambda model: torch.optim.RMSprop(list(model.named_parameters()), lr=0.01, centered=True),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", [0, 1])
def test_it_trains_as_torch_does(maker: str, stage: int) -> None:
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    plain = Net()
    optimizer = MAKERS[maker](plain)
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(plain(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model = Net()
    config = CONFIG | {"zero_optimization": {"stage": stage}}
    with engine.initialize(model, config, loss_of, optimizer=MAKERS[maker](model)) as eng:
        for batch in batches:
            eng.train_batch(batch)
        assert type(eng.optimizer) is type(optimizer)
        for name, value in eng.full_state_dict().items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())


def refusal(make: Callable[[nn.Module], torch.optim.Optimizer], **changes: Any) -> str:
    model = Net()
    with pytest.raises(engine.ConfigError) as caught:
        engine.initialize(model, CONFIG | changes, loss_of, optimizer=make(model))
    return str(caught.value)


def test_what_cannot_be_taken_is_said() -> None:
    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model(torch.ones(4, 3)), torch.ones(4, 3)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return optimizer

    class Needy(torch.optim.SGD):
        def __init__(self, params: Any, secret: float) -> None:
            super().__init__(params, lr=secret)

    assert "is not the model's; build it over model.parameters()" in refusal(
        lambda model: torch.optim.AdamW(Net().parameters())
    )
    assert "without the trainable parameter '2.weight'; add it" in refusal(
        lambda model: torch.optim.SGD(model.get_submodule("0").parameters(), lr=1)
    )
    assert "has made steps, whose state an engine cannot take" in refusal(stepped)
    assert "whose constructor needs secret" in refusal(lambda model: Needy(model.parameters(), 0.1))
    assert "keep one of them" in refusal(
        lambda model: torch.optim.AdamW(model.parameters()), optimizer={"no_weight_decay": ["*.bias"]}
    )
