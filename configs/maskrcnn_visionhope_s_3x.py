_base_ = [
    './_base_/models/maskrcnn_visionhope.py',
    './_base_/datasets/coco_instance_ms.py',
    './_base_/schedules/coco_3x.py',
    './_base_/default_runtime.py',
]

model = dict(
    backbone=dict(arch='small', drop_path_rate=0.4), neck=dict(in_channels=[64, 160, 320, 512])
)
