"""``directional_scan``: the one public entry to the recurrence."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .library import (
    COMPILED,
    DIRECTIONS,
    GPU_KERNEL_DIMS,
    KERNEL_DIMS,
    TRITON,
    directional_scan_op,
    has_kernel,
)
from .reference import FULL_MODEL, Dynamics, directional_scan_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MEMORIES = ('content', 'key', 'value', 'rate', 'retention', 'skip', 'scale')


def directional_scan(
    z: Tensor,
    q: Tensor,
    content: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    retention: Tensor,
    skip: Tensor,
    scale: Tensor,
    directions: Sequence[str] = DIRECTIONS,
    row_chunk: int | None = None,
    col_chunk: int | None = None,
    dynamics: Dynamics | None = None,
) -> Tensor:
    r"""Self-referential nested learning along directional scans of a feature map, fused.

    Each direction r walks the map with five memories of its own. Inside a chunk that starts after
    token b, the memories at b generate (Equations 15, 16)

    .. math::
        k_t = M^k_b z_t / \sqrt{|M^k_b z_t|^2 + 10^{-6}}, \quad v_t = M^v_b z_t, \quad
        \eta_t = 0.025\,\mathrm{softplus}(m^\eta_b z_t), \quad
        \alpha_t = \sigma(m^\alpha_b z_t + \log 9)

    and answer the query, :math:`o_t = M^m_b\, q_t / |q_t|`; with :math:`\delta_t = k_t - v_t` and
    the executed step :math:`\tilde\eta_t` of Equations 19 and 20, every memory is updated by

    .. math::
        M_t = M_{t-1} (\alpha_t I - \tilde\eta_t k_t k_t^\top) - \tilde\eta_t M_b \delta_t k_t^\top
        .

    The output is :math:`y = \sum_r \lambda_r \odot (o^r + \mathrm{skip} \odot z)` (Equation 26).
    With H = 1 and ``directions=('right',)`` this is SRNL on a plain sequence.

    Args:
        z: tokens, (B, H, W, nh * d), float16, bfloat16, float32 or float64, any strides.
        q: raw queries, like ``z``; normalised per head inside.
        content: initial content memories, (R, nh, d, d), R = len(directions).
        key: initial key memories, (R, nh, d, d).
        value: initial value memories, (R, nh, d, d).
        rate: initial learning-rate memories, (R, nh, d).
        retention: initial retention memories, (R, nh, d).
        skip: weight of z in each direction's output, (nh, d) or (R, nh, d).
        scale: weight of each direction, (R, nh * d).
        directions: distinct names out of ``'right'`` (row-major), ``'left'`` (its reverse),
            ``'down'`` (column-major) and ``'up'`` (its reverse).
        row_chunk: tokens per chunk for right and left; None is W. May exceed H * W.
        col_chunk: tokens per chunk for down and up; None is H.
        dynamics: an ablation of the above, which runs in plain PyTorch; None is the full model.

    Returns:
        y, shaped and typed like ``z``, contiguous. Memories and step arithmetic are float32
        whatever the dtype of ``z``, and under autocast too; float64 if ``z`` is. Gradients exist
        for every tensor argument; only first-order ones are part of the contract.

    Raises:
        TypeError: an argument is not a floating-point tensor, or z and q differ in dtype or have
            another one than the four above.
        NotImplementedError: forward-mode differentiation is asked for.
        ValueError: a shape, device, direction or chunk length does not fit; the message names it.

    Example:
        >>> B, H, W, nh, d, R = 2, 6, 5, 3, 8, 4
        >>> z, q = torch.randn(2, B, H, W, nh * d).unbind()
        >>> content, key, value = torch.randn(3, R, nh, d, d).mul(0.01).unbind()
        >>> rate, retention = torch.zeros(2, R, nh, d).unbind()
        >>> skip, scale = torch.zeros(nh, d), torch.ones(R, nh * d)
        >>> directional_scan(z, q, content, key, value, rate, retention, skip, scale).shape
        torch.Size([2, 6, 5, 24])
    """
    tensors = dict(
        z=z,
        q=q,
        content=content,
        key=key,
        value=value,
        rate=rate,
        retention=retention,
        skip=skip,
        scale=scale,
    )
    directions = tuple([directions] if isinstance(directions, str) else directions)
    _check_directions(directions)
    _check_tensors(tensors, len(directions))
    row_chunk = _chunk('row_chunk', row_chunk, z.shape[2])
    col_chunk = _chunk('col_chunk', col_chunk, z.shape[1])

    if not torch.compiler.is_compiling():
        _refuse_forward_mode(tensors)
    device = z.device.type
    if torch.is_autocast_enabled(device) and z.dtype != torch.float64:
        # As for any operator under autocast, which leaves float64 alone; the memories are the
        # parameters that stay float32.
        tensors['z'], tensors['q'] = (x.to(torch.get_autocast_dtype(device)) for x in (z, q))
    dtype = tensors['z'].dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    memories = {name: tensors[name].to(compute) for name in MEMORIES}
    with torch.autocast(device, enabled=False):
        full = dynamics is None or Dynamics.of(dynamics) == FULL_MODEL
        if full and has_kernel(z, content.shape[-1]):
            save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
            codes = [DIRECTIONS.index(name) for name in directions]
            y, _ = directional_scan_op(
                tensors['z'], tensors['q'], *memories.values(), codes, row_chunk, col_chunk, save
            )
            return y
        if not torch.compiler.is_compiling():
            _warn_slow(_why_slow(z, content.shape[-1]) if full else f'kernels have no {dynamics}')
        y = directional_scan_reference(
            tensors['z'].to(compute),
            tensors['q'].to(compute),
            **memories,
            directions=directions,
            row_chunk=row_chunk,
            col_chunk=col_chunk,
            dynamics=dynamics or FULL_MODEL,
        )
        return y.to(dtype)


@functools.cache  # once for each reason
def _warn_slow(reason: str) -> None:
    warnings.warn(f'directional_scan runs in plain PyTorch, which is slow: {reason}', stacklevel=4)


def _why_slow(z: Tensor, d: int) -> str:
    if z.device.type == 'cuda':
        if not TRITON:
            return 'its GPU kernels need Triton; install it by `pip install triton`'
        return (
            f'the GPU kernels are for heads of {GPU_KERNEL_DIMS} channels and float16, bfloat16 or '
            f'float32, not for {d} and {z.dtype}'
        )
    if z.device.type != 'cpu':
        return f'there are kernels for cpu and cuda, not for {z.device.type}'
    if not COMPILED:
        return (
            'mmvisionhope was installed without its compiled op; install g++, then it again by '
            '`pip install --no-build-isolation`'
        )
    return f'the compiled op is for heads of {KERNEL_DIMS} channels, not of {d}'


def _check_directions(directions: tuple[str, ...]) -> None:
    unknown = [name for name in directions if name not in DIRECTIONS]
    if unknown or not directions or len(set(directions)) < len(directions):
        raise ValueError(f'directions must be distinct names out of {DIRECTIONS}, got {directions}')


def _check_tensors(tensors: dict[str, Tensor], routes: int) -> None:
    z, content = tensors['z'], tensors['content']
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f'{name} must be a floating-point tensor, got {kind}')
        if tensor.device != z.device:
            raise ValueError(f'{name} is on {tensor.device} but z is on {z.device}')
    if z.dtype not in DTYPES:
        raise TypeError(f'z must be {", ".join(map(str, DTYPES))}, got {z.dtype}')
    if tensors['q'].dtype != z.dtype:
        raise TypeError(f'q must have the dtype of z, {z.dtype}, got {tensors["q"].dtype}')
    if z.ndim != 4 or 0 in z.shape[1:]:
        raise ValueError(
            f'z must be (B, H, W, channels) with H, W, channels >= 1, got {tuple(z.shape)}'
        )
    if content.ndim != 4 or content.shape[2] != content.shape[3]:
        raise ValueError(f'content must be (R, nh, d, d), got {tuple(content.shape)}')
    heads, d = content.shape[1:3]
    if heads * d != z.shape[3]:
        raise ValueError(f'z has {z.shape[3]} channels but content has {heads} heads of {d}')
    square, row = (routes, heads, d, d), (routes, heads, d)
    expected: dict[str, list[tuple[int, ...]]] = dict(
        q=[tuple(z.shape)],
        content=[square],
        key=[square],
        value=[square],
        rate=[row],
        retention=[row],
        skip=[(heads, d), row],
        scale=[(routes, heads * d)],
    )
    for name, shapes in expected.items():
        if tuple(tensors[name].shape) not in shapes:
            accepted = ' or '.join(map(str, shapes))
            raise ValueError(
                f'{name} must be {accepted} for z {tuple(z.shape)} and {routes} directions, '
                f'got {tuple(tensors[name].shape)}'
            )


def _refuse_forward_mode(tensors: dict[str, Tensor]) -> None:
    """An operator without a formula for it would pass on a tangent of zero."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors.values()):
        raise NotImplementedError(
            'directional_scan has gradients by backward() and torch.autograd.grad, '
            'not by forward-mode differentiation'
        )


def _chunk(name: str, chunk: int | None, default: int) -> int:
    if chunk is None:
        return default
    if isinstance(chunk, np.integer):
        chunk = int(chunk)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f'{name} must be a positive integer or None, got {chunk!r}')
    return chunk
