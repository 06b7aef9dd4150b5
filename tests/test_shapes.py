"""The embedded data set: deterministic, exact, whole or absent."""

import json

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from mmvisionhope.datasets import draw_shapes
from mmvisionhope.datasets.draw_shapes import CLASSES, draw_image, generate_shapes, shapes_root


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    return generate_shapes(tmp_path_factory.mktemp('cache') / 'shapes', train=24, val=12)


def test_an_image_is_always_the_same_and_splits_differ(root):
    for split in ('train', 'val'):
        image, masks, labels = draw_image(split, 3)
        again = draw_image(split, 3)
        assert all(np.array_equal(a, b) for a, b in zip((image, masks, labels), again, strict=True))
        assert np.array_equal(cv2.imread(str(root / split / '000003.png')), image)
    assert not np.array_equal(draw_image('train', 3)[0], draw_image('val', 3)[0])


def test_visible_masks_are_disjoint_and_large_enough():
    for index in range(40):
        _, masks, labels = draw_image('train', index)
        assert masks.sum(0).max() <= 1
        assert len(masks) == len(labels) >= 2
        assert masks.sum((1, 2)).min() >= 40


@pytest.mark.parametrize('split', ['train', 'val'])
def test_annotations_are_those_of_the_masks(root, split):
    coco = COCO(root / 'annotations' / f'instances_{split}.json')
    assert [category['name'] for category in coco.cats.values()] == list(CLASSES)
    for index in coco.imgs:
        _, masks, labels = draw_image(split, index)
        annotations = coco.imgToAnns[index]
        for annotation, mask, label in zip(annotations, masks, labels, strict=True):
            assert np.array_equal(coco.annToMask(annotation).astype(bool), mask)
            x, y, width, height = annotation['bbox']
            ys, xs = np.nonzero(mask)
            assert (x, y, x + width, y + height) == (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
            assert annotation['area'] == mask.sum() and annotation['iscrowd'] == 0
            assert annotation['category_id'] == label + 1


def test_sizes_and_classes_are_mixed(root):
    content = json.loads((root / 'annotations' / 'instances_train.json').read_text())
    areas = [annotation['area'] for annotation in content['annotations']]
    assert min(areas) < 150 and max(areas) > 1000
    assert {a['category_id'] for a in content['annotations']} == set(range(1, 7))


def test_an_interrupted_drawing_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(draw_shapes, '_annotation', interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate_shapes(tmp_path / 'shapes', train=2, val=1)
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_may_be_faster(tmp_path, monkeypatch):
    other = generate_shapes(tmp_path / 'other', train=2, val=1)
    write = draw_shapes._write_split

    def meanwhile(unfinished, split, count):
        write(unfinished, split, count)
        if split == 'val':
            other.rename(tmp_path / 'shapes')

    monkeypatch.setattr(draw_shapes, '_write_split', meanwhile)
    root = generate_shapes(tmp_path / 'shapes', train=2, val=1)
    assert [path.name for path in tmp_path.iterdir()] == ['shapes']
    assert len(list((root / 'train').iterdir())) == 2


def test_an_unwritable_cache_says_what_to_do(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match='set MMVISIONHOPE_CACHE to a folder'):
        generate_shapes(tmp_path / 'file' / 'shapes')


def test_the_cache_folder_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.delenv('MMVISIONHOPE_CACHE', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert shapes_root() == tmp_path / 'mmvisionhope' / 'shapes-v1'
    monkeypatch.setenv('MMVISIONHOPE_CACHE', str(tmp_path / 'here'))
    assert shapes_root() == tmp_path / 'here' / 'shapes-v1'


def test_the_dataset_draws_itself_on_first_use(monkeypatch, tmp_path):
    pytest.importorskip('mmdet')
    from mmvisionhope.datasets import shapes

    monkeypatch.setattr(shapes, 'shapes_root', lambda: tmp_path / 'shapes')
    monkeypatch.setattr(shapes, 'generate_shapes', lambda root: generate_shapes(root, 6, 4))
    dataset = shapes.ShapesDataset('val', pipeline=[])
    assert len(dataset) == 4 and dataset.metainfo['classes'] == CLASSES
    assert len(dataset[0]['instances']) == len(draw_image('val', 0)[1])
    with pytest.raises(ValueError, match="split must be one of train, val, got 'test'"):
        shapes.ShapesDataset('test')
