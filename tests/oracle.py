"""An independent, token-by-token SRNL, written from the paper's equations with loops and matrices.

It shares no code with the package: numbers, index order and update follow Equations 15-21, 24-26
and 53 and Appendix B.3 literally. Slow on purpose.
"""

import math

import torch

ORDER = {
    'right': lambda h, w: [(i, j) for i in range(h) for j in range(w)],
    'left': lambda h, w: [(i, j) for i in range(h) for j in range(w)][::-1],
    'down': lambda h, w: [(i, j) for j in range(w) for i in range(h)],
    'up': lambda h, w: [(i, j) for j in range(w) for i in range(h)][::-1],
}


def token(
    x, m_k, m_v, m_eta, m_alpha, injection_cap='soft', spectral_clamp='hard', rate_scale=0.025
):
    """k, v, executed step and retention of one token, (15), (19), (20), (53).

    A soft limit is ``limit (1 - exp(-step / limit))``, a hard one the minimum (Appendix C.5).
    """
    k = m_k @ x
    k = k / torch.sqrt(k @ k + 1e-6)
    v = m_v @ x
    eta = rate_scale * torch.nn.functional.softplus(torch.clamp(m_eta @ x, -10, 10))
    s = torch.clamp(m_alpha @ x + math.log(0.9 / 0.1), -10, 10)
    alpha, one_minus_alpha = torch.sigmoid(s), torch.sigmoid(-s)
    delta = k - v
    r = torch.sqrt(delta @ delta + 1e-12) + 1e-6
    injection_limit = (1 - 1e-3) * one_minus_alpha / r
    spectral_limit = (1 - 1e-6) * 2 * alpha / torch.clamp(k @ k, min=1e-20)
    for limit, kind in ((injection_limit, injection_cap), (spectral_limit, spectral_clamp)):
        if kind == 'soft':
            eta = limit * -torch.expm1(-eta / limit)
        elif kind == 'hard':
            eta = torch.minimum(eta, limit)
    return k, v, eta, alpha


def sequence(
    xs, qs, memories, chunk, adaptive_kv=True, adaptive_dynamics=True, dgd=True, **step_options
):
    """Outputs, and per token (step, gain, memories), of one head along one scan.

    A memory that is not adaptive stays as it is; without DGD, (21) lacks ``step k k^T``.
    """
    adaptive = [True, adaptive_kv, adaptive_kv, adaptive_dynamics, adaptive_dynamics]
    m, k_mem, v_mem, eta_mem, alpha_mem = memories
    d = m.shape[0]
    working = [m, k_mem, v_mem, eta_mem[None], alpha_mem[None]]
    outputs, trace = [], []
    for t, (x, q) in enumerate(zip(xs, qs, strict=True)):
        if t % chunk == 0:
            boundary = list(working)
            gain = torch.eye(d, dtype=x.dtype)
        outputs.append(boundary[0] @ (q / torch.clamp(q.norm(), min=1e-12)))
        k, v, step, alpha = token(
            x, boundary[1], boundary[2], boundary[3][0], boundary[4][0], **step_options
        )
        a = alpha * torch.eye(d, dtype=x.dtype)
        if dgd:
            a = a - step * torch.outer(k, k)
        b = -step * torch.outer(k - v, k)
        gain = gain @ a + b
        working = [
            w @ a - step * torch.outer(m0 @ k - m0 @ v, k) if evolves else w
            for w, m0, evolves in zip(working, boundary, adaptive, strict=True)
        ]
        trace.append((step, gain, list(working)))
    return outputs, trace


def directional_scan(
    z,
    q,
    content,
    key,
    value,
    rate,
    retention,
    skip,
    scale,
    directions,
    row_chunk=None,
    col_chunk=None,
    **dynamics,
):
    batch, height, width, channels = z.shape
    _, heads, d = rate.shape
    skip = skip.expand(len(directions), heads, d)
    images = []
    for n in range(batch):
        y = [[torch.zeros(channels, dtype=z.dtype) for _ in range(width)] for _ in range(height)]
        for r, direction in enumerate(directions):
            order = ORDER[direction](height, width)
            by_rows = direction in ('right', 'left')
            chunk = (row_chunk or width) if by_rows else (col_chunk or height)
            per_head = []
            for head in range(heads):
                part = slice(head * d, (head + 1) * d)
                xs = [z[n, i, j, part] for i, j in order]
                qs = [q[n, i, j, part] for i, j in order]
                start = [t[r, head] for t in (content, key, value, rate, retention)]
                reads, _ = sequence(xs, qs, start, chunk, **dynamics)
                per_head.append([o + skip[r, head] * x for o, x in zip(reads, xs, strict=True)])
            for t, (i, j) in enumerate(order):
                y[i][j] = y[i][j] + scale[r] * torch.cat([outputs[t] for outputs in per_head])
        images.append(torch.stack([torch.stack(row) for row in y]))
    return torch.stack(images)
