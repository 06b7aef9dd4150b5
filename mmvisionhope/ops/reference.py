"""The recurrence in plain PyTorch: the definition that every kernel is tested against.

Numbers in brackets are equations of the paper. Shapes: ``B`` images, ``R`` directions, ``h`` heads
of ``d`` channels, ``N = H * W`` tokens in chunks of ``C``.

All five memories of one head and direction are updated by the same gain from the right (46), so
they are kept as the rows of one matrix, the *state*, of shape ``(3d + 2, d)``: content, key,
value, rate, retention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

RETENTION_INIT = 0.9  # alpha_init in (53)
SCALAR_LIMIT = 10.0  # both scalar pre-activations are clamped to [-10, 10]
EPS = 1e-6  # epsilon of (19)
KEY_EPS = 1e-6  # stabilised key normalisation, Appendix C.1
QUERY_EPS = 1e-12
# Inward factors that keep the limits true in finite precision, Appendix B.3.
INJECTION_MARGIN = 1 - 1e-3
SPECTRAL_MARGIN = 1 - 1e-6

# A chunk is worked through in tiles of at most this many tokens: its decay matrices then take O(C)
# memory instead of O(C^2), and all tiles of a chunk are solved at once.
MAX_TILE = 32

ROW_MAJOR = ('right', 'left')
COLUMN_MAJOR = ('down', 'up')


@dataclass(frozen=True)
class Dynamics:
    """What of the recurrence is switched on; the default is the paper's full model.

    The rest are the ablations of the paper's Tables 5 and 9: ``docs/ablations.md`` has the equation
    of each.

    Args:
        adaptive_kv: key and value memories evolve along the scan.
        adaptive_dynamics: learning-rate and retention memories evolve along the scan.
        dgd: the transition has the key-dependent correction ``-step k k^T`` of (6).
        injection_cap: ``'soft'`` is (19), ``'hard'`` is ``min(eta, eta_inj)``, ``'none'`` leaves
            the raw step, and nothing then keeps the memories from exploding.
        spectral_clamp: ``'hard'`` is (20), ``'soft'`` approaches the same limit as (19) does its
            own, ``'none'`` leaves out the limit.
        rate_scale: gamma_eta of (53), above 0.

    Raises:
        ValueError: a value is none of these.
    """

    adaptive_kv: bool = True
    adaptive_dynamics: bool = True
    dgd: bool = True
    injection_cap: str = 'soft'
    spectral_clamp: str = 'hard'
    rate_scale: float = 0.025

    def __post_init__(self) -> None:
        for name in ('adaptive_kv', 'adaptive_dynamics', 'dgd'):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f'{name} must be True or False, got {getattr(self, name)!r}')
        for name in ('injection_cap', 'spectral_clamp'):
            if getattr(self, name) not in ('soft', 'hard', 'none'):
                raise ValueError(
                    f"{name} must be 'soft', 'hard' or 'none', got {getattr(self, name)!r}"
                )
        scale = self.rate_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < 1e6:
            raise ValueError(f'rate_scale must be a number above 0, below 1e6, got {scale!r}')

    @classmethod
    def of(cls, options: Dynamics | Mapping | None) -> Dynamics:
        """From what a config has: a dict of the arguments that differ from the full model.

        Raises:
            ValueError: an option is unknown, or has a value that is.
        """
        if isinstance(options, Dynamics):
            return options
        known = [field.name for field in fields(cls)]
        if not isinstance(options, (Mapping, type(None))) or not set(options or ()) <= set(known):
            raise ValueError(f'dynamics must be a dict with any of {known}, got {options!r}')
        return cls(**(options or {}))


FULL_MODEL = Dynamics()


def directional_scan_reference(
    z: Tensor,
    q: Tensor,
    content: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    retention: Tensor,
    skip: Tensor,
    scale: Tensor,
    directions: Sequence[str],
    row_chunk: int,
    col_chunk: int,
    dynamics: Dynamics = FULL_MODEL,
) -> Tensor:
    """(24)-(26) for arguments that :func:`mmvisionhope.ops.directional_scan` has checked.

    Computes in the dtype of the memories, which must be that of ``z`` and ``q``.
    """
    heads, d = content.shape[1:3]
    z, q = (x.unflatten(-1, (heads, d)) for x in (z, q))
    q = F.normalize(q, dim=-1, eps=QUERY_EPS)
    skip = skip.expand(len(directions), heads, d)
    scale = scale.unflatten(-1, (heads, d))
    state = torch.cat([content, key, value, rate.unsqueeze(-2), retention.unsqueeze(-2)], dim=-2)

    # Directions whose chunks are equally long step together.
    groups: dict[int, list[int]] = {}
    for r, direction in enumerate(directions):
        chunk = row_chunk if direction in ROW_MAJOR else col_chunk
        groups.setdefault(min(chunk, z.shape[1] * z.shape[2]), []).append(r)

    y = torch.zeros_like(z, memory_format=torch.contiguous_format)
    for chunk, members in groups.items():
        z_r = torch.stack([serialise(z, directions[r]) for r in members], dim=1)
        q_r = torch.stack([serialise(q, directions[r]) for r in members], dim=1)
        y_r = srnl(z_r, q_r, state[members], chunk, dynamics) + skip[members].unsqueeze(-2) * z_r
        y_r = scale[members].unsqueeze(-2) * y_r
        for r, sequence in zip(members, y_r.unbind(1), strict=True):
            y = y + restore(sequence, directions[r], z.shape[1:3])
    return y.flatten(-2)


def serialise(x: Tensor, direction: str) -> Tensor:
    """The permutation P_r of (24): (B, H, W, h, d) to (B, h, N, d) in scan order."""
    if direction in COLUMN_MAJOR:
        x = x.transpose(1, 2)
    x = x.flatten(1, 2).transpose(1, 2)
    return x.flip(2) if direction in ('left', 'up') else x


def restore(x: Tensor, direction: str, size: Sequence[int]) -> Tensor:
    """The inverse of :func:`serialise`, onto a grid of ``size = (H, W)``."""
    height, width = size
    if direction in ('left', 'up'):
        x = x.flip(2)
    x = x.transpose(1, 2)
    if direction in COLUMN_MAJOR:
        return x.unflatten(1, (width, height)).transpose(1, 2)
    return x.unflatten(1, (height, width))


def srnl(
    x: Tensor, q: Tensor, state: Tensor, chunk: int, dynamics: Dynamics = FULL_MODEL
) -> Tensor:
    """Chunk-wise SRNL: x, q (B, R, h, N, d), initial state (R, h, 3d + 2, d) to y like x. (15)-(21)

    Within a chunk the memories of its boundary generate every token's quantities and answer its
    query, ``y_t = M^m_b q_t`` (16); at its end all five become ``M_b G`` (46), but for those that
    ``dynamics`` keeps as learned.
    """
    length, d = x.shape[-2:]
    chunks = math.ceil(length / chunk)
    # Padding tokens come last and are only ever read from, so their values do not matter.
    padding = (0, 0, 0, chunks * chunk - length)
    x, q = (F.pad(t, padding).unflatten(-2, (chunks, chunk)) for t in (x, q))

    kv, scalars = dynamics.adaptive_kv, dynamics.adaptive_dynamics
    evolving = torch.tensor([True] * d + [kv] * 2 * d + [scalars] * 2, device=x.device)[:, None]
    state = state.expand(len(x), *state.shape)
    contents = [state[..., :d, :]]
    # The memories after the last chunk are never read, so it needs no gain.
    for tokens in x.unbind(-3)[:-1]:
        quantities = token_quantities(tokens, state[..., d:, :], dynamics)
        updated = state @ chunk_gain(*quantities, dgd=dynamics.dgd)
        state = updated if kv and scalars else torch.where(evolving, updated, state)
        contents.append(state[..., :d, :])
    y = q @ torch.stack(contents, dim=-3).mT
    return y.flatten(-3, -2)[..., :length, :]


def token_quantities(
    x: Tensor, generators: Tensor, dynamics: Dynamics = FULL_MODEL
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each token x (..., C, d) does to the memories, by (15), (19), (20) and (53).

    Args:
        x: tokens of one chunk. The square of a generated key or value must not overflow.
        generators: (..., 2d + 2, d), the boundary memories that generate key, value, rate,
            retention.

    Returns:
        key ``k`` (..., C, d) of norm at most 1, discrepancy ``delta = k - v`` (..., C, d), executed
        step (..., C) and ``log(alpha)`` (..., C).
    """
    d = x.shape[-1]
    k, v, rate, retention = (x @ generators.mT).split([d, d, 1, 1], dim=-1)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + KEY_EPS)
    delta = k - v
    rate = rate.squeeze(-1).clamp(-SCALAR_LIMIT, SCALAR_LIMIT)
    retention = retention.squeeze(-1) + math.log(RETENTION_INIT / (1 - RETENTION_INIT))
    retention = retention.clamp(-SCALAR_LIMIT, SCALAR_LIMIT)
    raw_step = dynamics.rate_scale * F.softplus(rate)
    step = executed_step(k, delta, raw_step, retention, dynamics)
    return k, delta, step, F.logsigmoid(retention)


