"""Bytes of a federation of a small transformer: all of it, its adapters, their factor B, its head.

The transformer has random weights, since bytes do not depend on them: two layers of 128, as of
`prajjwal1/bert-tiny`, with a vocabulary of its own.

    python benchmarks/adapters.py
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import fedbayes
from fedbayes.core import pretrained
from fedbayes.errors import ModelError

ROUNDS, SITES, WORDS = 2, 3, 2000
KINDS: dict[str, dict[str, Any]] = {
    "all of it": {"trains": "all"},
    "adapters of rank 8": {"trains": "lora", "lora_rank": 8},
    "their factor B": {"trains": "lora", "lora_rank": 8, "lora_trains": "b"},
    "the head": {"trains": "head"},
}


def write_network(folder: Path) -> Path:
    """A small BERT and a tokenizer of words, in a folder."""
    pretrained.require("transformers", "this benchmark", ModelError)
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{word}" for word in range(WORDS))]
    vocabulary = {word: number for number, word in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=512, **shape)
    BertModel(config).save_pretrained(folder)
    return folder


def write_texts(file: Path) -> Path:
    """Texts of some sites, of two classes."""
    lines = ["site,text,label"]
    lines += [f"{row % SITES},w{row % 7} w{row % 11},{row % 2}" for row in range(60)]
    file.write_text("\n".join(lines) + "\n")
    return file


def main() -> None:
    """Print a table."""
    warnings.simplefilter("ignore")
    print("what trains | parameters | bytes a client and way | times its tensors | in model file")
    with tempfile.TemporaryDirectory() as place:
        network, texts = write_network(Path(place, "net")), write_texts(Path(place, "texts.csv"))
        data = {"path": texts, "group": "site", "tokens": "text", "max_tokens": 8}
        for name, kind in KINDS.items():
            model = {"name": "transformers", "pretrained": str(network), **kind}
            folder = Path(place, name)
            run = fedbayes.run(rounds=ROUNDS, data=data, model=model, folder=folder)
            stored = run.folder.model()
            size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
            ways = [line[way] / SITES for line in run.metrics for way in ("bytes_up", "bytes_down")]
            count = sum(tensor.numel() for tensor in stored.values())
            file = run.folder.model_file.stat().st_size
            print(f"{name} | {count:,} | {max(ways):,.0f} | {max(ways) / size:.3f} | {file:,}")


if __name__ == "__main__":
    main()
