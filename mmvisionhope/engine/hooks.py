"""Resumed training that equals unbroken training, and learning from one's own average."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import get_rank
from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import FUNCTIONS, HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn


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


@HOOKS.register_module()
class MESAHook(Hook):
    r"""MESA: the classifier learns from its own moving average too (Appendix C.2).

    From ``begin_epoch`` on, with student scores s and scores t of the average that the ``EMAHook``
    of the run keeps, in eval mode and on the same augmented images, the losses get

    .. math::
        \mathrm{loss\_mesa} =
            -\frac{w}{B} \sum_b \sum_c \mathrm{softmax}(t_b)_c \, \log \mathrm{softmax}(s_b)_c

    It works for any classifier of mmpretrain whose head scores images as (B, classes). It has no
    state: what a resumed run needs is the checkpoint's average.

    Args:
        begin_epoch: epochs trained without it.
        loss_weight: w.

    Raises:
        ValueError: an argument is out of range, or the run does not have exactly one ``EMAHook``.
        TypeError: the model has no head, or its head gives no (B, classes).
    """

    def __init__(self, begin_epoch: int = 0, loss_weight: float = 1.0) -> None:
        if type(begin_epoch) is not int or begin_epoch < 0:
            raise ValueError(f'begin_epoch must be an integer from 0 on, got {begin_epoch!r}')
        if not isinstance(loss_weight, (int, float)) or loss_weight <= 0:
            raise ValueError(f'loss_weight must be a positive number, got {loss_weight!r}')
        self.begin_epoch = begin_epoch
        self.loss_weight = loss_weight
        self._scores: object = None

    def before_train(self, runner: Runner) -> None:
        averages = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
        if len(averages) != 1:
            raise ValueError(
                'MESAHook needs one EMAHook in custom_hooks, whose average is the teacher, '
                f'got {len(averages)}'
            )
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        if not isinstance(getattr(model, 'head', None), nn.Module):
            raise TypeError(f'MESAHook needs a classifier with a head, got {type(model).__name__}')
        self._teacher = averages[0].ema_model.module.eval()
        self._active = False
        self._handles = [
            model.head.register_forward_hook(self._keep_scores),
            model.register_forward_hook(self._add_loss, with_kwargs=True),
        ]

    def before_train_epoch(self, runner: Runner) -> None:
        self._active = runner.epoch >= self.begin_epoch

    def after_train_epoch(self, runner: Runner) -> None:
        self._active = False

    def after_train(self, runner: Runner) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_scores(self, head: nn.Module, args: tuple, scores: object) -> None:
        if self._active:
            self._scores = scores

    def _add_loss(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> dict | None:
        if not self._active:
            return None
        scores, self._scores = self._scores, None
        if not isinstance(scores, Tensor) or scores.ndim != 2:
            raise TypeError(
                f'MESAHook needs a head that gives (B, classes), {type(model.head).__name__} '
                'does not'
            )
        with torch.no_grad():
            target = self._teacher(kwargs['inputs'], mode='tensor').float().softmax(dim=1)
        return losses | dict(loss_mesa=self.loss_weight * F.cross_entropy(scores.float(), target))


@FUNCTIONS.register_module()
def seed_worker_from_torch(worker_id: int) -> None:
    """Seed a worker of a data loader from what torch gave it, which is new each epoch.

    mmengine's own function gives a worker the same seed whenever it starts, so that without
    persistent workers every epoch would draw the same augmentations.
    """
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)
