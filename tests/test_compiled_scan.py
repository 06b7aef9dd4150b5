"""What the compiled op promises beyond test_scan.py: accuracy, repeatability, life inside torch."""

import functools
import os
import subprocess
import sys
import time

import pytest
import torch
from test_scan import NAMES, arguments, outputs_and_gradients, relative

from mmvisionhope import VisionHOPE
from mmvisionhope.ops import directional_scan, library, scan
from mmvisionhope.ops.library import directional_scan_backward_op, directional_scan_op
from mmvisionhope.ops.reference import directional_scan_reference

pytestmark = pytest.mark.skipif(
    not library.COMPILED, reason='mmvisionhope was installed without its compiled op'
)


def reference(*tensors, directions=scan.DIRECTIONS, row_chunk=None, col_chunk=None):
    return directional_scan_reference(
        *tensors,
        directions=directions,
        row_chunk=row_chunk or tensors[0].shape[2],
        col_chunk=col_chunk or tensors[0].shape[1],
    )


def errors(tensors, **options):
    """Relative RMS error of the output and every gradient, against the reference in float64."""
    grad = torch.randn_like(tensors[0])
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(lambda *a: reference(*a, **options), exact, grad.double())
    actual = outputs_and_gradients(lambda *a: directional_scan(*a, **options), tensors, grad)
    return {name: relative(actual[name].double(), expected[name]) for name in expected}


def keep_alive(tensors):
    """Retention close to one for every token, so that memories live through all chunks."""
    z, *rest = tensors
    rest[5] = rest[5].detach().abs().mul(4).requires_grad_()
    return [z.detach().abs().requires_grad_(), *rest]


@pytest.mark.parametrize(
    ('shape', 'heads', 'alive'),
    [
        ((56, 56), 2, False),
        ((56, 56), 2, True),
        ((14, 14), 8, False),
        ((14, 14), 8, True),
        ((50, 83), 2, True),
        # Alive over 66,800 tokens, float32 loses three digits of the keys' gradients; so does the
        # reference.
        ((200, 334), 2, False),
    ],
    ids=str,
)
def test_float32_accuracy(shape, heads, alive):
    tensors = arguments(*shape, heads=heads, d=16, dtype=torch.float32)
    found = errors(keep_alive(tensors) if alive else tensors)
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize('d', library.KERNEL_DIMS)
@pytest.mark.parametrize('directions', [('right',), ('up', 'left'), scan.DIRECTIONS], ids=str)
@pytest.mark.parametrize('chunk', [1, 5, 17, 1000, None])
def test_every_head_dimension_and_set_of_directions(d, directions, chunk):
    tensors = arguments(6, 11, batch=2, heads=2, d=d, routes=len(directions), dtype=torch.float32)
    found = errors(tensors, directions=directions, row_chunk=chunk, col_chunk=chunk)
    # Sums over d channels of numbers that cancel: 2e-5, and more with the square root of d.
    assert max(found.values()) < 2e-5 * max(1, d / 16) ** 0.5, found


def test_low_retention():
    """alpha about 1e-3: a block's decay underflows unless it is folded back early."""
    tensors = arguments(4, 40, d=16, dtype=torch.float32)
    tensors[0] = tensors[0].detach().abs().requires_grad_()
    tensors[6] = torch.full_like(tensors[6], -0.7).requires_grad_()
    found = errors(tensors)
    assert max(found.values()) < 2e-5, found


def test_no_output_is_left_unwritten():
    """Uninitialised memory is NaN in this mode: nothing of it may show."""
    tensors = arguments(5, 7, batch=2, heads=2, d=16, dtype=torch.float32)
    grad = torch.randn_like(tensors[0])
    expected = outputs_and_gradients(directional_scan, tensors, grad)
    torch.use_deterministic_algorithms(True)
    try:
        actual = outputs_and_gradients(directional_scan, tensors, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize('chunk', [None, 5])
@pytest.mark.parametrize(('batch', 'heads'), [(3, 2), (1, 2), (1, 1)])
def test_gradients_are_bitwise_repeatable_for_any_number_of_threads(batch, heads, chunk):
    """Whether heads are enough work for all threads, or are split by direction."""
    tensors = arguments(9, 13, batch=batch, heads=heads, d=16, dtype=torch.float32)
    grad = torch.randn_like(tensors[0])
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            scan_ = functools.partial(directional_scan, row_chunk=chunk, col_chunk=chunk)
            runs.append(outputs_and_gradients(scan_, tensors, grad))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(run[name], runs[0][name]) for name in runs[0])


