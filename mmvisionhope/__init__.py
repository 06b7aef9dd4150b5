"""VisionHOPE for OpenMMLab: importing this package registers the backbones with mmengine."""

import warnings
from importlib.util import find_spec

from .version import __version__

__all__ = ['__version__']

if find_spec('torch') and find_spec('mmengine'):
    from .engine import (
        EpochSeedHook,
        GpuAmpOptimWrapper,
        MESAHook,
        VisionHOPEOptimWrapperConstructor,
        seed_worker_from_torch,
    )
    from .models import SRNL, PlainVisionHOPE, SimpleFeaturePyramid, VisionHOPE, VisionHOPENeck

    __all__ += [
        'SRNL',
        'EpochSeedHook',
        'GpuAmpOptimWrapper',
        'MESAHook',
        'PlainVisionHOPE',
        'SimpleFeaturePyramid',
        'VisionHOPE',
        'VisionHOPENeck',
        'VisionHOPEOptimWrapperConstructor',
        'seed_worker_from_torch',
    ]
else:
    warnings.warn(
        'mmvisionhope needs torch and mmengine, so nothing of it is registered: '
        '`python -m mmvisionhope.check` tells what to install',
        stacklevel=2,
    )
