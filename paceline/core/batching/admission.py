"""Admission and preemption: which pending segments have memory for their rows.

Sequences that end together, as the branches of one answer do, form a group (`groups`), which is admitted and preempted
as a whole. A group is admitted when its pending rows fit beside some growth of those before it. Where a group then
lacks rows, the youngest is preempted (`row_accounts`): its rows are released, and computed again before its next
segment. Every group ends if each asks for finitely many rows and would fit alone:

- Groups that hold rows but wait for something else, such as a peer, are preempted like younger ones once they are idle.
  So the first of the pending groups is given what it lacks, after two ticks at the latest, and its segments run. The
  engine never stands still for lack of memory, and answers on two engines cannot block each other through it.
- A group loses rows only to one before it, or while nothing of it is pending. So the first of the pending groups
  finishes its segments, and those are finitely many.
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.core.batching.groups import Group, GroupState, GroupTable
from paceline.core.batching.memory import Memory
from paceline.core.batching.pending import PendingQueues, PendingSegment
from paceline.core.batching.row_accounts import RowAccounts
from paceline.core.batching.segment import SeqId


class Admission:
    """Gives the pending segments of `queues` the rows they need, group by group."""

    def __init__(self, queues: PendingQueues, groups: GroupTable, block_size: int) -> None:
        self._queues = queues
        self._groups = groups
        self._block_size = block_size
        self._capacity = 0  # the most rows that were ever free
        self.short: frozenset[Group] = frozenset()  # groups with pending segments that lack memory
        self.preemptions = 0  # of groups

    def reject_oversized(self, arrived: Collection[PendingSegment], free_rows: int) -> list[int]:
        """Drop the segments that would not fit even alone, and the later ones of their sequences; return their keys."""
        self._capacity = max(self._capacity, free_rows)
        too_long = [item.segment.seq for item in arrived if self._ceil(item.end) > self._capacity]
        return [key for seq in dict.fromkeys(too_long) for key in self._queues.drop(seq)]

    def admit(self, memory: Memory, free_rows: int) -> tuple[list[PendingSegment], list[int]]:
        """The segments that may run, and the keys of those dropped because their group exceeds all memory.

        While a group waits no later one is admitted, otherwise small ones would overtake it forever.
        """
        queues, pending = self._queues, self._pending_groups()
        accounts = RowAccounts(free_rows, self._capacity, self._groups, lambda seq: self._ceil(memory.held(seq)))
        for state, seqs in pending.items():
            for seq in seqs:
                if queues.is_started(seq):
                    accounts.allocate(state, self._cost(seq))
        admitted: list[PendingSegment] = []
        rejected: list[int] = []
        short: set[Group] = set()
        for state in sorted(pending, key=lambda state: state.rank):
            asking = [seq for seq in pending[state] if not queues.is_started(seq)]
            cost = sum(map(self._cost, asking))
            if cost == 0 or ((state.resident or not short) and self._make_room(accounts, memory, state, cost)):
                accounts.allocate(state, cost)
                self._restore(asking, memory)
                admitted += map(queues.head, pending[state])
            elif accounts.held(state) + cost > self._capacity:
                rejected += [key for seq in pending[state] for key in queues.drop(seq)]
            else:
                short.add(state.group)
                admitted += [queues.head(seq) for seq in pending[state] if seq not in asking]
        self.short = frozenset(short)
        return admitted, rejected

    def _pending_groups(self) -> dict[GroupState, list[SeqId]]:
        """Sequences with pending segments, by group."""
        pending: dict[GroupState, list[SeqId]] = {}
        for seq in self._queues:
            pending.setdefault(self._groups.of(seq), []).append(seq)
        for state in pending:
            self._groups.stay_active(state)
        return pending

    def _make_room(self, accounts: RowAccounts, memory: Memory, state: GroupState, cost: int) -> bool:
        """True if so many rows are left for the group now."""
        need = accounts.need(state, cost)
        victims = accounts.victims(state, need) if accounts.left < need else []
        for victim in victims or ():
            seqs = list(victim.resident)
            for seq in seqs:
                self._queues.preempt(seq)
                self._groups.give_up_rows(seq)
            memory.preempt(seqs)
            accounts.released(victim, memory.free_rows() or 0)
            self.preemptions += 1
        return accounts.left >= need

    def _restore(self, seqs: Collection[SeqId], memory: Memory) -> None:
        for seq in seqs:
            if self._queues.is_preempted(seq):
                self._queues.restore(seq, memory.rows_of(seq))

    def _cost(self, seq: SeqId) -> int:
        """Free rows that the first pending segment needs, with those to be computed again, in whole blocks."""
        return self._ceil(self._queues.end(seq)) - self._ceil(self._queues.rows_written(seq))

    def _ceil(self, rows: int) -> int:
        return -(-rows // self._block_size) * self._block_size
