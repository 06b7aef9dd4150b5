_base_ = [
    './_base_/models/upernet_visionhope.py',
    './_base_/datasets/ade20k.py',
    './_base_/schedules/ade20k_160k.py',
    './_base_/segmentation_runtime.py',
]

model = dict(
    backbone=dict(arch='small', drop_path_rate=0.4),
    decode_head=dict(in_channels=[64, 160, 320, 512]),
    auxiliary_head=dict(in_channels=320),
)
