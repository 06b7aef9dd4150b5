"""The ablations of Tables 5 and 9: by the oracle, and as options of the backbone."""

import warnings

import oracle
import pytest
import torch
from test_scan import arguments, outputs_and_gradients, relative
from torch.utils.flop_counter import FlopCounterMode

from mmvisionhope import PlainVisionHOPE, VisionHOPE
from mmvisionhope.ops import Dynamics, directional_scan, library, scan
from mmvisionhope.ops.reference import chunk_gain, token_quantities

DYNAMICS = [
    dict(adaptive_kv=False),
    dict(adaptive_dynamics=False),
    dict(adaptive_kv=False, adaptive_dynamics=False),
    dict(dgd=False),
    dict(injection_cap='hard'),
    dict(injection_cap='none'),
    dict(spectral_clamp='soft'),
    dict(spectral_clamp='none'),
    dict(rate_scale=0.1),
]
ARCH = dict(embed_dims=32, depth=2, head_dims=8)
BACKBONE = [
    *(dict(dynamics=options) for options in DYNAMICS),
    dict(directions=('right',)),
    dict(directions=('right', 'left')),
    dict(fixed_sum=True),
    dict(shared_memories=True),
    dict(chunk_size=1),
    dict(arch=dict(ARCH, operator_dims=32)),
    dict(arch=dict(ARCH, head_dims=4)),
]


def build(**options):
    return PlainVisionHOPE(**dict(dict(arch=ARCH, layer_scale_init_value=1.0), **options))


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(scan, '_warn_slow', lambda reason: None)


@pytest.mark.parametrize('options', DYNAMICS, ids=str)
@pytest.mark.parametrize('chunk', [1, None, 40])
def test_equals_the_oracle(options, chunk, quiet):
    # Chunks of 40 tokens take two tiles. Several heads, for memories that low retention ends early.
    size = dict(height=10, width=9) if chunk == 40 else dict(height=3, width=4, batch=3, heads=3)
    tensors = arguments(**size, routes=2)
    # Long steps, and retentions from almost 0 to almost 1: each limit binds for some tokens.
    tensors[5], tensors[6] = ((t * 12).detach().requires_grad_() for t in tensors[5:7])
    fixed = dict(directions=('right', 'up'), row_chunk=chunk, col_chunk=chunk)
    grad = torch.randn_like(tensors[0])
    expected = outputs_and_gradients(
        lambda *a: oracle.directional_scan(*a, **fixed, **options), tensors, grad
    )
    actual = outputs_and_gradients(
        lambda *a: directional_scan(*a, **fixed, dynamics=Dynamics(**options)), tensors, grad
    )
    full = outputs_and_gradients(lambda *a: directional_scan(*a, **fixed), tensors, grad)
    errors = {name: relative(actual[name], expected[name]) for name in expected}
    # Float64 over at most 90 tokens. No cap lets rounding grow with the memories.
    assert max(errors.values()) < (1e-6 if options.get('injection_cap') == 'none' else 1e-10)
    assert relative(actual['y'], full['y']) > 1e-6 or relative(actual['z'], full['z']) > 1e-6


@pytest.mark.parametrize('options', BACKBONE, ids=str)
def test_backbones_run_forward_and_backward(options, quiet):
    images = torch.randn(2, 3, 64, 96)
    torch.manual_seed(1)
    model = build(**options).train()
    (y,) = model(images)
    y.square().sum().backward()
    # An untrained model is too tame for the missing cap to show.
    assert y.shape == (2, 32, 4, 6) and torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_without_the_injection_cap_memories_explode_and_with_it_they_do_not(quiet):
    """Equation 18 with v = 20 k, a step of 0.25 and alpha of about 1: 0.25 * 18 > 1 + alpha."""
    d, length = 8, 64
    z = torch.ones(1, 1, length, d)
    content = torch.eye(d).expand(1, 1, d, d)
    rate = retention = torch.full((1, 1, d), 10.0)
    memories = (content, content, 20 * content, rate, retention)
    skip, scale = torch.zeros(1, d), torch.ones(1, d)

    def reads(**options):
        return directional_scan(
            z,
            z,
            *memories,
            skip,
            scale,
            directions=('right',),
            row_chunk=1,
            dynamics=Dynamics(**options),
        )[0, 0]

    # Growth ends only where the square of a key overflows; NaN is not less either.
    assert not reads(injection_cap='none').abs().max() < 1e30
    # Corollary 1: |M_t| <= |M_0|, and queries have norm 1. The other controls bound it too.
    for options in (
        {},
        dict(injection_cap='hard'),
        dict(spectral_clamp='soft'),
    ):
        y = reads(**options)
        assert (y.norm(dim=-1) <= content.norm() * (1 + d * torch.finfo(y.dtype).eps)).all()


