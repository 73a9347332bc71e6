"""Watches training scripts from outside, compares runs with one process, says where they part.

`python -m proof --help` shows what it can do. What it watches may have modules of its own with the
names of ours, so importing this package imports no other one."""

import importlib


def __getattr__(name):
    """proof.Run and proof.launch, which train.py starts with."""
    if name in ("Run", "launch"):
        return getattr(importlib.import_module("proof.run"), name)
    raise AttributeError(f"module 'proof' has no attribute {name!r}")
