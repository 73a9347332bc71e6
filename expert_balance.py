"""An even load for a mixture of experts: two losses and a bias of the router.

A router gives each token a score for each of E experts, and sends it to the k best. Nothing in the
model's loss keeps all tokens from the same few experts. Three remedies, each a field of the config:

balance_loss  factor of E sum_e f_e P_e: of a sequence's assignments the share f_e goes to expert e,
              whose mean score is P_e. For an even load it is 1, and 1 is the least. f has no
              gradient, so P falls where f is large (Fedus et al. 2021, arXiv:2101.03961; per
              sequence: DeepSeek-V3, arXiv:2412.19437)
z_loss        factor of the mean of logsumexp(logits)^2, which keeps logits small (Zoph et al. 2022,
              arXiv:2202.08906)
bias_rate     step of a bias, added to the scores for the choice only. After each step it goes up
              where the load was low (Wang et al. 2024, arXiv:2408.15664)

The losses act through gradients: the loss that the model reports is the cross-entropy alone. Like
that, both are sums over tokens, divided by target_count. So those of a batch's pieces add up.

    weights, chosen = ...                                     # of the router, (B, T, k)
    weights = balance(router, weights, chosen, scores, logits, target_count)
    ...                                                       # backward, the optimizer's step
    rebalance(model)                                          # once a step
"""

import torch


def balance(router, weights, chosen, scores, logits, target_count):
    """Returns the weights (B, T, k), as they are. Their backward counts the load, and runs the
    losses' backward. chosen (B, T, k): the experts' numbers. scores, logits (B, T, E)."""
    config, chosen = router.config, chosen.flatten(1)
    assigned = scores.new_zeros(len(scores), config.experts)  # (B, E)
    assigned.scatter_add_(1, chosen, scores.new_ones(chosen.shape))
    load = assigned.sum(0).long()

    def count(gradient):  # in backward: with recomputation a forward runs twice, a backward once
        router.load += load

    weights.register_hook(count)
    if config.balance_loss:
        loss = config.balance_loss * imbalance(router, scores, assigned) / target_count
        weights = AddLoss.apply(weights, loss)
    if config.z_loss:
        loss = config.z_loss * logits.logsumexp(-1).square().sum() / target_count
        weights = AddLoss.apply(weights, loss)
    return weights


def imbalance(router, scores, assigned):
    """tokens x E sum_e f_e P_e, added up over sequences."""
    experts, top_k = router.config.experts, router.config.top_k
    if router.config.scores == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    tokens = assigned.new_full((len(scores), 1), scores.shape[1])
    # One tensor: where a sequence is cut, that is one message
    sums = router.sum_over_sequence(torch.cat((assigned, scores.sum(1), tokens), dim=1))
    assigned, scores, tokens = sums.split((experts, experts, 1), dim=1)  # (B, E), (B, E), (B, 1)
    # f = assigned / (k tokens) and P = scores / tokens
    return (assigned.detach() * scores / tokens).sum() * experts / top_k


class AddLoss(torch.autograd.Function):
    """Returns x. In backward `loss` gets the gradient 1, as if it had been added to the model's
    loss, even on a pipeline stage without the head (Megatron-LM's MoEAuxLossAutoScaler). A
    GradScaler multiplies the model's loss, but not this one: give target_count / scale instead."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0])


@torch.no_grad()
def rebalance(model, sum_over_devices=None, step_taken=True):
    """After each step: move every router's bias by `bias_rate` towards an even load. A skipped step
    only zeroes the loads. sum_over_devices(load): in place, over the devices with other tokens."""
    for router in [module for module in model.modules() if hasattr(module, "choice_bias")]:
        if router.config.bias_rate and step_taken:
            if sum_over_devices is not None:
                sum_over_devices(router.load)
            load = router.load.to(router.choice_bias.dtype)
            router.choice_bias += router.config.bias_rate * (load.mean() - load).sign()
        router.load.zero_()
