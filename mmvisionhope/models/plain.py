"""The plain VisionHOPE backbone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmengine.registry import MODELS
from torch import nn

from .layers import Stem
from .visionhope import VisionHOPE


@MODELS.register_module()
class PlainVisionHOPE(VisionHOPE):
    """P-VisionHOPE, all blocks at a sixteenth of the image's resolution.

    The stem is four 3x3 convolutions of stride 2 and widths D/8, D/4, D/2, D, each followed by
    BatchNorm, with GELU after the first three. The paper's table of these models lost its numbers:
    widths are those of DeiT and Vim, stem and depths are our choice, by which P-VisionHOPE-T has
    the 6 M parameters that are known, and the multiply-adds of -B are near those of Vim-B.

    Each block is a stage of :class:`VisionHOPE`, with the same options: ``out_indices`` and
    ``frozen_stages`` count blocks, and every output has the stride 16.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict with ``embed_dims`` and ``depth`` (one
            number each) and optionally ``operator_dims`` (by default half of ``embed_dims``),
            ``head_dims`` (16) and ``ffn_ratio`` (4.0).
        out_indices: blocks to return; None is the last one.
        kwargs: of :class:`VisionHOPE`.

    Raises:
        ValueError: an argument is out of range; the message says what is accepted.

    Example:
        >>> model = PlainVisionHOPE('tiny').eval()
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 224, 224))]
        [(1, 192, 14, 14)]
    """

    arch_settings = {
        'tiny': dict(embed_dims=192, depth=12),
        'small': dict(embed_dims=384, depth=14),
        'base': dict(embed_dims=768, depth=15),
    }

    def __init__(
        self,
        arch: str | dict = 'tiny',
        *,
        out_indices: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(arch, str):
            if arch not in self.arch_settings:
                raise ValueError(
                    f'arch must be one of {sorted(self.arch_settings)} or a dict, got {arch!r}'
                )
            arch = self.arch_settings[arch]
        if not isinstance(arch, dict) or not {'embed_dims', 'depth'} <= arch.keys():
            raise ValueError(f'arch as a dict needs embed_dims and depth, got {arch!r}')
        known = ['depth', 'embed_dims', 'ffn_ratio', 'head_dims', 'operator_dims']
        if unknown := arch.keys() - set(known):
            raise ValueError(f'arch knows {", ".join(known)}, got {sorted(unknown)}')
        stages = dict(arch)
        depth = stages.pop('depth')
        if type(depth) is not int or depth < 1:
            raise ValueError(f'depth of arch must be a positive integer, got {depth!r}')
        for name in stages.keys() & {'embed_dims', 'operator_dims'}:
            if type(stages[name]) is not int:
                raise ValueError(f'{name} of arch must be an integer, got {stages[name]!r}')
            stages[name] = (stages[name],) * depth
        if arch['embed_dims'] < 8:
            raise ValueError(f'embed_dims of arch must be at least 8, got {arch["embed_dims"]}')
        super().__init__(
            dict(stages, depths=(1,) * depth),
            out_indices=depth - 1 if out_indices is None else out_indices,
            **kwargs,
        )

    def _reduction(self, stage: int, in_channels: int, embed_dims: int) -> nn.Module:
        if stage:
            return nn.Identity()
        widths = (embed_dims // 8, embed_dims // 4, embed_dims // 2, embed_dims)
        return Stem(in_channels, widths, (2, 2, 2, 2))
