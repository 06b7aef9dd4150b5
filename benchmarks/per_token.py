"""The gains of chunks by a straightforward Triton kernel, token after token: the GPU baseline."""

import torch
import triton
import triton.language as tl

from mmvisionhope.ops.triton_kernels import launch
from mmvisionhope.ops.triton_kernels.forward import SIZES, load_matrix, store_matrix
from mmvisionhope.ops.triton_kernels.srnl import identity, token_quantities
from mmvisionhope.ops.triton_kernels.walk import direction, pixel_offsets


@triton.jit(do_not_specialize=SIZES)
def per_token_kernel(
    p_z, z_b, z_h, z_w, z_c,
    p_key, p_value, p_rate, p_retention, p_gains,
    height, width, heads, routes, row_chunk, col_chunk, codes,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same table as ``gains_kernel``: quantities by tiles of 16, then G token by token."""
    i_chain = tl.program_id(0)
    i_h = i_chain % heads
    i_r = i_chain // heads % routes
    i_b = (i_chain // heads // routes).to(tl.int64)
    code, chunk, chunks, first, all_chunks, first_tile, all_tiles = direction(
        codes, i_r, routes, height, width, row_chunk, col_chunk
    )
    i_d = tl.arange(0, D)
    i_t = tl.arange(0, 16)
    p_z += i_b * z_b + (i_h * D + i_d[None, :]).to(tl.int64) * z_c
    p_gains += ((i_b * heads + i_h) * all_chunks + first) * D * D
    i_memory = i_r * heads + i_h
    b_key = load_matrix(p_key + i_memory * D * D, D)
    b_value = load_matrix(p_value + i_memory * D * D, D)
    b_rate = tl.load(p_rate + i_memory * D + i_d)
    b_retention = tl.load(p_retention + i_memory * D + i_d)
    b_product = identity(D)
    store_matrix(p_gains, b_product, D)
    for i_chunk in range(chunks - 1):
        b_gain = identity(D)
        for i_tile in range(tl.cdiv(chunk, 16)):
            i_token = i_tile * 16 + i_t
            m_x = i_token < chunk
            i_token += i_chunk * chunk
            p_x = p_z + pixel_offsets(i_token, code, height, width, z_h, z_w)[:, None]
            b_x = tl.load(p_x, mask=m_x[:, None], other=0.0).to(tl.float32)
            b_k, b_delta, b_step, b_log_alpha, saved = token_quantities(
                b_x, m_x, b_key, b_value, b_rate, b_retention, PRECISION
            )
            for t in range(16):
                own = i_t == t
                b_k_t = tl.sum(tl.where(own[:, None], b_k, 0.0), 0)
                b_delta_t = tl.sum(tl.where(own[:, None], b_delta, 0.0), 0)
                step = tl.sum(tl.where(own, b_step, 0.0), 0)
                alpha = tl.exp(tl.sum(tl.where(own, b_log_alpha, 0.0), 0))
                b_u = tl.sum(b_gain * b_k_t[None, :], 1) + b_delta_t
                b_gain = alpha * b_gain - step * b_u[:, None] * b_k_t[None, :]
        b_key = tl.sum(b_key[:, :, None] * b_gain[None, :, :], 1)
        b_value = tl.sum(b_value[:, :, None] * b_gain[None, :, :], 1)
        b_rate = tl.sum(b_rate[:, None] * b_gain, 0)
        b_retention = tl.sum(b_retention[:, None] * b_gain, 0)
        b_product = tl.sum(b_product[:, :, None] * b_gain[None, :, :], 1)
        store_matrix(p_gains + (i_chunk + 1) * D * D, b_product, D)


def chunk_gains(scan, z, key, value, rate, retention):
    """What ``launch.chunk_gains`` returns."""
    gains = key.new_empty(scan.batch, scan.heads, scan.all_chunks, scan.d, scan.d)
    with torch.cuda.device_of(z):
        launch.launch(
            per_token_kernel, (scan.chains,),
            z, *z.stride(), key, value, rate, retention, gains, *scan.sizes,
            D=scan.d, PRECISION=launch.precisions(z)[0], num_warps=1,
        )  # fmt: skip
    return gains
