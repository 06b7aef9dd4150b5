# P-VisionHOPE-S as ViTDet has a plain backbone: a pyramid from its last map. The paper trains no
# such detector; the recipe is that of its Mask R-CNN, stochastic depth that of P-VisionHOPE-S.
_base_ = [
    './_base_/models/maskrcnn_visionhope.py',
    './_base_/datasets/coco_instance_ms.py',
    './_base_/schedules/coco_1x.py',
    './_base_/default_runtime.py',
]

model = dict(
    backbone=dict(type='PlainVisionHOPE', arch='small', out_indices=None, drop_path_rate=0.1),
    neck=dict(type='SimpleFeaturePyramid', in_channels=384),
)
