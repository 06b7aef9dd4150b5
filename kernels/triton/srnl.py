"""One tile of 16 tokens of SRNL as 16 x 16 matrices, and its adjoint: what the kernels share.

``n`` tiles are worked through side by side, (n, 16, d) for their rows, so that the warps of a
program share them. Numbers in brackets are equations of the paper; ../README.md derives the rest.
"""

import math

import triton
import triton.language as tl
from mmvisionhope.ops import reference

TILE = tl.constexpr(16)

RATE_SCALE = tl.constexpr(reference.FULL_MODEL.rate_scale)
RETENTION_LOGIT = tl.constexpr(math.log(reference.RETENTION_INIT / (1 - reference.RETENTION_INIT)))
SCALAR_LIMIT = tl.constexpr(reference.SCALAR_LIMIT)
EPS = tl.constexpr(reference.EPS)
KEY_EPS = tl.constexpr(reference.KEY_EPS)
QUERY_EPS = tl.constexpr(reference.QUERY_EPS)
INJECTION_MARGIN = tl.constexpr(reference.INJECTION_MARGIN)
# The smallest float32 below one besides: the clamped step is rounded towards zero.
SPECTRAL_BOUND = tl.constexpr(2 * reference.SPECTRAL_MARGIN)
ULP_DOWN = tl.constexpr(1 - 2.0**-24)


@triton.jit
def nearest_tf32(x):
    """Rounded to the 10 bits of mantissa that matrix units read; they would truncate, and the bias
    of that adds up along the chain."""
    bits = (x.to(tl.int32, bitcast=True) + 4096) & -8192
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def matmul(a, b, precision: tl.constexpr):
    """a b in float32. ``tf32x3`` sums three products of rounded parts: 22 bits of each operand.

    By hand, as Triton's own guards against infinities, which cost 15 % more instructions.
    """
    if precision == 'tf32x3':
        a_big, b_big = nearest_tf32(a), nearest_tf32(b)
        small = tl.dot(a - a_big, b_big, input_precision='tf32')
        small = tl.dot(a_big, b - b_big, small, input_precision='tf32')
        return tl.dot(a_big, b_big, small, input_precision='tf32')
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def transposed(x):
    """The last two dimensions exchanged."""
    return tl.trans(x) if len(x.shape) == 2 else tl.permute(x, (0, 2, 1))


@triton.jit
def clamped(x):
    # Written so that a NaN stays one.
    return tl.where(x < -SCALAR_LIMIT, -SCALAR_LIMIT, tl.where(x > SCALAR_LIMIT, SCALAR_LIMIT, x))


@triton.jit
def inside(x):
    return (x >= -SCALAR_LIMIT) & (x <= SCALAR_LIMIT)


@triton.jit
def log1p_unit(e):
    """log(1 + e) for 0 < e <= 1 to the last digits: what rounding 1 + e loses is divided out."""
    w = 1.0 + e
    exact = w == 1.0
    return tl.where(exact, e, tl.log(w) * (e / tl.where(exact, 1.0, w - 1.0)))


@triton.jit
def one_minus_exp_over(u):
    """(1 - exp(-u)) / u for u >= 0: a series where the difference would cancel."""
    t = tl.minimum(u, 0.5)
    series = 1.0 - t / 10
    for n in tl.static_range(9, 1, -1):
        series = 1.0 - t / n * series
    return tl.where(u < 0.5, series, (1.0 - tl.exp(-u)) / tl.maximum(u, 0.5))


@triton.jit
def one_minus_exp_over_slope(u, phi):
    """The derivative of ``phi = one_minus_exp_over(u)``, by its series where it would cancel."""
    t = tl.minimum(u, 0.5)
    factor = tl.full(u.shape, -0.5, tl.float32)
    series = tl.zeros(u.shape, tl.float32)
    for n in tl.static_range(1, 10):
        series += factor
        factor *= -t * ((n + 1) / (n * (n + 2)))
    return tl.where(u < 0.5, series, (tl.exp(-u) - phi) / tl.maximum(u, 0.5))


