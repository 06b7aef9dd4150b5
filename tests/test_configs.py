"""Every config parses, builds and takes a step; the recipes are the paper's."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, init_default_scope

pytest.importorskip('mmdet')

from mmdet.registry import MODELS  # noqa: E402
from mmdet.testing import demo_mm_inputs  # noqa: E402

CONFIGS = Path(__file__).parents[1] / 'configs'
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
COCO = {
    'maskrcnn_visionhope_t_1x': ('tiny', 0.2, 12, [8, 11], False),
    'maskrcnn_visionhope_s_1x': ('small', 0.3, 12, [8, 11], False),
    'maskrcnn_visionhope_b_1x': ('base', 0.3, 12, [8, 11], True),
    'maskrcnn_visionhope_t_3x': ('tiny', 0.2, 36, [27, 33], False),
    'maskrcnn_visionhope_s_3x': ('small', 0.4, 36, [27, 33], False),
}


def load(name):
    return Config.fromfile(CONFIGS / f'{name}.py')


@pytest.mark.parametrize('name', NAMES)
def test_builds_and_takes_a_step(name):
    config = load(name)
    init_default_scope(config.default_scope)
    # As deep as the architecture is, a step is the same with one block per stage.
    if config.model.backbone.get('arch') in ('tiny', 'small', 'base'):
        widths = config.model.neck.in_channels
        config.model.backbone.arch = dict(embed_dims=widths, depths=[1, 1, 1, 1])
    # As many RoIs as a test needs.
    config.model.train_cfg.rpn_proposal.max_per_img = 50
    config.model.train_cfg.rcnn.sampler.num = 16
    model = MODELS.build(config.model)
    model.init_weights()
    model.train()
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    classes = config.model.roi_head.bbox_head.num_classes
    batch = demo_mm_inputs(
        2, [[3, 96, 128], [3, 128, 96]], num_items=[2, 1], num_classes=classes, with_mask=True
    )
    before = [p.detach().clone() for p in model.backbone.parameters()]
    logs = model.train_step(batch, wrapper)
    assert all(torch.isfinite(value).all() for value in logs.values())
    assert any(
        not torch.equal(p, b) for p, b in zip(model.backbone.parameters(), before, strict=True)
    )


@pytest.mark.parametrize('name', COCO)
def test_coco_recipe(name):
    config = load(name)
    arch, drop_path, epochs, milestones, with_cp = COCO[name]
    backbone = config.model.backbone
    assert (backbone.arch, backbone.drop_path_rate) == (arch, drop_path)
    assert backbone.norm_eval and backbone.get('with_cp', False) == with_cp
    assert config.train_cfg.max_epochs == epochs
    warmup, steps = config.param_scheduler
    assert (warmup.start_factor, warmup.end, warmup.by_epoch) == (1e-3, 1000, False)
    assert (steps.milestones, steps.gamma) == (milestones, 0.1)
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 4e-4, 0.05)
    assert config.optim_wrapper.type == 'GpuAmpOptimWrapper'
    assert config.auto_scale_lr.base_batch_size == 64
    assert config.model.neck.out_channels == 256
    for extractor in ('bbox_roi_extractor', 'mask_roi_extractor'):
        assert config.model.roi_head[extractor].type == 'Float32RoIExtractor'


def test_norms_and_biases_do_not_decay():
    config = load('maskrcnn_visionhope_t_1x')
    init_default_scope('mmdet')
    backbone = MODELS.build(
        config.model.backbone | dict(arch=dict(embed_dims=[32] * 4, depths=[1] * 4))
    )
    optimizer = build_optim_wrapper(backbone, config.optim_wrapper).optimizer
    decay = {
        id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']
    }
    for name, parameter in backbone.named_parameters():
        free = 'norm' in name or name.endswith('.bias') or '.proj.1.' in name or '.proj.4.' in name
        free = free or '.proj.7.' in name or '.proj.10.' in name  # the stem's BatchNorms
        assert decay[id(parameter)] == (0 if free else 0.05), name


def test_coco_root_moves_the_data(monkeypatch):
    assert load('maskrcnn_visionhope_t_1x').train_dataloader.dataset.data_root == 'data/coco'
    monkeypatch.setenv('COCO_ROOT', '/elsewhere')
    config = load('maskrcnn_visionhope_t_1x')
    assert config.test_dataloader.dataset.data_root == '/elsewhere'
    assert config.test_evaluator.ann_file == '/elsewhere/annotations/instances_val2017.json'


def test_multi_scale_pipelines_run_on_real_images(shared):
    config = load('maskrcnn_visionhope_t_1x')
    init_default_scope('mmdet')
    root = dict(data_root=str(shared / 'data' / 'tiny_coco'))
    import mmdet.datasets  # noqa: F401

    train = DATASETS.build(config.train_dataloader.dataset | root)
    sides = {min(train[i % len(train)]['inputs'].shape[1:]) for i in range(12)}
    assert len(sides) > 3 and all(side <= 800 for side in sides)
    sample = DATASETS.build(config.test_dataloader.dataset | root)[0]
    assert max(sample['inputs'].shape[1:]) <= 1333 and min(sample['inputs'].shape[1:]) <= 800
