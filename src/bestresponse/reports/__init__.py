"""Reports of runs: one HTML file with everything in it, drawn from the files of a run's folder."""

from .comparison import write_comparison as write_comparison
from .recorded import Recorded as Recorded
from .report import write_report as write_report
