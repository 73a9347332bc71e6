"""Lessons for a second reading: torchrun --nproc_per_node=4 -m advanced.NAME

Each is a file to copy, like those of the top level, and imports the lessons that it builds on by
their plain names. Here those names work, too."""

import os
import sys

sys.path.append(os.path.dirname(__file__))