def test_threads_share_the_work():
    tensors = arguments(64, 64, batch=2, heads=2, d=16, dtype=torch.float32, grad=False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        directional_scan(*tensors)
        mine, all_ = time.thread_time(), time.process_time()
        for _ in range(10):
            directional_scan(*tensors)
        mine, all_ = time.thread_time() - mine, time.process_time() - all_
    finally:
        torch.set_num_threads(threads)
    # Processor time, whatever else the machine does: half of it is the other thread's.
    assert 0.3 * all_ < mine < 0.7 * all_


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_that_of_its_own_rounding(dtype):
    """Tokens are read and written rounded, all between is float32."""
    z, q, *memories = arguments(14, 15, heads=2, d=16, dtype=torch.float32, grad=False)
    tensors = [z.to(dtype), q.to(dtype), *memories]
    grad = torch.randn_like(z).to(dtype)
    actual = outputs_and_gradients(directional_scan, [t.requires_grad_() for t in tensors], grad)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(reference, exact, grad.double())
    assert actual['y'].dtype == actual['z'].dtype == actual['q'].dtype == dtype
    for name in expected:
        # Rounding to nearest is uniform within half a unit in the last place: below eps / 2 in RMS.
        bound = torch.finfo(dtype).eps / 2 if name in ('y', 'z', 'q') else 2e-5
        assert relative(actual[name].double(), expected[name]) < bound, name


def test_what_is_kept_for_backward():
    """At 56 x 56, 24 bytes per token, head and direction beside z and q: one gain per chunk."""
    tensors = arguments(56, 56, heads=2, d=16, dtype=torch.float32)
    known = {t.untyped_storage().data_ptr() for t in tensors[:2]}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        directional_scan(*tensors)
    parameters = sum(t.untyped_storage().nbytes() for t in tensors[2:])
    assert (sum(kept.values()) - parameters) / (56 * 56 * 2 * 4) <= 24


def test_expanded_gradients_and_inputs_in_any_layout():
    tensors = arguments(4, 5, batch=2, heads=2, d=8, dtype=torch.float32)
    ones = torch.ones((), dtype=torch.float32).expand_as(tensors[0])
    expected = torch.autograd.grad(directional_scan(*tensors), tensors, ones.contiguous())
    actual = torch.autograd.grad(directional_scan(*tensors), tensors, ones)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_any_subset_of_inputs_may_require_gradients():
    tensors = arguments(3, 4, d=8, dtype=torch.float32)
    every = dict(
        zip(NAMES, torch.autograd.grad(directional_scan(*tensors).sum(), tensors), strict=True)
    )
    for name, index in zip(NAMES, range(9), strict=True):
        alone = [t.detach().requires_grad_(i == index) for i, t in enumerate(tensors)]
        (gradient,) = torch.autograd.grad(directional_scan(*alone).sum(), alone[index])
        assert torch.equal(gradient, every[name]), name


def test_a_second_derivative_is_refused():
    tensors = arguments(3, 4, d=8, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(
        directional_scan(*tensors).sum(), tensors[:1], create_graph=True
    )
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def op_arguments(save):
    tensors = arguments(3, 5, batch=2, heads=2, d=8, dtype=torch.float32)
    return (*tensors, [0, 1, 2, 3], 5, 3, save)


@pytest.mark.parametrize('save', [True, False])
def test_opcheck(save):
    torch.library.opcheck(directional_scan_op, op_arguments(save), test_utils=(
        'test_schema', 'test_faketensor', 'test_autograd_registration',
        *(['test_aot_dispatch_dynamic'] if save else []),
    ))  # fmt: skip


def test_opcheck_of_the_backward():
    inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in op_arguments(True)]
    y, gains = directional_scan_op(*inputs)
    arguments_ = (torch.randn_like(y), *inputs[:9], gains, *inputs[9:12])
    torch.library.opcheck(
        directional_scan_backward_op, arguments_, test_utils=('test_schema', 'test_faketensor')
    )


SMALL = dict(embed_dims=[16, 32], depths=[1, 1], head_dims=8)


def test_the_backbone_compiles_as_one_graph_for_changing_sizes():
    model = VisionHOPE(SMALL, out_indices=(0, 1)).eval()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for size in (64, 96):
        images = torch.randn(1, 3, size, size + 32)
        for actual, expected in zip(compiled(images), model(images), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    loss = sum(y.square().sum() for y in compiled(torch.randn(2, 3, 64, 64)))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_backbone_exports():
    model = VisionHOPE(SMALL, out_indices=(0, 1)).eval()
    images = torch.randn(1, 3, 64, 96)
    exported = torch.export.export(model, (images,))
    # Inside a submodule: the op is called with autocast switched off.
    targets = {
        str(node.target)
        for module in exported.graph_module.modules()
        if hasattr(module, 'graph')
        for node in module.graph.nodes
    }
    assert 'mmvisionhope.directional_scan.default' in targets
    for actual, expected in zip(exported.module()(images), model(images), strict=True):
        torch.testing.assert_close(actual, expected)


def test_flops_are_those_of_equation_56():
    from torch.utils.flop_counter import FlopCounterMode

    tensors = arguments(14, 14, batch=2, heads=2, d=16, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        directional_scan(*tensors)
    assert counter.get_total_flops() == 2 * 2 * library.scan_macs(14, 14, 2, 16, 14, 14)


def test_offsets_are_64_bit(tmp_path):
    """Pixels more than 2^31 elements apart, in a sparse file."""
    stride = 2**31 + 64
    big = torch.from_file(str(tmp_path / 'sparse'), shared=True, size=stride + 1024)
    z = big.as_strided((1, 2, 2, 8), (stride + 64, stride, 16, 1))
    tensors = arguments(2, 2, d=8, dtype=torch.float32, grad=False)
    z.copy_(tensors[0])
    assert torch.equal(directional_scan(z, *tensors[1:]), directional_scan(*tensors))


@pytest.mark.parametrize('capability', ['default', 'avx2'])
def test_other_instruction_sets_agree(capability, tmp_path):
    """The same wheel on an older machine: torch's own switch chooses the kernels."""
    cases = []
    for d in (16, 32, 64):
        tensors = arguments(7, 9, batch=2, heads=2, d=d, dtype=torch.float32)
        cases.append((*tensors, torch.randn_like(tensors[0])))
    torch.save(cases, tmp_path / 'in.pt')
    code = (
        'import sys, torch\n'
        'from mmvisionhope.ops import directional_scan\n'
        'folder = sys.argv[1]\n'
        'out = []\n'
        'for *tensors, grad in torch.load(f"{folder}/in.pt"):\n'
        '    y = directional_scan(*tensors)\n'
        '    out.append((y.detach(), *torch.autograd.grad(y, tensors, grad)))\n'
        'torch.save(out, f"{folder}/out.pt")\n'
    )
    environment = {**os.environ, 'ATEN_CPU_CAPABILITY': capability}
    subprocess.run([sys.executable, '-c', code, str(tmp_path)], env=environment, check=True)
    for (*tensors, grad), theirs in zip(cases, torch.load(tmp_path / 'out.pt'), strict=True):
        here = outputs_and_gradients(directional_scan, tensors, grad)
        for name, there in zip(here, theirs, strict=True):
            assert relative(there, here[name]) < 1e-5, name


@pytest.mark.parametrize('name', ['rate', 'retention'])
def test_a_diverged_memory_shows(name):
    """NaN must not disappear in a clamp."""
    tensors = arguments(4, 5, heads=1, d=16, dtype=torch.float32, grad=False)
    tensors[NAMES.index(name)][0, 0, 3] = float('nan')
    assert directional_scan(*tensors).isnan().any()


def test_without_the_extension_it_says_once_what_to_do(monkeypatch):
    monkeypatch.setattr(library, 'COMPILED', False)
    monkeypatch.setattr(scan, 'COMPILED', False)
    scan._warn_slow.cache_clear()
    tensors = arguments(3, 4, d=8, dtype=torch.float32, grad=False)
    with pytest.warns(UserWarning, match='plain PyTorch.*pip install --no-build-isolation') as seen:
        slow = directional_scan(*tensors)
        directional_scan(*tensors)
    assert len(seen) == 1
    monkeypatch.undo()
    torch.testing.assert_close(slow, directional_scan(*tensors))


def test_a_head_dimension_without_kernel_says_so():
    scan._warn_slow.cache_clear()
    with pytest.warns(UserWarning, match=r'heads of \(4, 8, 16, 32, 64\) channels, not of 12'):
        directional_scan(*arguments(3, 4, d=12, dtype=torch.float32, grad=False))
