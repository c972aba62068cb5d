#!/usr/bin/env bash
# Gives a wheel its manylinux tag. Bundles nothing: torch brings its libraries and NVIDIA's.
# tools/repair_wheel.sh WHEEL DEST manylinux_2_28
set -euo pipefail
exec auditwheel repair --plat "$3_$(uname -m)" --wheel-dir "$2" \
    --exclude 'libtorch*.so*' --exclude 'libc10*.so*' --exclude 'libcudart.so.*' \
    --exclude 'libcublas*.so.*' --exclude 'libcuda.so.*' "$1"
