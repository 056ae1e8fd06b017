"""A replica's end of all NIXL transfers: its agent, its lease words, its peers, and the transfers under way.

Shared by the connectors of one replica. Knows nothing of what the bytes mean.

Why a lease word
----------------
A one-sided read asks nobody's leave: if the owner freed the memory meanwhile, the read still ends in ``DONE``, with
whatever is there now. So each claim has a word in an array that the owner registered, holding a random nonce while the
claim stands, and the fetcher reads that word *after* its data, in a second transfer that starts once the first has
ended. As with a seqlock, order makes it a proof:

    owner      word := nonce ... publish | ... word := 0, then free, then someone overwrites the memory
    fetcher                              read data (ends) -> read word (starts) -> is it the nonce?

Had any byte of the data come from the overwriting, then the word was zeroed before that byte was written, hence before
it was read, hence before the read of the word began: that read would find 0, or the nonce of a later claim. Finding
the claim's own nonce therefore proves that every byte was read while the claim stood.

The fetcher reads the word *before* the data too. That costs one small read and buys two things: a claim that ended
long ago moves no data, and connecting to a peer that does not answer, the step that can hang, has a private word as
its destination, so that it can be given up after a time-out. A writer reads the word of its target first for the same
two reasons. After its data it need not: whether the owner may reuse the target is not for the writer to prove.

How a transfer runs
-------------------
Its parts (word, data in batches, word) are one generator, which a thread runs as far as it gets: between processes of
one host, where the data moves inside the call that posts it, a transfer is one turn of one thread. It yields where it
has to wait, and between batches if others wait for a thread; the event loop waits for it. A cancellation takes effect
between batches. What is so small that handing it to a thread would take longer than the transfer (each hand-over waits
for the interpreter's lock, which the engine's thread is after too) starts on the event loop, where nothing ever waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch

from epd.errors import HandleExpiredError, PeerLostError, TransferError
from epd.transfer.finish import finish
from epd.transfer.moves import Move, Moves, Run, batches
from epd.transfer.nixl_agent import Agent, AgentError, Region, State, Transfer
from epd.transfer.slab import SlabAllocator
from epd.transfer.steps import SHUTTING_DOWN, Steps, StepThreads, is_on_event_loop

__all__ = ["LeaseWord", "NixlEndpoint", "PeerMemory"]

_LOG = logging.getLogger(__name__)

_NUM_LEASE_WORDS = 16384
_NUM_SCRATCH_WORDS = 1024
_NONCE_BITS = 62
_RECEIVE_BYTES = 16 * 2**20
_MAX_RECEIVE_PIECE_BYTES = 4 * 2**20
_MAX_BATCH_BYTES = 32 * 2**20
"""How much one transfer moves: a cancellation, and other transfers, wait for that long."""
_MAX_INLINE_BYTES = 256 * 2**10
"""What may move on the event loop: within 0.1 ms."""
_MAX_PEERS = 256
_MEETING = b"meeting"
"""A notice that is for nobody."""

# How to wait: spin for what a small transfer takes, then sleep ever longer in the thread; a transfer that needs longer
# than its slice is looked at from the event loop's timer, so that a peer that hangs keeps no thread.
_SPIN_S = 20e-6
_FIRST_SLEEP_S = 50e-6
_LAST_SLEEP_S = 500e-6
_SLICE_S = 0.02
_FIRST_PAUSE_S = 0.001
_LAST_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A replica, how to reach it, and a claim on its memory, as told by its handle, target or introduction.

    ``claim`` names the claim in messages. ``word_address`` is where the claim's word is, which holds ``nonce`` while
    the claim stands. ``memory`` is (kind, device).
    """

    owner: str
    claim: str
    agent: str
    description: bytes
    word_address: int
    nonce: int
    memory: tuple[str, int]


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """A claim's word in the owner's registered array; ``revoke`` before the memory is freed."""

    address: int
    nonce: int
    revoke: Callable[[], None]


@dataclass(slots=True)
class _Peer:
    name: str
    owner: str
    num_active: int = 0
    """Transfers that may still write, here or there, stalled ones included."""
    num_stalled: int = 0
    is_lost: bool = False
    is_superseded: bool = False
    """Its replica has restarted, under the same name and with another agent."""


@dataclass(frozen=True, slots=True)
class _Posted:
    """A posted transfer, until ``_advance`` finds that it has ended."""

    peer: _Peer
    transfer: Transfer


