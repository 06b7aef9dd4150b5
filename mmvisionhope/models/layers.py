"""The layers around the recurrence: norms, the feed-forward network, stem and downsampling.

Maps are (B, C, H, W) and, inside the backbone, channels_last in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W)."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__(channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def gelu(x: Tensor) -> Tensor:
    """GELU, in place where no backward will want ``x``: fresh memory is half of what it costs."""
    return F.gelu(x) if torch.is_grad_enabled() else torch.ops.aten.gelu_(x)


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution, as the matrix product that it is on channels_last maps."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
        return y.permute(0, 3, 1, 2)


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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Not vector_norm, which is many times slower on channels_last maps. A channel of zeros has
        # a gradient of zero.
        square = wide.square().sum(dim=(2, 3), keepdim=True)
        norm = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()
        norm = norm / (norm.mean(dim=1, keepdim=True) + 1e-6)
        return torch.addcmul(self.beta, wide, 1 + self.gamma * norm).to(x.dtype)


class ConvFFN(nn.Module):
    """1x1 conv to the hidden width, GELU, residual 3x3 depthwise conv, GELU, GRN, 1x1 conv."""

    def __init__(self, embed_dims: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = int(embed_dims * ratio)
        self.fc1 = PointwiseConv2d(embed_dims, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.grn = GRN(hidden)
        self.fc2 = PointwiseConv2d(hidden, embed_dims)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.fc1(x))
        x = gelu(self.dwconv(x).add_(x))
        return self.fc2(self.grn(x))


class Stem(nn.Module):
    """3x3 convolutions, each with BatchNorm, and GELU after all but the last.

    Args:
        in_channels: channels of the image.
        widths: channels after each convolution.
        strides: stride of each.
    """

    def __init__(self, in_channels: int, widths: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, stride in zip(widths, strides, strict=True):
            conv = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1)
            layers += [conv, nn.BatchNorm2d(width), nn.GELU()]
            in_channels = width
        self.proj = nn.Sequential(*layers[:-1])

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
