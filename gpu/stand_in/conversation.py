"""The text of a prompt, cut at the assistant's turns as chat templates mark them. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass


def _any_of(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


# Marks of the templates ChatML, Llama 3, Llama 4, Gemma, Mistral, GLM and Phi, DeepSeek, Harmony, and MiniMax.
_OPENS_ASSISTANT = _any_of(
    "<|im_start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|header_start|>assistant<|header_end|>",
    "<start_of_turn>model",
    *("[/INST]", "[/TOOL_RESULTS]"),
    "<|assistant|>",
    "<\uff5cAssistant\uff5c>",
    "<|start|>assistant",
    "]~b]ai",
)
_ENDS_ASSISTANT = _any_of(
    "<|im_end|>",
    *("<|eot_id|>", "<|eom_id|>"),
    *("<|eot|>", "<|eom|>"),
    "<end_of_turn>",
    "</s>",
    *("<|user|>", "<|observation|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    *("<|end|>", "<|return|>", "<|call|>"),
    "[e~[",
    "<|endoftext|>",
)
_OPENS_USER = _any_of(
    "<|im_start|>user",
    "<|start_header_id|>user",
    "<|header_start|>user",
    "<start_of_turn>user",
    "[INST]",
    "<|user|>",
    "<\uff5cUser\uff5c>",
    "<|start|>user",
    "]~b]user",
)


@dataclass(frozen=True)
class Conversation:
    system: str  # what stands before the first turn of the user: instructions and tools
    inputs: list[str]  # what came before the first turn of the assistant and after each, oldest first: messages, results of tools
    begun: str  # what the prompt has of the assistant's new turn already

    @classmethod
    def of(cls, prompt: str) -> Conversation:
        """A prompt without known marks is one input."""
        head, *turns = _OPENS_ASSISTANT.split(prompt)
        user = _OPENS_USER.search(head)
        inputs, begun = [head[user.start() :] if user else head], ""
        for number, turn in enumerate(turns, 1):
            end = _ENDS_ASSISTANT.search(turn)
            if end is None and number == len(turns):
                begun = turn
                break
            later = turn[end.end() :] if end else turn
            if later.strip():
                inputs.append(later)
        return cls(head[: user.start()] if user else "", inputs, begun)
