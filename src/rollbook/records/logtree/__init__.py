"""A tree of what happened in an iteration: for people as one HTML file, for programs as JSON.

    with logtree.trace("RL iteration 3") as trace:
        with logtree.scope("Group 0", group_idx=0, task_id="gsm8k/17"):
            logtree.conversation(messages, traj_idx=0)
            logtree.table([{"traj_idx": 0, "reward": 1.0}], caption="Rewards")
    logtree.write(trace, html=Path("train.html"), json=Path("train_logtree.json"))

Library code logs unconditionally: with no trace open, every call returns at once and builds nothing.
There is no way to log raw HTML; text that looks like HTML is text.
"""

from rollbook.records.logtree.files import decode_node, encode, encode_node, read, write
from rollbook.records.logtree.find import Found, find_conversations
from rollbook.records.logtree.log import (
    conversation,
    scope,
    section,
    table,
    text,
    trace,
    under,
)
from rollbook.records.logtree.tree import NOWHERE, Node, Trace

__all__ = [
    "NOWHERE",
    "Found",
    "Node",
    "Trace",
    "conversation",
    "decode_node",
    "encode",
    "encode_node",
    "find_conversations",
    "read",
    "scope",
    "section",
    "table",
    "text",
    "trace",
    "under",
    "write",
]
