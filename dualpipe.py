"""DualPipe hides the experts' all-to-alls: while a micro-batch's tokens travel, another computes.

In a mixture of experts (expert_parallel.py) each layer waits for four all-to-alls: tokens go to
their experts and come back, in forward and in backward. Here a rank runs the backward of one
micro-batch and the forward of another at the same time. ~ is a message on its way:

    backward    ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~ attention
    forward     attention ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~

Split     As in pipeline.py and expert_parallel.py. A rank holds two stages, near the pipeline's
          start and near its end, so that it has a forward and a backward to pair all the time.
Order     The two run in two threads, but one at a time: before it waits for a message a thread
          calls turn(), and the other goes on. So all ranks do all work and send all messages in
          one order, that of the program, and both threads can send through the same groups. On a
          GPU both queue work on one stream, in that order.
Sent      What the schedule sends without overlap, to the byte.
Hidden    The waits in pairs. The first forwards and the last backwards have no partner: with p
          ranks and m micro-batches 1 - (5p - 1) / 4m of all waits are in pairs. Not hidden: the
          exchange of the numbers of tokens.
Limits    Without experts there is nothing to hide: take zb-v. Only DualPipe's schedule has pairs.
          Both micro-batches' temporary tensors are in memory at once.

    torchrun --nproc_per_node=4 dualpipe.py             python dualpipe.py --in-turns

DeepSeek-V3, arXiv:2412.19437, section 3.2.1. The schedule: docs/learn/pipelines.md.
"""

import functools
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from pipeline import Mailbox, Pipeline
from zero_bubble import SplitSchedule

# --- the whole idea: two calls that take turns


class Pair:
    """Two calls, each in a thread. The first runs until it calls turn() or ends, then the second
    does, and so on. The second runs in the thread that makes the pair.

    In a pipeline the backward is first. It begins by sending, and while its gradients travel the
    forward computes. If the forward were first, it would compute with nothing on its way, then
    both would send, and both wait."""

    def __init__(self, *calls):
        self.calls, self.results, self.errors = calls, [None, None], []
        self.may_run = threading.Semaphore(1), threading.Semaphore(0)
        self.second_thread = threading.current_thread()
        self.one_ended = False

    def run(self, i):
        """Run call 0 or 1, in its thread, when its turn comes."""
        try:
            self.may_run[i].acquire()
            self.stop_if_failed()
            self.results[i] = self.calls[i]()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.one_ended = True
            self.may_run[1 - i].release()

    def turn(self):
        """Let the other call go on, up to its own turn(). Returns whether there is another one."""
        both_run = not self.one_ended
        if both_run:
            # All other threads count as the first's: on GPUs autograd runs a backward in its own
            i = 1 if threading.current_thread() is self.second_thread else 0
            self.may_run[1 - i].release()
            self.may_run[i].acquire()
        self.stop_if_failed()
        return both_run

    def stop_if_failed(self):
        if self.errors:
            raise RuntimeError("the other call of this pair has failed")


class Turns:
    """Runs two calls alternately, the first in a thread of its own. Messages travel meanwhile.

        turns = Turns()

        def layer(x):                              # attention and experts: any two functions
            rows = attention(x)
            arriving = torch.empty_like(rows)
            work = dist.all_to_all_single(arriving, rows, group=group, async_op=True)
            turns.turn()                           # the other call goes on, up to its turn()
            work.wait()
            return experts(arriving)

        y1, y2 = turns.overlap(lambda: layer(x1), lambda: layer(x2))

    To overlap a backward, call turn() in the all-to-all's backward too, as expert_parallel.py does.
    Ranks that make the same calls send the same messages in the same order.

    The first call has this thread's dispatch modes, device and stream, but not its no_grad,
    autocast or torch.device. On a GPU the second must not run a backward: autograd has one thread
    for a device, which may be waiting in the first's turn()."""

    def __init__(self):
        self.pair = None  # while two calls run
        self.waits = self.switches = 0  # calls of turn(), and those that let the other call go on

    def turn(self):
        """Call it before each wait for a message. Outside of overlap() it does nothing."""
        self.waits += 1
        if self.pair is not None and self.pair.turn():
            self.switches += 1

    def overlap(self, first, second):
        """[first(), second()]. An error in one ends the other at its next turn(), and is raised."""
        pair = self.pair = Pair(in_this_context(first), second)
        thread = threading.Thread(target=pair.run, args=(0,), daemon=True)
        try:
            thread.start()
            pair.run(1)
            thread.join()
        except BaseException as error:  # Ctrl-C: the first call must not go on
            pair.errors.append(error)
        finally:
            if not thread.is_alive():
                self.pair = None
        if pair.errors:
            error, pair.errors = pair.errors[0], [None]  # still true, but keeps no tensors
            raise error
        return pair.results


def in_this_context(call):
    """`call`, for another thread: with those settings of this one that torch keeps per thread."""
    modes = _get_current_dispatch_mode_stack()  # FLOP counters, fake tensors
    threads = torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def called():
        torch.set_num_threads(threads)
        for mode in modes:  # not `with mode`, which may begin to count anew
            _push_mode(mode)
        if stream is not None:
            torch.cuda.set_stream(stream)  # sets the device too
        return call()

    return called


