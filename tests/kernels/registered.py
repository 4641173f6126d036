"""An operator beside what torch wants of one: its schema, its shapes without content, its backward, compiled code."""

import warnings
from typing import Any

import torch


def check_operator(operator: Any, args: tuple[Any, ...], **bounds: Any) -> None:
    """Run torch's own ``opcheck``.

    torch 2.14 reads ``.grad`` of tensors that are no leaves in it, and hides its own warning from those who have not
    made warnings errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(operator, args, **bounds)
