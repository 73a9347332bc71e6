"""What train.py adds to zero.py and fsdp.py: masters in the memory of the host, and gathers of new
weights that the next forward hides."""

import torch

from zero import ShardedBucket, await_weights


class OffloadedBucket(ShardedBucket):
    """Its master, and so the optimizer's states, are in the host's memory."""

    def make_master(self, values):
        if not self.trainable:
            return self.shard
        master = values.to("cpu", copy=True)
        # Pinned, so that the host need not wait for copies; without a GPU nothing is
        return master if values.device == master.device else master.pin_memory()

    def give_gradients(self):
        on_device = self.gradient_shard
        self.gradient_shard = on_device.to(self.master, non_blocking=True)
        if on_device.is_cuda:
            # Until the gradients are on the host, and the last step's weights have left it
            torch.cuda.synchronize()
        super().give_gradients()
        self.gradient_shard = on_device


def wait_in_forward(zero, modules):
    """For stages 1 and 2: step() no longer waits for the gathers of new weights. Each module, such
    as those of fsdp.default_units(model), waits for its own when its forward begins. Before that
    nobody else may read these weights, or write the masters."""
    waiting = {p for module in modules for p in module.parameters()}
    # A weight outside of the modules is read without a wait: step() waits for its bucket
    awaited = [b for b in zero.buckets if not waiting.issuperset(b.parameters)]

    def update_weights(buckets=None):
        for bucket in reversed(buckets or zero.buckets):
            bucket.start_update()
        await_weights(awaited)

    zero.update_weights = update_weights
    for module in modules:
        parameters = set(module.parameters())
        used = [b for b in zero.buckets if not parameters.isdisjoint(b.parameters)]
        module.register_forward_pre_hook(lambda *_, used=used: await_weights(used))

    def await_all(*_):  # before whatever else reads or writes weights
        await_weights(zero.buckets)

    zero.optimizer.register_step_pre_hook(await_all)
    for module in zero.model.modules():
        module.register_state_dict_pre_hook(await_all)
        module.register_load_state_dict_pre_hook(await_all)