# --- pairs of a schedule


class PairedSchedule(SplitSchedule):
    """A schedule in which a forward and the backward after it are a pair, if they are of different
    stages: they start when both have their messages, and send when both are done."""

    def steps(self, rank):
        """A rank's actions in tuples of those that start together: one, or backward and forward."""
        row, steps = list(self[rank]), []
        while row:
            both = row[:2]
            is_pair = [a.kind for a in both] == ["F", "B"] and both[0].stage != both[1].stage
            steps.append((both[1], both[0]) if is_pair else (both[0],))
            row = row[len(steps[-1]) :]
        return steps


# --- the executor


class DualPipe(Pipeline):
    """A Pipeline that overlaps the pairs of its schedule. pipeline.py explains its arguments.

        turns = Turns()
        # In each layer, as in expert_parallel.py:
        dispatch = ExpertDispatch(expert_counts(E, N), ep_group, before_wait=turns.turn)

        schedule = PairedSchedule(find_schedule("dualpipev", ranks, microbatches).rows)
        pipeline = DualPipe(schedule, forward, (b, T, C), dtype, device, links, turns=turns)
        losses = pipeline.run()

    All ranks of an ep_group have the same place in the pipeline: they run the same pairs. `around`
    is entered once for a pair, with its backward; the forward runs inside it."""

    def __init__(self, *args, turns, **options):
        super().__init__(*args, **options)
        self.turns = turns

    def run(self):
        runner = self.schedule.runner(self.forward, self.row)
        mailbox, losses = Mailbox(self), []
        for step in self.schedule.steps(dist.get_rank(self.links[0])):
            calls = []
            for action in step:
                calls.append(functools.partial(runner.run, action, mailbox.receive(action)))
            with self.around(step[0]):
                results = self.turns.overlap(*calls) if len(calls) == 2 else [calls[0]()]
            for action, result in zip(step, results):
                mailbox.send(action, result)
                if action.kind == "F" and action.stage == self.schedule.last:
                    losses.append(result)
            del calls, results, result  # frees them while this rank waits
        mailbox.close()
        return losses


# --- demo ---

import expert_parallel
import harness
import proof
import receipts.dualpipe
import receipts.pipeline
from pipeline import open_links
from receipts.train import ExpertRows
from zero_bubble import find_schedule


def main():
    parser = harness.parser(__doc__, experts=4, microbatches=8)
    g = parser.add_argument_group("DualPipe")
    why = "ranks that share the experts of a stage, each with sequences of its own (default: 2)"
    g.add_argument("--ep", **harness.POSITIVE, help=why)
    g.add_argument("--in-turns", action="store_true", help="run pairs one after the other")
    harness.flags.gone(g, "--plot", "docs/learn/dualpipe.md has the schedule drawn")
    args = parser.parse_args()
    config = harness.configure(args)
    check = functools.partial(receipts.dualpipe.check, find_schedule, args, config)
    proof.launch(demo, args, check=check)


def demo(run):
    args, config = run.args, run.config
    mesh = torch.arange(run.world).view(-1, args.ep)  # a row: ranks with the same two stages

    def own_group(rows):
        return dist.new_subgroups_by_enumeration(rows.tolist())[0]

    ep, pp, links = own_group(mesh), own_group(mesh.T), [own_group(mesh.T) for _ in range(4)]
    run.groups(ep=ep, pp=pp, down=links[:2], up=links[2:])
    kind = SplitSchedule if args.in_turns else PairedSchedule
    schedule = kind(find_schedule("dualpipev", len(mesh), args.microbatches).rows)
    open_links(links, schedule, run.device)
    layers = receipts.pipeline.stage_layers(config, schedule.last + 1)
    parts = harness.split(run.meta_model, layers, schedule.stages(dist.get_rank(pp)))
    turns = Turns()
    for part in parts.values():
        expert_parallel.parallelize_experts(part, ep, before_wait=turns.turn)
    model = run.fill(harness.Stages(parts))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    rows = ExpertRows(run, model, turns)  # counts what travels, for the receipt

    def forward(stage, m, x):
        tokens, targets, samples = batches[m]  # the step's, which the loop sets
        x = tokens if x is None else x
        return model[stage](x, targets=targets, target_count=run.target_count, sample_ids=samples)

    shape = (args.batch // args.microbatches // args.ep, config.context, config.width)
    options = (schedule, forward, shape, run.dtype, run.device, links)
    pipeline = Pipeline(*options) if args.in_turns else DualPipe(*options, turns=turns)
    for step in run.steps(optimizer):
        batches = run.microbatches(step, dist.get_rank(ep), args.ep)
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        with rows:
            losses = pipeline.run()
        expert_parallel.sum_replicated_gradients(parameters, ep)
        loss = sum(losses, run.zero())  # the first rank of the pipeline has the last stage, too
        dist.all_reduce(loss)
        norm = harness.grad_norm(parameters, [pp])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
    return run.receipt(*receipts.dualpipe.of_demo(run, schedule, layers, rows))


if __name__ == "__main__":
    harness.script(main)
