"""The hierarchical VisionHOPE backbone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from mmengine.model import BaseModule, PretrainedInit
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from mmvisionhope.engine.checkpoint import (
    IMAGENET_HEAD,
    check_match,
    load_checkpoint_file,
    rename_for_classifier,
    state_dict_of,
)
from mmvisionhope.ops import Dynamics
from mmvisionhope.ops.scan import DIRECTIONS

from .block import Block
from .layers import Downsample, LayerNorm2d, Stem

MIN_IMAGE_SIZE = 32


@MODELS.register_module()
class VisionHOPE(BaseModule):
    """VisionHOPE, a backbone whose memories rewrite each other along four scans of the feature map.

    A stem reduces the image to a quarter, then four stages of blocks run at strides 4, 8, 16 and
    32. For images of any height and width from 32 pixels on.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict with ``embed_dims`` and ``depths`` (one
            number per stage) and optionally ``operator_dims`` (internal width per stage, by default
            half of ``embed_dims``), ``head_dims`` (16) and ``ffn_ratio`` (4.0).
        in_channels: channels of the image.
        out_indices: stages to return, in the order of the outputs. Stages after the last one are
            not built.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first
            one.
        layer_scale_init_value: initial LayerScale of both residual branches.
        chunk_size: tokens per chunk, one number or (row scans, column scans); None aligns the
            chunks with rows and columns of the feature map (Equation 25), as in the released
            models.
        directions: scans of every block, distinct names out of ``'right'``, ``'left'``, ``'down'``
            and ``'up'``; ``('right',)`` is the paper's one-way ablation.
        fixed_sum: sum the scans with scales of 1 instead of learned ones (ablation).
        shared_memories: start all scans of a block from the same learned memories (ablation).
        dynamics: ablations of the recurrence, a dict of the arguments of
            :class:`mmvisionhope.ops.Dynamics` that differ from the full model. They run in plain
            PyTorch. ``docs/ablations.md`` has the equations and the paper's figures.
        out_norm: pass each output through a LayerNorm of its own, as dense tasks do.
        frozen_stages: -1 freezes nothing; k freezes the stem and stages 0 to k with their output
            norms: no gradients, and eval mode always.
        norm_eval: keep BatchNorm in eval mode in training.
        with_cp: recompute the blocks in backward instead of storing their activations.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` loads released ImageNet weights as
            they are; ``prefix='backbone.'`` takes the backbone out of a detector, segmentor or
            classifier. Loading is strict: see :meth:`init_weights`.

    Raises:
        ValueError: an argument is out of range; the message says what is accepted.

    Example:
        >>> model = VisionHOPE('tiny', out_indices=(2, 3)).eval()
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 224, 224))]
        [(1, 256, 14, 14), (1, 512, 7, 7)]
    """

    init_cfg: dict | list[dict] | None

    arch_settings: dict[str, dict] = {
        'tiny': dict(embed_dims=(64, 128, 256, 512), depths=(3, 4, 18, 4)),
        'small': dict(embed_dims=(64, 160, 320, 512), depths=(4, 8, 25, 8)),
        'base': dict(embed_dims=(96, 192, 448, 640), depths=(4, 8, 25, 8)),
    }

    def __init__(
        self,
        arch: str | dict = 'tiny',
        in_channels: int = 3,
        out_indices: int | Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float = 1e-6,
        chunk_size: int | tuple[int | None, int | None] | None = None,
        directions: Sequence[str] = DIRECTIONS,
        fixed_sum: bool = False,
        shared_memories: bool = False,
        dynamics: Dynamics | Mapping | None = None,
        out_norm: bool = True,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        settings = _resolve_arch(arch, self.arch_settings)
        self.embed_dims: tuple[int, ...] = settings['embed_dims']
        self.depths: tuple[int, ...] = settings['depths']
        self.out_indices = _check_out_indices(out_indices, len(self.depths))
        _check_chunk_size(chunk_size)
        _check_directions(directions)
        operator_cfg = dict(
            chunk_size=chunk_size,
            directions=tuple(directions),
            fixed_sum=fixed_sum,
            shared_memories=shared_memories,
            dynamics=None if dynamics is None else Dynamics.of(dynamics),
        )
        if not isinstance(drop_path_rate, (int, float)) or not 0 <= drop_path_rate < 1:
            raise ValueError(f'drop_path_rate must be in [0, 1), got {drop_path_rate!r}')
        if frozen_stages not in range(-1, len(self.depths)):
            raise ValueError(
                f'frozen_stages must be -1 (none) to {len(self.depths) - 1}, got {frozen_stages}'
            )
        if not isinstance(in_channels, int) or in_channels < 1:
            raise ValueError(f'in_channels must be a positive integer, got {in_channels!r}')
        self.in_channels = in_channels
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp

        # The ramp counts all blocks of the architecture: a block's rate must not depend on what is
        # returned.
        ramp = iter(torch.linspace(0, drop_path_rate, sum(self.depths)).tolist())
        self.downsample_layers = nn.ModuleList()
        self.stages = nn.ModuleList()
        previous = in_channels
        for i in range(max(self.out_indices) + 1):
            embed_dims = self.embed_dims[i]
            self.downsample_layers.append(self._reduction(i, previous, embed_dims))
            self.stages.append(
                nn.ModuleList(
                    Block(
                        embed_dims,
                        settings['operator_dims'][i],
                        head_dims=settings['head_dims'],
                        ffn_ratio=settings['ffn_ratio'],
                        drop_path=next(ramp),
                        layer_scale_init_value=float(layer_scale_init_value),
                        operator_cfg=operator_cfg,
                    )
                    for _ in range(self.depths[i])
                )
            )
            previous = embed_dims
        self.out_norms = nn.ModuleDict(
            {str(i): LayerNorm2d(self.embed_dims[i]) for i in self.out_indices if out_norm}
        )
        self.apply(_init_layer)
        self._freeze()

    def _reduction(self, stage: int, in_channels: int, embed_dims: int) -> nn.Module:
        """What stands before a stage."""
        if stage:
            return Downsample(in_channels, embed_dims)
        half = embed_dims // 2
        return Stem(in_channels, (half, half, embed_dims, embed_dims), (2, 1, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_channels, H, W) to the features of ``out_indices``, stage i with a height
        and width of ceil(H / 2^(i + 2)) and ceil(W / 2^(i + 2)), contiguous."""
        self._check_images(x)
        # The recurrence, norms and 1x1 convolutions all want channels side by side.
        x = x.contiguous(memory_format=torch.channels_last)
        features = {}
        for i, (downsample, stage) in enumerate(
            zip(self.downsample_layers, self.stages, strict=True)
        ):
            x = downsample(x)
            for block in stage.children():
                if self.with_cp and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            if i in self.out_indices:
                features[i] = self.out_norms[str(i)](x) if self.out_norms else x
        # mmcv's RoIAlign reads memory as if it were (B, C, H, W) whatever the strides say.
        return tuple(features[i].contiguous() for i in self.out_indices)

    def train(self, mode: bool = True) -> VisionHOPE:
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def init_weights(self) -> None:
        """Run ``init_cfg``; a ``Pretrained`` entry is read with ``weights_only`` and strictly.

        The ImageNet head and what belongs to stages that are not built are left over, output norms
        may be left over or missing (they are no part of ImageNet training); the log names both.

        Raises:
            ValueError: nothing in the file, or nothing under its prefix, is for this model, an
                entry is missing or unknown, or a shape differs.
        """
        configured = self.init_cfg
        entries = configured if isinstance(configured, (list, tuple)) else [configured or {}]
        if not all(isinstance(cfg, dict) for cfg in entries):
            raise ValueError(f'init_cfg must be a dict or a list of them, got {configured!r}')
        # mmengine knows it by either name; its own loader would unpickle, and skip what differs.
        names = ('Pretrained', 'mmengine.Pretrained', PretrainedInit)
        pretrained = [c for c in entries if c.get('type') in names]
        self.init_cfg = [cfg for cfg in entries if cfg and cfg not in pretrained]
        super().init_weights()
        self.init_cfg = configured
        for cfg in pretrained:
            if not isinstance(cfg.get('checkpoint'), (str, os.PathLike)):
                raise ValueError(f'init_cfg of type Pretrained needs a checkpoint, got {cfg}')
            self._load_pretrained(str(cfg['checkpoint']), cfg.get('prefix') or '')

    def _load_pretrained(self, filename: str, prefix: str) -> None:
        weights = state_dict_of(load_checkpoint_file(filename), filename)
        names = list(weights)
        if prefix:
            prefix = prefix.rstrip('.') + '.'
            weights = {
                n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)
            }
        if not self.state_dict().keys() & weights.keys():
            inside = 'backbone.' if any(n.startswith('backbone.stages.') for n in names) else ''
            advice = f': set prefix={inside!r} in init_cfg' if inside not in ('', prefix) else ''
            raise ValueError(
                f'checkpoint {filename} has no weights of VisionHOPE under prefix {prefix!r}; '
                f'its names begin like {names[0]}{advice}'
            )
        unbuilt = [
            f'{part}.{i}.'
            for part in ('downsample_layers', 'stages')
            for i in range(len(self.stages), len(self.depths))
        ]
        check_match(
            self,
            weights,
            filename,
            optional=['out_norms.'],
            leftover=[*IMAGENET_HEAD, 'out_norms.', *unbuilt],
        )
        self.load_state_dict(weights, strict=False)

    @staticmethod
    def _checkpoint_filter(state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
        """mmpretrain's classifier calls it before it loads weights: the authors' files fit too."""
        rename_for_classifier(state_dict, prefix)

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """The layer of a parameter and the number of layers, for layer-wise learning rates.

        The stem is layer 0 and every block a layer; a downsampling goes with the block after it,
        an output norm with the block before it, and what is not under ``prefix`` is the last layer.

        Raises:
            ValueError: the backbone has no such part.
        """
        layers = sum(self.depths[: len(self.stages)]) + 2
        if not param_name.startswith(prefix):
            return layers - 1, layers
        part, *rest = param_name[len(prefix) :].split('.')
        if part not in ('downsample_layers', 'stages', 'out_norms'):
            raise ValueError(f'VisionHOPE has no parameter {param_name}')
        stage = int(rest[0])
        first = sum(self.depths[:stage]) + 1
        if part == 'stages':
            return first + int(rest[1]), layers
        if part == 'out_norms':
            return first + self.depths[stage] - 1, layers
        return (first if stage else 0), layers

    def _check_images(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f'images must be (B, {self.in_channels}, H, W), got {tuple(x.shape)}')
        if not x.is_floating_point():
            raise TypeError(f'images must be floating-point, got {x.dtype}: normalise them first')
        if min(x.shape[2:]) < MIN_IMAGE_SIZE:
            raise ValueError(
                f'images must be at least {MIN_IMAGE_SIZE} pixels high and wide, '
                f'got {x.shape[2]} x {x.shape[3]}'
            )

    def _freeze(self) -> None:
        for i in range(min(self.frozen_stages + 1, len(self.stages))):
            frozen = [self.downsample_layers[i], self.stages[i]]
            if str(i) in self.out_norms:
                frozen.append(self.out_norms[str(i)])
            for module in frozen:
                module.eval()
                module.requires_grad_(False)


def _init_layer(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _resolve_arch(arch: str | dict, known: dict[str, dict]) -> dict:
    """The full settings of a named or described architecture."""
    if isinstance(arch, str):
        if arch not in known:
            raise ValueError(f'arch must be one of {sorted(known)} or a dict, got {arch!r}')
        arch = known[arch]
    optional = {'operator_dims', 'head_dims', 'ffn_ratio'}
    if not isinstance(arch, dict) or not {'embed_dims', 'depths'} <= arch.keys():
        raise ValueError(f'arch as a dict needs embed_dims and depths, got {arch!r}')
    if unknown := arch.keys() - {'embed_dims', 'depths'} - optional:
        raise ValueError(
            f'arch knows embed_dims, depths, {", ".join(sorted(optional))}, got {sorted(unknown)}'
        )
    head_dims = arch.get('head_dims', 16)
    if type(head_dims) is not int:
        raise ValueError(f'head_dims of arch must be an integer, got {head_dims!r}')
    for name in ('embed_dims', 'depths', 'operator_dims'):
        given = arch.get(name, ())
        if not isinstance(given, (list, tuple)) or any(type(n) is not int for n in given):
            raise ValueError(f'{name} of arch must be integers, one per stage, got {given!r}')
    embed_dims = tuple(arch['embed_dims'])
    operator_dims = tuple(arch.get('operator_dims', (dims // 2 for dims in embed_dims)))
    depths = tuple(arch['depths'])
    if not len(embed_dims) == len(operator_dims) == len(depths) > 0:
        raise ValueError(
            'embed_dims, operator_dims and depths of arch must have one number per stage, '
            f'got {embed_dims}, {operator_dims}, {depths}'
        )
    if min(*depths, *embed_dims, *operator_dims, head_dims) < 1:
        raise ValueError(f'all numbers of arch must be positive, got {arch!r}')
    if any(dims % head_dims for dims in operator_dims):
        raise ValueError(
            f'operator_dims of arch must be multiples of head_dims {head_dims}, got {operator_dims}'
        )
    return dict(
        embed_dims=embed_dims,
        operator_dims=operator_dims,
        depths=depths,
        head_dims=head_dims,
        ffn_ratio=arch.get('ffn_ratio', 4.0),
    )


def _check_out_indices(out_indices: int | Sequence[int], stages: int) -> tuple[int, ...]:
    if isinstance(out_indices, int):
        out_indices = (out_indices,)
    indices = tuple(out_indices) if isinstance(out_indices, Sequence) else ()
    if (
        not indices
        or any(isinstance(i, bool) or i not in range(stages) for i in indices)
        or len(set(indices)) < len(indices)
    ):
        raise ValueError(
            f'out_indices must be distinct stages out of 0 to {stages - 1}, got {out_indices}'
        )
    return indices


def _check_directions(directions: object) -> None:
    names = list(directions) if isinstance(directions, (list, tuple)) else []
    if not names or any(name not in DIRECTIONS for name in names) or len({*names}) < len(names):
        raise ValueError(
            f'directions must be a tuple of distinct names out of {DIRECTIONS}, got {directions!r}'
        )


def _check_chunk_size(chunk_size: object) -> None:
    pair = isinstance(chunk_size, (tuple, list)) and len(chunk_size) == 2
    sizes = list(chunk_size) if pair else [chunk_size]  # type: ignore[call-overload]
    if any(size is not None and (not isinstance(size, int) or size < 1) for size in sizes):
        raise ValueError(
            'chunk_size must be None, a positive integer or a pair of them (row, column), '
            f'got {chunk_size!r}'
        )
