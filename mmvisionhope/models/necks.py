"""A pyramid from one map, for dense tasks with the plain backbone."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import LayerNorm2d


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """The pyramid of ViTDet: strides 4, 8, 16 and 32, each made from the one map of stride 16.

    By two, one and no transposed 2x2 convolutions of stride 2 and by a 2x2 max pooling; then a 1x1
    and a 3x3 convolution, each with a LayerNorm over channels. Neither mmdet nor mmsegmentation
    ships it: mmsegmentation's ``Feature2Pyramid`` takes one map per level.

    Args:
        in_channels: channels of the map, a multiple of 4.
        out_channels: channels of each level.
        num_outs: levels; those beyond 4 halve the one before by max pooling, as in mmdet's FPN.
        init_cfg: of mmengine's ``BaseModule``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        num_outs: int = 4,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        if type(in_channels) is not int or in_channels < 4 or in_channels % 4:
            raise ValueError(f'in_channels must be a multiple of 4, got {in_channels!r}')
        if type(num_outs) is not int or num_outs < 4:
            raise ValueError(f'num_outs must be an integer of at least 4, got {num_outs!r}')
        self.num_outs = num_outs
        half, quarter = in_channels // 2, in_channels // 4
        rescales = [
            nn.Sequential(
                nn.ConvTranspose2d(in_channels, half, 2, stride=2),
                LayerNorm2d(half),
                nn.GELU(),
                nn.ConvTranspose2d(half, quarter, 2, stride=2),
            ),
            nn.Sequential(nn.ConvTranspose2d(in_channels, half, 2, stride=2)),
            nn.Sequential(),
            nn.Sequential(nn.MaxPool2d(2, stride=2, ceil_mode=True)),
        ]
        self.levels = nn.ModuleList(
            nn.Sequential(
                rescale,
                nn.Conv2d(channels, out_channels, 1, bias=False),
                LayerNorm2d(out_channels),
                nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                LayerNorm2d(out_channels),
            )
            for rescale, channels in zip(
                rescales, (quarter, half, in_channels, in_channels), strict=True
            )
        )

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One map (B, in_channels, H, W) to (B, out_channels, 4 H, 4 W), 2 H, H, H / 2 and so on,
        halves rounded up, contiguous.

        Raises:
            ValueError: there is more than one map.
        """
        if len(inputs) != 1:
            raise ValueError(
                'SimpleFeaturePyramid takes one map: set out_indices of the backbone to its last '
                f'block, got {len(inputs)} maps'
            )
        outputs = [level(inputs[0]).contiguous() for level in self.levels]
        while len(outputs) < self.num_outs:
            outputs.append(F.max_pool2d(outputs[-1], 1, stride=2))
        return tuple(outputs)
