from .reference import Dynamics
from .scan import directional_scan

__all__ = ['Dynamics', 'directional_scan']
