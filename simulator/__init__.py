"""A training step without devices: what it holds, how long it takes, which layout to choose."""

import advanced  # its lessons have plain names
