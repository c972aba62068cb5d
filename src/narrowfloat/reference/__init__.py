"""What every operator means, in plain PyTorch; these functions are the CPU's kernels too.

The CUDA kernels equal these bit for bit in quantized bytes and scales; a GEMM may differ by the
order of its fp32 sum. All of them are written for clarity and run on any device.
"""
