_base_ = [
    './_base_/models/maskrcnn_visionhope.py',
    './_base_/datasets/coco_instance_ms.py',
    './_base_/schedules/coco_3x.py',
    './_base_/default_runtime.py',
]
