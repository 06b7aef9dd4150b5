# COCO instances with the multi-scale training of DETR and Swin. COCO_ROOT moves the data.
dataset_type = 'CocoDataset'
data_root = '{{$COCO_ROOT:data/coco}}'
backend_args = None

multi_scale = dict(
    type='RandomChoiceResize',
    scales=[(side, 1333) for side in range(480, 801, 32)],
    keep_ratio=True,
)
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args=backend_args),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [multi_scale],
            [
                dict(
                    type='RandomChoiceResize',
                    scales=[(400, 1333), (500, 1333), (600, 1333)],
                    keep_ratio=True,
                ),
                dict(
                    type='RandomCrop',
                    crop_type='absolute_range',
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                multi_scale,
            ],
        ],
    ),
    dict(type='PackDetInputs'),
]
meta_keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
test_pipeline = [
    dict(type='LoadImageFromFile', backend_args=backend_args),
    dict(type='Resize', scale=(1333, 800), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=meta_keys),
]

train_dataloader = dict(
    batch_size=8,
    num_workers=4,
    # Workers that start anew with each epoch, seeded by EpochSeedHook.
    persistent_workers=False,
    worker_init_fn=dict(type='seed_worker_from_torch'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='AspectRatioBatchSampler'),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=train_pipeline,
        backend_args=backend_args,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file='annotations/instances_val2017.json',
        data_prefix=dict(img='val2017/'),
        test_mode=True,
        pipeline=test_pipeline,
        backend_args=backend_args,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(
    type='CocoMetric',
    ann_file=data_root + '/annotations/instances_val2017.json',
    metric=['bbox', 'segm'],
    backend_args=backend_args,
)
test_evaluator = val_evaluator

tta_model = dict(
    type='InstanceTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)
)
tta_pipeline = [
    dict(type='LoadImageFromFile', backend_args=backend_args),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale=(1333, side), keep_ratio=True) for side in (640, 800, 960)],
            [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)],
            [dict(type='LoadAnnotations', with_bbox=True, with_mask=True)],
            [dict(type='PackDetInputs', meta_keys=(*meta_keys, 'flip', 'flip_direction'))],
        ],
    ),
]
