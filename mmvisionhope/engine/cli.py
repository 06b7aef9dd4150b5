"""What tools/train.py and tools/test.py share: arguments, configs, and errors a user can mend."""

from __future__ import annotations

import argparse
import os
import os.path as osp
import sys
from collections.abc import Callable, Iterator

import torch
from mmengine.config import Config, ConfigDict, DictAction
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import Tensor

from .checkpoint import (
    check_match,
    load_checkpoint_file,
    rename_for_classifier,
    state_dict_of,
)

# What moves the data of each toolbox's configs.
DATA_ROOTS = dict(mmdet='COCO_ROOT', mmseg='ADE20K_ROOT', mmpretrain='IMAGENET_ROOT')


class UsageError(Exception):
    """A mistake of the user's, in one sentence that says what to do."""


def run(main: Callable[[], None]) -> None:
    """Call ``main``; a :class:`UsageError` ends the process with its sentence and status 2."""
    try:
        main()
    except UsageError as error:
        print(f'{osp.basename(sys.argv[0])}: error: {error}', file=sys.stderr)
        sys.exit(2)


class Options(DictAction):
    """mmengine's key=value pairs, with an error of argparse for what is none."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        for value in values:
            if '=' not in value:
                parser.error(f'{option_string} takes key=value pairs, got {value}')
        super().__call__(parser, namespace, values, option_string)


def argument_parser(description: str, config: str | None = None) -> argparse.ArgumentParser:
    """The arguments of training and testing alike; ``config`` makes that one optional."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', nargs='?' if config else None, default=config, help='config file')
    parser.add_argument('--work-dir', help='folder of logs and checkpoints')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        help='override settings of the config: key=value pairs, lists as key="[a,b]" or key=a,b',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='job launcher',
    )
    # torch.distributed.launch passes it; mmengine reads it from the environment.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """The config with the overrides of the command line.

    Raises:
        UsageError: there is no such config, or an override does not fit it.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    if not osp.isfile(args.config):
        raise UsageError(f'config {args.config} does not exist')
    if args.launcher == 'pytorch' and 'RANK' not in os.environ:
        raise UsageError('--launcher pytorch is for torchrun to start, as tools/dist_*.sh do')
    try:
        config = Config.fromfile(args.config)
    except (OSError, SyntaxError) as error:
        raise UsageError(f'config {args.config} cannot be read: {error}') from error
    config.launcher = args.launcher
    if args.cfg_options:
        try:
            config.merge_from_dict(args.cfg_options)
        except (KeyError, TypeError, IndexError) as error:
            raise UsageError(f'--cfg-options does not fit {args.config}: {error}') from error
    if args.work_dir:
        config.work_dir = args.work_dir
    elif config.get('work_dir') is None:
        name = osp.splitext(osp.basename(args.config))[0]
        config.work_dir = osp.join('work_dirs', name)
    return config


def check_data(config: Config, *loaders: str) -> None:
    """Raise before anything is built if files of these data loaders are not there.

    Raises:
        UsageError: names the path and what moves it.
    """
    variable = DATA_ROOTS.get(config.get('default_scope', ''))
    moved = f'by {variable} or by' if variable else 'by'
    for loader in loaders:
        for dataset in _datasets(config.get(loader, {}).get('dataset', {})):
            root = dataset.get('data_root') or ''
            # mmpretrain's data sets take one folder, or find it in the root by the split's name.
            prefixes = dataset.get('data_prefix') or (root and dataset.get('split')) or {}
            folders = [prefixes] if isinstance(prefixes, str) else prefixes.values()
            parts = [dataset.get('ann_file'), *folders]
            for part in parts:
                path = osp.join(root, part) if isinstance(part, str) else ''
                # Addresses of a file client are for mmengine to reach.
                if path and '://' not in path and not osp.exists(path):
                    raise UsageError(
                        f'{path}, which {loader} of the config reads, does not exist: put the data '
                        f'there, or say where it is {moved} '
                        f'--cfg-options {loader}.dataset.data_root=...'
                    )
        evaluator = loader.replace('dataloader', 'evaluator')
        for metric in _metrics(config.get(evaluator)):
            path = metric.get('ann_file') or ''
            if path and '://' not in path and not osp.exists(path):
                raise UsageError(
                    f'{path}, which {evaluator} of the config reads, does not exist: say where it '
                    f'is {moved} --cfg-options {evaluator}.ann_file=...'
                )


def build_runner(config: Config) -> Runner:
    """The runner of ``runner_type`` if the config has one, else mmengine's."""
    if config.launcher == 'pytorch' and get_device() == 'cpu':
        # mmengine would reach for a GPU of each process.
        torch.distributed.init_process_group('gloo')
        wrapper = config.get('model_wrapper_cfg') or dict(broadcast_buffers=False)
        config.model_wrapper_cfg = dict(
            find_unused_parameters=config.get('find_unused_parameters', False)
        ) | dict(wrapper, device_ids=None)
    return RUNNERS.build(config) if 'runner_type' in config else Runner.from_cfg(config)


def read_checkpoint(filename: str) -> tuple[dict, dict[str, Tensor]]:
    """A checkpoint and the weights in it.

    Raises:
        UsageError: it does not exist, or cannot be read as plain weights.
    """
    try:
        checkpoint = load_checkpoint_file(filename)
        return checkpoint, state_dict_of(checkpoint, filename)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def check_weights(
    runner: Runner, weights: dict[str, Tensor], filename: str, whole: bool = True
) -> None:
    """Raise unless the weights are of the runner's model: all of them, or any if not ``whole``.

    Raises:
        UsageError: names the checkpoint and what of it does not fit.
    """
    model = runner.model
    # DistributedDataParallel and test-time augmentation wrap the model that the weights are of.
    while not weights.keys() & model.state_dict().keys() and hasattr(model, 'module'):
        model = model.module
    own = model.state_dict()
    if 'neck.head_pre_logits.weight' in own:
        weights = dict(weights)
        rename_for_classifier(weights)
    if not whole and any(n in own and own[n].shape == w.shape for n, w in weights.items()):
        return
    try:
        check_match(model, weights, filename)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _metrics(evaluator: ConfigDict | list | None) -> list:
    """The metrics of an evaluator, which may be one or several."""
    return evaluator if isinstance(evaluator, list) else [evaluator or {}]


def _datasets(config: ConfigDict) -> Iterator[ConfigDict]:
    """The data sets of a loader, inside whatever wraps them."""
    if 'dataset' in config:
        yield from _datasets(config.dataset)
    elif 'datasets' in config:
        for part in config.datasets:
            yield from _datasets(part)
    elif config:
        yield config
