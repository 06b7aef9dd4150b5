from .heads import VisionHOPENeck
from .visionhope import VisionHOPE

__all__ = ['VisionHOPE', 'VisionHOPENeck']
