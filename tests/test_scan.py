"""directional_scan, in plain PyTorch and compiled, against the oracle; its contract."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
import torch

from mmvisionhope.ops import directional_scan, library, scan

DIRECTIONS = ('right', 'left', 'down', 'up')
SHAPES = [(1, 1), (1, 7), (7, 1), (5, 3), (14, 14), (3, 50)]
CHUNKS = [1, 3, None, 1000]
NAMES = ('z', 'q', 'content', 'key', 'value', 'rate', 'retention', 'skip', 'scale')


@pytest.fixture(autouse=True, params=['reference', 'compiled'])
def implementation(request, monkeypatch):
    if request.param == 'reference':
        monkeypatch.setattr(scan, 'has_kernel', lambda z, d: False)
        monkeypatch.setattr(scan, '_warn_slow', lambda reason: None)
    elif not library.COMPILED:
        pytest.skip('mmvisionhope was installed without its compiled op')


def arguments(
    height, width, batch=1, heads=1, d=4, routes=4, dtype=torch.float64, shared_skip=True, grad=True
):
    """Random arguments whose steps, clamps and retentions all vary."""
    z, q = torch.randn(2, batch, height, width, heads * d, dtype=dtype).unbind()
    content, key, value = torch.randn(3, routes, heads, d, d, dtype=dtype).mul(0.5).unbind()
    rate, retention = torch.randn(2, routes, heads, d, dtype=dtype).unbind()
    skip = (
        torch.randn(heads, d, dtype=dtype)
        if shared_skip
        else torch.randn(routes, heads, d).to(dtype)
    )
    scale = torch.randn(routes, heads * d, dtype=dtype)
    tensors = (z, q, content, key, value, rate, retention, skip, scale)
    return [t.clone().requires_grad_(grad) for t in tensors]


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def outputs_and_gradients(function, tensors, grad):
    y = function(*tensors)
    # With a single chunk no key, value, rate or retention is ever used: their gradient is zero.
    grads = torch.autograd.grad(y, tensors, grad, allow_unused=True, materialize_grads=True)
    return dict(zip(('y', *NAMES), (y.detach(), *grads), strict=True))


def assert_matches_oracle(tensors, directions, row_chunk, col_chunk, tolerance=1e-10):
    grad = torch.randn_like(tensors[0])
    options = dict(directions=directions, row_chunk=row_chunk, col_chunk=col_chunk)
    expected = outputs_and_gradients(
        lambda *a: oracle.directional_scan(*a, **options), tensors, grad
    )
    actual = outputs_and_gradients(lambda *a: directional_scan(*a, **options), tensors, grad)
    errors = {name: relative(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize(('shape', 'chunk'), [*itertools.product(SHAPES, CHUNKS)])
def test_equals_the_oracle(shape, chunk):
    assert_matches_oracle(arguments(*shape), DIRECTIONS, chunk, chunk)


def test_equals_the_oracle_with_several_images_heads_and_skips():
    tensors = arguments(4, 6, batch=2, heads=3, d=16, shared_skip=False)
    assert_matches_oracle(tensors, DIRECTIONS, row_chunk=5, col_chunk=None)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    row_chunk=st.none() | st.integers(1, 40),
    col_chunk=st.none() | st.integers(1, 40),
    directions=st.lists(st.sampled_from(DIRECTIONS), min_size=1, unique=True),
)
def test_equals_the_oracle_for_any_directions_and_chunks(
    height, width, row_chunk, col_chunk, directions
):
    tensors = arguments(height, width, routes=len(directions))
    assert_matches_oracle(tensors, directions, row_chunk, col_chunk)


def test_gradcheck():
    tensors = arguments(3, 4)
    assert torch.autograd.gradcheck(
        lambda *a: directional_scan(*a, row_chunk=3, col_chunk=2), tensors, fast_mode=True
    )


@pytest.mark.parametrize('chunk', [40, 70, 334])
def test_long_chunks_of_several_tiles(chunk):
    tensors = arguments(1, 2 * chunk, routes=1)
    assert_matches_oracle(tensors, ('right',), chunk, None)


def test_float32_follows_float64_over_long_scans():
    """Relative error of a few ulp: every factor of the recurrence is at most 1, so errors of single
    tokens (6e-8) do not grow; the largest, of gradients through |k - v|, stay within 300 ulp."""
    tensors = arguments(12, 60, heads=2, d=16)
    grad = torch.randn_like(tensors[0])
    expected = outputs_and_gradients(directional_scan, tensors, grad)
    single = [t.detach().float().requires_grad_() for t in tensors]
    actual = outputs_and_gradients(directional_scan, single, grad.float())
    errors = {name: relative(actual[name].double(), expected[name]) for name in expected}
    assert max(errors.values()) < 2e-5, errors


def test_a_single_row_is_a_sequence():
    """One chunk per token turns the chunk-wise recurrence into Equation 13."""
    tensors = arguments(1, 9, routes=1)
    z, q, content, key, value, rate, retention, skip, scale = (t.detach() for t in tensors)
    reads, _ = oracle.sequence(
        z[0, 0], q[0, 0], [t[0, 0] for t in (content, key, value, rate, retention)], chunk=1
    )
    expected = scale[0] * (torch.stack(reads) + skip[0] * z[0, 0])
    actual = directional_scan(*tensors, directions=('right',), row_chunk=1)
    torch.testing.assert_close(actual[0, 0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    'restride',
    [
        lambda t: t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        lambda t: torch.stack([t, t], dim=3).flatten(2, 3)[:, :, ::2],
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    ],
    ids=['nchw', 'every second column', 'transposed', 'channel slice'],
)
def test_strides_do_not_matter(restride):
    z, q, *rest = arguments(3, 5, batch=2, grad=False)
    assert torch.equal(restride(z), z)
    expected = directional_scan(z, q, *rest)
    torch.testing.assert_close(directional_scan(restride(z), restride(q), *rest), expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_inputs_give_half_outputs_with_float32_memories(dtype):
    z, q, *memories = arguments(4, 5, dtype=torch.float32, grad=False)
    z, q = z.to(dtype), q.to(dtype)
    y = directional_scan(z, q, *memories)
    assert y.dtype == dtype
    # Arithmetic in float32, one rounding at the end.
    expected = directional_scan(z.float(), q.float(), *memories).to(dtype)
    assert torch.equal(y, expected)


def test_autocast_rounds_tokens_but_not_memories():
    z, q, *memories = arguments(4, 5, dtype=torch.float32, grad=False)
    with torch.autocast('cpu', torch.bfloat16):
        y = directional_scan(z, q, *memories)
    assert torch.equal(y, directional_scan(z.bfloat16(), q.bfloat16(), *memories))


def test_an_empty_batch_is_an_empty_result():
    z, q, *memories = arguments(4, 5, batch=0, dtype=torch.float32, grad=False)
    assert directional_scan(z, q, *memories).shape == (0, 4, 5, 4)


def _replaced(index, change):
    tensors = arguments(2, 3, grad=False)
    tensors[index] = change(tensors[index])
    return tensors


@pytest.mark.parametrize(
    ('tensors', 'options', 'error', 'message'),
    [
        (_replaced(0, lambda t: t[0]), {}, ValueError, r'z must be \(B, H, W, channels\)'),
        (_replaced(0, lambda t: t.int()), {}, TypeError, 'z must be a floating-point tensor'),
        (_replaced(0, lambda t: t[:, :0]), {}, ValueError, 'H, W, channels >= 1'),
        (_replaced(0, lambda t: t.to(torch.float8_e5m2)), {}, TypeError, 'z must be torch.float16'),
        (_replaced(1, lambda t: t.float()), {}, TypeError, 'q must have the dtype of z'),
        (_replaced(1, lambda t: t[..., :2]), {}, ValueError, 'q must be'),
        (_replaced(2, lambda t: t[..., :2]), {}, ValueError, r'content must be \(R, nh, d, d\)'),
        (_replaced(3, lambda t: t[:2]), {}, ValueError, 'key must be'),
        (_replaced(5, lambda t: t.to('meta')), {}, ValueError, 'rate is on meta but z is on cpu'),
        (_replaced(7, lambda t: None), {}, TypeError, 'skip must be a floating-point tensor'),
        (_replaced(8, lambda t: t[..., 0]), {}, ValueError, 'scale must be'),
        (arguments(2, 3), dict(directions=('right',)), ValueError, 'must be .* 1 directions'),
        (arguments(2, 3), dict(directions=()), ValueError, 'directions must be distinct names'),
        (arguments(2, 3), dict(directions=('in',) * 4), ValueError, 'directions must be distinct'),
        (arguments(2, 3), dict(row_chunk=0), ValueError, 'row_chunk must be a positive integer'),
        (arguments(2, 3), dict(col_chunk=2.0), ValueError, 'col_chunk must be a positive integer'),
    ],
)
def test_bad_arguments_are_named(tensors, options, error, message):
    with pytest.raises(error, match=message):
        directional_scan(*tensors, **options)


def test_a_chunk_may_be_as_long_as_an_integer():
    tensors = arguments(3, 4, d=8, dtype=torch.float32, grad=False)
    whole = directional_scan(*tensors, row_chunk=12, col_chunk=12)
    assert torch.equal(
        directional_scan(*tensors, row_chunk=2**63 - 1, col_chunk=np.int64(100)), whole
    )


def test_autocast_leaves_float64_alone():
    tensors = arguments(3, 4, dtype=torch.float64, grad=False)
    with torch.autocast('cpu', torch.bfloat16):
        y = directional_scan(*tensors)
    assert torch.equal(y, directional_scan(*tensors))


def test_forward_mode_is_refused_rather_than_zero():
    z, *rest = arguments(3, 4, d=8, dtype=torch.float32, grad=False)
    with pytest.raises(NotImplementedError, match='not by forward-mode'):
        torch.func.jvp(lambda z: directional_scan(z, *rest), (z,), (torch.ones_like(z),))
