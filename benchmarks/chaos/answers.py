"""What a client got, and how it compares with the calm run's answer to the same case.

Equal means equal tokens, text and ends, save behind a token at which the calm run was undecided: its two best candidates, noise
included, closer than 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from benchmarks.chaos.cases import Case
from gpu.plan import child_seed
from kernels.gumbel import gumbel_noise

UNDECIDED = 1e-3
LOGPROB_TOLERANCE = 0.05  # a taker computes in one prefill what its predecessor decoded
RESYNCHRONISED = 4  # tokens in a row that show where two sequences go on together

VerdictKind = Literal["same", "excused", "lost", "repeated", "changed"]


@dataclass(frozen=True)
class Verdict:
    kind: VerdictKind
    detail: str = ""


@dataclass
class ChoiceAnswer:
    """One choice, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[tuple[int, float]] = field(default_factory=list)  # of each token: id and logprob
    top: list[dict[int, float]] = field(default_factory=list)  # of each token: the candidates' logprobs

    def add(self, item: dict[str, Any]) -> bool:
        """An item of `choices`, of a chunk or of a whole answer. Returns whether it brought tokens or text."""
        message = item.get("delta") or item.get("message")
        text = message.get("content") or "" if message else item.get("text", "")
        token_ids = item.get("token_ids") or []
        self.text += text
        self.token_ids += token_ids
        if item.get("finish_reason"):
            self.finish_reason, self.stop_reason = item["finish_reason"], item.get("stop_reason")
        if told := item.get("logprobs"):
            self._add_logprobs(told)
        return bool(text or token_ids)

    def _add_logprobs(self, told: dict[str, Any]) -> None:
        if "content" in told:  # chat
            for entry in told["content"]:
                self.logprobs.append((_id(entry["token"]), entry["logprob"]))
                self.top.append({_id(each["token"]): each["logprob"] for each in entry["top_logprobs"]})
            return
        for token, value, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            self.logprobs.append((_id(token), value))
            self.top.append({_id(each): logprob for each, logprob in top.items()})


@dataclass
class Answer:
    choices: dict[int, ChoiceAnswer] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def add(self, body: dict[str, Any]) -> bool:
        """A chunk, or the whole answer. Returns whether it brought tokens or text."""
        self.usage = body.get("usage") or self.usage
        return any([self.choices.setdefault(item["index"], ChoiceAnswer()).add(item) for item in body["choices"]])


