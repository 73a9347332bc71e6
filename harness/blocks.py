"""How the blocks of a GPT run: compiled, or with activation checkpointing. Set before training."""

import torch
from torch.utils.checkpoint import checkpoint

import model as gpt


def recompute(model, kind):
    """Hold less of each block from forward to backward, for more work. No gradient changes.

        none       keep all that backward needs: 16 tensors (B, T, C) of a GPT-2 block
        selective  keep 10: norms and activation functions run again (Korthikanti et al. 2022,
                   section 5, arXiv:2205.05198, do so with scores; a flash kernel keeps none)
        block      keep 1, the input: the whole block runs again (Chen et al. 2016, 1604.06174)

    Selective wraps norm + qkv, norm + up, activation + down. Backward needs only the input of the
    product, so the second run stops before it. An `enter` that gathers does so again.
    A norm before two products (SwiGLU, a mixture) is kept, or the first would run twice.
    With block, all but the last product runs twice, and whatever the techniques send before it."""
    if kind not in ("none", "selective", "block"):
        raise ValueError(f"unknown kind {kind!r}: choose none, selective or block")
    model.run = run_checkpointed if kind == "block" else gpt.run_directly
    for module in model.blocks.modules():
        if isinstance(module, (gpt.Attention, gpt.MLP, gpt.Experts)):
            module.run = run_checkpointed if kind == "selective" else gpt.run_directly


def run_checkpointed(function, *inputs):
    """Activation checkpointing: keep the inputs, run the function again in backward."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model):
    """Have torch.compile fuse operations within each block. A mixture would compile anew each
    step, because the shapes of its experts' rows change."""
    # Else each layer would compile anew, because the sites of its dropouts differ
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)
