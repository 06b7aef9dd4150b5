"""The plain backbone and the pyramid that dense tasks make of its one map."""

import pytest
import torch

from mmvisionhope import PlainVisionHOPE, SimpleFeaturePyramid
from mmvisionhope.analysis import count_macs

SMALL = dict(embed_dims=32, depth=3, head_dims=8)
HEAD_CHANNELS, CLASSES = 1024, 1000


def head_params(dims):
    norms = 2 * dims + 2 * HEAD_CHANNELS
    return norms + (dims + 1) * HEAD_CHANNELS + (HEAD_CHANNELS + 1) * CLASSES


def head_macs(dims, tokens):
    norms = tokens * (5 * dims + 2 * HEAD_CHANNELS)
    return norms + tokens * dims * HEAD_CHANNELS + HEAD_CHANNELS * CLASSES


def vim_macs(dims, tokens=196, layers=24):
    """Equation 55 for all layers, and the 16 x 16 patch embedding."""
    return layers * (6 * tokens * dims**2 + 576 * tokens * dims) + tokens * dims * 3 * 16**2


# Our depths and stem: parameters and multiply-adds at 224 x 224 with the ImageNet head, and the
# latter over Vim's.
@pytest.mark.parametrize(
    ('arch', 'dims', 'depth', 'params', 'gmacs', 'over_vim'),
    [
        ('tiny', 192, 12, 6.135, 1.169, 0.735),
        ('small', 384, 14, 23.048, 4.793, 0.911),
        ('base', 768, 15, 91.799, 19.217, 1.020),
    ],
)
def test_sizes(arch, dims, depth, params, gmacs, over_vim):
    model = PlainVisionHOPE(arch, out_norm=False)
    assert model.embed_dims == (dims,) * depth and len(model.stages) == depth
    operator = model.stages[0][0].operator
    assert operator.d_skip.shape == (dims // 32, 16)
    own = sum(p.numel() for p in model.parameters())
    assert (own + head_params(dims)) / 1e6 == pytest.approx(params, abs=1e-3)
    macs = sum(count_macs(model, (224, 224)).values()) + head_macs(dims, 196)
    assert macs / 1e9 == pytest.approx(gmacs, abs=1e-3)
    assert macs / vim_macs(dims) == pytest.approx(over_vim, abs=1e-3)


@pytest.mark.parametrize('size', [(32, 32), (224, 224), (33, 65)])
def test_one_resolution_a_sixteenth_of_the_image(size):
    model = PlainVisionHOPE(SMALL, out_indices=(2, 0)).eval()
    for y in model(torch.randn(2, 3, *size)):
        assert y.shape == (2, 32, -(-size[0] // 16), -(-size[1] // 16)) and y.is_contiguous()
    (last,) = PlainVisionHOPE(SMALL).eval()(torch.randn(2, 3, *size))
    assert last.shape == y.shape


def test_blocks_are_what_is_returned_frozen_and_dropped():
    model = PlainVisionHOPE(SMALL, out_indices=1, frozen_stages=0, drop_path_rate=0.2)
    assert len(model.stages) == 2
    assert [stage[0].drop_path.p for stage in model.stages] == pytest.approx([0, 0.1])
    trained = {name.split('.')[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {'1'}  # stages.1 and out_norms.1
    assert not model.train().downsample_layers[0].training


def test_weights_load_under_a_prefix(tmp_path):
    source = PlainVisionHOPE(SMALL)
    weights = {f'backbone.{name}': value for name, value in source.state_dict().items()}
    torch.save({'state_dict': weights}, tmp_path / 'plain.pth')
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'plain.pth'), prefix='backbone.')
    model = PlainVisionHOPE(SMALL, init_cfg=pretrained)
    model.init_weights()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(arch='huge'), r"arch must be one of \['base', 'small', 'tiny'\] or a dict"),
        (dict(arch=dict(embed_dims=32)), 'arch as a dict needs embed_dims and depth'),
        (dict(arch=dict(SMALL, depth=0)), 'depth of arch must be a positive integer'),
        (dict(arch=dict(SMALL, depth='2')), 'depth of arch must be a positive integer'),
        (dict(arch=dict(SMALL, embed_dims=[32])), 'embed_dims of arch must be an integer'),
        (dict(arch=dict(SMALL, embed_dims=4)), 'embed_dims of arch must be at least 8'),
        (dict(arch=dict(SMALL, depths=3)), r"arch knows depth, embed_dims, .* got \['depths'\]"),
        (dict(arch=SMALL, out_indices=3), 'out_indices must be distinct stages out of 0 to 2'),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PlainVisionHOPE(**options)


@pytest.mark.parametrize('size', [(2, 2), (5, 7), (1, 1)])
def test_the_pyramid_has_strides_4_to_64(size):
    neck, (height, width) = SimpleFeaturePyramid(16, out_channels=8, num_outs=5), size
    levels = neck((torch.randn(2, 16, *size),))
    expected = [(4 * height, 4 * width), (2 * height, 2 * width), size]
    for _ in range(2):
        expected.append((-(-expected[-1][0] // 2), -(-expected[-1][1] // 2)))
    assert [tuple(y.shape[2:]) for y in levels] == expected
    assert all(y.shape[:2] == (2, 8) and y.is_contiguous() for y in levels)
    sum(y.square().sum() for y in levels).backward()
    assert all(torch.isfinite(p.grad).all() for p in neck.parameters())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(in_channels=[8]), 'in_channels must be a multiple of 4'),
        (dict(in_channels=6), 'in_channels must be a multiple of 4'),
        (dict(in_channels=8, num_outs=3), 'num_outs must be an integer of at least 4'),
    ],
)
def test_bad_options_of_the_pyramid_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SimpleFeaturePyramid(**options)


def test_the_pyramid_takes_one_map():
    with pytest.raises(ValueError, match='takes one map: set out_indices .* got 2 maps'):
        SimpleFeaturePyramid(8)([torch.zeros(1, 8, 2, 2)] * 2)
