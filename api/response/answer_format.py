"""What an endpoint's answers look like, as the code that sends them sees it: the events of a stream, and the whole answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from api.errors import ApiError
from api.response.output_processor import ChoiceOutput


class AnswerFormat(ABC):
    """Made for one answer. A stream calls `opening`, `chunks` for each output, and then either `closing` or `failure`."""

    opens_at_once: ClassVar[bool] = False  # the opening does not wait for the first output
    tells_each_output: ClassVar[bool] = False  # its events depend on single outputs: merged ones keep their pieces

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first output."""

    @abstractmethod
    def chunks(self, output: ChoiceOutput) -> bytes:
        """Events of one output. Empty where it shows nothing."""

    def is_long(self, output: ChoiceOutput) -> bool:
        """Whether to make its events would keep the event loop for more than some milliseconds."""
        return False

    @abstractmethod
    def closing(self) -> bytes:
        """Events behind the last output, the stream's last one among them."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream which breaks off."""

    def unfinished(self, status: str) -> bytes:
        """The answer of a request that goes on without a client, before its end, JSON. Only endpoints of such requests have one."""
        raise NotImplementedError

    @abstractmethod
    def whole(self, choices: list[ChoiceOutput]) -> bytes:
        """The answer in one piece, JSON."""
