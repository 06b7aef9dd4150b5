# 36 epochs of COCO at 64 images a step.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=36, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type='MultiStepLR', begin=0, end=36, by_epoch=True, milestones=[27, 33], gamma=0.1),
]
optim_wrapper = dict(
    type='GpuAmpOptimWrapper',
    optimizer=dict(type='AdamW', lr=4e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)

# lr 4e-4 is for 8 GPUs x 8 images; --auto-scale-lr multiplies it by (GPUs x batch_size) / 64.
auto_scale_lr = dict(enable=False, base_batch_size=64)
