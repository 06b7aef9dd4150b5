"""Create .venv with everything this repository is tested with. `make` runs it; no dependencies.

The slow part, once per torch and Python version, is compiling mmcv. Its wheel is kept in
${XDG_CACHE_HOME:-~/.cache}/mmvisionhope/wheels, in a folder named by what it was compiled for:
pip's own cache would hand it to another torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / '.venv'
PYTHON = VENV / 'bin' / 'python'
STAMP = VENV / 'mmvisionhope-setup'
REQUIREMENTS = ROOT / 'requirements'
STEP = re.compile(r'\[(\d+)/(\d+)\]')


def main() -> None:
    if sys.argv[1:]:
        sys.exit(f'{__doc__}\nIt takes no arguments.')
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    check_machine()
    if not PYTHON.exists():
        say(f'creating {VENV}')
        run(sys.executable, '-m', 'venv', '--clear', str(VENV))
    STAMP.unlink(missing_ok=True)
    say('installing torch (about 3 GB to download unless pip is pointed at a CPU build)')
    pip('install', '-r', 'requirements/build.txt')
    say('installing the other packages')
    pip('install', '-r', 'requirements/runtime.txt', '-r', 'requirements/dev.txt')
    pip('install', '--no-deps', str(mmcv_wheel()))
    pip('install', '--no-deps', '-r', 'requirements/openmmlab.txt')
    say('compiling the op of this package: some four minutes on two cores')
    pip('install', '--no-deps', '--no-build-isolation', '-e', '.')
    run(str(PYTHON), '-m', 'mmvisionhope.check')
    STAMP.write_text(wanted)


def fingerprint() -> str:
    """Changes when the environment must be set up anew."""
    files = [Path(__file__), ROOT / 'pyproject.toml', ROOT / 'setup.py']
    files += sorted(REQUIREMENTS.glob('*.txt')) + sorted(ROOT.glob('kernels/csrc/*'))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return f'{sys.version} {ROOT} {digest.hexdigest()}'


def check_machine() -> None:
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        fail(
            f'Python 3.10 to 3.12 is needed, this is {platform.python_version()}: '
            'choose one with `make PYTHON=python3.11 ...`'
        )
    missing = []
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append('python3-venv')
    if not shutil.which('g++'):
        missing.append('g++')
    if not Path(sysconfig.get_paths()['include'], 'Python.h').is_file():
        missing.append('python3-dev')
    if missing:
        fail(f'missing on this machine: run `apt-get install {" ".join(missing)}`')


def mmcv_wheel() -> Path:
    """The compiled mmcv for this torch and Python: from the cache, else built into it."""
    requirement = next(
        line.strip()
        for line in (REQUIREMENTS / 'openmmlab.txt').read_text().splitlines()
        if line.startswith('onedl-mmcv==')
    )
    # mmcv compiles its CUDA ops where torch sees a GPU.
    key = subprocess.check_output(
        [
            str(PYTHON),
            '-c',
            'import platform, sys, torch;'
            "print(f'torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}"
            "-{platform.machine()}' + ('-gpu' if torch.cuda.is_available() else ''))",
        ],
        text=True,
    ).strip()
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    folder = cache / 'mmvisionhope' / 'wheels' / key
    pattern = requirement.replace('-', '_').replace('==', '-') + '-*.whl'
    if kept := sorted(folder.glob(pattern)):
        say(f'mmcv compiled earlier: {kept[0]}')
        return kept[0]
    built = build_mmcv(requirement)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Copied under another name first: a half-written wheel must never be found.
        partial = folder / f'.{built.name}.{os.getpid()}'
        shutil.copyfile(built, partial)
        return partial.rename(folder / built.name)
    except OSError as error:
        say(f'the compiled mmcv is not kept for next time: {error}')
        return built


def build_mmcv(requirement: str) -> Path:
    jobs = os.environ.get('MAX_JOBS') or str(os.cpu_count() or 1)
    folder = Path(tempfile.mkdtemp(prefix='mmcv-'))
    log = folder / 'build.log'
    say(f'compiling {requirement} with {jobs} jobs: about a quarter of an hour on two cores')
    command = [str(PYTHON), '-m', 'pip', 'wheel', '-v', '--no-deps', '--no-build-isolation']
    environment = {**os.environ, 'MAX_JOBS': jobs, 'MMCV_WITH_OPS': '1'}
    start = time.monotonic()
    with (
        log.open('w') as record,
        subprocess.Popen(
            [*command, '--no-cache-dir', '-w', str(folder), requirement],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors='replace',
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            record.write(line)
            if step := STEP.search(line):
                show_progress(int(step[1]), int(step[2]), time.monotonic() - start)
    print()
    if process.returncode or not (wheels := list(folder.glob('*.whl'))):
        fail(f'{requirement} did not compile; the last lines of {log} say why')
    return wheels[0]


def show_progress(done: int, total: int, seconds: float) -> None:
    text = f'  mmcv: {done} of {total} files, {seconds / 60:.0f} min'
    if sys.stdout.isatty():
        print(f'\r{text}', end='', flush=True)
    elif done % 10 == 0 or done == total:
        print(text, flush=True)


def pip(*arguments: str) -> None:
    run(
        str(PYTHON),
        '-m',
        'pip',
        '--disable-pip-version-check',
        *arguments[:1],
        '-q',
        *arguments[1:],
    )


def run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, check=False)
    if result.returncode:
        fail(f'`{" ".join(command)}` failed')


def say(message: str) -> None:
    print(f'set-up: {message}', flush=True)


def fail(message: str) -> None:
    sys.exit(f'set-up: {message}')


if __name__ == '__main__':
    main()
