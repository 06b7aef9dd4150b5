"""What stands between the backbone and the linear layer of an ImageNet model."""

from __future__ import annotations

import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn

from .layers import LayerNorm2d, PointwiseConv2d


@MODELS.register_module()
class VisionHOPENeck(BaseModule):
    """LayerNorm over channels, 1x1 conv, BatchNorm, SiLU, global average pool.

    mmpretrain's ``LinearClsHead`` follows it. Names are those of the released weights.

    Args:
        in_channels: channels of the last stage.
        out_channels: channels for the classifier.
        init_cfg: of mmengine's ``BaseModule``.
    """

    def __init__(
        self, in_channels: int, out_channels: int = 1024, init_cfg: dict | list[dict] | None = None
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.norm = LayerNorm2d(in_channels)
        self.head_pre_logits = PointwiseConv2d(in_channels, out_channels)
        self.head_norm = nn.BatchNorm2d(out_channels)
        nn.init.trunc_normal_(self.head_pre_logits.weight, std=0.02)
        nn.init.zeros_(self.get_parameter('head_pre_logits.bias'))

    def forward(self, feats: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Features of which the last is (B, in_channels, H, W) to one of (B, out_channels)."""
        x = self.head_pre_logits(self.norm(feats[-1]))
        return (F.silu(self.head_norm(x)).mean(dim=(2, 3)),)
