"""The layers around the recurrence: norms, the feed-forward network, stem and downsampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W)."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__(channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GRN(nn.Module):
    """Global response normalization of ConvNeXt V2, in float32.

    With n the L2 norm of each channel over space, divided by its mean over channels (+ 1e-6):
    ``x * (1 + gamma * n) + beta``.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        # The sum of squares over a large map overflows float16.
        dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True, dtype=dtype)
        norm = norm / (norm.mean(dim=1, keepdim=True) + 1e-6)
        return (x * (1 + self.gamma * norm) + self.beta).to(x.dtype)


class ConvFFN(nn.Module):
    """1x1 conv to the hidden width, GELU, residual 3x3 depthwise conv, GELU, GRN, 1x1 conv."""

    def __init__(self, embed_dims: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = int(embed_dims * ratio)
        self.fc1 = nn.Conv2d(embed_dims, hidden, 1)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.grn = GRN(hidden)
        self.fc2 = nn.Conv2d(hidden, embed_dims, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x))
        x = F.gelu(x + self.dwconv(x))
        return self.fc2(self.grn(x))


class Stem(nn.Module):
    """Four 3x3 convolutions, strides 2 1 2 1, each with BatchNorm, GELU after the first three."""

    def __init__(self, in_channels: int, embed_dims: int) -> None:
        super().__init__()
        half = embed_dims // 2
        self.proj = nn.Sequential(
            nn.Conv2d(in_channels, half, 3, stride=2, padding=1),
            nn.BatchNorm2d(half),
            nn.GELU(),
            nn.Conv2d(half, half, 3, padding=1),
            nn.BatchNorm2d(half),
            nn.GELU(),
            nn.Conv2d(half, embed_dims, 3, stride=2, padding=1),
            nn.BatchNorm2d(embed_dims),
            nn.GELU(),
            nn.Conv2d(embed_dims, embed_dims, 3, padding=1),
            nn.BatchNorm2d(embed_dims),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Downsample(nn.Module):
    """3x3 stride-2 convolution without bias, then BatchNorm."""

    def __init__(self, in_channels: int, embed_dims: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, embed_dims, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(embed_dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x))
