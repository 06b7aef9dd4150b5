"""The kernels of the backward: prefix, outer products, adjoint (serial over chunks), merge.

Names as in the forward. ../README.md derives the adjoint.
"""

import triton
import triton.language as tl

from .forward import SIZES, load_matrix, mix_axes, store_matrix
from .srnl import (
    QUERY_EPS,
    TILE,
    decays,
    identity,
    matmul,
    solve_transposed,
    tile_system,
    tile_transition,
    token_gradients,
    token_quantities,
    transposed,
    written_keys,
)
from .walk import direction, pixel_offsets, segment_of, segment_start, walk_code


@triton.jit(do_not_specialize=SIZES)
def prefix_kernel(
    p_z, z_b, z_h, z_w, z_c,
    p_key, p_value, p_rate, p_retention, p_gains,
    p_chunk_gains, p_key_b, p_value_b, p_rate_b, p_retention_b,
    p_starts, p_suffixes, p_keys, p_written, p_updates, p_steps, p_log_alphas,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's gain again, and what the adjoint needs of it; parallel, one program per chunk.

    Per chunk: also the boundary memories. Per tile: the gain it starts from and the product of the
    transitions after it. Per token: key, written key, update u_t = G_{t-1} k_t + delta_t, step and
    log(alpha).
    """
    i_chunk = tl.program_id(0)
    i_chain = tl.program_id(1)
    i_h = i_chain % heads
    i_r = i_chain // heads % routes
    i_b = (i_chain // heads // routes).to(tl.int64)
    code, chunk, chunks, first, all_chunks, first_tile, all_tiles = direction(
        codes, i_r, routes, height, width, row_chunk, col_chunk
    )
    if i_chunk >= chunks - 1:  # a grid has room for the direction with the most chunks
        return
    tiles = tl.cdiv(chunk, TILE)
    i_table = (i_b * heads + i_h) * all_chunks + first + i_chunk
    i_first_tile = (i_b * heads + i_h) * all_tiles + first_tile + i_chunk * tiles
    i_d = tl.arange(0, D)
    i_t = tl.arange(0, TILE)
    i_row = i_t[:, None] * D + i_d[None, :]
    p_z += i_b * z_b + (i_h * D + i_d[None, :]).to(tl.int64) * z_c
    p_starts += i_first_tile * D * D
    p_suffixes += i_first_tile * D * D
    p_keys += i_first_tile * TILE * D
    p_written += i_first_tile * TILE * D
    p_updates += i_first_tile * TILE * D
    p_steps += i_first_tile * TILE + i_t
    p_log_alphas += i_first_tile * TILE + i_t
    i_memory = i_r * heads + i_h
    b_product = load_matrix(p_gains + i_table * D * D, D)
    b_key = matmul(load_matrix(p_key + i_memory * D * D, D), b_product, PRECISION)
    b_value = matmul(load_matrix(p_value + i_memory * D * D, D), b_product, PRECISION)
    b_rate = tl.load(p_rate + i_memory * D + i_d)
    b_rate = tl.sum(b_rate[:, None] * b_product, 0)
    b_retention = tl.load(p_retention + i_memory * D + i_d)
    b_retention = tl.sum(b_retention[:, None] * b_product, 0)
    store_matrix(p_key_b + i_table * D * D, b_key, D)
    store_matrix(p_value_b + i_table * D * D, b_value, D)
    tl.store(p_rate_b + i_table * D + i_d, b_rate)
    tl.store(p_retention_b + i_table * D + i_d, b_retention)

    b_gain = identity(D)
    for i_tile in range(tiles):
        i_token = i_tile * TILE + i_t
        m_x = i_token < chunk
        i_token += i_chunk * chunk
        p_x = p_z + pixel_offsets(i_token, code, height, width, z_h, z_w)[:, None]
        b_x = tl.load(p_x, mask=m_x[:, None], other=0.0).to(tl.float32)
        b_k, b_delta, b_step, b_log_alpha, _ = token_quantities(
            b_x, m_x, b_key, b_value, b_rate, b_retention, PRECISION
        )
        tl.store(p_keys + i_tile * TILE * D + i_row, b_k)
        tl.store(p_steps + i_tile * TILE, b_step)
        tl.store(p_log_alphas + i_tile * TILE, b_log_alpha)
        b_recalled = matmul(b_k, transposed(b_gain), PRECISION)[None, :, :]
        b_k, b_delta, b_step = b_k[None, :, :], b_delta[None, :, :], b_step[None, :]
        b_before, b_after, b_total, b_segments = decays(b_log_alpha[None, :])
        system = tile_system(b_k, b_step, b_segments, PRECISION)
        b_written = written_keys(b_k, b_step, b_after, system, PRECISION)
        b_updates = b_before[:, :, None] * b_recalled + b_delta
        b_updates = solve_transposed(system, b_updates, PRECISION)
        b_p, b_q = tile_transition(b_k, b_delta, b_before, b_total, b_written, PRECISION)
        b_p = tl.reshape(b_p, (D, D))
        tl.store(p_written + i_tile * TILE * D + i_row, tl.reshape(b_written, (TILE, D)))
        tl.store(p_updates + i_tile * TILE * D + i_row, tl.reshape(b_updates, (TILE, D)))
        store_matrix(p_starts + i_tile * D * D, b_gain, D)
        store_matrix(p_suffixes + i_tile * D * D, b_p, D)
        b_gain = matmul(b_gain, b_p, PRECISION) + tl.reshape(b_q, (D, D))
    store_matrix(p_chunk_gains + i_table * D * D, b_gain, D)

    # Each tile's transition gives way to the product of those after it.
    b_suffix = identity(D)
    for i_back in range(tiles):
        p_suffix = p_suffixes + (tiles - 1 - i_back) * D * D
        tl.debug_barrier()
        b_p = load_matrix(p_suffix, D)
        tl.debug_barrier()
        store_matrix(p_suffix, b_suffix, D)
        b_suffix = matmul(b_p, b_suffix, PRECISION)


@triton.jit(do_not_specialize=SIZES)
def outer_products_kernel(
    p_dy, dy_b, dy_h, dy_w, dy_c, p_q, q_b, q_h, q_w, q_c, p_outer,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of each segment's reader: sum over its pixels of dy q^T / |q|."""
    i_segment = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    tokens = height * width
    row_segments = segment_of(tokens - 1, row_chunk, tokens) + 1
    by_rows = i_segment < row_segments
    chunk = tl.where(by_rows, row_chunk, col_chunk)
    i_own = tl.where(by_rows, i_segment, i_segment - row_segments)
    start = segment_start(i_own, chunk, tokens)
    end = tl.minimum(segment_start(i_own + 1, chunk, tokens), tokens)
    code = tl.where(by_rows, 0, 2)

    i_channel = i_h * D + tl.arange(0, D)[None, :]
    p_dy += i_b * dy_b + i_channel * dy_c
    p_q += i_b * q_b + i_channel * q_c
    b_outer = tl.zeros((D, D), tl.float32)
    for i_first in range(start, end, BLOCK):
        i_token = i_first + tl.arange(0, BLOCK)
        m_token = (i_token < end)[:, None]
        i_dy = pixel_offsets(i_token, code, height, width, dy_h, dy_w)[:, None]
        i_q = pixel_offsets(i_token, code, height, width, q_h, q_w)[:, None]
        b_dy = tl.load(p_dy + i_dy, m_token, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + i_q, m_token, other=0.0).to(tl.float32)
        b_norm = tl.maximum(tl.sqrt(tl.sum(b_q * b_q, 1)), QUERY_EPS)
        b_outer += matmul(transposed(b_dy), b_q / b_norm[:, None], PRECISION)
    segments = tl.num_programs(0)
    store_matrix(p_outer + (i_bh * segments + i_segment) * D * D, b_outer, D)


@triton.jit
def reader_gradient(p_outer, i_chunk, code, chunk, row_chunk, tokens, D: tl.constexpr):
    """The gradient of what a chunk's pixels read: the sum over its segments."""
    begin = i_chunk * chunk
    end = tl.minimum(begin + chunk, tokens)
    first = segment_of(tl.where(code % 2 == 1, tokens - end, begin), chunk, tokens)
    last = segment_of(tl.where(code % 2 == 1, tokens - begin, end) - 1, chunk, tokens)
    p_outer += tl.where(code < 2, 0, segment_of(tokens - 1, row_chunk, tokens) + 1) * D * D
    b_sum = load_matrix(p_outer + first * D * D, D)
    if last > first:  # a chunk has two segments at most
        b_sum += load_matrix(p_outer + last * D * D, D)
    return b_sum


@triton.jit(do_not_specialize=SIZES)
def content_kernel(
    p_content, p_scale, p_gains, p_chunk_gains, p_outer, segments, p_dgains, p_dcontent, p_dscale,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chain's content memory and scale, and of each chunk's gain through them.

    Serial over chunks, from the last to the first, but short: no token takes part.
    """
    i_chain = tl.program_id(0)
    i_h = i_chain % heads
    i_r = i_chain // heads % routes
    i_bh = (i_chain // heads // routes).to(tl.int64) * heads + i_h
    code, chunk, chunks, first, all_chunks, first_tile, all_tiles = direction(
        codes, i_r, routes, height, width, row_chunk, col_chunk
    )
    tokens = height * width
    i_memory = i_r * heads + i_h
    i_d = tl.arange(0, D)
    p_gains += (i_bh * all_chunks + first) * D * D
    p_chunk_gains += (i_bh * all_chunks + first) * D * D
    p_dgains += (i_bh * all_chunks + first) * D * D
    p_outer += i_bh * segments * D * D
    b_scale = tl.load(p_scale + i_memory * D + i_d)
    b_initial = load_matrix(p_content + i_memory * D * D, D)
    b_dcontent = tl.zeros((D, D), tl.float32)
    b_dscale = tl.zeros((D,), tl.float32)
    for i_back in range(chunks):
        i_chunk = chunks - 1 - i_back
        b_content = matmul(b_initial, load_matrix(p_gains + i_chunk * D * D, D), PRECISION)
        if i_back > 0:  # the last chunk's gain is never used
            b_dgain = matmul(transposed(b_content), b_dcontent, PRECISION)
            store_matrix(p_dgains + i_chunk * D * D, b_dgain, D)
            b_gain = load_matrix(p_chunk_gains + i_chunk * D * D, D)
            b_dcontent = matmul(b_dcontent, transposed(b_gain), PRECISION)
        b_outer = reader_gradient(p_outer, i_chunk, code, chunk, row_chunk, tokens, D)
        b_dcontent += b_scale[:, None] * b_outer
        b_dscale += tl.sum(b_content * b_outer, 1)
    store_matrix(p_dcontent + i_chain.to(tl.int64) * D * D, b_dcontent, D)
    tl.store(p_dscale + i_chain.to(tl.int64) * D + i_d, b_dscale)


@triton.jit(do_not_specialize=SIZES)
def adjoint_kernel(
    p_z, z_b, z_h, z_w, z_c,
    p_chunk_gains, p_key_b, p_value_b, p_rate_b, p_retention_b,
    p_starts, p_suffixes, p_keys, p_written, p_updates, p_steps, p_log_alphas,
    p_dgains, p_dz, p_dkey, p_dvalue, p_drate, p_dretention,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chain's other memories and its tokens, from its last chunk to its first.

    Serial over chunks, since the gradient of a chunk's gain is made of those of the memories after
    it. ``p_dz`` has a map of float32 for each direction; the last chunk's tokens are not written.
    """
    i_chain = tl.program_id(0)
    i_h = i_chain % heads
    i_r = i_chain // heads % routes
    i_b = (i_chain // heads // routes).to(tl.int64)
    code, chunk, chunks, first, all_chunks, first_tile, all_tiles = direction(
        codes, i_r, routes, height, width, row_chunk, col_chunk
    )
    tokens = height * width
    tiles = tl.cdiv(chunk, TILE)
    channels = heads * D
    i_bh = i_b * heads + i_h
    i_d = tl.arange(0, D)
    i_t = tl.arange(0, TILES * TILE)
    i_n = tl.arange(0, TILES)
    i_square = i_d[None, :, None] * D + i_d[None, None, :]
    i_oblong = tl.arange(0, TILE)[None, :, None] * D + i_d[None, None, :]
    i_channel = i_h * D + i_d[None, :]
    p_z += i_b * z_b + i_channel.to(tl.int64) * z_c
    batch = tl.num_programs(0) // (routes * heads)
    p_dz += (i_r.to(tl.int64) * batch + i_b) * tokens * channels + i_channel
    i_first = i_bh * all_chunks + first
    i_first_tile = i_bh * all_tiles + first_tile

    # Of the memories at the end of the chunk at hand; those at a map's end have no reader.
    b_dkey = tl.zeros((D, D), tl.float32)
    b_dvalue = tl.zeros((D, D), tl.float32)
    b_drate = tl.zeros((D,), tl.float32)
    b_dretention = tl.zeros((D,), tl.float32)
    for i_back in range(chunks - 1):
        i_chunk = chunks - 2 - i_back
        i_table = i_first + i_chunk
        b_rate = tl.load(p_rate_b + i_table * D + i_d)
        b_retention = tl.load(p_retention_b + i_table * D + i_d)
        b_dgain = load_matrix(p_dgains + i_table * D * D, D)
        b_key = load_matrix(p_key_b + i_table * D * D, D)
        b_dgain += matmul(transposed(b_key), b_dkey, PRECISION)
        b_value = load_matrix(p_value_b + i_table * D * D, D)
        b_dgain += matmul(transposed(b_value), b_dvalue, PRECISION)
        b_dgain += b_rate[:, None] * b_drate[None, :]
        b_dgain += b_retention[:, None] * b_dretention[None, :]
        b_gain = load_matrix(p_chunk_gains + i_table * D * D, D)
        b_dkey = matmul(b_dkey, transposed(b_gain), PRECISION)
        b_dvalue = matmul(b_dvalue, transposed(b_gain), PRECISION)
        b_drate = tl.sum(b_gain * b_drate[None, :], 1)
        b_dretention = tl.sum(b_gain * b_dretention[None, :], 1)

        for i_group in range(tl.cdiv(tiles, TILES)):
            # What goes through the gain, from what the prefix left.
            i_tile = i_group * TILES + i_n
            m_tile = i_tile < tiles
            i_tile = i_first_tile + i_chunk * tiles + i_tile
            m_matrix = m_tile[:, None, None]
            i_matrix = i_tile[:, None, None] * D * D + i_square
            i_row = i_tile[:, None, None] * TILE * D + i_oblong
            i_line = i_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            b_suffix = tl.load(p_suffixes + i_matrix, m_matrix, other=0.0)
            # Transposed: the gradient of the gain at each tile's end.
            b_end = tl.broadcast_to(transposed(b_dgain)[None, :, :], (TILES, D, D))
            b_end = matmul(b_suffix, b_end, PRECISION)
            b_written = tl.load(p_written + i_row, m_matrix, other=0.0)
            b_step_w = matmul(b_written, b_end, PRECISION)

            b_k = tl.load(p_keys + i_row, m_matrix, other=0.0)
            b_step = tl.load(p_steps + i_line, m_tile[:, None], other=0.0)[:, :, None]
            b_log_alpha = tl.load(p_log_alphas + i_line, m_tile[:, None], other=0.0)
            b_before, b_after, b_total, b_segments = decays(b_log_alpha)
            b_start = tl.load(p_starts + i_matrix, m_matrix, other=0.0)
            b_recalled = b_before[:, :, None] * matmul(b_k, transposed(b_start), PRECISION)
            b_inner = b_total * tl.sum(tl.sum(b_start * transposed(b_end), 2), 1)
            b_inner -= tl.sum(tl.sum(b_recalled * b_step_w, 2), 1)
            b_dk = b_before[:, :, None] * matmul(b_step_w, b_start, PRECISION)
            b_u = tl.load(p_updates + i_row, m_matrix, other=0.0)
            b_step_u_w = tl.sum(b_u * b_step_w, 2)
            b_u_end = matmul(b_u, transposed(b_end), PRECISION)
            b_dk += b_step * b_after[:, :, None] * b_u_end
            b_cross = b_segments * matmul(b_u, transposed(b_step_w), PRECISION)
            b_dk -= matmul(transposed(b_cross), b_step * b_k, PRECISION)
            b_dk -= b_step * matmul(b_cross, b_k, PRECISION)

            # What goes through the tokens' quantities.
            i_token = i_group * TILES * TILE + i_t
            m_x = i_token < chunk
            i_token += i_chunk * chunk
            p_x = p_z + pixel_offsets(i_token, code, height, width, z_h, z_w)[:, None]
            b_x = tl.load(p_x, mask=m_x[:, None], other=0.0).to(tl.float32)
            # Loaded here, and again below: kept through the loop they would cost the registers of
            # each of the forms in which they are multiplied.
            b_key = load_matrix(p_key_b + i_table * D * D, D)
            b_value = load_matrix(p_value_b + i_table * D * D, D)
            b_k, b_delta, b_step, _, saved = token_quantities(
                b_x, m_x, b_key, b_value, b_rate, b_retention, PRECISION
            )
            # alpha_t <G_{t-1}, D_t> is <G_{t-1}, D_{t-1}> + step (u_t - delta_t) . w_t; the first
            # of these is b_inner less step delta_s . w_s of all tokens before.
            b_injected = tl.sum(tl.reshape(b_delta, (TILES, TILE, D)) * b_step_w, 2)
            b_kept = b_inner[:, None] - tl.cumsum(b_injected, 1) + b_step_u_w
            b_dkey_x, b_dvalue_x, b_drate_x, b_dretention_x = token_gradients(
                b_k, b_delta, b_step, saved,
                tl.reshape(b_step_u_w, (TILES * TILE,)), tl.reshape(b_kept, (TILES * TILE,)),
                tl.reshape(b_step_w, (TILES * TILE, D)), tl.reshape(b_dk, (TILES * TILE, D)),
            )  # fmt: skip
            b_key = load_matrix(p_key_b + i_table * D * D, D)
            b_value = load_matrix(p_value_b + i_table * D * D, D)
            b_dx = matmul(b_dkey_x, b_key, PRECISION) + matmul(b_dvalue_x, b_value, PRECISION)
            b_dx += b_drate_x[:, None] * b_rate[None, :]
            b_dx += b_dretention_x[:, None] * b_retention[None, :]
            i_dx = pixel_offsets(i_token, code, height, width, width * channels, channels)
            tl.store(p_dz + i_dx[:, None], b_dx, m_x[:, None])

            b_drate += tl.sum(b_drate_x[:, None] * b_x, 0)
            b_dretention += tl.sum(b_dretention_x[:, None] * b_x, 0)
            b_x = tl.reshape(b_x, (TILES, TILE, D))
            b_dkey_x = transposed(tl.reshape(b_dkey_x, (TILES, TILE, D)))
            b_dvalue_x = transposed(tl.reshape(b_dvalue_x, (TILES, TILE, D)))
            b_dkey += tl.sum(matmul(b_dkey_x, b_x, PRECISION), 0)
            b_dvalue += tl.sum(matmul(b_dvalue_x, b_x, PRECISION), 0)

    i_chain = i_chain.to(tl.int64)
    store_matrix(p_dkey + i_chain * D * D, b_dkey, D)
    store_matrix(p_dvalue + i_chain * D * D, b_dvalue, D)
    tl.store(p_drate + i_chain * D + i_d, b_drate)
    tl.store(p_dretention + i_chain * D + i_d, b_dretention)


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    p_dy, dy_b, dy_h, dy_w, dy_c, p_z, z_b, z_h, z_w, z_c, p_q, q_b, q_h, q_w, q_c,
    p_readers, p_pass, p_dz_r, p_dz, p_dq, p_through, segments,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dz of a block of pixels, and its sum of dy z; dq and dz are contiguous."""
    blocks_w = tl.cdiv(width, BLOCK_W)
    i_row = tl.program_id(0) // blocks_w * BLOCK_H + tl.arange(0, BLOCK_H)
    i_column = tl.program_id(0) % blocks_w * BLOCK_W + tl.arange(0, BLOCK_W)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    i_d = tl.arange(0, D)
    i_channel = i_h * D + i_d[None, None, :]
    m_pixel = ((i_row < height)[:, None] & (i_column < width)[None, :])[:, :, None]
    i_i, i_j = i_row.to(tl.int64)[:, None, None], i_column.to(tl.int64)[None, :, None]
    tokens = height * width
    channels = heads * D
    i_out = (i_i * width + i_j) * channels + i_channel

    p_dy += i_b * dy_b + i_i * dy_h + i_j * dy_w + i_channel * dy_c
    b_dy = tl.load(p_dy, m_pixel, other=0.0).to(tl.float32)
    b_dq = mix_axes(
        p_readers + i_bh * segments * D * D, b_dy, i_row, i_column, height, width,
        row_chunk, col_chunk, ROWS, COLUMNS, True, PRECISION,
    )  # fmt: skip
    p_q += i_b * q_b + i_i * q_h + i_j * q_w + i_channel * q_c
    b_q = tl.load(p_q, m_pixel, other=0.0).to(tl.float32)
    b_norm = tl.sqrt(tl.sum(b_q * b_q, 2))
    b_inverse = 1.0 / tl.maximum(b_norm, QUERY_EPS)
    b_q *= b_inverse[:, :, None]
    # Below QUERY_EPS the query is divided by a constant.
    b_along = tl.where(b_norm >= QUERY_EPS, tl.sum(b_q * b_dq, 2), 0.0)
    b_dq = (b_dq - b_along[:, :, None] * b_q) * b_inverse[:, :, None]
    p_dq += i_b * tokens * channels
    tl.store(p_dq + i_out, b_dq.to(p_dq.dtype.element_ty), m_pixel)

    p_z += i_b * z_b + i_i * z_h + i_j * z_w + i_channel * z_c
    b_z = tl.load(p_z, m_pixel, other=0.0).to(tl.float32)
    b_through = tl.sum(tl.sum(b_dy * b_z, 1), 0)
    tl.store(p_through + (i_bh * tl.num_programs(0) + tl.program_id(0)) * D + i_d, b_through)
    b_dz = tl.load(p_pass + i_h * D + i_d)[None, None, :] * b_dy
    batch = tl.num_programs(1) // heads
    for i_r in range(routes):
        code = walk_code(codes, i_r)
        chunk = tl.where(code < 2, row_chunk, col_chunk)
        i_token = tl.where(
            code < 2,
            i_row[:, None] * width + i_column[None, :],
            i_column[None, :] * height + i_row[:, None],
        )
        i_token = tl.where(code % 2 == 1, tokens - 1 - i_token, i_token)
        # The last chunk's tokens are only read from.
        m_token = m_pixel & (i_token < (tl.cdiv(tokens, chunk) - 1) * chunk)[:, :, None]
        p_own = p_dz_r + (i_r * batch.to(tl.int64) + i_b) * tokens * channels
        b_dz += tl.load(p_own + i_out, m_token, other=0.0)
    p_dz += i_b * tokens * channels
    tl.store(p_dz + i_out, b_dz.to(p_dz.dtype.element_ty), m_pixel)
