"""What the README says is so. Its commands are run by test_tools.py, make demo and CI."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import init_default_scope

from mmvisionhope import VisionHOPE
from mmvisionhope.analysis import count_macs

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def blocks(language):
    return re.findall(rf'```{language}\n(.*?)```', README, re.DOTALL)


def test_every_file_it_names_exists():
    linked = re.findall(r'\]\(([^)#:]+)\)', README)
    typed = re.findall(r'(?:tools|configs)/[\w/]+\.\w+', '\n'.join(blocks('bash')))
    assert linked and typed
    assert not [name for name in linked + typed if not (ROOT / name).exists()]


def test_every_option_it_names_is_one():
    helps = [
        subprocess.run(
            [sys.executable, ROOT / 'tools' / f'{name}.py', '--help'],
            capture_output=True,
            text=True,
        ).stdout
        for name in ('train', 'test')
    ]
    named = set(re.findall(r'`(--[\w-]+)', README))
    assert named and all(any(option in text for text in helps) for option in named)


def test_make_targets_exist():
    makefile = (ROOT / 'Makefile').read_text()
    for target in re.findall(r'^make (\w+)', '\n'.join(blocks('bash')), re.MULTILINE):
        assert re.search(rf'^{target}:', makefile, re.MULTILINE)
    assert 'make test' in (ROOT / '.ci' / 'run').read_text()


def test_the_config_fits_a_stock_one():
    mmdet = pytest.importorskip('mmdet')
    from mmdet.registry import MODELS

    (snippet,) = blocks('python')
    ours: dict = {}
    exec(snippet, ours)
    stock = Path(mmdet.__file__).parent / '.mim/configs/mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
    config = Config.fromfile(stock)
    config.merge_from_dict({key: ours[key] for key in ('custom_imports', 'model')})
    init_default_scope('mmdet')
    assert isinstance(MODELS.build(config.model).backbone, VisionHOPE)


def test_the_table_is_what_the_models_are():
    rows = re.findall(
        r'^\| (tiny|small|base) \| ([\d.]+) M \| ([\d.]+) G \| ([\d ]+) \|', README, re.MULTILINE
    )
    assert [arch for arch, *_ in rows] == ['tiny', 'small', 'base']
    for arch, params, macs, widths in rows:
        model = VisionHOPE(arch, out_norm=False)
        assert f'{sum(p.numel() for p in model.parameters()) / 1e6:.1f}' == params
        assert f'{sum(count_macs(model, (224, 224)).values()) / 1e9:.1f}' == macs
        assert widths == ' '.join(map(str, model.embed_dims))
