"""ImageNet through mmpretrain: the recipe, MESA, the moving average, and runs that resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS, DefaultScope, init_default_scope
from mmengine.runner import Runner

mmpretrain = pytest.importorskip('mmpretrain')
skimage = pytest.importorskip('skimage')

from mmvisionhope import MESAHook, VisionHOPE, VisionHOPENeck  # noqa: E402
from mmvisionhope.engine.checkpoint import load_checkpoint_file  # noqa: E402

ROOT = Path(__file__).parents[1]
TINY = ROOT / 'configs' / 'visionhope_t_in1k.py'
RECIPES = {
    't': ('tiny', 512, 0.2, 1.0, 256, 2e-3, 2048, 26_637_192),
    's': ('small', 512, 0.4, 1.5, 128, 1e-3, 1024, 52_883_016),
    'b': ('base', 640, 0.4, 1.5, 128, 1e-3, 1024, 91_170_648),
}


def load(name='t'):
    config = Config.fromfile(ROOT / 'configs' / f'visionhope_{name}_in1k.py')
    init_default_scope('mmpretrain')
    return config


@pytest.mark.parametrize('name', RECIPES)
def test_recipe(name):
    config = load(name)
    arch, dims, drop_path, mesa, batch, lr, base_batch, parameters = RECIPES[name]
    assert (config.model.backbone.arch, config.model.neck.in_channels) == (arch, dims)
    assert config.model.backbone.drop_path_rate == drop_path
    assert config.train_dataloader.batch_size == batch
    assert config.auto_scale_lr.base_batch_size == base_batch
    assert config.train_cfg.max_epochs == 310
    wrapper = config.optim_wrapper
    assert wrapper.optimizer == dict(type='AdamW', lr=lr, betas=(0.9, 0.999), weight_decay=0.05)
    assert (wrapper.type, wrapper.dtype) == ('GpuAmpOptimWrapper', 'bfloat16')
    assert wrapper.clip_grad == dict(max_norm=5.0)
    ema, hook = config.custom_hooks[-2:]
    assert (ema.type, ema.momentum) == ('EMAHook', 2e-4)
    assert hook == dict(type='MESAHook', begin_epoch=75, loss_weight=mesa)
    assert config.model.train_cfg.augments == [
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]
    model = MODELS.build(config.model)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(('name', 'peak'), [('t', 2e-3), ('s', 1e-3)])
def test_learning_rate_warms_up_falls_along_a_cosine_and_stays(name, peak):
    epoch = 10  # iterations
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedulers = []
    for cfg in load(name).param_scheduler:
        cls = PARAM_SCHEDULERS.get(cfg.pop('type'))
        cfg.pop('convert_to_iter_based')
        schedulers.append(cls.build_iter_from_epoch(optimizer, epoch_length=epoch, **cfg))
    rates = []
    for _ in range(310 * epoch):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert rates[0] == pytest.approx(1e-6)
    assert rates[20 * epoch] == pytest.approx(peak, rel=1e-3)
    assert max(rates) <= peak * (1 + 1e-6)
    middle = 1e-5 + (peak - 1e-5) / 2
    assert rates[160 * epoch] == pytest.approx(middle, rel=1e-2)
    # The last step of the cosine is one iteration short of its end.
    assert rates[300 * epoch :] == pytest.approx([1e-5] * 10 * epoch, rel=1e-2)


def test_imagenet_root_moves_the_data(monkeypatch):
    assert load().train_dataloader.dataset.data_root == 'data/imagenet'
    monkeypatch.setenv('IMAGENET_ROOT', '/elsewhere')
    config = load()
    assert config.train_dataloader.dataset.data_root == '/elsewhere'
    assert config.test_dataloader.dataset.data_root == '/elsewhere'


def test_evaluation_resizes_the_short_edge_to_the_crop():
    pipeline = load().test_dataloader.dataset.pipeline
    resize, crop = pipeline[1:3]
    assert (resize.scale, resize.edge, resize.interpolation) == (224, 'short', 'bicubic')
    assert crop.crop_size == 224


def test_neck_is_norm_conv_batch_norm_silu_pool():
    neck = VisionHOPENeck(8, 16).eval()
    x = torch.randn(2, 8, 3, 5)
    (y,) = neck((torch.zeros(1), x))
    weight = neck.head_pre_logits.weight[:, :, 0, 0]
    normed = torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), (8,), eps=1e-6)
    # BatchNorm of a new network only divides by sqrt(1 + eps).
    expected = (normed @ weight.T / (1 + neck.head_norm.eps) ** 0.5).sigmoid()
    expected = expected * (normed @ weight.T) / (1 + neck.head_norm.eps) ** 0.5
    # Sums of eight float32 products, then of fifteen.
    torch.testing.assert_close(y, expected.mean(dim=(1, 2)), rtol=1e-5, atol=1e-6)


# -- Optimizer groups --------------------------------------------------------------------------


def small_model():
    config = load()
    config.model.backbone.arch = dict(embed_dims=[32] * 4, depths=[1, 1, 2, 1])
    config.model.neck.update(in_channels=32, out_channels=16)
    config.model.head.update(in_channels=16, num_classes=10)
    config.model.data_preprocessor.num_classes = 10
    return MODELS.build(config.model), config


def settings(model, wrapper_cfg):
    optimizer = build_optim_wrapper(model, wrapper_cfg).optimizer
    groups = optimizer.param_groups
    by_id = {id(p): (g['lr'], g['weight_decay']) for g in groups for p in g['params']}
    assert len(by_id) == sum(len(group['params']) for group in groups)
    return {name: by_id[id(p)] for name, p in model.named_parameters() if p.requires_grad}, groups


def test_every_parameter_decays_as_the_recipe_says():
    model, config = small_model()
    found, groups = settings(model, config.optim_wrapper)
    assert len(groups) == 3
    assert {name.rpartition('.')[2] for name, (_, decay) in found.items() if decay == 0.01} == {
        'M_m_0',
        'M_k_0',
        'M_v_0',
    }
    modules = dict(model.named_modules())
    for name, (lr, decay) in found.items():
        owner, _, last = name.rpartition('.')
        matrix = isinstance(modules[owner], (torch.nn.Conv2d, torch.nn.Linear))
        assert (decay == 0.05) == (matrix and last == 'weight'), name
        assert lr == 2e-3
    for last in ('M_eta_0', 'M_alpha_0', 'd_skip', 'direction_scale', 'gamma1', 'gamma2'):
        assert found[f'backbone.stages.2.1.{"" if "gamma" in last else "operator."}'
                     f'{"srnl." if last.startswith("M_") else ""}{last}'][1] == 0  # fmt: skip
    assert found['backbone.stages.0.0.ffn.grn.gamma'][1] == 0


def test_layer_wise_rates_fall_from_head_to_stem_with_every_parameter_placed():
    model, config = small_model()
    config.optim_wrapper.paramwise_cfg.layer_decay_rate = 0.5
    found, _ = settings(model, config.optim_wrapper)
    rate = {name: 2e-3 * 0.5**power for name, power in {
        'head.fc.weight': 0,
        'neck.norm.weight': 0,
        'backbone.stages.3.0.cpe.weight': 1,
        'backbone.downsample_layers.3.proj.weight': 1,
        'backbone.stages.2.1.cpe.weight': 2,
        'backbone.stages.2.0.cpe.weight': 3,
        'backbone.downsample_layers.2.norm.weight': 3,
        'backbone.stages.1.0.operator.srnl.M_m_0': 4,
        'backbone.stages.0.0.gamma1': 5,
        'backbone.downsample_layers.0.proj.0.weight': 6,
    }.items()}  # fmt: skip
    for name, lr in rate.items():
        assert found[name][0] == pytest.approx(lr), name


def test_layers_of_output_norms_and_of_mmpretrains_own_constructor():
    backbone = VisionHOPE(dict(embed_dims=[32] * 4, depths=[1, 1, 2, 1]))
    assert backbone.get_layer_depth('out_norms.2.weight') == (4, 7)
    assert backbone.get_layer_depth('rpn_head.weight', 'backbone.') == (6, 7)
    with pytest.raises(ValueError, match='no parameter neck.weight'):
        backbone.get_layer_depth('neck.weight')
    # With one stage built: the stem, its three blocks, and what follows.
    assert VisionHOPE('tiny', out_indices=(0,)).get_layer_depth('stages.0.2.gamma1') == (3, 5)
    model, config = small_model()
    config.optim_wrapper.update(
        constructor='LearningRateDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=0.5),
    )
    found, _ = settings(model, config.optim_wrapper)
    assert found['backbone.stages.3.0.cpe.weight'][0] == pytest.approx(1e-3)


def test_custom_keys_override_and_frozen_parameters_stay_out():
    model, config = small_model()
    model.backbone.downsample_layers[0].requires_grad_(False)
    config.optim_wrapper.paramwise_cfg.custom_keys = {
        'head': dict(lr_mult=10.0),
        'head.fc.bias': dict(decay_mult=2.0),
    }
    found, _ = settings(model, config.optim_wrapper)
    assert found['head.fc.weight'] == (pytest.approx(2e-2), 0.05)
    assert found['head.fc.bias'] == (2e-3, pytest.approx(0.1))
    assert not any(name.startswith('backbone.downsample_layers.0') for name in found)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(paramwise_cfg=dict(norm_decay_mult=0.0)), 'knows memory_weight_decay.*norm_decay'),
        (dict(paramwise_cfg=dict(layer_decay_rate=0.0)), r'layer_decay_rate must be in \(0, 1\]'),
        (dict(optimizer=dict(type='AdamW', lr=1.0)), 'must have lr and weight_decay'),
    ],
)
def test_options_of_the_constructor_are_checked(change, message):
    model, config = small_model()
    with pytest.raises(ValueError, match=message):
        build_optim_wrapper(model, dict(config.optim_wrapper) | change)


def test_a_backbone_without_layers_is_named():
    model = torch.nn.Linear(2, 2)
    cfg = load().optim_wrapper
    cfg.paramwise_cfg.layer_decay_rate = 0.5
    with pytest.raises(ValueError, match='get_layer_depth, Linear has none'):
        build_optim_wrapper(model, cfg)


# -- Training on real images -------------------------------------------------------------------


@pytest.fixture(scope='module')
def faces(tmp_path_factory):
    """200 photographs of 25 x 25 pixels that scikit-image ships, half of them faces, as ImageNet
    is laid out."""
    root = tmp_path_factory.mktemp('imagenet')
    images = np.load(Path(skimage.__file__).parent / 'data' / 'lfw_subset.npy')
    for index, image in enumerate(images):
        # The first hundred are faces; every fifth of each kind validates.
        label = 'face' if index < 100 else 'other'
        folder = root / ('val' if index % 5 == 4 else 'train') / label
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f'{index}.png'), (image * 255).round().astype(np.uint8))
    return root


MESA_EPOCH = 2


def faces_config(faces, work_dir, *, name='t', epochs=4):
    """The recipe, with a network, images and a schedule as small as the data."""
    config = load(name)
    config.merge_from_dict(
        {
            'work_dir': str(work_dir),
            # mmengine keeps one visualizer per name, with the folder of its first run.
            'visualizer.name': str(work_dir),
            'default_hooks.checkpoint.max_keep_ckpts': -1,
            'model.backbone.layer_scale_init_value': 1.0,
            'model.neck.in_channels': 32,
            'model.neck.out_channels': 32,
            'model.head.in_channels': 32,
            'model.head.num_classes': 2,
            'model.data_preprocessor.num_classes': 2,
            'train_dataloader.num_workers': 0,
            'val_dataloader.num_workers': 0,
            'val_dataloader.persistent_workers': False,
            'train_dataloader.batch_size': 32,
            'train_cfg.max_epochs': epochs,
            'default_hooks.logger.interval': 1,
            'val_evaluator.topk': (1,),
        }
    )
    config.model.backbone.arch = dict(embed_dims=[32] * 4, depths=[1, 1, 1, 1])
    config.param_scheduler[0].update(begin=0, end=1, start_factor=0.1)
    config.param_scheduler[1].update(begin=1, end=epochs)
    # A few steps must leave their mark on the average.
    config.custom_hooks[-2].momentum = 0.05
    config.custom_hooks[-1].begin_epoch = MESA_EPOCH
    for loader in ('train_dataloader', 'val_dataloader'):
        dataset = config[loader].dataset
        dataset.update(data_root=str(faces), metainfo=dict(classes=['face', 'other']))
        for step in dataset.pipeline:
            for key in ('scale', 'crop_size'):
                if key in step:
                    step[key] = 32
    config.test_dataloader = config.val_dataloader
    config.test_evaluator = config.val_evaluator
    return config


def logged(work_dir):
    lines = [
        json.loads(line)
        for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if 'loss' in line], [
        line for line in lines if 'accuracy/top1' in line
    ]


@pytest.fixture(scope='module')
def unbroken(faces, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('unbroken')
    runner = Runner.from_cfg(faces_config(faces, work_dir))
    runner.train()
    return runner, work_dir


def test_mesa_starts_at_its_epoch(unbroken):
    steps, _ = logged(unbroken[1])
    assert {step['epoch'] for step in steps} == {1, 2, 3, 4}
    for step in steps:
        # The log counts epochs from one.
        assert ('loss_mesa' in step) == (step['epoch'] > MESA_EPOCH)


def test_mesa_is_the_soft_cross_entropy_to_the_average_in_eval_mode(faces, tmp_path):
    config = faces_config(faces, tmp_path)
    config.custom_hooks[-1].update(begin_epoch=0, loss_weight=1.5)
    runner = Runner.from_cfg(config)
    model = runner.model
    mesa = next(hook for hook in runner.hooks if isinstance(hook, MESAHook))
    ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    ema.before_run(runner)
    mesa.before_train(runner)
    mesa._active = True
    with torch.no_grad():
        for parameter in ema.ema_model.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.train()
    teacher = ema.ema_model.module
    batch = next(iter(runner.build_dataloader(config.train_dataloader)))
    data = model.data_preprocessor(batch, training=True)
    torch.manual_seed(1)
    scores = model.head(model.extract_feat(data['inputs']))
    torch.manual_seed(1)  # the same blocks drop out
    losses = model(**data, mode='loss')
    expected = teacher(data['inputs']).softmax(1) * scores.log_softmax(1)
    torch.testing.assert_close(losses['loss_mesa'], -1.5 * expected.sum(1).mean())
    assert not teacher.training and losses['loss_mesa'].requires_grad
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    mesa.after_train(runner)
    assert 'loss_mesa' not in model(**data, mode='loss')


def test_mesa_fits_any_classifier_of_mmpretrain(faces, tmp_path):
    config = faces_config(faces, tmp_path, epochs=1)
    config.model.backbone = dict(type='ResNet', depth=18, norm_eval=False)
    config.model.neck = dict(type='GlobalAveragePooling')
    config.model.head.in_channels = 512
    config.train_dataloader.dataset.indices = 32
    config.param_scheduler = []
    config.custom_hooks[-1].begin_epoch = 0
    Runner.from_cfg(config).train()
    steps, _ = logged(tmp_path)
    assert steps and all(np.isfinite(step['loss_mesa']) for step in steps)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(begin_epoch=-1), 'begin_epoch must be an integer from 0 on, got -1'),
        (dict(loss_weight=0), 'loss_weight must be a positive number, got 0'),
    ],
)
def test_arguments_of_mesa_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        MESAHook(**options)


def test_mesa_without_an_average_is_refused_before_training(faces, tmp_path):
    config = faces_config(faces, tmp_path)
    del config.custom_hooks[-2]
    with pytest.raises(ValueError, match='MESAHook needs one EMAHook'):
        Runner.from_cfg(config).train()


def test_the_average_is_what_is_validated_and_saved(unbroken, faces, tmp_path):
    runner, work_dir = unbroken
    ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    saved = load_checkpoint_file(str(work_dir / 'epoch_4.pth'))
    average = ema.ema_model.module.state_dict()
    assert all(torch.equal(value, average[name]) for name, value in saved['state_dict'].items())
    name = 'head.fc.weight'
    assert not torch.equal(runner.model.state_dict()[name], average[name])

    seen = {}

    def record(runner, *_, **__):
        seen.update({n: v.clone() for n, v in runner.model.state_dict().items()})

    for hook in runner.hooks:
        if isinstance(hook, MESAHook):
            hook.before_val_iter = record
    runner.val_loop.run()
    assert all(torch.equal(seen[name], value) for name, value in average.items())


def test_a_resumed_run_equals_an_unbroken_one_bitwise(unbroken, faces, tmp_path):
    """From before MESA begins to after: weights, average, its step count, optimizer and losses."""
    _, work_dir = unbroken
    config = faces_config(faces, tmp_path)
    config.load_from = str(work_dir / 'epoch_1.pth')
    config.resume = True
    Runner.from_cfg(config).train()
    whole, parts = (load_checkpoint_file(str(w / 'epoch_4.pth')) for w in (work_dir, tmp_path))
    for key in ('state_dict', 'ema_state_dict'):
        assert whole[key].keys() == parts[key].keys()
        assert all(torch.equal(value, parts[key][name]) for name, value in whole[key].items())
    assert int(parts['ema_state_dict']['steps']) == 20
    for index, state in whole['optimizer']['state'].items():
        for name, value in state.items():
            assert torch.equal(value, parts['optimizer']['state'][index][name])
    timeless = ('loss', 'loss_mesa', 'grad_norm', 'lr', 'step')
    steps, resumed = (
        [{k: line[k] for k in timeless if k in line} for line in logged(w)[0]]
        for w in (work_dir, tmp_path)
    )
    assert resumed == steps[5:]


def test_resuming_within_mesa_is_exact_too(unbroken, faces, tmp_path):
    _, work_dir = unbroken
    config = faces_config(faces, tmp_path)
    config.load_from = str(work_dir / 'epoch_3.pth')
    config.resume = True
    Runner.from_cfg(config).train()
    whole, parts = (load_checkpoint_file(str(w / 'epoch_4.pth')) for w in (work_dir, tmp_path))
    for key in ('state_dict', 'ema_state_dict'):
        assert all(torch.equal(value, parts[key][name]) for name, value in whole[key].items())


def test_it_learns_to_tell_faces(faces, tmp_path):
    config = faces_config(faces, tmp_path, epochs=10)
    config.param_scheduler = []
    config.train_dataloader.batch_size = 16
    Runner.from_cfg(config).train()
    steps, tests = logged(tmp_path)
    # The log's loss is that of the labels alone, mixed and smoothed.
    first, last = (np.mean([s['loss'] for s in part]) for part in (steps[:10], steps[-10:]))
    assert last < first - 0.02
    # 20 of 40 by chance.
    assert tests[-1]['accuracy/top1'] >= 80


def test_tools_train_and_test_a_config_of_ones_own(faces, tmp_path):
    faces_config(faces, tmp_path / 'work', epochs=2).dump(tmp_path / 'faces.py')
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}

    def run(tool, *arguments):
        command = [sys.executable, str(ROOT / 'tools' / f'{tool}.py'), 'faces.py', *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    result = run('train')
    assert result.returncode == 0, result.stderr[-3000:]
    result = run('test', 'work/epoch_2.pth')
    assert result.returncode == 0, result.stderr[-3000:]
    assert 'accuracy/top1' in result.stdout + result.stderr
    result = run('train', '--cfg-options', 'train_dataloader.dataset.data_root=nowhere')
    assert result.returncode == 2
    assert 'nowhere/train, which train_dataloader' in result.stderr
    assert 'IMAGENET_ROOT' in result.stderr


# -- The authors' ImageNet files ---------------------------------------------------------------


def released_file(shared, path, name='tiny'):
    """A file in the authors' format with random weights."""
    shapes = json.loads((shared / 'spec' / f'state_dict_{name}.json').read_text())
    weights = {
        n: torch.zeros((), dtype=torch.long) if n.endswith('tracked') else 0.02 * torch.randn(s)
        for n, s in shapes.items()
    }
    weights |= {n: w.abs() + 1 for n, w in weights.items() if n.endswith('running_var')}
    torch.save({'state_dict': weights}, path)
    return weights


