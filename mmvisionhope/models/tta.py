"""Test-time augmentation with masks. Needs mmdet, so only configs import this module."""

from __future__ import annotations

import torch
from mmcv.ops import batched_nms
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox_flip
from mmengine.registry import MODELS
from mmengine.structures import InstanceData

_FLIPPED_AXES = {'horizontal': (-1,), 'vertical': (-2,), 'diagonal': (-1, -2)}


@MODELS.register_module()
class InstanceTTAModel(DetTTAModel):
    """mmdet's ``DetTTAModel``, which refuses masks, for models that predict them too.

    The detections of all views are turned back, pooled and suppressed together by their boxes; each
    that stays keeps the mask of the view it comes from.
    """

    def merge_preds(self, data_samples_list: list[list[DetDataSample]]) -> list[DetDataSample]:
        """Views of each image to one sample per image, with at most ``max_per_img`` instances."""
        return [self._merge_views(views) for views in data_samples_list]

    def _merge_views(self, views: list[DetDataSample]) -> DetDataSample:
        pooled = InstanceData.cat([_turned_back(view) for view in views])
        merged = views[0]
        if len(pooled):
            kept_boxes, kept = batched_nms(
                pooled.bboxes, pooled.scores, pooled.labels, self.tta_cfg['nms']
            )
            kept = kept[: self.tta_cfg['max_per_img']]
            pooled = pooled[kept]
            # Soft NMS lowers scores.
            pooled.scores = kept_boxes[: len(kept), -1]
        merged.pred_instances = pooled
        return merged


def _turned_back(view: DetDataSample) -> InstanceData:
    instances = view.pred_instances
    turned = InstanceData(bboxes=instances.bboxes, scores=instances.scores, labels=instances.labels)
    if 'masks' in instances:
        turned.masks = instances.masks
    if view.metainfo.get('flip'):
        direction = view.metainfo['flip_direction']
        turned.bboxes = bbox_flip(turned.bboxes, view.metainfo['ori_shape'], direction)
        if 'masks' in instances:
            turned.masks = torch.flip(turned.masks, _FLIPPED_AXES[direction])
    return turned
