"""Resumed training that equals unbroken training."""

from __future__ import annotations

import random

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import FUNCTIONS, HOOKS
from mmengine.runner import Runner


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed Python, NumPy and torch at each epoch from (seed of the run, epoch, rank).

    The state of random generators is in no checkpoint. With this hook, and with data loaders that
    use :func:`seed_worker_from_torch` and start their workers anew each epoch, an epoch does not
    depend on the ones before it except through the weights, so a resumed run repeats the losses of
    an unbroken one.
    """

    priority = 'VERY_HIGH'

    def before_train_epoch(self, runner: Runner) -> None:
        sequence = np.random.SeedSequence([runner.seed, runner.epoch, get_rank()])
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


@FUNCTIONS.register_module()
def seed_worker_from_torch(worker_id: int) -> None:
    """Seed a worker of a data loader from what torch gave it, which is new each epoch.

    mmengine's own function gives a worker the same seed whenever it starts, so that without
    persistent workers every epoch would draw the same augmentations.
    """
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)