@pytest.mark.parametrize('spectral', ['hard', 'soft'])
@pytest.mark.parametrize('injection', ['hard', 'soft'])
def test_hard_and_soft_limits_both_bound_every_gain(injection, spectral):
    """Proposition 1 uses no more of the controls than their limits."""
    x, d = torch.randn(24, 8) * 100, 8
    generators = torch.randn(2 * d + 2, d) * 3
    dynamics = Dynamics(injection_cap=injection, spectral_clamp=spectral, rate_scale=10.0)
    gain = chunk_gain(*token_quantities(x, generators, dynamics))
    assert torch.linalg.matrix_norm(gain, 2) <= 1 + d * torch.finfo(x.dtype).eps


def test_memories_that_do_not_adapt_still_learn(quiet):
    """Outer training reaches them; what they generate is that of the first token throughout."""
    tensors = arguments(4, 5, routes=1)
    y = directional_scan(
        *tensors,
        directions=('right',),
        dynamics=Dynamics(adaptive_kv=False, adaptive_dynamics=False),
    )
    gradients = torch.autograd.grad(y.sum(), tensors[3:7])
    assert all((gradient != 0).any() for gradient in gradients)


@pytest.mark.skipif(not library.COMPILED, reason='needs the compiled op')
def test_what_kernels_lack_is_said_once_and_the_full_model_stays_fast():
    scan._warn_slow.cache_clear()
    tensors = arguments(3, 4, d=8, dtype=torch.float32, grad=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        fast = directional_scan(*tensors)
        assert torch.equal(directional_scan(*tensors, dynamics=Dynamics()), fast)
        assert not caught
        for _ in range(2):
            directional_scan(*tensors, dynamics=Dynamics(dgd=False))
    assert len(caught) == 1 and 'dgd=False' in str(caught[0].message)
    scan._warn_slow.cache_clear()


def test_scanning_and_fusion_options_change_the_parameters_they_should():
    def shapes(**options):
        operator = build(**options).stages[0][0].operator
        return {name: tuple(p.shape) for name, p in operator.named_parameters()}

    full = shapes()
    assert full['srnl.M_k_0'] == (4, 2, 8, 8) and full['direction_scale'] == (4, 16)
    assert shapes(directions=('right',))['srnl.M_k_0'] == (1, 2, 8, 8)
    assert shapes(directions=('right', 'left'))['direction_scale'] == (2, 16)
    assert 'direction_scale' not in shapes(fixed_sum=True)
    assert shapes(shared_memories=True)['srnl.M_k_0'] == (1, 2, 8, 8)
    assert shapes(arch=dict(ARCH, head_dims=4))['srnl.M_k_0'] == (4, 4, 4, 4)


def test_shared_memories_and_fixed_sums_are_the_full_model_with_equal_values():
    images = torch.randn(1, 3, 64, 64)
    tied, full = build(shared_memories=True, fixed_sum=True).eval(), build().eval()
    weights = tied.state_dict()
    for name, value in full.state_dict().items():
        if name in weights:
            weights[name] = weights[name].expand_as(value)
        else:
            weights[name] = torch.ones_like(value)  # the scales
    full.load_state_dict(weights)
    torch.testing.assert_close(tied(images), full(images))


@pytest.mark.skipif(not library.COMPILED, reason='needs the compiled op')
def test_multiply_adds_follow_the_directions():
    """The recurrent terms of Equation 56 are sums over the directions."""

    def flops(*directions):
        tensors = arguments(4, 8, d=8, routes=len(directions), dtype=torch.float32, grad=False)
        with FlopCounterMode(display=False) as counter:
            directional_scan(*tensors, directions=directions)
        return counter.get_total_flops()

    rows, columns = flops('right'), flops('down')
    assert columns > rows  # chunks of 4 tokens instead of 8
    assert flops('right', 'left') == 2 * rows
    assert flops('right', 'left', 'down', 'up') == 2 * rows + 2 * columns


def test_options_survive_torch_compile(quiet):
    tensors = arguments(3, 4, dtype=torch.float32, grad=False)
    dynamics = Dynamics(dgd=False, injection_cap='hard')
    compiled = torch.compile(
        lambda *a: directional_scan(*a, dynamics=dynamics), backend='eager', fullgraph=True
    )
    torch.testing.assert_close(compiled(*tensors), directional_scan(*tensors, dynamics=dynamics))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(dynamics=dict(cap='none')), r"dynamics must be a dict with any of \['adaptive_kv'"),
        (dict(dynamics='none'), 'dynamics must be a dict'),
        (dict(dynamics=dict(injection_cap=None)), "injection_cap must be 'soft', 'hard' or 'none'"),
        (dict(dynamics=dict(spectral_clamp='x')), "spectral_clamp must be 'soft', 'hard' or"),
        (dict(dynamics=dict(dgd=0)), 'dgd must be True or False, got 0'),
        (dict(dynamics=dict(rate_scale=0)), 'rate_scale must be a number above 0'),
        (dict(directions=()), 'directions must be a tuple of distinct names'),
        (dict(directions='right'), 'directions must be a tuple of distinct names'),
        (dict(directions=('right', 'right')), 'directions must be a tuple of distinct names'),
    ],
)
def test_unknown_options_are_named(options, message):
    for backbone in (VisionHOPE, PlainVisionHOPE):
        with pytest.raises(ValueError, match=message):
            backbone(**options)
