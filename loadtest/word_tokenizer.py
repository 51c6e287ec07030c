"""A tokenizer in which each of the simulated engine's words is one token, as most words of a text
are of a true one: with the engine's own, every byte is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from tokenizers import pre_tokenizers, trainers

from workers.engines.sim.text import FOLDER, SPECIAL, WORDS


@contextmanager
def word_tokenizer() -> Iterator[str]:
    """The folder that it is in, with the chat template of the engine's own."""
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 2, trainer)
    with TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        yield folder
