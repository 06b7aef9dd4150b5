"""Pretrained weights: read without unpickling, matched strictly, refused in one sentence."""

import pickle

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MMLogger
from mmengine.model import PretrainedInit
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import CheckpointLoader

from mmvisionhope import VisionHOPE
from mmvisionhope.engine.checkpoint import check_match, load_checkpoint_file, register_safe_loader

ARCH = dict(embed_dims=[16, 32, 32, 32], depths=[1, 2, 1, 1], head_dims=8)


@pytest.fixture
def released(tmp_path):
    """A file like the authors': an ImageNet model's weights and nothing else."""
    source = VisionHOPE(ARCH, out_norm=False)
    weights = {name: torch.randn_like(v.float()) for name, v in source.state_dict().items()}
    head = {'norm.weight': torch.ones(32), 'head.weight': torch.ones(10, 32)}
    path = tmp_path / 'visionhope_test.pth'
    torch.save({'state_dict': {**weights, **head}}, path)
    return path, weights


def pretrained(path, arch=ARCH, prefix=None, **options):
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix=prefix)
    model = VisionHOPE(arch, init_cfg=init_cfg, **options)
    model.init_weights()
    return model


def test_imagenet_weights_fill_the_backbone_and_leave_output_norms(released):
    path, weights = released
    state = pretrained(path).state_dict()
    assert all(torch.equal(state[name], value.to(state[name])) for name, value in weights.items())
    assert (state['out_norms.0.weight'] == 1).all()


def test_head_and_output_norms_are_reported_and_anything_else_is_an_error(released, caplog):
    path, weights = released
    with caplog.at_level('INFO', logger='mmengine'):
        logger = MMLogger.get_instance('weights', log_level='INFO')
        logger.propagate = True
        with caplog.at_level('INFO', logger='weights'):
            logger.addHandler(caplog.handler)
            pretrained(path)
    assert 'not used by VisionHOPE: head.weight, norm.weight' in caplog.text
    assert 'stays as initialised: out_norms.0.bias' in caplog.text
    torch.save({'state_dict': weights | {'stages.0.0.extra': torch.ones(1)}}, path)
    with pytest.raises(ValueError, match='has no stages.0.0.extra'):
        pretrained(path)


def test_a_backbone_with_fewer_stages_takes_what_it_has(released):
    path, weights = released
    state = pretrained(path, out_indices=(0,)).state_dict()
    assert torch.equal(state['stages.0.0.cpe.weight'], weights['stages.0.0.cpe.weight'])


def test_frozen_stages_are_loaded_too(released):
    path, weights = released
    model = pretrained(path, frozen_stages=0)
    assert torch.equal(model.stages[0][0].cpe.weight, weights['stages.0.0.cpe.weight'])
    assert not model.stages[0][0].cpe.weight.requires_grad


@pytest.mark.parametrize('type_', ['mmengine.Pretrained', PretrainedInit])
def test_other_names_of_pretrained_are_as_strict(released, type_):
    init_cfg = dict(type=type_, checkpoint=str(released[0]))
    with pytest.raises(ValueError, match='another architecture'):
        VisionHOPE('tiny', init_cfg=init_cfg).init_weights()


@pytest.mark.parametrize('prefix', ['backbone', 'backbone.'])
def test_a_prefix_takes_the_backbone_out_of_a_detector(released, tmp_path, prefix):
    _, weights = released
    detector = tmp_path / 'detector.pth'
    torch.save(
        {f'backbone.{name}': v for name, v in weights.items()} | {'neck.w': torch.ones(1)}, detector
    )
    state = pretrained(detector, prefix=prefix).state_dict()
    assert torch.equal(state['stages.1.1.cpe.weight'], weights['stages.1.1.cpe.weight'])
    with pytest.raises(ValueError, match="begin like backbone.*: set prefix='backbone.'"):
        pretrained(detector)


