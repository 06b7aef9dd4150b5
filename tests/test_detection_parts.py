"""What mmengine and mmdet lack: float32 RoIs, mask TTA, AMP that minds the device, seeds."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.structures import InstanceData
from torch import nn

from mmvisionhope import EpochSeedHook, GpuAmpOptimWrapper, seed_worker_from_torch

pytest.importorskip('mmdet')

from mmdet.structures import DetDataSample  # noqa: E402

from mmvisionhope.models.roi_extractor import Float32RoIExtractor  # noqa: E402
from mmvisionhope.models.tta import InstanceTTAModel  # noqa: E402


def extractor():
    layer = dict(type='RoIAlign', output_size=3, sampling_ratio=2)
    return Float32RoIExtractor(layer, out_channels=2, featmap_strides=[4, 8])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_rois_stay_in_float32_under_autocast(dtype):
    feats = [torch.randn(1, 2, 330, 40).to(dtype), torch.randn(1, 2, 165, 20).to(dtype)]
    # Between two pixels that float16 and bfloat16 cannot tell apart.
    rois = torch.tensor([[0, 3.3, 1201.3, 50.7, 1270.9], [0, 0.0, 0.0, 150.0, 300.0]])
    expected = extractor()([x.float() for x in feats], rois)
    with torch.autocast('cpu', torch.bfloat16):
        actual = extractor()(feats, rois)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


def test_amp_without_a_gpu_is_float32(monkeypatch):
    monkeypatch.setattr('mmvisionhope.engine.optim.get_device', lambda: 'cpu')
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    wrapper = GpuAmpOptimWrapper(optimizer=optimizer, loss_scale='dynamic', accumulative_counts=2)
    assert type(wrapper) is OptimWrapper and wrapper._accumulative_counts == 2


def test_amp_with_a_gpu_is_mmengines(monkeypatch):
    monkeypatch.setattr('mmvisionhope.engine.optim.get_device', lambda: 'cuda')
    built = {}
    monkeypatch.setattr('mmvisionhope.engine.optim.AmpOptimWrapper', lambda **kw: built.update(kw))
    GpuAmpOptimWrapper(optimizer=None)
    assert built == dict(optimizer=None, loss_scale='dynamic', dtype=None)


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_an_epoch_is_seeded_by_run_epoch_and_rank(monkeypatch):
    def epoch(seed, number, rank=0):
        monkeypatch.setattr('mmvisionhope.engine.hooks.get_rank', lambda: rank)
        EpochSeedHook().before_train_epoch(SimpleNamespace(seed=seed, epoch=number))
        return draws()

    first = epoch(0, 3)
    assert epoch(0, 3) == first
    for other in (epoch(1, 3), epoch(0, 4), epoch(0, 3, rank=1)):
        assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_worker_is_seeded_by_what_torch_gave_it():
    def worker(seed):
        torch.manual_seed(seed)
        seed_worker_from_torch(0)
        return draws()

    # Torch gives 64 bits, NumPy takes 32.
    assert worker(2**40 + 1) == worker(2**40 + 1)
    assert all(a != b for a, b in zip(worker(1), worker(2), strict=True))


def view(boxes, scores, masks, flipped):
    instances = InstanceData(
        bboxes=torch.tensor(boxes),
        scores=torch.tensor(scores),
        labels=torch.zeros(len(boxes)).long(),
    )
    instances.masks = masks
    shape = dict(ori_shape=(20, 40), img_shape=(20, 40))
    if flipped:
        shape |= dict(flip=True, flip_direction='horizontal')
    return DetDataSample(metainfo=shape, pred_instances=instances)


def test_views_are_turned_back_and_merged_with_their_masks():
    masks = torch.zeros(2, 20, 40, dtype=torch.bool)
    masks[0, 2:8, 4:10] = True
    masks[1, 10:18, 20:36] = True
    boxes = [[4.0, 2.0, 10.0, 8.0], [20.0, 10.0, 36.0, 18.0]]
    mirrored = [[30.0, 2.0, 36.0, 8.0]]
    model = InstanceTTAModel(
        tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=10), module=Detector()
    )
    (merged,) = model.merge_preds(
        [[view(boxes, [0.6, 0.8], masks, False), view(mirrored, [0.9], masks[:1].flip(-1), True)]]
    )
    found = merged.pred_instances
    # The first object twice, once kept: from the mirrored view, which was surer.
    assert found.scores.tolist() == pytest.approx([0.9, 0.8])
    assert found.bboxes.tolist() == boxes
    assert torch.equal(found.masks, masks)


def test_no_detections_in_any_view():
    nothing = torch.zeros(0, 20, 40, dtype=torch.bool)
    model = InstanceTTAModel(
        tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=10), module=Detector()
    )
    empty = torch.zeros(0, 4).tolist()
    views = [view(empty, [], nothing, flipped) for flipped in (False, True)]
    for sample in views:
        sample.pred_instances.bboxes = torch.zeros(0, 4)
    (merged,) = model.merge_preds([views])
    assert len(merged.pred_instances) == 0


class Detector(nn.Module):
    def test_step(self, data):
        raise NotImplementedError
