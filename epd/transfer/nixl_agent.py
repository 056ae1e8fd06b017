"""One quiet, idle-cheap NIXL agent: loading the library, memory registration, reads from and writes to other agents.

A thin layer over ``nixl``, which is imported only here and only when asked for. Knows nothing of leases, blocks or
requests. What was measured with nixl 1.5 and shaped this file (2 cores, UCX, host memory):

* ``nixl_agent`` starts its progress thread with a delay of zero: it polls, and takes a whole core while idle. With a
  delay the thread sleeps in ``poll()`` on UCX's event descriptors, wakes at once when a peer speaks, and idles at
  0.1 % of a core. Hence ``_PROGRESS_DELAY_US``, which the Python class does not let one set.
* Between processes of one host UCX moves data with ``process_vm_readv`` and ``process_vm_writev`` (its transport
  ``cma``), inside the call that posts the transfer and with the GIL released: 64 MiB in 1,024 descriptors take
  12-22 ms, against 80-110 ms over ``tcp``. UCX chooses it unasked, so ``UCX_TLS`` is left alone.
* A write is ``DONE`` when it is complete at the *peer*: NIXL's UCX backend ends each transfer with a flush of the
  endpoint, which UCX completes only once all that was put has reached the peer's memory. The notice given with a write
  is sent after that flush has completed, never before, and the state stays ``PROC`` until it is sent. So whoever has
  the notice sees the data, on every transport.
* ``release`` of an active transfer returns at once, and ``remove_remote_agent`` too, but neither stops it: 64 MiB were
  seen to arrive after both. Removal even makes its state unreadable. So the one proof that nothing can write any more
  is the state ``DONE`` or ``ERR``; no transfer is released, and no peer removed, before that.
"""

from __future__ import annotations

import contextlib
import logging.config
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from epd.transfer.moves import Moves

if TYPE_CHECKING:
    import torch

__all__ = ["Agent", "AgentError", "Region", "State", "Transfer", "load"]

_PROGRESS_DELAY_US = 100_000


class AgentError(Exception):
    """The library refused a call, usually because the peer is gone."""


class State(Enum):
    ACTIVE = "PROC"
    DONE = "DONE"
    FAILED = "ERR"


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory: ``kind`` is NIXL's word for where it is, ``device`` an index among those."""

    address: int
    num_bytes: int
    kind: str
    device: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A read or write as ``post`` left it. One that has ended is over: its handle has been given back."""

    native: Any
    state: State


class Agent:
    """A NIXL agent under a lock, since the library does not promise to be thread-safe.

    Calls that post or poll may take milliseconds: make them off the event loop.
    """

    def __init__(self, name: str) -> None:
        """Raises ``ImportError`` without the library, ``AgentError`` when it has no usable transport."""
        nixl = load()
        self.name = name
        self._errors = tuple(value for key, value in vars(nixl._bindings).items() if key.endswith("Error"))
        self._lock = threading.Lock()
        self._registered: list[Any] = []
        with self._translated():
            self._agent = _create(nixl, name)

    @property
    def is_busy(self) -> bool:
        """Whether a call would wait for another one."""
        return self._lock.locked()

    def register(self, tensor: torch.Tensor) -> Region:
        """Register the tensor's memory, which must outlive the agent and never move."""
        with self._translated():
            self._registered.append(self._agent.register_memory([tensor]))
        is_host = tensor.device.type == "cpu"
        return Region(
            tensor.data_ptr(),
            tensor.nbytes,
            "DRAM" if is_host else "VRAM",
            0 if is_host else tensor.get_device(),
        )

    def describe(self) -> bytes:
        """Return what a peer needs to read from this agent, covering what is registered so far."""
        with self._translated():
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, description: bytes) -> str:
        with self._translated():
            name = self._agent.add_remote_agent(description)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect. Only when no transfer from this peer is active."""
        with self._translated():
            self._agent.remove_remote_agent(name)

    def post(
        self,
        operation: Literal["READ", "WRITE"],
        peer: str,
        moves: Moves,
        *,
        local: tuple[str, int],
        remote: tuple[str, int],
        notice: bytes = b"",
    ) -> Transfer:
        """Post one transfer; ``local`` and ``remote`` say (kind, device) of the two sides' memory.

        ``notice``, unless empty, reaches the peer after the data. A transfer that is still active is so until ``poll``
        says otherwise.
        """
        (local_kind, local_device), (remote_kind, remote_device) = local, remote
        agent = self._agent
        ours, theirs = _descriptors(moves[:, 1], moves, local_device), _descriptors(moves[:, 0], moves, remote_device)
        with self._translated():
            native = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs(ours, local_kind),
                agent.get_xfer_descs(theirs, remote_kind),
                peer,
                notice,
            )
            state = State(agent.transfer(native))
            return self._settled(native, state)

    def poll(self, transfer: Transfer) -> Transfer:
        """Return an active transfer as it is now."""
        with self._translated():
            return self._settled(transfer.native, State(self._agent.check_xfer_state(transfer.native)))

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a notice alone. It follows the data of transfers that have ended; nothing tells whether it arrives."""
        with self._translated():
            self._agent.send_notif(peer, notice)

    def take_notices(self) -> list[bytes]:
        """Return the notices that came since the last call, from all peers."""
        with self._translated():
            if self._agent is None:
                return []
            return [notice for notices in self._agent.get_new_notifs().values() for notice in notices]

    def close(self) -> None:
        """Deregister everything and stop. Only when no transfer is active."""
        with self._translated():
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            self._registered.clear()
            self._agent = None

    def _settled(self, native: Any, state: State) -> Transfer:
        """Give the handle of a transfer that has ended back. The caller has the lock."""
        if state is not State.ACTIVE:
            with contextlib.suppress(*self._errors):
                self._agent.release_xfer_handle(native)
        return Transfer(native, state)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except self._errors as error:
                raise AgentError(str(error) or type(error).__name__) from error


def _descriptors(addresses: Any, moves: Moves, device: int) -> Any:
    """Return what the library takes: uint64 ``[num_moves, 3]`` of address, number of bytes and device."""
    descriptors = np.empty((len(moves), 3), dtype=np.uint64)
    descriptors[:, 0], descriptors[:, 1], descriptors[:, 2] = addresses, moves[:, 2], device
    return descriptors


def load() -> Any:
    """Import ``nixl`` without its noise. Raises ``ImportError``.

    Its C++ side and UCX print what this module raises anyway; set ``NIXL_LOG_LEVEL`` and ``UCX_LOG_LEVEL`` to see it.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    with _kept_logging():
        import nixl  # type: ignore[import-untyped, unused-ignore]
        import nixl._api
        import nixl._bindings
    return nixl


@contextlib.contextmanager
def _kept_logging() -> Iterator[None]:
    """Undo what importing ``nixl`` does to everyone's logging: it closes all handlers and silences their errors."""
    configure, raises = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raises


def _create(nixl: Any, name: str) -> Any:
    """Create an agent whose progress thread sleeps while nothing happens."""
    agent = nixl._api.nixl_agent(name, nixl._api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = nixl._bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_DELAY_US
    config.syncMode = nixl._bindings.NIXL_THREAD_SYNC_NONE
    agent.agent = nixl._bindings.nixlAgent(name, config)
    if "UCX" not in agent.get_plugin_list():
        raise AgentError("nixl has no UCX plugin here")
    agent.create_backend("UCX")
    return agent
