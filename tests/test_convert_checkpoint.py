"""Weights change names and nothing else, on the way there and back."""

import hashlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmvisionhope import VisionHOPE
from mmvisionhope.engine.checkpoint import check_match, load_checkpoint_file

ROOT = Path(__file__).parents[1]
TOOL = str(ROOT / 'tools' / 'convert_checkpoint.py')
ARCH = dict(embed_dims=[16, 32, 32, 32], depths=[1, 2, 1, 1], head_dims=8)


def random_like(shapes):
    return {
        name: torch.tensor(3) if name.endswith('num_batches_tracked') else torch.randn(shape)
        for name, shape in shapes.items()
    }


def shapes_of(module):
    return {name: value.shape for name, value in module.state_dict().items()}


def imagenet(arch=ARCH):
    """Weights in the authors' format."""
    head = {
        'norm.weight': (32,), 'norm.bias': (32,),
        'head_pre_logits.weight': (24, 32, 1, 1), 'head_pre_logits.bias': (24,),
        'head_norm.weight': (24,), 'head_norm.bias': (24,),
        'head_norm.running_mean': (24,), 'head_norm.running_var': (24,),
        'head_norm.num_batches_tracked': (),
        'head.weight': (10, 24), 'head.bias': (10,),
    }  # fmt: skip
    return random_like(shapes_of(VisionHOPE(arch, out_norm=False)) | head)


@pytest.fixture
def tool(monkeypatch, capsys, tmp_path):
    """Run the tool in this process; returns the file it wrote, or what it says and its status."""

    def call(source, to, *options, target='x.pth'):
        monkeypatch.chdir(tmp_path)
        arguments = [str(source), target, '--to', to, *map(str, options)]
        monkeypatch.setattr(sys, 'argv', [TOOL, *arguments])
        try:
            runpy.run_path(TOOL, run_name='__main__')
        except SystemExit as stop:
            return capsys.readouterr().err.strip().splitlines()[-1], stop.code
        return tmp_path / capsys.readouterr().out.strip().splitlines()[-1]

    return call


def write(path, weights, **more):
    torch.save({'state_dict': weights, **more}, path)
    return path


def read(path):
    return load_checkpoint_file(str(path))['state_dict']


def assert_same(first, second):
    """Bitwise, in names and their order too."""
    assert list(first) == list(second)
    assert all(torch.equal(first[n], w) and first[n].dtype == w.dtype for n, w in second.items())


@pytest.mark.parametrize('name', ['tiny', 'small', 'base'])
def test_imagenet_weights_go_to_the_classifier_and_back(shared, tool, tmp_path, name):
    pytest.importorskip('mmpretrain')
    shapes = json.loads((shared / 'spec' / f'state_dict_{name}.json').read_text())
    source = write(tmp_path / 'theirs.pth', random_like(shapes))
    ours = tool(source, 'classifier')
    config = Config.fromfile(ROOT / 'configs' / f'visionhope_{name[0]}_in1k.py')
    init_default_scope('mmpretrain')
    model = MODELS.build(config.model)
    check_match(model, read(ours), 'ours', leftover=())
    model.load_state_dict(read(ours))
    # Through the model itself, as after training.
    back = tool(write(tmp_path / 'trained.pth', model.state_dict(), meta={}), 'released')
    assert_same(read(back), read(source))


def test_a_backbone_is_taken_out_and_completed_again(tool, tmp_path):
    source = write(tmp_path / 'theirs.pth', imagenet())
    classifier = tool(source, 'classifier')
    for origin in (source, classifier):
        backbone = tool(origin, 'backbone')
        model = VisionHOPE(ARCH, out_norm=False)
        model.load_state_dict(read(backbone))
        for head in (source, classifier):
            assert_same(read(tool(backbone, 'released', '--head', head)), read(source))
            assert_same(read(tool(backbone, 'classifier', '--head', head)), read(classifier))


