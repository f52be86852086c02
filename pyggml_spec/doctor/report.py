"""What the doctor found: one verdict per check, and which failure is the cause rather than a consequence."""

from dataclasses import dataclass, field, replace

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "FAIL", "n/a"
NEARLY = 0.8
FILES, FEATURES, READING, FIT, PRECISION, RUNNING = range(6)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was looked at.
        verdict: OK, WARN, FAIL or NOT_APPLICABLE.
        found: what was measured, or why nothing could be; one sentence.
        remedy: what to do about it, one sentence; empty where there is nothing to do.
        stage: FILES to RUNNING; a failure explains the acceptance that later stages measure.
        data: the figures, JSON-ready.
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
    """All checks of one pair, in the order in which they were made."""

    target: str
    drafter: str
    checks: tuple[Check, ...]
    conditions: dict = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.verdict == FAIL)

    def check(self, name: str) -> Check:
        """The check of this name."""
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
    """The checks, with failures demoted to warnings that an earlier stage's failure explains, or a stronger one of the same sweep.

    A drafter with NaN weights also has features that do not help it; only the weights are named as the cause. Of readings that would each
    raise acceptance, the one that raises it most is named: two wrong keys show up one after the other. Of readings that raise it about
    equally, the first one made is: rows beyond the trained block can be cut off, or hidden by reading the block causally (1.01 against 0.98).
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
                check = replace(check, verdict=WARN, remedy=f"mend {first.name!r} first, then run the doctor again")
        out.append(check)
    return tuple(out)
