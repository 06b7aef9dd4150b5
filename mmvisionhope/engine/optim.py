"""Mixed precision where there is a device for it, and what each parameter decays by."""

from __future__ import annotations

from typing import Any

from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import AmpOptimWrapper, DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from torch import nn

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


# By the last part of their names: the content, key and value memories, and what is neither a bias
# nor of one dimension but scales, shifts or gates.
MEMORIES = ('M_m_0', 'M_k_0', 'M_v_0')
UNDECAYED = (
    *('M_eta_0', 'M_alpha_0', 'd_skip', 'direction_scale'),
    *('gamma1', 'gamma2', 'gamma', 'beta'),
)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class VisionHOPEOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Weight decay per group of parameters, and a learning rate per layer.

    Content, key and value memories decay by ``memory_weight_decay``. Norms (GRN too), biases,
    LayerScale, skip, direction scales and the learning-rate and retention memories do not decay.
    Everything else decays by the optimizer's ``weight_decay``.

    The layer-wise rate is ``lr * layer_decay_rate ** (layers - 1 - layer)``, where a layer is a
    block, as the backbone's ``get_layer_depth`` counts; what is behind the backbone has ``lr``.
    Parameters with the same settings share a group.

    Args:
        optim_wrapper_cfg: as for mmengine's default constructor.
        paramwise_cfg: a dict with

            - ``memory_weight_decay`` (0.01),
            - ``layer_decay_rate`` (1.0: the same rate for all),
            - ``custom_keys``: as for mmengine's default constructor, the longest part of a name
              that is a key decides, by ``lr_mult`` and ``decay_mult``.

    Raises:
        ValueError: another option is given, the optimizer has no ``lr`` or no ``weight_decay``, or
            a layer-wise rate is asked of a backbone that does not count its layers.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        defaults = dict(memory_weight_decay=0.01, layer_decay_rate=1.0, custom_keys={})
        given = paramwise_cfg or {}
        if unknown := sorted(given.keys() - defaults.keys()):
            raise ValueError(f'paramwise_cfg knows {", ".join(defaults)}, got {", ".join(unknown)}')
        super().__init__(optim_wrapper_cfg, defaults | given)
        if self.base_lr is None or self.base_wd is None:
            raise ValueError(f'optimizer must have lr and weight_decay, got {self.optimizer_cfg}')
        if not 0 < self.paramwise_cfg['layer_decay_rate'] <= 1:
            raise ValueError(
                f'layer_decay_rate must be in (0, 1], got {self.paramwise_cfg["layer_decay_rate"]}'
            )

    def add_params(self, params: list[dict], module: nn.Module, **kwargs: Any) -> None:
        """Append the groups of the trainable parameters of ``module`` to ``params``."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                settings = self._settings(module, name, parameter)
                groups.setdefault(settings, []).append(parameter)
        params += [
            dict(params=group, lr=lr, weight_decay=decay) for (lr, decay), group in groups.items()
        ]

    def _settings(
        self, model: nn.Module, name: str, parameter: nn.Parameter
    ) -> tuple[float, float]:
        """Learning rate and weight decay of a parameter."""
        lr = self.base_lr * self._layer_scale(model, name)
        custom_keys = self.paramwise_cfg['custom_keys']
        if keys := [key for key in custom_keys if key in name]:
            custom = custom_keys[max(keys, key=len)]
            return lr * custom.get('lr_mult', 1.0), self.base_wd * custom.get('decay_mult', 1.0)
        last = name.rpartition('.')[2]
        if last in MEMORIES:
            return lr, self.paramwise_cfg['memory_weight_decay']
        if parameter.ndim <= 1 or last in UNDECAYED:
            return lr, 0.0
        return lr, self.base_wd

    def _layer_scale(self, model: nn.Module, name: str) -> float:
        rate = self.paramwise_cfg['layer_decay_rate']
        if rate == 1:
            return 1.0
        backbone: Any = getattr(model, 'backbone', model)
        if not hasattr(backbone, 'get_layer_depth'):
            raise ValueError(
                'layer_decay_rate needs a backbone with get_layer_depth, '
                f'{type(backbone).__name__} has none'
            )
        prefix = '' if backbone is model else 'backbone.'
        layer, layers = backbone.get_layer_depth(name, prefix)
        return rate ** (layers - 1 - layer)
