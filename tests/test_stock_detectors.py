"""VisionHOPE inside mmdet's own configs, by overriding the backbone and the neck's widths alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope

mmdet = pytest.importorskip('mmdet')

from mmdet.registry import MODELS  # noqa: E402
from mmdet.structures import DetDataSample  # noqa: E402
from mmdet.structures.mask import BitmapMasks  # noqa: E402
from mmengine.structures import InstanceData  # noqa: E402

import mmvisionhope  # noqa: E402, F401

CONFIGS = Path(mmdet.__file__).parent / '.mim' / 'configs'
WIDTHS = [16, 32, 64, 64]


def backbone(**options):
    arch = dict(embed_dims=WIDTHS, depths=[1, 1, 1, 1], head_dims=8)
    return dict(type='VisionHOPE', _delete_=True, arch=arch, **options)


STOCK = {
    'retinanet/retinanet_r50_fpn_1x_coco.py': dict(
        backbone=backbone(), neck=dict(in_channels=WIDTHS)
    ),
    'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py': dict(
        backbone=backbone(frozen_stages=0, norm_eval=True), neck=dict(in_channels=WIDTHS)
    ),
    # DINO's neck takes the last three stages.
    'dino/dino-4scale_r50_8xb2-12e_coco.py': dict(
        backbone=backbone(out_indices=(1, 2, 3)), neck=dict(in_channels=WIDTHS[1:])
    ),
}


# DINO picks 900 proposals out of the tokens of its maps.
SIZES = {'dino/dino-4scale_r50_8xb2-12e_coco.py': (256, 320)}

# RetinaNet's FPN has start_level=1: stage 0 is computed, its output norm is not.
UNUSED = {'retinanet/retinanet_r50_fpn_1x_coco.py': 'out_norms.0'}


def a_batch(size):
    """Two images with two instances each, as mmdet's pipelines pack them."""
    samples = []
    for _ in range(2):
        boxes = torch.tensor([[8.0, 8.0, 60.0, 70.0], [30.0, 20.0, 120.0, 90.0]])
        masks = np.zeros((2, *size), dtype=np.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        instances = InstanceData(
            bboxes=boxes, labels=torch.tensor([3, 17]), masks=BitmapMasks(masks, *size)
        )
        shape = dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0))
        samples.append(DetDataSample(metainfo=shape, gt_instances=instances))
        samples[-1].ignored_instances = InstanceData(bboxes=torch.zeros(0, 4))
    return dict(
        inputs=[torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in samples],
        data_samples=samples,
    )


@pytest.mark.parametrize('path', STOCK)
def test_one_training_step(path):
    config = Config.fromfile(CONFIGS / path)
    config.merge_from_dict(dict(model=STOCK[path]))
    init_default_scope('mmdet')
    detector = MODELS.build(config.model)
    detector.init_weights()
    detector.train()
    optimizer = torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=1e-3)
    before = {n: p.detach().clone() for n, p in detector.backbone.named_parameters()}

    data = detector.data_preprocessor(a_batch(SIZES.get(path, (96, 128))), training=True)
    losses, _ = detector.parse_losses(detector(**data, mode='loss'))
    losses.backward()
    optimizer.step()

    assert torch.isfinite(losses)
    for name, parameter in detector.backbone.named_parameters():
        if parameter.requires_grad and not name.startswith(UNUSED.get(path, '-')):
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    trained = [n for n, p in detector.backbone.named_parameters() if not torch.equal(p, before[n])]
    assert any('stages.3' in name for name in trained)
    frozen = detector.backbone.frozen_stages
    assert not any(name.startswith(f'stages.{frozen}.') for name in trained)
