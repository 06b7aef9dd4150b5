# 300 epochs of ImageNet at 1024 images a step.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=300, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

param_scheduler = [
    # From 1e-6.
    dict(
        type='LinearLR',
        start_factor=1e-3,
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
optim_wrapper = dict(
    type='GpuAmpOptimWrapper',
    dtype='bfloat16',
    # bfloat16 has the range of float32.
    loss_scale=1.0,
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
    constructor='VisionHOPEOptimWrapperConstructor',
    paramwise_cfg=dict(memory_weight_decay=0.01),
    clip_grad=dict(max_norm=5.0),
)

# lr 1e-3 is for 8 GPUs x 128 images; --auto-scale-lr multiplies it by (GPUs x batch_size) / 1024.
auto_scale_lr = dict(enable=False, base_batch_size=1024)
