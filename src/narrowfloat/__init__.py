"""FP8 and FP4 linear layers for training in PyTorch. What is public, and nothing else."""

from . import _binary as _binary
from . import ops as ops
from ._version import __version__
from .autograd import DelayedLinearFunction, LinearFunction, linear, matmul
from .autograd_block import BlockLinearFunction
from .autograd_fp4 import FP4LinearFunction
from .autograd_mixed import MixedLinearFunction
from .convert import Report, convert, plan
from .fp4_weights import PackedFP4Linear
from .history import step
from .modules import FP4Linear, FP8Linear, Linear
from .quantized import BlockTensor, FP4Tensor, QuantizedTensor, quantize
from .recipe import RECIPES, BlockRecipe, Delayed, FP4Recipe, Gemm, MixedRecipe, Recipe
from .reuse import reuse_weights
from .seeds import (
    FP4DequantizeFunction,
    FP4MatMulFunction,
    FP4QuantizeFunction,
    fp4_dequantize,
    fp4_matmul,
    fp4_matmul_backward_A,
    fp4_matmul_backward_B,
    fp4_quantize,
    fp8_linear_backward,
    fp8_linear_forward,
    fp8_mm,
    fp8_mm_view,
)
from .support import Support, supported
from .tune import load_plans, save_plans, tune

__all__ = [
    "RECIPES",
    "BlockLinearFunction",
    "BlockRecipe",
    "BlockTensor",
    "Delayed",
    "DelayedLinearFunction",
    "FP4DequantizeFunction",
    "FP4Linear",
    "FP4LinearFunction",
    "FP4MatMulFunction",
    "FP4QuantizeFunction",
    "FP4Recipe",
    "FP4Tensor",
    "FP8Linear",
    "Gemm",
    "Linear",
    "LinearFunction",
    "MixedLinearFunction",
    "MixedRecipe",
    "PackedFP4Linear",
    "QuantizedTensor",
    "Recipe",
    "Report",
    "Support",
    "__version__",
    "convert",
    "fp4_dequantize",
    "fp4_matmul",
    "fp4_matmul_backward_A",
    "fp4_matmul_backward_B",
    "fp4_quantize",
    "fp8_linear_backward",
    "fp8_linear_forward",
    "fp8_mm",
    "fp8_mm_view",
    "linear",
    "load_plans",
    "matmul",
    "plan",
    "quantize",
    "reuse_weights",
    "save_plans",
    "step",
    "supported",
    "tune",
]
