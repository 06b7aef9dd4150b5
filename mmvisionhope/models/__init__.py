from .visionhope import VisionHOPE

__all__ = ['VisionHOPE']
