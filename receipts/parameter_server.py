"""What a parameter server sends and holds: with S of them (N-1) P e / S of weights each; a worker
sends P e of gradients."""

from receipts.formulas import SCALAR, held, summed


def expected(sizes, group, served):
    """(sent, held). served: how many parameters this rank serves; a worker serves none."""
    parameters = sizes.parameters()
    # Weights to all others, and gradients to the servers of the rest
    size = ((group.ranks - 1) * served + parameters - served) * sizes.e
    text = "(N-1) P_s e of weights, (P - P_s) e of gradients; it serves P_s" if served else "P e"
    if served == parameters:
        text = "(N-1) P e"
    sent = {("send", group.name): (size, text)}
    sent |= summed(group, 2 * SCALAR, "the loss and the norm, 8 bytes each")
    moments = sizes.moments * served * sizes.master
    return sent, held(sizes) | {"optimizer": (moments, f"{sizes.moments} x what it serves")}
