# What default_runtime.py has, for mmseg and for training that counts iterations.
_base_ = './default_runtime.py'

default_scope = 'mmseg'
custom_imports = dict(
    imports=['mmvisionhope', 'mmvisionhope.models.seg_preprocessor'], allow_failed_imports=False
)
default_hooks = dict(
    logger=dict(log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=16000),
    visualization=dict(type='SegVisualizationHook'),
)
visualizer = dict(type='SegLocalVisualizer')
log_processor = dict(by_epoch=False)
