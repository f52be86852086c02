"""Why is acceptance low, or speed missing? Each known cause is measured on the loaded pair.
probe.py      texts of the target, and teacher-forced acceptance on them
files.py      files and build, before anything runs     opening.py    repairs keys of drafters that the engine refuses
readings.py   sweeps of hyper-parameters                precision.py  cost of quantisation
running.py    template, thinking mode, generations, step times, speed-up
split.py      layers on several devices                 trees.py      expected gain of draft trees
report.py     verdicts"""

from .examine import Subject, examine, examine_drafter
from .report import FAIL, NOT_APPLICABLE, OK, WARN, Check, Report

__all__ = ["FAIL", "NOT_APPLICABLE", "OK", "WARN", "Check", "Report", "Subject", "examine", "examine_drafter"]
