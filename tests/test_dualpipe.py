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
from torch.utils._python_dispatch import TorchDispatchMode

import dualpipe
import expert_parallel
import harness
import model as gpt
import pipeline
import zero_bubble
from harness import initialize, presets
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
    assert threading.active_count() == threads and turns.pair is None
    turns.turn()  # nobody is there to go on
    assert run(turns, "a.b", "c") == ("acb", 1)


def test_ctrl_c_ends_both_calls(ranks):
    """While the second call runs, and the first waits for its turn."""

    def work(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        turns, done = dualpipe.Turns(), []

        def second():
            signal.raise_signal(signal.SIGINT)  # Python's handler runs in the main thread
            time.sleep(1)
            turns.turn()
            done.append("after the interrupt")

        with pytest.raises(KeyboardInterrupt):
            turns.overlap(turns.turn, second)
        assert not done and turns.pair is None

    ranks(1, work)


def test_nothing_of_a_failed_pair_stays():
    """Else its tensors stay, just where a caller wants memory. And one Turns runs one pair."""
    turns, tensor = dualpipe.Turns(), torch.ones(1)
    alive = weakref.ref(tensor)

    def fail(x):
        raise ArithmeticError

    def nested():
        turns.overlap(list, list)

    with contextlib.suppress(ArithmeticError):
        turns.overlap(functools.partial(fail, tensor), list)
    del tensor
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="one for each pipeline"):
        turns.overlap(nested, list)


def test_pairs():
    for p in range(1, 9):
        for m in range(2 * p, 4 * p):
            schedule = zero_bubble.find_schedule("dualpipev", p, m)
            schedule = dualpipe.PairedSchedule(schedule.rows)
            for rank in range(p):
                steps = schedule.steps(rank)
                assert tuple(action for step in steps for action in step) == schedule[rank]
                pairs = [step for step in steps if len(step) == 2]
                # DeepSeek's steps 4 and 5, where the last rank's first pair runs in turns
                assert len(pairs) == 2 * (m - 2 * p + rank + 1) + p - 1 - rank
                for forward, backward in pairs:
                    assert forward.kind + backward.kind == "FB"
                    assert forward.stage + backward.stage == 2 * p - 1


CONFIG = presets.configure(layers=4, heads=2, width=16, context=8, vocab=61, experts=4)
MICROBATCHES = 3


def one_step(schedule_of, turns, watch=contextlib.nullcontext):
    """The gradients of a step: both stages on each rank, the experts shared by all ranks."""
    schedule = schedule_of(zero_bubble.find_schedule("dualpipev", 1, MICROBATCHES).rows)
    layers = schedules.stage_layers(CONFIG, 2)

    def whole():
        with torch.device("meta"):
            return gpt.GPT(CONFIG)

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
    make = pipeline.Pipeline
    if isinstance(schedule, dualpipe.PairedSchedule):
        make = functools.partial(dualpipe.DualPipe, turns=turns)
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
        start(transfer, *rows)
        transfer.matmuls = Matmuls.count

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
        plain = busy_messages(zero_bubble.SplitSchedule, dualpipe.Turns())
        turns = dualpipe.Turns()
        paired = busy_messages(dualpipe.PairedSchedule, turns)
        with mock.patch.object(dualpipe.Turns, "turn", lambda self: None):
            still = busy_messages(dualpipe.PairedSchedule, dualpipe.Turns())
        torch.testing.assert_close([paired[0], still[0]], [plain[0]] * 2, rtol=0, atol=0)
        schedule = zero_bubble.find_schedule("dualpipev", 1, MICROBATCHES)
        schedule = dualpipe.PairedSchedule(schedule.rows)
        assert plain[1] == still[1] == 0
        switches, waits = receipt.switches(schedule, 0, paired[3])
        assert (switches, waits) == (turns.switches, turns.waits) == (32, 48)
        # Of 4 pairs each has one end of the near stage, which has no head. There nothing but sums
        # comes after the last rows of a forward, and before the first of a backward
        assert paired[1:3] == (switches - 4, waits)

    ranks(2, work)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_either_thread(ranks, where):
    """Ends the step on the rank that has it, with that exception."""

    def work(rank):
        def fail(transfer, *_):
            in_forward = threading.current_thread() is threading.main_thread()
            if in_forward == (where == "forward") and turns.pair:
                raise ZeroDivisionError
            return start(transfer, *_)

        turns, start = dualpipe.Turns(), expert_parallel.Transfer.start
        with mock.patch.object(expert_parallel.Transfer, "start", fail):
            with pytest.raises(ZeroDivisionError):
                one_step(dualpipe.PairedSchedule, turns)
        assert turns.pair is None

    ranks(2, work)
