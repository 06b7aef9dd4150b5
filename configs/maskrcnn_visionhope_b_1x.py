_base_ = [
    './_base_/models/maskrcnn_visionhope.py',
    './_base_/datasets/coco_instance_ms.py',
    './_base_/schedules/coco_1x.py',
    './_base_/default_runtime.py',
]

model = dict(
    backbone=dict(arch='base', drop_path_rate=0.3, with_cp=True),
    neck=dict(in_channels=[96, 192, 448, 640]),
)
