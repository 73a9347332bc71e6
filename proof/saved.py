"""What a part of a model keeps in memory from forward to backward, counted."""

import torch

from proof.ledger import storage_bytes


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
