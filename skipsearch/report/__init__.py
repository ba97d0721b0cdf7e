"""Draw a search and its profile as figures, in one HTML page or one by one in a notebook."""

from skipsearch.report.drafter_figures import draw_drafters, draw_reliability
from skipsearch.report.figure import MissingData, ReportFigure
from skipsearch.report.layer_map import draw_layer_map
from skipsearch.report.profile_figures import draw_token_times
from skipsearch.report.reading_figure import draw_readings
from skipsearch.report.report_page import write_report
from skipsearch.report.search_figures import (
    draw_convergence,
    draw_predictions,
    draw_speedup_by_skipped,
)
from skipsearch.report.study_reader import JudgedTrial, StudyRecord, read_study

__all__ = [
    "JudgedTrial",
    "MissingData",
    "ReportFigure",
    "StudyRecord",
    "draw_convergence",
    "draw_drafters",
    "draw_layer_map",
    "draw_predictions",
    "draw_readings",
    "draw_reliability",
    "draw_speedup_by_skipped",
    "draw_token_times",
    "read_study",
    "write_report",
]