@pytest.mark.parametrize(
    ('arch', 'prefix', 'message'),
    [
        (dict(ARCH, embed_dims=[16, 48, 32, 32]), None, 'another architecture.*instead of'),
        (dict(ARCH, depths=[1, 3, 1, 1]), None, 'another architecture.*it lacks stages.1.2'),
        (dict(ARCH, depths=[1, 1, 1, 1]), None, 'another architecture.*has no stages.1.1'),
        (ARCH, 'encoder', "no weights of VisionHOPE under prefix 'encoder.'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(released, arch, prefix, message):
    with pytest.raises(ValueError, match=message):
        pretrained(released[0], arch, prefix)


def test_the_hint_at_the_end_of_a_detector_build(released):
    """The way users meet it: a registry build inside another model."""
    cfg = dict(
        type='VisionHOPE',
        arch='tiny',
        init_cfg=dict(type='Pretrained', checkpoint=str(released[0])),
    )
    with pytest.raises(ValueError, match='another architecture'):
        MODELS.build(cfg).init_weights()


@pytest.mark.parametrize(
    ('init_cfg', 'message'),
    [
        ('x.pth', "init_cfg must be a dict or a list of them, got 'x.pth'"),
        (dict(type='Pretrained'), 'init_cfg of type Pretrained needs a checkpoint'),
        (dict(type='Pretrained', checkpoint=None), 'needs a checkpoint'),
    ],
)
def test_init_cfg_that_names_no_file_is_refused(init_cfg, message):
    with pytest.raises(ValueError, match=message):
        VisionHOPE(ARCH, init_cfg=init_cfg).init_weights()


def test_missing_damaged_and_empty_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='checkpoint .*nowhere.pth does not exist'):
        pretrained(tmp_path / 'nowhere.pth')
    damaged = tmp_path / 'damaged.pth'
    torch.save({'state_dict': {}}, damaged)
    with pytest.raises(ValueError, match='holds no state_dict'):
        pretrained(damaged)
    torch.save({'state_dict': {'x': torch.ones(1000)}}, damaged)
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(ValueError, match='it is damaged, or'):
        pretrained(damaged)


@pytest.mark.parametrize(
    'content', [b'', b'garbage', b'\x80\x02J\x01', b'\x80\x02.', b'\x80\x02h\x07.']
)
def test_garbled_files_are_one_sentence(tmp_path, content):
    path = tmp_path / 'garbled.pth'
    path.write_bytes(content)
    with pytest.raises(ValueError, match='garbled.pth cannot be read as plain weights'):
        load_checkpoint_file(str(path))


class Payload:
    def __reduce__(self):
        return (print, ('executed',))


def test_code_in_a_checkpoint_never_runs(tmp_path, capsys):
    path = tmp_path / 'hostile.pth'
    torch.save({'state_dict': {}, 'payload': Payload()}, path)
    with pytest.raises(ValueError, match='cannot be read as plain weights'):
        load_checkpoint_file(str(path))
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError, match='cannot be read as plain weights'):
        load_checkpoint_file(str(path))
    assert 'executed' not in capsys.readouterr().out


def test_the_log_of_a_training_run_is_readable(tmp_path):
    buffer = HistoryBuffer([1.0, 2.0], [1, 1])
    path = tmp_path / 'epoch_1.pth'
    torch.save({'state_dict': {}, 'message_hub': {'loss': buffer, 'lr': np.float64(0.5)}}, path)
    hub = load_checkpoint_file(str(path))['message_hub']
    assert hub['loss'].mean() == 1.5 and hub['lr'] == 0.5


def test_the_runner_reads_through_the_safe_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointLoader, '_schemes', dict(CheckpointLoader._schemes))
    register_safe_loader()
    path = tmp_path / 'hostile.pth'
    torch.save(Payload(), path)
    with pytest.raises(ValueError, match='cannot be read as plain weights'):
        CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


def test_check_match_names_what_differs():
    model = torch.nn.Linear(2, 3)
    check_match(model, model.state_dict() | {'extra': torch.ones(1)}, 'x.pth')
    with pytest.raises(ValueError, match='x.pth has nothing for Linear'):
        check_match(model, {'a': torch.ones(1)}, 'x.pth')
    with pytest.raises(ValueError, match=r'weight \(1,\) instead of \(3, 2\)'):
        check_match(model, {'weight': torch.ones(1)}, 'x.pth')
    check_match(
        model, model.state_dict() | {'extra.x': torch.ones(1)}, 'x.pth', leftover=['extra.']
    )
    with pytest.raises(ValueError, match='x.pth is of another architecture.*has no extra'):
        check_match(model, model.state_dict() | {'extra': torch.ones(1)}, 'x.pth', leftover=())
    with pytest.raises(ValueError, match='it lacks bias'):
        check_match(model, {'weight': torch.ones(3, 2)}, 'x.pth')
