"""Counting multiply-adds by the rules of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mmvisionhope.models.operator import Operator
from mmvisionhope.ops.library import scan_macs


def count_macs(model: nn.Module, image_size: Sequence[int]) -> dict[str, int]:
    """Multiply-adds of one forward pass, by module name.

    Convolutions and linear layers count their multiply-adds, BatchNorm 2 and LayerNorm 5 per
    element, the scan of an operator by Equation 56 (its projections are layers of their own). GRN,
    activations and element-wise operations count nothing.

    Args:
        model: a backbone; run once in eval mode on zeros, and left in its mode.
        image_size: (height, width).

    Returns:
        Multiply-adds for each module that has any; their sum is the model's figure.
    """
    macs: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        for kind, rule in _RULES.items():
            if isinstance(module, kind):
                hooks.append(module.register_forward_hook(_recorder(macs, name, rule)))
    parameter = next(model.parameters())
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, *image_size, device=parameter.device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return macs


def _recorder(macs: dict[str, int], name: str, rule: Callable[..., int]) -> Callable[..., None]:
    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        macs[name] = macs.get(name, 0) + rule(module, inputs[0], output)

    return record


def _conv(module: nn.Conv2d, x: Tensor, y: Tensor) -> int:
    return y.numel() * module.weight[0].numel()


def _linear(module: nn.Linear, x: Tensor, y: Tensor) -> int:
    return y.numel() * module.in_features


def _operator(module: Operator, x: Tensor, y: Tensor) -> int:
    height, width = x.shape[1:3]
    heads, d = module.d_skip.shape
    chunks = module.row_chunk or width, module.col_chunk or height
    return len(x) * scan_macs(height, width, heads, d, *chunks)


_RULES: dict[type[nn.Module], Callable[..., int]] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.BatchNorm2d: lambda module, x, y: 2 * x.numel(),
    nn.LayerNorm: lambda module, x, y: 5 * x.numel(),
    Operator: _operator,
}
