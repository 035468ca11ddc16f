"""Files of environment variables."""

from pathlib import Path

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.tpu_vm.env_file import check_env_file


def file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / ".env"
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


def test_names_and_values_as_they_are(tmp_path: Path) -> None:
    path = file(
        tmp_path, "# a comment\n\nA=1\n_b2=x=y 'z' \"$HOME\" # all of it\nEMPTY=\nU=é\u2028é"
    )
    assert check_env_file(path) == path


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("export A=canary", "is not NAME=VALUE"),
        (" A=canary", "is not NAME=VALUE"),
        ("canary", "is not NAME=VALUE"),
        ("1A=canary", "is not NAME=VALUE"),
        ("A B=canary", "is not NAME=VALUE"),
        ("A= canary", "whitespace around the value of A"),
        ("A=canary\r", "whitespace around the value of A"),
        ("A=can\0ary", "a null byte"),
        ("A='canary'", "quotes around the value of A"),
        ('A="canary"', "quotes around the value of A"),
    ],
)
def test_what_would_be_read_otherwise_is_refused_without_showing_it(
    tmp_path: Path, line: str, error: str
) -> None:
    with pytest.raises(UserError, match=error) as refused:
        check_env_file(file(tmp_path, f"OK=1\n{line}\n"))
    assert str(refused.value).startswith(f"line 2 of {tmp_path}")
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        check_env_file(file(tmp_path, "A=1\n", mode))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        check_env_file(tmp_path / "none")
    path = file(tmp_path, "")
    path.write_bytes(b"A=\xff\n")
    with pytest.raises(UserError, match="not encoded in UTF-8"):
        check_env_file(path)


def test_a_path_that_gcloud_would_take_for_a_host_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    with pytest.raises(UserError, match="has a ':'"):
        check_env_file(file(folder, "A=1\n"))