def test_a_detector_and_a_segmentor_keep_their_names(tool, tmp_path):
    pytest.importorskip('mmdet')
    pytest.importorskip('mmseg')
    backbone = dict(type='VisionHOPE', arch=ARCH)
    config = Config.fromfile(ROOT / 'configs' / 'maskrcnn_visionhope_t_1x.py')
    config.model.backbone.arch = ARCH
    config.model.neck.in_channels = ARCH['embed_dims']
    init_default_scope('mmdet')
    detector = MODELS.build(config.model)
    import mmseg.models  # noqa: F401

    init_default_scope('mmseg')
    norm = dict(type='BN')
    heads = dict(channels=16, num_classes=5, norm_cfg=norm)
    segmentor = MODELS.build(
        dict(
            type='EncoderDecoder',
            backbone=backbone,
            decode_head=dict(
                type='UPerHead', in_channels=ARCH['embed_dims'], in_index=[0, 1, 2, 3], **heads
            ),
            auxiliary_head=dict(type='FCNHead', in_channels=32, in_index=2, **heads),
            test_cfg=dict(mode='whole'),
        )
    )
    for model in (detector, segmentor):
        source = write(tmp_path / 'theirs.pth', random_like(shapes_of(model)))
        model.load_state_dict(read(source))
        trained = write(tmp_path / 'epoch_1.pth', model.state_dict(), optimizer={}, meta={})
        released = tool(trained, 'released')
        assert_same(read(released), read(source))
        assert set(load_checkpoint_file(str(released))) == {'state_dict'}
        taken = VisionHOPE(ARCH)
        taken.load_state_dict(read(tool(released, 'backbone')))
        prefixed = {f'backbone.{name}': value for name, value in taken.state_dict().items()}
        assert all(torch.equal(value, read(source)[name]) for name, value in prefixed.items())
        message, status = tool(released, 'classifier')
        assert status == 2 and 'has no ImageNet head' in message


def test_files_are_named_by_their_hash_which_follows_from_the_weights(tool, tmp_path):
    source = write(tmp_path / 'theirs.pth', imagenet())
    first = tool(source, 'classifier', target='deep/er/visionhope.pth')
    digest = hashlib.sha256(first.read_bytes()).hexdigest()[:8]
    assert first.parent.name == 'er' and first.name == f'visionhope-{digest}.pth'
    second = tool(source, 'classifier', target='other.pth')
    assert re.fullmatch(r'other-[0-9a-f]{8}\.pth', second.name)
    assert second.read_bytes() == first.read_bytes()


def without(weights, *names):
    return {name: value for name, value in weights.items() if name not in names}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda w: without(w, 'stages.1.1.cpe.bias'), 'it lacks stages.1.1.cpe.bias'),
        (lambda w: without(w, 'head_norm.bias'), 'it lacks head_norm.bias'),
        (lambda w: without(w, 'head.weight'), 'it lacks head.weight'),
        (lambda w: without(w, 'stages.2.0.gamma1'), 'it lacks'),
        (lambda w: w | {'stem.weight': torch.ones(1)}, 'which has no stem.weight'),
        (lambda w: w | {'norm.weight': torch.ones(3)}, 'norm.weight'),
        (lambda w: {'a.b': torch.ones(1)}, 'holds no VisionHOPE: its names begin like a.b'),
    ],
)
def test_what_is_not_whole_is_refused(tool, tmp_path, change, message):
    source = write(tmp_path / 'theirs.pth', change(imagenet()))
    said, status = tool(source, 'classifier')
    assert status == 2 and message in said
    assert not list(tmp_path.glob('x-*.pth'))


def test_other_mistakes_are_one_sentence(tool, tmp_path):
    source = write(tmp_path / 'theirs.pth', imagenet())
    assert tool('none.pth', 'classifier') == (
        'convert_checkpoint.py: error: checkpoint none.pth does not exist', 2,
    )  # fmt: skip
    assert 'must end with .pth' in tool(source, 'classifier', target='x.pt')[0]
    backbone = tool(source, 'backbone')
    assert '--head takes the head of another file' in tool(backbone, 'classifier')[0]
    assert '--head takes a file with' in tool(backbone, 'classifier', '--head', backbone)[0]
    assert '--head takes a file with' in tool(source, 'classifier', '--head', source)[0]
    torch.save(torch.nn.Linear(1, 1), tmp_path / 'hostile.pth')
    assert 'cannot be read as plain weights' in tool('hostile.pth', 'classifier')[0]
