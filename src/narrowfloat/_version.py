"""The version of the package, here alone: pyproject.toml and setup.py read this line as text."""

__version__ = "0.1.0"
