"""Test a detector, segmentor or classifier: python tools/test.py CONFIG CHECKPOINT."""

from __future__ import annotations

import argparse

from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults

from mmvisionhope.engine import cli
from mmvisionhope.engine.checkpoint import register_safe_loader


def parse_args() -> argparse.Namespace:
    parser = cli.argument_parser('Test a detector, segmentor or classifier')
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument('--out', help='file for all predictions, ending with .pkl')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='folder for images with predictions drawn in')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation of the config')
    args = parser.parse_args()
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out must end with .pkl or .pickle, got {args.out}')
    return args


def main() -> None:
    args = parse_args()
    register_safe_loader()
    config = cli.load_config(args)
    cli.check_data(config, 'test_dataloader')
    _, weights = cli.read_checkpoint(args.checkpoint)
    config.load_from = args.checkpoint
    config.resume = False
    if args.show or args.show_dir:
        draw_predictions(config, args.show, args.show_dir)
    if args.tta:
        augment(config, args.config)
    runner = cli.build_runner(config)
    cli.check_weights(runner, weights, args.checkpoint)
    if args.out:
        runner.test_evaluator.metrics.append(dump_results(config, args.out))
    runner.test()


def draw_predictions(config: Config, show: bool, folder: str | None) -> None:
    """Switch on the visualization hook of the config, whose options differ between toolboxes."""
    hook = config.get('default_hooks', {}).get('visualization')
    if not hook:
        raise cli.UsageError('--show and --show-dir need default_hooks.visualization in the config')
    scope = config.get('default_scope')
    if scope == 'mmpretrain':
        hook.update(enable=True, show=show, out_dir=folder)
    else:
        hook.update(draw=True, show=show)
        if scope == 'mmseg':
            config.visualizer.save_dir = folder
        else:
            hook.test_out_dir = folder


def augment(config: Config, name: str) -> None:
    missing = [key for key in ('tta_model', 'tta_pipeline') if key not in config]
    if missing:
        raise cli.UsageError(f'--tta needs {" and ".join(missing)} in {name}')
    config.model = ConfigDict(**config.tta_model, module=config.model)
    config.test_dataloader.dataset.pipeline = config.tta_pipeline


def dump_results(config: Config, filename: str) -> DumpResults:
    if config.get('default_scope') == 'mmdet':
        from mmdet.evaluation import DumpDetResults  # masks as RLE

        return DumpDetResults(out_file_path=filename)
    return DumpResults(out_file_path=filename)


if __name__ == '__main__':
    cli.run(main)
