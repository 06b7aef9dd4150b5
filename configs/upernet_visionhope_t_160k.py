_base_ = [
    './_base_/models/upernet_visionhope.py',
    './_base_/datasets/ade20k.py',
    './_base_/schedules/ade20k_160k.py',
    './_base_/segmentation_runtime.py',
]
