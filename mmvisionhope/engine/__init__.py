from .hooks import EpochSeedHook, MESAHook, seed_worker_from_torch
from .optim import GpuAmpOptimWrapper, VisionHOPEOptimWrapperConstructor

__all__ = [
    'EpochSeedHook',
    'GpuAmpOptimWrapper',
    'MESAHook',
    'VisionHOPEOptimWrapperConstructor',
    'seed_worker_from_torch',
]
