"""Mixed precision where there is a device for it."""

from __future__ import annotations

from typing import Any

from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

# What mmengine's AmpOptimWrapper runs on.
AMP_DEVICES = ('cuda', 'npu', 'mlu', 'musa')


@OPTIM_WRAPPERS.register_module()
def GpuAmpOptimWrapper(  # noqa: N802 - configs name it like the classes it stands for
    loss_scale: str | float | dict = 'dynamic', dtype: str | None = None, **kwargs: Any
) -> OptimWrapper:
    """mmengine's ``AmpOptimWrapper`` on a GPU or the like, a float32 ``OptimWrapper`` on others.

    mmengine's own refuses to train on a CPU, so a config with it would not run there.

    Args:
        loss_scale, dtype: of ``AmpOptimWrapper``: float16 with a dynamic loss scale by default.
        kwargs: of ``OptimWrapper``.
    """
    device = get_device()
    if device in AMP_DEVICES:
        return AmpOptimWrapper(loss_scale=loss_scale, dtype=dtype, **kwargs)
    print_log(
        f'mixed precision is for {", ".join(AMP_DEVICES)}: training in float32 on {device}',
        logger='current',
    )
    return OptimWrapper(**kwargs)
