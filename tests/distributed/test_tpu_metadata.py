"""A TPU VM's worker learns from the metadata server, here a stand-in, which of them it is."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.cluster import Cluster, find_cluster

PREFIX = "/computeMetadata/v1/instance/"


@contextmanager
def metadata_server(attributes: Mapping[str, str], status: int = 404) -> Iterator[dict[str, str]]:
    """Serves the attributes, and `status` for others; yields the environment that leads there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            name = self.path.removeprefix(PREFIX)
            value = attributes.get(name.removeprefix("attributes/"))
            self.send_response(status if value is None else 200)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {"GCE_METADATA_HOST": f"localhost:{server.server_port}"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "endpoints", ["unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3", "10.0.0.2,10.0.0.3"]
)
def test_workers_of_a_pod_find_each_other(endpoints: str) -> None:
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": endpoints}
    with metadata_server(attributes) as environment:
        found = find_cluster(environment)
    assert found == Cluster("10.0.0.2:8476", 2, 1, ("10.0.0.2", "10.0.0.3"))


@pytest.mark.parametrize(
    "attributes",
    [{}, {"agent-worker-number": "0", "worker-network-endpoints": "unknown:unknown:10.0.0.2"}],
)
def test_without_other_workers_a_process_is_alone(attributes: dict[str, str]) -> None:
    with metadata_server(attributes) as environment:
        assert find_cluster(environment) is None


def test_a_server_that_fails_is_no_reason_to_run_on_a_part_of_the_pod() -> None:
    silent = pytest.raises(UserError, match="did not say which TPU worker this is")
    with metadata_server({}, status=503) as environment, silent:
        find_cluster(environment)
    with silent:
        find_cluster(environment)  # and now it is gone


def test_what_the_environment_says_comes_first() -> None:
    environment = {
        "GCE_METADATA_HOST": "localhost:1",
        "TPU_WORKER_HOSTNAMES": "a,b",
        "TPU_WORKER_ID": "0",
    }
    assert find_cluster(environment) == Cluster("a:8476", 2, 0, ("a", "b"))
    assert find_cluster({"GCE_METADATA_HOST": "localhost:1", "TPU_SKIP_MDS_QUERY": "1"}) is None
