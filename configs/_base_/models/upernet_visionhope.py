# UPerNet with 512 channels and an FCN beside it on stage 3, as mmseg's, and VisionHOPE-T. From
# ImageNet weights:
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#                 model.backbone.init_cfg.checkpoint=visionhope_tiny.pth
norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='PaddedSegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512),
        # An image alone is tested as it is, a batch padded to its largest.
        test_cfg=dict(size_divisor=1),
    ),
    backbone=dict(
        type='VisionHOPE',
        arch='tiny',
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.2,
        norm_eval=True,
    ),
    decode_head=dict(
        type='UPerHead',
        in_channels=[64, 128, 256, 512],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=256,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    # --cfg-options model.test_cfg.mode=slide tests by windows instead, of this size and stride.
    test_cfg=dict(mode='whole', crop_size=(512, 512), stride=(341, 341)),
)
