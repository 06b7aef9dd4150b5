# The recipe of maskrcnn_visionhope_shapes.py with a ResNet of like size, for comparison.
_base_ = './maskrcnn_visionhope_shapes.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='ResNet',
        depth=18,
        base_channels=32,
        stem_channels=32,
        norm_cfg=dict(type='BN', requires_grad=True),
        norm_eval=False,
    )
)
