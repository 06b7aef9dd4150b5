"""The VisionHOPE operator: queries, memories for each direction, and their directional scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmvisionhope.ops import Dynamics, directional_scan
from mmvisionhope.ops.scan import DIRECTIONS

from .srnl import Memories


class Operator(nn.Module):
    """F_VH of Equation 26 on channels-last maps.

    Args:
        channels: internal width Dm, a multiple of ``head_dims``.
        head_dims: d, channels per head.
        chunk_size: tokens per chunk, one number or (row scans, column scans); None aligns chunks
            with the rows and columns of the map at hand (Equation 25).
        directions: scans to take, distinct names out of right, left, down and up.
        fixed_sum: sum the directions with scales of 1 instead of learned ones.
        shared_memories: start all directions from the same learned memories.
        dynamics: an ablation of the recurrence, see :class:`mmvisionhope.ops.Dynamics`.
    """

    direction_scale: Tensor

    def __init__(
        self,
        channels: int,
        head_dims: int = 16,
        chunk_size: int | tuple[int | None, int | None] | None = None,
        directions: Sequence[str] = DIRECTIONS,
        fixed_sum: bool = False,
        shared_memories: bool = False,
        dynamics: Dynamics | Mapping | None = None,
    ) -> None:
        super().__init__()
        heads = channels // head_dims
        self.row_chunk, self.col_chunk = (
            chunk_size if isinstance(chunk_size, (tuple, list)) else (chunk_size, chunk_size)
        )
        self.directions = tuple(directions)
        self.shared_memories = shared_memories
        # None spares the full model a comparison in every call.
        self.dynamics = None if dynamics is None else Dynamics.of(dynamics)
        self.d_skip = nn.Parameter(torch.zeros(heads, head_dims))
        scale = torch.ones(len(self.directions), channels)
        if fixed_sum:
            self.register_buffer('direction_scale', scale, persistent=False)
        else:
            self.direction_scale = nn.Parameter(scale)
        self.srnl = Memories(1 if shared_memories else len(self.directions), heads, head_dims)
        self.W_q = nn.Linear(channels, channels)

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, W, Dm) to (B, H, W, Dm)."""
        memories = self.srnl.tensors()
        if self.shared_memories:
            routes = len(self.directions)
            memories = {name: m.expand(routes, *m.shape[1:]) for name, m in memories.items()}
        return directional_scan(
            z,
            self.W_q(z),
            **memories,
            skip=self.d_skip,
            scale=self.direction_scale,
            directions=self.directions,
            row_chunk=self.row_chunk,
            col_chunk=self.col_chunk,
            dynamics=self.dynamics,
        )
