from .complexity import count_macs

__all__ = ['count_macs']
