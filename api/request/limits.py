"""How much one request may ask for, by the API server's settings. Checked before anything is made that grows with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from api.errors import BadRequest
from engine.config import ApiConfig
from engine.protocol import SamplingParams


@dataclass(frozen=True)
class RequestLimits:
    """The settings of the same names (`engine.config.ApiConfig`)."""

    max_n: int = 16384
    max_prompts: int = 1024
    max_choices: int = 4096
    max_request_logprobs: int = 4 * 1024 * 1024
    max_stop_strings: int = 4
    max_bad_words: int = 128
    # No settings: more is a mistake, or worse.
    max_stop_characters: int = 16384
    max_repeated_entries: int = 2**19  # of lists and maps, which go to the engine once a prompt
    max_repeated_characters: int = 2**22  # of a grammar, which goes to the engine once a prompt
    max_repeated_tokens: int = 2**22  # of prompts, which the answer shows again in each choice
    max_kept_bytes: int = 2**22  # of a response's conversation and fields, which its API server reads for each GET

    @classmethod
    def of(cls, config: ApiConfig) -> RequestLimits:
        names = ("max_n", "max_prompts", "max_choices", "max_request_logprobs", "max_stop_strings", "max_bad_words")
        return cls(**{name: getattr(config, name) for name in names})

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

    def check_shown_prompts(self, num_prompt_tokens: int, n: int) -> None:
        """`num_prompt_tokens`: of all prompts that each of their `n` choices shows, as text or as ids. Raises BadRequest."""
        if num_prompt_tokens * n > self.max_repeated_tokens:
            raise BadRequest(
                f"{num_prompt_tokens:,} prompt tokens in each of n={n} choices are more than {self.max_repeated_tokens:,}. Please "
                "set a smaller n, or ask for neither echo nor return_token_ids.",
                param="n",
            )

    def check_logprobs(self, sampling: SamplingParams, num_prompt_tokens: int, num_output_tokens: int, vocab_size: int) -> None:
        """Tokens whose logprobs the answer shows, of all prompts and of all choices. Raises BadRequest."""
        of_prompts = num_prompt_tokens * _logprobs_a_token(sampling.prompt_logprobs, vocab_size)
        of_outputs = num_output_tokens * _logprobs_a_token(sampling.logprobs, vocab_size)
        if of_prompts + of_outputs > self.max_request_logprobs:
            prompts = f"{of_prompts:,} of {num_prompt_tokens:,} prompt tokens"
            outputs = f"{of_outputs:,} of up to {num_output_tokens:,} output tokens"
            raise BadRequest(
                f"This request asks for too many logprobs: {prompts} and {outputs}. This server gives at most "
                f"{self.max_request_logprobs:,} in one request (--max-request-logprobs). Please ask for fewer of each token, or "
                "set a smaller max_tokens or n.",
                param="prompt_logprobs" if of_prompts > of_outputs else "logprobs",
            )

    def check_stop_strings(self, words: Sequence[str]) -> None:
        if len(words) > self.max_stop_strings:
            raise BadRequest(f"stop must contain at most {self.max_stop_strings} strings, got {len(words)}.", param="stop")
        if (length := sum(map(len, words))) > self.max_stop_characters:
            raise BadRequest(f"stop must have at most {self.max_stop_characters} characters, got {length}.", param="stop")

    def check_kept(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: bytes of JSON that are kept with a response, by field of its body. Raises BadRequest that names the largest."""
        if (total := sum(sizes.values())) > self.max_kept_bytes:
            largest = max(sizes, key=sizes.__getitem__)
            message = f"A response is kept with its conversation and fields. These have {total:,} bytes"
            message += f", {sizes[largest]:,} of them in {largest}; at most {self.max_kept_bytes:,} are kept."
            raise BadRequest(message, param=largest)

    def check_bad_words(self, count: int, tokenized: bool = False) -> None:
        """`count`: of words, or, `tokenized`, of the token sequences that they become, at least one a word."""
        if count > self.max_bad_words:
            what = "bad words after tokenization" if tokenized else "bad words"
            raise BadRequest(f"Too many {what}: {count}. The max number is {self.max_bad_words}.", param="bad_words")


def _logprobs_a_token(count: int | None, vocab_size: int) -> int:
    """The token's own and `count` alternatives; -1: the whole vocabulary."""
    if count is None:
        return 0
    return 1 + (vocab_size if count == -1 else count)
