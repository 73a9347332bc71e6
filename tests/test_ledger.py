"""ledger.py: every operation counted, every live byte seen."""

import torch
import torch.distributed as dist

from proof.ledger import Ledger


def test_ledger_counts_every_operation(ranks):
    def work(rank):
        world, pair = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        ledger = Ledger({"world": world, "pair": pair})
        x, parts = torch.zeros(12), [torch.zeros(3) for _ in range(4)]
        with ledger:
            dist.all_reduce(x)
            dist.all_reduce(x[:3], group=pair)
            dist.all_reduce(x[:3], group=pair, op=dist.ReduceOp.MAX)
            dist.all_gather(parts, x[:3])
            dist.all_gather_into_tensor(x, x[rank * 3 : rank * 3 + 3].clone())
            dist.reduce_scatter_tensor(parts[0], x)
            dist.all_to_all_single(x, x.clone())
            dist.broadcast(x, 0)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x[:2], (rank + 1) % 4),
                    dist.P2POp(dist.irecv, parts[0][:2], (rank - 1) % 4),
                ]
            )
            for w in works:
                w.wait()
            dist.barrier()
        return ledger.sent

    for sent in ranks(4, work):
        assert sent == {
            ("all_reduce", "world"): [1, 48, 72.0],
            ("all_reduce", "pair"): [2, 24, 24.0],
            ("all_gather", "world"): [2, 96, 72.0],
            ("reduce_scatter", "world"): [1, 48, 36.0],
            ("all_to_all", "world"): [1, 48, 36.0],
            ("broadcast", "world"): [1, 48, 36.0],
            ("send", "world"): [1, 8, 8.0],
            ("recv", "world"): [1, 8, 0.0],
        }


def test_ledger_sees_what_is_alive(ranks):
    def work(rank):
        known = torch.zeros(100)
        ledger = Ledger({})
        ledger.watch([known])
        with ledger:
            known += 1
            a = torch.zeros(1000)
            view = a[10:20]
            b = a * 2  # 8000 bytes alive
            del a
            c = torch.zeros(500)  # `view` still holds all of a: 10000
            del view, c
            d = b + 1  # 8000
        return ledger.peak, ledger.bytes, d.sum().item()

    assert ranks(1, work) == [(10000, 8000, 1000.0)]
