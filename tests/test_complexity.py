"""Counting multiply-adds: the figures of the paper, Equation 57, nothing left out in silence."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmvisionhope import VisionHOPE
from mmvisionhope.analysis import complexity, count_macs
from mmvisionhope.models.layers import LayerNorm2d, PointwiseConv2d
from mmvisionhope.models.operator import Operator

ROOT = Path(__file__).parents[1]
# Of a name and a shape: millions of parameters as the paper prints them (it prints none of Mask
# R-CNN), and billions of multiply-adds.
FIGURES = {
    ('upernet_visionhope_t_160k', 512, 2048): ('55.4', 942),
    ('upernet_visionhope_s_160k', 512, 2048): ('81.8', 1043),
    ('upernet_visionhope_b_160k', 512, 2048): ('121.2', 1200),
    ('maskrcnn_visionhope_t_1x', 800, 1280): (None, 266),
    ('maskrcnn_visionhope_s_1x', 800, 1280): (None, 365),
    ('maskrcnn_visionhope_b_1x', 800, 1280): (None, 516),
}


@pytest.mark.parametrize(('name', 'height', 'width'), FIGURES)
def test_figures_of_the_paper(name, height, width):
    config = Config.fromfile(ROOT / 'configs' / f'{name}.py')
    pytest.importorskip(config.default_scope)
    init_default_scope(config.default_scope)
    found = complexity(MODELS.build(config.model), (height, width))
    parameters, macs = found.within('')
    expected, gmacs = FIGURES[name, height, width]
    assert macs / 1e9 == pytest.approx(gmacs, rel=0.01)
    assert f'{parameters / 1e6:.1f}' == expected or not expected
    assert not found.unknown
    assert {name.split('.')[0] for name in found.unused} <= {'auxiliary_head'}


@pytest.mark.parametrize(
    ('arch', 'parameters', 'gmacs'),
    [('tiny', 26_637_192, 4.9), ('small', 52_883_016, 9.8), ('base', 91_170_648, 17.3)],
)
def test_figures_of_the_paper_with_the_imagenet_head(arch, parameters, gmacs):
    backbone = VisionHOPE(arch, out_indices=3, out_norm=False)
    head = [PointwiseConv2d(backbone.embed_dims[-1], 1024), nn.BatchNorm2d(1024), nn.SiLU()]
    head = [LayerNorm2d(backbone.embed_dims[-1]), *head, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = nn.Sequential(*head, nn.Linear(1024, 1000))
    found = complexity(Model(lambda image: head(backbone(image)[0]), backbone, head), (224, 224))
    assert found.within('')[0] == parameters
    assert found.within('')[1] / 1e9 == pytest.approx(gmacs, rel=0.01)
    assert not found.unknown and not found.unused


class Model(nn.Module):
    """A function of an image and the modules it uses."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, image):
        return self.function(image)


@pytest.mark.parametrize('side', [14, 28, 56])
def test_an_operator_and_its_projections_cost_equation_57(side):
    dims = 96
    into, operator = nn.Linear(dims, dims // 2), Operator(dims // 2)
    out = nn.Linear(dims // 2, dims)

    def interaction(image):
        tokens = image[:, :1].permute(0, 2, 3, 1).expand(-1, -1, -1, dims)
        return out(operator(into(tokens)))

    macs = sum(count_macs(Model(interaction, into, operator, out), (side, side)).values())
    n = side**2
    assert macs == 5 / 4 * n * dims**2 + 232 * n * dims + 1600 * dims * side


def test_plain_pytorch_costs_what_the_compiled_op_costs(monkeypatch):
    model = VisionHOPE(dict(embed_dims=[32] * 4, depths=[1] * 4))
    compiled = count_macs(model, (64, 96))
    monkeypatch.setattr('mmvisionhope.ops.scan.has_kernel', lambda *_: False)
    assert count_macs(model, (64, 96)) == compiled


def test_functions_count_like_modules():
    weight = torch.zeros(8, 3, 3, 3)
    model = Model(
        lambda image: F.conv_transpose2d(F.conv2d(image, weight, stride=2), weight, stride=2),
        nn.Linear(1, 1),
    )
    # Outputs of 7 x 15, then inputs of as many, each by 8 x 3 x 9 weights.
    assert sum(count_macs(model, (16, 32)).values()) == 2 * 7 * 15 * 8 * 3 * 9


def test_what_is_not_counted_is_named():
    idle, linear = nn.Linear(4, 5), nn.Linear(8, 2)
    model = Model(lambda image: linear(image).relu().cumsum(-1), idle, linear)
    found = complexity(model.train(), (4, 8))
    assert model.training
    assert found.unused == ['parts.0.weight', 'parts.0.bias']
    assert 'aten.relu' in found.free and dict(found.unknown) == {'aten.cumsum': 1}
    assert found.macs == {'parts.1': 3 * 4 * 8 * 2}
    assert found.within('parts.0') == (25, 0) and found.within('') == (43, 192)
    assert found.modules(1) == ['parts'] and found.modules(2) == ['parts', 'parts.0', 'parts.1']


@pytest.fixture
def get_flops(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, 'argv', ['get_flops.py', *map(str, arguments)])
        runpy.run_path(str(ROOT / 'tools' / 'get_flops.py'), run_name='__main__')
        return capsys.readouterr().out

    return call


def test_the_tool_prints_a_table(get_flops):
    pytest.importorskip('mmseg')
    config = ROOT / 'configs' / 'upernet_visionhope_t_160k.py'
    output = get_flops(config, '--shape', 512, 2048, '--depth', 1)
    rows = [line.split('│')[1].strip() for line in output.splitlines() if line.startswith('│')]
    assert rows == ['model', 'backbone', 'decode_head', 'auxiliary_head']
    assert '512 x 2048 (height x width): 55.4 M parameters, 941.6 G multiply-adds' in output
    assert 'Not run for a prediction' in output and 'auxiliary_head.conv_seg' in output
    assert 'Free by rule' in output and 'No rule' not in output


@pytest.mark.parametrize('arguments', [['x.py'], ['x.py', '--shape', '8', '64']])
def test_the_tool_names_mistakes(get_flops, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        get_flops(*arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'x.py does not exist' in error or '--shape must be at least 32 32' in error
