_base_ = [
    './_base_/models/visionhope_in1k.py',
    './_base_/datasets/imagenet.py',
    './_base_/schedules/imagenet_300e.py',
    './_base_/imagenet_runtime.py',
]

# Without MESA and without the hierarchical models' last ten epochs.
model = dict(
    backbone=dict(type='PlainVisionHOPE', arch='base', out_indices=None, drop_path_rate=0.5),
    neck=dict(in_channels=768),
)
