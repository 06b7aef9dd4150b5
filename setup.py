"""Builds the compiled op if there is torch and a compiler; everything else is in pyproject.toml."""

import os
import sys
import warnings

from setuptools import setup

# Needs no network and no GPU. Without the op the package works, slowly, and says so on first use.
HOW = (
    'install g++ and run `pip install --no-build-isolation .` in an environment with torch '
    'and setuptools>=80'
)


def extension() -> dict:
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        warnings.warn(f'building without the compiled op ({error}): {HOW}', stacklevel=2)
        return {}

    class OptionalBuildExtension(BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # whatever a compiler or its absence raises
                warnings.warn(f'building without the compiled op ({error}): {HOW}', stacklevel=2)
                self.extensions = []

    sources = ['cpu.cpp', 'cpu_generic.cpp', 'cpu_avx2.cpp', 'cpu_avx512.cpp']
    flags = ['-O3', '-std=c++17', '-ffp-contract=fast', '-fno-math-errno', '-fno-trapping-math']
    if sys.platform == 'linux':
        # at::parallel_for is serial without. For the compiler alone: linking would bring in a
        # second OpenMP, next to the one that torch carries and that has its threads.
        flags.append('-fopenmp')
    return dict(
        ext_modules=[
            CppExtension(
                'mmvisionhope._C',
                [os.path.join('kernels', 'csrc', name) for name in sources],
                extra_compile_args=[*flags, '-Wno-psabi', '-g0'],
            )
        ],
        cmdclass=dict(build_ext=OptionalBuildExtension),
    )


setup(**extension())
