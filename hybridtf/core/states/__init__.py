"""State leaves: everything that a component carries through time.

A state is a pytree (dicts, tuples, named tuples, nesting allowed) of three leaf classes, each batch first with an int64
tensor ``length`` (b): the number of real tokens of the row's current document. The state owns the position.

``Growing``  tokens of the document, compacted from slot 0 of each row (KV, latents); or some of them (pooled blocks)
``Ring``     the last tokens of the document; token ``p`` lies in slot ``p % capacity`` (windows)
``Fixed``    tensors of constant size (recurrent and convolution states), with snapshots of the last ``keep`` tokens

An update, a crop and a detach consume their leaf: it may write into the buffer (no grad, capacity given by ``max_len``) or
make a new one, and either way the old leaf is dead. ``debug_states()`` makes a dead leaf raise. ``reorder``, ``clone`` and
``snapshot`` copy, and leave the leaf alive. ``concat_rows`` puts rows side by side; ``overwrite`` and ``write_rows`` are the
in-place forms of a call and of a change of rows, for states whose addresses must stay.
"""

from hybridtf.core.states.fixed import ConvWindow, Fixed
from hybridtf.core.states.growing import Growing
from hybridtf.core.states.leaf import StateLeaf, debug_states
from hybridtf.core.states.ring import Ring
from hybridtf.core.states.rows import concat_rows, overwrite, own_memory, with_room, write_rows
from hybridtf.core.states.whole import (
    OwnClock,
    State,
    crop,
    declare,
    detach,
    leaves,
    map_state,
    reorder,
    restore,
    snapshot,
    state_bytes,
    state_lengths,
)

__all__ = [
    "ConvWindow", "Fixed", "Growing", "OwnClock", "Ring", "State", "StateLeaf", "concat_rows",
    "crop", "debug_states", "declare", "detach",
    "leaves", "map_state", "overwrite", "own_memory", "reorder", "restore", "snapshot", "state_bytes", "state_lengths",
    "with_room", "write_rows",
]
