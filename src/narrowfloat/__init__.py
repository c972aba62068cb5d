"""FP8 and FP4 linear layers for training in PyTorch. What is public, and nothing else."""

from . import _binary as _binary
from . import ops as ops
from ._version import __version__
from .amax_history import delayed_state, load_delayed_state, step
from .autograd import (
    BlockLinearFunction,
    DelayedLinearFunction,
    FP4LinearFunction,
    LinearFunction,
    MixedLinearFunction,
    linear,
    matmul,
)
from .cast import Cast
from .convert import Report, convert, plan, revert
from .functional import (
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
from .gemm_ops import GEMM_OPS
from .modules import FP4Linear, FP8Linear, Linear
from .quantized import BlockTensor, FP4Tensor, QuantizedTensor, quantize
from .recipe import (
    RECIPES,
    BlockRecipe,
    Delayed,
    FP4Recipe,
    Gemm,
    MixedRecipe,
    Recipe,
    block_recipe,
    fp4_recipe,
    mixed_recipe,
)
from .support import Support, supported
from .tune import load_plans, save_plans, tune
from .w4a16 import PackedFP4Linear
from .weight_cache import reuse_weights

__all__ = [
    "GEMM_OPS",
    "RECIPES",
    "BlockLinearFunction",
    "BlockRecipe",
    "BlockTensor",
    "Cast",
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
    "block_recipe",
    "convert",
    "delayed_state",
    "fp4_dequantize",
    "fp4_matmul",
    "fp4_matmul_backward_A",
    "fp4_matmul_backward_B",
    "fp4_quantize",
    "fp4_recipe",
    "fp8_linear_backward",
    "fp8_linear_forward",
    "fp8_mm",
    "fp8_mm_view",
    "linear",
    "load_delayed_state",
    "load_plans",
    "matmul",
    "mixed_recipe",
    "plan",
    "quantize",
    "reuse_weights",
    "revert",
    "save_plans",
    "step",
    "supported",
    "tune",
]
