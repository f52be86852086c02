"""Verdicts, and which failure is the cause rather than a consequence."""

from dataclasses import dataclass, field, replace

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "FAIL", "n/a"
NEARLY = 0.8
FILES, FEATURES, READING, FIT, PRECISION, RUNNING = range(6)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: subject.
        verdict: OK, WARN, FAIL or NOT_APPLICABLE.
        found: what was measured, or why not; one sentence.
        remedy: what to do, one sentence; empty if nothing.
        stage: FILES to RUNNING; a failure explains the results of later stages.
        data: figures, JSON-ready.
    """

    name: str
    verdict: str
    found: str
    remedy: str = ""
    stage: int = FILES
    data: dict = field(default_factory=dict)

    def as_dict(self) -> dict:
        return {"name": self.name, "verdict": self.verdict, "found": self.found, "remedy": self.remedy, "data": self.data}


@dataclass(frozen=True)
class Report:
    """All checks of one pair, in order."""

    target: str
    drafter: str
    checks: tuple[Check, ...]
    conditions: dict = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The failed checks."""
        return tuple(check for check in self.checks if check.verdict == FAIL)

    def check(self, name: str) -> Check:
        """The check called ``name``."""
        return next(check for check in self.checks if check.name == name)

    def as_dict(self) -> dict:
        return {
            "target": self.target,
            "drafter": self.drafter,
            "passed": not self.failed,
            "failed": [check.name for check in self.failed],
            "checks": [check.as_dict() for check in self.checks],
            **self.conditions,
        }


def causes_only(checks: list[Check]) -> tuple[Check, ...]:
    """Demotes failures to warnings that are explained by an earlier stage, or by a stronger one of the same sweep.

    Of readings that raise acceptance, the one with the largest gain counts; the first if gains are about equal.
    """
    out = []
    for check in checks:
        if check.verdict == FAIL:
            first = next((c for c in checks if c.verdict == FAIL and c.stage < check.stage), None)
            if first is None and check.stage == READING:
                rivals = [c for c in checks if c.verdict == FAIL and c.stage == READING]
                most = max(c.data["gain"] for c in rivals)
                first = next(c for c in rivals if c.data["gain"] >= NEARLY * most)
            if first is not None and first is not check:
                check = replace(check, verdict=WARN, remedy=f"fix {first.name!r} first, then run doctor again")
        out.append(check)
    return tuple(out)
