"""RoIAlign in float32. Needs mmdet, so configs import this module and mmvisionhope does not."""

from __future__ import annotations

import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.registry import MODELS
from torch import Tensor


@MODELS.register_module()
class Float32RoIExtractor(SingleRoIExtractor):
    """mmdet's ``SingleRoIExtractor`` run in float32 under any autocast.

    The original casts the RoIs to the dtype of the features; float16 resolves coordinates beyond
    1024 to whole pixels only.
    """

    def forward(
        self, feats: tuple[Tensor, ...], rois: Tensor, roi_scale_factor: float | None = None
    ) -> Tensor:
        """Features (B, C, H_i, W_i) of each level and RoIs (n, 5) of image index and corners in
        pixels to float32 features (n, C, size, size)."""
        with torch.autocast(rois.device.type, enabled=False):
            return super().forward(
                tuple(feat.float() for feat in feats), rois.float(), roi_scale_factor
            )
