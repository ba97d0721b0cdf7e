"""Report: a search and its profile as pictures, in one HTML file or one by one in a notebook.

    study            `read_study`: a study, read without writing to it
    recorded         what the attributes of a study hold
    searches         convergence, speedup by skipped sub-layers, predicted against measured
    maps             layer map, policy surface
    moved            how masks moved that a drafter chose while decoding
    closed_form      a profile's times, and what α, β and v alone predict
    drafters         what each drafter of a profile brought
    methods          a table of methods, as `bench --methods` measured it
    drawn            a figure with its numbers, as SVG or PNG
    theme            colours, in the light and in the dark
    page             `write_report`
"""

from skipsearch.report.closed_form import closed_form, token_times
from skipsearch.report.drafters import by_certainty, by_drafter
from skipsearch.report.drawn import Drawn, NothingToDraw
from skipsearch.report.maps import layer_map, policy_surface
from skipsearch.report.methods import Table, methods_side_by_side, read_methods
from skipsearch.report.moved import masks_over_rounds
from skipsearch.report.page import write_report
from skipsearch.report.searches import convergence, predicted_measured, speedup_by_skipped
from skipsearch.report.study import Judged, Study, read_study

__all__ = ["Drawn", "Judged", "NothingToDraw", "Study", "Table", "by_certainty", "by_drafter", "closed_form", "convergence", "layer_map",
           "masks_over_rounds", "methods_side_by_side", "policy_surface", "predicted_measured", "read_methods", "read_study",
           "speedup_by_skipped", "token_times", "write_report"]
