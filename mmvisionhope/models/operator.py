"""The VisionHOPE operator: queries, four sets of memories, and their directional scan."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmvisionhope.ops import directional_scan
from mmvisionhope.ops.scan import DIRECTIONS


class Memories(nn.Module):
    """The learned initial memories of every direction and head (Equation 8).

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

    def reset_parameters(self) -> None:
        """Appendix C.1: the first step is 0.025 log 2 and the first retention 0.9 for any token."""
        for memory in (self.M_m_0, self.M_v_0, self.M_k_0):
            nn.init.trunc_normal_(memory, std=0.01)
        nn.init.zeros_(self.M_eta_0)
        nn.init.zeros_(self.M_alpha_0)


class Operator(nn.Module):
    """F_VH of Equation 26 on channels-last maps.

    Args:
        channels: internal width Dm, a multiple of ``head_dims``.
        head_dims: d, channels per head.
        chunk_size: tokens per chunk, one number or (row scans, column scans); None aligns chunks
            with the rows and columns of the map at hand (Equation 25).
    """

    def __init__(
        self,
        channels: int,
        head_dims: int = 16,
        chunk_size: int | tuple[int | None, int | None] | None = None,
    ) -> None:
        super().__init__()
        heads, directions = channels // head_dims, len(DIRECTIONS)
        self.row_chunk, self.col_chunk = (
            chunk_size if isinstance(chunk_size, (tuple, list)) else (chunk_size, chunk_size)
        )
        self.d_skip = nn.Parameter(torch.zeros(heads, head_dims))
        self.direction_scale = nn.Parameter(torch.ones(directions, channels))
        self.srnl = Memories(directions, heads, head_dims)
        self.W_q = nn.Linear(channels, channels)

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, W, Dm) to (B, H, W, Dm)."""
        return directional_scan(
            z,
            self.W_q(z),
            content=self.srnl.M_m_0,
            key=self.srnl.M_k_0,
            value=self.srnl.M_v_0,
            rate=self.srnl.M_eta_0,
            retention=self.srnl.M_alpha_0,
            skip=self.d_skip,
            scale=self.direction_scale,
            row_chunk=self.row_chunk,
            col_chunk=self.col_chunk,
        )