@triton.jit
def token_quantities(x, valid, key, value, rate, retention, precision: tl.constexpr):
    """(15), (19), (20) and (53) for tokens x (N, d), from the boundary memories of their chunk.

    Tokens that are not ``valid`` have x = 0 and leave the memories alone: their step and
    log(alpha) are zero, as are k and delta.

    Returns k, delta (N, d), step, log(alpha) (N,), and what :func:`token_gradients` needs.
    """
    raw_k = matmul(x, transposed(key), precision)
    v = matmul(x, transposed(value), precision)

    square = tl.sum(raw_k * raw_k, 1)
    inverse_norm = 1.0 / tl.sqrt(square + KEY_EPS)
    key_square = square * (inverse_norm * inverse_norm)
    k = raw_k * inverse_norm[:, None]
    delta = k - v

    rate_in = tl.sum(x * rate[None, :], 1)
    s = clamped(rate_in)
    e = tl.exp(-tl.abs(s))
    eta = RATE_SCALE * (tl.maximum(s, 0.0) + log1p_unit(e))
    rate_slope = RATE_SCALE * tl.where(s < 0, e, 1.0) / (1.0 + e)
    rate_slope = tl.where(inside(rate_in) & valid, rate_slope, 0.0)

    retention_in = tl.sum(x * retention[None, :], 1) + RETENTION_LOGIT
    a = clamped(retention_in)
    f = tl.exp(-tl.abs(a))
    big = 1.0 / (1.0 + f)
    alpha = tl.where(a < 0, f * big, big)
    beta = tl.where(a < 0, big, f * big)
    log_alpha = tl.where(valid, tl.minimum(a, 0.0) - log1p_unit(f), 0.0)
    retention_slope = tl.where(inside(retention_in) & valid, 1.0, 0.0)

    distance = tl.sqrt(tl.sum(delta * delta, 1) + EPS * EPS)
    u = eta * (distance + EPS) / (INJECTION_MARGIN * beta)
    phi = one_minus_exp_over(u)
    capped = eta * phi
    bound = SPECTRAL_BOUND * alpha
    fires = capped * key_square > bound
    step = tl.where(fires, bound / tl.where(fires, key_square, 1.0) * ULP_DOWN, capped)
    step = tl.where(valid, step, 0.0)
    saved = (
        inverse_norm, key_square, alpha, beta, eta, distance, u, phi, fires, rate_slope,
        retention_slope,
    )  # fmt: skip
    return k, delta, step, log_alpha, saved


@triton.jit
def token_gradients(k, delta, step, saved, u_w, kept, step_w, minus_dk):
    """The adjoint of :func:`token_quantities`, up to the products with x.

    Args:
        u_w: step times u_t . w_t, minus the step times its gradient, (N,).
        kept: alpha_t times the gradient of alpha_t, (N,).
        step_w: step times w_t, minus the gradient of delta_t through the gain, (N, d).
        minus_dk: minus the gradient of k_t through the gain, (N, d).

    Returns the gradients of raw key and value (N, d) and of the two scalar pre-activations (N,).
    """
    (
        inverse_norm, key_square, alpha, beta, eta, distance, u, phi, fires, rate_slope,
        retention_slope,
    ) = saved  # fmt: skip
    grad_capped = tl.where(fires, 0.0, -u_w / tl.where(step > 0, step, 1.0))
    grad_clamp = tl.where(fires, -u_w, 0.0)  # times the clamped step
    slope = one_minus_exp_over_slope(u, phi)
    grad_u = grad_capped * eta * slope * u  # times u: what both its factors need
    grad_rate = grad_capped * tl.exp(-u) * rate_slope
    grad_retention = (beta * (kept + grad_clamp) + grad_u * alpha) * retention_slope

    along_delta = grad_u / (distance * (distance + EPS))
    along_key = -2.0 * grad_clamp / tl.where(fires, key_square, 1.0)
    grad_delta = along_delta[:, None] * delta - step_w
    grad_k = grad_delta - minus_dk + along_key[:, None] * k
    projection = tl.sum(grad_k * k, 1)
    grad_key = inverse_norm[:, None] * (grad_k - projection[:, None] * k)
    return grad_key, -grad_delta, grad_rate, grad_retention


