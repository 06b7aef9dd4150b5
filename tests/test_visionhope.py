"""The backbone: architectures, shapes, freezing, options, and what it refuses."""

import json

import pytest
import torch
from torch import nn

from mmvisionhope import VisionHOPE
from mmvisionhope.analysis import count_macs

SMALL = dict(embed_dims=[16, 32, 32, 64], depths=[1, 1, 2, 1], head_dims=8)
PARAMS = dict(tiny=25_083_808, small=51_329_632, base=89_485_936)
GMACS = dict(tiny=4.831, small=9.758, base=17.226)


def small(**options):
    return VisionHOPE(SMALL, **options)


@pytest.mark.parametrize('arch', PARAMS)
def test_parameters_of_the_paper(arch):
    model = VisionHOPE(arch, out_norm=False)
    assert sum(p.numel() for p in model.parameters()) == PARAMS[arch]


@pytest.mark.parametrize('arch', PARAMS)
def test_names_and_shapes_of_the_released_weights(arch, shared):
    released = json.loads((shared / f'spec/state_dict_{arch}.json').read_text())
    expected = {
        name: tuple(shape)
        for name, shape in released.items()
        if name.startswith(('downsample_layers.', 'stages.'))
    }
    model = VisionHOPE(arch, out_norm=False)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected


@pytest.mark.parametrize('arch', GMACS)
def test_multiply_adds_of_the_paper(arch):
    macs = count_macs(VisionHOPE(arch, out_norm=False), (224, 224))
    assert sum(macs.values()) / 1e9 == pytest.approx(GMACS[arch], rel=0.01)


@pytest.mark.parametrize('size', [(32, 32), (33, 65), (96, 32), (100, 70)])
def test_any_image_from_32_pixels(size):
    outputs = small().eval()(torch.randn(2, 3, *size))
    for i, y in enumerate(outputs):
        expected = [-(-side // 2 ** (i + 2)) for side in size]
        assert y.shape == (2, SMALL['embed_dims'][i], *expected)


def test_images_of_a_batch_do_not_mix_and_memory_format_does_not_matter():
    model, images = small().eval(), torch.randn(2, 3, 40, 56)
    for together, alone, channels_last in zip(
        model(images),
        model(images[1:]),
        model(images.to(memory_format=torch.channels_last)),
        strict=True,
    ):
        torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together, channels_last, rtol=1e-4, atol=1e-5)


def test_the_scans_carry_context_across_the_whole_map():
    """The last feature of a stage-1 map depends on the first pixel through the scans alone."""
    arch = dict(embed_dims=[32], depths=[1])
    model = VisionHOPE(arch, out_indices=0, layer_scale_init_value=1).eval().double()
    images = torch.randn(1, 3, 128, 128, dtype=torch.float64, requires_grad=True)

    def influence():
        last = model(images)[0][0, :, -1, -1].square().sum()
        return torch.autograd.grad(last, images)[0][0, :, 0, 0]

    assert (influence() != 0).all()
    nn.init.zeros_(model.stages[0][0].operator.direction_scale)
    assert (influence() == 0).all()


def test_stages_that_are_not_returned_are_not_built():
    model = small(out_indices=(2, 0))
    assert len(model.stages) == len(model.downsample_layers) == 3
    assert sorted(model.out_norms) == ['0', '2']
    outputs = model(torch.randn(2, 3, 64, 64))
    assert [y.shape[1] for y in outputs] == [32, 16]
    sum(y.sum() for y in outputs).backward()
    # The last block's key, value, rate and retention do get used: its map has several chunks.
    assert all(p.grad is not None for p in model.parameters())


def test_every_parameter_gets_a_gradient_even_from_an_image_of_one_chunk():
    """32 pixels make a 1x1 map at stride 32, where the last memories are never read: distributed
    training must still see their gradients."""
    model = small()
    sum(y.sum() for y in model(torch.randn(2, 3, 32, 32))).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_out_norm_and_single_index():
    (y,) = small(out_indices=1, out_norm=False)(torch.randn(1, 3, 64, 64))
    (normed,) = small(out_indices=1)(torch.randn(1, 3, 64, 64))
    assert y.mean(1).abs().max() > 1e-4
    torch.testing.assert_close(normed.mean(1), torch.zeros(1, 8, 8), rtol=0, atol=1e-5)


@pytest.mark.parametrize('frozen', [-1, 0, 2, 3])
def test_frozen_stages_hold_from_construction_on(frozen):
    model = small(frozen_stages=frozen)
    for _ in range(2):
        for i in range(4):
            parts = nn.ModuleList(
                [model.downsample_layers[i], model.stages[i], model.out_norms[str(i)]]
            )
            assert all(p.requires_grad == (i > frozen) for p in parts.parameters())
            assert all(m.training == (i > frozen) for m in parts.children())
        assert model.train() is model


def test_frozen_batch_norm_keeps_its_statistics():
    model = small(frozen_stages=0)
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(2, 3, 64, 64))
    changed = [n for n, v in model.named_buffers() if not torch.equal(v, before[n])]
    assert changed and not any(name.startswith('downsample_layers.0') for name in changed)


def test_norm_eval_keeps_statistics_but_trains_weights():
    model = small(norm_eval=True).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    sum(y.sum() for y in model(torch.randn(2, 3, 64, 64))).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert model.downsample_layers[0].proj[1].weight.grad is not None
    assert model.eval() is model and not model.training


