"""Parameters and multiply-adds by module: python tools/get_flops.py CONFIG --shape H W."""

from __future__ import annotations

import argparse
import os.path as osp

from mmengine.registry import MODELS, init_default_scope
from rich.console import Console
from rich.table import Table

from mmvisionhope.analysis import Complexity, complexity
from mmvisionhope.engine import cli


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Parameters and multiply-adds of a detector, segmentor or classifier'
    )
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        default=[224, 224],
        help='height and width of the image (224 224)',
    )
    parser.add_argument('--depth', type=int, default=2, help='levels of modules to list (2)')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=cli.Options,
        help='override settings of the config: key=value pairs',
    )
    args = parser.parse_args()
    if args.depth < 0 or min(args.shape) < 32:
        parser.error('--shape must be at least 32 32, and --depth at least 0')
    return args


def table_of(found: Complexity, depth: int) -> Table:
    """A row for the model and for each module down to ``depth`` that has parameters or work."""
    table = Table('module')
    for title in ('parameters', 'MACs', 'share'):
        table.add_column(title, justify='right')
    whole = found.within('')[1]
    for name in ['', *found.modules(depth)]:
        parameters, macs = found.within(name)
        level = name.count('.') + 1 if name else 0
        label = '  ' * level + (name or 'model')
        table.add_row(
            label, f'{parameters / 1e6:.3f} M', f'{macs / 1e9:.3f} G', f'{macs / whole:.1%}'
        )
    return table


def main() -> None:
    args = parse_args()
    args.work_dir, args.launcher, args.local_rank = None, 'none', 0
    config = cli.load_config(args)
    init_default_scope(config.get('default_scope', 'mmengine'))
    model = MODELS.build(config.model)
    found = complexity(model, args.shape)

    console = Console(soft_wrap=True)
    parameters, macs = found.within('')
    console.print(table_of(found, args.depth))
    console.print(
        f'{osp.basename(args.config)} at {args.shape[0]} x {args.shape[1]} (height x width): '
        f'{parameters / 1e6:.1f} M parameters, {macs / 1e9:.1f} G multiply-adds'
    )
    if found.unused:
        modules = sorted({name.rpartition('.')[0] for name in found.unused})
        console.print(f'Not run for a prediction, so without multiply-adds: {", ".join(modules)}')
    console.print(f'Free by rule: {", ".join(sorted(found.free))}')
    if found.unknown:
        console.print(
            f'No rule, so missing in these figures: {", ".join(sorted(found.unknown))}',
            style='bold red',
        )


if __name__ == '__main__':
    cli.run(main)