def executed_step(
    k: Tensor,
    delta: Tensor,
    raw_step: Tensor,
    retention: Tensor,
    dynamics: Dynamics = FULL_MODEL,
) -> Tensor:
    """Step-size control, Definition 1: soft injection cap (19), then spectral clamp (20).

    The cap ``eta_inj (1 - exp(-eta / eta_inj))`` is written ``eta * (1 - exp(-u)) / u`` with
    ``u = eta / eta_inj``: where k is close to v, eta_inj is huge and u tiny, and the difference of
    the first form would lose every digit of its gradient.

    Args:
        k, delta: (..., d).
        raw_step: (...), the step eta > 0 before control.
        retention: (...), the logit of alpha; 1 - alpha is ``sigmoid(-retention)``, not a
            difference.
    """
    r = torch.sqrt(delta.square().sum(-1) + EPS**2) + EPS
    margin = INJECTION_MARGIN * torch.sigmoid(-retention)
    capped = raw_step
    if dynamics.injection_cap == 'soft':
        capped = raw_step * one_minus_exp_over(raw_step * r / margin)
    elif dynamics.injection_cap == 'hard':
        capped = torch.minimum(raw_step, margin / r)

    key_square = k.square().sum(-1)
    bound = SPECTRAL_MARGIN * 2 * torch.sigmoid(retention)
    if dynamics.spectral_clamp == 'none':
        return capped
    if dynamics.spectral_clamp == 'soft':
        return capped * one_minus_exp_over(capped * key_square / bound)
    # Equation 20 as a comparison, so that a step the clamp leaves alone is never divided by |k|^2:
    # the gradient of a quotient by zero is NaN even where a minimum does not choose it. Where the
    # clamp fires |k|^2 is above 3e-4, since eta is at most 0.26 and alpha at least 4.5e-5.
    fires = capped * key_square > bound
    limit = bound / torch.where(fires, key_square, torch.ones_like(key_square))
    # One ulp towards zero; nextafter has no gradient of its own, that of the limit is right.
    limit = limit + (torch.nextafter(limit.detach(), limit.new_zeros(())) - limit.detach())
    return torch.where(fires, limit, capped)


