"""Test batches of unequal images. Needs mmseg, so only configs import this module."""

from __future__ import annotations

from typing import Any

from mmengine.registry import MODELS
from mmseg.models import SegDataPreProcessor
from mmseg.utils import stack_batch


@MODELS.register_module()
class PaddedSegDataPreProcessor(SegDataPreProcessor):
    """mmseg's ``SegDataPreProcessor``, which refuses to test images of different sizes together.

    Here they are padded at the right and the bottom, and segmentors take the padding off again.

    Args:
        test_cfg: ``dict(size_divisor=k)`` pads to the largest image of the batch and up to
            multiples of k; ``dict(size=(h, w))`` pads to that size. k is 1 by default.
        kwargs: of ``SegDataPreProcessor``.
    """

    def __init__(self, *, test_cfg: dict | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.test_padding = test_cfg or dict(size_divisor=1)

    def forward(self, data: dict, training: bool = False) -> dict[str, Any]:
        """Images, each (3, H, W), to a batch, normalized, with what was padded in the samples."""
        if training:
            return super().forward(data, training)
        alone = super().forward
        images = [alone(dict(inputs=[image]))['inputs'][0] for image in data['inputs']]
        samples = self.cast_data(data.get('data_samples'))
        inputs, paddings = stack_batch(images, **self.test_padding, pad_val=self.pad_val)
        for sample, padding in zip(samples or [], paddings, strict=False):
            sample.set_metainfo(padding)
        return dict(inputs=inputs, data_samples=samples)
