"""A Hugging Face folder, written so that it never loads half old and half new.

Weights are first written under names that nobody loads (*.partial). When all are on the disk,
config.json is removed, without which neither transformers nor --init-from loads anything. Then the
old weights go, in whatever form they are, the new ones get their names, and config.json comes last.
A crash leaves the old folder as it was, or one that is refused because config.json is missing.
"""

import json
import os
import pathlib

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")
WEIGHTS += ("pytorch_model.bin.index.json", "tf_model*.h5", "flax_model*.msgpack")


def weights_in(folder):
    """The weights that a folder holds, in any form that transformers loads, by their paths."""
    return sorted(path for pattern in WEIGHTS for path in pathlib.Path(folder).glob(pattern))


class FolderWriter:
    """add(name, tensor) of each tensor, then finish(config, files)."""

    def __init__(self, folder, limit):
        self.folder, self.limit = pathlib.Path(folder), limit
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.partial"):
            path.unlink()  # of an export that was killed
        self.files = []  # of each file the names of its tensors
        self.current, self.current_bytes, self.total_bytes = {}, 0, 0
        umask = os.umask(0)
        os.umask(umask)
        self.mode = 0o666 & ~umask

    def add(self, name, tensor):
        """Add a tensor to the current file. A file has at most `limit` bytes, or one tensor."""
        if self.current_bytes + tensor.nbytes > self.limit:
            self.flush()
        self.current[name] = tensor.contiguous()
        self.current_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self):
        """Write the current file."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if self.current:
            self.files.append(list(self.current))
            path = self.partial(len(self.files))
            try:
                save_file(self.current, path, metadata={"format": "pt"})
            except SafetensorError as e:  # a full disk, for one
                raise OSError(str(e)) from e
            path.chmod(self.mode)  # save_file lets nobody else read it
            self.sync(path)
            self.current, self.current_bytes = {}, 0

    def partial(self, number):
        return self.folder / f"weights-{number}.partial"

    def sync(self, path):
        """Wait until a file, or a folder's names, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def finish(self, config, files=()):
        """Make the folder one of these weights. config: config.json's content. files: paths of
        other files, which are copied."""
        self.flush()
        contents = {path.name: path.read_bytes() for path in files}
        (self.folder / "config.json").unlink(missing_ok=True)
        self.sync(self.folder)
        for path in weights_in(self.folder):
            path.unlink()
        names = ["model.safetensors"]
        if len(self.files) > 1:
            total = len(self.files)
            names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
        where = {}
        for i, (name, tensors) in enumerate(zip(names, self.files), 1):
            os.replace(self.partial(i), self.folder / name)
            where |= dict.fromkeys(tensors, name)
        if len(names) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": where}
            contents["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
        for name, content in contents.items():
            self.write_whole(name, content)
        self.sync(self.folder)
        self.write_whole("config.json", json.dumps(config, indent=1).encode())
        self.sync(self.folder)

    def write_whole(self, name, content):
        """Write a file of its own under another name, then give it its name."""
        temporary = self.folder / f"{name}.partial"
        temporary.write_bytes(content)
        self.sync(temporary)
        os.replace(temporary, self.folder / name)
