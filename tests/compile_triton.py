"""Compiles the GPU kernels for devices that are not there, and prints what the compilers say.

    python tests/compile_triton.py [--targets sm_90 ...] [--dims 16 ...] [--dtypes float32 ...]

Every kernel is compiled with the arguments and choices that its launcher gives it, for contiguous
tokens. A process of its own, since nothing here may run a kernel. Exits with an error unless
shared memory fits, every kernel that multiplies uses matrix units, and, for heads of 16 channels,
nothing is spilled but what SPILLS admits.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmvisionhope.ops import library
from mmvisionhope.ops.triton_kernels import launch

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
SHARED = {'sm_80': 163 << 10, 'sm_90': 227 << 10, 'sm_100': 227 << 10, 'gfx942': 64 << 10}
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
POINTERS = {torch.float32: '*fp32', torch.bfloat16: '*bf16', torch.float16: '*fp16'}
# Bytes of stack a thread, where the registers of one do not suffice: see docs/performance.md.
SPILLS = {('adjoint_kernel', 'cuda'): 256}


def launches(d, dtype):
    """The arguments of each kernel's launch in a forward and backward of an 800 x 1333 stage 1."""
    found = {}

    def record(kernel, grid, *arguments, num_warps, **constants):
        found.setdefault(kernel, (arguments, num_warps, constants))

    height, width, heads, routes = 200, 334, 1, 4
    z = torch.empty(1, height, width, heads * d, dtype=dtype)
    square, row = torch.empty(routes, heads, d, d), torch.empty(routes, heads, d)
    memories = square, square, square, row, row
    skip, scale = torch.empty(heads, d), torch.empty(routes, heads * d)
    start, launch.launch = launch.launch, record
    try:
        arguments = z, z, *memories, skip, scale
        _, gains = launch.forward(*arguments, range(routes), width, height, True)
        launch.backward(z, *arguments, gains, range(routes), width, height)
    finally:
        launch.launch = start
    return found


def compile_for(target, kernel, arguments, num_warps, constants, dtype):
    constants = dict(constants)
    if target.backend == 'cuda':
        chain, reads = launch.nvidia_precisions(dtype)
        pixels = kernel.fn.__name__ in ('reads_kernel', 'merge_kernel', 'outer_products_kernel')
        constants['PRECISION'] = reads if pixels else chain
    names = [name for name in kernel.arg_names if name not in constants]
    signature, attributes = {}, {}
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            signature[name] = POINTERS[argument.dtype]
            attributes[(kernel.arg_names.index(name),)] = [['tt.divisibility', 16]]
        elif name.endswith('_c'):  # a stride of one, which Triton specialises on
            constants[name] = 1
        else:
            signature[name] = 'i32'
    signature |= dict.fromkeys(constants, 'constexpr')
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = dict(num_warps=launch.warps(num_warps, target.warp_size), num_stages=launch.STAGES)
    return triton.compile(source, target=target, options=options)


def figures(compiled, target):
    """Registers a thread, bytes spilled a thread, shared memory, matrix and all instructions."""
    shared = compiled.metadata.shared
    if target.backend == 'hip':
        code = compiled.asm['amdgcn']
        registers, spilled = (
            int(re.search(rf'\.{name}:\s+(\d+)', code)[1])
            for name in ('vgpr_count', 'vgpr_spill_count')
        )
        instructions = re.findall(r'^\t([svdgb]\w+_\w+)', code, re.M)
        matrix = sum(name.startswith('v_mfma') for name in instructions)
        return registers, 4 * spilled, shared, matrix, len(instructions)
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
            for option in ('-res-usage', '-sass')
        )
    registers, stack = (int(re.search(rf'{n}:(\d+)', usage.stdout)[1]) for n in ('REG', 'STACK'))
    instructions = re.findall(r'^\s+/\*[0-9a-f]+\*/\s+(.*?);', code.stdout, re.M)
    matrix = sum('MMA' in instruction for instruction in instructions)
    return registers, stack, shared, matrix, len(instructions)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--targets', nargs='+', default=list(TARGETS), choices=list(TARGETS))
    dims = library.GPU_KERNEL_DIMS
    parser.add_argument('--dims', nargs='+', type=int, default=list(dims), choices=dims)
    parser.add_argument('--dtypes', nargs='+', default=list(DTYPES), choices=list(DTYPES))
    arguments = parser.parse_args()

    columns = 'kernel d dtype target warps registers spilled shared matrix instructions'
    table = Table(*columns.split())
    faults = []
    for d, dtype in itertools.product(arguments.dims, arguments.dtypes):
        for kernel, (values, warps, constants) in launches(d, DTYPES[dtype]).items():
            name = kernel.fn.__name__
            for key in arguments.targets:
                target = TARGETS[key]
                compiled = compile_for(target, kernel, values, warps, constants, DTYPES[dtype])
                registers, spilled, shared, matrix, count = figures(compiled, target)
                row = (
                    name,
                    d,
                    dtype,
                    key,
                    launch.warps(warps, target.warp_size),
                    registers,
                    spilled,
                    shared,
                    matrix,
                    count,
                )
                table.add_row(*map(str, row))
                if shared > SHARED[key]:
                    faults.append(f'{row}: more than {SHARED[key]} bytes of shared memory')
                if not matrix:
                    faults.append(f'{row}: no matrix instruction')
                if d == 16 and spilled > SPILLS.get((name, target.backend), 0):
                    faults.append(f'{row}: spills')
    Console(width=130).print(table)
    if faults:
        raise SystemExit('\n'.join(faults))


if __name__ == '__main__':
    main()
