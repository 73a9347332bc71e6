"""dualpipe.py: two calls that take turns, the pairs of a schedule, and what they hide."""

import contextlib
import functools
import gc
import signal
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dualpipe
import expert_parallel
import harness
import zero_bubble
from harness import families, initialize, presets
from pipeline import Schedule
from receipts import dualpipe as receipt
from receipts import pipeline as schedules


def run(turns, first, second):
    """(what two calls do, in order; how often it changed). Letters are work, dots turns."""
    done, before = [], turns.switches

    def call(steps):
        for step in steps:
            if step == "!":
                raise ArithmeticError(steps)
            turns.turn() if step == "." else done.append(step)
        return steps

    results = turns.overlap(lambda: call(first), lambda: call(second))
    assert results == [first, second]
    return "".join(done), turns.switches - before


@pytest.mark.parametrize(
    "first, second, order",
    [
        ("a.b.c", "d.e.f", "adbecf"),
        ("a.b", "c.d.e", "acbde"),
        ("a.b.c.d", "e.f", "aebfcd"),
        ("a", "b.c", "abc"),
        ("a.b.", "c", "acb"),
    ],
)
def test_calls_take_turns(first, second, order):
    """In an order that only the calls decide; the receipt's formula says how often."""
    turns = dualpipe.Turns()
    done, switches = run(turns, first, second)
    assert done == order and turns.waits == (first + second).count(".")
    assert receipt.switches_in_pair(first.count("."), second.count(".")) == switches


@pytest.mark.parametrize("first, second", [("a.!", "b.c"), ("a.b", "c!"), ("!", "a"), (".!", ".!")])
def test_an_error_ends_both_calls(first, second):
    """It is the first error that comes, no thread stays, and the next pair runs."""
    turns, threads = dualpipe.Turns(), threading.active_count()
    with pytest.raises(ArithmeticError):
        run(turns, first, second)
    assert threading.active_count() == threads and turns.running == 0
    turns.turn()  # nobody is there to go on
    assert run(turns, "a.b", "c") == ("acb", 1)


