"""Two processes on half a batch each give the gradients of one on the whole: DDP, FSDP2 on gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mmvisionhope import VisionHOPE

ARCH = dict(embed_dims=[16, 32], depths=[1, 1], head_dims=8)


def model(**options):
    torch.manual_seed(1)
    # BatchNorm's statistics are of a process's own images; frozen they are of nobody's.
    model = VisionHOPE(
        ARCH, out_indices=(0, 1), norm_eval=True, layer_scale_init_value=1.0, **options
    )
    return model.train()


def images():
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(2))


def loss(features):
    return sum(feature.square().mean() for feature in features)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worker(kind, rank, folder):
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{folder}/meeting', rank=rank, world_size=2
    )
    backbone = model()
    if kind == 'ddp':
        wrapped = torch.nn.parallel.DistributedDataParallel(backbone, broadcast_buffers=False)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh('cpu', (2,))
        for block in (block for stage in backbone.stages for block in stage):
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(backbone, mesh=mesh)
    loss(wrapped(images()[rank : rank + 1])).backward()
    found = gradients(backbone)
    if kind == 'fsdp':
        found = {name: gradient.full_tensor() for name, gradient in found.items()}
    if rank == 0:
        torch.save(found, f'{folder}/gradients.pt')
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_two_processes_equal_one(kind, tmp_path):
    command = [sys.executable, __file__, kind]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in (0, 1)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    alone = model()
    loss(alone(images())).backward()
    expected, found = gradients(alone), torch.load(tmp_path / 'gradients.pt')
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        # Sums over images in another order: some ulp of float32, relative to the whole tensor.
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputing_gives_the_same_gradients(reentrant):
    plain = model()
    loss(plain(images())).backward()
    expected = gradients(plain)
    if reentrant:
        recomputed = model()
        x = images().requires_grad_()
        loss(checkpoint(recomputed, x, use_reentrant=True)).backward()
    else:
        recomputed = model(with_cp=True)
        loss(recomputed(images())).backward()
    assert all(torch.equal(g, expected[name]) for name, g in gradients(recomputed).items())


if __name__ == '__main__':
    worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
