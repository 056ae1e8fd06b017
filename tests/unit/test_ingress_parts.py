"""The parts of the ingress that need neither Ray nor a model. If these fail, dead replicas stay in sight, keys that
should be refused are taken, or a metrics page cannot be scraped.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.auth import is_local, load_api_keys
from deployments.cluster_view import ClusterView
from deployments.errors import to_http
from deployments.messages import ReplicaAddress
from deployments.metrics import IngressMetrics, ReplicaSnapshot, render
from deployments.payload_inbox import TICKET_LIFETIME_S, PayloadInbox
from deployments.preparation import SamplingDefaults
from deployments.serve_file import read_serve_file
from deployments.trace import TIMINGS, trace_object
from epd import errors
from epd.config import IngressConfig
from epd.stages.stats import Histogram, WorkerStats
from epd.types import Mode, Placement, ReplicaLoad, Stage, StageReport

HERE, ELSEWHERE = ("127.0.0.1", 8000), ("10.1.2.3", 8000)
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def load(replica_id: str, **fields: int) -> ReplicaLoad:
    return ReplicaLoad(replica_id, replica_id.partition("#")[0], frozenset(Stage), **fields)


class FakePools:
    """Answers for pools; an exception in place of a list is raised."""

    def __init__(self, **answers: list[ReplicaLoad] | Exception) -> None:
        self.answers = answers

    async def ask(self, pool: str) -> Sequence[ReplicaLoad]:
        answer = self.answers[pool]
        if isinstance(answer, Exception):
            raise answer
        return answer


class TestClusterView:
    async def test_it_holds_who_answers_and_forgets_who_does_not(self):
        pools = FakePools(a=[load("a#1"), load("a#2")], b=[load("b#1")])
        view = ClusterView(["a", "b"], pools.ask, poll_interval_s=1.0, clock=lambda: 5.0)
        assert view.missing_pools == ["a", "b"]
        await view.refresh()
        assert [each.replica_id for each in view.loads] == ["a#1", "a#2", "b#1"]
        assert {each.reported_at_s for each in view.loads} == {5.0}
        pools.answers.update(a=[load("a#2")], b=TimeoutError())
        await view.refresh()
        assert [each.replica_id for each in view.loads] == ["a#2"]
        assert view.missing_pools == ["b"]

    async def test_a_failed_replica_is_gone_at_once_and_back_when_it_answers(self):
        pools = FakePools(a=[load("a#1"), load("a#2")])
        view = ClusterView(["a"], pools.ask, poll_interval_s=1.0)
        await view.refresh()
        view.drop("a#1")
        view.drop("a#1")
        assert [each.replica_id for each in view.loads] == ["a#2"]
        await view.refresh()
        assert [each.replica_id for each in view.loads] == ["a#1", "a#2"]

    async def test_loads_on_replies_replace_polled_ones(self):
        view = ClusterView(["a"], FakePools(a=[load("a#1")]).ask, poll_interval_s=1.0, clock=lambda: 7.0)
        await view.refresh()
        view.update(load("a#1", num_running=3))
        assert [(each.num_running, each.reported_at_s) for each in view.loads] == [(3, 7.0)]


class TestApiKeys:
    def keys(self, tmp_path: Path, **options: bool):
        path = tmp_path / "keys"
        path.write_text("# ours\nalpha\n\nbeta\n")
        return load_api_keys(IngressConfig(api_keys_file=str(path), **options))

    @pytest.mark.parametrize(
        "header", [None, "", "alpha", "Bearer", "Bearer ", "Bearer gamma", "Basic alpha", "Bearer a"]
    )
    def test_anything_but_a_known_key_is_refused(self, tmp_path: Path, header: str | None):
        with pytest.raises(errors.AuthenticationError):
            self.keys(tmp_path).check(header, ELSEWHERE)

    @pytest.mark.parametrize("header", ["Bearer alpha", "bearer beta", "Bearer  beta "])
    def test_a_known_key_is_taken(self, tmp_path: Path, header: str):
        self.keys(tmp_path).check(header, ELSEWHERE)

    def test_without_keys_this_machine_may_whatever_it_sends(self):
        keys = load_api_keys(IngressConfig())
        keys.check(None, HERE)
        keys.check("Bearer none", HERE)

    def test_anonymous_callers_may_be_let_in_but_wrong_keys_not(self, tmp_path: Path):
        keys = self.keys(tmp_path, allow_anonymous=True)
        keys.check(None, ELSEWHERE)
        with pytest.raises(errors.AuthenticationError):
            keys.check("Bearer gamma", ELSEWHERE)

    def test_without_keys_other_machines_are_refused_unless_anyone_may_call(self):
        with pytest.raises(errors.ForbiddenError, match="allow_anonymous"):
            load_api_keys(IngressConfig()).check("Bearer none", ELSEWHERE)
        load_api_keys(IngressConfig(allow_anonymous=True)).check(None, ELSEWHERE)

    @pytest.mark.parametrize(
        ("arrived_at", "expected"),
        [
            (("127.0.0.1", 8000), True),
            (("127.8.8.8", 8000), True),
            (("::1", 8000), True),
            (("::ffff:127.0.0.1", 8000), True),
            (("/run/epd.sock", None), True),
            (("10.1.2.3", 8000), False),
            (("0.0.0.0", 8000), False),
            (("fe80::1%eth0", 8000), False),
            (("localhost.example", 8000), False),
            (None, False),
        ],
    )
    def test_only_addresses_that_nobody_else_can_reach_are_local(self, arrived_at, expected: bool):
        assert is_local(arrived_at) is expected

    def test_a_server_that_was_meant_to_be_closed_does_not_start_open(self, tmp_path: Path):
        with pytest.raises(errors.ConfigError, match=r"args\.ingress\.api_keys_env"):
            load_api_keys(IngressConfig(api_keys_env="KEYS"), environ={"KEYS": " , "})
        with pytest.raises(errors.ConfigError, match=r"args\.ingress\.api_keys_file"):
            load_api_keys(IngressConfig(api_keys_file=str(tmp_path / "missing")))


class TestHttpErrors:
    def test_every_deliberate_error_has_a_status_of_its_own_choice(self):
        def kinds(base: type[errors.EpdError]) -> list[type[errors.EpdError]]:
            return [base, *(each for kind in base.__subclasses__() for each in kinds(kind))]

        statuses = {}
        for kind in kinds(errors.EpdError):
            if kind in (errors.EpdError, errors.ConfigError) or kind.__module__ != "epd.errors":
                continue
            error = kind.__new__(kind)
            Exception.__init__(error, "a", "b", 1.0)
            error.__dict__.update(param=None, retry_after_s=1.0, reason="r", stage="s", request_id="x")
            statuses[kind.__name__] = to_http(error, "id").status
        assert 500 not in statuses.values(), statuses
        assert set(statuses.values()) == {400, 401, 403, 404, 413, 429, 502, 503, 504}

    def test_a_bug_is_named_by_the_request_only(self):
        reply = to_http(ZeroDivisionError("secret"), "id-1")
        assert (reply.status, reply.headers) == (500, {})
        assert "id-1" in reply.message
        assert "secret" not in str(reply.body)

    def test_the_message_names_the_part_once(self):
        reply = to_http(errors.MediaError("cannot be decoded", "messages[0].content[1]"), "id")
        assert reply.message == "messages[0].content[1]: cannot be decoded"
        again = to_http(errors.MediaError(reply.message, "messages[0].content[1]"), "id")
        assert again.message == reply.message

    def test_waiting_times_are_whole_seconds_of_at_least_one(self):
        assert to_http(errors.AdmissionRejectedError("full", "ttft", 0.2), "id").headers == {"retry-after": "1"}
        assert to_http(errors.AdmissionRejectedError("full", "ttft", 3.2), "id").headers == {"retry-after": "4"}
        assert to_http(errors.HandleExpiredError("gone"), "id").headers == {"retry-after": "1"}


class TestMetricsPage:
    def snapshot(self) -> ReplicaSnapshot:
        histogram = Histogram()
        histogram.observe(0.02)
        stats = WorkerStats(
            stage_requests={Stage.ENCODE: 2},
            stage_seconds={Stage.ENCODE: histogram},
            transfer_bytes={("kv", "nixl"): 10},
            kv_blocks_total=8,
            kv_blocks_free=5,
        )
        return ReplicaSnapshot("pool", "pool#1", stats)

    def test_ingresses_and_replicas_share_one_valid_page(self):
        ingresses = [IngressMetrics("ingress#1"), IngressMetrics("ingress#2")]
        for each in ingresses:
            count = each.request_started()
            each.first_token("epd", 0.1)
            each.next_tokens("epd", 0.01, 3)
            count.end("epd", 200)
        shipped = [pickle.loads(pickle.dumps(each.families())) for each in ingresses]
        page = render(shipped, [self.snapshot()]).decode()
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        assert page.count("# TYPE epd_requests_total counter") == 1
        for replica in ("ingress#1", "ingress#2"):
            key = ("epd_requests_total", ("mode", "epd"), ("replica", replica), ("status", "200"))
            assert samples[key] == 1
            assert samples["epd_itl_seconds_count", ("mode", "epd"), ("replica", replica)] == 3
        base = (("pool", "pool"), ("replica", "pool#1"))
        assert samples["epd_kv_blocks_free", *base] == 5
        assert samples["epd_stage_seconds_count", *base, ("stage", "encode")] == 1
        assert samples["epd_transfer_bytes_total", ("backend", "nixl"), ("kind", "kv"), *base] == 10

    def test_a_request_is_counted_once_however_often_it_ends(self):
        metrics = IngressMetrics("i")
        count = metrics.request_started()
        count.end("epd", 200)
        count.end("epd", 499)
        page = render([metrics.families()], []).decode()
        assert 'status="200"} 1.0' in page
        assert "499" not in page
        assert 'epd_ingress_running_requests{replica="i"} 0.0' in page


class TestPayloadInbox:
    def test_a_ticket_is_good_once(self):
        inbox = PayloadInbox()
        inbox.deposit("t", {0: b"abc"})
        assert inbox.num_bytes == 3
        assert inbox.claim("t") == {0: b"abc"}
        with pytest.raises(errors.StageFailedError):
            inbox.claim("t")
        assert inbox.num_bytes == 0

    def test_tickets_that_nobody_claims_expire(self):
        now_s = [0.0]
        inbox = PayloadInbox(lambda: now_s[0])
        inbox.deposit("old", {0: b"abc"})
        now_s[0] = TICKET_LIFETIME_S + 1.0
        inbox.deposit("new", {0: b"d"})
        assert inbox.num_bytes == 1
        inbox.discard("new")
        inbox.discard("new")
        assert inbox.num_bytes == 0


class TestSamplingDefaults:
    @pytest.mark.parametrize(
        ("generation_config", "expected"),
        [
            ({}, (1.0, 1.0, 0)),
            ({"do_sample": False, "temperature": 0.7}, (0.0, 1.0, 0)),
            ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, (0.7, 0.8, 20)),
            ({"temperature": None, "top_k": True}, (1.0, 1.0, 0)),
        ],
    )
    def test_the_checkpoint_speaks_where_the_client_does_not(self, generation_config, expected):
        defaults = SamplingDefaults(generation_config)
        assert (defaults.temperature, defaults.top_p, defaults.top_k) == expected


class TestServeFile:
    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("a: [", "cannot be read"),
            ("a: 1", "applications"),
            ("applications: [{import_path: other:app}]", "exactly one"),
            ("applications: [{import_path: 'deployments.app:build_app', args: {pool: {}}}]", "args.pool"),
        ],
    )
    def test_a_file_that_cannot_work_says_why(self, tmp_path: Path, text: str, part: str):
        path = tmp_path / "x.yaml"
        path.write_text(text)
        with pytest.raises(errors.ConfigError) as failure:
            read_serve_file(path)
        assert part in failure.value.message

    @pytest.mark.parametrize(
        "path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda p: p.name
    )
    def test_every_shipped_file_is_valid(self, path: Path):
        assert read_serve_file(path).config.modes


def test_a_trace_has_every_timing_even_of_what_did_not_happen():
    placement = Placement(Mode.EPD, "p#1", "d#1", ("e#1",), "why")
    trace = trace_object(placement, StageReport({"encode": 0.5}, {"kv": 7}), ttft_s=1.5, num_attempts=1)
    assert list(trace["timings_ms"]) == list(TIMINGS)
    assert trace["timings_ms"]["encode"] == 500
    assert trace["timings_ms"]["ttft"] == 1500
    assert trace["bytes"] == {"embedding": 0, "kv": 7}
    assert trace["placement"] == {"encode": ["e#1"], "prefill": "p#1", "decode": "d#1"}


def test_replica_ids_and_addresses_are_the_same_thing():
    assert ReplicaAddress.parse("my#pool#abc123") == ReplicaAddress("my#pool", "abc123")
    assert str(ReplicaAddress("pool", "abc123")) == "pool#abc123"
