"""A Hugging Face folder, written so that it never loads half old and half new.

All files are first written beside, into FOLDER/export.partial. When they are on the disk,
config.json is removed, without which neither transformers nor --init-from loads anything. Then the
old weights go, in whatever form they are, the new files move in, and config.json comes last. A
crash leaves the old folder as it was, or one that is refused because config.json is missing.
"""

import json
import os
import pathlib
import shutil

import safetensors.torch

from trainer.checkpoint import sync, write

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")
WEIGHTS += ("pytorch_model.bin.index.json", "tf_model*.h5", "flax_model*.msgpack")


def weights_in(folder):
    """The weights that a folder holds, in any form that transformers loads, by their paths."""
    return sorted(path for pattern in WEIGHTS for path in pathlib.Path(folder).glob(pattern))


class FolderWriter:
    """add(name, tensor) of each tensor, then finish(config, files)."""

    def __init__(self, folder, limit=1 << 30):
        self.folder, self.limit = pathlib.Path(folder), limit
        self.partial = self.folder / "export.partial"
        shutil.rmtree(self.partial, ignore_errors=True)  # of an export that was killed
        self.partial.mkdir(parents=True)
        self.files = []  # of each file the names of its tensors
        self.current, self.current_bytes, self.total_bytes = {}, 0, 0

    def add(self, name, tensor):
        """Add a tensor to the current file. A file has at most `limit` bytes, or one tensor."""
        if self.current and self.current_bytes + tensor.nbytes > self.limit:
            self.flush()
        self.current[name] = tensor.contiguous()
        self.current_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self):
        """Write the current file."""
        content = safetensors.torch.save(self.current, metadata={"format": "pt"})
        write(self.partial / f"{len(self.files)}", content)
        self.files.append(list(self.current))
        self.current, self.current_bytes = {}, 0

    def finish(self, config, files):
        """Make the folder one of these weights. config: config.json's content. files: {name:
        content} of other files."""
        self.flush()
        total, where = len(self.files), {}
        for i, tensors in enumerate(self.files):
            name = f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            if total == 1:
                name = "model.safetensors"
            os.rename(self.partial / f"{i}", self.partial / name)
            where |= dict.fromkeys(tensors, name)
        if total > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": where}
            files = files | {"model.safetensors.index.json": json.dumps(index, indent=1).encode()}
        files = files | {"config.json": json.dumps(config, indent=1).encode()}
        for name, content in files.items():
            write(self.partial / name, content)
        (self.folder / "config.json").unlink(missing_ok=True)
        sync(self.folder)
        for path in weights_in(self.folder):
            path.unlink()
        for path in sorted(self.partial.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, self.folder / path.name)
            sync(self.folder)
        self.partial.rmdir()
