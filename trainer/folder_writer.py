"""A Hugging Face folder, written so that it never loads half old and half new.

Without config.json neither transformers nor --init-from loads anything. So an old model's is
removed first, and the new one is written last, when all other files are on the disk.
"""

import json
import os
import pathlib

from trainer.checkpoint import sync, write, write_tensors


def model_in(folder):
    """The files of a model that a folder holds, by their paths: config.json, then weights."""
    folder = pathlib.Path(folder)
    return sorted([*folder.glob("config.json"), *folder.glob("*.safetensors*")])


def write_folder(folder, config, tensors, files, limit=1 << 30):
    """Write a model. config: config.json's content. tensors: (name, tensor) pairs, in files of at
    most `limit` bytes or of one tensor; one file at a time is in memory. files: {name: content} of
    other files. Raises OSError."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in model_in(folder):
        path.unlink()
        sync(folder)
    parts, file_of, total = [], {}, 0  # file_of: {tensor's name: number of its file}
    for shard in shards(tensors, limit):
        parts.append(folder / f"{len(parts)}.safetensors.partial")
        write_tensors(parts[-1], shard, {"format": "pt"})
        file_of |= dict.fromkeys(shard, len(parts))
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = ["model.safetensors"]
    else:
        where = {tensor: names[number - 1] for tensor, number in file_of.items()}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        files = files | {"model.safetensors.index.json": json.dumps(index, indent=1).encode()}
    for part, name in zip(parts, names):
        os.rename(part, folder / name)
    for name, content in files.items():
        write(folder / name, content)
    sync(folder)
    config = config | {"dtype": dtype, "torch_dtype": dtype}
    write(folder / "config.json", json.dumps(config, indent=1).encode())


def shards(tensors, limit):
    """Group (name, tensor) pairs into dicts of at most `limit` bytes, or of one tensor."""
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard
