"""Tokenizers of every kind of file: from the hub as from a folder, or one sentence on why not."""

import ast
import base64
import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from huggingface_hub.utils import filter_repo_objects

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.token_files import TokenFiles, vocabulary_files
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models import hub
from grpo_eqx.models.hub import MODEL_FILES
from grpo_eqx.models.pretrained import model_folder

EMBEDDED = model_folder("tiny_qwen2")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Publishes a folder on a hub of which, as of the real one, what is asked for is downloaded."""
    monkeypatch.setattr(hub, "_snapshots", {})
    files: dict[str, Path] = {}

    def snapshot_download(
        name: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        source, target = files[name], tmp_path / "snapshot" / name
        paths = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for path in filter_repo_objects(
            paths, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, target / path)
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    def publish(folder: Path) -> str:
        files["o/m"] = folder
        return "o/m"

    return publish


def with_vocab_and_merges(folder: Path) -> None:
    whole = json.loads((EMBEDDED / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in whole["merges"]]
    (folder / "merges.txt").write_text("\n".join(merges))


def with_vocab_txt(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is"]))
    fields = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))


def with_all_in_one(folder: Path) -> None:
    shutil.copy(EMBEDDED / "tokenizer.json", folder)


def with_templates(folder: Path) -> None:
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool_use.jinja").write_text("{{ messages[0].content }}!")


@pytest.mark.parametrize(
    "write", [with_vocab_and_merges, with_vocab_txt, with_all_in_one, with_templates]
)
def test_what_loads_from_a_folder_loads_from_the_hub(
    tmp_path: Path, published: Callable[[Path], str], write: Callable[[Path], None]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(EMBEDDED / "config.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    write(folder)
    here = ChatTokenizer.from_pretrained(folder)
    there = ChatTokenizer.from_pretrained(model_folder(published(folder)))
    assert len(here.tokenizer) > 5
    assert here.tokenizer("what is")["input_ids"] == there.tokenizer("what is")["input_ids"]
    assert here.fingerprint() == there.fingerprint()


@pytest.mark.parametrize(
    ("file", "content", "package"),
    [
        ("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>", "sentencepiece"),
        ("spiece.model", b"\x0a\x0e\x0a\x05<unk>", "sentencepiece"),
        ("tokenizer.model.v3", b"\x0a\x0e\x0a\x05<unk>", "sentencepiece"),
        ("tokenizer.model", base64.b64encode(b"!") + b" 0\n", "tiktoken"),
        ("qwen.tiktoken", base64.b64encode(b"!") + b" 0\n", "tiktoken"),
    ],
)
def test_a_package_that_a_tokenizer_takes_is_named(
    tmp_path: Path,
    published: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: bytes,
    package: str,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "grpo_eqx.data.token_files.find_spec", lambda x: None if x == package else found(x)
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(EMBEDDED / "config.json", folder)
    (folder / file).write_bytes(content)
    for where in (folder, model_folder(published(folder))):
        with pytest.raises(UserError, match=rf"is {file}, which takes the package {package} to re"):
            ChatTokenizer.from_pretrained(where)
    shutil.copy(EMBEDDED / "tokenizer.json", folder)  # which is read instead
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert ChatTokenizer.from_pretrained(folder).eos_ids == (2,)


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, tmp_path)
    assert vocabulary_files(tmp_path) == []
    with pytest.raises(UserError, match=r"contains no tokenizer: copy tokenizer\.json"):
        TokenFiles.read(tmp_path).tokenizer()


def test_a_vocabulary_of_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    with_vocab_txt(tmp_path)
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"Qwen2Tokenizer finds no tokens in vocab\.txt; add the"):
        ChatTokenizer.from_pretrained(tmp_path)


def downloaded(files: Sequence[str]) -> list[str]:
    return list(filter_repo_objects(files, allow_patterns=list(MODEL_FILES)))


def test_neither_code_nor_pickles_nor_other_weights_are_downloaded() -> None:
    wanted = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "tekken.json",
        "model.safetensors.index.json", "added_tokens.json", "special_tokens_map.json",
        "chat_template.jinja", "chat_templates/tool_use.jinja", "tokenizer.model.v3",
    ]  # fmt: skip
    others = [
        "pytorch_model.bin", "consolidated.00.pth", "model.onnx", "model.gguf", "tf_model.h5",
        "flax_model.msgpack", "modeling_x.py", "training_args.bin", "model.ckpt", "a.pt",
        "rust_model.ot", "README.md", "figure.png", "tokenizer.pkl",
    ]  # fmt: skip
    assert downloaded([*wanted, *others]) == wanted


def test_the_files_of_all_tokenizers_of_transformers_are_downloaded() -> None:
    """But for pickles."""
    names = set[str]()
    for path in (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and "VOCAB_FILES_NAMES" in ast.unparse(node.targets[0]):
                constants = (x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant))
                names |= {str(x) for x in constants if "." in str(x)}
    assert len(names) > 10
    assert names - {*downloaded(sorted(names))} <= {
        x for x in names if x.endswith((".bin", ".pkl"))
    }
