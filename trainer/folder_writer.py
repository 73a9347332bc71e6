"""A Hugging Face folder, written so that it never loads half old and half new.

All files are first written beside, into FOLDER/export.partial. When they are on the disk,
config.json is removed, without which neither transformers nor --init-from loads anything. Then the
new files move in, and config.json comes last. A crash leaves the old folder as it was, or one that
is refused because config.json is missing.
"""

import json
import os
import pathlib
import shutil

import safetensors.torch

from trainer.checkpoint import shards, sync, write


def model_in(folder):
    """The files of a model that a folder holds: config.json or weights, by their paths."""
    folder = pathlib.Path(folder)
    return sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])


def write_folder(folder, config, tensors, files, limit=1 << 30):
    """Write a model. config: config.json's content. tensors: (name, tensor) pairs, in files of at
    most `limit` bytes or of one tensor; one file at a time is in memory. files: {name: content} of
    other files. Raises OSError."""
    folder = pathlib.Path(folder)
    partial = folder / "export.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    tensors_of, total_bytes = [], 0  # tensors_of: of each file their names
    for i, shard in enumerate(shards(tensors, limit)):
        write(partial / f"{i}", safetensors.torch.save(shard, metadata={"format": "pt"}))
        tensors_of.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
    where = {}
    for i, names in enumerate(tensors_of):
        file = f"model-{i + 1:05d}-of-{len(tensors_of):05d}.safetensors"
        if len(tensors_of) == 1:
            file = "model.safetensors"
        os.rename(partial / f"{i}", partial / file)
        where |= dict.fromkeys(names, file)
    if len(tensors_of) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        files = files | {"model.safetensors.index.json": json.dumps(index, indent=1).encode()}
    config = config | {"dtype": dtype, "torch_dtype": dtype}
    files = files | {"config.json": json.dumps(config, indent=1).encode()}
    for name, content in files.items():
        write(partial / name, content)
    (folder / "config.json").unlink(missing_ok=True)
    sync(folder)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(path, folder / path.name)
        sync(folder)
    partial.rmdir()
