"""The residual block around the operator (Equation 27, Appendix B.5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from .layers import ConvFFN, LayerNorm2d, PointwiseConv2d
from .operator import Operator


class Block(nn.Module):
    r"""One VisionHOPE block, (B, D, H, W) to the same.

    .. math::
        x &\mathrel{+}= \mathrm{cpe}(x) \\
        x &\mathrel{+}= \gamma_1 \, \mathrm{mix}(\mathrm{norm}_1(x)) \\
        x &\mathrel{+}= \gamma_2 \, \mathrm{ffn}(\mathrm{norm}_2(x))

    Args:
        embed_dims: block width D.
        operator_dims: internal width Dm of the operator.
        head_dims: channels per head of the operator.
        ffn_ratio: hidden width of the feed-forward network over D.
        drop_path: probability of dropping a residual branch of an image in training.
        layer_scale_init_value: initial value of gamma1 and gamma2.
        operator_cfg: further arguments of :class:`Operator`.
    """

    def __init__(
        self,
        embed_dims: int,
        operator_dims: int,
        head_dims: int = 16,
        ffn_ratio: float = 4.0,
        drop_path: float = 0.0,
        layer_scale_init_value: float = 1e-6,
        operator_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        width = operator_dims
        self.gamma1 = nn.Parameter(torch.full((embed_dims, 1, 1), layer_scale_init_value))
        self.gamma2 = nn.Parameter(torch.full((embed_dims, 1, 1), layer_scale_init_value))
        self.cpe = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims)
        self.norm1 = LayerNorm2d(embed_dims)
        self.proj_in = PointwiseConv2d(embed_dims, width)
        self.operator = Operator(width, head_dims, **(operator_cfg or {}))
        self.local_conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.local_gate = PointwiseConv2d(width, width)
        self.local_position = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.proj_out = nn.Linear(width, embed_dims)
        self.norm2 = LayerNorm2d(embed_dims)
        self.ffn = ConvFFN(embed_dims, ffn_ratio)
        self.drop_path = StochasticDepth(drop_path, mode='row')

    def forward(self, x: Tensor) -> Tensor:
        # Sums go into what a convolution has just allocated: on a CPU, memory is what these cost.
        x = self.cpe(x).add_(x)
        x = torch.addcmul(x, self.gamma1, self.drop_path(self.mix(self.norm1(x))))
        return torch.addcmul(x, self.gamma2, self.drop_path(self.ffn(self.norm2(x))))

    def mix(self, x: Tensor) -> Tensor:
        """Token mixing: local gate, operator, local positions, (B, D, H, W) to the same."""
        u = self.proj_in(x)
        z = torch.addcmul(u, torch.sigmoid(self.local_gate(u)), self.local_conv(u))
        y = self.local_position(z).permute(0, 2, 3, 1).add_(self.operator(z.permute(0, 2, 3, 1)))
        return self.proj_out(y).permute(0, 3, 1, 2)
