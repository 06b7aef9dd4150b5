"""Speed, as ratios of things run in one process: python benchmarks/run.py scan backbones gpu

Everything compared is run in turns, so that a noisy machine slows all alike; figures are medians.
A speed-up is printed only if what is faster is as close to float64 as what it replaces.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mmvisionhope import VisionHOPE
from mmvisionhope.analysis import count_macs
from mmvisionhope.ops import directional_scan, library
from mmvisionhope.ops.reference import directional_scan_reference
from mmvisionhope.ops.scan import DIRECTIONS

# (batch, height, width, heads) of 16 channels: VisionHOPE-T's stages 1 and 3 at 224, stage 1 at
# 800 x 1333, and a batch of larger maps.
SCAN_SHAPES = [(1, 56, 56, 2), (8, 14, 14, 8), (1, 200, 334, 2), (2, 128, 128, 2)]
# The same on a GPU, by images as one trains with.
GPU_SHAPES = [(1, 200, 334, 2), (16, 200, 334, 2), (128, 56, 56, 2), (128, 14, 14, 8)]
LINEAR_SIDES = [64, 128, 256, 512]
HEAD_DIMS = 16
TURN = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        'what', nargs='*', choices=[*BENCHMARKS, []], help='default: all that run here'
    )
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--repeats', type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # The reference's best form: its memories fade into denormals, which are slow.
    torch.set_flush_denormal(True)
    print(machine(args.threads))
    default = [name for name in BENCHMARKS if name != 'gpu' or torch.cuda.is_available()]
    for name in args.what or default:
        print(f'\n{name}')
        BENCHMARKS[name](args.repeats)


def machine(threads: int) -> str:
    model = platform.processor() or platform.machine()
    try:
        with open('/proc/cpuinfo') as info:
            model = next(
                line.split(':')[1].strip() for line in info if line.startswith('model name')
            )
    except (OSError, StopIteration):
        model += ' (no /proc/cpuinfo)'
    capability = torch.backends.cpu.get_cpu_capability()
    return f'{model}, {capability}, {threads} thread(s), torch {torch.__version__}'


def medians(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each, run in turns of at least TURN seconds."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    calls = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        calls[name] = 1 + int(TURN / (time.perf_counter() - start))
    gc.disable()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - start) / calls[name])
    gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def fma_peak() -> float:
    """Multiply-adds a second of one core, by a matrix product that fits its cache."""
    a, b = torch.randn(2, 256, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = medians({'mm': lambda: torch.mm(a, b)}, 15)['mm']
    torch.set_num_threads(threads)
    return 256**3 / seconds


@dataclass
class Scan:
    """Arguments of one scan, fading or alive (retention near one, so memories live on)."""

    tensors: list[Tensor]
    tokens: int

    @classmethod
    def of(cls, shape: tuple[int, int, int, int], alive: bool) -> Scan:
        torch.manual_seed(0)
        batch, height, width, heads = shape
        routes, d = len(DIRECTIONS), HEAD_DIMS
        z, q = torch.randn(2, batch, height, width, heads * d).unbind()
        content, key, value = torch.randn(3, routes, heads, d, d).mul(0.5).unbind()
        rate, retention = torch.randn(2, routes, heads, d).unbind()
        if alive:
            z, retention = z.abs(), retention.abs() * 4
        rest = [torch.randn(heads, d), torch.randn(routes, heads * d)]
        tensors = [t.requires_grad_() for t in (z, q, content, key, value, rate, retention, *rest)]
        return cls(tensors, batch * height * width * heads * routes)

    def reference(self, *tensors: Tensor) -> Tensor:
        height, width = tensors[0].shape[1:3]
        return directional_scan_reference(*tensors, DIRECTIONS, width, height)

    def exact(self) -> list[Tensor]:
        """Output and gradients by the reference in float64."""
        tensors = [t.detach().double().requires_grad_() for t in self.tensors]
        return Scan(tensors, self.tokens).both(self.reference)

    def both(self, function: Callable[..., Tensor]) -> list[Tensor]:
        y = function(*self.tensors)
        return [y, *torch.autograd.grad(y, self.tensors, torch.ones_like(y))]

    def forward(self, function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*self.tensors)


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(((a - e).norm() / e.norm().clamp_min(1e-30)).item() for a, e in pairs)


def scan(repeats: int) -> None:
    peak = fma_peak()
    print(f'peak of one core: {peak / 1e9:.0f} G multiply-adds/s')
    if not library.COMPILED:
        raise SystemExit('the compiled op is not installed: there is nothing to compare')
    macs = 6 * HEAD_DIMS**2 + 20 * HEAD_DIMS  # Equation 56 per token, head and direction
    print('ns per token, head and direction; of peak: multiply-adds of Equation 56 over the peak')
    print(
        'error: the largest of output and gradients, relative, to float64; of the reference in ()'
    )
    header = ('shape', 'inputs', 'fwd', 'ratio', 'of peak', 'fwd+bwd', 'ratio', 'error')
    print('{:18}{:8}{:>8}{:>8}{:>9}{:>9}{:>8}{:>16}'.format(*header))
    for shape in SCAN_SHAPES:
        for alive in (False, True):
            case = Scan.of(shape, alive)
            exact = case.exact()
            error = difference(case.both(directional_scan), exact)
            usual = difference(case.both(case.reference), exact)
            del exact
            if error > max(2e-5, 3 * usual):
                print(f'{shape!s:18} off by {error:.0e}, the reference by {usual:.0e}: no speed-up')
                continue
            forward = medians(
                {
                    'compiled': lambda case=case: case.forward(directional_scan),
                    'reference': lambda case=case: case.forward(case.reference),
                },
                repeats,
            )
            both = medians(
                {
                    'compiled': lambda case=case: case.both(directional_scan),
                    'reference': lambda case=case: case.both(case.reference),
                },
                repeats,
            )
            print(
                f'{shape!s:18}{"alive" if alive else "fading":8}'
                f'{forward["compiled"] / case.tokens * 1e9:8.1f}'
                f'{forward["reference"] / forward["compiled"]:8.1f}'
                f'{macs * case.tokens / forward["compiled"] / peak:9.0%}'
                f'{both["compiled"] / case.tokens * 1e9:9.1f}'
                f'{both["reference"] / both["compiled"]:8.1f}'
                f'{f"{error:.0e} ({usual:.0e})":>16}'
            )
    cases = {side: Scan.of((1, side, side, 2), False) for side in LINEAR_SIDES}
    linear = medians(
        {str(side): lambda c=c: c.forward(directional_scan) for side, c in cases.items()}, repeats
    )
    per_token = {side: linear[str(side)] / case.tokens * 1e9 for side, case in cases.items()}
    print('forward by map side: ' + ', '.join(f'{k}: {v:.1f} ns' for k, v in per_token.items()))


def backbones(repeats: int) -> None:
    """VisionHOPE-T against ConvNeXt-T and Swin-T of the toolboxes, forward, batch 1."""
    from mmdet.models import SwinTransformer
    from mmpretrain.models import ConvNeXt

    models = {
        'VisionHOPE-T': VisionHOPE('tiny', out_norm=False),
        'ConvNeXt-T': ConvNeXt('tiny', out_indices=(0, 1, 2, 3), gap_before_final_norm=False),
        'Swin-T': SwinTransformer(96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    }
    # Of the two others as their papers give them at 224 x 224, growing with the pixels.
    gmacs = {'ConvNeXt-T': 4.5, 'Swin-T': 4.5}
    for size in ((224, 224), (800, 1280)):
        gmacs['VisionHOPE-T'] = sum(count_macs(models['VisionHOPE-T'], size).values()) / 1e9
        images = torch.randn(1, 3, *size).contiguous(memory_format=torch.channels_last)
        for model in models.values():
            model.eval()  # mmdet's returns nothing
            model.to(memory_format=torch.channels_last)
        with torch.no_grad():
            seconds = medians(
                {name: lambda m=m, x=images: m(x) for name, m in models.items()},
                repeats if size[0] < 300 else 3,
            )
        print(f'{size[0]} x {size[1]}')
        pixels = size[0] * size[1] / 224**2
        for name, value in seconds.items():
            macs = gmacs[name] * (1 if name == 'VisionHOPE-T' else pixels)
            ratio = value / seconds['VisionHOPE-T']
            print(
                f'  {name:13} {value * 1e3:8.0f} ms {value / macs * 1e3:6.1f} ms/GMAC {ratio:6.2f}'
            )


def gpu(repeats: int) -> None:
    """The op on a GPU: rates against the device's own, and the gains against token by token."""
    if not torch.cuda.is_available():
        raise SystemExit('gpu: torch sees no GPU here')
    from per_token import chunk_gains
    from triton.testing import do_bench

    from mmvisionhope.ops.triton_kernels import launch

    def seconds(function: Callable[[], object]) -> float:
        rounds = [do_bench(function, return_mode='median') for _ in range(repeats)]
        return statistics.median(rounds) * 1e-3

    big = torch.empty(2**28, device='cuda')
    bandwidth = 2 * big.nbytes / seconds(big.clone)
    a = torch.randn(8192, 8192, device='cuda')
    rates = {}
    for name, precision in (('float32', 'highest'), ('tf32', 'high')):
        torch.set_float32_matmul_precision(precision)
        rates[name] = 2 * 8192**3 / seconds(partial(torch.mm, a, a))
    torch.set_float32_matmul_precision('highest')
    print(f'{torch.cuda.get_device_name()}: {bandwidth / 1e12:.2f} TB/s copied')
    print(', '.join(f'{name} products {rate / 1e12:.0f} TFLOP/s' for name, rate in rates.items()))
    print('TFLOP/s by Equation 56; TB/s of z, q, y, and of their gradients for both')
    header = ('shape', 'inputs', 'fwd ms', 'TFLOP/s', 'TB/s', 'ratio', 'fwd+bwd ms', 'TFLOP/s')
    header += ('TB/s', 'ratio', 'gains ms', 'by token')
    print(('{:18}{:8}' + '{:>11}' * 10).format(*header))
    for shape in GPU_SHAPES:
        for alive in (False, True):
            case = Scan.of(shape, alive)
            case.tensors = [t.detach().cuda().requires_grad_() for t in case.tensors]
            exact = case.exact()
            error = difference(case.both(directional_scan), exact)
            usual = difference(case.both(case.reference), exact)
            del exact
            z, _, content, *memories = (t.detach() for t in case.tensors[:7])
            scan_ = launch.Scan.of(z, content, range(4), z.shape[2], z.shape[1])
            ours, plain = (
                function(scan_, z, *memories) for function in (launch.chunk_gains, chunk_gains)
            )
            apart = ((ours - plain).norm() / plain.norm()).item()
            if error > max(2e-5, 3 * usual) or apart > 1e-4:
                print(f'{shape!s:18} off by {error:.0e}, gains by {apart:.0e}: no speed-up')
                continue
            flops = 2 * (6 * HEAD_DIMS**2 + 20 * HEAD_DIMS) * case.tokens
            row = f'{shape!s:18}{"alive" if alive else "fading":8}'
            for run, times in ((case.forward, 1), (case.both, 3)):
                own = seconds(partial(run, directional_scan))
                eager = seconds(partial(run, case.reference))
                row += f'{own * 1e3:11.3f}{times * flops / own / 1e12:11.2f}'
                row += f'{times * 3 * z.nbytes / own / 1e12:11.2f}{eager / own:11.1f}'
            for function in (launch.chunk_gains, chunk_gains):
                row += f'{seconds(partial(function, scan_, z, *memories)) * 1e3:11.3f}'
            print(row)


BENCHMARKS = {'scan': scan, 'backbones': backbones, 'gpu': gpu}

if __name__ == '__main__':
    main()