def test_with_cp_gives_the_same_outputs_and_gradients():
    images = torch.randn(2, 3, 48, 64)
    results = []
    for with_cp in (False, True):
        torch.manual_seed(1)
        model = small(with_cp=with_cp, drop_path_rate=0.5, layer_scale_init_value=1.0).train()
        y = model(images)[-1]
        y.square().sum().backward()
        results.append((y, [p.grad for p in model.stages[0].parameters()]))
    (y, grads), (y_cp, grads_cp) = results
    assert torch.equal(y, y_cp)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_cp, strict=True))


def test_stochastic_depth_grows_linearly_and_ignores_what_is_built():
    rates = [b.drop_path.p for stage in small(drop_path_rate=0.4).stages for b in stage]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    partial = [b.drop_path.p for s in small(drop_path_rate=0.4, out_indices=1).stages for b in s]
    assert partial == pytest.approx([0, 0.1])


def test_chunk_size_changes_the_scan():
    """On a map of 16x16, chunks of 16 are the default; a pair is (row scans, column scans)."""
    images = torch.randn(1, 3, 64, 64)
    reference = VisionHOPE(SMALL, out_indices=0, layer_scale_init_value=1.0).eval()
    outputs = {}
    for chunk in (16, (16, 16), (16, None), 4, (4, 16)):
        model = VisionHOPE(
            SMALL, out_indices=0, layer_scale_init_value=1.0, chunk_size=chunk
        ).eval()
        model.load_state_dict(reference.state_dict())
        outputs[chunk] = model(images)[0]
    expected = reference(images)[0]
    assert all(torch.equal(outputs[c], expected) for c in (16, (16, 16), (16, None)))
    assert not torch.equal(outputs[4], expected) and not torch.equal(outputs[(4, 16)], outputs[4])


def test_initial_values():
    model = VisionHOPE('tiny')
    block = model.stages[0][0]
    assert (block.gamma1 == 1e-6).all() and (block.operator.d_skip == 0).all()
    assert (block.operator.direction_scale == 1).all() and (block.ffn.grn.gamma == 0).all()
    assert block.operator.srnl.M_k_0.std().item() == pytest.approx(0.01, rel=0.1)
    assert (block.operator.srnl.M_alpha_0 == 0).all() and (block.operator.srnl.M_eta_0 == 0).all()
    assert block.ffn.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (block.ffn.fc1.bias == 0).all()


def test_bfloat16_autocast_trains():
    model = small(layer_scale_init_value=1.0)
    with torch.autocast('cpu', torch.bfloat16):
        outputs = model(torch.randn(2, 3, 64, 64))
    sum(y.float().square().sum() for y in outputs).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(arch='huge'), r"arch must be one of \['base', 'small', 'tiny'\] or a dict"),
        (dict(arch=dict(depths=[1])), 'arch as a dict needs embed_dims and depths'),
        (dict(arch=dict(SMALL, width=3)), r"arch knows .* got \['width'\]"),
        (dict(arch=dict(SMALL, depths=[1, 1])), 'one number per stage'),
        (dict(arch=dict(SMALL, depths=[1, 0, 1, 1])), 'must be positive'),
        (dict(arch=dict(SMALL, embed_dims=32)), 'embed_dims of arch must be integers'),
        (dict(arch=dict(SMALL, depths=[1, 1, 1, '1'])), 'depths of arch must be integers'),
        (dict(arch=dict(SMALL, head_dims=None)), 'head_dims of arch must be an integer'),
        (dict(arch=dict(SMALL, head_dims=24)), 'multiples of head_dims 24'),
        (dict(out_indices=(0, -1)), 'out_indices must be distinct stages out of 0 to 3'),
        (dict(out_indices=(1, 1)), 'out_indices must be distinct stages'),
        (dict(out_indices=4), 'out_indices must be distinct stages'),
        (dict(out_indices=True), 'out_indices must be distinct stages'),
        (dict(out_indices=None), 'out_indices must be distinct stages'),
        (dict(drop_path_rate='0.1'), r'drop_path_rate must be in \[0, 1\)'),
        (dict(in_channels=0), 'in_channels must be a positive integer'),
        (dict(out_indices=()), 'out_indices must be distinct stages'),
        (dict(frozen_stages=4), 'frozen_stages must be -1'),
        (dict(drop_path_rate=1.0), r'drop_path_rate must be in \[0, 1\)'),
        (dict(chunk_size=0), 'chunk_size must be None, a positive integer or a pair'),
        (dict(chunk_size=(1, 2, 3)), 'chunk_size must be None'),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        VisionHOPE(**options)


@pytest.mark.parametrize('out_norm', [True, False])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_features_are_contiguous(out_norm, layout):
    """mmcv's operators take the memory of a map without a look at its strides."""
    images = torch.randn(2, 3, 64, 96).contiguous(memory_format=layout)
    model = small(out_norm=out_norm).to(memory_format=layout)
    assert all(y.is_contiguous() for y in model(images))


@pytest.mark.parametrize(
    ('images', 'error', 'message'),
    [
        (torch.zeros(1, 1, 3, 64, 64), ValueError, r'images must be \(B, 3, H, W\)'),
        (torch.zeros(1, 4, 64, 64), ValueError, r'images must be \(B, 3, H, W\)'),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), TypeError, 'images must be floating-point'),
        (torch.zeros(1, 3, 31, 64), ValueError, 'at least 32 pixels high and wide, got 31 x 64'),
    ],
)
def test_bad_images_are_named(images, error, message):
    with pytest.raises(error, match=message):
        small()(images)
