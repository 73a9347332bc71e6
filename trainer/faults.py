"""Find the parameter whose gradient is not finite."""

import functools


def first_nonfinite(model, step, batches):
    """The first of this rank's parameters, in the order of backward, whose gradient is not finite
    before it is added to other ranks' gradients. step(batches) runs the step's forward and backward
    again. Returns (name or None, where it is)."""
    found, handles = [], []

    def look(name, stage, gradient):
        if not gradient.isfinite().all():
            found.append((name, f", stage {stage}"))

    for stage, part in model.parts.items():
        for name, p in part.named_parameters():
            if p.requires_grad:
                handles.append(p.register_hook(functools.partial(look, name, stage)))
    step(batches)
    for handle in handles:
        handle.remove()
    return found[0] if found else (None, "")
