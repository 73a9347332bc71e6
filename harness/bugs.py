"""The bugs of harness/exercise.py. Spoilers: do the exercises first.

Each is one exact change of one file. `old` occurs there once (a test looks), so that a change of
the file cannot make an exercise mean something else. The receipt of `run` catches each.
"""

from typing import NamedTuple

# A model that trains in a second. SGD, because AdamW hides a gradient of the wrong scale
SMALL = "--layers 2 --heads 2 --width 32 --context 16 --batch 8 --steps 2 --dtype float64"
SMALL += " --optimizer sgd --lr 0.3 --data harness/data.py --device cpu --timeout 60"
LEVELS = ("easy", "medium", "hard")


class Bug(NamedTuple):
    """An exercise. The learner sees file, level and run; then the hint; then the rest."""

    file: str
    level: str
    run: str  # the script and its flags; SMALL is added for those that train
    old: str
    new: str
    hint: str
    why: str  # what is wrong, and what it does
    seen: str  # the public thread where it happened


GITHUB = "https://github.com/"

BUGS = [
    # --- collectives.py
    Bug(
        "collectives.py",
        "easy",
        "collectives.py --nproc 2 --size 10KB --device cpu",
        "arriving = chunks[(rank + step + 2) % n]",
        "arriving = chunks[(rank + step + 1) % n]",
        "Draw the ring of three ranks after the first round: which chunk must each pass on?",
        "The reduce-scatter adds what arrives to the chunk that it has just sent, one place off. So"
        " the sums mix chunks.",
        GITHUB + "Xilinx/ACCL/pull/37",
    ),
    Bug(
        "collectives.py",
        "hard",
        "collectives.py --nproc 3 --size 10KB --device cpu",
        "    chunks = x.tensor_split(wire.size)\n"
        "    await ring_reduce_scatter(wire, chunks, combine)\n",
        "    chunks = [x]\n"
        "    left, right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size\n"
        "    passed_on, arriving = x.clone(), x.clone()\n"
        "    for _ in range(wire.size - 1):\n"
        "        await wire.exchange({left: passed_on}, {right: arriving})\n"
        "        combine(x, arriving, out=x)\n"
        "        passed_on, arriving = arriving, passed_on\n"
        "    chunks = [x[:0]] * wire.size\n",
        "Are the sums wrong, or what they cost? Count the bytes that a rank sends in a round.",
        "Each rank passes whole tensors around the ring and adds them up. The sums are right, but a"
        " rank sends (N-1) S bytes in place of 2 (N-1)/N S. Only a count of bytes shows it.",
        GITHUB + "callummcdougall/ARENA_3.0/pull/407",
    ),
    # --- ddp.py
    Bug(
        "ddp.py",
        "easy",
        "ddp.py --nproc 2",
        "part = model(tokens, targets=targets, count=run.count, samples=samples)",
        "part = model(tokens, targets=targets, samples=samples)",
        "What divides the sum of a micro-batch's losses, and what must it be?",
        "Each micro-batch's loss is divided by its own number of tokens, and the means are added"
        " up: ranks x micro-batches times too much. With equal pieces it is a factor. With pieces"
        " of different sizes the tokens of short ones weigh more.",
        GITHUB + "huggingface/transformers/issues/24725",
    ),
    Bug(
        "ddp.py",
        "easy",
        "ddp.py --nproc 2",
        "            work.wait()\n",
        "            work.wait()\n"
        "        for bucket in self.buckets:\n"
        "            bucket.flat /= dist.get_world_size(self.group)\n",
        "The loss was divided by the number of tokens in the whole batch. Is anything left to do?",
        "The gradients are averaged over ranks, although the loss is divided by the tokens of all"
        " ranks already. AdamW hides the factor, as it does not depend on the gradient's scale.",
        GITHUB + "pytorch/torchtitan/pull/2323",
    ),
    Bug(
        "ddp.py",
        "medium",
        "ddp.py --nproc 2",
        "p.grad = piece.view_as(p)",
        "p.grad = piece.view_as(p).clone()",
        "Which memory does the all-reduce sum, and which does the optimizer read?",
        "p.grad is no view of its bucket any more. Backward adds to p.grad, the all-reduce sums the"
        " bucket's zeros, and each rank steps on its own gradient.",
        GITHUB + "facebookresearch/fairscale/issues/354",
    ),
    # --- zero.py
    Bug(
        "zero.py",
        "easy",
        "zero.py --nproc 2 --stage 1",
        "            work.wait()\n            self._keep_shard(bucket)\n",
        "            self._keep_shard(bucket)\n",
        "async_op=True returns a handle. What must happen before the result is read?",
        "Nobody waits for the reduce-scatter. The optimizer reads the shard before the sum is"
        " there.",
        GITHUB + "OpenNMT/OpenNMT-py/issues/2295",
    ),
    Bug(
        "zero.py",
        "medium",
        "zero.py --nproc 2 --stage 2",
        "self.gradient += self.full[self.own]",
        "self.gradient.copy_(self.full[self.own])",
        "Run it with --microbatches 1: does it still fail?",
        "Stage 2 reduces in every micro-batch. The shard is overwritten each time, so only the last"
        " micro-batch trains.",
        GITHUB + "allenai/open-instruct/pull/1498",
    ),
    Bug(
        "zero.py",
        "medium",
        "zero.py --nproc 2 --stage 2",
        "        if self.stage > 0:\n            dist.all_reduce(total, group=self.group)\n",
        "",
        "Gradients are right. Which number is made of all of them?",
        "The norm is of this rank's shards alone. Each rank clips by another number, so the shards"
        " of one parameter are scaled differently.",
        GITHUB + "pytorch/xla/pull/4796",
    ),
    # --- tensor_parallel.py
    Bug(
        "tensor_parallel.py",
        "easy",
        "tensor_parallel.py --nproc 2",
        "        y = self.leave(F.linear(x, self.weight))\n"
        "        return y if self.bias is None else y + self.bias  # the bias once, after g\n",
        "        return self.leave(F.linear(x, self.weight, self.bias))\n",
        "Biases start at zero. Which step is the first to differ, and what had changed by then?",
        "Every rank adds the bias to its partial sum, and g adds the partial sums: t biases in"
        " place of one. It shows from the second step on, because biases start at zero.",
        GITHUB + "awslabs/slapo/issues/10",
    ),
    Bug(
        "tensor_parallel.py",
        "medium",
        "tensor_parallel.py --nproc 2",
        "        dist.all_reduce(total, group=ctx.group)\n",
        "",
        "Which parameters are right: those after f in the model, or those before it?",
        "f does not add up the gradients in backward. Each rank has the gradient of its own part of"
        " the layer alone, so all that lies before f gets a partial sum.",
        GITHUB + "pytorch/torchtitan/pull/4054",
    ),
    Bug(
        "tensor_parallel.py",
        "medium",
        "tensor_parallel.py --nproc 2",
        "start, length, _ = span(parameter.shape[dim], rank, t)",
        "start, length, _ = span(parameter.shape[dim], 0, t)",
        "Compare the weights that the ranks start with.",
        "All ranks hold the first shard: half of the matrix twice, the other half never. Training"
        " goes on, with a smaller model than it should be.",
        GITHUB + "modelscope/ms-swift/pull/7944",
    ),
    Bug(
        "tensor_parallel.py",
        "hard",
        "tensor_parallel.py --nproc 2",
        "onehot = (~outside).to(softmax.dtype).unsqueeze(1)",
        "onehot = torch.ones_like(outside, dtype=softmax.dtype).unsqueeze(1)",
        "The loss is right. Its backward is softmax - onehot: who has the one?",
        "Every rank subtracts the target's one, although the target's logit lies on one rank alone."
        " The others subtract it from the first column of their shard.",
        GITHUB + "modelscope/ms-swift/pull/9947",
    ),
    # --- sequence_parallel.py
    Bug(
        "sequence_parallel.py",
        "medium",
        "sequence_parallel.py --nproc 2",
        "    mark_partial(model.parameters(), group)\n    return model\n",
        "    return model\n",
        "What do all wrong parameters have in common? Look at where they stand in a block.",
        "Norms, positions and the biases after g see this rank's tokens alone. Their gradients are"
        " partial sums, which nobody adds up.",
        GITHUB + "NVIDIA/Megatron-LM/issues/1446",
    ),
    Bug(
        "sequence_parallel.py",
        "hard",
        "sequence_parallel.py --nproc 2",
        "        return reduce_scatter(grad, ctx.group), None, None\n",
        "        rank, t = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)\n"
        "        return tensor_parallel.shard_tensor(grad, 1, rank, t), None, None\n",
        "f gathers tokens in forward. Other ranks have used them too: who tells this rank?",
        "Backward of the all-gather cuts this rank's tokens out of its own gradient. The other"
        " ranks' gradients of these tokens are lost. It should be a reduce-scatter.",
        GITHUB + "NVIDIA-NeMo/Automodel/pull/1260",
    ),
    # --- pipeline.py
    Bug(
        "pipeline.py",
        "easy",
        "pipeline.py --nproc 2 --microbatches 4",
        "return model[stage](x, targets=targets, count=run.count, samples=samples)",
        "return model[stage](x, targets=targets, samples=samples)",
        "By what factor is the loss off? What comes in that number?",
        "The last stage divides by the tokens of its micro-batch, and the schedule adds the"
        " micro-batches up: m times too much.",
        GITHUB + "pytorch/torchtitan/issues/2972",
    ),
    Bug(
        "pipeline.py",
        "easy",
        "pipeline.py --nproc 2 --microbatches 4",
        "            work.wait()\n            self.post(message.queue)\n",
        "            self.post(message.queue)\n",
        "What is in the buffer when the stage begins to compute?",
        "The stage takes the buffer before the message is there, and computes on whatever lay in"
        " that memory.",
        GITHUB + "NVIDIA/apex/pull/1373",
    ),
    Bug(
        "pipeline.py",
        "medium",
        "pipeline.py --nproc 2 --microbatches 4",
        "        reduce_tied(parameters)\n",
        "",
        "One matrix is on two ranks. Which one, and who uses it for what?",
        "The tied matrix gets one gradient on the first stage (embedding) and another on the last"
        " (output). Nobody adds them up: each copy takes its own step, and they drift apart.",
        GITHUB + "uw-syfi/piper/issues/13",
    ),
    # --- context_parallel.py
    Bug(
        "context_parallel.py",
        "medium",
        "context_parallel.py --nproc 2",
        "total = torch.logaddexp(lse_so_far, lse)",
        "total = torch.maximum(lse_so_far, lse)",
        "Two tiles have the denominators 3 and 5. What is the denominator of both together?",
        "The denominators of two tiles add up; their maximum is only the larger one. So the weights"
        " of all keys add up to more than one.",
        GITHUB + "jzhang38/EasyContext/issues/14",
    ),
    Bug(
        "context_parallel.py",
        "medium",
        "context_parallel.py --nproc 2",
        "return Tile(whole, slice(0, half), False)",
        "return Tile(whole, whole, False)",
        "Rank 1 of 2 holds the chunks 1 and 2, rank 0 the chunks 0 and 3. Who may see chunk 3?",
        "In a zigzag an earlier rank's second chunk is later than all queries of this rank. Here"
        " they see it: tokens read the future, and the loss may even look better.",
        GITHUB + "zhuzilin/ring-flash-attention/issues/54",
    ),
    Bug(
        "context_parallel.py",
        "hard",
        "context_parallel.py --nproc 2",
        "attend_backward(grad, q, kv_j, out, lse, tile)",
        "attend_backward(grad, q, kv, out, lse, tile)",
        "Forward is right. In backward keys and values go around the ring again: does it use them?",
        "Backward of every tile uses this rank's own keys and values, not those that have arrived."
        " The loss is right and nothing is NaN.",
        GITHUB + "huggingface/diffusers/issues/14265",
    ),
    # --- expert_parallel.py
    Bug(
        "expert_parallel.py",
        "easy",
        "expert_parallel.py --nproc 2",
        "    dist.all_reduce(flat, group=group)\n",
        "",
        "Each rank has other tokens. Which parameters are on all ranks?",
        "The gradients of routers, attention and norms are not summed over the ranks. Their copies"
        " drift apart, and a router sends tokens elsewhere on each rank.",
        GITHUB + "pytorch/torchtitan/issues/2387",
    ),
    Bug(
        "expert_parallel.py",
        "medium",
        "expert_parallel.py --nproc 2",
        "    parameters = replicated(parameters, group)\n    if not parameters:\n",
        "    for p in parameters:\n"
        "        if split_over(p, group):\n"
        "            p.grad /= dist.get_world_size(group)\n"
        "    parameters = replicated(parameters, group)\n"
        "    if not parameters:\n",
        "An expert has seen its tokens of the whole batch. By what was their loss divided?",
        "The experts' gradients are averaged over the ranks. They are complete already: the loss of"
        " each of their tokens was divided by the tokens of all ranks.",
        GITHUB + "deepspeedai/DeepSpeed/pull/6546",
    ),
    Bug(
        "expert_parallel.py",
        "hard",
        "expert_parallel.py --nproc 2",
        "combine.wait(sent) * weights.flatten()[order].unsqueeze(1)",
        "combine.wait(sent) * weights.detach().flatten()[order].unsqueeze(1)",
        "How does the loss reach the router? A choice of experts has no gradient.",
        "The router's weights are cut out of autograd's graph, and the balance loss, which travels"
        " with them, is lost too. The router never moves; the loss falls all the same.",
        GITHUB + "NVIDIA-NeMo/Automodel/pull/2995",
    ),
    # --- diloco.py
    Bug(
        "diloco.py",
        "easy",
        "diloco.py --nproc 2 --sync-every 1",
        "moved = [old.to(p.dtype).to(old) - p.detach().to(old) for p, old in self.pieces()]",
        "moved = [p.detach().to(old) - old.to(p.dtype).to(old) for p, old in self.pieces()]",
        "An optimizer subtracts what it takes for a gradient. Which way do the islands go?",
        "The outer gradient is new weights - old weights. So the outer optimizer steps away from"
        " where the islands have gone, and the loss rises.",
        GITHUB + "pytorch/torchtitan/pull/1507",
    ),
    Bug(
        "diloco.py",
        "medium",
        "diloco.py --nproc 2 --sync-every 2 --stream-delay 1 --steps 4",
        "p.copy_(old + keep * (p - old) if keep else old)",
        "torch.lerp(old, p, keep)",
        "The islands' old weights are right. Do their weights ever become them?",
        "torch.lerp returns the mix and changes nothing; the result is dropped. The outer optimizer"
        " steps, and each island trains on as if it were alone.",
        GITHUB + "meta-pytorch/torchft/pull/233",
    ),
    Bug(
        "diloco.py",
        "hard",
        "diloco.py --nproc 2 --sync-every 1 --outer-bits 4",
        "        if self.bits:\n            outer_gradient += part.error\n",
        "",
        "The first outer step is right. What does the second need that the first left behind?",
        "The error of a message is kept and never added to the next one. In 4 bits whatever is"
        " less than a fourteenth of its block's largest number is never sent at all.",
        GITHUB + "sands-lab/grace/issues/10",
    ),
    # --- model.py, train.py and what stands below and above the techniques
    Bug(
        "train.py",
        "easy",
        "train.py --pp 2 --sample 0 --eval-batches 1 --min-lr 0.3 --warmup 0",
        "splitting = [tp, pp]",
        "splitting = [tp]",
        "Gradients are right. Over which ranks is the model cut?",
        "The norm leaves out the other stages. Each stage clips by its own norm.",
        GITHUB + "pytorch/torchtitan/issues/596",
    ),
    Bug(
        "harness/optimizer.py",
        "medium",
        "tensor_parallel.py --nproc 2",
        "counted = [p.grad for p in parameters if is_first(p, groups)]",
        "counted = [p.grad for p in parameters]",
        "Some parameters are cut over the ranks, some are whole on each. How often do they count?",
        "Norms and biases that every rank holds are counted once a rank. The norm is too large, and"
        " clipping too strong: the more so, the more ranks there are.",
        GITHUB + "NVIDIA-NeMo/RL/pull/3788",
    ),
    Bug(
        "model.py",
        "medium",
        "ddp.py --nproc 2 --dropout 0.2",
        "            drop_key = hash64(samples.unsqueeze(1) + hash64(positions))  # (B, T)\n",
        "            rows = torch.arange(len(samples), device=samples.device)\n"
        "            drop_key = hash64(rows.unsqueeze(1) + hash64(positions))  # (B, T)\n",
        "Row 0 of rank 0 and row 0 of rank 1 are different rows of the batch. What do they share?",
        "The dropout mask depends on the row's number on its rank. So all ranks, micro-batches and"
        " steps drop the same elements.",
        GITHUB + "huggingface/transformers/issues/31412",
    ),
    Bug(
        "trainer/composed_zero.py",
        "hard",
        "train.py --dp 2 --pp 2 --zero 2 --sample 0 --eval-batches 1 --min-lr 0.3 --warmup 0",
        "        for bucket in self.trained:\n"
        "            for group in bucket.partial:\n"
        "                dist.all_reduce(bucket.gradient, group=group)\n",
        "",
        "The step has two sums over different groups: one over copies of a stage. And the other?",
        "The tied matrix is on the first and on the last stage, and ZeRO has cut both gradients"
        " over the data-parallel ranks. These shards must be added up over the two stages as well.",
        GITHUB + "NVIDIA/Megatron-LM/issues/844",
    ),
]
