"""Reading checkpoints: only ever with ``weights_only``, and never silently in part."""

from __future__ import annotations

import os.path as osp
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, MutableMapping

import numpy as np
import torch
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

# What reading raises of a file that is cut short, garbled, or no checkpoint at all.
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    struct.error,
)

# What an ImageNet model of the authors has behind its backbone.
IMAGENET_HEAD = ('norm.', 'head_pre_logits.', 'head_norm.', 'head.')


def _safe_globals() -> list:
    """What checkpoints of mmengine's runner hold besides tensors: log buffers, numpy values."""
    multiarray = (np._core if hasattr(np, '_core') else np.core).multiarray
    dtypes = [np.float64, np.float32, np.int64, np.int32, np.uint32, np.bool_]
    return [
        HistoryBuffer,
        multiarray._reconstruct,
        multiarray.scalar,
        np.ndarray,
        np.dtype,
        *(type(np.dtype(dtype)) for dtype in dtypes),
        # Log buffers name their statistics as getattr(HistoryBuffer, 'mean'); what getattr returns
        # still cannot be called unless it is in this list.
        getattr,
    ]


def load_checkpoint_file(filename: str, map_location: str | Callable | None = 'cpu') -> dict:
    """Read a checkpoint file or URL without executing anything in it.

    Args:
        filename: a local path, or an ``http(s)://`` address, which is downloaded once.
        map_location: as for ``torch.load``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or holds more than weights and mmengine's log buffers.
    """
    filename = osp.expanduser(filename)
    url = filename.startswith(('http://', 'https://'))
    if not url and not osp.isfile(filename):
        raise FileNotFoundError(f'checkpoint {filename} does not exist')
    with torch.serialization.safe_globals(_safe_globals()):
        try:
            if url:
                return torch.hub.load_state_dict_from_url(
                    filename, map_location=map_location, weights_only=True
                )
            return torch.load(filename, map_location=map_location, weights_only=True)
        except UNREADABLE as error:
            reason = str(error).split('\n')[0] or type(error).__name__
            raise ValueError(
                f'checkpoint {filename} cannot be read as plain weights ({reason}): it is damaged, '
                'or it holds Python objects, which are not loaded because unpickling them would '
                "run code; if you trust it, save its weights anew as {'state_dict': ...}"
            ) from error
        except OSError as error:
            raise ValueError(f'checkpoint {filename} cannot be read: {error}') from error


def register_safe_loader() -> None:
    """Make mmengine's runner read local checkpoints with :func:`load_checkpoint_file`."""
    CheckpointLoader.register_scheme(
        prefixes='',
        loader=lambda filename, map_location: load_checkpoint_file(filename, map_location),
        force=True,
    )


def state_dict_of(checkpoint: Mapping, filename: str) -> dict[str, Tensor]:
    """The weights in a checkpoint: its ``state_dict`` if it has one, else the mapping itself."""
    weights = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, Mapping) else None
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f'checkpoint {filename} holds no state_dict of named tensors')
    return {name.removeprefix('module.'): value for name, value in weights.items()}


def released_to_classifier(name: str) -> str:
    """The name that a weight of the authors' ImageNet models has in mmpretrain's classifier."""
    if name.startswith('head.'):
        return name.replace('head.', 'head.fc.', 1)
    return ('neck.' if name.startswith(IMAGENET_HEAD) else 'backbone.') + name


def classifier_to_released(name: str) -> str:
    """The inverse of :func:`released_to_classifier`."""
    if name.startswith('head.fc.'):
        return name.replace('head.fc.', 'head.', 1)
    return name.removeprefix('neck.').removeprefix('backbone.')


def rename_for_classifier(weights: MutableMapping[str, Tensor], prefix: str = '') -> None:
    """Give the authors' ImageNet weights the names of mmpretrain's classifier, in place.

    Other weights keep theirs.

    Args:
        weights: names and tensors.
        prefix: of the names that are meant.
    """
    if f'{prefix}head_pre_logits.weight' not in weights:
        return
    for name in [name for name in weights if name.startswith(prefix)]:
        weights[prefix + released_to_classifier(name.removeprefix(prefix))] = weights.pop(name)


def check_match(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    filename: str,
    optional: Iterable[str] = (),
    leftover: Iterable[str] | None = None,
) -> None:
    """Raise unless ``weights`` fill ``module``, so that no model runs on weights it only half got.

    Entries that the module does not have are named in the log and otherwise left alone.

    Args:
        module: the model the weights are for.
        weights: names and tensors of the file.
        filename: named in the messages.
        optional: prefixes of names that the file may lack.
        leftover: prefixes of names that the module may lack; None allows any.

    Raises:
        ValueError: nothing matches, an entry is missing or is not allowed to be left over, or a
            shape differs.
    """
    own = module.state_dict()
    optional = tuple(optional)
    model = type(module).__name__
    if not own.keys() & weights.keys():
        raise ValueError(
            f'checkpoint {filename} has nothing for {model}: its names begin like '
            f'{_some(weights)}, those of the model like {_some(own)}'
        )
    differing = [
        f'{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}'
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if differing:
        raise ValueError(
            f'checkpoint {filename} is of another architecture than {model}: {_some(differing)}'
        )
    missing = [
        name
        for name in own.keys() - weights.keys()
        if not name.startswith(optional) and not name.endswith('num_batches_tracked')
    ]
    if missing:
        raise ValueError(
            f'checkpoint {filename} is of another architecture than {model}: '
            f'it lacks {_some(sorted(missing))}'
        )
    unused = sorted(weights.keys() - own.keys())
    if leftover is not None:
        allowed = tuple(leftover)
        if unknown := [name for name in unused if not name.startswith(allowed)]:
            raise ValueError(
                f'checkpoint {filename} is of another architecture than {model}, '
                f'which has no {_some(unknown)}'
            )
    if unused:
        print_log(f'{filename}: not used by {model}: {_some(unused)}', logger='current')
    initial = sorted(own.keys() - weights.keys())
    if initial:
        print_log(f'{filename}: stays as initialised: {_some(initial)}', logger='current')


def _some(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    rest = len(names) - count
    return ', '.join(names[:count]) + (f' and {rest} more' if rest > 0 else '')
