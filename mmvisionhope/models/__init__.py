from .heads import VisionHOPENeck
from .necks import SimpleFeaturePyramid
from .plain import PlainVisionHOPE
from .srnl import SRNL
from .visionhope import VisionHOPE

__all__ = ['SRNL', 'PlainVisionHOPE', 'SimpleFeaturePyramid', 'VisionHOPE', 'VisionHOPENeck']
