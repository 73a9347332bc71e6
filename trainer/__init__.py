"""What long runs of train.py need: checkpoints, Hugging Face folders, logs, sampling."""

import advanced  # its lessons have plain names