@dataclass(slots=True)
class _Words:
    """The registered int64 array: lease words, then scratch words that lease words of others are read into, then the
    doorbell, which anyone may write to and nobody reads."""

    memory: torch.Tensor = field(
        default_factory=lambda: torch.zeros(_NUM_LEASE_WORDS + _NUM_SCRATCH_WORDS + 1, dtype=torch.int64)
    )
    free_leases: list[int] = field(default_factory=lambda: list(range(_NUM_LEASE_WORDS)))
    free_scratch: list[int] = field(
        default_factory=lambda: list(range(_NUM_LEASE_WORDS, _NUM_LEASE_WORDS + _NUM_SCRATCH_WORDS))
    )

    def address(self, slot: int) -> int:
        return self.memory.data_ptr() + slot * self.memory.itemsize

    @property
    def doorbell(self) -> Run:
        return Run(self.address(len(self.memory) - 1), self.memory.itemsize)


class NixlEndpoint:
    """See the module. The owner's side is thread-safe; whoever reads or writes does so on the event loop."""

    def __init__(self, owner: str, *, contact_timeout_s: float = 5.0, read_timeout_s: float = 10.0) -> None:
        """Create the agent, under a name that no other incarnation of this replica has.

        ``contact_timeout_s`` bounds the read of a lease word, first contact included; ``read_timeout_s`` each read into
        the receive area. Raises ``ImportError`` or ``AgentError``.
        """
        self.owner = owner
        self._agent = Agent(f"{owner}/{uuid.uuid4().hex}")
        self._contact_timeout_s = contact_timeout_s
        self._read_timeout_s = read_timeout_s
        self._words = _Words()
        self._receive = torch.empty(_RECEIVE_BYTES, dtype=torch.uint8)
        self._receive_ranges = SlabAllocator(_RECEIVE_BYTES)
        self._word_region = self._agent.register(self._words.memory)
        self._receive_region = self._agent.register(self._receive)
        self._description: bytes | None = None
        self._memory_lock = threading.Lock()
        """Guards words and receive ranges."""
        self._peer_lock = threading.Lock()
        """Guards what is below; held while the agent connects and disconnects."""
        self._peers: dict[str, _Peer] = {}
        self._stalled: list[tuple[_Posted, Callable[[], None]]] = []
        """Reads that nobody waits for any more but that may still write, with what to do once they cannot."""
        self._is_closed = False
        self._threads = StepThreads(2, "epd-nixl")
        self._hello = self.lend_word()

    # -- owner's side --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._agent.name

    @property
    def description(self) -> bytes:
        """What a peer needs for first contact; fixed from the first use on, when all memory is registered."""
        if self._description is None:
            self._description = self._agent.describe()
        return self._description

    @property
    def hello(self) -> tuple[LeaseWord, Region, Run]:
        """What first contact without a claim is made with: a word that stands as long as the endpoint, and a range of
        the region that anyone may write to and nobody reads."""
        return self._hello, self._word_region, self._words.doorbell

    def register(self, tensor: torch.Tensor) -> Region:
        """Register memory for the endpoint's life, before the first publish: peers learn of it at first contact."""
        if self._description is not None:
            raise RuntimeError("memory must be registered before the first handle is published")
        return self._agent.register(tensor)

    def lend_word(self) -> LeaseWord:
        """Return a word that stands for a new claim. Raises ``TransferError`` when claims hold all of them."""
        nonce = secrets.randbelow(2**_NONCE_BITS - 1) + 1
        with self._memory_lock:
            if not self._words.free_leases:
                raise TransferError(f"{_NUM_LEASE_WORDS} handles are live: no more can be published")
            slot = self._words.free_leases.pop()
        self._words.memory[slot] = nonce

        def revoke() -> None:
            self._words.memory[slot] = 0
            with self._memory_lock:
                self._words.free_leases.append(slot)

        return LeaseWord(self._words.address(slot), nonce, revoke)

    @property
    def is_busy(self) -> bool:
        """Whether a call would wait for a transfer that is being made."""
        return self._agent.is_busy

    def take_notices(self) -> list[bytes]:
        """Return the notices that writers have sent since the last call. Thread-safe; waits for a batch under way."""
        try:
            return self._agent.take_notices()
        except AgentError as error:
            raise TransferError(f"notices cannot be received: {error}") from error

    # -- reader's and writer's side ------------------------------------------------------------------------------------

    async def meet(self, there: PeerMemory, doorbell: Run) -> None:
        """Connect ahead of the first transfer: read, write and give notice once, since each sets something up.

        Raises ``PeerLostError``.
        """
        await self._threads.run(self._meet(there, doorbell))

    async def check_lease(self, there: PeerMemory) -> None:
        """Read the claim's word. Raises ``HandleExpiredError`` unless the claim stands, ``PeerLostError`` in time."""
        await self._threads.run(self._check(there), is_inline=self._can_inline(there, 0))

    async def read_into(self, there: PeerMemory, moves: Moves, local: Region) -> None:
        """Read straight into registered memory of the caller's, and prove that the claim stood throughout.

        Ends only when nothing can write there any more. There is no time-out, because giving up would leave the memory
        open to writes. A peer that dies ends the read with ``PeerLostError`` at once; one that is merely frozen stalls
        it, if the transport needs the peer's help (``tcp`` does, ``cma`` and RDMA do not), until it thaws or dies. A
        cancellation takes effect between batches.

        Raises ``HandleExpiredError`` or ``PeerLostError``.
        """
        stop = threading.Event()
        is_inline = self._can_inline(there, int(moves[:, 2].sum()))
        await self._threads.run(self._read_checked(there, moves, local, stop), is_inline=is_inline, on_cancel=stop.set)

    async def write_from(self, there: PeerMemory, moves: Moves, local: Region, notice: bytes = b"") -> None:
        """Write registered memory to the peer's; ``notice``, unless empty, reaches the peer after all of it.

        Ends only when nothing can write any more, as ``read_into`` does. Cancelled in time, it sends no notice.

        Raises ``HandleExpiredError`` if the claim has ended already, or ``PeerLostError``.
        """
        stop = threading.Event()
        is_inline = self._can_inline(there, int(moves[:, 2].sum()))
        await self._threads.run(self._write(there, moves, local, notice, stop), is_inline=is_inline, on_cancel=stop.set)

    async def read_bytes(self, there: PeerMemory, address: int, into: torch.Tensor) -> None:
        """Read a range into ordinary memory (uint8 ``[num_bytes]``), by way of the registered receive area.

        So the read is bounded in time: what a stalled peer may still write to is its piece of the receive area, which
        stays out of use until that has ended. The price is a copy. Registering each destination instead would take
        0.15 ms here, milliseconds where registering pins pages, and could not be given up.

        Raises ``PeerLostError``, or ``TransferError`` when there is no room to receive.
        """
        await finish(self._read_pieces(there, address, into))

    def sweep(self) -> None:
        """Clear away stalled reads that have ended, for which nobody waits. Thread-safe."""
        with self._peer_lock:
            stalled, self._stalled = self._stalled, []
        for read, reclaim in stalled:
            has_ended = self._advance(read, 0.0) is not State.ACTIVE
            with self._peer_lock:
                if has_ended:
                    read.peer.num_stalled -= 1
                else:
                    self._stalled.append((read, reclaim))
            if has_ended:
                reclaim()

    def close(self) -> None:
        """Stop the agent, once the transfers under way have ended: their memory is kept until then. Idempotent."""
        with self._peer_lock:
            if self._is_closed:
                return
            self._is_closed = True
        if not self._try_close():
            _LOG.warning("%s: NIXL transfers are still under way; closing when they end", self.owner)
            threading.Thread(target=self._close_later, name="epd-nixl-close", daemon=True).start()

    def _try_close(self) -> bool:
        self.sweep()
        with self._peer_lock:
            if any(peer.num_active for peer in self._peers.values()):
                return False
        self._threads.close()
        self._agent.close()
        return True

    def _close_later(self) -> None:
        while not self._try_close():
            time.sleep(0.05)

    # -- steps, run in a thread ----------------------------------------------------------------------------------------

    def _can_inline(self, there: PeerMemory, num_bytes: int) -> bool:
        """Whether a transfer can start on the event loop: it is small, nothing has to be connected, and nobody else is
        at the agent (someone may come between; then the loop waits for one batch)."""
        return (
            num_bytes <= _MAX_INLINE_BYTES
            and there.agent in self._peers
            and not (self._peer_lock.locked() or self._agent.is_busy)
        )

    def _check(self, there: PeerMemory, ended: str = "was released or its lease ran out") -> Steps[None]:
        if (yield from self._read_word(there)) != there.nonce:
            raise HandleExpiredError(f"{there.claim} {ended}")

    def _read_checked(self, there: PeerMemory, moves: Moves, local: Region, stop: threading.Event) -> Steps[None]:
        yield from self._check(there)
        yield from self._read_batches(there, moves, local, stop)
        yield from self._check(there)

    def _read_batches(self, there: PeerMemory, moves: Moves, local: Region, stop: threading.Event) -> Steps[None]:
        for index, batch in enumerate(batches(moves, _MAX_BATCH_BYTES)):
            if index > 0 and self._threads.has_queue:
                yield 0.0
            if stop.is_set():
                return
            yield from self._transfer("READ", there, batch, local, there.memory)

    def _write(
        self, there: PeerMemory, moves: Moves, local: Region, notice: bytes, stop: threading.Event
    ) -> Steps[None]:
        yield from self._check(there, "is closed: nothing more is to be written there")
        num_left = int(moves[:, 2].sum())
        for batch in batches(moves, _MAX_BATCH_BYTES):
            if stop.is_set():
                return
            num_left -= int(batch[:, 2].sum())
            yield from self._transfer("WRITE", there, batch, local, there.memory, notice=b"" if num_left else notice)
            if num_left and self._threads.has_queue:
                yield 0.0
        if notice and not len(moves):
            self._notify(there, notice)

    def _meet(self, there: PeerMemory, doorbell: Run) -> Steps[None]:
        if (yield from self._read_word(there)) != there.nonce:
            raise PeerLostError(f"replica {there.owner} cannot be reached: it has introduced itself, but is gone")
        move = Move(doorbell.address, self._words.doorbell.address, doorbell.num_bytes)
        yield from self._transfer("WRITE", there, np.array([move]), self._word_region, there.memory, notice=_MEETING)

    def _read_word(self, there: PeerMemory) -> Steps[int]:
        with self._memory_lock:
            if not self._words.free_scratch:
                raise TransferError(f"{_NUM_SCRATCH_WORDS} transfers are starting: no more can")
            slot = self._words.free_scratch.pop()
        move = Move(there.word_address, self._words.address(slot), self._words.memory.itemsize)
        reclaim = partial(self._reclaim_scratch, slot)
        yield from self._transfer(
            "READ",
            there,
            np.array([move]),
            self._word_region,
            ("DRAM", 0),
            timeout_s=self._contact_timeout_s,
            reclaim=reclaim,
        )
        value = int(self._words.memory[slot])
        reclaim()
        return value

    def _transfer(
        self,
        operation: Literal["READ", "WRITE"],
        there: PeerMemory,
        moves: Moves,
        local: Region,
        remote: tuple[str, int],
        *,
        timeout_s: float | None = None,
        reclaim: Callable[[], None] = lambda: None,
        notice: bytes = b"",
    ) -> Steps[None]:
        """Post one transfer and see it end.

        Unless this returns, ``reclaim`` is called once nothing can write to ``local`` any more.
        """
        try:
            posted = self._post(operation, there, moves, local, remote, notice)
        except BaseException:
            reclaim()
            raise
        pause_s = _FIRST_PAUSE_S
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_inline = is_on_event_loop()
        state = self._advance(posted, 0.0 if is_inline else _SLICE_S)
        if is_inline and state is State.ACTIVE:
            yield 0.0  # To a thread.
            state = self._advance(posted, _SLICE_S)
        while state is State.ACTIVE:
            if deadline_s is not None and time.monotonic() > deadline_s:
                with self._peer_lock:
                    posted.peer.num_stalled += 1
                    self._stalled.append((posted, reclaim))
                raise PeerLostError(f"replica {there.owner} cannot be reached: no answer within {timeout_s} s")
            yield pause_s
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            state = self._advance(posted, 0.0)
        if state is State.FAILED:
            reclaim()
            raise PeerLostError(f"replica {there.owner} cannot be reached: the connection broke")

    async def _read_pieces(self, there: PeerMemory, address: int, into: torch.Tensor) -> None:
        for start in range(0, into.nbytes, _MAX_RECEIVE_PIECE_BYTES):
            piece = into[start : start + _MAX_RECEIVE_PIECE_BYTES]
            offset = await self._take_room(piece.nbytes)
            await self._threads.run(self._read_piece(there, address + start, piece, offset))

    def _read_piece(self, there: PeerMemory, address: int, into: torch.Tensor, offset: int) -> Steps[None]:
        move = Move(address, self._receive_region.address + offset, into.nbytes)
        reclaim = partial(self._reclaim_room, offset)
        yield from self._transfer(
            "READ",
            there,
            np.array([move]),
            self._receive_region,
            there.memory,
            timeout_s=self._read_timeout_s,
            reclaim=reclaim,
        )
        into.copy_(self._receive[offset : offset + into.nbytes])
        reclaim()

    async def _take_room(self, num_bytes: int) -> int:
        """Wait for a piece of the receive area, as long as a read may take."""
        deadline_s = time.monotonic() + self._read_timeout_s
        while True:
            with self._memory_lock:
                offset = self._receive_ranges.allocate(num_bytes)
            if offset is not None:
                return offset
            if time.monotonic() > deadline_s:
                raise TransferError("no room to receive an embedding: too many fetches are under way")
            await asyncio.sleep(_LAST_PAUSE_S / 10)

    def _reclaim_scratch(self, slot: int) -> None:
        with self._memory_lock:
            self._words.free_scratch.append(slot)

    def _reclaim_room(self, offset: int) -> None:
        with self._memory_lock:
            self._receive_ranges.free(offset)

    # -- one call of the agent, and who is met -------------------------------------------------------------------------

    def _post(
        self,
        operation: Literal["READ", "WRITE"],
        there: PeerMemory,
        moves: Moves,
        local: Region,
        remote: tuple[str, int],
        notice: bytes,
    ) -> _Posted:
        """Post a transfer, to the peer as it is now. Raises ``PeerLostError``."""
        self.sweep()
        peer = self._contact(there)
        here = local.kind, local.device
        try:
            transfer = self._agent.post(operation, peer.name, moves, local=here, remote=remote, notice=notice)
        except AgentError as error:
            self._leave(peer, is_lost=True)
            raise PeerLostError(f"replica {there.owner} cannot be reached: {error}") from error
        return _Posted(peer, transfer)

    def _notify(self, there: PeerMemory, notice: bytes) -> None:
        """Send a notice alone. Raises ``PeerLostError``."""
        peer = self._contact(there)
        is_lost = True
        try:
            self._agent.notify(peer.name, notice)
            is_lost = False
        except AgentError as error:
            raise PeerLostError(f"replica {there.owner} cannot be reached: {error}") from error
        finally:
            self._leave(peer, is_lost=is_lost)

    def _advance(self, posted: _Posted, budget_s: float) -> State:
        """Wait for a transfer for at most ``budget_s``; once it has ended, and nothing writes any more, let go of it.

        Not to be called again then.
        """
        started_s = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        state = posted.transfer.state
        while state is State.ACTIVE:
            try:
                state = self._agent.poll(posted.transfer).state
            except AgentError:
                state = State.FAILED
            elapsed_s = time.monotonic() - started_s
            if state is not State.ACTIVE or elapsed_s >= budget_s:
                break
            if elapsed_s > _SPIN_S:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)
        if state is not State.ACTIVE:
            self._leave(posted.peer, is_lost=state is State.FAILED)
        return state

    def _contact(self, there: PeerMemory) -> _Peer:
        """Return the connected peer, counted as active. Raises ``PeerLostError``."""
        with self._peer_lock:
            if self._is_closed:
                raise TransferError(SHUTTING_DOWN)
            peer = self._peers.pop(there.agent, None)
            if peer is None:
                self._supersede(there.owner)
                self._make_way()
                try:
                    peer = _Peer(self._agent.add_peer(there.description), there.owner)
                except AgentError as error:
                    raise PeerLostError(f"replica {there.owner} cannot be reached: {error}") from error
            self._peers[there.agent] = peer  # Last in order: used most recently.
            if peer.is_lost or peer.num_stalled:
                raise PeerLostError(f"replica {there.owner} cannot be reached: it does not answer earlier calls")
            peer.num_active += 1
            return peer

    def _leave(self, peer: _Peer, *, is_lost: bool) -> None:
        """Count a transfer as ended. A lost peer is forgotten with its last one: a new handle makes contact anew."""
        with self._peer_lock:
            peer.num_active -= 1
            peer.is_lost = peer.is_lost or is_lost
            if (peer.is_lost or peer.is_superseded) and peer.num_active == 0:
                self._forget(peer)

    def _supersede(self, owner: str) -> None:
        """Let go of earlier agents of a replica that has restarted, each when it is idle. The caller has the lock."""
        for peer in [peer for peer in self._peers.values() if peer.owner == owner]:
            peer.is_superseded = True
            if peer.num_active == 0:
                self._forget(peer)

    def _make_way(self) -> None:
        """Forget the peer that was idle for longest, when there are many. The caller has the lock."""
        if len(self._peers) >= _MAX_PEERS:
            idle = next((peer for peer in self._peers.values() if peer.num_active == 0), None)
            if idle is not None:
                self._forget(idle)

    def _forget(self, peer: _Peer) -> None:
        self._peers.pop(peer.name, None)
        with contextlib.suppress(AgentError):
            self._agent.remove_peer(peer.name)
