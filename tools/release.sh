#!/usr/bin/env bash
# Decides how wheels are packed for a release, and unpacked for the index.
# A wheel has the same name for both CUDAs, so each CUDA's are one file of a release.
#   tools/release.sh pack            of cu12/ cu13/ sdist/: cu12.tar, cu13.tar, and public/, which
#                                    is for the public index: it knows no CUDA, so those for CUDA 13
#   tools/release.sh index TARS OUT  of TARS/*/cu*.tar, of all releases: OUT, the index
set -euo pipefail
case "${1-}" in
pack)
    tar cf cu12.tar cu12
    tar cf cu13.tar cu13
    mkdir public
    cp cu13/*.whl sdist/*.tar.gz public
    ;;
index)
    unpacked=$(mktemp -d)
    for tar in "$2"/*/cu*.tar; do tar xf "$tar" -C "$unpacked"; done
    python3 "$(dirname "${BASH_SOURCE[0]}")/wheel_index.py" "$3" \
        cu12="$unpacked/cu12" cu13="$unpacked/cu13"
    rm -r "$unpacked"
    ;;
*)
    echo "usage: tools/release.sh pack | index TARS OUT" >&2
    exit 2
    ;;
esac
