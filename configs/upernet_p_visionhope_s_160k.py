# P-VisionHOPE-S with a pyramid from its last map. The paper trains no such segmentor; the recipe is
# that of its UPerNet, stochastic depth that of P-VisionHOPE-S.
_base_ = [
    './_base_/models/upernet_visionhope.py',
    './_base_/datasets/ade20k.py',
    './_base_/schedules/ade20k_160k.py',
    './_base_/segmentation_runtime.py',
]

model = dict(
    backbone=dict(type='PlainVisionHOPE', arch='small', out_indices=None, drop_path_rate=0.1),
    neck=dict(type='SimpleFeaturePyramid', in_channels=384, out_channels=256),
    decode_head=dict(in_channels=[256, 256, 256, 256]),
    auxiliary_head=dict(in_channels=256),
)
