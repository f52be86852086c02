"""Why is acceptance low, or speed missing? Each known cause is measured on the loaded pair.

evidence.py   texts that the target wrote, with the hidden states it had
probe.py      teacher-forced acceptance of one reading of the drafter
files.py      what the files say and hold          opening.py   opening a drafter that the engine refuses
readings.py   hyper-parameters swept, features     precision.py what quantisation costs
templates.py  template and thinking mode           running.py   what happens when the pair generates
split.py      layers on several devices          report.py    verdicts
"""

from .examine import Subject, examine, examine_drafter
from .report import FAIL, NOT_APPLICABLE, OK, WARN, Check, Report

__all__ = ["FAIL", "NOT_APPLICABLE", "OK", "WARN", "Check", "Report", "Subject", "examine", "examine_drafter"]
