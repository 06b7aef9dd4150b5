"""Train a detector, segmentor or classifier: python tools/train.py CONFIG."""

from __future__ import annotations

import argparse
import os.path as osp

from mmengine.runner import find_latest_checkpoint

from mmvisionhope.engine import cli
from mmvisionhope.engine.checkpoint import register_safe_loader


def parse_args() -> argparse.Namespace:
    parser = cli.argument_parser('Train a detector, segmentor or classifier')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='go on from this checkpoint, or, without one, from the latest in the work dir',
    )
    parser.add_argument(
        '--amp', action='store_true', help='mixed precision; float32 where there is no GPU'
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    register_safe_loader()
    config = cli.load_config(args)
    if args.amp:
        config.optim_wrapper.type = 'mmengine.GpuAmpOptimWrapper'
    if args.auto_scale_lr:
        if 'base_batch_size' not in config.get('auto_scale_lr', {}):
            raise cli.UsageError(f'--auto-scale-lr needs auto_scale_lr in {args.config}')
        config.auto_scale_lr.enable = True
    if args.resume:
        config.resume = True
        latest = args.resume == 'auto'
        config.load_from = find_latest_checkpoint(config.work_dir) if latest else args.resume
    weights = None
    # Addresses are for mmengine to fetch.
    if config.get('load_from') and '://' not in config.load_from:
        config.load_from = osp.expanduser(config.load_from)
        checkpoint, weights = cli.read_checkpoint(config.load_from)
        if config.resume and not {'meta', 'message_hub'} <= checkpoint.keys():
            raise cli.UsageError(
                f'checkpoint {config.load_from} holds weights but no state of a run to resume: '
                f'start from it by --cfg-options load_from={config.load_from}'
            )
    cli.check_data(config, 'train_dataloader', 'val_dataloader')
    runner = cli.build_runner(config)
    if weights:
        # Fine-tuning keeps what fits, which mmengine would call a success if it were nothing.
        cli.check_weights(runner, weights, config.load_from, whole=config.resume)
    runner.train()


if __name__ == '__main__':
    cli.run(main)