@triton.jit
def decays(log_alpha):
    """gamma_{t-1}, gamma_T / gamma_t (n, 16), gamma_T (n,), and gamma_{t-1} / gamma_s at [s, t].

    gamma_t = alpha_1 ... alpha_t; the last is (n, 16, 16), zero where s >= t. Each is the
    exponential of a difference of running sums. Those are kept in two parts: a coarse one in units
    of 2^-14, which 16 tokens of at most 10 each add up without rounding, and the fine rest.
    Differences of plain float32 sums would lose digits where retention is low.
    """
    coarse_term = tl.floor(log_alpha * 16384.0) * (1.0 / 16384.0)
    fine_term = log_alpha - coarse_term
    coarse, fine = tl.cumsum(coarse_term, 1), tl.cumsum(fine_term, 1)
    coarse_before, fine_before = coarse - coarse_term, fine - fine_term
    i = tl.arange(0, TILE)
    last = i[None, :] == TILE - 1
    coarse_total = tl.sum(tl.where(last, coarse, 0.0), 1)
    fine_total = tl.sum(tl.where(last, fine, 0.0), 1)
    after = tl.exp((coarse_total[:, None] - coarse) + (fine_total[:, None] - fine))
    before = tl.exp(coarse_before + fine_before)
    segments = (coarse_before[:, None, :] - coarse[:, :, None]) + (
        fine_before[:, None, :] - fine[:, :, None]
    )
    later = (i[None, :] > i[:, None])[None, :, :]
    segments = tl.where(later, tl.exp(tl.where(later, segments, 0.0)), 0.0)
    return before, after, tl.exp(coarse_total + fine_total), segments


@triton.jit
def tile_system(k, step, segments, precision: tl.constexpr):
    """N (n, 16, 16) of (I + N), strictly upper triangular, with its second, fourth, eighth power.

    N[s, t] = step_s gamma_{t-1} / gamma_s k_s . k_t. Inverting I + N by these powers is safe for
    16 tokens, where N^16 = 0.
    """
    n1 = step[:, :, None] * segments * matmul(k, transposed(k), precision)
    n2 = matmul(n1, n1, precision)
    n4 = matmul(n2, n2, precision)
    return n1, n2, n4, matmul(n4, n4, precision)


@triton.jit
def solve(system, y, precision: tl.constexpr):
    """(I + N)^-1 y = (I - N)(I + N^2)(I + N^4)(I + N^8) y. With y first, while the powers form."""
    n1, n2, n4, n8 = system
    y -= matmul(n1, y, precision)
    y += matmul(n2, y, precision)
    y += matmul(n4, y, precision)
    return y + matmul(n8, y, precision)


@triton.jit
def solve_transposed(system, y, precision: tl.constexpr):
    n1, n2, n4, n8 = system
    y -= matmul(transposed(n1), y, precision)
    y += matmul(transposed(n2), y, precision)
    y += matmul(transposed(n4), y, precision)
    return y + matmul(transposed(n8), y, precision)


@triton.jit
def written_keys(k, step, after, system, precision: tl.constexpr):
    """x_s (n, 16, d), step times what key s adds to the gain at the tile's end per unit of u_s.

    G_T = gamma_T G_0 - sum_s u0_s x_s^T with u0_s = gamma_{s-1} G_0 k_s + delta_s, that is, before
    the tile's earlier tokens have been written.
    """
    return solve(system, (step * after)[:, :, None] * k, precision)


@triton.jit
def identity(d: tl.constexpr):
    i = tl.arange(0, d)
    return tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def tile_transition(k, delta, before, total, x, precision: tl.constexpr):
    """P and Q (n, d, d) with G_T = G_0 P + Q over a tile."""
    d: tl.constexpr = k.shape[2]
    p = total[:, None, None] * identity(d)[None, :, :]
    p -= matmul(transposed(before[:, :, None] * k), x, precision)
    return p, -matmul(transposed(delta), x, precision)


@triton.jit
def halves(x):
    """Even and odd members of (n, d, d)."""
    n: tl.constexpr = x.shape[0]
    pairs = tl.reshape(x, (n // 2, 2, x.shape[1], x.shape[2]))
    return tl.split(tl.permute(pairs, (0, 2, 3, 1)))


@triton.jit
def join_tiles(p, q, LEVELS: tl.constexpr, precision: tl.constexpr):
    """The one (P, Q) (d, d) of 2^LEVELS tiles in a row, by a tree."""
    d: tl.constexpr = p.shape[1]
    for _ in tl.static_range(LEVELS):
        p_first, p_second = halves(p)
        q_first, q_second = halves(q)
        p = matmul(p_first, p_second, precision)
        q = matmul(q_first, p_second, precision) + q_second
    return tl.reshape(p, (d, d)), tl.reshape(q, (d, d))
