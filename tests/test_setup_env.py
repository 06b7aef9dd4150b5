"""Set-up: the compiled mmcv is found again for the torch it was compiled for, and only then."""

import importlib.util
import platform
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def setup_env(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location('setup_env', ROOT / 'tools' / 'setup_env.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, 'PYTHON', Path(sys.executable))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return module


@pytest.fixture
def built(setup_env, monkeypatch, tmp_path):
    """A wheel that 'compiles', and how often it did."""
    wheel = tmp_path / 'onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64.whl'
    wheel.write_bytes(b'wheel')
    calls = []
    monkeypatch.setattr(
        setup_env, 'build_mmcv', lambda requirement: calls.append(requirement) or wheel
    )
    return calls


def test_the_wheel_is_kept_by_torch_and_python(setup_env, built, tmp_path):
    kept = setup_env.mmcv_wheel()
    version = f'cp{sys.version_info[0]}{sys.version_info[1]}'
    key = f'torch{torch.__version__}-{version}-{platform.machine()}'
    assert kept.parent.name.removesuffix('-gpu') == key
    assert kept.read_bytes() == b'wheel'
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert setup_env.mmcv_wheel() == kept
    assert built == ['onedl-mmcv==2.3.6']


def test_half_a_wheel_is_never_found(setup_env, built, monkeypatch):
    def interrupted(source, target):
        target.write_bytes(b'wh')
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_env.shutil, 'copyfile', interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup_env.mmcv_wheel()
    monkeypatch.setattr(setup_env.shutil, 'copyfile', lambda s, t: t.write_bytes(s.read_bytes()))
    assert setup_env.mmcv_wheel().read_bytes() == b'wheel'
    assert len(built) == 2


def test_an_unwritable_cache_is_said_and_survived(setup_env, built, monkeypatch, tmp_path, capsys):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert setup_env.mmcv_wheel().read_bytes() == b'wheel'
    assert 'the compiled mmcv is not kept' in capsys.readouterr().out


def test_a_python_it_was_not_made_for_is_refused(setup_env, monkeypatch):
    monkeypatch.setattr(setup_env.sys, 'version_info', (3, 9, 1))
    with pytest.raises(SystemExit, match=r'Python 3.10 to 3.12 is needed.*make PYTHON='):
        setup_env.check_machine()


def test_what_the_machine_lacks_is_one_command(setup_env, monkeypatch):
    monkeypatch.setattr(setup_env.shutil, 'which', lambda name: None)
    monkeypatch.setattr(setup_env.sysconfig, 'get_paths', lambda: {'include': '/nowhere'})
    with pytest.raises(SystemExit, match=r'`apt-get install g\+\+ python3-dev`'):
        setup_env.check_machine()
