"""One quiet, idle-cheap NIXL agent: loading the library, memory registration, and reads from other agents.

A thin layer over ``nixl``, which is imported only here and only when asked for. Knows nothing of leases, blocks or
requests. What was measured with nixl 1.5 and shaped this file (2 cores, UCX, host memory):

* ``nixl_agent`` starts its progress thread with a delay of zero: it polls, and takes a whole core while idle. With a
  delay the thread sleeps in ``poll()`` on UCX's event descriptors, wakes at once when a peer speaks, and idles at
  0.1 % of a core. Hence ``_PROGRESS_DELAY_US``, which the Python class does not let one set.
* Between processes of one host UCX reads with ``process_vm_readv`` (its transport ``cma``), inside the call that posts
  the transfer and with the GIL released: 64 MiB in 1,024 descriptors take 12-22 ms, against 80-110 ms over ``tcp``.
  UCX chooses it unasked, so ``UCX_TLS`` is left alone.
* ``release`` of an active transfer returns at once, and ``remove_remote_agent`` too, but neither stops it: 64 MiB were
  seen to arrive after both. Removal even makes its state unreadable. So the one proof that nothing can write any more
  is the state ``DONE`` or ``ERR``; no transfer is released, and no peer removed, before that.
"""

from __future__ import annotations

import contextlib
import logging.config
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from epd.transfer.moves import Move

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
    """A posted read, and what the library said at that moment."""

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

    def read(self, peer: str, moves: Sequence[Move], *, local: tuple[str, int], remote: tuple[str, int]) -> Transfer:
        """Post one read; ``local`` and ``remote`` say (kind, device) of the two sides' memory.

        The transfer is active until ``poll`` says otherwise, then ``release`` it.
        """
        (local_kind, local_device), (remote_kind, remote_device) = local, remote
        agent = self._agent
        into = [(move.local_address, move.num_bytes, local_device) for move in moves]
        source = [(move.remote_address, move.num_bytes, remote_device) for move in moves]
        with self._translated():
            native = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(into, local_kind),
                agent.get_xfer_descs(source, remote_kind),
                peer,
            )
            return Transfer(native, State(agent.transfer(native)))

    def poll(self, transfer: Transfer) -> State:
        with self._translated():
            return State(self._agent.check_xfer_state(transfer.native))

    def release(self, transfer: Transfer) -> None:
        """Give a finished transfer's handle back."""
        with self._translated():
            self._agent.release_xfer_handle(transfer.native)

    def close(self) -> None:
        """Deregister everything and stop. Only when no transfer is active."""
        with self._translated():
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            self._registered.clear()
            del self._agent

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except self._errors as error:
                raise AgentError(str(error) or type(error).__name__) from error


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
