"""The version of the package is the same wherever it is written."""

import tomllib
from pathlib import Path

import yaml

import grpo_eqx

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_versions_are_the_same() -> None:
    assert grpo_eqx.__version__ == PROJECT["version"]
    assert CITATION["version"] == PROJECT["version"]


def test_the_citation_says_what_the_project_does() -> None:
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["authors"] == PROJECT["authors"]


def test_the_changelog_has_this_version_once_any_is_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text
    released = f"## [{PROJECT['version']}] - " in text
    assert released or "\n## [" not in text.partition("## [Unreleased]")[2]
