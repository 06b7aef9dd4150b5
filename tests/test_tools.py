"""The commands users type: train, resume, test, and what they say to mistakes."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import mmcv
import mmengine
import pytest
import torch
from mmengine.structures import InstanceData

mmdet = pytest.importorskip('mmdet')

from mmvisionhope.datasets.draw_shapes import generate_shapes  # noqa: E402
from mmvisionhope.engine.checkpoint import load_checkpoint_file  # noqa: E402

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / 'configs' / 'maskrcnn_visionhope_shapes.py'
COCO = ROOT / 'configs' / 'maskrcnn_visionhope_t_1x.py'
MMDET_TRAIN = Path(mmdet.__file__).parent / '.mim' / 'tools' / 'train.py'

# Two steps an epoch, on a few images; stochastic depth so that random numbers matter.
QUICK = [
    'train_dataloader.dataset.indices=4',
    'train_dataloader.batch_size=2',
    'val_dataloader.dataset.indices=4',
    'test_dataloader.dataset.indices=4',
    'model.backbone.drop_path_rate=0.5',
    'default_hooks.logger.interval=1',
    'train_cfg.max_epochs=2',
    'train_cfg.val_interval=2',
]


def python(*arguments, cwd, **environment):
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def train(
    work_dir, *arguments, options=(), config=SHAPES, script=ROOT / 'tools' / 'train.py', **env
):
    result = python(
        script, config, '--work-dir', work_dir, *arguments, '--cfg-options', *QUICK, *options,
        cwd=work_dir.parent, **env,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def scalars(work_dir):
    """The logged losses of the training steps, by step."""
    lines = [
        json.loads(line)
        for path in sorted(work_dir.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    return {line['step']: line['grad_norm'] for line in lines if 'grad_norm' in line}


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp('cache')
    generate_shapes(folder / 'shapes-v1', train=4, val=4)
    os.environ['MMVISIONHOPE_CACHE'] = str(folder)
    yield folder
    del os.environ['MMVISIONHOPE_CACHE']


@pytest.fixture(scope='module')
def unbroken(cache, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('unbroken') / 'work'
    return work_dir, train(work_dir, '--amp')


def test_train_saves_evaluates_and_says_once_that_a_cpu_has_no_amp(unbroken):
    work_dir, output = unbroken
    assert {'epoch_1.pth', 'epoch_2.pth', 'last_checkpoint'} <= {p.name for p in work_dir.iterdir()}
    assert 'coco/bbox_mAP' in output and 'coco/segm_mAP' in output
    if not torch.cuda.is_available():
        assert output.count('training in float32') == 1


def test_a_resumed_run_equals_an_unbroken_one(unbroken, tmp_path):
    work_dir, _ = unbroken
    resumed = tmp_path / 'work'
    resumed.mkdir()
    for name in ('epoch_1.pth', 'last_checkpoint'):
        (resumed / name).write_bytes((work_dir / name).read_bytes())
    (resumed / 'last_checkpoint').write_text(str(resumed / 'epoch_1.pth'))
    assert 'resumed epoch: 1' in train(resumed, '--resume', '--amp')
    assert scalars(resumed) == {k: v for k, v in scalars(work_dir).items() if k > 2}
    whole, parts = (load_checkpoint_file(str(w / 'epoch_2.pth')) for w in (work_dir, resumed))
    assert all(torch.equal(v, parts['state_dict'][k]) for k, v in whole['state_dict'].items())


def test_mmdets_own_train_script_takes_our_configs(cache, tmp_path):
    train(tmp_path / 'work', options=['train_cfg.max_epochs=1'], script=MMDET_TRAIN)
    assert (tmp_path / 'work' / 'epoch_1.pth').is_file()


def test_test_reports_dumps_and_draws_from_any_directory(unbroken, tmp_path):
    work_dir, _ = unbroken
    relative = os.path.relpath(work_dir / 'epoch_2.pth', tmp_path)
    result = python(
        ROOT / 'tools' / 'test.py', SHAPES, relative, '--out', 'results.pkl', '--show-dir', 'drawn',
        '--cfg-options', 'test_dataloader.dataset.indices=2',
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert 'coco/segm_mAP' in result.stdout + result.stderr
    assert len(mmengine.load(tmp_path / 'results.pkl')) == 2
    assert len(list(tmp_path.glob('work_dirs/*/*/drawn/*.png'))) == 2


def test_two_processes_train_and_test_together(cache, tmp_path):
    """gloo, no unused parameters, one set of checkpoints."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PORT': str(port)}
    environment['PATH'] = f'{Path(sys.executable).parent}{os.pathsep}{environment["PATH"]}'
    work_dir = tmp_path / 'work'
    for command in (
        ['dist_train.sh', SHAPES, 2, '--work-dir', work_dir, '--cfg-options', *QUICK],
        ['dist_test.sh', SHAPES, work_dir / 'epoch_2.pth', 2, '--work-dir', work_dir],
    ):
        result = subprocess.run(
            ['bash', str(ROOT / 'tools' / command[0]), *map(str, command[1:])],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
        assert 'coco/bbox_mAP' in result.stdout + result.stderr


def test_real_images_train_and_test_with_augmentation(shared, tmp_path):
    """VisionHOPE-T and the multi-scale pipeline on COCO images shrunk to what a CPU bears."""
    pipeline = 'train_dataloader.dataset.pipeline.3.transforms'
    small = [
        f'{pipeline}.0.0.scales=[(128,96),(96,64)]',
        f'{pipeline}.1.0.scales=[(128,96)]',
        f'{pipeline}.1.1.crop_size=(48,64)',
        f'{pipeline}.1.2.scales=[(128,96)]',
        'model.train_cfg.rpn_proposal.max_per_img=50',
        'model.train_cfg.rcnn.sampler.num=16',
        # Validation follows the last epoch whatever its interval.
        'val_dataloader.dataset.pipeline.1.scale=(128,96)',
        'train_cfg.max_epochs=1',
    ]
    root = str(shared / 'data' / 'tiny_coco')
    train(tmp_path / 'work', options=small, config=COCO, COCO_ROOT=root)
    result = python(
        ROOT / 'tools' / 'test.py', COCO, tmp_path / 'work' / 'epoch_1.pth', '--tta',
        '--cfg-options', 'test_dataloader.dataset.indices=1', 'model.test_cfg.rcnn.score_thr=0',
        'model.test_cfg.rpn.max_per_img=20',
        *(f'tta_pipeline.1.transforms.0.{i}.scale=(128,{s})' for i, s in enumerate([64, 80, 96])),
        cwd=tmp_path, COCO_ROOT=root,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert 'coco/segm_mAP' in result.stdout + result.stderr


@pytest.fixture
def tool(monkeypatch, capsys, tmp_path):
    """Run a tool in this process and return the sentence it ends with."""

    def call(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / 'tools' / f'{name}.py'), run_name='__main__')
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert 'Traceback' not in message
        return message.strip().splitlines()[-1]

    return call


def test_mistakes_end_with_one_sentence(tool, cache, unbroken, tmp_path, monkeypatch):
    monkeypatch.setenv('COCO_ROOT', str(tmp_path / 'nowhere'))
    checkpoint = unbroken[0] / 'epoch_2.pth'
    assert 'config x.py does not exist' in tool('train', 'x.py')
    assert 'README.md cannot be read' in tool('train', ROOT / 'README.md')
    assert 'takes key=value pairs, got a.b' in tool('train', SHAPES, '--cfg-options', 'a.b')
    assert 'for torchrun to start' in tool('train', SHAPES, '--launcher', 'pytorch')
    message = tool('train', COCO)
    assert 'nowhere/annotations/instances_train2017.json' in message and 'COCO_ROOT' in message
    assert 'does not exist' in tool('train', SHAPES, '--resume', 'x.pth')
    assert '--cfg-options does not fit' in tool(
        'train', SHAPES, '--cfg-options', 'model.backbone.type.x=1'
    )
    assert 'checkpoint x.pth does not exist' in tool('test', SHAPES, 'x.pth')
    assert '--out must end with .pkl' in tool('test', SHAPES, checkpoint, '--out', 'x.json')
    assert '--tta needs tta_model and tta_pipeline' in tool('test', SHAPES, checkpoint, '--tta')

    torch.save({'state_dict': {'a.weight': torch.zeros(1)}}, tmp_path / 'other.pth')
    nothing = 'other.pth has nothing for MaskRCNN'
    assert nothing in tool('test', SHAPES, tmp_path / 'other.pth')
    # As a start of training too, where mmengine only warns.
    assert nothing in tool('train', SHAPES, '--cfg-options', 'load_from=other.pth')
    assert 'no state of a run to resume' in tool('train', SHAPES, '--resume', 'other.pth')
    weights = load_checkpoint_file(str(checkpoint))['state_dict']
    weights['backbone.stages.0.0.cpe.weight'] = torch.zeros(1, 2)
    torch.save({'state_dict': weights}, tmp_path / 'arch.pth')
    assert 'is of another architecture' in tool('test', SHAPES, tmp_path / 'arch.pth')

    # The latest of a work dir is checked as one that is named.
    work = tmp_path / 'work'
    work.mkdir()
    (work / 'last_checkpoint').write_text(str(work / 'epoch_1.pth'))
    resume = ('train', SHAPES, '--work-dir', work, '--resume')
    assert 'epoch_1.pth does not exist' in tool(*resume)
    for size in (20000, 100):
        (work / 'epoch_1.pth').write_bytes(checkpoint.read_bytes()[:size])
        assert 'epoch_1.pth cannot be read' in tool(*resume)
    (work / 'last_checkpoint').write_text(str(checkpoint))
    other = tool(*resume, '--cfg-options', 'model.backbone.arch.depths=[1,1,2,2]')
    assert 'is of another architecture' in other


def test_annotations_of_the_evaluator_are_looked_for_too(tool, shared):
    options = [
        f'{loader}_dataloader.dataset.data_root={shared / "data" / "tiny_coco"}'
        for loader in ('train', 'val')
    ]
    message = tool('train', COCO, '--cfg-options', *options)
    assert 'val_evaluator.ann_file=...' in message


def test_training_may_start_from_weights_that_fit_in_part(unbroken, tmp_path):
    options = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=9']
    options += [f'load_from={unbroken[0] / "epoch_2.pth"}']
    options += ['model.roi_head.bbox_head.fc_out_channels=64']
    train(tmp_path / 'work', options=options)
    assert (tmp_path / 'work' / 'epoch_1.pth').is_file()


def test_demo_trains_tests_and_draws(cache, tmp_path):
    result = python(
        ROOT / 'tools' / 'demo.py', '--work-dir', 'work', '--cfg-options', *QUICK,
        'test_dataloader.dataset.indices=4', cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert 'box AP50 0.' in result.stdout and 'mask AP50 0.' in result.stdout
    # Two rows of four images, each 3 x 128 pixels and 2 x 3 of border.
    assert mmcv.imread(str(tmp_path / 'work' / 'detections.png')).shape == (780, 1560, 3)


def test_demo_draws_the_surest_detection_last():
    enlarge = runpy.run_path(str(ROOT / 'tools' / 'demo.py'))['enlarge']
    masks = torch.zeros(2, 4, 4, dtype=torch.bool)
    masks[0, :2] = True
    found = enlarge(
        InstanceData(
            bboxes=torch.tensor([[0.0, 0.0, 4.0, 2.0], [1.0, 1.0, 2.0, 2.0]]),
            labels=torch.tensor([5, 2]),
            scores=torch.tensor([0.9, 0.6]),
            masks=masks,
        )
    )
    assert found.labels.tolist() == [2, 5] and found.bboxes[1].tolist() == [0, 0, 12, 6]
    assert found.masks.shape == (2, 12, 12) and not found.masks[0].any()
    assert found.masks[1, :6].all() and not found.masks[1, 6:].any()


def test_auto_scale_lr_scales(cache, tmp_path):
    output = train(
        tmp_path / 'work',
        '--auto-scale-lr',
        options=['train_cfg.max_epochs=1', 'train_cfg.val_interval=9'],
    )
    # Two images a step instead of eight.
    assert 'Scaling the original LR by 0.25' in output
