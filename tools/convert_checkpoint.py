"""Convert checkpoints: python tools/convert_checkpoint.py SOURCE TARGET --to FORMAT.

ImageNet weights go both ways between the authors' names (released), mmpretrain's ImageClassifier
(classifier) and VisionHOPE alone (backbone). Detectors and segmentors have the same names here and
there: released drops all but their weights, backbone takes VisionHOPE out.

What is written is {'state_dict': ...}, checked strictly, and named as in OpenMMLab's zoo:
TARGET x.pth becomes x-<first 8 hex digits of its sha256>.pth.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from mmvisionhope import VisionHOPE, VisionHOPENeck
from mmvisionhope.engine import cli
from mmvisionhope.engine.checkpoint import (
    IMAGENET_HEAD,
    check_match,
    classifier_to_released,
    released_to_classifier,
)

BLOCK = re.compile(r'stages\.(\d+)\.(\d+)\.')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', help='checkpoint file or address')
    parser.add_argument('target', help='file to write, ending with .pth')
    parser.add_argument('--to', required=True, choices=['released', 'classifier', 'backbone'])
    parser.add_argument(
        '--head', help='released or classifier file that gives a backbone its ImageNet head'
    )
    args = parser.parse_args()
    if not args.target.endswith('.pth'):
        parser.error(f'the target must end with .pth, got {args.target}')
    return args


def main() -> None:
    args = parse_args()
    _, weights = cli.read_checkpoint(args.source)
    head = cli.read_checkpoint(args.head)[1] if args.head else {}
    try:
        converted = convert(weights, args.to, args.source, head)
    except ValueError as error:
        raise cli.UsageError(str(error)) from error
    print(save(converted, Path(args.target)))


def convert(
    weights: dict[str, Tensor], to: str, source: str, head: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Weights under the names of another format, in the order they had.

    Args:
        weights: of a released file, a classifier, a backbone, a detector or a segmentor.
        to: ``'released'``, ``'classifier'`` or ``'backbone'``.
        source: the file's name, for messages.
        head: released or classifier weights whose ImageNet head completes a backbone.

    Raises:
        ValueError: the weights are none of these, are incomplete or hold something else, or cannot
            become what is asked.
    """
    weights = released(weights)
    if head:
        if has_head(weights) or not has_head(released(head)):
            raise ValueError(
                '--head takes a file with an ImageNet head, for a source without one: '
                f'{source} has {"one" if has_head(weights) else "none, nor has the other file"}'
            )
        weights |= {n: w for n, w in released(head).items() if n.startswith(IMAGENET_HEAD)}
    dense = not has_head(weights) and any(name.startswith('backbone.') for name in weights)
    prefix = 'backbone.' if dense else ''
    parts = {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    check(parts, source)
    if to == 'backbone':
        return {n: w for n, w in parts.items() if not n.startswith(IMAGENET_HEAD)}
    if dense and to == 'released':
        return weights
    if not has_head(weights):
        raise ValueError(
            f'{source} has no ImageNet head ({", ".join(IMAGENET_HEAD)}), so it cannot become '
            f'{to}: for a backbone, --head takes the head of another file'
        )
    if to == 'released':
        return weights
    return {released_to_classifier(name): weight for name, weight in weights.items()}


def released(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A classifier's weights under the authors' names; others as they are."""
    if 'neck.head_pre_logits.weight' not in weights:
        return dict(weights)
    return {classifier_to_released(name): weight for name, weight in weights.items()}


def has_head(weights: dict[str, Tensor]) -> bool:
    return 'head_pre_logits.weight' in weights


def check(weights: dict[str, Tensor], source: str) -> None:
    """Raise unless the weights are a whole VisionHOPE, its ImageNet head with it if it has one."""
    blocks = {(int(m[1]), int(m[2])) for m in map(BLOCK.match, weights) if m}
    if not blocks:
        raise ValueError(
            f'{source} holds no VisionHOPE: its names begin like {next(iter(weights))}'
        )
    depths = [0] * (1 + max(stage for stage, _ in blocks))
    for stage, block in blocks:
        depths[stage] = max(depths[stage], block + 1)
    try:
        width, operator, heads, hidden = (
            [weights[f'stages.{stage}.0.{name}'].shape for stage in range(len(depths))]
            for name in ('gamma1', 'proj_in.weight', 'operator.d_skip', 'ffn.fc1.weight')
        )
        in_channels = weights['downsample_layers.0.proj.0.weight'].shape[1]
        arch = dict(
            embed_dims=[shape[0] for shape in width],
            operator_dims=[shape[0] for shape in operator],
            depths=depths,
            head_dims=heads[0][1],
            ffn_ratio=hidden[0][0] / width[0][0],
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f'{source} is no whole VisionHOPE: it lacks {error}') from error
    normed = sorted({int(n.split('.')[1]) for n in weights if n.startswith('out_norms.')})
    backbone = VisionHOPE(
        arch,
        in_channels=in_channels,
        out_indices=normed or len(depths) - 1,
        out_norm=bool(normed),
    )
    behind = {n: w for n, w in weights.items() if n.startswith(IMAGENET_HEAD)}
    rest = {n: w for n, w in weights.items() if n not in behind}
    check_match(backbone, rest, source, leftover=())
    if behind:
        if missing := {'head_pre_logits.weight', 'head.weight'} - behind.keys():
            raise ValueError(f'{source} has half an ImageNet head: it lacks {min(missing)}')
        hidden_channels, channels = behind['head_pre_logits.weight'].shape[:2]
        neck = VisionHOPENeck(channels, hidden_channels)
        neck.add_module('head', nn.Linear(hidden_channels, behind['head.weight'].shape[0]))
        check_match(neck, behind, source, leftover=())


def save(weights: dict[str, Tensor], target: Path) -> Path:
    """Write weights under the name of their hash. The same weights give the same file."""
    buffer = io.BytesIO()
    # Clones: a tensor that is a view would be saved with all it is a view of.
    torch.save({'state_dict': {name: w.clone() for name, w in weights.items()}}, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:8]
    path = target.with_name(f'{target.stem}-{digest}.pth')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


if __name__ == '__main__':
    cli.run(main)