@dataclass(frozen=True)
class CalmAnswer:
    """The calm run's answer to a case, asked for with the logprobs of the candidates.

    `is_exact`: the model has no logits in which candidates could be close, and nothing is excused.
    """

    case: Case
    answer: Answer
    is_exact: bool = False

    @cached_property
    def margins(self) -> dict[int, list[float]]:
        """By choice and token: by how much the best candidate, which became the token, beat the second."""
        return {index: self._margins(index, choice) for index, choice in self.answer.choices.items()}

    def _margins(self, index: int, choice: ChoiceAnswer) -> list[float]:
        if self.is_exact:
            return [float("inf")] * len(choice.token_ids)
        assert self.answer.usage is not None
        prompt = int(self.answer.usage["prompt_tokens"])
        found = []
        for offset, (top, (token, logprob)) in enumerate(zip(choice.top, choice.logprobs, strict=True)):
            scores = np.array([top.get(token, logprob), *(value for each, value in top.items() if each != token)])
            scores += self._noise(index, prompt + offset, [token, *(each for each in top if each != token)])
            others = scores[1:][np.isfinite(scores[1:])]
            found.append(float(scores[0] - others.max()) if others.size else float("inf"))
        return found

    def _noise(self, index: int, position: int, token_ids: list[int]) -> Any:
        body = self.case.body
        if body["temperature"] == 0.0:
            return 0.0
        return gumbel_noise(child_seed(body["seed"], index), position, max(token_ids) + 1).numpy()[token_ids]

    def judge(self, answer: Answer, is_whole: bool) -> Verdict:
        """`is_whole`: the client stayed to the end. Else what it got must be the beginning."""
        if is_whole and set(answer.choices) != set(self.answer.choices):
            return Verdict("lost", f"choices {sorted(answer.choices)} of {len(self.answer.choices)}")
        verdicts = [self._judge_choice(index, choice, is_whole) for index, choice in sorted(answer.choices.items())]
        worst = next((verdict for verdict in verdicts if verdict.kind not in ("same", "excused")), None)
        if worst is not None:
            return worst
        if excused := [verdict for verdict in verdicts if verdict.kind == "excused"]:
            return excused[0]
        return self._judge_usage(answer) if is_whole else Verdict("same")

    def _judge_choice(self, index: int, got: ChoiceAnswer, is_whole: bool) -> Verdict:
        want = self.answer.choices[index]
        where = f"choice {index}"
        differing = first_difference(got.token_ids, want.token_ids)
        if differing is None and is_whole and len(got.token_ids) < len(want.token_ids):
            return Verdict("lost", f"{where}: {len(got.token_ids)} of {len(want.token_ids)} tokens")
        if differing is not None:
            return self._judge_difference(index, got.token_ids, differing)
        if not (got.text == want.text if is_whole else want.text.startswith(got.text)):
            return Verdict("changed", f"{where}: text {got.text!r} instead of {want.text!r}")
        ends = (got.finish_reason, got.stop_reason), (want.finish_reason, want.stop_reason)
        if is_whole and ends[0] != ends[1]:
            return Verdict("changed", f"{where}: ends with {ends[0]} instead of {ends[1]}")
        return self._judge_logprobs(where, got, want)

    def _judge_difference(self, index: int, got: list[int], differing: int) -> Verdict:
        want = self.answer.choices[index].token_ids
        detail = f"choice {index}, token {differing}: {got[differing : differing + 8]} instead of {want[differing : differing + 8]}"
        margins = self.margins[index]
        if differing < len(margins) and margins[differing] < UNDECIDED:
            return Verdict("excused", f"{detail}, margin {margins[differing]:.1e}")
        if _goes_on(got, want, differing):
            return Verdict("repeated", detail)
        if _goes_on(want, got, differing):
            return Verdict("lost", detail)
        margin = f"{margins[differing]:.1e}" if differing < len(margins) else "none"
        return Verdict("changed", f"{detail}, margin {margin}")

    def _judge_logprobs(self, where: str, got: ChoiceAnswer, want: ChoiceAnswer) -> Verdict:
        if not self.case.wants_logprobs:
            return Verdict("same")
        if [token for token, _ in got.logprobs] != got.token_ids:
            return Verdict("lost", f"{where}: logprobs of {len(got.logprobs)} of {len(got.token_ids)} tokens")
        for place, ((_, value), (_, calm)) in enumerate(zip(got.logprobs, want.logprobs, strict=False)):
            if abs(value - calm) > LOGPROB_TOLERANCE:
                return Verdict("changed", f"{where}, token {place}: logprob {value} instead of {calm}")
        return Verdict("same")

    def _judge_usage(self, answer: Answer) -> Verdict:
        assert self.answer.usage is not None
        if answer.usage is None:
            return Verdict("lost", "usage")
        for name in ("prompt_tokens", "completion_tokens"):
            if answer.usage[name] != self.answer.usage[name]:
                return Verdict("changed", f"usage: {answer.usage[name]} {name} instead of {self.answer.usage[name]}")
        return Verdict("same")


def first_difference(got: list[int], want: list[int]) -> int | None:
    """The place at which `got` leaves `want`; None where it is a beginning of `want`."""
    for place, token in enumerate(got):
        if place >= len(want) or token != want[place]:
            return place
    return None


def _goes_on(longer: list[int], shorter: list[int], place: int) -> bool:
    """Whether `longer` has tokens too many at `place`, behind which it goes on as `shorter` does there."""
    rest = shorter[place : place + RESYNCHRONISED]
    if not rest:  # too long: repeated where its tail was there before
        tail = longer[place:]
        return any(longer[start : start + len(tail)] == tail for start in range(place))
    return any(longer[start : start + len(rest)] == rest for start in range(place + 1, len(longer) - len(rest) + 1))


def _id(shown: str) -> int:
    return int(shown.removeprefix("token_id:"))
