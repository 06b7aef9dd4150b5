"""The stability theorem (Proposition 1, Theorem 1) in float32, on inputs chosen to break it."""

import pytest
import torch

from mmvisionhope.ops.reference import chunk_gain, executed_step, token_quantities

EPS = torch.finfo(torch.float32).eps
LENGTH, D = 24, 8


def tokens(kind):
    alternating = torch.tensor([1.0, -1.0]).repeat(LENGTH // 2)[:, None]
    return {
        'random': lambda: torch.randn(LENGTH, D),
        'huge': lambda: torch.randn(LENGTH, D) * 1e15,
        'tiny': lambda: torch.randn(LENGTH, D) * 1e-25,
        'constant': lambda: torch.ones(LENGTH, D),
        'zero': lambda: torch.zeros(LENGTH, D),
        'alternating': lambda: alternating * torch.full((LENGTH, D), 1e4),
        'huge among tiny': lambda: (
            torch.randn(LENGTH, D) * torch.logspace(-20, 15, LENGTH)[:, None]
        ),
    }[kind]()


def generators(kind):
    """Key and value rows, then those of rate and retention: (2 D + 2, D)."""
    key, value = torch.randn(2, D, D).unbind()
    rate, retention = torch.zeros(1, D), torch.zeros(1, D)
    if kind == 'opposed':  # v = -k: the largest discrepancy for a key
        value = -key
    elif kind == 'agreeing':  # v close to k: no injection, so only the spectral clamp is left
        value = key / (key @ torch.ones(D)).norm()
    elif kind == 'greedy':  # long steps and little retention where x > 0, the reverse where x < 0
        rate, retention = torch.full((1, D), 10.0), torch.full((1, D), -10.0)
    elif kind == 'faithful':  # alpha at its upper clamp, no margin for injection
        rate, retention = torch.full((1, D), 10.0), torch.full((1, D), 10.0)
    elif kind == 'dead':
        key = torch.zeros(D, D)
    elif kind == 'strong':
        # With huge tokens |M x| is about 1e18: the largest whose square float32 can hold.
        key, value = key * 1e2, value * 1e2
    return torch.cat([key, value, rate, retention])


TOKENS = ['random', 'huge', 'tiny', 'constant', 'zero', 'alternating', 'huge among tiny']
GENERATORS = ['random', 'opposed', 'agreeing', 'greedy', 'faithful', 'dead', 'strong']


@pytest.mark.parametrize('memory_kind', GENERATORS)
@pytest.mark.parametrize('token_kind', TOKENS)
def test_every_transition_gain_and_memory_is_bounded(token_kind, memory_kind):
    k, delta, step, log_retention = token_quantities(tokens(token_kind), generators(memory_kind))
    alpha = log_retention.exp()
    # The rounding of a d x d product and of the norm itself: d ulp.
    slack = 1 + D * EPS
    assert torch.isfinite(step).all() and (step >= 0).all()
    assert (k.norm(dim=-1) <= slack).all()
    eye = torch.eye(D)
    gain, memory = eye, torch.randn(D, D)
    norms = [memory.norm()]
    for t in range(LENGTH):
        a = alpha[t] * eye - step[t] * torch.outer(k[t], k[t])
        b = -step[t] * torch.outer(delta[t], k[t])
        assert torch.linalg.matrix_norm(a, 2) <= alpha[t] * slack
        assert torch.linalg.matrix_norm(b, 2) <= (1 - alpha[t]) * slack + EPS
        gain = gain @ a + b
        closed = chunk_gain(k[: t + 1], delta[: t + 1], step[: t + 1], log_retention[: t + 1])
        for g in (gain, closed):
            assert torch.linalg.matrix_norm(g, 2) <= slack
        norms.append((memory @ closed).norm())
    # Relative to the boundary of the chunk, as Theorem 1 has it.
    assert all(norm <= norms[0] * slack for norm in norms)


@pytest.mark.parametrize('memory_kind', GENERATORS)
@pytest.mark.parametrize('token_kind', TOKENS)
def test_memories_never_grow_token_by_token(token_kind, memory_kind):
    """Corollary 1: with one token per chunk, no memory grows at any token."""
    x, state = tokens(token_kind), torch.cat([torch.randn(D, D), generators(memory_kind)])
    for t in range(LENGTH):
        gain = chunk_gain(*token_quantities(x[t : t + 1], state[D:]))
        updated = state @ gain
        for old, new in zip(
            state.split([D, D, D, 1, 1]), updated.split([D, D, D, 1, 1]), strict=True
        ):
            assert new.norm() <= old.norm() * (1 + D * EPS)
        state = updated


@pytest.mark.parametrize('memory_kind', GENERATORS)
@pytest.mark.parametrize('token_kind', TOKENS)
def test_gradients_are_finite(token_kind, memory_kind):
    x = tokens(token_kind).requires_grad_()
    memory = generators(memory_kind).requires_grad_()
    chunk_gain(*token_quantities(x, memory)).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(memory.grad).all()


def test_small_raw_steps_are_kept_and_large_ones_capped():
    """(39): the cap leaves a small step as it is; (19): it tends to eta_inj for a large one."""
    k = torch.tensor([1.0, 0.0], dtype=torch.float64)
    delta = torch.tensor([3.0, 4.0], dtype=torch.float64)
    retention = torch.tensor(0.0, dtype=torch.float64)  # alpha = 1/2, |delta| = 5: eta_inj = 0.1
    small, large = torch.tensor([1e-6, 1e3], dtype=torch.float64)
    assert executed_step(k, delta, small, retention) == pytest.approx(1e-6, rel=1e-4)
    limit = (1 - 1e-3) * 0.5 / 5.000001
    assert executed_step(k, delta, large, retention) == pytest.approx(limit, rel=1e-6)


def test_the_spectral_clamp_fires_when_retention_is_low():
    k = torch.tensor([1.0, 0.0], dtype=torch.float64)
    retention = torch.tensor(-8.0, dtype=torch.float64)
    raw = torch.tensor(1.0, dtype=torch.float64)
    step = executed_step(k, torch.zeros_like(k), raw, retention)
    assert step == pytest.approx(2 * torch.sigmoid(retention).item(), rel=2e-6)
