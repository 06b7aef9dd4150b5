"""SRNL on plain sequences, and the memories that it and the operator learn to start from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mmvisionhope.ops import Dynamics, directional_scan


class Memories(nn.Module):
    """The learned initial memories of every direction and head (Equation 8).

    Args:
        directions: sets of memories, one per scan.
        heads: heads of each.
        head_dims: d, channels per head.

    Names are those of the released weights: ``M_m_0`` content, ``M_v_0`` value, ``M_k_0`` key,
    ``M_eta_0`` learning rate, ``M_alpha_0`` retention.
    """

    def __init__(self, directions: int, heads: int, head_dims: int) -> None:
        super().__init__()
        matrix, row = (directions, heads, head_dims, head_dims), (directions, heads, head_dims)
        self.M_m_0 = nn.Parameter(torch.empty(matrix))
        self.M_v_0 = nn.Parameter(torch.empty(matrix))
        self.M_k_0 = nn.Parameter(torch.empty(matrix))
        self.M_eta_0 = nn.Parameter(torch.empty(row))
        self.M_alpha_0 = nn.Parameter(torch.empty(row))
        self.reset_parameters()

    def tensors(self) -> dict[str, Tensor]:
        """The memories under the names that ``directional_scan`` has for them."""
        return dict(
            content=self.M_m_0,
            key=self.M_k_0,
            value=self.M_v_0,
            rate=self.M_eta_0,
            retention=self.M_alpha_0,
        )

    def reset_parameters(self) -> None:
        """Appendix C.1: the first step is 0.025 log 2 and the first retention 0.9 for any token."""
        for memory in (self.M_m_0, self.M_v_0, self.M_k_0):
            nn.init.trunc_normal_(memory, std=0.01)
        nn.init.zeros_(self.M_eta_0)
        nn.init.zeros_(self.M_alpha_0)


class SRNL(nn.Module):
    r"""Self-referential nested learning on a sequence (Section 2.1, with the steps of Section 2.2).

    Each head reads :math:`y_t = M^m_b\, q_t / |q_t|` with :math:`q_t` its part of :math:`W_q x_t`,
    where b is the last token before the chunk of t; the chunk's tokens then rewrite the five
    memories, :math:`M_t = M_{t-1} A_t + M_b B_t` (Equations 13, 15, 16, 21). So y is causal:
    :math:`y_t` depends on :math:`x_t` by its query and on tokens up to b by the memory.

    Args:
        embed_dims: channels of a token, a multiple of ``head_dims``.
        head_dims: d, channels per head; None is one head of all, as in Section 2.1.
        chunk_size: tokens per chunk, any positive number. 1 is the token-indexed recurrence
            (Equations 9 to 14); longer chunks are faster.
        dynamics: an ablation, see :class:`mmvisionhope.ops.Dynamics`; None is the full model.

    Raises:
        ValueError: an argument is out of range; the message says what is accepted.

    Example:
        >>> SRNL(32, head_dims=8)(torch.rand(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """

    skip: Tensor
    scale: Tensor

    def __init__(
        self,
        embed_dims: int,
        head_dims: int | None = None,
        chunk_size: int = 16,
        dynamics: Dynamics | Mapping | None = None,
    ) -> None:
        super().__init__()
        head_dims = embed_dims if head_dims is None else head_dims
        if min(embed_dims, head_dims) < 1 or embed_dims % head_dims:
            raise ValueError(
                'embed_dims must be a positive multiple of head_dims, '
                f'got {embed_dims} and {head_dims}'
            )
        if type(chunk_size) is not int or chunk_size < 1:
            raise ValueError(f'chunk_size must be a positive integer, got {chunk_size!r}')
        heads = embed_dims // head_dims
        self.chunk_size = chunk_size
        self.dynamics = Dynamics.of(dynamics)
        self.memories = Memories(1, heads, head_dims)
        self.W_q = nn.Linear(embed_dims, embed_dims, bias=False)
        nn.init.trunc_normal_(self.W_q.weight, std=0.02)
        # Section 2.1 has neither the skip nor the scales that the operator adds.
        self.register_buffer('skip', torch.zeros(heads, head_dims), persistent=False)
        self.register_buffer('scale', torch.ones(1, embed_dims), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, embed_dims) to the same.

        Raises:
            ValueError: x has another shape.
        """
        if x.ndim != 3 or x.shape[-1] != len(self.W_q.weight):
            raise ValueError(f'x must be (B, N, {len(self.W_q.weight)}), got {tuple(x.shape)}')
        x = x.unsqueeze(1)
        y = directional_scan(
            x,
            # Under autocast a linear layer narrows; the scan does so with both.
            self.W_q(x).to(x.dtype),
            **self.memories.tensors(),
            skip=self.skip,
            scale=self.scale,
            directions=('right',),
            row_chunk=self.chunk_size,
            col_chunk=None,
            dynamics=self.dynamics,
        )
        return y.squeeze(1)
