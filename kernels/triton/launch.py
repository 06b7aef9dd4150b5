"""Sizes, tile and warp choices, and the launches: forward and backward of the op on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import triton

from .backward import (
    adjoint_kernel,
    content_kernel,
    merge_kernel,
    outer_products_kernel,
    prefix_kernel,
)
from .forward import gains_kernel, readers_kernel, reads_kernel

TILE = 16


@dataclass(frozen=True)
class Scan:
    """The sizes of one call, with chunks no longer than the map."""

    batch: int
    height: int
    width: int
    heads: int
    d: int
    directions: tuple[int, ...]
    row_chunk: int
    col_chunk: int

    @classmethod
    def of(cls, z, content, directions: Sequence[int], row_chunk: int, col_chunk: int) -> Scan:
        batch, height, width, _ = z.shape
        heads, d = content.shape[1:3]
        tokens = height * width
        if tokens >= 2**30:
            raise ValueError(
                f'the Triton kernels take maps of fewer than 2^30 pixels, got {height} x {width}'
            )
        # An axis without directions is one chunk, which nobody walks.
        rows = any(code < 2 for code in directions)
        columns = any(code >= 2 for code in directions)
        return cls(
            batch,
            height,
            width,
            heads,
            d,
            tuple(directions),
            min(row_chunk, tokens) if rows else tokens,
            min(col_chunk, tokens) if columns else tokens,
        )

    @property
    def routes(self) -> int:
        return len(self.directions)

    @property
    def tokens(self) -> int:
        return self.height * self.width

    @property
    def codes(self) -> int:
        return sum(code << 2 * r for r, code in enumerate(self.directions))

    @property
    def chains(self) -> int:
        return self.batch * self.routes * self.heads

    @property
    def rows(self) -> bool:
        return any(code < 2 for code in self.directions)

    @property
    def columns(self) -> bool:
        return any(code >= 2 for code in self.directions)

    def chunk(self, code: int) -> int:
        return self.row_chunk if code < 2 else self.col_chunk

    def chunks(self, code: int) -> int:
        return triton.cdiv(self.tokens, self.chunk(code))

    @property
    def all_chunks(self) -> int:
        return sum(map(self.chunks, self.directions))

    @property
    def all_tiles(self) -> int:
        """Tiles of all chunks but each direction's last."""
        return sum(
            (self.chunks(code) - 1) * triton.cdiv(self.chunk(code), TILE)
            for code in self.directions
        )

    @property
    def segments(self) -> int:
        return sum(
            self.tokens // chunk * (2 if self.tokens % chunk else 1) + (self.tokens % chunk > 0)
            for chunk in (self.row_chunk, self.col_chunk)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return (
            self.height, self.width, self.heads, self.routes, self.row_chunk, self.col_chunk,
            self.codes,
        )  # fmt: skip

    def tiles(self, most: int) -> int:
        """Tiles worked through side by side: a chunk's, as a power of two, up to ``most``."""
        chunk = max(map(self.chunk, self.directions))
        return min(triton.next_power_of_2(triton.cdiv(chunk, TILE)), most)

    @property
    def block(self) -> tuple[int, int]:
        """Pixels of a block: as many along each axis that is walked as a matrix unit takes."""
        if self.rows and self.columns:
            return TILE, TILE
        return (1, 4 * TILE) if self.rows else (4 * TILE, 1)


@dataclass(frozen=True)
class Choice:
    """For one head dimension: warps, of 32 lanes; and tiles side by side in the serial kernels."""

    gains_tiles: int
    gains_warps: int  # for as many tiles
    adjoint_tiles: int
    adjoint_warps: int
    chunk_warps: int  # prefix, readers, outer products: one tile or matrix at a time
    pixel_warps: int


# By what the compiler says of registers and spills, see docs/performance.md.
CHOICES = {
    16: Choice(8, 8, 4, 8, 1, 8),
    32: Choice(4, 8, 2, 8, 2, 8),
    64: Choice(2, 8, 1, 8, 4, 8),
}


# Pipelining copies of what a turn loads through shared memory costs more registers than there are.
STAGES = 1


def precisions(z: Tensor) -> tuple[str, str]:
    """How float32 is multiplied in the state chain, and in the reads of pixels like z.

    AMD's matrix units multiply float32 as it is, and so does the interpreter.
    """
    if z.device.type != 'cuda' or torch.version.hip:
        return 'ieee', 'ieee'
    return nvidia_precisions(z.dtype)


def nvidia_precisions(dtype: torch.dtype) -> tuple[str, str]:
    """Float32 is three products of tf32 parts (see ``matmul``) on NVIDIA's matrix units.

    The reads of bfloat16 tokens need one: nothing is made of them but an output with fewer digits.
    """
    return 'tf32x3', 'tf32' if dtype == torch.bfloat16 else 'tf32x3'


def warps(count: int, lanes: int = 64 if torch.version.hip else 32) -> int:
    """As many warps of ``lanes`` as have the lanes of ``count`` warps of 32."""
    return max(count * 32 // lanes, 1)


def launch(kernel, grid: tuple[int, ...], *arguments, num_warps: int, **constants) -> None:
    """The one place where kernels start; a grid without programs would be an error."""
    if all(grid):
        kernel[grid](*arguments, num_warps=warps(num_warps), num_stages=STAGES, **constants)


def forward(
    z: Tensor, q: Tensor, content: Tensor, key: Tensor, value: Tensor, rate: Tensor,
    retention: Tensor, skip: Tensor, scale: Tensor,
    directions: Sequence[int], row_chunk: int, col_chunk: int, save_gains: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``mmvisionhope::directional_scan`` for head dimensions in :data:`CHOICES`, not float64."""
    scan = Scan.of(z, content, directions, row_chunk, col_chunk)
    choice = CHOICES[scan.d]
    chain, reads = precisions(z)
    content, key, value, rate, retention, scale = (
        t.contiguous() for t in (content, key, value, rate, retention, scale)
    )
    scale = scale.view_as(rate)
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    with torch.cuda.device_of(z):
        gains = chunk_gains(scan, z, key, value, rate, retention)
        readers = _readers(scan, content, scale, gains, chain)
        launch(
            reads_kernel, (_blocks(scan), scan.batch * scan.heads),
            z, *z.stride(), q, *q.stride(), readers, (scale * skip).sum(0), y, scan.segments,
            *scan.sizes, **_pixels(scan, reads), num_warps=choice.pixel_warps,
        )  # fmt: skip
    return y, gains if save_gains else gains.new_empty(*gains.shape[:2], 0, *gains.shape[3:])


def backward(
    dy: Tensor, z: Tensor, q: Tensor, content: Tensor, key: Tensor, value: Tensor, rate: Tensor,
    retention: Tensor, skip: Tensor, scale: Tensor, gains: Tensor,
    directions: Sequence[int], row_chunk: int, col_chunk: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``mmvisionhope::directional_scan_backward``: sums in a fixed order, no atomics."""
    scan = Scan.of(z, content, directions, row_chunk, col_chunk)
    choice = CHOICES[scan.d]
    chain, reads = precisions(z)
    content, key, value, rate, retention, scale = (
        t.contiguous() for t in (content, key, value, rate, retention, scale)
    )
    scale = scale.view_as(rate)
    b, h, d = scan.batch, scan.heads, scan.d
    outer = content.new_empty(b, h, scan.segments, d, d)
    # What the prefix leaves for the adjoint, see there.
    prefix = (
        *gains.new_empty(3, *gains.shape),
        *gains.new_empty(2, *gains.shape[:-1]),
        *content.new_empty(2, b, h, scan.all_tiles, d, d),
        *content.new_empty(3, b, h, scan.all_tiles, TILE, d),
        *content.new_empty(2, b, h, scan.all_tiles, TILE),
    )
    dz_r = content.new_empty(scan.routes, *z.shape)
    of_content, of_scale, *of_others = (
        content.new_empty(b, *t.shape) for t in (content, scale, key, value, rate, retention)
    )
    dgains = torch.empty_like(gains)
    dz, dq = torch.empty((2, *z.shape), dtype=z.dtype, device=z.device)
    through = content.new_empty(b, h, _blocks(scan), d)
    tiles = scan.tiles(choice.adjoint_tiles)
    memories = key, value, rate, retention
    with torch.cuda.device_of(z):
        readers = _readers(scan, content, scale, gains, chain)
        launch(
            outer_products_kernel, (scan.segments, b * h),
            dy, *dy.stride(), q, *q.stride(), outer, *scan.sizes,
            D=d, BLOCK=2 * TILE, PRECISION=reads, num_warps=choice.chunk_warps,
        )  # fmt: skip
        launch(
            prefix_kernel, (max(map(scan.chunks, scan.directions)) - 1, scan.chains),
            z, *z.stride(), *memories, gains, *prefix, *scan.sizes,
            D=d, PRECISION=chain, num_warps=choice.chunk_warps,
        )  # fmt: skip
        launch(
            content_kernel, (scan.chains,),
            content, scale, gains, prefix[0], outer, scan.segments, dgains, of_content, of_scale,
            *scan.sizes, D=d, PRECISION=chain, num_warps=choice.chunk_warps,
        )  # fmt: skip
        launch(
            adjoint_kernel, (scan.chains,),
            z, *z.stride(), *prefix, dgains, dz_r, *of_others, *scan.sizes,
            D=d, TILES=tiles, PRECISION=chain,
            num_warps=max(choice.adjoint_warps * tiles // choice.adjoint_tiles, 1),
        )  # fmt: skip
        launch(
            merge_kernel, (_blocks(scan), b * h),
            dy, *dy.stride(), z, *z.stride(), q, *q.stride(), readers, (scale * skip).sum(0),
            dz_r, dz, dq, through, scan.segments, *scan.sizes,
            **_pixels(scan, reads), num_warps=choice.pixel_warps,
        )  # fmt: skip
    *dmemories, dscale = (t.sum(0) for t in (of_content, *of_others, of_scale))
    # y has sum over directions of scale skip z.
    through = through.sum((0, 2))
    dskip = scale * through
    dscale += skip * through
    return dz, dq, *dmemories, dskip.sum(0) if skip.ndim == 2 else dskip, dscale.flatten(1)


def chunk_gains(
    scan: Scan, z: Tensor, key: Tensor, value: Tensor, rate: Tensor, retention: Tensor
) -> Tensor:
    """The serial part of the forward: for each chunk, the product of the gains before it."""
    choice = CHOICES[scan.d]
    tiles = scan.tiles(choice.gains_tiles)
    gains = key.new_empty(scan.batch, scan.heads, scan.all_chunks, scan.d, scan.d)
    launch(
        gains_kernel, (scan.chains,),
        z, *z.stride(), key, value, rate, retention, gains, *scan.sizes,
        D=scan.d, TILES=tiles, LOG_TILES=tiles.bit_length() - 1, PRECISION=precisions(z)[0],
        num_warps=max(choice.gains_warps * tiles // choice.gains_tiles, 1),
    )  # fmt: skip
    return gains


def _readers(scan: Scan, content: Tensor, scale: Tensor, gains: Tensor, precision: str) -> Tensor:
    readers = content.new_empty(scan.batch, scan.heads, scan.segments, scan.d, scan.d)
    launch(
        readers_kernel, (scan.segments, scan.batch * scan.heads),
        content, scale, gains, readers, *scan.sizes,
        D=scan.d, PRECISION=precision, num_warps=CHOICES[scan.d].chunk_warps,
    )  # fmt: skip
    return readers


def _blocks(scan: Scan) -> int:
    block_h, block_w = scan.block
    return triton.cdiv(scan.height, block_h) * triton.cdiv(scan.width, block_w)


def _pixels(scan: Scan, precision: str) -> dict[str, object]:
    block_h, block_w = scan.block
    return dict(
        D=scan.d, BLOCK_H=block_h, BLOCK_W=block_w, ROWS=scan.rows, COLUMNS=scan.columns,
        PRECISION=precision,
    )  # fmt: skip
