"""How much one request may ask for, by the API server's settings. Checked before anything is made that grows with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import BadRequest
from engine.config import ApiConfig


@dataclass(frozen=True)
class RequestLimits:
    """The settings of the same names (`engine.config.ApiConfig`)."""

    max_n: int = 16384
    max_prompts: int = 1024
    max_choices: int = 4096
    max_stop_strings: int = 4
    max_bad_words: int = 128
    # No settings: more is a mistake, or worse.
    max_stop_characters: int = 16384
    max_repeated_entries: int = 2**19  # of lists and maps, which go to the engine once a prompt

    @classmethod
    def of(cls, config: ApiConfig) -> RequestLimits:
        return cls(config.max_n, config.max_prompts, config.max_choices, config.max_stop_strings, config.max_bad_words)

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Raises BadRequest for more prompts, choices of a prompt, or choices in all than one request may have."""
        if n > self.max_n:
            raise BadRequest(f"n must be at most {self.max_n}, got {n}.", param="n")
        if num_prompts > self.max_prompts:
            message = f"prompt list length {num_prompts} exceeds the maximum allowed count of {self.max_prompts}."
            raise BadRequest(message, param="prompt")
        if num_prompts * n > self.max_choices:
            choices = f"{num_prompts} prompt(s) with n={n} make {num_prompts * n} choices"
            message = f"{choices}; this server answers at most {self.max_choices} in one request (--max-choices)."
            raise BadRequest(message, param="n")

    def check_stop_strings(self, words: Sequence[str]) -> None:
        if len(words) > self.max_stop_strings:
            raise BadRequest(f"stop must contain at most {self.max_stop_strings} strings, got {len(words)}.", param="stop")
        if (length := sum(map(len, words))) > self.max_stop_characters:
            raise BadRequest(f"stop must have at most {self.max_stop_characters} characters, got {length}.", param="stop")

    def check_bad_words(self, count: int, tokenized: bool = False) -> None:
        """`count`: of words, or, `tokenized`, of the token sequences that they become, at least one a word."""
        if count > self.max_bad_words:
            what = "bad words after tokenization" if tokenized else "bad words"
            raise BadRequest(f"Too many {what}: {count}. The max number is {self.max_bad_words}.", param="bad_words")
