"""model.py's GPT as the stages of a pipeline: each keeps some of the blocks. The first keeps the
embedding, the last the head. pipeline.py itself plays stages of any model."""

import torch.nn as nn


def split(make_model, layers, held, tied_group=None):
    """{stage: what is left of a GPT} for the stages in `held`. Layers keep their names.

    make_model(): the whole GPT, on the meta device; called once a stage. layers: each stage's range
    of layers. tied_group: the ranks of the first and the last stage. Each holds a copy of a tied
    matrix, and its gradient is a partial sum over them, which pipeline.reduce_tied completes."""
    parts, last = {}, len(layers) - 1
    for stage in held:
        model = parts[stage] = make_model()
        for name in list(model.blocks):
            if int(name) not in layers[stage]:
                del model.blocks[name]
        if model.config.tied and last == 0:
            model.embed.token.weight.used_twice = True  # see trainer/split_backward.py
        if model.config.tied and stage in (0, last) and not {0, last} <= set(held):
            if tied_group is None:
                raise ValueError("without tied_group the copies of a tied matrix drift apart")
            model.embed.token.weight.placement = {"partial": [tied_group]}
        if stage > 0:
            model.embed = None
        if stage < last:
            model.head = None
    return parts


class Stages(nn.Module):
    """The stages of a rank as one module. Both ends of a model share a tied matrix."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleDict({str(stage): part for stage, part in parts.items()})
        first = [part for part in parts.values() if part.embed is not None]
        final = [part for part in parts.values() if part.head is not None]
        if first and final and first[0].config.tied:
            final[0].head.out.weight = first[0].embed.token.weight

    def __getitem__(self, stage):
        return self.parts[str(stage)]

    def uses(self):
        """All stages' parameters. One that two stages use comes twice, like its gradients."""
        return [p for part in self.parts.values() for p in part.parameters()]

    def named(self):
        """(full name, parameter), each once."""
        names = {}
        for part in self.parts.values():
            names |= {p: name for name, p in part.named()}
        return [(name, p) for p, name in names.items()]
