# `make demo`: a small VisionHOPE with light heads, from scratch on the embedded data set, sized for
# two CPU cores: RoIAlign's backward runs on one of them, so RoIs are few and small.
_base_ = [
    './_base_/models/maskrcnn_visionhope.py',
    './_base_/datasets/shapes.py',
    './_base_/default_runtime.py',
]
custom_imports = dict(
    imports=[
        'mmvisionhope',
        'mmvisionhope.models.roi_extractor',
        'mmvisionhope.models.tta',
        'mmvisionhope.datasets.shapes',
    ]
)

roi_extractor = dict(
    roi_layer=dict(sampling_ratio=2),
    out_channels=64,
    featmap_strides=[4, 8, 16, 32],
    finest_scale=16,
)
model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=[32, 64, 128, 256], depths=[1, 1, 2, 1]),
        drop_path_rate=0.0,
        # Deep training schedules grow LayerScale from 1e-6; a few hundred steps cannot.
        layer_scale_init_value=1.0,
        norm_eval=False,
    ),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=64, num_outs=4),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[4], strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=roi_extractor,
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=6),
        mask_roi_extractor=roi_extractor,
        mask_head=dict(num_convs=2, in_channels=64, conv_out_channels=64, num_classes=6),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=30)),
)

max_epochs = 12
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=6)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(logger=dict(interval=16))
auto_scale_lr = dict(enable=False, base_batch_size=8)
