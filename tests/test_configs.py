"""Every config parses, builds and takes a step; the recipes are the paper's."""

import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS, init_default_scope

from mmvisionhope import VisionHOPE

CONFIGS = Path(__file__).parents[1] / 'configs'
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
COCO = {
    'maskrcnn_visionhope_t_1x': ('tiny', 0.2, 12, [8, 11], False),
    'maskrcnn_visionhope_s_1x': ('small', 0.3, 12, [8, 11], False),
    'maskrcnn_visionhope_b_1x': ('base', 0.3, 12, [8, 11], True),
    'maskrcnn_visionhope_t_3x': ('tiny', 0.2, 36, [27, 33], False),
    'maskrcnn_visionhope_s_3x': ('small', 0.4, 36, [27, 33], False),
}
ADE20K = {
    'upernet_visionhope_t_160k': ('tiny', 0.2),
    'upernet_visionhope_s_160k': ('small', 0.4),
    'upernet_visionhope_b_160k': ('base', 0.4),
}


def load(name):
    """The config of a name, with its toolbox as the default scope."""
    config = Config.fromfile(CONFIGS / f'{name}.py')
    pytest.importorskip(config.default_scope)
    init_default_scope(config.default_scope)
    return config


def detections(model):
    """Two images for a detector that has as many RoIs as a test needs."""
    from mmdet.testing import demo_mm_inputs

    model.train_cfg.rpn_proposal.max_per_img = 50
    model.train_cfg.rcnn.sampler.num = 16
    classes = model.roi_head.bbox_head.num_classes
    return demo_mm_inputs(
        2, [[3, 96, 128], [3, 128, 96]], num_items=[2, 1], num_classes=classes, with_mask=True
    )


def segmentations(model):
    """Two images, padded to 96 x 64 for this segmentor."""
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    model.data_preprocessor.size = (96, 64)
    sizes = [(96, 48), (64, 64)]
    return dict(
        inputs=[torch.randint(256, (3, *size), dtype=torch.uint8) for size in sizes],
        data_samples=[
            SegDataSample(
                gt_sem_seg=PixelData(data=torch.randint(model.decode_head.num_classes, (1, *size)))
            )
            for size in sizes
        ],
    )


def classifications(model):
    """Two images of 64 x 64 for a classifier."""
    from mmpretrain.structures import DataSample

    classes = model.head.num_classes
    return dict(
        inputs=torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8),
        data_samples=[DataSample().set_gt_label(i % classes) for i in range(2)],
    )


BATCHES = dict(mmdet=detections, mmseg=segmentations, mmpretrain=classifications)


@pytest.mark.parametrize('name', NAMES)
def test_builds_and_takes_a_step(name):
    config = load(name)
    backbone = config.model.backbone
    # As deep as the architecture is, a step is the same with one block per stage.
    if backbone.type == 'VisionHOPE' and isinstance(backbone.arch, str):
        backbone.arch = dict(VisionHOPE.arch_settings[backbone.arch], depths=[1, 1, 1, 1])
    batch = BATCHES[config.default_scope](config.model)
    # As mmengine's runner does on a CPU.
    model = revert_sync_batchnorm(MODELS.build(config.model))
    model.init_weights()
    model.train()
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
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


@pytest.mark.parametrize(
    ('name', 'decay', 'biases'),
    [('maskrcnn_visionhope_t_1x', 0.05, 0), ('upernet_visionhope_t_160k', 0.01, 0.01)],
)
def test_norms_do_not_decay_nor_do_biases_of_detectors(name, decay, biases):
    config = load(name)
    backbone = MODELS.build(
        config.model.backbone | dict(arch=dict(embed_dims=[32] * 4, depths=[1] * 4))
    )
    optimizer = build_optim_wrapper(backbone, config.optim_wrapper).optimizer
    actual = {
        id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']
    }
    for name, parameter in backbone.named_parameters():
        norm = 'norm' in name or re.search(r'\.proj\.(1|4|7|10)\.', name)  # the last: of the stem
        expected = 0 if norm else biases if name.endswith('.bias') else decay
        assert actual[id(parameter)] == expected, name


@pytest.mark.parametrize('name', ADE20K)
def test_ade20k_recipe(name):
    config = load(name)
    arch, drop_path = ADE20K[name]
    backbone = config.model.backbone
    assert (backbone.arch, backbone.drop_path_rate, backbone.norm_eval) == (arch, drop_path, True)
    assert config.train_cfg.max_iters == 160_000
    warmup, poly = config.param_scheduler
    assert (warmup.start_factor, warmup.begin, warmup.end) == (1e-6, 0, 1500)
    assert (poly.power, poly.eta_min, poly.begin, poly.end) == (1.0, 0.0, 1500, 160_000)
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 6e-5, 0.01)
    assert config.optim_wrapper.type == 'OptimWrapper'
    assert config.auto_scale_lr.base_batch_size == 8 * config.train_dataloader.batch_size == 16
    head, auxiliary = config.model.decode_head, config.model.auxiliary_head
    assert (head.channels, auxiliary.in_index, auxiliary.loss_decode.loss_weight) == (512, 2, 0.4)
    assert auxiliary.in_channels == head.in_channels[2]
    assert config.model.test_cfg.mode == 'whole'
    assert config.test_dataloader.dataset.pipeline[1].scale == (2048, 512)


@pytest.mark.parametrize(
    ('name', 'variable', 'default'),
    [
        ('maskrcnn_visionhope_t_1x', 'COCO_ROOT', 'data/coco'),
        ('upernet_visionhope_t_160k', 'ADE20K_ROOT', 'data/ade/ADEChallengeData2016'),
    ],
)
def test_an_environment_variable_moves_the_data(name, variable, default, monkeypatch):
    assert load(name).train_dataloader.dataset.data_root == default
    monkeypatch.setenv(variable, '/elsewhere')
    config = load(name)
    for loader in ('train', 'val', 'test'):
        assert config[f'{loader}_dataloader'].dataset.data_root == '/elsewhere'
    if 'ann_file' in config.test_evaluator:
        assert config.test_evaluator.ann_file == '/elsewhere/annotations/instances_val2017.json'


def test_multi_scale_pipelines_run_on_real_images(shared):
    config = load('maskrcnn_visionhope_t_1x')
    root = dict(data_root=str(shared / 'data' / 'tiny_coco'))
    import mmdet.datasets  # noqa: F401

    train = DATASETS.build(config.train_dataloader.dataset | root)
    sides = {min(train[i % len(train)]['inputs'].shape[1:]) for i in range(12)}
    assert len(sides) > 3 and all(side <= 800 for side in sides)
    sample = DATASETS.build(config.test_dataloader.dataset | root)[0]
    assert max(sample['inputs'].shape[1:]) <= 1333 and min(sample['inputs'].shape[1:]) <= 800
