"""Turning a model's linear layers into narrowfloat's, and back."""

from .planning import TAKE, Filter, convert, plan
from .report import Report
from .reverting import revert

__all__ = ["TAKE", "Filter", "Report", "convert", "plan", "revert"]
