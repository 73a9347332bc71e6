"""How the blocks of a GPT run: compiled, or with activation checkpointing. Set before training."""

import collections
import functools

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import model as gpt

RECOMPUTATIONS = ("none", "selective", "half", "block")
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten._grouped_mm)


def recompute(model, kind):
    """Hold less of each block from forward to backward, for more work (docs/use/memory.md). No
    gradient changes. Call it once.

        none       keep all that backward needs: 16 tensors (B, T, C) of a GPT-2 block
        selective  keep 10: norms and activation functions run again (Korthikanti et al. 2022,
                   arXiv:2205.05198, section 5)
        half       keep 9: the block's input, attention's result and every second product's; all
                   else runs again (TorchTitan's `_apply_ac_to_transformer_block`, "op")
        block      keep 1, the input: the whole block runs again (Chen et al. 2016, 1604.06174)
    """
    if kind in ("half", "block"):
        model.run_block = run_half_again if kind == "half" else run_checkpointed
    for module in model.blocks.modules() if kind == "selective" else ():
        if type(module) is gpt.Block:  # a norm after a product is not before a single one
            module.forward = functools.partial(run_selectively, module)
        elif hasattr(module, "finish"):  # of an MLP or Experts: it has the activation function
            module.finish = functools.partial(run_checkpointed, module.finish)


def run_checkpointed(function, *inputs, **options):
    """Activation checkpointing: keep the inputs, run the function again in backward."""
    options |= {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(function, *inputs, **options)


def run_selectively(block, x, batch):
    """The forward of a block that runs again, in backward, each norm before a single product."""
    qkv = run_norm_again(block.attn_norm, block.attn.enter, block.attn.qkv, x)
    x = x + block.attn_drop(block.attn.attend(qkv, batch), batch.drop_key)
    if isinstance(block.mlp, gpt.MLP) and block.mlp.gate is None:
        y = block.mlp.finish(run_norm_again(block.mlp_norm, block.mlp.enter, block.mlp.up, x))
    else:
        y = block.mlp(block.mlp_norm(x), batch)
    return x + block.mlp_drop(y, batch.drop_key)


def run_norm_again(norm, enter, layer, x):
    """A linear layer saves its input before its product, and the second run ends there. But
    tensor_overlap.py saves after it: there the second run gets the product from the first one."""
    options = {}
    if hasattr(enter, "gather_again") and not torch.compiler.is_compiling():
        enter.gather_again = False  # the second run gathers
        products = [aten.mm.default, aten.addmm.default]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, products)
    return run_checkpointed(lambda x: layer(enter(norm(x))), x, **options)


def run_half_again(block, *inputs):
    """Activation checkpointing that also keeps what attention's kernel returns, and the first, the
    third, ... product. Of a ring's tiles only the first: n ranks have n tiles."""
    counts = collections.Counter()

    def policy(context, operation, *args, **options):
        keep, again = False, context.is_recompute  # older torch asks in the second run too
        if operation.name().startswith("aten::_scaled_dot_product"):
            counts["attention", again] += 1
            keep = counts["attention", again] == 1
        elif getattr(operation, "overloadpacket", None) in PRODUCTS:
            counts["product", again] += 1
            keep = counts["product", again] % 2 == 1 and not is_added(block, args)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return run_checkpointed(block, *inputs, context_fn=contexts)


def is_added(block, args):
    """Whether a product of `args` is what attention or an MLP adds to x. Backward does not need
    it, and tensor parallelism sums it in place: the second run would add up sums, silently."""

    def place(t):
        return t.untyped_storage()._cdata, t.storage_offset()

    modules = block.named_modules()
    added = [place(m.weight) for name, m in modules if name.endswith(("proj", "down"))]
    return any(place(t) in added for t in args if isinstance(t, torch.Tensor))


def compile_blocks(model):
    """Have torch.compile fuse a block's operations. A mixture's shapes would change each step."""
    # Else each layer would compile anew, because the sites of its dropouts differ
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)
