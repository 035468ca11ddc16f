"""Secrets of the environment stay there: no record of a run holds them."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from .conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.grid("secrets")]

SECRETS = {
    "HF_TOKEN": "hf_canary" + "0123456789" * 3,
    "WANDB_API_KEY": "canary" + "0123456789abcdef" * 2 + "01",
}
NO_SECRET = "no-secret-but-to-be-found"


def texts(folder: Path) -> dict[str, bytes]:
    """What every file below a folder holds, and says in its name; of tables, the text in them."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += str(pq.read_table(path).to_pylist()).encode()
        found[str(path.relative_to(folder))] = content + str(path).encode()
    return found


def assert_no_secret(output: str, files: dict[str, bytes]) -> None:
    for variable, secret in SECRETS.items():
        assert secret not in output, variable
        assert [name for name, held in files.items() if secret.encode() in held] == [], variable


def test_no_file_and_no_output_of_a_run_holds_a_secret(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    command = Command(
        small_model, programs, tmp_path / "run",
        steps=2, wandb="offline", system_prompt=NO_SECRET,
    )  # fmt: skip
    command.environment |= {**SECRETS, "WANDB_MODE": "offline"}
    output, files = command.finish(), texts(tmp_path)
    found = {name for name, held in files.items() if NO_SECRET.encode() in held}
    kinds = ("run/config.json", "checkpoints/step_2/facts", ".wandb")
    assert all(any(kind in name for name in found) for kind in kinds), found  # nothing is encoded
    assert any(b"'completion': " in held for held in files.values())
    assert_no_secret(output, files)


def test_the_error_of_a_download_holds_no_secret(programs: Path, tmp_path: Path) -> None:
    command = Command(Path("someone/else"), programs, tmp_path / "run")
    nobody = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    command.environment |= {**SECRETS, **nobody, "HF_HOME": str(tmp_path / "hub")}
    process = command.start()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "could not be downloaded from the Hugging Face hub" in output
    assert_no_secret(output, texts(tmp_path))


SHOW = """
import os
pid = os.getpid()
while pid > 1:
    print(open(f"/proc/{pid}/cmdline").read().replace(chr(0), " "))
    if "launch" in open(f"/proc/{pid}/cmdline").read().split(chr(0)):
        print("that was the launcher, and the secret is", len(os.environ["HF_TOKEN"]), "long")
        break
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
"""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_a_local_pod_gets_secrets_but_shows_them_on_no_command_line() -> None:
    """Other users of a machine can read command lines, but not the environment."""
    done = subprocess.run(
        [
            sys.executable, "-m", "grpo_eqx.cli.main", "launch", "local", "--processes", "2", "--",
            sys.executable, "-c", SHOW,
        ],
        env=os.environ | SECRETS, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[{rank}] that was the launcher, and the secret is 39 long" in done.stdout
    for secret in SECRETS.values():
        assert secret not in done.stdout + done.stderr
