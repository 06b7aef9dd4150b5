"""Run by test_triton.py in a process of its own: Triton's interpreter is chosen before its import.

The GPU kernels take the place of the compiled op for CPU tensors, so that everything between
``directional_scan`` and the kernels takes part: checks, dtypes, autograd. Shapes are small, since
the interpreter takes some 70 ms for a chunk.
"""

import importlib.util
import os
from pathlib import Path

os.environ['TRITON_INTERPRET'] = '1'

import pytest
import torch
from test_compiled_scan import errors, keep_alive, reference
from test_scan import arguments, outputs_and_gradients, relative

from mmvisionhope.ops import directional_scan, library, scan
from mmvisionhope.ops.triton_kernels import launch

# One is there already; and the interpreter's own use of NumPy.
pytestmark = [
    pytest.mark.filterwarnings('ignore:Warning only once for all operators'),
    pytest.mark.filterwarnings('ignore:Conversion of an array with ndim > 0'),
]


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope='module', autouse=True)
def triton_for_cpu_tensors():
    own = torch.library.Library('mmvisionhope', 'IMPL')
    own.impl('directional_scan', launch.forward, 'CPU', allow_override=True)
    own.impl('directional_scan_backward', launch.backward, 'CPU', allow_override=True)
    yield
    own._destroy()


CASES = {
    'one pixel': dict(shape=(1, 1)),
    'one row': dict(shape=(1, 9)),
    'one column': dict(shape=(9, 1)),
    'two tiles a chunk': dict(shape=(2, 19)),
    'a ragged group of tiles': dict(shape=(2, 70), directions=('right',)),
    'images and heads': dict(shape=(3, 4), batch=2, heads=2, directions=('right', 'up')),
    'chunks of one': dict(shape=(2, 3), chunks=(1, 1)),
    'ragged chunks': dict(shape=(4, 5), chunks=(3, 7)),
    'chunks beyond the map': dict(shape=(3, 4), chunks=(100, 5)),
    'a block and a bit': dict(shape=(3, 18), chunks=(30, 30), directions=('left', 'down')),
    'three directions': dict(shape=(3, 3), directions=('up', 'left', 'right')),
    'd = 32': dict(shape=(3, 5), d=32),
    'd = 64': dict(shape=(2, 3), d=64, directions=('down',)),
    'a skip for each direction': dict(shape=(2, 3), skip_per_direction=True),
}


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_forward_and_gradients_are_those_of_the_float64_reference(case):
    case = dict(d=16, batch=1, heads=1, directions=scan.DIRECTIONS, chunks=(None, None)) | case
    per_direction = case.pop('skip_per_direction', False)
    routes = len(case['directions'])
    tensors = arguments(
        *case['shape'], batch=case['batch'], heads=case['heads'], d=case['d'], routes=routes,
        dtype=torch.float32,
    )  # fmt: skip
    if per_direction:
        tensors[7] = torch.randn(routes, case['heads'], case['d'], requires_grad=True)
    row_chunk, col_chunk = case['chunks']
    found = errors(tensors, directions=case['directions'], row_chunk=row_chunk, col_chunk=col_chunk)
    assert max(found.values()) < 1e-5, found


def test_memories_that_stay_alive():
    found = errors(keep_alive(arguments(3, 18, d=16, dtype=torch.float32)))
    # Retention at its limit, where the injection cap makes a step's gradient that of its rate times
    # exp(-u), u up to some hundreds: rounding of u is the relative error.
    rate = found.pop('rate')
    assert max(found.values()) < 1e-5, found
    assert rate < 2e-4


@pytest.mark.parametrize('layout', ['channels_last', 'slice', 'transposed', 'expanded'])
def test_tokens_are_walked_through_their_strides(layout):
    z, q, *memories = arguments(3, 5, heads=1, d=16, dtype=torch.float32, grad=False)
    grad = torch.randn_like(z)
    views = {
        'channels_last': lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        'slice': lambda x: torch.cat([x, x], 3)[..., 16:],
        'transposed': lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        'expanded': lambda x: x[:, :1].expand_as(x),
    }
    z, q, grad = map(views[layout], (z, q, grad))
    tensors = [t.requires_grad_() for t in (z, q, *memories)]
    actual = outputs_and_gradients(directional_scan, tensors, grad)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(reference, exact, grad.double())
    for name in expected:
        assert relative(actual[name].double(), expected[name]) < 1e-5, name


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_that_of_its_own_rounding(dtype):
    z, q, *memories = arguments(3, 5, heads=1, d=16, dtype=torch.float32, grad=False)
    tensors = [t.requires_grad_() for t in (z.to(dtype), q.to(dtype), *memories)]
    grad = torch.randn_like(z).to(dtype)
    actual = outputs_and_gradients(directional_scan, tensors, grad)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(reference, exact, grad.double())
    for name in expected:
        # Rounding to nearest is uniform within half a unit in the last place; the interpreter
        # truncates to bfloat16, within a whole one.
        unit = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)
        bound = unit if name in ('y', 'z', 'q') else 1e-5
        assert relative(actual[name].double(), expected[name]) < bound, name


def test_nothing_is_left_unwritten():
    """Uninitialised memory is NaN in this mode: nothing of it may show."""
    tensors = arguments(3, 5, d=16, dtype=torch.float32)
    grad = torch.randn_like(tensors[0])
    expected = outputs_and_gradients(directional_scan, tensors, grad)
    torch.use_deterministic_algorithms(True)
    try:
        actual = outputs_and_gradients(directional_scan, tensors, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_baseline_of_the_benchmark_forms_the_same_gains():
    spec = importlib.util.spec_from_file_location('per_token', ROOT / 'benchmarks/per_token.py')
    per_token = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(per_token)
    z, _, content, *memories = arguments(3, 17, d=16, dtype=torch.float32, grad=False)[:7]
    walks = launch.Scan.of(z, content, range(4), 17, 3)
    ours, plain = (f(walks, z, *memories) for f in (launch.chunk_gains, per_token.chunk_gains))
    assert relative(ours, plain) < 1e-6


def test_a_map_beyond_the_index_range_is_refused():
    z = torch.empty(1).expand(1, 2**15, 2**15, 16)
    content = torch.empty(1).expand(4, 1, 16, 16)
    with pytest.raises(ValueError, match='fewer than 2\\^30 pixels, got 32768 x 32768'):
        launch.Scan.of(z, content, range(4), 1, 1)


def test_the_launcher_knows_the_dimensions_that_the_op_promises():
    assert tuple(launch.CHOICES) == library.GPU_KERNEL_DIMS
