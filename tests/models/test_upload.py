"""Uploads to a hub that stands in for Hugging Face's."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.common.errors import RunError

ADDRESS = "http://127.0.0.1/someone/trained"
PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


class Hub(ThreadingHTTPServer):
    """A hub that takes what is uploaded, with any token but `bad`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.created: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "bad" in (self.headers.get("Authorization") or ""):
            self._answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": ADDRESS, "name": "someone/trained"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer({"files": [{"path": path, **plain} for path in paths]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            self._answer({"commitUrl": f"{ADDRESS}/commit/1", "commitOid": "1"})
        else:
            self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "someone/trained", "sha": "1", "siblings": [], "tags": []})

    def _answer(self, content: dict[str, object], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def trainer(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    folder = tmp_path_factory.mktemp("run")
    trainer = GRPOTrainer(GRPOConfig(model=str(small_model), data=str(PROBLEMS), output_dir=folder))
    with trainer.programs.compiler:  # leaves nothing that compiles during other tests
        return trainer


def test_model_and_tokenizer_are_uploaded(hub: Hub, trainer: GRPOTrainer, tmp_path: Path) -> None:
    url = trainer.push_to_hub("someone/trained", private=True)
    assert url == f"{ADDRESS}/commit/1"
    assert '"private"' in json.dumps(hub.created[0])  # a flag of old hubs, a value of new ones
    trainer.save_pretrained(tmp_path)
    assert hub.files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_refusal_is_a_sentence_and_leaves_the_model(
    hub: Hub, trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(RunError, match=r"could not be uploaded to 'someone/trained' .* HF_TOKEN"):
        trainer.push_to_hub("someone/trained")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert trainer.push_to_hub("someone/trained")
