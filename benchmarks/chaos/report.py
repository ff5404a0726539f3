"""The result of a run in figures, and the exit code that they mean."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.answers import CalmAnswer, Verdict
from benchmarks.chaos.client import Outcome
from benchmarks.chaos.faults import Injected
from benchmarks.text_table import text_table

AFTER_SECONDS = 3.0  # a pause that begins so soon after a fault stands beside it
FAILURES = ("lost", "repeated", "changed", "stuck")


@dataclass
class Report:
    """`judged`: each request with its verdict, of one of the kinds of FAILURES, `same` or `excused`."""

    judged: list[tuple[Outcome, Verdict]]
    faults: Sequence[Injected]
    leaks: dict[str, list[str]]  # by kind: blocks, requests, keys, resources
    own_ends: list[str] = field(default_factory=list)  # processes that ended although no fault touched them

    @property
    def is_clean(self) -> bool:
        counts = self._counts()
        return not any(counts[kind] for kind in FAILURES) and not any(self.leaks.values()) and not self.own_ends

    def _counts(self) -> Counter[str]:
        return Counter(verdict.kind if not outcome.error.startswith("stuck") else "stuck" for outcome, verdict in self.judged)

    def lines(self) -> list[str]:
        counts = self._counts()
        behaviours: Counter[str] = Counter(outcome.item.behaviour for outcome, _ in self.judged)
        found = [
            f"requests   {len(self.judged)}: {_listed(behaviours)}",
            f"faults     {len(self.faults)}",
            *(f"{kind:<10} {counts[kind]}" for kind in FAILURES),
            f"restarted  {sum(outcome.restarts for outcome, _ in self.judged)} (streams that Redis had just forgotten)",
            f"excused    {counts['excused']} (the calm run's best two candidates were closer than 1e-3)",
            *(f"{'leaked ' + kind:<17} {len(leaked)}" for kind, leaked in self.leaks.items()),
            f"own ends   {len(self.own_ends)} (processes that ended although no fault touched them)",
            *self._pauses(),
        ]
        for kind, leaked in self.leaks.items():
            found += [f"  leaked {kind}: {each}" for each in leaked]
        found += [f"  {each}" for each in self.own_ends]
        return found

    def _pauses(self) -> list[str]:
        """The worst pause of all, and the worst beside each kind of fault."""
        pauses = [pause for outcome, _ in self.judged for pause in outcome.pauses]
        beside: dict[str, float] = {}
        for fault in self.faults:
            near = [end - begin for begin, end in pauses if begin < fault.ended + AFTER_SECONDS and end > fault.began]
            beside[fault.kind] = max([beside.get(fault.kind, 0.0), *near])
        worst = max((end - begin for begin, end in pauses), default=0.0)
        table = text_table(
            ["fault", "times", "worst pause, s"],
            [
                [kind, str(count), f"{beside[kind]:.1f}"]
                for kind, count in sorted(Counter(fault.kind for fault in self.faults).items())
            ],
        )
        return [f"worst pause {worst:.1f} s without a token", *([table] if self.faults else [])]

    def failures(self) -> list[str]:
        """A line each request that went wrong."""
        return [
            f"request {outcome.item.number} ({outcome.item.behaviour}, case {outcome.item.case.number}, {outcome.request_id}): "
            f"{outcome.error or verdict.kind}: {verdict.detail}; {'; '.join(outcome.history)}"
            for outcome, verdict in self.judged
            if verdict.kind in FAILURES
        ]

    def write(self, path: Path, calm: dict[int, CalmAnswer], began: float) -> None:
        """Everything about each request that went wrong, and the faults, as JSON lines with times since `began`."""
        with open(path, "w") as file:
            for fault in self.faults:
                times = {"began": fault.began - began, "ended": fault.ended - began}
                file.write(json.dumps({"fault": fault.kind, "detail": fault.detail, **times}) + "\n")
            for outcome, verdict in self.judged:
                if verdict.kind not in FAILURES:
                    continue
                case = outcome.item.case
                entry = {
                    "request": outcome.item.number, "id": outcome.request_id, "behaviour": outcome.item.behaviour,
                    "verdict": verdict.kind, "detail": verdict.detail, "error": outcome.error, "path": case.path, "body": case.body,
                    "began": outcome.started - began, "ended": outcome.ended - began, "history": outcome.history,
                    "got": {index: choice.token_ids for index, choice in outcome.answer.choices.items()},
                    "calm": {index: choice.token_ids for index, choice in calm[case.number].answer.choices.items()},
                }  # fmt: skip
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def judge(outcome: Outcome, calm: CalmAnswer) -> Verdict:
    if outcome.error:
        return Verdict("lost", outcome.error)
    is_whole = outcome.item.behaviour != "abort" or outcome.is_whole
    verdict = calm.judge(outcome.answer, is_whole)
    if outcome.other is not None and verdict.kind in ("same", "excused"):
        return calm.judge(outcome.other, is_whole)
    return verdict


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
