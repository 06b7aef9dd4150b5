"""Counting multiply-adds by the rules of the paper's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmvisionhope.ops.library import DIRECTIONS

# What the paper's figures for Mask R-CNN are counted with.
PROPOSALS, MASKS = 1000, 100


@dataclass
class Complexity:
    """What one forward pass takes.

    Attributes:
        macs: multiply-adds by name of the module that does them.
        parameters: number of its own parameters by name of module; one that several share counts
            for the first.
        unused: names of parameters that the pass did not touch, such as an auxiliary head's.
        free: calls of each operator that counts nothing by rule.
        unknown: calls of each operator that there is no rule for: their work is missing in macs.
    """

    macs: Counter[str] = field(default_factory=Counter)
    parameters: Counter[str] = field(default_factory=Counter)
    unused: list[str] = field(default_factory=list)
    free: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def modules(self, depth: int) -> list[str]:
        """Names, in the model's order, of the modules to ``depth`` with parameters or work."""
        names = [name for name in self.parameters if name and name.count('.') < depth]
        return [name for name in names if any(self.within(name))]

    def within(self, name: str) -> tuple[int, int]:
        """Parameters and multiply-adds of a module and all inside it; '' is the whole model."""

        def total(counts: Counter[str]) -> int:
            return sum(
                n for key, n in counts.items() if not name or f'{key}.'.startswith(f'{name}.')
            )

        return total(self.parameters), total(self.macs)


def count_macs(model: nn.Module, image_size: Sequence[int]) -> Counter[str]:
    """The multiply-adds of :func:`complexity`: their sum is the model's figure."""
    return complexity(model, image_size).macs


def complexity(model: nn.Module, image_size: Sequence[int]) -> Complexity:
    """Parameters and multiply-adds of the pass that turns one image into predictions.

    Matrix products and convolutions count their multiply-adds. As in fvcore, BatchNorm counts 2 per
    element, LayerNorm and GroupNorm 5, bilinear interpolation 4 per output, nearest 1, adaptive
    average pooling 1 per input. The scan of an operator counts by Equation 56 (its projections are
    layers of their own). GRN, activations and element-wise operations count nothing. Two-stage
    detectors run their heads on 1000 proposals and 100 masks; RoIAlign and what follows the heads
    (decoding, suppression) are left out.

    Nothing is computed, only shapes: this takes a second or so and next to no memory, whatever the
    image.

    Args:
        model: a backbone, classifier, segmentor or detector; run in eval mode, left in its mode.
        image_size: (height, width).
    """
    found = Complexity()
    names = {}
    for module_name, module in model.named_modules():
        found.parameters[module_name] = 0
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in names:
                found.parameters[module_name] += parameter.numel()
                names[parameter] = f'{module_name}.{name}'.lstrip('.')
    counter = _Counter(found)
    hooks = [
        handle
        for name, module in model.named_modules()
        for handle in (
            module.register_forward_pre_hook(lambda *_, name=name: counter.running.append(name)),
            module.register_forward_hook(lambda *_: counter.leave(), always_call=True),
        )
    ]
    training = model.training
    # One operator wherever the scan would run in plain PyTorch: Equation 56 is of the scan.
    fused = patch('mmvisionhope.ops.scan.directional_scan_reference', _scan)
    try:
        with torch.no_grad(), fused, FakeTensorMode(allow_non_fake_inputs=True), counter:
            _predict(model.eval(), torch.empty(1, 3, *image_size, device=next(iter(names)).device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    found.unused = [name for parameter, name in names.items() if parameter not in counter.touched]
    return found


def _scan(z, q, *, directions, row_chunk, col_chunk, dynamics=None, **memories) -> Tensor:
    codes = [DIRECTIONS.index(name) for name in directions]
    y, _ = torch.ops.mmvisionhope.directional_scan(
        z, q, *memories.values(), codes, row_chunk, col_chunk, False
    )
    return y


def _predict(model: Any, image: Tensor) -> None:
    """The forward pass, for two-stage detectors with a fixed number of regions."""
    roi_head = getattr(model, 'roi_head', None)
    if roi_head is None:
        model(image)
        return
    features = model.extract_feat(image)
    model.rpn_head(features)
    for part, regions in (('bbox', PROPOSALS), ('mask', MASKS)):
        head = getattr(roi_head, f'{part}_head', None)
        if head is not None:
            extractor = getattr(roi_head, f'{part}_roi_extractor')
            size = extractor.roi_layers[0].output_size
            head(image.new_empty(regions, extractor.out_channels, *size))


class _Counter(TorchDispatchMode):
    """Sees every operator that runs, below autograd, as torch's own ``FlopCounterMode`` does."""

    def __init__(self, found: Complexity) -> None:
        super().__init__()
        self.found = found
        self.running = ['']
        self.touched: set[Tensor] = set()

    def leave(self) -> None:
        self.running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.touched.update(x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter))
        operator = func._overloadpacket
        if operator in _RULES:
            self.found.macs[self.running[-1]] += _RULES[operator](args, output)
        elif operator in flop_registry:
            # Of torch, which counts a multiply-add as two, and of our operator likewise.
            flops = flop_registry[operator](*args, **kwargs, out_val=output)
            self.found.macs[self.running[-1]] += flops // 2
        elif func.is_view or torch.Tag.pointwise in func.tags or operator in _FREE:
            self.found.free[str(operator)] += 1
        else:
            self.found.unknown[str(operator)] += 1
        return output


_aten = torch.ops.aten
_RULES: dict[Any, Callable[[tuple, Any], int]] = {
    _aten.native_batch_norm: lambda args, y: 2 * args[0].numel(),
    _aten.native_layer_norm: lambda args, y: 5 * args[0].numel(),
    _aten.native_group_norm: lambda args, y: 5 * args[0].numel(),
    _aten.upsample_bilinear2d: lambda args, y: 4 * y.numel(),
    _aten.upsample_nearest2d: lambda args, y: y.numel(),
    _aten._adaptive_avg_pool2d: lambda args, y: args[0].numel(),
}
# Besides views and what torch tags as element-wise: allocation, copies, reductions and maxima.
_FREE = {
    *(_aten.empty, _aten.new_empty, _aten.zeros, _aten.new_zeros, _aten.ones, _aten.fill_),
    *(_aten.cat, _aten.stack, _aten.constant_pad_nd, _aten.roll, _aten.index, _aten.arange),
    *(_aten.sum, _aten.mean, _aten.amax, _aten._softmax, _aten.max_pool2d_with_indices),
    *(_aten.gelu_, _aten.promote_types, _aten.as_strided_),
    torch.ops.prim.device,
}
