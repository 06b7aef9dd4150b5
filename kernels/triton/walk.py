"""Where tokens, chunks and readers lie: integer arithmetic only.

A *walk* is the order of tokens in one direction: code 0 is right, 1 left, 2 down, 3 up; ``codes``
packs those of all directions, two bits each. Token t of a backward walk is token N - 1 - t of the
forward one. Tokens count in 32 bits, offsets in 64.

The *segments* of an axis (rows: right and left; columns: down and up) are the runs of tokens on
which both its walks stay within a chunk. If the chunk divides the map they are the chunks; else
both walks' boundaries alternate.
"""

import triton
import triton.language as tl


@triton.jit
def walk_code(codes, r):
    return (codes >> (2 * r)) & 3


@triton.jit
def pixel_offsets(t, code, height, width, stride_h, stride_w):
    """Offsets of tokens t of a walk."""
    by_rows = code < 2
    t = tl.where(code % 2 == 1, height * width - 1 - t, t)
    inner = tl.where(by_rows, width, height)
    outer_stride = tl.where(by_rows, stride_h, stride_w).to(tl.int64)
    inner_stride = tl.where(by_rows, stride_w, stride_h).to(tl.int64)
    return t // inner * outer_stride + t % inner * inner_stride


@triton.jit
def sum_before(codes, r, row, column):
    """A sum over the directions before r of what those along rows and those along columns have."""
    total = 0
    for earlier in range(r):
        total += tl.where(walk_code(codes, earlier) < 2, row, column)
    return total


@triton.jit
def segment_of(t, chunk, tokens):
    """The segment of token t of the forward walk."""
    ragged = tokens % chunk
    return tl.where(ragged == 0, t // chunk, t // chunk * 2 + (t % chunk >= ragged).to(tl.int32))


@triton.jit
def segment_start(segment, chunk, tokens):
    """The first token, in the forward walk, of a segment; of the one after the last, ``tokens``."""
    ragged = tokens % chunk
    return tl.where(ragged == 0, segment * chunk, segment // 2 * chunk + segment % 2 * ragged)


@triton.jit
def chunk_at(t, code, chunk, tokens):
    """The chunk, in its own walk, of token t of the forward walk."""
    return tl.where(code % 2 == 1, tokens - 1 - t, t) // chunk


@triton.jit
def direction(codes, r, routes, height, width, row_chunk, col_chunk):
    """Direction r: its code, chunk length and number of chunks, and where its chunks lie in tables.

    Tables hold the chunks of all directions one after the other: returns r's first and how many
    there are; then the same for tiles of 16 tokens, of which a direction's last chunk has none.
    """
    code = walk_code(codes, r)
    tokens = height * width
    chunk = tl.where(code < 2, row_chunk, col_chunk)
    row_chunks, col_chunks = tl.cdiv(tokens, row_chunk), tl.cdiv(tokens, col_chunk)
    row_tiles = (row_chunks - 1) * tl.cdiv(row_chunk, 16)
    col_tiles = (col_chunks - 1) * tl.cdiv(col_chunk, 16)
    return (
        code,
        chunk,
        tl.cdiv(tokens, chunk),
        sum_before(codes, r, row_chunks, col_chunks),
        sum_before(codes, routes, row_chunks, col_chunks),
        sum_before(codes, r, row_tiles, col_tiles),
        sum_before(codes, routes, row_tiles, col_tiles),
    )
