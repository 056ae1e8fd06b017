"""Errors cross process boundaries: one that does not pickle reaches the user as an unreadable 500."""

from __future__ import annotations

import inspect
import pickle

import pytest

from epd import errors

SAMPLES = [
    errors.ConfigError("args.pools", "no pool can decode"),
    errors.InvalidRequestError("too long", "messages[0]"),
    errors.MediaError("not an image", "messages[0].content[1]"),
    errors.PromptTooLongError("9000 tokens"),
    errors.UnsupportedModeError("epd", "epd.mode"),
    errors.AuthenticationError("no key"),
    errors.ForbiddenError("not from here"),
    errors.ModelNotFoundError("no such model"),
    errors.BodyTooLargeError("too large"),
    errors.AdmissionRejectedError("too busy", "ttft", 2.5),
    errors.MediaFetchError("timed out", "messages[0].content[0]", 3.0),
    errors.StageFailedError("prefill", "the replica died", 1.5),
    errors.DeadlineExceededError("too late"),
    errors.RequestReturnedError("r1", "no blocks"),
    errors.TransferError("broken"),
    errors.HandleExpiredError("released"),
    errors.IncompatiblePeerError("other dtype"),
    errors.PeerLostError("gone"),
    errors.PeerGoneError("gone"),
    errors.EpdError("plain"),
]


def test_every_error_has_a_sample():
    classes = {value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__}
    assert classes == {type(sample) for sample in SAMPLES}


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_a_process_boundary_with_its_attributes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.message == error.message
    assert vars(copy) == vars(error)


def test_messages_are_sentences_for_the_user():
    assert str(errors.ConfigError("args.pools", "no pool can decode")) == "args.pools: no pool can decode"
    assert str(errors.InvalidRequestError("too long", "messages[0]")) == "too long"
    assert str(errors.StageFailedError("prefill", "the replica died")) == "prefill failed: the replica died"
