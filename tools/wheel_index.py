"""Decides the layout of the package index on GitHub Pages: PEP 503, a directory for each CUDA.

python3 tools/wheel_index.py OUT cu12=FOLDER_OF_WHEELS cu13=FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import shutil
import sys
import zipfile
from pathlib import Path

NAME = "narrowfloat"
PAGE = """<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="pypi:repository-version" content="1.0">
    <title>{title}</title>
  </head>
  <body>
{body}
  </body>
</html>
"""


def page(path: Path, title: str, links: list[str]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    body = "\n".join(f"    {link}<br>" for link in links)
    (path / "index.html").write_text(PAGE.format(title=html.escape(title), body=body))


def requires_python(wheel: Path) -> str | None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        found = re.search(r"^Requires-Python: (.+)$", archive.read(name).decode(), re.M)
    return found[1] if found else None


def link(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    python = requires_python(wheel)
    more = f' data-requires-python="{html.escape(python)}"' if python else ""
    return f'<a href="{wheel.name}#sha256={digest}"{more}>{wheel.name}</a>'


def write(out: Path, folders: dict[str, Path]) -> int:
    """The index in `out`, with the wheels; how many they are."""
    count = 0
    for cuda, folder in folders.items():
        wheels = sorted(folder.glob(f"{NAME}-*.whl"))
        if not wheels:
            sys.exit(f"{folder} has no wheel of {NAME}")
        if len({w.name for w in wheels}) != len(list(folder.glob("*.whl"))):
            sys.exit(f"{folder} has wheels of something else")
        project = out / cuda / NAME
        page(out / cuda, f"{NAME} for CUDA {cuda[2:]}", [f'<a href="{NAME}/">{NAME}</a>'])
        page(project, NAME, [link(w) for w in wheels])
        for wheel in wheels:
            shutil.copy(wheel, project)
        count += len(wheels)
    links = [f'<a href="{cuda}/">{cuda}</a>' for cuda in folders]
    page(out, f"{NAME}: which CUDA?", links)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", help="cu13=dist/cu13")
    args = parser.parse_args()
    folders = {}
    for pair in args.folders:
        cuda, _, folder = pair.partition("=")
        if not re.fullmatch(r"cu\d+", cuda) or not Path(folder).is_dir():
            parser.error(f"expected cuNN=FOLDER, got {pair}")
        folders[cuda] = Path(folder)
    print(f"{write(args.out, folders)} wheels in {args.out}")


if __name__ == "__main__":
    main()
