"""The lease table: when memory that was lent out is free again.

If these fail, blocks leak until the replica stops serving, or are reused under a reader.
"""

from __future__ import annotations

import threading

import pytest

from epd.errors import HandleExpiredError, TransferError
from epd.transfer.leases import LeaseTable


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_claim_that_ends_during_a_read_frees_after_it_however_it_ends() -> None:
    for end in ("release", "expire", "close"):
        clock, freed = Clock(), []
        leases: LeaseTable[str] = LeaseTable(10, clock)
        handle_id = leases.publish("blocks", 100, lambda freed=freed: freed.append(1))
        with leases.hold(handle_id) as payload, leases.hold(handle_id):
            assert payload == "blocks"
            clock.now_s = 10
            leases.release(handle_id) if end == "release" else getattr(leases, end)()
            assert (leases.num_live, leases.live_bytes, freed) == (0, 0, [])
            with pytest.raises(HandleExpiredError), leases.hold(handle_id):
                pass
        assert freed == [1]


def test_freeing_may_use_the_table_again() -> None:
    leases: LeaseTable[str] = LeaseTable(10, Clock())
    inner = leases.publish("inner", 1, lambda: None)
    outer = leases.publish("outer", 1, lambda: leases.release(inner))
    leases.release(outer)
    assert leases.num_live == 0


def test_a_late_renewal_saves_a_claim_that_nobody_collected() -> None:
    clock = Clock()
    leases: LeaseTable[str] = LeaseTable(10, clock)
    handle_id = leases.publish("blocks", 1, lambda: None)
    clock.now_s = 15
    leases.renew(handle_id)
    assert leases.expire() == 0
    clock.now_s = 25
    assert leases.expire() == 1
    with pytest.raises(HandleExpiredError):
        leases.renew(handle_id)


def test_the_oldest_claims_age_counts_from_its_publication_and_ends_with_it() -> None:
    clock = Clock()
    leases: LeaseTable[str] = LeaseTable(10, clock)
    assert leases.oldest_s == 0
    oldest = leases.publish("oldest", 1, lambda: None)
    clock.now_s = 6
    leases.publish("younger", 1, lambda: None)
    leases.renew(oldest)
    clock.now_s = 9
    assert leases.oldest_s == 9
    leases.release(oldest)
    assert leases.oldest_s == 3
    clock.now_s = 16
    leases.expire()
    assert leases.oldest_s == 0


def test_handle_ids_are_not_repeated() -> None:
    leases: LeaseTable[str] = LeaseTable(10, Clock())
    assert len({leases.publish("", 0, lambda: None) for _ in range(1000)}) == 1000


def test_a_closed_table_takes_nothing() -> None:
    leases: LeaseTable[str] = LeaseTable(10, Clock())
    leases.close()
    with pytest.raises(TransferError):
        leases.publish("", 0, lambda: None)


def test_racing_releases_free_once() -> None:
    freed: list[int] = []
    leases: LeaseTable[str] = LeaseTable(10, Clock())
    for claim in range(200):
        handle_id = leases.publish("", 8, lambda claim=claim: freed.append(claim))
        threads = [threading.Thread(target=leases.release, args=[handle_id]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert freed == list(range(200))
    assert leases.live_bytes == 0
