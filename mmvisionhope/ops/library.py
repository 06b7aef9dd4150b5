"""``directional_scan`` as an operator of torch: schema, fake, autograd, FLOPs, kernels per device.

An operator rather than plain functions, so that ``torch.compile``, ``torch.export``, activation
checkpointing and data parallelism see one opaque node with a known gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from .reference import COLUMN_MAJOR, ROW_MAJOR

try:
    import mmvisionhope._C  # noqa: F401 - loading it registers torch.ops.mmvisionhope_cpu
except ImportError:
    COMPILED = False
else:
    COMPILED = True

DIRECTIONS: tuple[str, ...] = ROW_MAJOR + COLUMN_MAJOR
# Head dimensions that the kernels are compiled for.
KERNEL_DIMS = (4, 8, 16, 32, 64)
# The same on GPUs, where a product of matrices has at least 16 rows.
GPU_KERNEL_DIMS = (16, 32, 64)
TRITON = importlib.util.find_spec('triton') is not None


def has_kernel(z: Tensor, d: int) -> bool:
    """Whether a kernel covers these tokens; the reference covers everything."""
    if z.device.type == 'cuda':  # AMD's too, under ROCm
        return TRITON and d in GPU_KERNEL_DIMS and z.dtype != torch.float64
    return z.device.type == 'cpu' and COMPILED and d in KERNEL_DIMS


# The schema is defined here, so that the operator exists without the extension. Defined by hand:
# torch.library.custom_op's wrappers cost about 0.2 ms in a forward and backward.
_library = torch.library.Library('mmvisionhope', 'DEF')
_ARGUMENTS = (
    'Tensor z, Tensor q, Tensor content, Tensor key, Tensor value, Tensor rate, Tensor retention, '
    'Tensor skip, Tensor scale'
)
# The scan, and with save_gains what its backward needs besides the arguments. directions are
# indices into DIRECTIONS; memories are float32 (float64 with float64 tokens). The gains are
# (B, nh, chunks of all directions, d, d): for each chunk the product of the gains of those before
# it in its scan, so that its boundary memories are the initial ones times that (Appendix B.4).
_library.define(
    f'directional_scan({_ARGUMENTS}, SymInt[] directions, SymInt row_chunk, SymInt col_chunk, '
    'bool save_gains) -> (Tensor, Tensor)',
    tags=torch.Tag.pt2_compliant_tag,
)
# Gradients of z, q, content, key, value, rate, retention, skip and scale.
_library.define(
    f'directional_scan_backward(Tensor dy, {_ARGUMENTS}, Tensor gains, SymInt[] directions, '
    'SymInt row_chunk, SymInt col_chunk) -> '
    '(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)',
    tags=torch.Tag.pt2_compliant_tag,
)
directional_scan_op = torch.ops.mmvisionhope.directional_scan.default
directional_scan_backward_op = torch.ops.mmvisionhope.directional_scan_backward.default
if COMPILED:
    _library.impl('directional_scan', torch.ops.mmvisionhope_cpu.forward.default, 'CPU')
    _library.impl('directional_scan_backward', torch.ops.mmvisionhope_cpu.backward.default, 'CPU')


def _triton_forward(*arguments):
    from .triton_kernels import launch  # on first use: importing triton takes a second

    return launch.forward(*arguments)


def _triton_backward(*arguments):
    from .triton_kernels import launch

    return launch.backward(*arguments)


if TRITON:
    _library.impl('directional_scan', _triton_forward, 'CUDA')
    _library.impl('directional_scan_backward', _triton_backward, 'CUDA')


def scan_macs(
    height: int, width: int, heads: int, d: int, row_chunk: int, col_chunk: int, routes: int = 4
) -> int:
    """The recurrent terms of Equation 56 for one image: token quantities, gains and reads; then the
    memories at chunk ends. Half of the directions are taken to be row-major."""
    tokens = height * width
    per_token = routes * tokens * heads * (6 * d**2 + 20 * d)
    chunk_ends = (
        heads * tokens * (3 * d**3 + 2 * d**2) * routes / 2 * (1 / row_chunk + 1 / col_chunk)
    )
    return round(per_token + chunk_ends)


def _chunks(tokens: int, directions: Sequence[int], row_chunk: int, col_chunk: int) -> int:
    rows = sum(DIRECTIONS[r] in ROW_MAJOR for r in directions)
    columns = len(directions) - rows
    return rows * -(-tokens // row_chunk) + columns * -(-tokens // col_chunk)


@torch.library.register_fake('mmvisionhope::directional_scan', lib=_library)
def _fake(
    z, q, content, key, value, rate, retention, skip, scale,
    directions, row_chunk, col_chunk, save_gains,
):  # fmt: skip
    batch, height, width, _ = z.shape
    heads, d = content.shape[1:3]
    chunks = _chunks(height * width, directions, row_chunk, col_chunk) if save_gains else 0
    return z.new_empty(z.shape), content.new_empty(batch, heads, chunks, d, d)


@torch.library.register_fake('mmvisionhope::directional_scan_backward', lib=_library)
def _backward_fake(
    dy, z, q, content, key, value, rate, retention, skip, scale, gains,
    directions, row_chunk, col_chunk,
):  # fmt: skip
    return tuple(
        t.new_empty(t.shape) for t in (z, q, content, key, value, rate, retention, skip, scale)
    )


class _DirectionalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, *arguments):
        *tensors, ctx.directions, ctx.row_chunk, ctx.col_chunk, _ = arguments
        with torch._C._AutoDispatchBelowAutograd():
            y, gains = directional_scan_op.redispatch(keys, *arguments)
        ctx.save_for_backward(*tensors, gains)
        ctx.mark_non_differentiable(gains)
        return y, gains

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        gradients = directional_scan_backward_op(
            dy, *ctx.saved_tensors, ctx.directions, ctx.row_chunk, ctx.col_chunk
        )
        return None, *gradients, None, None, None, None


def _autograd(keys, *arguments):
    keys = keys & torch._C._after_autograd_keyset
    if torch.is_grad_enabled() and any(t.requires_grad for t in arguments[:9]):
        return _DirectionalScan.apply(keys, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return directional_scan_op.redispatch(keys, *arguments)


_library.impl('directional_scan', _autograd, 'Autograd', with_keyset=True)


@register_flop_formula(torch.ops.mmvisionhope.directional_scan)
def _flops(z, q, content, *args, out_shape=None, **kwargs) -> int:
    directions, row_chunk, col_chunk = args[6:9]
    return _scan_flops(z, content, directions, row_chunk, col_chunk)


@register_flop_formula(torch.ops.mmvisionhope.directional_scan_backward)
def _backward_flops(dy, z, q, content, *args, out_shape=None, **kwargs) -> int:
    """As for a convolution, twice the forward."""
    directions, row_chunk, col_chunk = args[7:10]
    return 2 * _scan_flops(z, content, directions, row_chunk, col_chunk)


def _scan_flops(z, content, directions, row_chunk, col_chunk) -> int:
    batch, height, width, _ = z
    _, heads, d, _ = content
    macs = 0
    for r in directions:
        chunk = row_chunk if DIRECTIONS[r] in ROW_MAJOR else col_chunk
        macs += scan_macs(height, width, heads, d, chunk, chunk, routes=1)
    return 2 * batch * macs
