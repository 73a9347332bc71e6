"""Dynamic loss scaling, without which float16 loses small gradients.

float16 has no number between 0 and 6e-8, and none above 65,504. So the loss is multiplied by a
scale before backward, and with it every gradient. The optimizer divides its own copies of the
gradients by the scale, in the masters' dtype. A gradient that is not finite was too large: the step
is skipped, and the scale is halved. After 2,000 steps in a row without that it is doubled, as in
torch.amp.GradScaler (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

All ranks decide alike without a message: they read the gradient's norm, which is the same on all of
them. Where the scale has come down to 1, or the loss itself is not finite, scaling is not to blame:
the run ends, as in other types (--skip-nan). GradScaler goes on for ever there.
"""

import math

import torch

SCALED = {"float16"}  # the types that need it


class LossScale:
    """A run's loss scale: `value`, 1 where no type needs it."""

    INITIAL, LEAST = 2.0**16, 1.0
    GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000

    def __init__(self, args, optimizer):
        self.enabled = not SCALED.isdisjoint((args.param_dtype, args.reduce_dtype))
        self.value = self.INITIAL if self.enabled else 1.0
        self.good_steps = 0  # since the scale changed
        if self.enabled:
            optimizer.optimizer.register_step_pre_hook(self.unscale_masters)

    def count(self, n):
        """What to divide the sum of losses by in place of n, the number of tokens, so that losses
        are `value` times larger. The routers' losses are divided by it too: they join in the middle
        of backward and have no part in the model's loss."""
        return n / self.value if self.enabled else n

    def unscale(self, named):
        """Divide the gradients of (name, parameter) pairs, which are copies, by the scale."""
        if self.enabled:
            self.divide(p for _, p in named)
        return named

    def unscale_masters(self, optimizer, *_):
        self.divide(p for group in optimizer.param_groups for p in group["params"])

    def divide(self, parameters):
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.value)

    def overflow(self, loss, norm):
        """A sentence where the scale was too large for a step with this loss and norm, numbers."""
        at_fault = math.isfinite(loss) and not math.isfinite(norm)
        if not at_fault or self.value <= self.LEAST:  # 1 where no type needs it
            return None
        where = f"beyond float16 at a loss scale of {self.value:,.0f}"
        return f"has gradients {where}: skipped, the scale is halved"

    def row(self):
        """Its part of a step's row in the log."""
        return {"loss_scale": self.value} if self.enabled else {}

    def update(self, taken):
        """After each step. taken: whether the optimizer took it."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if taken else 0
        if not taken:
            self.value = max(self.value * self.BACKOFF, self.LEAST)
        elif self.good_steps >= self.INTERVAL:
            self.value, self.good_steps = self.value * self.GROWTH, 0

    def state(self):
        """What a checkpoint keeps of it."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, saved):
        """Go on with a checkpoint's scale, if it has one."""
        if self.enabled and saved is not None:
            self.value, self.good_steps = saved["value"], saved["good_steps"]
