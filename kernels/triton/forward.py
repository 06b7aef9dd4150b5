"""The kernels of the forward: gains, serial over chunks; readers; reads, parallel over pixels.

Names: ``b_`` a block in registers, ``p_`` pointers, ``m_`` a mask, ``i_`` an index.
"""

import triton
import triton.language as tl

from .srnl import (
    QUERY_EPS,
    TILE,
    decays,
    identity,
    join_tiles,
    matmul,
    tile_system,
    tile_transition,
    token_quantities,
    transposed,
    written_keys,
)
from .walk import (
    chunk_at,
    direction,
    pixel_offsets,
    segment_of,
    segment_start,
    sum_before,
    walk_code,
)

SIZES = ['height', 'width', 'heads', 'routes', 'row_chunk', 'col_chunk', 'codes']


@triton.jit
def load_matrix(p, d: tl.constexpr):
    i = tl.arange(0, d)
    return tl.load(p + i[:, None] * d + i[None, :])


@triton.jit
def store_matrix(p, matrix, d: tl.constexpr):
    i = tl.arange(0, d)
    tl.store(p + i[:, None] * d + i[None, :], matrix)


@triton.jit(do_not_specialize=SIZES)
def gains_kernel(
    p_z, z_b, z_h, z_w, z_c,
    p_key, p_value, p_rate, p_retention, p_gains,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, TILES: tl.constexpr, LOG_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each chunk of one image, direction and head, the product of the gains before it.

    Serial over chunks, since each chunk's tokens are made of what the chunk before left behind.
    The tiles of a chunk are solved side by side, TILES at a time, then joined by a tree. The last
    chunk's gain is never used.
    """
    i_chain = tl.program_id(0)
    i_h = i_chain % heads
    i_r = i_chain // heads % routes
    i_b = (i_chain // heads // routes).to(tl.int64)
    code, chunk, chunks, first, all_chunks, first_tile, all_tiles = direction(
        codes, i_r, routes, height, width, row_chunk, col_chunk
    )
    i_d = tl.arange(0, D)
    i_t = tl.arange(0, TILES * TILE)
    p_z += i_b * z_b + (i_h * D + i_d[None, :]).to(tl.int64) * z_c
    p_gains += ((i_b * heads + i_h) * all_chunks + first) * D * D
    i_memory = i_r * heads + i_h
    b_key = load_matrix(p_key + i_memory * D * D, D)
    b_value = load_matrix(p_value + i_memory * D * D, D)
    b_rate = tl.load(p_rate + i_memory * D + i_d)
    b_retention = tl.load(p_retention + i_memory * D + i_d)

    b_product = identity(D)
    store_matrix(p_gains, b_product, D)
    groups = tl.cdiv(chunk, TILES * TILE)
    m_next = i_t < chunk
    p_next = p_z + pixel_offsets(i_t, code, height, width, z_h, z_w)[:, None]
    b_next = tl.load(p_next, mask=m_next[:, None] & (chunks > 1), other=0.0)
    for i_chunk in range(chunks - 1):
        b_gain = identity(D)
        for i_group in range(groups):
            b_x, m_x = b_next.to(tl.float32), m_next
            # The tokens of the next turn are asked for before this one's long chain begins.
            last = i_group == groups - 1
            i_next = tl.where(last, 0, (i_group + 1) * TILES * TILE) + i_t
            i_next_chunk = tl.where(last, i_chunk + 1, i_chunk)
            m_next = (i_next < chunk) & (i_next_chunk < chunks - 1)
            i_next += i_next_chunk * chunk
            p_next = p_z + pixel_offsets(i_next, code, height, width, z_h, z_w)[:, None]
            b_next = tl.load(p_next, mask=m_next[:, None], other=0.0)

            b_k, b_delta, b_step, b_log_alpha, _ = token_quantities(
                b_x, m_x, b_key, b_value, b_rate, b_retention, PRECISION
            )
            b_k = tl.reshape(b_k, (TILES, TILE, D))
            b_delta = tl.reshape(b_delta, (TILES, TILE, D))
            b_step = tl.reshape(b_step, (TILES, TILE))
            b_log_alpha = tl.reshape(b_log_alpha, (TILES, TILE))
            b_before, b_after, b_total, b_segments = decays(b_log_alpha)
            system = tile_system(b_k, b_step, b_segments, PRECISION)
            b_written = written_keys(b_k, b_step, b_after, system, PRECISION)
            b_p, b_q = tile_transition(b_k, b_delta, b_before, b_total, b_written, PRECISION)
            b_p, b_q = join_tiles(b_p, b_q, LOG_TILES, PRECISION)
            b_gain = b_p + b_q if i_group == 0 else matmul(b_gain, b_p, PRECISION) + b_q
        # All next memories at once from this chunk's, rather than one after the other from P.
        b_key = matmul(b_key, b_gain, PRECISION)
        b_value = matmul(b_value, b_gain, PRECISION)
        b_rate = tl.sum(b_rate[:, None] * b_gain, 0)
        b_retention = tl.sum(b_retention[:, None] * b_gain, 0)
        b_product = matmul(b_product, b_gain, PRECISION)
        store_matrix(p_gains + (i_chunk + 1) * D * D, b_product, D)


@triton.jit(do_not_specialize=SIZES)
def readers_kernel(
    p_content, p_scale, p_gains, p_readers,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the pixels of a segment read: sum over its axis' walks of diag(scale) content P.

    First the segments of the rows, then those of the columns.
    """
    i_segment = tl.program_id(0)
    i_h = tl.program_id(1) % heads
    i_bh = tl.program_id(1).to(tl.int64)
    tokens = height * width
    row_chunks, col_chunks = tl.cdiv(tokens, row_chunk), tl.cdiv(tokens, col_chunk)
    all_chunks = sum_before(codes, routes, row_chunks, col_chunks)
    row_segments = segment_of(tokens - 1, row_chunk, tokens) + 1
    by_rows = i_segment < row_segments
    chunk = tl.where(by_rows, row_chunk, col_chunk)
    start = segment_start(tl.where(by_rows, i_segment, i_segment - row_segments), chunk, tokens)

    b_reader = tl.zeros((D, D), tl.float32)
    i_d = tl.arange(0, D)
    first = 0
    for i_r in range(routes):
        code = walk_code(codes, i_r)
        if (code < 2) == by_rows:
            i_chunk = first + chunk_at(start, code, chunk, tokens)
            b_product = load_matrix(p_gains + (i_bh * all_chunks + i_chunk) * D * D, D)
            i_memory = i_r * heads + i_h
            b_content = load_matrix(p_content + i_memory * D * D, D)
            b_scale = tl.load(p_scale + i_memory * D + i_d)
            b_reader += b_scale[:, None] * matmul(b_content, b_product, PRECISION)
        first += tl.where(code < 2, row_chunks, col_chunks)
    segments = tl.num_programs(0)
    store_matrix(p_readers + (i_bh * segments + i_segment) * D * D, b_reader, D)


@triton.jit
def mix(
    p_readers, b_x, i_line, i_along, chunk, tokens, length,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each pixel's reader, or its transpose, times b_x (lines, along, d), for one axis.

    Token ``line * length + along`` of the forward walk. A line usually lies in one segment; as many
    readers are gone through as the block's line with the most of them has.
    """
    D: tl.constexpr = b_x.shape[2]
    i_d = tl.arange(0, D)
    i_first = tl.minimum(i_line * length + tl.min(i_along, 0), tokens - 1)
    end = tl.minimum(tl.max(i_along, 0), length - 1)
    i_last = tl.minimum(i_line * length + end, tokens - 1)
    i_segment = segment_of(i_first, chunk, tokens)
    more = segment_of(i_last, chunk, tokens) - i_segment
    i_token = i_line[:, None] * length + i_along[None, :]
    i_mine = segment_of(i_token, chunk, tokens)
    b_y = tl.zeros(b_x.shape, tl.float32)
    for n in range(tl.max(more, 0) + 1):
        p_reader = p_readers + tl.minimum(i_segment + n, i_segment + more)[:, None, None] * D * D
        b_reader = tl.load(p_reader + i_d[None, :, None] * D + i_d[None, None, :])
        if not TRANSPOSED:
            b_reader = transposed(b_reader)
        b_part = matmul(b_x, b_reader, PRECISION)
        b_y += tl.where((i_mine == i_segment[:, None] + n)[:, :, None], b_part, 0.0)
    return b_y


@triton.jit
def mix_axes(
    p_readers, b_x, i_row, i_column, height, width, row_chunk, col_chunk,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(A_i + B_j) x_ij, or (A_i + B_j)^T x_ij, for pixels b_x (rows, columns, d) of one head."""
    D: tl.constexpr = b_x.shape[2]
    tokens = height * width
    b_y = tl.zeros(b_x.shape, tl.float32)
    if ROWS:
        b_y += mix(p_readers, b_x, i_row, i_column, row_chunk, tokens, width, TRANSPOSED, PRECISION)
    if COLUMNS:
        p_readers += (segment_of(tokens - 1, row_chunk, tokens) + 1) * D * D
        b_x = tl.permute(b_x, (1, 0, 2))
        b_part = mix(
            p_readers, b_x, i_column, i_row, col_chunk, tokens, height, TRANSPOSED, PRECISION
        )
        b_y += tl.permute(b_part, (1, 0, 2))
    return b_y


@triton.jit(do_not_specialize=SIZES)
def reads_kernel(
    p_z, z_b, z_h, z_w, z_c, p_q, q_b, q_h, q_w, q_c, p_readers, p_pass, p_y, segments,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y_ij = (A_i + B_j) q_ij / |q_ij| + pass z_ij for a block of pixels; y is contiguous."""
    blocks_w = tl.cdiv(width, BLOCK_W)
    i_row = tl.program_id(0) // blocks_w * BLOCK_H + tl.arange(0, BLOCK_H)
    i_column = tl.program_id(0) % blocks_w * BLOCK_W + tl.arange(0, BLOCK_W)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    i_d = tl.arange(0, D)
    i_channel = i_h * D + i_d[None, None, :]
    m_pixel = ((i_row < height)[:, None] & (i_column < width)[None, :])[:, :, None]
    i_i, i_j = i_row.to(tl.int64)[:, None, None], i_column.to(tl.int64)[None, :, None]

    b_q = tl.load(p_q + i_b * q_b + i_i * q_h + i_j * q_w + i_channel * q_c, m_pixel, other=0.0)
    b_q = b_q.to(tl.float32)
    b_y = mix_axes(
        p_readers + i_bh * segments * D * D, b_q, i_row, i_column, height, width,
        row_chunk, col_chunk, ROWS, COLUMNS, False, PRECISION,
    )  # fmt: skip
    b_norm = tl.maximum(tl.sqrt(tl.sum(b_q * b_q, 2)), QUERY_EPS)
    b_z = tl.load(p_z + i_b * z_b + i_i * z_h + i_j * z_w + i_channel * z_c, m_pixel, other=0.0)
    b_pass = tl.load(p_pass + i_h * D + i_d)
    b_y = b_y / b_norm[:, :, None] + b_pass[None, None, :] * b_z.to(tl.float32)
    p_y += ((i_b * height + i_i) * width + i_j) * (heads * D) + i_channel
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), m_pixel)
