from .complexity import Complexity, complexity, count_macs

__all__ = ['Complexity', 'complexity', 'count_macs']
