"""Find the parameter whose gradient is not finite."""


def blame(model, passes):
    """The first of this rank's parameters, in the order of backward, whose gradient is not finite
    before it is added to other ranks' gradients. passes() plays the step's forward and backward
    again. Returns (name or None, where it is)."""
    found = []

    def watch(name, where):
        def look(gradient):
            if not gradient.isfinite().all():
                found.append((name, where))

        return look

    handles = []
    for stage, part in model.parts.items():
        for name, p in part.named_parameters():
            if p.requires_grad:
                handles.append(p.register_hook(watch(name, f", stage {stage}")))
    passes()
    for handle in handles:
        handle.remove()
    return found[0] if found else (None, "")
