_base_ = [
    './_base_/models/visionhope_in1k.py',
    './_base_/datasets/imagenet.py',
    './_base_/schedules/imagenet_310e.py',
    './_base_/imagenet_runtime.py',
]

# 2048 images a step: 8 GPUs x 256. The warm-up starts from 1e-6.
train_dataloader = dict(batch_size=256)
optim_wrapper = dict(optimizer=dict(lr=2e-3))
param_scheduler = [dict(_base_.param_scheduler[0], start_factor=5e-4), _base_.param_scheduler[1]]
auto_scale_lr = dict(base_batch_size=2048)
custom_hooks = [*_base_.custom_hooks, dict(type='MESAHook', begin_epoch=75, loss_weight=1.0)]
