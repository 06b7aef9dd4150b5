"""The embedded data set for mmdet. Configs import this module, so mmvisionhope itself need not."""

from __future__ import annotations

from typing import Any

from mmdet.datasets import CocoDataset
from mmdet.evaluation import CocoMetric
from mmengine.registry import DATASETS, METRICS

from .draw_shapes import CLASSES, SPLITS, generate_shapes, shapes_root


@DATASETS.register_module()
class ShapesDataset(CocoDataset):
    """A few hundred drawn images of 128 x 128 pixels, generated on first use.

    Args:
        split: ``'train'`` or ``'val'``.
        data_root: folder of the data set; None is the cache folder (see
            :func:`mmvisionhope.datasets.draw_shapes.shapes_root`), filled when it is empty.
        kwargs: as for mmdet's ``CocoDataset``.
    """

    METAINFO = {
        'classes': CLASSES,
        'palette': [
            (230, 60, 60),
            (60, 170, 60),
            (70, 100, 230),
            (240, 170, 30),
            (170, 70, 210),
            (30, 190, 200),
        ],
    }

    def __init__(self, split: str = 'train', data_root: str | None = None, **kwargs: Any) -> None:
        super().__init__(
            data_root=_folder(split, data_root),
            ann_file=f'annotations/instances_{split}.json',
            data_prefix=dict(img=f'{split}/'),
            **kwargs,
        )


@METRICS.register_module()
class ShapesMetric(CocoMetric):
    """COCO box and mask AP on the annotations of a :class:`ShapesDataset`, wherever they are.

    Args:
        split, data_root: as for the data set.
        kwargs: as for mmdet's ``CocoMetric``.
    """

    def __init__(self, split: str = 'val', data_root: str | None = None, **kwargs: Any) -> None:
        folder = _folder(split, data_root)
        super().__init__(ann_file=f'{folder}/annotations/instances_{split}.json', **kwargs)


def _folder(split: str, data_root: str | None) -> str:
    if split not in SPLITS:
        raise ValueError(f'split must be one of {", ".join(SPLITS)}, got {split!r}')
    return str(data_root or generate_shapes(shapes_root()))
