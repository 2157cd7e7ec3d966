"""Tiny pretrained networks of `transformers`, with random weights, in local folders."""

from pathlib import Path

import torch

from fedbayes.core import pretrained
from fedbayes.errors import ModelError

WORDS = (
    *("good", "bad", "fine", "poor", "great", "awful", "pain", "fever", "none", "severe", "mild"),
    *("the", "a", "was", "is", "very", "not"),
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def available(package: str) -> bool:
    """Whether a package of the extra `hf` is here and works."""
    try:
        pretrained.require(package, "a test", ModelError)
    except ModelError:
        return False
    return True


def write_text_network(folder: Path, hidden: int = 32, layers: int = 2, length: int = 32) -> Path:
    """A BERT, and a tokenizer of words built from nothing."""
    pretrained.require("transformers", "a test", ModelError)
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=length,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder


def write_image_network(folder: Path) -> Path:
    """A vision transformer, and its image processor."""
    pretrained.require("transformers", "a test", ModelError)
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def write_texts(file: Path, rows: int = 90) -> Path:
    """Texts of three sites, of which a word tells the class."""
    kinds = (["good", "fine", "great", "none"], ["bad", "poor", "awful", "severe"])
    lines = ["site,note,outcome"]
    for row in range(rows):
        word = kinds[row % 2][row // 2 % 4]
        more = " ".join(WORDS[(row + step) % 6 + 11] for step in range(row % 5))
        lines.append(f"s{row % 3},the pain was {word} {more},{('well', 'ill')[row % 2]}")
    file.write_text("\n".join(lines) + "\n")
    return file
