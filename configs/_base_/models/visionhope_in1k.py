# VisionHOPE-T with the head of the released ImageNet models. To test their weights, give
# tools/test.py the file as it is.
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        num_classes=1000,
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    backbone=dict(
        type='VisionHOPE',
        arch='tiny',
        out_indices=(3,),
        drop_path_rate=0.2,
        # The neck has the norm of an ImageNet model.
        out_norm=False,
    ),
    neck=dict(type='VisionHOPENeck', in_channels=512, out_channels=1024),
    head=dict(
        type='LinearClsHead',
        in_channels=1024,
        num_classes=1000,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
