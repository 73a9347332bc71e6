"""What a part of a model keeps in memory from forward to backward, counted."""

import torch

from harness.formulas import activation_bytes
from harness.ledger import storage_bytes


def saved_bytes(model, block, *args, **kwargs):
    """Bytes that the submodule `block` keeps for backward in model(*args, **kwargs). Parameters do
    not count."""
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    # Autograd calls `note` for each tensor that it saves while the block runs
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    before = block.register_forward_pre_hook(lambda *_: hooks.__enter__())
    after = block.register_forward_hook(lambda *_: hooks.__exit__())
    model(*args, **kwargs)
    before.remove()
    after.remove()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return storage_bytes(t for t in saved if t.untyped_storage().data_ptr() not in parameters)


def kept_by_a_block(run, model, expected):
    """A line for the receipt: what the first block of this rank's model keeps, beside the formula's
    `expected` bytes, and beside tensor parallelism and one process."""
    tokens, _, samples = run.microbatches(0)[0]
    block, element = next(iter(model.blocks.values())), run.dtype.itemsize
    tensor = tokens.numel() * run.config.width * element  # bytes of one (B, T, C)
    kept = saved_bytes(model, block, tokens, samples=samples) / tensor
    tensor_parallel, one = (
        activation_bytes(run.config, len(tokens), element, ranks) / tensor
        for ranks in (run.world, 1)
    )
    return (
        f"a block keeps {kept:.2f} B T C e for backward, counted; formula {expected / tensor:.2f}, "
        f"tensor parallelism {tensor_parallel:.2f}, one process {one:.2f}"
    )
