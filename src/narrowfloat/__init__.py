"""FP8 linear layers and matmuls for training in PyTorch. What is public, and nothing else."""

from . import _binary as _binary
from . import ops as ops
from ._version import __version__
from .autograd import LinearFunction, linear, matmul
from .convert import Report, convert, plan
from .modules import FP8Linear, Linear
from .ops import QuantizedTensor, quantize
from .recipe import RECIPES, Gemm, Recipe
from .reuse import reuse_weights
from .seeds import fp8_linear_backward, fp8_linear_forward, fp8_mm, fp8_mm_view
from .support import Support, supported

__all__ = [
    "RECIPES",
    "FP8Linear",
    "Gemm",
    "Linear",
    "LinearFunction",
    "QuantizedTensor",
    "Recipe",
    "Report",
    "Support",
    "__version__",
    "convert",
    "fp8_linear_backward",
    "fp8_linear_forward",
    "fp8_mm",
    "fp8_mm_view",
    "linear",
    "matmul",
    "plan",
    "quantize",
    "reuse_weights",
    "supported",
]
