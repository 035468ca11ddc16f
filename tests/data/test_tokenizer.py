"""The bytes of each token are what decoding makes of it."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_eqx.construction import model_folder
from grpo_eqx.data.tokenizer import ChatTokenizer

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
    return ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))


@pytest.mark.parametrize("make", [embedded, byte_level, of_characters])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_make_its_bytes(make: Make, text: str) -> None:
    tokenizer = make()
    added = tokenizer.token_bytes(len(tokenizer.tokenizer))
    ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(added[i] for i in ids).decode() == text == tokenizer.decode([ids])[0]


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
    assert tokenizer.decode([ids]) == [text]


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
    assert [text.decode() for text in added] == tokenizer.decode([[size + i] for i in range(4)])


def test_fewer_ids_than_the_tokenizer_has() -> None:
    tokenizer = embedded()
    assert tokenizer.token_bytes(7) == [b"", b"", b"", b"!", b'"', b"#", b"$"]
