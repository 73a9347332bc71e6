"""What ddp.py's ranks send and hold: 2 r P e, however it is summed."""

from receipts.formulas import SCALAR, add, held, summed


def expected(sizes, group, copies=None, scalars=1):
    """(sent, held). copies: the ranks with the same experts as this one, if experts have fewer
    copies than the rest. scalars: how many numbers are summed beside: the loss."""
    own = sizes.parameters()
    common = own if copies is None else sizes.parameters(experts=0)
    text = "the loss and the norm, 8 bytes each" if scalars == 2 else "the loss, 8 bytes"
    loss = summed(group, scalars * SCALAR, text)
    sent = add(summed(group, common * sizes.reduced, "2 r P e"), loss)
    if copies is not None:
        sent |= summed(copies, (own - common) * sizes.reduced, "2 r P e of experts")
    return sent, held(sizes)
