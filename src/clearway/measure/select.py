"""Selection: micro-benchmarks propose, whole generations decide, the combination is an arm of its own.

1. The noise floor: the plain run against itself, on the user's scenario.
2. Micro-benchmarks at the shapes that one generation runs propose routes.
3. A first look: all candidates of the same arithmetic take turns for 3 rounds; what is slower in every one,
   and by more than the floor, is out. The rest goes on, fastest first.
   Executors, which may take minutes to build, come after all else, with at most half of what time is left.
4. A trial each: paired by round with the plain run, the signed-rank test of `clock.compare`, the pictures of
   all rounds compared, the driver's peak, the cost of starting charged.
5. The winners together against the plain run; then each left out in turn: what does not pay inside the
   combination is dropped, one at a time.
6. The final against the plain run once more, a measurement of its own. Only what wins again is chosen: a
   candidate without effect passes one test at 2.5 %, so two at less than 1 in 1000.

Candidates of changed precision and of less work are measured only if asked for, and never chosen here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clearway.errors import one_line
from clearway.measure.candidates import SAME, Candidate, Change, merged
from clearway.measure.clock import Failed, Samples, compare, interleave
from clearway.measure.journal import Journal
from clearway.measure.trial import (
    LEAST_ROUNDS,
    Evaluator,
    Pictures,
    Terms,
    TimeUp,
    percent,
    trial,
    verdict,
)
from clearway.models.chosen import DEFAULTS

LOOK_ROUNDS, LOOK_GROUP = 3, 4
LOOK_CALLS = 5.5  # of an arm: one or two to warm up, then the rounds
SLOW_SLOT = "executor"
USUAL = {fields["executor"] for fields in DEFAULTS.values()}
"""Executors that networks run by where nothing is selected: made ready in seconds, they give most and come
first."""
BUSY = 0.1  # a noise floor above this is the machine's other work
LOOK_SLACK = 0.01  # 3 rounds are no test: what seems up to 1 % slower goes on in any case
PLAIN = Change()
Say = Callable[[str], None]
Show = Callable[[Candidate, Pictures, Pictures], str | None]


@dataclass
class Outcome:
    """What was found. `trials` has one row a candidate: name, section, what, status, why, result; `micro` is
    what the micro-benchmarks found.

    `status` is "chosen", "lost", "rejected", "left out", "measured" (other sections), "not here" or
    "not decided". `complete` is False where time ran out before everything was measured.
    """

    floor: float
    chosen: tuple[str, ...]
    change: Change
    trials: list[dict[str, Any]]
    micro: list[dict[str, Any]] = field(default_factory=list)
    combination: list[dict[str, Any]] = field(default_factory=list)
    verification: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {**asdict(self), "chosen": list(self.chosen), "change": self.change.as_dict()}


def select(
    evaluator: Evaluator,
    candidates: Sequence[Candidate],
    terms: Terms,
    journal: Journal,
    *,
    propose: Callable[[list[dict[str, Any]]], list[Candidate]] = lambda findings: [],
    say: Say = lambda text: None,
    show: Show = lambda candidate, base, arm: None,
) -> Outcome:
    """The fastest combination of `candidates` of the same arithmetic, by `terms`, with all the evidence.

    `propose` turns the micro-benchmarks' findings into further candidates. Steps found in `journal` are not
    run again. After `terms.limit_s` no further step is begun.
    """
    return _Selection(evaluator, terms, journal, say, show).run(candidates, propose)


class _Selection:
    def __init__(self, evaluator: Evaluator, terms: Terms, journal: Journal, say: Say, show: Show) -> None:
        self.evaluator, self.terms, self.journal, self.say, self.show = evaluator, terms, journal, say, show
        self.ends = evaluator.timer.now() + terms.limit_s
        self.floor, self.plain_s = math.inf, 0.0
        self.notes: list[str] = []
        self.complete = True

    def run(
        self, candidates: Sequence[Candidate], propose: Callable[[list[dict[str, Any]]], list[Candidate]]
    ) -> Outcome:
        self._find_floor()
        tried = [one for one in candidates if one.absent is None]
        found = self.journal.step(
            "micro", lambda: self._in_time(lambda: {"found": self.evaluator.micro(self._left() / 6)}, 0.5)
        )
        proposed = propose(found["found"]) if found else []
        rows = {one.name: _row(one) for one in (*candidates, *proposed)}
        same = [one for one in (*proposed, *tried) if one.section == SAME]
        others = [one for one in tried if one.section != SAME]
        quick = [one for one in same if SLOW_SLOT not in one.slots]
        usual = [one for one in same if one.name in USUAL]
        groups = [([one], 0.5) for one in usual]
        groups += [(quick[at : at + LOOK_GROUP], 0.0) for at in range(0, len(quick), LOOK_GROUP)]
        groups += [([one], 0.5) for one in same if one not in quick and one not in usual]
        winners: list[Candidate] = []
        for group, reserve in groups:
            going = self._look(group, rows, reserve)
            winners += self._try(going, len(others), rows, reserve)
        winners.sort(key=lambda one: rows[one.name]["result"]["charged"]["ratio"])
        members, steps = self._combine(winners, rows)
        members, checked = self._verify(members, winners, rows)
        self._measure(others, rows)
        for one in members:
            rows[one.name]["status"] = "chosen"
        return Outcome(
            floor=self.floor,
            chosen=tuple(one.name for one in members),
            change=merged(one.change for one in members),
            trials=list(rows.values()),
            micro=found["found"] if found else [],
            combination=steps,
            verification=checked,
            notes=self.notes,
            complete=self.complete,
        )

    def _left(self) -> float:
        return max(0.0, self.ends - self.evaluator.timer.now())

    def _least(self) -> float:
        """What a trial takes at least: 6 rounds and two warm-ups of both."""
        return self.plain_s * 2 * (LEAST_ROUNDS + 2)

    def _find_floor(self) -> None:
        """The noise floor, and how long a plain generation takes."""

        def measure() -> dict[str, Any]:
            arm = self.evaluator.arm(PLAIN)
            try:
                found = interleave(
                    {"a": arm, "b": arm},
                    self.evaluator.timer,
                    rounds=self.terms.rounds,  # as in a trial: with fewer the floor would be wider
                    limit_s=self._left() / 2,
                    seed=self.terms.seed,
                )
                for one in found.values():
                    if isinstance(one, Failed):
                        raise one.error
                a, b = (one for one in found.values() if isinstance(one, Samples))
                both = compare(a, b, 0.0)
                floor = max(abs(math.log(both.low)), abs(math.log(both.high))) if both.low else math.inf
                return {
                    "floor": floor,
                    "p50_s": a.p50,
                    "comparison": asdict(both),
                    "a": a.wall_s,
                    "b": b.wall_s,
                }
            finally:
                arm.close()

        found = self.journal.step("noise floor", lambda: self._in_time(measure, 0.0))
        if found:
            self.floor, self.plain_s = found["floor"], found["p50_s"]
        if math.isinf(self.floor):
            self.journal.drop()
            self.complete = False
            takes = f"a generation takes {self.plain_s:.1f} s, and " if found else ""
            self._note(
                f"{takes}{self.terms.limit_s:g} s do not suffice to tell a difference from noise; "
                "a larger --limit-s, a smaller --size or fewer --steps would do"
            )
        else:
            shown = percent(math.exp(self.floor), sign=False)
            self.say(f"plain: {self.plain_s:.3f} s, noise floor {shown}")
            if self.floor > BUSY:
                self._note(
                    f"this machine is busy: nothing below {shown} can be told from noise now; "
                    "--fresh measures anew when it is idle"
                )

    def _look(
        self, candidates: Sequence[Candidate], rows: dict[str, dict[str, Any]], reserve: float
    ) -> list[Candidate]:
        """Those worth a trial, fastest first; the others' rows say what was seen.

        `reserve` is the share of the time left that must be left over, whatever building takes.
        """
        step = "look: " + ", ".join(one.name for one in candidates)
        looks = self.journal.step(step, lambda: self._in_time(lambda: self._looked(candidates), reserve))
        if looks is None:
            self._undecided([one.name for one in candidates], rows)
            return []
        going = []
        for one in candidates:
            look = looks[one.name]
            if "ratio" not in look:
                why = verdict(look, SAME, self.terms, self.floor)[1]
                rows[one.name] |= {"status": "rejected", "why": why, "result": look}
            elif look["slower"] and math.log(look["ratio"]) > max(self.floor, LOOK_SLACK):
                why = f"slower: {percent(look['ratio'])}, in each of the first {LOOK_ROUNDS} rounds"
                rows[one.name] |= {"status": "lost", "why": why, "result": look}
            else:
                going.append(one)
        return sorted(going, key=lambda one: looks[one.name]["ratio"])

    def _looked(self, group: Sequence[Candidate]) -> dict[str, Any] | None:
        """By name the median ratio of 3 rounds, or why there is none; None where there is no time left."""
        once = self.plain_s * (len(group) + 1)
        if math.isinf(self.floor) or self._left() < once * LOOK_CALLS + 3 * self._least():
            return None
        self.say("first look at " + "; ".join(one.name for one in group))
        found: dict[str, Any] = {}
        arms = {}
        try:
            plain = self.evaluator.arm(PLAIN)
            arms[""] = plain
            for one in group:
                try:
                    arms[one.name] = self.evaluator.arm(one.change)
                except Exception as error:
                    found[one.name] = {"failed": one_line(error)}
            timed = interleave(
                arms,
                self.evaluator.timer,
                rounds=LOOK_ROUNDS,
                limit_s=self._left() if SLOW_SLOT in group[0].slots else once * LOOK_CALLS,
                seed=self.terms.seed,
            )
            base = timed.pop("")
            if isinstance(base, Failed):
                raise base.error
            for name, samples in timed.items():
                if isinstance(samples, Failed):
                    found[name] = {"failed": one_line(samples.error)}
                elif reason := arms[name].proof():
                    found[name] = {"refused": reason}
                else:
                    ratios = [b / a for a, b in zip(base.wall_s, samples.wall_s, strict=True)]
                    slower = len(ratios) == LOOK_ROUNDS and min(ratios) > 1
                    found[name] = {"ratio": statistics.median(ratios), "slower": slower}
        finally:
            for arm in arms.values():
                arm.close()
        return found

    def _in_time(self, measure: Callable[[], dict[str, Any] | None], reserve: float) -> dict[str, Any] | None:
        """What is measured; None where it did not end in its time."""
        try:
            with self.evaluator.within(self._left() * (1 - reserve)):
                return measure()
        except TimeUp:
            return None

    def _try(
        self,
        going: Sequence[Candidate],
        others: int,
        rows: dict[str, dict[str, Any]],
        reserve: float = 0.0,
    ) -> list[Candidate]:
        """The candidates that win a trial against the plain run."""
        winners = []
        for number, one in enumerate(going):
            waiting = len(going) - number + others + 1
            result = self._pair(
                f"trial: {one.name}", PLAIN, one.change, waiting, self.terms.seed, reserve=reserve
            )
            if result is None:
                self._undecided([one.name], rows)
                continue
            passed, why = verdict(result, SAME, self.terms, self.floor)
            slow = "comparison" in result and result["comparison"]["verdict"] != "faster"
            status = "left out" if passed else "lost" if slow else "rejected"
            rows[one.name] |= {"status": status, "why": why, "result": result}
            self.say(f"{one.name}: {why}")
            if passed:
                winners.append(one)
        return winners

    def _combine(
        self, winners: Sequence[Candidate], rows: dict[str, dict[str, Any]]
    ) -> tuple[list[Candidate], list[dict[str, Any]]]:
        """What pays inside the combination of the best winner of each slot, and how that was found."""
        members: list[Candidate] = []
        for one in winners:
            rivals = [other.name for other in members if other.slots & one.slots]
            if rivals:
                rows[one.name]["why"] += f"; {rivals[0]} decides the same and is better"
            else:
                members.append(one)
        steps: list[dict[str, Any]] = []
        if len(members) < 2:
            return members, steps
        together = self._pair(f"together: {_names(members)}", PLAIN, _all(members), 3, self.terms.seed + 1)
        if together is not None:
            steps.append({"step": "together", "members": [one.name for one in members], "result": together})
            self.say(f"together: {verdict(together, SAME, self.terms, self.floor)[1]}")
        while len(members) > 1:
            failing: list[tuple[float, int, Candidate, str]] = []
            for place, one in enumerate(members):
                rest = [other for other in members if other is not one]
                step = f"{_names(rest)} with {one.name}"
                waiting = len(members) - place + 1
                result = self._pair(step, _all(rest), _all(members), waiting, self.terms.seed + 2)
                if result is None:
                    self._note(f"no time for leaving out one at a time: only {members[0].name} is taken")
                    self.complete = False
                    for other in members[1:]:
                        rows[other.name] |= {"status": "not decided"}
                    return members[:1], steps
                pays, why = verdict(result, SAME, self.terms, self.floor)
                steps.append({"step": step, "pays": pays, "why": why, "result": result})
                if not pays:
                    ratio = result["charged"]["ratio"] if "charged" in result else math.inf
                    failing.append((ratio, place, one, why))
            if not failing:
                break
            _, _, worst, why = max(failing)
            members.remove(worst)
            rows[worst.name]["why"] += f"; within the combination: {why}"
            self.say(f"{worst.name} does not pay within the combination and is left out")
        return members, steps

    def _verify(
        self, members: list[Candidate], winners: Sequence[Candidate], rows: dict[str, dict[str, Any]]
    ) -> tuple[list[Candidate], dict[str, Any] | None]:
        """The members, if together they win again; else the best winner alone, if it does; else nothing."""
        for attempt in dict.fromkeys((tuple(members), tuple(winners[:1]))):
            if not attempt:
                continue
            step = f"verification: {_names(attempt)}"
            change = _all(attempt)
            result = self._pair(step, PLAIN, change, 1, self.terms.seed + 3, verified_later=False)
            if result is None:
                self._note(f"{_names(attempt)} won, and no time was left to verify it: nothing is chosen yet")
                self.complete = False
                for one in attempt:
                    rows[one.name]["status"] = "not decided"
                return [], None
            passed, why = verdict(result, SAME, self.terms, self.floor)
            self.say(f"{_names(attempt)}, measured again: {why}")
            if passed:
                return list(attempt), {"members": [one.name for one in attempt], "why": why, "result": result}
            for one in attempt:
                rows[one.name]["why"] += f"; measured again: {why}"
        return [], None

    def _measure(self, others: Sequence[Candidate], rows: dict[str, dict[str, Any]]) -> None:
        """The candidates that change pictures: measured and shown, never chosen."""
        for number, one in enumerate(others):
            step = f"trial: {one.name}"
            waiting = len(others) - number
            result = self._pair(step, PLAIN, one.change, waiting, self.terms.seed, one, verified_later=False)
            if result is None:
                self._undecided([one.name], rows)
                continue
            _, why = verdict(result, one.section, self.terms, self.floor)
            rows[one.name] |= {
                "status": "measured" if "comparison" in result else "rejected",
                "why": why,
                "result": result,
            }
            self.say(f"{one.name}: {why}")

    def _pair(
        self,
        step: str,
        base: Change,
        change: Change,
        waiting: int,
        seed: int,
        shown: Candidate | None = None,
        reserve: float = 0.0,
        verified_later: bool = True,
    ) -> dict[str, Any] | None:
        """The trial called `step`, in its share of the time left for `waiting` of them; None: not decided."""

        def measure() -> dict[str, Any] | None:
            left = self._left()
            least = self._least()
            left -= 1.5 * least if verified_later else 0.0
            if math.isinf(self.floor) or left < 1.5 * least:
                return None
            return trial(
                self.evaluator,
                base,
                change,
                self.terms,
                floor=self.floor,
                limit_s=max(0.75 * left * (1 - reserve) / waiting, least),
                seed=seed,
                show=None if shown is None else lambda a, b: self.show(shown, a, b),
            )

        return self.journal.step(step, lambda: self._in_time(measure, reserve))

    def _undecided(self, names: Sequence[str], rows: dict[str, dict[str, Any]]) -> None:
        self.complete = False
        for name in names:
            rows[name] |= {
                "status": "not decided",
                "why": "the time was up; the same command goes on from here",
            }

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)


def _row(one: Candidate) -> dict[str, Any]:
    return {
        "name": one.name,
        "section": one.section,
        "what": one.why,
        "change": one.change.as_dict(),
        "status": "not here" if one.absent else "not decided",
        "why": one.absent or "",
        "result": None,
    }


def _names(members: Sequence[Candidate]) -> str:
    return " + ".join(one.name for one in members)


def _all(members: Sequence[Candidate]) -> Change:
    return merged(one.change for one in members)


def lost_by(row: Mapping[str, Any]) -> float | None:
    """The measured ratio of times of a row, below 1 if faster; None where nothing was measured."""
    result = row.get("result") or {}
    speed = result.get("comparison")
    found = speed["ratio"] if speed else result.get("ratio")
    return None if found is None else float(found)
