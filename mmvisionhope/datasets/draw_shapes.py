"""Draws the embedded data set: shapes on textured backgrounds, annotated as COCO instances.

Every image has a random generator of its own, seeded by (split, image), so an image does not depend
on how many are drawn. Shapes are painted back to front; a mask is what stays visible of its shape.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask

CLASSES = ('circle', 'square', 'triangle', 'star', 'ring', 'cross')
SPLITS = ('train', 'val')
IMAGE_SIZE = 128

# Shapes are rasterised this much finer than the image, for smooth edges and exact thresholds.
_FINE = 4
_MAX_SHAPES = 6
_RADII = (6.0, 30.0)
# No shape may hide more than this share of another, nor leave fewer visible pixels than that.
_MAX_HIDDEN = 0.5
_MIN_AREA = 40


def shapes_root() -> Path:
    """Folder of the data set: ``$MMVISIONHOPE_CACHE/shapes-v1`` when that is set, else
    ``${XDG_CACHE_HOME:-~/.cache}/mmvisionhope/shapes-v1``."""
    user_cache = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'mmvisionhope')
    return Path(os.environ.get('MMVISIONHOPE_CACHE') or user_cache).expanduser() / 'shapes-v1'


def generate_shapes(root: str | Path, train: int = 512, val: int = 128) -> Path:
    """Write the data set unless it is there: ``train/``, ``val/`` and ``annotations/``.

    It is written beside ``root`` and renamed, so ``root`` is either whole or absent, also when the
    process is killed or several write at once.

    Args:
        root: the folder to make.
        train, val: images of each split.

    Returns:
        ``root``.

    Raises:
        OSError: the folder cannot be written; the message says how to choose another one.
    """
    root = Path(root)
    if root.is_dir():
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f'.{root.name}-', dir=root.parent))
    except OSError as error:
        raise OSError(
            f'the data set of shapes cannot be written to {root} ({error.strerror}): set '
            'MMVISIONHOPE_CACHE to a folder that can be written'
        ) from error
    try:
        unfinished.chmod(0o755)
        for split, count in zip(SPLITS, (train, val), strict=True):
            _write_split(unfinished, split, count)
        _rename(unfinished, root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return root


def draw_image(split: str, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw one image.

    Args:
        split: ``'train'`` or ``'val'``.
        index: number of the image in its split.

    Returns:
        The image, (128, 128, 3) uint8 in BGR; the visible masks, (n, 128, 128) bool, no two of
        which overlap; the class indices, (n,) int64.
    """
    rng = np.random.default_rng([SPLITS.index(split), index])
    image = _texture(rng, _colour(rng), contrast=rng.uniform(20, 60))
    masks: list[np.ndarray] = []
    labels: list[int] = []
    count = rng.integers(2, _MAX_SHAPES + 1)
    while len(labels) < count:
        label = int(rng.integers(len(CLASSES)))
        cover = _shape(rng, label)
        mask = cover >= 0.5
        if mask.sum() < _MIN_AREA or _hides_too_much(mask, masks):
            continue
        masks = [below & ~mask for below in masks] + [mask]
        labels.append(label)
        image = _paint(rng, image, cover)
    grain = rng.normal(0, 4, image.shape)
    image = np.clip(np.rint(image + grain), 0, 255).astype(np.uint8)
    return image, np.stack(masks), np.array(labels)


