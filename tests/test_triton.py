"""The GPU kernels without a GPU: run by Triton's interpreter, and compiled for four of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmvisionhope.ops import library, scan

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(not library.TRITON, reason='Triton is not installed')


def run(*command, **environment):
    """In a process of its own, as interpreter or compiler is chosen when Triton is imported."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@needs_triton
@pytest.mark.skipif(not library.COMPILED, reason='its tests are compared with the compiled op')
def test_interpreted_kernels_are_the_reference():
    done = run('-m', 'pytest', 'tests/interpreted_triton.py', TRITON_INTERPRET='1')
    assert done.returncode == 0, done.stdout[-5000:]


@needs_triton
def test_kernels_compile_for_nvidia_and_amd(tmp_path):
    """All dimensions, dtypes and targets: `python tests/compile_triton.py`, some minutes."""
    done = run(
        'tests/compile_triton.py', '--dims', '16', '--dtypes', 'float32',
        '--targets', 'sm_90', 'gfx942', TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0',
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_gpu_kernels_cover(monkeypatch):
    class Tokens:
        device = torch.device('cuda')
        dtype = torch.float32

    assert library.has_kernel(Tokens, 16) == library.TRITON
    assert not library.has_kernel(Tokens, 8)
    assert 'not for 8 and torch.float32' in scan._why_slow(Tokens, 8)
    Tokens.dtype = torch.float64
    assert not library.has_kernel(Tokens, 16)
    monkeypatch.setattr(library, 'TRITON', False)
    monkeypatch.setattr(scan, 'TRITON', False)
    Tokens.dtype = torch.float32
    assert not library.has_kernel(Tokens, 16)
    assert 'pip install triton' in scan._why_slow(Tokens, 16)
