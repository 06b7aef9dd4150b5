_base_ = [
    './_base_/models/visionhope_in1k.py',
    './_base_/datasets/imagenet.py',
    './_base_/schedules/imagenet_310e.py',
    './_base_/imagenet_runtime.py',
]

model = dict(backbone=dict(arch='small', drop_path_rate=0.4), neck=dict(in_channels=512))
custom_hooks = [*_base_.custom_hooks, dict(type='MESAHook', begin_epoch=75, loss_weight=1.5)]