def _write_split(root: Path, split: str, count: int) -> None:
    (root / split).mkdir()
    images: list[dict] = []
    annotations: list[dict] = []
    for index in range(count):
        image, masks, labels = draw_image(split, index)
        name = f'{index:06d}.png'
        if not cv2.imwrite(str(root / split / name), image):
            raise OSError(f'{root / split / name} cannot be written')
        images.append(dict(id=index, file_name=name, width=IMAGE_SIZE, height=IMAGE_SIZE))
        for mask, label in zip(masks, labels, strict=True):
            annotations.append(_annotation(len(annotations) + 1, index, mask, int(label)))
    categories = [dict(id=i, name=name) for i, name in enumerate(CLASSES, 1)]
    content = dict(images=images, annotations=annotations, categories=categories)
    path = root / 'annotations' / f'instances_{split}.json'
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _annotation(number: int, image: int, mask: np.ndarray, label: int) -> dict:
    code = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, left = int(rows[0]), int(columns[0])
    return dict(
        id=number,
        image_id=image,
        category_id=label + 1,
        bbox=[left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
        area=int(mask.sum()),
        segmentation=dict(size=code['size'], counts=code['counts'].decode()),
        iscrowd=0,
    )


def _rename(unfinished: Path, root: Path) -> None:
    try:
        unfinished.rename(root)
    except OSError:
        # Another process was faster, and its set is the same.
        if not root.is_dir():
            raise


def _hides_too_much(mask: np.ndarray, below: list[np.ndarray]) -> bool:
    for other in below:
        left = (other & ~mask).sum()
        if left < _MIN_AREA or left < (1 - _MAX_HIDDEN) * other.sum():
            return True
    return False


def _colour(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(30, 225, 3)


def _paint(rng: np.random.Generator, image: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Lay a textured shape over the image, in a colour that stands out from what it covers."""
    behind = image[cover >= 0.5].mean(axis=0)
    candidates = [_colour(rng) for _ in range(4)]
    colour = max(candidates, key=lambda colour: float(np.abs(colour - behind).sum()))
    fill = _texture(rng, colour, contrast=rng.uniform(0, 25))
    return image + cover[..., None] * (fill - image)


def _texture(rng: np.random.Generator, colour: np.ndarray, contrast: float) -> np.ndarray:
    """Cloudy noise or stripes around a colour, (128, 128, 3) float64."""
    size = (IMAGE_SIZE, IMAGE_SIZE)
    if rng.random() < 0.3:
        angle, period = rng.uniform(0, np.pi), rng.uniform(6, 24)
        y, x = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE]
        phase = (x * np.cos(angle) + y * np.sin(angle)) * (2 * np.pi / period)
        pattern = 0.5 * np.sin(phase)[..., None] * rng.uniform(0.5, 1, 3)
    else:
        pattern = np.zeros((*size, 3))
        for cells in (3, 6, 12, 24):
            noise = rng.uniform(-1, 1, (cells, cells, 3))
            pattern += cv2.resize(noise, size, interpolation=cv2.INTER_CUBIC) / 3
    return colour + contrast * pattern


def _shape(rng: np.random.Generator, label: int) -> np.ndarray:
    """Cover of each pixel by a shape of random size, place and angle, (128, 128) in 0 to 1."""
    # Even in the logarithm, so that small shapes are as frequent as large ones.
    radius = np.exp(rng.uniform(*np.log(_RADII)))
    centre = rng.uniform(0.6 * radius, IMAGE_SIZE - 0.6 * radius, 2)
    angle = rng.uniform(0, 2 * np.pi)
    fine = np.zeros((IMAGE_SIZE * _FINE, IMAGE_SIZE * _FINE), np.float32)
    for contour, value in _contours(CLASSES[label], radius):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        points = np.rint((contour @ turn.T + centre) * _FINE).astype(np.int32)
        cv2.fillPoly(fine, [points], value)
    return cv2.resize(fine, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_AREA)


def _contours(name: str, radius: float) -> list[tuple[np.ndarray, float]]:
    """Outlines of a shape around the origin, (points, 2), each with the value to fill it with."""
    if name == 'circle':
        return [(_polygon(64, radius), 1.0)]
    if name == 'ring':
        return [(_polygon(64, radius), 1.0), (_polygon(64, 0.5 * radius), 0.0)]
    if name == 'square':
        return [(_polygon(4, 1.1 * radius), 1.0)]
    if name == 'triangle':
        return [(_polygon(3, 1.15 * radius), 1.0)]
    if name == 'star':
        outline = np.empty((10, 2))
        outline[::2] = _polygon(5, 1.15 * radius)
        outline[1::2] = _polygon(5, 0.45 * radius, turn=np.pi / 5)
        return [(outline, 1.0)]
    long, short = 1.05 * radius, 0.35 * radius
    bar = np.array([[-long, -short], [long, -short], [long, short], [-long, short]])
    return [(bar, 1.0), (bar[:, ::-1], 1.0)]


def _polygon(corners: int, radius: float, turn: float = 0.0) -> np.ndarray:
    angles = turn + np.arange(corners) * (2 * np.pi / corners)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
