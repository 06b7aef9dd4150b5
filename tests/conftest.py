from pathlib import Path

import pytest
import torch

# Fact sheets and sample images that lie beside the repository in development; users lack them.
SHARED = Path(__file__).resolve().parents[2] / 'shared'


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f'needs the development data in {SHARED}')
    return SHARED