def one_minus_exp_over(u: Tensor) -> Tensor:
    """(1 - exp(-u)) / u for u > 0, exact to the last digits in value and gradient."""
    small = u < 1e-2
    # Each branch sees only arguments it is good for: an unused one must not return NaN gradients.
    safe = torch.where(small, torch.ones_like(u), u)
    direct = -torch.expm1(-safe) / safe
    t = torch.where(small, u, torch.zeros_like(u))
    series = 1 - t / 2 * (1 - t / 3 * (1 - t / 4 * (1 - t / 5 * (1 - t / 6 * (1 - t / 7)))))
    return torch.where(small, series, direct)


def chunk_gain(
    k: Tensor, delta: Tensor, step: Tensor, log_retention: Tensor, dgd: bool = True
) -> Tensor:
    """The gain G_C (..., d, d) of a chunk, by (46): G_t = G_{t-1} A_t + B_t from G_0 = I.

    A_t = alpha_t I - step_t k_t k_t^T (only alpha_t I without DGD) and B_t = -step_t delta_t k_t^T.
    A tile of T tokens maps G to
    G P + Q; the tiles' P and Q are solved for in parallel, then folded in order.

    Args:
        k, delta: (..., C, d).
        step, log_retention: (..., C).
    """
    length, d = k.shape[-2:]
    tiles = math.ceil(length / MAX_TILE)
    tile = math.ceil(length / tiles)
    # Padding with zeros adds tokens with A = I and B = 0.
    padding = tiles * tile - length
    k, delta = (F.pad(t, (0, 0, 0, padding)).unflatten(-2, (tiles, tile)) for t in (k, delta))
    step, log_retention = (
        F.pad(t, (0, padding)).unflatten(-1, (tiles, tile)) for t in (step, log_retention)
    )
    p, q = tile_transition(k, delta, step, log_retention, dgd)
    (first_p, *ps), (first_q, *qs) = p.unbind(-3), q.unbind(-3)
    gain = first_p + first_q
    for p_tile, q_tile in zip(ps, qs, strict=True):
        gain = gain @ p_tile + q_tile
    return gain


def tile_transition(
    k: Tensor, delta: Tensor, step: Tensor, log_retention: Tensor, dgd: bool
) -> tuple[Tensor, Tensor]:
    """P and Q with G_T = G_0 P + Q after the T tokens of a tile, each (..., d, d).

    G_t = alpha_t G_{t-1} - u_t k_t^T with u_t = step_t (G_{t-1} k_t + delta_t). Unrolled with
    gamma[i, j] = alpha_{j+1} ... alpha_i, all u_t follow from one unit lower-triangular system,

        u_t + sum_{s<t} step_t gamma[t-1, s] (k_t . k_s) u_s
            = step_t (gamma[t-1, 0] G_0 k_t + delta_t),

    which is linear in G_0: solved once for the part that G_0 acts on and once for delta. Without
    DGD, u_t = step_t delta_t.
    """
    d = k.shape[-1]
    # A sum over each segment, since a difference of running sums would cancel. All gamma <= 1.
    rows = F.pad(log_retention, (1, 0)).unsqueeze(-1)
    ones = rows.new_ones(rows.shape[-2], rows.shape[-2])
    gamma = (rows * ones.tril(-1)).cumsum(-2).exp().tril()

    step = step.unsqueeze(-1)
    if dgd:
        # Strictly lower: gamma[t-1, s] = 0 for s >= t.
        system = step * gamma[..., :-1, 1:] * (k @ k.mT)
        target = step * torch.cat([gamma[..., :-1, :1] * k, delta], dim=-1)
        u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    else:
        u = step * torch.cat([torch.zeros_like(k), delta], dim=-1)
    written = (gamma[..., -1, 1:].unsqueeze(-1) * u).mT @ k
    p_written, q_written = written.split([d, d], dim=-2)
    eye = torch.eye(d, dtype=k.dtype, device=k.device)
    return gamma[..., -1:, :1] * eye - p_written, -q_written
