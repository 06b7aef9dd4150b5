_base_ = './default_runtime.py'

default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmvisionhope'])
default_hooks = dict(
    logger=dict(interval=100), visualization=dict(type='VisualizationHook', enable=False)
)
visualizer = dict(type='UniversalVisualizer')

custom_hooks = [
    dict(type='EpochSeedHook'),
    # Decay 0.9998, of BatchNorm's statistics too. The average is what is tested.
    dict(type='EMAHook', momentum=2e-4, update_buffers=True),
]
