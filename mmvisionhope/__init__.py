"""VisionHOPE for OpenMMLab: importing this package registers the backbones with mmengine."""

from .models import VisionHOPE

__version__ = '0.1.0'

__all__ = ['VisionHOPE', '__version__']
