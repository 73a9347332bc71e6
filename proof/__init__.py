"""Counts what a rank sends and holds, compares with one process, says where a difference began."""

from proof.run import Run, launch