def test_ctrl_c_ends_both_calls(ranks):
    """While the first call runs, and the second waits for its turn."""

    def work(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        turns, done = dualpipe.Turns(), []

        def first():
            turns.turn()
            signal.raise_signal(signal.SIGINT)  # Python's handler runs in the main thread
            time.sleep(1)
            turns.turn()
            done.append("after the interrupt")

        with pytest.raises(KeyboardInterrupt):
            turns.overlap(first, turns.turn)
        assert not done and turns.running == 0

    ranks(1, work)


def test_nothing_of_a_failed_pair_stays():
    """Else its tensors stay, just where a caller wants memory."""
    turns, tensor = dualpipe.Turns(), torch.ones(1)
    alive = weakref.ref(tensor)

    def fail(x):
        raise ArithmeticError

    with contextlib.suppress(ArithmeticError):
        turns.overlap(functools.partial(fail, tensor), list)
    del tensor
    gc.collect()
    assert alive() is None


def test_pairs():
    for p in range(1, 9):
        for m in range(2 * p, 4 * p):
            schedule = schedules.find_schedule("dualpipev", p, m)
            schedule = dualpipe.PairedSchedule(schedule.rows)
            for rank in range(p):
                steps = schedule.steps(rank)
                in_turns = [action for step in steps for action in reversed(step)]
                assert tuple(in_turns) == schedule[rank]
                pairs = [step for step in steps if len(step) == 2]
                # DeepSeek's steps 4 and 5, where the last rank's first pair runs in turns
                assert len(pairs) == 2 * (m - 2 * p + rank + 1) + p - 1 - rank
                for backward, forward in pairs:
                    assert forward.kind + backward.kind == "FB"
                    assert forward.stage + backward.stage == 2 * p - 1


CONFIG = presets.configure(layers=4, heads=2, width=16, context=8, vocab=61, experts=4)
MICROBATCHES = 3


def one_step(schedule_of, turns, watch=contextlib.nullcontext):
    """The gradients of a step: both stages on each rank, the experts shared by all ranks."""
    schedule = schedule_of(schedules.find_schedule("dualpipev", 1, MICROBATCHES).rows)
    layers = schedules.stage_layers(CONFIG, 2)

    def whole():
        with torch.device("meta"):
            return families.build(CONFIG)

    parts = harness.split(whole, layers, [0, 1])
    for part in parts.values():
        expert_parallel.parallelize_experts(part, dist.group.WORLD, before_wait=turns.turn)
    model = initialize.fill(harness.Stages(parts), 7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(61, (MICROBATCHES, 2, 9), generator=generator)

    def forward(stage, m, x):
        x, targets = tokens[m, :, :-1] if x is None else x, tokens[m, :, 1:]
        return model[stage](x, targets=targets, target_count=tokens[..., 1:].numel())

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    options = (schedule, forward, (2, 8, 16), torch.float64, "cpu", [alone] * 4)
    make = zero_bubble.SplitPipeline
    if isinstance(schedule, dualpipe.PairedSchedule):
        make = functools.partial(dualpipe.DualPipeV, turns=turns)
    with watch():
        make(*options).run()
    return {name: p.grad for name, p in model.named()}, layers


class Matmuls(TorchDispatchMode):
    """Counts them, in the thread where it is on and in those that take over its modes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Matmuls.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


def busy_messages(schedule_of, turns):
    """(gradients, how many all-to-alls of rows are on their way while a matmul runs, of how
    many)."""
    start, wait, busy = expert_parallel.Transfer.start, expert_parallel.Transfer.wait, []

    def started(transfer, *rows):
        transfer.matmuls = Matmuls.count
        return start(transfer, *rows)

    def waited(transfer):
        rows = wait(transfer)
        busy.append(Matmuls.count > transfer.matmuls)
        return rows

    with mock.patch.multiple(expert_parallel.Transfer, start=started, wait=waited):
        gradients, layers = one_step(schedule_of, turns, Matmuls)
    return gradients, sum(busy), len(busy), layers


def test_rows_travel_while_the_other_micro_batch_computes(ranks):
    """As many as the formula says; without turns none. The gradients are the same, bit for bit."""

    def work(rank):
        plain = busy_messages(Schedule, dualpipe.Turns())
        turns = dualpipe.Turns()
        paired = busy_messages(dualpipe.PairedSchedule, turns)
        with mock.patch.object(dualpipe.Turns, "turn", lambda self: None):
            still = busy_messages(dualpipe.PairedSchedule, dualpipe.Turns())
        torch.testing.assert_close([paired[0], still[0]], [plain[0]] * 2, rtol=0, atol=0)
        schedule = dualpipe.PairedSchedule([dualpipe.dualpipev(0, 1, MICROBATCHES)])
        assert plain[1] == still[1] == 0
        switches, waits = receipt.switches(schedule, 0, paired[3])
        assert (switches, waits) == (turns.switches, turns.waits) == (32, 48)
        assert paired[1:3] == (switches, waits)

    ranks(2, work)


class Clock:
    """Virtual time, in which layers compute and rows travel, one message after the other."""

    def __init__(self, message):
        self.now = self.link_free = self.waited = 0
        self.message, self.turns = message, dualpipe.Turns()

    def compute(self, seconds):
        self.now += seconds

    def send_and_wait(self):
        self.link_free = arrives = max(self.now, self.link_free) + self.message
        self.turns.turn()
        self.waited += max(0, arrives - self.now)
        self.now = max(self.now, arrives)


class Layer(torch.autograd.Function):
    """Attention takes 2 in forward and 4 in backward, experts 3 and 6."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        for part in (2, 3):
            clock.compute(part)
            clock.send_and_wait()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        for part in (6, 4):
            ctx.clock.send_and_wait()
            ctx.clock.compute(part)
        return gradient, None


def test_what_pairs_hide(ranks):
    """All their waits, if no message takes longer than the shortest part that it hides behind. And
    the table of docs/learn/dualpipe.md."""
    layers, microbatches = 3, 16
    computing, messages = 2 * microbatches * layers * 15, 2 * microbatches * layers * 4
    unpaired = messages // microbatches  # the first two forwards and the last two backwards

    def waited(paired, message):
        """In a step of one pipeline rank."""
        schedule = schedules.find_schedule("dualpipev", 1, microbatches)
        clock = Clock(message)

        def forward(stage, m, x):
            x = torch.ones(1, requires_grad=True) if x is None else x
            for _ in range(layers):
                x = Layer.apply(x, clock)
            return x.sum() if stage == schedule.last else x

        options = (forward, (1,), torch.float32, "cpu")
        if paired:
            schedule = dualpipe.PairedSchedule(schedule.rows)
            dualpipe.DualPipeV(schedule, *options, turns=clock.turns).run()
        else:
            zero_bubble.SplitPipeline(schedule, *options).run()
        assert clock.now == computing + clock.waited
        return clock.waited

    def work(rank):
        for message in (1, 2):
            assert waited(False, message) == messages * message
            assert waited(True, message) == unpaired * message
        for ratio, share in ((0.5, 0.94), (1, 0.78), (1.5, 0.91), (2, 0.94)):
            waiting = ratio * computing
            hidden = waiting - waited(True, waiting / messages)
            assert hidden / min(waiting, computing) == pytest.approx(share, abs=0.005)

    ranks(1, work)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_either_thread(ranks, where):
    """Ends the step on the rank that has it, with that exception."""

    def work(rank):
        def fail(transfer, *_):
            in_forward = threading.current_thread() is threading.main_thread()
            if in_forward == (where == "forward") and turns.running:
                raise ZeroDivisionError
            return start(transfer, *_)

        turns, start = dualpipe.Turns(), expert_parallel.Transfer.start
        with mock.patch.object(expert_parallel.Transfer, "start", fail):
            with pytest.raises(ZeroDivisionError):
                one_step(dualpipe.PairedSchedule, turns)
        assert turns.running == 0

    ranks(2, work)


def test_dropout_in_a_recomputed_layer():
    """Draws in backward what it drew in forward, although the other call draws meanwhile; and the
    other call draws as if it ran alone."""
    turns, layer = dualpipe.Turns(), torch.nn.Linear(8, 8).double()

    def draw_and_wait(x):
        x = F.dropout(layer(x), 0.5)
        turns.turn()
        return F.dropout(layer(x), 0.5)

    def forward(x):
        return checkpoint(draw_and_wait, x, use_reentrant=False).square().sum()

    def step(overlap):
        torch.manual_seed(0)
        layer.zero_grad()
        first = forward(torch.ones(4, 8).double())
        call = functools.partial(forward, torch.full((4, 8), 2.0).double())
        _, second = overlap(first.backward, call)
        second.backward()
        return layer.weight.grad, torch.rand(1)

    in_turns = step(lambda *calls: [call() for call in calls])
    torch.testing.assert_close(step(turns.overlap), in_turns, rtol=1e-12, atol=0)
    assert turns.switches > 0
