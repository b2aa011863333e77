"""Context parallelism: which tokens of a replica's sequences a rank works on, and how the rows of
items meet them.

Every rank of a CP group holds the weights of its TP rank and an equal run of a slot's tokens, so
that whatever is done token by token is divided without a message; for attention the group
exchanges tokens for heads (`ulysses`). Rows of other items (what encoders left, what a generator is
conditioned on) are divided evenly over the group, wherever their tokens are (`division.Place`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.models.group import Group
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import Items
from disttrain_cli.models.parallel import gather, reduce


def own_part(
    items: Items, given_RD: Tensor, group: Group | None, cp: Group | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where rows that an encoder left go among this rank's tokens, these rows, and their shares
    (`Items.shares`): of a TP group each rank has a part of them.

    Args:
        given_RD: this rank's own part of the rows of all items.
    """
    rows, shared, shares = items.rows, items.shared, items.shares
    assert rows is not None
    if shared is None:
        return rows if group is None else rows[group.local_rows(len(rows))], given_RD, None
    mine = slice(0, shared.tokens) if group is None else group.local_rows(shared.tokens)
    whole_RD = gather(given_RD, mine.stop - mine.start, cp)
    first, stop = np.searchsorted(shared.numbers, (mine.start, mine.stop)).tolist()
    numbers = to_device(torch.from_numpy(shared.numbers[first:stop] - mine.start), rows.device)
    own = slice(first, stop)
    return rows[own], whole_RD.index_select(0, numbers), None if shares is None else shares[own]


def assembled(own_RD: Tensor, items: Items, cp: Group | None) -> Tensor:
    """Rows of the items' tokens among this rank's → those of all, on every rank; what comes back
    has the gradients of all, of which each rank takes its own."""
    if items.shared is None:
        return own_RD
    numbers = to_device(items.shared.numbers.tolist(), own_RD.device, torch.int64)
    whole_RD = own_RD.new_zeros(items.shared.tokens, *own_RD.shape[1:])
    return reduce(whole_RD.index_copy(0, numbers, own_RD), cp)
