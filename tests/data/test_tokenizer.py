"""The bytes of each token are what decoding makes of it, and a folder says how a text ends."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.token_files import TokenFiles
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models.pretrained import model_folder

TEXTS = [
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "価格は€5です。  12 + 30 = 42\n\n\tDone 🎉🎉",
    "<answer> 7 </answer>",
]
Make = Callable[[], ChatTokenizer]
END = "<|end|>"


def chat_tokenizer(tokenizer: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END))


def byte_level() -> ChatTokenizer:
    """As Qwen2's: BPE over bytes, each spelled as a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return chat_tokenizer(tokenizer)


def with_fallback_to_bytes() -> ChatTokenizer:
    """As Llama 2's: BPE over characters with a mark for spaces, and bytes for all others."""
    vocab = {END: 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {token: i for i, token in enumerate("▁abcdeü", len(vocab))} | {"▁a": 264, "▁▁": 265}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return chat_tokenizer(tokenizer)


def of_characters() -> ChatTokenizer:
    """BPE over characters, whose tokens are joined as they are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return chat_tokenizer(tokenizer)


def of_words() -> ChatTokenizer:
    """A token for each word, joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel({END: 0, "über": 1, "den": 2, "Deich": 3}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return chat_tokenizer(tokenizer)


def embedded() -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(str(model_folder("tiny_qwen2")))


@pytest.mark.parametrize("make", [embedded, byte_level, of_characters])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_make_its_bytes(make: Make, text: str) -> None:
    tokenizer = make()
    added = tokenizer.token_bytes(len(tokenizer.tokenizer))
    ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (
        b"".join(added[i] for i in ids).decode() == text == tokenizer.decode_completions([ids])[0]
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (with_fallback_to_bytes, "a bad  cab  über Köln, für 5€"),
        (of_words, "über den Deich den"),
    ],
)
def test_a_space_before_the_first_token_is_not_decoded(make: Make, text: str) -> None:
    tokenizer = make()
    added = tokenizer.token_bytes(len(tokenizer.tokenizer))
    ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(added[i] for i in ids).decode() == " " + text
    assert tokenizer.decode_completions([ids]) == [text]


@pytest.mark.parametrize("make", [byte_level, with_fallback_to_bytes])
def test_every_byte_has_its_token(make: Make) -> None:
    tokenizer = make()
    added = tokenizer.token_bytes(len(tokenizer.tokenizer))
    assert {bytes([byte]) for byte in range(256)} <= set(added)


@pytest.mark.parametrize("make", [byte_level, with_fallback_to_bytes, of_characters, of_words])
def test_special_tokens_and_ids_without_a_token_add_nothing(make: Make) -> None:
    tokenizer = make()
    size = len(tokenizer.tokenizer)
    more = [AddedToken("<tool>", special=False), AddedToken("<|pad|>", special=True)]
    tokenizer.tokenizer.add_tokens(more)
    added = tokenizer.token_bytes(size + 5)
    assert len(added) == size + 5
    assert added[size].strip() == b"<tool>"
    assert added[0] == b""
    assert added[size + 1 :] == [b""] * 4


def test_tokens_added_to_a_byte_level_tokenizer_are_decoded_like_its_own() -> None:
    tokenizer = byte_level()
    size = len(tokenizer.tokenizer)
    texts = ["<tool>", "\n\n", " 価", "Ġq"]
    tokenizer.tokenizer.add_tokens([AddedToken(text, special=False) for text in texts])
    added = tokenizer.token_bytes(size + 4)[size:]
    assert added == [b"<tool>", b"\n\n", " 価".encode(), b" q"]
    assert [text.decode() for text in added] == tokenizer.decode_completions(
        [[size + i] for i in range(4)]
    )


@pytest.mark.parametrize("make", [embedded, byte_level])
def test_texts_of_tokens_make_a_text_and_special_ones_have_names(make: Make) -> None:
    tokenizer, text = make(), "3 apples, is it?"
    ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(tokenizer.token_texts(ids)) == text
    end = tokenizer.eos_ids[0]
    assert tokenizer.token_texts([ids[0], end, ids[0]])[1] == (
        tokenizer.tokenizer.convert_ids_to_tokens(end)
    )


def test_a_token_that_is_part_of_a_character_has_a_replacement_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.tokenizer("価", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert set("".join(tokenizer.token_texts(ids))) == {"\N{REPLACEMENT CHARACTER}"}


def test_fewer_ids_than_the_tokenizer_has() -> None:
    tokenizer = embedded()
    assert tokenizer.token_bytes(7) == [b"", b"", b"", b"!", b'"', b"#", b"$"]


# How a completion ends: the embedded tokenizer's own end is 2.

GENERATION = "generation_config.json"


def folder_with(
    path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None = None
) -> Path:
    """The embedded tokenizer beside these files of a model."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder("tiny_qwen2") / name, path)
    for name, fields in {GENERATION: generation, "config.json": config}.items():
        if fields is not None:
            (path / name).write_text(json.dumps({"model_type": "qwen2", **fields}))
    return path


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 5}, (7, 5, 2)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": [8, 2, 5]}, (7, 8, 2, 5)),
        ({"eos_token_id": 1}, {}, (1, 2)),
        ({"temperature": 0.7}, {"eos_token_id": [5, 6]}, (5, 6, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 5}, (5, 2)),
        ({"eos_token_id": []}, {"eos_token_id": [2, 5]}, (2, 5)),
        (None, {"eos_token_id": 5}, (5, 2)),
        (None, {"eos_token_id": 0}, (0, 2)),
        ({}, {"eos_token_id": None}, (2,)),
        ({}, {}, (2,)),
        (None, None, (2,)),
    ],
)
def test_ends_are_those_of_generation_of_the_model_and_its_own(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any] | None,
    ids: tuple[int, ...],
) -> None:
    assert ChatTokenizer.from_pretrained(folder_with(tmp_path, generation, config)).eos_ids == ids


@pytest.mark.parametrize("named", ["2", 2.0, True, -1, {"id": 2}, [2, "3"], [[2]]])
@pytest.mark.parametrize("file", [GENERATION, "config.json"])
def test_ends_that_are_no_ids_are_refused(tmp_path: Path, file: str, named: Any) -> None:
    fields = {"eos_token_id": named}
    folder = folder_with(tmp_path, *((fields, {}) if file == GENERATION else ({}, fields)))
    with pytest.raises(
        UserError, match=r"is neither a token id nor a list of token ids\.$"
    ) as error:
        ChatTokenizer.from_pretrained(folder)
    assert f"{folder / file}: eos_token_id={named!r}" in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "is not valid JSON"), ("[2]", r"holds \[2\]: expected a JSON object")],
)
def test_a_file_that_is_no_generation_config_is_named(
    tmp_path: Path, content: str, complaint: str
) -> None:
    folder = folder_with(tmp_path, None)
    (folder / GENERATION).write_text(content)
    with pytest.raises(UserError, match=f"{GENERATION} {complaint}"):
        ChatTokenizer.from_pretrained(folder)


def test_a_folder_that_transformers_refuses_is_one_sentence(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None, {"rms_norm_eps": None})
    with pytest.raises(UserError, match="contains no usable tokenizer") as error:
        ChatTokenizer.from_pretrained(folder)
    assert "'rms_norm_eps' expected float" in str(error.value)
    assert "\n" not in str(error.value)


# What is written beside a model: that of Qwen2.5-7B-Instruct, with other ids.

PUBLISHED: dict[str, Any] = {
    "bos_token_id": 4,
    "pad_token_id": 9,
    "do_sample": True,
    "eos_token_id": [7, 8, 2],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def written(tokenizer: ChatTokenizer, folder: Path) -> dict[str, Any]:
    tokenizer.save_pretrained(folder)
    return json.loads((folder / GENERATION).read_text())


def test_generation_keeps_its_fields_and_has_the_ids_in_use(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_pretrained(folder_with(tmp_path, PUBLISHED))
    expected = {"model_type": "qwen2", **PUBLISHED, "pad_token_id": tokenizer.pad_id}
    assert tokenizer.pad_id == 0
    assert written(tokenizer, tmp_path / "export") == expected
    again = ChatTokenizer.from_pretrained(tmp_path / "export")
    assert again.eos_ids == (7, 8, 2)
    assert written(again, tmp_path / "again") == expected


def test_an_end_of_the_model_is_written_as_one_of_generation(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_pretrained(folder_with(tmp_path, None, {"eos_token_id": 5}))
    assert written(tokenizer, tmp_path / "export") == {"eos_token_id": [5, 2], "pad_token_id": 0}
    assert ChatTokenizer.from_pretrained(tmp_path / "export").eos_ids == (5, 2)


def test_a_tokenizer_of_no_folder_has_no_more_to_write_than_its_ids(tmp_path: Path) -> None:
    tokenizer = byte_level()
    assert written(tokenizer, tmp_path) == {"eos_token_id": 0, "pad_token_id": 0}


# Prompts: what the model reads of them.

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Count."}


def with_template(template: str | None, **options: Any) -> ChatTokenizer:
    chat = byte_level()
    chat.tokenizer.chat_template = template
    return ChatTokenizer(chat.tokenizer, **options)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("1 + 1?", {}), "[system]Think.[user]1 + 1?[assistant]"),
        (Prompt([USER], {}), "[system]Think.[user]1 + 1?[assistant]"),
        (Prompt([SYSTEM, USER], {}), "[system]Count.[user]1 + 1?[assistant]"),
    ],
)
def test_messages_are_rendered_by_the_template(prompt: Prompt, expected: str) -> None:
    chat = with_template(TEMPLATE, system_prompt="Think.")
    assert chat.render(prompt) == expected
    assert chat.tokenizer.decode(chat.encode_prompts([prompt])[0]) == expected


def test_without_a_template_a_question_is_continued_where_that_is_asked_for() -> None:
    assert with_template(None, plain=True).render(Prompt("1 + 1?", {})) == "1 + 1?"
    assert with_template(TEMPLATE, plain=True).render(Prompt("1 + 1?", {})) == "1 + 1?"
    assert with_template(TEMPLATE).render(Prompt("1 + 1 =", {}, plain=True)) == "1 + 1 ="
    with pytest.raises(UserError, match="the tokenizer has no chat template: set chat_template"):
        with_template(None).render(Prompt("1 + 1?", {}))
    with pytest.raises(UserError, match="are conversations, and chat_template is none"):
        with_template(TEMPLATE, plain=True).render(Prompt([USER], {}))


def test_a_system_prompt_without_messages_is_refused() -> None:
    with pytest.raises(UserError, match="system_prompt is set, and the problems are texts"):
        with_template(TEMPLATE, system_prompt="Think.").render(Prompt("1 =", {}, plain=True))


def test_prompts_of_both_kinds_keep_their_places() -> None:
    chat = with_template(TEMPLATE)
    prompts = [Prompt("a", {}, plain=True), Prompt("b", {}), Prompt("c", {}, plain=True)]
    decoded = [chat.tokenizer.decode(ids) for ids in chat.encode_prompts(prompts)]
    assert decoded == ["a", "[user]b[assistant]", "c"]


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [(319, "320 tokens, but the model's vocabulary has 319"), (401, "far fewer than the 401")],
)
def test_another_models_tokenizer_is_refused(vocab_size: int, message: str) -> None:
    chat = byte_level()
    assert len(chat.tokenizer) == 320
    chat.check_belongs_to(400)
    with pytest.raises(UserError, match=message):
        chat.check_belongs_to(vocab_size)


def test_ends_and_ids_that_the_tokenizer_does_not_have_are_refused() -> None:
    """Also in a vocabulary with holes, which has fewer tokens than its highest id says."""
    vocab = {f"word{i}": i + (i > 4) for i in range(10)}  # without the id 5
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="word0"))
    chat = ChatTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word2"), [5]
    )
    with pytest.raises(UserError, match="eos_token_id is 5, but the tokenizer's 10 tokens"):
        chat.check_belongs_to(12)
    with pytest.raises(UserError, match="10 tokens, but the model's vocabulary has 10, without"):
        chat.check_belongs_to(10)


def test_the_line_on_ends_says_which_are_ordinary_tokens(tmp_path: Path) -> None:
    chat = ChatTokenizer.from_pretrained(folder_with(tmp_path, {"eos_token_id": [3, 1]}))
    assert chat.describe_ends() == (
        "completions end at '!' (3, an ordinary token), '<|im_start|>' (1) or '<|im_end|>' (2)"
    )


# A tokenizer that is passed beside a model's folder, which has its own.


def passed_to(folder: Path, change: Callable[[Any], None]) -> ChatTokenizer:
    """The folder's tokenizer after a change, as the model in the folder takes it."""
    files = TokenFiles.read(folder)
    tokenizer = files.tokenizer()
    change(tokenizer)
    return ChatTokenizer(tokenizer).of_model(files, files.tokenizer())


def test_the_models_own_tokenizer_may_have_more_tokens(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    passed_to(folder, lambda tokenizer: None)
    more = passed_to(folder, lambda tokenizer: tokenizer.add_tokens(["<more>"]))
    assert len(more.tokenizer) == 449


def test_another_models_tokenizer_is_refused_where_the_model_has_its_own(tmp_path: Path) -> None:
    """Of a size that it could well have."""
    files = TokenFiles.read(folder_with(tmp_path, None))
    tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(430)}))
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word2")
    with pytest.raises(UserError, match=r"id 0 is 'word0' of it, and '<\|endoftext\|>' of the tok"):
        ChatTokenizer(other).of_model(files, files.tokenizer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vocab: vocab.pop("Ġgives"), r"is no token of it, and 'Ġgives' of .* \(1 of 448 "),
        (lambda vocab: vocab.update({"!": 4, '"': 3}), r"id 3 is '\"' of it, and '!' .*\(2 of 448"),
        (lambda vocab: vocab.update(renamed=vocab.pop("!")), "id 3 is 'renamed' of it, and '!'"),
        (lambda vocab: vocab.update({"!": 448}), r"id 3 is no token of it, and '!' .*\(1 of 448"),
    ],
    ids=["one less", "two that changed places", "one with another name", "one that moved"],
)
def test_a_token_that_differs_is_named(
    tmp_path: Path, change: Callable[[dict[str, int]], Any], message: str
) -> None:
    files = TokenFiles.read(folder_with(tmp_path, None))
    vocab = files.tokenizer().get_vocab()
    change(vocab)
    other = Tokenizer(models.WordLevel(vocab, unk_token="<|endoftext|>"))
    passed = PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<|im_end|>")
    with pytest.raises(UserError, match=message):
        ChatTokenizer(passed).of_model(files, files.tokenizer())


