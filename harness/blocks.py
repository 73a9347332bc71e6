"""How the blocks of a GPT run: compiled, or with activation checkpointing. Set before training."""

import collections
import functools
import operator

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
    """Hold less of each block from forward to backward, for more work (docs/memory.md). No gradient
    changes.

        none       keep all that backward needs: 16 tensors (B, T, C) of a GPT-2 block
        selective  keep 10: norms and activation functions run again (Korthikanti et al. 2022,
                   arXiv:2205.05198, section 5)
        half       keep 9: the block's input, attention's result and every second product's; all
                   else runs again (TorchTitan's `_apply_ac_to_transformer_block`, "op")
        block      keep 1, the input: the whole block runs again (Chen et al. 2016, 1604.06174)

    Selective wraps norm + qkv, norm + up, activation + down. Backward needs only the input of the
    product, so the second run stops before it. A norm before two products (SwiGLU, a mixture) is
    kept, or the first would run twice."""
    runs = {"half": run_half_again, "block": run_checkpointed}
    model.run_block = runs.get(kind, operator.call)
    for module in model.blocks.modules():
        for plain, selective in SELECTIVE.items():
            if isinstance(module, plain):
                module.__class__ = selective if kind == "selective" else plain


class SelectiveBlock(gpt.Block):
    """A block that runs norm + qkv again in backward, and norm + up if they stand alone."""

    def forward(self, x, rope=None, drop_key=None, target_count=None):
        # x is an argument: a closure would see the next x when it runs again
        def project(x):
            return self.attn.qkv(self.attn.enter(self.attn_norm(x)))

        def expand(x):
            return self.mlp.up(self.mlp.enter(self.mlp_norm(x)))

        qkv = run_checkpointed(project, x)
        x = x + self.attn_drop(self.attn.attend(qkv, rope), drop_key)
        if isinstance(self.mlp, gpt.MLP) and self.mlp.gate is None:
            y = self.mlp.finish(run_checkpointed(expand, x))
        else:
            y = self.mlp(self.mlp_norm(x), target_count)
        return x + self.mlp_drop(y, drop_key)


class SelectiveMLP(gpt.MLP):
    """An MLP that runs its activation again in backward."""

    def finish(self, up, gate=None):
        return run_checkpointed(super().finish, up, gate)


class SelectiveExperts(gpt.Experts):
    """Experts that run their activation again in backward."""

    def finish(self, up, gate, ends):
        return run_checkpointed(super().finish, up, gate, ends)


SELECTIVE = {gpt.Block: SelectiveBlock, gpt.MLP: SelectiveMLP, gpt.Experts: SelectiveExperts}


def run_checkpointed(function, *inputs):
    """Activation checkpointing: keep the inputs, run the function again in backward."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def run_half_again(block, *inputs):
    """Activation checkpointing that also keeps what attention's kernel returns, and the first, the
    third, ... product. Of a ring's tiles only the first: n ranks have n tiles."""
    counts = collections.Counter()  # older torch asks the policy in the second run too

    def policy(context, operation, *args, **options):
        keep = False
        if operation.name().startswith("aten::_scaled_dot_product"):
            counts["attention", context.is_recompute] += 1
            keep = counts["attention", context.is_recompute] == 1
        elif getattr(operation, "overloadpacket", None) in PRODUCTS:
            counts["product", context.is_recompute] += 1
            keep = counts["product", context.is_recompute] % 2 == 1 and not is_added(block, args)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(block, *inputs, context_fn=contexts, **options)


def is_added(block, args):
    """Whether a product of `args` is what attention or an MLP adds to x. Backward does not need
    it, and tensor parallelism sums it in place: the second run would add up sums, silently."""

    def place(t):
        return t.untyped_storage()._cdata, t.storage_offset()

    linear = [m for name, m in block.named_modules() if name.endswith(("proj", "down"))]
    added = [place(module.weight) for module in linear]
    return any(place(t) in added for t in args if isinstance(t, torch.Tensor))


def compile_blocks(model):
    """Have torch.compile fuse operations within each block. A mixture would compile anew each
    step, because the shapes of its experts' rows change."""
    # Else each layer would compile anew, because the sites of its dropouts differ
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)
