"""SRNL on sequences: Section 2.1 token by token, causality, and what chunks change."""

import oracle
import pytest
import torch

from mmvisionhope.models import SRNL

DIMS, D, N = 12, 4, 11


def srnl(chunk_size, memory_std=0.5, **options):
    """In float64, with memories large enough to matter."""
    torch.manual_seed(0)
    module = SRNL(DIMS, D, chunk_size=chunk_size, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=memory_std)
    return module


@pytest.fixture
def x():
    return torch.randn(2, N, DIMS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize('options', [{}, dict(dgd=False, injection_cap='hard')], ids=str)
@pytest.mark.parametrize('chunk', [1, 4, N, 100])
@pytest.mark.filterwarnings('ignore:directional_scan runs in plain PyTorch')
def test_equals_the_token_loop(chunk, options, x):
    module = srnl(chunk, dynamics=options)
    q = module.W_q(x)
    expected = []
    for head in range(DIMS // D):
        part = slice(head * D, (head + 1) * D)
        memories = [m[0, head] for m in module.memories.tensors().values()]
        reads = [
            torch.stack(oracle.sequence(tokens, queries, memories, chunk, **options)[0])
            for tokens, queries in zip(x[..., part], q[..., part], strict=True)
        ]
        expected.append(torch.stack(reads))
    expected = torch.cat(expected, dim=-1)
    actual = module(x)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, [x, module.W_q.weight], grad),
        torch.autograd.grad(expected, [x, module.W_q.weight], grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize('chunk', [1, 3, 5])
def test_a_token_changes_its_own_output_and_those_of_later_chunks(chunk, x):
    module, changed = srnl(chunk), x.detach().clone()
    token = 4
    changed[:, token] = torch.randn(2, DIMS, dtype=torch.float64)
    differs = (module(changed) != module(x)).all(dim=-1).all(dim=0)
    next_chunk = (token // chunk + 1) * chunk
    assert differs.tolist() == [t == token or t >= next_chunk for t in range(N)]


@pytest.mark.parametrize('chunk', [1, 3, 20])
def test_a_prefix_of_the_tokens_gives_a_prefix_of_the_outputs(chunk, x):
    module = srnl(chunk)
    torch.testing.assert_close(module(x[:, :7]), module(x)[:, :7], rtol=1e-12, atol=1e-12)


def test_the_first_chunk_reads_the_initial_memory_whatever_its_length(x):
    q = torch.nn.functional.normalize(srnl(1).W_q(x).unflatten(-1, (-1, D)), dim=-1)
    initial = torch.einsum('hij,bnhj->bnhi', srnl(1).memories.M_m_0[0], q).flatten(-2)
    for chunk in (1, 3, N, 100):
        first = slice(0, chunk)
        torch.testing.assert_close(srnl(chunk)(x)[:, first], initial[:, first])
    # Beyond it the length of chunks does matter.
    assert not torch.allclose(srnl(3)(x), srnl(1)(x))


def test_output_is_linear_in_the_content_memory(x):
    module = srnl(3)
    y = module(x)
    module.memories.M_m_0.data.mul_(3)
    torch.testing.assert_close(module(x), 3 * y)


def test_one_head_by_default_and_half_precision():
    module = SRNL(16)
    assert module.memories.M_k_0.shape == (1, 1, 16, 16)
    x = torch.randn(2, 40, 16)
    with torch.autocast('cpu', torch.bfloat16):
        y = module(x)
    assert y.shape == x.shape and y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(embed_dims=12, head_dims=5), 'embed_dims must be a positive multiple of head_dims'),
        (dict(embed_dims=12, chunk_size=0), 'chunk_size must be a positive integer'),
        (dict(embed_dims=12, dynamics=dict(x=1)), 'dynamics must be a dict with any of'),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SRNL(**options)


def test_bad_tokens_are_named():
    with pytest.raises(ValueError, match=r'x must be \(B, N, 12\), got \(2, 3\)'):
        SRNL(DIMS)(torch.zeros(2, 3))