def with_one_beyond() -> ChatTokenizer:
    """A tokenizer as Gemma 3's, with a special token for images after all others."""
    chat = byte_level()
    chat.tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    return ChatTokenizer(chat.tokenizer, chat.eos_ids)


def test_a_special_token_beyond_the_models_vocabulary_is_accepted_where_no_prompt_has_it() -> None:
    chat = with_one_beyond()
    assert len(chat.tokenizer) == 321
    chat.check_belongs_to(320)
    (ids,) = chat.encode_prompts([Prompt("text", {}, plain=True)])
    chat.check_ids(ids, 320, "the prompt")
    (ids,) = chat.encode_prompts([Prompt("an <image_soft_token>", {}, plain=True)])
    with pytest.raises(
        UserError, match=r"the prompt has the token '<image_soft_token>' \(320\).* has 320 tokens"
    ):
        chat.check_ids(ids, 320, "the prompt")
    assert len(chat.token_bytes(320)) == 320
    assert chat.ids_without_token(320) == frozenset()


def test_an_end_padding_or_ordinary_token_beyond_the_models_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="eos_token_id is 320, but the model's vocabulary has 320"):
        ChatTokenizer(with_one_beyond().tokenizer, [320]).check_belongs_to(320)
    chat = with_one_beyond()
    chat.tokenizer.pad_token = "<image_soft_token>"
    with pytest.raises(UserError, match="pad_token_id is 320, but the model's vocabulary has 320"):
        chat.check_belongs_to(320)
    chat = with_one_beyond()
    chat.tokenizer.add_tokens(["ordinary"])
    with pytest.raises(UserError, match="322 tokens, but the model's vocabulary has 320, without"):
        ChatTokenizer(chat.tokenizer, chat.eos_ids).check_belongs_to(320)
