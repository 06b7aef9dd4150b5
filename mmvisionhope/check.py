"""``python -m mmvisionhope.check``: what is installed, what is missing, what mends it."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata


@dataclass
class Component:
    """A package we use: its import name, the distributions that provide it, and for what.

    ``wanted`` is the version this repository is tested with; ``needed`` ones fail the check when
    they are missing.
    """

    module: str
    distributions: Sequence[str]
    wanted: str
    needed: bool = False
    purpose: str = ''


COMPONENTS = [
    Component('torch', ['torch'], '2.9.1', needed=True),
    Component('torchvision', ['torchvision'], '0.24.1', needed=True),
    Component('mmengine', ['onedl-mmengine', 'mmengine', 'mmengine-lite'], '0.10.12', needed=True),
    Component('mmcv', ['onedl-mmcv', 'mmcv', 'mmcv-lite'], '2.3.6', purpose='every toolbox'),
    Component('mmcv._ext', ['onedl-mmcv', 'mmcv'], '2.3.6', purpose='detection, segmentation'),
    Component('mmdet', ['onedl-mmdetection', 'mmdet'], '3.5.1', purpose='detection'),
    Component('pycocotools', ['pycocotools'], '2.0.11', purpose='COCO metrics'),
    Component('mmseg', ['onedl-mmsegmentation', 'mmsegmentation'], '1.4.2', purpose='segmentation'),
    Component('mmpretrain', ['onedl-mmpretrain', 'mmpretrain'], '1.3.6', purpose='classification'),
]
TOOLBOXES = ('mmdet', 'mmseg', 'mmpretrain')


@dataclass
class Finding:
    """State of a component: ``ok``, ``missing`` or ``refuses``, its version, what is wrong."""

    component: Component
    state: str
    version: str = ''
    problem: str = ''


def inspect(component: Component) -> Finding:
    """Import a component and say how that went; never raises for what the component does."""
    name, version = _installed(component)
    try:
        importlib.import_module(component.module)
        if component.module in TOOLBOXES:
            # Their top level imports little; what it needs shows here.
            importlib.import_module(f'{component.module}.datasets')
    except ModuleNotFoundError as error:
        if error.name != component.module:
            problem = f'{component.module} needs {error.name}, which is not installed'
            return Finding(component, 'refuses', version, problem)
        if component.module == 'mmcv._ext' and name:
            problem = (
                f'{name} {version} has no compiled operators (mmcv._ext): build it from source'
            )
        else:
            problem = f'{component.module} is not installed'
        return Finding(component, 'missing', '', problem)
    except (ImportError, AssertionError, OSError, RuntimeError) as error:
        # Toolboxes assert that mmcv and mmengine are of versions they know; a mmcv compiled for
        # another torch fails to link.
        reason = ' '.join(str(error).split())
        return Finding(component, 'refuses', version, f'{component.module} {version}: {reason}')
    return Finding(component, 'ok', f'{version} ({name})' if name else '')


def problems(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that keep something from working: what is needed and missing, and whatever is
    installed and refuses. At least one toolbox is needed, and mmcv with its operators by those."""
    state = {finding.component.module: finding.state for finding in findings}
    toolboxes = [name for name in TOOLBOXES if state[name] != 'missing']
    needed = {component.module for component in COMPONENTS if component.needed}
    needed |= {'mmcv'} | ({'mmdet'} if not toolboxes else set())
    if 'mmdet' in toolboxes or 'mmseg' in toolboxes or not toolboxes:
        needed.add('mmcv._ext')
    if 'mmdet' in toolboxes:
        needed.add('pycocotools')
    return [
        finding
        for finding in findings
        if finding.state == 'refuses'
        or (finding.state == 'missing' and finding.component.module in needed)
    ]


def remedy(broken: Sequence[Finding]) -> str:
    """One pip command for all that is broken."""
    packages = {f'{f.component.distributions[0]}=={f.component.wanted}' for f in broken}
    # mmcv is compiled against the torch that is installed, not against one that pip would choose.
    return f'pip install --no-build-isolation {" ".join(sorted(packages))}'


def main() -> int:
    findings = [inspect(component) for component in COMPONENTS]
    print(f'{"Python":13}{platform.python_version()}, {platform.platform()}')
    for finding in findings:
        purpose = f'for {finding.component.purpose}' if finding.component.purpose else ''
        print(
            f'{finding.component.module:13}{finding.state:9}{finding.version:31}{purpose}'.rstrip()
        )
    print(f'{"own op":13}{_own_op()}')
    print(f'{"GPU":13}{_gpu()}')
    broken = problems(findings)
    if not broken:
        return 0
    print()
    for finding in broken:
        print(f'{finding.problem}.')
    print(f'To mend it: {remedy(broken)}')
    return 1


def _installed(component: Component) -> tuple[str, str]:
    for name in component.distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return '', ''


def _own_op() -> str:
    try:
        from mmvisionhope.ops.library import COMPILED
    except ImportError:
        return 'unknown without torch and mmengine'
    if COMPILED:
        return 'compiled'
    return 'not compiled, so slow: `pip install --no-build-isolation` this package with g++ at hand'


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return 'unknown without torch'
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return 'none, which is fine'


if __name__ == '__main__':
    sys.exit(main())
