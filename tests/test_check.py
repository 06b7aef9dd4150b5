"""``python -m mmvisionhope.check`` names what is wrong and what mends it."""

import importlib
import subprocess
import sys

import pytest

from mmvisionhope import check


def component(module):
    return next(c for c in check.COMPONENTS if c.module == module)


@pytest.fixture
def broken_import(monkeypatch):
    """Make the import of one module raise."""
    original = importlib.import_module

    def breaking(module, error):
        def import_module(name):
            if name == module:
                raise error
            return original(name)

        monkeypatch.setattr(check.importlib, 'import_module', import_module)

    return breaking


def test_what_works_is_ok():
    finding = check.inspect(component('torch'))
    assert finding.state == 'ok' and importlib.import_module('torch').__version__.startswith(
        finding.version.split(' ')[0]
    )


def test_a_missing_toolbox_is_missing(broken_import, monkeypatch):
    broken_import('mmseg', ModuleNotFoundError("No module named 'mmseg'", name='mmseg'))
    finding = check.inspect(component('mmseg'))
    assert (finding.state, finding.problem) == ('missing', 'mmseg is not installed')


def test_missing_operators_are_named(broken_import, monkeypatch):
    broken_import('mmcv._ext', ModuleNotFoundError('mmcv._ext', name='mmcv._ext'))
    monkeypatch.setattr(check, '_installed', lambda component: ('mmcv-lite', '2.1.0'))
    finding = check.inspect(component('mmcv._ext'))
    assert finding.state == 'missing'
    assert finding.problem.startswith('mmcv-lite 2.1.0 has no compiled operators (mmcv._ext)')


def test_a_pair_of_versions_that_refuses_is_named(broken_import, monkeypatch):
    broken_import('mmdet', AssertionError('MMCV==2.3.6 is used but incompatible.\n  Install <2.2'))
    monkeypatch.setattr(check, '_installed', lambda component: ('mmdet', '3.3.0'))
    finding = check.inspect(component('mmdet'))
    assert finding.state == 'refuses'
    assert finding.problem == 'mmdet 3.3.0: MMCV==2.3.6 is used but incompatible. Install <2.2'


def test_a_dependency_that_lacks_is_named(broken_import):
    broken_import('mmdet.datasets', ModuleNotFoundError("No module named 'imgaug'", name='imgaug'))
    finding = check.inspect(component('mmdet'))
    assert finding.problem == 'mmdet needs imgaug, which is not installed'


def findings(**states):
    return [
        check.Finding(c, states.get(c.module.replace('.', ''), 'ok'), '', f'{c.module}!')
        for c in check.COMPONENTS
    ]


def test_one_toolbox_is_enough():
    assert check.problems(findings(mmseg='missing', mmpretrain='missing')) == []
    # mmpretrain alone needs neither mmcv's operators nor COCO's metrics.
    without = dict(mmdet='missing', mmseg='missing', mmcv_ext='missing', pycocotools='missing')
    assert check.problems(findings(**without)) == []


def test_the_remedy_is_one_command_for_all_that_is_broken():
    broken = check.problems(findings(mmengine='missing', mmdet='refuses', mmseg='missing'))
    assert [f.component.module for f in broken] == ['mmengine', 'mmdet']
    assert check.remedy(broken) == (
        'pip install --no-build-isolation onedl-mmdetection==3.5.1 onedl-mmengine==0.10.12'
    )


def test_it_runs_without_mmengine(tmp_path):
    """The package itself must import then, or the check could not be asked."""
    hide = (
        'import sys, runpy\n'
        'class Hide:\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        "        if name.split('.')[0].startswith('mm') and 'visionhope' not in name:\n"
        '            raise ModuleNotFoundError(f"No module named {name!r}", name=name)\n'
        'sys.meta_path.insert(0, Hide())\n'
        'import importlib.util as u; find = u.find_spec\n'
        "u.find_spec = lambda name, *a: None if name == 'mmengine' else find(name, *a)\n"
        "runpy.run_module('mmvisionhope.check', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, '-c', hide], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'mmengine is not installed.' in result.stdout
    assert 'To mend it: pip install --no-build-isolation' in result.stdout
    assert 'nothing of it is registered' in result.stderr
