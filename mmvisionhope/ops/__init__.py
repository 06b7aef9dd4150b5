from .scan import directional_scan

__all__ = ['directional_scan']
