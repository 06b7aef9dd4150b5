"""`make demo`: train a small Mask R-CNN on drawn shapes, test it, and draw what it detects."""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import VISUALIZERS
from mmengine.runner import Runner
from mmengine.structures import InstanceData

from mmvisionhope.engine import cli
from mmvisionhope.engine.checkpoint import register_safe_loader

CONFIG = Path(__file__).resolve().parents[1] / 'configs' / 'maskrcnn_visionhope_shapes.py'
ROWS, COLUMNS = 2, 4
ZOOM = 3  # the images are 128 x 128 pixels
SCORE = 0.5


def main() -> None:
    parser = cli.argument_parser('Train, test and draw on the embedded data set', str(CONFIG))
    parser.set_defaults(work_dir='work_dirs/demo')
    args = parser.parse_args()

    register_safe_loader()
    print(f'Training: the same as python tools/train.py {args.config} --work-dir {args.work_dir}')
    cli.build_runner(cli.load_config(args)).train()

    checkpoint = Path(args.work_dir, 'last_checkpoint').read_text()
    print(f'Testing: the same as python tools/test.py {args.config} {checkpoint}')
    runner, metrics = test(args, checkpoint)
    picture = Path(args.work_dir, 'detections.png')
    draw_detections(runner, picture)
    print(
        f'\nbox AP50 {metrics["coco/bbox_mAP_50"]:.3f}, mask AP50 {metrics["coco/segm_mAP_50"]:.3f}'
        f'\ndetections on images it has not seen: {picture}\ncheckpoint: {checkpoint}'
    )


def test(args: argparse.Namespace, checkpoint: str) -> tuple[Runner, dict[str, float]]:
    config: Config = cli.load_config(args)
    config.load_from = checkpoint
    runner = cli.build_runner(config)
    return runner, runner.test()


@torch.no_grad()
def draw_detections(runner: Runner, path: Path) -> None:
    """A grid of the first test images with their detections of at least ``SCORE``."""
    dataset = runner.test_dataloader.dataset
    visualizer = VISUALIZERS.build(
        dict(type='DetLocalVisualizer', name='demo', line_width=2, alpha=0.5)
    )
    visualizer.dataset_meta = dataset.metainfo
    runner.model.eval()
    tiles = []
    for index in range(min(ROWS * COLUMNS, len(dataset))):
        (sample,) = runner.model.test_step(pseudo_collate([dataset[index]]))
        image = mmcv.imread(sample.img_path, channel_order='rgb')
        sample.pred_instances = enlarge(sample.pred_instances)
        visualizer.add_datasample(
            sample.img_path,
            cv2.resize(image, None, fx=ZOOM, fy=ZOOM, interpolation=cv2.INTER_CUBIC),
            sample,
            draw_gt=False,
            pred_score_thr=SCORE,
        )
        tiles.append(np.pad(visualizer.get_image(), ((3, 3), (3, 3), (0, 0)), constant_values=255))
    tiles += [np.full_like(tiles[0], 255)] * (ROWS * COLUMNS - len(tiles))
    rows = [np.hstack(tiles[row * COLUMNS :][:COLUMNS]) for row in range(ROWS)]
    cv2.imwrite(str(path), cv2.cvtColor(np.vstack(rows), cv2.COLOR_RGB2BGR))


def enlarge(instances: InstanceData) -> InstanceData:
    """Boxes and masks for the enlarged image."""
    masks = F.interpolate(
        instances.masks[:, None].float(), scale_factor=ZOOM, mode='bilinear', align_corners=False
    )
    enlarged = InstanceData(
        bboxes=instances.bboxes * ZOOM,
        labels=instances.labels,
        scores=instances.scores,
        masks=masks[:, 0] > 0.5,
    )
    # The last is drawn on top: where two labels meet, the surer one is read.
    return enlarged[enlarged.scores.argsort()]


if __name__ == '__main__':
    cli.run(main)
