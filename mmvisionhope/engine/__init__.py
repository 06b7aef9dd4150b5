from .hooks import EpochSeedHook, seed_worker_from_torch
from .optim import GpuAmpOptimWrapper

__all__ = ['EpochSeedHook', 'GpuAmpOptimWrapper', 'seed_worker_from_torch']
