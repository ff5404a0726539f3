"""The script of `--load-format scripted`: rules that say which text answers a prompt. Torch-free.

    - match: weather in (\\w+)             # a regular expression, searched in what came since the last answer
      answer:                             # a list: the first answers that input, the next one the input after it, and so on
        - '<tool_call>{"name": "get_weather", "arguments": {"city": "\\1"}}</tool_call>'
        - It is sunny in \\1.
    - answer: I have nothing to say.      # without `match`: answers anything

The first rule that has an answer gives it. A rule counts the inputs from the newest one that it matches.
"""

from __future__ import annotations

import re
from collections import deque
from functools import partial
from pathlib import Path

import msgspec
import yaml

from gpu.checkpoint.model_files import read_text
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.stand_in.conversation import Conversation

_MOST_BYTES = 16 << 20
_REFERENCE = re.compile(r"\\(?:(\d+)|g<(\w+)>)")  # to a group of `match`; all else in an answer stands for itself


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    answer: str | list[str]
    match: str = ""
    system: str = ""  # another regular expression, searched in what stands before the user's first turn


class _CompiledRule:
    def __init__(self, rule: _Rule) -> None:
        """Raises ValueError with the reason why it is none."""
        self.match, self.system = _compile("match", rule.match), _compile("system", rule.system)
        self.answers = [_joined(answer) for answer in ([rule.answer] if isinstance(rule.answer, str) else rule.answer)]
        if not self.answers:
            raise ValueError("it has no answer")
        groups = {*map(str, range(self.match.groups + 1)), *self.match.groupindex}
        for reference in (found for answer in self.answers for found in _REFERENCE.finditer(answer)):
            if (reference[1] or reference[2]) not in groups:
                raise ValueError(f"its answer names the group {reference[0]}, which its `match` does not have")

    def answer(self, conversation: Conversation) -> str | None:
        """None where the rule has none to the newest input: it matches neither that nor, with an answer left, one before."""
        if self.system.search(conversation.system):
            for answer, text in zip(self.answers, reversed(conversation.inputs), strict=False):
                if last := deque(self.match.finditer(text), maxlen=1):
                    return _REFERENCE.sub(partial(_captured, last[0]), answer)
        return None


class Script:
    def __init__(self, text: str, place: str = "the script") -> None:
        """`text`: YAML, or JSON, which is YAML too. Raises UnsupportedConfiguration where it is no list of rules."""
        self.text = text
        try:
            rules = msgspec.convert(yaml.safe_load(text), list[_Rule])
        except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
            raise UnsupportedConfiguration(f"{place} is no list of rules: {' '.join(str(error).split())}") from None
        self._rules: list[_CompiledRule] = []
        for number, rule in enumerate(rules, 1):
            try:
                self._rules.append(_CompiledRule(rule))
            except ValueError as error:
                raise UnsupportedConfiguration(f"{place}, rule {number}: {error}") from None

    @classmethod
    def read(cls, path: str) -> Script:
        """Raises UnsupportedConfiguration."""
        try:
            return cls(read_text(Path(path).expanduser(), _MOST_BYTES), path)
        except (CheckpointError, RuntimeError) as error:  # the latter: no such user's home
            raise UnsupportedConfiguration(f"--script: {error}") from None

    def answer(self, conversation: Conversation) -> str | None:
        """What is to follow the prompt, without what it has of the answer already; None where no rule fits."""
        answers = (rule.answer(conversation) for rule in self._rules)
        answer = next((answer for answer in answers if answer is not None), None)
        return None if answer is None else _without(conversation.begun, answer)


def _joined(text: str) -> str:
    """JSON may write a character as a pair of escapes (surrogates), which YAML reads apart. Raises ValueError for half a pair."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError("it has an escape that is half a character") from None


def _compile(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(_joined(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"`{name}` is no regular expression: {error}") from None


def _captured(match: re.Match[str], reference: re.Match[str]) -> str:
    return match[int(reference[1]) if reference[1] else reference[2]] or ""


def _without(begun: str, answer: str) -> str:
    """Where the prompt begins the answer (`<think>`, or a message to be continued), its rest; else all of it."""
    for beginning in (begun.lstrip(), begun.strip()):
        if beginning and answer.startswith(beginning):
            return answer.removeprefix(beginning)
    return answer