def test_the_inferencer_takes_our_config_and_the_authors_file(shared, tmp_path):
    from mmpretrain import ImageClassificationInferencer

    path = tmp_path / 'visionhope_tiny.pth'
    weights = released_file(shared, path)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        inferencer = ImageClassificationInferencer(str(TINY), pretrained=str(path), device='cpu')
        (result,) = inferencer(np.full((240, 300, 3), 90, np.uint8))
    state = inferencer.model.state_dict()
    assert len(state) == len(weights)
    assert torch.equal(state['head.fc.weight'], weights['head.weight'])
    assert torch.equal(state['neck.norm.bias'], weights['norm.bias'])
    assert torch.equal(
        state['backbone.stages.3.3.ffn.fc2.bias'], weights['stages.3.3.ffn.fc2.bias']
    )
    assert result['pred_scores'].shape == (1000,) and isinstance(result['pred_class'], str)


def test_test_and_train_take_the_authors_file_for_a_classifier(shared, faces, tmp_path):
    """As checkpoint to test, and whole: a file that lacks something is refused."""
    from mmvisionhope.engine import cli

    config = faces_config(faces, tmp_path)
    config.model = load().model
    path = tmp_path / 'visionhope_tiny.pth'
    weights = released_file(shared, path)
    config.load_from = str(path)
    runner = Runner.from_cfg(config)
    cli.check_weights(runner, weights, str(path))
    runner.call_hook('before_run')
    runner.load_or_resume()
    assert torch.equal(runner.model.state_dict()['head.fc.bias'], weights['head.bias'])
    del weights['head_norm.weight']
    with pytest.raises(cli.UsageError, match='it lacks neck.head_norm.weight'):
        cli.check_weights(runner, weights, str(path))
